"""What a run says of itself: records that are JSON, how it stands, and what it has asked for."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from fsla._json_values import finite, named, plain
from fsla.problems._counted import Counts

Record = dict[str, Any]


class Status(StrEnum):
    """How a run stands. Records hold the values, which are plain strings."""

    RUNNING = "running"
    FINISHED = "finished"
    BUDGET = "budget"
    DIVERGED = "diverged"


OWN = (
    "step", "seconds", "preparation_seconds", "engine", "oracles", "status", "diverged", "diverged_size", "not_finite",
)  # fmt: skip
"""The names in a record that are the loop's own."""


def work(counts: Counts) -> int:
    """What a run has asked for, in passes over a batch: gradients and products, a joint pass once.

    ∂_λ F is not among them: it comes with ∂_ω F, or without a pass.
    """
    products = counts.hvp + counts.cross + counts.cross_t - counts.joint
    return counts.grad + counts.forward + counts.d_omega + products


def measured(metrics: object) -> tuple[Record, list[str]]:
    """What was measured as JSON, with None in the place of numbers that are not finite; and where these were."""
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"'measure' must return a mapping from names to numbers. Got {type(metrics).__name__} instead. "
            'Write {"loss": loss}.'
        )
    if taken := [name for name in OWN if name in metrics]:
        raise ValueError(
            f"What 'measure' returns must have names of its own. Got {', '.join(map(repr, taken))}, which the loop "
            "itself writes into each record. Choose other names."
        )
    bad: list[str] = []
    return {name: finite(plain(x, str(name)), str(name), bad) for name, x in named(metrics, "'measure'")}, bad
