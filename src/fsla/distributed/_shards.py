"""Samples that live on several processes: which rank owns which, and how each rank draws its own.

Rank r of W owns the samples n r / W … n (r+1) / W - 1 (rounded down), and with them their weights. A batch of B
samples is then B / W of each rank's own, a `BatchShard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsla._checks import function, instance, whole_number
from fsla._state_tree import saved
from fsla._tree import Tree
from fsla.distributed._group import parts
from fsla.distributed._partition import BatchShard


@saved
@dataclass(frozen=True)
class IndexRange:
    """The samples that a rank owns: `start` … `stop` - 1.

    Args:
        num_samples: samples of all ranks together.
        rank: the rank that owns them.
        world_size: number of ranks.

    Examples:
        >>> index_range = fsla.distributed.IndexRange(10, rank=1, world_size=3)
        >>> index_range.start, index_range.stop, len(index_range)
        (3, 6, 3)
    """

    num_samples: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        whole_number(self.num_samples, "num_samples", "IndexRange", least=0)
        whole_number(self.rank, "rank", "IndexRange", least=0)
        whole_number(self.world_size, "world_size", "IndexRange")
        if self.rank >= self.world_size:
            raise ValueError(
                f"The 'rank' of IndexRange must be below its 'world_size', {self.world_size}. Got {self.rank} instead."
            )

    @classmethod
    def for_this_rank(cls, num_samples: int, group: dist.ProcessGroup | None = None) -> IndexRange:
        """Return the samples of this process; all samples if there is no process group."""
        whole_number(num_samples, "num_samples", "IndexRange")
        if not (dist.is_available() and dist.is_initialized()):
            return cls(num_samples)
        return cls(num_samples, dist.get_rank(group), dist.get_world_size(group))

    @property
    def start(self) -> int:
        """Index of the first sample."""
        start: int = self._rows.start
        return start

    @property
    def stop(self) -> int:
        """Index after the last sample."""
        stop: int = self._rows.stop
        return stop

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def _rows(self) -> slice:
        return parts(self.num_samples, self.world_size)[self.rank]

    def full(self) -> list[IndexRange]:
        """Return the range of every rank, in the order of ranks."""
        return [replace(self, rank=rank) for rank in range(self.world_size)]

    def __str__(self) -> str:
        return f"samples {self.start} … {self.stop - 1} of {self.num_samples} (rank {self.rank} of {self.world_size})"


class ShardedSampler:
    """Sampler of a rank's own samples, with replacement: a source of batches for `fsla.StepBatches.draw`.

    A batch is ``BatchShard(collate_fn(index), batch_size)``. `global_batches` draws the batches of all ranks in one
    process.

    Args:
        index_range: samples that this rank owns.
        batch_size: samples of a batch on all ranks together. Each rank draws batch_size / world_size of them. If that
            is no whole number, ranks take turns in drawing one more.
        seed: the same on every rank; each rank draws differently.
        collate_fn: makes the batch from the samples' indices; by default the indices are the batch.

    Raises:
        ValueError: if the rank owns no sample.

    Examples:
        >>> index_range = fsla.distributed.IndexRange(10, rank=1, world_size=2)
        >>> sampler = fsla.distributed.ShardedSampler(index_range, batch_size=4, seed=0)
        >>> batch = sampler()
        >>> batch.total, len(batch.batch), int(batch.batch.min()) >= index_range.start
        (4, 2, True)
    """

    def __init__(
        self,
        index_range: IndexRange,
        batch_size: int,
        seed: int,
        *,
        collate_fn: Callable[[Tensor], Any] | None = None,
    ) -> None:
        instance(index_range, IndexRange, "index_range", "ShardedSampler", "a fsla.distributed.IndexRange")
        function(collate_fn, "collate_fn", "ShardedSampler", optional=True)
        whole_number(batch_size, "batch_size", "ShardedSampler")
        whole_number(seed, "seed", "ShardedSampler", least=0)
        if not len(index_range):
            raise ValueError(
                f"A rank that draws samples must own one. Got {index_range.num_samples} for {index_range.world_size} "
                "ranks."
            )
        self.index_range = index_range
        self.batch_size = batch_size
        self.collate_fn = collate_fn
        self.drawn = 0
        self.generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + index_range.rank) % 2**63)

    def index(self) -> Tensor:
        """Return the indices of the next batch's samples on this rank."""
        rank, world_size = self.index_range.rank, self.index_range.world_size
        turn = self.drawn % world_size
        begin = (self.batch_size * rank + turn) // world_size
        end = (self.batch_size * (rank + 1) + turn) // world_size
        self.drawn += 1
        start, stop = self.index_range.start, self.index_range.stop
        return torch.randint(start, stop, (end - begin,), generator=self.generator)

    def __call__(self) -> BatchShard:
        index = self.index()
        return BatchShard(index if self.collate_fn is None else self.collate_fn(index), self.batch_size)

    @classmethod
    def global_batches(
        cls,
        num_samples: int,
        world_size: int,
        batch_size: int,
        seed: int,
        *,
        collate_fn: Callable[[Tensor], Any] | None = None,
    ) -> Callable[[], Any]:
        """Return a source of the batches that so many ranks draw together, in the order of ranks, for one process."""
        samplers = [cls(part, batch_size, seed) for part in IndexRange(num_samples, 0, world_size).full()]

        def draw() -> Any:
            index = torch.cat([sampler.index() for sampler in samplers])
            return index if collate_fn is None else collate_fn(index)

        return draw

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampler."""
        return {"drawn": self.drawn, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set what `state_dict` returned.

        Raises:
            ValueError: if it is something else; then nothing is set.
        """
        drawn, generator = (state.get(name) if isinstance(state, Mapping) else None for name in ("drawn", "generator"))
        try:
            whole_number(drawn, "drawn", "a state of ShardedSampler", least=0)
            if not isinstance(generator, Tensor) or generator.shape != self.generator.get_state().shape:
                raise TypeError("The 'generator' of a state of ShardedSampler must be the state of a torch.Generator.")
            torch.Generator().set_state(generator)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"Cannot load state of ShardedSampler: {error}") from None
        assert isinstance(drawn, int)
        assert isinstance(generator, Tensor)
        self.drawn = drawn
        self.generator.set_state(generator)


def gather_rows(
    parts: Iterator[tuple[int, Tree]], index_range: IndexRange, chunk: int, group: dist.ProcessGroup | None = None
) -> Iterator[tuple[int, Tree]]:
    """Yield all ranks' rows on rank 0, some at a time: the index of the first, and the rows. Nothing on the others.

    Every rank must exhaust it.

    Args:
        parts: this rank's rows from first to last, `chunk` at a time.
        index_range: the samples that this rank owns.
        chunk: how many rows are sent at once.
        group: the processes.
    """
    to = 0 if group is None else dist.get_global_rank(group, 0)
    like: Tree = {}
    for first, rows in parts:
        like = rows
        if index_range.rank == 0:
            yield index_range.start + first, rows
        else:
            for t in rows.values():
                dist.send(t.contiguous(), to, group)
    for other in index_range.full()[1:] if index_range.rank == 0 else ():
        source = other.rank if group is None else dist.get_global_rank(group, other.rank)
        for first in range(0, len(other), chunk):
            count = min(chunk, len(other) - first)
            rows = {name: t.new_empty((count, *t.shape[1:])) for name, t in like.items()}
            for t in rows.values():
                dist.recv(t, source, group)
            yield other.start + first, rows
