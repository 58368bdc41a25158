"""Damaged, edited, swapped and irregular files in the place of each file that fsla writes."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch

from faults.saved import Saved, same, saved_things
from faults.trials import SilentlyWrong, Trial, new_folder
from fsla._storage import _container as container

WAIT_S = 20.0
"""How long a refusal of a file may take, on a machine that is busy; on a quiet one it takes milliseconds."""
EDITED = "files: edited under a fitting digest"
FLIPS, CUTS, EDITS = 60, 12, 40
"""Trials for each kind of file."""


def trials(seed: int) -> Iterator[Trial]:
    """Yield the trials of all kinds of files."""
    saved_things()  # Outside of the time limits of trials.
    for kind in KINDS:
        yield from _damages(kind, seed)
        yield from _irregular(kind)
        if kind != "records of fit":
            yield from _edits(kind, seed)


KINDS = (
    "core checkpoint",
    "checkpoint of fit",
    "records of fit",
    "saved model (linear)",
    "saved model (forest)",
    "manifest of shards",
    "shard",
)


def _trial(category: str, name: str, kind: str, act: Callable[[Saved, Path], None], limit_s: float = WAIT_S) -> Trial:
    """Return the trial that acts on a copy, reads it, and compares."""

    def run() -> None:
        saved = saved_things()[kind]
        path = saved.copy_to(new_folder() / "copy")
        act(saved, path)
        result = saved.read(path)
        if not same(result, saved.expected):
            raise SilentlyWrong("another result was read")

    return Trial(category, f"{kind}: {name}", run, limit_s)


def _damages(kind: str, seed: int) -> Iterator[Trial]:
    """Flip bits, cut, append, and put another run's file there."""
    random = Random(f"{kind} {seed}")
    category = "files: damaged bytes"

    def flip(at: float, bit: int) -> Callable[[Saved, Path], None]:
        def act(saved: Saved, path: Path) -> None:
            data = bytearray(path.read_bytes())
            data[int(at * len(data))] ^= 1 << bit
            path.write_bytes(data)

        return act

    def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Saved, Path], None]:
        return lambda saved, path: (path.write_bytes(change(path.read_bytes())), None)[1]

    for i in range(FLIPS):
        at = random.random() if i % 3 else random.random() * 0.05  # The head is short and matters most.
        yield _trial(category, f"bit {i} flipped at {at:.4f}", kind, flip(at, random.randrange(8)))
    for i in range(CUTS):
        share = random.random()
        yield _trial(category, f"cut {i}", kind, rewrite(lambda data, share=share: data[: int(share * len(data))]))
    changes: dict[str, Callable[[bytes], bytes]] = {
        "empty": lambda data: b"",
        "a byte more": lambda data: data + b"\0",
        "twice": lambda data: data + data,
        "zeros": lambda data: bytes(len(data)),
        "noise": lambda data: random.randbytes(len(data)),
        "header of 2^63 bytes": lambda data: b"\xff" * 7 + b"\x7f" + data[8:],
        "a page of zeros inside": lambda data: data[:64] + bytes(64) + data[128:],
    }
    for name, change in changes.items():
        yield _trial(category, name, kind, rewrite(change))

    def swap(saved: Saved, path: Path) -> None:
        path.write_bytes(saved.other)

    if kind not in ("core checkpoint", "saved model (linear)", "saved model (forest)"):  # These belong to no run.
        yield _trial("files: swapped", "another run's", kind, swap)
    for other in KINDS:
        if other.partition(" (")[0] != kind.partition(" (")[0]:  # Another model is a model.

            def act(saved: Saved, path: Path, other: str = other) -> None:
                source = saved_things()[other]
                path.write_bytes((source.folder / source.file).read_bytes())

            yield _trial("files: swapped", f"replaced by a {other}", kind, act)
    for name, plant in {"pickle": _pickle, "torch.save": _torch_pickle}.items():
        yield _planted(kind, name, plant)


class _Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._marker),)


def _pickle(marker: Path) -> bytes:
    return pickle.dumps(_Bomb(marker))


def _torch_pickle(marker: Path) -> bytes:
    file = io.BytesIO()
    torch.save({"state": _Bomb(marker)}, file)
    return file.getvalue()


def _planted(kind: str, name: str, plant: Callable[[Path], bytes]) -> Trial:
    marker = new_folder() / "executed"
    trial = _trial("files: planted pickles", name, kind, lambda saved, path: (path.write_bytes(plant(marker)), None)[1])

    def run() -> None:
        try:
            trial.run()
        finally:
            if marker.exists():
                raise SilentlyWrong("a pickle was executed")

    return Trial(trial.category, trial.name, run, trial.limit_s)


def _irregular(kind: str) -> Iterator[Trial]:
    """Put something else than a regular file in the file's place."""

    def replaced(make: Callable[[Path], object]) -> Callable[[Saved, Path], None]:
        def act(saved: Saved, path: Path) -> None:
            path.unlink()
            make(path)

        return act

    def socket_at(path: Path) -> None:
        before = os.getcwd()
        os.chdir(path.parent)  # The names of sockets have at most 107 bytes.
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
        finally:
            os.chdir(before)

    kinds: dict[str, Callable[[Path], object]] = {
        "pipe": os.mkfifo,
        "socket": socket_at,
        "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
        "link to a pipe": lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe")),
        "link to itself": lambda path: path.symlink_to(path.name),
        "link to nothing": lambda path: path.symlink_to("nothing"),
        "folder": os.mkdir,
        "missing": lambda path: None,
    }
    for name, make in kinds.items():
        yield _trial("files: irregular", name, kind, replaced(make))

    def link_to_whole(saved: Saved, path: Path) -> None:
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")

    yield _trial("files: irregular", "link to the file", kind, link_to_whole)
    if os.geteuid():
        yield _trial("files: irregular", "unreadable", kind, lambda saved, path: path.chmod(0))


Place = tuple[str | int, ...]


def places(nest: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield the places of all values in a JSON nest, and the values."""
    yield place, nest
    if isinstance(nest, dict | list):
        for name, part in nest.items() if isinstance(nest, dict) else enumerate(nest):
            yield from places(part, (*place, name))


def edited(nest: Any, place: Place, change: Callable[[Any], Any]) -> Any:
    """Return a copy with another value at a place."""
    if not place:
        return change(nest)
    nest = dict(nest) if isinstance(nest, dict) else list(nest)
    nest[place[0]] = edited(nest[place[0]], place[1:], change)
    return nest


def hostile_values(value: Any) -> list[tuple[str, Callable[[Any], Any]]]:
    """Return changes that no undamaged file has in the place of a value."""
    changes: list[tuple[str, Callable[[Any], Any]]] = [
        ("an object", lambda old: {"x": 1}),
        ("a list", lambda old: [[]]),
        ("nested", lambda old: json.loads("[" * 500 + "]" * 500)),
    ]
    if isinstance(value, bool):
        changes.append(("a number", lambda old: 7))
    elif isinstance(value, int | float):
        changes += [("text", lambda old: "7"), ("-1", lambda old: -1), ("huge", lambda old: 10**30)]
    elif isinstance(value, str):
        changes += [("a number", lambda old: 7), ("other text", lambda old: "\x1b[2J no such name")]
    elif isinstance(value, list) and value:
        changes += [("one less", lambda old: old[:-1]), ("one twice", lambda old: [*old, old[-1]])]
    elif isinstance(value, dict) and value:
        changes += [
            ("without an entry", lambda old: dict(list(old.items())[1:])),
            ("an entry more", lambda old: {**old, "__class__": "x"}),
        ]
    return changes


def _edits(kind: str, seed: int) -> Iterator[Trial]:
    """Change the JSON or a tensor, and seal the file with a fitting digest."""
    random = Random(f"edits {kind} {seed}")

    def json_edit(draw: float, pick: float) -> Callable[[Saved, Path], None]:
        def act(saved: Saved, path: Path) -> None:
            content, about = read_any(path)
            options = list(places(content.json))
            place, value = options[int(draw * len(options))]
            changes = hostile_values(value)
            _, change = changes[int(pick * len(changes))]
            path.write_bytes(
                container.to_bytes(about["kind"], content.tensors, edited(content.json, place, change), content.run_id)
            )

        return act

    def tensor_edit(draw: float, pick: float) -> Callable[[Saved, Path], None]:
        def act(saved: Saved, path: Path) -> None:
            content, about = read_any(path)
            tensors = dict(content.tensors)
            if not tensors:
                raise ValueError("Nothing to edit.")
            name = sorted(tensors)[int(draw * len(tensors))]
            changes = hostile_tensors(tensors[name])
            change = changes[int(pick * len(changes))]
            if change is None:
                del tensors[name]
            else:
                tensors[name] = change
            path.write_bytes(container.to_bytes(about["kind"], tensors, content.json, content.run_id))

        return act

    def other_version(saved: Saved, path: Path) -> None:
        content, about = read_any(path)
        text = json.dumps(content.json).encode()
        path.write_bytes(container._sealed(about | {"fsla": "99.0"}, content.tensors, text, "fsla-0099"))

    for i in range(EDITS if kind != "core checkpoint" else 0):  # That one holds any nest of any shapes.
        yield _trial(EDITED, f"JSON {i}", kind, json_edit(random.random(), random.random()))
    if kind not in ("manifest of shards", "core checkpoint"):
        for i in range(EDITS // 2):
            yield _trial(EDITED, f"tensor {i}", kind, tensor_edit(random.random(), random.random()))
    yield _trial("files: other format", "version 99", kind, other_version)


def read_any(path: Path) -> tuple[container.Content, dict[str, str]]:
    """Return the content of a file of any kind, and what its head says of it."""
    data = path.read_bytes()
    about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    return container.from_bytes(path, about["kind"], data), {
        name: about[name] for name in ("fsla", "kind", "run") if name in about
    }


def hostile_tensors(t: torch.Tensor) -> list[torch.Tensor | None]:
    """Return tensors that no undamaged file has in the place of one; None removes it."""
    changes: list[torch.Tensor | None] = [None, t[None].clone(), t.flatten()[:-1].clone(), torch.zeros(3, 3, 3)]
    changes.append(t.to(torch.int32) if t.is_floating_point() else t.to(torch.float64))
    if t.is_floating_point():
        changes += [torch.full_like(t, math.nan), torch.full_like(t, math.inf)]
    return changes
