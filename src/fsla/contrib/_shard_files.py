"""A run whose rows live on several ranks, in a folder: a file for each rank, and a manifest with their digests.

    manifest.fsla     rank-0-of-2/step-400.safetensors     rank-1-of-2/step-400.safetensors

The name of a rank's file holds the step and the number of ranks. Rank 0 writes the manifest last, when all files are
there, and then removes files that the manifest does not name. A process that is killed at any moment leaves the run
that was saved before, whole. The ranks may be on several machines with a common folder: each writes to its own folder.
`fsla._storage._container` is the format of all files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fsla._checks import file_path, instance, target_device, whole_number
from fsla._storage import _container as container
from fsla._storage._json_values import items, number, record, text
from fsla._tree import Tree
from fsla.contrib._lazy_rows import LazyRowOptimizer
from fsla.distributed._shards import IndexRange
from fsla.train._checkpoint import CheckpointError, disk_errors, file_errors, load_nest, save_nest

MANIFEST = "manifest.fsla"
_KIND = "the manifest of a run on several ranks"
_KIND_OF_RANK = "the rows of a rank"
_MANIFEST = record(
    step_count=number(int, 0), num_samples=number(int, 1), world_size=number(int, 1), digests=items(text)
)


class _Manifest(NamedTuple):
    """The run that is saved in a folder."""

    step_count: int
    num_samples: int
    world_size: int
    digests: list[str]
    """Of the ranks' files."""


class LoadedShards(NamedTuple):
    """Result of `load_shards`.

    Args:
        state: state for `LazyRowOptimizer.load_state_dict`.
        extra: `extra_state` of `save_shards`; None after `reshard`.

    Examples:
        >>> fsla.contrib.save_shards("run", run, extra_state={"epoch": 3})
        >>> fsla.contrib.load_shards("run", run.index_range).extra
        {'epoch': 3}
    """

    state: dict[str, Any]
    """For `LazyRowOptimizer.load_state_dict`."""
    extra: Any
    """What `save_shards` was given as `extra_state`; None after `reshard`."""


def save_shards(
    folder: str | Path,
    run: LazyRowOptimizer[Any],
    extra_state: object = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a run to a folder, a file for each rank; every rank must call it.

    Args:
        folder: the folder.
        run: the run.
        extra_state: what else this rank resumes from, such as its samplers' `state_dict`.
        group: the processes.

    Raises:
        CheckpointError: if a file cannot be written.

    Examples:
        >>> import os
        >>> fsla.contrib.save_shards("run", run)
        >>> sorted(os.listdir("run"))
        ['manifest.fsla', 'rank-0-of-1']
    """
    folder = file_path(folder, "folder", "save_shards")
    instance(run, LazyRowOptimizer, "run", "save_shards", "a fsla.LazyRowOptimizer")
    index_range = run.index_range
    several = index_range.world_size > 1
    _save(folder, run.step_count, index_range, {"state": run.state_dict(), "extra": extra_state})
    if several:
        dist.barrier(group)
    if index_range.rank == 0:
        _publish(folder, run.step_count, index_range)
    if several:
        dist.barrier(group)


def load_shards(folder: str | Path, index_range: IndexRange, device: torch.device | str = "cpu") -> LoadedShards:
    """Return this rank's part of a run that the same number of ranks wrote.

    Args:
        folder: the folder of `save_shards`.
        index_range: samples that this rank owns.
        device: where the tensors go.

    Returns:
        The state, and what else was saved with it.

    Raises:
        CheckpointError: if the run has other samples or another number of ranks, or a file is damaged.

    Examples:
        >>> fsla.contrib.save_shards("run", run)
        >>> run.load_state_dict(fsla.contrib.load_shards("run", run.index_range).state)
        >>> run.step_count
        1
    """
    folder = file_path(folder, "folder", "load_shards")
    instance(index_range, IndexRange, "index_range", "load_shards", "a fsla.distributed.IndexRange")
    device = target_device(device, "device", "load_shards")
    manifest = _manifest(folder)
    if manifest.num_samples != index_range.num_samples:
        raise CheckpointError(
            f"The run in {folder} has {manifest.num_samples} samples, and this one has {index_range.num_samples}. Name "
            "another folder."
        )
    if manifest.world_size != index_range.world_size:
        raise CheckpointError(
            f"The run in {folder} is of {_count_ranks(manifest.world_size)}, and this one of "
            f"{_count_ranks(index_range.world_size)}. Start as many processes, or first call "
            f"fsla.contrib.reshard({str(folder)!r}, {index_range.world_size}) in one."
        )
    return _load(folder, manifest, index_range, device)


def reshard(folder: str | Path, world_size: int) -> None:
    """Rewrite a saved run for another number of ranks. Call it in one process.

    ω, v and all else that ranks have in common stay, and rows go to their new owners. What a rank saved for itself
    (`extra_state`) is left out: samplers begin anew.

    Args:
        folder: the folder of `save_shards`.
        world_size: the new number of ranks.

    Raises:
        ValueError: if there are fewer samples than ranks.
        CheckpointError: if the folder holds no run.

    Examples:
        >>> import os
        >>> fsla.contrib.save_shards("run", run)
        >>> fsla.contrib.reshard("run", 2)
        >>> sorted(os.listdir("run"))
        ['manifest.fsla', 'rank-0-of-2', 'rank-1-of-2']
    """
    whole_number(world_size, "world_size", "reshard")
    folder = file_path(folder, "folder", "reshard")
    manifest = _manifest(folder)
    if world_size > manifest.num_samples:
        raise ValueError(
            f"A run of {manifest.num_samples} samples can be on at most as many ranks. Got {world_size}. Name fewer."
        )
    if world_size == manifest.world_size:
        return
    old = IndexRange(manifest.num_samples, 0, manifest.world_size)
    new = IndexRange(manifest.num_samples, 0, world_size)
    common = _load(folder, manifest, old, "cpu").state
    state = common["state"]
    decay = common["rows"]["decay"]
    del common  # and with it a rank's rows
    for target in new.full():
        parts = [_cut(folder, manifest, other, target) for other in old.full() if _overlap(other, target)]
        rows = {
            "lam": _joined([part["lam"] for part in parts]),
            "d": _joined([part["d"] for part in parts]),
            "last": torch.cat([part["last"] for part in parts]),
            "decay": decay,
        }
        run = {"index_range": target, "state": state, "rows": rows}
        _save(folder, manifest.step_count, target, {"state": run, "extra": None})
    _publish(folder, manifest.step_count, new)


def _cut(folder: Path, manifest: _Manifest, source: IndexRange, target: IndexRange) -> dict[str, Any]:
    """The rows in a rank's file that belong to a new owner."""
    rows = _load(folder, manifest, source, "cpu").state["rows"]
    begin = max(source.start, target.start) - source.start
    end = min(source.stop, target.stop) - source.start

    def cut(t: Tensor) -> Tensor:
        return t[begin:end].clone()

    lam = {name: cut(t) for name, t in rows["lam"].items()}
    d = {name: cut(t) for name, t in rows["d"].items()}
    return {"lam": lam, "d": d, "last": cut(rows["last"])}


def _joined(parts: list[Tree]) -> Tree:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _overlap(a: IndexRange, b: IndexRange) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)


def _path(folder: Path, step_count: int, owner: IndexRange) -> Path:
    return folder / f"rank-{owner.rank}-of-{owner.world_size}" / f"step-{step_count}.safetensors"


def _save(folder: Path, step_count: int, owner: IndexRange, content: object) -> None:
    path = _path(folder, step_count, owner)
    with disk_errors(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
    save_nest(path, _KIND_OF_RANK, content)


def _count_ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _publish(folder: Path, step_count: int, owner: IndexRange) -> None:
    """Make the files of a step the run that is saved, and remove those of others."""
    named = [_path(folder, step_count, each) for each in owner.full()]
    with disk_errors(folder), file_errors():
        digests = [container.read_digest(path) for path in named]
        manifest = _Manifest(step_count, owner.num_samples, owner.world_size, digests)
        container.write(folder / MANIFEST, _KIND, {}, cast(Any, manifest._asdict()))
    with disk_errors(folder):
        for path in folder.glob("rank-*-of-*/step-*.safetensors"):
            if path not in named:
                path.unlink(missing_ok=True)
        for place in folder.glob("rank-*-of-*"):
            if not any(place.iterdir()):
                place.rmdir()


def _manifest(folder: Path) -> _Manifest:
    try:
        content: Any = container.read(folder / MANIFEST, _KIND).json
        if not _MANIFEST(content) or not len(content["digests"]) == content["world_size"] <= content["num_samples"]:
            raise container.unreadable(folder / MANIFEST, "it is malformed")
    except ValueError as error:
        raise CheckpointError(f"{folder} holds no run of fsla.contrib.save_shards. {error}") from None
    return _Manifest(*(content[name] for name in _Manifest._fields))


def _load(folder: Path, manifest: _Manifest, owner: IndexRange, device: torch.device | str) -> LoadedShards:
    path = _path(folder, manifest.step_count, owner)
    saved, file = load_nest(path, _KIND_OF_RANK, device)
    if file.digest != manifest.digests[owner.rank]:
        raise CheckpointError(f"Cannot use {path}: it is not the file that {MANIFEST} names. Begin anew.")
    state = saved.get("state") if isinstance(saved, dict) else None
    if not isinstance(saved, dict) or not isinstance(state, dict) or state.get("index_range") != owner:
        raise CheckpointError(
            f"{path} does not hold rank {owner.rank} of {_count_ranks(owner.world_size)}. Begin anew."
        )
    return LoadedShards(state, saved.get("extra"))
