"""S-TFBO (Yang et al. 2024): a single loop whose steps are what was seen so far of each direction's length.

    a² = 1/α² + Σ ‖D_λ‖²      b² = 1/τ² + Σ ‖D_ω‖²      c² = 1/β² + Σ ‖D_v‖²      f = max(b, c)
    ω ← ω - D_ω / b           v ← v - D_v / f           λ ← λ - D_λ / (a f)

in SOBA's order. The rates are only where the steps start: 1 will do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fsla._tree import Leaves, axpy, dense, dot, zeros_like
from fsla.algorithms._alternating import State, Stepped
from fsla.algorithms._simultaneous import Tracked
from fsla.problems._batches import Needs, Sample
from fsla.problems._problem import Oracles, Point
from fsla.problems._wrappers import Seeded
from fsla.steps._schedules import Rates, callable_rates
from fsla.steps._updates import GradientDescent, Projection, Update, onto


@dataclass(frozen=True)
class TuningFree(Stepped):
    rates: Callable[[int], Rates]
    outer: Update = field(default_factory=GradientDescent)

    def __post_init__(self) -> None:
        callable_rates(self.rates)

    @property
    def needs(self) -> Needs:
        return Needs(hvp=0, outer_lam=0, cross=0)

    def init(self, problem: Oracles, at: Point, xi: Sample) -> State:
        at, outer = self.started(problem, at, xi)
        zero = next(iter(at.omega.values())).new_zeros(())
        sums = {"lam": zero, "omega": zero.clone(), "v": zero.clone()}
        return State(0, at, sums, zeros_like(at.omega), zeros_like(at.lam), outer)

    def move(self, problem: Oracles, state: State, xi: Sample, rate: Rates) -> State:
        self.needs.check(xi)
        at = state.at
        v = state.memory
        found = Tracked(Seeded(problem, xi), xi)
        directions: dict[str, Leaves] = {"lam": found.lam(at, v), "omega": found.omega(at, v), "v": found.v(at, v)}
        sums = {name: state.inner[name] + dot(d, d) for name, d in directions.items()}
        a = (1 / rate.alpha**2 + sums["lam"]).sqrt()
        b = (1 / rate.tau**2 + sums["omega"]).sqrt()
        f = torch.maximum(b, (1 / rate.beta**2 + sums["v"]).sqrt())
        d = dense(directions["lam"])
        lam, outer = self.outer(at.lam, d, 1 / (a * f), state.outer)
        omega = axpy(-1 / b, directions["omega"], at.omega)
        return State(state.k + 1, Point(lam, omega), sums, axpy(-1 / f, dense(directions["v"]), v), d, outer)


def s_tfbo(rates: Callable[[int], Rates], *, project: Projection | None = None) -> TuningFree:
    """S-TFBO: the cost of SOBA."""
    return TuningFree(rates, onto(project))
