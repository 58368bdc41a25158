"""`fsla clean` and `fsla weigh`: files in, a folder out, and a round of review that comes back in."""

import json
import re
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import fsla.data as data
from browser import CHROMIUM, chromium
from fsla._storage import _container as container
from fsla.cli import app
from fsla.data import _demo as digits
from fsla.data import _output as output

LABELS = np.array(["ant", "bee", "cow"])


def run(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(done.exception, ValueError | OSError):
        return SimpleNamespace(code=2, text=str(done.exception))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return SimpleNamespace(code=done.exit_code, text=done.output)


def frame(n, seed):
    """Return rows of three sources, of which the forum's labels are all shifted, and their true labels."""
    rng = np.random.default_rng(seed)
    centers = 3 * np.random.default_rng(7).standard_normal((3, 4))
    true = rng.integers(3, size=n)
    table = pd.DataFrame(centers[true] + rng.standard_normal((n, 4)), columns=["a", "b", "c", "d"]).round(4)
    table["source"] = np.array(["web", "book", "forum"])[np.arange(n) % 3]
    table["label"] = LABELS[np.where(table["source"] == "forum", (true + 1) % 3, true)]
    table["name"] = [f"s{i}" for i in range(n)]
    return table, LABELS[true]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with data.csv (60 of 240 rows checked at random) and trusted.csv, and one run on it."""
    folder = tmp_path_factory.mktemp("cli")
    table, true = frame(240, 0)
    checked = np.random.default_rng(1).permutation(240)[:60]
    table["checked"] = ""
    table.loc[checked, "checked"] = true[checked]
    table.to_csv(folder / "data.csv", index=False)
    trusted, trusted_true = frame(60, 5)
    trusted.assign(label=trusted_true).drop(columns=["source", "name"]).to_csv(folder / "trusted.csv", index=False)
    done = run("clean", folder / "data.csv", *COLUMNS, "-o", folder / "out")
    assert done.code == 0, done.text
    (folder / "output.txt").write_text(done.text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def result(folder):
    """Return what Python says of the same table."""
    return data.clean(folder / "data.csv", group="source", id="name", checked="checked")


COLUMNS = ("--group-column", "source", "--id-column", "name", "--checked-column", "checked")


def test_clean_finds_the_bad_source_and_corrects_its_labels(folder):
    """The whole way: a table in, a decision that is right out."""
    text = (folder / "output.txt").read_text(encoding="utf-8")
    groups = pd.read_csv(folder / "out" / "group_weights.csv").set_index("group")
    assert groups["decision"].to_dict() == {"web": "keep", "book": "keep", "forum": "drop"}
    assert "Drop forum" in text.splitlines()[0]
    cleaned = pd.read_csv(folder / "out" / "cleaned.csv")
    true = dict(zip(frame(240, 0)[0]["name"], frame(240, 0)[1], strict=True))
    right = cleaned["label"] == cleaned["name"].map(true)
    assert right.mean() > 0.95
    assert (cleaned["original_label"] == cleaned["name"].map(true)).mean() < 0.8


def test_terminal_summary_and_report_have_the_same_lines(folder):
    """A decision that reads differently in two places is none."""
    text = (folder / "output.txt").read_text(encoding="utf-8")
    lines = json.loads((folder / "out" / "summary.json").read_text(encoding="utf-8"))["summary"]
    assert "\n".join(lines) in text
    page = (folder / "out" / "report.html").read_text(encoding="utf-8").replace("\u00a0", " ")
    assert all(line in page for line in lines)
    assert text.rstrip().endswith("report.html")


def test_python_and_command_give_the_same_result(folder, result):
    """The command is a wrapper."""
    lines = json.loads((folder / "out" / "summary.json").read_text(encoding="utf-8"))["summary"]
    assert [result.decision, *result.facts] == lines
    saved = pd.read_csv(folder / "out" / "label_issues.csv")
    assert saved["row"].tolist() == result.label_issues["row"].tolist()
    again = data.load_model(folder / "out" / "model.safetensors")
    rows = frame(50, 9)[0]
    np.testing.assert_allclose(again.predict_proba(rows), result.model.predict_proba(rows))
    assert (again.predict(rows) == result.model.predict(rows)).all()
    assert (again.predict(rows) == frame(50, 9)[1]).mean() > 0.9


def test_model_predicts_the_same_from_a_file_with_other_columns(folder):
    """New rows come with more columns, and in another order."""
    model = data.load_model(folder / "out" / "model.safetensors")
    rows = frame(50, 9)[0]
    expected = model.predict_proba(rows)
    np.testing.assert_allclose(model.predict_proba(rows[["d", "name", "c", "b", "a"]].assign(more=1)), expected)
    np.testing.assert_allclose(model.predict_proba(rows.astype(str)), expected)
    with pytest.raises(ValueError, match="a"):
        model.predict(rows.drop(columns="a"))


@pytest.mark.parametrize("position", [100, 2000, -100])
def test_damaged_model_file_is_refused(folder, tmp_path, position):
    """One bit of another model is another model."""
    content = bytearray((folder / "out" / "model.safetensors").read_bytes())
    content[position] ^= 1
    (tmp_path / "model").write_bytes(content)
    with pytest.raises(ValueError, match="Cannot read"):
        data.load_model(tmp_path / "model")


def edits(value, path=()):
    """Yield copies of a JSON value, each with one part replaced or removed, and where that is."""
    for bad in (None, -1, "x", [], {}, 10**30, [[]], True, 0.5, ["x"], {"a": 1}):
        yield path, bad
    if isinstance(value, dict):
        for name in value:
            yield (*path, name), {key: part for key, part in value.items() if key != name}
            for where, changed in edits(value[name], (*path, name)):
                yield where, value | {name: changed}
    elif isinstance(value, list) and value:
        for where, changed in edits(value[0], (*path, 0)):
            yield where, [changed, *value[1:]]


def test_edited_model_file_is_refused_or_predicts(folder, tmp_path):
    """Whoever edits a file and its digest gets one message or a model, never a crash on loading."""
    stored = container.read(folder / "out" / "model.safetensors", "fsla.data model")
    rows = frame(5, 9)[0]
    messages, loaded = [], []

    def load(tensors, content, where):
        (tmp_path / "x").write_bytes(container.to_bytes("fsla.data model", tensors, content))
        try:
            model = data.load_model(tmp_path / "x")
        except ValueError as error:
            messages.append(f"{error} ({where})")
            return
        loaded.append(where)
        with suppress(ValueError):  # such as a column that has another name now
            assert len(model.predict(rows)) == 5, where

    for where, content in edits(stored.json):
        load(stored.tensors, content, where)
    for name, tensor in stored.tensors.items():
        load({key: part for key, part in stored.tensors.items() if key != name}, stored.json, f"without {name}")
        for changed in (tensor[None], tensor.to(torch.int32), tensor[:0], torch.ones(3, 3)):
            load(stored.tensors | {name: changed}, stored.json, name)
    assert [message for message in messages if not message.startswith("Cannot read")] == []
    assert {where for where in loaded if where in {(name,) for name in stored.json}} <= {("text",)}  # {} is right there


def test_other_file_of_fsla_is_no_model(tmp_path):
    container.write(tmp_path / "model", "a checkpoint", {}, {})
    with pytest.raises(ValueError, match=r"it holds a checkpoint, not fsla\.data model"):
        data.load_model(tmp_path / "model")
    container.write(tmp_path / "model", "fsla.data model", {}, {"task": "classification"})
    with pytest.raises(ValueError, match="it is no model that fsla saved"):
        data.load_model(tmp_path / "model")


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed; apt-get install chromium installs it")
def test_reviewed_file_comes_back_as_trusted_rows(folder, tmp_path):
    """A round of review: decide in the page, save, run again with the file."""
    true = dict(zip(frame(240, 0)[0]["name"], frame(240, 0)[1], strict=True))
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    with chromium(tmp_path / "profile") as page:
        page.open(folder / "out" / "report.html", 390)
        names = pd.read_csv(folder / "out" / "review.csv")["id"].tolist()
        page.evaluate("document.querySelector('article').focus()")
        for name in names:
            page.press(str(1 + LABELS.tolist().index(true[name])))
        saved = page.download("document.getElementById('save').click()", downloads)
    assert len(names) == 50
    (tmp_path / "reviewed.csv").write_bytes(saved)
    done = run("clean", folder / "data.csv", *COLUMNS, "--trusted", tmp_path / "reviewed.csv", "-o", tmp_path / "out")
    assert done.code == 0, done.text
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert summary["n_trusted"] == 60 + 50
    assert summary["comparison"]["rows"] == 60 + 25  # rows that look wrong judge nothing
    again = pd.read_csv(tmp_path / "out" / "review.csv")
    assert not set(again["id"]) & set(names)
    cleaned = pd.read_csv(tmp_path / "out" / "cleaned.csv").set_index("name")
    assert all(cleaned.loc[name, "label"] == true[name] for name in names)


def test_weigh_of_numbers_changes_none(tmp_path):
    """Groups of numbers: the bad one is found, and cleaned.csv keeps what was given."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 3))
    price = x @ [3.0, -2.0, 1.0] + 10 + 0.1 * rng.standard_normal(300)
    table = pd.DataFrame(x, columns=["a", "b", "c"]).round(4)
    table["source"] = np.array(["web", "book", "forum"])[np.arange(300) % 3]
    table["price"] = np.where(table["source"] == "forum", rng.permutation(price), price).round(4)
    table["checked"] = [f"{p:.4f}" if i < 80 else "" for i, p in enumerate(price)]
    table.to_csv(tmp_path / "data.csv", index=False)
    done = run(
        "weigh", tmp_path / "data.csv", "--label-column", "price", "--group-column", "source",
        "--checked-column", "checked", "-o", tmp_path / "out",
    )  # fmt: skip
    assert done.code == 0, done.text
    weights = pd.read_csv(tmp_path / "out" / "group_weights.csv").set_index("group")["weight"]
    assert weights["forum"] < 0.3 < weights[["web", "book"]].min()
    cleaned = pd.read_csv(tmp_path / "out" / "cleaned.csv")
    unchecked = cleaned[cleaned["checked"].isna()]
    assert (unchecked["price"] == unchecked["original_price"]).all()
    assert "root mean squared error" in done.text


def test_quiet_prints_the_decision_alone(folder, result, monkeypatch):
    """A log of many runs has one line a run."""
    monkeypatch.setattr(data, "clean", lambda *_, **__: result)
    done = run("clean", folder / "data.csv", "--quiet", "-o", folder / "quiet")
    assert done.text == f"{result.decision}\n"


def test_options_of_the_command_reach_clean(tmp_path, monkeypatch):
    """An option that goes nowhere looks as if it worked."""
    calls = []

    def record(source, **options):
        calls.append((source, options))
        raise ValueError("enough")

    monkeypatch.setattr(data, "clean", record)
    options = {
        "label": ("--label-column", "y"), "group": ("--group-column", "g"), "id": ("--id-column", "i"),
        "checked": ("--checked-column", "k"), "trusted_column": ("--trusted-column", "t"),
        "annotator": ("--annotator-column", "w"), "image": ("--image-column", "p"),
        "label_columns": ("--label-columns", "a,b"), "text": ("--text-column", "n, m"),
        "features": ("--feature-columns", "x"), "ignore": ("--ignore-columns", "z"), "encoder": ("--encoder", "dir"),
        "relabel": ("--relabel", "all"), "review": ("--review", "7"), "missing": ("--missing", "error"),
        "task": ("--task", "regression"), "image_size": ("--image-size", "32"), "random_state": ("--seed", "3"),
    }  # fmt: skip
    arguments = [part for pair in options.values() for part in pair]
    done = run("clean", "d.csv", *arguments, "--trusted", "t.csv", "--trusted", "r.csv", "-o", tmp_path / "out")
    assert done.text == "enough"
    ((source, passed),) = calls
    lists = {"label_columns": ["a", "b"], "text": ["n", "m"], "features": ["x"], "ignore": ["z"]}
    numbers = {"review": 7, "image_size": 32, "random_state": 3}
    expected = {name: value for name, (_, value) in options.items()} | lists | numbers
    assert str(source) == "d.csv"
    assert {name: passed[name] for name in expected} == expected
    assert [str(path) for path in passed["trusted"]] == ["t.csv", "r.csv"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["clean"], "No data. Name a file or a folder, or use --demo."),
        (["weigh", "data.csv"], "No groups to weigh. Name their column with --group-column"),
        (["clean", "data.csv", "--relabel", "maybe"], "The relabel must be one of 'never', 'sure', 'all'"),
        (["clean", "data.csv", "--device", "tpu"], "The device must be"),
        (["clean", "nowhere.csv"], "Cannot read nowhere.csv"),
        (["clean", "data.csv", "--label-column", "lable"], "label"),
    ],
)
def test_command_that_cannot_work_says_why_and_writes_nothing(folder, tmp_path, monkeypatch, arguments, text):
    """One message, and what to do."""
    monkeypatch.chdir(folder)
    done = run(*arguments, "-o", tmp_path / "out")
    assert done.code == 2
    assert text in done.text
    assert list(tmp_path.iterdir()) == []


def test_folder_with_files_of_the_user_is_refused_before_training(folder, tmp_path, monkeypatch):
    """Nobody waits for an hour to read that."""
    (tmp_path / "thesis.tex").write_text("precious")
    monkeypatch.setattr(data, "clean", None)
    done = run("clean", folder / "data.csv", "-o", tmp_path)
    assert done.code == 2
    assert f"Cannot use --out {tmp_path}: no summary.json of fsla lists thesis.tex" in done.text


def test_folder_is_locked_while_the_command_trains(folder, tmp_path, monkeypatch):
    """A second run would replace what the first one writes."""
    messages = []

    def clean(*_, **__):
        messages.append(run("clean", folder / "data.csv", "-o", tmp_path / "out").text)
        raise ValueError("enough")

    monkeypatch.setattr(data, "clean", clean)
    assert run("clean", folder / "data.csv", "-o", tmp_path / "out").text == "enough"
    assert "(this one) is using it" in messages[0]
    assert [p.name for p in tmp_path.iterdir()] == []


def test_disk_that_is_full_leaves_the_earlier_run(folder, result, tmp_path, monkeypatch):
    """The last good results are worth more than half of the new ones."""
    result.save(tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device", "summary.json")

    monkeypatch.setattr(data, "clean", lambda *_, **__: result)
    monkeypatch.setattr(output, "write_text", full)
    assert run("clean", folder / "data.csv", "-o", tmp_path / "out").code == 2
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


def test_time_limit_of_zero_skips_strategies_and_says_so(folder, tmp_path):
    """A result of half the candidates is another result."""
    done = run("clean", folder / "data.csv", *COLUMNS, "--time-limit", 0, "--review", 0, "-o", tmp_path / "out")
    assert done.code == 0
    assert "Time was up before these strategies" in done.text
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["skipped_strategies"]


def test_demo_table_has_the_errors_that_it_tells_of():
    """Two fifths are wrong, in three of six sources."""
    demo = digits.make_demo()
    assert demo.wrong.mean() == pytest.approx(0.42, abs=0.03)
    assert (demo.table["checked"] != "").sum() == 100
    rates = pd.Series(demo.wrong).groupby(demo.table["source"]).mean()
    assert (rates[list(digits.SOURCES[:3])] < 0.1).all()
    assert (rates[list(digits.SOURCES[3:])] > 0.4).all()
    pd.testing.assert_frame_equal(demo.table, digits.make_demo().table)


@pytest.mark.slow
def test_demo_finds_the_bad_sources(tmp_path):
    """What a visitor sees first must be right."""
    done = run("clean", "--demo", "-o", tmp_path / "out")
    assert done.code == 0, done.text
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    decisions = {row["group"]: row["decision"] for row in summary["groups"]}
    assert [decisions[name] for name in digits.SOURCES[:3]] == ["keep"] * 3
    assert "keep" not in [decisions[name] for name in digits.SOURCES[3:]]
    assert min(summary["demo"]["precision"], summary["demo"]["recall"]) > 0.9
    assert summary["demo"]["accuracy"] > summary["demo"]["accuracy_as_it_is"]
    assert re.search(r"Demo: \d+ % of the flagged labels are wrong", done.text.splitlines()[-1])
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert page.count("<img") == 50  # a person judges digits by sight, not by 64 numbers
    assert "pixel_3_3 " not in page.split("Rows to review")[-1].split("Confusions")[0]


def test_messages_name_the_flags_of_the_command(tmp_path):
    """Whoever types a command has no `annotator=` to set."""
    (tmp_path / "x.csv").write_text("x,label\n1,a\n2,b\n")
    done = run("clean", tmp_path / "x.csv", "--annotator-column", "x", "-o", tmp_path / "out")
    assert done.text.startswith("--annotator-column needs --id-column, the column that says which rows are")
    done = run("clean", tmp_path / "x.csv", "--task", "regression", "-o", tmp_path / "out")
    assert done.text.endswith("Correct them, or set --task classification.")
