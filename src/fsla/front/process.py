"""What a run has to do with its process: one of them in a folder, and signals that ask it to end."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

from collections.abc import Iterator

from fsla.checkpoint import CheckpointError

LOCK = "lock"
_held: set[Path] = set()
_guard = threading.Lock()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes, and other runs of this one, out of a folder.

    The system lets go of the lock when the process ends, in whatever way: a file that a dead process left locks
    nothing. Child processes do not have it.
    """
    path = folder.resolve() / LOCK
    with _guard:
        if path in _held:
            raise _refused(folder, os.getpid(), " (this one)")
        file = _take(path, folder)
        _held.add(path)
    try:
        yield
    finally:
        with _guard:
            path.unlink(missing_ok=True)
            if file is not None:
                os.close(file)
            _held.discard(path)


def _take(path: Path, folder: Path) -> int | None:
    if fcntl is None:
        return None
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(file, 32).decode(errors="replace").strip()
            os.close(file)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _refused(folder, owner or "unknown", "") from None
            warnings.warn(
                f"{folder} is on a file system without locks ({error.strerror}): nothing keeps a second process out.",
                UserWarning,
                stacklevel=5,
            )
            return None
        try:
            current = os.stat(path).st_ino == os.fstat(file).st_ino
        except FileNotFoundError:
            current = False
        if not current:  # its last owner removed it between the two calls
            os.close(file)
            continue
        os.ftruncate(file, 0)
        os.write(file, f"{os.getpid()}\n".encode())
        return file


def _refused(folder: Path, owner: object, more: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} must be used by one run at a time. The process {owner}{more} is using it. Wait until it ends, stop "
        "it, or name another folder."
    )


class Signals:
    """Notes SIGTERM and SIGINT inside of its block, so that a run can end at a good place.

    A second signal has the effect that it had outside of the block. Where it is `patient`, none has: the ranks of
    torchrun are told twice if all processes are, once by torchrun, which ends them itself when they take too long.
    Outside of the main thread signals are left alone.
    """

    NOTED = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, *, patient: bool = False) -> None:
        self.received: signal.Signals | None = None
        self._patient = patient
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self.NOTED}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        child = os.getpid() != self._process  # such as a loader's worker, that was forked in the block
        if child or not self._patient:
            self.__exit__()
        if child:
            os.kill(os.getpid(), number)
            return
        self.received = self.received or signal.Signals(number)


def leave(received: signal.Signals, step: int, saved_at: Path | None, stack: ExitStack, *, says: bool) -> None:
    """Ends the process as the signal asked, after the bar is gone."""
    stack.close()
    where = "" if saved_at is None else f", and is saved in {saved_at}"
    if says:
        print(
            f"fsla: the run was ended by {received.name} after step {step}{where}. Call fit again with this folder to "
            "go on.",
            file=sys.stderr,
            flush=True,
        )
    raise SystemExit(128 + received)
