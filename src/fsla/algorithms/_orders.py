"""The two orders in which λ, ω and v move.

Alternating     λ by d, then ω and v, then d at the new point (Algorithm 1); with `outer_last` ω, v, d and then λ
Simultaneous    all three from one point (SOBA)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fsla._checks import whole_number
from fsla._state_tree import evolve, saved
from fsla._tree import Leaves, Scalar, Tree, clone, dense, sub, zeros_like
from fsla.algorithms._base import Algorithm, State
from fsla.hypergradients._estimators import HypergradientEstimator, Tracked
from fsla.problems._batches import BatchSpec
from fsla.problems._views import Point
from fsla.steps._context import StepContext, descend
from fsla.steps._momentum import SPIDER, STORM, Direction, NoMomentum, Position
from fsla.steps._updates import Variable


class SharedBatchWarning(UserWarning):
    """Warning that STORM reads batches that also moved ω and v: its direction keeps a bias.

    Examples:
        >>> import warnings
        >>> shared = fsla.StepBatches.draw("shared", lambda: None, lambda: None)
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     state = fsla.algorithms.fsla(constant(0.2, 0.5, 0.5, 0.5)).init(problem, at, shared)
        >>> caught[0].category.__name__
        'SharedBatchWarning'
    """


@dataclass(frozen=True)
class AdjointState(State):
    """State of an algorithm whose v moves by an update.

    Args:
        adjoint: v.
    """

    adjoint: Variable

    @property
    def v(self) -> Tree:
        return self.adjoint.value


@saved
@dataclass(frozen=True)
class AlternatingState(AdjointState):
    """State of `Alternating`.

    Args:
        adjoint: memory of the estimator: v where it tracks one, {} where it has none.
        trajectory: inner moves that led to ω, if the estimator unrolls them and the momentum looks back.
        first_omega: the value that ω restarts from, if it restarts.

    Examples:
        >>> state = fsla.algorithms.fsla(constant(0.2, 0.5, 0.5, 0.5)).init(problem, at, batches)
        >>> state.step_count, state.v
        (0, {'w': tensor([0.])})
    """

    trajectory: tuple[tuple[Tree, Scalar], ...] = ()
    first_omega: Tree = field(default_factory=dict)

    @property
    def position(self) -> Position:
        return Position(Point(self.lam.value, self.omega.value, self.trajectory), self.adjoint.value)


@saved
@dataclass(frozen=True)
class SensitivityState(AlternatingState):
    """State of `Alternating` where the memory of the estimator is dω/dλ, and there is no v."""

    @property
    def v(self) -> Tree:
        return {}


@dataclass(frozen=True, kw_only=True)
class Alternating(Algorithm[AlternatingState]):
    """Algorithm 1 and its relatives: λ moves by d, then ω and v, then d is taken at the new point.

    Args:
        estimator: estimator of the hypergradient.
        momentum: rule that makes d from the hypergradient.
        inner_steps: moves of ω in a step; with `growth`, ⌈inner_steps (k+1)^growth⌉ at step k.
        growth: power by which the number of inner moves grows.
        warm_up: moves of ω before the first step, on its batch.
        restart: whether ω restarts from the run's first ω in every step.
        adjoint_at: whether v moves at the "old_params" (Algorithm 1) or at the "new_params".
        outer_last: whether λ moves last, along this step's d. The cycle is the same, but λ's first move reads a v that
            has moved.

    The other fields are those of `Algorithm`.

    Examples:
        >>> from fsla.algorithms import Alternating
        >>> from fsla.steps import EMA
        >>> minimize(Alternating(step_sizes=constant(0.2, 0.5, 0.5, 0.5), momentum=EMA(), inner_steps=2))
        1.0
    """

    estimator: HypergradientEstimator = field(default_factory=Tracked)
    momentum: Direction = field(default_factory=STORM)
    inner_steps: int = 1
    growth: float = 0.0
    warm_up: int = 0
    restart: bool = False
    adjoint_at: Literal["old_params", "new_params"] = "old_params"
    outer_last: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.inner_steps, "inner_steps", type(self).__name__)
        whole_number(self.warm_up, "warm_up", type(self).__name__, least=0)
        if self.outer_last and self.momentum.looks_back:
            raise ValueError(
                f"With outer_last, the momentum of {type(self).__name__} must not look back. Got {self.momentum}."
            )
        if self.adjoint_at not in ("old_params", "new_params"):
            raise ValueError(f"'adjoint_at' must be 'old_params' or 'new_params'. Got {self.adjoint_at!r} instead.")

    @property
    def batches(self) -> BatchSpec:
        steps = 1 if self.growth else self.inner_steps
        return BatchSpec(inner_grad=steps, hvp=self.estimator.hvp_batches(self.inner_steps))

    @property
    def looks_back(self) -> bool:
        return self.momentum.looks_back

    @property
    def capturable(self) -> bool:
        return super().capturable and self.estimator.capturable and not self.growth

    @property
    def moves_adjoint(self) -> bool:
        return self.estimator.moves_adjoint

    def start(self, state: State, step: StepContext) -> AlternatingState:
        if step.batches.mode == "shared" and self.momentum.looks_back:
            warnings.warn(_BIASED, SharedBatchWarning, stacklevel=4)
        at, omega = descend(step, state.point, state.omega, self.warm_up, batches=step.batches.inner_grad[:1])
        first = clone(omega.value) if self.restart else {}
        adjoint = step.updates.adjoint.init(self.estimator.memory(at))
        position = Position(Point(at.lam, at.omega), adjoint.value)
        d = state.direction if self.outer_last else dense(self.estimator.gradient(step, position))
        kind = SensitivityState if self.estimator.carries_sensitivity else AlternatingState
        return kind(0, state.lam, omega, d, state.measured, adjoint, (), first)

    def move(self, state: AlternatingState, step: StepContext) -> AlternatingState:
        rates, updates = step.rates, step.updates
        lam, omega, adjoint, measured = state.lam, state.omega, state.adjoint, state.measured
        back = self.momentum.asks_back(rates.new_grad_weight)
        old = self.keep(state.position) if back else state.position
        if not self.outer_last:
            lam = updates.outer(lam, state.direction, rates.outer_lr)  # line 3
        point = Point(lam.value, omega.value)
        if self.adjoint_at == "old_params":  # line 7, first, since its product leaves the gradient of line 6 too
            adjoint, measured = self.estimator.advance(step, point, adjoint, measured)
        if self.restart:
            omega = updates.inner.set(omega, state.first_omega)
            point = Point(lam.value, omega.value)
        growth = (step.step_count + 1) ** self.growth if self.growth else 1
        count = math.ceil(self.inner_steps * growth)
        at, omega = descend(step, point, omega, count, keep=self._keep_omega)  # line 6
        if self.adjoint_at == "new_params":
            if step.batches.hvp[0] is step.batches.mixed_hvp[0]:  # H v and J v' are of one graph
                step.inner_at(at, step.batches.hvp[0]).linearized()
            adjoint, measured = self.estimator.advance(step, at, adjoint, measured)
        g = self.estimator.gradient(step, Position(at, adjoint.value))  # line 8
        g_old = self.estimator.gradient(step, old) if back else {}
        d = self.momentum(g, g_old, state.direction, rates.new_grad_weight)  # line 9
        if self.outer_last:
            lam = updates.outer(lam, d, rates.outer_lr)
        trajectory = at.trajectory if self.momentum.looks_back else ()
        return evolve(
            state, lam=lam, omega=omega, adjoint=adjoint, direction=d, measured=measured, trajectory=trajectory
        )

    @property
    def _keep_omega(self) -> Callable[[Tree], Tree] | None:
        """The function that copies the states of a trajectory; None if the estimator needs none."""
        if not self.estimator.unrolls:
            return None
        return clone if self.updates.in_place else dict


_BIASED = (
    "STORM needs the batches of its gradients drawn independently of those that move omega and v; on shared ones its "
    "direction keeps a bias for ever. Draw batches 'grouped' or 'independent' (for a module: give step "
    "independent_batches=), or take momentum='none' or 'average'."
)


@saved
@dataclass(frozen=True)
class SimultaneousState(AdjointState):
    """State of `Simultaneous`.

    Args:
        adjoint: v; {} where an estimator solves for it.
        omega_direction: direction of ω; {} where it is not remembered.
        adjoint_direction: direction of v; {} where it is not remembered.
        before: position where the last step began, if a momentum looks back.

    Examples:
        >>> state = fsla.algorithms.soba(constant(0.2, 0.5, 0.5)).init(problem, at, batches)
        >>> state.v, state.before
        ({'w': tensor([0.])}, None)
    """

    omega_direction: Tree
    adjoint_direction: Tree
    before: Position | None


class Gradients(NamedTuple):
    """Of ω, v and λ at one position; that of v is H v - ∂_ω F, in two parts."""

    omega: Tree
    hv: Tree
    b: Tree
    lam: Leaves

    @property
    def adjoint(self) -> Tree:
        return sub(self.hv, self.b)


_NONE = Gradients({}, {}, {}, {})


@dataclass(frozen=True, kw_only=True)
class Simultaneous(Algorithm[SimultaneousState]):
    """SOBA and its relatives: ω, v and λ move at once, from one point.

    ω moves along ∂_ω G, v along H v - ∂_ω F, and λ along ∂_λ F - J v.

    Args:
        inner_momentum: rule that makes the direction of ω.
        adjoint_momentum: rule that makes the direction of v.
        outer_momentum: rule that makes the direction of λ.
        estimator: estimator that solves for v at the point; then only ω and λ move.
        delayed_outer: whether λ moves by the d of the last step.

    The other fields are those of `Algorithm`.

    Examples:
        >>> from fsla.algorithms import Simultaneous
        >>> minimize(Simultaneous(step_sizes=constant(0.1, 0.5, 0.5), outer_update=fsla.steps.Momentum(0.5)))
        1.0
    """

    inner_momentum: Direction = field(default_factory=NoMomentum)
    adjoint_momentum: Direction = field(default_factory=NoMomentum)
    outer_momentum: Direction = field(default_factory=NoMomentum)
    estimator: HypergradientEstimator | None = None
    delayed_outer: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outer_every > 1 and self.inner_momentum.looks_back:
            raise ValueError(
                "outer_every must be 1 where the momentum of omega looks back, since plain steps leave its direction "
                f"stale. Got {self.outer_every} with {self.inner_momentum}."
            )

    @property
    def batches(self) -> BatchSpec:
        if self.estimator is None:
            return BatchSpec(hvp=0, outer_grad_lam=0, mixed_hvp=0)
        return BatchSpec(hvp=self.estimator.hvp_batches(1))

    @property
    def at_one_point(self) -> bool:
        return not self.looks_back

    @property
    def capturable(self) -> bool:
        solved = self.estimator is None or self.estimator.capturable
        return super().capturable and solved and not any(isinstance(m, SPIDER) for m in self._momenta)

    @property
    def moves_adjoint(self) -> bool:
        return self.estimator is None

    @property
    def _momenta(self) -> tuple[Direction, Direction, Direction]:
        return self.inner_momentum, self.adjoint_momentum, self.outer_momentum

    @property
    def looks_back(self) -> bool:
        return any(momentum.looks_back for momentum in self._momenta)

    def start(self, state: State, step: StepContext) -> SimultaneousState:
        omega = state.omega.value
        adjoint = Variable({}) if self.estimator else step.updates.adjoint.init(zeros_like(omega))
        position = Position(state.point, adjoint.value)
        d_omega, d_adjoint, d = zeros_like(omega), zeros_like(adjoint.value), state.direction
        if self.looks_back or self.estimator:
            first = self._gradients(step, position)
            d_omega, d_adjoint, d = first.omega, first.adjoint, dense(first.lam)
        before = self.keep(position) if self.looks_back else None
        d_omega = d_omega if self.inner_momentum.remembers else {}
        d_adjoint = d_adjoint if self.adjoint_momentum.remembers else {}
        return SimultaneousState(0, state.lam, state.omega, d, state.measured, adjoint, d_omega, d_adjoint, before)

    def move(self, state: SimultaneousState, step: StepContext) -> SimultaneousState:
        rates, updates = step.rates, step.updates
        weight = rates.new_grad_weight
        adjoint, measured = state.adjoint, state.measured
        position = Position(state.point, adjoint.value)
        new = self._gradients(step, position)
        back = state.before is not None and any(momentum.asks_back(weight) for momentum in self._momenta)
        old = self._gradients(step, state.before) if back and state.before is not None else _NONE
        d_omega = self.inner_momentum(new.omega, old.omega, state.omega_direction, weight)
        remembered: Tree = {}
        if self.inner_momentum.remembers:  # The optimiser of a module may change its gradient in place.
            remembered = clone(d_omega) if updates.in_place else d_omega
        d = self.outer_momentum(new.lam, old.lam, state.direction, weight)
        before = self.keep(position) if self.looks_back else None
        d_adjoint: Tree = {}
        if self.estimator is None:
            view = step.inner_at(position.at, step.batches.inner_grad[0])
            residual, measured = step.step_sizes.residual(adjoint.value, new.hv, new.b, measured, view)
            d_adjoint = self.adjoint_momentum(residual, old.adjoint, state.adjoint_direction, weight)
            adjoint = updates.adjoint(adjoint, d_adjoint, rates.adjoint_lr)
        return evolve(
            state,
            omega=updates.inner(state.omega, d_omega, rates.inner_lr),
            adjoint=adjoint,
            lam=updates.outer(state.lam, state.direction if self.delayed_outer else d, rates.outer_lr),
            direction=d,
            omega_direction=remembered,
            adjoint_direction=d_adjoint if self.adjoint_momentum.remembers else {},
            before=before,
            measured=measured,
        )

    def _gradients(self, step: StepContext, position: Position) -> Gradients:
        at, v = position
        inner = step.inner_at(at, step.batches.inner_grad[0])
        if self.estimator is not None:
            return Gradients(inner.grad_omega, {}, {}, self.estimator.gradient(step, position))
        hv, jv = inner.products(v)
        by_omega, by_lam = step.outer_at(at, step.batches.outer_grad_omega[0]).gradients()
        return Gradients(inner.grad_omega, hv, by_omega, sub(by_lam, jv))
