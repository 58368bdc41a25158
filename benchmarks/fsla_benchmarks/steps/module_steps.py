"""Steps on a module beside the bare passes that they make: what the care for points, masks and buffers costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fsla.train import FSLA, SOBA
from fsla_benchmarks.steps.cases import BATCH, IMAGES
from fsla_benchmarks.steps.race import Key
from fsla_reproduction.problems.networks import build

SAMPLES = 10_000
Step = Callable[[], None]


def steppers(name: str, device: torch.device) -> dict[Key, Step]:
    """SOBA and FSLA by differences on a network, each with the passes that it makes."""
    generator = torch.Generator(device).manual_seed(0)
    images = torch.randn(IMAGES, 1, 28, 28, device=device, generator=generator)
    labels = torch.randint(10, (IMAGES,), device=device, generator=generator)

    def draw() -> Tensor:
        return torch.randint(SAMPLES, (BATCH,), device=device, generator=generator)

    def inner(model: nn.Module, weights: Tensor, index: Tensor) -> Tensor:
        each = cross_entropy(model(images[index % IMAGES]), labels[index % IMAGES], reduction="none")
        return (weights[index].sigmoid() * each).mean()

    def outer(model: nn.Module, weights: Tensor, index: Tensor) -> Tensor:
        return cross_entropy(model(images[index % IMAGES]), labels[index % IMAGES])

    def start() -> tuple[nn.Module, nn.Parameter]:
        return build(name, 28, 10, seed=0, device=device), nn.Parameter(torch.zeros(SAMPLES, device=device))

    def step(kind: type[SOBA] | type[FSLA]) -> Step:
        model, weights = start()
        factories: dict[str, Any] = {
            "inner_optimizer": partial(torch.optim.SGD, lr=1e-3),
            "adjoint_optimizer": partial(torch.optim.SGD, lr=1e-3),
            "outer_optimizer": partial(torch.optim.SGD, lr=1e-3),
        }
        opt = kind(
            model,
            weights,
            inner_loss=inner,
            outer_loss=outer,
            hvp_method="finite_difference",
            max_rollbacks=0,
            **factories,
        )
        opt.step(draw(), draw(), seed=0)

        def run() -> None:
            opt.step(draw(), draw(), seed=0)

        return run

    def passes(forward: int) -> Step:
        """Three gradients, and passes in which λ alone requires one."""
        model, weights = start()
        parameters = list(model.parameters())

        def run() -> None:
            batch = draw()
            for loss, index in ((inner, batch), (inner, batch), (outer, draw())):
                for p in (*parameters, weights):
                    p.grad = None
                loss(model, weights, index).backward()  # type: ignore[no-untyped-call]
            for p in parameters:
                p.requires_grad_(False)
            for _ in range(forward):
                weights.grad = None
                inner(model, weights, batch).backward()  # type: ignore[no-untyped-call]
            for p in parameters:
                p.requires_grad_(True)

        return run

    return {
        Key("passes of module soba"): passes(0),
        Key("module soba"): step(SOBA),
        Key("passes of module fsla"): passes(2),
        Key("module fsla", "none"): step(FSLA),
    }
