"""`fsla clean` and `fsla weigh`: files in, a folder out, and what is said of bad input."""

import gzip
import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

import fsla
from fsla.cli import app
from fsla.data import _demo as demo
from fsla.data import _job as job
from fsla.data._reading import Columns, Given, read
from fsla.data._report import render
from launch import finish

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = "<script>alert(1)</script>"
QUICK = {"steps": 40, "bilevel_steps": 30, "folds": 2, "random_state": 0, "device": "cpu"}


@pytest.fixture
def quick(monkeypatch):
    """Estimators that train for a moment."""
    for kind in (fsla.HyperCleaner, fsla.DataWeigher):
        start = kind.__init__

        def init(self, *, _start=start, **given):
            _start(self, **{**given, "steps": 40, "bilevel_steps": 20, "folds": 2})

        monkeypatch.setattr(kind, "__init__", init)


def run(*arguments):
    """The command, in this process; an error that the user can mend becomes text, as `main` has it."""
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(done.exception, ValueError | OSError):
        return SimpleNamespace(code=2, text=str(done.exception))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return SimpleNamespace(code=done.exit_code, text=done.output)


def frame(n=120, seed=0, labels=("ant", "bee", "cow")):
    random = np.random.default_rng(seed)
    centres = 3 * np.random.default_rng(7).standard_normal((3, 4))
    y = random.integers(3, size=n)
    x = centres[y] + random.standard_normal((n, 4))
    table = pd.DataFrame(x, columns=["a", "b", "c", "d"])
    table["colour"] = np.where(y == 0, "red", "blue")
    table["note"] = [f"text {i}" for i in range(n)]  # too many texts for a feature
    table["source"] = np.array(["web", "book", "forum"])[np.arange(n) % 3]
    wrong = (table["source"] == "forum").to_numpy()
    table["label"] = np.array(labels)[np.where(wrong, (y + 1) % 3, y)]
    table["name"] = [f"s{i}" for i in range(n)]
    return table, np.array(labels)[y]


@pytest.fixture
def files(tmp_path):
    table, _ = frame()
    table.to_csv(tmp_path / "data.csv", index=False)
    clean, true = frame(40, 5)
    clean.assign(label=true).drop(columns=["source", "name"]).to_csv(tmp_path / "trusted.csv", index=False)
    return tmp_path


def cleaned(files, *more):
    data = files / "data.csv"
    given = ("--trusted", files / "trusted.csv", "--group", "source", "--id", "name", "--out", files / "out")
    return run("clean", data, *given, *more)


def test_a_table_becomes_a_folder(files, quick):
    done = cleaned(files)
    assert done.code == 0, done.text
    assert "The report:" in done.text
    out = files / "out"
    assert sorted(p.name for p in out.iterdir()) == [
        "cleaned.csv", "issues.csv", "model.safetensors", "report.html", "summary.json", "weights.csv",
    ]  # fmt: skip
    assert "Learns from 5 columns: a, b, c, d, colour. Left out: note." in done.text
    assert re.search(r"cleaned.csv has \d+ of 120 rows, \d+ of them with another label", done.text)
    issues = pd.read_csv(out / "issues.csv")
    assert set(issues["group"]) == set(pd.read_csv(files / "data.csv")["source"])
    assert list(issues.columns)[:4] == ["id", "given_label", "suggested_label", "suggested_probability"]
    assert set(issues["id"]) == {f"s{i}" for i in range(120)}
    assert issues["label_quality"].is_monotonic_increasing
    kept = pd.read_csv(out / "cleaned.csv")
    assert {"a", "note", "label", "given_label", "weight"} <= set(kept.columns)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["samples"] == 120
    assert summary["trusted"] == 40
    assert len(summary["weights"]) == 3
    loaded = fsla.HyperCleaner.load(out / "model.safetensors")
    assert loaded.n_features_in_ == 6  # four numbers and two colours
    assert cleaned(files).code == 0  # an earlier run's folder is replaced
    assert [p.name for p in files.iterdir() if p.name.startswith(".")] == []


def test_numbers_are_weighed(tmp_path, quick):
    table, _ = frame()
    table["price"] = table["a"] - table["b"] + 0.5
    table["ok"] = ["yes"] * 30 + ["no"] * 90
    table.to_parquet(tmp_path / "data.parquet")
    done = run(
        "weigh", tmp_path / "data.parquet", "--label", "price", "--group", "source", "--trusted-column", "ok",
        "--features", "a, b", "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.code == 0, done.text
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["samples"] == 90
    assert {row["way"] for row in summary["candidates"]} == {
        "together", "trusted samples alone", "everything", "group weights",
    }  # fmt: skip
    assert not (tmp_path / "out" / "issues.csv").exists()
    assert "root mean squared error" in (tmp_path / "out" / "report.html").read_text()


def folder_of_images(path, seed, size=(8, 8), n=12):
    random = np.random.default_rng(seed)
    for number, name in enumerate(["cat", "dog"]):
        (path / name).mkdir(parents=True)
        for i in range(n):
            pixels = (random.random(size) * 100 + 100 * number).astype(np.uint8)
            Image.fromarray(pixels).save(path / name / f"{i}.png")


def test_folders_of_images_and_columns_of_paths(tmp_path, quick):
    folder_of_images(tmp_path / "data", 0)
    folder_of_images(tmp_path / "trusted", 1)
    done = run(
        "clean", tmp_path / "data", "--trusted", tmp_path / "trusted", "--model", "linear", "--out", tmp_path / "out"
    )
    assert done.code == 0, done.text
    assert pd.read_csv(tmp_path / "out" / "issues.csv")["id"].str.match(r"(cat|dog)/\d+\.png").all()
    rows = [{"file": f"{part}/{c}/{i}.png", "label": c, "good": part == "trusted"}
            for part in ("data", "trusted") for c in ("cat", "dog") for i in range(12)]  # fmt: skip
    pd.DataFrame(rows).to_csv(tmp_path / "images.csv", index=False)
    given = read(tmp_path / "images.csv", Columns(image="file", trusted="good", size=16))
    assert given.x.shape == (48, 1, 16, 16)
    assert given.trusted.sum() == 24
    assert 0 <= given.x.min() <= given.x.max() <= 1


def test_arrays(tmp_path, quick):
    table, _ = frame()
    x = table[["a", "b"]].to_numpy()
    np.savez(
        tmp_path / "data.npz",
        X=x,
        y=table["label"].to_numpy(str),
        groups=np.arange(120) % 2,
        trusted=np.arange(120) < 30,
    )
    assert run("weigh", tmp_path / "data.npz", "--out", tmp_path / "out").code == 0
    given = read(tmp_path / "data.npz", Columns())
    assert given.groups.tolist()[:3] == ["0", "1", "0"]


def test_plain_and_structured_arrays_are_tables(tmp_path):
    np.save(tmp_path / "plain.npy", np.array([[0.5, 1.0, 2.0], [0.25, 3.0, 0.0]]))
    plain = read(tmp_path / "plain.npy", Columns(label="price", group="x1"))
    assert plain.y.tolist() == [2, 0]
    assert plain.names == ["x0"]
    assert plain.groups.tolist() == ["1.0", "3.0"]
    kinds = [("a", "f4"), ("source", "U3"), ("label", "U3")]
    np.save(tmp_path / "named.npy", np.array([(1.0, "web", "cat"), (2.0, "lab", "dog")], dtype=kinds))
    named = read(tmp_path / "named.npy", Columns(group="source"))
    assert named.y.tolist() == ["cat", "dog"]
    assert named.x.tolist() == [[1.0], [2.0]]


def test_a_label_seen_only_once_ends_well(files, quick):
    """Among the samples of mixed quality nothing stands in for it, among the trusted ones it can be suggested."""
    table = pd.read_csv(files / "data.csv")
    table.loc[3, "label"] = "unicorn"
    table.to_csv(files / "data.csv", index=False)
    trusted = pd.read_csv(files / "trusted.csv")
    trusted.loc[5, "label"] = "phoenix"
    trusted.to_csv(files / "trusted.csv", index=False)
    done = cleaned(files)
    assert done.code == 0, done.text
    assert "No trusted sample has the label unicorn" in done.text
    issues = pd.read_csv(files / "out" / "issues.csv").set_index("given_label")
    assert issues.loc["unicorn", "suggested_label"] == "unicorn"
    assert "No trusted sample is of the class <strong>unicorn</strong>." in (files / "out" / "report.html").read_text()


@pytest.mark.slow
def test_two_million_rows(tmp_path, quick):
    random = np.random.default_rng(0)
    count = 2_000_000
    true = random.integers(2, size=count)
    x = true[:, None] + 0.3 * random.standard_normal((count, 2))
    wrong = random.random(count) < 0.2
    table = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "label": np.where(wrong, 1 - true, true)})
    table["source"] = np.where(np.arange(count) % 2, "web", "lab")
    table.to_parquet(tmp_path / "data.parquet")
    table.head(200).assign(label=true[:200]).to_csv(tmp_path / "trusted.csv", index=False)
    done = run(
        "clean", tmp_path / "data.parquet", "--trusted", tmp_path / "trusted.csv", "--group", "source",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.code == 0, done.text
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["noise_rate"] == pytest.approx(0.2, abs=0.03)
    with (tmp_path / "out" / "issues.csv").open() as file:
        assert sum(1 for _ in file) == count + 1


# -------------------------------------------------------------------------------------------------------- bad input


def bad_tables(tmp_path):
    table, _ = frame(30)
    (tmp_path / "garbage.csv").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "garbage.parquet").write_bytes(b"PAR1 nothing")
    (tmp_path / "garbage.npz").write_bytes(gzip.compress(b"nothing"))
    (tmp_path / "garbage.npy").write_bytes(b"nothing")
    (tmp_path / "blank.npy").write_bytes(b"")
    np.save(tmp_path / "flat.npy", np.zeros(5))
    np.save(tmp_path / "object.npy", np.array([["a", None]], dtype=object))
    (tmp_path / "empty.csv").write_text("a,label\n")
    table.assign(a=np.where(np.arange(30) == 3, np.nan, table["a"])).to_csv(tmp_path / "nan.csv", index=False)
    table.assign(a=np.where(np.arange(30) == 3, np.inf, table["a"])).to_csv(tmp_path / "inf.csv", index=False)
    table.assign(label=table["label"].where(table.index > 4)).to_csv(tmp_path / "unlabelled.csv", index=False)
    table.assign(source=table["source"].where(table.index != 7)).to_csv(tmp_path / "homeless.csv", index=False)
    table.to_csv(tmp_path / "semicolons.csv", index=False, sep=";")
    (tmp_path / "data.xlsx").write_bytes(b"PK")
    table.assign(name="same").to_csv(tmp_path / "twice.csv", index=False)
    table[["note", "label"]].to_csv(tmp_path / "texts.csv", index=False)
    table.assign(ok="perhaps").to_csv(tmp_path / "perhaps.csv", index=False)
    table.assign(ok=False).to_csv(tmp_path / "none.csv", index=False)
    np.savez(tmp_path / "short.npz", X=np.zeros((5, 2)), y=np.zeros(4))
    np.savez(tmp_path / "nothing.npz", Z=np.zeros(3))
    np.savez(tmp_path / "object.npz", X=np.zeros((3, 2)), y=np.array(["a", None, 3], dtype=object))
    folder_of_images(tmp_path / "mixed", 0, n=2)
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "mixed" / "cat" / "odd.png")
    folder_of_images(tmp_path / "broken", 0, n=2)
    (tmp_path / "broken" / "cat" / "b.png").write_bytes(b"no image")
    (tmp_path / "hollow").mkdir()


@pytest.mark.parametrize(
    ("name", "columns", "text"),
    [
        ("missing.csv", {}, "must be a file or a folder. There is none"),
        ("data.txt", {}, r"must be a table \(.csv, .tsv, .parquet, .npy\)"),
        ("garbage.csv", {}, "garbage.csv must"),
        ("garbage.parquet", {}, "must be a table that can be read"),
        ("garbage.npz", {}, "must be an .npz file of plain arrays"),
        ("object.npz", {}, "must be an .npz file of plain arrays"),
        ("garbage.npy", {}, "must be a table that can be read"),
        ("blank.npy", {}, "must be a table that can be read"),
        ("object.npy", {}, "must be a table that can be read"),
        ("flat.npy", {}, r"the label in its last column. It has the shape \(5,\)"),
        ("nothing.npz", {}, "must hold the arrays X and y. It holds: Z"),
        ("short.npz", {}, "y in .* must have a value for each of the 5 samples. Got 4"),
        ("empty.csv", {}, "at least one row"),
        ("nan.csv", {}, "1 rows have missing or infinite ones, in a"),
        ("inf.csv", {}, "1 rows have missing or infinite ones, in a"),
        ("unlabelled.csv", {}, "must have a label. 5 of 30 have none in 'label', the first of them row 1: fill them"),
        (
            "homeless.csv",
            {"group": "source"},
            "must have a group. 1 of 30 have none in 'source', .* row 8",
        ),
        ("semicolons.csv", {}, "which --label names. .* separated by semicolons: separate them by commas"),
        ("nan.csv", {"label": "lable"}, "Did you mean 'label'"),
        ("data.xlsx", {}, "Save a spreadsheet as CSV"),
        ("twice.csv", {"id": "name"}, "'same' occurs 30 times"),
        ("texts.csv", {}, "at least one column of numbers"),
        ("texts.csv", {"features": ("note",)}, "at most 20 different texts. It has 30"),
        ("texts.csv", {"features": ("size",)}, "the columns that --features names. It lacks size"),
        ("nan.csv", {"label": "klass"}, "must have the column 'klass', which --label names. It has a, b"),
        ("nan.csv", {"group": "origin"}, "which --group names"),
        ("perhaps.csv", {"trusted": "ok"}, "must hold true or false. It holds 'perhaps'"),
        ("mixed", {}, "All images must have one size. Got 8 x 8 and 9 x 9.*--size"),
        ("broken", {}, "b.png must be an image that can be read"),
        ("hollow", {}, "a folder of images for each class"),
    ],
)
def test_bad_files_get_one_message(tmp_path, name, columns, text):
    bad_tables(tmp_path)
    (tmp_path / "data.txt").write_text("x")
    with pytest.raises(ValueError, match=text):
        read(tmp_path / name, Columns(**columns))


def test_what_does_not_fit_together_is_said_and_nothing_is_written(files, quick):
    bad_tables(files)
    out = files / "out"
    assert "There must be data to look at" in run("clean").text
    assert "Some samples must be trusted" in run("clean", files / "data.csv", "--out", out).text
    pd.DataFrame({"a": [1.0], "label": ["ant"]}).to_csv(files / "narrow.csv", index=False)
    said = run("clean", files / "data.csv", "--trusted", files / "narrow.csv", "--out", out).text
    assert "must have the features of the data. It lacks b, c, d, colour" in said
    assert "can be named with --group or --id" in said
    said = run("clean", files / "none.csv", "--trusted-column", "ok", "--out", out).text
    assert "The trusted set must have at least one sample" in said
    assert "Samples must come in groups" in run("weigh", files / "data.csv", "--trusted", files / "trusted.csv").text
    strange = pd.read_csv(files / "trusted.csv")
    strange["label"] = strange["label"].str.upper()
    strange.to_csv(files / "strange.csv", index=False)
    said = run("clean", files / "data.csv", "--trusted", files / "strange.csv", "--group", "source", "--out", out).text
    assert "written alike. Here the labels are ant, bee, cow, and the trusted ones ANT, BEE, COW" in said
    for column, text, other, what in (("label", "ant", "Ant", "labels"), ("colour", "red", "Red", "features")):
        strange = pd.read_csv(files / "trusted.csv")
        strange[column] = strange[column].replace(text, other)
        strange.to_csv(files / "strange.csv", index=False)
        done = run("clean", files / "data.csv", "--trusted", files / "strange.csv", "--group", "source", "--out", out)
        assert done.code == 2
        assert f"The {what} must be written alike in both. The trusted samples have" in done.text
        assert other in done.text
    assert "The model must be one of" in run("clean", files / "data.csv", "--model", "resnet", "--out", out).text
    assert not out.exists()
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    done = cleaned(files)
    assert done.code == 2
    assert f"Cannot use --out {out}: no summary.json of fsla lists thesis.tex. Move what you want" in done.text
    assert (out / "thesis.tex").read_text() == "precious"


def test_a_run_that_breaks_off_leaves_the_folder_as_it_was(files, quick, monkeypatch):
    assert cleaned(files).code == 0
    before = {p.name: p.read_bytes() for p in (files / "out").iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device", "report.html")

    monkeypatch.setattr(job, "write_text", full)
    assert cleaned(files).code == 2
    assert {p.name: p.read_bytes() for p in (files / "out").iterdir()} == before
    assert [p.name for p in files.iterdir() if p.name.startswith(".")] == []


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def hidden(folder):
    return [p.name for p in folder.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("name", ["notes.md", "plots/a.png", "report.html/a", "no manifest", "issues.csv of weigh"])
def test_clean_refuses_an_earlier_folder_with_files_of_the_user(files, quick, monkeypatch, name):
    """They would be removed with the folder. The refusal comes before the training."""
    out = files / "out"
    data = ("weigh", files / "data.csv", "--trusted", files / "trusted.csv", "--group", "source", "--id", "name")
    assert run(*data, "--out", out).code == 0
    foreign = name.split("/")[0]
    if name == "no manifest":  # as earlier versions wrote it
        summary = json.loads((out / "summary.json").read_text())
        assert summary.pop("files") == sorted(p.name for p in out.iterdir())
        (out / "summary.json").write_text(json.dumps(summary))
        foreign = "cleaned.csv, model.safetensors, report.html, summary.json, weights.csv"
    elif name == "issues.csv of weigh":
        foreign = "issues.csv"
        (out / foreign).write_text("mine")
    else:
        if name == "report.html/a":
            (out / "report.html").unlink()
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    before = contents(files)
    monkeypatch.setattr(fsla.HyperCleaner, "fit", None)
    done = cleaned(files)
    assert done.code == 2
    assert f"Cannot use --out {out}: no summary.json of fsla lists {foreign}. Move what you want to keep" in done.text
    assert contents(files) == before


def test_clean_keeps_both_where_files_appear_during_the_training(files, quick, monkeypatch):
    """The user's file stays, and so do the results of the training."""
    out = files / "out"
    assert cleaned(files).code == 0
    before = contents(out)
    real = job.render

    def meanwhile(*given):
        (out / "notes.md").write_text("mine")
        return real(*given)

    monkeypatch.setattr(job, "render", meanwhile)
    done = cleaned(files)
    assert done.code == 2
    (kept,) = (p for p in files.iterdir() if p.name.startswith("out-"))
    assert f"Cannot replace {out}: fsla did not write notes.md. The folder is as it was, and the new" in done.text
    assert done.text.endswith(f" {kept}.")
    assert contents(out) == before | {"notes.md": b"mine"}
    assert set(contents(kept)) == set(before)
    assert hidden(files) == []


LOCKING = "import fcntl, os, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); f.write(str(os.getpid()))"


def test_clean_refuses_an_out_that_another_process_writes(files, quick, monkeypatch):
    """Each would replace what the other one writes. What a killed process left is taken over."""
    code = f"{LOCKING}; f.flush(); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, files / ".out.lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        before = contents(files)
        with monkeypatch.context() as patch:
            patch.setattr(fsla.HyperCleaner, "fit", None)
            done = cleaned(files)
        assert done.code == 2
        assert f"one run at a time. The process {other.pid} is using it" in done.text
        assert contents(files) == before
        other.kill()
    assert hidden(files) == [".out.lock"]
    assert cleaned(files).code == 0
    assert hidden(files) == []


def test_clean_has_out_for_itself_until_it_ends(files, quick, monkeypatch):
    """The lock is held during the training, too."""
    real = fsla.HyperCleaner.fit
    said = []

    def fit(*given, **more):
        said.append(hidden(files))
        said.append(cleaned(files).text)
        return real(*given, **more)

    monkeypatch.setattr(fsla.HyperCleaner, "fit", fit)
    assert cleaned(files).code == 0
    assert said[0] == [".out.lock"]
    assert "(this one) is using it" in said[1]
    assert hidden(files) == []


def test_clean_follows_a_link_that_the_user_names(files, quick):
    """The folder that it leads to is replaced, not the link."""
    (files / "deep").mkdir()
    (files / "out").symlink_to(files / "deep" / "real")
    for _ in range(2):
        assert cleaned(files).code == 0
    assert (files / "out").is_symlink()
    assert (files / "out" / "report.html").is_file()
    assert [p.name for p in (files / "deep").iterdir()] == ["real"]


def test_clean_refuses_links_in_the_place_of_its_files(files, quick):
    """A planted lock, folder or summary leads to files of the user."""
    victim = files / "victim"
    victim.write_text("123")
    (files / ".out.lock").symlink_to(victim)
    assert "it is a symbolic link" in cleaned(files).text
    (files / ".out.lock").unlink()
    (files / "out").symlink_to("out")
    assert "--out must be a folder" in cleaned(files).text
    (files / "out").unlink()
    assert cleaned(files).code == 0
    (files / "out" / "summary.json").rename(files / "summary.json")
    (files / "out" / "summary.json").symlink_to(files / "summary.json")
    done = cleaned(files)
    assert done.code == 2
    assert "lists cleaned.csv" in done.text
    assert victim.read_text() == "123"


def test_a_budget_that_ends_early_is_said(files, quick):
    done = cleaned(files, "--budget", "0")
    assert done.code == 0
    assert "Time was up before these ways were tried: everything, agreement" in done.text
    assert set(pd.read_csv(files / "out" / "weights.csv")["decision"]) == {"not compared"}
    assert "not compared" in (files / "out" / "report.html").read_text(encoding="utf-8")


def test_trusted_samples_among_the_others_are_said(files, quick, capsys):
    done = run("clean", files / "data.csv", "--trusted", files / "data.csv", "--out", files / "out")
    assert done.code == 0
    assert "120 samples are among the trusted ones too" in capsys.readouterr().err + done.text


# ------------------------------------------------------------------------------------------------------- the report


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report on data whose names are an attack."""
    table, _ = frame(labels=("ant", EVIL, "cow"))
    clean, clean_true = frame(40, 5, labels=("ant", EVIL, "cow"))
    x = table[["a", "b", "c", "d"]].to_numpy(np.float32)
    groups = table["source"].str.replace("web", f'"><img src=x onerror=alert(2)>{EVIL}').to_numpy()
    given = Given(x, table["label"].to_numpy(), table["name"].to_numpy(), groups, names=[EVIL, "b", "c", "d"])
    found = fsla.HyperCleaner(**QUICK | {"steps": 150}).fit(
        x, given.y, clean[["a", "b", "c", "d"]].to_numpy(np.float32), clean_true, groups=groups
    )
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(found, given, 40, f"A report {EVIL}", EVIL, [f"Found {EVIL}"]), encoding="utf-8")
    return path


def test_every_string_of_the_data_is_escaped(page):
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"<script", text)) == 1  # ours
    assert "<img src=x" not in text
    assert text.count("&lt;script&gt;alert(1)") > 10
    assert not re.search(r"(?:src|href)=\"(?!data:)", text)
    assert "default-src 'none'" in text


def opened(page, tmp_path, script):
    """The page after a script has played on it: its text, and what the browser complained of."""
    played = tmp_path / "played.html"
    report = f"<script>addEventListener('load', () => {{ {script} }});</script></body>"
    played.write_text(page.read_text(encoding="utf-8").replace("</body>", report), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    options += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path / 'user'}"]
    command = [CHROMIUM, *options, "--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom", str(played)]
    done = finish(*command)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed; apt-get install chromium installs it")
def test_the_page_works_in_a_browser(page, tmp_path):
    script = """
      const rows = () => [...document.querySelectorAll('#samples tbody tr:not([hidden])')];
      const cells = column => rows().map(row => row.cells[column].textContent);
      const sort = document.querySelectorAll('#samples thead th')[1].querySelector('button');
      const label = document.getElementById('label'), find = document.getElementById('find');
      sort.click();
      const up = cells(1);
      sort.click();
      const down = cells(1);
      label.selectedIndex = 1;
      label.dispatchEvent(new Event('change'));
      const labels = new Set(cells(3));
      find.value = 'no such thing';
      find.dispatchEvent(new Event('input'));
      document.title = JSON.stringify({
        up: up.join() === [...up].sort().join(), down: down.join() === [...down].sort().reverse().join(),
        many: up.length > 10, labels: labels.size, left: rows().length, scripts: document.scripts.length,
        count: document.getElementById('count').textContent,
      });
    """
    dom, complaints = opened(page, tmp_path, script)
    found = json.loads(re.search(r"<title>(.*?)</title>", dom)[1].replace("&quot;", '"'))
    assert found == {
        "up": True, "down": True, "many": True, "labels": 1, "left": 0, "scripts": 2, "count": "0 shown",
    }  # fmt: skip
    assert complaints == []


def test_the_demonstration_knows_its_errors():
    made = demo.make()
    assert made.wrong.mean() == pytest.approx(0.42, abs=0.03)
    assert len(made.job.trusted) == 100
    assert set(made.job.mixed.groups) == set(demo.SOURCES)
    again = demo.make()
    np.testing.assert_array_equal(made.job.mixed.y, again.job.mixed.y)


@pytest.mark.slow
def test_the_demonstration_finds_the_bad_sources(tmp_path):
    done = run("clean", "--demo", "--out", tmp_path / "out", "--device", "cpu")
    assert done.code == 0, done.text
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    decisions = {row["group"]: row["decision"] for row in summary["weights"]}
    assert [decisions[name] for name in demo.SOURCES] == ["keep"] * 3 + ["drop"] * 3
    assert min(summary["demo"]["precision"], summary["demo"]["recall"]) > 0.9
    assert summary["demo"]["accuracy_after"] > summary["demo"]["accuracy_before"]
