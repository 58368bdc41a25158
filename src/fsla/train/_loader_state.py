"""Batches without end from two loaders, and the place in them, from which a run is taken up again exactly.

A loader starts anew when it ends. What order it takes is drawn from random states as it starts; so these are kept as
they were then, and a run that is taken up sets them, starts the loader and drops as many batches as were used.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from fsla.distributed import Ranks
from fsla.train._checkpoint import CheckpointError
from fsla.train._data_parallel import Together

_END = object()


class RandomState(NamedTuple):
    """The states of the generators that a program shares: torch's, NumPy's and Python's."""

    torch: Tensor
    numpy: dict[str, Any]
    python: tuple[Any, ...]
    cuda: list[Tensor]

    @classmethod
    def now(cls, *, cuda: bool = True) -> RandomState:
        used = cuda and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        on_devices = torch.cuda.get_rng_state_all() if used else []
        return cls(torch.get_rng_state(), numpy.random.get_state(legacy=False), random.getstate(), on_devices)

    def packed(self) -> tuple[Any, ...]:
        """The states with Python's numbers as a tensor, as checkpoints have them."""
        version, numbers, gauss = self.python
        return (self.torch, self.numpy, (version, torch.tensor(numbers), gauss), self.cuda)

    @classmethod
    def unpacked(cls, saved: tuple[Any, ...]) -> RandomState:
        states, numpy_state, (version, numbers, gauss), cuda = saved
        return cls(states, numpy_state, (version, tuple(numbers.tolist()), gauss), cuda)

    def plain(self) -> list[Any]:
        """As messages have it; without those of devices."""
        version, numbers, gauss = self.python
        state = self.numpy["state"] | {"key": self.numpy["state"]["key"].tolist()}
        return [self.torch.tolist(), self.numpy | {"state": state}, [version, numbers, gauss]]

    @classmethod
    def from_plain(cls, told: list[Any]) -> RandomState:
        states, numpy_state, (version, numbers, gauss) = told
        key = numpy.array(numpy_state["state"]["key"], dtype=numpy.uint32)
        numpy_state = numpy_state | {"state": numpy_state["state"] | {"key": key}}
        return cls(torch.tensor(states, dtype=torch.uint8), numpy_state, (version, tuple(numbers), gauss), [])

    @classmethod
    @contextmanager
    def kept(cls) -> Iterator[None]:
        """Puts the states back after what is drawn inside."""
        state = cls.now()
        try:
            yield
        finally:
            state.set()

    def set(self) -> None:
        torch.set_rng_state(self.torch)
        numpy.random.set_state(self.numpy)
        random.setstate(self.python)
        if self.cuda:
            for device, state in zip(range(torch.cuda.device_count()), self.cuda, strict=False):
                torch.cuda.set_rng_state(state, device)


class Feed:
    """The batches of a loader, again and again.

    Args:
        loader: an iterable that can be iterated again, such as a DataLoader or a list of batches, or one without end.
        name: what messages call it.
    """

    def __init__(self, loader: Iterable[Any], name: str) -> None:
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise TypeError(f"{name} must be an iterable of batches. Got {type(loader).__name__} instead.")
        self._loader = loader
        self._name = name
        self._drawn_from = not isinstance(loader, list | tuple)
        """Whether the loader may draw as it starts."""
        self._batches: Iterator[Any] | None = None
        self._epoch = 0
        self._index = 0
        self._start: RandomState | None = None
        self._start_generators: list[Tensor] = []

    def draw(self) -> Any:
        """The next batch; the first of a new epoch where one ends."""
        if self._batches is not None:
            batch = next(self._batches, _END)
            if batch is not _END:
                self._index += 1
                return batch
            if isinstance(self._loader, Iterator):
                raise ValueError(
                    f"{self._name} must be iterable again, or without end. It is a {type(self._loader).__name__} that "
                    f"ended after {self._index} batches. Give a DataLoader, a list of batches, or an object whose "
                    "__iter__ starts anew."
                )
            self._epoch += 1
        self._begin()
        assert self._batches is not None
        batch = next(self._batches, _END)
        if batch is _END:
            raise ValueError(
                f"{self._name} must have at least one batch. It has none in epoch {self._epoch}. A DataLoader with "
                "drop_last=True has none where the data is smaller than a batch."
            )
        self._index = 1
        return batch

    def check_same(self, ranks: Ranks) -> None:
        """Raises if the loader gives each rank its own samples, and the ranks would share these out once more."""
        if any(isinstance(sampler, DistributedSampler) for sampler in self._samplers()):
            ranks.refuse(
                f"{self._name} must give every rank the same batches where batches='whole'. Its DistributedSampler "
                "gives each its own. Leave the sampler out, or make opt with batches='shares'."
            )

    @property
    def count(self) -> int | None:
        """How many batches an epoch has, where the loader knows."""
        try:
            return len(self._loader)  # type: ignore[arg-type]
        except TypeError:
            return None

    def position(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "index": self._index,
            "start": None if self._start is None else self._start.packed(),
            "start_generators": self._start_generators,
            "generators": [g.get_state() for g in self.generators()],
        }

    def seek(self, position: dict[str, Any]) -> None:
        """Goes to a position by drawing. The shared random states are the caller's to put back; see `settle`."""
        self._epoch = position["epoch"]
        if position["start"] is not None:
            RandomState.unpacked(position["start"]).set()
        self._set_generators(position["start_generators"])
        self._begin()
        assert self._batches is not None
        for i in range(position["index"]):
            if next(self._batches, _END) is _END:
                raise CheckpointError(
                    f"{self._name} must have the batches that it had when the run was saved, {position['index']} of "
                    f"them in epoch {self._epoch}. It ended after {i}. Give the same data, or name another folder."
                )
        self._index = position["index"]

    def settle(self, position: dict[str, Any]) -> None:
        """Puts the loader's own generators where they were; done last, since two loaders may share one."""
        self._set_generators(position["generators"])

    def _begin(self) -> None:
        if self._drawn_from:
            self._start = RandomState.now(cuda=False)
            self._start_generators = [g.get_state() for g in self.generators()]
        for sampler in self._samplers():
            if hasattr(sampler, "set_epoch"):  # as a DistributedSampler asks for, or every epoch has one order
                sampler.set_epoch(self._epoch)
        self._batches = iter(self._loader)
        self._index = 0

    def generators(self) -> list[torch.Generator]:
        """The generators that a DataLoader and its samplers were given, each once."""
        found = [getattr(owner, "generator", None) for owner in (self._loader, *self._samplers())]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def _samplers(self) -> list[Any]:
        """What a DataLoader draws by: its sampler, its batch sampler, and that one's, each once."""
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        found = [getattr(self._loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
        return list({id(sampler): sampler for sampler in found if sampler is not None}.values())

    def _set_generators(self, states: list[Tensor]) -> None:
        generators = self.generators()
        if len(generators) != len(states):
            raise CheckpointError(
                f"{self._name} must have the generators that it had when the run was saved, {len(states)} of them. "
                f"It has {len(generators)}. Make the loader as it was made then."
            )
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def begin_together(together: Together, feeds: list[Feed]) -> None:
    """Has all ranks draw alike from here on: each begins with the random states of rank 0."""
    ranks = together.ranks
    if ranks.world == 1:
        return
    if together.batches == "whole":
        for feed in feeds:
            feed.check_same(ranks)
    own = [RandomState.now(cuda=False).plain(), [[g.get_state().tolist() for g in f.generators()] for f in feeds]]
    shared, generators = ranks.from_first(own)
    RandomState.from_plain(shared).set()
    for feed, states in zip(feeds, generators, strict=True):
        for generator, state in zip(feed.generators(), states, strict=True):
            generator.set_state(torch.tensor(state, dtype=torch.uint8))
