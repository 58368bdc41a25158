"""What is given: samples of mixed quality and trusted ones, and the losses of a network on them.

Several networks are trained at once. What is said of each of them has a first dimension: outputs are (networks, batch,
classes), rows are (networks, batch). A view is a part of the trusted samples, and each network is of one view, which
says which trusted samples it may see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsla.data._networks import USUAL_PACE, Maker, Pace

THREADED = 256
"""Numbers of a sample from which a pass on a CPU is worth more than one thread."""
PREDICT = 8192
"""Samples of one forward pass outside of training."""


@dataclass(frozen=True)
class Material:
    """Tensors on one device: the samples of mixed quality, and after them the trusted ones."""

    x: Tensor
    y: Tensor
    """Numbers from 0 to classes - 1, or the targets of a regression (classes = 0)."""
    mixed: int
    """How many samples are of mixed quality."""
    classes: int
    make: Maker
    groups: Tensor | None = None
    """Of the samples of mixed quality: from 0 to group_count - 1."""
    group_count: int = 0
    seed: int = 0
    pace: Pace = USUAL_PACE
    steps: int | None = None
    """Of each training; by default from the number of samples."""
    small: bool = False
    """Whether the network is one of our own, which may be captured in a CUDA graph and need one thread on a CPU."""
    progress: Callable[[], None] = lambda: None
    """Called after each training."""

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def given(self) -> Tensor:
        """The labels or targets of the samples of mixed quality."""
        return self.y[: self.mixed]

    @property
    def trusted(self) -> Tensor:
        """The rows of the trusted samples."""
        return torch.arange(self.mixed, len(self.x), device=self.device)

    def seed_of(self, number: int) -> int:
        """A seed for one of the draws that this material's seed fixes."""
        return 1_000_003 * self.seed + number

    def network(self, number: int) -> nn.Module:
        """A new network, drawn from its number and this material's seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed_of(number))
            return self.make().to(self.device)

    def samples(self, rows: Tensor) -> Tensor:
        """x[rows], which is several times slower on a CPU."""
        return self.x.index_select(0, rows.flatten()).view(*rows.shape, *self.x.shape[1:])

    def chance_of_given(self, belief: Tensor) -> Tensor:
        """Of probabilities of the classes, (..., mixed, classes), those of the given labels."""
        y = self.given.expand(belief.shape[:-1])
        return belief.gather(-1, y[..., None])[..., 0]

    def losses(self, outputs: Tensor, rows: Tensor) -> Tensor:
        """One a sample, for labels or targets as they are given."""
        y = self.y[rows]
        if self.classes:
            return -outputs.log_softmax(-1).gather(-1, y[..., None])[..., 0]
        return 0.5 * (outputs[..., 0] - y).square()


Losses = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of outputs, the view of each network as a column, and rows: one a sample."""


def given(material: Material) -> Losses:
    """Takes the labels or targets as they are."""
    return lambda outputs, views, rows: material.losses(outputs, rows)


def soft(probabilities: Tensor) -> Losses:
    """Takes the probability of each label, which each view sees in its own way."""
    return lambda outputs, views, rows: -(outputs.log_softmax(-1) * probabilities[views, rows]).sum(-1)


def evident(chances: Tensor) -> Losses:
    """Takes e[view, i, c], the chance of i's given label were c the true one: -log Σ_c p(c | x) e[view, i, c]."""
    logs = chances.clamp(min=1e-12).log()
    return lambda outputs, views, rows: -(outputs.log_softmax(-1) + logs[views, rows]).logsumexp(-1)


def answers(network: nn.Module, x: Tensor, classes: int, rows: Tensor | None = None) -> Tensor:
    """Probabilities of the classes, or the predicted numbers, of all samples or of some rows."""
    network.eval()
    rows = torch.arange(len(x), device=x.device) if rows is None else rows
    with torch.no_grad():
        outputs = torch.cat([network(x.index_select(0, part)) for part in torch.split(rows, PREDICT)])
    return outputs.softmax(1) if classes else outputs[:, 0]


@contextmanager
def threads(material: Material) -> Iterator[None]:
    """One thread for small samples on a CPU: with more, a step waits for them longer than it computes."""
    before = torch.get_num_threads()
    if material.device.type == "cpu" and material.x[0].numel() < THREADED and material.small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
