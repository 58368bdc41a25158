"""The examples run, small, beside what they are compared with; they stay short, and fsla does what each is about."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

import fsla
from launch import finish

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "gallery")
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "gallery.json").read_text(encoding="utf-8"))["examples"]
PNG = b"\x89PNG\r\n\x1a\n"


def run(path, folder, *arguments):
    """Run a program of the examples, in a folder; return what it printed."""
    source = str(Path(fsla.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source, "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}
    done = finish(sys.executable, "-W", "error::UserWarning", path, *arguments, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(line):
    return [float(n) for n in re.findall(r"-?\d+\.\d+", line)]


def poison(lines):
    """The attack raises the error."""
    (before,), (after,) = (numbers(line.split("%")[0]) for line in lines)
    assert after > before


def tolls(lines):
    """Tolls save time."""
    before, after = (numbers(line)[-1] for line in lines)
    assert after < before


def distill(lines):
    """Learnt images teach more than real ones."""
    before, after = (numbers(line)[-1] for line in lines)
    assert after > before


def penalties(lines):
    """Without shrinkage the validation loss is lower: that is what overfits."""
    (_, valid, _), (_, valid_shrunk, _) = map(numbers, lines)
    assert valid < valid_shrunk


def denoise(lines):
    """Denoised images are closer to the clean ones."""
    noisy, denoised = numbers(lines[0])
    assert denoised > noisy + 1


def critic(lines):
    """The policy reaches the goal more often."""
    before, after = (numbers(line)[-1] for line in lines)
    assert after > before


def sinusoids(lines):
    """New tasks are solved better with learnt features than with random ones."""
    before, after = (numbers(line)[-1] for line in lines)
    assert after < before


def architecture(lines):
    """Each layer has shares that sum to 1 and are no longer equal."""
    for line in lines:
        shares = numbers(line)
        assert sum(shares) == pytest.approx(1, abs=0.01)
        assert max(shares) > min(shares)


def equilibrium(lines):
    """The error falls."""
    before, after = (numbers(line)[-1] for line in lines)
    assert after < before


def source_weights(lines):
    """Clean sources have larger weights than those whose labels are wrong."""
    weights = {line[:20].strip(): numbers(line[20:])[0] for line in lines[:-1]}
    assert weights["clean"] > weights["labels + 1"]


def text_mixture(lines):
    """Shares sum to 1, and the program tells how often each source was read."""
    assert sum(numbers(line)[1] for line in lines) == pytest.approx(1, abs=0.05)
    assert all(numbers(line)[2] > 0 for line in lines)


def hyper_cleaning(lines):
    """Wrong labels get smaller weights than right ones."""
    wrong, right = numbers(lines[0])
    assert wrong < right


def class_weights(lines):
    """Rare classes get larger weights."""
    weights, _ = map(numbers, lines)
    assert sum(weights[5:]) > sum(weights[:5])


CHECKS = {
    check.__name__: check
    for check in (
        poison, tolls, distill, penalties, denoise, critic, sinusoids, architecture, equilibrium, source_weights,
        text_mixture, hyper_cleaning, class_weights,
    )
}  # fmt: skip


def test_examples_all_have_check_comparison_and_page():
    assert sorted(CHECKS) == NAMES
    assert sorted(path.stem for path in (EXAMPLES / "comparisons").glob("[!_]*.py")) == NAMES
    assert sorted(path.stem for path in (ROOT / "docs" / "gallery").glob("*.md") if path.stem != "index") == NAMES
    assert sorted(RESULTS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_example_runs_and_is_short(name, tmp_path):
    """What a reader copies works as it stands, and a page can show it."""
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    core = text.split("# --8<-- [start:core]\n")[1].split("# --8<-- [end:core]")[0]
    assert len(core.splitlines()) <= 60
    CHECKS[name](run(EXAMPLES / f"{name}.py", tmp_path, "--small").splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_comparison_runs(name, tmp_path):
    """Each method that the results name still runs, and the picture is drawn."""
    path = tmp_path / "gallery.json"
    run(EXAMPLES / "gallery.py", tmp_path, name, "--small", "--json", path, "--pictures", tmp_path)
    rows = json.loads(path.read_text(encoding="utf-8"))["examples"][name]["rows"]
    assert [row["method"] for row in rows] == [row["method"] for row in RESULTS[name]["rows"]]
    assert all(row["mean"] is not None for row in rows)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("name", NAMES)
def test_results_name_commit_date_and_three_seeds(name):
    """A figure without these cannot be checked."""
    result = RESULTS[name]
    assert re.fullmatch(r"[0-9a-f]{12}( with changes)?", result["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
    assert result["command"].startswith("python examples/gallery.py")
    assert all(len(row["values"]) == 3 for row in result["rows"])


def test_pages_have_the_figures_of_the_results():
    """A figure that is typed by hand goes stale: the pages are filled from the results."""
    run(EXAMPLES / "gallery.py", ROOT, "--only", "pages", "--check")
