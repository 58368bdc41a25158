"""The processes that torchrun started, each with its rank; a process that nobody started so is rank 0 of 1."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as distributed

PATIENCE = timedelta(days=30)
"""How long a process may wait for the others: one may still be in the middle of a long run."""
T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those that do one piece of work."""

    rank: int = 0
    world: int = 1

    def wait(self) -> None:
        """Until all are here."""
        if self.world > 1:
            distributed.barrier()

    def gather(self, plain: T) -> list[T]:
        """The value of every rank, in the order of the ranks."""
        if self.world == 1:
            return [plain]
        found: list[Any] = [None] * self.world
        distributed.all_gather_object(found, plain)
        return found

    def from_first(self, plain: T) -> T:
        """The value that rank 0 has."""
        if self.world == 1:
            return plain
        held = [plain]
        distributed.broadcast_object_list(held, src=0)
        return held[0]


def join() -> Ranks:
    """Meets the other processes, if there are any; may be called again."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or "RANK" not in os.environ:
        return Ranks()
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", timeout=PATIENCE)
        atexit.register(_leave)
    return Ranks(distributed.get_rank(), distributed.get_world_size())


def _leave() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()
