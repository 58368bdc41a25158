"""Step sizes (Algorithm 1, lines 3-4): where the sizes of a step come from.

    Schedule     first values, each divided by (k+1)^power; no state
    Automatic    measured during the run (`_automatic`), with a state that is part of the algorithm's

α moves λ, τ moves ω, β moves v, and η weighs the new gradient in d; it is never more than 1. The paper prints δ/√k,
which is infinite at k = 0; its appendix has δ/√(k+1). Methods of two time scales have a power for each of the four.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from fsla._checks import number, whole_number
from fsla._tree import Scalar, Tree, sub
from fsla.problems._views import View
from fsla.steps._updates import GradientDescent, Update

STEEPEST = 100.0
"""The largest power of k+1 by which step sizes may fall."""
P = TypeVar("P")


class Rates(NamedTuple):
    """Sizes of one step.

    Args:
        outer_lr: α, which moves λ.
        inner_lr: τ, which moves ω.
        adjoint_lr: β, which moves v.
        new_grad_weight: η, the weight of the new gradient in d.

    Examples:
        >>> fsla.steps.constant(outer_lr=0.1, inner_lr=0.2, adjoint_lr=0.3).rates(0)
        Rates(outer_lr=0.1, inner_lr=0.2, adjoint_lr=0.3, new_grad_weight=1.0)
    """

    outer_lr: Scalar
    inner_lr: Scalar
    adjoint_lr: Scalar
    new_grad_weight: Scalar


class Push(NamedTuple):
    """How λ acts on ω at a point.

    Args:
        omega: ω at the point.
        gradient: ∂_ω G where λ has moved by so much along its direction, of root mean square 1.
    """

    omega: Tree
    gradient: Callable[[float], Tree]


class StepSizes(ABC, Generic[P]):
    """Base class of step sizes: from k alone, or from a state that the run measures.

    A subclass defines `init`, the first state, and `rates`, the sizes of step k. Derive from `Scheduled` where sizes
    follow from k alone.

    Examples:
        >>> isinstance(fsla.steps.Automatic(), fsla.steps.StepSizes)
        True
    """

    @abstractmethod
    def init(self, omega: Tree) -> P:
        """Return the state at the start of a run."""

    @abstractmethod
    def rates(self, k: int, state: P) -> Rates:
        """Return the sizes of step k = 0, 1, …"""

    def spaced(self, outer_every: int) -> StepSizes[P]:
        """Return the step sizes of a run in which λ and v move at one step in each block of `outer_every`."""
        return self

    def outer_update(self) -> Update:
        """Return the update of λ whose size `rates` speaks of."""
        return GradientDescent()

    def residual(self, v: Tree, hv: Tree, b: Tree, state: P, view: View) -> tuple[Tree, P]:
        """Return the direction of v, H v - ∂_ω F, as the policy wants it, and what it and ∂_ω G tell."""
        return sub(hv, b), state

    def products_due(self, k: int, state: P) -> int:
        """Return how many products the policy measures before step k. Never asks the device."""
        return 0

    def measure(self, view: View, products: int, state: P, push: Push | None = None) -> P:
        """Return the state after so many products of H at the point where the step begins.

        Args:
            view: G at the point.
            products: how many.
            state: the state before.
            push: how λ acts on ω along its direction, where it has one.
        """
        return state


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


class Scheduled(StepSizes[None]):
    """Base class of step sizes that are a function of k. A subclass defines `rates`.

    Examples:
        >>> class Linear(fsla.steps.Scheduled):
        ...     def rates(self, k, state=None):
        ...         lr = max(0.0, 1 - k / 100)
        ...         return fsla.steps.Rates(lr, lr, lr, 1.0)
        >>> Linear().rates(50).inner_lr
        0.5
    """

    def init(self, omega: Tree) -> None:
        """Return None: there is no state."""

    @abstractmethod
    def rates(self, k: int, state: None = None) -> Rates: ...


@dataclass(frozen=True)
class Schedule(Scheduled):
    """Step sizes that fall by a power of k + 1.

    Args:
        outer_lr: α at k = 0.
        inner_lr: τ at k = 0.
        adjoint_lr: β at k = 0.
        new_grad_weight: η at k = 0.
        power: the power, or one for each of the four.
        clip_weight: whether η is at most 1.

    Raises:
        ValueError: if a number is negative or not finite.

    Examples:
        >>> sizes = fsla.steps.Schedule(0.8, 0.4, 0.4, power=(1, 0.5, 0.5, 0))
        >>> sizes.rates(3)
        Rates(outer_lr=0.2, inner_lr=0.2, adjoint_lr=0.2, new_grad_weight=1.0)
    """

    outer_lr: float
    inner_lr: float
    adjoint_lr: float
    new_grad_weight: float = 1.0
    power: float | tuple[float, float, float, float] = 0.0
    clip_weight: bool = True

    def __post_init__(self) -> None:
        for name in Rates._fields:
            object.__setattr__(self, name, _rate(getattr(self, name), name))
        if isinstance(self.power, tuple):
            if len(self.power) != len(Rates._fields):
                raise ValueError(f"The 'power' of Schedule must be one number or four. Got {len(self.power)}.")
            object.__setattr__(self, "power", tuple(_rate(power, "power") for power in self.power))
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

    def rates(self, k: int, state: None = None) -> Rates:
        firsts = (self.outer_lr, self.inner_lr, self.adjoint_lr, self.new_grad_weight)
        sizes = (first / _fall(k, power) for first, power in zip(firsts, self._powers, strict=True))
        outer_lr, inner_lr, adjoint_lr, weight = sizes
        return Rates(outer_lr, inner_lr, adjoint_lr, min(1.0, weight) if self.clip_weight else weight)


def _fall(k: int, power: float) -> float:
    try:
        return float((k + 1) ** power)
    except OverflowError:
        return math.inf


def inverse_sqrt(delta: float = 1000.0, c_tau: float = 1e-3, c_beta: float = 1e-4, c_eta: float = 9e-4) -> Schedule:
    """Return the paper's step sizes: α = δ/√(k+1), τ = c_τ α, β = c_β α, η = min(1, c_η α).

    Args:
        delta: δ; the defaults are those of Appendix E.
        c_tau: c_τ.
        c_beta: c_β.
        c_eta: c_η.

    Returns:
        The schedule.

    Examples:
        >>> fsla.steps.inverse_sqrt(delta=1.0, c_tau=0.5, c_beta=0.5, c_eta=0.9).rates(3)
        Rates(outer_lr=0.5, inner_lr=0.25, adjoint_lr=0.25, new_grad_weight=0.45)
    """
    for name, value in (("delta", delta), ("c_tau", c_tau), ("c_beta", c_beta), ("c_eta", c_eta)):
        number(value, name, "inverse_sqrt", low=0.0)
    return Schedule(delta, c_tau * delta, c_beta * delta, c_eta * delta, power=0.5)


def constant_over_horizon(steps: int, delta: float, c_tau: float, c_beta: float, c_eta: float) -> Schedule:
    """Return constant step sizes for a run of K steps: α = δ/√K, τ = c_τ α, β = c_β α, η = min(1, c_η α).

    The bound of Theorem 5 then has no logarithm.

    Args:
        steps: K.
        delta: δ.
        c_tau: c_τ.
        c_beta: c_β.
        c_eta: c_η.

    Returns:
        The schedule.

    Examples:
        >>> fsla.steps.constant_over_horizon(100, delta=1.0, c_tau=0.5, c_beta=0.5, c_eta=0.5).rates(7)
        Rates(outer_lr=0.1, inner_lr=0.05, adjoint_lr=0.05, new_grad_weight=0.05)
    """
    whole_number(steps, "steps", "constant_over_horizon")
    for name, value in (("delta", delta), ("c_tau", c_tau), ("c_beta", c_beta), ("c_eta", c_eta)):
        number(value, name, "constant_over_horizon", low=0.0)
    alpha = delta / math.sqrt(steps)
    return Schedule(alpha, c_tau * alpha, c_beta * alpha, c_eta * alpha)


@dataclass(frozen=True)
class PeriodicRefresh(Scheduled):
    """Step sizes with η = 1 at every `period`-th step and 0 between, which makes STORM SPIDER.

    Give the steps with η = 1 a large batch.

    Args:
        of: step sizes that α, τ and β are taken from.
        period: steps between two refreshes.

    Examples:
        >>> sizes = fsla.steps.PeriodicRefresh(fsla.steps.constant(0.1, 0.1, 0.1), period=3)
        >>> [sizes.rates(k).new_grad_weight for k in range(5)]
        [1.0, 0.0, 0.0, 1.0, 0.0]
    """

    of: Scheduled
    period: int

    def __post_init__(self) -> None:
        check_scheduled(self.of)
        whole_number(self.period, "period", "PeriodicRefresh")

    def rates(self, k: int, state: None = None) -> Rates:
        return self.of.rates(k)._replace(new_grad_weight=1.0 if k % self.period == 0 else 0.0)


@dataclass(frozen=True)
class Scaled(Scheduled):
    """Other step sizes, with α, τ and β times a factor."""

    of: Scheduled
    factor: float

    def rates(self, k: int, state: None = None) -> Rates:
        outer_lr, inner_lr, adjoint_lr, weight = self.of.rates(k)
        return Rates(self.factor * outer_lr, self.factor * inner_lr, self.factor * adjoint_lr, weight)


@dataclass(frozen=True)
class InnerStep(Scheduled):
    """Other step sizes, with β = τ: the derivative of the inner step itself (RTHO)."""

    of: Scheduled

    def __post_init__(self) -> None:
        check_scheduled(self.of)

    def rates(self, k: int, state: None = None) -> Rates:
        rates = self.of.rates(k)
        return rates._replace(adjoint_lr=rates.inner_lr)


def constant(outer_lr: float, inner_lr: float, adjoint_lr: float, new_grad_weight: float = 1.0) -> Schedule:
    """Return step sizes that are the same at every step.

    Args:
        outer_lr: α, which moves λ.
        inner_lr: τ, which moves ω.
        adjoint_lr: β, which moves v.
        new_grad_weight: η, the weight of the new gradient in d.

    Returns:
        The schedule.

    Examples:
        >>> fsla.steps.constant(0.1, 0.2, 0.3).rates(1000).inner_lr
        0.2
    """
    return Schedule(outer_lr, inner_lr, adjoint_lr, new_grad_weight)


def check_scheduled(of: object) -> None:
    """Raise unless step sizes are a function of k."""
    if not isinstance(of, Scheduled):
        raise TypeError(
            "The step sizes must be a function of k, such as fsla.steps.constant(outer_lr, inner_lr, adjoint_lr). "
            f"Got {type(of).__name__} instead."
        )
