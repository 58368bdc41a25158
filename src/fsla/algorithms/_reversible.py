"""Reversible learning (Maclaurin, Duvenaud & Adams 2015): unrolled differentiation that keeps no path.

    u ← γ u - (1 - γ) ∂_ω G,   ω ← ω + τ u,   T times from u = 0

Backwards, each state is computed from the next one: ω_t = ω_{t+1} - τ u_{t+1}, u_t = (u_{t+1} + (1 - γ) g_t) / γ. The
division by γ would lose bits, so that ω and u are whole numbers (multiples of 2⁻⁴⁰), and what a multiplication by
γ = n/d shifts out goes to a buffer: log₂(d/n) bits a step and coordinate. The path is then the same to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from fsla._checks import number, whole_number
from fsla._state_tree import evolve
from fsla._tree import Scalar, Tree, axpy, dense, scale, zeros_like
from fsla.algorithms._base import Algorithm, State
from fsla.algorithms._registry import register
from fsla.algorithms._single_loop import Sizes
from fsla.problems._batches import BatchSpec, batch_at
from fsla.problems._views import Point
from fsla.steps._context import StepContext
from fsla.steps._updates import Projection

ONE = 2.0**40
FULL = 52
"""Bits of a buffer, after which the next one is begun."""


class Bits:
    """What multiplications by n/d shifted out of a tree of whole numbers."""

    def __init__(self, factor: Fraction, like: Tree) -> None:
        self._n = factor.numerator
        self._d = factor.denominator
        self._room = math.floor(FULL / math.log2(self._d / self._n)) - 4
        self._full: list[Tree] = []
        self._now: Tree = _zeros(like)
        self._used = 0

    def times(self, u: Tree) -> Tree:
        if self._used == self._room:
            self._full.append(self._now)
            self._now = _zeros(u)
            self._used = 0
        self._used += 1
        u, self._now = _exchange_digits(u, self._now, self._d, self._n)
        return u

    def undo(self, u: Tree) -> Tree:
        if self._used == 0:
            self._now = self._full.pop()
            self._used = self._room
        self._used -= 1
        u, self._now = _exchange_digits(u, self._now, self._n, self._d)
        return u


def _exchange_digits(u: Tree, buffer: Tree, out: int, into: int) -> tuple[Tree, Tree]:
    """u · into / out: u's last digit in base `out` goes to the buffer, and the buffer's last in base `into` comes."""
    new = {}
    rest = {}
    for name, t in u.items():
        value = buffer[name] * out + t % out
        new[name] = t.div(out, rounding_mode="floor") * into + value % into
        rest[name] = value.div(into, rounding_mode="floor")
    return new, rest


def _zeros(like: Tree) -> Tree:
    return {name: torch.zeros(t.shape, dtype=torch.long, device=t.device) for name, t in like.items()}


def _whole(x: Tree) -> Tree:
    return {name: (t.double() * ONE).round().long() for name, t in x.items()}


def _real(x: Tree, like: Tree) -> Tree:
    return {name: (t.double() / ONE).to(like[name].dtype) for name, t in x.items()}


def _plus(x: Tree, y: Tree, sign: int) -> Tree:
    return {name: t + sign * y[name] for name, t in x.items()}


@dataclass(frozen=True, kw_only=True)
class Reversible(Algorithm[State]):
    """T momentum steps from the last ω, differentiated in reverse on the batches that they were taken on."""

    inner_steps: int = 10
    decay: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.inner_steps, "inner_steps", "Reversible")
        number(self.decay, "decay", "Reversible")
        if not 0 < self._factor < 1:
            raise ValueError(f"The 'decay' of Reversible must lie between 0 and 1. Got {self.decay!r} instead.")

    @property
    def _factor(self) -> Fraction:
        return Fraction(self.decay).limit_denominator(100)

    @property
    def batches(self) -> BatchSpec:
        return BatchSpec(inner_grad=self.inner_steps, hvp=0, mixed_hvp=0)

    def start(self, state: State, step: StepContext) -> State:
        return state

    def move(self, state: State, step: StepContext) -> State:
        batches, updates = step.batches, step.updates
        lam = state.lam.value
        like = state.omega.value
        lr = updates.inner.step_size(step.rates.inner_lr)
        keep = float(self._factor)
        bits = Bits(self._factor, like)
        omega = _whole(like)
        u = _zeros(like)

        def pushed(grad: Tree) -> Tree:
            return _whole(scale(keep - 1, grad))

        def moved(u: Tree) -> Tree:
            return _whole(scale(_double(lr), {name: t.double() / ONE for name, t in u.items()}))

        for t in range(self.inner_steps):
            grad = step.inner_at(Point(lam, _real(omega, like)), batch_at(batches.inner_grad, t)).grad_omega
            u = _plus(bits.times(u), pushed(grad), 1)
            omega = _plus(omega, moved(u), 1)
        at = Point(lam, _real(omega, like))
        by_omega = step.outer_at(at, batches.outer_grad_omega[0]).grad_omega
        d = step.outer_at(at, batches.outer_grad_lam[0]).grad_lam
        by_u = zeros_like(like)
        for t in reversed(range(self.inner_steps)):
            by_u = axpy(lr, by_omega, by_u)
            omega = _plus(omega, moved(u), -1)
            view = step.inner_at(Point(lam, _real(omega, like)), batch_at(batches.inner_grad, t))
            u = bits.undo(_plus(u, pushed(view.grad_omega), -1))
            h, j = view.products(by_u)
            by_omega = axpy(keep - 1, h, by_omega)
            d = axpy(keep - 1, j, d)
            by_u = scale(keep, by_u)
        d = dense(d)
        return evolve(
            state,
            lam=updates.outer(state.lam, d, step.rates.outer_lr),
            omega=updates.inner.set(state.omega, at.omega),
            direction=d,
        )


def _double(x: Scalar) -> Scalar:
    return x.double() if isinstance(x, Tensor) else x


@register("reversible")
def reversible(
    step_sizes: Sizes, *, inner_steps: int = 10, decay: float = 0.9, projection: Projection | None = None
) -> Reversible:
    """Return reversible learning: T momentum steps, differentiated without a path.

    Cost of a step: 2 T ∂_ω G and T joint products.

    Args:
        step_sizes: step sizes of λ, ω and v: a schedule such as `fsla.steps.constant`.
        inner_steps: T, moves of ω in a step.
        decay: γ of the momentum, a fraction with a denominator of at most 100.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `Reversible`.

    Examples:
        >>> minimize(fsla.algorithms.reversible(constant(0.2, 0.5, 0.0), inner_steps=4, decay=0.5))
        1.0
    """
    return Reversible(step_sizes=step_sizes, inner_steps=inner_steps, decay=decay, projection=projection)
