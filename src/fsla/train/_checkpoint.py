"""Checkpoints: any nest of states, points, trees, tuples, lists, numbers, strings and tensors in one file.

Tensors are stored bit for bit, and the nest around them is JSON. `fsla._container` is the format of the file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from fsla import _container as container
from fsla._files import FileError, check_regular, remove_orphans
from fsla._json_values import Plain
from fsla._tree import Scalar, Tree
from fsla.algorithms._alternating import State
from fsla.problems._problem import Point

KIND = "a checkpoint"
_DEEPEST = 100
"""How many levels a nest may have."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, written or used; the text is the whole message."""


def save_checkpoint(path: str | Path, value: object) -> None:
    """Write a nest of values, whole or not at all: where it fails, a file that was there stays as it is.

    Raises:
        CheckpointError: if the file cannot be written, or the path names a link or anything else but a regular file.
    """
    save_nest(Path(path), KIND, value)


def load_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> object:
    """Returns the nest of values, its tensors on the device."""
    return load_nest(Path(path), KIND, device)[0]


def save_nest(path: Path, kind: str, value: object, run_id: str | None = None) -> str:
    """Write a nest of values as a file of this kind, and return the file's digest."""
    nest, tensors = pack(value)
    try:
        remove_orphans(path.parent)
        with in_words():
            return container.write(path, kind, tensors, nest, run_id)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {path} must be written, and was not: {error.strerror or error}. The file that was there "
            "before, if any, is intact. Make room or choose another place, and start the run again to resume."
        ) from error


def load_nest(path: Path, kind: str, device: torch.device | str = "cpu") -> tuple[object, container.Content]:
    """Return the nest of values in a file of this kind, and the file's content."""
    with in_words():
        content = container.read(path, kind)
    tensors = {name: tensor.to(device) for name, tensor in content.tensors.items()}
    return unpack(path, content.json, tensors), content


@contextmanager
def in_words() -> Iterator[None]:
    """Turn the refusal of a file into a CheckpointError."""
    try:
        yield
    except FileError as error:
        raise CheckpointError(str(error)) from None


def check_place(path: Path) -> None:
    """Raises unless a checkpoint can be written there: said when a run starts, not when it first saves."""
    folder = path.parent
    if path.is_dir():
        raise CheckpointError(f"The checkpoint must be a file. {path} is a folder. Name a file in it.")
    with in_words():
        check_regular(path)
    if not folder.is_dir():
        raise CheckpointError(f"The checkpoint must be in a folder. {folder} is none. Make it, or name another.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CheckpointError(f"The checkpoint's folder must be writable. {folder} is not. Name another.")


def pack(value: object) -> tuple[Plain, dict[str, Tensor]]:
    """The nest as JSON, and the tensors that it names. Raises if a checkpoint has no place for what is in it."""
    tensors: dict[str, Tensor] = {}
    return _pack(value, tensors, {}, 0), tensors


def _pack(value: object, tensors: dict[str, Tensor], seen: dict[int, str], depth: int) -> Plain:
    if depth > _DEEPEST:
        raise TypeError(f"A checkpoint holds nests of at most {_DEEPEST} levels. Got a deeper one instead.")
    if isinstance(value, Tensor):
        _check_tensor(value)
        if id(value) not in seen:  # a tensor in two places is stored once, and is one tensor again when loaded
            seen[id(value)] = str(len(tensors))
            tensors[seen[id(value)]] = value
        return {"tensor": seen[id(value)]}
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"A checkpoint holds mappings from strings. Got {name!r} as a name instead.")
        return {"dict": {name: _pack(part, tensors, seen, depth + 1) for name, part in value.items()}}
    kind = type(value).__name__
    if isinstance(value, tuple | list) and type(value) in (tuple, list, State, Point):
        return {kind: [_pack(part, tensors, seen, depth + 1) for part in value]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        "A checkpoint holds states, points, trees, tuples, lists, numbers, strings and tensors. "
        f"Got {kind} instead. A memory of another type must be written with these."
    )


def _check_tensor(tensor: Tensor) -> None:
    kept = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
    if not kept or tensor.dtype is torch.complex128:
        raise TypeError(
            "A checkpoint holds dense tensors with numbers of at most 64 bits. "
            f"Got one of layout {tensor.layout} and dtype {tensor.dtype} on {tensor.device} instead."
        )


class _MalformedError(Exception):
    """What is wrong with a nest."""


def unpack(path: Path, nest: Plain, tensors: Mapping[str, Tensor]) -> object:
    """The nest that `pack` took apart; raises, with the path of its checkpoint, if it is none."""
    try:
        return _unpack(nest, tensors, 0)
    except _MalformedError as error:
        raise unreadable(path, str(error)) from None


def _unpack(nest: Plain, tensors: Mapping[str, Tensor], depth: int) -> object:
    if depth > _DEEPEST:
        raise _MalformedError(f"its nest has more than {_DEEPEST} levels")
    if isinstance(nest, list):
        raise _MalformedError("its nest has a list that is not named as one")
    if not isinstance(nest, dict):
        return nest
    if len(nest) != 1:
        raise _MalformedError(f"a part of its nest has {len(nest)} kinds")
    ((kind, content),) = nest.items()
    if kind == "tensor":
        if not isinstance(content, str) or content not in tensors:
            raise _MalformedError("a tensor is missing")
        return tensors[content]
    if kind == "float" and content in ("inf", "-inf", "nan"):
        return float(content)
    if kind == "dict" and isinstance(content, dict):
        return {name: _unpack(part, tensors, depth + 1) for name, part in content.items()}
    if kind in _KINDS and isinstance(content, list):
        return _KINDS[kind]([_unpack(part, tensors, depth + 1) for part in content])
    raise _MalformedError("its nest has a kind that is unknown, or has not what its kind has")


def _state(parts: list[object]) -> State:
    if len(parts) == len(State._fields):
        k, at, inner, memory, d, outer = parts
        if isinstance(k, int) and isinstance(at, Point) and _is_tree(d):
            return State(k, at, inner, memory, d, outer)
    raise _MalformedError("it has a State that is none")


def _point(parts: list[object]) -> Point:
    if len(parts) == len(Point._fields):
        lam, omega, trail = parts
        if _is_tree(lam) and _is_tree(omega) and _is_trail(trail):
            return Point(lam, omega, trail)
    raise _MalformedError("it has a Point that is none")


def _is_tree(x: object) -> TypeGuard[Tree]:
    return isinstance(x, dict) and all(isinstance(tensor, Tensor) for tensor in x.values())


def _is_trail(x: object) -> TypeGuard[tuple[tuple[Tree, Scalar], ...]]:
    return isinstance(x, tuple) and all(
        isinstance(step, tuple) and len(step) == 2 and _is_tree(step[0]) and isinstance(step[1], int | float | Tensor)
        for step in x
    )


_KINDS: dict[str, Callable[[list[object]], object]] = {"tuple": tuple, "list": list, "State": _state, "Point": _point}
"""What is written as a list of parts, by the name of its type."""


def unreadable(path: Path, why: str) -> CheckpointError:
    """Return the refusal of a checkpoint."""
    return CheckpointError(str(container.unreadable(path, why)))
