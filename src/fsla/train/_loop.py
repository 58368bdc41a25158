"""The loop around an algorithm's steps.

The clock runs only while steps are taken: preparing a program, measuring and saving are outside of it. All randomness
comes from the run's generator, whose state is saved with the rest: on a CPU, a run that is killed and started again
ends with the records of one that was not, times aside. (On a GPU some kernels add in no fixed order.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from fsla._checks import positive, whole_number
from fsla.algorithms._alternating import State
from fsla.problems._nest import tensors
from fsla.train._engine import Engine, make_engine
from fsla.train._run import Progress, Run, Saves
from fsla.train._run_records import Record, Status, measured, work

SAVE_EVERY_S = 10.0
"""A run with a checkpoint is saved after so many seconds, besides where it is asked to be."""


def train(
    run: Run,
    *,
    steps: int,
    every: int,
    measure: Callable[[State], Mapping[str, object]],
    checkpoint: str | Path | None = None,
    save_every: int | None = None,
    identity: Mapping[str, object] | None = None,
    budget_s: float | None = None,
    budget_calls: int | None = None,
    growth: float | None = 1e6,
    engine: str = "auto",
    on_measure: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Takes `steps` steps and returns a record for the start, for every `every`-th step and for the last.

    A record is JSON. It has what `measure` returns, with tensors and arrays as numbers and lists, and besides

        step                 how many steps were taken
        seconds              what they took; what a clock says decides nothing unless `budget_s` is given
        preparation_seconds  what tracing, checking and compiling took
        engine               which engine took the steps before it
        oracles              calls so far
        status               "running", "finished", "budget" or "diverged", the values of `Status`

    and where it diverged

        diverged             the quantity, the largest if several did: "lam", "omega", "trail", "inner" (the inner
                             update's memory), "v" (the estimator's memory), "d" or "outer" (the memory of λ's update)
                             of the state, else a measured one
        diverged_size        its largest absolute value; None if that is not finite
        not_finite           every quantity with a number that is not finite; such a number is None in the record

    Args:
        run: what takes the steps.
        steps: how many.
        every: how often to measure.
        measure: returns quantities by name; the names above are taken.
        checkpoint: a file to save the run in, and to resume it from if it is there.
        save_every: saves at every step that is a multiple of it, besides every SAVE_EVERY_S seconds.
        identity: what this is a run of, as plain values: data, seed, settings. It is saved, and a checkpoint with
            another identity is refused.
        budget_s: stops when steps have taken more seconds.
        budget_calls: stops when `work` exceeds it: the same for one run on every machine.
        growth: calls a run diverged when at a measurement the largest absolute value of a part of the state exceeds
            growth times the larger of 1 and what it was when it was first not zero, as seen at the start, after the
            first step and at the measurements. None leaves growth alone; numbers that are not finite always end a run.
        engine: one of the engines of `make_engine`.
        on_measure: is told each record.
    """
    whole_number(steps, "steps", "train")
    whole_number(every, "every", "train")
    for value, name in ((save_every, "save_every"), (budget_calls, "budget_calls")):
        if value is not None:
            whole_number(value, name, "train")
    positive(budget_s, "budget_s", "train", optional=True)
    positive(growth, "growth", "train", optional=True)
    if growth is not None and growth <= 1:
        raise ValueError(f"The 'growth' of train must be more than 1, or None. Got {growth} instead.")
    saves = Saves(run, checkpoint, save_every, SAVE_EVERY_S, identity)
    progress = saves.begin(steps)

    def spent(stride: int) -> bool:
        """Whether a budget is exceeded; asked at the same steps wherever a run is saved."""
        k = progress.state.k
        if k % stride and k % every and k < steps:
            return False
        by_clock = budget_s is not None and run.ranks.from_first(progress.seconds > budget_s)
        return by_clock or (budget_calls is not None and work(run.problem.calls) > budget_calls)

    def note(status: Status, name: str | None) -> None:
        record = _record(run, progress, measured(measure(progress.state)), status, name, growth)
        progress.records.append(record)
        on_measure(record)

    def after_step() -> None:
        if progress.state.k == 1:  # the state has its lasting form
            _look(progress)
            saves.check(progress.state)

    if not progress.records:
        note(Status.RUNNING, None)
    stepper: Engine | None = None
    pace = 1
    while progress.records[-1]["status"] == Status.RUNNING:
        goal = min(steps, _multiple_after(progress.state.k, every))
        if stepper is None:
            stepper = _prepared(run, progress, engine, steps, budget_s)
            after_step()
        while progress.state.k < goal and not spent(stepper.stride):
            k = progress.state.k
            ends = [goal]
            if k == 0:
                ends.append(1)
            if budget_s is not None or budget_calls is not None:
                ends.append(_multiple_after(k, stepper.stride))
            if save_every is not None:
                ends.append(_multiple_after(k, save_every))
            elif checkpoint is not None:
                ends.append(k + max(pace, stepper.stride))
            pace = run.ranks.from_first(_advance(run, progress, stepper, min(ends) - k))
            after_step()
            if progress.state.k < goal and not spent(stepper.stride):
                saves.reached(progress)
        ended = Status.BUDGET if spent(stepper.stride) else Status.RUNNING
        note(Status.FINISHED if progress.state.k >= steps else ended, stepper.name)
        if progress.records[-1]["status"] == Status.RUNNING:
            saves.reached(progress)
    return progress.records


class Health(NamedTuple):
    """The largest absolute value in each part of a state that has tensors; NaN if one of the part's numbers is."""

    sizes: dict[str, float]

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.sizes.values()))

    @property
    def largest(self) -> float:
        return _largest(list(self.sizes.values()))


def health(state: State) -> Health:
    """How large a state is, part by part. The host waits for the device once."""
    parts = {
        "lam": state.at.lam,
        "omega": state.at.omega,
        "trail": state.at.trail,
        "inner": state.inner,
        "v": state.memory,
        "d": state.d,
        "outer": state.outer,
    }
    held = {name: [t for t in tensors(part) if t.dtype.is_floating_point and t.numel()] for name, part in parts.items()}
    every = [t for group in held.values() for t in group]
    if not every:
        return Health({})
    with torch.no_grad():
        left = iter(torch.stack(torch._foreach_norm(every, ord=math.inf)).tolist())
    return Health({name: _largest([next(left) for _ in group]) for name, group in held.items() if group})


def _largest(sizes: list[float]) -> float:
    return math.nan if any(map(math.isnan, sizes)) else max(sizes, default=0.0)


def _look(progress: Progress) -> Health:
    """How large the state is; what each part was when it was first not zero is kept."""
    found = health(progress.state)
    for name, size in found.sizes.items():
        if 0 < size < math.inf:
            progress.reference.setdefault(name, size)
    return found


def _record(
    run: Run,
    progress: Progress,
    metrics: tuple[Record, list[str]],
    status: Status,
    engine: str | None,
    growth: float | None,
) -> Record:
    clean, bad = metrics
    record: Record = {
        "step": progress.state.k,
        "seconds": progress.seconds,
        "preparation_seconds": progress.preparation_seconds,
        "engine": engine,
        "oracles": asdict(run.problem.calls),
        "status": status.value,
        **clean,
    }
    sizes = _look(progress).sizes
    wild = [name for name, size in sizes.items() if not math.isfinite(size)]
    large = [name for name, size in sizes.items() if growth is not None and size > growth * _usual(progress, name)]
    if not (wild or large or bad):
        return record
    grown = None if wild else max(large, key=sizes.__getitem__, default=None)
    return record | {
        "status": Status.DIVERGED.value,
        "diverged": grown or (wild + bad)[0],
        "diverged_size": sizes[grown] if grown else None,
        "not_finite": wild + bad,
    }


def _usual(progress: Progress, name: str) -> float:
    return max(1.0, progress.reference.get(name, 0.0))


def _prepared(run: Run, progress: Progress, name: str, steps: int, budget_s: float | None) -> Engine:
    """The engine, made off the clock."""
    begun = perf_counter()
    stepper = make_engine(name, run.algorithm, run.problem, run.draw, run.generator, progress.state, steps, budget_s)
    wait(run.device)
    progress.preparation_seconds += perf_counter() - begun
    return stepper


def _advance(run: Run, progress: Progress, stepper: Engine, n: int) -> int:
    """Takes n steps on the clock; returns how many take a tenth of the time between two saves."""
    prepared = stepper.preparation_s
    begun = perf_counter()
    progress.state = stepper.advance(progress.state, n)
    wait(run.device)
    elapsed = perf_counter() - begun
    preparation = stepper.preparation_s - prepared  # for a form of batch that it had not met
    taken = max(0.0, elapsed - preparation)
    progress.seconds += taken
    progress.preparation_seconds += preparation
    return int(n * SAVE_EVERY_S / 10 / max(taken, 1e-6))


def _multiple_after(k: int, n: int) -> int:
    return (k // n + 1) * n


def wait(device: torch.device) -> None:
    """Waits until the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
