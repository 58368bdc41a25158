"""Algorithm 1, for every estimator, inner update, direction and schedule.

    rates(k) ─┐
    State ──▶ λ' = outer(λ, d, α) ─▶ inner.run ─────────▶ (λ', ω') ─┐
                   └───────────────▶ estimator.advance ─▶ v' ────────┴─▶ direction(gradient, new, old, d, η) ──▶ State'

This file is the only place that knows the order. A step is pure: it returns a new state, and the old one stays valid.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch

from fsla._tree import Leaves, Tree, dense, zeros_like
from fsla.hypergradients._estimators import Estimator
from fsla.hypergradients._inner import Descent, InnerUpdate
from fsla.problems._batches import Needs, Sample
from fsla.problems._nest import map_tensors, tensors
from fsla.problems._problem import Oracles, Point, checked
from fsla.problems._wrappers import Seeded, Shared
from fsla.steps._momentum import STORM, Direction
from fsla.steps._schedules import Rates, callable_rates
from fsla.steps._updates import GradientDescent, Update


class State(NamedTuple):
    """Where a run stands after k steps: (λ, ω), the memories of the inner update and of the estimator, d, and the
    memory of λ's update."""

    k: int
    at: Point
    inner: Any
    memory: Any
    d: Tree
    outer: Any = None

    def is_finite(self) -> bool:
        """Whether no tensor of the state, v among them, holds NaN or infinity. Asks the device: not at every step."""
        return all(bool(t.isfinite().all()) for t in tensors(self))

    def to(self, to: torch.device | torch.dtype | str) -> State:
        """The state on another device, or in another floating-point dtype."""
        moved: State = map_tensors(lambda t: t.to(to), self)
        return moved


class SharedBatchWarning(UserWarning):
    """STORM on batches that also moved ω and v: its direction keeps a bias."""


class Stepped(ABC):
    """What most algorithms have in common: a step is a move with the rates of the state's k."""

    rates: Callable[[int], Rates]
    outer: Update
    """How λ moves."""

    @property
    @abstractmethod
    def needs(self) -> Needs: ...

    @property
    def capturable(self) -> bool:
        return True

    def init(self, problem: Oracles, at: Point, xi: Sample) -> State:
        """The state of an algorithm that remembers nothing but (λ, ω) and λ's update."""
        at, outer = self.started(problem, at, xi)
        return State(0, at, None, None, zeros_like(at.lam), outer)

    def started(self, problem: Oracles, at: Point, xi: Sample) -> tuple[Point, Any]:
        """The start, checked and brought into λ's set, and the memory of λ's update."""
        self.needs.check(xi)
        at = checked(problem, at, xi)
        lam, memory = self.outer.init(at.lam)
        return Point(lam, at.omega), memory

    def step(self, problem: Oracles, state: State, xi: Sample) -> State:
        return self.move(problem, state, xi, self.rates(state.k))

    @abstractmethod
    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State: ...


class Algorithm(Protocol):
    """What every algorithm is: a start, a schedule and a pure step.

    `step` is `move` with the rates of the state's k. `move` itself never reads k, so that a captured step serves every
    k: the rates are computed from a whole number outside of it and handed in, as numbers or as 0-d tensors. One whose
    steps do not all take the same operations (it reads k, draws how many, or goes on until something holds) says
    `capturable = False`, and is never captured.
    """

    @property
    def rates(self) -> Callable[[int], Rates]: ...
    @property
    def needs(self) -> Needs:
        """The batches that a step reads."""
        ...

    def init(self, problem: Oracles, at: Point, xi: Sample) -> State: ...
    def step(self, problem: Oracles, state: State, xi: Sample) -> State: ...
    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State: ...


@dataclass(frozen=True)
class Solver(Stepped):
    """Algorithm 1 with its parts named. `v_at` says where v moves: at ω_k ("old", the algorithm) or ω_{k+1} ("new").

    With `lam_last` ω and v move first, and λ by the direction that follows: the same cycle, begun elsewhere, so that
    λ's first step knows of v.
    """

    estimator: Estimator
    rates: Callable[[int], Rates]
    inner: InnerUpdate = field(default_factory=Descent)
    direction: Direction = field(default_factory=STORM)
    v_at: Literal["old", "new"] = "old"
    outer: Update = field(default_factory=GradientDescent)
    lam_last: bool = False

    def __post_init__(self) -> None:
        callable_rates(self.rates)
        if self.lam_last and isinstance(self.direction, STORM):
            raise ValueError("With lam_last, the direction of a Solver must not look back. Got STORM() instead.")
        if self.v_at not in ("old", "new"):
            raise ValueError(f"The 'v_at' of a Solver must be 'old' or 'new'. Got {self.v_at!r} instead.")

    @property
    def capturable(self) -> bool:
        return self.estimator.capturable

    @property
    def needs(self) -> Needs:
        steps = self.inner.steps
        return Needs(inner=steps, hvp=self.estimator.hvp_batches(steps))

    def init(self, problem: Oracles, at: Point, xi: Sample) -> State:
        at, outer = self.started(problem, at, xi)
        if xi.mode == "shared" and isinstance(self.direction, STORM):
            warnings.warn(_BIASED, SharedBatchWarning, stacklevel=2)
        memory = self.estimator.init(at)
        d = zeros_like(at.lam) if self.lam_last else self._first(problem, at, memory, xi)
        return State(0, at, self.inner.init(at), memory, d, outer)

    def _first(self, problem: Oracles, at: Point, memory: Any, xi: Sample) -> Tree:
        return dense(self.estimator.gradient(Seeded(problem, xi), at, memory, xi))

    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State:
        self.needs.check(xi)
        if xi.seed is not None:
            problem = Seeded(problem, xi)
        if xi.repeats:
            several = self.v_at == "new" and xi.hvp is xi.cross  # H v and J v' at one point
            problem = Shared(problem, keep=self.inner.revisited, linearised=several)
        lam, outer = state.at.lam, state.outer
        if not self.lam_last:
            lam, outer = self.outer(lam, state.d, rate.alpha, outer)  # line 3
        here = Point(lam, state.at.omega)

        def advance(at: Point) -> Any:  # line 7
            return self.estimator.advance(problem, at, state.memory, xi, rate.beta)

        memory = advance(here) if self.v_at == "old" else None  # first, since a product may leave the gradient too
        at, inner = self.inner.run(problem, here, state.inner, xi, rate.tau)  # line 6
        memory = memory if self.v_at == "old" else advance(at)

        def gradient(at: Point, memory: Any) -> Leaves:  # line 8
            return self.estimator.gradient(problem, at, memory, xi)

        d = self.direction(gradient, (at, memory), (state.at, state.memory), state.d, rate.eta)  # line 9
        if self.lam_last:
            lam, outer = self.outer(lam, d, rate.alpha, outer)
            at = Point(lam, at.omega)
        return State(state.k + 1, at, inner, memory, d, outer)


_BIASED = (
    "STORM needs the batches of its gradients drawn independently of those that move omega and v; on shared ones its "
    "direction keeps a bias for ever. Draw samples 'grouped' or 'independent', or take momentum='none' or 'average'."
)
