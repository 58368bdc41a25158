"""Single files: every byte is under a digest, and nothing but a whole file of the right kind is read."""

import os
import socket
from random import Random
from time import monotonic

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import fsla
from fsla import algorithms
from fsla._storage import _container as container
from fsla.contrib import LazyRowOptimizer, load_shards, save_shards
from fsla.distributed import IndexRange
from fsla.steps import constant
from fsla.train import _stores as stores
from fsla.train import load_checkpoint, save_checkpoint
from lazy_rows_program import weighted

FLIPS = 120
KINDS = ["checkpoint", "fit", "rank", "manifest", "model"]


def fitted(steps, folder):
    model = torch.nn.Linear(2, 1)
    opt = fsla.SOBA(model, fsla.SampleWeights(4), inner_loss=inner_loss, outer_loss=outer_loss)
    loader = DataLoader(torch.arange(4), batch_size=4)
    return fsla.fit(opt, loader, loader, max_steps=steps, output_dir=folder, eval_every=1, progress_bar=False)


def inner_loss(model, weights, i):
    return (weights(i) * (model(torch.ones(len(i), 2))[:, 0] - i).square()).mean() + 0.1 * model.weight.square().sum()


def outer_loss(model, weights, i):
    return (model(torch.ones(len(i), 2)) - 1).square().mean()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A file of each kind, and what reads it."""
    folder = tmp_path_factory.mktemp("written")
    save_checkpoint(folder / "x", {"a": torch.arange(5.0), "b": [1, float("inf")]})
    fitted(2, folder / "fit")
    algorithm = algorithms.soba(constant(3.0, 0.2, 0.2))
    problem, at = weighted()
    batches = fsla.StepBatches.shared(torch.arange(101), torch.arange(10))
    run = LazyRowOptimizer(algorithm, problem, at, batches)
    save_shards(folder, run)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 3)), np.array(["a", "b"] * 20)
    checked = np.where(np.arange(40) < 20, y, None)
    cleaner = fsla.data.LabelCleaner(strategies=["trusted_only"], learners=["linear"], random_state=0)
    cleaner.fit(x, y, y_checked=checked)
    fsla.data.DataModel("classification", cleaner._builder, cleaner._predictor, cleaner.classes_).save(folder / "model")
    shard = IndexRange(101)
    return {
        "checkpoint": (folder / "x", load_checkpoint),
        "fit": (folder / "fit" / "checkpoint-00000002.safetensors", lambda path: container.read(path, stores.KIND)),
        "rank": (folder / "rank-0-of-1" / "step-0.safetensors", lambda path: load_shards(path.parents[1], shard)),
        "manifest": (folder / "manifest.fsla", lambda path: load_shards(path.parent, shard)),
        "model": (folder / "model", fsla.data.load_model),
    }


@pytest.fixture
def file(request, written):
    """A file of a kind, which is put back at the end, its bytes and what reads it."""
    path, read = written[request.param]
    whole = path.read_bytes()
    read(path)
    yield path, whole, lambda: read(path)
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_bytes(whole)


each = pytest.mark.parametrize("file", KINDS, indirect=True)


@each
def test_read_of_damaged_file_raises(file):
    """No byte may be outside the digest: in the head, the header, the tensors or after them."""
    path, whole, read = file
    random = Random(0)
    begin = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(40), *random.choices(range(40, begin), k=40), *random.choices(range(begin, len(whole)), k=40)]
    assert len(places) == FLIPS
    flipped = [whole[:i] + bytes([whole[i] ^ 1 << random.randrange(8)]) + whole[i + 1 :] for i in places]
    cut = [whole[:n] for n in (0, 1, 7, 8, 60, 120, begin - 1, begin, begin + 1, len(whole) // 2, len(whole) - 1)]
    for damaged in [*flipped, *cut, whole + b"\0", whole + whole, whole[1:], b"\0" * 4096]:
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"Cannot read .*(damaged|no file of fsla)"):
            read()


@each
@pytest.mark.parametrize("what", ["pipe", "socket", "device", "link", "own link", "folder", "missing", "unreadable"])
def test_read_of_irregular_file_raises(file, what, monkeypatch):
    """A pipe would be waited for, and /dev/zero read without end."""
    path, whole, read = file
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "socket":
        monkeypatch.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    elif what in ("device", "link", "own link"):
        (path.parent / "target").write_bytes(whole)
        path.symlink_to({"device": "/dev/zero", "link": path.parent / "target", "own link": path}[what])
    elif what == "folder":
        path.mkdir()
    elif what == "unreadable":
        path.write_bytes(whole)
        monkeypatch.setattr(container, "open_regular", denied)
    begin = monotonic()
    with pytest.raises(ValueError, match=r"Cannot (use|read) .*(not a regular file|No such file|Permission denied)"):
        read()
    assert monotonic() - begin < 1.2


def denied(path, flags):
    raise PermissionError(13, "Permission denied", str(path))


@each
def test_read_of_other_kind_or_version_raises(file, written):
    """Each refusal names what the file holds."""
    path, _, read = file
    other, _ = written["checkpoint" if path.name != "x" else "model"]
    path.write_bytes(other.read_bytes())
    with pytest.raises(ValueError, match=r"it holds (a checkpoint|fsla.data model), not "):
        read()
    path.write_bytes(container._sealed({"fsla": "9.8.7", "kind": "x"}, {}, b"1", "fsla-0099"))
    with pytest.raises(ValueError, match=r"fsla 9\.8\.7 wrote it in format fsla-0099, and this is fsla"):
        read()


@pytest.mark.parametrize("text", [b"NaN", b"[-Infinity]", b"[1e999]", b"{", b"", b"\xff", b"[" * 10**5, b"1" * 5000])
def test_read_of_malformed_json_raises(tmp_path, text):
    """The digest fits: someone wrote the file so."""
    (tmp_path / "x").write_bytes(container._sealed({"fsla": "1", "kind": "a checkpoint"}, {}, text))
    with pytest.raises(ValueError, match=r"Cannot read .*x: it is malformed"):
        load_checkpoint(tmp_path / "x")


def test_read_of_large_file_raises_before_reading(tmp_path):
    """A file with holes has any size, and its content does not fit into memory."""
    save_checkpoint(tmp_path / "x", 1)
    os.truncate(tmp_path / "x", 2**43)
    begin = monotonic()
    with pytest.raises(ValueError, match=r"it has 8796093022208 bytes, more than the limit"):
        load_checkpoint(tmp_path / "x")
    assert monotonic() - begin < 1.2


def test_fit_with_records_of_other_run_raises(tmp_path):
    """Records with the same number of lines would else be taken for those of the run."""
    fitted(2, tmp_path / "one")
    torch.manual_seed(1)
    fitted(2, tmp_path / "other")
    one, other = (tmp_path / name / "records.jsonl" for name in ("one", "other"))
    assert one.read_bytes() != other.read_bytes()
    one.write_bytes(other.read_bytes())
    with pytest.raises(fsla.CheckpointError, match=r"its first 2 records are of another run, or were edited\. Move it"):
        fitted(3, tmp_path / "one")


def test_checkpoint_after_resume_keeps_run_id(tmp_path):
    """Files of one run are known by it, and those of another are not."""
    names = ("one", "one", "other")
    for steps, name in zip((2, 4, 2), names, strict=True):
        fitted(steps, tmp_path / name)
    ids = {name: {container.read(p, stores.KIND).run_id for p in (tmp_path / name).glob("c*")} for name in names}
    assert len(ids["one"]) == len(ids["other"]) == 1
    assert ids["one"] != ids["other"]


def test_load_shards_with_file_of_other_run_raises(tmp_path):
    """Its rank, step and sizes are the same."""
    algorithm = algorithms.soba(constant(3.0, 0.2, 0.2))
    problem, at = weighted()
    batches = fsla.StepBatches.shared(torch.arange(101), torch.arange(10))
    for name, also in (("one", 1), ("other", 2)):
        save_shards(tmp_path / name, LazyRowOptimizer(algorithm, problem, at, batches), also)
    rank = "rank-0-of-1/step-0.safetensors"
    (tmp_path / "one" / rank).write_bytes((tmp_path / "other" / rank).read_bytes())
    with pytest.raises(fsla.CheckpointError, match=r"it is not the file that manifest\.fsla names"):
        load_shards(tmp_path / "one", IndexRange(101))
