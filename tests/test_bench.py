"""The benchmark runs and writes its files; its figures are for people, not for tests."""

import json
import sys

import pytest
import torch

from fsla.problems import Batch
from fsla_benchmarks.steps import (
    PROBLEMS,
    BenchRequest,
    case,
    describe_run,
    fill_tables,
    lines,
    measure_training,
    measure_transformer,
    race,
    save,
    scaling,
    table,
    training,
    transformer,
    write_costs,
)
from fsla_benchmarks.steps.memory import peak_mb
from fsla_benchmarks.steps.race import Key
from fsla_benchmarks.steps.rows import measured
from fsla_benchmarks.steps.table import _units
from fsla_benchmarks.steps.traffic import Machine, predicted, predictions
from launch import finish, torchrun


def test_bench_steps_prints_table_and_writes_rows(tmp_path):
    out = tmp_path / "new" / "rows.json"
    args = ["bench", "steps", "--problems", "softmax,quadratic", "--repeats", "2", "--device", "cpu", "--json", out]
    done = finish(sys.executable, "-m", "fsla", *args)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert {r["problem"] for r in rows} == {"softmax", "quadratic"}
    assert {"problem", "method", "momentum", "engine", "ratio", "memory_mb"} <= rows[0].keys()
    assert all(r["ratio"] == 1.0 for r in rows if r["method"] == "sgd")
    assert all(0 < r["low"] <= r["ratio"] <= r["high"] for r in rows)
    assert all(r["memory_mb"] > 0 for r in rows)
    assert {r["engine"] for r in rows} == {"eager"}  # a step is captured on a GPU alone
    assert "graph: steps are captured on a GPU alone" in done.stdout
    assert "soba" in done.stdout
    methods = {r["method"] for r in rows if "module" in r["method"] and r["problem"] == "softmax"}
    assert methods == {"module soba", "module fsla", "passes of module soba", "passes of module fsla"}
    by_differences = [r for r in rows if r["method"].endswith("difference")]
    assert {(r["method"], r["momentum"]) for r in by_differences} == {
        ("soba, difference", None),
        ("fsla, difference", "none"),
        ("fsla, difference", "storm"),
    }


def test_bench_steps_unknown_problem_exits_with_message():
    done = finish(sys.executable, "-m", "fsla", "bench", "steps", "--problems", "cn")
    assert done.returncode == 2
    assert "Did you mean 'cnn'" in done.stderr


def test_bench_steps_every_problem_steps():
    for name in PROBLEMS:
        c = case(name, torch.device("cpu"))
        assert c.problem.inner_at(c.at, Batch(c.inner())).value.isfinite()
        assert c.difference.inner_at(c.at, Batch(c.inner())).value.isfinite()
        c.sgd()(2)


@pytest.mark.parametrize(("varies", "values"), [("samples", (300, 5000)), ("parameters", (2, 4)), ("K", (1, 2))])
def test_bench_steps_scalings_include_sgd_baseline(varies, values, monkeypatch):
    monkeypatch.setattr(table, "case", lambda name, device, n, width: case(name, device, n, min(width, 4)))
    rows = scaling(varies, 1, torch.device("cpu"), lambda text: None, values)
    assert {r.varies for r in rows} == {varies}
    assert [r.ratio for r in rows if r.method == "sgd"] == [1.0, 1.0]
    counts = list(dict.fromkeys(r.n for r in rows))
    assert counts == list(values) if varies != "parameters" else counts[0] < counts[1]


def test_bench_steps_memory_equals_tensor_bytes():
    def f():
        a = torch.ones(250_000)  # 1 MB
        b = a + 1
        del a
        b.add_(1)

    assert peak_mb(f, torch.device("cpu")) == pytest.approx(2.0, abs=0.01)


class Clock:
    """A clock that only moves when a step is taken."""

    def __init__(self):
        self.now = 0.0

    def step(self, seconds):
        def advance(n):
            self.now += n * seconds

        return advance


def raced(monkeypatch, seconds, units):
    clock = Clock()
    monkeypatch.setattr(race.time, "perf_counter", lambda: clock.now)
    timed = {key: clock.step(s) for key, s in seconds.items()}
    rows = race.race("p", timed, units(timed), 3, 2, torch.device("cpu"), lambda text: None)
    return dict(zip(timed, rows, strict=True))


def test_bench_steps_is_relative_to_captured_sgd_where_timed(monkeypatch):
    captured, eager = (Key("sgd", engine=e) for e in ("graph", "eager"))
    keys = {e: Key("fsla", "none", "shared", e) for e in ("graph", "eager")}
    seconds = {captured: 2.0, eager: 4.0, keys["graph"]: 6.0, keys["eager"]: 8.0}
    rows = raced(monkeypatch, seconds, _units)
    assert [(rows[k].ratio, rows[k].unit, rows[k].plain_ratio) for k in keys.values()] == [
        (3.0, "sgd, graph", None),
        (4.0, "sgd, graph", None),
    ]
    assert (rows[captured].ratio, rows[eager].ratio) == (1.0, 2.0)
    assert rows[keys["graph"]].ms == pytest.approx(6000)
    del seconds[captured]
    assert raced(monkeypatch, seconds, _units)[keys["eager"]].ratio == 2.0


def test_bench_steps_compiled_module_has_ratio_to_plain_unit_too(monkeypatch):
    plain, compiled = (Key("adamw", engine=e) for e in ("eager", "compile"))
    key = Key("soba, difference", None, "shared", "compile")
    rows = raced(monkeypatch, {plain: 4.0, compiled: 2.0, key: 6.0}, lambda timed: lambda key: (compiled, plain))
    assert (rows[key].ratio, rows[key].unit, rows[key].plain_ratio) == (3.0, "adamw, compile", 1.5)


def test_bench_steps_transformer_is_relative_to_adamw():
    rows, notes = measure_transformer(1, torch.device("cpu"), lambda text: None, autocast=True)
    assert not notes
    by_method = {(r.method, r.precision): r for r in rows}
    for precision in ("float32", "bfloat16"):
        assert by_method["adamw", precision].ratio == by_method["adamw", precision].peak_ratio == 1.0
        assert by_method["soba, difference", precision].unit == "adamw"
        assert by_method["fsla, difference", precision].momentum == "none"
    assert by_method["soba, exact", "float32"].peak_ratio > by_method["soba, difference", "float32"].peak_ratio > 0
    assert ("soba, exact", "bfloat16") not in by_method
    assert all(r.peak_mb > r.memory_mb > 0 for r in rows)
    assert len(lines(rows)) == len(rows) + 1


def test_bench_steps_peak_includes_state():
    setting = transformer.Setting.on(torch.device("cpu"), None)
    run = transformer.AdamWRun(setting, compiled=False)
    run.advance(1)
    n = sum(t.numel() for t in setting.weights().values())
    assert sum(t.numel() for t in run.state_tensors()) == pytest.approx(3 * n, rel=0.01)  # parameters and two moments
    bilevel_run = transformer.BilevelRun(
        setting, setting.network(compiled=False), transformer._ALGORITHMS["soba"], "finite_difference"
    )
    bilevel_run.advance(1)
    assert sum(t.numel() for t in bilevel_run.state_tensors()) == pytest.approx(2 * n, rel=0.01)  # ω and v
    bilevel_run.move(torch.device("cpu"))
    bilevel_run.advance(1)


def test_bench_steps_failed_measurement_is_noted(monkeypatch):
    class Fails:
        def init(self, problem, at, batches):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory\nand more lines")

    monkeypatch.setitem(transformer._ALGORITHMS, "fsla", Fails())
    rows, notes = measure_transformer(1, torch.device("cpu"), lambda text: None)
    assert {r.method for r in rows} == {"adamw", "soba, exact", "soba, difference", "soba with adam, difference"}
    assert notes[0] == "transformer: fsla, exact, none, shared, eager, float32: CUDA out of memory"
    assert len(notes) == 2


def test_bench_steps_invalid_choice_fails_early():
    for problems, engines, scalings, text in (
        (("transfomer",), (), (), "Did you mean 'transformer'"),
        (("cnn",), ("auto",), (), "engine must be one of"),
        (("cnn", "transformer"), ("eager", "compile"), (), "transformer' alone.*Got the problems cnn too"),
        (("cnn",), ("eager",), ("k",), "scaling must be one of"),
    ):
        with pytest.raises(ValueError, match=text):
            BenchRequest(problems, engines, scalings)


def test_bench_steps_times_by_number_of_weights():
    small, large = measured([300, 5000], rounds=2, turn=1)
    assert (small.n, large.n) == (300, 5000)
    assert small.bytes == large.bytes == 12
    assert small.ratio == 1
    assert min(small.ms, large.ms, small.swept_ms, large.swept_ms) > 0


def test_bench_ranks_traffic_matches_formula():
    torchrun("-m", "fsla_benchmarks.steps.distributed", "traffic")


def test_bench_ranks_prediction_for_many_gpus():
    efficiencies = {
        (replication, world): predicted(Machine(1e14), replication, 1e8, 4096, world, "fsla").efficiency
        for replication in ("plain", "replicas", "shards")
        for world in (1, 8, 64)
    }
    for replication in ("plain", "replicas", "shards"):
        assert efficiencies[replication, 1] == 1.0 >= efficiencies[replication, 8] >= efficiencies[replication, 64] > 0
    assert efficiencies["plain", 64] < efficiencies["replicas", 64]
    assert len(list(predictions())) == 10


def test_bench_training_costs_become_rows_and_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "STEPS", {"transformer": {"eager": 4}, "cnn": {"eager": 4}})
    monkeypatch.setattr(training, "TRANSFORMER_RUNS", training.TRANSFORMER_RUNS[-2:])
    sizes = []
    device = torch.device("cpu")
    costs, notes = measure_training(
        device, lambda text: None, only=("transformer",), keep=lambda rows, notes: sizes.append(len(rows))
    )
    assert not notes
    assert sizes == [1, 2]
    assert [(cost.run, cost.outer_every) for cost in costs] == [("step, no rollback", 8), ("backward", 8)]
    assert all(cost.ratio > 0 and cost.first_s > 0 and cost.peak_ratio is None for cost in costs)
    save(tmp_path / "rows.json", costs, describe_run(device, "abc"), notes)
    page = "Before.\n<!-- table rows.json -->\nold\n<!-- end -->\nAfter.\n"
    page_now = fill_tables(page, write_costs, tmp_path)
    assert page_now.startswith("Before.\n<!-- table rows.json -->\n\n| training |")
    assert page_now.endswith("commit abc.\n\n<!-- end -->\nAfter.\n")
    assert "old" not in page_now
    assert fill_tables(page_now, write_costs, tmp_path) == page_now
    assert len([line for line in page_now.splitlines() if "| transformer |" in line]) == 2


def test_bench_training_run_that_fails_is_noted(monkeypatch):
    def fail(run, task, model):
        raise torch.cuda.OutOfMemoryError("No memory is left.")

    monkeypatch.setattr(training, "STEPS", {"transformer": {"eager": 2}, "cnn": {"eager": 2}})
    monkeypatch.setattr(training, "TRANSFORMER_RUNS", training.TRANSFORMER_RUNS[:1])
    monkeypatch.setattr(training.Run, "begin", fail)
    costs, notes = measure_training(torch.device("cpu"), lambda text: None, only=("transformer",))
    assert not costs
    assert len(notes) == 1
    assert "transformer, eager, step" in notes[0]
