"""Algorithm 1, for every estimator, inner update, direction and schedule.

    rates(k) ─┐
    State ──▶ λ' = Π(λ - α d) ──▶ inner.run ─────────▶ (λ', ω') ─┐
                   └────────────▶ estimator.advance ─▶ v' ────────┴─▶ direction(gradient, new, old, d, η) ──▶ State'

This file is the only place that knows the order. A step is pure: it returns a new state, and the old one stays valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from fsla.direction import Direction, Storm
from fsla.estimators import Estimator
from fsla.inner import Descent, InnerUpdate
from fsla.problem import Oracles, Point, Sample, checked
from fsla.projection import Projection
from fsla.rates import Rates, callable_rates
from fsla.tree import Tree, axpy, dense
from fsla.wrap import Shared


class State(NamedTuple):
    """Where a run stands after k steps: (λ, ω), the memories of the inner update and of the estimator, and d."""

    k: int
    at: Point
    inner: Any
    memory: Any
    d: Tree

    def is_finite(self) -> bool:
        """Whether λ, ω and d hold no NaN or infinity. Asks the device, so not at every step."""
        return all(bool(t.isfinite().all()) for x in (self.at.lam, self.at.omega, self.d) for t in x.values())


class Algorithm(Protocol):
    """What every algorithm is: a start, a schedule and a pure step.

    `step` is `move` with the rates of the state's k. `move` itself never reads k, so that a captured step serves every
    k: the rates are computed from a whole number outside of it and handed in, as numbers or as 0-d tensors.
    """

    @property
    def rates(self) -> Callable[[int], Rates]: ...
    def init(self, problem: Oracles, at: Point, xi: Sample) -> State: ...
    def step(self, problem: Oracles, state: State, xi: Sample) -> State: ...
    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State: ...


@dataclass(frozen=True)
class Solver:
    """Algorithm 1 with its parts named. `v_at` says where v moves: at ω_k ("old", the algorithm) or ω_{k+1} ("new")."""

    estimator: Estimator
    rates: Callable[[int], Rates]
    inner: InnerUpdate = field(default_factory=Descent)
    direction: Direction = field(default_factory=Storm)
    v_at: Literal["old", "new"] = "old"
    project: Projection | None = None

    def __post_init__(self) -> None:
        callable_rates(self.rates)
        if self.v_at not in ("old", "new"):
            raise ValueError(f"The 'v_at' of a Solver must be 'old' or 'new'. Got {self.v_at!r} instead.")

    def init(self, problem: Oracles, at: Point, xi: Sample) -> State:
        at = checked(problem, at, xi.inner, xi.outer_omega)
        at = Point(self._projected(at.lam), at.omega)
        memory = self.estimator.init(at)
        d = dense(self.estimator.gradient(problem, at, memory, xi))
        return State(0, at, self.inner.init(at), memory, d)

    def step(self, problem: Oracles, state: State, xi: Sample) -> State:
        return self.move(problem, state, xi, self.rates(state.k))

    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State:
        if xi.repeats:
            problem = Shared(problem, keep=self.inner.revisited)
        here = Point(self._projected(axpy(-rate.alpha, state.d, state.at.lam)), state.at.omega)  # line 3

        def advance(at: Point) -> Any:  # line 7
            return self.estimator.advance(problem, at, state.memory, xi, rate.beta)

        memory = advance(here) if self.v_at == "old" else None  # first, since a product may leave the gradient too
        at, inner = self.inner.run(problem, here, state.inner, xi, rate.tau)  # line 6
        memory = memory if self.v_at == "old" else advance(at)

        def gradient(at: Point, memory: Any) -> Tree:  # line 8
            return self.estimator.gradient(problem, at, memory, xi)

        d = self.direction(gradient, (at, memory), (state.at, state.memory), state.d, rate.eta)  # line 9
        return State(state.k + 1, at, inner, memory, d)

    def _projected(self, lam: Tree) -> Tree:
        return lam if self.project is None else self.project(lam)
