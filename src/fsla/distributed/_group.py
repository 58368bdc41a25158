"""The processes of one run, seen from one of them: what they send each other, and what they must agree on.

Messages are tensors, or plain values as JSON; nothing is pickled. For rank 0 of 1 every call here is the identity.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsla._checks import whole_number

T = TypeVar("T")
POLL_EVERY_S = 0.05
_MEETINGS = count(1)
"""Each has a place of its own in the store, also where a process joins the ranks anew."""


class DistributedError(RuntimeError):
    """Error of ranks that cannot find each other, do not agree, or wait for one that makes no progress.

    Examples:
        >>> try:
        ...     group.abort("Ranks differ in their data.")
        ... except fsla.distributed.DistributedError as error:
        ...     print(error)
        Ranks differ in their data.
    """


class ProcessGroup:
    """The processes of one run, as one of them sees them.

    Messages are tensors, or JSON values. With one process every method returns its argument, or what the action
    returns.

    Args:
        rank: number of this process.
        world_size: number of processes.

    Attributes:
        messages: messages that were sent.
        bytes: their bytes.
        store: the store where the ranks meet; None if it is unknown.

    Examples:
        >>> group.all_reduce_sum(torch.ones(2))
        tensor([1., 1.])
        >>> group.gather({"loss": 0.5})
        [{'loss': 0.5}]
        >>> group.run_on_first(lambda: "written")
        'written'
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self.messages = 0
        """How many were sent; each begins by being counted, so that the rank with the fewest is the one awaited."""
        self.bytes = 0
        self.store: Any = None
        """At which the ranks meet, where it is known."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and prints messages."""
        return self.rank == 0

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, in place, and return it."""
        if self.world_size > 1:
            self.count(x)
            dist.all_reduce(x)
        return x

    def copy_from(self, source: int, tensors: Sequence[Tensor]) -> None:
        """Set tensors of any dtype to those of rank `source`, in place, by one message for each device."""
        places: dict[torch.device, list[Tensor]] = {}
        for t in tensors if self.world_size > 1 else ():
            places.setdefault(t.device, []).append(t.detach())
        for there in places.values():
            flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in there])
            self.count(flat)
            dist.broadcast(flat, source)
            with torch.no_grad():
                for t, part in zip(there, torch.split(flat, [t.nbytes for t in there]), strict=True):
                    t.copy_(part.clone().view(t.dtype).view(t.shape))

    def gather(self, value: Any) -> list[Any]:
        """Return a JSON value of each rank, in the order of ranks."""
        if self.world_size == 1:
            return [value]
        sent = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(_device())
        sizes = [torch.zeros(1, dtype=torch.int64, device=sent.device) for _ in range(self.world_size)]
        self.count(sizes[0])
        dist.all_gather(sizes, torch.tensor([len(sent)], device=sent.device))
        longest = max(int(size) for size in sizes)
        padded = torch.cat([sent, sent.new_zeros(longest - len(sent))])
        padded_texts = [torch.empty_like(padded) for _ in range(self.world_size)]
        self.count(padded)
        dist.all_gather(padded_texts, padded)
        return [
            json.loads(part[: int(size)].cpu().numpy().tobytes())
            for part, size in zip(padded_texts, sizes, strict=True)
        ]

    def broadcast(self, value: T) -> T:
        """Return a JSON value as rank 0 has it, such as a reading of the clock."""
        if self.world_size == 1:
            return value
        text = json.dumps(value).encode() if self.is_first else b""
        size = torch.tensor([len(text)], device=_device())
        self.copy_from(0, [size])
        sent = torch.frombuffer(bytearray(text or bytes(int(size))), dtype=torch.uint8).to(_device())
        self.copy_from(0, [sent])
        received: T = json.loads(sent.cpu().numpy().tobytes())
        return received

    def all_reduce_max(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest that any rank has, of each number."""
        local = [int(number) for number in numbers]
        if self.world_size == 1:
            return local
        largest = torch.tensor(local, device=_device())
        self.count(largest)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return [int(number) for number in largest.tolist()]

    def run_on_first(self, action: Callable[[], T], *, shown: tuple[type[Exception], ...] = (Exception,)) -> T:
        """Return what `action` returns on rank 0, a JSON value; if it raises there, end the other ranks too."""
        if self.world_size == 1:
            return action()
        value: Any = None
        failed: Exception | None = None
        if self.is_first:
            try:
                value = action()
            except shown as error:
                failed = error
        self.raise_if_any_failed(failed)
        result: T = self.broadcast(value)
        return result

    def raise_if_any_failed(self, failed: Exception | None) -> None:
        """Raise if any rank failed: its own error on each rank that failed, SystemExit on the others.

        Rank 0 names the rank that failed.
        """
        if self.world_size == 1:
            if failed is not None:
                raise failed
            return
        texts = self.gather(None if failed is None else f"{type(failed).__name__}: {failed}")
        if failed is not None and (self.is_first or texts[0] is None):
            raise failed
        for rank, text in enumerate(texts):
            if text is not None:
                if self.is_first:
                    raise DistributedError(f"Rank {rank} cannot go on, and with it the run: {text}")
                raise SystemExit(1)

    def check_equal(self, known: Mapping[str, Any], what: str) -> None:
        """Raise unless all ranks have the same value under each name; rank 0 names what differs."""
        texts = self.gather({name: json.dumps(value, sort_keys=True) for name, value in known.items()})
        names = list(dict.fromkeys(name for text in texts for name in text))
        differ = [name for name in names if len({text.get(name) for text in texts}) > 1]
        if not differ:
            return
        shown = "; ".join(f"{name}: {_by_value([text.get(name) for text in texts])}" for name in differ[:4])
        more = f"; and {len(differ) - 4} more" if len(differ) > 4 else ""
        self.abort(
            f"Ranks differ in their {what}: {shown}{more}. Start the same program, with the same "
            "settings and data, on every machine."
        )

    def abort(self, text: str) -> NoReturn:
        """End all ranks, each of which must call this; rank 0 raises an error with the text."""
        if self.is_first:
            raise DistributedError(text)
        raise SystemExit(1)

    def wait(self) -> None:
        """Wait until all ranks are here, however long that takes."""
        if self.world_size == 1:
            return
        if self.store is None:
            self.all_reduce_sum(torch.zeros(1, device=_device()))
            return
        place = f"meeting/{next(_MEETINGS)}"
        self.store.add(place, 1)
        pause = threading.Event()
        while self.store.add(place, 0) < self.world_size:
            pause.wait(POLL_EVERY_S)

    def local_slice(self, count: int) -> slice:
        """Return this rank's slice of `count` things."""
        return parts(count, self.world_size)[self.rank]

    def count(self, x: Tensor) -> None:
        """Count a message."""
        self.messages += 1
        self.bytes += x.numel() * x.element_size()


def parts(count: int, world_size: int) -> list[slice]:
    """Return the slice of each rank, of `count` things that are shared out evenly.

    Args:
        count: number of things.
        world_size: number of ranks.

    Returns:
        One slice for each rank, in the order of ranks.

    Examples:
        >>> fsla.distributed.parts(5, 2)
        [slice(0, 2, None), slice(2, 5, None)]
    """
    whole_number(count, "count", "parts", least=0)
    whole_number(world_size, "world_size", "parts")
    return [slice(count * rank // world_size, count * (rank + 1) // world_size) for rank in range(world_size)]


def _device() -> torch.device:
    """Where small messages travel from: the CPU where its tensors can be sent."""
    if "gloo" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _by_value(values: Sequence[str | None]) -> str:
    """Who has what, the ranks that agree together."""
    ranks_of: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        short = "nothing" if value is None else value if len(value) <= 60 else f"{value[:57]}..."
        ranks_of.setdefault(short, []).append(str(rank))
    return ", ".join(f"{value} on rank {' '.join(those)}" for value, those in ranks_of.items())
