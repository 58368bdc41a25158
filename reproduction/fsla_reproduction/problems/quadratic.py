"""The reference problem: both losses quadratic, every quantity in closed form.

    G = ½ ωᵀHω + λᵀJω - cᵀω        F = ½ ωᵀQω - qᵀω + λᵀRω + ½ λᵀSλ - sᵀλ
    ω_λ = H⁻¹(c - Jᵀλ)    v_λ = H⁻¹(Qω_λ + Rᵀλ - q)    ∇f = Rω_λ + Sλ - s - J v_λ

A Quadratic answers the five oracles from its matrices; `losses()` gives the same problem to automatic differentiation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from fsla._tree import Tree
from fsla.problems import Inner, Outer, Point, Problem
from fsla.problems._batches import Batch


@dataclass(frozen=True)
class Quadratic:
    """λ is the tree {"lam": p-vector}, ω the tree {"omega": n-vector}; batches are ignored."""

    H: Tensor
    J: Tensor
    c: Tensor
    Q: Tensor
    q: Tensor
    R: Tensor
    S: Tensor
    s: Tensor

    @classmethod
    def random(
        cls, p: int, n: int, *, kappa: float = 10.0, seed: int = 0, dtype: torch.dtype = torch.float64
    ) -> Quadratic:
        """A random one with μ = 1, L = kappa, and f convex."""
        g = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, dtype=dtype)

        axes = torch.linalg.qr(normal(n, n))[0]
        H = axes @ torch.diag(torch.linspace(1.0, kappa, n, dtype=dtype)) @ axes.T
        Q = normal(n, n)
        S = normal(p, p)
        return cls(
            (H + H.T) / 2, normal(p, n), normal(n), Q @ Q.T / n, normal(n), 0.1 * normal(p, n), S @ S.T / p, normal(p)
        )

    def point(self, lam: Tensor, omega: Tensor) -> Point:
        return Point({"lam": lam}, {"omega": omega})

    def inner_at(self, at: Point, batch: Batch = None, seed: int | None = None) -> Inner:
        return _QuadraticInner(self, at.lam["lam"], at.omega["omega"])

    def outer_at(self, at: Point, batch: Batch = None, seed: int | None = None) -> Outer:
        return _QuadraticOuter(self, at.lam["lam"], at.omega["omega"])

    def outer_products_at(self, at: Point, batch: Batch = None, seed: int | None = None) -> Inner:
        exchanged = replace(self, H=self.Q, J=self.R, c=self.q)
        return _QuadraticInner(exchanged, at.lam["lam"], at.omega["omega"])

    def losses(self) -> Problem:
        """The same problem as two losses for automatic differentiation."""
        return Problem(
            lambda lam, omega, batch: self.inner_at(Point(lam, omega), batch).value,
            lambda lam, omega, batch: self.outer_at(Point(lam, omega), batch).value,
        )

    def omega_of(self, lam: Tensor) -> Tensor:
        return self._inverse(self.c - self.J.T @ lam)

    def v_of(self, lam: Tensor) -> Tensor:
        return self._inverse(self.Q @ self.omega_of(lam) + self.R.T @ lam - self.q)

    def _inverse(self, b: Tensor) -> Tensor:
        x: Tensor = torch.linalg.solve(self.H, b)
        return x

    def gradient(self, lam: Tensor) -> Tensor:
        """∇f(λ)."""
        return self.R @ self.omega_of(lam) + self.S @ lam - self.s - self.J @ self.v_of(lam)

    def value(self, lam: Tensor) -> Tensor:
        """f(λ)."""
        return self.outer_at(self.point(lam, self.omega_of(lam))).value

    def hessian(self) -> Tensor:
        """∇²f, which is constant."""
        JH = self._inverse(self.J.T).T
        return self.S - self.R @ JH.T - JH @ self.R.T + JH @ self.Q @ JH.T


@dataclass(frozen=True)
class _QuadraticInner:
    of: Quadratic
    lam: Tensor
    omega: Tensor

    @property
    def unit(self) -> float:
        return torch.finfo(self.omega.dtype).eps

    @property
    def value(self) -> Tensor:
        return self.omega @ (self.of.H @ self.omega / 2 + self.of.J.T @ self.lam - self.of.c)

    @property
    def grad(self) -> Tree:
        return {"omega": self.of.H @ self.omega + self.of.J.T @ self.lam - self.of.c}

    @property
    def d_lam(self) -> Tree:
        return {"lam": self.of.J @ self.omega}

    def gradients(self) -> tuple[Tree, Tree]:
        return self.grad, self.d_lam

    def hvp(self, v: Tree) -> Tree:
        return {"omega": self.of.H @ v["omega"]}

    def cross(self, v: Tree) -> Tree:
        return {"lam": self.of.J @ v["omega"]}

    def hvp_cross(self, v: Tree) -> tuple[Tree, Tree]:
        return self.hvp(v), self.cross(v)

    def cross_t(self, u: Tree) -> Tree:
        return {"omega": self.of.J.T @ u["lam"]}

    def linearised(self) -> Self:
        return self


@dataclass(frozen=True)
class _QuadraticOuter:
    of: Quadratic
    lam: Tensor
    omega: Tensor

    @property
    def value(self) -> Tensor:
        own = self.omega @ (self.of.Q @ self.omega / 2 - self.of.q)
        return own + self.lam @ (self.of.R @ self.omega + self.of.S @ self.lam / 2 - self.of.s)

    @property
    def d_lam(self) -> Tree:
        return {"lam": self.of.R @ self.omega + self.of.S @ self.lam - self.of.s}

    @property
    def d_omega(self) -> Tree:
        return {"omega": self.of.Q @ self.omega + self.of.R.T @ self.lam - self.of.q}
