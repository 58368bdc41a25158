"""Lemma 2's cases and section 4: ways to have v ≈ H⁻¹ ∂_ω F, or to do without it.

An estimator has a memory and two parts. `advance` moves the memory by one step (Algorithm 1, line 7); `gradient` is the
hypergradient ∂_λ F - J v at any point, memory and sample (line 8). The split lets one STORM correction, which needs the
gradient at the old and the new point on one sample, serve every estimator.

    Tracked    FSLA: v is carried from step to step, and one term of the forward mode is added at each
    Warm       AID-BiO: v is carried, and improved by conjugate gradients
    Implicit   NS, CG: v is solved for afresh at each point, by one of `_linear_solvers`
    Unrolled   BP: the backward mode over the inner steps that led to the point
    Tangent    the same derivative as Unrolled, by the matrix recursion: p products a step
    Carried    RTHO: the matrix of that recursion is carried from step to step
    Exact      the reference: ω_λ by Newton's method, v by a direct solve
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fsla._checks import positive, whole_number
from fsla._tree import Leaves, Scalar, Tree, axpy, basis, norm, scale, sub, zeros_like
from fsla.hypergradients import _linsolve as linsolve
from fsla.hypergradients._exact import solve_directly, solve_inner
from fsla.hypergradients._linear_solvers import ConjugateGradient, Identity, Neumann, RandomNeumann, Solve
from fsla.hypergradients._recursions import Term, adjoint_recursion, apply_matrix, matrix_recursion, vector_recursion
from fsla.problems._batches import Batches, Sample, batch_of_step
from fsla.problems._problem import Oracles, Point

__all__ = [
    "Carried",
    "ConjugateGradient",
    "Estimator",
    "Exact",
    "Identity",
    "Implicit",
    "Neumann",
    "RandomNeumann",
    "Tangent",
    "Tracked",
    "Unrolled",
    "Warm",
    "readout",
]


class Estimator(Protocol):
    @property
    def capturable(self) -> bool:
        """Whether it takes the same operations on every sample, so that a step can be captured once for all."""
        ...

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
    capturable = True

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

    @property
    def capturable(self) -> bool:
        return True

    def hvp_batches(self, inner_steps: int) -> int:
        return 1

    def init(self, at: Point) -> None:
        return None

    def advance(self, problem: Oracles, at: Point, memory: None, xi: Sample, beta: Scalar) -> None:
        return None


@dataclass(frozen=True)
class Implicit(Memoryless):
    """v = solve(H, ∂_ω F) at the point itself, by one of `_linear_solvers` or any function of the product and ∂_ω F.

    Where the sample's `hvp` holds several batches, each product is of the next one.
    """

    solve: Solve | RandomNeumann

    @property
    def capturable(self) -> bool:
        return not isinstance(self.solve, RandomNeumann)

    def hvp_batches(self, inner_steps: int) -> int:
        return int(getattr(self.solve, "batches", 1))

    def adjoint(self, problem: Oracles, at: Point, xi: Sample) -> Tree:
        """v at the point."""
        solve = self.solve.drawn(xi.seed) if isinstance(self.solve, RandomNeumann) else self.solve
        b = problem.outer_at(at, xi.outer_omega).d_omega
        if not isinstance(xi.hvp, Batches):
            return solve(problem.inner_at(at, xi.hvp).linearised().hvp, b)
        views = (problem.inner_at(at, batch) for batch in xi.hvp)
        return solve(lambda v: next(views).hvp(v), b)

    def gradient(self, problem: Oracles, at: Point, memory: None, xi: Sample) -> Leaves:
        return readout(problem, at, self.adjoint(problem, at, xi), xi)


@dataclass(frozen=True)
class Warm:
    """v by conjugate gradients from the v of the step before: one product for its residual, and `steps` - 1 steps."""

    steps: int
    capturable = True

    def __post_init__(self) -> None:
        whole_number(self.steps, "steps", "Warm", least=2)

    def hvp_batches(self, inner_steps: int) -> int:
        return 1

    def init(self, at: Point) -> Tree:
        return zeros_like(at.omega)

    def advance(self, problem: Oracles, at: Point, v: Tree, xi: Sample, beta: Scalar) -> Tree:
        view = problem.inner_at(at, batch_of_step(xi.hvp, 0)).linearised()
        residual = sub(problem.outer_at(at, xi.outer_omega).d_omega, view.hvp(v))
        return axpy(1.0, linsolve.cg(view.hvp, residual, steps=self.steps - 1), v)

    def gradient(self, problem: Oracles, at: Point, v: Tree, xi: Sample) -> Leaves:
        return readout(problem, at, v, xi)


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
        start = [zeros_like(at.omega) for _ in basis(at.lam)]
        change = apply_matrix(matrix_recursion(terms, at.lam, start), p, at.lam)
        return sub(problem.outer_at(at, xi.outer_lam).d_lam, change)


@dataclass(frozen=True)
class Carried:
    """A ← A (I - β H) + β J, once a hyper-iteration, with p rows of the form of ω: β is the inner step. FSLA keeps one
    vector in the place of this matrix."""

    capturable = True

    def hvp_batches(self, inner_steps: int) -> int:
        return 1

    def init(self, at: Point) -> tuple[Tree, ...]:
        return tuple(zeros_like(at.omega) for _ in basis(at.lam))

    def advance(
        self, problem: Oracles, at: Point, matrix: tuple[Tree, ...], xi: Sample, beta: Scalar
    ) -> tuple[Tree, ...]:
        term = Term(problem.inner_at(at, batch_of_step(xi.hvp, 0)), beta)
        return tuple(matrix_recursion([term], at.lam, matrix))

    def gradient(self, problem: Oracles, at: Point, matrix: tuple[Tree, ...], xi: Sample) -> Leaves:
        p = problem.outer_at(at, xi.outer_omega).d_omega
        return sub(problem.outer_at(at, xi.outer_lam).d_lam, apply_matrix(matrix, p, at.lam))


@dataclass(frozen=True)
class Exact(Memoryless):
    """∇f(λ) on the sample's batches; at.omega is only where Newton's method starts."""

    def solved(self, problem: Oracles, at: Point, xi: Sample) -> Point:
        """(λ, ω_λ)."""
        return Point(at.lam, solve_inner(problem, at, xi.hvp))

    def gradient(self, problem: Oracles, at: Point, memory: None, xi: Sample) -> Leaves:
        return Implicit(solve_directly).gradient(problem, self.solved(problem, at, xi), None, xi)
