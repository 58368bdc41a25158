"""Resident memory over long runs: flat after the first steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import fsla
from faults.saved import BATCHES, new_optimizer
from faults.trials import SilentlyWrong, Trial

CATEGORY = "memory over 3000 steps"
WARM_UP, STEPS, LIMIT_MIB = 300, 3000, 8.0


def resident_mib() -> float:
    """Return the resident memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def trials(seed: int) -> Iterator[Trial]:
    """Yield steps of an optimiser, and a run of `fit`."""
    yield Trial(CATEGORY, "step", partial(_grows, _steps), limit_s=300.0)
    yield Trial(CATEGORY, "fit", partial(_grows, _fit), limit_s=300.0)


def _steps(count: int) -> None:
    optimizer = new_optimizer()
    for _ in range(count):
        optimizer.step(BATCHES[0], BATCHES[1])


def _fit(count: int) -> None:
    fsla.fit(new_optimizer(), BATCHES, BATCHES, max_steps=count, eval_every=500, progress_bar=False)


def _grows(work: object) -> None:
    assert callable(work)
    work(WARM_UP)
    before = resident_mib()
    work(STEPS)
    grown = resident_mib() - before
    if grown > LIMIT_MIB:
        raise SilentlyWrong(f"{grown:.1f} MiB more after {STEPS} steps")
