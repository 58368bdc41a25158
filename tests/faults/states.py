"""State dicts, edited: `load_state_dict` reads what a user's own file may hold."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

import torch

import fsla
from faults.files import hostile_tensors, hostile_values
from faults.saved import BATCHES, _lazy_run, new_optimizer, same, weights_of
from faults.trials import SilentlyWrong, Trial
from fsla._state_tree import flatten

CATEGORY = "state dicts: edited"
EDITS = 60


def _train(optimizer: fsla.BilevelOptimizer, steps: int) -> None:
    for i in range(steps):
        optimizer.step(BATCHES[i % 2], BATCHES[0])


def _of_optimizer(options: Mapping[str, Any]) -> tuple[Any, Callable[[Any], Any]]:
    """Return a state, and what comes of loading one and training on."""
    optimizer = new_optimizer(**options)
    _train(optimizer, 3)
    state = optimizer.state_dict()
    parameters = [copy.deepcopy(part.state_dict()) for part in (optimizer.model, optimizer.outer)]

    def continued(state: Any) -> Any:
        fresh = new_optimizer(**options)
        for part, values in zip((fresh.model, fresh.outer), parameters, strict=True):
            part.load_state_dict(values)
        fresh.load_state_dict(state)
        _train(fresh, 12)
        return weights_of(fresh)

    return state, continued


def _of_rows() -> tuple[Any, Callable[[Any], Any]]:
    run = _lazy_run(0)

    def continued(state: Any) -> Any:
        fresh = _lazy_run(1)
        fresh.load_state_dict(state)
        return flatten(fresh.state_dict())

    return run.state_dict(), continued


def _of_sampler() -> tuple[Any, Callable[[Any], Any]]:
    def new() -> Any:
        return fsla.distributed.ShardedSampler(fsla.distributed.IndexRange(20), batch_size=3, seed=5)

    sampler = new()
    for _ in range(9):
        sampler()

    def continued(state: Any) -> Any:
        fresh = new()
        fresh.load_state_dict(state)
        return [fresh().batch for _ in range(5)]

    return sampler.state_dict(), continued


SOURCES: dict[str, Callable[[], tuple[Any, Callable[[Any], Any]]]] = {
    "SOBA": lambda: _of_optimizer({}),
    "SOBA with Adam": lambda: _of_optimizer(
        {
            "inner_optimizer": lambda p: torch.optim.Adam(p, lr=0.01),
            "outer_optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        }
    ),
    "LazyRowOptimizer": _of_rows,
    "ShardedSampler": _of_sampler,
}


def _places(nest: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield place, nest
    if isinstance(nest, Mapping):
        for name, part in nest.items():
            yield from _places(part, (*place, name))
    elif type(nest) in (list, tuple):
        for i, part in enumerate(nest):
            yield from _places(part, (*place, i))


def _edited(nest: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    if isinstance(nest, Mapping):
        return {**nest, place[0]: _edited(nest[place[0]], place[1:], value)}
    parts = list(nest)
    parts[place[0]] = _edited(parts[place[0]], place[1:], value)
    return type(nest)(parts)


def trials(seed: int) -> Iterator[Trial]:
    """Yield edits of the state dicts of everything that has one."""
    for name, make in SOURCES.items():
        random = Random(f"{name} {seed}")
        state, continued = make()
        expected = continued(state)
        options = list(_places(state))
        for i in range(EDITS):
            place, value = random.choice(options)
            if isinstance(value, torch.Tensor):
                changed: Any = random.choice(hostile_tensors(value))
                label = "a tensor" if changed is not None else "None"
            else:
                label, change = random.choice(hostile_values(value))
                changed = change(value)
            where = "/".join(map(str, place)) or "all of it"
            yield Trial(
                CATEGORY, f"{name} {i}: {where} as {label}", _load(continued, _edited(state, place, changed), expected)
            )


def _load(continued: Callable[[Any], Any], state: Any, expected: Any) -> Callable[[], None]:
    def run() -> None:
        if not same(continued(state), expected):
            raise SilentlyWrong("another run came of it")

    return run
