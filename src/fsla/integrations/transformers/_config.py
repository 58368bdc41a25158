"""Settings of a bilevel Trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from fsla import integrations
from fsla.train import GroupWeights

Weighting = Literal["auto", "loss_function", "groups"] | Callable[[Any, Any], Tensor]


@dataclass(kw_only=True)
class BilevelConfig(integrations.BilevelConfig):
    """Settings of a bilevel Trainer, beside those of `fsla.integrations.BilevelConfig`.

    Args:
        group_column: column of the training data that the weights are called with. With `fsla.GroupWeights` it holds
            names, with other modules numbers.
        weighting: how weights enter the loss. "loss_function": the model's own loss function, token by token, at no
            cost. "groups": one call of the Trainer's `compute_loss` for each group in a batch, which serves any
            Trainer whose loss is a sum or a mean over rows. A function: called as ``weighting(model, inputs)``, it
            returns the loss of each row. "auto": "loss_function" where the Trainer uses it, else "groups".
        sample_by_weights: draw training rows in proportion to the weights, so that the weights are not in the loss.
            It needs `fsla.GroupWeights`.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if a number or a name is out of range.

    Example:
        >>> BilevelConfig(weights=weights, trusted_dataset=trusted, group_column="source").weighting
        'auto'
    """

    group_column: str
    weighting: Weighting = "auto"
    sample_by_weights: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.weighting) and self.weighting not in ("auto", "loss_function", "groups"):
            raise ValueError(
                "The 'weighting' of BilevelConfig must be 'auto', 'loss_function', 'groups' or a function that returns "
                f"the loss of each row. Got {self.weighting!r} instead."
            )
        if self.sample_by_weights and not isinstance(self.weights, GroupWeights):
            raise TypeError(
                "sample_by_weights=True needs weights of groups, fsla.GroupWeights. "
                f"Got {type(self.weights).__name__} instead."
            )
