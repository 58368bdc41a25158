"""Strategies that learn weights of groups or votes by bilevel optimisation, with a network in the loop.

A small network minimises the weighted loss of the votes, and the weights minimise its loss on checked rows, both in
one run of `fsla.SOBA` or `fsla.FSLA`. On images the network is a head on the features of the trunk.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fsla.data._dataset import Array, TrainingData
from fsla.data._network_learners import MLP_INPUT_SCALE, fork_seed, one_thread
from fsla.data._strategies import Belief, Strategy, vote_mass
from fsla.train import FSLA, SOBA, BilevelOptimizer
from fsla.train._weights import GroupWeights, SampleWeights

MIN_CHECKED = 10
"""Fewer checked rows cannot guide weights."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _BilevelStrategy(Strategy):
    """Base class: one training run that learns the weights on its way.

    Attributes:
        algorithm: "soba" or "fsla".
        hidden: Width of the hidden layer. 0 makes the network linear.
        steps: Number of steps of the network.
        batch_size: Votes of a step.
        outer_every: The weights move once in so many steps.
        lr: Learning rate of Adam, which moves the network.
        weight_decay: Ridge penalty of the network.
        seed: Of the batches and of the network.
    """

    algorithm: Literal["soba", "fsla"] = "soba"
    hidden: int = 64
    steps: int = 800
    batch_size: int = 256
    outer_every: int = 2
    lr: float = 3e-3
    weight_decay: float = 1e-3
    seed: int = 0

    def supports(self, data: TrainingData) -> bool:
        """Return whether checked rows can guide weights."""
        return len(data.checked_rows) >= MIN_CHECKED

    @abstractmethod
    def build_weights(self, data: TrainingData, votes: Array) -> tuple[nn.Module, Array]:
        """Return the module of the weights, and the index of each of the votes in it."""

    @abstractmethod
    def read_weights(self, mean_logit: Tensor) -> Array:
        """Return the weights of averaged logits, the largest about 1."""

    def belief(self, data: TrainingData, checked: Array) -> Belief:
        """Return the votes of unchecked rows, each times the weight that the run has learned."""
        votes = np.nonzero(~data.is_checked[data.votes.row])[0]
        vote_weight = np.zeros(len(data.votes))
        group_weight = None
        if len(votes) and len(checked):
            vote_weight[votes], group_weight = self._learn(data, votes, checked)
        return Belief(vote_mass(data, vote_weight), vote_weight, group_weight)

    def _learn(self, data: TrainingData, votes: Array, checked: Array) -> tuple[Array, Array | None]:
        """Return the weight of each vote, and of each group where weights are those of groups."""
        x = torch.from_numpy((MLP_INPUT_SCALE * data.features.dense).astype(np.float32))
        vote_row = torch.from_numpy(data.votes.row[votes])
        checked_row = torch.from_numpy(data.checked_rows[checked])
        labels = _as_targets(data, data.votes.label[votes])
        checked_labels = _as_targets(data, data.checked_labels[checked])
        weights, positions = self.build_weights(data, votes)
        index = torch.from_numpy(positions)
        outputs = data.num_classes or 1
        logit = next(weights.parameters())
        mean = torch.zeros_like(logit)
        generator = torch.Generator().manual_seed(self.seed)
        with one_thread(), fork_seed(self.seed):
            network = _build_network(x.shape[1], self.hidden, outputs)
            optimizer = self._optimizer(network, weights)
            late = self.steps // 2
            for step in range(self.steps):
                i = torch.randint(len(votes), (self.batch_size,), generator=generator)
                j = torch.arange(len(checked))
                if len(checked) > self.batch_size:
                    j = torch.randint(len(checked), (self.batch_size,), generator=generator)
                optimizer.step(
                    (x[vote_row[i]], labels[i], index[i]), (x[checked_row[j]], checked_labels[j]), seed=self.seed + step
                )
                if step >= late:
                    mean += logit.detach() / (self.steps - late)
        learned = self.read_weights(mean)
        return learned[positions], learned if isinstance(weights, GroupWeights) else None

    def _optimizer(self, network: nn.Module, weights: nn.Module) -> BilevelOptimizer:
        adam = torch.optim.Adam(network.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        options: dict[str, Any] = {"inner_loss": _inner_loss, "outer_loss": _outer_loss}
        options |= {"inner_optimizer": adam, "outer_every": self.outer_every}
        if self.algorithm == "fsla":
            return FSLA(network, weights, momentum="average", **options)
        return SOBA(network, weights, **options)


@dataclass(frozen=True, eq=False, kw_only=True)
class BilevelGroupWeights(_BilevelStrategy):
    """Weights of groups by bilevel optimisation: groups whose votes lower the loss on checked rows count more."""

    name: ClassVar[str] = "bilevel_group_weights"

    def supports(self, data: TrainingData) -> bool:
        """Return whether there are several groups, and checked rows to guide their weights."""
        return super().supports(data) and data.num_groups > 1

    def build_weights(self, data: TrainingData, votes: Array) -> tuple[nn.Module, Array]:
        """Return a weight for each group."""
        return GroupWeights(data.num_groups), data.votes.group[votes].astype(np.intp)

    def read_weights(self, mean_logit: Tensor) -> Array:
        """Return weights relative to the largest."""
        return np.exp((mean_logit - mean_logit.max()).numpy().astype(np.float64))


@dataclass(frozen=True, eq=False, kw_only=True)
class BilevelSampleWeights(_BilevelStrategy):
    """A weight for each vote by bilevel optimisation: the paper's hyper-cleaning.

    The network is linear and the run is longer, because each weight moves only when its vote is drawn.
    """

    name: ClassVar[str] = "bilevel_sample_weights"
    hidden: int = 0
    steps: int = 1000
    outer_every: int = 1
    weight_decay: float = 1e-2

    def build_weights(self, data: TrainingData, votes: Array) -> tuple[nn.Module, Array]:
        """Return a weight for each vote."""
        return SampleWeights(len(votes)), np.arange(len(votes))

    def read_weights(self, mean_logit: Tensor) -> Array:
        """Return weights relative to the mean of the largest tenth, at most 1."""
        weight: Array = mean_logit.sigmoid().numpy().astype(np.float64)
        top = np.sort(weight)[-max(1, len(weight) // 10) :].mean()
        return np.asarray(np.minimum(weight / top, 1.0))


def _build_network(inputs: int, hidden: int, outputs: int) -> nn.Module:
    if hidden == 0:
        return nn.Linear(inputs, outputs)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def _as_targets(data: TrainingData, labels: Array) -> Tensor:
    kind = np.int64 if data.task == "classification" else np.float32
    return torch.from_numpy(labels.astype(kind))


def _losses(outputs: Tensor, target: Tensor) -> Tensor:
    if target.is_floating_point():
        return (outputs[:, 0] - target).square() / 2
    return nn.functional.cross_entropy(outputs, target, reduction="none")


def _inner_loss(network: nn.Module, weights: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the weighted mean: only ratios of weights matter, so their size is no penalty on the network."""
    x, target, index = batch
    weight: Tensor = weights(index)
    return (weight * _losses(network(x), target)).sum() / weight.sum()


def _outer_loss(network: nn.Module, weights: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, target = batch
    return _losses(network(x), target).mean()


def bilevel_strategies(data: TrainingData) -> tuple[Strategy, ...]:
    """Return the strategies of this module that can be used with the data."""
    strategies: tuple[Strategy, ...] = (BilevelGroupWeights(), BilevelSampleWeights())
    return tuple(strategy for strategy in strategies if strategy.supports(data))
