"""A problem of the comparison: its losses, its samples, how batches are drawn, and what a λ is worth."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fsla._tree import Tree, flatten, norm, size, sub
from fsla.hypergradients import largest_eigenvalue
from fsla.problems import Batch, Point, Problem
from fsla.problems._passes import Loss
from fsla_benchmarks.compare.exact import Data, f_and_gradient, inner_minimum, least


class Measured(NamedTuple):
    """f(λ), and what the model ω_λ does on test samples, where there are any."""

    value: float
    test_loss: float | None = None
    accuracy: float | None = None


class Scales(NamedTuple):
    """Sizes at the start: the root mean square of ∇f, the norm of v_λ, and the distance of ω_λ."""

    slope: float
    adjoint: float
    reach: float


@dataclass(frozen=True, eq=False)
class Task:
    """A problem of the comparison: two losses, a start, all samples of both levels, and how many make a batch."""

    name: str
    title: str
    inner_loss: Loss
    outer_loss: Loss
    start: Point
    inner: Data
    outer: Data
    batch: int
    outer_uses_lam: bool = False
    test: Data | None = None
    scores: Callable[[Tree, Tree, Data], Tensor] | None = field(default=None, repr=False)
    """Class scores of a batch, where there is test data."""

    def oracles(self) -> Problem:
        return Problem(
            self.inner_loss, self.outer_loss, outer_uses_lam=self.outer_uses_lam, hvp_method="reverse_over_reverse"
        )

    def measure(self, lam: Tree, omega: Tree) -> Measured:
        """f(λ) on all samples, with ω_λ solved for from ω or from the start; +inf where it is not a number.

        Costs no oracle calls.
        """
        if not all(bool(t.isfinite().all()) for t in (*lam.values(), *omega.values())):
            return Measured(math.inf)
        with torch.no_grad():
            inner_loss_now = float(self.inner_loss(lam, omega, self.inner))
            first = (
                omega
                if inner_loss_now <= float(self.inner_loss(lam, self.start.omega, self.inner))
                else self.start.omega
            )
        solved = inner_minimum(self.inner_loss, Point(lam, first), self.inner)
        with torch.no_grad():
            value = float(self.outer_loss(lam, solved, self.outer))
            if not math.isfinite(value):
                return Measured(math.inf)
            if self.test is None or self.scores is None:
                return Measured(value)
            scores = self.scores(lam, solved, self.test)
            loss = float(cross_entropy(scores, self.test[1]))
            return Measured(value, loss, float((scores.argmax(1) == self.test[1]).double().mean()))

    def inner_batch(self, generator: torch.Generator) -> Data:
        return _drawn(self.inner, self.batch, generator)

    def outer_batch(self, generator: torch.Generator) -> Data:
        return _drawn(self.outer, self.batch, generator)

    @cached_property
    def inner_batches(self) -> tuple[Data, ...]:
        """Fixed batches that divide the inner samples, for methods that keep a table with an entry for each."""
        return _divided(self.inner, self.batch)

    @cached_property
    def outer_batches(self) -> tuple[Data, ...]:
        return _divided(self.outer, self.batch)

    @cached_property
    def curvature(self) -> float:
        """L, the largest eigenvalue of ∂²G/∂ω² at the start, on all samples."""
        view = self.oracles().inner_at(self.start, Batch(self.inner))
        return largest_eigenvalue(view.linearized().hvp, self.start.omega)

    @cached_property
    def scales(self) -> Scales:
        exact = f_and_gradient(self.oracles(), self.inner_loss, self.start, self.inner, self.outer)
        slope = float(flatten(exact.gradient).square().mean().sqrt())
        return Scales(slope, float(norm(exact.v)), float(norm(sub(exact.omega, self.start.omega))))

    def least(self, iterations: int) -> tuple[float, float]:
        """f at the start, and the least f that so many iterations of L-BFGS on ∇f find."""
        return least(self.oracles(), self.inner_loss, self.start, self.inner, self.outer, iterations)

    @property
    def n(self) -> int:
        return size(self.start.omega)

    @property
    def p(self) -> int:
        return size(self.start.lam)


def _drawn(data: Data, count: int, generator: torch.Generator) -> Data:
    rows = torch.randint(len(data[0]), (count,), generator=generator)
    return tuple(t[rows] for t in data)


def _divided(data: Data, count: int) -> tuple[Data, ...]:
    whole = len(data[0]) // count * count  # batches of one size, so that each weighs the same
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(0))[:whole]
    return tuple(tuple(t[rows] for t in data) for rows in order.reshape(-1, count))
