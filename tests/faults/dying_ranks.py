"""Checkpoint folders of two ranks: damaged and swapped files, and a rank that is killed while it writes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from random import Random

import torch

from faults.saved import same
from faults.trials import SilentlyWrong, Trial, new_folder
from launch import torchrun

FOLDERS, DEATH = "checkpoint folders of two ranks: bytes and swaps", "a rank that dies while it writes"
PROGRAM = "faults_ranks_program.py"
FLIPS = 30


@cache
def written(run: int) -> Path:
    """Run two ranks to step 4 and return their folder."""
    folder = new_folder() / "run"
    torchrun(PROGRAM, folder, "4", str(run))
    return folder


def trials(seed: int) -> Iterator[Trial]:
    """Yield damage to each file of a folder, and ranks that die at each change of a file."""
    random = Random(f"ranks {seed}")
    folders = written(0), written(1)
    names = sorted(path.name for path in _checkpoint(folders[0]).iterdir())
    for name in names:
        for i in range(FLIPS):
            yield Trial(FOLDERS, f"{name[:12]}: bit {i}", partial(_read, _flip(name, random.random(), i % 8)), 30.0)
        for i in range(5):
            yield Trial(FOLDERS, f"{name[:12]}: cut {i}", partial(_read, _cut(name, random.random())), 30.0)
        for label, act in _irregular(name).items():
            yield Trial(FOLDERS, f"{name[:12]}: {label}", partial(_read, act), 30.0)
        yield Trial(FOLDERS, f"{name[:12]}: another run's", partial(_read, _swap(name)), 30.0)
    yield Trial(FOLDERS, "a shard more", partial(_read, _one_more), 30.0)
    for at in (2, 5, 8) if seed == 0 else (3, 6, 10):
        for rank in (0, 1):
            yield Trial(DEATH, f"rank {rank}, change {at}", partial(_die, rank, at), 300.0)


def _checkpoint(folder: Path) -> Path:
    (path,) = (path for path in folder.iterdir() if path.is_dir() and path.name.startswith("checkpoint-"))
    return path


Act = Callable[[Path], None]


def _flip(name: str, at: float, bit: int) -> Act:
    def act(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[int(at * len(data))] ^= 1 << bit
        (folder / name).write_bytes(data)

    return act


def _cut(name: str, share: float) -> Act:
    def act(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(share * len(data))])

    return act


def _swap(name: str) -> Act:
    def act(folder: Path) -> None:
        other = _checkpoint(written(1))
        start = name[:11]
        (source,) = (path for path in other.iterdir() if path.name.startswith(start))
        (folder / name).write_bytes(source.read_bytes())

    return act


def _irregular(name: str) -> dict[str, Act]:
    def replaced(make: Callable[[Path], object]) -> Act:
        def act(folder: Path) -> None:
            (folder / name).unlink()
            make(folder / name)

        return act

    return {
        "missing": replaced(lambda path: None),
        "pipe": replaced(os.mkfifo),
        "folder": replaced(os.mkdir),
        "link to /dev/zero": replaced(lambda path: path.symlink_to("/dev/zero")),
        "link to itself": replaced(lambda path: path.symlink_to(path.name)),
    }


def _one_more(folder: Path) -> None:
    (shard,) = [path for path in folder.iterdir() if path.name.startswith("shard-00001")][:1]
    (folder / "shard-00003-model-00001-of-00001.safetensors").write_bytes(shard.read_bytes())


@cache
def _whole() -> dict[str, torch.Tensor]:
    return _load(_checkpoint(written(0)))


def _load(path: Path) -> dict[str, torch.Tensor]:
    from fsla._state_tree import flatten
    from fsla.distributed import get_group
    from fsla.train import _stores as stores

    value, _ = stores.load(path, get_group())
    return flatten(value)[0]


def _read(act: Act) -> None:
    """Read a damaged copy of a checkpoint in one process."""
    expected = _whole()
    copy = new_folder() / _checkpoint(written(0)).name
    shutil.copytree(_checkpoint(written(0)), copy)
    act(copy)
    if not same(_load(copy), expected):
        raise SilentlyWrong("another checkpoint was read")


def _die(rank: int, at: int) -> None:
    """Kill a rank at a change of a file; the next run must end as one that nothing disturbed."""
    undisturbed, folder = new_folder(), new_folder() / "run"
    torchrun(PROGRAM, undisturbed / "run", "8", "0", str(undisturbed / "end"))
    torchrun(PROGRAM, folder, "8", "0", succeeds=False, FSLA_TEST_DIES=f"{rank}:{at}")
    torchrun(PROGRAM, folder, "8", "0", str(folder.parent / "end"))
    if (folder.parent / "end").read_text() != (undisturbed / "end").read_text():
        raise SilentlyWrong("the run ended with other weights")


assert sys.platform == "linux"
