"""BDA (Liu et al. 2020): where G has many minimisers, the inner steps follow F as well, and choose among them.

    ω^{t+1} = ω^t - [a_t β ∂_ω F + (1 - a_t) τ ∂_ω G],   a_t = a / (t + 1)

and λ moves along the derivative of F through all T steps. These are plain steps of size 1 on a mixture of the two
losses, so that what differentiates inner steps serves here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from torch import Tensor

from fsla._checks import positive, whole_number
from fsla._tree import Leaves, Scalar, Tree, axpy, dense, scale
from fsla.algorithms._alternating import State, Stepped
from fsla.hypergradients._estimators import Unrolled
from fsla.hypergradients._inner import Descent
from fsla.problems._batches import Batch, Batches, Needs, Sample, batch_of_step
from fsla.problems._problem import Inner, Oracles, Outer, Point, outer_products_at
from fsla.problems._wrappers import Seeded
from fsla.steps._schedules import Rates, callable_rates
from fsla.steps._updates import GradientDescent, Projection, Update, onto


class Share(NamedTuple):
    """The batch of an inner step: what F and G count in it, and a batch of each."""

    of_outer: Scalar
    of_inner: Scalar
    outer: Batch
    inner: Batch


@dataclass(frozen=True)
class Aggregated:
    """A problem whose inner loss is a mixture of F and G, by the `Share` that is its batch."""

    problem: Oracles

    def inner_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner:
        outer = outer_products_at(self.problem, at, batch.outer, seed)
        return _Mixed(self.problem.inner_at(at, batch.inner, seed), batch.of_inner, outer, batch.of_outer)

    def outer_at(self, at: Point, batch: Batch, seed: int | None = None) -> Outer:
        return self.problem.outer_at(at, batch, seed)


@dataclass(frozen=True)
class _Mixed:
    """a times one view, and b times another."""

    first: Inner
    a: Scalar
    second: Inner
    b: Scalar

    @property
    def unit(self) -> float:
        return self.first.unit

    @property
    def value(self) -> Tensor:
        return self.a * self.first.value + self.b * self.second.value

    @property
    def grad(self) -> Tree:
        return axpy(self.a, self.first.grad, scale(self.b, self.second.grad))

    @property
    def d_lam(self) -> Leaves:
        return axpy(self.a, self.first.d_lam, scale(self.b, self.second.d_lam))

    def gradients(self) -> tuple[Tree, Leaves]:
        return self.grad, self.d_lam

    def hvp(self, v: Tree) -> Tree:
        return axpy(self.a, self.first.hvp(v), scale(self.b, self.second.hvp(v)))

    def cross(self, v: Tree) -> Leaves:
        return axpy(self.a, self.first.cross(v), scale(self.b, self.second.cross(v)))

    def hvp_cross(self, v: Tree) -> tuple[Tree, Leaves]:
        (h, j), (other_h, other_j) = self.first.hvp_cross(v), self.second.hvp_cross(v)
        return axpy(self.a, h, scale(self.b, other_h)), axpy(self.a, j, scale(self.b, other_j))

    def cross_t(self, u: Tree) -> Tree:
        return axpy(self.a, self.first.cross_t(u), scale(self.b, self.second.cross_t(u)))

    def linearised(self) -> Self:
        self.first.linearised()
        self.second.linearised()
        return self


@dataclass(frozen=True)
class Bda(Stepped):
    """T aggregated steps from the last ω, differentiated in reverse on the batches that they were taken on."""

    rates: Callable[[int], Rates]
    T: int = 10
    a: float = 0.5
    outer: Update = field(default_factory=GradientDescent)

    def __post_init__(self) -> None:
        callable_rates(self.rates)
        whole_number(self.T, "T", "Bda")
        positive(self.a, "a", "Bda")

    @property
    def needs(self) -> Needs:
        return Needs(inner=self.T, hvp=0, cross=0)

    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State:
        self.needs.check(xi)
        mixture = Aggregated(Seeded(problem, xi))
        shares = Batches(
            Share(share * rate.beta, (1 - share) * rate.tau, xi.outer_omega, batch_of_step(xi.inner, t))
            for t, share in enumerate(self.a / (t + 1) for t in range(self.T))
        )
        steps = Descent(self.T, trail=True)
        own = xi._replace(inner=shares, hvp=shares)
        at, _ = steps.run(mixture, state.at, steps.init(state.at), own, 1.0)
        d = dense(Unrolled().gradient(mixture, at, None, own))
        lam, outer = self.outer(at.lam, d, rate.alpha, state.outer)
        return State(state.k + 1, Point(lam, at.omega), None, None, d, outer)


def bda(rates: Callable[[int], Rates], *, T: int = 10, a: float = 0.5, project: Projection | None = None) -> Bda:
    """BDA. Per step: T each of ∂_ω G and ∂_ω F, and of joint products of both (one less of each HVP). β is F's step."""
    return Bda(rates, T, a, onto(project))
