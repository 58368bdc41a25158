"""SOBA's order: ω, v and λ all move from one point, on one inner and one outer batch.

    D_ω = filter(∂_ω G)      D_v = filter(H v - ∂_ω F)      D_λ = filter(∂_λ F - J v)
    ω ← update(ω, D_ω, τ)    v ← update(v, D_v, β)          λ ← update(λ, D_λ, α)

so that ∂_ω G, H v and J v come from one pass. Each of the three has a filter (`fsla.steps._momentum`) and an update
(`fsla.steps._updates`) of its own: SOBA has plain ones, MA-SOBA averages D_λ, FdeHBO has STORM three times, and v in
a ball. With an estimator that solves for v afresh (SUSTAIN, MRBO, BiAdam) there are two of them, ω and λ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fsla._tree import Leaves, Tree, dense, sub, zeros_like
from fsla.algorithms._alternating import State, Stepped
from fsla.hypergradients._estimators import Implicit
from fsla.problems._batches import Needs, Sample
from fsla.problems._problem import Oracles, Point, checked
from fsla.problems._wrappers import Seeded
from fsla.steps._momentum import SPIDER, STORM, Direction, NoMomentum
from fsla.steps._schedules import Rates, callable_rates
from fsla.steps._updates import GradientDescent, Update


@dataclass(frozen=True)
class Jacobi(Stepped):
    """SOBA and its relatives. Without an estimator the sample's `inner` and `outer_omega` batches serve all oracles.

    With `delayed`, λ moves by the direction of the step before, as MA-SOBA has it.
    """

    rates: Callable[[int], Rates]
    omega_filter: Direction = field(default_factory=NoMomentum)
    v_filter: Direction = field(default_factory=NoMomentum)
    lam_filter: Direction = field(default_factory=NoMomentum)
    omega_update: Update = field(default_factory=GradientDescent)
    v_update: Update = field(default_factory=GradientDescent)
    lam_update: Update = field(default_factory=GradientDescent)
    delayed: bool = False
    estimator: Implicit | None = None

    def __post_init__(self) -> None:
        callable_rates(self.rates)

    @property
    def needs(self) -> Needs:
        return (
            Needs(hvp=0, outer_lam=0, cross=0) if self.estimator is None else Needs(hvp=self.estimator.hvp_batches(1))
        )

    @property
    def capturable(self) -> bool:
        drawn = self.estimator is not None and not self.estimator.capturable
        return not drawn and not any(isinstance(f, SPIDER) for f in self._filters)

    @property
    def _filters(self) -> tuple[Direction, Direction, Direction]:
        return self.omega_filter, self.v_filter, self.lam_filter

    @property
    def _looks_back(self) -> bool:
        return any(isinstance(f, STORM) for f in self._filters)

    def init(self, problem: Oracles, at: Point, xi: Sample) -> State:
        self.needs.check(xi)
        at = checked(problem, at, xi)
        omega, omega_memory = self.omega_update.init(at.omega)
        lam, lam_memory = self.lam_update.init(at.lam)
        v: Any = None
        v_memory: Any = None
        if self.estimator is None:
            v, v_memory = self.v_update.init(zeros_like(at.omega))
        at = Point(lam, omega)
        d = zeros_like(lam)
        d_omega = None if isinstance(self.omega_filter, NoMomentum) else zeros_like(omega)
        d_v = None if v is None or isinstance(self.v_filter, NoMomentum) else zeros_like(omega)
        if self._looks_back or self.estimator is not None:
            first = self._directions(Seeded(problem, xi), xi)
            d = dense(first.lam(at, v))
            d_omega = first.omega(at, v)
            d_v = first.v(at, v) if isinstance(first, Tracked) else None
        before = (at, v) if self._looks_back else None
        inner = {"omega": omega_memory, "v": v_memory, "before": before, "d_omega": d_omega, "d_v": d_v}
        return State(0, at, inner, v, d, lam_memory)

    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State:
        self.needs.check(xi)
        at = state.at
        v = state.memory
        memory = state.inner
        new = (at, v)
        old = new if memory["before"] is None else memory["before"]
        found = self._directions(problem if xi.seed is None else Seeded(problem, xi), xi)
        d_omega = self.omega_filter(found.omega, new, old, _known(memory["d_omega"], at.omega), rate.eta)
        d_v = v_memory = None
        if isinstance(found, Tracked):
            d_v = self.v_filter(found.v, new, old, _known(memory["d_v"], v), rate.eta)
            v, v_memory = self.v_update(v, d_v, rate.beta, memory["v"])
        d = self.lam_filter(found.lam, new, old, state.d, rate.eta)
        omega, omega_memory = self.omega_update(at.omega, d_omega, rate.tau, memory["omega"])
        lam, outer = self.lam_update(at.lam, state.d if self.delayed else d, rate.alpha, state.outer)
        inner = {
            "omega": omega_memory,
            "v": v_memory,
            "before": new if self._looks_back else None,
            "d_omega": None if isinstance(self.omega_filter, NoMomentum) else d_omega,
            "d_v": None if isinstance(self.v_filter, NoMomentum) else d_v,
        }
        return State(state.k + 1, Point(lam, omega), inner, v, d, outer)

    def _directions(self, problem: Oracles, xi: Sample) -> Tracked | Afresh:
        return Tracked(problem, xi) if self.estimator is None else Afresh(problem, xi, self.estimator)


def _known(d: Tree | None, unread: Tree) -> Tree:
    """The direction so far; a filter that keeps none reads none, and any tree of the form will do."""
    return unread if d is None else d


class Afresh:
    """Those of ω and λ, with v by an estimator at the point itself."""

    def __init__(self, problem: Oracles, xi: Sample, estimator: Implicit) -> None:
        self._problem = problem
        self._xi = xi
        self._estimator = estimator

    def omega(self, at: Point, v: None) -> Tree:
        return self._problem.inner_at(at, self._xi.inner).grad

    def lam(self, at: Point, v: None) -> Leaves:
        return self._estimator.gradient(self._problem, at, None, self._xi)


class Tracked:
    """All three, from one pass for each point."""

    def __init__(self, problem: Oracles, xi: Sample) -> None:
        self._problem = problem
        self._xi = xi
        self._found: dict[int, tuple[Point, Tree, Tree, Leaves]] = {}

    def omega(self, at: Point, v: Tree) -> Tree:
        return self._at(at, v)[1]

    def v(self, at: Point, v: Tree) -> Tree:
        return self._at(at, v)[2]

    def lam(self, at: Point, v: Tree) -> Leaves:
        return self._at(at, v)[3]

    def _at(self, at: Point, v: Tree) -> tuple[Point, Tree, Tree, Leaves]:
        if id(at) not in self._found:
            inner = self._problem.inner_at(at, self._xi.inner)
            outer = self._problem.outer_at(at, self._xi.outer_omega)
            hv, jv = inner.hvp_cross(v)
            d_v = sub(hv, outer.d_omega)
            self._found[id(at)] = at, inner.grad, d_v, sub(outer.d_lam, jv)  # the point is kept, and so its id
        return self._found[id(at)]
