"""How a run takes its next n steps.

    eager     one by one from Python
    graph     a step captured once as a CUDA graph, its batches drawn on the device, so that the host does nothing
    auto      graph on a GPU, for runs of some length; eager otherwise

All give the same numbers to rounding. Captured steps are an optimisation, never at the price of a silent wrong number:
they are compared with the step itself at first and now and then, and abandoned with a warning where they differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from fsla._checks import pick
from fsla.algorithms._base import Algorithm, State
from fsla.problems._batches import StepBatches
from fsla.problems._views import Oracles
from fsla.problems._wrappers import CountedProblem
from fsla.train._captured import CaptureError, CudaGraph, EngineWarning

__all__ = ["ENGINES", "CaptureError", "Eager", "Engine", "EngineWarning", "make_engine"]
ENGINES = ("auto", "eager", "graph")
WORTH_STEPS = 20
WORTH_S = 10.0
"""Steps, and seconds of budget, from which "auto" captures: a capture costs a second or two."""


class Engine(Protocol):
    @property
    def name(self) -> str:
        """Which of ENGINES it is: "eager" as well after a captured step failed."""
        ...

    @property
    def stride(self) -> int:
        """How many steps to ask for at a time."""
        ...

    @property
    def preparation_s(self) -> float:
        """The seconds spent so far on capturing and comparing, those within `advance` among them."""
        ...

    def advance(self, state: State, n: int) -> State:
        """Return the state n steps later."""
        ...


class Eager:
    name = "eager"
    stride = 1
    preparation_s = 0.0

    def __init__(self, algorithm: Algorithm[Any], problem: CountedProblem, draw: Callable[[], StepBatches]) -> None:
        self._algorithm = algorithm
        self._problem = problem
        self._draw = draw

    def advance(self, state: State, n: int) -> State:
        for _ in range(n):
            state = self._algorithm.step(self._problem, state, self._draw())
        return state


def make_engine(
    name: str,
    algorithm: Algorithm[Any],
    problem: Oracles,
    draw: Callable[[], StepBatches],
    generator: torch.Generator,
    state: State,
    steps: int | None = None,
    budget_s: float | None = None,
) -> Engine:
    """Return the engine of a name, whose ``advance(state, n)`` takes the next n steps of a functional run.

    A step is captured when `advance` first takes one. If a step cannot be captured, such as a loss that asks a tensor
    for a number, that call raises; with "auto" it warns, and steps are taken eagerly.

    Args:
        name: "auto", "eager" or "graph".
        algorithm: what takes a step.
        problem: the two losses.
        draw: returns the batches of a step.
        generator: its device is where the run is. On a GPU `draw` must draw from it alone, on the device: the draw is
            captured with the step.
        state: state of the run.
        steps: length of the run, for "auto"; None is long. Give the whole length to a run that is resumed, so that it
            goes on with its first engine.
        budget_s: the run's budget in seconds, for "auto": a short one is not spent on preparations.

    Returns:
        The engine.

    Raises:
        CaptureError: if "graph" is asked for, and the algorithm or the device does not allow it.

    Examples:
        >>> problem = fsla.Problem(
        ...     inner_loss=lambda lam, omega, batch: ((omega["w"] - lam["x"]) ** 2).sum() / 2,
        ...     outer_loss=lambda lam, omega, batch: ((omega["w"] - 1) ** 2).sum() / 2,
        ... )
        >>> at = fsla.Point({"x": torch.zeros(1)}, {"w": torch.zeros(1)})
        >>> batches = fsla.StepBatches.shared(None, None)
        >>> algorithm = fsla.algorithms.soba(fsla.steps.constant(0.2, 0.5, 0.5))
        >>> state = algorithm.init(problem, at, batches)
        >>> engine = fsla.train.make_engine("auto", algorithm, problem, lambda: batches, torch.Generator(), state)
        >>> engine.name, engine.advance(state, 5).step_count
        ('eager', 5)
    """
    pick(name, dict.fromkeys(ENGINES), "engine")
    problem = problem if isinstance(problem, CountedProblem) else CountedProblem(problem)
    refused = _refused(algorithm, generator.device)
    if name == "graph" and refused is not None:
        raise CaptureError(f"Engine 'graph' is unavailable: {refused}")
    if name == "eager" or (name == "auto" and (refused is not None or not _is_worthwhile(steps, budget_s))):
        return Eager(algorithm, problem, draw)
    return CudaGraph(algorithm, problem, draw, generator, lenient=name == "auto")


def _refused(algorithm: Algorithm[Any], device: torch.device) -> str | None:
    """Return why steps cannot be captured, and what to do; None where they can."""
    kind = type(algorithm).__name__
    if not algorithm.capturable or algorithm.outer_every > 1:
        return f"{kind} does not take the same operations at every step. Use engine='eager' or 'auto'."
    if algorithm.updates.in_place:
        return f"the updates of this {kind} write into their variables. Use engine='eager' or 'auto'."
    if device.type != "cuda":
        return f"it replays a CUDA graph, and the run is on {device}. Use engine='auto', which takes eager steps there."
    return None


def _is_worthwhile(steps: int | None, budget_s: float | None) -> bool:
    """Return whether a capture pays for a run. It depends on the run's settings alone, never on time."""
    return (steps is None or steps >= WORTH_STEPS) and (budget_s is None or budget_s >= WORTH_S)
