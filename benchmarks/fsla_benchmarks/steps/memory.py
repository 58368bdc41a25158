"""How much memory the tensors of a step take."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile


@contextmanager
def _silence() -> Iterator[None]:
    """Keep the lines off the terminal that the profiler prints at each start and stop."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def peak_mb(f: Callable[[], None], device: torch.device) -> float:
    """The most that tensors took at once during f beyond what they took before it, in MB (10^6 bytes).

    On a CPU it is the sum over the profiler's allocations and releases; what libraries take for themselves, such as
    the scratch memory of convolutions, is not seen there.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        f()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 1e6
    with warnings.catch_warnings(), _silence():
        warnings.simplefilter("ignore")  # the profiler warns of settings of its own
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            f()
    resident = peak = 0
    kineto = seen.profiler.kineto_results
    for event in sorted((e for e in kineto.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        resident += event.nbytes()
        peak = max(peak, resident)
    return peak / 1e6
