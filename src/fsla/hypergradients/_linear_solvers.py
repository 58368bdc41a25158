"""Ways to have v ≈ H⁻¹ b from products alone, with their settings.

    Neumann             K terms of the series: K - 1 products
    RandomNeumann       one term, drawn by the seed of the step, whose mean is the sum of K (Ghadimi & Wang 2018)
    ConjugateGradient   K steps from zero: K products
    Identity            v = β b, no product (T1-T2, DARTS)

Each is called with the product and b. `products` is how many products may each have a batch of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fsla._checks import positive, whole_number
from fsla._tree import Tree, scale
from fsla.hypergradients import _linsolve as linsolve
from fsla.hypergradients._linsolve import Matvec

Solve = Callable[[Matvec, Tree], Tree]


@dataclass(frozen=True)
class Neumann:
    """K terms of the Neumann series, by steps of size `adjoint_lr`."""

    num_terms: int
    adjoint_lr: float

    def __post_init__(self) -> None:
        whole_number(self.num_terms, "num_terms", "Neumann")
        positive(self.adjoint_lr, "adjoint_lr", "Neumann")

    @property
    def products(self) -> int:
        return self.num_terms - 1

    def __call__(self, matvec: Matvec, b: Tree) -> Tree:
        return linsolve.neumann(matvec, b, steps=self.num_terms, beta=self.adjoint_lr)


@dataclass(frozen=True)
class RandomNeumann:
    """One term of the series, scaled so that its mean is the sum of K terms; (K - 1) / 2 products in the mean.

    The seed of the step draws the term, so that a step stays a function of its state and its batches.
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
        if seed is None:
            raise ValueError(
                "A random Neumann series needs step batches with a seed, which draws its length. "
                "Got none. Use StepBatches.draw(..., seed=k), with another k at each step."
            )
        length = int(torch.randint(self.num_terms, (), generator=torch.Generator().manual_seed(seed)))
        return NeumannTerm(length, self.num_terms, self.adjoint_lr)


@dataclass(frozen=True)
class NeumannTerm:
    """A term of known length."""

    length: int
    num_terms: int
    adjoint_lr: float

    def __call__(self, matvec: Matvec, b: Tree) -> Tree:
        return linsolve.random_neumann(matvec, b, steps=self.num_terms, beta=self.adjoint_lr, length=self.length)


@dataclass(frozen=True)
class ConjugateGradient:
    """K conjugate-gradient steps from zero; `stop_early` saves products after convergence, but makes the host wait."""

    hvp_steps: int
    stop_early: bool = False
    tol: float | None = None

    def __post_init__(self) -> None:
        whole_number(self.hvp_steps, "hvp_steps", "ConjugateGradient")
        positive(self.tol, "tol", "ConjugateGradient", optional=True)

    def __call__(self, matvec: Matvec, b: Tree) -> Tree:
        return linsolve.cg(matvec, b, steps=self.hvp_steps, tol=self.tol, stop_early=self.stop_early)


@dataclass(frozen=True)
class Identity:
    """`adjoint_lr` in the place of the inverse Hessian."""

    adjoint_lr: float

    def __post_init__(self) -> None:
        positive(self.adjoint_lr, "adjoint_lr", "Identity")

    def __call__(self, matvec: Matvec, b: Tree) -> Tree:
        return scale(self.adjoint_lr, b)
