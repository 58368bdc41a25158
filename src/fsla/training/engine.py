"""How a run takes its next n steps: one by one from Python, or as replays of a captured CUDA graph.

On a GPU an eager step is bound by the host, which launches hundreds of small kernels. The graph engine captures one
whole step, with its random batches and its rates as tensors on the device, and replays it: the same arithmetic in the
same order, and the host does nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from fsla.checks import pick
from fsla.problem import Point, Sample
from fsla.solver import Algorithm, State
from fsla.wrap import Counted, Counts

ENGINES = ("auto", "eager", "graph")


class EngineWarning(UserWarning):
    """A faster engine could not be had, and why."""


class Engine(Protocol):
    stride: int
    """How many steps to ask for at a time."""

    def advance(self, state: State, n: int) -> State:
        """Returns the state n steps later."""
        ...


class Eager:
    stride = 1

    def __init__(self, algorithm: Algorithm, problem: Counted, draw: Callable[[], Sample]) -> None:
        self._algorithm, self._problem, self._draw = algorithm, problem, draw

    def advance(self, state: State, n: int) -> State:
        for _ in range(n):
            state = self._algorithm.step(self._problem, state, self._draw())
        return state


class Graph:
    """A step captured once and replayed. The state lives in tensors that the graph writes to."""

    stride = 10

    def __init__(
        self,
        algorithm: Algorithm,
        problem: Counted,
        draw: Callable[[], Sample],
        generator: torch.Generator,
        state: State,
    ) -> None:
        self._device, self._problem = generator.device, problem
        self._held: State = _map(torch.clone, _on_device(state, self._device))
        calls, samples, random = problem.calls, problem.samples, generator.get_state()
        problem.calls, problem.samples = Counts(), Counts()
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):  # the first calls choose kernels and fill the caches of libraries
            for _ in range(3):
                algorithm.step(problem, self._held, draw())
        torch.cuda.current_stream(self._device).wait_stream(side)
        generator.set_state(random)
        problem.calls, problem.samples = Counts(), Counts()
        self._graph = torch.cuda.CUDAGraph()
        self._graph.register_generator_state(generator)
        with torch.cuda.graph(self._graph):
            _copy(self._held, algorithm.step(problem, self._held, draw()))
        self._calls, self._samples = problem.calls, problem.samples  # what one step asks for
        problem.calls, problem.samples = calls, samples

    def advance(self, state: State, n: int) -> State:
        _copy(self._held, _on_device(state, self._device))
        for _ in range(n):
            self._graph.replay()
        self._problem.calls = self._problem.calls.plus(n, self._calls)
        self._problem.samples = self._problem.samples.plus(n, self._samples)
        out: State = _map(torch.clone, self._held)
        return out._replace(k=state.k + n)


def make_engine(
    name: str,
    algorithm: Algorithm,
    problem: Counted,
    draw: Callable[[], Sample],
    generator: torch.Generator,
    state: State,
) -> tuple[Engine, State]:
    """Returns the engine of a name, and the state from which it goes on. "auto" is a graph where one can be had."""
    pick(name, dict.fromkeys(ENGINES), "engine")
    eager = Eager(algorithm, problem, draw)
    if name == "eager" or (name == "auto" and generator.device.type != "cuda"):
        return eager, state
    if generator.device.type != "cuda":
        raise ValueError(
            f"The engine 'graph' needs a CUDA device. Got {generator.device} instead. Use 'auto' or 'eager'."
        )
    first = algorithm.step(problem, _on_device(state, generator.device), draw())
    state = first._replace(k=state.k + 1)  # after one step the state has its lasting form
    try:
        return Graph(algorithm, problem, draw, generator, state), state
    except RuntimeError as error:
        if name == "graph":
            raise
        reason = str(error).splitlines()[0]
        warnings.warn(
            f"No CUDA graph could be captured, so steps are taken one by one: {reason}", EngineWarning, stacklevel=2
        )
        return eager, state


def _on_device(state: State, device: torch.device) -> State:
    """The state with its step number as a tensor, so that rates are computed on the device."""
    k: Any = torch.tensor(float(state.k), device=device)
    return state._replace(k=k)


def _map(f: Callable[[Tensor], Tensor], x: Any) -> Any:
    """Applies f to every tensor in a nest of states, points, trees and tuples."""
    if isinstance(x, Tensor):
        return f(x)
    if isinstance(x, dict):
        return {k: _map(f, v) for k, v in x.items()}
    if isinstance(x, tuple):
        parts = [_map(f, v) for v in x]
        return type(x)(*parts) if isinstance(x, State | Point) else tuple(parts)
    return x


def _tensors(x: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map(lambda t: found.append(t) or t, x)  # type: ignore[func-returns-value]
    return found


def _copy(to: State, source: State) -> None:
    """Writes the tensors of one state into those of another of the same form."""
    with torch.no_grad():
        torch._foreach_copy_(_tensors(to), _tensors(source))
