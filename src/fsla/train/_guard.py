"""Detect divergence: a loss, v or d that is not finite, or that grows a hundredfold over all that it has been.

A quantity that rightly starts at 0 has no scale to be compared with. Its growth counts once it has stayed within its
scale for some looks, or has gone on for several looks.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import Tensor

CHECK_EVERY = 10
KEEP_EVERY = 100
GROWTH = 100.0
"""How much more than ever before a loss, v or d may be after CHECK_EVERY steps."""
KNOWN = 3
"""Looks without growth after which the scale of a quantity is known, and looks in a row that may show growth before."""
COMPARABLE = 1e-3
"""Share of the larger loss that the smaller one must have at the first look for their scales to be known then."""


class StepInfo(NamedTuple):
    """What a step saw. The numbers are 0-d tensors, so that the host need not wait for the device."""

    step: int
    inner_loss: Tensor
    outer_loss: Tensor
    hypergradient_norm: Tensor
    adjoint_norm: Tensor
    hessian_norm: float | None
    """L, where it was measured."""
    outer_step_scale: Tensor | float | None
    """ψ in [0, 1], how far λ was let go; None where its optimiser is the user's."""


class DivergenceError(RuntimeError):
    """A run diverged, and going back with shorter steps did not help."""


class RollbackWarning(UserWarning):
    """A run diverged, and goes on from the last good state with shorter steps."""


@dataclass
class Scale:
    """How large a quantity has been.

    Args:
        largest: its largest size so far.
        quiet: looks in a row, since it was first above 0, that showed no growth.
        growths: looks in a row that showed growth while the scale was not known.
    """

    largest: float = 0.0
    quiet: int = 0
    growths: int = 0

    def observe(self, size: float) -> None:
        """Compare a size with the largest so far, and remember it."""
        if not math.isfinite(size):
            self.growths = KNOWN
        elif self.largest > 0 and size > GROWTH * self.largest:
            self.growths = KNOWN if self.quiet >= KNOWN else self.growths + 1
            self.quiet = 0
        elif self.largest > 0:
            self.quiet += 1
            self.growths = 0
        self.largest = max(self.largest, size)


class Guard:
    """Watches the sizes of a run, and counts its rollbacks.

    Args:
        max_rollbacks: how often the run may still be rescued; None watches nothing.
    """

    def __init__(self, max_rollbacks: int | None) -> None:
        self.max_rollbacks = max_rollbacks
        self.caution = 1.0
        """What steps are multiplied by after rollbacks."""
        self._scales: dict[str, Scale] = {}

    @property
    def doubts(self) -> bool:
        """Whether a quantity has just grown, so that the state may be none to go back to."""
        return any(scale.growths for scale in self._scales.values())

    def look(self, info: StepInfo) -> str:
        """Return what grows if the run diverges, else an empty string. Asks the device, unless it watches nothing."""
        if self.max_rollbacks is None:
            return ""
        sizes = {"inner loss": abs(float(info.inner_loss)), "outer loss": abs(float(info.outer_loss))}
        if not self._scales:
            comparable = min(sizes.values()) > COMPARABLE * max(sizes.values())
            self._scales = {name: Scale(quiet=KNOWN if comparable else 0) for name in sizes}
        if info.step > 0:  # v and d start at 0.
            sizes |= {"v": float(info.adjoint_norm), "hypergradient": float(info.hypergradient_norm)}
        for name, size in sizes.items():
            self._scales.setdefault(name, Scale()).observe(size)
        if all(scale.growths < KNOWN for scale in self._scales.values()):
            return ""
        return " and ".join([name for name, scale in self._scales.items() if scale.growths])

    def state_dict(self) -> dict[str, Any]:
        scales = {name: asdict(scale) for name, scale in self._scales.items()}
        return {"max_rollbacks": self.max_rollbacks, "caution": self.caution, "scales": scales}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.max_rollbacks = state["max_rollbacks"]
        self.caution = state["caution"]
        self._scales = {name: Scale(**scale) for name, scale in state["scales"].items()}
