"""The loop around an algorithm's steps.

The clock runs only while steps are taken: capturing a graph is inside it, measuring and saving are outside. All
randomness comes from the run's generator, whose state is saved with the rest: on a CPU, a run that is killed and
started again ends with the records of one that was not, times aside. (On a GPU some kernels add in no fixed order.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fsla.counted import Counted, Counts
from fsla.sample import Sample
from fsla.solver import Algorithm, State
from fsla.training.checkpoint import load_checkpoint, save_checkpoint
from fsla.training.engine import Engine, make_engine

Record = dict[str, Any]
Diverged = "diverged"
SAVE_EVERY_S = 10.0


@dataclass
class Run:
    """What a loop needs: the algorithm, the counted problem, how to begin and how to draw a sample."""

    algorithm: Algorithm
    problem: Counted
    generator: torch.Generator
    start: Callable[[], State]
    draw: Callable[[], Sample]

    @property
    def device(self) -> torch.device:
        return self.generator.device


def train(
    run: Run,
    *,
    steps: int,
    every: int,
    measure: Callable[[State], Record],
    checkpoint: Path | None = None,
    budget_s: float | None = None,
    engine: str = "auto",
    on_measure: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Takes `steps` steps and returns a record for the start, for every `every`-th step and for the last.

    A record has what `measure` returns, and `step`, `seconds`, `engine` (which took the steps before it), `oracles`
    (calls so far) and `status`: "running", "finished", "budget" (stopped at the wall-clock budget) or "diverged" (a
    measured quantity is not finite; it is named).
    """
    state, seconds, records = _resume(run, checkpoint)
    saved = time.monotonic()
    if not records:
        records.append(_record(run, measure(state), state.k, seconds, "running", None))
        on_measure(records[-1])
    motor: Engine | None = None
    while records[-1]["status"] == "running":
        goal, over = min(steps, (state.k // every + 1) * every), False
        while state.k < goal and not over:
            begun = time.perf_counter()
            if motor is None:
                motor, state = make_engine(
                    engine, run.algorithm, run.problem, run.draw, run.generator, state, steps, budget_s
                )
            state = motor.advance(state, min(goal - state.k, motor.stride))
            wait(run.device)
            seconds += time.perf_counter() - begun
            over = budget_s is not None and seconds > budget_s
        status = "finished" if state.k >= steps else "budget" if over else "running"
        name = None if motor is None else motor.name
        records.append(_record(run, measure(state), state.k, seconds, status, name))
        on_measure(records[-1])
        due = status == "running" and motor is not None and motor.settled and time.monotonic() - saved >= SAVE_EVERY_S
        if checkpoint is not None and due:
            counts = asdict(run.problem.calls), asdict(run.problem.samples)
            save_checkpoint(checkpoint, (state, run.generator.get_state(), seconds, tuple(records), *counts))
            saved = time.monotonic()
    return records


def _resume(run: Run, checkpoint: Path | None) -> tuple[State, float, list[Record]]:
    if checkpoint is None or not checkpoint.exists():
        return run.start(), 0.0, []
    state, random, seconds, records, calls, samples = load_checkpoint(checkpoint, run.device)
    run.generator.set_state(random.cpu())
    run.problem.calls, run.problem.samples = Counts(**calls), Counts(**samples)
    return state, seconds, list(records)


def _record(run: Run, measured: Record, step: int, seconds: float, status: str, engine: str | None) -> Record:
    bad = [name for name, x in measured.items() if isinstance(x, float) and not math.isfinite(x)]
    clean = {name: None if name in bad else x for name, x in measured.items()}
    own = {"step": step, "seconds": seconds, "engine": engine, "oracles": asdict(run.problem.calls), "status": status}
    record = own | clean
    return record | {"status": Diverged, "not_finite": bad} if bad else record


def wait(device: torch.device) -> None:
    """Waits until the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
