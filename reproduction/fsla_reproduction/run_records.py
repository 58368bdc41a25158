"""What the record of an algorithm's run holds: measured quantities as JSON, oracle calls, and progress."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum

import torch

from fsla._state_tree import tensors_of
from fsla._storage._json_values import finite, named, plain
from fsla._torch import foreach_norm
from fsla.algorithms._base import State
from fsla.problems._wrappers import OracleCounts
from fsla.steps._updates import Variable
from fsla.train._records import Record


class Status(StrEnum):
    """Status of a run of `run_algorithm`. Records hold the values, which are plain strings."""

    RUNNING = "running"
    FINISHED = "finished"
    BUDGET = "budget"
    DIVERGED = "diverged"


RESERVED = (
    "step", "seconds", "preparation_seconds", "engine", "oracles", "status", "diverged", "diverged_size", "not_finite",
)  # fmt: skip
"""The names in a record that are the loop's own."""


def work(counts: OracleCounts) -> int:
    """Return the passes over a batch that oracle calls took: gradients and products, a joint pass once.

    ∂_λ F is not counted: it comes with ∂_ω F, or without a pass.

    Args:
        counts: the oracle calls.

    Returns:
        The number of passes.
    """
    products = counts.hvp + counts.mixed_hvp + counts.mixed_hvp_transpose - counts.joint
    return counts.grad + counts.forward + counts.outer_grad_omega + products


def measured(metrics: object) -> tuple[Record, list[str]]:
    """Return what was measured as JSON, None in the place of numbers that are not finite, and where these were."""
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"'eval_fn' must return a mapping from names to numbers. Got {type(metrics).__name__} instead. "
            'Write {"loss": loss}.'
        )
    if taken := [name for name in RESERVED if name in metrics]:
        raise ValueError(
            f"What 'eval_fn' returns must have names of its own. Got {', '.join(map(repr, taken))}, which the loop "
            "itself writes into each record. Choose other names."
        )
    bad: list[str] = []
    return {name: finite(plain(x, str(name)), str(name), bad) for name, x in named(metrics, "'eval_fn'")}, bad


def health(state: State) -> dict[str, float]:
    """Return the largest absolute value in each part of a state; NaN if one of the part's numbers is NaN.

    The parts are the fields that hold tensors, except what the step sizes measured. The memory of a variable's update
    is a part by itself, such as "omega.memory". The host waits for the device once.

    Args:
        state: the state.

    Returns:
        The sizes, by the names of the parts.
    """
    parts: dict[str, object] = {}
    for f in fields(state):
        part = getattr(state, f.name)
        if isinstance(part, Variable):
            parts |= {f.name: part.value, f"{f.name}.memory": part.memory}
        elif f.name != "measured":
            parts[f.name] = part
    tensors = {
        name: [t for t in tensors_of(part) if t.dtype.is_floating_point and t.numel()] for name, part in parts.items()
    }
    every = [t for group in tensors.values() for t in group]
    if not every:
        return {}
    with torch.no_grad():
        left = iter(torch.stack(foreach_norm(every, ord=math.inf)).tolist())
    return {name: _largest([next(left) for _ in group]) for name, group in tensors.items() if group}


def _largest(sizes: list[float]) -> float:
    return math.nan if any(map(math.isnan, sizes)) else max(sizes)
