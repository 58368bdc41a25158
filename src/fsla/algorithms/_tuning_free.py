"""S-TFBO (Yang et al. 2024): a single loop whose steps are what was seen so far of each direction's length.

    a² = 1/α² + Σ ‖D_λ‖²      b² = 1/τ² + Σ ‖D_ω‖²      c² = 1/β² + Σ ‖D_v‖²      f = max(b, c)
    ω ← ω - D_ω / b           v ← v - D_v / f           λ ← λ - D_λ / (a f)

in SOBA's order. The step sizes are only where the steps start: 1 will do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsla._state_tree import evolve, saved
from fsla._tree import Tree, dense, dot, scalar, sub, zeros_like
from fsla.algorithms._base import Algorithm, State
from fsla.algorithms._orders import AdjointState
from fsla.algorithms._registry import register
from fsla.algorithms._single_loop import Sizes
from fsla.problems._batches import BatchSpec
from fsla.steps._context import StepContext
from fsla.steps._updates import Projection


@saved
@dataclass(frozen=True)
class TuningFreeState(AdjointState):
    """State of `TuningFree`.

    Args:
        sums: squared lengths of the directions so far, by variable.
    """

    sums: Tree


@dataclass(frozen=True, kw_only=True)
class TuningFree(Algorithm[TuningFreeState]):
    """SOBA with steps by what was seen of each direction's length."""

    batches = BatchSpec(hvp=0, outer_grad_lam=0, mixed_hvp=0)
    moves_adjoint = True
    at_one_point = True

    def start(self, state: State, step: StepContext) -> TuningFreeState:
        omega = state.omega.value
        adjoint = step.updates.adjoint.init(zeros_like(omega))
        sums = {name: scalar(0.0, omega) for name in ("lam", "omega", "adjoint")}
        return TuningFreeState(0, state.lam, state.omega, state.direction, state.measured, adjoint, sums)

    def move(self, state: TuningFreeState, step: StepContext) -> TuningFreeState:
        rates, updates = step.rates, step.updates
        at = state.point
        inner = step.inner_at(at, step.batches.inner_grad[0])
        hv, jv = inner.products(state.adjoint.value)
        by_omega, by_lam = step.outer_at(at, step.batches.outer_grad_omega[0]).gradients()
        directions = {"lam": dense(sub(by_lam, jv)), "omega": inner.grad_omega, "adjoint": sub(hv, by_omega)}
        sums = {name: state.sums[name] + dot(d, d) for name, d in directions.items()}
        a = (1 / rates.outer_lr**2 + sums["lam"]).sqrt()
        b = (1 / rates.inner_lr**2 + sums["omega"]).sqrt()
        f = torch.maximum(b, (1 / rates.adjoint_lr**2 + sums["adjoint"]).sqrt())
        return evolve(
            state,
            lam=updates.outer(state.lam, directions["lam"], 1 / (a * f)),
            omega=updates.inner(state.omega, directions["omega"], 1 / b),
            adjoint=updates.adjoint(state.adjoint, directions["adjoint"], 1 / f),
            direction=directions["lam"],
            sums=sums,
        )


@register("s_tfbo")
def s_tfbo(step_sizes: Sizes, *, projection: Projection | None = None) -> TuningFree:
    """Return S-TFBO: SOBA whose steps follow from the lengths of its directions.

    Args:
        step_sizes: where the steps begin: ``fsla.steps.constant(1.0, 1.0, 1.0)`` will do.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `TuningFree`.

    Examples:
        >>> minimize(fsla.algorithms.s_tfbo(constant(1.0, 1.0, 1.0)))
        1.0
    """
    return TuningFree(step_sizes=step_sizes, projection=projection)
