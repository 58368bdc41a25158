"""One hostile trial, and how its end is judged."""

from __future__ import annotations

import atexit
import linecache
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from tempfile import mkdtemp

import fsla

SOURCE = str(Path(fsla.__file__).parent)
LIMIT_S = 30.0
"""After how many seconds a trial hangs, unless it says otherwise."""


class Outcome(StrEnum):
    """How a trial ended."""

    REFUSED = "refused"
    """fsla raised an error of its own in words, or warned."""
    RIGHT = "right"
    """It ended with what an undisturbed call gives."""
    RAW = "raw"
    """Another library's error, or one that no `raise` of fsla wrote, reached the user."""
    SILENT = "silent"
    """It was accepted without a word, and is wrong."""
    HANG = "hang"
    """It did not end in time."""


_SCRATCH = Path(mkdtemp(prefix="fsla-faults-"))
atexit.register(shutil.rmtree, _SCRATCH, ignore_errors=True)


def new_folder() -> Path:
    """Return an empty folder, which is removed when the process ends."""
    return Path(mkdtemp(dir=_SCRATCH))


BAD = (Outcome.RAW, Outcome.SILENT, Outcome.HANG)


class SilentlyWrong(Exception):
    """Raised by a trial whose call was accepted with a wrong result."""


class ProgramRaw(Exception):
    """Raised by a trial whose child process ended with a traceback or an exit code that nothing documents."""


class Refused(Exception):
    """Raised by a trial whose child process refused in words."""


class _TimeIsUp(BaseException):
    """Raised in a trial that hangs."""


@dataclass(frozen=True)
class Trial:
    """A hostile act.

    Args:
        category: row of the table.
        name: what is done, unique in its category.
        run: does it. Returns a remark or None where the result is right, and raises `SilentlyWrong` where it is not.
        limit_s: after how many seconds it hangs.
        tag: what else the trial is counted by.
    """

    category: str
    name: str
    run: Callable[[], str | None]
    limit_s: float = LIMIT_S
    tag: str = ""


@dataclass
class Result:
    """The end of a trial."""

    trial: Trial
    outcome: Outcome
    detail: str = field(default="", repr=False)
    """The error, or the remark of what came out right."""


def run_trial(trial: Trial) -> Result:
    """Run a trial in this process and judge its end."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with _time_limit(trial.limit_s):
                remark = trial.run() or ""
        except _TimeIsUp:
            return Result(trial, Outcome.HANG, f"more than {trial.limit_s:g} s")
        except Refused as error:
            return Result(trial, Outcome.REFUSED, str(error))
        except ProgramRaw as error:
            return Result(trial, Outcome.RAW, str(error))
        except SilentlyWrong as error:
            words = [str(w.message) for w in caught if is_of_fsla(w)]
            return Result(trial, Outcome.REFUSED if words else Outcome.SILENT, "; ".join([str(error), *words]))
        except Exception as error:
            worded = is_worded(error)
            text = f"{type(error).__name__}: {error}" if worded else "".join(traceback.format_exception(error)[-6:])
            return Result(trial, Outcome.REFUSED if worded else Outcome.RAW, text)
    return Result(trial, Outcome.RIGHT, remark)


def is_worded(error: BaseException) -> bool:
    """Return whether a `raise` in fsla's source wrote this error, with a text."""
    if type(error).__name__ == "NotFittedError":  # What every estimator of scikit-learn raises before `fit`.
        return True
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    if not last.filename.startswith(SOURCE) or not str(error).strip() or isinstance(error, AssertionError):
        return False
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return line.startswith("raise ") or line == "raise"


def is_of_fsla(warning: warnings.WarningMessage) -> bool:
    """Return whether a warning is one that users of fsla see."""
    return issubclass(warning.category, UserWarning)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Interrupt what takes longer."""

    def interrupt(number: int, frame: object) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
