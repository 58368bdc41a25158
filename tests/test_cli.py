"""The command end to end: a run, its files, resuming, and what bad input gets."""

import errno
import json
import os
import stat
import sys
import threading

import pytest

import fsla
from fsla import cli
from fsla_reproduction.folder import Folder, check_parent
from fsla_reproduction.synthetic import SyntheticSpec, run
from launch import finish


def command(*args, cwd=None, **environment):
    return finish(sys.executable, "-m", "fsla", *args, cwd=cwd, env=os.environ | environment)


def synthetic(out):
    """`fsla reproduce synthetic` with one seed, in a process of its own, at a small size."""
    code = (
        "from functools import partial; from fsla import cli; from fsla_reproduction import synthetic\n"
        "synthetic.SyntheticSpec = partial(synthetic.SyntheticSpec, K_max=120, K_timed=20, K_sequence=300)\n"
        "cli.main()\n"
    )
    return finish(sys.executable, "-c", code, "reproduce", "synthetic", "--out", out, "--seeds", "1")


@pytest.fixture
def inside(monkeypatch, capsys):
    """Runs a command in this process; gives the exit code, stdout and stderr."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["fsla", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "new" / "deeper"
    done = synthetic(out)
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
    done = synthetic(out)
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
        (["reproduce", "fig2", "--out", "x", "--preset", "big"], "The preset must be one of 'smoke', 'paper'"),
        (["reproduce", "fig2", "--out", "x", "--device", "tpu"], "The device must be 'auto', 'cpu' or"),
        (["reproduce", "fig2", "--out", "x", "--device", "meta"], "The device must be 'auto', 'cpu' or"),
        (["reproduce", "fig2", "--out", "x", "--time-limit", "-1"], "'time_limit' of reproduce must be positive"),
        (["reproduce", "fig2", "--out", "x", "--model", "cn"], "Did you mean 'cnn'"),
        (["reproduce", "fig4", "--out", "x", "--preset", "paper", "--data-dir", "none"], "fashion-mnist needs files"),
        (["reproduce", "fig2", "--out", "x", "--engine", "grap"], "Did you mean 'graph'"),
        (["data", "fetch", "minst"], "Did you mean 'mnist'"),
        (["data", "check", "minst"], "Did you mean 'mnist'"),
    ],
)
def test_bad_input_gets_one_message(args, text, tmp_path, inside, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = inside(*args)
    assert code == 2
    assert text in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_bad_input_ends_the_process(tmp_path):
    done = command("reproduce", "fig2", "--out", "x", "--model", "cn", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("fsla: ")
    assert "Did you mean 'cnn'" in done.stderr


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--preset", "big"], "The preset must be one of"),
        (["--device", "tpu"], "The device must be"),
        (["--engine", "grap"], "Did you mean 'graph'"),
        (["--model", "cn"], "Did you mean 'cnn'"),
        (["--time-limit", "0"], "must be positive"),
        (["--preset", "paper", "--data-dir", "none"], "mnist needs files"),
    ],
)
def test_everything_is_checked_before_anything_is_run(args, text, tmp_path, inside, monkeypatch):
    monkeypatch.setattr("fsla_reproduction.synthetic.run", lambda *args: pytest.fail("the synthetic experiment ran"))
    code, _, err = inside("reproduce", "all", "--out", str(tmp_path / "x"), *args)
    assert code == 2
    assert text in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["synthetic", "cleaning"])
def test_all_refuses_a_folder_of_other_files_before_anything_is_run(place, tmp_path, inside, monkeypatch):
    monkeypatch.setattr("fsla_reproduction.synthetic.run", lambda *args: pytest.fail("the synthetic experiment ran"))
    (tmp_path / place).mkdir()
    (tmp_path / place / "summary.md").write_text("mine")
    code, _, err = inside("reproduce", "all", "--out", str(tmp_path))
    assert code == 2
    assert f"{tmp_path / place} holds other files (summary.md for one)" in err
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == [place, f"{place}/summary.md"]


def test_all_refuses_a_folder_that_is_not_its_own(tmp_path, inside, monkeypatch):
    monkeypatch.setattr("fsla_reproduction.synthetic.run", lambda *args: pytest.fail("the synthetic experiment ran"))
    (tmp_path / "thesis.tex").write_text("mine")
    code, _, err = inside("reproduce", "all", "--out", str(tmp_path))
    assert code == 2
    assert "holds other files (thesis.tex for one)" in err
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "synthetic").mkdir()
    (tmp_path / "synthetic" / "spec.json").write_text("{}")
    check_parent(tmp_path, ("synthetic", "cleaning"))  # with an experiment of ours in it, other files may be beside


def test_an_output_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "x").write_text("mine")
    done = command("reproduce", "synthetic", "--out", str(tmp_path / "x"))
    assert done.returncode == 2
    assert "must be writable" in done.stderr
    assert (tmp_path / "x").read_text() == "mine"


def test_version_and_help(inside):
    assert command("--version").stdout.strip() == f"fsla {fsla.__version__}"
    for args in ((), ("reproduce",), ("data",), ("bench",)):
        code, out, _ = inside(*args, "--help")
        assert code == 0
        assert "0 done, 1 a check failed, 2 bad input, 70 a defect of fsla, 130 interrupted" in " ".join(out.split())


def test_greek_letters_need_no_greek_terminal():
    done = command("data", "list", "--data-dir", "δ", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == r"folder: \u03b4"


def test_texts_of_the_user_are_shown_as_they_are(tmp_path, inside):
    strange = tmp_path / "[/x]\x1b[31m\n:smile:\udcff"
    shown = str(tmp_path) + r"/[/x]\x1b[31m\n:smile:\udcff"
    code, out, _ = inside("data", "list", "--data-dir", str(strange))
    assert code == 0
    assert out.splitlines()[0] == f"folder: {shown}"
    code, out, _ = inside("data", "check", "mnist", "--data-dir", str(strange))
    assert code == 1
    assert out.startswith(f"BAD {shown}/mnist/")
    strange.mkdir(parents=True)
    (strange / "x").write_text("mine")
    code, _, err = inside("reproduce", "synthetic", "--out", str(strange))
    assert code == 2
    assert f"{shown} holds other files" in err
    assert len(err.splitlines()) == 1


def test_a_run_into_a_strangely_named_folder_ends_well(tmp_path, inside, monkeypatch):
    spec = SyntheticSpec(seeds=1, K_max=5, K_timed=5, K_sequence=10)
    monkeypatch.setattr("fsla_reproduction.synthetic.SyntheticSpec", lambda seeds: spec)
    code, out, err = inside("reproduce", "synthetic", "--out", str(tmp_path / "[/x]\x1b[31m"))
    assert code == 0, err
    assert str(tmp_path) + r"/[/x]\x1b[31m/summary.md" in out.splitlines()[-3]
    assert "\x1b[31m" not in out


def test_an_interruption_is_said_in_one_line(tmp_path):
    """A real SIGINT in a real process, at the first run."""
    code = (
        "import os, signal, sys; from fsla import cli; from fsla_reproduction import synthetic\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may have it ignored\n"
        "synthetic._estimators = lambda spec, seed, tell: os.kill(os.getpid(), signal.SIGINT)\n"
        "cli.main()\n"
    )
    done = finish(sys.executable, "-c", code, "reproduce", "synthetic", "--out", "x", cwd=tmp_path)
    assert done.returncode == 130
    assert done.stderr == "fsla: interrupted; the same command resumes.\n"
    assert {p.name for p in (tmp_path / "x").iterdir()} == {"spec.json", "runs"}


def test_a_write_that_breaks_off_gets_one_message(tmp_path):
    """A limit on the size of files breaks a write off midway, as a full disk does."""
    code = (
        "import resource; from fsla import cli; from fsla_reproduction.plots import synthetic\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); cli.main()\n"
    )
    done = finish(sys.executable, "-c", code, "reproduce", "synthetic", "--seeds", "1", "--out", tmp_path / "x")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "runs/estimators-000.jsonl must be usable. It is not: File too large." in done.stderr
    assert {p.name for p in (tmp_path / "x").rglob("*")} == {"spec.json", "runs"}


def test_a_full_disk_is_said_with_what_to_do(tmp_path, inside, monkeypatch):
    def full(path, *args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("fsla_benchmarks.steps.request.measure", lambda *args, **more: ([], []))
    monkeypatch.setattr("fsla_benchmarks.steps.save", full)
    code, _, err = inside("bench", "steps", "--json", str(tmp_path / "rows.json"))
    assert code == 2
    assert err == (
        f"fsla: {tmp_path / 'rows.json'} must be usable. It is not: No space left on device. Free some room and give "
        "the same command again; experiments resume.\n"
    )
    assert not list(tmp_path.iterdir())


def test_a_benchmark_into_a_pipe_leaves_the_pipe(inside, monkeypatch, tmp_path):
    monkeypatch.setattr("fsla_benchmarks.steps.request.measure", lambda *args, **more: ([], []))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    seen = []
    reader = threading.Thread(target=lambda: seen.append(pipe.read_text()))
    reader.start()
    code, out, err = inside("bench", "steps", "--json", str(pipe))
    reader.join()
    assert code == 0, err
    assert out.splitlines()[-1] == str(pipe)
    assert json.loads(seen[0])["rows"] == []
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("path", ["/proc/nowhere/rows.json", "/proc/rows.json", "/dev/null/rows.json", "/"])
def test_a_benchmark_that_could_not_be_written_is_not_measured(path, inside, monkeypatch):
    monkeypatch.setattr("fsla_benchmarks.steps.request.measure", lambda *args, **more: pytest.fail("measured"))
    code, _, err = inside("bench", "steps", "--json", path)
    assert code == 2
    assert f"fsla: {path} must be usable" in err


def test_damaged_runs_are_done_again(folder):
    out, _ = folder
    whole = json.loads((out / "summary.json").read_text())
    (out / "runs" / "sequences-000.jsonl").write_text("{half")
    (out / "runs" / "divergence-000.jsonl").write_text("")
    done = synthetic(out)
    assert done.returncode == 0, done.stderr
    again = json.loads((out / "summary.json").read_text())
    assert again == whole


def test_the_claims_are_shown(folder):
    out, done = folder
    assert "BP and NS coincide" in done.stdout
    assert "| BP and NS coincide | yes |" in (out / "summary.md").read_text()
    assert "Hessian-vector products" not in done.stdout


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


def test_bad_specs_get_one_message():
    with pytest.raises(ValueError, match="'K_max' of SyntheticSpec must be at least 1"):
        SyntheticSpec(K_max=0)


def test_a_cleaning_figure_from_one_command(tmp_path):
    out = tmp_path / "x"
    done = command("reproduce", "overview", "--out", str(out), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert (out / "overview.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((out / "summary.json").read_text())
    assert len(summary["runs"]) == 6
    claims = {c["claim"]: c["holds"] for c in summary["claims"]}
    assert claims["Cleaning helps (not a claim of the paper's)"] is True
    assert claims["… also without momentum"] is False  # what does not hold is said
    spec = json.loads((out / "spec.json").read_text())
    assert list(spec["data"]) == ["digits"]
    (out / "spec.json").write_text(json.dumps(spec | {"data": {"digits": "another"}}))
    other = command("reproduce", "overview", "--out", str(out), "--device", "cpu")
    assert other.returncode == 2
    assert "other images or labels of digits than were read now" in other.stderr
    (out / "spec.json").write_text(json.dumps(spec))
    other = command("reproduce", "fig4", "--time-limit", "5", "--out", str(out))
    assert other.returncode == 2
    assert "time_limit: None there, 5.0 now" in other.stderr


@pytest.mark.slow
def test_figures_share_their_runs(tmp_path):
    out = tmp_path / "x"
    assert command("reproduce", "overview", "--out", str(out), "--device", "cpu").returncode == 0
    first = next(iter((out / "runs").iterdir()))
    stamp = first.stat().st_mtime_ns
    done = command("reproduce", "fig4", "--out", str(out), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert first.stat().st_mtime_ns == stamp
    assert "FSLA beats the best CG in time" in (out / "summary.md").read_text()
    assert "<svg" in (out / "fig4.svg").read_text()
    summary = json.loads((out / "summary.json").read_text())
    assert len(summary["runs"]) == 6 + 6  # those of the first command are still there


def test_data_list_and_check(tmp_path):
    assert "0 of 4 files" in command("data", "list", "--data-dir", str(tmp_path)).stdout
    done = command("data", "check", "mnist", "--data-dir", str(tmp_path))
    assert done.returncode == 1
    assert "BAD" in done.stdout
    assert "missing" in done.stdout
