"""What watches a run. Where v, d or a loss is not finite or grows beyond measure, it goes back and halves its steps."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

CHECK_EVERY = 10
KEEP_EVERY = 100
GROWTH = 100.0
"""How much more than ever before a loss, v or d may be after CHECK_EVERY steps."""
_SMALL = 1e-8


class Info(NamedTuple):
    """What a step saw. The numbers are 0-d tensors, so that the host need not wait for the device."""

    step: int
    inner_loss: Tensor
    outer_loss: Tensor
    hypergradient_norm: Tensor
    adjoint_norm: Tensor
    curvature: float | None
    """L, where it was measured."""
    gate: Tensor | float | None
    """ψ in [0, 1], how far λ was let go; None where its optimiser is the user's."""


class DivergenceError(RuntimeError):
    """A run diverged, and going back with shorter steps did not help."""


class RescueWarning(UserWarning):
    """A run diverged, and goes on from the last good state with shorter steps."""


class Guard:
    """Knows the sizes that a run has had, how often it may be rescued, and how much shorter its steps are by now."""

    def __init__(self, rescues: int | None) -> None:
        self.rescues = rescues
        self.caution = 1.0
        self._sizes: dict[str, float] = {}

    def look(self, info: Info) -> str:
        """What diverged, or nothing. Asks the device, unless it is to watch nothing."""
        if self.rescues is None:
            return ""
        found = {"inner loss": abs(float(info.inner_loss)), "outer loss": abs(float(info.outer_loss))}
        if info.step > 0:  # v begins at zero, and with it d: how large they are is not known yet
            found |= {"v": float(info.adjoint_norm), "hypergradient": float(info.hypergradient_norm)}
        bad = [name for name, size in found.items() if not math.isfinite(size) or size > GROWTH * self._usual(name)]
        if not bad:
            self._sizes |= {name: max(size, self._sizes.get(name, 0.0)) for name, size in found.items()}
        return " and ".join(bad)

    def state_dict(self) -> dict[str, Any]:
        return {"rescues": self.rescues, "caution": self.caution, "sizes": dict(self._sizes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rescues = state["rescues"]
        self.caution = state["caution"]
        self._sizes = dict(state["sizes"])

    def _usual(self, name: str) -> float:
        return max(self._sizes[name], _SMALL) if name in self._sizes else math.inf
