"""The benchmark runs and writes what it says; its figures are for people, not for tests."""

import json
import subprocess
import sys

import torch

from fsla.experiments.bench import PROBLEMS, case, scaling


def test_the_command_prints_a_table_and_writes_rows(tmp_path):
    out = tmp_path / "rows.json"
    args = ["bench", "--problems", "softmax,quadratic", "--rounds", "2", "--device", "cpu", "--json", str(out)]
    done = subprocess.run([sys.executable, "-m", "fsla", *args], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert {r["problem"] for r in rows} == {"softmax", "quadratic"}
    assert {"problem", "method", "momentum", "engine", "ratio"} <= rows[0].keys()
    assert all(r["ratio"] == 1.0 for r in rows if r["method"] == "sgd")
    assert all(0 < r["low"] <= r["ratio"] <= r["high"] for r in rows)
    assert "soba" in done.stdout


def test_an_unknown_problem_gets_one_message():
    done = subprocess.run([sys.executable, "-m", "fsla", "bench", "--problems", "cn"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Did you mean 'cnn'" in done.stderr


def test_every_problem_has_a_step():
    for name in PROBLEMS:
        c = case(name, torch.device("cpu"))
        assert c.problem.inner_at(c.at, c.inner()).value.isfinite()
        c.sgd()()


def test_samples_scale_without_images():
    rows = scaling((300, 5000), 1, torch.device("cpu"), lambda text: None)
    assert [r.n for r in rows] == [300, 300, 5000, 5000]
