"""Many runs: whoever does them, the records are the same; what goes wrong is one message, and what ended stays."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import joblib
import pytest
import torch
from joblib.parallel import BACKENDS, ThreadingBackend

from fsla import cli
from fsla.distributed import ProcessGroup
from fsla_reproduction import cleaning, figures, reproduce
from fsla_reproduction.folder import Folder, RunError
from fsla_reproduction.images import load_once
from fsla_reproduction.job import Job
from fsla_reproduction.runs import Workers, workers
from fsla_reproduction.synthetic import SyntheticSpec, run
from launch import LIMIT_S, wait_until

SMALL = SyntheticSpec(seeds=2, K_max=5, K_timed=5, K_sequence=10)


@dataclass(frozen=True)
class Spec:
    seeds: int = 1


def timeless(folder):
    """The records of every run, without the times."""
    records = {}
    for path in sorted((folder / "runs").iterdir()):
        lines = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
        records[path.name] = [
            {k: x for k, x in r.items() if "seconds" not in k and not k.startswith("s_")} for r in lines
        ]
    return records


@pytest.fixture
def inside(monkeypatch, capsys):
    """Runs a command in this process; gives the exit code, stdout and stderr."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["fsla", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return call


class Cluster(ThreadingBackend):
    """Two threads in the place of a cluster's workers."""

    requests = 0

    def effective_n_jobs(self, n_jobs):
        assert n_jobs == -1  # all that the cluster has
        return 2

    def submit(self, func, callback=None):
        type(self).requests += 1
        return super().submit(func, callback)


class Lists(Cluster):
    """As Ray's: it has no generators."""

    supports_return_generator = False


@pytest.fixture
def cluster():
    """The back ends dask and ray of joblib, with threads in the place of a cluster."""
    Cluster.requests = Lists.requests = 0
    joblib.register_parallel_backend("dask", Cluster)
    joblib.register_parallel_backend("ray", partial(Lists))
    yield
    for name in ("dask", "ray"):
        BACKENDS.pop(name, None)


# ------------------------------------------------------------------------------------------------- the same records


@pytest.fixture(scope="module")
def expected_records(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    run(SMALL, Folder(out, "synthetic", SMALL))
    return timeless(out)


def test_runs_in_two_processes_equal_one(tmp_path, expected_records):
    seen = []
    run(SMALL, Folder(tmp_path, "synthetic", SMALL), lambda *args: seen.append(args), Workers(2))
    assert timeless(tmp_path) == expected_records
    assert [done for _, done, _ in seen] == [
        1,
        2,
        3,
        4,
        5,
        6,
        6,
        7,
    ]  # the one with the clock begins when all have ended
    assert seen[-1] == ("timing", 7, 7)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    (tmp_path / "runs" / "divergence-001.jsonl").unlink()
    run(SMALL, Folder(tmp_path, "synthetic", SMALL), workers=Workers(2))
    assert timeless(tmp_path) == expected_records
    assert [path.name for path in before if path.stat().st_mtime_ns != before[path]] == ["divergence-001.jsonl"]


@pytest.mark.parametrize(("backend", "kind"), [("dask", Cluster), ("ray", Lists)])
def test_runs_on_cluster_equal_one_process(backend, kind, tmp_path, expected_records, cluster):
    seen = []
    with joblib.parallel_config(backend):
        pool = workers()
        assert pool.number == 2
        run(SMALL, pool.open(tmp_path, "synthetic", SMALL), lambda *args: seen.append(args), pool)
    assert timeless(tmp_path) == expected_records
    assert kind.requests == 6  # the one with the clock is not for a cluster
    assert [done for _, done, _ in seen] == [1, 2, 3, 4, 5, 6, 6, 7]


def by_itself(report):
    calls.append(1)
    time.sleep(0.05)
    return [{"beside": len(calls) - 1, "done": calls.pop()}]


calls = []


def test_worker_with_threads_runs_one_at_a_time(tmp_path, cluster):
    """Runs share the random state and the warnings of their process."""
    folder = Folder(tmp_path, "x", Spec())
    jobs = [Job(name, name, by_itself) for name in "abcd"]
    with joblib.parallel_config("dask"):
        workers().do(folder, jobs)
    assert folder.gather("abcd") == [{"beside": 0, "done": 1}] * 4


@pytest.mark.parametrize("backend", ["dask", "ray"])
def test_command_uses_configured_cluster(backend, tmp_path, inside, cluster, monkeypatch):
    monkeypatch.setattr("fsla_benchmarks.compare.plot.draw", lambda out, results: [])
    args = "--algorithms", "soba", "--problems", "quadratic", "--seeds", "1", "--max-oracle-calls", "20"
    with joblib.parallel_config(backend):
        code, output, err = inside("compare", "--out", str(tmp_path / "x"), *args)
    assert (code, err) == (0, "")
    assert "with 2 processes" in output
    assert (Cluster if backend == "dask" else Lists).requests == 3
    assert inside("compare", "--out", str(tmp_path / "y"), *args)[0] == 0
    assert timeless(tmp_path / "x") == timeless(tmp_path / "y")


def test_cleaning_run_in_worker_resumes_exactly(tmp_path, monkeypatch):
    smoke = figures.PRESETS["smoke"]
    monkeypatch.setitem(figures.PRESETS, "smoke", replace(smoke, base=replace(smoke.base, steps=8, every=2)))
    plans = [reproduce.prepare(tmp_path / name, figures.CleaningSpec(), ("fig4",), 1) for name in ("one", "two")]
    reproduce.carry_out(plans[0])

    class Stop(Exception):
        pass

    seen = []

    def stop(record):
        seen.append(record)
        if record["step"] == 6:
            raise Stop

    monkeypatch.setattr(cleaning, "run_algorithm", partial(cleaning.run_algorithm, save_every=2))
    first = plans[1].panels.runs(("fig4",), 1)[0]
    folder = Folder(plans[1].out, "cleaning", plans[1].panels.cleaning_spec, plans[1].fingerprints)
    part = folder.runs / f"{first.name}.part"
    images = load_once(first.task.dataset, plans[1].fingerprints[first.task.dataset], None)
    with pytest.raises(Stop):
        cleaning.execute(first, checkpoint=part, images=images, on_measure=stop)
    assert sorted(path.name for path in part.iterdir()) == ["checkpoint-00000004.safetensors", "records.jsonl"]
    reproduce.carry_out(plans[1], workers=Workers(2))
    assert timeless(tmp_path / "one") == timeless(tmp_path / "two")
    assert len(timeless(tmp_path / "two")) == 6  # and no checkpoint is left
    lines = (folder.runs / f"{first.name}.jsonl").read_text().splitlines()
    assert json.loads(lines[1])["seconds"] == seen[1]["seconds"] > 0  # it was not taken again
    assert (tmp_path / "two" / "summary.json").exists()


def test_worker_with_other_data_runs_nothing(monkeypatch):
    with pytest.raises(RunError, match="One read other images or labels of digits"):
        load_once("digits", "the print of other images", None)


# ---------------------------------------------------------------------------------------------------- what goes wrong


class Strange(Exception):
    """Cannot be built again from its text."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def fails(error, report):
    raise error


def strange(report):
    raise Strange(1, 2)


def records(report):
    return [{"threads": torch.get_num_threads()}]


def ends_after(path, report):
    while not path.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("work", "kind", "text"),
    [
        (partial(fails, ValueError("must hold")), ValueError, "^must hold"),
        (partial(fails, OSError(28, "full", "x")), OSError, "full: 'x'"),
        (strange, RuntimeError, "^Strange: 1 and 2"),
    ],
)
def test_worker_error_propagates(work, kind, text, tmp_path):
    with pytest.raises(kind, match=text):
        Workers(2).do(Folder(tmp_path, "x", Spec()), [Job("a", "a", work)])


def test_worker_killed_keeps_finished_runs(tmp_path):
    folder = Folder(tmp_path, "x", Spec())
    bad = Job("b", "b", partial(ends_after, folder.runs.resolve() / "a.jsonl"))
    with pytest.raises(RunError, match=r"must live until its runs have ended.*The runs that ended are kept"):
        Workers(2).do(folder, [Job("a", "a", records), bad])
    assert folder.finished("a")
    assert [path.name for path in folder.runs.iterdir()] == ["a.jsonl"]
    stamp = (folder.runs / "a.jsonl").stat().st_mtime_ns
    Workers(2).do(folder, [Job("a", "a", records), Job("b", "b", records)])
    assert folder.gather(["a", "b"]) == [{"threads": 1}] * 2
    assert (folder.runs / "a.jsonl").stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--jobs", "0"], "--jobs"),
    ],
)
def test_jobs_invalid_value_raises(args, text, tmp_path, inside):
    code, _, err = inside("reproduce", "synthetic", "--out", str(tmp_path / "x"), *args)
    assert code == 2
    assert text in err
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------- several processes

SCRIPT = """
import os, signal
from fsla import cli
from fsla_reproduction import synthetic
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may have it ignored
synthetic.SyntheticSpec.__init__.__defaults__ = (20, 5, 5, 10, *synthetic.SyntheticSpec.__init__.__defaults__[4:])
save = synthetic.Folder.save
def saved(folder, name, records):
    with open("saved" + os.environ.get("RANK", ""), "a") as file:
        print(name, file=file)
    save(folder, name, records)
synthetic.Folder.save = saved
def draw(out, records):
    with open(out / "figure", "a") as file:
        file.write(os.environ.get("RANK", ""))
    return []
import fsla_reproduction.plots.synthetic
fsla_reproduction.plots.synthetic.draw = draw
if "breaks" in os.environ and os.environ["RANK"] == "1":
    synthetic._sequences = lambda *args: 1 / 0
cli.main()
"""


def start(tmp_path, launcher, *args, **environment):
    (tmp_path / "script.py").write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, *launcher, "script.py", *args],
        cwd=tmp_path,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_runs_on_ranks_leave_same_files(tmp_path, expected_records):
    process = start(tmp_path, TORCHRUN, "reproduce", "synthetic", "--seeds", "2", "--out", "x")
    output, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert timeless(tmp_path / "x") == expected_records
    assert output.count("summary.md") == output.count("BP and NS coincide") == 1
    names = {path.name for path in (tmp_path / "x").iterdir()}
    assert names == {"spec.json", "runs", "records.jsonl", "summary.json", "summary.md", "figure"}
    assert (tmp_path / "x" / "figure").read_text() == "0"
    saved = [(tmp_path / f"saved{rank}").read_text().split() for rank in (0, 1)]
    names = [job.name for job in SMALL.runs()]
    assert saved == [[*names[0:6:2], "timing"], names[1:6:2]]


@pytest.mark.parametrize(
    ("name", "got"), [("auto", "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")]
)
def test_runs_on_ranks_use_one_gpu_each(name, got, monkeypatch):
    chosen = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    monkeypatch.setattr("fsla_reproduction.runs.pick_device", torch.device)
    monkeypatch.setenv("LOCAL_RANK", "3")  # more ranks than GPUs: two share one
    assert Workers(group=ProcessGroup(5, 8)).device(name) == torch.device(got)
    assert chosen == ([1] if got == "cuda:1" else [])


def test_cluster_on_ranks_raises(monkeypatch, cluster):
    monkeypatch.setattr("fsla.distributed.get_group", lambda: ProcessGroup(1, 2))
    with pytest.raises(RunError, match="2 ranks"), joblib.parallel_config("dask"):
        workers()
    assert Cluster.requests == 0


def test_rank_failure_ends_all_ranks(tmp_path):
    process = start(tmp_path, TORCHRUN, "reproduce", "synthetic", "--seeds", "2", "--out", "x", breaks="")
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0
    assert "ZeroDivisionError" in err
    assert not (tmp_path / "x" / "summary.md").exists()


def test_interrupt_ends_workers_and_keeps_files(tmp_path):
    process = start(tmp_path, (), "reproduce", "synthetic", "--seeds", "200", "--jobs", "2", "--out", "x")
    runs = tmp_path / "x" / "runs"
    wait_until(lambda: process.poll() is not None or len(list(runs.glob("*.jsonl"))) > 4)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert err == "fsla: interrupted; the same command resumes.\n"
    spec = replace(SMALL, seeds=200)
    folder = Folder(tmp_path / "x", "synthetic", spec)
    assert all(folder.finished(path.stem) for path in folder.runs.iterdir())
    wait_until(lambda: not members(process.pid))


def members(group):
    """The processes of a group that run."""
    names = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(of) == group and state != "Z":
            names.append(path)
    return names
