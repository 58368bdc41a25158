"""The benchmark runs and writes what it says; its figures are for people, not for tests."""

import json
import subprocess
import sys

import pytest
import torch

from fsla.experiments.bench import PROBLEMS, case, scaling
from fsla.experiments.bench.memory import peak_mb


def test_the_command_prints_a_table_and_writes_rows(tmp_path):
    out = tmp_path / "new" / "rows.json"
    args = ["bench", "--problems", "softmax,quadratic", "--rounds", "2", "--device", "cpu", "--json", str(out)]
    done = subprocess.run([sys.executable, "-m", "fsla", *args], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert {r["problem"] for r in rows} == {"softmax", "quadratic"}
    assert {"problem", "method", "momentum", "engine", "ratio", "memory_mb"} <= rows[0].keys()
    assert all(r["ratio"] == 1.0 for r in rows if r["method"] == "sgd")
    assert all(0 < r["low"] <= r["ratio"] <= r["high"] for r in rows)
    assert all(r["memory_mb"] > 0 for r in rows)
    assert {r["engine"] for r in rows} == {"eager", "graph"}
    assert "soba" in done.stdout


def test_an_unknown_problem_gets_one_message():
    done = subprocess.run([sys.executable, "-m", "fsla", "bench", "--problems", "cn"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Did you mean 'cnn'" in done.stderr


def test_every_problem_has_a_step():
    for name in PROBLEMS:
        c = case(name, torch.device("cpu"))
        assert c.problem.inner_at(c.at, c.inner()).value.isfinite()
        c.sgd()(2)


@pytest.mark.parametrize(("varies", "values"), [("samples", (300, 5000)), ("parameters", (2, 4)), ("K", (1, 2))])
def test_scalings_have_an_sgd_step_beside_each(varies, values):
    rows = scaling(varies, 1, torch.device("cpu"), lambda text: None, values)
    assert {r.varies for r in rows} == {varies}
    assert [r.ratio for r in rows if r.method == "sgd"] == [1.0, 1.0]
    found = list(dict.fromkeys(r.n for r in rows))
    assert found == list(values) if varies != "parameters" else found[0] < found[1]


def test_memory_is_that_of_the_tensors():
    def f():
        a = torch.ones(250_000)  # 1 MB
        b = a + 1
        del a
        b.add_(1)

    assert peak_mb(f, torch.device("cpu")) == pytest.approx(2.0, abs=0.01)
