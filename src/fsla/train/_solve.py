"""ω to convergence at the present λ, by L-BFGS on the whole of the data."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsla._tree import norm, size
from fsla.hypergradients._check import ConvergenceWarning
from fsla.problems._batches import Batch
from fsla.problems._views import Oracles, Point


def solve_inner(
    problem: Oracles,
    at: Point,
    parameters: Mapping[str, nn.Parameter],
    batch: Any,
    *,
    max_iter: int,
    tol: float | None,
) -> float:
    """Move parameters to a minimum of the inner loss on a batch; return the loss there.

    Args:
        problem: the losses.
        at: the point of the parameters; it moves with them.
        parameters: ω.
        batch: batch of the inner loss.
        max_iter: the most iterations.
        tol: the size of the gradient, relative to 1 + ‖ω‖, at which it has converged; None chooses by the dtype.
    """
    before = {name: p.grad for name, p in parameters.items()}
    if tol is None:
        tol = 1e-6 if all(p.dtype == torch.float64 for p in parameters.values()) else 1e-4
    optimizer = torch.optim.LBFGS(
        list(parameters.values()),
        max_iter=max_iter,
        tolerance_grad=tol / size(at.omega) ** 0.5,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
    fixed = Batch(batch, seed=0)

    def closure() -> Tensor:
        view = problem.inner_at(Point(at.lam, at.omega), fixed)
        for name, gradient in view.grad_omega.items():
            parameters[name].grad = gradient
        return view.value

    try:
        optimizer.step(closure)  # type: ignore[no-untyped-call]
        value = closure()
        length = float(norm({name: p.grad for name, p in parameters.items() if p.grad is not None}))
    finally:
        for name, p in parameters.items():
            p.grad = before[name]
    if not length <= tol * (1 + float(norm(at.omega))):
        warnings.warn(
            f"solve stopped at a gradient of length {length:.1e} after {max_iter} iterations or no progress: the model "
            "is not at a minimum of the inner loss. Raise max_iter= or tol=.",
            ConvergenceWarning,
            stacklevel=3,
        )
    return float(value)
