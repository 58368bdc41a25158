"""Checkpoints bit for bit, and runs that end with the same records whenever they are killed."""

import json
import os
import signal
import sys
from functools import partial

import pytest
import torch

import fsla
from fsla import StepBatches
from fsla.train import CheckpointError, load_checkpoint, save_checkpoint
from fsla_reproduction import cleaning
from fsla_reproduction.cleaning import RunSpec, execute, prepare, warm_up
from fsla_reproduction.datasets import TaskSpec, make_task
from fsla_reproduction.methods import Bp, Cg, Fsla, NoCleaning, Ns, Oracle
from launch import finish
from support import network

TINY = RunSpec(
    TaskSpec("digits", n_train=60, n_valid=40), model="softmax", steps=20, every=4, batch=16,
    delta=10.0, c_tau=0.1, c_beta=0.01, c_eta=0.09,
)  # fmt: skip


def save_at_every_step(monkeypatch):
    monkeypatch.setattr(cleaning, "run_algorithm", partial(cleaning.run_algorithm, save_every_minutes=1e-12))


def timeless(records):
    return [{k: v for k, v in r.items() if k not in ("seconds", "preparation_seconds")} for r in records]


@pytest.mark.parametrize("name", ["fsla", "bp", "cg", "soba"])
def test_run_state_round_trip_is_exact(tmp_path, name):
    problem, at, train, valid = network(torch.float32)
    more = {"inner_steps": 3} if name in ("bp", "cg") else {}
    solver = fsla.algorithms.get_algorithm(name)(fsla.steps.constant(0.1, 0.1, 0.1), **more)
    batches = StepBatches.shared(train, valid)
    state = solver.step(problem, solver.init(problem, at, batches), batches)
    save_checkpoint(tmp_path / "x", (state, torch.get_rng_state(), 0.1, "text", None, True))
    loaded, random, *rest = load_checkpoint(tmp_path / "x")
    assert rest == [0.1, "text", None, True]
    assert torch.equal(random, torch.get_rng_state())
    assert type(loaded) is type(state)
    one = solver.step(problem, state, batches)
    two = solver.step(problem, loaded, batches)
    assert all(torch.equal(one.direction[k], two.direction[k]) for k in one.direction)
    assert all(torch.equal(one.omega.value[k], two.omega.value[k]) for k in one.omega.value)


def test_run_damaged_checkpoint_is_named(tmp_path):
    save_checkpoint(tmp_path / "x", ({"a": torch.ones(3)},))
    (tmp_path / "y").write_bytes((tmp_path / "x").read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"Cannot read .* damaged.*Remove it"):
        load_checkpoint(tmp_path / "y")
    (tmp_path / "z").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="Cannot read"):
        load_checkpoint(tmp_path / "z")
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(CheckpointError, match="no file of fsla"):
        load_checkpoint(tmp_path / "other")
    with pytest.raises(TypeError, match="Got object instead"):
        save_checkpoint(tmp_path / "w", object())


@pytest.mark.parametrize("method", [Fsla(), Bp(3), Ns(1, 3), Cg(2, 3), NoCleaning(), Oracle()], ids=str)
def test_run_with_one_seed_is_repeatable(method):
    spec = RunSpec(**{**TINY.__dict__, "method": method})
    one = execute(spec)
    two = execute(spec)
    assert timeless(one) == timeless(two)
    assert [r["step"] for r in one] == [0, 4, 8, 12, 16, 20]
    assert one[-1]["status"] == "finished"
    assert json.loads(json.dumps(one)) == one


@pytest.mark.parametrize(
    ("method", "samples", "engine", "stop"),
    [(method, "independent", "auto", stop) for method in (Fsla(), Bp(3), Cg(2, 3)) for stop in (4, 12, 16)]
    + [(method, samples, "eager", 12) for method in (Fsla(), Cg(1, 3), Ns(2, 3)) for samples in ("grouped", "shared")],
)
def test_run_stopped_resumes_to_same_records(tmp_path, monkeypatch, method, samples, engine, stop):
    save_at_every_step(monkeypatch)
    spec = RunSpec(**{**TINY.__dict__, "method": method, "samples": samples})

    class Killed(Exception):
        pass

    def kill(record):
        if record["step"] == stop:
            raise Killed

    with pytest.raises(Killed):
        execute(spec, checkpoint=tmp_path / "part", on_measure=kill, engine=engine)
    seen = []
    resumed = execute(spec, checkpoint=tmp_path / "part", on_measure=lambda r: seen.append(r["step"]), engine=engine)
    assert 0 not in seen or stop == 4  # it went on from its checkpoint
    assert timeless(resumed) == timeless(execute(spec, engine=engine))


def test_command_killed_resumes_to_same_records(tmp_path):
    """A real process that is ended by SIGKILL at different steps; the records of the whole are the same."""
    code = (
        "import os, signal, sys; from functools import partial; from pathlib import Path\n"
        "from fsla_reproduction import cleaning\n"
        "cleaning.run_algorithm = partial(cleaning.run_algorithm, save_every=10)\n"
        "from dataclasses import replace; from fsla_reproduction.figures import PRESETS\n"
        "PRESETS['smoke'] = replace(PRESETS['smoke'], base=replace(PRESETS['smoke'].base, steps=40))\n"
        "from fsla_reproduction.figures import CleaningSpec; from fsla_reproduction.reproduce import reproduce\n"
        "import torch; torch.set_num_threads(1)\n"
        "def report(name, done, total):\n"
        "    if [str(done)] == sys.argv[2:]:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "reproduce(Path(sys.argv[1]), CleaningSpec(), ('fig4',), 1, report=report)\n"
    )

    def outcome(name, *kill_at):
        command = [sys.executable, "-c", code, tmp_path / name, *kill_at]
        return finish(*command, env=os.environ | {"PYTHONWARNINGS": "ignore"}).returncode

    assert outcome("whole") == 0
    for done in (20 / 40, 2 + 40 / 40):  # saved at 10 and at 30
        assert outcome("killed", done) == -signal.SIGKILL
        assert list((tmp_path / "killed" / "runs").glob("*.part*"))
    assert outcome("killed") == 0
    records = [
        [json.loads(line) for line in (tmp_path / name / "records.jsonl").read_text().splitlines()]
        for name in ("whole", "killed")
    ]
    assert timeless(records[0]) == timeless(records[1])
    assert not list((tmp_path / "killed" / "runs").glob("*.part*"))


def test_run_budget_stops_and_reports(monkeypatch):
    ticks = iter(range(10**9))
    monkeypatch.setattr("fsla.train._loop.perf_counter", lambda: float(next(ticks)))  # each step takes a second
    records = execute(RunSpec(**{**TINY.__dict__, "budget_s": 6.5}))
    assert [(r["step"], r["status"]) for r in records] == [(0, "running"), (4, "running"), (7, "budget")]
    assert records[-1]["seconds"] == 7.0


def test_run_divergence_is_reported():
    spec = RunSpec(**{**TINY.__dict__, "c_tau": 1e30, "steps": 100})
    records = execute(spec)
    assert records[-1]["status"] == "diverged"
    assert "valid_loss" in records[-1]["not_finite"]
    assert records[-1]["valid_loss"] is None
    json.dumps(records, allow_nan=False)


def test_run_measuring_changes_no_counts():
    often, seldom = (execute(RunSpec(**{**TINY.__dict__, "every": e}))[-1] for e in (1, 20))
    for record in (often, seldom):
        del record["seconds"], record["preparation_seconds"], record["run"]
    assert often == seldom
    assert often["oracles"]["hvp"] == 20
    assert often["oracles"]["mixed_hvp"] == 40


def test_run_record_fields():
    first, *_, last = execute(TINY)
    assert first["spec"]["batch"] == 16
    assert first["changed_labels"] > 0
    assert first["origin"] == "scikit-learn"
    assert first["weight_auroc"] == 0.5
    assert first["weight_clean"] == first["weight_corrupted"] == 0.5
    assert sum(last["histogram_clean"]) + sum(last["histogram_corrupted"]) == 60
    for key in (
        "valid_accuracy",
        "test_accuracy",
        "weight_ap",
        "confidence_auroc",
        "confidence_ap",
        "v_norm",
        "d_norm",
    ):
        assert last[key] is not None
    assert last["hypergradient_norm"] > 0


def test_cleaning_experiment_reduces_loss():
    """On digits with four fifths of the labels redrawn: a lower loss, and weights that rank the wrong labels."""
    from fsla_reproduction.figures import CleaningSpec, panels

    runs = panels(CleaningSpec()).panel("fig2", "FSLA and BP").runs
    fsla_run, none, oracle = (execute(runs[label])[-1] for label in ("FSLA", "no cleaning", "oracle"))
    assert oracle["valid_loss"] < fsla_run["valid_loss"] < 0.8 * none["valid_loss"]
    assert fsla_run["weight_auroc"] > 0.9
    assert fsla_run["weight_clean"] > fsla_run["weight_corrupted"] + 0.2


@pytest.mark.parametrize("model", ["cnn", "cnn-small", "cnn4", "softmax"])
def test_cleaning_experiment_every_model_runs(model):
    spec = RunSpec(**{**TINY.__dict__, "model": model, "steps": 2, "every": 2})
    assert execute(spec)[-1]["status"] == "finished"


def test_method_batches_match_spec():
    """BP differentiates the steps that were taken; T inner steps have T batches; STORM's batches are its own."""
    task = make_task(TINY.task)

    def draw(method):
        return prepare(RunSpec(**{**TINY.__dict__, "method": method}), task)[0].draw()

    batches = draw(Bp(3))
    assert batches.hvp == batches.inner_grad  # a batch is equal to itself alone
    assert len(batches.inner_grad) == 3
    batches = draw(Cg(2, 3))
    assert len(batches.inner_grad) == 2
    assert not set(batches.hvp) & set(batches.inner_grad)
    batches = draw(Fsla())
    drawn = [batch for slot in batches.slots for batch in slot]
    assert len(set(drawn)) == 5
    assert all(len(batch.data) == TINY.batch for batch in drawn)


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_run_stopped_at_once_resumes_to_same_records(tmp_path, monkeypatch, stop):
    """The first steps are those in which states get their lasting form; no batch may be lost in them."""
    save_at_every_step(monkeypatch)
    spec = RunSpec(**{**TINY.__dict__, "steps": 6, "every": 1})
    whole = execute(spec)

    class Stop(Exception):
        pass

    def interrupt(record):
        if record["step"] == stop + 1:
            raise Stop

    with pytest.raises(Stop):
        execute(spec, checkpoint=tmp_path / "x", on_measure=interrupt)
    assert timeless(execute(spec, checkpoint=tmp_path / "x")) == timeless(whole)


def test_run_warm_up_step_leaves_no_trace():
    spec = RunSpec(TaskSpec("digits", n_train=60, n_valid=40), model="softmax", steps=4, batch=8)
    run, _ = prepare(spec, make_task(spec.task))
    random = run.generator.get_state()
    warm_up(run)
    assert torch.equal(run.generator.get_state(), random)
    assert run.problem.calls == run.problem.samples == fsla.OracleCounts()
