"""The processes of one run, seen from one of them: what they tell each other, and what they must agree on.

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

T = TypeVar("T")
LOOK_EVERY_S = 0.05
_MEETINGS = count(1)
"""Each has a place of its own in the store, also where a process joins the ranks anew."""


class RankError(RuntimeError):
    """Ranks that cannot find each other, do not agree, or wait for one that does not come."""


class Ranks:
    """The processes that work on one run, seen from one of them."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank = rank
        self.world = world
        self.messages = 0
        """How many were sent; each begins by being counted, so that the rank with the fewest is the one awaited."""
        self.bytes = 0
        self.store: Any = None
        """At which the ranks meet, where it is known."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and speaks."""
        return self.rank == 0

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, in place."""
        if self.world > 1:
            self._count(x)
            dist.all_reduce(x)
        return x

    def copy_from(self, source: int, tensors: Sequence[Tensor]) -> None:
        """Sets tensors of any dtype to those of a rank, in place; one message for each device."""
        places: dict[torch.device, list[Tensor]] = {}
        for t in tensors if self.world > 1 else ():
            places.setdefault(t.device, []).append(t.detach())
        for there in places.values():
            flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in there])
            self._count(flat)
            dist.broadcast(flat, source)
            with torch.no_grad():
                for t, part in zip(there, torch.split(flat, [t.nbytes for t in there]), strict=True):
                    t.copy_(part.clone().view(t.dtype).view(t.shape))

    def gather(self, value: Any) -> list[Any]:
        """A plain value (numbers, strings, lists and mappings of these) of each rank."""
        if self.world == 1:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(_device())
        sizes = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(self.world)]
        self._count(sizes[0])
        dist.all_gather(sizes, torch.tensor([len(own)], device=own.device))
        longest = max(int(size) for size in sizes)
        padded = torch.cat([own, own.new_zeros(longest - len(own))])
        parts = [torch.empty_like(padded) for _ in range(self.world)]
        self._count(padded)
        dist.all_gather(parts, padded)
        return [json.loads(part[: int(size)].cpu().numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def from_first(self, value: T) -> T:
        """A plain value as rank 0 has it: for what is read from a clock, or may come out differently elsewhere."""
        if self.world == 1:
            return value
        text = json.dumps(value).encode() if self.is_first else b""
        size = torch.tensor([len(text)], device=_device())
        self.copy_from(0, [size])
        sent = torch.frombuffer(bytearray(text or bytes(int(size))), dtype=torch.uint8).to(_device())
        self.copy_from(0, [sent])
        found: T = json.loads(sent.cpu().numpy().tobytes())
        return found

    def most(self, numbers: Sequence[int]) -> list[int]:
        """The largest that any rank has, of each number."""
        found = [int(number) for number in numbers]
        if self.world == 1:
            return found
        told = torch.tensor(found, device=_device())
        self._count(told)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return [int(number) for number in told.tolist()]

    def first(self, action: Callable[[], T], *, shown: tuple[type[Exception], ...] = (Exception,)) -> T:
        """What rank 0's action returns, a plain value; where it raises there, the other ranks end too."""
        if self.world == 1:
            return action()
        value: Any = None
        failed: Exception | None = None
        if self.is_first:
            try:
                value = action()
            except shown as error:
                failed = error
        self.all_well(failed)
        found: T = self.from_first(value)
        return found

    def all_well(self, failed: Exception | None) -> None:
        """Raises where any rank failed: each its own error, and SystemExit on the others; rank 0 names who failed."""
        if self.world == 1:
            if failed is not None:
                raise failed
            return
        texts = self.gather(None if failed is None else f"{type(failed).__name__}: {failed}")
        if failed is not None and (self.is_first or texts[0] is None):
            raise failed
        for rank, text in enumerate(texts):
            if text is not None:
                if self.is_first:
                    raise RankError(f"Rank {rank} cannot go on, and with it the run: {text}")
                raise SystemExit(1)

    def agree(self, known: Mapping[str, Any], what: str) -> None:
        """Raises unless all ranks say the same of everything that is named; rank 0 says what differs."""
        said = self.gather({name: json.dumps(value, sort_keys=True) for name, value in known.items()})
        names = list(dict.fromkeys(name for own in said for name in own))
        differ = [name for name in names if len({own.get(name) for own in said}) > 1]
        if not differ:
            return
        shown = "; ".join(f"{name}: {_by_value([own.get(name) for own in said])}" for name in differ[:4])
        more = f"; and {len(differ) - 4} more" if len(differ) > 4 else ""
        self.refuse(
            f"All ranks must have the same {what}. These differ: {shown}{more}. Start the same program, with the same "
            "settings and data, on every machine."
        )

    def refuse(self, text: str) -> NoReturn:
        """Ends all ranks, each of which must call this; rank 0 says why."""
        if self.is_first:
            raise RankError(text)
        raise SystemExit(1)

    def wait(self) -> None:
        """Until all ranks are here, however long that takes."""
        if self.world == 1:
            return
        if self.store is None:
            self.total(torch.zeros(1, device=_device()))
            return
        place = f"meeting/{next(_MEETINGS)}"
        self.store.add(place, 1)
        pause = threading.Event()
        while self.store.add(place, 0) < self.world:
            pause.wait(LOOK_EVERY_S)

    def part(self, count: int) -> slice:
        """Which of so many things are this rank's."""
        return parts(count, self.world)[self.rank]

    def _count(self, x: Tensor) -> None:
        self.messages += 1
        self.bytes += x.numel() * x.element_size()


def parts(count: int, world: int) -> list[slice]:
    """So many things, shared out evenly."""
    return [slice(count * rank // world, count * (rank + 1) // world) for rank in range(world)]


def _device() -> torch.device:
    """Where small messages travel from: the CPU where its tensors can be sent."""
    if "gloo" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _by_value(values: Sequence[str | None]) -> str:
    """Who has what, the ranks that agree together."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        short = "nothing" if value is None else value if len(value) <= 60 else f"{value[:57]}..."
        ranks.setdefault(short, []).append(str(rank))
    return ", ".join(f"{value} on rank {' '.join(those)}" for value, those in ranks.items())
