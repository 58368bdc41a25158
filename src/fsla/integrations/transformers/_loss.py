"""A weight for each row in the loss function of a transformers model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

SHIFTED = {
    "ForCausalLMLoss": True,
    "ForMaskedLMLoss": False,
    "ForSequenceClassificationLoss": False,
    "ForTokenClassification": False,
}
"""Loss functions of transformers that are a cross entropy, and whether they shift the labels by one place."""


class WeightedLossFunction:
    """The loss function of a model. Inside `weighted` it is a cross entropy with a weight for each row.

    Args:
        loss_function: the model's own one.
        shifts: whether token n is the label of place n - 1.
    """

    def __init__(self, loss_function: Callable[..., Tensor], *, shifts: bool) -> None:
        self._loss_function = loss_function
        self._shifts = shifts
        self._row_weights: Tensor | None = None
        self.unweighted: Tensor | None = None
        """The loss of the last weighted call with all weights 1."""

    @contextmanager
    def weighted(self, row_weights: Tensor) -> Iterator[None]:
        """Weigh the rows of every call inside."""
        self._row_weights = row_weights
        try:
            yield
        finally:
            self._row_weights = None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._row_weights is None:
            return self._loss_function(*args, **kwargs)
        return self._cross_entropy(*args, **kwargs)

    def _cross_entropy(
        self,
        logits: Tensor | None = None,
        labels: Tensor | None = None,
        *_: Any,
        pooled_logits: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **__: Any,
    ) -> Tensor:
        scores = pooled_logits if logits is None else logits
        assert scores is not None
        assert self._row_weights is not None
        if shift_labels is not None:
            labels = shift_labels
        elif self._shifts and labels is not None:
            labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
        assert labels is not None
        if labels.is_floating_point():
            raise ValueError(
                "The labels are real numbers, so the model's loss is no cross entropy. Use weighting='groups'."
            )
        labels = labels.to(scores.device)
        losses = cross_entropy(
            scores.float().reshape(-1, scores.shape[-1]),
            labels.reshape(-1),
            ignore_index=ignore_index,
            reduction="none",
        ).view(len(labels), -1)
        total: Tensor | int = (labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        total = total.to(scores.device) if isinstance(total, Tensor) else total
        self.unweighted = losses.detach().sum() / total
        return (self._row_weights.to(scores.device)[:, None] * losses).sum() / total


def install_loss_function(model: nn.Module) -> WeightedLossFunction | None:
    """Put a weighted loss function into a model, and return it; None where its loss is no cross entropy."""
    network: Any = model
    base = network.get_base_model() if hasattr(network, "get_base_model") else network
    present: Any = getattr(base, "loss_function", None)
    if isinstance(present, WeightedLossFunction):
        return present
    name = getattr(present, "__name__", "")
    config = getattr(base, "config", None)
    classifies = getattr(config, "num_labels", 2) > 1
    others = ("regression", "multi_label_classification")
    if name not in SHIFTED or getattr(config, "problem_type", None) in others:
        return None
    if name == "ForSequenceClassificationLoss" and not classifies:
        return None
    weighted = WeightedLossFunction(present, shifts=SHIFTED[name])
    base.loss_function = weighted
    return weighted
