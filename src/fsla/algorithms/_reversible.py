"""Reversible learning (Maclaurin, Duvenaud & Adams 2015): unrolled differentiation that keeps no path.

    u ← γ u - (1 - γ) ∂_ω G,   ω ← ω + τ u,   T times from u = 0

Backwards, each state is computed from the next one: ω_t = ω_{t+1} - τ u_{t+1}, u_t = (u_{t+1} + (1 - γ) g_t) / γ. The
division by γ would lose bits, so that ω and u are whole numbers (multiples of 2⁻⁴⁰), and what a multiplication by
γ = n/d shifts out goes to a buffer: log₂(d/n) bits a step and coordinate. The path is then the same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from fsla._checks import whole_number
from fsla._tree import Scalar, Tree, axpy, dense, scale, zeros_like
from fsla.algorithms._alternating import State, Stepped
from fsla.problems._batches import Needs, Sample, batch_of_step
from fsla.problems._problem import Oracles, Point
from fsla.problems._wrappers import Seeded
from fsla.steps._schedules import Rates, callable_rates
from fsla.steps._updates import GradientDescent, Projection, Update, onto

ONE = 2.0**40
FULL = 52
"""Bits of a buffer, after which the next one is begun."""


class Bits:
    """What multiplications by n/d shifted out of a tree of whole numbers."""

    def __init__(self, share: Fraction, like: Tree) -> None:
        self._n = share.numerator
        self._d = share.denominator
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
        u, self._now = _exchanged(u, self._now, self._d, self._n)
        return u

    def undo(self, u: Tree) -> Tree:
        if self._used == 0:
            self._now = self._full.pop()
            self._used = self._room
        self._used -= 1
        u, self._now = _exchanged(u, self._now, self._n, self._d)
        return u


def _exchanged(u: Tree, buffer: Tree, out: int, into: int) -> tuple[Tree, Tree]:
    """u · into / out: u's last digit in base `out` goes to the buffer, and the buffer's last in base `into` comes."""
    new = {}
    rest = {}
    for name, t in u.items():
        held = buffer[name] * out + t % out
        new[name] = t.div(out, rounding_mode="floor") * into + held % into
        rest[name] = held.div(into, rounding_mode="floor")
    return new, rest


def _zeros(like: Tree) -> Tree:
    return {name: torch.zeros(t.shape, dtype=torch.long, device=t.device) for name, t in like.items()}


def _whole(x: Tree) -> Tree:
    return {name: (t.double() * ONE).round().long() for name, t in x.items()}


def _real(x: Tree, like: Tree) -> Tree:
    return {name: (t.double() / ONE).to(like[name].dtype) for name, t in x.items()}


def _plus(x: Tree, y: Tree, sign: int) -> Tree:
    return {name: t + sign * y[name] for name, t in x.items()}


@dataclass(frozen=True)
class Reversible(Stepped):
    """T momentum steps from the last ω, differentiated in reverse on the batches that they were taken on."""

    rates: Callable[[int], Rates]
    T: int = 10
    decay: float = 0.9
    outer: Update = field(default_factory=GradientDescent)

    def __post_init__(self) -> None:
        callable_rates(self.rates)
        whole_number(self.T, "T", "Reversible")
        if not 0 < self._share < 1:
            raise ValueError(f"The 'decay' of Reversible must lie between 0 and 1. Got {self.decay!r} instead.")

    @property
    def _share(self) -> Fraction:
        return Fraction(self.decay).limit_denominator(100)

    @property
    def needs(self) -> Needs:
        return Needs(inner=self.T, hvp=0, cross=0)

    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State:
        self.needs.check(xi)
        problem = Seeded(problem, xi)
        lam = state.at.lam
        like = state.at.omega
        keep = float(self._share)
        bits = Bits(self._share, like)
        omega = _whole(like)
        u = _zeros(like)

        def pushed(grad: Tree) -> Tree:
            return _whole(scale(keep - 1, grad))

        def moved(u: Tree) -> Tree:
            return _whole(scale(_double(rate.tau), {name: t.double() / ONE for name, t in u.items()}))

        for t in range(self.T):
            grad = problem.inner_at(Point(lam, _real(omega, like)), batch_of_step(xi.inner, t)).grad
            u = _plus(bits.times(u), pushed(grad), 1)
            omega = _plus(omega, moved(u), 1)
        at = Point(lam, _real(omega, like))
        by_omega = problem.outer_at(at, xi.outer_omega).d_omega
        d = problem.outer_at(at, xi.outer_lam).d_lam
        by_u = zeros_like(like)
        for t in reversed(range(self.T)):
            by_u = axpy(rate.tau, by_omega, by_u)
            omega = _plus(omega, moved(u), -1)
            view = problem.inner_at(Point(lam, _real(omega, like)), batch_of_step(xi.inner, t))
            u = bits.undo(_plus(u, pushed(view.grad), -1))
            h, j = view.hvp_cross(by_u)
            by_omega = axpy(keep - 1, h, by_omega)
            d = axpy(keep - 1, j, d)
            by_u = scale(keep, by_u)
        d = dense(d)
        lam, outer = self.outer(lam, d, rate.alpha, state.outer)
        return State(state.k + 1, Point(lam, at.omega), None, None, d, outer)


def _double(x: Scalar) -> Scalar:
    return x.double() if isinstance(x, Tensor) else x


def reversible(
    rates: Callable[[int], Rates], *, T: int = 10, decay: float = 0.9, project: Projection | None = None
) -> Reversible:
    """Reversible learning. Per step: 2 T ∂_ω G and T joint products, and no path."""
    return Reversible(rates, T, decay, onto(project))
