"""Detect divergence: a loss, v or d that is not finite, or that grows a hundredfold over all that it has been.

A quantity that rightly starts at 0 has no scale to be compared with. Its growth counts once it has stayed within its
scale at some checks, or has lasted for several checks. A loss that begins far below the other one is at its minimum:
its growth counts where it lasts.

An outer loss that stays above where it started is no divergence. The run says so once, and λ takes shorter steps.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fsla._state_tree import map_tensors, tensors_of

CHECK_EVERY = 10
KEEP_EVERY = 100
GROWTH = 100.0
"""How much more than ever before a loss, v or d may be after CHECK_EVERY steps."""
KNOWN = 3
"""Checks without growth after which the scale of a quantity is known, and the most checks in a row that may show growth
before."""
COMPARABLE = 1e-3
"""Share of the larger loss that the smaller one must have at the first check for their scales to be known then."""
STARTING = 50
"""Steps whose largest outer loss is the one at the start: ω moves to its minimum, and λ little."""
MOST = 0.6
"""Share of the last checks that must be above it: nine in a row, or more where only most of them are."""
MARGIN = 0.01
"""By what share of the outer loss at the start a later one must exceed it."""
SHORTEST = 1 / 16
"""The least that λ's steps are multiplied by for this reason: λ must be able to come back."""


class StepInfo(NamedTuple):
    """What a step saw.

    The numbers are 0-d tensors, so that the host need not wait for the device.

    Args:
        step: number of the step, from 0.
        inner_loss: G on the step's batch.
        outer_loss: F on the step's batch; None if λ did not move.
        hypergradient_norm: ‖d‖.
        adjoint_norm: ‖v‖.
        hessian_norm: L, a running estimate of the largest eigenvalue of H; None if it is not measured.
        outer_step_scale: ψ in [0, 1], the multiplier of λ's step; None where λ does not wait.

    Examples:
        >>> info = bilevel.step(train, trusted)
        >>> info.step, bool(info.outer_loss > 0)
        (1, True)
    """

    step: int
    inner_loss: Tensor | None
    outer_loss: Tensor | None
    """None at a step where λ did not move."""
    hypergradient_norm: Tensor
    adjoint_norm: Tensor
    hessian_norm: Tensor | None
    """L, a running estimate of the largest eigenvalue of H, where it is measured."""
    outer_step_scale: Tensor | None
    """ψ in [0, 1], the multiplier of λ's step; None where λ does not wait."""


class DivergenceError(RuntimeError):
    """Error of a run that diverged, where rollbacks with shorter steps did not help.

    Examples:
        >>> diverging = torch.optim.SGD(model.parameters(), lr=100.0)
        >>> bilevel = fsla.SOBA(
        ...     model, weights, inner_loss=inner_loss, outer_loss=outer_loss, inner_optimizer=diverging, max_rollbacks=0
        ... )
        >>> try:
        ...     for _ in range(100):
        ...         info = bilevel.step(train, trusted)
        ... except fsla.DivergenceError as error:
        ...     print(str(error).split(" at ")[0])
        The run diverged
    """


class RollbackWarning(UserWarning):
    """Warning that a run diverged, and goes on from its last good state with shorter steps.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings(action="error", category=fsla.RollbackWarning):
        ...     info = bilevel.step(train, trusted)  # stops a run at its first divergence
    """


class RisingLossWarning(UserWarning):
    """Warning that the outer loss stays above its start, so that λ takes shorter steps.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings(action="error", category=fsla.RisingLossWarning):
        ...     info = bilevel.step(train, trusted)  # stops a run that makes the outer loss worse
    """


@dataclass
class Scale:
    """How large a quantity has been.

    Args:
        largest: its largest size so far.
        quiet: checks in a row, since it was first above 0, that showed no growth.
        growths: checks in a row that showed growth while the scale was not known.
        learns: whether checks without growth make the scale known. A loss that begins at its minimum has none to learn.
    """

    largest: float = 0.0
    quiet: int = 0
    growths: int = 0
    learns: bool = True

    def observe(self, size: float) -> None:
        """Compare a size with the largest so far, and remember it."""
        if not math.isfinite(size):
            self.growths = KNOWN
        elif self.largest > 0 and size > GROWTH * self.largest:
            self.growths = KNOWN if self.quiet >= KNOWN else self.growths + 1
            self.quiet = 0
        elif self.largest > 0:
            self.quiet += self.learns
            self.growths = 0
        self.largest = max(self.largest, size)


@dataclass
class Rise:
    """Whether an outer loss stays above where it started.

    Args:
        start: the largest at the start; None before the first.
        share: of the last checks, about ten, those that were above it.
        last: step of the last of them.
        reported: whether the run has said so.
    """

    start: float | None = None
    share: float = 0.0
    last: int = 0
    reported: bool = False

    def observe(self, loss: float, step: int) -> bool:
        """Return whether most losses of the last 100 steps, and since this last returned True, are above the start."""
        if not math.isfinite(loss):
            return False
        if self.start is None or step < STARTING:
            self.start = loss if self.start is None else max(self.start, loss)
        if step - self.last < CHECK_EVERY:
            return False
        above = loss > self.start + MARGIN * abs(self.start)
        self.share += (above - self.share) / 10
        self.last = step
        if self.share < MOST:
            return False
        self.share = 0.0
        return True


class Guard:
    """Watches the sizes of a run, and counts its rollbacks.

    Args:
        max_rollbacks: how often the run may still be rescued; None watches nothing.
    """

    def __init__(self, max_rollbacks: int | None) -> None:
        self.max_rollbacks = max_rollbacks
        self.step_scale = 1.0
        """What steps are multiplied by after rollbacks."""
        self.outer_step_scale = 1.0
        """What λ's steps are multiplied by as well, after the outer loss stayed above its start."""
        self.rise = Rise()
        self._scales: dict[str, Scale] = {}
        self._last: dict[str, float] = {}
        """The sizes of v and d at the last check: where they are the same, λ did not move since."""

    def is_due(self, step: int, *, measures: bool) -> bool:
        """Return whether the guard checks after this step: also before anything is measured, which must be finite."""
        return self.max_rollbacks is not None and (measures or step == 0 or (step + 1) % CHECK_EVERY == 0)

    def is_lost(self, info: StepInfo) -> bool:
        """Return whether v or d is not finite, where λ has moved. Asks the device."""
        if self.max_rollbacks is None or info.outer_loss is None:
            return False
        return not math.isfinite(float(info.adjoint_norm + info.hypergradient_norm))

    def should_keep(self, step: int) -> bool:
        """Return whether the state after this step is one to go back to. Not while a quantity has just grown."""
        due = (step + 1) % KEEP_EVERY == 0 or step + 1 == CHECK_EVERY
        return due and not any(scale.growths for scale in self._scales.values())

    def observe(self, info: StepInfo) -> str:
        """Return what grows if the run diverges, else an empty string. Asks the device."""
        losses = {"inner loss": info.inner_loss, "outer loss": info.outer_loss}
        sizes = {name: abs(float(loss)) for name, loss in losses.items() if loss is not None}
        if not self._scales and len(sizes) == len(losses):
            bound = COMPARABLE * max(sizes.values())
            known = KNOWN if min(sizes.values()) > bound else 0
            self._scales = {name: Scale(quiet=known, learns=size > bound) for name, size in sizes.items()}
        moved = {"v": float(info.adjoint_norm), "hypergradient": float(info.hypergradient_norm)}
        if info.step > 0 and moved != self._last:  # v and d start at 0.
            sizes |= moved
        self._last = moved
        for name, size in sizes.items():
            self._scales.setdefault(name, Scale()).observe(size)
        if all(scale.growths < KNOWN for scale in self._scales.values()):
            return ""
        return " and ".join([name for name, scale in self._scales.items() if scale.growths])

    def stays_high(self, info: StepInfo) -> bool:
        """Return whether the outer loss has stayed above its start for so long that λ must take shorter steps."""
        return info.outer_loss is not None and self.rise.observe(float(info.outer_loss), info.step)

    def shorten(self, step: int) -> bool:
        """Return whether λ's steps are to be halved, and say so the first time."""
        if not self.rise.reported:
            self.rise.reported = True
            warnings.warn(
                f"At step {step} the outer loss has been above {self.rise.start:.4g}, its largest value in the first "
                f"{STARTING} steps, for most of 100 steps. The outer variable takes steps half as long from now on. "
                "Check the losses, use smaller outer steps, or give the outer variable another unit.",
                RisingLossWarning,
                stacklevel=6,
            )
        if self.outer_step_scale <= SHORTEST:
            return False
        self.outer_step_scale /= 2
        return True

    def begin_rollback(self, what: str, step: int) -> int:
        """Return how many rollbacks are left after this one; raise where there is none."""
        if not self.max_rollbacks:
            raise self.divergence(what, step)
        return self.max_rollbacks - 1

    @staticmethod
    def divergence(what: str, step: int) -> DivergenceError:
        """Return the error of a run that cannot go back."""
        return DivergenceError(
            f"{_diverged(what, step)} Use smaller step sizes where you gave some, a penalty on the parameters in the "
            "inner loss (v needs curvature), max_adjoint_norm=, or hvp_method='autograd'."
        )

    def halved(self, step_scale: float, left: int) -> None:
        """Remember that steps are `step_scale` times as long, and how many rollbacks are left."""
        self.step_scale = step_scale
        self.max_rollbacks = left

    def warn(self, what: str, at: int, step: int, left: int, *, owned: bool) -> None:
        """Warn of a rollback at one step to another."""
        goes_on = (
            f"It goes on from step {step} with steps half as long"
            if owned
            else "The outer variable goes back to its last good value, v begins anew, and their steps are half as long"
        )
        warnings.warn(
            f"{_diverged(what, at)} {goes_on}; {left} such rollbacks are left.", RollbackWarning, stacklevel=6
        )

    @staticmethod
    def copy(snapshot: Any, into: Any) -> Any:
        """Return a copy of a nest, each tensor on its own device, in the tensors of an earlier copy where they fit."""
        places = [] if into is None else tensors_of(into)
        left = iter(places)

        def copy_tensor(t: Tensor) -> Tensor:
            place = next(left, None)
            if place is None or (place.shape, place.dtype, place.device) != (t.shape, t.dtype, t.device):
                return t.detach().clone()
            return place.copy_(t.detach())

        return map_tensors(copy_tensor, snapshot)

    def state_dict(self) -> dict[str, Any]:
        scales = {name: asdict(scale) for name, scale in self._scales.items()}
        steps = {"step_scale": self.step_scale, "outer_step_scale": self.outer_step_scale}
        return {
            "max_rollbacks": self.max_rollbacks, **steps, "scales": scales, "last": self._last,
            "rise": asdict(self.rise),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.max_rollbacks = state["max_rollbacks"]
        self.step_scale = state["step_scale"]
        self._scales = {name: Scale(**scale) for name, scale in state["scales"].items()}
        self._last = dict(state["last"])
        self.outer_step_scale = state["outer_step_scale"]
        self.rise = Rise(**state["rise"])


def _diverged(what: str, step: int) -> str:
    return f"The run diverged at step {step}: {what} not finite or {GROWTH:g} times as large as before."
