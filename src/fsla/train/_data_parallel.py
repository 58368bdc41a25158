"""A model on several ranks: each passes its share of a batch, and the derivatives are those of the whole batch.

A loss is a mean over the samples of a batch, plus terms that no sample enters. Rank r has b_r of the B samples, and
multiplies its loss by W b_r / B; then the mean over the W ranks of values and derivatives is that of the whole batch.
Who takes that mean:

    a plain module                          one message here, for ω, λ and the value together
    DistributedDataParallel, fully_shard    their own hooks for ω, while `backward` runs; here one for the rest
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsla._tree import is_sharded
from fsla.distributed import Ranks, raise_once
from fsla.problems._batches import Batch

Batches = Literal["whole", "shares"]
Found = dict[str, Tensor | None]
_PRIME = 1_000_003


class Together:
    """The ranks of a model, as its passes see them.

    Args:
        ranks: the processes.
        model: whose parameters are ω.
        batches: "whole": every rank is given the same batch, and takes its part. "shares": every rank is given its own.
    """

    def __init__(self, ranks: Ranks, model: nn.Module, batches: Batches) -> None:
        self.ranks = ranks
        self.batches = batches
        self.sharded = any(is_sharded(p) for p in model.parameters())
        """Whether ω is in shards, as fully_shard has it."""
        self._wrapped = isinstance(model, DistributedDataParallel)
        self._apart = False
        self._counts_for = 1.0
        """W b_r / B of the last batch."""
        if (self.sharded or self._wrapped) and ranks.world == 1:
            self._apart = True  # nothing to share out

    @property
    def alone(self) -> bool:
        return self._apart or self.ranks.world == 1

    @property
    def looks_at_a_share(self) -> bool:
        """Whether passes are those of this rank alone, on a part of a batch: it need not reach all that the batch
        reaches."""
        return self._apart and self.ranks.world > 1

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Has passes be those of this rank alone: for what each rank finds out by itself."""
        before = self._apart
        self._apart = True
        try:
            yield
        finally:
            self._apart = before

    def seed(self, seed: int | None) -> int | None:
        """That of this rank's random layers."""
        return seed if seed is None else (seed + _PRIME * self.ranks.rank) % 2**63

    def share(self, batch: Batch) -> tuple[Batch, float]:
        """This rank's part of a batch, and W b_r / B. A rank without samples passes one that does not count."""
        self._counts_for = 1.0
        if self.alone or batch is None or self.batches == "shares":
            return batch, 1.0
        try:
            total = _length(batch)
        except TypeError as error:
            raise_once(error)
        world, rank = self.ranks.world, self.ranks.rank
        first, last = total * rank // world, total * (rank + 1) // world
        self._counts_for = world * (last - first) / total
        if first == last:
            return _rows(batch, slice(0, 1), total), 0.0
        return _rows(batch, slice(first, last), total), self._counts_for

    def check_batches(self, batches: Sequence[Batch]) -> None:
        """Raises unless whole batches are the same on all ranks: others are of other data."""
        if self.batches == "whole" and not self.alone:
            names = ("inner batch", "outer batch")
            self.ranks.agree({name: _digest(batch) for name, batch in zip(names, batches, strict=True)}, "batches")

    def quietly(self, model: Any, *, omega: bool) -> AbstractContextManager[None]:
        """Keeps the model's own hooks from reducing where ω's derivative is not wanted, or not yet."""
        if self._wrapped and (not omega or self.alone):
            quiet: AbstractContextManager[None] = model.no_sync()
            return quiet
        return nullcontext()

    def bare(self, model: Any) -> Any:
        """The model without the wrapper whose hooks know of one derivative alone."""
        return model.module if self._wrapped else model

    def mean(self, found: Found, like: Mapping[str, Tensor], value: Tensor, batch: Batch) -> tuple[Found, Tensor]:
        """Derivatives and the value on the whole batch, from those of the shares; None for what no rank reached."""
        if self.alone:
            return found, value
        names = list(found)
        reached = [0.0 if found[name] is None else 1.0 for name in names]
        sizes = [0.0] * self.ranks.world
        sizes[self.ranks.rank] = float(_size(batch)) if self.batches == "shares" else 0.0
        exact = torch.promote_types(value.dtype, torch.float32)  # sizes are whole numbers
        value = value.to(exact)
        told = torch.tensor([*reached, *sizes], dtype=exact, device=value.device)
        sent = [torch.zeros_like(like[name]) if found[name] is None else found[name] for name in names]
        *received, told, value = self._total([*sent, told, value])  # type: ignore[list-item]
        if self.batches == "shares":
            self._check_sizes(told[len(names) :])
        if not all(reached):  # or this rank need not wait for the device
            reached = told[: len(names)].tolist()
        means = {
            name: t / self.ranks.world if count else None
            for name, t, count in zip(names, received, reached, strict=True)
        }
        return means, value / self.ranks.world

    def mean_by_hooks(
        self, found: Found, like: Mapping[str, Tensor], value: Tensor, batch: Batch, hooked: frozenset[str]
    ) -> tuple[Found, Tensor]:
        """As `mean`, where hooks of the model have taken that of some derivatives already."""
        hooked = hooked if self.sharded or self._wrapped else frozenset()
        rest = {name: g for name, g in found.items() if name not in hooked}
        means, value = self.mean(rest, like, value, batch)
        return {name: found[name] if name in hooked else means[name] for name in found}, value

    def same_buffers(self, buffers: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """Takes the mean over the samples of how buffers moved, as running statistics do, each rank's by its own share;
        what did not move stays, bit by bit."""
        pairs = [(b, old) for b, old in zip(buffers, before, strict=True) if _may_move(b)]
        if self.alone or not pairs:
            return
        with torch.no_grad():
            moved = [torch.where(b == old, 0, b - old) for b, old in pairs]
            sent = [self._counts_for * t if self._counts_for else torch.zeros_like(t) for t in moved]
            for (b, old), t in zip(pairs, self._total(sent), strict=True):
                b.copy_(old + t / self.ranks.world)

    def _total(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """The sums over the ranks, in one message for each dtype and device."""
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, t in enumerate(sent):
            kinds.setdefault((t.dtype, t.device), []).append(i)
        out = list(sent)
        for places in kinds.values():
            flat = self.ranks.total(torch.cat([sent[i].detach().reshape(-1) for i in places]))
            for i, part in zip(places, torch.split(flat, [sent[i].numel() for i in places]), strict=True):
                out[i] = part.view(sent[i].shape)
        return out

    def _check_sizes(self, sizes: Tensor) -> None:
        found = [int(size) for size in sizes.tolist()]
        if len(set(found)) == 1:
            return
        self.ranks.refuse(
            f"With batches='shares' all ranks must bring as many samples. Got {', '.join(map(str, found))} by rank. "
            "Give the loaders drop_last=True, or the same whole batch to every rank with batches='whole'."
        )


def _may_move(buffer: Tensor) -> bool:
    return buffer.dtype.is_floating_point and buffer.dtype.itemsize > 1 and not is_sharded(buffer)


def _length(batch: Batch) -> int:
    """How many samples a batch has; raises unless it can be shared out."""
    held = _held(batch)
    lengths = {len(t) if t.ndim else None for t in held}
    if len(lengths) != 1 or None in lengths or 0 in lengths:
        shapes = ", ".join(str(tuple(t.shape)) for t in held[:6]) or "no tensors"
        raise TypeError(
            "A batch that is shared out among ranks must be tensors, or lists, tuples and mappings of them, with a row "
            f"for each sample. Got {type(batch).__name__} with {shapes}. Let each rank bring its own samples instead, "
            "with batches='shares'."
        )
    (length,) = lengths
    assert length is not None
    return length


def _size(batch: Batch) -> int:
    """How many samples a batch seems to have."""
    return next((len(t) for t in _held(batch) if t.ndim), 0)


def _digest(batch: Batch) -> list[str]:
    """What is in a batch, in short."""
    return [hashlib.blake2b(_bytes(t), digest_size=8).hexdigest() for t in _held(batch)]


def _bytes(t: Any) -> Any:
    """What a tensor of any dtype, or an array, holds."""
    if isinstance(t, Tensor):
        t = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return numpy.ascontiguousarray(t).data


def _held(x: Any) -> list[Any]:
    """The tensors and arrays of a batch."""
    if isinstance(x, Tensor | numpy.ndarray):
        return [x]
    if isinstance(x, Mapping):
        return [t for value in x.values() for t in _held(value)]
    if isinstance(x, list | tuple):
        return [t for value in x for t in _held(value)]
    return []


def _rows(x: Any, part: slice, length: int) -> Any:
    """Some rows of a batch; a list with an entry for each sample (texts, say) is cut too."""
    if isinstance(x, Tensor | numpy.ndarray):
        return x[part]
    if isinstance(x, Mapping):
        cut_values = {key: _rows(value, part, length) for key, value in x.items()}
        if type(x) is dict or not isinstance(x, MutableMapping):
            return cut_values
        kept = copy.copy(x)  # with what else it knows, as a tokeniser's batches do
        kept.update(cut_values)
        return kept
    if isinstance(x, list | tuple):
        if len(x) == length and not _held(x):
            return x[part]
        cut = [_rows(value, part, length) for value in x]
        return type(x)(*cut) if hasattr(x, "_fields") else type(x)(cut)
    return x
