"""BDA (Liu et al. 2020): where G has many minimisers, the inner steps follow F as well, and choose among them.

    ω^{t+1} = ω^t - [a_t β ∂_ω F + (1 - a_t) τ ∂_ω G],   a_t = a / (t + 1)

and λ moves along the derivative of F through all T steps. These are plain steps of size τ on a mixture of the two
losses, so that what differentiates inner steps serves here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

from torch import Tensor

from fsla._checks import positive, whole_number
from fsla._state_tree import evolve
from fsla._tree import Leaves, Scalar, Tree, axpy, clone, dense, scale
from fsla.algorithms._base import Algorithm, State
from fsla.algorithms._registry import register
from fsla.algorithms._single_loop import Sizes
from fsla.hypergradients._estimators import ReverseUnroll
from fsla.problems._batches import Batch, BatchSpec, batch_at
from fsla.problems._views import Point, View
from fsla.problems._wrappers import ForwardingProblem
from fsla.steps._context import StepContext, descend
from fsla.steps._momentum import Position
from fsla.steps._updates import Projection


class MixedBatch(NamedTuple):
    """The data of an inner step: what F and G count in it, and a batch of each."""

    outer_weight: Scalar
    inner_weight: Scalar
    outer: Batch
    inner: Batch


class MixedProblem(ForwardingProblem):
    """A problem whose inner loss is a mixture of F and G, by the `MixedBatch` in its batch."""

    def inner_at(self, at: Point, batch: Batch, *, update_buffers: bool = False) -> View:
        mixed: MixedBatch = batch.data
        inner = self.problem.inner_at(at, mixed.inner, update_buffers=update_buffers)
        return MixedView(inner, mixed.inner_weight, self.problem.outer_at(at, mixed.outer), mixed.outer_weight)


class MixedView(View):
    """a times one view, and b times another."""

    def __init__(self, first: View, a: Scalar, second: View, b: Scalar) -> None:
        self._first = first
        self._a = a
        self._second = second
        self._b = b

    @property
    def eps(self) -> float:
        return self._first.eps

    @property
    def value(self) -> Tensor:
        return self._a * self._first.value + self._b * self._second.value

    @property
    def known_value(self) -> Tensor | None:
        return self._first.known_value

    def gradients(self, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        first = self._first.gradients(omega=omega, lam=lam)
        return self._mix(first, self._second.gradients(omega=omega, lam=lam))

    def products(self, v: Tree, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        first = self._first.products(v, omega=omega, lam=lam)
        return self._mix(first, self._second.products(v, omega=omega, lam=lam))

    def mixed_hvp_transpose(self, u: Tree) -> Tree:
        return axpy(self._a, self._first.mixed_hvp_transpose(u), scale(self._b, self._second.mixed_hvp_transpose(u)))

    def linearized(self) -> Self:
        self._first.linearized()
        self._second.linearized()
        return self

    def _mix(self, first: tuple[Tree, Leaves], second: tuple[Tree, Leaves]) -> tuple[Tree, Leaves]:
        by_omega = axpy(self._a, first[0], scale(self._b, second[0]))
        return by_omega, axpy(self._a, first[1], scale(self._b, second[1]))


@dataclass(frozen=True, kw_only=True)
class Bda(Algorithm[State]):
    """T aggregated steps from the last ω, differentiated in reverse on the batches that they were taken on."""

    inner_steps: int = 10
    aggregation: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.inner_steps, "inner_steps", "Bda")
        positive(self.aggregation, "aggregation", "Bda")

    @property
    def batches(self) -> BatchSpec:
        return BatchSpec(inner_grad=self.inner_steps, hvp=0, mixed_hvp=0)

    def start(self, state: State, step: StepContext) -> State:
        return state

    def move(self, state: State, step: StepContext) -> State:
        rates, outer = step.rates, step.batches.outer_grad_omega[0]
        ratio = rates.adjoint_lr / step.updates.inner.step_size(rates.inner_lr)
        data = [
            MixedBatch(a * ratio, 1 - a, outer, batch_at(step.batches.inner_grad, t))
            for t, a in enumerate(self.aggregation / (t + 1) for t in range(self.inner_steps))
        ]
        batches = tuple(Batch(mixed, mixed.inner.seed) for mixed in data)
        mixture = step.reading(step.batches._replace(inner_grad=batches, hvp=batches), MixedProblem)
        keep = clone if self.updates.in_place else dict
        at, omega = descend(mixture, state.point, state.omega, self.inner_steps, keep=keep)
        d = dense(ReverseUnroll().gradient(mixture, Position(at, {})))
        return evolve(state, lam=step.updates.outer(state.lam, d, rates.outer_lr), omega=omega, direction=d)


@register("bda")
def bda(
    step_sizes: Sizes, *, inner_steps: int = 10, aggregation: float = 0.5, projection: Projection | None = None
) -> Bda:
    """Return BDA: inner steps that follow F as well, where G has many minimisers.

    Cost of a step: T each of ∂_ω G and ∂_ω F, and of joint products of both, less one HVP of each.

    Args:
        step_sizes: step sizes of λ and ω, and β, the step of ω along ∂_ω F.
        inner_steps: T, moves of ω in a step.
        aggregation: a, the first weight of F.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `Bda`.

    Examples:
        >>> minimize(fsla.algorithms.bda(constant(0.2, 0.5, 0.5), inner_steps=5))
        1.0
    """
    return Bda(step_sizes=step_sizes, inner_steps=inner_steps, aggregation=aggregation, projection=projection)
