"""Checkpoints: any nest of states, points, trees, tuples, numbers and tensors in one safetensors file.

Tensors are stored as they are, bit for bit; the nest around them is JSON in the file's header. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fsla.problem import Point
from fsla.solver import State

_NAMED: dict[str, type] = {"State": State, "Point": Point}
_FORMAT = "fsla-checkpoint-1"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read; the text is the whole message."""


def save_checkpoint(path: Path, value: Any) -> None:
    """Writes a nest of values; whole or not at all."""
    tensors: dict[str, Tensor] = {}
    nest = _pack(value, tensors, {})
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata={"format": _FORMAT, "nest": json.dumps(nest)})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> Any:
    """Returns the nest of values, its tensors on the device."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} must be a checkpoint. It cannot be read ({error}). Remove it to begin anew."
        ) from None
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} must be a checkpoint of the format {_FORMAT}. It is not. Remove it to begin anew."
        )
    return _unpack(json.loads(metadata["nest"]), tensors)


def _pack(value: Any, tensors: dict[str, Tensor], seen: dict[int, str]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in seen:  # a tensor in two places is stored once, and is one tensor again when loaded
            seen[id(value)] = str(len(tensors))
            tensors[seen[id(value)]] = value.detach().cpu().clone().contiguous()
        return {"tensor": seen[id(value)]}
    if isinstance(value, dict):
        return {"dict": {str(k): _pack(v, tensors, seen) for k, v in value.items()}}
    if isinstance(value, tuple | list):
        kind = type(value).__name__
        return {kind if kind in (*_NAMED, "list") else "tuple": [_pack(v, tensors, seen) for v in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"A checkpoint holds tensors, trees, tuples, numbers and strings. Got {type(value).__name__} instead."
    )


def _unpack(nest: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(nest, dict):
        return nest
    ((kind, content),) = nest.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {k: _unpack(v, tensors) for k, v in content.items()}
    parts = [_unpack(v, tensors) for v in content]
    return _NAMED[kind](*parts) if kind in _NAMED else parts if kind == "list" else tuple(parts)
