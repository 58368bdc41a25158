"""What the comparison measures with: ω_λ, f and ∇f on all samples, and the least f that a long search finds.

Everything here is deterministic, on full batches, in float64, and costs no oracle calls of any method.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from fsla._tree import Leaves, Tree, dense, flatten, sub, unflatten
from fsla.hypergradients._linear_solvers import cg
from fsla.problems import Batch, Oracles, Point
from fsla.problems._passes import Loss

Data = tuple[Tensor, ...]
"""A batch: tensors with a row for each sample."""
_TIGHT: dict[str, Any] = {"maxcor": 20, "maxiter": 1000, "maxfun": 2000, "gtol": 1e-9, "ftol": 0.0}


class ExactGradient(NamedTuple):
    """f and ∇f at λ; ω_λ, from which the next solve may start; and v_λ."""

    value: float
    gradient: Tree
    omega: Tree
    v: Tree


def inner_minimum(inner_loss: Loss, at: Point, batch: Data) -> Tree:
    """ω_λ, by L-BFGS from at.omega."""

    def loss(x: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        omega = {name: t.requires_grad_() for name, t in unflatten(torch.from_numpy(x), at.omega).items()}
        value = inner_loss(at.lam, omega, batch)
        gradient = torch.autograd.grad(value, list(omega.values()))
        return float(value.detach()), torch.cat([g.flatten() for g in gradient]).numpy()

    with np.errstate(all="ignore"):
        solution = minimize(loss, flatten(at.omega).numpy(), jac=True, method="L-BFGS-B", options=_TIGHT)
    return unflatten(torch.from_numpy(solution.x), at.omega)


def f_and_gradient(problem: Oracles, inner_loss: Loss, at: Point, inner: Data, outer: Data) -> ExactGradient:
    """f and ∇f at λ; v = H⁻¹ ∂_ω F by conjugate gradients."""
    minimum = Point(at.lam, inner_minimum(inner_loss, at, inner))
    view = problem.inner_at(minimum, Batch(inner)).linearized()
    above = problem.outer_at(minimum, Batch(outer))
    v = cg(view.hvp, above.grad_omega, steps=500, tol=1e-9, stop_early=True)
    direction: Leaves = sub(above.grad_lam, view.mixed_hvp(v))
    return ExactGradient(float(above.value), dense(direction), minimum.omega, v)


def least(
    problem: Oracles, inner_loss: Loss, start: Point, inner: Data, outer: Data, iterations: int
) -> tuple[float, float]:
    """f at the start, and the least f of a search by L-BFGS on ∇f."""
    omega = start.omega
    values: list[float] = []

    def f(x: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        nonlocal omega
        exact = f_and_gradient(
            problem, inner_loss, Point(unflatten(torch.from_numpy(x), start.lam), omega), inner, outer
        )
        omega = exact.omega
        values.append(exact.value)
        return exact.value, flatten(exact.gradient).numpy()

    minimize(
        f, flatten(start.lam).numpy(), jac=True, method="L-BFGS-B",
        options={"maxcor": 20, "maxiter": iterations, "maxfun": 2 * iterations, "gtol": 1e-9, "ftol": 0.0},
    )  # fmt: skip
    return values[0], min(values)
