"""Step sizes (Algorithm 1, lines 3-4): α for λ, τ for ω, β for v, η for the momentum of d.

At step k = 0, 1, … each is its first value divided by (k+1)^power; η is never more than 1. The paper prints δ/√k, which
is infinite at k = 0; its appendix has δ/√(k+1). Methods of two time scales have a power for each of the four.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from fsla._checks import whole_number
from fsla._tree import Scalar

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
            "rates must be a function of k, such as fsla.steps.constant(alpha, tau, beta). "
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
    """Rates as a function of k: first values, and the power of k+1 by which they fall, or one for each (α, τ, β, η)."""

    alpha: float
    tau: float
    beta: float
    eta: float = 1.0
    power: float | tuple[float, float, float, float] = 0.0
    clip_eta: bool = True

    def __post_init__(self) -> None:
        for name in ("alpha", "tau", "beta", "eta"):
            object.__setattr__(self, name, _rate(getattr(self, name), name))
        if isinstance(self.power, tuple):
            powers = Rates(*(_rate(power, "power") for power in self.power))
            object.__setattr__(self, "power", tuple(powers))
        else:
            object.__setattr__(self, "power", _rate(self.power, "power"))
        if max(self._powers) > STEEPEST:
            raise ValueError(
                f"The 'power' of Schedule must be at most {STEEPEST:g}. Got {max(self._powers):g} instead. "
                "Rates that fall faster are 0 after one step."
            )

    @property
    def _powers(self) -> tuple[float, float, float, float]:
        return self.power if isinstance(self.power, tuple) else (self.power, self.power, self.power, self.power)

    def __call__(self, k: int) -> Rates:
        """The rates of step k."""
        alpha, tau, beta, eta = (
            first / _fall(k, power)
            for first, power in zip((self.alpha, self.tau, self.beta, self.eta), self._powers, strict=True)
        )
        return Rates(alpha, tau, beta, min(1.0, eta) if self.clip_eta else eta)


def _fall(k: int, power: float) -> float:
    try:
        return float((k + 1) ** power)
    except OverflowError:
        return math.inf


def paper(delta: float = 1000.0, c_tau: float = 1e-3, c_beta: float = 1e-4, c_eta: float = 9e-4) -> Schedule:
    """α_k = δ/√(k+1), τ = c_τ α, β = c_β α, η = min(1, c_η α); the defaults are Appendix E's, for data cleaning."""
    return Schedule(delta, c_tau * delta, c_beta * delta, c_eta * delta, power=0.5)


def horizon(steps: int, delta: float, c_tau: float, c_beta: float, c_eta: float) -> Schedule:
    """The same, constant at α = δ/√K for a run of K steps: the bound of Theorem 5 then has no logarithm."""
    whole_number(steps, "steps", "horizon")
    alpha = delta / math.sqrt(steps)
    return Schedule(alpha, c_tau * alpha, c_beta * alpha, c_eta * alpha)


@dataclass(frozen=True)
class Periodic:
    """Other rates, but η = 1 at every `period`-th step and 0 between: what makes STORM SPIDER.

    Give the steps with η = 1 a large batch.
    """

    rates: Callable[[int], Rates]
    period: int

    def __post_init__(self) -> None:
        callable_rates(self.rates)
        whole_number(self.period, "period", "Periodic")

    def __call__(self, k: int) -> Rates:
        return self.rates(k)._replace(eta=1.0 if k % self.period == 0 else 0.0)


def constant(alpha: float, tau: float, beta: float, eta: float = 1.0) -> Schedule:
    """The same rates at every step."""
    return Schedule(alpha, tau, beta, eta)
