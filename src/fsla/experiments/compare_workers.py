"""The processes that share the work of the comparison, each with one thread."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import torch


def single_threaded() -> None:
    """One thread for each process: the tensors are small, and more threads only wait for each other."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-not-found, import-untyped, unused-ignore]

    torch.set_num_threads(1)
    threadpool_limits(1)


@contextmanager
def workers(jobs: int) -> Iterator[ProcessPoolExecutor | None]:
    """A pool of processes; none for one job, which this process does."""
    if jobs == 1:
        yield None
        return
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=begin)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def begin() -> None:
    """A worker ends at once, and says nothing, when Ctrl-C is pressed or the process that started it is gone."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    single_threaded()
