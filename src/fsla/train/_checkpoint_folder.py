"""Checkpoints of several ranks: a folder, of which each rank writes a part while the run goes on.

    checkpoint-00000100/
        shard-00001-….safetensors    the tensors, or parts of tensors, that a rank wrote
        manifest.fsla                the nest around the tensors, their forms, and a digest of every other file

PyTorch's distributed checkpoints say who writes what, and read it again on another number of ranks. The folder has
another name until rank 0 has written the manifest, which is a file of `fsla._container`. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, zeros

from fsla import _container as container
from fsla._files import FileError, open_regular
from fsla._json_values import Plain, among, either, items, mapping, number, record
from fsla._tree import is_sharded
from fsla.distributed import Ranks
from fsla.train._checkpoint import CheckpointError, in_words, pack, unpack, unreadable

PART = ".part"
"""What the name of a folder ends with that is not written to its end."""
MANIFEST = "manifest.fsla"
_KIND = "the manifest of a checkpoint folder"
_KIND_OF_RANK = "the digests of a rank's files"
_SHARD = re.compile(r"shard-[0-9]{5}-[\w-]{1,80}\.safetensors")
_WHOLE = "whole"
_SIZE = number(int, 0)
_FORM = record(
    dtype=lambda name: isinstance(getattr(torch, str(name), None), torch.dtype),
    shape=items(_SIZE),
    spread=either(among(None), items(either(among(_WHOLE), _SIZE))),
)
_HEADER = record(nest=lambda value: True, tensors=mapping, files=mapping)


@dataclass
class _Writing:
    """A checkpoint under way."""

    path: Path
    header: dict[str, Plain]
    run_id: str
    future: Future[object]


class FolderWriter:
    """Writes checkpoints of all ranks, one after the other. Every rank must call the same methods in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo")  # messages of its own, in a thread
        self._writing: _Writing | None = None

    def begin(self, path: Path, value: object, run_id: str) -> None:
        """Copies a nest of values, and writes the copy while the caller goes on; waits for the one before."""
        self.finish()
        nest, held = pack(value)
        part = _part(path)
        self._ranks.first(lambda: _emptied(part), shown=(OSError,))
        header: dict[str, Plain] = {"nest": nest, "tensors": {name: _form(t) for name, t in held.items()}}
        future: Any = async_save(
            {name: t.detach() for name, t in held.items()},
            storage_writer=HuggingFaceStorageWriter(str(part), save_distributed=True),
            process_group=self._group,
        )
        written: Future[object] = Future()
        future.add_done_callback(lambda done: self._sign(part, run_id, done, written))
        self._writing = _Writing(path, header, run_id, written)

    def look(self) -> Path | None:
        """On rank 0: the checkpoint that was under way, if all of it is written by now; it has its name then."""
        writing = self._writing
        if not self._ranks.is_first or writing is None or not writing.future.done():
            return None
        if writing.future.exception() is not None:
            return None  # `finish` says so
        return self._name(writing) if all(path.exists() for path in self._signed(writing)) else None

    def finish(self) -> Path | None:
        """Waits until the checkpoint under way is written; on rank 0 returns it, unless `look` did."""
        writing = self._writing
        pending = self._ranks.first(lambda: self._writing is not None)
        if not pending:
            self._writing = None
            return None
        failed = None
        if writing is not None:
            error = writing.future.exception()
            if error is not None:
                failed = CheckpointError(
                    f"The checkpoint {writing.path} must be written, and was not: {error}. Those that were there "
                    "before are intact. Make room or choose another place, and start the run again to resume."
                )
        self._ranks.all_well(failed)
        if writing is None or not self._ranks.is_first:
            self._writing = None
            return None
        return self._name(writing)

    def close(self) -> None:
        """Lets go of the ranks' messages, and with them of the group's threads."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _sign(self, part: Path, run_id: str, done: Future[Any], written: Future[object]) -> None:
        """Leaves a digest of what this rank wrote, as the last thing that it writes."""
        try:
            done.result()
            own: Plain = {path.name: _digest(path) for path in part.glob(f"shard-{self._ranks.rank + 1:05}-*")}
            container.write(part / _signature(self._ranks.rank), _KIND_OF_RANK, {}, own, run_id)
        except BaseException as error:
            written.set_exception(error)
        else:
            written.set_result(None)

    def _name(self, writing: _Writing) -> Path:
        part = _part(writing.path)
        files: dict[str, Plain] = {}
        for path in self._signed(writing):
            found = container.read(path, _KIND_OF_RANK)
            if not isinstance(found.json, dict) or found.run_id != writing.run_id:
                raise unreadable(path, "it is of another run")
            files |= found.json
            path.unlink()
        container.write(part / MANIFEST, _KIND, {}, writing.header | {"files": files}, writing.run_id)
        if writing.path.exists():
            shutil.rmtree(writing.path)
        part.replace(writing.path)
        self._writing = None
        return writing.path

    def _signed(self, writing: _Writing) -> list[Path]:
        """The files in which the ranks leave the digests of what they wrote."""
        return [_part(writing.path) / _signature(rank) for rank in range(self._ranks.world)]


def load_folder(path: Path, ranks: Ranks, mesh: DeviceMesh | None = None) -> tuple[object, str]:
    """Return the nest of values of a checkpoint, and its run id.

    Any number of ranks may read it. What was in shards is spread over the mesh.
    """
    header = ranks.first(lambda: _header(path))
    failed = None
    try:
        _check_digests(path, header["files"], sorted(header["files"])[ranks.rank :: ranks.world])
    except (OSError, FileError) as error:
        failed = unreadable(path, str(error))
    ranks.all_well(failed)
    tensors = {name: _empty(form, mesh) for name, form in header["tensors"].items()}
    reader = HuggingFaceStorageReader(str(path))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as is meant, for one process
        load(tensors, storage_reader=reader, no_dist=ranks.world == 1)
    return unpack(path, header["nest"], tensors), header["run_id"]


def _header(path: Path) -> dict[str, Any]:
    with in_words():
        content = container.read(path / MANIFEST, _KIND)
    header: Any = content.json
    if not (
        _HEADER(header) and all(map(_SHARD.fullmatch, header["files"])) and all(map(_FORM, header["tensors"].values()))
    ):
        raise unreadable(path, f"its {MANIFEST} is malformed")
    return {**header, "run_id": content.run_id}


def _check_digests(path: Path, files: Mapping[str, str], own: Iterable[str]) -> None:
    """Raise unless the files are as they were written, and there are no others. Each rank reads `own`."""
    for found in path.glob("*.safetensors"):
        if found.name not in files:
            raise unreadable(path, f"{found.name} is of another checkpoint")
    for name in own:
        if _digest(path / name) != files[name]:
            raise unreadable(path, f"{name} is damaged, or of another checkpoint")


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


def _spread_name(placement: Placement) -> int | str:
    if isinstance(placement, Shard):
        return placement.dim
    if isinstance(placement, Replicate):
        return _WHOLE
    raise TypeError(f"A checkpoint holds tensors that are whole or in shards. Got one that is {placement}.")


def _empty(form: dict[str, Any], mesh: DeviceMesh | None) -> Tensor:
    dtype: torch.dtype = getattr(torch, form["dtype"])
    spread = form["spread"]
    if spread is None or mesh is None:
        return torch.zeros(form["shape"], dtype=dtype)
    placements: list[Placement] = [Replicate() if name == _WHOLE else Shard(int(name)) for name in spread]
    if len(placements) != mesh.ndim:
        placements = [*[Replicate()] * (mesh.ndim - 1), next((p for p in placements if p != Replicate()), Replicate())]
    return zeros(form["shape"], dtype=dtype, device_mesh=mesh, placements=placements)
