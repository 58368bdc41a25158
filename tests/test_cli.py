"""The command end to end: a run, its files, resuming, and what bad input gets."""

import json
import subprocess
import sys

import pytest

import fsla
from fsla.experiments.folder import Folder, RunError, write_text
from fsla.experiments.synthetic import SyntheticSpec, run


def command(*args, cwd=None):
    return subprocess.run([sys.executable, "-m", "fsla", *args], capture_output=True, text=True, cwd=cwd, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "new" / "deeper"
    done = command("reproduce", "synthetic", "--out", str(out), "--seeds", "1")
    assert done.returncode == 0, done.stderr
    return out, done


def test_a_run_leaves_records_summary_and_figures(folder):
    out, done = folder
    for name in ("estimators", "sequences", "products", "time"):
        assert (out / f"fig1-{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (out / f"fig1-{name}.svg").read_text()
        assert f"fig1-{name}.png" in done.stdout
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert {r["run"] for r in records} == {"estimators", "sequences", "divergence", "timing"}
    assert json.loads((out / "summary.json").read_text())["K_to_level"]["FSLA"]["1e-06"] > 10
    assert (out / "summary.md").read_text().startswith("# Synthetic quadratic")
    assert not [p for p in out.rglob("*") if p.name.startswith(".")]  # no temporary file is left
    assert "Warning" not in done.stderr


def test_the_same_command_again_repeats_no_run(folder):
    out, _ = folder
    before = {p.name: p.stat().st_mtime_ns for p in (out / "runs").iterdir()}
    done = command("reproduce", "synthetic", "--out", str(out), "--seeds", "1")
    assert done.returncode == 0
    assert {p.name: p.stat().st_mtime_ns for p in (out / "runs").iterdir()} == before


def test_a_folder_of_another_run_is_refused(folder):
    out, _ = folder
    before = (out / "records.jsonl").read_bytes()
    done = command("reproduce", "overview", "--out", str(out))
    assert done.returncode == 2
    assert "experiment: synthetic there, cleaning now" in done.stderr
    assert "Traceback" not in done.stderr
    assert (out / "records.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["reproduce", "synthetic"], "--out"),
        (["reproduce", "synthetic", "--out", "x", "--seeds", "0"], "--seeds"),
        (["reproduce", "sinthetic"], "sinthetic"),
        (["reproduce", "synthetic", "--out", "/proc/nowhere/x"], "must be writable"),
        (["reproduce", "fig2", "--out", "x", "--scale", "big"], "The scale must be one of 'smoke', 'paper'"),
        (["reproduce", "fig2", "--out", "x", "--device", "tpu"], "The device must be 'auto', 'cpu' or"),
        (["reproduce", "fig2", "--out", "x", "--device", "meta"], "The device must be 'auto', 'cpu' or"),
        (["reproduce", "fig2", "--out", "x", "--budget", "-1"], "'budget' of reproduce must be positive"),
        (["reproduce", "fig2", "--out", "x", "--model", "cn"], "Did you mean 'cnn'"),
        (["reproduce", "fig4", "--out", "x", "--scale", "paper", "--data-dir", "none"], "fashion-mnist needs files"),
        (["data", "fetch", "minst"], "Did you mean 'mnist'"),
        (["data", "check", "minst"], "Did you mean 'mnist'"),
    ],
)
def test_bad_input_gets_one_message(args, text, tmp_path):
    done = command(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_output_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "x").write_text("mine")
    done = command("reproduce", "synthetic", "--out", str(tmp_path / "x"))
    assert done.returncode == 2
    assert "must be writable" in done.stderr
    assert (tmp_path / "x").read_text() == "mine"


def test_version_and_help():
    assert command("--version").stdout.strip() == f"fsla {fsla.__version__}"
    assert "reproduce" in command("--help").stdout


def test_an_interrupted_experiment_resumes_where_it_stopped(tmp_path):
    spec = SyntheticSpec(seeds=2, K_max=5, K_timed=5, K_sequence=10)

    class Stop(Exception):
        pass

    def stop_at(name, done, total):
        if done == 4:
            raise Stop

    with pytest.raises(Stop):
        run(spec, Folder(tmp_path / "a", "synthetic", spec), stop_at)
    assert len(list((tmp_path / "a" / "runs").iterdir())) == 4
    done = []
    resumed = run(spec, Folder(tmp_path / "a", "synthetic", spec), lambda name, k, n: done.append(name))
    whole = run(spec, Folder(tmp_path / "b", "synthetic", spec), lambda name, k, n: None)

    more = SyntheticSpec(seeds=3, K_max=5, K_timed=5, K_sequence=10)
    assert len(run(more, Folder(tmp_path / "a", "synthetic", more), lambda name, k, n: None)) > len(whole)

    def timeless(records):
        return [{k: v for k, v in r.items() if not k.startswith("s_")} for r in records]

    assert timeless(resumed) == timeless(whole)
    assert json.loads((tmp_path / "a" / "records.jsonl").read_text().splitlines()[0]) == resumed[0]


def test_a_damaged_settings_file_is_named(tmp_path):
    write_text(tmp_path / "spec.json", "{half")
    with pytest.raises(RunError, match=r"spec.json must be the settings of a run"):
        Folder(tmp_path, "synthetic", SyntheticSpec())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    write_text(tmp_path / "x", "old")
    monkeypatch.setattr("pathlib.Path.replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_text(tmp_path / "x", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "old"


def test_bad_specs_get_one_message():
    with pytest.raises(ValueError, match="'K_max' of SyntheticSpec must be at least 1"):
        SyntheticSpec(K_max=0)


def test_cleaning_figures_from_one_command(tmp_path):
    """`overview` at smoke scale, then `fig4` into the same folder: runs are shared, figures and summary are there."""
    out = tmp_path / "x"
    done = command("reproduce", "overview", "--out", str(out), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert (out / "overview.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((out / "summary.json").read_text())
    assert len(summary["runs"]) == 6
    held = {c["claim"]: c["held"] for c in summary["claims"]}
    assert held["Cleaning helps (not a claim of the paper's)"] is True
    assert held["… also without momentum"] is False  # what does not hold is said
    first = next(iter((out / "runs").iterdir()))
    stamp = first.stat().st_mtime_ns
    done = command("reproduce", "fig4", "--out", str(out), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert first.stat().st_mtime_ns == stamp
    assert "FSLA beats the best CG in time" in (out / "summary.md").read_text()
    assert "<svg" in (out / "fig4.svg").read_text()
    summary = json.loads((out / "summary.json").read_text())
    assert len(summary["runs"]) == 6 + 6  # those of the first command are still there
    other = command("reproduce", "fig4", "--budget", "5", "--out", str(out))
    assert other.returncode == 2
    assert "budget_s: None there, 5.0 now" in other.stderr


def test_data_list_and_check(tmp_path):
    assert "0 of 4 files" in command("data", "list", "--data-dir", str(tmp_path)).stdout
    done = command("data", "check", "mnist", "--data-dir", str(tmp_path))
    assert done.returncode == 1
    assert "BAD" in done.stdout
    assert "missing" in done.stdout
