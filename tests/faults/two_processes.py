"""Two processes on one folder: the second is refused by name of the first, or both end whole."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import fsla
from faults.children import run_child
from faults.kills import read_folder, reference, results, text_of
from faults.saved import BATCHES, STEPS, new_optimizer, run_fit, same, weights_of
from faults.trials import Refused, SilentlyWrong, Trial, new_folder

CATEGORY, LOAD = "two processes on one folder", "numbers beside four busy processes"


def trials(seed: int) -> Iterator[Trial]:
    """Yield pairs of the same work on the same folder, and work on a busy machine."""
    reference(), results()
    for turn in range(3):
        yield Trial(CATEGORY, f"fit and fit {turn}", _second_fit, limit_s=60.0)
        yield Trial(CATEGORY, f"clean and clean {turn}", _second_clean, limit_s=60.0)
    yield Trial(CATEGORY, "two saves of one checkpoint", _two_saves, limit_s=60.0)
    for turn in range(2):
        yield Trial(LOAD, f"fit {turn}", _busy_fit, limit_s=120.0)
        yield Trial(LOAD, f"clean {turn}", _busy_clean, limit_s=120.0)


def _fork(work: Callable[[], Any]) -> int:
    pid = os.fork()
    if pid == 0:  # pragma: no cover (the child)
        try:
            work()
        finally:
            os._exit(0)
    return pid


def _while_held(folder: Path, lock: Path, hold: Callable[[], Any], second: Callable[[], Any]) -> None:
    """Run the second while the first holds its lock."""
    pid = _fork(hold)
    try:
        while not lock.exists():
            time.sleep(0.01)
        try:
            run_child(lambda: (second(), None)[1], folder)
        except Refused as error:
            if str(pid) not in str(error):
                raise SilentlyWrong(f"the process {pid} is not named: {error}") from None
            raise
    finally:
        os.waitpid(pid, 0)


def _second_fit() -> None:
    folder = new_folder()

    def slow() -> None:
        optimizer = new_optimizer()
        fsla.fit(
            optimizer,
            BATCHES,
            BATCHES,
            max_steps=STEPS,
            output_dir=folder / "run",
            eval_every=2,
            save_every=4,
            save_every_minutes=None,
            callbacks=[lambda *_: time.sleep(0.3)],
            progress_bar=False,
        )

    try:
        _while_held(folder, folder / "run" / "lock", slow, lambda: run_fit(folder / "run"))
    finally:
        if not same(run_fit(folder / "run"), reference()):
            raise SilentlyWrong("the run ended with other weights")


def _second_clean() -> None:
    folder = new_folder()

    def slow() -> None:
        from fsla.data import _output as output

        with output.claim_folder(folder / "out"):
            time.sleep(1.0)

    try:
        _while_held(folder, folder / ".out.lock", slow, lambda: results()[1].save(folder / "out"))
    finally:
        results()[0].save(folder / "out")
        if read_folder(folder / "out") != text_of(0):
            raise SilentlyWrong("the folder is not whole")


def _two_saves() -> None:
    folder = new_folder()

    def save(value: float) -> None:
        for _ in range(50):
            fsla.train.save_checkpoint(folder / "x", torch.full((2000,), value))

    children = [_fork(lambda value=value: save(value)) for value in (1.0, 2.0)]
    for pid in children:
        os.waitpid(pid, 0)
    loaded: Any = fsla.train.load_checkpoint(folder / "x")
    if loaded.unique().numel() != 1 or len(list(folder.iterdir())) != 1:
        raise SilentlyWrong("the file is of two processes, or something was left")


def _beside_four(work: Callable[[], Any]) -> Any:
    def spin() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            pass

    children = [_fork(spin) for _ in range(4)]
    try:
        return work()
    finally:
        for pid in children:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def _busy_fit() -> None:
    def work() -> list[torch.Tensor]:
        optimizer = new_optimizer()
        for _ in range(100):
            optimizer.step(BATCHES[0], BATCHES[1])
        return weights_of(optimizer)

    if not same(_beside_four(work), work()):
        raise SilentlyWrong("other weights")


def _busy_clean() -> None:
    folder = new_folder()
    _beside_four(lambda: results.__wrapped__()[0].save(folder / "out"))
    seconds = re.compile(rb'"seconds"[:>] ?[0-9.e-]+')  # The numbers that a clock made.
    written, expected = (
        {name: seconds.sub(b"", b) for name, b in f.items()} for f in (read_folder(folder / "out"), text_of(0))
    )
    if written != expected:
        raise SilentlyWrong("other files")
