"""Lemma 2's cases and section 4: four ways to have v ≈ H⁻¹ ∂_ω F, or to do without it.

An estimator has a memory and two parts. `advance` moves the memory by one step (Algorithm 1, line 7); `gradient` is the
hypergradient ∂_λ F - J v at any point, memory and sample (line 8). The split lets one STORM correction, which needs the
gradient at the old and the new point on one sample, serve every estimator.

    Tracked    FSLA: v is carried from step to step, and one term of the forward mode is added at each
    Implicit   NS, CG: v is solved for afresh at each point
    Unrolled   BP: the backward mode over the inner steps that led to the point
    Exact      the reference: ω_λ by Newton's method, v by a direct solve
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fsla import linsolve
from fsla.checks import positive, whole
from fsla.exact import solve_adjoint, solve_inner
from fsla.formulation import Term, adjoint_recursion, vector_recursion
from fsla.linsolve import Matvec
from fsla.problem import Oracles, Point, Sample, batch_of_step
from fsla.tree import Scalar, Tree, norm, scale, sub, zeros_like
from fsla.wrap import curved, known_curvature


class Estimator(Protocol):
    def init(self, at: Point) -> Any: ...
    def advance(self, problem: Oracles, at: Point, memory: Any, xi: Sample, beta: Scalar) -> Any: ...
    def gradient(self, problem: Oracles, at: Point, memory: Any, xi: Sample) -> Tree: ...


def readout(problem: Oracles, at: Point, v: Tree, xi: Sample) -> Tree:
    """Returns ∂_λ F - J v (Algorithm 1, line 8)."""
    return sub(problem.outer_at(at, xi.outer_lam).d_lam, problem.inner_at(at, xi.cross).cross(v))


@dataclass(frozen=True)
class Tracked:
    """v ← v + β (∂_ω F - H v), `steps` times a hyper-iteration (FSLA: once), from v_0 = 0.

    `radius`, if given, keeps ‖v‖ ≤ radius, as the proof does with C_{F,ω} / μ. With `curvature` "gauss-newton" H is the
    Gauss-Newton matrix, along whose directions v cannot run away; `damping` is added to its diagonal.
    """

    steps: int = 1
    radius: float | None = None
    curvature: str = "hessian"
    damping: float = 0.0

    def __post_init__(self) -> None:
        whole(self.steps, "steps", "Tracked")
        positive(self.radius, "radius", "Tracked")
        known_curvature(self.curvature, self.damping)

    def init(self, at: Point) -> Tree:
        return zeros_like(at.omega)

    def advance(self, problem: Oracles, at: Point, v: Tree, xi: Sample, beta: Scalar) -> Tree:
        p = problem.outer_at(at, xi.outer_omega).d_omega
        views = (problem.inner_at(at, batch_of_step(xi.hvp, j)) for j in range(self.steps))
        terms = (Term(curved(view, self.curvature, self.damping), beta, p) for view in views)
        v = vector_recursion(terms, v)
        return v if self.radius is None else scale(torch.clamp(self.radius / norm(v), max=1.0), v)

    def gradient(self, problem: Oracles, at: Point, v: Tree, xi: Sample) -> Tree:
        return readout(problem, at, v, xi)


class Memoryless:
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
        whole(self.steps, "steps", "Neumann")
        positive(self.beta, "beta", "Neumann")

    def __call__(self, matvec: Matvec, b: Tree) -> Tree:
        return linsolve.neumann(matvec, b, steps=self.steps, beta=self.beta)


@dataclass(frozen=True)
class ConjugateGradient:
    """K conjugate-gradient steps from zero; `stop_early` saves products after convergence, but makes the host wait."""

    steps: int
    stop_early: bool = False

    def __post_init__(self) -> None:
        whole(self.steps, "steps", "ConjugateGradient")

    def __call__(self, matvec: Matvec, b: Tree) -> Tree:
        return linsolve.cg(matvec, b, steps=self.steps, stop_early=self.stop_early)


@dataclass(frozen=True)
class Implicit(Memoryless):
    """v = solve(H, ∂_ω F) at the point itself, with H as in `Tracked`."""

    solve: Callable[[Matvec, Tree], Tree]
    curvature: str = "hessian"
    damping: float = 0.0

    def __post_init__(self) -> None:
        known_curvature(self.curvature, self.damping)

    def gradient(self, problem: Oracles, at: Point, memory: None, xi: Sample) -> Tree:
        view = curved(problem.inner_at(at, batch_of_step(xi.hvp, 0)), self.curvature, self.damping)
        v = self.solve(view.hvp, problem.outer_at(at, xi.outer_omega).d_omega)
        return readout(problem, at, v, xi)


@dataclass(frozen=True)
class Unrolled(Memoryless):
    """The derivative of F through the inner steps in at.trail, or through the last `truncate` of them.

    On a sample whose `hvp` batches are its `inner` batches this is the derivative of the steps that were taken.
    """

    truncate: int | None = None

    def __post_init__(self) -> None:
        if self.truncate is not None:
            whole(self.truncate, "truncate", "Unrolled")

    def gradient(self, problem: Oracles, at: Point, memory: None, xi: Sample) -> Tree:
        first = 0 if self.truncate is None else max(0, len(at.trail) - self.truncate)
        backwards = (
            Term(problem.inner_at(Point(at.lam, at.trail[k][0]), batch_of_step(xi.hvp, k)), at.trail[k][1])
            for k in reversed(range(first, len(at.trail)))
        )
        p = problem.outer_at(at, xi.outer_omega).d_omega
        return adjoint_recursion(backwards, p, problem.outer_at(at, xi.outer_lam).d_lam)


@dataclass(frozen=True)
class Exact(Memoryless):
    """∇f(λ) on the sample's batches; at.omega is only where Newton's method starts."""

    def gradient(self, problem: Oracles, at: Point, memory: None, xi: Sample) -> Tree:
        there = Point(at.lam, solve_inner(problem, at, xi.hvp))
        v = solve_adjoint(problem.inner_at(there, xi.hvp), problem.outer_at(there, xi.outer_omega).d_omega)
        return readout(problem, there, v, xi)
