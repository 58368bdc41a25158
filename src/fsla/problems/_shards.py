"""Samples that live on several processes: who owns which, and how each draws its own.

Rank r of W owns the samples n r / W … n (r+1) / W - 1 (rounded down), and with them their weights. A batch of B
samples is then B / W of each rank's own, a `fsla.Share`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsla._checks import whole_number
from fsla._tree import Tree
from fsla.problems._batches import Batch, Share


class Shard(NamedTuple):
    """Samples `first` … `last` - 1 of n, which live on this rank."""

    n: int
    rank: int = 0
    world: int = 1

    @classmethod
    def own(cls, n: int, group: dist.ProcessGroup | None = None) -> Shard:
        """This process's, among those that torchrun started; all samples where there is no process group."""
        whole_number(n, "n", "Shard")
        if not (dist.is_available() and dist.is_initialized()):
            return cls(n)
        return cls(n, dist.get_rank(group), dist.get_world_size(group))

    @property
    def first(self) -> int:
        return self.n * self.rank // self.world

    @property
    def last(self) -> int:
        return self.n * (self.rank + 1) // self.world

    @property
    def size(self) -> int:
        return self.last - self.first

    def all(self) -> list[Shard]:
        """Every rank's."""
        return [self._replace(rank=r) for r in range(self.world)]

    def __str__(self) -> str:
        return f"samples {self.first} … {self.last - 1} of {self.n} (rank {self.rank} of {self.world})"


class ShardSampler:
    """Draws a rank's own samples, with replacement: a source of batches for `fsla.Sample.draw`.

    Args:
        shard: the samples that this rank owns.
        size: how many samples the batch has on all ranks together. Each rank draws size / world of them; where that is
            no whole number, ranks take turns in drawing one more.
        seed: the same on every rank; each draws differently.
        take: makes the batch from the samples' numbers; by default the numbers are the batch.

    A batch is `Share(take(index), size)`. `whole` draws the batches of all ranks in one process.
    """

    def __init__(self, shard: Shard, size: int, seed: int, *, take: Callable[[Tensor], Batch] | None = None) -> None:
        whole_number(size, "size", "ShardSampler")
        whole_number(seed, "seed", "ShardSampler", least=0)
        if shard.size == 0:
            raise ValueError(f"A rank that draws samples must own one. Got {shard.n} for {shard.world} ranks.")
        self.shard = shard
        self.size = size
        self.take = take
        self.drawn = 0
        self.generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + shard.rank) % 2**63)

    def index(self) -> Tensor:
        """The numbers of the next batch's samples on this rank."""
        shard = self.shard
        turn = self.drawn % shard.world
        begin = (self.size * shard.rank + turn) // shard.world
        end = (self.size * (shard.rank + 1) + turn) // shard.world
        self.drawn += 1
        return torch.randint(shard.first, shard.last, (end - begin,), generator=self.generator)

    def __call__(self) -> Share:
        index = self.index()
        return Share(index if self.take is None else self.take(index), self.size)

    @classmethod
    def whole(
        cls, n: int, world: int, size: int, seed: int, *, take: Callable[[Tensor], Batch] | None = None
    ) -> Callable[[], Batch]:
        """The batches that `world` ranks draw together, in the order of ranks, for one process."""
        each = [cls(shard, size, seed) for shard in Shard(n, 0, world).all()]

        def draw() -> Batch:
            index = torch.cat([sampler.index() for sampler in each])
            return index if take is None else take(index)

        return draw

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.drawn = state["drawn"]
        self.generator.set_state(state["generator"])


def gather(
    parts: Iterator[tuple[int, Tree]], shard: Shard, chunk: int, group: dist.ProcessGroup | None = None
) -> Iterator[tuple[int, Tree]]:
    """Yields all ranks' rows on rank 0, some at a time: the number of the first, and the rows. Nothing on the others.

    Args:
        parts: this rank's rows from first to last, `chunk` at a time.

    Every rank must exhaust it.
    """
    to = 0 if group is None else dist.get_global_rank(group, 0)
    like: Tree = {}
    for first, rows in parts:
        like = rows
        if shard.rank == 0:
            yield shard.first + first, rows
        else:
            for t in rows.values():
                dist.send(t.contiguous(), to, group)
    for other in shard.all()[1:] if shard.rank == 0 else ():
        source = other.rank if group is None else dist.get_global_rank(group, other.rank)
        for first in range(0, other.size, chunk):
            count = min(chunk, other.size - first)
            rows = {name: t.new_empty((count, *t.shape[1:])) for name, t in like.items()}
            for t in rows.values():
                dist.recv(t, source, group)
            yield other.first + first, rows
