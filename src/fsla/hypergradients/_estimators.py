"""Estimators of the hypergradient ∂_λ F - J v with v ≈ H⁻¹ ∂_ω F, or of it without v (Lemma 2's cases and section 4).

An estimator has a memory and two parts. `advance` moves the memory by one step (Algorithm 1, line 7); `gradient` is the
hypergradient at any position on the step's batches (line 8). The split lets one STORM correction, which needs the
gradient at the old and the new position on the same batches, serve every estimator.

    Tracked               FSLA: v is carried from step to step, and moves by H v - ∂_ω F
    WarmStartCG           AID-BiO: v is carried, and improved by conjugate gradients
    Solved                NS, CG: v is solved for afresh at each position, by one of `_linear_solvers`
    OneStep               v is ∂_ω F times a number
    ReverseUnroll         BP: reverse-mode differentiation through the inner moves that led to ω
    ForwardUnroll         the same derivative by the matrix recursion: p products a move
    ForwardSensitivity    RTHO: the matrix of that recursion is carried from step to step
    Exact                 the reference: ω_λ by Newton's method, v by a direct solve
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from fsla._checks import whole_number
from fsla._tree import Leaves, Tree, axpy, basis, scale, size, sub, zeros_like
from fsla.hypergradients._exact import solve_directly, solve_inner
from fsla.hypergradients._linear_solvers import ConjugateGradient, RandomNeumann, Solve
from fsla.hypergradients._recursions import Term, adjoint_recursion, apply_matrix, matrix_recursion
from fsla.problems._batches import batch_at
from fsla.problems._views import Point
from fsla.steps._context import StepContext
from fsla.steps._momentum import Position
from fsla.steps._updates import Variable


class HypergradientEstimator(ABC):
    """Base class of estimators of the hypergradient ∂_λ F - J v.

    A subclass defines `gradient`. One with a memory, such as v, also defines `memory` and `advance`.

    Attributes:
        unrolls: whether it reads the inner moves that led to ω, which a point then keeps.
        moves_adjoint: whether its memory is a v that moves by the update of v.
        carries_sensitivity: whether its memory is dω/dλ, in the place of v.
        row_wise: whether a row of λ enters only through the samples that read it.

    Examples:
        >>> class DirectGradient(fsla.hypergradients.HypergradientEstimator):
        ...     def gradient(self, step, position):
        ...         return step.outer_at(position.at, step.batches.outer_grad_lam[0]).grad_lam
        >>> estimate(DirectGradient())
        tensor([0., 0.])
    """

    unrolls = False
    """Whether it reads the inner moves that led to ω, which a point then keeps."""
    moves_adjoint = False
    """Whether its memory is a v that moves by the update of v."""
    carries_sensitivity = False
    """Whether its memory is dω/dλ, in the place of v."""
    row_wise = False
    """Whether a row of λ enters through the samples that read it alone, so that the rows of the batches serve for λ."""

    @property
    def capturable(self) -> bool:
        """Whether it takes the same operations on all batches, so that a step can be captured once for all."""
        return True

    def hvp_batches(self, inner_steps: int) -> int:
        """Return how many batches for products a step of so many inner moves reads."""
        return 1

    def memory(self, at: Point) -> Tree:
        """Return the memory at the start of a run; {} where there is none."""
        return {}

    def advance(self, step: StepContext, at: Point, adjoint: Variable, measured: Any) -> tuple[Variable, Any]:
        """Return the memory after a move at a point, and what the step sizes have learnt from it."""
        return adjoint, measured

    @abstractmethod
    def gradient(self, step: StepContext, position: Position) -> Leaves:
        """Return the hypergradient at a position."""


def readout(step: StepContext, at: Point, v: Tree) -> Leaves:
    """Return ∂_λ F - J v (Algorithm 1, line 8)."""
    by_lam = step.outer_at(at, step.batches.outer_grad_lam[0]).grad_lam
    return sub(by_lam, step.inner_at(at, step.batches.mixed_hvp[0]).mixed_hvp(v))


class _CarriedAdjoint(HypergradientEstimator):
    """An estimator whose memory is v, from v_0 = 0."""

    row_wise = True

    def memory(self, at: Point) -> Tree:
        return zeros_like(at.omega)

    def gradient(self, step: StepContext, position: Position) -> Leaves:
        return readout(step, *position)


@dataclass(frozen=True)
class Tracked(_CarriedAdjoint):
    """FSLA's estimator: v is carried from step to step, from v_0 = 0, and moves along H v - ∂_ω F.

    Args:
        moves: moves of v in a step.

    Examples:
        >>> estimate(fsla.hypergradients.Tracked(moves=2))
        tensor([-2., -2.])
    """

    moves: int = 1
    moves_adjoint = True

    def __post_init__(self) -> None:
        whole_number(self.moves, "moves", "Tracked")

    def hvp_batches(self, inner_steps: int) -> int:
        return self.moves

    def advance(self, step: StepContext, at: Point, adjoint: Variable, measured: Any) -> tuple[Variable, Any]:
        b = step.outer_at(at, step.batches.outer_grad_omega[0]).grad_omega
        several = self.moves > 1 and len(step.batches.hvp) == 1  # products of one batch, from one graph
        for j in range(self.moves):
            view = step.inner_at(at, batch_at(step.batches.hvp, j))
            hv = (view.linearized() if several else view).hvp(adjoint.value)
            residual, measured = step.step_sizes.residual(adjoint.value, hv, b, measured, view)
            adjoint = step.updates.adjoint(adjoint, residual, step.rates.adjoint_lr)
        return adjoint, measured


@dataclass(frozen=True)
class WarmStartCG(_CarriedAdjoint):
    """AID-BiO's estimator: v is carried from step to step, and improved by conjugate gradients.

    Args:
        hvp_steps: products in a step, one of them for the residual of the last v.

    Examples:
        >>> estimate(fsla.hypergradients.WarmStartCG(hvp_steps=3))
        tensor([-2., -2.])
    """

    hvp_steps: int

    def __post_init__(self) -> None:
        whole_number(self.hvp_steps, "hvp_steps", "WarmStartCG", least=2)

    def advance(self, step: StepContext, at: Point, adjoint: Variable, measured: Any) -> tuple[Variable, Any]:
        view = step.inner_at(at, step.batches.hvp[0]).linearized()
        residual = sub(step.outer_at(at, step.batches.outer_grad_omega[0]).grad_omega, view.hvp(adjoint.value))
        correction = ConjugateGradient(self.hvp_steps - 1)(view.hvp, residual)
        return step.updates.adjoint.set(adjoint, axpy(1.0, correction, adjoint.value)), measured


@dataclass(frozen=True)
class Solved(HypergradientEstimator):
    """Estimator that solves H v = ∂_ω F anew at each position.

    Args:
        solve: a linear solver such as `ConjugateGradient`, or any function of the product v ↦ H v and of ∂_ω F. If a
            step has several batches for products, each product reads the next one.

    Examples:
        >>> from fsla.hypergradients import ConjugateGradient, Solved
        >>> estimate(Solved(ConjugateGradient(hvp_steps=2)))
        tensor([-2., -2.])
    """

    solve: Solve | RandomNeumann
    row_wise = True

    @property
    def capturable(self) -> bool:
        return not isinstance(self.solve, RandomNeumann)

    def hvp_batches(self, inner_steps: int) -> int:
        return int(getattr(self.solve, "products", 1))

    def adjoint(self, step: StepContext, at: Point) -> Tree:
        """Return v at the point."""
        batches = step.batches
        solve = self.solve.drawn(batches.seed) if isinstance(self.solve, RandomNeumann) else self.solve
        b = step.outer_at(at, batches.outer_grad_omega[0]).grad_omega
        if len(batches.hvp) == 1:
            return solve(step.inner_at(at, batches.hvp[0]).linearized().hvp, b)
        views = (step.inner_at(at, batch) for batch in batches.hvp)
        return solve(lambda v: next(views).hvp(v), b)

    def gradient(self, step: StepContext, position: Position) -> Leaves:
        return readout(step, position.at, self.adjoint(step, position.at))


@dataclass(frozen=True)
class OneStep(HypergradientEstimator):
    """Estimator without a solve: v = β ∂_ω F, with the step size of v for β.

    DARTS and methods that align gradients do this. Its scale is off unless β is 1 over the curvature.

    Examples:
        >>> estimate(fsla.hypergradients.OneStep())
        tensor([-0.4000, -1.6000])
    """

    row_wise = True

    def gradient(self, step: StepContext, position: Position) -> Leaves:
        at = position.at
        b = step.outer_at(at, step.batches.outer_grad_omega[0]).grad_omega
        return readout(step, at, scale(step.rates.adjoint_lr, b))


@dataclass(frozen=True)
class ReverseUnroll(HypergradientEstimator):
    """Derivative of F through the inner moves of the point's trajectory, in reverse.

    It is the derivative of the moves themselves if the products read the batches of the moves.

    Args:
        unroll_length: how many of the last moves are differentiated; None for all.

    Examples:
        >>> estimate(fsla.hypergradients.ReverseUnroll(), inner_steps=4)
        tensor([-1.1800, -2.0000])
    """

    unroll_length: int | None = None
    unrolls = True
    row_wise = True

    def __post_init__(self) -> None:
        if self.unroll_length is not None:
            whole_number(self.unroll_length, "unroll_length", "ReverseUnroll")

    def hvp_batches(self, inner_steps: int) -> int:
        return inner_steps

    def gradient(self, step: StepContext, position: Position) -> Leaves:
        at = position.at
        first = 0 if self.unroll_length is None else max(0, len(at.trajectory) - self.unroll_length)
        p, by_lam = _outer_gradients(step, at)
        backwards = (_term(step, at, t, last=t == first) for t in reversed(range(first, len(at.trajectory))))
        return adjoint_recursion(backwards, p, by_lam)


@dataclass(frozen=True)
class ForwardUnroll(HypergradientEstimator):
    """Derivative of F through the inner moves of the trajectory, from the first to the last.

    Each move takes p products, so it suits few coordinates of λ.

    Examples:
        >>> estimate(fsla.hypergradients.ForwardUnroll(), inner_steps=4)
        tensor([-1.1800, -2.0000])
    """

    unrolls = True

    def hvp_batches(self, inner_steps: int) -> int:
        return inner_steps

    def gradient(self, step: StepContext, position: Position) -> Leaves:
        at = position.at
        p, by_lam = _outer_gradients(step, at)
        terms = (_term(step, at, t) for t in range(len(at.trajectory)))
        start = [zeros_like(at.omega) for _ in basis(at.lam)]
        return sub(by_lam, apply_matrix(matrix_recursion(terms, at.lam, start), p, at.lam))


def _outer_gradients(step: StepContext, at: Point) -> tuple[Tree, Leaves]:
    """∂_ω F and ∂_λ F, each on its own batch."""
    by_omega = step.outer_at(at, step.batches.outer_grad_omega[0]).grad_omega
    return by_omega, step.outer_at(at, step.batches.outer_grad_lam[0]).grad_lam


def _term(step: StepContext, at: Point, t: int, *, last: bool = False) -> Term:
    """The inner move t of a trajectory."""
    omega, lr = at.trajectory[t]
    return Term(step.inner_at(Point(at.lam, omega), batch_at(step.batches.hvp, t)), lr, last=last)


@dataclass(frozen=True)
class ForwardSensitivity(HypergradientEstimator):
    """RTHO's estimator: A ← A (I - β H) + β J once a step, with p rows of the form of ω.

    β is the inner step. FSLA keeps one vector in the place of this matrix.

    Examples:
        >>> estimate(fsla.hypergradients.ForwardSensitivity())
        tensor([-2., -2.])
    """

    carries_sensitivity = True

    def memory(self, at: Point) -> Tree:
        rows = size(at.lam)
        return {name: t.new_zeros((rows, *t.shape)) for name, t in at.omega.items()}

    def advance(self, step: StepContext, at: Point, adjoint: Variable, measured: Any) -> tuple[Variable, Any]:
        view = step.inner_at(at, step.batches.hvp[0])
        rows = matrix_recursion([Term(view, step.rates.adjoint_lr)], at.lam, _rows(adjoint.value))
        stacked = {name: torch.stack([row[name] for row in rows]) for name in at.omega}
        return step.updates.adjoint.set(adjoint, stacked), measured

    def gradient(self, step: StepContext, position: Position) -> Leaves:
        at = position.at
        p, by_lam = _outer_gradients(step, at)
        return sub(by_lam, apply_matrix(_rows(position.adjoint), p, at.lam))


def _rows(stacked: Tree) -> list[Tree]:
    count = len(next(iter(stacked.values())))
    return [{name: t[i] for name, t in stacked.items()} for i in range(count)]


@dataclass(frozen=True)
class Exact(HypergradientEstimator):
    """Estimator of ∇f(λ) itself: ω_λ by Newton's method from the present ω, v by a direct solve.

    Examples:
        >>> estimate(fsla.hypergradients.Exact())
        tensor([-2., -2.])
    """

    capturable = False

    def solved(self, step: StepContext, at: Point) -> Point:
        """Return (λ, ω_λ)."""
        return Point(at.lam, solve_inner(lambda point: step.inner_at(point, step.batches.hvp[0]), at))

    def gradient(self, step: StepContext, position: Position) -> Leaves:
        at = self.solved(step, position.at)
        return Solved(solve_directly).gradient(step, Position(at, {}))
