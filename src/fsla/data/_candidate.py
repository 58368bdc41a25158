"""A way to train, and its answers to trusted samples that it was not shown."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsla.data._mixture import likelihood, tempered

TEMPERATURES = tuple(2 ** (step / 4) for step in range(-12, 13))


@dataclass
class Candidate:
    """A way, and what it said of the trusted samples that each fold held out, and of those that stand in for them."""

    name: str
    held: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Answers and truths, of each fold."""
    share: float = 0.0
    """In the final model."""

    @property
    def answers(self) -> Tensor:
        """Of all folds, as sure as they should be."""
        return tempered(self._raw, self.temperature)

    @property
    def truths(self) -> Tensor:
        return torch.cat([truths for _, truths in self.held])

    @property
    def temperature(self) -> float:
        """How much too sure its probabilities are: p^(1/T) is most likely. Of a regression it is 1.

        Without that a network that learnt from wrong labels, and so is never sure, would win over one that is right
        more often.
        """
        raw = self._raw
        if raw.ndim == 1:
            return 1.0
        return max(TEMPERATURES, key=lambda temperature: likelihood(tempered(raw, temperature), self.truths))

    @property
    def score(self) -> float:
        """The mean log-likelihood of a trusted sample, at the best temperature."""
        return likelihood(self.answers, self.truths)

    @property
    def error(self) -> float:
        """The share of wrong answers, or the root mean squared error."""
        raw = self._raw
        if raw.ndim == 2:
            return float((raw.argmax(1) != self.truths).float().mean())
        return float((raw - self.truths).square().mean().sqrt())

    @property
    def _raw(self) -> Tensor:
        return torch.cat([answers for answers, _ in self.held])
