"""Data parallel: the batches of a problem shared out among processes, with the same numbers as in one.

Every oracle is a mean over the batch, plus terms that no sample enters. Of a batch of B samples rank r takes b_r, and

    the oracle on the whole batch = Σ_r (b_r / B) · the oracle on rank r's share

which is one message: an all-reduce of the answer as one vector. All else (rates, v, d, CG's scalars) is then computed
on every rank from equal numbers, so that every algorithm runs unchanged. Where each rank draws samples of its own, a
batch is a `Share`; with a weight λ_j for each sample, d_j and the rows of J v then live on the rank that owns sample j,
and nothing of λ's length travels.

    torchrun --nproc-per-node 2 train.py     # which uses fsla.Reduced(problem), and draws the same batches on each rank
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from fsla._tree import Leaf, Leaves, Rows, Tree, dense, zeros_like
from fsla.distributed import ALONE, join
from fsla.problems._batches import Batch, Share
from fsla.problems._nest import map_tensors, tensors
from fsla.problems._problem import Inner, Oracles, Outer, Point


class Reduced:
    """A problem whose oracles are computed on this rank's share of the batch, and averaged over all ranks.

    Args:
        problem: any problem whose losses are means over the samples of a batch.
        group: the processes that share the work; by default all that torchrun started, or this one alone.

    Every rank must ask for the same oracles in the same order, on the same batches: draw them from the same seed. A
    batch is a tensor, or a nest of tensors, with a row for each sample; where there are fewer samples than ranks, some
    ranks wait. A batch that is a `fsla.Share` is this rank's own samples of a batch that no rank holds: other ranks
    bring others, none of them of the same rows of λ.
    """

    def __init__(self, problem: Oracles, group: dist.ProcessGroup | None = None) -> None:
        self.ranks = join()
        alone = not dist.is_initialized() or (group is None and self.ranks is ALONE)
        self._problem = problem
        self._group = None if alone else (dist.group.WORLD if group is None else group).group_name  # type: ignore[union-attr]
        self.rank = 0 if alone else dist.get_rank(group)
        self.world = 1 if alone else dist.get_world_size(group)
        self.messages = 0
        self.bytes = 0

    def inner_at(self, at: Point, batch: Batch, seed: int | None = None) -> Inner:
        part = _Part(self, batch)
        view = self._problem.inner_at(at, part.batch, seed)
        return _ReducedInner(view if part.size else None, part, at, view.unit)

    def outer_at(self, at: Point, batch: Batch, seed: int | None = None) -> Outer:
        part = _Part(self, batch)
        view = self._problem.outer_at(at, part.batch, seed) if part.size else None
        return _ReducedOuter(view, part, at, reads_lam=bool(stated(self._problem, "direct", True)))

    def rows(self, batch: Batch) -> Tensor | None:
        """The rows of λ that a batch reads, where the problem knows them."""
        found: Tensor | None = None
        rows = stated(self._problem, "rows", None)
        if rows is not None:
            found = rows(batch)
        return found

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks, as an operation that a captured step repeats; the group goes by its name, so that
        its threads end with it."""
        if self._group is None:
            return x
        self.messages += 1
        self.bytes += x.numel() * x.element_size()
        self.ranks.messages += 1
        sent = torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", self._group)
        received: Tensor = torch.ops._c10d_functional.wait_tensor(sent)
        return received


def stated(problem: Any, name: str, otherwise: object) -> Any:
    """What a problem says of itself, through wrappers such as `fsla.GaussNewton`."""
    while not hasattr(problem, name) and hasattr(problem, "problem"):
        problem = problem.problem
    return getattr(problem, name, otherwise)


class _Part:
    """This rank's part of a batch, and how answers on it become answers on the whole.

    Of a batch that all ranks hold it is a slice, and rows of λ, which all ranks hold too, travel. A `Share` is a part
    as it comes, and its rows of λ are no other rank's: they stay, weighted as all else is.
    """

    def __init__(self, of: Reduced, batch: Batch) -> None:
        self._owned = isinstance(batch, Share)
        self._whole: Batch = batch.batch if isinstance(batch, Share) else batch
        held = tensors(self._whole)
        if not held or held[0].ndim == 0 or any(t.ndim == 0 or len(t) != len(held[0]) for t in held):
            raise TypeError(
                "A batch that is shared out among ranks must be a tensor, or a nest of tensors, with a row for each "
                f"sample. Got {type(batch).__name__} with {[tuple(t.shape) for t in held]}."
            )
        self._of = of
        self.first = 0
        self.last = self.total = len(held[0])
        self.batch: Batch = self._whole
        if isinstance(batch, Share):
            self.total = batch.total
            if not max(self.last, 1) <= self.total:
                raise ValueError(
                    f"The total of a Share must count the samples of all ranks. Got {self.total} with {self.last} on "
                    "this rank alone. Add up the ranks' numbers of samples."
                )
        else:
            self.first = self.total * of.rank // of.world
            self.last = self.total * (of.rank + 1) // of.world
            self.batch = map_tensors(lambda t: t[self.first : self.last], batch)
        self.size = self.last - self.first

    def mean(self, *answers: Leaves) -> list[Leaves]:
        """The answers on the whole batch, from this rank's, in one message, or in none where all of it stays."""
        weight = self.size / self.total
        sent = [self._sent(t) for answer in answers for t in answer.values() if not self._stays(t)]
        received = iter(self._summed(weight, sent))
        return [{name: self._received(t, weight, received) for name, t in answer.items()} for answer in answers]

    def _summed(self, weight: float, sent: list[Tensor]) -> list[Tensor]:
        if not sent:
            return []
        flat = weight * torch.cat([t.reshape(-1) for t in sent])
        parts = torch.split(self._of.summed(flat), [t.numel() for t in sent])
        return [part.view(t.shape) for part, t in zip(parts, sent, strict=True)]

    def _stays(self, t: Leaf) -> bool:
        return self._owned and isinstance(t, Rows)

    def _sent(self, t: Leaf) -> Tensor:
        """What goes into the message: a share's rows between zeros for those of the other shares."""
        if not isinstance(t, Rows):
            return t
        if len(t.index) != self.size:
            raise ValueError(
                f"A derivative by λ must have a row for each of the {self.size} samples of a share. Got {len(t.index)}."
            )
        values = t.values.new_zeros((self.total, *t.values.shape[1:]))
        values[self.first : self.last] = t.values
        return values

    def _received(self, t: Leaf, weight: float, received: Iterator[Tensor]) -> Leaf:
        if not isinstance(t, Rows):
            return next(received)
        if self._owned:
            return t.scaled(weight)
        index = self._of.rows(self._whole)
        assert index is not None
        return Rows(index, next(received), t.length)

    def no_lam(self, lam: Tree) -> Leaves:
        """The derivative by λ of a share without samples: no rows, or zeros."""
        index = self._of.rows(self._whole)
        if index is None:
            return zeros_like(lam)
        return {name: Rows(index[:0], t.new_zeros((0, *t.shape[1:])), len(t)) for name, t in lam.items()}


class _ReducedOuter:
    def __init__(self, view: Outer | None, part: _Part, at: Point, *, reads_lam: bool) -> None:
        self._view = view
        self._part = part
        self._at = at
        self._reads_lam = reads_lam
        self._d_omega: Tree | None = None
        self._d_lam: Leaves | None = None
        self._value: Tensor | None = None

    @property
    def value(self) -> Tensor:
        if self._value is None:
            self._value = _value(self._view, self._part, self._at)
        return self._value

    @property
    def d_omega(self) -> Tree:
        """∂_ω F; where F reads λ, ∂_λ F comes with the same message."""
        if self._d_omega is None:
            own = zeros_like(self._at.omega) if self._view is None else self._view.d_omega
            if self._reads_lam:
                by_lam = zeros_like(self._at.lam) if self._view is None else self._view.d_lam
                by_omega, self._d_lam = self._part.mean(own, by_lam)
            else:
                (by_omega,) = self._part.mean(own)
            self._d_omega = dense(by_omega)
        return self._d_omega

    @property
    def d_lam(self) -> Leaves:
        if self._d_lam is None:
            own = zeros_like(self._at.lam) if self._view is None else self._view.d_lam
            self._d_lam = self._part.mean(own)[0] if self._reads_lam else own
        return self._d_lam


class _ReducedInner:
    def __init__(self, view: Inner | None, part: _Part, at: Point, unit: float) -> None:
        self._view = view
        self._part = part
        self._at = at
        self._value: Tensor | None = None
        self._grad: Tree | None = None
        self.unit = unit
        """That of the passes of all ranks, this one's or others'."""

    @property
    def value(self) -> Tensor:
        if self._value is None:
            self._value = _value(self._view, self._part, self._at)
        return self._value

    @property
    def grad(self) -> Tree:
        if self._grad is None:
            own = self._no_omega if self._view is None else self._view.grad
            self._grad = dense(self._part.mean(own)[0])
        return self._grad

    @property
    def d_lam(self) -> Leaves:
        return self._part.mean(self._no_lam if self._view is None else self._view.d_lam)[0]

    def gradients(self) -> tuple[Tree, Leaves]:
        grad, by_lam = self._part.mean(*(self._nothing if self._view is None else self._view.gradients()))
        self._grad = dense(grad)
        return self._grad, by_lam

    def hvp(self, v: Tree) -> Tree:
        return dense(self._part.mean(self._no_omega if self._view is None else self._view.hvp(v))[0])

    def cross(self, v: Tree) -> Leaves:
        return self._part.mean(self._no_lam if self._view is None else self._view.cross(v))[0]

    def hvp_cross(self, v: Tree) -> tuple[Tree, Leaves]:
        h, j = self._part.mean(*(self._nothing if self._view is None else self._view.hvp_cross(v)))
        return dense(h), j

    def cross_t(self, u: Tree) -> Tree:
        return dense(self._part.mean(self._no_omega if self._view is None else self._view.cross_t(u))[0])

    def linearised(self) -> Self:
        if self._view is not None:
            self._view.linearised()
        return self

    @property
    def _no_omega(self) -> Tree:
        return zeros_like(self._at.omega)

    @property
    def _no_lam(self) -> Leaves:
        return self._part.no_lam(self._at.lam)

    @property
    def _nothing(self) -> tuple[Tree, Leaves]:
        return self._no_omega, self._no_lam


def _value(view: Inner | Outer | None, part: _Part, at: Point) -> Tensor:
    like = next(iter(at.omega.values()))
    own = like.new_zeros(()) if view is None else view.value
    found: Mapping[str, Leaf] = part.mean({"value": own})[0]
    return dense(found)["value"]
