"""States as data: nests of declared types, trees, tuples, numbers, strings and tensors.

flatten      {path: tensor} and JSON, which a store can write without pickling
unflatten    the state again, checked against the types that its classes declare
evolve       a state with other fields
describe     what a run is a run of, from the public fields of its parts
map_tensors  the same nest with other tensors
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy
import torch
from torch import Tensor

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
T = TypeVar("T")
_TYPES: dict[str, type] = {}
_DEEPEST = 100
"""How many levels a nest may have."""


def saved(cls: type[T]) -> type[T]:
    """Declare a dataclass or NamedTuple as a part of states, so that checkpoints can hold it.

    Args:
        cls: the class; its name must be its own among the declared types.

    Returns:
        The class.

    Raises:
        TypeError: if another declared type has its name.

    Examples:
        >>> from dataclasses import dataclass
        >>> @fsla.algorithms.saved
        ... @dataclass(frozen=True)
        ... class CountingState(fsla.State):
        ...     refreshes: int
    """
    if _TYPES.setdefault(cls.__name__, cls).__qualname__ != cls.__qualname__:
        raise TypeError(f"Two types of saved states must have different names. Both are called {cls.__name__}.")
    _TYPES[cls.__name__] = cls
    return cls


def flatten(value: object, path: str = "") -> tuple[dict[str, Tensor], Json]:
    """Return the tensors of a nest by their path, such as "omega/value/0.weight", and the rest as JSON.

    A tensor in several places is one entry, named by the first.

    Raises:
        TypeError: if the nest holds anything but declared types, mappings from strings or whole numbers, tuples, lists,
            numbers, strings and dense tensors.
    """
    paths: dict[Tensor, str] = {}
    json = _flatten(value, path, 0, paths)
    return {path: t.detach() for t, path in paths.items()}, json


def _flatten(value: object, path: str, depth: int, paths: dict[Tensor, str]) -> Json:
    if depth > _DEEPEST:
        raise TypeError(f"A state must be a nest of at most {_DEEPEST} levels. Got a deeper one instead.")
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, Tensor):
        _check_tensor(value)
        return {"tensor": paths.setdefault(value, path)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    names, entries = _entries(value)
    parts: list[Json] = []
    for name, entry in zip(names, entries, strict=True):
        place = _escaped(str(name))
        part = _flatten(entry, f"{path}/{place}" if path else place, depth + 1, paths)
        parts.append([name, part] if isinstance(value, Mapping) else part)
    return {_kind(value): parts}


def unflatten(tensors: Mapping[str, Tensor], json: Json, kind: Any = object) -> Any:
    """Return the nest that `flatten` took apart.

    Raises:
        ValueError: if the JSON is none of a nest, or the nest is not of the declared types.
    """
    value = _unflatten(tensors, json, 0)
    if not _conforms(value, kind):
        raise ValueError(f"a part of it is not the {getattr(kind, '__name__', kind)} that belongs there")
    return value


def _unflatten(tensors: Mapping[str, Tensor], json: Json, depth: int) -> Any:
    if depth > _DEEPEST:
        raise ValueError(f"its nest has more than {_DEEPEST} levels")
    if isinstance(json, list):
        raise ValueError("its nest has a list that is not named as one")
    if not isinstance(json, dict):
        return json
    if len(json) != 1:
        raise ValueError(f"a part of its nest has {len(json)} kinds")
    ((kind, parts),) = json.items()
    if kind == "tensor" and isinstance(parts, str) and parts in tensors:
        return tensors[parts]
    if kind == "float" and parts in ("inf", "-inf", "nan"):
        return float(str(parts))
    if not isinstance(parts, list):
        raise ValueError("a tensor is missing" if kind == "tensor" else "its nest has a kind that is unknown")
    if kind in ("mapping", "counter"):
        pairs = [(part[0], part[1]) for part in parts if isinstance(part, list) and len(part) == 2]
        if len(pairs) != len(parts) or not all(type(name) in (str, int) for name, _ in pairs):
            raise ValueError("it has a mapping that is none")
        mapping = {name: _unflatten(tensors, part, depth + 1) for name, part in pairs}
        return Counter(mapping) if kind == "counter" else mapping
    entries = [_unflatten(tensors, part, depth + 1) for part in parts]
    if kind in ("tuple", "list"):
        return tuple(entries) if kind == "tuple" else entries
    return _rebuilt(kind, entries)


def _rebuilt(kind: str, entries: list[Any]) -> Any:
    if kind not in _TYPES:
        raise ValueError("its nest has a kind that is unknown")
    cls = _TYPES[kind]
    hints = _hints(cls)
    if len(entries) != len(hints) or not all(
        _conforms(entry, hint) for entry, hint in zip(entries, hints.values(), strict=True)
    ):
        raise ValueError(f"it has a {kind} that is none")
    return cls(**dict(zip(hints, entries, strict=True)))


@cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of the fields that a saved value of this class consists of."""
    hints = get_type_hints(cls)
    return {name: hints[name] for name in _names(cls)}


def _is_declared(value: object) -> bool:
    return _TYPES.get(type(value).__name__) is type(value)


def _names(cls: type) -> list[str]:
    return [f.name for f in fields(cls)] if is_dataclass(cls) else list(getattr(cls, "_fields", ()))


def _conforms(value: object, hint: Any) -> bool:
    """Whether a value is of a declared type."""
    if hint in (object, Any):
        return True
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin in (Union, UnionType):
        return any(_conforms(value, option) for option in arguments)
    if isinstance(hint, TypeVar):
        return True
    if origin is None:
        kind = NoneType if hint is None else hint
        if kind is float:
            return isinstance(value, int | float) and not isinstance(value, bool)
        if kind is int:
            return isinstance(value, int) and not isinstance(value, bool)
        return isinstance(value, kind)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(_conforms(entry, arguments[0]) for entry in value)
        return len(value) == len(arguments) and all(map(_conforms, value, arguments))
    if issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(_conforms(entry, arguments[1]) for entry in value.values())
    return isinstance(value, origin)


def _entries(value: object) -> tuple[Sequence[str | int], list[object]]:
    """The names of the parts of a nest, and the parts."""
    if isinstance(value, Mapping):
        for name in value:
            if type(name) not in (str, int):
                raise TypeError(
                    f"A state holds mappings from strings and whole numbers. Got {name!r} as a name instead."
                )
        if len(set(map(str, value))) < len(value):
            raise TypeError("The names in a mapping of a state must differ as text.")
        return list(value), list(value.values())
    if _is_declared(value):
        names = _names(type(value))
        return names, [getattr(value, name) for name in names]
    if type(value) in (tuple, list):
        parts: list[object] = list(value)  # type: ignore[call-overload]
        return range(len(parts)), parts
    raise TypeError(
        "A state holds declared types, mappings, tuples, lists, numbers, strings and tensors. "
        f"Got {type(value).__name__} instead. Mark the class with @fsla.algorithms.saved, or write it with these."
    )


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        return "counter" if isinstance(value, Counter) else "mapping"
    return type(value).__name__


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1") or "~2"


def _check_tensor(tensor: Tensor) -> None:
    supported = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
    if not supported or tensor.dtype is torch.complex128:
        raise TypeError(
            "A state holds dense tensors with numbers of at most 64 bits. "
            f"Got one of layout {tensor.layout} and dtype {tensor.dtype} on {tensor.device} instead."
        )


def map_tensors(f: Callable[[Tensor], Tensor], value: T) -> T:
    """Return the nest with f applied to every tensor."""
    result: Any
    if isinstance(value, Tensor):
        result = f(value)
    elif isinstance(value, Mapping):
        result = {name: map_tensors(f, part) for name, part in value.items()}
    elif _is_declared(value):
        result = type(value)(**{name: map_tensors(f, getattr(value, name)) for name in _names(type(value))})
    elif type(value) in (tuple, list):
        result = type(value)(map_tensors(f, part) for part in value)  # type: ignore[attr-defined,call-arg]
    else:
        result = value
    return cast(T, result)


def evolve(value: T, **changes: object) -> T:
    """Return a saved dataclass with other fields: `dataclasses.replace` at a fraction of its cost, for every step."""
    evolved = object.__new__(type(value))
    evolved.__dict__.update(value.__dict__, **changes)
    return evolved


def tensors_of(value: object) -> list[Tensor]:
    """Return the tensors of a nest, in a fixed order; one in two places comes twice."""
    tensors: list[Tensor] = []

    def collect(t: Tensor) -> Tensor:
        tensors.append(t)
        return t

    map_tensors(collect, value)
    return tensors


def describe(value: object) -> Json:
    """Return what a run is a run of, from the public fields of its parts: a run resumes only where this is the same."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): describe(part) for name, part in value.items()}
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return [describe(part) for part in value]
    if isinstance(value, torch.optim.Optimizer):
        sizes: list[Json] = [len(group["params"]) for group in value.param_groups]  # Schedulers change all the rest.
        return {"type": type(value).__name__, "groups": sizes}
    if is_dataclass(value) or isinstance(value, tuple):  # of these, the named ones are left
        shown = [f.name for f in fields(value) if f.repr] if is_dataclass(value) else _names(type(value))
        return {"type": type(value).__name__} | {name: describe(getattr(value, name)) for name in shown}
    return getattr(value, "__qualname__", type(value).__name__)
