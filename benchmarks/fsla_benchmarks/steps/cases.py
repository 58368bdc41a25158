"""The problems that the benchmark measures on, with random data.

cnn         the four-layer network on 28 x 28 images, batch 256, a weight for each sample
softmax     softmax regression 784 x 10 with a ridge, batch 256, a weight for each sample
quadratic   the synthetic experiment: 5 dimensions, 10 000 rows, full batches
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fsla._checks import pick
from fsla.problems import Point, Problem, WeightedLossProblem
from fsla.steps import constant
from fsla_benchmarks.steps.race import Advance
from fsla_reproduction.problems import Reweighting, Synthetic
from fsla_reproduction.problems.networks import RIDGE, build, cnn

Data = Tensor | None
"""A batch: indices, or nothing where all of the data is read."""
BATCH = 256
IMAGES = 2_000


@dataclass
class Case:
    """A problem to measure on: its oracles, a start, two sources of batches, and the step of plain SGD."""

    name: str
    problem: Problem
    general: Problem
    difference: Problem
    at: Point
    inner: Callable[[], Data]
    outer: Callable[[], Data]
    generator: torch.Generator

    def sgd(self) -> Advance:
        lam = self.at.lam
        loss = self.problem.inner_loss

        def advance(n: int) -> None:
            for _ in range(n):
                omega = {name: t.detach().requires_grad_() for name, t in self.at.omega.items()}
                leaves = list(omega.values())
                grads = torch.autograd.grad(loss(lam, omega, self.inner()), leaves)
                torch._foreach_add(leaves, list(grads), alpha=-0.1)

        return advance


def case(name: str, device: torch.device, n: int = 10_000, width: int = 32) -> Case:
    """A benchmark problem on random data, with n sample weights and a network of a width."""
    pick(name, dict.fromkeys(PROBLEMS), "problem")
    generator = torch.Generator(device).manual_seed(0)
    if name == "quadratic":
        drawn = Synthetic.draw(0)
        synthetic = Synthetic(*(getattr(drawn, f).to(device) for f in Synthetic.__dataclass_fields__))
        problem = synthetic.losses()
        difference = Problem(
            problem.inner_loss, problem.outer_loss, outer_uses_lam=False, hvp_method="finite_difference"
        )
        return Case(name, problem, problem, difference, synthetic.at, lambda: None, lambda: None, generator)
    images = torch.randn(IMAGES, 1, 28, 28, device=device, generator=generator)
    labels = torch.randint(10, (IMAGES,), device=device, generator=generator)
    few = cast(Tensor, _Wrapped(images)), cast(Tensor, _Wrapped(labels))
    model = build(name, 28, 10, seed=0, device=device) if width == 32 else cnn(28, 10, width=width).to(device)
    data = Reweighting(model, *few, images, labels, ridge=RIDGE.get(name, 0.0))
    weighted = data.losses()
    at = Point({"weight_logits": torch.zeros(n, device=device)}, data.start().omega)

    def batch(size: int) -> Tensor:
        return torch.randint(size, (BATCH,), device=device, generator=generator)

    general = Problem(weighted.inner_loss, weighted.outer_loss, outer_uses_lam=False, hvp_method="reverse_over_reverse")
    difference = WeightedLossProblem(
        weighted.per_sample_loss,
        weighted.sample_weight,
        weighted.outer_loss,
        regularizer=weighted.regularizer,
        row_index=weighted.row_index,
        model_outputs=weighted.model_outputs,
        outer_uses_lam=False,
        hvp_method="finite_difference",
    )
    return Case(name, weighted, general, difference, at, lambda: batch(n), lambda: batch(IMAGES), generator)


class _Wrapped:
    """Rows of a small tensor under the indices of a large data set, so that n weights need no n images."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def __getitem__(self, index: Tensor) -> Tensor:
        return self._rows[index % len(self._rows)]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def device(self) -> torch.device:
        return self._rows.device


PROBLEMS = ("cnn", "softmax", "quadratic")
RATES = {name: constant(1e-3, 1e-2, 1e-2, 0.5) for name in ("cnn", "softmax")} | {
    "quadratic": constant(1e-9, 2e-5, 2e-5, 0.5)
}
