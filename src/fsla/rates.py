"""Step sizes (Algorithm 1, lines 3-4): α for λ, τ for ω, β for v, η for the momentum of d.

At step k = 0, 1, … each is its first value divided by (k+1)^power; η is never more than 1. The paper prints δ/√k, which
is infinite at k = 0; its appendix has δ/√(k+1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fsla.checks import whole
from fsla.tree import Scalar


class Rates(NamedTuple):
    alpha: Scalar
    tau: Scalar
    beta: Scalar
    eta: Scalar


def callable_rates(rates: object) -> None:
    if not callable(rates):
        raise TypeError(
            "rates must be a function of k, such as fsla.rates.constant(alpha, tau, beta). "
            f"Got {type(rates).__name__} instead."
        )


@dataclass(frozen=True)
class Schedule:
    """Rates as a function of k: first values, and the power of k+1 by which they fall."""

    alpha: float
    tau: float
    beta: float
    eta: float = 1.0
    power: float = 0.0
    clip_eta: bool = True

    def __post_init__(self) -> None:
        for name in ("alpha", "tau", "beta", "eta", "power"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"The {name!r} of Schedule must be a finite number, at least 0. Got {value!r} instead."
                )

    def __call__(self, k: int | Tensor) -> Rates:
        """The rates of step k: numbers, or 0-d tensors if k is one, so that a captured step need not ask the host."""
        fall = (k + 1) ** self.power
        eta = self.eta / fall
        if self.clip_eta:
            eta = eta.clamp(max=1.0) if isinstance(eta, Tensor) else min(1.0, eta)
        return Rates(self.alpha / fall, self.tau / fall, self.beta / fall, eta)


def paper(delta: float = 1000.0, c_tau: float = 1e-3, c_beta: float = 1e-4, c_eta: float = 9e-4) -> Schedule:
    """α_k = δ/√(k+1), τ = c_τ α, β = c_β α, η = min(1, c_η α); the defaults are Appendix E's, for data cleaning."""
    return Schedule(delta, c_tau * delta, c_beta * delta, c_eta * delta, power=0.5)


def horizon(steps: int, delta: float, c_tau: float, c_beta: float, c_eta: float) -> Schedule:
    """The same, constant at α = δ/√K for a run of K steps: the bound of Theorem 5 then has no logarithm."""
    whole(steps, "steps", "horizon")
    alpha = delta / math.sqrt(steps)
    return Schedule(alpha, c_tau * alpha, c_beta * alpha, c_eta * alpha)


def constant(alpha: float, tau: float, beta: float, eta: float = 1.0) -> Schedule:
    """The same rates at every step."""
    return Schedule(alpha, tau, beta, eta)
