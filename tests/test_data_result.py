"""A result: its tables, its folder and its model's file."""

import csv
import io
import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from fabricated import CLASSES, Predictor, fabricate, fabricated_result
from fsla.data import _output as output
from fsla.data._clean import build_result
from fsla.data._output import FILES, table_for_people

HOSTILE = [
    "=1+1",
    "+cmd",
    "-2+3",
    "@SUM(A1)",
    "\tx",
    "-3.5",
    "plain",
    'quo"te, comma',
    "a\r\nb",
    " 007 ",
    "1e3",
    "ü\u202e",
]


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def hidden(folder):
    return [p.name for p in folder.iterdir() if p.name.startswith(".")]


# ------------------------------------------------------------------------------------------ tables


def test_saved_folder_has_all_files_and_their_columns(tmp_path):
    """Programs of the users read these names."""
    fabricated_result("better").save(tmp_path / "out")
    out = tmp_path / "out"
    assert sorted(p.name for p in out.iterdir()) == [
        "cleaned.csv", "group_weights.csv", "label_issues.csv", "model.safetensors", "report.html", "review.csv",
        "summary.json",
    ]  # fmt: skip
    header = {p.name: p.read_text(encoding="utf-8").splitlines()[0] for p in out.glob("*.csv")}
    assert header == {
        "cleaned.csv": "a,b,note,source,label,original_label,sample_weight",
        "group_weights.csv": "group,n_samples,noise_rate,noise_rate_low,noise_rate_high,label_quality,weight,"
        "weight_low,weight_high,decision,reason",
        "label_issues.csv": "row,id,given_label,suggested_label,suggested_probability,is_label_issue,label_quality,"
        "sample_weight,group",
        "review.csv": "row,id,given_label,suggested_label,probability,reason,is_random,group,text",
    }
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["generator"]["name"] == "fsla"
    assert summary["summary"][0].startswith("Drop forum")
    assert summary["n_samples"] == 120
    assert summary["n_trusted"] == 40
    assert summary["files"] == sorted(p.name for p in out.iterdir())
    assert {row["decision"] for row in summary["groups"]} == {"keep", "drop"}
    assert summary["comparison"]["gain"] == {"value": 0.13, "low": 0.06, "high": 0.2}


def test_label_issues_are_sorted_worst_first_without_checked_rows():
    """The first rows are those that are worth a look."""
    result = fabricated_result("better")
    assert result.label_issues["label_quality"].is_monotonic_increasing
    assert set(result.label_issues["row"]) == set(range(40, 120))
    issues = result.label_issues[result.label_issues["is_label_issue"]]
    assert (issues["given_label"] != issues["suggested_label"]).all()


def test_checked_rows_have_their_checked_label_and_full_weight():
    """Nobody knows better."""
    loaded, _ = fabricate("better")
    result = fabricated_result("better")
    cleaned = result.cleaned.iloc[:40]
    assert cleaned["label"].tolist() == CLASSES[loaded.data.checked_labels].tolist()
    assert (cleaned["sample_weight"] == 1).all()


def test_sample_weight_is_that_of_the_label_that_a_row_has():
    """A corrected label counts as its probability, a given one as its vote."""
    result = fabricated_result("better")
    cleaned = result.cleaned.iloc[40:]
    corrected = cleaned["label"] != cleaned["original_label"]
    assert corrected.any()
    np.testing.assert_allclose(cleaned.loc[corrected, "sample_weight"], 0.97)
    forum = (cleaned["source"] == "forum") & ~corrected
    np.testing.assert_allclose(cleaned.loc[forum, "sample_weight"], 0.05)
    np.testing.assert_allclose(cleaned.loc[~forum & ~corrected, "sample_weight"], 1.0)


def test_cleaned_cells_stay_as_they_are_written(tmp_path):
    """A program reads them: 007 is not 7, and nothing is defused."""
    texts = [HOSTILE[i % len(HOSTILE)] for i in range(120)]
    result = fabricated_result("better", texts=texts)
    result.save(tmp_path / "out")
    with open(tmp_path / "out" / "cleaned.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["note"] for row in rows] == texts


def test_files_for_people_hold_no_formula(tmp_path):
    """A spreadsheet would run what begins with an equals sign."""
    ids = [HOSTILE[i % len(HOSTILE)] for i in range(120)]
    result = fabricated_result("better", ids=ids, texts=ids, review=40)
    result.save(tmp_path / "out")
    for name in ("label_issues.csv", "review.csv"):
        with open(tmp_path / "out" / name, newline="", encoding="utf-8") as file:
            cells = [cell for row in csv.reader(file) for cell in row]
        bad = [cell for cell in cells if cell.startswith(("=", "+", "@", "\t", "\r")) or cell == "-2+3"]
        assert bad == []
        assert "'=1+1" in cells
        assert "-3.5" in cells  # a number is no formula


def test_table_for_people_names_no_missing_value():
    table = pd.DataFrame({"=a": [None, np.nan, 1.23456789], "b": [True, False, True]})
    assert list(csv.reader(io.StringIO(table_for_people(table)))) == [
        ["'=a", "b"], ["", "true"], ["", "false"], ["1.23457", "true"],
    ]  # fmt: skip


def test_column_names_that_are_taken_get_an_underscore():
    """A table may have a sample_weight of its own."""
    loaded, fit = fabricate("better")
    loaded.table.insert(0, "sample_weight", "7")
    result = build_result(loaded, fit, relabel="sure", review=0, seed=0, inputs={})
    assert result.cleaned["sample_weight"].tolist()[:3] == ["7"] * 3
    assert "_sample_weight" in result.cleaned


# ------------------------------------------------------------------------------------------ folder


def test_save_replaces_an_earlier_run_and_leaves_nothing_hidden(tmp_path):
    for effect in ("better", "unknown"):
        fabricated_result(effect, checked=0 if effect == "unknown" else 40).save(tmp_path / "out")
    assert hidden(tmp_path) == []
    assert "No recommendation" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["notes.md", "plots/a.png", "report.html/a", "no manifest"])
def test_save_refuses_a_folder_with_files_of_the_user(tmp_path, name):
    """They would be removed with the folder."""
    out = tmp_path / "out"
    result = fabricated_result("better")
    result.save(out)
    foreign = name.split("/")[0]
    if name == "no manifest":
        summary = json.loads((out / "summary.json").read_text())
        summary.pop("files")
        (out / "summary.json").write_text(json.dumps(summary))
        foreign = "cleaned.csv, group_weights.csv, label_issues.csv"
    else:
        if name == "report.html/a":
            (out / "report.html").unlink()
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=f"Cannot use --out {out}: no summary.json of fsla lists {foreign}"):
        result.save(out)
    assert contents(tmp_path) == before


def test_save_that_breaks_off_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    """A full disk must not cost the earlier results."""
    result = fabricated_result("better")
    result.save(tmp_path / "out")
    before = contents(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device", "summary.json")

    monkeypatch.setattr(output, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        result.save(tmp_path / "out")
    assert contents(tmp_path) == before
    assert hidden(tmp_path) == []


def test_save_keeps_both_where_files_appear_meanwhile(tmp_path, monkeypatch):
    """The user's file stays, and so do the results."""
    out = tmp_path / "out"
    result = fabricated_result("better")
    result.save(out)
    before = contents(out)
    write_text = output.write_text

    def meanwhile(path, text):
        (out / "notes.md").write_text("mine")
        write_text(path, text)

    monkeypatch.setattr(output, "write_text", meanwhile)
    with pytest.raises(ValueError, match=r"fsla did not write notes\.md"):
        result.save(out)
    (spare,) = (p for p in tmp_path.iterdir() if p.name.startswith("out-"))
    assert contents(out) == before | {"notes.md": b"mine"}
    assert set(contents(spare)) == set(before)
    assert hidden(tmp_path) == []


LOCKING = "import fcntl, os, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); f.write(str(os.getpid()))"


def test_save_refuses_a_folder_that_another_process_writes(tmp_path):
    """Each would replace what the other one writes. What a killed process left is taken over."""
    result = fabricated_result("better")
    code = f"{LOCKING}; f.flush(); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, tmp_path / ".out.lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(ValueError, match=f"The process {other.pid} is using it"):
            result.save(tmp_path / "out")
        other.kill()
    assert hidden(tmp_path) == [".out.lock"]
    result.save(tmp_path / "out")
    assert hidden(tmp_path) == []


def test_save_follows_a_link_that_the_user_names(tmp_path):
    """The folder that it leads to is replaced, not the link."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "deep" / "real")
    for _ in range(2):
        fabricated_result("better").save(tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["real"]


def test_save_refuses_links_in_the_place_of_its_files(tmp_path):
    """A planted lock, folder or summary leads to files of the user."""
    result, out, victim = fabricated_result("better"), tmp_path / "out", tmp_path / "victim"
    victim.write_text("123")
    (tmp_path / ".out.lock").symlink_to(victim)
    with pytest.raises(ValueError, match="it is a symbolic link"):
        result.save(out)
    (tmp_path / ".out.lock").unlink()
    out.symlink_to("out")
    with pytest.raises(ValueError, match="it is not a folder"):
        result.save(out)
    out.unlink()
    result.save(out)
    (out / "summary.json").rename(tmp_path / "summary.json")
    (out / "summary.json").symlink_to(tmp_path / "summary.json")
    with pytest.raises(ValueError, match=r"lists cleaned\.csv"):
        result.save(out)
    assert victim.read_text() == "123"


def test_all_written_files_are_declared(tmp_path):
    """A file that is not in FILES would never be cleared away."""
    fabricated_result("better").save(tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} <= FILES


def test_model_that_cannot_be_saved_is_said_and_all_else_is_written(tmp_path):
    """A module of the user's own has no state that fsla can read back."""

    class MyNet(Predictor):
        def to_state(self):
            raise ValueError("MyNet is no model of fsla.")

    loaded, fit = fabricate("better")
    object.__setattr__(fit, "predictor", MyNet(fit.predictor.table))
    result = build_result(loaded, fit, relabel="sure", review=5, seed=0, inputs={})
    assert result.facts[-1] == "model.safetensors is not written: MyNet is no model of fsla."
    result.save(tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert (tmp_path / "out" / "report.html").exists()
