"""Full and read-only disks, missing and strange folders: refused in words, and what was there stays."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fsla
from faults.children import run_child
from faults.kills import results
from faults.saved import _fitted_model, _lazy_run, run_fit
from faults.trials import Refused, SilentlyWrong, Trial, new_folder
from fsla.contrib import save_shards
from fsla.train import save_checkpoint

CATEGORY, TRAPS = "full disks and strange places", "files of the user in the way"
Writer = Callable[[Path], Any]


def writers() -> dict[str, Writer]:
    """Return what writes a file or a folder at a path."""
    model, run = _fitted_model(0, "linear"), _lazy_run(0)
    return {
        "save_checkpoint": lambda path: save_checkpoint(path, {"a": torch.zeros(5000)}),
        "fit": lambda path: run_fit(path, 4),
        "save_shards": lambda path: save_shards(path, run),
        "DataModel.save": model.save,
        "CleaningResult.save": results()[0].save,
    }


def trials(seed: int) -> Iterator[Trial]:
    """Yield every writer at every bad place, and the traps."""
    for name, write in writers().items():
        for label, place in _PLACES.items():
            yield Trial(CATEGORY, f"{name}: {label}", partial(_at, write, place))
        for limit in (0, 1000, 20_000):
            yield Trial(CATEGORY, f"{name}: files of at most {limit} bytes", partial(_limited, write, limit))
        yield Trial(CATEGORY, f"{name}: no file descriptors left", partial(_limited, write, 8, resource.RLIMIT_NOFILE))
    yield Trial(CATEGORY, "fit: /dev/full as records", partial(_at, lambda path: run_fit(path, 4), _with_full_records))
    for name, trap in _TRAPS.items():
        yield Trial(TRAPS, name, trap)


def _file_in_the_way(folder: Path) -> Path:
    (folder / "file").write_text("precious")
    return folder / "file" / "x"


def _read_only(folder: Path) -> Path:
    folder.chmod(0o500)
    return folder / "x"


def _with_full_records(folder: Path) -> Path:
    (folder / "x").mkdir()
    (folder / "x" / "records.jsonl").symlink_to("/dev/full")
    return folder / "x"


_PLACES: dict[str, Callable[[Path], Path]] = {
    "below a file": _file_in_the_way,
    "a name of 300 bytes": lambda folder: folder / ("x" * 300),
    "in /proc": lambda folder: Path("/proc/fsla/x"),
    "below a device": lambda folder: Path("/dev/null/x"),
    "a path of 5000 bytes": lambda folder: folder.joinpath(*["y" * 100] * 50),
    "read-only": _read_only,
    "a link to itself": lambda folder: (folder / "x").symlink_to("x") or folder / "x",
    "an ended link": lambda folder: (folder / "x").symlink_to("gone/at/all") or folder / "x",
    "a pipe": lambda folder: os.mkfifo(folder / "x") or folder / "x",
    "a missing folder": lambda folder: folder / "a" / "b",
}


def _at(write: Writer, place: Callable[[Path], Path]) -> None:
    """Write at a place. Where that works, something must be there."""
    path = place(new_folder())
    write(path)
    if not path.exists():
        raise SilentlyWrong("nothing was written")


def _limited(write: Writer, limit: int, kind: int = resource.RLIMIT_FSIZE) -> None:
    """Write in a child that has little room, over what is there; that must stay, whole, where it is refused."""
    folder = new_folder()
    path = folder / "x"
    write(path)
    before = _content(path)

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit, hard))
        try:
            write(path)
        finally:
            resource.setrlimit(kind, (hard, hard))

    try:
        run_child(work, folder)
    except Refused:
        if _content(path).keys() - {"lock"} != before.keys() - {"lock"}:
            raise SilentlyWrong("other files are there than before") from None
        raise


def _content(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def _keeps(act: Callable[[Path, Path], Any]) -> Callable[[], None]:
    """Return what acts on a folder beside a file of the user's, which must stay as it was."""

    def run() -> None:
        folder = new_folder()
        precious = folder / "thesis.txt"
        precious.write_text("precious")
        refused = None
        try:
            act(folder, precious)
        except (ValueError, OSError) as error:
            refused = error
        if not precious.exists() or precious.read_text() != "precious":
            raise SilentlyWrong("a file of the user's was lost or changed") from refused
        if refused:
            raise refused

    return run


def _link_in_run(name: str) -> Callable[[Path, Path], None]:
    def act(folder: Path, precious: Path) -> None:
        (folder / "run").mkdir()
        (folder / "run" / name).symlink_to(precious)
        run_fit(folder / "run", 4)

    return act


def _own_file_in_out(folder: Path, precious: Path) -> None:
    results()[0].save(folder / "out")
    moved = folder / "out" / "notes.txt"
    moved.write_text("notes")
    try:
        results()[1].save(folder / "out")
    finally:
        if not moved.exists() or moved.read_text() != "notes":
            precious.write_text("lost")


def _foreign_folder(folder: Path, precious: Path) -> None:
    results()[0].save(folder)


def _temporary_names(folder: Path, precious: Path) -> None:
    names = [".x.1.tmp", ".x.fsla-00000000-1-0123456789abcdef.tmp", ".thesis.fsla-x.tmp", "x.tmp"]
    for name in names:
        (folder / name).write_text("another program's")
    save_checkpoint(folder / "x", [1])
    fsla.train.load_checkpoint(folder / "x")
    if not all((folder / name).exists() for name in names):
        precious.write_text("lost")


_TRAPS = {
    "lock is a link to a file": _keeps(_link_in_run("lock")),
    "records.jsonl is a link to a file": _keeps(_link_in_run("records.jsonl")),
    "a checkpoint is a link to a file": _keeps(_link_in_run("checkpoint-00000004.safetensors")),
    "the target of save_checkpoint is a link": _keeps(
        lambda folder, precious: ((folder / "x").symlink_to(precious), save_checkpoint(folder / "x", [1]))
    ),
    "out holds a file of the user's": _keeps(_own_file_in_out),
    "out is a folder of other files": _keeps(_foreign_folder),
    "temporary files of other programs": _keeps(_temporary_names),
    "checkpoint-00000004.safetensors.part is a folder of the user's": _keeps(
        lambda folder, precious: (
            (folder / "run" / "mine").mkdir(parents=True),
            run_fit(folder / "run", 4),
        )
    ),
}
