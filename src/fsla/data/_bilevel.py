"""Weights of groups or samples by FSLA: the model minimises the weighted loss, the weights the trusted loss.

The weighted loss is a weighted mean: only how weights compare matters. Were it a sum, the size of all of them would be
one more penalty on the network, and that may be best small.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fsla.data._material import Material
from fsla.steps import ScaleFree
from fsla.train import FSLA
from fsla.train._weights import SampleWeights

DECAY = 1e-2
"""Adam's weight decay, of which v knows. Without any, a run learns wrong labels by heart and v never settles."""
KEPT = 2.0
PULL = 0.002
"""A logit is drawn towards KEPT, so slowly that evidence against a group outdoes it, and chance does not."""
KEEP = 0.3
"""The weight from which a group is kept."""
CERTAIN = 0.7
RECORD = 50
SHOWN = 50


class Weighed(NamedTuple):
    """Weights, the mean over the second half of a run; and the trusted loss and the weights on the way (up to 50)."""

    weights: Tensor
    curve: list[tuple[int, float, list[float]]]


def learn(material: Material, index: Tensor, count: int, shown: Tensor, number: int = 0) -> Weighed:
    """One training run that learns the weights on the way; `index` is the number of each sample's weight, and `shown`
    are the rows of the trusted samples that it may see. Runs of other numbers draw other samples.

    The steps of v and of the weights are automatic; the network moves by Adam.
    """
    steps = material.pace.bilevel_steps
    batch = material.pace.bilevel_batch
    network = material.network(number)
    network.train()
    weights = SampleWeights(count).to(material.device)

    def inner_loss(model: nn.Module, weights: SampleWeights, i: Tensor) -> Tensor:
        losses = material.losses(model(material.samples(i)), i)
        weight: Tensor = weights(index[i])
        return (weight * losses).sum() / weight.sum()

    def outer_loss(model: nn.Module, weights: SampleWeights, j: Tensor) -> Tensor:
        return material.losses(model(material.samples(j)), j).mean()

    adam = torch.optim.Adam(network.parameters(), lr=material.pace.rate, weight_decay=DECAY)
    opt = FSLA(network, weights, inner_loss=inner_loss, outer_loss=outer_loss, inner_optimizer=adam, momentum="average")
    draw = torch.Generator(material.device).manual_seed(material.seed_of(number))
    curve = []
    mean = torch.zeros_like(weights.logit)
    kept = torch.full_like(mean, KEPT)
    late = steps // 2
    for k in range(steps):
        i = torch.randint(material.mixed, (batch,), generator=draw, device=material.device)
        j = torch.randint(len(shown), (batch,), generator=draw, device=material.device)
        info = opt.step(i, shown[j] if batch < len(shown) else shown, seed=material.seed_of(steps * number + k))
        assert info.outer_step_scale is not None
        assert info.outer_loss is not None
        with torch.no_grad():
            weights.logit.lerp_(kept, PULL * info.outer_step_scale / (1 + k / ScaleFree.fall) ** 0.5)
        if k >= late:
            mean += weights.logit.detach() / (steps - late)
        if k % RECORD == 0 or k == steps - 1:
            now = compared(weights.weights).tolist() if count <= SHOWN else []
            curve.append((k, float(info.outer_loss), now))
    material.progress()
    return Weighed(compared(mean.sigmoid()), curve)


def acted_on(weights: Tensor) -> Tensor:
    """The weights to train with. One below KEEP is none: what little is left of many bad groups would add up."""
    return weights * ((weights - KEEP) / (CERTAIN - KEEP)).clamp(0.0, 1.0)


def compared(weights: Tensor) -> Tensor:
    """Weights as shares of the largest ones: the mean of the upper tenth."""
    upper = weights.sort(descending=True).values[: max(1, len(weights) // 10)].mean()
    return (weights / upper).clamp(max=1.0)
