"""Step sizes (Algorithm 1, lines 3-4): α for λ, τ for ω, β for v, η for the momentum of d.

At step k = 0, 1, … each is its first value divided by (k+1)^power; η is never more than 1. The paper prints δ/√k, which
is infinite at k = 0; its appendix has δ/√(k+1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from fsla.checks import whole_number
from fsla.tree import Scalar

STEEPEST = 100.0
"""The largest power of k+1 by which rates may fall."""


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


def _rate(value: object, name: str) -> float:
    """The value as a float. Raises unless it is a number, finite as a float and at least 0."""
    must = f"The {name!r} of Schedule must be a finite number, at least 0. Got"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{must} {value!r} instead.")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{must} a whole number that is too large for a float instead.") from None
    if not 0 <= number < math.inf:
        raise ValueError(f"{must} {value!r} instead.")
    return number


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
            object.__setattr__(self, name, _rate(getattr(self, name), name))
        if self.power > STEEPEST:
            raise ValueError(
                f"The 'power' of Schedule must be at most {STEEPEST:g}. Got {self.power:g} instead. "
                "Rates that fall faster are 0 after one step."
            )

    def __call__(self, k: int) -> Rates:
        """The rates of step k."""
        try:
            fall = (k + 1) ** self.power
        except OverflowError:
            fall = math.inf
        eta = self.eta / fall
        return Rates(self.alpha / fall, self.tau / fall, self.beta / fall, min(1.0, eta) if self.clip_eta else eta)


def paper(delta: float = 1000.0, c_tau: float = 1e-3, c_beta: float = 1e-4, c_eta: float = 9e-4) -> Schedule:
    """α_k = δ/√(k+1), τ = c_τ α, β = c_β α, η = min(1, c_η α); the defaults are Appendix E's, for data cleaning."""
    return Schedule(delta, c_tau * delta, c_beta * delta, c_eta * delta, power=0.5)


def horizon(steps: int, delta: float, c_tau: float, c_beta: float, c_eta: float) -> Schedule:
    """The same, constant at α = δ/√K for a run of K steps: the bound of Theorem 5 then has no logarithm."""
    whole_number(steps, "steps", "horizon")
    alpha = delta / math.sqrt(steps)
    return Schedule(alpha, c_tau * alpha, c_beta * alpha, c_eta * alpha)


def constant(alpha: float, tau: float, beta: float, eta: float = 1.0) -> Schedule:
    """The same rates at every step."""
    return Schedule(alpha, tau, beta, eta)
