"""Arithmetic on trees, the form that λ, ω, v and d take everywhere.

A tree is a mapping from names to tensors. Operations pair tensors by name, never by position, refuse trees that
disagree in keys, shapes, dtypes or devices (PyTorch would broadcast or promote them silently), and never write in
place: an old state stays valid. Scalars that are computed stay 0-d tensors, so the host never waits for the device.

A derivative by λ may hold a `RowSparse` for a tensor: where each of N samples has a weight, the derivative on a batch
is zero but for the batch's rows. Sums with a tensor give a tensor; nothing of the length N is allocated before that.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeGuard, TypeVar, overload

import torch
from torch import Tensor

from fsla._torch import foreach_add, foreach_add_, foreach_copy_, foreach_mul, foreach_norm

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Scalar = float | Tensor


@dataclass(frozen=True, eq=False)
class RowSparse:
    """A tensor of `length` rows, zero but for those in `index`; values of a row that is named twice add up."""

    index: Tensor
    values: Tensor
    length: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.length, *self.values.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def scaled(self, a: Scalar) -> RowSparse:
        return replace(self, values=a * self.values)

    def detach(self) -> RowSparse:
        return replace(self, values=self.values.detach())

    def plus(self, a: Scalar, other: RowSparse) -> RowSparse:
        """Return self + a other."""
        if self.index is other.index:
            return replace(self, values=self.values + a * other.values)
        index = torch.cat([self.index, other.index])
        return RowSparse(index, torch.cat([self.values, a * other.values]), self.length)

    def dense(self) -> Tensor:
        return self.values.new_zeros(self.shape).index_add_(0, self.index, self.values)


Leaf = Tensor | RowSparse
Tree = Mapping[str, Tensor]
Leaves = Mapping[str, Leaf]
"""A tree that may hold rows: what a derivative by λ is."""
L = TypeVar("L", bound=Leaf)


def dense(x: Leaves) -> Tree:
    """Return x with every `RowSparse` written out."""
    return {name: _dense(t) for name, t in x.items()}


def _dense(t: Leaf) -> Tensor:
    return t.dense() if isinstance(t, RowSparse) else t


def check(x: object, name: str) -> None:
    """Raise unless x is a non-empty mapping from names to floating-point tensors."""
    if not isinstance(x, Mapping):
        hint = ' Write {"name": tensor}.' if isinstance(x, Tensor) else ""
        raise TypeError(f"{name} must be a mapping from names to tensors. Got {type(x).__name__} instead.{hint}")
    if not x:
        raise ValueError(f"{name} must hold at least one tensor. Got an empty mapping instead.")
    for key, t in x.items():
        if not isinstance(key, str) or not isinstance(t, Tensor):
            raise TypeError(
                f"{name} must map names to tensors. Got {type(key).__name__} -> {type(t).__name__} at {key!r} instead."
            )
        if not t.dtype.is_floating_point:
            raise TypeError(f"{name}[{key!r}] must be a real floating-point tensor. Got {t.dtype} instead.")


def aligned(x: Mapping[str, L], like: Leaves) -> list[L]:
    """Return the tensors of x in the order of `like`; raises if the two trees are not of one form."""
    if x.keys() != like.keys():
        raise ValueError(f"Trees must have the same keys, but only one of them has {sorted(x.keys() ^ like.keys())}.")
    out = []
    for name, b in like.items():
        a = x[name]
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            raise ValueError(
                f"Trees must agree in shape, dtype and device, but at {name!r} one holds {_form(a)} and the other "
                f"{_form(b)}. Convert one with .reshape or .to before the call."
            )
        out.append(a)
    return out


def _form(t: Leaf) -> str:
    return f"{tuple(t.shape)} {t.dtype} on {t.device}"


def _tensors(leaves: list[Leaf]) -> TypeGuard[list[Tensor]]:
    """Whether none of the leaves is rows."""
    return RowSparse not in map(type, leaves)


@overload
def axpy(a: Scalar, x: Leaves, y: Tree) -> Tree: ...
@overload
def axpy(a: Scalar, x: Tree, y: Leaves) -> Tree: ...
@overload
def axpy(a: Scalar, x: Leaves, y: Leaves) -> Leaves: ...
def axpy(a: Scalar, x: Leaves, y: Leaves) -> Leaves:
    """Return y + a x."""
    tensors = list(y.values())
    other = aligned(x, y)
    if not (_tensors(tensors) and _tensors(other)):
        return {name: _add(u, a, t) for name, u, t in zip(y, tensors, other, strict=True)}
    if not tensors:
        return {}
    if isinstance(a, Tensor):
        total = foreach_mul(other, a)
        foreach_add_(total, tensors)
        return dict(zip(y, total, strict=True))
    return dict(zip(y, foreach_add(tensors, other, alpha=a), strict=True))


def _add(y: Leaf, a: Scalar, x: Leaf) -> Leaf:
    """y + a x; rows if both are."""
    if isinstance(x, RowSparse):
        return y.plus(a, x) if isinstance(y, RowSparse) else y.index_add(0, x.index, a * x.values)
    return (a * x).index_add_(0, y.index, y.values) if isinstance(y, RowSparse) else y + a * x


class Shifted(Mapping[str, Tensor]):
    """The tree y + a x, computed at its first read. A module whose parameters are y can move there instead."""

    def __init__(self, a: Tensor, x: Tree, y: Tree) -> None:
        self.a, self.x, self.y = a, dict(zip(y, aligned(x, y), strict=True)), y
        self._tree: Tree | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._tree is None:
            self._tree = axpy(self.a, self.x, self.y)
        return self._tree[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.y)

    def __len__(self) -> int:
        return len(self.y)


def lasting(x: Tree) -> Tree:
    """Return a tree of the form of x that is there already: x itself, or what it is shifted from."""
    return x.y if isinstance(x, Shifted) else x


@overload
def sub(x: Tree, y: Leaves) -> Tree: ...
@overload
def sub(x: Leaves, y: Tree) -> Tree: ...
@overload
def sub(x: Leaves, y: Leaves) -> Leaves: ...
def sub(x: Leaves, y: Leaves) -> Leaves:
    """Return x - y."""
    return axpy(-1.0, y, x)


@overload
def scale(a: Scalar, x: Tree) -> Tree: ...
@overload
def scale(a: Scalar, x: Leaves) -> Leaves: ...
def scale(a: Scalar, x: Leaves) -> Leaves:
    """Return a x."""
    tensors = list(x.values())
    if not _tensors(tensors):
        return {name: t.scaled(a) if isinstance(t, RowSparse) else a * t for name, t in x.items()}
    return dict(zip(x, foreach_mul(tensors, a), strict=True)) if tensors else {}


def scale_each(a: Mapping[str, Scalar], x: Tree) -> Tree:
    """Return the tensors of x, each times its number; those without a number times 0."""
    factors = [a.get(name, 0.0) for name in x]
    numbers = [factor for factor in factors if not isinstance(factor, Tensor)]
    if len(numbers) < len(factors):
        return {name: factor * t for factor, (name, t) in zip(factors, x.items(), strict=True)}
    return dict(zip(x, foreach_mul(list(x.values()), numbers), strict=True))


def dot(x: Leaves, y: Leaves) -> Tensor:
    """Return <x, y> as a 0-d tensor."""
    tensors, other = [_dense(t) for t in x.values()], [_dense(t) for t in aligned(y, x)]
    if any(is_sharded(t) for t in tensors):  # DTensor cannot be concatenated.
        return whole(torch.stack([(a * b).sum() for a, b in zip(tensors, other, strict=True)]).sum())
    return (_joined(tensors) * _joined(other)).sum()


def _joined(tensors: list[Tensor]) -> Tensor:
    """The coordinates of tensors as one vector, by one kernel."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([t.reshape(-1) for t in tensors])


def norm(x: Leaves) -> Tensor:
    """Return the Euclidean norm of x as a 0-d tensor."""
    total: Tensor = torch.linalg.vector_norm(torch.stack(foreach_norm(list(dense(x).values()))))
    return whole(total)


def copy_(to: list[Tensor], source: list[Tensor]) -> None:
    """Write tensors into others of the same shapes, in one kernel where they are on a GPU."""
    with torch.no_grad():
        if any(is_sharded(t) for t in to):  # DTensor has no fused copy.
            for t, value in zip(to, source, strict=True):
                t.copy_(value)
        elif to:
            foreach_copy_(to, source)


def is_sharded(t: object) -> TypeGuard[DTensor]:
    """Whether a tensor is spread over several processes. The module that has such tensors takes long to import."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def local_part(t: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return t.to_local() if is_sharded(t) else t


def spread(t: Tensor, like: Tensor) -> Tensor:
    """A tensor that every process has, spread as another one is."""
    t = t.to(like.device, like.dtype)
    if not is_sharded(like):
        return t
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(t, like.device_mesh, like.placements, src_data_rank=None)


def whole(t: Tensor) -> Tensor:
    """All of a tensor that may be spread, for each process."""
    return t.full_tensor() if is_sharded(t) else t


@overload
def detach(x: Tree) -> Tree: ...
@overload
def detach(x: Leaves) -> Leaves: ...
def detach(x: Leaves) -> Leaves:
    return {name: t.detach() for name, t in x.items()}


def to(x: Tree, to: torch.device | torch.dtype | str) -> Tree:
    """Return x on another device, or in another dtype."""
    return {name: t.to(to) for name, t in x.items()}


def zeros_like(x: Leaves) -> Tree:
    return {name: _zeros(t) for name, t in x.items()}


def _zeros(t: Leaf) -> Tensor:
    if is_sharded(t):
        return torch.zeros_like(t)
    return torch.zeros(t.shape, dtype=t.dtype, device=t.device)


def each(function: Callable[[Tensor], Tensor], x: Tree) -> Tree:
    """Return the tree with a function applied to every tensor."""
    return {name: function(t) for name, t in x.items()}


def where(condition: Tensor, x: Tree, y: Tree) -> Tree:
    """Return x where a 0-d tensor is true, else y."""
    return {name: torch.where(condition, t, y[name]) for name, t in x.items()}


def clone(x: Tree) -> Tree:
    """Return a copy, cut off from any graph."""
    return {name: t.detach().clone() for name, t in x.items()}


def scalar(value: float, like: Tree) -> Tensor:
    """Return a 0-d tensor of the dtype and device of a tree."""
    first = next(iter(like.values()))
    return torch.full((), value, dtype=first.dtype, device=first.device)


def is_finite(x: Leaves) -> bool:
    """Whether x holds no NaN or infinity. Asks the device."""
    return all(bool((t.values if isinstance(t, RowSparse) else t).isfinite().all()) for t in x.values())


def size(x: Leaves) -> int:
    """Return the number of coordinates of x."""
    return sum(math.prod(t.shape) for t in x.values())


def flatten(x: Leaves) -> Tensor:
    """Return the coordinates of x as one vector."""
    return torch.cat([_dense(t).reshape(-1) for t in x.values()])


def unflatten(flat: Tensor, like: Leaves) -> Tree:
    """Return the tree of the form of `like` whose coordinates are `flat`."""
    parts = torch.split(flat, [math.prod(t.shape) for t in like.values()])
    return {
        name: part.reshape(t.shape).to(t.device, t.dtype) for (name, t), part in zip(like.items(), parts, strict=True)
    }


def basis(like: Leaves) -> Iterator[Tree]:
    """Yield the unit trees e_1, e_2, … of the form of `like`."""
    one = torch.zeros_like(flatten(like))
    for i in range(one.numel()):
        yield unflatten(one.index_fill(0, torch.tensor(i, device=one.device), 1), like)
