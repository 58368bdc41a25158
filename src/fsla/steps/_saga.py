"""SAGA: a table of the last derivatives on each of N fixed batches, and their mean.

    D = g_i - T_i + mean T,      mean T ← mean T + (g_i - T_i) / N,      T_i ← g_i

The noise of D goes to zero as the iterates converge, at the price of N trees. Tables start at zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsla._tree import Leaves, Tree, dense

Table = dict[str, Tree]
"""Of each tensor of a tree what N batches "said", and the "mean"."""


def empty(like: Tree, count: int) -> Table:
    last = {name: t.new_zeros((count, *t.shape)) for name, t in like.items()}
    return {"said": last, "mean": {name: torch.zeros_like(t) for name, t in like.items()}}


def corrected(g: Leaves, number: Tensor, table: Table) -> tuple[Tree, Table]:
    """The direction, and the table with the new gradient of batch `number`."""
    index = number.reshape(1)
    last = {}
    mean = {}
    direction = {}
    for name, t in dense(g).items():
        before = table["said"][name]
        change = t - before.index_select(0, index)[0]
        direction[name] = change + table["mean"][name]
        mean[name] = table["mean"][name] + change / len(before)
        last[name] = before.index_copy(0, index, t[None])
    return direction, {"said": last, "mean": mean}
