"""A run whose rows live on several ranks, in a folder: a file for each rank, and a manifest with their digests.

    manifest.fsla     rank-0-of-2/step-400.safetensors     rank-1-of-2/step-400.safetensors

A rank's file has a name of its own for every step and number of ranks. Rank 0 writes the manifest last, when all files
are there, and then removes files that the manifest does not name. A process that is killed at any moment leaves the run
that was saved before, whole. The ranks may be on several machines with a common folder: each writes to a folder of its
own. `fsla._container` is the format of all files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fsla import _container as container
from fsla._checks import whole_number
from fsla._json_values import items, number, record, text
from fsla._tree import Tree
from fsla.contrib._lazy_rows import LazyRows
from fsla.problems._shards import Shard
from fsla.train._checkpoint import CheckpointError, in_words, load_nest, save_nest

MANIFEST = "manifest.fsla"
_KIND = "the manifest of a run on several ranks"
_KIND_OF_RANK = "the rows of a rank"
_MANIFEST = record(k=number(int, 0), n=number(int, 1), world=number(int, 1), digests=items(text))


class _Manifest(NamedTuple):
    """The run that is saved in a folder."""

    k: int
    n: int
    world: int
    digests: list[str]
    """Of the ranks' files."""


class Saved(NamedTuple):
    """What `load_shards` returns."""

    run: dict[str, Any]
    """For `LazyRows.restored`."""
    also: Any
    """What was given to `save_shards`; None after `reshard`."""


def save_shards(
    folder: str | Path, run: LazyRows, also: object = None, *, group: dist.ProcessGroup | None = None
) -> None:
    """Writes a run; every rank must call it.

    Args:
        also: what else this rank goes on from, such as its samplers' `state_dict`.
    """
    folder = Path(folder)
    shard = run.shard
    together = shard.world > 1
    _save(folder, run.k, shard, {"run": run.state_dict(), "also": also})
    if together:
        dist.barrier(group)
    if shard.rank == 0:
        _publish(folder, run.k, shard)
    if together:
        dist.barrier(group)


def load_shards(folder: str | Path, shard: Shard, device: torch.device | str = "cpu") -> Saved:
    """Reads this rank's part of a run that as many ranks have written."""
    folder = Path(folder)
    saved = _manifest(folder)
    _, n, world, _ = saved
    if n != shard.n:
        raise CheckpointError(
            f"The run in {folder} must be of {shard.n} samples, as this one is. It is of {n}. Name another folder."
        )
    if world != shard.world:
        raise CheckpointError(
            f"The run in {folder} must be of {_ranks(shard.world)}, as this one is. It is of {_ranks(world)}. Start as "
            f"many processes, or first call fsla.contrib.reshard({str(folder)!r}, {shard.world}) in one."
        )
    return _load(folder, saved, shard, device)


def reshard(folder: str | Path, world: int) -> None:
    """Rewrites a saved run for another number of ranks. Call it in one process.

    ω, v and all else that ranks have in common stay; rows go to their new owners. What a rank saved for itself (`also`)
    is left out: samplers begin anew.
    """
    whole_number(world, "world", "reshard")
    folder = Path(folder)
    saved = _manifest(folder)
    k, n, before, _ = saved
    if world > n:
        raise ValueError(f"A run of {n} samples can be on at most as many ranks. Got {world}. Name fewer.")
    if world == before:
        return
    common = _load(folder, saved, Shard(n, 0, before), "cpu").run
    state = common["state"]
    decay = common["rows"]["decay"]
    del common  # and with it a rank's rows
    for shard in Shard(n, 0, world).all():
        parts = [_cut(folder, saved, other, shard) for other in Shard(n, 0, before).all() if _overlap(other, shard)]
        rows = {
            "lam": _joined([part["lam"] for part in parts]),
            "d": _joined([part["d"] for part in parts]),
            "last": torch.cat([part["last"] for part in parts]),
            "decay": decay,
        }
        run = {"shard": tuple(shard), "state": state, "rows": rows}
        _save(folder, k, shard, {"run": run, "also": None})
    _publish(folder, k, Shard(n, 0, world))


def _cut(folder: Path, saved: _Manifest, source: Shard, shard: Shard) -> dict[str, Any]:
    """The rows in a file that belong to a new shard."""
    rows = _load(folder, saved, source, "cpu").run["rows"]
    begin = max(source.first, shard.first) - source.first
    end = min(source.last, shard.last) - source.first

    def own(t: Tensor) -> Tensor:
        return t[begin:end].clone()

    lam = {name: own(t) for name, t in rows["lam"].items()}
    d = {name: own(t) for name, t in rows["d"].items()}
    return {"lam": lam, "d": d, "last": own(rows["last"])}


def _joined(parts: list[Tree]) -> Tree:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _overlap(a: Shard, b: Shard) -> bool:
    return max(a.first, b.first) < min(a.last, b.last)


def _path(folder: Path, k: int, shard: Shard) -> Path:
    return folder / f"rank-{shard.rank}-of-{shard.world}" / f"step-{k}.safetensors"


def _save(folder: Path, k: int, shard: Shard, content: object) -> None:
    path = _path(folder, k, shard)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_nest(path, _KIND_OF_RANK, content)


def _ranks(world: int) -> str:
    return "1 rank" if world == 1 else f"{world} ranks"


def _publish(folder: Path, k: int, shard: Shard) -> None:
    """Makes the files of step k the run that is saved, and removes those of others."""
    named = [_path(folder, k, each) for each in shard.all()]
    with in_words():
        saved = _Manifest(k, shard.n, shard.world, [container.read_digest(path) for path in named])
        container.write(folder / MANIFEST, _KIND, {}, cast(Any, saved._asdict()))
    for path in folder.glob("rank-*-of-*/step-*.safetensors"):
        if path not in named:
            path.unlink(missing_ok=True)
    for place in folder.glob("rank-*-of-*"):
        if not any(place.iterdir()):
            place.rmdir()


def _manifest(folder: Path) -> _Manifest:
    try:
        found: Any = container.read(folder / MANIFEST, _KIND).json
        if not _MANIFEST(found) or not len(found["digests"]) == found["world"] <= found["n"]:
            raise container.unreadable(folder / MANIFEST, "it is malformed")
    except ValueError as error:
        raise CheckpointError(f"{folder} must hold a run that fsla.contrib.save_shards wrote. {error}") from None
    return _Manifest(*(found[name] for name in _Manifest._fields))


def _load(folder: Path, saved: _Manifest, shard: Shard, device: torch.device | str) -> Saved:
    path = _path(folder, saved.k, shard)
    found, content = load_nest(path, _KIND_OF_RANK, device)
    if content.digest != saved.digests[shard.rank]:
        raise CheckpointError(f"Cannot use {path}: it is not the file that {MANIFEST} names. Begin anew.")
    run = found.get("run") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(run, dict) or run.get("shard") != tuple(shard):
        raise CheckpointError(
            f"{path} must hold rank {shard.rank} of {_ranks(shard.world)}. It holds something else. Begin anew."
        )
    return Saved(run, found.get("also"))
