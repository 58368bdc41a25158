"""Algorithms around algorithms.

ByDifferences   every product is a difference of two gradients
WarmedUp        ω takes some inner steps before the first step
Growing         the number of inner steps grows with k
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from fsla._checks import positive, whole_number
from fsla.algorithms._alternating import Solver, State
from fsla.algorithms._simultaneous import Jacobi
from fsla.hypergradients._inner import Descent
from fsla.problems._batches import Needs, Sample, batch_of_step
from fsla.problems._differences import Differences
from fsla.problems._problem import Oracles, Point, checked
from fsla.problems._wrappers import Seeded
from fsla.steps._schedules import Rates


@dataclass(frozen=True)
class ByDifferences:
    """Another algorithm, on `fsla.Differences(problem)`."""

    of: Jacobi | Solver

    @property
    def rates(self) -> Callable[[int], Rates]:
        return self.of.rates

    @property
    def needs(self) -> Needs:
        return self.of.needs

    @property
    def capturable(self) -> bool:
        return self.of.capturable

    def init(self, problem: Oracles, at: Point, xi: Sample) -> State:
        return self.of.init(Differences(problem), at, xi)

    def step(self, problem: Oracles, state: State, xi: Sample) -> State:
        return self.of.step(Differences(problem), state, xi)

    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State:
        return self.of.move(Differences(problem), state, xi, rate)


@dataclass(frozen=True)
class WarmedUp(Solver):
    """A Solver whose ω first takes `warm_up` steps at the first λ, on the inner batch that it starts from."""

    warm_up: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.warm_up, "warm_up", "WarmedUp", least=0)

    def init(self, problem: Oracles, at: Point, xi: Sample) -> State:
        if self.warm_up:
            at = checked(problem, at, xi)
            steps = Descent(self.warm_up)
            one = xi._replace(inner=batch_of_step(xi.inner, 0))
            at, _ = steps.run(Seeded(problem, xi), at, steps.init(at), one, self.rates(0).tau)
        return super().init(problem, Point(at.lam, at.omega), xi)


@dataclass(frozen=True)
class Growing(Solver):
    """A Solver that takes ⌈T (k+1)^growth⌉ inner steps at step k, for `Descent(T)`, all on one inner batch."""

    growth: float = 0.5
    capturable = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.inner, Descent):
            raise TypeError(f"The inner of Growing must be a Descent. Got {self.inner} instead.")
        if self.growth:
            positive(self.growth, "growth", "Growing")

    @property
    def needs(self) -> Needs:
        return super().needs._replace(inner=1)

    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State:
        steps = math.ceil(self.inner.steps * (state.k + 1) ** self.growth)
        return Solver.move(replace(self, inner=Descent(steps)), problem, state, xi, rate)
