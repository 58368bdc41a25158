"""The reference problem: both losses quadratic, every quantity in closed form.

    G = ½ ωᵀHω + λᵀJω - cᵀω        F = ½ ωᵀQω - qᵀω + λᵀRω + ½ λᵀSλ - sᵀλ
    ω_λ = H⁻¹(c - Jᵀλ)    v_λ = H⁻¹(Qω_λ + Rᵀλ - q)    ∇f = Rω_λ + Sλ - s - J v_λ

A Quadratic answers from its matrices; `losses()` gives the same problem to automatic differentiation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsla._tree import Leaves, Tree
from fsla.problems import Batch, Oracles, Point, Problem, View

NO_BATCH = Batch(None)


@dataclass(frozen=True)
class Quadratic(Oracles):
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

    def inner_at(self, at: Point, batch: Batch = NO_BATCH, *, update_buffers: bool = False) -> View:
        none, nothing = torch.zeros_like(self.S), torch.zeros_like(self.s)
        return _QuadraticView(self.H, self.J, self.c, none, nothing, at.lam["lam"], at.omega["omega"])

    def outer_at(self, at: Point, batch: Batch = NO_BATCH) -> View:
        return _QuadraticView(self.Q, self.R, self.q, self.S, self.s, at.lam["lam"], at.omega["omega"])

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
class _QuadraticView(View):
    """½ ωᵀAω + λᵀBω - aᵀω + ½ λᵀCλ - cᵀλ at a point."""

    A: Tensor
    B: Tensor
    a: Tensor
    C: Tensor
    c: Tensor
    lam: Tensor
    omega: Tensor

    @property
    def eps(self) -> float:
        return torch.finfo(self.omega.dtype).eps

    @property
    def value(self) -> Tensor:
        inner = self.omega @ (self.A @ self.omega / 2 - self.a)
        return inner + self.lam @ (self.B @ self.omega + self.C @ self.lam / 2 - self.c)

    def gradients(self, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        by_omega = {"omega": self.A @ self.omega + self.B.T @ self.lam - self.a} if omega else {}
        return by_omega, {"lam": self.B @ self.omega + self.C @ self.lam - self.c} if lam else {}

    def products(self, v: Tree, *, omega: bool = True, lam: bool = True) -> tuple[Tree, Leaves]:
        return {"omega": self.A @ v["omega"]} if omega else {}, {"lam": self.B @ v["omega"]} if lam else {}

    def mixed_hvp_transpose(self, u: Tree) -> Tree:
        return {"omega": self.B.T @ u["lam"]}
