"""Plain training of ω, with λ left where it is: what every bilevel method is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fsla._tree import zeros_like
from fsla.algorithms._alternating import State, Stepped
from fsla.hypergradients._inner import Descent
from fsla.problems._batches import Needs, Sample
from fsla.problems._problem import Oracles, Point, checked
from fsla.problems._wrappers import Seeded
from fsla.steps._schedules import Rates, callable_rates


@dataclass(frozen=True)
class Fixed(Stepped):
    """ω ← ω - τ ∂_ω G(λ, ω), and nothing else. Of a sample it reads `inner` alone."""

    rates: Callable[[int], Rates]
    inner: Descent = field(default_factory=Descent)

    def __post_init__(self) -> None:
        callable_rates(self.rates)

    @property
    def needs(self) -> Needs:
        return Needs(inner=self.inner.steps, outer_omega=0, hvp=0, outer_lam=0, cross=0)

    def init(self, problem: Oracles, at: Point, xi: Sample) -> State:
        self.needs.check(xi)
        at = checked(problem, at, xi)
        return State(0, at, self.inner.init(at), None, zeros_like(at.lam))

    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State:
        self.needs.check(xi)
        at, inner = self.inner.run(Seeded(problem, xi), state.at, state.inner, xi, rate.tau)
        return state._replace(k=state.k + 1, at=at, inner=inner)


def fixed(rates: Callable[[int], Rates]) -> Fixed:
    """SGD on ω alone, at a fixed λ."""
    return Fixed(rates)
