"""SABA (Dagréou et al. 2022): SOBA with SAGA on each of its five oracles, for data cut into fixed batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fsla._checks import whole_number
from fsla._state_tree import evolve, saved
from fsla._tree import sub, zeros_like
from fsla.algorithms._base import Algorithm, State
from fsla.algorithms._orders import AdjointState
from fsla.algorithms._registry import register
from fsla.algorithms._single_loop import Sizes
from fsla.problems._batches import Batch, BatchSpec
from fsla.steps._context import StepContext
from fsla.steps._saga import Table, corrected, empty
from fsla.steps._updates import Projection


@saved
@dataclass(frozen=True)
class SabaState(AdjointState):
    """State of `Saba`.

    Args:
        tables: last gradients and products of each batch, by oracle.
    """

    tables: Mapping[str, Table]


@dataclass(frozen=True, kw_only=True)
class Saba(Algorithm[SabaState]):
    """The batches `inner_grad` and `outer_grad_omega` must have a number, unless there is one of each."""

    inner_batches: int = 1
    outer_batches: int = 1

    batches = BatchSpec(hvp=0, outer_grad_lam=0, mixed_hvp=0)
    moves_adjoint = True
    at_one_point = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.inner_batches, "inner_batches", "Saba")
        whole_number(self.outer_batches, "outer_batches", "Saba")

    def start(self, state: State, step: StepContext) -> SabaState:
        omega, lam = state.omega.value, state.lam.value
        tables = {
            "inner_grad": empty(omega, self.inner_batches),
            "hvp": empty(omega, self.inner_batches),
            "mixed_hvp": empty(lam, self.inner_batches),
            "outer_grad_omega": empty(omega, self.outer_batches),
            "outer_grad_lam": empty(lam, self.outer_batches),
        }
        adjoint = step.updates.adjoint.init(zeros_like(omega))
        return SabaState(0, state.lam, state.omega, state.direction, state.measured, adjoint, tables)

    def move(self, state: SabaState, step: StepContext) -> SabaState:
        rates, updates = step.rates, step.updates
        inner_batch, outer_batch = step.batches.inner_grad[0], step.batches.outer_grad_omega[0]
        at = state.point
        inner = step.inner_at(at, inner_batch)
        hvp, mixed_hvp = inner.products(state.adjoint.value)
        by_omega, by_lam = step.outer_at(at, outer_batch).gradients()
        device = next(iter(hvp.values())).device
        i = _number(inner_batch, self.inner_batches, "inner", device)
        j = _number(outer_batch, self.outer_batches, "outer", device)
        gradients = {
            "inner_grad": (inner.grad_omega, i),
            "hvp": (hvp, i),
            "mixed_hvp": (mixed_hvp, i),
            "outer_grad_omega": (by_omega, j),
            "outer_grad_lam": (by_lam, j),
        }
        results = {name: corrected(g, number, state.tables[name]) for name, (g, number) in gradients.items()}
        g = {name: direction for name, (direction, _) in results.items()}
        d = sub(g["outer_grad_lam"], g["mixed_hvp"])
        return evolve(
            state,
            lam=updates.outer(state.lam, d, rates.outer_lr),
            omega=updates.inner(state.omega, g["inner_grad"], rates.inner_lr),
            adjoint=updates.adjoint(state.adjoint, sub(g["hvp"], g["outer_grad_omega"]), rates.adjoint_lr),
            direction=d,
            tables={name: table for name, (_, table) in results.items()},
        )


def _number(batch: Batch, count: int, level: str, device: torch.device) -> Tensor:
    if batch.number is None:
        if count > 1:
            raise TypeError(
                f"SABA needs {level} batches that say which of the {count} they are. "
                "Got a batch without a number; use fsla.Batch(data, number=i)."
            )
        return torch.zeros((), dtype=torch.long, device=device)
    if isinstance(batch.number, int) and not 0 <= batch.number < count:
        raise ValueError(f"The number of an {level} batch must lie in 0 … {count - 1}. Got {batch.number} instead.")
    return torch.as_tensor(batch.number, device=device)


@register("saba")
def saba(
    step_sizes: Sizes, *, inner_batches: int = 1, outer_batches: int = 1, projection: Projection | None = None
) -> Saba:
    """Return SABA: SOBA with SAGA on its five oracles.

    It costs what SOBA costs. Its tables hold 2 trees like ω and one like λ for each batch of G, and one of each for
    each batch of F.

    Args:
        step_sizes: step sizes of λ, ω and v: a schedule such as `fsla.steps.constant`.
        inner_batches: fixed batches that the inner data is cut into.
        outer_batches: fixed batches that the outer data is cut into.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, a `Saba`.

    Examples:
        >>> minimize(fsla.algorithms.saba(constant(0.2, 0.5, 0.5)))
        1.0
    """
    return Saba(step_sizes=step_sizes, inner_batches=inner_batches, outer_batches=outer_batches, projection=projection)
