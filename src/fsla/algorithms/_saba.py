"""SABA (Dagréou et al. 2022): SOBA with SAGA on each of its five oracles, for data cut into fixed batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsla._checks import whole_number
from fsla._tree import sub, zeros_like
from fsla.algorithms._alternating import State, Stepped
from fsla.problems._batches import Batch, Needs, Numbered, Sample
from fsla.problems._problem import Oracles, Point
from fsla.problems._wrappers import Seeded
from fsla.steps._saga import corrected, empty
from fsla.steps._schedules import Rates, callable_rates
from fsla.steps._updates import GradientDescent, Projection, Update, onto


@dataclass(frozen=True)
class Saba(Stepped):
    """The sample's `inner` and `outer_omega` must be `Numbered` batches, unless there is one of each."""

    rates: Callable[[int], Rates]
    inner_batches: int = 1
    outer_batches: int = 1
    outer: Update = field(default_factory=GradientDescent)

    def __post_init__(self) -> None:
        callable_rates(self.rates)
        whole_number(self.inner_batches, "inner_batches", "Saba")
        whole_number(self.outer_batches, "outer_batches", "Saba")

    @property
    def needs(self) -> Needs:
        return Needs(hvp=0, outer_lam=0, cross=0)

    def init(self, problem: Oracles, at: Point, xi: Sample) -> State:
        at, outer = self.started(problem, at, self._plain(xi))
        of_omega = {name: empty(at.omega, self.inner_batches) for name in ("grad", "hvp")}
        tables = of_omega | {
            "cross": empty(at.lam, self.inner_batches),
            "d_omega": empty(at.omega, self.outer_batches),
            "d_lam": empty(at.lam, self.outer_batches),
        }
        return State(0, at, tables, zeros_like(at.omega), zeros_like(at.lam), outer)

    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State:
        self.needs.check(xi)
        at = state.at
        v = state.memory
        own = self._plain(xi)
        problem = Seeded(problem, own)
        inner = problem.inner_at(at, own.inner)
        outer = problem.outer_at(at, own.outer_omega)
        hvp, cross = inner.hvp_cross(v)
        device = next(iter(v.values())).device
        i = _number(xi.inner, self.inner_batches, "inner", device)
        j = _number(xi.outer_omega, self.outer_batches, "outer", device)
        tables = dict(state.inner)
        grad, tables["grad"] = corrected(inner.grad, i, tables["grad"])
        hvp, tables["hvp"] = corrected(hvp, i, tables["hvp"])
        cross, tables["cross"] = corrected(cross, i, tables["cross"])
        d_omega, tables["d_omega"] = corrected(outer.d_omega, j, tables["d_omega"])
        d_lam, tables["d_lam"] = corrected(outer.d_lam, j, tables["d_lam"])
        d = sub(d_lam, cross)
        omega, _ = GradientDescent()(at.omega, grad, rate.tau, None)
        v, _ = GradientDescent()(v, sub(hvp, d_omega), rate.beta, None)
        lam, memory = self.outer(at.lam, d, rate.alpha, state.outer)
        return State(state.k + 1, Point(lam, omega), tables, v, d, memory)

    def _plain(self, xi: Sample) -> Sample:
        """The sample with batches that a problem can read."""
        return xi._replace(inner=_batch(xi.inner), outer_omega=_batch(xi.outer_omega))


def _batch(batch: Batch) -> Batch:
    return batch.batch if isinstance(batch, Numbered) else batch


def _number(batch: Batch, count: int, level: str, device: torch.device) -> Tensor:
    if not isinstance(batch, Numbered):
        if count > 1:
            raise TypeError(
                f"SABA needs {level} batches that say which of the {count} they are: fsla.Numbered(number, batch). "
                f"Got {type(batch).__name__} instead."
            )
        return torch.zeros((), dtype=torch.long, device=device)
    if isinstance(batch.number, int) and not 0 <= batch.number < count:
        raise ValueError(f"The number of an {level} batch must lie in 0 … {count - 1}. Got {batch.number} instead.")
    return torch.as_tensor(batch.number, device=device)


def saba(
    rates: Callable[[int], Rates], *, inner_batches: int = 1, outer_batches: int = 1, project: Projection | None = None
) -> Saba:
    """SABA: the cost of SOBA, and tables of 2 trees like ω and one like λ a batch of G, one of each a batch of F."""
    return Saba(rates, inner_batches, outer_batches, onto(project))
