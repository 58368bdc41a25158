"""What every integration is told: the weights, the trusted data, and how often the weights move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsla._checks import instance, whole_number
from fsla.algorithms import Algorithm
from fsla.problems._batches import mix_seed
from fsla.train import BilevelOptimizer
from fsla.train._optimizers import OptimizerFactory


@dataclass(kw_only=True)
class BilevelConfig:
    """Settings of bilevel training in a loop of another library.

    Args:
        weights: module of the weights to learn, such as `fsla.GroupWeights`. It must not be a part of the model.
        trusted_dataset: samples of the outer loss, with a length and an index.
        outer_every: the weights move at one optimiser step in each block of this length.
        trusted_batch_size: trusted samples on each device; by default as many as training samples.
        algorithm: algorithm, or the name of one with automatic step sizes. It must ask for everything at one point, as
            "soba", "ma_soba" and "one_step" do.
        adjoint_optimizer: function of parameters that makes the optimiser of the adjoint.
        outer_optimizer: torch optimiser of the weights, or a function that makes one.
        options: further arguments of `fsla.BilevelOptimizer`, such as ``{"max_adjoint_norm": 10.0}``.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if a number is out of range, or the trusted data are empty.

    Example:
        >>> config = BilevelConfig(weights=weights, trusted_dataset=trusted, outer_every=8)
        >>> config.algorithm
        'soba'
    """

    weights: nn.Module
    trusted_dataset: Any
    outer_every: int = 8
    trusted_batch_size: int | None = None
    algorithm: Algorithm[Any] | str = "soba"
    adjoint_optimizer: OptimizerFactory = None
    outer_optimizer: OptimizerFactory = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        owner = "BilevelConfig"
        if not isinstance(self.weights, nn.Module):
            raise TypeError(
                f"The 'weights' of {owner} must be a torch.nn.Module, such as fsla.GroupWeights(names). "
                f"Got {type(self.weights).__name__} instead."
            )
        whole_number(self.outer_every, "outer_every", owner)
        if self.trusted_batch_size is not None:
            whole_number(self.trusted_batch_size, "trusted_batch_size", owner)
        instance(self.options, Mapping, "options", owner, "a mapping of arguments of fsla.BilevelOptimizer")
        if not (hasattr(self.trusted_dataset, "__len__") and hasattr(self.trusted_dataset, "__getitem__")):
            raise TypeError(
                f"The 'trusted_dataset' of {owner} must have a length and an index, since its batches are drawn by "
                f"their number. Got {type(self.trusted_dataset).__name__} instead; load it into memory."
            )

    def build(
        self, model: nn.Module, inner_optimizer: torch.optim.Optimizer, autocast_dtype: torch.dtype | None
    ) -> BilevelOptimizer:
        """Return the bilevel optimizer of a model, with the weights on the model's device."""
        self.check_outside(model)
        self.weights.to(next(model.parameters()).device)
        return BilevelOptimizer(
            model,
            self.weights,
            algorithm=self.algorithm,
            inner_optimizer=inner_optimizer,
            adjoint_optimizer=self.adjoint_optimizer,
            outer_optimizer=self.outer_optimizer,
            outer_every=self.outer_every,
            autocast_dtype=autocast_dtype,
            **self.options,
        )

    def state_dict(self, bilevel: BilevelOptimizer) -> dict[str, Any]:
        """Return all that the loop does not save itself, as a dict that `torch.load(weights_only=True)` reads."""
        optimizer = self.outer_optimizer
        return {
            "bilevel": bilevel.state_dict(),
            "weights": self.weights.state_dict(),
            "outer_optimizer": optimizer.state_dict() if isinstance(optimizer, torch.optim.Optimizer) else None,
        }

    def load_state_dict(self, bilevel: BilevelOptimizer, state: Mapping[str, Any]) -> None:
        """Set what `state_dict` returned."""
        bilevel.load_state_dict(state["bilevel"])
        self.weights.load_state_dict(state["weights"])
        if (state["outer_optimizer"] is None) == isinstance(self.outer_optimizer, torch.optim.Optimizer):
            raise ValueError(
                "Cannot load the state of outer_optimizer: it was an optimiser in one run, and a function that makes "
                "it, or nothing, in the other. Give the same in both."
            )
        if isinstance(self.outer_optimizer, torch.optim.Optimizer):
            self.outer_optimizer.load_state_dict(state["outer_optimizer"])

    def check_outside(self, model: nn.Module) -> None:
        """Raise if the weights are a part of the model, whose loop would train, wrap and shard them."""
        inside = set(model.parameters()) & set(self.weights.parameters())
        if inside:
            raise ValueError(
                f"The weights must not be a part of the model. {len(inside)} of their parameters are, and the loop's "
                "optimiser, DDP or FSDP would take them for the model's. Hold them in the BilevelConfig alone."
            )

    def check_trusted(self, batch_size: int, world_size: int) -> None:
        """Raise unless there is a trusted batch for each rank."""
        needed, count = batch_size * world_size, len(self.trusted_dataset)
        if count < needed:
            raise ValueError(
                f"trusted_dataset must have at least {needed} samples, {batch_size} for each of {world_size} "
                f"process(es). Got {count}. Set trusted_batch_size to fewer."
            )


def trusted_rows(count: int, number: int, batch_size: int, *, rank: int, world_size: int, seed: int) -> list[int]:
    """Return the rows of trusted batch `number` on a rank. Nothing need be replayed when a run resumes.

    The batches of a pass over the data hold different samples, in an order drawn from the seed.
    """
    total = batch_size * world_size
    number_of_pass, place = divmod(number, count // total)
    generator = torch.Generator().manual_seed(mix_seed(seed, 5, number_of_pass) or 0)
    start = place * total + rank * batch_size
    order: list[int] = torch.randperm(count, generator=generator)[start : start + batch_size].tolist()
    return order
