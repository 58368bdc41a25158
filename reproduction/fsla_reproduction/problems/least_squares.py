"""Least squares at both levels: the synthetic experiment of section 6.1, and a finite sum to sample from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsla._tree import Tree
from fsla.problems import Point, Problem
from fsla_reproduction.problems.quadratic import Quadratic


@dataclass(frozen=True)
class Synthetic:
    """Section 6.1: F = ‖A_o ω - b_o‖², G = ‖A_λ λ + A_ω ω - b_i‖², sums over the rows, with neither ½ nor 1/N."""

    A_o: Tensor
    b_o: Tensor
    A_lam: Tensor
    A_omega: Tensor
    b_i: Tensor
    lam: Tensor
    start: Tensor
    """ω_0, drawn like the rest; the paper leaves it open."""

    @classmethod
    def draw(cls, seed: int, *, rows: int = 10_000, dim: int = 5, low: float = 0.0, high: float = 1.0) -> Synthetic:
        """Matrices, λ, ω, ω_o and the start from U[low, high); Gaussian noise of variance 0.1. All from the seed."""
        g = torch.Generator().manual_seed(seed)

        def uniform(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float64).uniform_(low, high, generator=g)

        def noise() -> Tensor:
            return torch.randn(rows, generator=g, dtype=torch.float64) * math.sqrt(0.1)

        A_o = uniform(rows, dim)
        A_lam = uniform(rows, dim)
        A_omega = uniform(rows, dim)
        lam = uniform(dim)
        omega = uniform(dim)
        omega_o = uniform(dim)
        b_o = A_o @ omega_o + noise()
        b_i = A_lam @ lam + A_omega @ omega + noise()
        return cls(A_o, b_o, A_lam, A_omega, b_i, lam, uniform(dim))

    def losses(self) -> Problem:
        """The problem on its data, for automatic differentiation: every product passes over the rows."""

        def inner(lam: Tree, omega: Tree, batch: Any) -> Tensor:
            return (self.A_lam @ lam["lam"] + self.A_omega @ omega["omega"] - self.b_i).square().sum()

        def outer(lam: Tree, omega: Tree, batch: Any) -> Tensor:
            return (self.A_o @ omega["omega"] - self.b_o).square().sum()

        return Problem(inner, outer, outer_uses_lam=False)

    def quadratic(self) -> Quadratic:
        """The same problem in closed form (up to constants of F and G)."""
        p = self.A_lam.shape[1]
        n = self.A_omega.shape[1]
        return Quadratic(
            H=2 * self.A_omega.T @ self.A_omega,
            J=2 * self.A_lam.T @ self.A_omega,
            c=2 * self.A_omega.T @ self.b_i,
            Q=2 * self.A_o.T @ self.A_o,
            q=2 * self.A_o.T @ self.b_o,
            R=self.lam.new_zeros(p, n),
            S=self.lam.new_zeros(p, p),
            s=self.lam.new_zeros(p),
        )

    @property
    def at(self) -> Point:
        return Point({"lam": self.lam}, {"omega": self.start})


@dataclass(frozen=True)
class LeastSquares:
    """A finite sum, whose batches are row indices.

    G = mean ½(a_iᵀω - x_iᵀλ - b_i)² + ½ρ_ω‖ω‖²        F = mean ½(c_jᵀω - e_j)² + ½ρ_λ‖λ‖²
    """

    a: Tensor
    x: Tensor
    b: Tensor
    c: Tensor
    e: Tensor
    rho_omega: float
    rho_lam: float

    @classmethod
    def draw(
        cls, seed: int, *, rows: int = 2000, p: int = 4, n: int = 5, rho_omega: float = 0.5, rho_lam: float = 0.1
    ) -> LeastSquares:
        g = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, dtype=torch.float64)

        scales = torch.linspace(0.7, 1.5, n, dtype=torch.float64)
        a = normal(rows, n) * scales
        x = a @ normal(n, p) / n**0.5 + normal(rows, p) / 2
        return cls(a, x, normal(rows), normal(rows, n), normal(rows), rho_omega, rho_lam)

    def losses(self) -> Problem:
        def inner(lam: Tree, omega: Tree, rows: Tensor) -> Tensor:
            gap = self.a[rows] @ omega["omega"] - self.x[rows] @ lam["lam"] - self.b[rows]
            return gap.square().mean() / 2 + self.rho_omega / 2 * omega["omega"].square().sum()

        def outer(lam: Tree, omega: Tree, rows: Tensor) -> Tensor:
            gap = self.c[rows] @ omega["omega"] - self.e[rows]
            return gap.square().mean() / 2 + self.rho_lam / 2 * lam["lam"].square().sum()

        return Problem(inner, outer)

    def quadratic(self) -> Quadratic:
        """The whole sum in closed form."""
        N = len(self.b)
        p = self.x.shape[1]
        n = self.a.shape[1]
        eye_p = torch.eye(p, dtype=self.a.dtype)
        eye_n = torch.eye(n, dtype=self.a.dtype)
        return Quadratic(
            H=self.a.T @ self.a / N + self.rho_omega * eye_n,
            J=-self.x.T @ self.a / N,
            c=self.a.T @ self.b / N,
            Q=self.c.T @ self.c / N,
            q=self.c.T @ self.e / N,
            R=self.a.new_zeros(p, n),
            S=self.rho_lam * eye_p,
            s=self.a.new_zeros(p),
        )
