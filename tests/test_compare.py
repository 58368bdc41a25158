"""`fsla compare`: its problems, its budgets, its searches and its report."""

import json
import math
import sys

import pytest
import torch

from fsla import cli
from fsla.algorithms import list_algorithms
from fsla.problems import BatchSpec, OracleCounts
from fsla_benchmarks.compare import methods
from fsla_benchmarks.compare import runs as compare_runs
from fsla_benchmarks.compare.experiment import CompareSpec, Unit, carry_out, prepare, records_of
from fsla_benchmarks.compare.methods import METHODS, RANGES, make, settings
from fsla_benchmarks.compare.plot import draw
from fsla_benchmarks.compare.problems import PROBLEMS, least_squares, quadratic, sources
from fsla_benchmarks.compare.report import Curve, Results, ratios
from fsla_benchmarks.compare.runs import price, run
from fsla_reproduction.folder import RunError
from fsla_reproduction.problems import LeastSquares
from fsla_reproduction.runs import Workers

TASK = quadratic()
SMALL = CompareSpec(seeds=1, algorithms=("soba", "hoag", "fsla_automatic"), problems=("quadratic",))


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `fsla compare` in this process; gives the exit code, stdout and stderr."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["fsla", "compare", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return call


def without_seconds(folder):
    """The records of every run, without the times."""
    records = {}
    for path in sorted((folder / "runs").iterdir()):
        lines = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
        records[path.name] = [{name: x for name, x in line.items() if name != "seconds"} for line in lines]
    return records


def test_compare_methods_cover_every_algorithm():
    assert {*list_algorithms(), "fsla_automatic", "soba_automatic"} == set(METHODS)
    for method in METHODS.values():
        assert set(method.searched) <= {*RANGES, "power"}


@pytest.mark.parametrize("name", METHODS)
def test_compare_method_stays_within_budget(name):
    data = LeastSquares.draw(0, rows=64, p=2, n=3)
    task = least_squares(data)
    assert METHODS[name].takes(task)
    setting = settings(name, task, 1)[0]
    stops = run(task, name, setting, 1, [20.0, 200.0])
    for stop in stops:
        assert stop.progress.calls <= stop.mark
    last = stops[1].progress
    assert last.steps >= 1
    assert last.at is None or not torch.equal(last.at.lam["lam"], task.start.lam["lam"])


def test_compare_command_writes_records_summary_and_figures(tmp_path, command):
    out = tmp_path / "out"
    args = "--out", str(out), "--algorithms", "soba, single_loop,fsla_automatic", "--problems", "quadratic,sources"
    code, output, wrong = command(*args, "--seeds", "1")
    assert (code, wrong) == (0, "")
    assert "4 searches of 2 runs and 6 runs, each of 200 oracle calls" in output
    names = ("compare-quadratic", "compare-sources", "compare-profiles", "compare-ranks")
    for name in names:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"{name}.png" in output
    numbers = json.loads((out / "summary.json").read_text())
    assert {row["algorithm"] for row in numbers["overall"]} == {"soba", "single_loop", "fsla_automatic"}
    assert len(numbers["rows"]) == 6
    text = (out / "summary.md").read_text()
    assert "## Weights of sources, digits" in text
    assert "| fsla, automatic | shared |" in text
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert {r["kind"] for r in records} == {"least", "trial", "run"}

    before = {p.name: p.stat().st_mtime_ns for p in (out / "runs").iterdir()}
    assert len(before) == 2 + 4 + 6
    (out / "runs" / "quadratic-soba-seed1.jsonl").unlink()
    records_before = without_seconds(out)
    assert command(*args, "--seeds", "1")[0] == 0
    after = {p.name: p.stat().st_mtime_ns for p in (out / "runs").iterdir()}
    assert [name for name in before if before[name] != after[name]] == ["quadratic-soba-seed1.jsonl"]
    assert {name: x for name, x in without_seconds(out).items() if name in records_before} == records_before
    code, output, _ = command("--out", str(out), "--preset", "paper", "--problems", "quadratic")
    assert code == 2  # one folder holds one preset


def test_compare_killed_or_parallel_run_has_same_records(tmp_path):
    carry_out(prepare(tmp_path / "one", SMALL))
    stopped = prepare(tmp_path / "two", SMALL)

    def stop(name, done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out(stopped, report=stop)
    assert len(without_seconds(tmp_path / "two")) == 2
    carry_out(prepare(tmp_path / "two", SMALL), workers=Workers(2))
    assert without_seconds(tmp_path / "one") == without_seconds(tmp_path / "two")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--algorithms", "sobe"], "Did you mean 'soba'"),
        (["--problems", "quadratics"], "Did you mean 'quadratic'"),
        (["--preset", "big"], "The preset must be one of 'smoke', 'paper'"),
        (["--problems", "cleaning_mnist", "--data-dir", "nowhere"], "mnist needs files that are not there"),
        (["--jobs", "0"], "--jobs"),
    ],
)
def test_compare_invalid_option_exits_with_message(args, text, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, wrong = command("--out", "x", *args)
    assert code == 2
    assert text in wrong
    assert "Traceback" not in wrong
    assert not list(tmp_path.iterdir())


def test_compare_without_mnist_skips_it_with_reason(tmp_path):
    spec = CompareSpec("paper", algorithms=("soba",))
    plan = prepare(tmp_path / "out", spec, tmp_path / "nowhere")
    assert list(plan.tasks) == [name for name in PROBLEMS if name != "cleaning_mnist"]
    assert "The problem cleaning_mnist is left out. The data set mnist needs files" in plan.skipped[0]
    assert "cleaning_mnist" not in prepare(tmp_path / "smoke", CompareSpec()).tasks


def test_compare_worker_error_exits_with_message(tmp_path):
    plan = prepare(tmp_path / "out", CompareSpec(seeds=1, algorithms=("soba",), problems=("quadratic",)))
    setting = {**dict.fromkeys(RANGES, 1.0), "outer_lr": -1.0, "power": 0.0}
    trial = {"problem": "quadratic", "algorithm": "soba", "kind": "trial", "setting": setting, "value": 1.0}
    plan.folder.save("quadratic-soba-tuning", [trial])
    with pytest.raises(RunError, match=r"soba must run on quadratic. It raised ValueError: The 'outer_lr' of Schedule"):
        carry_out(plan, workers=Workers(2))
    assert plan.folder.finished("quadratic-least")


def test_compare_run_error_exits_with_message(monkeypatch):
    def broken(name):
        raise TypeError("no such thing.")

    monkeypatch.setattr(methods, "get_algorithm", broken)
    with pytest.raises(RunError, match=r"soba must run on quadratic. It raised TypeError: no such thing."):
        records_of(SMALL, None, Unit("quadratic", "soba", 1), settings("soba", TASK, 1)[0])


def test_compare_measure_at_minimum_is_zero_and_uncounted():
    data = LeastSquares.draw(3, rows=200)
    task = least_squares(data)
    closed = data.quadratic()
    zero = torch.zeros(4, dtype=torch.float64)
    best = torch.linalg.solve(closed.hessian(), -closed.gradient(zero))
    constant = float(data.e.square().mean() / 2)
    start, least = task.least(30)
    assert start == pytest.approx(float(closed.value(zero)) + constant, abs=1e-8)
    assert least == pytest.approx(float(closed.value(best)) + constant, abs=1e-8)
    for omega in (torch.zeros(5, dtype=torch.float64), torch.full((5,), 1e3, dtype=torch.float64)):
        assert task.measure({"lam": best}, {"omega": omega}).value == pytest.approx(least, abs=1e-8)
    assert math.isinf(task.measure({"lam": best}, {"omega": omega * math.nan}).value)
    assert task.scales.slope == pytest.approx(float(closed.gradient(zero).square().mean().sqrt()), rel=1e-6)
    assert task.curvature == pytest.approx(float(torch.linalg.eigvalsh(closed.H)[-1]), rel=1e-6)


def test_compare_oracle_calls_scale_with_batch_size():
    counts = OracleCounts(grad=64, hvp=128, mixed_hvp=64, joint=64, outer_grad_omega=32, inner_views=1000)
    assert price(counts, 64) == (64 + 128 + 64 + 32) / 64  # a joint pass counts as the two products that it gives
    setting = settings("soba", TASK, 1)[0]
    stochastic = run(TASK, "soba", setting, 1, [2000.0])[0].progress
    assert stochastic.calls == pytest.approx(2 + 5 * stochastic.steps)  # the start looks at both gradients
    assert 2000 - stochastic.calls < 5
    full = run(TASK, "single_loop", setting, 1, [2000.0])[0].progress
    first, a_step = 4, 5  # gradients of both levels, ∂_λ F and J v; and every step one of each oracle
    assert full.calls == 16 * (first + a_step * full.steps)  # all 1024 samples are 16 batches
    assert full.calls <= 2000 < full.calls + 16 * a_step
    automatic = run(TASK, "soba_automatic", {}, 1, [2000.0])[0].progress
    assert automatic.calls <= 2000 < automatic.calls + 26  # at times a product more, for the curvature


def test_compare_curve_excludes_step_beyond_mark():
    setting = settings("amigo", TASK, 1)[0]
    marks = [10.0, 24.9, 48.0, 200.0]
    progress = [stop.progress for stop in run(TASK, "amigo", setting, 1, marks)]
    assert [p.steps for p in progress] == [0, 0, 2, 8]
    assert progress[0].at is progress[1].at


def test_compare_diverged_run_scores_infinity():
    setting = {"outer_lr": 1e3, "inner_lr": 1e3, "adjoint_lr": 1e3, "new_grad_weight": 1.0, "power": 0.0}
    stops = run(TASK, "soba", setting, 1, [100.0, 10_000.0])
    assert stops[-1].progress.at is None
    assert stops[-1].measured is None
    assert stops[-1].progress.steps <= 200


def test_compare_settings_depend_on_problem_and_method():
    drawn = settings("fsla", TASK, 16)
    assert drawn == settings("fsla", quadratic(), 16)
    assert drawn[:2] == settings("fsla", TASK, 2)
    assert drawn[0]["outer_lr"] != settings("soba", TASK, 1)[0]["outer_lr"]
    for setting in drawn:
        assert 0.03 <= setting["inner_lr"] * TASK.curvature <= 1
        assert 1e-3 <= setting["outer_lr"] * TASK.scales.slope <= 3
        assert setting["power"] in (0.0, 0.5)
    assert {setting["new_grad_weight"] for setting in settings("soba", TASK, 4)} == {1.0}  # it has none
    assert make("stocbio", TASK, drawn[0]).estimator.solve.adjoint_lr == drawn[0]["adjoint_lr"]


def test_compare_search_runs_best_setting_on_other_seeds(tmp_path):
    results, _ = carry_out(prepare(tmp_path / "out", SMALL))
    records = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    trials = [r for r in records if r["kind"] == "trial" and r["algorithm"] == "soba"]
    best = min((r for r in trials if r["value"] is not None), key=lambda r: r["value"])
    (row,) = [row for row in results.rows if row["algorithm"] == "soba"]
    assert len(trials) == row["trials"] == 2
    assert row["setting"] == best["setting"]
    assert best["value"] not in [r["value"] for r in records if r["kind"] == "run"]
    assert all(r["mark"] == 200 for r in trials)


def curve(gaps, seed=1, seconds=None):
    marks = tuple(100.0 * 2**i for i in range(len(gaps)))
    seconds = tuple(seconds or (m / 100 for m in marks))
    return Curve(seed, marks, tuple(gaps), marks, seconds, tuple(range(10, 10 + len(gaps))), None)


def test_compare_profiles_match_dolan_more():
    curves = {
        ("one", "a"): (curve([0.5, 0.09, 0.05]),),
        ("one", "b"): (curve([0.5, 0.2, 0.08]),),
        ("two", "a"): (curve([0.5, 0.5, math.inf]),),
        ("two", "b"): (curve([0.1, 0.09, 0.05]),),
    }
    actual, tasks = ratios(curves, 0.1)
    assert tasks == 2
    assert actual == {"a": [1.0], "b": [1.0, 2.0]}
    assert ratios(curves, 1e-3)[0] == {"a": [], "b": []}
    assert curve([0.5, 0.4]).gap_at(1.5) == 0.5
    assert curve([0.5, 0.4]).gap_at(0.5) == 1.0  # the start


def records(values, start=2.0, least=1.0):
    """Records of one problem: for each algorithm the last f, or None, of every seed."""
    rows = [{"problem": "quadratic", "kind": "least", "start": start, "value": least}]
    for name, seeds in values.items():
        head = {"problem": "quadratic", "algorithm": name, "kind": "run", "setting": {}}
        for seed, value in enumerate(seeds, 1):
            took = {"calls": 90.0, "steps": 20, "seconds": 0.5}
            rows.append({**head, "seed": seed, "mark": 50.0, **took, "value": start})
            rows.append({**head, "seed": seed, "mark": 100.0, **took, "value": value})
    return rows


def test_compare_ranking_uses_median_and_ties(tmp_path):
    values = {"cg": [None, None, 1.0], "fsla": [1.2, 1.1, 1.9], "soba": [1.5, 1.5, 1.5], "ns": [None, None, None]}
    results = Results.of(records(values), {"quadratic": "quadratic"})
    assert [(row["algorithm"], row["rank"]) for row in results.rows] == [
        ("fsla", 1), ("soba", 2), ("cg", 3.5), ("ns", 3.5)
    ]  # fmt: skip
    assert results.rows[0]["gap"] == pytest.approx(0.2)
    assert results.rows[0]["gap_most"] == pytest.approx(0.9)
    assert results.rows[0]["calls_to_best"] == 100
    below = Results.of(records({"fsla": [0.5]}), {"quadratic": "quadratic"})
    assert below.rows[0]["gap"] == 0  # a run that is better than the search is the best that is known
    assert all(path.stat().st_size > 10_000 for path in draw(tmp_path, results))


def test_compare_problems_provide_oracles():
    task = sources()
    generator = torch.Generator().manual_seed(0)
    assert [len(t) for t in task.inner_batch(generator)] == [64, 64, 64]
    assert len(task.inner_batches) == 1000 // 64
    assert sum(len(batch[0]) for batch in task.outer_batches) == 200 // 64 * 64
    numbers = {
        int(compare_runs.sampler(task, "saba", BatchSpec(), generator)(0).inner_grad[0].number) for _ in range(60)
    }
    assert numbers <= set(range(15))
    assert len(numbers) > 5
    best = task.measure({"logit": 3 - torch.arange(10, dtype=torch.float64)}, task.start.omega)
    assert best.value < task.measure(task.start.lam, task.start.omega).value
    assert 0.8 < best.accuracy <= 1
