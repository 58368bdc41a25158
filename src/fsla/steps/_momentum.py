"""How a direction d is made from stochastic gradients g (Algorithm 1, line 9; in SOBA's order each of the three).

    NoMomentum     d = g_new
    EMA   d = (1-η) d + η g_new
    STORM     d = g_new + (1-η) (d - g_old)      g_old at the old point and memory, on the same sample
    SPIDER    STORM with η = 1 every q steps, on a large batch, and η = 0 between (see `fsla.steps.Periodic`)

With η = 1 all agree. STORM is unbiased only if the sample of g is independent of the sample that moved ω and v. (SAGA,
which remembers what each batch said, is in `fsla.steps._saga`.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsla._checks import pick
from fsla._tree import Leaves, Scalar, Tree, axpy, dense, scale
from fsla.problems._problem import Point

Where = tuple[Point, Any]
"""A point and the estimator's memory there."""
Gradient = Callable[[Point, Any], Leaves]
Direction = Callable[[Gradient, Where, Where, Tree, Scalar], Tree]


@dataclass(frozen=True)
class NoMomentum:
    def __call__(self, gradient: Gradient, new: Where, old: Where, d: Tree, eta: Scalar) -> Tree:
        return dense(gradient(*new))


@dataclass(frozen=True)
class EMA:
    def __call__(self, gradient: Gradient, new: Where, old: Where, d: Tree, eta: Scalar) -> Tree:
        return axpy(1.0 - eta, d, scale(eta, gradient(*new)))


@dataclass(frozen=True)
class STORM:
    def __call__(self, gradient: Gradient, new: Where, old: Where, d: Tree, eta: Scalar) -> Tree:
        keep = 1.0 - eta
        return axpy(keep, d, axpy(-keep, gradient(*old), gradient(*new)))


@dataclass(frozen=True)
class SPIDER(STORM):
    """Where η is the number 1, the old point is not asked."""

    def __call__(self, gradient: Gradient, new: Where, old: Where, d: Tree, eta: Scalar) -> Tree:
        if isinstance(eta, float) and eta == 1.0:
            return dense(gradient(*new))
        return super().__call__(gradient, new, old, d, eta)


MOMENTA: dict[str, Direction] = {"storm": STORM(), "average": EMA(), "none": NoMomentum()}


def by_name(name: str) -> Direction:
    return pick(name, MOMENTA, "momentum")
