"""What becomes of (λ_j, d_j) while no batch holds sample j: known beforehand, so it can wait until j is seen again.

With a weight for each sample, the derivative by λ has rows for the batch alone. For all other rows step k is

    λ ← Π(λ - α_k d)     d ← κ_k d        κ = 1 - η, or 0 where d remembers nothing

and from step t to step k, without a visit between,

    d(k) = D(t,k) d(t)                D(t,k) = κ_t κ_{t+1} … κ_{k-1}
    λ(k) = Π(λ(t) - A(t,k) d(t))      A(t,k) = Σ_{s=t}^{k-1} α_s D(t,s)

where λ moves by the new direction in the place of the old one, with α_s κ_s for α_s. A box Π commutes with this if
κ ≥ 0 and α ≥ 0: d keeps its sign, so λ moves in one direction, and stays at a bound once it is there. A ball does not
commute: where a row goes depends on all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fsla._storage._json_values import number, record
from fsla._tree import Tree
from fsla.steps._projections import Box
from fsla.train._schema import check_like, check_numbers

BLOCK = 2048
"""Steps of a block; a further step costs a sweep over a block's numbers, and over a number for each full block."""
FLOOR = 1e-290
"""D below this is 0, since numbers near the smallest of float64 are slow to compute with and never reach 0."""
_DECAY = record(
    k=number(int, 0),
    block=number(int, 1, 1 << 20),
    steps=lambda value: isinstance(value, Tensor),
    blocks=lambda value: isinstance(value, Tensor),
)
"""What a saved decay must be."""
CHUNK = 1 << 20
"""Rows that a sweep brings up to date at once."""


class Decay:
    """D(t, k) and A(t, k) for every t, at the present k, which `append` moves on by one.

    D and A compose: from t over m to k they are D(t,m) D(m,k) and A(t,m) + D(t,m) A(m,k). So two tables serve, from
    each step to the end of its block (or to k, in the last block), and from the end of each block to k. Of both, only
    the last block's steps and the full blocks change with k:

        A ← A + α_k D      D ← κ_k D

    Nothing is divided or subtracted, so that κ = 0 and products that underflow are as exact as all else, and rates are
    asked for when they are used and not before. 16 bytes a step, in float64 whatever λ is.
    """

    def __init__(self, device: torch.device | str = "cpu", block: int = BLOCK) -> None:
        self.k = 0
        self.block = block
        self._steps = _fresh(block, device)
        self._blocks = _fresh(1, device)

    def append(self, alpha: float, keep: float) -> None:
        """Move on to k + 1, by a step with these α and κ."""
        full = self.k // self.block
        begin = full * self.block
        self._steps = _with_room(self._steps, self.k + 2)
        self._blocks = _with_room(self._blocks, full + 2)
        changing = (self._steps[:, begin : self.k + 1], self._blocks[:, :full])
        for D, A in changing:
            A.add_(D, alpha=alpha)
            D.mul_(keep)
        self.k += 1
        if self.k % self.block == 0:
            for D, _ in changing:
                D.masked_fill_(D.abs() < FLOOR, 0.0)

    def decay_from(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return D(t, k) and A(t, k) for a vector of steps t ≤ k."""
        D, A = self._steps[:, t]
        D_block, A_block = self._blocks[:, t // self.block]
        return D * D_block, A + D * A_block

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the tables."""
        blocks = self.k // self.block + 1
        return {
            "k": self.k,
            "block": self.block,
            "steps": self._steps[:, : self.k].clone(),
            "blocks": self._blocks[:, :blocks].clone(),
        }

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Any], device: torch.device | str) -> Decay:
        """Return the decay of a `state_dict`, as a copy."""
        decay = cls(device, saved["block"])
        decay.k = saved["k"]
        decay._steps = _with_room(saved["steps"].to(device), decay.k + 1)
        decay._blocks = _with_room(saved["blocks"].to(device), decay.k // decay.block + 1)
        return decay


def _fresh(count: int, device: torch.device | str) -> Tensor:
    """Return (D, A) of no steps at all: (1, 0)."""
    table = torch.zeros(2, count, dtype=torch.float64, device=device)
    table[0] = 1.0
    return table


def _with_room(table: Tensor, count: int) -> Tensor:
    """Return the table, twice as long if it has not `count` places."""
    length = table.shape[1]
    if length >= count:
        return table
    longer = _fresh(max(2 * length, count), table.device)
    longer[:, :length] = table
    return longer


class RowTable:
    """(λ_j, d_j) of many samples, each as it was at its last visit, and when that was. Changed in place.

    Args:
        lam, d: a row for each sample in every tensor.
        last: the step of each row's last visit, as int32.
        decay: what has become of the rows since.
        box: the box that λ stays in; None for none.

    In float32 a weight takes 4 bytes each for λ, d and its last visit. Sums are taken in float64 and rounded once.
    """

    def __init__(self, lam: Tree, d: Tree, last: Tensor, decay: Decay, box: Box | None) -> None:
        self.lam = lam
        self.d = d
        self.last = last
        self.decay = decay
        self.box = box

    @classmethod
    def init_rows(cls, lam: Tree, box: Box | None) -> RowTable:
        """Return copies of the first rows, with d = 0. A row outside of the box enters it when first seen."""
        rows = {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in lam.items()}
        d = {name: torch.zeros_like(t) for name, t in rows.items()}
        one = next(iter(rows.values()))
        last = torch.zeros(len(one), dtype=torch.int32, device=one.device)
        return cls(rows, d, last, Decay(one.device), box)

    def __len__(self) -> int:
        return len(self.last)

    def get_rows(self, index: Tensor | slice) -> tuple[Tree, Tree]:
        """Return λ and d of some rows as they are now."""
        D, A = self.decay.decay_from(self.last[index].long())
        lam = {}
        d = {}
        for name, t in self.d.items():
            shape = (-1,) + (1,) * (t.ndim - 1)
            before = t[index].double()
            moved = self.lam[name][index].double() - A.view(shape) * before
            if self.box is not None:
                moved = moved.clamp(self.box.low, self.box.high)
            lam[name] = moved.to(t.dtype)
            d[name] = (D.view(shape) * before).to(t.dtype)
        return lam, d

    def set_rows(self, index: Tensor, lam: Tree, d: Tree) -> None:
        """Set some rows, each named once, to what they are now."""
        for name, t in lam.items():
            self.lam[name][index] = t
            self.d[name][index] = d[name]
        self.last[index] = self.decay.k

    def sweep(self, chunk: int = CHUNK) -> Iterator[tuple[int, Tree, Tree]]:
        """Yield all rows as they are now, some at a time: the index of the first, λ and d. Changes nothing."""
        for first in range(0, len(self), chunk):
            lam, d = self.get_rows(slice(first, first + chunk))
            yield first, lam, d

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors themselves, which the next step changes."""
        return {"lam": dict(self.lam), "d": dict(self.d), "last": self.last, "decay": self.decay.state_dict()}

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Any], box: Box | None) -> RowTable:
        """Return the rows of a `state_dict`, as copies."""
        lam = {name: t.clone() for name, t in saved["lam"].items()}
        d = {name: t.clone() for name, t in saved["d"].items()}
        last = saved["last"].clone()
        return cls(lam, d, last, Decay.from_state_dict(saved["decay"], last.device), box)


def check_rows(saved: Any, table: Mapping[str, Any]) -> None:
    """Raise a ValueError unless a value is the `state_dict` of as many rows, of the same form, as those of a table."""
    if not isinstance(saved, Mapping) or saved.keys() != table.keys() or not _DECAY(saved["decay"]):
        raise ValueError("Cannot load state: its rows are malformed.")
    for name in ("lam", "d", "last"):
        check_like(name, saved[name], table[name])
    decay = saved["decay"]
    k, block = decay["k"], decay["block"]
    shapes = {"steps": (2, k), "blocks": (2, k // block + 1)}
    if any(decay[name].shape != shape or decay[name].dtype != torch.float64 for name, shape in shapes.items()):
        raise ValueError(f"Cannot load state: the decay of its rows is not of {k} steps.")
    check_numbers("rows", [saved["lam"], saved["d"], decay["steps"], decay["blocks"]])
    if not bool(((saved["last"] >= 0) & (saved["last"] <= k)).all()):
        raise ValueError(f"Cannot load state: it has rows that were touched after step {k}.")
