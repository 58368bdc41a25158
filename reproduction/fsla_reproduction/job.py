"""One run, as whoever does it sees it: this process, or a worker far away."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fsla import distributed as distributed
from fsla_reproduction.folder import Record

ReportShare = Callable[[float], None]
"""Called by a run with the share of it that is done."""
Outcome = list[Record] | Exception
"""The records of a run, or what went wrong in it."""


def quiet(fraction: float) -> None:
    """For a run that nobody watches."""


@dataclass(frozen=True)
class Job:
    """One run. `work` must be picklable: a function of a module, with its arguments bound by `partial`."""

    name: str
    """Of its file."""
    text: str
    work: Callable[[ReportShare], list[Record]]
    part: Path | None = None
    """The folder of its checkpoints, which is removed once its records are written."""
    gpu: bool = False
    exclusive: bool = False
    """Whether it holds a clock: it is done when all others are, with nothing beside it."""


def records_of(job: Job, report: ReportShare) -> list[Record]:
    """Do the run."""
    if not job.gpu:
        single_threaded()
    with distributed.single_process():  # other ranks do other runs
        return job.work(report)


def single_threaded() -> None:
    """One thread: small tensors gain nothing by more, and with as many everywhere rounding is the same everywhere."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-not-found, import-untyped, unused-ignore]

    torch.set_num_threads(1)
    threadpool_limits(1)


_turn = threading.Lock()
"""A cluster's worker may have several threads. Runs share what a process has once: random state, warnings, threads."""


def outcome(number: int, job: Job, parent: int | None) -> tuple[int, Outcome]:
    """What a worker does: the run, and whatever goes wrong in it is a value too."""
    if parent is not None:
        _begin(parent)
    try:
        with _turn:
            return number, records_of(job, quiet)
    except Exception as error:
        error.add_note(f"In a worker:\n{traceback.format_exc()}")
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return number, RuntimeError(f"{type(error).__name__}: {error}")
        return number, error


_initialized = False


def _begin(parent: int) -> None:
    """A worker leaves Ctrl-C to the process that started it, and ends after that one."""
    global _initialized
    if _initialized:
        return
    _initialized = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
