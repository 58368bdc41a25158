"""The comparison of automatic with searched steps: its tasks are sound, and its table has the results of the runs."""

import json

import pytest
import torch

from fsla import FSLA
from fsla_benchmarks.automatic import experiment as automatic
from fsla_benchmarks.automatic import spacing
from fsla_benchmarks.automatic.experiment import AutomaticSpec, claims, markdown, reproduce, summarise
from fsla_benchmarks.automatic.tasks import tasks


@pytest.mark.parametrize("task", tasks(), ids=lambda task: task.name)
def test_bench_automatic_every_task_steps(task):
    model, outer = task.build()
    inner_loss, outer_loss = task.losses()
    opt = FSLA(model, outer, inner_loss=inner_loss, outer_loss=outer_loss, hvp_method="autograd")
    info = opt.step(*task.draw(torch.Generator().manual_seed(0)))
    assert info.inner_loss.isfinite()
    assert info.hessian_norm > 0
    again, _ = task.build()
    for a, b in zip(task.build()[0].parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)  # every run begins where the others do


def test_bench_automatic_task_names_are_unique():
    names = [task.name for task in tasks()]
    assert len(set(names)) == len(names) >= 10


def test_bench_automatic_command_compares_and_resumes(tmp_path, monkeypatch):
    few = [task for task in tasks() if task.name in ("least squares, condition 10", "ridge a feature, wine")]
    monkeypatch.setattr(automatic, "tasks", lambda: few)
    for name, values in (("T", (0.3, 1e4)), ("R", (1.0,)), ("M", (0.1,)), ("FALLS", (False,))):
        monkeypatch.setattr(automatic, name, values)
    done = []
    summary = reproduce(tmp_path / "x", AutomaticSpec(steps=60), lambda name, k, n: done.append(name))
    assert set(done) == {task.name for task in few}
    rows = json.loads((tmp_path / "x" / "summary.json").read_text())["tasks"]
    assert [r["task"] for r in rows] == [task.name for task in few]
    for r in rows:
        assert r["tried"] == 2
        assert r["diverged"] == 1  # a step of ten thousand over L
        assert r["automatic"] < r["start"]
    done.clear()
    again = reproduce(tmp_path / "x", AutomaticSpec(steps=60), lambda name, k, n: done.append(name))
    assert not done
    assert again.text == summary.text


def record(task, rule, f):
    return {"task": task, "rule": rule, "f": f, "start": 2.0, "rollbacks": 0}


def test_bench_automatic_reports_failed_claims():
    runs = [record("a", "automatic", 1.05), record("b", "automatic", 3.0), record("c", "automatic", None)]
    runs += [record(t, "constants", f) for t in "abc" for f in (1.0, 2.0, None)]
    rows = summarise(runs)
    assert [r["ratio"] for r in rows] == [1.05, 3.0, None]
    assert [r["diverged"] for r in rows] == [1, 1, 1]
    close, stable = claims(rows)
    assert not close.holds
    assert "1 of 3; not on b (3.00), c (diverged)" in close.figures
    assert not stable.holds
    assert "**no**" in markdown(AutomaticSpec(), rows)


def test_bench_outer_every_runs_every_task_at_every_spacing(monkeypatch):
    """The table of the docs is made of these rows."""
    monkeypatch.setattr(spacing, "SPACINGS", (1, 4))
    monkeypatch.setattr(spacing, "NAMES", {"least squares, condition 10": "least squares"})
    one, four = spacing.measure(steps=60, seeds=2, report=lambda text: None)
    assert (one.outer_every, four.outer_every) == (1, 4)
    assert one.f[0] == one.f[1]  # the whole data at every step
    assert one.f[0] < one.start
    assert four.f[0] != one.f[0]
    text = spacing.write_result({"rows": [vars(one), vars(four) | {"f": [None, 1.0]}]})
    assert text[0] == "| λ | at the start | m = 1 | m = 4 |"
    assert text[2].startswith("| least squares | 6.9 | ")
    assert "1 of 2 diverged" in text[2]
