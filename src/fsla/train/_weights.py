"""Weights of training data as modules, to hand to a bilevel optimizer as `outer`.

weights = fsla.GroupWeights(["web", "forum", "vendor"])
inner_loss = lambda model, weights, batch: (weights(batch["source"]) * losses(model, batch)).mean()
bilevel = fsla.SOBA(model, weights, inner_loss=inner_loss, outer_loss=outer_loss)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsla._checks import instance, number, positive, whole_number


class SampleWeights(nn.Module):
    """A weight in (0, 1) for each sample, the sigmoid of a logit.

    Call it with the samples' numbers.

    Args:
        num_samples: number of samples.
        init: weight that all samples begin with.

    Examples:
        >>> weights = fsla.SampleWeights(1000, init=0.9)
        >>> weights(torch.tensor([0, 999])).detach()
        tensor([0.9000, 0.9000])
    """

    def __init__(self, num_samples: int, *, init: float = 0.5) -> None:
        super().__init__()
        whole_number(num_samples, "num_samples", "SampleWeights")
        number(init, "init", "SampleWeights")
        if not 0 < init < 1:
            raise ValueError(f"The 'init' of SampleWeights must lie in (0, 1). Got {init} instead.")
        self.logit = nn.Parameter(torch.full((num_samples,), math.log(init / (1 - init))))

    def forward(self, index: Tensor) -> Tensor:
        """Return the weights of samples, by their numbers."""
        _check_index(index, len(self.logit), "SampleWeights")
        return self.logit[index].sigmoid()

    @property
    def weights(self) -> Tensor:
        """The weights of all samples, without a graph."""
        return self.logit.detach().sigmoid()


class GroupWeights(nn.Module):
    """A weight for each group (source, annotator, class), with mean 1: softmax times the number of groups.

    Call it with names, such as the list of strings of a batch, or with a tensor of the groups' indices.

    Args:
        groups: the names, or the group of each sample, where a name may come more than once. With a number of groups
            they are named 0, 1, …
        init: weights that they begin with, by name; only their ratios matter. By default all are 1.

    Attributes:
        names: the groups, in the order in which they first came.
        group_index: index of the group of each entry of `groups`.

    Raises:
        ValueError: if there are fewer than two groups, or `init` has other names.

    Examples:
        >>> weights = fsla.GroupWeights(["web", "forum", "vendor"])
        >>> weights(["vendor", "web"]).detach()
        tensor([1., 1.])
        >>> weights.as_dict()
        {'web': 1.0, 'forum': 1.0, 'vendor': 1.0}
    """

    group_index: Tensor

    def __init__(self, groups: int | Iterable[Any], *, init: Mapping[Any, float] | None = None) -> None:
        super().__init__()
        if isinstance(groups, int):
            whole_number(groups, "groups", "GroupWeights")
            groups = range(groups)
        self._indices: dict[Any, int] = {}
        index = [self._indices.setdefault(name, len(self._indices)) for name in _as_list(groups)]
        if len(self._indices) < 2:
            raise ValueError(
                f"GroupWeights needs at least two groups, since the mean weight is 1. Got {len(self._indices)}."
            )
        self.logit = nn.Parameter(torch.zeros(len(self._indices)) if init is None else self._logits(init))
        self.register_buffer("group_index", torch.tensor(index), persistent=False)

    def _logits(self, init: Mapping[Any, float]) -> Tensor:
        instance(init, Mapping, "init", "GroupWeights", "a mapping from names to weights")
        if init.keys() != self._indices.keys():
            raise ValueError(
                f"The 'init' of GroupWeights must have a weight for each group: {', '.join(map(repr, self.names))}. "
                f"Got {', '.join(map(repr, init))} instead."
            )
        for name in self.names:
            positive(init[name], f"init[{name!r}]", "GroupWeights")
        weights = torch.tensor([float(init[name]) for name in self.names])
        return (weights / weights.mean()).log()

    @property
    def names(self) -> list[Any]:
        """The groups, in the order in which they first came."""
        return list(self._indices)

    def forward(self, groups: Tensor | Iterable[Any]) -> Tensor:
        """Return the weights of groups, by their names or indices."""
        index = groups if isinstance(groups, Tensor) else self._index_of(groups)
        _check_index(index, len(self.logit), "GroupWeights")
        return self._all()[index]

    def _index_of(self, names: Iterable[Any]) -> Tensor:
        try:
            index = [self._indices[name] for name in _as_list(names)]
        except KeyError as error:
            raise ValueError(
                f"Unknown group {error.args[0]!r}. GroupWeights has {', '.join(map(repr, self.names))}; a tensor is "
                "taken for indices."
            ) from None
        return torch.tensor(index, device=self.logit.device)

    def _all(self) -> Tensor:
        return len(self.logit) * self.logit.softmax(0)

    @property
    def weights(self) -> Tensor:
        """The weights of all groups, without a graph."""
        return self._all().detach()

    def probabilities(self) -> list[float]:
        """Return how often to draw each group so that its samples need no weight, in the order of `names`.

        It is the weight times how often the group comes in `groups`, such as its number of samples. The list serves
        ``datasets.interleave_datasets(probabilities=...)``.
        """
        sizes = self.group_index.bincount(minlength=len(self.logit))
        drawn = self.weights.double() * sizes
        result: list[float] = (drawn / drawn.sum()).tolist()
        return result

    def as_dict(self) -> dict[Any, float]:
        """Return the weights by the groups' names."""
        return dict(zip(self.names, self.weights.tolist(), strict=True))


class ProductWeights(nn.Module):
    """Product of several weights, such as that of the source and that of the annotator.

    Call it with one argument for each factor.

    Args:
        parts: modules of the factors, such as `GroupWeights`.

    Raises:
        ValueError: if there are fewer than two.

    Examples:
        >>> weights = fsla.ProductWeights(fsla.GroupWeights(["web", "forum"]), fsla.GroupWeights(["ann", "bob"]))
        >>> weights(["web", "web"], ["ann", "bob"]).detach()
        tensor([1., 1.])
    """

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        for part in parts:
            instance(part, nn.Module, "parts", "ProductWeights", "modules, such as fsla.GroupWeights")
        if len(parts) < 2:
            raise ValueError(f"ProductWeights must have at least two factors. Got {len(parts)}.")
        self.parts = nn.ModuleList(parts)

    def forward(self, *groups: Any) -> Tensor:
        """Return the products of the weights."""
        if len(groups) != len(self.parts):
            raise ValueError(
                f"ProductWeights has {len(self.parts)} factors, and must be called with as many arguments. "
                f"Got {len(groups)}."
            )
        return torch.stack([part(group) for part, group in zip(self.parts, groups, strict=True)]).prod(0)


def _check_index(index: object, size: int, owner: str) -> None:
    """Raise unless numbers are those of weights. On a GPU torch checks them: the host must not wait for it."""
    if not isinstance(index, Tensor) or index.is_floating_point() or index.is_complex():
        kind = str(index.dtype) if isinstance(index, Tensor) else type(index).__name__
        raise TypeError(f"{owner} must be called with a tensor of whole numbers. Got {kind} instead.")
    if index.device.type == "cpu" and index.numel() and index.dtype is not torch.bool:
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= size:
            raise IndexError(f"{owner} has the weights 0 to {size - 1}. Got the numbers {low} to {high}.")


def _as_list(names: Iterable[Any]) -> list[Any]:
    """Names as Python values; an array or a column of a table has `tolist`."""
    if isinstance(names, str):
        raise TypeError(f"Groups must be a list of names. Got the string {names!r}; use [{names!r}].")
    values = getattr(names, "tolist", lambda: names)()
    if not isinstance(values, Iterable):
        raise TypeError(f"Groups must be a list of names. Got {names!r} instead.")
    return list(values)
