"""Weights of training data as modules: λ is a logit for each sample or group, and a weight lies in (0, 1).

weights = fsla.GroupWeights(source_of_each_sample)
inner = lambda model, weights, batch: (weights(batch["group"]) * losses(model, batch)).mean()
opt = fsla.FSLA(model, weights, inner_loss=inner, outer_loss=outer)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fsla._checks import whole_number


class SampleWeights(nn.Module):
    """A weight for each of `count` samples; called with their numbers.

    Args:
        count: how many there are.
        start: the weight that all begin with.
    """

    def __init__(self, count: int, *, start: float = 0.5) -> None:
        super().__init__()
        whole_number(count, "count", type(self).__name__)
        if not 0 < start < 1:
            raise ValueError(f"The 'start' of {type(self).__name__} must lie in (0, 1). Got {start} instead.")
        self.logit = nn.Parameter(torch.full((count,), math.log(start / (1 - start))))

    def forward(self, index: Tensor) -> Tensor:
        return self.logit[index].sigmoid()

    @property
    def values(self) -> Tensor:
        """All weights, as they stand."""
        return self.logit.detach().sigmoid()


class GroupWeights(SampleWeights):
    """A weight for each group (source, annotator, crawl, class); called with the groups' numbers.

    Args:
        groups: the group of each sample, by any names; or how many groups there are.
        start: the weight that all begin with.
    """

    index: Tensor
    """The number of each sample's group, which the weights are called with."""

    def __init__(self, groups: int | Iterable[Any], *, start: float = 0.5) -> None:
        if isinstance(groups, int):
            names: list[Any] = list(range(groups))
            index = torch.arange(groups)
        else:
            given = groups.tolist() if hasattr(groups, "tolist") else list(groups)
            numbers: dict[Any, int] = {}
            index = torch.tensor([numbers.setdefault(name, len(numbers)) for name in given], dtype=torch.int64)
            names = list(numbers)
            if not names:
                raise ValueError("GroupWeights must be given the group of each sample. Got no samples.")
        super().__init__(len(names), start=start)
        self.names = names
        self.register_buffer("index", index, persistent=False)

    def table(self) -> dict[Any, float]:
        """The weights by the groups' names."""
        return dict(zip(self.names, self.values.tolist(), strict=True))


class ProductWeights(nn.Module):
    """The product of several weights (of the source and of the annotator, say); called with a number for each."""

    def __init__(self, *parts: SampleWeights) -> None:
        super().__init__()
        if len(parts) < 2:
            raise ValueError(f"ProductWeights must have at least two factors. Got {len(parts)}.")
        self.parts = nn.ModuleList(parts)

    def forward(self, *indices: Tensor) -> Tensor:
        if len(indices) != len(self.parts):
            raise ValueError(f"There are {len(self.parts)} factors, which need a number each. Got {len(indices)}.")
        factors = [part(index) for part, index in zip(self.parts, indices, strict=True)]
        return torch.stack(factors).prod(0)
