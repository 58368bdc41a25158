"""Lemma 2's cases and section 4: ways to have v ≈ H⁻¹ ∂_ω F, or to do without it.

An estimator has a memory and two parts. `advance` moves the memory by one step (Algorithm 1, line 7); `gradient` is the
hypergradient ∂_λ F - J v at any point, memory and sample (line 8). The split lets one STORM correction, which needs the
gradient at the old and the new point on one sample, serve every estimator.

    Tracked    FSLA: v is carried from step to step, and one term of the forward mode is added at each
    Implicit   NS, CG: v is solved for afresh at each point
    Unrolled   BP: the backward mode over the inner steps that led to the point
    Tangent    the same derivative as Unrolled, by the matrix recursion: p products a step
    Exact      the reference: ω_λ by Newton's method, v by a direct solve
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fsla import linsolve
from fsla.checks import positive, whole_number
from fsla.exact import solve_directly, solve_inner
from fsla.formulation import Term, adjoint_recursion, apply_matrix, matrix_recursion, vector_recursion
from fsla.linsolve import Matvec
from fsla.problem import Oracles, Point
from fsla.sample import Sample, batch_of_step
from fsla.tree import Leaves, Scalar, Tree, norm, scale, sub, zeros_like


class Estimator(Protocol):
    def hvp_batches(self, inner_steps: int) -> int:
        """How many batches for products a hyper-iteration of so many inner steps reads."""
        ...

    def init(self, at: Point) -> Any: ...
    def advance(self, problem: Oracles, at: Point, memory: Any, xi: Sample, beta: Scalar) -> Any: ...
    def gradient(self, problem: Oracles, at: Point, memory: Any, xi: Sample) -> Leaves: ...


def readout(problem: Oracles, at: Point, v: Tree, xi: Sample) -> Leaves:
    """Returns ∂_λ F - J v (Algorithm 1, line 8)."""
    return sub(problem.outer_at(at, xi.outer_lam).d_lam, problem.inner_at(at, xi.cross).cross(v))


@dataclass(frozen=True)
class Tracked:
    """v ← v + β (∂_ω F - H v), `steps` times a hyper-iteration (FSLA: once), from v_0 = 0.

    `radius`, if given, keeps ‖v‖ ≤ radius, as the proof does with C_{F,ω} / μ.
    """

    steps: int = 1
    radius: float | None = None

    def __post_init__(self) -> None:
        whole_number(self.steps, "steps", "Tracked")
        positive(self.radius, "radius", "Tracked", optional=True)

    def hvp_batches(self, inner_steps: int) -> int:
        return self.steps

    def init(self, at: Point) -> Tree:
        return zeros_like(at.omega)

    def advance(self, problem: Oracles, at: Point, v: Tree, xi: Sample, beta: Scalar) -> Tree:
        p = problem.outer_at(at, xi.outer_omega).d_omega
        views = (problem.inner_at(at, batch_of_step(xi.hvp, j)) for j in range(self.steps))
        v = vector_recursion((Term(view, beta, p) for view in views), v)
        return v if self.radius is None else scale(torch.clamp(self.radius / norm(v), max=1.0), v)

    def gradient(self, problem: Oracles, at: Point, v: Tree, xi: Sample) -> Leaves:
        return readout(problem, at, v, xi)


class Memoryless:
    """What the estimators that compute everything afresh have in common."""

    def hvp_batches(self, inner_steps: int) -> int:
        return 1

    def init(self, at: Point) -> None:
        return None

    def advance(self, problem: Oracles, at: Point, memory: None, xi: Sample, beta: Scalar) -> None:
        return None


@dataclass(frozen=True)
class Neumann:
    """K terms of the Neumann series with step β."""

    steps: int
    beta: float

    def __post_init__(self) -> None:
        whole_number(self.steps, "steps", "Neumann")
        positive(self.beta, "beta", "Neumann", optional=True)

    def __call__(self, matvec: Matvec, b: Tree) -> Tree:
        return linsolve.neumann(matvec, b, steps=self.steps, beta=self.beta)


@dataclass(frozen=True)
class ConjugateGradient:
    """K conjugate-gradient steps from zero; `stop_early` saves products after convergence, but makes the host wait."""

    steps: int
    stop_early: bool = False
    tol: float | None = None

    def __post_init__(self) -> None:
        whole_number(self.steps, "steps", "ConjugateGradient")
        positive(self.tol, "tol", "ConjugateGradient", optional=True)

    def __call__(self, matvec: Matvec, b: Tree) -> Tree:
        return linsolve.cg(matvec, b, steps=self.steps, tol=self.tol, stop_early=self.stop_early)


@dataclass(frozen=True)
class Implicit(Memoryless):
    """v = solve(H, ∂_ω F) at the point itself."""

    solve: Callable[[Matvec, Tree], Tree]

    def adjoint(self, problem: Oracles, at: Point, xi: Sample) -> Tree:
        """v at the point."""
        view = problem.inner_at(at, batch_of_step(xi.hvp, 0)).linearised()
        return self.solve(view.hvp, problem.outer_at(at, xi.outer_omega).d_omega)

    def gradient(self, problem: Oracles, at: Point, memory: None, xi: Sample) -> Leaves:
        return readout(problem, at, self.adjoint(problem, at, xi), xi)


@dataclass(frozen=True)
class Unrolled(Memoryless):
    """The derivative of F through the inner steps in at.trail, or through the last `truncate` of them.

    On a sample whose `hvp` batches are its `inner` batches this is the derivative of the steps that were taken.
    """

    truncate: int | None = None

    def __post_init__(self) -> None:
        if self.truncate is not None:
            whole_number(self.truncate, "truncate", "Unrolled")

    def hvp_batches(self, inner_steps: int) -> int:
        return inner_steps

    def gradient(self, problem: Oracles, at: Point, memory: None, xi: Sample) -> Leaves:
        first = 0 if self.truncate is None else max(0, len(at.trail) - self.truncate)

        def term(k: int) -> Term:
            omega, eta = at.trail[k]
            return Term(problem.inner_at(Point(at.lam, omega), batch_of_step(xi.hvp, k)), eta, last=k == first)

        backwards = (term(k) for k in reversed(range(first, len(at.trail))))
        p = problem.outer_at(at, xi.outer_omega).d_omega
        return adjoint_recursion(backwards, p, problem.outer_at(at, xi.outer_lam).d_lam)


@dataclass(frozen=True)
class Tangent(Memoryless):
    """The derivative of F through the inner steps in at.trail, from the first to the last: for few coordinates of λ."""

    def hvp_batches(self, inner_steps: int) -> int:
        return inner_steps

    def gradient(self, problem: Oracles, at: Point, memory: None, xi: Sample) -> Leaves:
        terms = [
            Term(problem.inner_at(Point(at.lam, omega), batch_of_step(xi.hvp, k)), eta)
            for k, (omega, eta) in enumerate(at.trail)
        ]
        p = problem.outer_at(at, xi.outer_omega).d_omega
        change = apply_matrix(matrix_recursion(terms, at.lam, at.omega), p, at.lam)
        return sub(problem.outer_at(at, xi.outer_lam).d_lam, change)


@dataclass(frozen=True)
class Exact(Memoryless):
    """∇f(λ) on the sample's batches; at.omega is only where Newton's method starts."""

    def solved(self, problem: Oracles, at: Point, xi: Sample) -> Point:
        """(λ, ω_λ)."""
        return Point(at.lam, solve_inner(problem, at, xi.hvp))

    def gradient(self, problem: Oracles, at: Point, memory: None, xi: Sample) -> Leaves:
        return Implicit(solve_directly).gradient(problem, self.solved(problem, at, xi), None, xi)
