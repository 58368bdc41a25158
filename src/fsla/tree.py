"""Arithmetic on trees, the form that λ, ω, v and d take everywhere.

A tree is a mapping from names to tensors. Operations pair tensors by name, never by position, refuse trees that
disagree in keys, shapes, dtypes or devices (PyTorch would broadcast or promote them silently), and never write in
place: an old state stays valid. Scalars that are computed stay 0-d tensors, so the host never waits for the device.

A hypergradient may hold `Rows` for a tensor: where each of N samples has a weight, the derivative on a batch
is zero but for the batch's rows. Sums with a tensor give a tensor; nothing of the length N is made before that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

Tree = Mapping[str, Tensor]
Scalar = float | Tensor


@dataclass(frozen=True, eq=False)
class Rows:
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

    def dense(self) -> Tensor:
        return self.values.new_zeros(self.shape).index_add_(0, self.index, self.values)


def dense(x: Tree) -> Tree:
    """Returns x with every `Rows` written out."""
    return {name: t.dense() if isinstance(t, Rows) else t for name, t in x.items()}


def _has_rows(x: Tree) -> bool:
    return any(isinstance(t, Rows) for t in x.values())


def check(x: object, name: str) -> None:
    """Raises unless x is a non-empty mapping from names to floating-point tensors."""
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


def row(x: Tree, like: Tree) -> list[Tensor]:
    """Returns the tensors of x in the order of `like`; raises if the two trees are not of one form."""
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


def _form(t: Tensor) -> str:
    return f"{tuple(t.shape)} {t.dtype} on {t.device}"


def axpy(a: Scalar, x: Tree, y: Tree) -> Tree:
    """Returns y + a x."""
    xs, ys = row(x, y), list(y.values())
    if _has_rows(x) or _has_rows(y):
        return {name: _add(u, a, t) for name, t, u in zip(y, xs, ys, strict=True)}
    if isinstance(a, Tensor):
        return dict(zip(y, torch._foreach_add(ys, torch._foreach_mul(xs, a)), strict=True))
    return dict(zip(y, torch._foreach_add(ys, xs, alpha=a), strict=True))


def _add(y: Tensor | Rows, a: Scalar, x: Tensor | Rows) -> Tensor:
    """y + a x, where either may be rows; rows if both are."""
    if isinstance(x, Rows):
        if not isinstance(y, Rows):
            return y.index_add(0, x.index, a * x.values)
        if x.index is y.index:
            return cast(Tensor, Rows(x.index, y.values + a * x.values, x.length))
        both = torch.cat([y.index, x.index]), torch.cat([y.values, a * x.values])
        return cast(Tensor, Rows(*both, x.length))
    return (a * x).index_add_(0, y.index, y.values) if isinstance(y, Rows) else y + a * x


def _scaled(a: Scalar, x: Tensor | Rows) -> Tensor:
    return cast(Tensor, Rows(x.index, a * x.values, x.length)) if isinstance(x, Rows) else a * x


def sub(x: Tree, y: Tree) -> Tree:
    """Returns x - y."""
    if _has_rows(x) or _has_rows(y):
        return axpy(-1.0, y, x)
    return dict(zip(x, torch._foreach_sub(list(x.values()), row(y, x)), strict=True))


def scale(a: Scalar, x: Tree) -> Tree:
    """Returns a x."""
    if _has_rows(x):
        return {name: _scaled(a, t) for name, t in x.items()}
    return dict(zip(x, torch._foreach_mul(list(x.values()), a), strict=True))


def dot(x: Tree, y: Tree) -> Tensor:
    """Returns <x, y> as a 0-d tensor."""
    x, y = dense(x), dense(y)
    parts = [(a * b).sum() for a, b in zip(x.values(), row(y, x), strict=True)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def norm(x: Tree) -> Tensor:
    """Returns the Euclidean norm of x as a 0-d tensor."""
    total: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(dense(x).values()))))
    return total


def detach(x: Tree) -> Tree:
    return {name: t.detach() for name, t in x.items()}


def zeros_like(x: Tree) -> Tree:
    return {name: torch.zeros_like(t) for name, t in x.items()}


def size(x: Tree) -> int:
    """Returns the number of coordinates of x."""
    return sum(t.numel() for t in x.values())


def flatten(x: Tree) -> Tensor:
    """Returns the coordinates of x as one vector."""
    return torch.cat([t.reshape(-1) for t in x.values()])


def unflatten(flat: Tensor, like: Tree) -> Tree:
    """Returns the tree of the form of `like` whose coordinates are `flat`."""
    parts = torch.split(flat, [t.numel() for t in like.values()])
    return {name: part.reshape(t.shape).to(t) for (name, t), part in zip(like.items(), parts, strict=True)}


def basis(like: Tree) -> Iterator[Tree]:
    """Yields the unit trees e_1, e_2, … of the form of `like`."""
    one = torch.zeros_like(flatten(like))
    for i in range(one.numel()):
        yield unflatten(one.index_fill(0, torch.tensor(i, device=one.device), 1), like)
