"""kill -9, and system calls that fail, at the n-th change of a file: the old or the new is there, whole."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

import fsla
from faults.children import failing, kill, run_child
from faults.saved import run_fit, same
from faults.trials import ProgramRaw, Refused, SilentlyWrong, Trial, new_folder

FIT, CLEAN = "kill -9 during fit, then again", "kill -9 while fsla clean writes, then again"
FAILING = "system calls that fail at the n-th change of a file"
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EDQUOT)


def trials(seed: int) -> Iterator[Trial]:
    """Yield kills at every change of a file, kills by the clock, and failing calls."""
    random = Random(f"kills {seed}")
    expected, published = reference(), results()
    changes_of_fit = _changes(lambda folder: run_fit(folder / "run"))
    changes_of_clean = _changes(lambda folder: published[0].save(folder / "out"))
    for at in range(1, changes_of_fit + 1):
        yield Trial(FIT, f"change {at}", _kill_fit(at, expected))
    for i in range(10):
        after = random.random() * 0.3
        yield Trial(FIT, f"moment {i}, {after:.3f} s", _kill_fit_by_clock(after, expected))
    for at in range(1, changes_of_clean + 4):
        yield Trial(CLEAN, f"change {at}", _kill_clean(at))
    for at in range(1, changes_of_fit + 1):
        code = random.choice(ERRORS)
        yield Trial(FAILING, f"fit, change {at}, {errno.errorcode[code]}", _fail_fit(at, code, expected))
    for at in range(1, changes_of_clean + 4):
        code = random.choice(ERRORS)
        yield Trial(FAILING, f"clean, change {at}, {errno.errorcode[code]}", _fail_clean(at, code))


@cache
def reference() -> list[torch.Tensor]:
    """Return the weights of a run that nothing disturbs."""
    return run_fit(new_folder() / "run")


@cache
def results() -> tuple[fsla.data.CleaningResult, fsla.data.CleaningResult]:
    """Return two results of `clean`, on two tables."""
    import pandas as pd

    def made_of(seed: int) -> fsla.data.CleaningResult:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal(60)
        label = np.where(x > 0, "a", "b")
        table = pd.DataFrame({"x": x.astype(str), "label": label, "source": ["s", "t"] * 30})
        table["checked"] = np.where(np.arange(60) < 30, label, "")
        return fsla.data.clean(
            table, checked="checked", group="source", strategies=["trusted_only", "all_data"], learners=["linear"]
        )

    return made_of(0), made_of(1)


@cache
def text_of(index: int) -> dict[str, bytes]:
    """Return the files that a result writes."""
    folder = new_folder() / "out"
    results()[index].save(folder)
    return read_folder(folder)


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _changes(work: Callable[[Path], Any]) -> int:
    folder = new_folder()
    count = run_child(lambda: (work(folder), None)[1], folder)
    assert count
    return count


def _check_fit(folder: Path, expected: list[torch.Tensor]) -> None:
    """Run again, and compare with an undisturbed run."""
    if not same(run_fit(folder / "run"), expected):
        raise SilentlyWrong("the run ended with other weights")
    left = [path.name for path in (folder / "run").iterdir() if path.name.startswith(".") or path.name == "lock"]
    if left:
        raise SilentlyWrong(f"left behind: {left}")


def _kill_fit(at: int, expected: list[torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        folder = new_folder()
        run_child(lambda: (run_fit(folder / "run"), None)[1], folder, at, kill)
        _check_fit(folder, expected)

    return run


def _kill_fit_by_clock(after: float, expected: list[torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        folder = new_folder()
        pid = os.fork()
        if pid == 0:  # pragma: no cover (the child)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 0)
            run_fit(folder / "run")
            os._exit(0)
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        _check_fit(folder, expected)

    return run


def _old_out() -> Path:
    """Return a folder that holds the results of the first table."""
    folder = new_folder()
    results()[0].save(folder / "out")
    return folder


def _check_clean(folder: Path) -> None:
    """The folder is wholly the old or wholly the new one, and nothing is left after the next run."""
    if read_folder(folder / "out") not in (text_of(0), text_of(1)):
        raise SilentlyWrong("out is neither the old nor the new folder")
    results()[1].save(folder / "out")
    if read_folder(folder / "out") != text_of(1):
        raise SilentlyWrong("the next run wrote something else")
    left = [path.name for path in folder.iterdir() if path.name != "out"]
    if left:
        raise SilentlyWrong(f"left behind: {left}")
    shutil.rmtree(folder)


def _kill_clean(at: int) -> Callable[[], None]:
    def run() -> None:
        folder = _old_out()
        run_child(lambda: results()[1].save(folder / "out"), folder, at, kill)
        _check_clean(folder)

    return run


def _fail_fit(at: int, code: int, expected: list[torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        folder = new_folder()
        refused = None
        try:
            run_child(lambda: (run_fit(folder / "run"), None)[1], folder, at, failing(code))
        except Refused as error:
            refused = error
        _check_fit(folder, expected)
        if refused:
            raise refused

    return run


def _fail_clean(at: int, code: int) -> Callable[[], None]:
    def run() -> None:
        folder = _old_out()
        refused: Refused | ProgramRaw | None = None
        try:
            run_child(lambda: results()[1].save(folder / "out"), folder, at, failing(code))
        except Refused as error:
            refused = error
        _check_clean(folder)
        if refused:
            raise refused

    return run
