"""Several ways of training as one model: each has a share, and is made as sure as it should be."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fsla.data._training import mean_answer

SMALLEST = 1e-9


class Member(NamedTuple):
    """A way's share in the model, how much too sure it is of itself, and its networks."""

    share: float
    temperature: float
    networks: tuple[nn.Module, ...]


class Mixture(NamedTuple):
    """The model: the mean answer of its members."""

    members: tuple[Member, ...]
    classes: int

    def answers(self, x: Tensor) -> Tensor:
        """Probabilities of the classes, or the predicted numbers."""
        parts = [
            member.share * tempered(mean_answer(member.networks, x, self.classes), member.temperature)
            for member in self.members
        ]
        return torch.stack(parts).sum(0)


def tempered(answers: Tensor, temperature: float) -> Tensor:
    """p^(1 / temperature), normalised; numbers as they are."""
    if temperature == 1.0:
        return answers
    return (answers.clamp(min=SMALLEST).log() / temperature).softmax(-1)


def likelihood(answers: Tensor, truths: Tensor) -> float:
    """The mean log-likelihood of a sample; of numbers, with the spread that suits them best."""
    if answers.ndim == 2:
        return float(answers.gather(1, truths[:, None]).clamp(min=SMALLEST).log().mean())
    squared = float((answers - truths).square().mean())
    return -0.5 * math.log(2 * math.pi * math.e * max(squared, 1e-12))
