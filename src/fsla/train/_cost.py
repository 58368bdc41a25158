"""What a step of an algorithm costs, counted on a problem of one number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsla._tree import Tree
from fsla.algorithms._base import Algorithm, State
from fsla.problems._autograd import HvpMethod, Problem
from fsla.problems._batches import StepBatches
from fsla.problems._views import Point
from fsla.problems._wrappers import CountedProblem, OracleCounts
from fsla.steps._updates import GradientDescent


def describe_cost(counts: OracleCounts, outer_every: int) -> str:
    """Return the gradients and products of a step, in words."""
    gradients = counts.grad + counts.forward + counts.outer_grad_omega
    passes = counts.hvp + counts.mixed_hvp + counts.mixed_hvp_transpose - counts.joint
    text = f"{gradients} gradients"
    if passes:
        text += f" and {passes} pass{'es' if passes > 1 else ''} for second derivatives"
    if outer_every > 1:
        text += f" on every {_ordinal(outer_every)} step"
    return text if passes else f"{text}: about {(gradients + outer_every - 1) / outer_every:.3g} plain steps"


def toy_step(algorithm: Algorithm[Any], *, by_differences: bool) -> tuple[OracleCounts, State]:
    """Return what the second step of an algorithm asks for and its state, on a problem of one number at each level."""
    plain = GradientDescent()
    algorithm = replace(
        algorithm, inner_update=plain, adjoint_update=plain, outer_update=plain, projection=None, outer_every=1
    )
    method: HvpMethod = "finite_difference" if by_differences else "reverse_over_reverse"
    problem = CountedProblem(Problem(_inner_loss, _outer_loss, hvp_method=method, outer_uses_lam=False))
    one = torch.ones(1, dtype=torch.float64)
    batches = StepBatches.shared(0, 0, seed=0)
    state = algorithm.init(problem, Point({"x": one / 2}, {"x": one}), batches)
    state = algorithm.step(problem, state, batches)
    state, counts, _ = problem.counting(lambda: algorithm.step(problem, state, batches))
    return counts, state


def _inner_loss(lam: Tree, omega: Tree, data: object) -> Tensor:
    return (omega["x"] - lam["x"]).square().sum() / 2


def _outer_loss(lam: Tree, omega: Tree, data: object) -> Tensor:
    return (omega["x"] - 1).square().sum() / 2


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"
