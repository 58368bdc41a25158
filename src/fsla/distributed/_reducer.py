"""One pass shared out among processes: who passes which samples, and how derivatives become those of the whole batch.

A loss is a mean over the samples of a batch, plus terms that no sample enters. Rank r has b_r of the B samples, and
multiplies its loss by b_r / B; then the sum over the ranks of values and derivatives is that of the whole batch. Hooks
of a module take means in the place of sums, so that a module's loss is multiplied by the number of ranks, too. All else
(rates, v, d) is computed on every rank from equal numbers, so that no algorithm knows of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsla._torch import all_reduce_sum
from fsla._tree import is_sharded
from fsla.distributed._group import parts
from fsla.distributed._join import SINGLE_PROCESS, get_group, raise_on_first
from fsla.distributed._partition import BatchShard, count_samples, digest, first_length, take_rows

_PRIME = 1_000_003
Derivatives = Mapping[str, Tensor | None]
"""Derivatives by name; None for a tensor that the loss does not reach."""


class GraphLeaves(NamedTuple):
    """Where the graph of a pass begins."""

    omega: Mapping[str, Tensor]
    lam: Mapping[str, Tensor]


class Part(NamedTuple):
    """What one process passes of a batch.

    Args:
        data: the samples.
        seed: of the random layers of this process.
        weight: what the loss is multiplied by.
        number: which of the batch's micro-batches it is.
    """

    data: Any
    seed: int | None
    weight: float = 1.0
    number: int = 0


class Reducer:
    """How processes share a pass. This base class is one process: it passes the whole batch and reduces nothing.

    Attributes:
        reduces: whether a pass sees a part of the batch, and `mean` makes its derivatives those of the whole.
        partial: whether a pass sees samples of this process alone. A loss then need not reach all that the batch
            reaches.

    Examples:
        >>> fsla.distributed.Reducer().local_part(torch.arange(4), seed=None).data
        tensor([0, 1, 2, 3])
    """

    reduces = False
    """Whether a pass sees a part of the batch, and `mean` makes its derivatives those of the whole."""
    partial = False
    """Whether a pass sees samples of this process alone, so that a loss need not reach all that the batch reaches."""

    def local_part(self, data: Any, seed: int | None, number: int = 0) -> Part:
        """Return this process's part of a batch, which is micro-batch `number` of several."""
        return Part(self.whole(data), seed, 1.0, number)

    def check_batches(self, batches: Mapping[str, Any]) -> None:
        """Raise unless all processes hold the batches that they must hold."""

    def whole(self, data: Any) -> Any:
        """Return the data whose derivatives `mean` returns: the whole batch, or the samples that are this process's."""
        return data.batch if isinstance(data, BatchShard) else data

    def mean(
        self,
        data: Sequence[Any],
        values: list[Tensor],
        by_omega: list[Derivatives],
        by_lam: Derivatives,
        leaves: GraphLeaves,
        *,
        lam_rows: bool,
        by_backward: bool,
    ) -> tuple[list[Tensor], list[Derivatives], Derivatives]:
        """Return values and derivatives on the whole batch, from those on this process's parts.

        Args:
            data: the whole batch, in its micro-batches.
            values: the loss on the parts, where it is wanted.
            by_omega: trees of derivatives of the form of ω; {} where there are none.
            by_lam: derivatives of the form of λ; {} where there are none.
            leaves: what they are derivatives by.
            lam_rows: whether `by_lam` has a row for each sample of the part.
            by_backward: whether `backward` computed them, with the hooks of the model.
        """
        return values, by_omega, by_lam

    def most_cautious(self, probe: Callable[[], int]) -> int:
        """Return the largest number that any process finds out."""
        return probe()

    def backward_context(self, model: Any, *, omega: bool, last: bool) -> AbstractContextManager[None]:
        """Return what a backward pass runs in: a model's own hooks reduce where ω's derivative is complete."""
        return nullcontext()

    def unwrap(self, model: Any) -> Any:
        """Return the model without a wrapper whose hooks know of one derivative alone."""
        return model

    def buffers_moved(self, part: Part, buffers: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """Make buffers that a pass over a part has moved equal on all processes."""


class DataParallelReducer(Reducer):
    """Several processes share each batch.

    Each process passes its part, and this class takes the mean of the derivatives:

        a function, a plain module              one message here, for ω, λ and the value together
        DistributedDataParallel, fully_shard    their own hooks for ω, while `backward` runs; here one for the rest

    Every process must ask for the same derivatives in the same order.

    Args:
        model: module whose parameters are ω; None if the losses are functions.
        split_batches: True if every process receives the same batch, and takes its part. False if each receives
            different samples, the same number on each.
        group: the processes; by default all that torchrun started, or this one alone.

    Examples:
        >>> reducer = fsla.distributed.DataParallelReducer(torch.nn.Linear(2, 1))
        >>> reducer.reduces
        False
    """

    def __init__(
        self, model: nn.Module | None = None, *, split_batches: bool = True, group: dist.ProcessGroup | None = None
    ) -> None:
        self.process_group = get_group()
        self.model = model
        self.split_batches = split_batches
        self.sharded = model is not None and any(is_sharded(p) for p in model.parameters())
        """Whether ω is in shards, as fully_shard has it."""
        single = not (dist.is_available() and dist.is_initialized()) or (
            group is None and self.process_group is SINGLE_PROCESS
        )
        self._group = None if single else (dist.group.WORLD if group is None else group).group_name  # type: ignore[union-attr]
        self._wrapped = isinstance(model, DistributedDataParallel)
        self._rank = 0 if single else dist.get_rank(group)
        self._world_size = 1 if single else dist.get_world_size(group)
        self._splits = not single and (model is None or self._world_size > 1)
        """Whether there are others; a function's batches are also shared out in a group of one."""
        self.several = self._world_size > 1 or self.sharded or self._wrapped
        """Whether several processes train, or hooks of a wrapper that serves several run."""
        self._by_itself = False

    @property
    def _scale(self) -> int:
        """What losses are multiplied by besides b_r / B, and sums divided by."""
        return 1 if self.model is None else self._world_size

    @property
    def reduces(self) -> bool:  # type: ignore[override]
        return self._splits and not self._by_itself

    @property
    def partial(self) -> bool:  # type: ignore[override]
        return self._splits and (self._by_itself or self.model is None)

    def local_part(self, data: Any, seed: int | None, number: int = 0) -> Part:
        seed = None if seed is None else (seed + _PRIME * self._rank) % 2**63
        if isinstance(data, BatchShard):
            count = first_length(data.batch)
            _check_total(count, data.total)
            return Part(data.batch, seed, self._scale * count / data.total, number)
        if not self._splits or not self.split_batches or (data is None and self.model is not None):
            return Part(data, seed, 1.0, number)
        try:
            total = count_samples(data)
        except TypeError as error:
            raise_on_first(error)
        rows = parts(total, self._world_size)[self._rank]
        weight = self._scale * (rows.stop - rows.start) / total
        if rows.start == rows.stop:  # Fewer samples than ranks: one that does not count.
            rows = slice(0, 1)
        return Part(take_rows(data, rows, total), seed, 1.0 if self._by_itself else weight, number)

    def check_batches(self, batches: Mapping[str, Any]) -> None:
        """Raise unless whole batches are the same on all ranks: others are of other data."""
        if self.split_batches and self._splits:
            self.process_group.check_equal({name: digest(batch) for name, batch in batches.items()}, "batches")

    def mean(
        self,
        data: Sequence[Any],
        values: list[Tensor],
        by_omega: list[Derivatives],
        by_lam: Derivatives,
        leaves: GraphLeaves,
        *,
        lam_rows: bool,
        by_backward: bool,
    ) -> tuple[list[Tensor], list[Derivatives], Derivatives]:
        if not self.reduces:
            return values, by_omega, by_lam
        hooked = by_backward and (self.sharded or self._wrapped)
        stays = lam_rows and isinstance(data[0], BatchShard)
        sent_omega = [] if hooked else by_omega
        sent_lam = {} if stays else by_lam
        derivatives = [g for tree in [*sent_omega, sent_lam] for g in tree.values()]
        like = [leaves.omega[name] for tree in sent_omega for name in tree] + [leaves.lam[name] for name in sent_lam]
        sent = [torch.zeros_like(t) if g is None else g.detach() for g, t in zip(derivatives, like, strict=True)]
        if lam_rows and not stays:
            start = len(sent) - len(sent_lam)
            sent[start:] = [self._among_rows(t, data[0]) for t in sent[start:]]
        exists = [g is not None for g in derivatives]
        values, means = self._mean(values, sent, exists, data, next(iter(leaves.omega.values())))
        received = iter(means)
        by_omega = by_omega if hooked else [{name: next(received) for name in tree} for tree in by_omega]
        return values, by_omega, by_lam if stays else {name: next(received) for name in by_lam}

    def _mean(
        self, values: list[Tensor], sent: list[Tensor], exists: list[bool], data: Sequence[Any], like: Tensor
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Means over the ranks; with a module, None for what no rank reached, for which the host may wait."""
        exact = torch.promote_types(like.dtype, torch.float32)  # The same on all ranks; sizes are whole numbers.
        values = [value.to(exact) for value in values]
        if self.model is None:
            sums = self._sum([*sent, *values])
            return sums[len(sent) :], list(sums[: len(sent)])
        sizes = [0.0] * self._world_size
        sizes[self._rank] = 0.0 if self.split_batches else float(sum(first_length(part) for part in data))
        notes = torch.tensor([*map(float, exists), *sizes], dtype=exact, device=like.device)
        *sums, notes = self._sum([*sent, *values, notes])
        if not self.split_batches:
            self._check_sizes(notes[len(sent) :])
        if not all(exists):  # Else this rank need not wait for the device.
            exists = [count > 0 for count in notes[: len(sent)].tolist()]
        means = [t / self._scale for t in sums]
        derivatives = [t if any_reached else None for t, any_reached in zip(means, exists, strict=False)]
        return means[len(sent) :], derivatives

    def _among_rows(self, t: Tensor, data: Any) -> Tensor:
        """The rows of this rank's samples between zeros for those of the others."""
        total = count_samples(data)
        rows = parts(total, self._world_size)[self._rank]
        values = t.new_zeros((total, *t.shape[1:]))
        if rows.start < rows.stop:
            if len(t) != rows.stop - rows.start:
                raise ValueError(
                    f"A derivative by λ must have a row for each of the {rows.stop - rows.start} samples of a share. "
                    f"Got {len(t)}."
                )
            values[rows] = t
        return values

    def _sum(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """Sum over the ranks, in one message for each dtype and device, by an operation that a captured step repeats.

        The group goes by its name, so that its threads end with it.
        """
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, t in enumerate(sent):
            kinds.setdefault((t.dtype, t.device), []).append(i)
        sums = list(sent)
        for places in kinds.values():
            flat = torch.cat([sent[i].detach().reshape(-1) for i in places])
            self.process_group.count(flat)
            flat = all_reduce_sum(flat, self._group)
            for i, part in zip(places, torch.split(flat, [sent[i].numel() for i in places]), strict=True):
                sums[i] = part.view(sent[i].shape)
        return sums

    def _check_sizes(self, sizes: Tensor) -> None:
        counts = [int(size) for size in sizes.tolist()]
        if len(set(counts)) > 1:
            self.process_group.abort(
                "With split_batches=False all ranks must bring as many samples. "
                f"Got {', '.join(map(str, counts))} by rank. Give the loaders drop_last=True, or the same whole batch "
                "to every rank with split_batches=True."
            )

    def most_cautious(self, probe: Callable[[], int]) -> int:
        """Each rank finds out by itself, on its own part."""
        if not self._splits:
            return probe()
        failed: Exception | None = None
        result = 0
        self._by_itself = True
        try:
            result = probe()
        except Exception as error:
            failed = error
        finally:
            self._by_itself = False
        self.process_group.raise_if_any_failed(failed)
        return self.process_group.all_reduce_max([result])[0]

    def backward_context(self, model: Any, *, omega: bool, last: bool) -> AbstractContextManager[None]:
        if self._wrapped and not (self.reduces and omega and last):
            no_sync: AbstractContextManager[None] = model.no_sync()
            return no_sync
        return nullcontext()

    def unwrap(self, model: Any) -> Any:
        return model.module if self._wrapped else model

    def buffers_moved(self, part: Part, buffers: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """Take the mean over the samples of how buffers moved, as running statistics do; what did not move stays."""
        pairs = [(b, old) for b, old in zip(buffers, before, strict=True) if _may_move(b)]
        if not self.reduces or not pairs:
            return
        with torch.no_grad():
            moved = [torch.where(b == old, 0, b - old) for b, old in pairs]
            sent = [part.weight * t if part.weight else torch.zeros_like(t) for t in moved]
            for (b, old), t in zip(pairs, self._sum(sent), strict=True):
                b.copy_(old + t / self._scale)


class ClosureReducer(DataParallelReducer):
    """The processes of a loop that belongs to somebody else, which passes its own samples on each of them.

    Steps on which λ rests send nothing that the loop does not send itself.

    Args:
        model: module whose parameters are ω.
    """

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__(model, split_batches=False)

    def mean(
        self,
        data: Sequence[Any],
        values: list[Tensor],
        by_omega: list[Derivatives],
        by_lam: Derivatives,
        leaves: GraphLeaves,
        *,
        lam_rows: bool,
        by_backward: bool,
    ) -> tuple[list[Tensor], list[Derivatives], Derivatives]:
        if by_backward and not by_lam and (self.sharded or self._wrapped):
            return values, by_omega, by_lam
        return super().mean(data, values, by_omega, by_lam, leaves, lam_rows=lam_rows, by_backward=by_backward)

    def _check_sizes(self, sizes: Tensor) -> None:
        """The loop knows how many samples it passes."""

    def buffers_moved(self, part: Part, buffers: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        if not self._wrapped:
            super().buffers_moved(part, buffers, before)

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take the mean of `.grad`: a pass that does not go through the wrapper's forward runs none of its hooks.

        Where the hooks have run, the gradients are equal on all processes, and stay.
        """
        if not (self._wrapped and self.reduces):
            return
        with torch.no_grad():
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            for p, total in zip(parameters, self._sum(grads), strict=True):
                p.grad = total / self._world_size


def _may_move(buffer: Tensor) -> bool:
    return buffer.dtype.is_floating_point and buffer.dtype.itemsize > 1 and not is_sharded(buffer)


def _check_total(count: int, total: int) -> None:
    if not max(count, 1) <= total:
        raise ValueError(
            f"The total of a BatchShard must count the samples of all ranks. Got {total} with {count} on this rank "
            "alone. Add up the ranks' numbers of samples."
        )
