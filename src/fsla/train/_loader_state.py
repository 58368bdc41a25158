"""Batches without end from two loaders, and the place in them, from which a run resumes exactly.

A loader starts anew when it ends. It draws its order from random states as it starts. These are saved, and a run that
resumes sets them, starts the loader and drops as many batches as were used.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from fsla._storage._json_values import among, either, items, mapping, number, record, text
from fsla.distributed import DataParallelReducer, ProcessGroup
from fsla.train._checkpoint import CheckpointError

_END = object()


class RandomState:
    """The states of the generators that a program shares, as JSON: torch's, NumPy's, Python's and those of GPUs."""

    @staticmethod
    def now(*, cuda: bool = True) -> dict[str, Any]:
        """Return the states. Those of GPUs are none where no GPU was used."""
        used = cuda and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        numpy_state = numpy.random.get_state(legacy=False)
        version, numbers, gauss = random.getstate()
        return {
            "torch": to_text(torch.get_rng_state()),
            "numpy": numpy_state | {"state": {name: _packed(part) for name, part in numpy_state["state"].items()}},
            "python": [version, _packed(numpy.array(numbers, dtype="uint32")), gauss],
            "cuda": [to_text(state) for state in (torch.cuda.get_rng_state_all() if used else [])],
        }

    @staticmethod
    def set(state: dict[str, Any]) -> None:
        """Set what `now` returned."""
        words = {name: _unpacked(part) for name, part in state["numpy"]["state"].items()}
        version, numbers, gauss = state["python"]
        torch.set_rng_state(from_text(state["torch"]))
        numpy.random.set_state(state["numpy"] | {"state": words})
        random.setstate((version, tuple(_unpacked(numbers).tolist()), gauss))
        if state["cuda"]:
            for device, text in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
                torch.cuda.set_rng_state(from_text(text), device)

    @classmethod
    @contextmanager
    def preserved(cls) -> Iterator[None]:
        """Put the states back after what is drawn inside."""
        state = cls.now()
        try:
            yield
        finally:
            cls.set(state)


def to_text(state: Tensor) -> str:
    """Return the state of a torch generator as text."""
    return state.numpy().tobytes().hex()


def from_text(text: str) -> Tensor:
    """Return the state of a torch generator from its text."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _packed(part: Any) -> Any:
    return [str(part.dtype), part.tobytes().hex()] if isinstance(part, numpy.ndarray) else part


def _unpacked(part: Any) -> Any:
    return numpy.frombuffer(bytearray.fromhex(part[1]), dtype=part[0]) if isinstance(part, list) else part


_POSITION = record(
    epoch=number(int, 0),
    index=number(int, 0),
    start=either(among(None), mapping),
    start_generators=items(text),
    generators=items(text),
)


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
        self._start: dict[str, Any] | None = None
        self._start_generators: list[str] = []

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

    def check_same(self, group: ProcessGroup) -> None:
        """Raise if the loader gives each rank its own samples, and the ranks would share these out once more."""
        if any(isinstance(sampler, DistributedSampler) for sampler in self._samplers()):
            group.abort(
                f"{self._name} must give every rank the same batches where split_batches=True. Its DistributedSampler "
                "gives each its own. Leave the sampler out, or pass split_batches=False."
            )

    @property
    def count(self) -> int | None:
        """How many batches an epoch has, where the loader knows."""
        try:
            return len(self._loader)  # type: ignore[arg-type]
        except TypeError:
            return None

    def position(self) -> dict[str, Any]:
        """Return the place in the loader, as JSON."""
        return {
            "epoch": self._epoch,
            "index": self._index,
            "start": self._start,
            "start_generators": self._start_generators,
            "generators": self.generator_states(),
        }

    def seek(self, position: dict[str, Any]) -> None:
        """Go to a position by drawing. The caller restores the shared random states; see `restore_generators`."""
        if not _POSITION(position):
            raise ValueError(f"its place in {self._name} is malformed")
        self._epoch = position["epoch"]
        if position["start"] is not None:
            RandomState.set(position["start"])
        self.set_generators(position["start_generators"])
        self._begin()
        assert self._batches is not None
        for i in range(position["index"]):
            if next(self._batches, _END) is _END:
                raise CheckpointError(
                    f"Cannot resume: {self._name} ended after {i} batches in epoch {self._epoch}, and had "
                    f"{position['index']} when the run was saved. Give the same data, or name another folder."
                )
        self._index = position["index"]

    def restore_generators(self, position: dict[str, Any]) -> None:
        """Put the loader's own generators where they were; done last, since two loaders may share one."""
        self.set_generators(position["generators"])

    def _begin(self) -> None:
        if self._drawn_from:
            self._start = RandomState.now(cuda=False)
            self._start_generators = self.generator_states()
        for sampler in self._samplers():
            if hasattr(sampler, "set_epoch"):  # as a DistributedSampler asks for, or every epoch has one order
                sampler.set_epoch(self._epoch)
        self._batches = iter(self._loader)
        self._index = 0

    def generator_states(self) -> list[str]:
        """Return the states of the loader's own generators, as text."""
        return [to_text(g.get_state()) for g in self._generators()]

    def _generators(self) -> list[torch.Generator]:
        """The generators of a DataLoader and its samplers, each once."""
        candidates = [getattr(owner, "generator", None) for owner in (self._loader, *self._samplers())]
        return list(dict.fromkeys(g for g in candidates if isinstance(g, torch.Generator)))

    def _samplers(self) -> list[Any]:
        """What a DataLoader draws by: its sampler, its batch sampler, and that one's, each once."""
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        candidates = [getattr(self._loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
        return [s for i, s in enumerate(candidates) if s is not None and not any(s is t for t in candidates[:i])]

    def set_generators(self, states: list[str]) -> None:
        """Set what `generator_states` returned."""
        generators = self._generators()
        if len(generators) != len(states):
            raise CheckpointError(
                f"Cannot resume: {self._name} has {len(generators)} generators, and had {len(states)} when the run was "
                "saved. Make the loader as it was made then."
            )
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(from_text(state))


def begin_together(reducer: DataParallelReducer, feeds: list[Feed]) -> None:
    """Make all ranks draw alike from here on: each begins with the random states of rank 0."""
    group = reducer.process_group
    if group.world_size == 1:
        return
    if reducer.split_batches:
        for feed in feeds:
            feed.check_same(group)
    local: Any = [RandomState.now(cuda=False), [feed.generator_states() for feed in feeds]]
    random_states, generators = group.broadcast(local)
    RandomState.set(random_states)
    for feed, states in zip(feeds, generators, strict=True):
        feed.set_generators(states)
