"""What every algorithm is: a start, and a step from one state to the next.

    rates   = step_sizes.rates(k, state.measured)     the sizes of the step
    context = StepContext(problem, batches, rates, …) what this step may ask: views, one for each question
    state   = algorithm.move(state, context)          the algorithm itself; it never asks the host

The same `move` serves dicts of tensors, where updates return new trees, and a module in place, where they write into
the module's parameters. Two rules make that so: all that is asked at a point is asked before the point moves (a view
that is asked later raises), and `keep` copies what is needed from an old point.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

import torch

from fsla._checks import function, instance, whole_number
from fsla._state_tree import evolve, map_tensors, saved, tensors_of
from fsla._tree import Tree, axpy, zeros_like
from fsla.problems._batches import BatchSpec, StepBatches, mix_seed
from fsla.problems._views import Oracles, Point, validate_start
from fsla.problems._wrappers import FiniteDifferenceProblem
from fsla.steps._automatic import Automatic, Measured
from fsla.steps._context import StepContext, descend
from fsla.steps._momentum import Position
from fsla.steps._schedules import Push, Rates, StepSizes
from fsla.steps._updates import GradientDescent, Projection, Update, Updates, Variable, projected


@saved
@dataclass(frozen=True)
class State:
    """State of a run: λ and ω with what their updates remember, the direction of λ, and what was measured.

    Args:
        step_count: steps that were taken.
        lam: the outer variable.
        omega: the inner variable.
        direction: d, the estimate of ∇f that λ moves by.
        measured: state of automatic step sizes; None under a schedule.

    Examples:
        >>> algorithm = fsla.algorithms.soba(constant(0.2, 0.5, 0.5))
        >>> state = algorithm.step(problem, algorithm.init(problem, at, batches), batches)
        >>> state.step_count, state.omega.value, state.is_finite()
        (1, {'w': tensor([0.2500])}, True)
    """

    step_count: int
    lam: Variable
    omega: Variable
    direction: Tree
    measured: Measured | None

    @property
    def point(self) -> Point:
        return Point(self.lam.value, self.omega.value)

    @property
    def v(self) -> Tree:
        """v ≈ H⁻¹ ∂_ω F; {} where the algorithm keeps none."""
        return {}

    def is_finite(self) -> bool:
        """Return whether no tensor of the state holds NaN or infinity. Asks the device: not at every step."""
        return all(bool(t.isfinite().all()) for t in tensors_of(self))

    def to(self, to: torch.device | torch.dtype | str) -> Self:
        """Return the state on another device, or in another floating-point dtype."""
        return map_tensors(
            lambda t: t.to(to) if t.dtype.is_floating_point or not isinstance(to, torch.dtype) else t, self
        )


S = TypeVar("S", bound=State)


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC, Generic[S]):
    """Base class of all algorithms: their common fields, `init` and `step`.

    A subclass is a frozen dataclass that defines `start` and `move`.

    Args:
        step_sizes: where the sizes of a step come from: a schedule, or `Automatic`.
        inner_update: how ω moves.
        adjoint_update: how v moves.
        outer_update: how λ moves; by default plain steps under a schedule, `ScaleFree` under automatic sizes.
        projection: set that λ stays in.
        outer_every: λ and v move at one step in each block of this length, which `due` draws. On the others ω alone
            moves, by its own gradient.
        finite_differences: whether products are taken by differences, whatever the problem does.

    Raises:
        TypeError: if `step_sizes` is no `fsla.steps.StepSizes`.
        ValueError: if a number is out of range.

    Examples:
        >>> algorithm = fsla.algorithms.soba(constant(0.2, 0.5, 0.5))
        >>> isinstance(algorithm, fsla.Algorithm)
        True
        >>> state = algorithm.init(problem, at, batches)
        >>> state = algorithm.step(problem, state, batches)
        >>> state.step_count
        1
    """

    step_sizes: StepSizes[Any] = field(default_factory=Automatic)
    inner_update: Update = field(default_factory=GradientDescent)
    adjoint_update: Update = field(default_factory=GradientDescent)
    outer_update: Update | None = None
    projection: Projection | None = None
    outer_every: int = 1
    finite_differences: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.step_sizes, StepSizes):
            raise TypeError(
                "step_sizes must be step sizes, such as fsla.steps.constant(outer_lr, inner_lr, adjoint_lr). "
                f"Got {type(self.step_sizes).__name__} instead."
            )
        owner = type(self).__name__
        whole_number(self.outer_every, "outer_every", owner)
        function(self.projection, "projection", owner, optional=True)
        for name in ("inner_update", "adjoint_update", "outer_update"):
            if name != "outer_update" or self.outer_update is not None:
                instance(getattr(self, name), Update, name, owner, "an update, such as fsla.steps.Momentum()")
        object.__setattr__(self, "step_sizes", self.step_sizes.spaced(self.outer_every))

    @cached_property
    def updates(self) -> Updates:
        """How ω, v and λ move."""
        outer = self.step_sizes.outer_update() if self.outer_update is None else self.outer_update
        return Updates(self.inner_update, self.adjoint_update, projected(outer, self.projection))

    @property
    def batches(self) -> BatchSpec:
        """The batches that a step reads."""
        return BatchSpec()

    @property
    def at_one_point(self) -> bool:
        """Whether a step asks for everything at one point before anything moves, so that ω may move outside of it."""
        return False

    @property
    def looks_back(self) -> bool:
        """Whether λ's direction reads the gradient at the old position, on batches that must be independent."""
        return False

    @property
    def capturable(self) -> bool:
        """Whether all steps that move λ take the same operations, and none asks the host: then one can be captured."""
        return True

    @property
    def moves_adjoint(self) -> bool:
        """Whether a variable of ω's form, such as v, moves by the update of v."""
        return False

    @property
    def in_place(self) -> bool:
        """Whether `move` also serves variables that move in place, as those of a module do."""
        return True

    @abstractmethod
    def start(self, state: State, step: StepContext) -> S:
        """Return the first state, from one with λ, ω, d = 0 and what the step sizes measured."""

    @abstractmethod
    def move(self, state: S, step: StepContext) -> S:
        """Return the state after a step, but for its step count."""

    def init(self, problem: Oracles, at: Point, batches: StepBatches) -> S:
        """Return the first state of a run from a point; raise unless losses and gradients are finite there."""
        self.batches.check(batches)
        outer_batch = batches.outer_grad_omega[0] if self.batches.outer_grad_omega else None
        at = validate_start(problem, at, batches.inner_grad[0], outer_batch)
        updates = self.updates
        lam, omega = updates.outer.init(at.lam), updates.inner.init(at.omega)
        at = Point(lam.value, omega.value)
        measured = self.step_sizes.init(omega.value)
        products = self.step_sizes.products_due(0, measured)
        if products:
            view = self._with_products(problem).inner_at(at, batches.inner_grad[0]).linearized()
            measured = self.step_sizes.measure(view, products, measured)
        step = self.context(problem, 0, measured, batches, update_buffers=False)
        return self.start(State(0, lam, omega, zeros_like(lam.value), measured), step)

    def step(self, problem: Oracles, state: S, batches: StepBatches) -> S:
        """Return the state after one step on these batches."""
        return self.measure(problem, self.advance(problem, state, batches)[0], batches)

    def advance(self, problem: Oracles, state: S, batches: StepBatches) -> tuple[S, StepContext]:
        """Return the state after the moves of one step, before `measure`, and the context that led to it."""
        self.batches.check(batches)
        k = state.step_count
        state = self.prepare(problem, state, batches)
        step = self.context(problem, k, state.measured, batches)
        state = self.move(state, step) if self.due(k) else self.train(state, step)
        return evolve(state, step_count=k + 1), step

    def prepare(self, problem: Oracles, state: S, batches: StepBatches) -> S:
        """Return the state with what the step sizes measure before the moves of a step, on its batches.

        Something is where all is asked at one point: ω may then move outside of the step, and nothing is measured after
        it.
        """
        block = state.step_count // self.outer_every
        if not (self.at_one_point and block and self.due(state.step_count)):
            return state
        return self._measured(problem, state, batches, self.step_sizes.products_due(block, state.measured))

    def measure(self, problem: Oracles, state: S, batches: StepBatches) -> S:
        """Return the state with what the step sizes measure after the moves of a step, on its batches."""
        if self.at_one_point:
            return state
        return self._measured(problem, state, batches, self.products_due(state.step_count - 1, state))

    def products_due(self, k: int, state: S) -> int:
        """Return how many products are measured after step k; where all is asked at one point, before the next one
        that moves λ."""
        return self.step_sizes.products_due(k // self.outer_every + 1, state.measured) if self.due(k) else 0

    def _measured(self, problem: Oracles, state: S, batches: StepBatches, products: int) -> S:
        """The state after so many products at its point."""
        if not products:
            return state
        problem, at, batch = self._with_products(problem), state.point, batches.inner_grad[0]
        direction = self.updates.outer.direction(state.lam)

        def gradient(length: float) -> Tree:
            return problem.inner_at(Point(axpy(length, direction, at.lam), at.omega), batch).grad_omega

        push = Push(at.omega, gradient) if direction else None
        measured = self.step_sizes.measure(problem.inner_at(at, batch), products, state.measured, push)
        return evolve(state, measured=measured)

    def due(self, k: int) -> bool:
        """Return whether λ and v move at step k: one step in each block of `outer_every`, so that none aliases with an
        epoch."""
        block, place = divmod(k, self.outer_every)
        return place == (mix_seed(0, block, 0) or 0) % self.outer_every

    def train(self, state: S, step: StepContext) -> S:
        """Move ω alone, by its own gradient."""
        omega = descend(step, state.point, state.omega, 1)[1]
        return evolve(state, omega=omega)

    def keep(self, x: Position) -> Position:
        """Return a position that stays valid while the variables move."""
        return x.clone() if self.updates.in_place else x

    def _with_products(self, problem: Oracles) -> Oracles:
        return FiniteDifferenceProblem(problem) if self.finite_differences else problem

    def context(
        self,
        problem: Oracles,
        k: int,
        measured: Any,
        batches: StepBatches,
        *,
        rates: Rates | None = None,
        update_buffers: bool = True,
    ) -> StepContext:
        """Return what step k may ask. Its sizes follow from k and from what was measured unless `rates` gives them."""
        return StepContext(
            self._with_products(problem),
            batches,
            self.step_sizes.rates(k, measured) if rates is None else rates,
            self.updates,
            self.step_sizes,
            step_count=k,
            update_buffers=update_buffers,
        )
