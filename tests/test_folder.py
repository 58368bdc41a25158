"""Output folders: whose they are, on which data their runs were done, and which runs are whole."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest

from fsla._storage import _files as files
from fsla_reproduction.datasets import load, sets
from fsla_reproduction.figures import CleaningSpec
from fsla_reproduction.folder import Folder, RunError, settings_for
from fsla_reproduction.reproduce import prepare
from idx_files import images, labels, write

RECORDS = [{"run": "a", "step": 0, "loss": 1.5}, {"run": "a", "step": 1, "loss": None}]


@dataclass(frozen=True)
class Spec:
    size: int = 1
    seeds: int = 1


def temporary(name, process):
    return f".{name}.fsla-{files._host()}-{process}-{'0' * 16}.tmp"


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", ["summary.md", "runs/mine.txt", ".hidden", ".summary.json.1.tmp"])
def test_folder_with_other_files_raises_and_stays(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(RunError, match=r"must be new, empty or of an earlier run.*holds other files.*Choose another"):
        Folder(tmp_path, "synthetic", Spec())
    assert contents(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("content", ["{half", "[1]", '{"openapi": "3.0"}', "\udcff"])
def test_folder_with_foreign_settings_raises_and_stays(tmp_path, content):
    (tmp_path / "spec.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    before = contents(tmp_path)
    with pytest.raises(RunError, match=r"spec.json must be the settings of a run"):
        Folder(tmp_path, "synthetic", Spec())
    assert contents(tmp_path) == before


def test_folder_empty_or_killed_at_once_is_used(tmp_path):
    Folder(tmp_path, "synthetic", Spec())
    Folder(tmp_path, "synthetic", Spec(seeds=2))
    (tmp_path / "killed").mkdir()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / "killed" / temporary("spec.json", dead.pid)).write_text("{half")
    Folder(tmp_path / "killed", "synthetic", Spec()).gather([])
    (tmp_path / "killed" / "records.jsonl").unlink()
    assert {p.name for p in (tmp_path / "killed").iterdir()} == {"spec.json", "runs"}


def test_folder_check_writes_nothing(tmp_path):
    settings_for(tmp_path / "new" / "deeper", "synthetic", Spec())
    assert not list(tmp_path.iterdir())


def test_folder_removes_files_of_killed_processes(tmp_path):
    Folder(tmp_path, "synthetic", Spec())
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    orphans = [tmp_path / temporary("summary.md", dead.pid), tmp_path / "runs" / temporary("a.jsonl", dead.pid)]
    running = tmp_path / "runs" / temporary("a.jsonl", os.getppid())
    for path in (*orphans, running):
        path.write_text("half")
    folder = Folder(tmp_path, "synthetic", Spec())
    assert all(path.exists() for path in orphans)  # until something is written
    folder.gather([])
    assert not any(path.exists() for path in orphans)
    assert running.exists()


def test_folder_does_not_follow_link(tmp_path):
    """A link in the folder would have a record file of another place replaced."""
    folder = Folder(tmp_path, "synthetic", Spec())
    (tmp_path / "victim").write_text("precious")
    for name in ("runs/a.jsonl", "records.jsonl"):
        (tmp_path / name).symlink_to(tmp_path / "victim")
    with pytest.raises(ValueError, match=r"a\.jsonl: it is a symbolic link"):
        folder.save("a", RECORDS)
    with pytest.raises(ValueError, match=r"records\.jsonl: it is a symbolic link"):
        folder.gather([])
    assert (tmp_path / "victim").read_text() == "precious"


def test_folder_with_other_data_raises_and_adds_new_data(tmp_path):
    Folder(tmp_path, "cleaning", Spec(), {"mnist": "aa"})
    Folder(tmp_path, "cleaning", Spec(), {"qmnist": "bb"})
    Folder(tmp_path, "cleaning", Spec(), {"mnist": "aa", "digits": "cc"})
    stored = json.loads((tmp_path / "spec.json").read_text())
    assert stored["data"] == {"mnist": "aa", "qmnist": "bb", "digits": "cc"}
    with pytest.raises(RunError, match=r"the data that its runs used.*other images or labels of qmnist than were read"):
        Folder(tmp_path, "cleaning", Spec(), {"mnist": "aa", "qmnist": "xx"})
    assert json.loads((tmp_path / "spec.json").read_text()) == stored


def test_folder_without_data_fingerprint_raises(tmp_path):
    Folder(tmp_path, "cleaning", Spec())
    with pytest.raises(RunError, match="must say which data its runs used"):
        Folder(tmp_path, "cleaning", Spec(), {"mnist": "aa"})


def test_folder_identifies_data_by_content(tmp_path, monkeypatch):
    arrays = (images(10_000, side=2), labels(10_000), images(100, 1, side=2), labels(100))
    for place, label in (("a", 0), ("same", 0), ("other", 1)):
        for file, array in zip(sets.SOURCES["mnist"].files, arrays, strict=True):
            write(tmp_path / place / "mnist" / file.name, array)
        changed = arrays[1].copy()
        changed[0] = label
        write(tmp_path / place / "mnist" / sets.SOURCES["mnist"].train_labels.name, changed)
    spec = CleaningSpec("paper")
    plan = prepare(tmp_path / "out", spec, ("overview",), 1, data_dir=tmp_path / "a")
    assert not (tmp_path / "out").exists()
    Folder(plan.out, "cleaning", spec, plan.fingerprints)
    assert prepare(plan.out, spec, ("overview",), 2, data_dir=tmp_path / "same").fingerprints == plan.fingerprints
    with pytest.raises(RunError, match="other images or labels of mnist"):
        prepare(plan.out, spec, ("overview",), 1, data_dir=tmp_path / "other")
    monkeypatch.setenv("FSLA_DATA", str(tmp_path / "other"))
    with pytest.raises(RunError, match="other images or labels of mnist"):
        prepare(plan.out, spec, ("overview",), 1)


def test_folder_too_little_data_writes_nothing(tmp_path, monkeypatch):
    few = load("digits")
    few = few._replace(train_x=few.train_x[:1000], train_y=few.train_y[:1000])
    monkeypatch.setattr("fsla_reproduction.reproduce.load", lambda name, data_dir: few)
    with pytest.raises(ValueError, match=r"must fit into digits's 1000 training images. Got 600 \+ 500"):
        prepare(tmp_path / "out", CleaningSpec(), ("overview",), 1)
    assert not list(tmp_path.iterdir())


def test_folder_records_round_trip(tmp_path):
    folder = Folder(tmp_path, "synthetic", Spec())
    assert not folder.finished("a")
    folder.save("a", RECORDS)
    folder.save("none", [])
    assert folder.finished("a")
    assert folder.finished("none")
    assert folder.gather(["a", "none", "a"]) == RECORDS * 2
    assert [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()] == RECORDS * 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: b"\n",
        lambda raw: raw[:-1],
        lambda raw: raw[:40],
        lambda raw: raw[raw.index(b"\n") + 1 :],
        lambda raw: b"".join(raw.splitlines(keepends=True)[:-1]),
        lambda raw: raw + b"{}\n",
        lambda raw: raw.replace(b"1.5", b"1.6"),
        lambda raw: b"not JSON",
        lambda raw: b'{"run": "a"}\n[1, 2]\n',
        lambda raw: b"\xff\xfe\n",
    ],
)
def test_folder_damaged_run_is_repeated(tmp_path, damage):
    folder = Folder(tmp_path, "synthetic", Spec())
    folder.save("a", RECORDS)
    file = tmp_path / "runs" / "a.jsonl"
    file.write_bytes(damage(file.read_bytes()))
    assert not folder.finished("a")
    with pytest.raises(RunError, match=r"a.jsonl must hold all records of a run. It is missing or damaged. Remove it"):
        folder.gather(["a"])
    folder.save("a", RECORDS)
    assert folder.gather(["a"]) == RECORDS


def test_folder_run_that_is_no_file_raises(tmp_path):
    folder = Folder(tmp_path, "synthetic", Spec())
    (tmp_path / "runs" / "a.jsonl").mkdir()
    with pytest.raises(RunError, match=r"a.jsonl must be a readable file. It is not: Is a directory. Remove it"):
        folder.finished("a")


def test_folder_with_other_settings_raises(tmp_path):
    Folder(tmp_path, "synthetic", Spec())
    with pytest.raises(RunError, match="size: 1 there, 2 now"):
        Folder(tmp_path, "synthetic", replace(Spec(), size=2))
