"""FSLA and its nearest relatives: one Solver each, with v carried from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fsla.algorithms._alternating import Solver
from fsla.algorithms._around import WarmedUp
from fsla.hypergradients._estimators import Tracked
from fsla.hypergradients._inner import Descent
from fsla.steps._momentum import EMA, NoMomentum, by_name
from fsla.steps._schedules import Rates
from fsla.steps._updates import Normalised, Projection, onto


def fsla(
    rates: Callable[[int], Rates],
    *,
    v_at: Literal["old", "new"] = "old",
    momentum: str = "storm",
    project: Projection | None = None,
    radius: float | None = None,
) -> Solver:
    """Algorithm 1. Per step: 1 ∂_ω G, 1 ∂_ω F, 1 HVP, and with STORM 2 ∂_λ F and 2 cross products.

    Args:
        rates: step sizes as a function of k, such as `fsla.steps.paper(...)`.
        v_at: "old" moves v at ω_k, as Algorithm 1 and its proof have it; "new" at ω_{k+1}, as the single-loop
            equation has.
        momentum: "storm" (Algorithm 1), "average" or "none".
        project: keeps λ in a set, such as `fsla.steps.Box(0, 1)`.
        radius: keeps ‖v‖ under this bound.
    """
    return Solver(Tracked(radius=radius), rates, direction=by_name(momentum), v_at=v_at, outer=onto(project))


def single_loop(rates: Callable[[int], Rates], *, project: Projection | None = None) -> Solver:
    """The deterministic single-loop equation of section 4: v at the new ω, and no momentum. Give it full batches."""
    return fsla(rates, v_at="new", momentum="none", project=project)


def amigo(rates: Callable[[int], Rates], *, T: int = 10, Q: int = 10, project: Projection | None = None) -> Solver:
    """AmIGO (Arbel & Mairal 2022): T warm steps on ω, Q on v, each on its own batch where `Batches` are given; then λ.

    With T = Q = 1 it is FSLA without momentum, v at the new ω, begun with ω instead of λ.
    """
    return Solver(
        Tracked(steps=Q), rates, Descent(T), direction=NoMomentum(), v_at="new", outer=onto(project), lam_last=True
    )


def slip(rates: Callable[[int], Rates], *, T0: int = 0, project: Projection | None = None) -> WarmedUp:
    """SLIP (Gong, Hao & Liu 2024): T0 steps on ω before the first; then ω, v at the new ω, and λ by α along the
    normalised average of its directions. For outer losses whose curvature grows with the gradient."""
    return WarmedUp(
        Tracked(),
        rates,
        direction=EMA(),
        v_at="new",
        outer=onto(project, Normalised()),
        lam_last=True,
        warm_up=T0,
    )
