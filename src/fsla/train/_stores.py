"""Where checkpoints are: a file that one process writes, or a folder of which each rank writes a part.

    checkpoint-00000100.safetensors  all of it

    checkpoint-00000100/
        shard-00001-….safetensors    the tensors, or parts of tensors, that a rank wrote
        manifest.fsla                the nest around the tensors, their forms, and a digest of every other file

For folders PyTorch's distributed checkpoints say who writes what, and read it again on another number of ranks. A
folder has another name until rank 0 has written the manifest. The files are those of `fsla._storage._container`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsla._state_tree import flatten
from fsla._storage import _container as container
from fsla._storage._files import FileError, open_regular, sync
from fsla._storage._json_values import Plain, among, each, either, items, number, record, text
from fsla._tree import is_sharded
from fsla.distributed import ProcessGroup
from fsla.train._checkpoint import CheckpointError, file_errors, load_nest, nest_of, save_nest, unreadable

KIND = "a checkpoint of fit"
PART = ".part"
"""What the name of a folder ends with that is not written to its end."""
MANIFEST = "manifest.fsla"
_KIND_OF_MANIFEST = "the manifest of a checkpoint folder"
_KIND_OF_RANK = "the digests of a rank's files"
_SHARD = re.compile(r"shard-[0-9]{5}-[\w-]{1,80}\.safetensors")
_WHOLE = "whole"
_SIZE = number(int, 0)
_FORM = record(
    dtype=lambda name: isinstance(getattr(torch, str(name), None), torch.dtype),
    shape=items(_SIZE),
    spread=either(among(None), items(either(among(_WHOLE), _SIZE))),
)
_HEADER = record(
    nest=lambda nest: True,
    tensors=each(_FORM),
    files=each(text, lambda name: _SHARD.fullmatch(name) is not None),
)


class Store(Protocol):
    """Writes checkpoints, one after the other. Every rank calls the same methods in the same order."""

    def begin(self, path: Path, value: object, run_id: str) -> Path:
        """Copy a nest of values and write the copy, perhaps while the caller goes on; return its place."""
        ...

    def poll(self) -> bool:
        """On rank 0: return whether a checkpoint was completed since the last call."""
        ...

    def finish(self) -> bool:
        """Wait until the last checkpoint is written; on rank 0 return as `poll` does."""
        ...

    def close(self) -> None:
        """Release what the store holds."""
        ...


class FileStore:
    """One process, one file."""

    def __init__(self) -> None:
        self._written = False

    def begin(self, path: Path, value: object, run_id: str) -> Path:
        path = path.with_suffix(".safetensors")
        save_nest(path, KIND, value, run_id)
        self._written = True
        return path

    def poll(self) -> bool:
        written, self._written = self._written, False
        return written

    finish = poll

    def close(self) -> None:
        pass


@dataclass
class _Writing:
    """A checkpoint that is being written."""

    path: Path
    header: dict[str, Plain]
    run_id: str
    future: Future[object]


class FolderStore:
    """All ranks, a folder, while the run goes on."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._messages: dist.ProcessGroup | None = dist.new_group(backend="gloo")  # of its own, in a thread
        self._writing: _Writing | None = None

    def begin(self, path: Path, value: object, run_id: str) -> Path:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save

        tensors, nest = flatten(value)
        part = _part(path)
        self._group.run_on_first(lambda: _emptied(part), shown=(OSError,))
        future: Any = async_save(
            dict(tensors),
            storage_writer=HuggingFaceStorageWriter(str(part), save_distributed=True),
            process_group=self._messages,
        )
        written: Future[object] = Future()
        future.add_done_callback(lambda done: self._sign(part, run_id, done, written))
        header: dict[str, Plain] = {"nest": nest, "tensors": {name: _form(t) for name, t in tensors.items()}}
        self._writing = _Writing(path, header, run_id, written)
        return path

    def poll(self) -> bool:
        writing = self._writing
        if not self._group.is_first or writing is None or not writing.future.done():
            return False
        if writing.future.exception() is not None or not all(path.exists() for path in self._signatures(writing)):
            return False  # `finish` says what went wrong
        self._publish(writing)
        return True

    def finish(self) -> bool:
        writing = self._writing
        pending = self._group.run_on_first(lambda: writing is not None)
        self._writing = None
        if not pending:
            return False
        failed = None
        if writing is not None and writing.future.exception() is not None:
            failed = CheckpointError(
                f"Cannot write the checkpoint {writing.path}: {writing.future.exception()}. Earlier ones are intact. "
                "Make room or choose another place, and start the run again to resume."
            )
        self._group.raise_if_any_failed(failed)
        if writing is None or not self._group.is_first:
            return False
        self._publish(writing)
        return True

    def close(self) -> None:
        """Let go of the ranks' messages, and with them of the group's threads."""
        if self._messages is not None and dist.is_initialized():
            dist.destroy_process_group(self._messages)
        self._messages = None

    def _sign(self, part: Path, run_id: str, done: Future[Any], written: Future[object]) -> None:
        """Leave a digest of what this rank wrote, as the last thing that it writes."""
        try:
            done.result()
            digests: Plain = {path.name: _digest(path) for path in part.glob(f"shard-{self._group.rank + 1:05}-*")}
            container.write(part / _signature(self._group.rank), _KIND_OF_RANK, {}, digests, run_id)
        except BaseException as error:
            written.set_exception(error)
        else:
            written.set_result(None)

    def _publish(self, writing: _Writing) -> None:
        """Write the manifest and give the folder its name."""
        part = _part(writing.path)
        files: dict[str, Plain] = {}
        for path in self._signatures(writing):
            signature = container.read(path, _KIND_OF_RANK)
            if not isinstance(signature.json, dict) or signature.run_id != writing.run_id:
                raise unreadable(path, "it is of another run")
            files |= signature.json
            path.unlink()
        container.write(part / MANIFEST, _KIND_OF_MANIFEST, {}, writing.header | {"files": files}, writing.run_id)
        if writing.path.exists():
            shutil.rmtree(writing.path)
        part.replace(writing.path)
        sync(writing.path.parent)
        self._writing = None

    def _signatures(self, writing: _Writing) -> list[Path]:
        """The files in which the ranks leave the digests of what they wrote."""
        return [_part(writing.path) / _signature(rank) for rank in range(self._group.world_size)]


def load(path: Path, group: ProcessGroup, mesh: DeviceMesh | None = None) -> tuple[object, str | None]:
    """Return the nest of values of a checkpoint, and its run id, whoever wrote it. Every rank calls this.

    What was in shards is spread over the mesh.
    """
    if path.is_dir():
        return _load_folder(path, group, mesh)
    failed: CheckpointError | None = None
    result: tuple[object, str | None] = (None, None)
    try:
        value, content = load_nest(path, KIND)
        result = (value, content.run_id)
    except CheckpointError as error:
        failed = error
    group.raise_if_any_failed(failed)
    return result


def _load_folder(path: Path, group: ProcessGroup, mesh: DeviceMesh | None) -> tuple[object, str | None]:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    header, run_id = group.run_on_first(lambda: _header(path))
    failed = None
    try:
        for file in path.glob("*.safetensors"):
            if file.name not in header["files"]:
                raise FileError(f"{file.name} is of another checkpoint")
        for name in sorted(header["files"])[group.rank :: group.world_size]:
            if _digest(path / name) != header["files"][name]:
                raise FileError(f"{name} is damaged, or of another checkpoint")
    except (OSError, FileError) as error:
        failed = unreadable(path, str(error))
    group.raise_if_any_failed(failed)
    tensors = {name: _empty(form, mesh) for name, form in header["tensors"].items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as is meant, for one process
        load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=group.world_size == 1)
    return nest_of(path, tensors, header["nest"]), run_id


def run_id_of(path: Path) -> str | None:
    """Return the run id in the head of a checkpoint, unchecked; None where it has none that can be read."""
    try:
        return container.read_run_id(path / MANIFEST if path.is_dir() else path)
    except (OSError, ValueError):
        return None


def _header(path: Path) -> tuple[Any, str | None]:
    with file_errors():
        content = container.read(path / MANIFEST, _KIND_OF_MANIFEST)
    if not _HEADER(content.json):
        raise unreadable(path, f"its {MANIFEST} is malformed")
    return content.json, content.run_id


def _emptied(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _part(path: Path) -> Path:
    return path.with_name(path.name + PART)


def _signature(rank: int) -> str:
    return f"rank-{rank + 1:05}.fsla"


def _digest(path: Path) -> str:
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _form(t: Tensor) -> Plain:
    return {
        "dtype": str(t.dtype).removeprefix("torch."),
        "shape": list(t.shape),
        "spread": [_spread_name(p) for p in t.placements] if is_sharded(t) else None,
    }


def _spread_name(placement: Any) -> int | str:
    if placement.is_shard():
        dim: int = placement.dim
        return dim
    if placement.is_replicate():
        return _WHOLE
    raise TypeError(f"A checkpoint holds tensors that are whole or in shards. Got one that is {placement}.")


def _empty(form: dict[str, Any], mesh: DeviceMesh | None) -> Tensor:
    from torch.distributed.tensor import Placement, Replicate, Shard, zeros

    dtype: torch.dtype = getattr(torch, form["dtype"])
    if form["spread"] is None or mesh is None:
        return torch.zeros(form["shape"], dtype=dtype)
    placements: list[Placement] = [Replicate() if name == _WHOLE else Shard(int(name)) for name in form["spread"]]
    if len(placements) != mesh.ndim:
        placements = [*[Replicate()] * (mesh.ndim - 1), next((p for p in placements if p != Replicate()), Replicate())]
    return zeros(form["shape"], dtype=dtype, device_mesh=mesh, placements=placements)
