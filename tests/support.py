"""Problems and an independent reference that the tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fsla import Point, Problem, make_functional
from fsla._tree import Tree

F64 = torch.float64


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def ridge_logistic(
    *, rows: int = 60, n: int = 6, seed: int = 0, dtype: torch.dtype = F64
) -> tuple[Problem, Point, Tree, Tree]:
    """Logistic regression with one log-ridge for each coefficient: smooth, strongly convex, not quadratic.

    Returns the problem, a point away from the inner minimum, and the training and validation batches.
    """
    truth = normal(n, seed=seed + 1)
    x, z = normal(rows, n, seed=seed + 2), normal(rows, n, seed=seed + 3)
    train = {"x": x.to(dtype), "y": (x @ truth + normal(rows, seed=seed + 4) > 0).to(dtype)}
    valid = {"x": z.to(dtype), "y": (z @ truth + normal(rows, seed=seed + 5) > 0).to(dtype)}

    def loss(omega: Tree, batch: Tree) -> Tensor:
        logits = batch["x"] @ omega["w"] + omega["b"]
        return nn.functional.binary_cross_entropy_with_logits(logits, batch["y"])

    def inner(lam: Tree, omega: Tree, batch: Tree) -> Tensor:
        ridge = (lam["log_ridge"].exp() * omega["w"].square()).sum() + 0.1 * omega["b"].square()
        return loss(omega, batch) + ridge / 2

    def outer(lam: Tree, omega: Tree, batch: Tree) -> Tensor:
        return loss(omega, batch) + 0.05 * lam["log_ridge"].square().sum()

    at = Point(
        {"log_ridge": (normal(n, seed=seed + 6) / 2 - 1).to(dtype)},
        {"w": normal(n, seed=seed + 7).to(dtype) / 2, "b": torch.tensor(0.3, dtype=dtype)},
    )
    return Problem(inner, outer), at, train, valid


def network(dtype: torch.dtype = F64, *, width: int = 8, rows: int = 32) -> tuple[Problem, Point, Any, Any]:
    """A small network with a weight for each training sample, and a ridge that makes H positive definite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3)).to(F64)
    omega, net = make_functional(model)
    train = (normal(rows, 5, seed=1).to(dtype), torch.arange(rows) % 3)
    valid = (normal(rows, 5, seed=2).to(dtype), torch.arange(rows) % 3)

    def inner(lam: Tree, omega: Tree, batch: Any) -> Tensor:
        losses = nn.functional.cross_entropy(net(omega, batch[0]), batch[1], reduction="none")
        return (lam["w"].sigmoid() * losses).mean() + 0.25 * sum(t.square().sum() for t in omega.values())

    def outer(lam: Tree, omega: Tree, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(net(omega, batch[0]), batch[1])

    at = Point({"w": normal(rows, seed=3).to(dtype)}, {name: t.to(dtype) for name, t in omega.items()})
    return Problem(inner, outer), at, train, valid


def classifier(rows: int, dtype: torch.dtype = F64, *, convolution: bool = True) -> tuple[Tree, Any, Any]:
    """A small image classifier on random data: ω, its scores (ω, index), and the samples' losses (scores, index)."""
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 4)]
    model = nn.Sequential(*(body if convolution else [nn.Flatten(), nn.Linear(16, 4)])).to(dtype)
    omega, net = make_functional(model)
    x, y = normal(rows, 1, 4, 4).to(dtype), torch.arange(rows) % 4

    def scores(omega: Tree, index: Tensor) -> Tensor:
        return net(omega, x[index])

    def losses(scores: Tensor, index: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores, y[index], reduction="none")

    return omega, scores, losses


@dataclass
class PlainLeastSquares:
    """The finite-sum least squares in plain numpy, for the independent Algorithm 1."""

    a: np.ndarray
    x: np.ndarray
    b: np.ndarray
    c: np.ndarray
    e: np.ndarray
    rho_omega: float
    rho_lam: float

    def inner_grad(self, lam, omega, i):
        gap = self.a[i] @ omega - self.x[i] @ lam - self.b[i]
        return self.a[i].T @ gap / len(i) + self.rho_omega * omega

    def hessian_times(self, v, i):
        return self.a[i].T @ (self.a[i] @ v) / len(i) + self.rho_omega * v

    def cross_times(self, v, i):
        return -self.x[i].T @ (self.a[i] @ v) / len(i)

    def outer_omega(self, omega, i):
        return self.c[i].T @ (self.c[i] @ omega - self.e[i]) / len(i)

    def outer_lam(self, lam):
        return self.rho_lam * lam


def plain_algorithm_1(
    p: PlainLeastSquares,
    lam: np.ndarray,
    omega: np.ndarray,
    batches: list[tuple[np.ndarray, ...]],
    rates: Callable[[int], tuple[float, float, float, float]],
    *,
    adjoint_at: str,
    momentum: str,
    projection: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Algorithm 1, written from the paper: (λ, ω, v, d) for each k. batches[0] starts d; batches[k+1] is ξ_{k+1}."""

    def hypergradient(lam, omega, v, batch):
        return p.outer_lam(lam) - p.cross_times(v, batch[4])

    v = np.zeros_like(omega)
    d = hypergradient(lam, omega, v, batches[0])
    trajectory = [(lam, omega, v, d)]
    for k, drawn in enumerate(batches[1:]):
        outer_lr, inner_lr, adjoint_lr, new_grad_weight = rates(k)
        lam_new = projection(lam - outer_lr * d)
        omega_new = omega - inner_lr * p.inner_grad(lam_new, omega, drawn[0])
        where = omega if adjoint_at == "old_params" else omega_new
        v_new = adjoint_lr * p.outer_omega(where, drawn[1]) + (v - adjoint_lr * p.hessian_times(v, drawn[2]))
        g = hypergradient(lam_new, omega_new, v_new, drawn)
        if momentum == "storm":
            d = g + (1 - new_grad_weight) * (d - hypergradient(lam, omega, v, drawn))
        elif momentum == "average":
            d = (1 - new_grad_weight) * d + new_grad_weight * g
        else:
            d = g
        lam, omega, v = lam_new, omega_new, v_new
        trajectory.append((lam, omega, v, d))
    return trajectory


# ------------------------------------------------------------------- a weight for each class, by a module of one's own


class ClassWeights(nn.Module):
    def __init__(self, n: int = 3) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(n, dtype=F64))

    def forward(self, y: Tensor) -> Tensor:
        return self.w.exp()[y]


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def class_weighted_loss(model: nn.Module, weights: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    ridge = sum(p.square().sum() for p in model.parameters())
    return (weights(batch[1]) * cross_entropy(model, batch)).mean() + 0.02 * ridge


def plain_loss(model: nn.Module, weights: ClassWeights, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model, batch).mean() + 0.01 * weights.w.square().sum()
