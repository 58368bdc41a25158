"""Nests of tensors: states, points, samples, trees and tuples, taken apart into tensors and put together again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsla.problems._batches import Batches


def map_tensors(f: Callable[[Tensor], Tensor], x: Any, seen: dict[int, Any] | None = None) -> Any:
    """Applies f once to every tensor of the nest. An object that stands in two places stays one object."""
    seen = {} if seen is None else seen
    if id(x) in seen:
        return seen[id(x)]
    out = x
    if isinstance(x, Tensor):
        out = f(x)
    elif isinstance(x, dict):
        out = {k: map_tensors(f, v, seen) for k, v in x.items()}
    elif isinstance(x, tuple | list):
        parts = [map_tensors(f, v, seen) for v in x]
        named = hasattr(x, "_fields")
        out = type(x)(*parts) if named else type(x)(parts) if isinstance(x, list | Batches) else tuple(parts)
    seen[id(x)] = out
    return out


def copied(x: Any, into: Any = None) -> Any:
    """Copy a nest, each tensor on its own device.

    Args:
        x: the nest.
        into: an earlier copy of a nest like it, whose tensors are written to where they fit; it is used up.
    """
    places: dict[int, Tensor] = {}

    def collect(t: Tensor) -> Tensor:
        return places.setdefault(len(places), t)

    def copy(t: Tensor) -> Tensor:
        place = places.pop(next(iter(places), 0), None)
        if place is None or (place.shape, place.dtype, place.device) != (t.shape, t.dtype, t.device):
            return t.detach().clone()
        return place.copy_(t.detach())

    map_tensors(collect, into)
    return map_tensors(copy, x)


def rebuild(x: Any, parts: Sequence[Tensor]) -> Any:
    """The nest with other tensors, in the order of `tensors`."""
    left = iter(parts)
    return map_tensors(lambda t: next(left), x)


def take_apart(x: object, *, layout: bool = True) -> tuple[Hashable, list[Tensor]]:
    """The form of a nest, and its tensors, each once, in a fixed order.

    The form is what two nests must have in common for one program to serve both: all but the numbers in their tensors
    and, without `layout`, their strides.
    """
    places: dict[int, int] = {}
    found: list[Tensor] = []

    def form(x: object) -> Hashable:
        if isinstance(x, Tensor):
            place = places.setdefault(id(x), len(found))  # a tensor in two places is one argument
            if place == len(found):
                found.append(x)
            return (place, x.shape, x.stride() if layout else None, x.dtype, x.device)
        if isinstance(x, dict):
            return tuple([(k, form(v)) for k, v in x.items()])
        if isinstance(x, tuple | list):
            return (type(x), *[form(v) for v in x])
        if x is None or isinstance(x, bool | int | float | str):
            return (type(x), x)  # 1, 1.0 and True are equal, and not the same
        raise TypeError(
            f"A step that is captured takes batches of tensors, numbers and strings. Got {type(x).__name__}."
        )

    return form(x), found


def tensors(x: object) -> list[Tensor]:
    return take_apart(x)[1]


def copy_into(to: object, source: object) -> None:
    """Writes the tensors of one nest into those of another of the same form, which they may look into."""
    targets = tensors(to)
    values = tensors(source)
    written = {t.untyped_storage().data_ptr() for t in targets}
    with torch.no_grad():
        values = [v.clone() if v.untyped_storage().data_ptr() in written else v for v in values]
        torch._foreach_copy_(targets, values)
