"""Checkpoints: bit for bit or refused, whatever happened to the file."""

import errno
import json
import os
import re
import subprocess
import sys
from collections import Counter, namedtuple
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsla
from fsla._storage import _container as container
from fsla._storage import _files as files
from fsla.algorithms._orders import AlternatingState
from fsla.steps import Variable
from fsla.train import CheckpointError, load_checkpoint, save_checkpoint
from fsla.train import _checkpoint as checkpoint


def state() -> AlternatingState:
    lam = {"a": torch.arange(3.0), "b": torch.tensor(-0.0)}
    omega = {"w": torch.randn(2, 2, generator=torch.Generator().manual_seed(0))}
    v = {"w": torch.tensor([1, 2], dtype=torch.bfloat16)}
    memory = {"moments": {"w": torch.tensor(2.0)}}
    direction = {"a": torch.ones(3), "b": lam["b"]}
    trajectory = ((lam, 0.5), (lam, torch.tensor(0.25)))
    return AlternatingState(3, Variable(lam), Variable(omega, memory), direction, None, Variable(v), trajectory)


VALUE = {
    "state": state(),
    "numbers": [1, 0.1, -0.0, True, None, "text \u2113", float("inf"), 10**30],
    "kinds": (torch.tensor([True, False]), torch.zeros(0, 3), torch.tensor(2**40), torch.tensor([1 + 2j])),
    "tensor": {"dict": ()},
    "a/b": {"~1": torch.ones(1), "/": torch.zeros(1)},
    "numbers of parameters": {0: {"step": torch.tensor(3.0)}, 1: {"step": torch.tensor(4.0)}},
    "milestones": Counter({4: 1, 11: 2}),
    "point": fsla.Point({"a": torch.ones(2)}, {"w": torch.ones(1)}),
}


def with_sign(x) -> object:
    """All that a nest is: types, names, numbers and the bits of its tensors."""
    if isinstance(x, torch.Tensor):
        return "tensor", str(x.dtype), tuple(x.shape), bytes(x.reshape(-1).view(torch.uint8).tolist())
    if isinstance(x, AlternatingState | fsla.Point):
        return type(x).__name__, tuple(with_sign(getattr(x, f.name)) for f in fields(x))
    if isinstance(x, Mapping):
        return isinstance(x, Counter), tuple((name, with_sign(part)) for name, part in x.items())
    if isinstance(x, tuple | list):
        return type(x).__name__, tuple(map(with_sign, x))
    return type(x).__name__, repr(x)


@pytest.mark.parametrize("kind", [Path, str])
def test_checkpoint_round_trip_keeps_every_type(tmp_path, kind):
    save_checkpoint(kind(tmp_path / "x"), VALUE)
    loaded = load_checkpoint(kind(tmp_path / "x"))
    assert with_sign(loaded) == with_sign(VALUE)
    assert loaded["state"].lam.value["b"] is loaded["state"].direction["b"]
    assert [f.name for f in tmp_path.iterdir()] == ["x"]


def test_load_checkpoint_with_flipped_bit_raises(tmp_path):
    """One bit flipped, each bit of a byte in turn over the bytes of the file."""
    save_checkpoint(tmp_path / "x", VALUE)
    whole = (tmp_path / "x").read_bytes()
    refused = []
    for i in range(len(whole)):
        damaged = bytearray(whole)
        damaged[i] ^= 1 << i % 8
        (tmp_path / "y").write_bytes(damaged)
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(tmp_path / "y")
        refused.append(str(caught.value))
    assert all(str(tmp_path / "y") in message for message in refused)
    assert len(refused) == len(whole)


def test_load_checkpoint_of_wrong_length_raises(tmp_path):
    save_checkpoint(tmp_path / "x", VALUE)
    whole = (tmp_path / "x").read_bytes()
    for damaged in (b"", b"junk", *(whole[:n] for n in range(1, len(whole), 37)), whole + b"0", whole[8:]):
        (tmp_path / "y").write_bytes(damaged)
        with pytest.raises(CheckpointError, match="Remove it"):
            load_checkpoint(tmp_path / "y")


def crafted(path: Path, nest: object, **tensors: torch.Tensor) -> Path:
    """A checkpoint with a fitting digest around any JSON, as text or bytes."""
    text = nest if isinstance(nest, bytes) else json.dumps(nest).encode()
    path.write_bytes(container._sealed({"fsla": "0", "kind": checkpoint.KIND}, tensors, text))
    return path


DEEP = b'{"tuple": [' * 200 + b"1" + b"]}" * 200
DEEPER = b'{"tuple": [' * 50_000 + b"1" + b"]}" * 50_000


@pytest.mark.parametrize(
    "nest",
    [
        {"tensor": "7"}, {"tensor": 0}, {"tensor": ["0"]}, {"tensor": None}, {"unknown": []}, {"mapping": {}}, {},
        {"mapping": [], "list": []}, {"State": []}, {"Point": [1, 2, 3]}, {"State": [1, 2, 3, 4, 5]}, {"tuple": {}},
        {"list": None}, [], [1], b"", b"{", b"\xff\xff",
        {"Point": [{"mapping": []}, {"mapping": [["a", 1]]}, {"tuple": []}]},
        {"Point": [{"mapping": []}, {"mapping": []}, {"tuple": [1]}]}, DEEP, DEEPER, b"1" * 5000,
        {"mapping": [["a", {"list": [{"b": 1}]}]]}, {"mapping": [["a"]]}, {"mapping": [[True, 1]]},
        {"mapping": [[0.5, 1]]},
        {"counter": [["a", {"list": [1]}, 2]]}, {"float": "1.0"}, {"float": ["nan"]},
    ],
    ids=lambda nest: (nest if isinstance(nest, bytes) else json.dumps(nest).encode()).decode("latin1")[:30],
)  # fmt: skip
def test_load_checkpoint_of_malformed_tree_raises(tmp_path, nest):
    path = crafted(tmp_path / "x", nest, **{"0": torch.ones(1)})
    with pytest.raises(CheckpointError, match=rf"Cannot read {re.escape(str(path))}: .* Remove it"):
        load_checkpoint(path)


KINDS = st.sampled_from(["tensor", "mapping", "counter", "tuple", "list", "State", "Point", "float", "", "other"])
NESTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just({"tensor": "0"}),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(KINDS, inner, max_size=2)
        | st.dictionaries(KINDS, st.lists(inner, max_size=5), min_size=1, max_size=1)
        | st.dictionaries(KINDS, st.dictionaries(st.text(max_size=2), inner, max_size=3), min_size=1, max_size=1)
        | st.dictionaries(
            KINDS,
            st.lists(st.tuples(st.text(max_size=2) | st.integers(0, 3), inner).map(list), max_size=3),
            min_size=1,
            max_size=1,
        )
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("nests")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(nest=NESTS)
def test_load_checkpoint_of_random_tree_loads_or_raises(folder, nest):
    path = crafted(folder / "x", nest, **{"0": torch.ones(1)})
    try:
        value = load_checkpoint(path)
    except CheckpointError:
        return
    save_checkpoint(folder / "y", value)
    assert with_sign(load_checkpoint(folder / "y")) == with_sign(value)


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = (value,)
    return value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (object(), "Got object instead"),
        ({(1,): 2}, r"mappings from strings and whole numbers. Got \(1,\)"),
        ({1: 2, "1": 3}, "must differ as text"),
        (namedtuple("Memory", "v")(1), "Got Memory instead"),
        (torch.ones(2).to_sparse(), "dense tensors"),
        (torch.ones(2, dtype=torch.complex128), "dense tensors"),
        (torch.ones(2, device="meta"), "dense tensors"),
        (nested(101), "at most 100 levels"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_save_checkpoint_of_unsupported_type_writes_nothing(tmp_path, value, why):
    with pytest.raises(TypeError, match=why):
        save_checkpoint(tmp_path / "x", value)
    assert not list(tmp_path.iterdir())


def test_checkpoint_round_trip_at_maximum_depth(tmp_path):
    save_checkpoint(tmp_path / "x", nested(100))
    assert load_checkpoint(tmp_path / "x") == nested(100)


def test_save_checkpoint_on_full_disk_keeps_previous(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "x", 1)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.* intact.* Make room"):
        save_checkpoint(tmp_path / "x", 2)
    assert load_checkpoint(tmp_path / "x") == 1
    assert [f.name for f in tmp_path.iterdir()] == ["x"]
    with pytest.raises(CheckpointError, match="No such file or directory"):
        save_checkpoint(tmp_path / "absent" / "x", 2)


def test_save_checkpoint_removes_orphaned_temporary_files(tmp_path):
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead = int(child.stdout)
    start, end = f".fsla-{files._host()}", f"{'0' * 16}.tmp"
    remaining = {f".x{start}-{os.getpid()}-{end}", f".x.{dead}.tmp", "x.tmp", f".x.fsla-0123abcd-{dead}-{end}"}
    removed = {f".x{start}-{dead}-{end}", f".y.part{start}-{dead}-{end}"}
    for name in remaining | removed:
        (tmp_path / name).write_text("")
    save_checkpoint(tmp_path / "x", 1)
    assert {f.name for f in tmp_path.iterdir()} == remaining | {"x"}


def test_load_checkpoint_writes_nothing(tmp_path):
    """Reading must not remove what a process writes that this one cannot see."""
    save_checkpoint(tmp_path / "x", 1)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    others = {f".x.{dead.pid}.tmp", f".x.fsla-{files._host()}-{dead.pid}-{'0' * 16}.tmp"}
    for name in others:
        (tmp_path / name).write_text("")
    assert load_checkpoint(tmp_path / "x") == 1
    assert {f.name for f in tmp_path.iterdir()} == {"x", *others}


def test_save_checkpoint_to_link_raises(tmp_path):
    """The file that it names would be replaced."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "x").symlink_to(tmp_path / "victim")
    with pytest.raises(CheckpointError, match=r"Cannot use .*x: it is a symbolic link"):
        save_checkpoint(tmp_path / "x", 1)
    assert (tmp_path / "victim").read_text() == "precious"
    assert {f.name for f in tmp_path.iterdir()} == {"victim", "x"}
