"""How a run takes its next n steps.

    eager     one by one from Python
    graph     a step captured once and replayed: on a GPU as a CUDA graph, with its batches and rates drawn and computed
              on the device, so that the host does nothing; on a CPU as a program, a list of tensor operations
    compile   the program compiled; on a GPU in parts that run side by side, and captured
    auto      graph for runs of some length, compile for long ones where it is the faster one; eager otherwise

All give the same numbers to rounding: captured rates are tensors, and a compiler orders sums in its own way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from fsla.checks import pick
from fsla.counted import Counted, Counts
from fsla.problem import Oracles
from fsla.sample import Sample
from fsla.solver import Algorithm, State
from fsla.training.cuda_graph import CudaGraph
from fsla.training.nest import form, map_tensors, rebuild, tensors
from fsla.training.program import CaptureError, Program, Step, with_tensor_k

ENGINES = ("auto", "eager", "graph", "compile")
PAYS = {
    "cuda": {"compile": (50_000, 300.0), "graph": (20, 10.0)},
    "cpu": {"compile": (20_000, 300.0), "graph": (1000, 10.0)},
}
"""Steps, and seconds of budget, from which "auto" takes an engine: tracing costs a second or two, compiling half a
minute."""


class EngineWarning(UserWarning):
    """A faster engine could not be had, and why."""


class Engine(Protocol):
    name: str
    """Which of ENGINES it is."""
    stride: int
    """How many steps to ask for at a time."""

    @property
    def settled(self) -> bool:
        """Whether every sample that was drawn has been used: the generator's state is then the run's."""
        ...

    def advance(self, state: State, n: int) -> State:
        """Returns the state n steps later."""
        ...


class Eager:
    name, stride = "eager", 1

    def __init__(self, algorithm: Algorithm, problem: Counted, draw: _Source) -> None:
        self._algorithm, self._problem, self._draw = algorithm, problem, draw

    @property
    def settled(self) -> bool:
        return self._draw.settled

    def advance(self, state: State, n: int) -> State:
        for _ in range(n):
            state = self._algorithm.step(self._problem, state, self._draw())
        return state


class Replay:
    """Programs, one for each form of sample that is drawn. Where `lenient`, a form without one is stepped eagerly."""

    stride = 1

    def __init__(
        self, name: str, step: Step, problem: Counted, draw: _Source, state: State, *, lenient: bool = False
    ) -> None:
        self.name, self._step, self._problem, self._draw, self._lenient = name, step, problem, draw, lenient
        self._like, self._programs = with_tensor_k(state), dict[Any, tuple[Program, Counts, Counts] | None]()
        self._last: tuple[State, list[Tensor]] | None = None

    @property
    def settled(self) -> bool:
        return self._draw.settled

    def prepare(self, state: State, xi: Sample, other: Sample) -> Replay:
        """Makes the program for samples of the form of xi, and checks it on another sample if that has the form."""
        self._problem.counting(lambda: self._step(state, xi))  # a problem finds out what is asked of it: before tracing
        self._programs[form(xi)] = self._made(state, xi, other if form(other) == form(xi) else _other(xi))
        return self

    def advance(self, state: State, n: int) -> State:
        last = self._last
        if last is not None and last[0] is state:
            parts = last[1]
        else:
            given = with_tensor_k(state)
            if form(given) != form(self._like):
                raise ValueError(
                    "The state must have the form of the one that the engine was made with: the same names in the "
                    "same order, shapes and dtypes. It has not. Make an engine for it."
                )
            parts = tensors(given)
        for i in range(n):
            xi = self._draw()
            if (found := self._found(xi, parts, state.k + i)) is None:
                parts = tensors(self._step(rebuild(self._like, parts), xi))
                continue
            program, calls, samples = found
            parts = program.run(parts, tensors(xi))
            self._problem.add(1, calls, samples)
        after: State = rebuild(self._like, parts)._replace(k=state.k + n)
        self._last = after, parts
        return after

    def _found(self, xi: Sample, parts: list[Tensor], k: int) -> tuple[Program, Counts, Counts] | None:
        key: Any = None
        try:
            key = form(xi)
            if key not in self._programs:
                self._programs[key] = self._made(rebuild(self._like, parts)._replace(k=k), xi, _other(xi))
        except Exception as error:
            if not self._lenient:
                raise
            if key not in self._programs:
                self._programs[key] = None
                _warn(f"The engine {self.name!r} cannot be had for a batch of another form", error)
        return self._programs[key]

    def _made(self, state: State, xi: Sample, other: Sample) -> tuple[Program, Counts, Counts]:
        """The program for samples of the form of xi, checked on another of that form, and what it asks for."""
        compiled = self.name == "compile"
        made = self._problem.counting(lambda: Program(self._step, self._like, xi, compiled=compiled))
        self._problem.counting(lambda: made[0].check(self._step, state, other))
        return made


def make_engine(
    name: str,
    algorithm: Algorithm,
    problem: Oracles,
    draw: Callable[[], Sample],
    generator: torch.Generator,
    state: State,
    steps: int | None = None,
    budget_s: float | None = None,
) -> tuple[Engine, State]:
    """Returns the engine of a name, and the state from which it goes on: at k = 0 all but "eager" take the first step.

    A captured step is a function of tensors: losses that ask for numbers, and rates that need a whole number k, cannot
    be captured. A program is checked against the step itself before it is used.

    Args:
        name: one of ENGINES.
        algorithm, problem, draw: what takes a step.
        generator: its device is where the run is. On a GPU `draw` must draw from it alone, on the device: the draw is
            captured with the step.
        state: where the run stands.
        steps: how long the run is, for "auto"; None is long. Not what is left of it: a run that is resumed must go on
            with the engine that it began with.
        budget_s: the run's budget in seconds, for "auto": a short one is not spent on preparations.
    """
    pick(name, dict.fromkeys(ENGINES), "engine")
    problem = problem if isinstance(problem, Counted) else Counted(problem)
    device = generator.device.type
    wanted = [name]
    if name == "auto":
        wanted = [
            engine
            for engine, (long, dear) in PAYS.get(device, {}).items()
            if (steps is None or steps >= long) and (budget_s is None or budget_s >= dear)
        ]
        if device == "cpu" and any(t.ndim > 2 for t in state.at.omega.values()):
            wanted = [e for e in wanted if e != "compile"]  # convolutions are calls of a library either way
    source = _Source(draw)
    for choice in wanted:
        if choice == "eager":
            break
        try:
            if state.k == 0:  # after one step the state has its lasting form
                state = _first_step(algorithm, problem, state, source)
            return _captured(choice, algorithm, problem, source, generator, state, lenient=name == "auto"), state
        except Exception as error:
            if name != "auto":
                raise
            _warn(f"The engine {choice!r} cannot be had", error)
    return Eager(algorithm, problem, source), state


def _warn(what: str, error: Exception) -> None:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    warnings.warn(f"{what}: {reason}", EngineWarning, stacklevel=3)


def _other(xi: Sample) -> Sample:
    """Another sample of the same form: the first half of each batch, every row twice."""
    twice: Sample = map_tensors(lambda t: t[torch.arange(len(t), device=t.device) // 2] if t.ndim else t, xi)
    return twice


class _Source:
    """Samples, the next of which can be looked at without being lost."""

    def __init__(self, draw: Callable[[], Sample]) -> None:
        self.draw, self._next = draw, list[Sample]()

    def peek(self, i: int = 0) -> Sample:
        """The i-th of those to come, or the last if they end before."""
        try:
            while len(self._next) <= i:
                self._next.append(self.draw())
        except StopIteration:
            if not self._next:
                raise
        return self._next[min(i, len(self._next) - 1)]

    @property
    def settled(self) -> bool:
        return not self._next

    def check_repeats(self, generator: torch.Generator) -> None:
        """Raises unless the draw is the generator's alone: from one state of it, the same sample twice."""
        random = generator.get_state()
        for _ in range(2):
            generator.set_state(random)
            self._next.append(self.draw())  # not lost, if it does not repeat
        *before, first, again = self._next
        if form(first) != form(again) or not all(map(torch.equal, tensors(first), tensors(again))):
            raise CaptureError(
                "What is drawn must come from the generator alone, on its device: the draw is captured with the step, "
                "and a batch from elsewhere, such as a DataLoader, would be replayed for ever. Use engine='eager'."
            )
        self._next = before
        generator.set_state(random)

    def __call__(self) -> Sample:
        return self._next.pop(0) if self._next else self.draw()


def _first_step(algorithm: Algorithm, problem: Counted, state: State, source: _Source) -> State:
    after, calls, samples = problem.counting(lambda: algorithm.step(problem, with_tensor_k(state), source.peek()))
    source()
    problem.add(1, calls, samples)
    first: State = after._replace(k=1)
    return first


def _captured(
    name: str,
    algorithm: Algorithm,
    problem: Counted,
    source: _Source,
    generator: torch.Generator,
    state: State,
    *,
    lenient: bool,
) -> Engine:
    def step(state: State, xi: Sample) -> State:
        return algorithm.step(problem, state, xi)

    if generator.device.type != "cuda":
        replay = Replay(name, step, problem, source, state, lenient=lenient)
        return replay.prepare(state, source.peek(), source.peek(1))
    source.check_repeats(generator)
    if name == "graph":
        return CudaGraph(name, step, problem, source.draw, generator, state)
    random = generator.get_state()
    xi = source.draw()
    generator.set_state(random)
    program, calls, samples = problem.counting(lambda: Program(step, with_tensor_k(state), xi, compiled=True))
    problem.counting(lambda: program.check(step, state, _other(xi)))
    graph = CudaGraph(name, program, problem, source.draw, generator, state)
    graph.counts = calls, samples
    return graph
