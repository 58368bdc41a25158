"""How a direction d is made from stochastic gradients g (Algorithm 1, line 9; in SOBA's order each of the three).

    Plain     d = g_new
    Average   d = (1-η) d + η g_new
    Storm     d = g_new + (1-η) (d - g_old)      g_old at the old point and memory, on the same sample
    Spider    Storm with η = 1 every q steps, on a large batch, and η = 0 between (see `fsla.rates.Periodic`)

With η = 1 all agree. STORM is unbiased only if the sample of g is independent of the sample that moved ω and v. (SAGA,
which remembers what each batch said, is in `fsla.saga`.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsla.checks import pick
from fsla.problem import Point
from fsla.tree import Leaves, Scalar, Tree, axpy, dense, scale

Where = tuple[Point, Any]
"""A point and the estimator's memory there."""
Gradient = Callable[[Point, Any], Leaves]
Direction = Callable[[Gradient, Where, Where, Tree, Scalar], Tree]


@dataclass(frozen=True)
class Plain:
    def __call__(self, gradient: Gradient, new: Where, old: Where, d: Tree, eta: Scalar) -> Tree:
        return dense(gradient(*new))


@dataclass(frozen=True)
class Average:
    def __call__(self, gradient: Gradient, new: Where, old: Where, d: Tree, eta: Scalar) -> Tree:
        return axpy(1.0 - eta, d, scale(eta, gradient(*new)))


@dataclass(frozen=True)
class Storm:
    def __call__(self, gradient: Gradient, new: Where, old: Where, d: Tree, eta: Scalar) -> Tree:
        keep = 1.0 - eta
        return axpy(keep, d, axpy(-keep, gradient(*old), gradient(*new)))


@dataclass(frozen=True)
class Spider(Storm):
    """Where η is the number 1, the old point is not asked."""

    def __call__(self, gradient: Gradient, new: Where, old: Where, d: Tree, eta: Scalar) -> Tree:
        if isinstance(eta, float) and eta == 1.0:
            return dense(gradient(*new))
        return super().__call__(gradient, new, old, d, eta)


MOMENTA: dict[str, Direction] = {"storm": Storm(), "average": Average(), "none": Plain()}


def by_name(name: str) -> Direction:
    return pick(name, MOMENTA, "momentum")
