"""The examples run, small; they write a picture, stay short, and FSLA does what each is about."""

import os
import re
import sys
from pathlib import Path

import pytest

import fsla
from launch import finish

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
PNG = b"\x89PNG\r\n\x1a\n"


def numbers(text, name):
    """The numbers of each line of the printed table that begins with a name."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith(name)]
    return [[float(n) for n in re.findall(r"-?\d+\.?\d*", line.removeprefix(name))] for line in lines]


def ridge_penalties(text):
    """On both data sets the validation error falls below that of both searches and of one penalty."""
    ratios = numbers(text, "FSLA, each feature")
    assert len(ratios) == 2
    others = [numbers(text, name) for name in ("random, each feature", "random, each group", "RidgeCV, one penalty")]
    for i, (start, valid, _) in enumerate(ratios):
        assert valid < start
        assert valid < min(other[i][1] for other in others)


def class_weights(text):
    """Rare classes get larger weights, and a handicap in training that makes the network work for them."""
    (common, rare), *_ = numbers(text, "weight:")
    assert common < 1 < rare
    (common, rare), *_ = numbers(text, "margin, added to the logit:")
    assert rare < 0 < common


def mixture_weights(text):
    """The clean sources gain, the wrong ones lose, and the network is better than with uniform weights."""
    percent = dict(re.findall(r"share of \d sources, (.+): (\d+) %", text))
    assert int(percent["clean"]) > 100 * 2 / 12
    assert int(percent["labels + 1"]) < 100 * 3 / 12
    assert int(percent["random labels"]) < 100 * 3 / 12
    assert numbers(text, "FSLA")[0][0] > numbers(text, "uniform weights")[0][0]


def few_shot(text):
    """New tasks are solved much better with the learnt map than with a random one."""
    start, _, end, _ = numbers(text, "FSLA")[0]
    assert end < start / 2


def equilibrium(text):
    """The error falls, and more iterations change nothing: the model is at its fixed point."""
    start, _, thirty, hundred, _ = numbers(text, "FSLA, equilibrium")[0]
    assert thirty < start / 2
    assert hundred == pytest.approx(thirty, rel=0.02)


CHECKS = {check.__name__: check for check in (ridge_penalties, class_weights, mixture_weights, few_shot, equilibrium)}


def test_examples_all_have_a_check():
    assert sorted(CHECKS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_example_runs(name, tmp_path):
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 120
    source = str(Path(fsla.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "MPLBACKEND": "Agg", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-W", "error::UserWarning", str(path), "--small", "--out", str(tmp_path)]
    done = finish(*command, env=environment, cwd=tmp_path, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    CHECKS[name](done.stdout)
    assert [p.name for p in tmp_path.iterdir()] == [f"{name}.png"]
    assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)


def test_example_learned_loss_has_fifteen_lines():
    marks = re.findall(r"# \+(\d+)", (EXAMPLES / "class_weights.py").read_text(encoding="utf-8"))
    assert [int(m) for m in marks] == list(range(1, len(marks) + 1))
    assert len(marks) <= 15
