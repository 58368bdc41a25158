"""A sampler that draws groups in proportion to weights that are being learnt."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from fsla.problems._batches import mix_seed
from fsla.train import GroupWeights

FLOOR = 0.02
"""Share of rows that are drawn from all groups by their sizes, so that no weight stays without a gradient."""


class GroupSampler(Sampler[int]):
    """Draws rows of groups in proportion to the groups' weights times their sizes, as the weights are at each draw.

    A group's rows come in a random order, each once before any comes again.

    Args:
        weights: weights of the groups.
        groups: index of the group of each row.
        seed: seed of the draws.

    Attributes:
        passes: how often each group's rows have been drawn, in passes over the group.

    Example:
        >>> sampler = GroupSampler(fsla.GroupWeights(2), [0, 0, 0, 1], seed=0)
        >>> sorted(sampler)
        [0, 1, 2, 3]
    """

    def __init__(self, weights: GroupWeights, groups: Sequence[int], *, seed: int) -> None:
        self._weights = weights
        self._seed = seed
        index = torch.as_tensor(groups)
        self._rows = [torch.nonzero(index == group)[:, 0] for group in range(len(weights.names))]
        self._sizes = torch.tensor([float(len(rows)) for rows in self._rows])
        self._drawn = [0] * len(self._rows)
        self._orders: dict[int, Tensor] = {}
        self._generator = torch.Generator().manual_seed(mix_seed(seed, 6, 0) or 0)
        self._used = 0
        self._ahead: deque[int] = deque()
        self._resumes = False

    def __len__(self) -> int:
        return int(self._sizes.sum())

    @property
    def passes(self) -> list[float]:
        return [n / max(size, 1.0) for n, size in zip(self._drawn, self._sizes.tolist(), strict=True)]

    def row_weights(self, groups: Tensor) -> Tensor:
        """Return what the loss of drawn rows is multiplied by: about 1, with the gradient that the weights have."""
        weights: Tensor = self._weights(torch.arange(len(self._rows), device=groups.device))
        sizes = self._sizes.to(weights)
        fractions = weights * sizes / (weights * sizes).sum()
        ratios: Tensor = fractions / _with_floor(fractions.detach(), sizes)
        return ratios[groups]

    def use(self, count: int) -> None:
        """Take note that rows were trained on: those that a loader has drawn ahead are drawn again after a resume."""
        for _ in range(min(count, len(self._ahead))):
            self._ahead.popleft()
        self._used += count

    def __iter__(self) -> Iterator[int]:
        if self._resumes:
            self._resumes = False
            again = list(self._ahead)
            count = self._used + len(again)
            yield from [0] * self._used  # The Trainer skips them.
            yield from again
        else:
            self._used, count = 0, 0
            self._ahead.clear()
        while count < len(self):
            count += 1
            row = self._draw()
            self._ahead.append(row)
            yield row

    def _draw(self) -> int:
        fractions = self._weights.weights.cpu() * self._sizes
        fractions = _with_floor(fractions / fractions.sum(), self._sizes)
        group = int(torch.multinomial(fractions, 1, generator=self._generator))
        number_of_pass, place = divmod(self._drawn[group], len(self._rows[group]))
        if place == 0 or group not in self._orders:
            seed = mix_seed(self._seed, 7 + group, number_of_pass) or 0
            order = torch.randperm(len(self._rows[group]), generator=torch.Generator().manual_seed(seed))
            self._orders[group] = self._rows[group][order]
        self._drawn[group] += 1
        return int(self._orders[group][place])

    def state_dict(self) -> dict[str, Any]:
        """Return where the draws stand."""
        return {
            "drawn": list(self._drawn),
            "generator": self._generator.get_state(),
            "used": self._used,
            "ahead": list(self._ahead),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set what `state_dict` returned. The next pass begins with as many dummies as rows were used."""
        self._drawn = list(state["drawn"])
        self._orders = {}
        self._generator.set_state(state["generator"])
        self._used = state["used"]
        self._ahead = deque(state["ahead"])
        self._resumes = 0 < self._used < len(self)


def _with_floor(fractions: Tensor, sizes: Tensor) -> Tensor:
    return (1 - FLOOR) * fractions + FLOOR * sizes / sizes.sum()
