"""Proposition 1 to machine precision: ω_λ by Newton's method, v = H⁻¹ ∂_ω F by a dense or a conjugate-gradient solve.

The reference that every estimator is measured against. Up to DENSE coordinates of ω the Hessian is assembled and
factorised; above, systems are solved by conjugate gradients to 1e-12, or as far as rounding allows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fsla._tree import Tree, axpy, basis, dot, flatten, norm, size, unflatten
from fsla.hypergradients._linear_solvers import Matvec, cg, relative_residual
from fsla.problems._views import Point, View

DENSE = 1000
SKEW = 1e-2
"""How far from symmetric a Hessian may be, relatively: products by differences in single precision have errors."""
_TOL = 1e-12


def solve_directly(matvec: Matvec, b: Tree) -> Tree:
    """Return v = H⁻¹ b for a positive definite H."""
    if size(b) > DENSE:
        v = cg(matvec, b, steps=20 * size(b), tol=_TOL, stop_early=True)
        residual = float(relative_residual(matvec, b, v))
        if not residual < torch.finfo(flatten(b).dtype).eps ** 0.5:
            raise ValueError(f"{_NEEDS} Conjugate gradients stopped at a relative residual of {residual:.1e}.")
        return v
    hessian = hessian_matrix(matvec, b)
    factor, failed = torch.linalg.cholesky_ex(hessian)
    if bool(failed) or not bool(factor.isfinite().all()):
        lowest = torch.linalg.eigvalsh(hessian)[0] if bool(hessian.isfinite().all()) else torch.tensor(torch.nan)
        raise ValueError(f"{_NEEDS} Its smallest eigenvalue here is {float(lowest):.3e}.")
    return unflatten(torch.cholesky_solve(flatten(b)[:, None], factor)[:, 0], b)


_NEEDS = (
    "The exact hypergradient needs a positive definite Hessian of the inner loss G in omega. Add a ridge to G, or use "
    "method='cg' at a point of your choice."
)


def hessian_matrix(matvec: Matvec, like: Tree) -> Tensor:
    """Return H as an n x n matrix, from n products."""
    h = torch.stack([flatten(matvec(e)) for e in basis(like)])
    skew = float((h - h.T).abs().max())
    if skew > SKEW * float(h.abs().max()):
        raise ValueError(
            f"The exact hypergradient needs a symmetric Hessian of the inner loss G, and this is not, by {skew:.1e}. "
            "For a fixed-point map use method='neumann' with step_size=1."
        )
    return (h + h.T) / 2


def solve_inner(inner_at: Callable[[Point], View], at: Point, *, steps: int = 100) -> Tree:
    """Return ω_λ, from at.omega, by Newton's method with backtracking, to the rounding level of ∂_ω G."""
    omega = at.omega
    inner = inner_at(Point(at.lam, omega)).linearized()
    unit = torch.finfo(flatten(omega).dtype).eps
    for _ in range(steps):
        gradient = inner.grad_omega
        move = solve_directly(inner.hvp, gradient)
        gap = float(norm(gradient))
        length = float(norm(move))
        slope = float(dot(move, gradient))
        size = 1 + float(norm(omega))
        if length <= unit * size:
            return omega
        for halving in range(40):
            new = axpy(-(0.5**halving), move, omega)
            there = inner_at(Point(at.lam, new)).linearized()
            nearer = float(norm(there.grad_omega)) < gap / 2  # near ω_λ the values are equal to rounding
            if nearer or float(there.value) < float(inner.value) - 1e-4 * 0.5**halving * slope:
                break
        else:  # no point on the way is better: ω is as good as rounding allows, or Newton's method has failed
            break
        omega = new
        inner = there
    if length <= unit**0.5 * size:
        return omega
    raise ValueError(
        f"The inner problem must be solvable by Newton's method, but its steps stay at length {length:.1e}. "
        "Check that G is bounded below and strongly convex in omega, or start nearer to its minimum."
    )
