"""Checkpoints of several ranks: a folder, of which each rank writes a part while the run goes on.

    checkpoint-00000100/
        shard-00001-….safetensors    the tensors, or parts of tensors, that a rank wrote
        rank-00001.json              a digest of that file
        nest.json                    what is around the tensors, and their forms

PyTorch's distributed checkpoints say who writes what, and read it again on another number of ranks. The folder has
another name until all of it is written. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping
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

from fsla._files import publish_file
from fsla._tree import is_sharded
from fsla.distributed import Ranks
from fsla.train._checkpoint import CheckpointError, pack, unpack, unreadable

FORMAT = "fsla-checkpoint-folder-1"
PART = ".part"
"""What the name of a folder ends with that is not written to its end."""
_NEST = "nest.json"
_WHOLE = "whole"
Form = dict[str, Any]


@dataclass
class _Writing:
    """A checkpoint under way."""

    path: Path
    header: str
    future: Future[object]


class FolderWriter:
    """Writes checkpoints of all ranks, one after the other. Every rank must call the same methods in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo")  # messages of its own, in a thread
        self._writing: _Writing | None = None

    def begin(self, path: Path, value: object) -> None:
        """Copies a nest of values, and writes the copy while the caller goes on; waits for the one before."""
        self.finish()
        nest, held = pack(value)
        part = _part(path)
        self._ranks.first(lambda: _emptied(part), shown=(OSError,))
        forms = {name: _form(t) for name, t in held.items()}
        header = json.dumps({"format": FORMAT, "world": self._ranks.world, "nest": nest, "tensors": forms})
        future: Any = async_save(
            {name: t.detach() for name, t in held.items()},
            storage_writer=HuggingFaceStorageWriter(str(part), save_distributed=True),
            process_group=self._group,
        )
        written: Future[object] = Future()
        future.add_done_callback(lambda done: self._sign(part, done, written))
        self._writing = _Writing(path, header, written)

    def look(self) -> Path | None:
        """On rank 0: the checkpoint that was under way, if all of it is written by now; it has its name then."""
        writing = self._writing
        if not self._ranks.is_first or writing is None or not writing.future.done():
            return None
        if writing.future.exception() is not None:
            return None  # `finish` says so
        signed = [_part(writing.path) / _signature(rank) for rank in range(self._ranks.world)]
        return self._name(writing) if all(path.exists() for path in signed) else None

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

    def _sign(self, part: Path, done: Future[Any], written: Future[object]) -> None:
        """Leaves a digest of what this rank wrote, as the last thing that it writes."""
        try:
            done.result()
            own = {path.name: _digest(path) for path in part.glob(f"shard-{self._ranks.rank + 1:05}-*")}
            publish_file(part / _signature(self._ranks.rank), json.dumps(own).encode())
        except BaseException as error:
            written.set_exception(error)
        else:
            written.set_result(None)

    def _name(self, writing: _Writing) -> Path:
        part = _part(writing.path)
        publish_file(part / _NEST, writing.header.encode())
        if writing.path.exists():
            shutil.rmtree(writing.path)
        part.replace(writing.path)
        self._writing = None
        return writing.path


def load_folder(path: Path, ranks: Ranks, mesh: DeviceMesh | None = None) -> object:
    """The nest of values of a checkpoint, on any number of ranks; what was in shards is spread over the mesh."""
    header = ranks.first(lambda: _header(path))
    _check_digests(path, header, ranks)
    tensors = {name: _empty(form, mesh) for name, form in header["tensors"].items()}
    reader = HuggingFaceStorageReader(str(path))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as is meant, for one process
        load(tensors, storage_reader=reader, no_dist=ranks.world == 1)
    return unpack(path, header["nest"], tensors)


def _header(path: Path) -> dict[str, Any]:
    try:
        header = json.loads((path / _NEST).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, f"its nest cannot be read: {error}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else None
        raise CheckpointError(
            f"{path} must be a checkpoint of the format {FORMAT}. It has {found!r}. Remove it to begin anew, or resume "
            "it with the version of fsla that wrote it."
        )
    if not isinstance(header.get("world"), int) or not isinstance(header.get("tensors"), dict):
        raise unreadable(path, "its nest has no tensors")
    return header


def _check_digests(path: Path, header: Mapping[str, Any], ranks: Ranks) -> None:
    """Raises unless the files are as they were written; each rank looks at some of them."""
    failed = None
    try:
        for rank in range(ranks.rank, header["world"], ranks.world):
            signed = json.loads((path / _signature(rank)).read_bytes())
            for name, digest in signed.items():
                if Path(name).name != name or _digest(path / name) != digest:
                    raise ValueError(f"what {name} holds is not what was written")
    except (OSError, ValueError, AttributeError) as error:
        failed = unreadable(path, str(error))
    ranks.all_well(failed)


def _emptied(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _part(path: Path) -> Path:
    return path.with_name(path.name + PART)


def _signature(rank: int) -> str:
    return f"rank-{rank + 1:05}.json"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _form(t: Tensor) -> Form:
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


def _empty(form: Form, mesh: DeviceMesh | None) -> Tensor:
    dtype = getattr(torch, str(form["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"A checkpoint must hold tensors of a dtype of torch. Got {form['dtype']!r}.")
    spread = form["spread"]
    if spread is None or mesh is None:
        return torch.zeros(form["shape"], dtype=dtype)
    placements: list[Placement] = [Replicate() if name == _WHOLE else Shard(int(name)) for name in spread]
    if len(placements) != mesh.ndim:
        placements = [*[Replicate()] * (mesh.ndim - 1), next((p for p in placements if p != Replicate()), Replicate())]
    return zeros(form["shape"], dtype=dtype, device_mesh=mesh, placements=placements)
