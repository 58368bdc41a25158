"""The loop: what ends a run, what its records say, and that a killed run ends as one that was not."""

import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import fsla
from fsla import CountedProblem, OracleCounts, State, StepBatches
from fsla.algorithms._orders import Alternating, AlternatingState
from fsla.steps import Variable
from fsla.train import CheckpointError, save_checkpoint
from fsla.train import _loop as loop
from fsla.train import _stores as stores
from fsla.train._checkpoint import load_nest, save_nest
from fsla_reproduction.algorithm_run import Run, run_algorithm
from fsla_reproduction.run_records import Status, health, work
from support import network, ridge_logistic

RATES = fsla.steps.constant(0.05, 0.1, 0.1, 0.5)
TIMES = ("seconds", "preparation_seconds")


class Killed(Exception):
    pass


def make_run(*, rates=RATES, name="fsla", kill_at=None, seed=0, algorithm=None) -> Run:
    """A small run that draws random rows; its draw raises when it is asked for the sample of step `kill_at`."""
    problem, at, train_batch, valid_batch = ridge_logistic()
    generator = torch.Generator().manual_seed(seed)
    draws = 0

    def rows(batch):
        index = torch.randint(len(batch["x"]), (8,), generator=generator)
        return {key: t[index] for key, t in batch.items()}

    def draw():
        nonlocal draws
        if kill_at is not None and draws == kill_at:
            raise Killed
        draws += 1
        return StepBatches.draw("independent", lambda: rows(train_batch), lambda: rows(valid_batch))

    more = {"bp": {"inner_steps": 2}, "cg": {"inner_steps": 2, "hvp_steps": 3}}.get(name, {})
    chosen = algorithm or fsla.algorithms.get_algorithm(name)(rates, **more)
    counted = CountedProblem(problem, size=lambda batch: len(batch["x"]))
    return Run(
        chosen, counted, generator, lambda: chosen.init(problem, at, StepBatches.shared(train_batch, valid_batch)), draw
    )


def train(run, *, steps, every, measure, **more):
    """The records of a run."""
    return run_algorithm(run, max_steps=steps, eval_every=every, eval_fn=measure, **more).records


def last_state(folder):
    """The state in the last checkpoint of a folder."""
    return load_nest(sorted(folder.glob("checkpoint-*"))[-1], stores.KIND)[0]["state"]


def all_numbers(state: State):
    """Every tensor of a state, so that records compare it bit for bit."""
    return {"lam": state.lam.value, "omega": state.omega.value, "v": state.v, "direction": state.direction}


def timeless(records):
    return [{name: x for name, x in record.items() if name not in TIMES} for record in records]


# ----------------------------------------------------------------------------------------------------- divergence


@pytest.mark.parametrize(
    ("value", "recorded", "where"),
    [
        (math.nan, None, "x"),
        (torch.tensor(math.nan), None, "x"),
        (torch.tensor(math.inf, dtype=torch.bfloat16), None, "x"),
        (torch.tensor([1.0, -math.inf]), [1.0, None], "x[1]"),
        (np.float32(math.nan), None, "x"),
        (np.float64(math.nan), None, "x"),
        (np.array([[1.0], [math.nan]]), [[1.0], [None]], "x[1][0]"),
        ([1, [2, math.nan]], [1, [2, None]], "x[1][1]"),
        ({"a": {"b": (0.5, np.float64("inf"))}}, {"a": {"b": [0.5, None]}}, "x.a.b[1]"),
        ([torch.tensor([[math.nan]])], [[[None]]], "x[0][0][0]"),
    ],
    ids=str,
)
def test_train_nonfinite_measurement_ends_run(value, recorded, where):
    def measure(state):
        return {"good": 1.0, "x": value if state.step_count == 2 else 0.0}

    records = train(make_run(), steps=6, every=2, measure=measure)
    assert [r["status"] for r in records] == ["running", "diverged"]
    assert records[-1]["x"] == recorded
    assert records[-1]["diverged"] == where
    assert records[-1]["not_finite"] == [where]
    assert records[-1]["diverged_size"] is None
    assert records[-1]["step"] == 2
    json.dumps(records, allow_nan=False)


def test_train_measurements_become_json():
    measurement = {
        "tensor": torch.tensor(1.5), "whole": torch.tensor(2), "truth": torch.tensor(True), "numpy": np.float32(0.5),
        "index": np.int64(3), "flag": np.bool_(False), "array": np.arange(3), "matrix": torch.eye(2), "text": "a",
        "nothing": None, "tuple": (1, torch.tensor(2.0)), "nested": {"a": [np.float64(1)]},
        "half": torch.ones(1).half(),
    }  # fmt: skip
    record = train(make_run(), steps=1, every=1, measure=lambda state: measurement)[-1]
    expected = {
        "tensor": 1.5, "whole": 2, "truth": True, "numpy": 0.5, "index": 3, "flag": False, "array": [0, 1, 2],
        "matrix": [[1.0, 0.0], [0.0, 1.0]], "text": "a", "nothing": None, "tuple": [1, 2.0], "nested": {"a": [1.0]},
        "half": [1.0],
    }  # fmt: skip
    actual = {name: record[name] for name in expected}
    assert repr(actual) == repr(expected)  # True is not 1, 1 is not 1.0
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert type(record["status"]) is str
    assert record["status"] == Status.FINISHED == "finished"


@pytest.mark.parametrize(
    "name", ["step", "status", "seconds", "preparation_seconds", "engine", "oracles", "diverged", "not_finite"]
)
def test_train_reserved_measurement_name_raises(name):
    run = make_run(kill_at=0)
    with pytest.raises(ValueError, match=f"names of its own. Got '{name}'"):
        train(run, steps=5, every=1, measure=lambda state: {name: "finished"})


@pytest.mark.parametrize(
    ("measured", "why"),
    [
        (1.0, "must return a mapping"),
        ({1: 2.0}, "must be strings. Got 1"),
        ({"a": {2: 1}}, "The names in a must be strings. Got 2"),
        ({"a": [object()]}, r"a\[0\] must be made of numbers.*Got object"),
        ({"a": 1j}, "a must be made of numbers.*Got complex"),
    ],
    ids=["number", "whole name", "whole name within", "object", "complex"],
)
def test_train_unsupported_measurement_raises(measured, why):
    with pytest.raises(TypeError, match=why):
        train(make_run(), steps=5, every=1, measure=lambda state: measured)


@dataclass(frozen=True, kw_only=True)
class Blowing(Alternating):
    """An algorithm that does nothing but make one part of its state larger: factor, factor², …"""

    part: str = "direction"
    factor: float = 1.0

    def move(self, state, step):
        size = -(self.factor ** (step.step_count + 1))

        def blown(tree):
            return {name: torch.full_like(t, size) for name, t in tree.items()}

        omega = state.omega.value
        return {
            "lam": lambda: replace(state, lam=Variable(blown(state.lam.value))),
            "omega": lambda: replace(state, omega=Variable(blown(omega))),
            "trajectory": lambda: replace(state, trajectory=((blown(omega), 0.1),)),
            "omega.memory": lambda: replace(state, omega=Variable(omega, {"moments": blown(omega)})),
            "adjoint": lambda: replace(state, adjoint=Variable(blown(state.v))),
            "direction": lambda: replace(state, direction=blown(state.direction)),
        }[self.part]()


def blowing(part, factor):
    return Blowing(step_sizes=RATES, part=part, factor=factor)


PARTS = ["lam", "omega", "trajectory", "omega.memory", "adjoint", "direction"]


@pytest.mark.parametrize("part", PARTS)
def test_health_covers_every_part(part):
    run = make_run(algorithm=blowing(part, 3e16))
    state = run.start()
    actual = health(state)
    assert all(map(math.isfinite, actual.values()))
    assert actual["lam"] == float(state.lam.value["log_ridge"].abs().max())
    assert actual["adjoint"] == 0.0
    state = run.algorithm.step(run.problem, state, run.draw())
    assert health(state)[part] == max(health(state).values()) == 3e16
    for bad in (math.nan, math.inf, -math.inf):
        run = make_run(algorithm=blowing(part, bad))
        state = run.algorithm.step(run.problem, run.start(), run.draw())
        assert [name for name, size in health(state).items() if not math.isfinite(size)] == [part]


def test_health_accepts_many_dtypes():
    tree = {
        "half": torch.tensor([1.0, -2.0], dtype=torch.float16), "brain": torch.tensor(-7.0, dtype=torch.bfloat16),
        "double": torch.tensor([1e300], dtype=torch.float64), "empty": torch.zeros(0), "index": torch.tensor([10**9]),
    }  # fmt: skip
    plain = {"a": torch.ones(1)}
    state = State(0, Variable(plain), Variable(tree), plain, None)
    assert health(state) == {"lam": 1.0, "omega": 1e300, "direction": 1.0}
    broken = AlternatingState(
        0, Variable(plain), Variable(plain), plain, None, Variable({"a": torch.tensor([math.nan])})
    )
    assert math.isnan(health(broken)["adjoint"])


def test_health_syncs_device_once(monkeypatch):
    state = make_run().start()
    reads = []
    for name in ("tolist", "item", "__float__", "__bool__", "isfinite"):
        method = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, method=method, name=name: reads.append(name) or method(t))
    health(state)
    assert reads == ["tolist"]


@pytest.mark.parametrize("part", PARTS)
def test_train_nonfinite_state_ends_run(part):
    """What is measured looks well: the state itself is checked."""
    run = make_run(algorithm=blowing(part, math.inf))
    records = train(run, steps=6, every=2, measure=lambda state: {"x": 1.0}, engine="eager")
    assert [r["status"] for r in records] == ["running", "diverged"]
    last = records[-1]
    assert (last["diverged"], last["diverged_size"], last["not_finite"], last["step"]) == (part, None, [part], 2)
    json.dumps(records, allow_nan=False)


@pytest.mark.parametrize("part", PARTS)
def test_train_growing_state_ends_run(part):
    def records(growth):
        run = make_run(algorithm=blowing(part, 100.0))
        return train(run, steps=6, every=1, measure=lambda state: {"x": 1.0}, engine="eager", divergence_factor=growth)

    ended = records(1e6)  # 100 at first, so 1e10 is the first that is more than 1e6 times that; λ and ω begin below 1
    first = 5 if part in ("adjoint", "trajectory", "omega.memory") else 4
    assert [r["status"] for r in ended] == ["running"] * first + ["diverged"]
    assert ended[-1]["diverged"] == part
    assert ended[-1]["diverged_size"] == pytest.approx(100.0**first)
    assert ended[-1]["not_finite"] == []
    assert records(1e30)[-1]["status"] == records(None)[-1]["status"] == "finished"


def test_train_detects_growth_before_first_measurement():
    """v is 0 at the start; what it is after the first step is known, though nothing is measured there."""
    run = make_run(algorithm=blowing("adjoint", 100.0))
    records = train(run, steps=20, every=10, measure=lambda state: {"x": 1.0}, engine="eager")
    assert [r["status"] for r in records] == ["running", "diverged"]
    assert records[-1]["diverged"] == "adjoint"


@pytest.mark.parametrize("engine", ["eager"])
def test_train_large_steps_report_divergence(engine):
    run = make_run(rates=fsla.steps.constant(0.0, 0.1, 60.0))
    records = train(run, steps=60, every=20, measure=lambda state: {"loss": 0.0}, engine=engine)
    assert records[-1]["status"] == "diverged"
    assert records[-1]["diverged"] == "adjoint"
    assert 1e6 < records[-1]["diverged_size"] < math.inf


# ------------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"eval_every": 0}, ValueError), ({"eval_every": -1}, ValueError), ({"eval_every": 2.0}, TypeError),
        ({"max_steps": -5}, ValueError),
        ({"max_steps": 0}, ValueError), ({"max_steps": math.nan}, TypeError), ({"max_steps": 10.0}, TypeError),
        ({"max_steps": True}, TypeError), ({"max_steps": "10"}, TypeError), ({"save_every": 0}, ValueError),
        ({"save_every": 1.5}, TypeError), ({"max_oracle_calls": 0}, ValueError),
        ({"max_oracle_calls": 1e3}, TypeError), ({"max_seconds": math.nan}, ValueError),
        ({"max_seconds": 0.0}, ValueError), ({"divergence_factor": math.nan}, ValueError),
        ({"divergence_factor": 1.0}, ValueError), ({"divergence_factor": -1.0}, ValueError),
        ({"divergence_factor": "large"}, TypeError),
    ],
    ids=str,
)  # fmt: skip
def test_train_invalid_argument_raises(arguments, error):
    (name,) = arguments
    run = make_run(kill_at=0)
    run.start = lambda: pytest.fail("the run began")
    with pytest.raises(error, match=f"The '{name}' of run_algorithm must be"):
        run_algorithm(run, **{"max_steps": 10, "eval_every": 5, "eval_fn": all_numbers, **arguments})


def test_train_unwritable_checkpoint_fails_at_start(tmp_path):
    run = make_run()
    run.start = lambda: pytest.fail("the run began")
    (tmp_path / "x").write_text("")
    with pytest.raises(CheckpointError, match=r"Cannot write to .*x: .*Name another folder"):
        train(run, steps=10, every=5, measure=all_numbers, output_dir=str(tmp_path / "x"))


def test_train_unsavable_state_fails_at_first_step(tmp_path):
    from collections import namedtuple

    class Odd(Blowing):
        def move(self, state, step):
            return replace(super().move(state, step), direction={"d": namedtuple("Odd", "a")(1)})

    run = make_run(algorithm=Odd(step_sizes=RATES))
    draws = []
    draw = run.draw
    run.draw = lambda: draws.append(1) or draw()
    with pytest.raises(TypeError, match="Got Odd instead"):
        train(run, steps=10, every=5, measure=all_numbers, output_dir=tmp_path / "x", engine="eager")
    assert draws == [1]


# -------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("name", "engine", "kill_at"), [(name, "eager", k) for name in ("fsla", "bp", "cg") for k in (1, 4, 5, 8, 13)]
)
def test_train_killed_anywhere_resumes_exactly(tmp_path, name, engine, kill_at):
    """Killed between measurements and saves, twice; every tensor of the state is in the records."""
    path = str(tmp_path / "x")

    def train_until(kill_at=None, folder=path):
        run = make_run(name=name, kill_at=kill_at)
        arguments = {"save_every": 2, "run_config": {"name": name}} if folder else {}
        records = train(run, steps=14, every=5, measure=all_numbers, output_dir=folder, engine=engine, **arguments)
        return records, run.problem.samples

    whole, samples = train_until(folder=None)
    assert [r["step"] for r in whole] == [0, 5, 10, 14]
    for _ in range(2):
        with pytest.raises(Killed):
            train_until(kill_at)
        kill_at = 1  # the second time soon after it was taken up
    records, counted = train_until()
    assert timeless(records) == timeless(whole)
    assert counted == samples


@pytest.mark.parametrize("kill_at", [2, 3, 4])
def test_train_resume_keeps_divergence_reference(tmp_path, kill_at):
    def train_until(kill_at=None):
        run = make_run(algorithm=blowing("adjoint", 100.0), kill_at=kill_at)
        return train(
            run, steps=9, every=3, measure=lambda s: {}, engine="eager", output_dir=tmp_path / "x", save_every=1
        )

    with pytest.raises(Killed):
        train_until(kill_at)
    assert last_state(tmp_path / "x").step_count == kill_at
    assert [(r["step"], r["status"]) for r in train_until()] == [(0, "running"), (3, "running"), (6, "diverged")]


def test_train_saves_at_requested_steps(tmp_path, monkeypatch):
    saved = []
    save = stores.FileStore.begin

    def spied(store, path, value, run_id):
        saved.append(value["state"].step_count)
        return save(store, path, value, run_id)

    monkeypatch.setattr(stores.FileStore, "begin", spied)

    def steps_saved(name, every=5, **arguments):
        saved.clear()
        train(make_run(), steps=12, every=every, measure=all_numbers, output_dir=tmp_path / name, **arguments)
        return list(saved)

    assert steps_saved("a", save_every=2) == [2, 4, 6, 8, 10, 12]
    assert steps_saved("b", save_every=2, every=3) == [2, 4, 6, 8, 10, 12]
    assert steps_saved("c", save_every=100) == [12]
    assert steps_saved("d") == [12]
    assert steps_saved("e", save_every_minutes=1e-12) == list(range(1, 13))  # any time is long enough


def saved_run(path, **arguments) -> None:
    with pytest.raises(Killed):
        train(make_run(kill_at=7), steps=14, every=5, measure=all_numbers, output_dir=path, save_every=3, **arguments)


IDENTITY = {"seed": 0, "data": {"name": "digits", "rows": [1, 2]}, "rate": 0.5, "flag": True}


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({**IDENTITY, "seed": 1}, r"\(run_config.seed: 0 there, 1 wanted\)"),
        ({**IDENTITY, "data": {"name": "mnist", "rows": [1, 3]}},
         r"\(run_config.data.name: 'digits' there, 'mnist' wanted; run_config.data.rows\[1\]: 2 there, 3 wanted\)"),
        ({**IDENTITY, "new": 1}, r"\(run_config.new: nothing there, 1 wanted\)"),
        ({**IDENTITY, "flag": 1}, r"\(run_config.flag: True there, 1 wanted\)"),
        ({**IDENTITY, "data": {"name": "digits"}}, r"run_config.data.rows\[0\]: 1 there, nothing wanted"),
        (None, "run_config.seed: 0 there, nothing wanted"),
    ],
    ids=["value", "nested", "missing there", "bool", "missing here", "none"],
)  # fmt: skip
def test_train_checkpoint_of_other_run_raises(tmp_path, other, why):
    saved_run(tmp_path / "x", run_config=IDENTITY)
    before = {p.name: p.read_bytes() for p in (tmp_path / "x").iterdir()}
    with pytest.raises(CheckpointError, match=rf"{tmp_path / 'x'}.* is the checkpoint of another run.*{why}"):
        train(make_run(), steps=14, every=5, measure=all_numbers, output_dir=tmp_path / "x", run_config=other)
    assert {p.name: p.read_bytes() for p in (tmp_path / "x").iterdir()} == before


def test_train_checkpoint_of_other_algorithm_raises(tmp_path):
    """Its state has the same form."""
    saved_run(tmp_path / "x")
    run = make_run(rates=fsla.steps.constant(0.05, 0.1, 0.2, 0.5))
    with pytest.raises(CheckpointError, match=r"algorithm\.step_sizes\.adjoint_lr: 0\.1 there, 0\.2 wanted"):
        train(run, steps=14, every=5, measure=all_numbers, output_dir=tmp_path / "x")


def test_train_equal_run_config_in_other_form_resumes(tmp_path):
    saved_run(tmp_path / "x", run_config={**IDENTITY, "weights": torch.ones(2), "limit": math.nan})
    same = {
        "limit": np.float64("nan"), "weights": [1.0, 1.0], "flag": True, "rate": np.float32(0.5), "seed": 0.0,
        "data": {"rows": (1, 2), "name": "digits"},
    }  # fmt: skip
    train(make_run(), steps=14, every=5, measure=all_numbers, output_dir=tmp_path / "x", run_config=same)
    with pytest.raises(TypeError, match=r"run_config\.path must be made of numbers"):
        train(
            make_run(), steps=1, every=1, measure=all_numbers, output_dir=tmp_path / "y", run_config={"path": tmp_path}
        )


def test_train_checkpoint_without_run_raises(tmp_path):
    saved_run(tmp_path)
    (path,) = tmp_path.glob("checkpoint-*")

    def resumed(**arguments):
        train(make_run(), **{"steps": 14, "every": 5, "measure": all_numbers, "output_dir": tmp_path, **arguments})

    with pytest.raises(CheckpointError, match=r"is at step 6, beyond max_steps=2"):
        resumed(steps=2)
    whole, content = load_nest(path, stores.KIND)
    for name in whole:
        save_nest(path, stores.KIND, {key: value for key, value in whole.items() if key != name}, content.run_id)
        with pytest.raises(CheckpointError, match=rf"(malformed|Cannot resume from.*{name}).*Remove it|remove it"):
            resumed()
    save_checkpoint(path, (1, 2))
    with pytest.raises(CheckpointError, match="it holds a checkpoint, not a checkpoint of fit"):
        resumed()
    for other in ((1, 2), None, {"state": 1}):
        save_nest(path, stores.KIND, other)
        with pytest.raises(CheckpointError, match="it is malformed"):
            resumed()
    state = whole["state"]
    for part in (
        {"calls": {"unheard": 1}}, {"calls": {"grad": "many"}}, {"random": torch.ones(3)}, {"progress": {"step": 1}},
        {"reference": {"lam": "large"}}, {"state": replace(state, step_count=5)}, {"state": 1},
        {"state": State(6, state.lam, state.omega, state.direction, None)},
        {"state": replace(state, lam=Variable({}))}, {"state": replace(state, omega=state.lam)},
        {"state": replace(state, direction={"log_ridge": torch.ones(7, dtype=torch.float64)})},
        {"state": replace(state, lam=Variable({"log_ridge": torch.ones(6)}))},
    ):  # fmt: skip
        save_nest(path, stores.KIND, whole | part)
        with pytest.raises(CheckpointError, match=r"Remove it|remove it"):
            resumed()
    save_nest(path, stores.KIND, whole, content.run_id)
    resumed()


# ------------------------------------------------------------------------------------------------ clock and budget


class Clock:
    """Seconds that pass when a test advances them."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(loop, "perf_counter", lambda: self.now)


def kill_at(step):
    def callback(run, record):
        if record["step"] == step:
            raise Killed

    return callback


class Motor:
    """An engine whose step takes 0.25 s, and which prepares for 8 s in its second call."""

    name = "graph"

    def __init__(self, clock, run, stride):
        self._clock = clock
        self._run = run
        self.stride = stride
        self.preparation_s = 5.0
        self.requests = []

    def advance(self, state, n):
        self.requests.append(n)
        if len(self.requests) == 2:
            self.preparation_s += 8.0
            self._clock.now += 8.0
        self._clock.now += 0.25 * n
        self._run.problem.add(
            n, OracleCounts(grad=1, hvp=1, mixed_hvp=2, joint=1, outer_grad_omega=1, outer_grad_lam=1), OracleCounts()
        )
        return replace(state, step_count=state.step_count + n)


def driven(monkeypatch, *, stride=3, **arguments):
    clock = Clock(monkeypatch)
    run = make_run()
    motor = Motor(clock, run, stride)

    def make(name, algorithm, problem, draw, generator, state, steps, budget_s):
        clock.now += 5.0
        return motor

    def measure(state):
        clock.now += 1000.0
        return {"x": 1.0}

    monkeypatch.setattr("fsla_reproduction.algorithm_run.make_engine", make)
    return train(run, **{"steps": 20, "every": 8, "measure": measure, **arguments}), motor


def test_train_clock_counts_steps_only(monkeypatch):
    records, motor = driven(monkeypatch)
    assert [(r["step"], r["seconds"], r["preparation_seconds"]) for r in records] == [
        (0, 0.0, 0.0), (8, 2.0, 13.0), (16, 4.0, 13.0), (20, 5.0, 13.0),
    ]  # fmt: skip
    assert motor.requests == [1, 7, 8, 4]  # all the steps to the next measurement at once


def test_train_max_seconds_counts_steps_only(monkeypatch):
    records, motor = driven(monkeypatch, max_seconds=2.9)
    assert [(r["step"], r["status"]) for r in records] == [(0, "running"), (8, "running"), (12, "budget")]
    assert records[-1]["seconds"] == 3.0
    assert motor.requests == [1, 2, 3, 2, 1, 3]


def test_train_max_oracle_calls_stops_at_fixed_step(monkeypatch):
    records, _ = driven(monkeypatch, max_oracle_calls=4 * 10)
    assert [(r["step"], r["status"]) for r in records] == [(0, "running"), (8, "running"), (12, "budget")]
    records, _ = driven(monkeypatch, max_oracle_calls=4 * 10, stride=1)
    assert [r["step"] for r in records] == [0, 8, 11]
    records, _ = driven(monkeypatch, max_oracle_calls=4 * 20)
    assert records[-1]["status"] == "finished"


@pytest.mark.parametrize("save_every", [1, 2, 5, 11])
def test_train_max_oracle_calls_ignores_save_points(tmp_path, monkeypatch, save_every):
    records, _ = driven(monkeypatch, max_oracle_calls=4 * 10, output_dir=tmp_path / "x", save_every=save_every)
    assert [(r["step"], r["status"]) for r in records] == [(0, "running"), (8, "running"), (12, "budget")]
    assert last_state(tmp_path / "x").step_count == 12
    records, motor = driven(monkeypatch, max_oracle_calls=4 * 10, output_dir=tmp_path / "x", save_every=save_every)
    assert [(r["step"], r["status"]) for r in records] == [(0, "running"), (8, "running"), (12, "budget")]
    assert motor.requests == []
    before = {1: 11, 2: 10, 5: 10, 11: 11}[save_every]
    with pytest.raises(Killed):
        driven(
            monkeypatch,
            max_oracle_calls=4 * 10,
            output_dir=tmp_path / "y",
            save_every=save_every,
            callbacks=[kill_at(12)],
        )
    assert last_state(tmp_path / "y").step_count == before
    records, motor = driven(monkeypatch, max_oracle_calls=4 * 10, output_dir=tmp_path / "y", save_every=save_every)
    assert [(r["step"], r["status"]) for r in records] == [(0, "running"), (8, "running"), (12, "budget")]
    assert sum(motor.requests) == 12 - before


@pytest.mark.parametrize("engine", ["eager"])
def test_train_max_oracle_calls_holds_after_resume(tmp_path, engine):
    def train_until(kill_at=None, folder=None):
        run = make_run(kill_at=kill_at)
        limit = {"max_oracle_calls": 48, "output_dir": folder, "save_every": 2 if folder else None}
        return train(run, steps=10**6, every=5, measure=all_numbers, engine=engine, **limit)

    whole = train_until()
    with pytest.raises(Killed):
        train_until(7, tmp_path / "x")
    resumed = train_until(None, tmp_path / "x")
    assert timeless(resumed) == timeless(whole)
    assert whole[-1]["status"] == "budget"
    assert 48 < work(OracleCounts(**whole[-1]["oracles"])) <= 48 + 5


def test_oracle_total_counts_joint_pass_once():
    assert work(OracleCounts()) == 0
    counts = {"grad": 1, "outer_grad_omega": 10, "hvp": 100, "mixed_hvp": 1000, "joint": 50}
    assert work(OracleCounts(**counts, outer_grad_lam=7, inner_views=7)) == 1061
    assert work(OracleCounts(forward=3, mixed_hvp_transpose=4)) == 7
    problem, at, train_batch, valid_batch = network()
    counted = CountedProblem(problem)
    algorithm = fsla.algorithms.soba(RATES)
    batches = StepBatches.shared(train_batch, valid_batch)
    algorithm.step(counted, algorithm.init(problem, at, batches), batches)
    assert work(counted.calls) == 3  # ∂_ω G, ∂_ω F, and H v with J v in one pass


def test_train_saving_by_clock_adapts_to_step_time(tmp_path, monkeypatch):
    records, motor = driven(monkeypatch, steps=40, every=40, output_dir=tmp_path / "x")
    assert records[-1]["step"] == 40
    assert sum(motor.requests) == 40
    assert motor.requests == [
        1,
        4,
        4,
        4,
        4,
        4,
        4,
        4,
        4,
        4,
        3,
    ]  # 4 steps take a second, a tenth of what lies between saves
