"""Ways to have v ≈ H⁻¹ b from products alone, with their settings.

    Neumann             K terms of the series: K - 1 products
    RandomNeumann       one term, drawn by the sample's seed, whose mean is the sum of K (Ghadimi & Wang 2018)
    ConjugateGradient   K steps from zero: K products
    Identity            v = β b, no product (T1-T2, DARTS)

Each is called with the product and b. `batches` is how many products may each have a batch of its own.
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
    """K terms of the Neumann series with step β."""

    steps: int
    beta: float

    def __post_init__(self) -> None:
        whole_number(self.steps, "steps", "Neumann")
        positive(self.beta, "beta", "Neumann")

    @property
    def batches(self) -> int:
        return self.steps - 1

    def __call__(self, matvec: Matvec, b: Tree) -> Tree:
        return linsolve.neumann(matvec, b, steps=self.steps, beta=self.beta)


@dataclass(frozen=True)
class RandomNeumann:
    """One term of the series, scaled so that its mean is the sum of K terms; (K - 1) / 2 products in the mean.

    Which term it is is drawn by the sample's seed, so that a step stays a function of its state and its sample.
    """

    steps: int
    beta: float

    def __post_init__(self) -> None:
        whole_number(self.steps, "steps", "RandomNeumann")
        positive(self.beta, "beta", "RandomNeumann")

    @property
    def batches(self) -> int:
        return self.steps - 1

    def drawn(self, seed: int | None) -> NeumannTerm:
        if seed is None:
            raise ValueError(
                "A random Neumann series needs a sample with a seed, which draws its length. "
                "Got a sample without one; hand over Sample.draw(..., seed=k), with another seed at each step."
            )
        length = int(torch.randint(self.steps, (), generator=torch.Generator().manual_seed(seed)))
        return NeumannTerm(length, self.steps, self.beta)


@dataclass(frozen=True)
class NeumannTerm:
    """A term of known length."""

    length: int
    steps: int
    beta: float

    def __call__(self, matvec: Matvec, b: Tree) -> Tree:
        return linsolve.random_neumann(matvec, b, steps=self.steps, beta=self.beta, length=self.length)


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
class Identity:
    """β in the place of the inverse Hessian."""

    beta: float

    def __post_init__(self) -> None:
        positive(self.beta, "beta", "Identity")

    def __call__(self, matvec: Matvec, b: Tree) -> Tree:
        return scale(self.beta, b)
