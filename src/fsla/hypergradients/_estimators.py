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
    """How the hypergradient is estimated."""

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


@dataclass(frozen=True)
class Tracked(HypergradientEstimator):
    """v moves by its own update along H v - ∂_ω F, `moves` times a step (FSLA: once), from v_0 = 0."""

    moves: int = 1
    moves_adjoint = True
    row_wise = True

    def __post_init__(self) -> None:
        whole_number(self.moves, "moves", "Tracked")

    def hvp_batches(self, inner_steps: int) -> int:
        return self.moves

    def memory(self, at: Point) -> Tree:
        return zeros_like(at.omega)

    def advance(self, step: StepContext, at: Point, adjoint: Variable, measured: Any) -> tuple[Variable, Any]:
        b = step.outer_at(at, step.batches.outer_grad_omega[0]).grad_omega
        several = self.moves > 1 and len(step.batches.hvp) == 1  # products of one batch, from one graph
        for j in range(self.moves):
            view = step.inner_at(at, batch_at(step.batches.hvp, j))
            hv = (view.linearized() if several else view).hvp(adjoint.value)
            residual, measured = step.step_sizes.residual(adjoint.value, hv, b, measured)
            adjoint = step.updates.adjoint(adjoint, residual, step.rates.adjoint_lr)
        return adjoint, measured

    def gradient(self, step: StepContext, position: Position) -> Leaves:
        return readout(step, *position)


@dataclass(frozen=True)
class WarmStartCG(HypergradientEstimator):
    """v by conjugate gradients from the v of the step before: of `hvp_steps` products, one is for its residual."""

    hvp_steps: int
    row_wise = True

    def __post_init__(self) -> None:
        whole_number(self.hvp_steps, "hvp_steps", "WarmStartCG", least=2)

    def memory(self, at: Point) -> Tree:
        return zeros_like(at.omega)

    def advance(self, step: StepContext, at: Point, adjoint: Variable, measured: Any) -> tuple[Variable, Any]:
        view = step.inner_at(at, step.batches.hvp[0]).linearized()
        residual = sub(step.outer_at(at, step.batches.outer_grad_omega[0]).grad_omega, view.hvp(adjoint.value))
        correction = ConjugateGradient(self.hvp_steps - 1)(view.hvp, residual)
        return step.updates.adjoint.set(adjoint, axpy(1.0, correction, adjoint.value)), measured

    def gradient(self, step: StepContext, position: Position) -> Leaves:
        return readout(step, *position)


@dataclass(frozen=True)
class Solved(HypergradientEstimator):
    """v = solve(H, ∂_ω F) at the position itself, by one of `_linear_solvers` or any function of the product and ∂_ω F.

    Where the batches for products are several, each product is of the next one.
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
    """v = β ∂_ω F, with the step size of v for β: what DARTS and methods that align gradients do."""

    row_wise = True

    def gradient(self, step: StepContext, position: Position) -> Leaves:
        at = position.at
        b = step.outer_at(at, step.batches.outer_grad_omega[0]).grad_omega
        return readout(step, at, scale(step.rates.adjoint_lr, b))


@dataclass(frozen=True)
class ReverseUnroll(HypergradientEstimator):
    """The derivative of F through the inner moves of the point's trajectory, or through the last `unroll_length`.

    Where the batches for products are those of the inner moves, it is the derivative of the moves that were made.
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
        p = step.outer_at(at, step.batches.outer_grad_omega[0]).grad_omega
        by_lam = step.outer_at(at, step.batches.outer_grad_lam[0]).grad_lam
        backwards = (_term(step, at, t, last=t == first) for t in reversed(range(first, len(at.trajectory))))
        return adjoint_recursion(backwards, p, by_lam)


@dataclass(frozen=True)
class ForwardUnroll(HypergradientEstimator):
    """The derivative of F through the inner moves of the trajectory, from the first to the last: for few coordinates
    of λ."""

    unrolls = True

    def hvp_batches(self, inner_steps: int) -> int:
        return inner_steps

    def gradient(self, step: StepContext, position: Position) -> Leaves:
        at = position.at
        p = step.outer_at(at, step.batches.outer_grad_omega[0]).grad_omega
        by_lam = step.outer_at(at, step.batches.outer_grad_lam[0]).grad_lam
        terms = (_term(step, at, t) for t in range(len(at.trajectory)))
        start = [zeros_like(at.omega) for _ in basis(at.lam)]
        return sub(by_lam, apply_matrix(matrix_recursion(terms, at.lam, start), p, at.lam))


def _term(step: StepContext, at: Point, t: int, *, last: bool = False) -> Term:
    """The inner move t of a trajectory."""
    omega, lr = at.trajectory[t]
    return Term(step.inner_at(Point(at.lam, omega), batch_at(step.batches.hvp, t)), lr, last=last)


@dataclass(frozen=True)
class ForwardSensitivity(HypergradientEstimator):
    """A ← A (I - β H) + β J, once a step, with p rows of the form of ω: β is the inner step.

    FSLA keeps one vector in the place of this matrix. The memory has the rows of each tensor of ω stacked.
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
        p = step.outer_at(at, step.batches.outer_grad_omega[0]).grad_omega
        by_lam = step.outer_at(at, step.batches.outer_grad_lam[0]).grad_lam
        return sub(by_lam, apply_matrix(_rows(position.adjoint), p, at.lam))


def _rows(stacked: Tree) -> list[Tree]:
    count = len(next(iter(stacked.values())))
    return [{name: t[i] for name, t in stacked.items()} for i in range(count)]


@dataclass(frozen=True)
class Exact(HypergradientEstimator):
    """∇f(λ) on the step's batches; ω of the position is only where Newton's method starts."""

    capturable = False

    def solved(self, step: StepContext, at: Point) -> Point:
        """Return (λ, ω_λ)."""
        return Point(at.lam, solve_inner(lambda point: step.inner_at(point, step.batches.hvp[0]), at))

    def gradient(self, step: StepContext, position: Position) -> Leaves:
        at = self.solved(step, position.at)
        return Solved(solve_directly).gradient(step, Position(at, {}))
