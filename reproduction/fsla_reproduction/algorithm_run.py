"""A run of an algorithm on a problem of one's own: trees of tensors, and a function that draws the batches of a step.

All randomness comes from the run's generator, whose state is saved with the rest: on a CPU, a run that is killed and
started again ends with the records of one that was not, times aside. (On a GPU some kernels add in no fixed order.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsla._checks import pick, positive
from fsla._state_tree import describe, map_tensors
from fsla._storage._json_values import number, record
from fsla._tree import Tree
from fsla.algorithms._base import Algorithm, State
from fsla.distributed import SINGLE_PROCESS, ProcessGroup
from fsla.problems._batches import StepBatches
from fsla.problems._wrappers import CountedProblem, OracleCounts
from fsla.train._engine import ENGINES, Engine, make_engine
from fsla.train._loop import Callback, FitResult, Progress, Settings, Stepper, StopReason, run_loop
from fsla.train._manager import Resume
from fsla.train._records import Record
from fsla_reproduction.run_records import Status, health, measured, work

Measure = Callable[[Any], Mapping[str, Any]]
_COUNTS = record(**dict.fromkeys(asdict(OracleCounts()), number(int, 0)))
_STATUS: dict[StopReason, Status] = {"steps": Status.FINISHED, "budget": Status.BUDGET}


@dataclass
class Run:
    """What takes the steps of a functional run.

    Args:
        algorithm: such as ``fsla.algorithms.soba(step_sizes)``.
        problem: problem that counts what is asked of it.
        generator: all that `draw` draws from; its device is where the run is.
        start: returns the first state.
        draw: returns the batches of a step.
        group: the processes that take the steps together.
    """

    algorithm: Algorithm[Any]
    problem: CountedProblem
    generator: torch.Generator
    start: Callable[[], State]
    draw: Callable[[], StepBatches]
    group: ProcessGroup = SINGLE_PROCESS


def run_algorithm(
    run: Run,
    *,
    max_steps: int,
    eval_fn: Measure,
    eval_every: int,
    output_dir: str | Path | None = None,
    patience: int | None = None,
    callbacks: Sequence[Callback] = (),
    save_every: int | None = None,
    save_every_minutes: float | None = 1 / 6,
    save_total_limit: int = 1,
    resume: Resume = True,
    run_config: Mapping[str, object] | None = None,
    max_seconds: float | None = None,
    max_oracle_calls: int | None = None,
    divergence_factor: float | None = 1e6,
    engine: str = "auto",
) -> FitResult:
    """Take `max_steps` steps, with a record of the start, of every `eval_every`-th step and of the last.

    A record is JSON. It has what `eval_fn` returns, with tensors and arrays as numbers and lists, and besides

        step                 steps that were taken
        seconds              seconds of the steps; a clock decides nothing without `max_seconds`
        preparation_seconds  seconds of capturing and checking
        engine               engine that took the steps before it
        oracles              calls so far
        status               "running", "finished", "budget" or "diverged", the values of `Status`

    and if the run diverged

        diverged             the quantity, the largest if several did: a part of the state as `health` names it, else a
                             measured one
        diverged_size        its largest absolute value; None if that is not finite
        not_finite           every quantity with a number that is not finite; such a number is None in the record

    Args:
        run: what takes the steps.
        max_steps: steps in all, also those before a resume.
        eval_fn: called with the state; returns quantities by name. The names above are taken.
        eval_every: steps between two records.
        output_dir: folder for records.jsonl, checkpoints and a lock; with None nothing is written.
        patience: ends the run after this many records in a row whose first quantity is not below the lowest before.
        callbacks: called as ``callback(run, record)`` after each record; one that returns True ends the run.
        save_every: steps between two checkpoints; the last step has one too.
        save_every_minutes: minutes between two checkpoints.
        save_total_limit: how many checkpoints stay in the folder.
        resume: "previous" resumes from the last checkpoint but one; False refuses to resume from any.
        run_config: data, seed and settings, as plain values. A checkpoint with another one is refused.
        max_seconds: ends the run when its steps have taken longer.
        max_oracle_calls: ends the run when `work` exceeds it: the same for one run on every machine.
        divergence_factor: a run diverges when a part of the state grows by more than this factor. The size of a part
            is its largest absolute value at a record, and its scale the larger of 1 and its first size that was not
            zero. With None only numbers that are not finite end a run.
        engine: one of the engines of `make_engine`.

    Returns:
        The records, and how the run ended.

    Raises:
        CheckpointError: if the folder holds another run, or cannot be written.
    """
    settings = Settings(
        owner="run_algorithm",
        max_steps=max_steps,
        output_dir=output_dir,
        eval_fn=eval_fn,
        eval_every=eval_every,
        patience=patience,
        callbacks=callbacks,
        save_every=save_every,
        save_every_minutes=save_every_minutes,
        save_total_limit=save_total_limit,
        resume=resume,
        run_config=run_config,
        max_seconds=max_seconds,
        max_oracle_calls=max_oracle_calls,
    )
    positive(divergence_factor, "divergence_factor", "run_algorithm", optional=True)
    if divergence_factor is not None and divergence_factor <= 1:
        raise ValueError(
            f"The 'divergence_factor' of run_algorithm must be more than 1, or None. Got {divergence_factor} instead."
        )
    pick(engine, dict.fromkeys(ENGINES), "engine")
    return run_loop(AlgorithmStepper(run, engine, divergence_factor), settings)


class AlgorithmStepper(Stepper):
    """Steps of a functional run.

    Args:
        run: what takes the steps.
        engine: the name of the engine.
        divergence_factor: the growth that ends the run.
    """

    records_start = True

    def __init__(self, run: Run, engine: str, divergence_factor: float | None) -> None:
        self.subject = run
        self.group = run.group
        self._run = run
        self._name = engine
        self._factor = divergence_factor
        self._engine: Engine | None = None
        self._state: State | None = None
        self._reference: dict[str, float] = {}
        """The size of each part of the state when it was first not zero."""

    @property
    def identity(self) -> Mapping[str, object]:
        return {"algorithm": describe(self._run.algorithm)}

    @property
    def state(self) -> State:
        """Where the run is."""
        if self._state is None:
            self._state = self._run.start()
        return self._state

    @property
    def stride(self) -> int:
        return 1 if self._engine is None else self._engine.stride

    @property
    def preparation_s(self) -> float:
        return 0.0 if self._engine is None else self._engine.preparation_s

    @property
    def oracle_calls(self) -> int:
        return work(self._run.problem.calls)

    def begin(self, max_steps: int, max_seconds: float | None) -> None:
        run = self._run
        self._engine = make_engine(
            self._name, run.algorithm, run.problem, run.draw, run.generator, self.state, max_steps, max_seconds
        )
        self._wait()

    def advance(self, n: int) -> None:
        assert self._engine is not None
        self._state = self._engine.advance(self.state, n)
        self._wait()
        if self._state.step_count == 1:  # the state has its lasting form
            self._measure_sizes()

    def measure(self, progress: Progress, reason: StopReason | None, eval_fn: Any) -> tuple[Record, float | None]:
        clean, bad = measured(eval_fn(self.state))
        row: Record = {
            "step": progress.step,
            "seconds": progress.seconds,
            "preparation_seconds": progress.preparation_seconds,
            "engine": None if self._engine is None else self._engine.name,
            "oracles": asdict(self._run.problem.calls),
            "status": (Status.RUNNING if reason is None else _STATUS[reason]).value,
            **clean,
        }
        first = next(iter(clean.values()), None)
        value = float(first) if isinstance(first, int | float) else None
        sizes, factor = self._measure_sizes(), self._factor
        wild = [name for name, size in sizes.items() if not math.isfinite(size)]
        typical = {name: max(1.0, self._reference.get(name, 0.0)) for name in sizes}
        large = [name for name, size in sizes.items() if factor is not None and size > factor * typical[name]]
        if wild or large or bad:
            grown = None if wild else max(large, key=sizes.__getitem__, default=None)
            row |= {
                "status": Status.DIVERGED.value,
                "diverged": grown or (wild + bad)[0],
                "diverged_size": sizes[grown] if grown else None,
                "not_finite": wild + bad,
            }
        return row, value

    def state_dict(self) -> dict[str, object]:
        return {
            "state": self.state,
            "reference": self._reference,
            "random": self._run.generator.get_state(),
            "calls": asdict(self._run.problem.calls),
            "samples": asdict(self._run.problem.samples),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        run, state, reference = self._run, saved["state"], saved["reference"]
        start = run.start()
        if type(state) is not type(start):
            raise TypeError(f"its state is a {type(state).__name__}, not a {type(start).__name__}")
        for name, value, like in (
            ("lam", state.lam.value, start.lam.value),
            ("omega", state.omega.value, start.omega.value),
            ("direction", state.direction, start.direction),
            ("v", state.v, start.v),
        ):
            if _forms(value) != _forms(like):
                raise ValueError(f"{name} has other tensors")
        if not (_COUNTS(saved["calls"]) and _COUNTS(saved["samples"])):
            raise ValueError("its counts are not whole numbers")
        if not all(isinstance(size, float) for size in reference.values()):
            raise ValueError("its sizes are not numbers")
        if state.step_count != saved["progress"]["step"]:
            raise ValueError("its state is of another step")
        run.generator.set_state(saved["random"])
        run.problem.calls = OracleCounts(**saved["calls"])
        run.problem.samples = OracleCounts(**saved["samples"])
        self._reference = dict(reference)
        self._state = map_tensors(lambda t: t.to(run.generator.device) if t.dtype != torch.uint8 else t, state)

    def _measure_sizes(self) -> dict[str, float]:
        """Return how large the state is; keep what each part was when it was first not zero."""
        sizes = health(self.state)
        for name, size in sizes.items():
            if 0 < size < math.inf:
                self._reference.setdefault(name, size)
        return sizes

    def _wait(self) -> None:
        """Return when the device has done what it was asked for."""
        if self._run.generator.device.type == "cuda":
            torch.cuda.synchronize(self._run.generator.device)


def _forms(tree: Tree) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    tensors: dict[str, Tensor] = dict(tree)
    return {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
