"""How a run takes its next n steps.

    eager     one by one from Python
    graph     a step captured once and replayed: on a GPU as a CUDA graph, with its batches drawn on the device, so that
              the host does nothing; on a CPU as a program, a list of tensor operations
    compile   the program compiled; on a GPU in parts that run side by side, and captured
    auto      graph for runs of some length, compile for long ones where it is the faster one; eager otherwise

All give the same numbers to rounding. Captured steps are an optimisation, never at the price of a silent wrong number:
they are compared with the step itself at first and now and then, and given up with a warning where they differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from fsla._checks import pick
from fsla.algorithms._alternating import Algorithm, State
from fsla.problems._batches import Sample
from fsla.problems._counted import Counted
from fsla.problems._problem import Oracles
from fsla.train._captured import EngineWarning
from fsla.train._cuda_graph import CudaGraph
from fsla.train._program import CaptureError
from fsla.train._replay import Replay

__all__ = ["ENGINES", "PAYS", "Eager", "Engine", "EngineWarning", "Replay", "make_engine"]
ENGINES = ("auto", "eager", "graph", "compile")
PAYS = {
    "cuda": {"compile": (50_000, 300.0), "graph": (20, 10.0)},
    "cpu": {"compile": (20_000, 300.0), "graph": (1000, 10.0)},
}
"""Steps, and seconds of budget, from which "auto" takes an engine: tracing costs a second or two, compiling half a
minute."""


class Engine(Protocol):
    @property
    def name(self) -> str:
        """Which of ENGINES it is: "eager" as well once a captured step was given up."""
        ...

    @property
    def stride(self) -> int:
        """How many steps to ask for at a time."""
        ...

    @property
    def preparation_s(self) -> float:
        """The seconds spent so far on tracing, compiling and comparing, those within `advance` among them."""
        ...

    def advance(self, state: State, n: int) -> State:
        """Returns the state n steps later."""
        ...


class Eager:
    name = "eager"
    stride = 1
    preparation_s = 0.0

    def __init__(self, algorithm: Algorithm, problem: Counted, draw: Callable[[], Sample]) -> None:
        self._algorithm = algorithm
        self._problem = problem
        self._draw = draw

    def advance(self, state: State, n: int) -> State:
        for _ in range(n):
            state = self._algorithm.step(self._problem, state, self._draw())
        return state


def make_engine(
    name: str,
    algorithm: Algorithm,
    problem: Oracles,
    draw: Callable[[], Sample],
    generator: torch.Generator,
    state: State,
    steps: int | None = None,
    budget_s: float | None = None,
) -> Engine:
    """Returns the engine of a name.

    A step is captured when `advance` first takes one. What cannot be captured, such as a loss that asks a tensor for a
    number, is an error of that call; with "auto" it is a warning, and steps are taken eagerly.

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
    chosen = _automatic(device, state, steps, budget_s) if name == "auto" else name
    if not getattr(algorithm, "capturable", True):
        if name not in ("auto", "eager"):
            raise CaptureError(
                f"Engine {name!r} is unavailable: {type(algorithm).__name__} does not take the same operations at "
                "every step. Use engine='eager' or 'auto'."
            )
        chosen = "eager"
    if chosen == "eager":
        return Eager(algorithm, problem, draw)
    if device == "cuda":
        return CudaGraph(chosen, algorithm, problem, draw, generator, lenient=name == "auto")
    return Replay(chosen, algorithm, problem, draw, lenient=name == "auto")


def _automatic(device: str, state: State, steps: int | None, budget_s: float | None) -> str:
    """The engine that pays for a run: it depends on the run's settings alone, never on time."""
    for engine, (long, costly) in PAYS.get(device, {}).items():
        convolutions = any(t.ndim > 2 for t in state.at.omega.values())  # on a CPU, calls of a library either way
        pays = (steps is None or steps >= long) and (budget_s is None or budget_s >= costly)
        if pays and not (engine == "compile" and device == "cpu" and convolutions):
            return engine
    return "eager"
