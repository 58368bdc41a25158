"""One cut of a batch among processes: rank r of W takes rows B r / W … B (r+1) / W - 1 (rounded down) of B."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor


class BatchShard(NamedTuple):
    """A process's own samples of a batch that several processes hold.

    Args:
        batch: the samples of this process.
        total: number of samples of all processes.

    Examples:
        >>> shard = fsla.distributed.BatchShard(torch.arange(3), total=6)
        >>> len(shard.batch) / shard.total
        0.5
    """

    batch: Any
    total: int


def count_samples(batch: Any) -> int:
    """Return how many samples a batch has; raise a TypeError unless it can be cut."""
    tensors = tensors_in(batch)
    lengths = {len(t) if t.ndim else None for t in tensors}
    if len(lengths) != 1 or None in lengths or 0 in lengths:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors[:6]) or "no tensors"
        raise TypeError(
            "A batch that ranks share must be tensors, or lists, tuples and mappings of them, with a row for each "
            f"sample. Got {type(batch).__name__} with {shapes}. Let each rank bring its own samples instead, with "
            "split_batches=False."
        )
    (length,) = lengths
    assert length is not None
    return length


def first_length(batch: Any) -> int:
    """Return how many samples a batch seems to have."""
    return next((len(t) for t in tensors_in(batch) if t.ndim), 0)


def take_rows(batch: Any, rows: slice, count: int) -> Any:
    """Return some rows of a batch of `count` samples; a list with an entry a sample (texts, say) is cut too."""
    if isinstance(batch, Tensor | numpy.ndarray):
        return batch[rows]
    if isinstance(batch, Mapping):
        cut = {key: take_rows(value, rows, count) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return cut
        same = copy.copy(batch)  # A tokenizer's batch knows more than its items.
        same.update(cut)
        return same
    if isinstance(batch, list | tuple):
        if len(batch) == count and not tensors_in(batch):
            return batch[rows]
        members = [take_rows(value, rows, count) for value in batch]
        return type(batch)(*members) if hasattr(batch, "_fields") else type(batch)(members)
    return batch


def digest(batch: Any) -> list[str]:
    """Return a digest of each tensor and array in a batch."""
    return [hashlib.blake2b(_bytes(t), digest_size=8).hexdigest() for t in tensors_in(batch)]


def tensors_in(batch: Any) -> list[Any]:
    """Return the tensors and arrays of a batch."""
    if isinstance(batch, Tensor | numpy.ndarray):
        return [batch]
    if isinstance(batch, Mapping):
        return [t for value in batch.values() for t in tensors_in(value)]
    if isinstance(batch, list | tuple):
        return [t for value in batch for t in tensors_in(value)]
    return []


def _bytes(t: Any) -> Any:
    if isinstance(t, Tensor):
        t = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return numpy.ascontiguousarray(t).data
