"""Nests of tensors: states, points, samples, trees and tuples, taken apart into tensors and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fsla.sample import Batches


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


def tensors(x: Any) -> list[Tensor]:
    """The tensors of the nest, each once, in a fixed order."""
    found: list[Tensor] = []
    map_tensors(lambda t: found.append(t) or t, x)  # type: ignore[func-returns-value]
    return found


def rebuild(x: Any, parts: Sequence[Tensor]) -> Any:
    """The nest with other tensors, in the order of `tensors`."""
    left: Iterator[Tensor] = iter(parts)
    return map_tensors(lambda t: next(left), x)


def form(x: Any) -> Any:
    """What two nests must have in common for one program to serve both: all but the numbers in their tensors."""
    seen: dict[int, int] = {}

    def of(x: Any) -> Any:
        if isinstance(x, Tensor):
            first = seen.setdefault(id(x), len(seen))  # whether this tensor stood in an earlier place
            return (first, x.shape, x.stride(), x.dtype, x.device)
        if isinstance(x, dict):
            return tuple((k, of(v)) for k, v in x.items())
        if isinstance(x, tuple | list):
            return (type(x).__name__, *map(of, x))
        if x is None or isinstance(x, bool | int | float | str):
            return (type(x).__name__, x)  # 1, 1.0 and True are equal, and not the same
        raise TypeError(
            f"A step that is captured takes batches of tensors, numbers and strings. Got {type(x).__name__}."
        )

    return of(x)


def copy_into(to: Any, source: Any) -> None:
    """Writes the tensors of one nest into those of another of the same form."""
    with torch.no_grad():
        torch._foreach_copy_(tensors(to), tensors(source))
