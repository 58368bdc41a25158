"""Run logging: JSON lines, TensorBoard and a progress bar."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from shutil import get_terminal_size
from time import monotonic
from typing import Any, BinaryIO

from fsla._storage._files import open_regular
from fsla.train._checkpoint import CheckpointError, file_errors

Record = dict[str, Any]

NAME = "records.jsonl"
BOARD = "tensorboard"
REFRESH_S = 0.25


class Journal:
    """The records of a run: in memory, and in a folder's file, one JSON object a line.

    Args:
        folder: where; None keeps them in memory alone.
        count: how many are there that a run goes on from; later ones are removed.
        digest: of these, as the checkpoint has it.
        board: whether to write for TensorBoard as well.
    """

    def __init__(
        self, folder: Path | None = None, *, count: int = 0, digest: str = "", step: int = 0, board: bool = False
    ) -> None:
        self.records: list[Record] = []
        self._path = None if folder is None else folder / NAME
        self._file: BinaryIO | None = None
        self._size = 0
        self._digest = hashlib.blake2b(digest_size=32)
        self._board: Any = None
        if self._path is not None:
            with file_errors():
                descriptor = open_regular(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            self._file = os.fdopen(descriptor, "ab+", buffering=0)
            self._load_existing(self._path, descriptor, count, digest)
            self._file.truncate(self._size)
        if board:
            assert folder is not None
            self._board = summary_writer()(str(folder / BOARD), purge_step=step + 1)

    def add(self, record: Record) -> None:
        """Write a record; whole or not at all."""
        self._append(record)
        self.records.append(record)
        if self._board is not None:
            for name, value in record.items():
                if name != "step" and isinstance(value, int | float):
                    self._board.add_scalar(name, value, record["step"])

    def flush(self) -> None:
        """Has the records reach the disk: a checkpoint that counts them must not be there without them."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    @property
    def digest(self) -> str:
        """What a checkpoint holds to know the records again."""
        return self._digest.hexdigest()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def _append(self, record: Record) -> None:
        if self._file is None:
            return
        line = json.dumps(record).encode() + b"\n"
        left = line
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._file.truncate(self._size)
            raise CheckpointError(
                f"Cannot write the record of step {record['step']} to {self._path}: {error.strerror}. Earlier records "
                "and checkpoints are intact. Make room, and call fit again to resume."
            ) from error
        self._size += len(line)
        self._digest.update(line)

    def _load_existing(self, path: Path, descriptor: int, count: int, digest: str) -> None:
        with open(descriptor, "rb", closefd=False) as file:
            file.seek(0)
            for _ in range(count):
                line = file.readline()
                try:
                    record = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:
                    record = None
                if not isinstance(record, dict):
                    warnings.warn(
                        f"{path} holds {len(self.records)} readable records of the {count} that the checkpoint counts. "
                        "The run goes on without the others.",
                        UserWarning,
                        stacklevel=6,
                    )
                    return
                self.records.append(record)
                self._size += len(line)
                self._digest.update(line)
        if count and self.digest != digest:
            self.close()
            raise CheckpointError(
                f"Cannot use {path}: its first {count} records are of another run, or were edited. Move it elsewhere "
                "to resume without them."
            )


def summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"tensorboard=True needs the package tensorboard, which cannot be imported ({error}). Install it with "
            "pip install 'fsla[tensorboard]', or leave tensorboard=False: the records are in records.jsonl."
        ) from None
    return SummaryWriter


class Bar:
    """One line on stderr where that is a terminal; nothing elsewhere. Asks the device for numbers when it is drawn."""

    def __init__(self, enabled: bool, steps: int, step: int) -> None:
        self._shown = enabled and step < steps and sys.stderr.isatty()
        self._steps = steps
        self._first = step
        self._start = self._last = monotonic()
        self._numbers = ""

    def show(self, step: int, numbers: Callable[[], str]) -> None:
        """Draw the line anew, unless it was drawn a moment ago."""
        if self._shown and monotonic() - self._last >= REFRESH_S:
            self._last = monotonic()
            self._numbers = numbers()
            self._draw(step)

    def close(self, step: int) -> None:
        """Draw the line for the last time, and end it."""
        if self._shown:
            self._draw(step)
            print(file=sys.stderr)

    def _draw(self, step: int) -> None:
        seconds = (monotonic() - self._start) / max(step - self._first, 1) * (self._steps - step)
        left = f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"
        width = get_terminal_size().columns - 1
        text = f"fit {step}/{self._steps}  {left}  {self._numbers}"[:width]
        print(f"\r{text:<{width}}", end="", file=sys.stderr, flush=True)
