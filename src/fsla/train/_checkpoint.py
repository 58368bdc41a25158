"""Checkpoints: a state, taken apart by `fsla._state_tree`, in a file that `fsla._storage._container` writes.

Tensors are stored bit for bit, and the nest around them is JSON. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from fsla._checks import file_path, target_device
from fsla._state_tree import Json, flatten, unflatten
from fsla._storage import _container as container
from fsla._storage._files import FileError, remove_orphans

KIND = "a checkpoint"


class CheckpointError(ValueError):
    """Error of a checkpoint that cannot be read, written or used; the text is the whole message.

    Examples:
        >>> try:
        ...     fsla.train.load_checkpoint("missing.safetensors")
        ... except fsla.CheckpointError as error:
        ...     print(error)
        Cannot read missing.safetensors: No such file or directory. Remove it, or name another file.
    """


def save_checkpoint(path: str | Path, value: object) -> None:
    """Write a nest of values to a file, whole or not at all. If it fails, a file that was there stays.

    Nothing is pickled.

    Args:
        path: the file.
        value: a nest of states, mappings, tuples, lists, numbers, strings and dense tensors.

    Raises:
        CheckpointError: if the file cannot be written, or the path names anything but a regular file.
        TypeError: if the nest holds anything else.

    Examples:
        >>> fsla.train.save_checkpoint("run.safetensors", {"step": 3, "weight": model.weight.detach()})
        >>> fsla.train.load_checkpoint("run.safetensors")["step"]
        3
    """
    save_nest(file_path(path, "path", "save_checkpoint"), KIND, value)


def load_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> object:
    """Return the nest of values in a file of `save_checkpoint`.

    Args:
        path: the file.
        device: where its tensors go.

    Returns:
        The nest.

    Raises:
        CheckpointError: if the file is damaged, or is no checkpoint.

    Examples:
        >>> fsla.train.save_checkpoint("run.safetensors", [1, 2])
        >>> fsla.train.load_checkpoint("run.safetensors")
        [1, 2]
    """
    to = target_device(device, "device", "load_checkpoint")
    return load_nest(file_path(path, "path", "load_checkpoint"), KIND, to)[0]


def save_nest(path: Path, kind: str, value: object, run_id: str | None = None) -> str:
    """Write a nest of values as a file of this kind, and return the file's digest."""
    tensors, nest = flatten(value)
    try:
        remove_orphans(path.parent)
        with file_errors():
            return container.write(path, kind, tensors, nest, run_id)
    except OSError as error:
        raise CheckpointError(
            f"Cannot write the checkpoint {path}: {error.strerror or error}. The file that was there before, if any, "
            "is intact. Make room or choose another place, and start the run again to resume."
        ) from error


def load_nest(path: Path, kind: str, device: torch.device | str = "cpu") -> tuple[object, container.Content]:
    """Return the nest of values in a file of this kind, and the file's content."""
    with file_errors():
        content = container.read(path, kind)
    return nest_of(path, {name: t.to(device) for name, t in content.tensors.items()}, content.json), content


def nest_of(path: Path, tensors: Mapping[str, Tensor], nest: Json) -> object:
    """Return the nest that `flatten` took apart; raise, with the path of its checkpoint, if it is none."""
    try:
        return unflatten(tensors, nest)
    except ValueError as error:
        raise unreadable(path, str(error)) from None


@contextmanager
def file_errors() -> Iterator[None]:
    """Turn the refusal of a file into a CheckpointError."""
    try:
        yield
    except FileError as error:
        raise CheckpointError(str(error)) from None


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a failure of the disk into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"Cannot write to {folder}: {error.strerror or error}. Earlier records and checkpoints are intact. Make "
            "room or choose another place, and start the run again to resume."
        ) from error


def unreadable(path: Path, why: str) -> CheckpointError:
    """Return the refusal of a checkpoint."""
    return CheckpointError(str(container.unreadable(path, why)))
