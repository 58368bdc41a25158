"""Solvers of H v = b for a symmetric H known by its products: solve(matvec, b, …) -> v.

    neumann          β Σ_{j<K} (I - βH)^j b: K terms, K - 1 products; converges iff 0 < β < 2/L
    random_neumann   K β (I - βH)^j b with j uniform in {0 … K-1}: its mean is the sum above (Ghadimi & Wang)
    cg               K conjugate-gradient steps from zero: K products; exact for K ≥ n

`neumann` equals K gradient steps of size β from zero on ½ vᵀHv - bᵀv. Where each product is of another batch's H, the
first one is in most terms of the series, the last in one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fsla._tree import Scalar, Tree, axpy, dot, norm, scale, size, sub, zeros_like

Matvec = Callable[[Tree], Tree]


def neumann(matvec: Matvec, b: Tree, *, steps: int, beta: Scalar) -> Tree:
    """Returns the first `steps` terms of the Neumann series."""
    term = b
    total = b
    for _ in range(steps - 1):
        term = axpy(-beta, matvec(term), term)
        total = axpy(1.0, term, total)
    return scale(beta, total)


def random_neumann(matvec: Matvec, b: Tree, *, steps: int, beta: Scalar, length: int) -> Tree:
    """Returns term `length` of the Neumann series, scaled so that with a length drawn from 0 … steps - 1 its mean is
    the sum of the first `steps` terms."""
    v = b
    for _ in range(length):
        v = axpy(-beta, matvec(v), v)
    return scale(steps * beta, v)


class Step(NamedTuple):
    """One step of CG: x_{k+1} = (I - α_k H) x_k + α_k p_k, which is a Term of Lemma 2's forward mode."""

    alpha: Tensor
    p: Tree


def cg(
    matvec: Matvec,
    b: Tree,
    *,
    steps: int,
    tol: float | None = None,
    stop_early: bool = False,
    history: list[Step] | None = None,
) -> Tree:
    """Returns the result of at most `steps` conjugate-gradient steps from zero.

    Once ‖r‖ ≤ tol ‖b‖ (by default the rounding unit), or when a direction q with qᵀHq ≤ 0 shows that H is not positive
    definite, the result no longer changes. With stop_early the loop then also ends, which saves products but makes
    the host wait for the device at each step. `history` receives the (α_k, p_k) of Lemma 2.
    """
    v = zeros_like(b)
    r = b
    q = b
    rr = dot(b, b)
    floor = rr * (torch.finfo(rr.dtype).eps if tol is None else tol) ** 2
    past = zeros_like(b)
    active = rr > floor
    for _ in range(steps):
        hq = matvec(q)
        curvature = dot(q, hq)
        active = active & (rr > floor) & (curvature > 0)
        if stop_early and not bool(active):
            break
        alpha = torch.where(active, rr / torch.where(active, curvature, 1), 0)
        if history is not None:
            history.append(Step(alpha, axpy(1.0, past, b)))
        v = axpy(alpha, q, v)
        r = axpy(-alpha, hq, r)
        rr, before = dot(r, r), rr
        past = scale(torch.where(active, rr / torch.where(active, before, 1), 0), q)
        q = axpy(1.0, past, r)
    return v


def relative_residual(matvec: Matvec, b: Tree, v: Tree) -> Tensor:
    """Returns ‖b - H v‖ / ‖b‖ (0 where b = 0, NaN where anything is), at the price of one product."""
    scale_b = norm(b)
    gap = norm(sub(b, matvec(v)))
    return torch.where(scale_b == 0, gap, gap / torch.where(scale_b == 0, 1, scale_b))


def largest_eigenvalue(matvec: Matvec, like: Tree, *, steps: int = 30, seed: int = 0) -> float:
    """Returns a lower bound of the largest eigenvalue L of H, sharp after a few dozen Lanczos steps.

    A Ritz value never exceeds L, so a step β with β · bound > 2 certainly exceeds 2/L. A few steps are enough where b
    has weight on the top eigenvector; the start is drawn on the CPU from `seed`, so that it is the same on every
    device.
    """
    generator = torch.Generator().manual_seed(seed)
    q: Tree = {name: torch.randn(t.shape, dtype=t.dtype, generator=generator).to(t.device) for name, t in like.items()}
    q = scale(1 / norm(q), q)
    basis = []
    diagonal = []
    off = []
    for _ in range(min(steps, size(like))):
        basis.append(q)
        w = matvec(q)
        diagonal.append(dot(q, w))
        for _ in range(2):  # full reorthogonalisation, twice: the bases are short
            for u in basis:
                w = axpy(-dot(u, w), u, w)
        off.append(norm(w))
        if not float(off[-1]) > 1e-6 * abs(float(diagonal[0])):
            break
        q = scale(1 / off[-1], w)
    a = torch.stack(diagonal).double()
    b = torch.stack(off[: len(diagonal) - 1]).double() if len(diagonal) > 1 else None
    t = torch.diag(a) if b is None else torch.diag(a) + torch.diag(b, 1) + torch.diag(b, -1)
    return float(torch.linalg.eigvalsh(t)[-1])
