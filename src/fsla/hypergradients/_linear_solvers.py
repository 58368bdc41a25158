"""Linear solvers: v ≈ H⁻¹ b for a symmetric H known by its products alone.

    Neumann             β Σ_{j<K} (I - βH)^j b: K - 1 products; converges iff 0 < β < 2/L
    RandomNeumann       K β (I - βH)^j b with j drawn by the seed of the step: its mean is that sum (Ghadimi & Wang)
    ConjugateGradient   K steps from zero: K products; exact for K ≥ n
    Identity            v = β b, no product (T1-T2, DARTS)

Each is called with the product and b. `products` is how many products may each have their own batch. `Neumann`
equals K gradient steps of size β from zero on ½ vᵀHv - bᵀv. Where each product is of another batch's H, the first one
is in most terms of the series, the last in one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fsla._checks import function, positive, whole_number
from fsla._tree import Tree, axpy, check, dot, norm, scale, size, sub, zeros_like

Matvec = Callable[[Tree], Tree]
Solve = Callable[[Matvec, Tree], Tree]


@dataclass(frozen=True)
class Neumann:
    """Linear solver: K terms of the Neumann series.

    Args:
        num_terms: K; the solver takes K - 1 products.
        adjoint_lr: β, the step of the series; it converges where 0 < β < 2/L.

    Examples:
        >>> solve = fsla.hypergradients.Neumann(num_terms=20, adjoint_lr=0.4)
        >>> solve(lambda v: {"w": h * v["w"]}, {"w": torch.ones(2)})
        {'w': tensor([1.0000, 0.2500])}
    """

    num_terms: int
    adjoint_lr: float

    def __post_init__(self) -> None:
        whole_number(self.num_terms, "num_terms", "Neumann")
        positive(self.adjoint_lr, "adjoint_lr", "Neumann")

    @property
    def products(self) -> int:
        return self.num_terms - 1

    def __call__(self, matvec: Matvec, b: Tree) -> Tree:
        term = total = b
        for _ in range(self.products):
            term = axpy(-self.adjoint_lr, matvec(term), term)
            total = axpy(1.0, term, total)
        return scale(self.adjoint_lr, total)


@dataclass(frozen=True)
class RandomNeumann:
    """Linear solver: one random term of the Neumann series, whose mean is the sum of K terms.

    The seed of the step draws the term, so that a step stays a function of its state and its batches. In the mean it
    takes (K - 1) / 2 products.

    Args:
        num_terms: K.
        adjoint_lr: β, the step of the series.

    Examples:
        >>> solve = fsla.hypergradients.RandomNeumann(num_terms=5, adjoint_lr=0.4)
        >>> solve.drawn(seed=0).length
        4
    """

    num_terms: int
    adjoint_lr: float

    def __post_init__(self) -> None:
        whole_number(self.num_terms, "num_terms", "RandomNeumann")
        positive(self.adjoint_lr, "adjoint_lr", "RandomNeumann")

    @property
    def products(self) -> int:
        return self.num_terms - 1

    def drawn(self, seed: int | None) -> NeumannTerm:
        """Return the term that a seed draws.

        Raises:
            ValueError: if there is no seed.
        """
        if seed is None:
            raise ValueError(
                "A random Neumann series needs step batches with a seed, which draws its length. "
                "Got none. Use StepBatches.draw(..., seed=k), with another k at each step."
            )
        length = int(torch.randint(self.num_terms, (), generator=torch.Generator().manual_seed(seed)))
        return NeumannTerm(length, self.num_terms, self.adjoint_lr)


@dataclass(frozen=True)
class NeumannTerm:
    """One term of the Neumann series, of known length."""

    length: int
    num_terms: int
    adjoint_lr: float

    def __call__(self, matvec: Matvec, b: Tree) -> Tree:
        v = b
        for _ in range(self.length):
            v = axpy(-self.adjoint_lr, matvec(v), v)
        return scale(self.num_terms * self.adjoint_lr, v)


@dataclass(frozen=True)
class ConjugateGradient:
    """Linear solver: K conjugate-gradient steps from zero.

    Args:
        hvp_steps: K; each step takes a product.
        stop_early: whether to stop after convergence, which saves products but makes the host wait for the device.
        tol: relative residual at which it has converged; by default the rounding unit.

    Examples:
        >>> solve = fsla.hypergradients.ConjugateGradient(hvp_steps=2)
        >>> solve(lambda v: {"w": h * v["w"]}, {"w": torch.ones(2)})
        {'w': tensor([1.0000, 0.2500])}
    """

    hvp_steps: int
    stop_early: bool = False
    tol: float | None = None

    def __post_init__(self) -> None:
        whole_number(self.hvp_steps, "hvp_steps", "ConjugateGradient")
        positive(self.tol, "tol", "ConjugateGradient", optional=True)

    def __call__(self, matvec: Matvec, b: Tree) -> Tree:
        return cg(matvec, b, steps=self.hvp_steps, tol=self.tol, stop_early=self.stop_early)


@dataclass(frozen=True)
class Identity:
    """Linear solver without products: a multiple of b.

    Args:
        adjoint_lr: the multiple.

    Examples:
        >>> solve = fsla.hypergradients.Identity(adjoint_lr=0.5)
        >>> solve(lambda v: {"w": h * v["w"]}, {"w": torch.ones(2)})
        {'w': tensor([0.5000, 0.5000])}
    """

    adjoint_lr: float

    def __post_init__(self) -> None:
        positive(self.adjoint_lr, "adjoint_lr", "Identity")

    def __call__(self, matvec: Matvec, b: Tree) -> Tree:
        return scale(self.adjoint_lr, b)


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
    """Return the result of at most `steps` conjugate-gradient steps from zero.

    The result stays as it is once ‖r‖ ≤ tol ‖b‖, or once a direction q with qᵀHq ≤ 0 shows that H is not positive
    definite.

    Args:
        matvec: the product v ↦ H v.
        b: right-hand side.
        steps: most steps.
        tol: relative residual; by default the rounding unit.
        stop_early: whether the loop then ends, which saves products but makes the host wait for the device in each
            step.
        history: list that receives the (α_k, p_k) of Lemma 2.
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
    """Return ‖b - H v‖ / ‖b‖, at the price of one product: 0 where b = 0, NaN where anything is NaN."""
    scale_b = norm(b)
    gap = norm(sub(b, matvec(v)))
    return torch.where(scale_b == 0, gap, gap / torch.where(scale_b == 0, 1, scale_b))


def largest_eigenvalue(matvec: Matvec, like: Tree, *, steps: int = 30, seed: int = 0) -> float:
    """Return a lower bound of the largest eigenvalue L of H, by Lanczos steps.

    A Ritz value never exceeds L. So a step β with β · bound > 2 certainly exceeds 2/L. A few dozen steps are enough.

    Args:
        matvec: the product v ↦ H v.
        like: a tree of the form of v.
        steps: most products.
        seed: seed of the start, which is drawn on the CPU, so that it is the same on every device.

    Returns:
        The bound.

    Examples:
        >>> round(fsla.hypergradients.largest_eigenvalue(lambda v: {"w": h * v["w"]}, at.omega), 4)
        4.0
    """
    function(matvec, "matvec", "largest_eigenvalue")
    check(like, "like")
    whole_number(steps, "steps", "largest_eigenvalue")
    whole_number(seed, "seed", "largest_eigenvalue", least=0)
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
