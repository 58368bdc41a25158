"""FSLA, SOBA and MA-SOBA for any model: three torch optimisers, one loop.

opt = fsla.FSLA(model, weights, inner_loss=inner, outer_loss=outer)
info = opt.step(train_batch, trusted_batch)
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
from torch import nn

from fsla._checks import pick
from fsla._tree import Leaves, Tree, axpy, dense, scale, sub
from fsla.algorithms._alternating import SharedBatchWarning
from fsla.problems._nest import map_tensors
from fsla.problems._problem import Inner, Point
from fsla.steps._momentum import by_name
from fsla.train._bilevel import BilevelOptimizer
from fsla.train._guard import StepInfo
from fsla.train._module import OuterModules


class FSLA(BilevelOptimizer):
    """Algorithm 1: λ by d, then ω and v at the old ω, then d from the gradient at the new point.

    Args:
        momentum: of d: "none", "average" or "storm", with weight `eta` for the new gradient.
        v_at: where v moves: at the "old" ω, as in the algorithm, or at the "new" one, for a gradient more.
    """

    def __init__(
        self,
        model: nn.Module,
        outer: OuterModules,
        *,
        momentum: Literal["none", "average", "storm"] = "none",
        eta: float = 0.1,
        v_at: Literal["old", "new"] = "old",
        **options: Any,
    ) -> None:
        self._filter = by_name(momentum)
        pick(v_at, {"old": 0, "new": 0}, "place where v moves (v_at)")
        _check_eta(eta, "FSLA")
        super().__init__(model, outer, **options)
        self._momentum = momentum
        self._eta = eta
        self._v_at = v_at
        self._warned = False

    def _first_direction(self, inner_batch: Any, outer_batch: Any, seed: int) -> Tree:
        return dense(self._direction(self.problem.here, self._v, inner_batch, outer_batch, seed))

    def _step(self, inner_batch: Any, outer_batch: Any, fresh: tuple[Any, Any] | None, seed: int) -> StepInfo:
        problem = self.problem
        assert self._d is not None
        storm = self._momentum == "storm"
        if storm and fresh is None and not self._warned:
            warnings.warn(_BIASED, SharedBatchWarning, stacklevel=4)
            self._warned = True
        old = (problem.here, self._v)
        if storm:  # the only one that looks back, at tensors that are about to move
            old = map_tensors(torch.clone, old)
        self._move_lam(self._d)
        here = problem.here
        inner = problem.inner_at(here, inner_batch, seed)
        outer = problem.outer_at(here, outer_batch, seed + 1)
        if self._v_at == "old":
            self._move_v(inner.hvp(self._v), outer.d_omega)  # first, since a product leaves the gradient too
        inner_loss = inner.value
        self._move_omega(inner.grad)
        if self._v_at == "new":
            outer = problem.outer_at(problem.here, outer_batch, seed + 1)
            self._move_v(problem.inner_at(problem.here, inner_batch, seed).hvp(self._v), outer.d_omega)
        batches = (inner_batch, outer_batch) if fresh is None else fresh
        own_seed = seed if fresh is None else seed + 2  # Other batches draw other masks.

        def direction(at: Point, v: Tree) -> Leaves:
            return self._direction(at, v, *batches, own_seed, direct=outer.reads_lam)

        self._d = self._filter(direction, (problem.here, self._v), old, self._d, self._eta)
        return self._info(inner_loss, outer.value)

    def _direction(
        self, at: Point, v: Tree, inner_batch: Any, outer_batch: Any, seed: int, *, direct: bool | None = True
    ) -> Leaves:
        jv = self.problem.inner_at(at, inner_batch, seed).cross(v)
        if not direct:
            return scale(-1.0, jv)
        return sub(self.problem.outer_at(at, outer_batch, seed + 1).d_lam, jv)


class SOBA(BilevelOptimizer):
    """All three directions at one point, on one inner and one outer batch: the cheapest step."""

    def _first_direction(self, inner_batch: Any, outer_batch: Any, seed: int) -> Tree:
        return {name: torch.zeros_like(t) for name, t in self.problem.here.lam.items()}

    def _step(self, inner_batch: Any, outer_batch: Any, fresh: tuple[Any, Any] | None, seed: int) -> StepInfo:
        assert self._d is not None
        problem = self.problem
        here = problem.here
        inner: Inner = problem.inner_at(here, inner_batch, seed)
        outer = problem.outer_at(here, outer_batch, seed + 1)
        hv, jv = inner.hvp_cross(self._v)
        gradient = inner.grad
        inner_loss = inner.value
        b = outer.d_omega
        direction = sub(outer.d_lam, jv)
        before = self._d
        self._d = self._filtered(dense(direction))
        self._move_v(hv, b)
        self._move_omega(gradient)
        self._move_lam(self._moves_by(before))
        return self._info(inner_loss, outer.value)

    def _filtered(self, direction: Tree) -> Tree:
        return direction

    def _moves_by(self, before: Tree) -> Tree:
        assert self._d is not None
        return self._d


class MASOBA(SOBA):
    """SOBA with a moving average of λ's direction, and λ moved by that of the step before."""

    def __init__(self, model: nn.Module, outer: OuterModules, *, eta: float = 0.1, **options: Any) -> None:
        _check_eta(eta, "MASOBA")
        super().__init__(model, outer, **options)
        self._eta = eta

    def _filtered(self, direction: Tree) -> Tree:
        assert self._d is not None
        return axpy(1 - self._eta, self._d, scale(self._eta, direction))

    def _moves_by(self, before: Tree) -> Tree:
        return before


_BIASED = (
    "STORM needs batches for λ's direction that are drawn independently of those that move the model and v; on shared "
    "ones its direction keeps a bias for ever. Give step(..., fresh=(inner_batch, outer_batch)), or take "
    "momentum='none' or 'average'."
)


def _check_eta(eta: float, owner: str) -> None:
    if not 0 < eta <= 1:
        raise ValueError(f"The 'eta' of {owner} must lie in (0, 1]. Got {eta} instead.")
