"""The examples of the README and of the documentation run unchanged."""

import re
from pathlib import Path

import pytest

import fsla
from fsla.algorithms import _registry
from test_doctests import run_example

ROOT = Path(__file__).parent.parent


def run(page):
    """Runs a page's Python blocks one after the other, as a reader would, and returns their names."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return names


def test_readme_runs(capsys):
    names = run("README.md")
    web, forum, vendor = names["weights"].as_dict().values()
    assert vendor < 0.1 < 0.5 < min(web, forum)
    x, y = names["x"][4000:], names["y"][4000:]
    assert (names["model"](x).argmax(1) == y).float().mean() > 0.9  # 0.80 with equal weights
    assert names["penalties"][:5].mean() < 0.1 < 1 < names["penalties"][5:].mean()
    output = capsys.readouterr().out
    assert float(re.search(r"relative error (\S+)", output)[1]) < 1e-3


def test_data_page_runs(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the page writes a file
    names = run("docs/tutorials/clean-a-csv.md")
    result = names["result"]
    assert result.groups.set_index("group")["decision"].to_dict() == {"shop": "keep", "forum": "drop"}
    worst = result.label_issues["row"][:50]
    assert names["wrong"][worst].mean() > 0.9
    low, high = result.noise_rate[1:]
    assert low < names["wrong"].mean() < high
    assert result.decision in capsys.readouterr().out
    weight = names["weights"].set_index("group")["weight"]
    assert weight["forum"] < 0.5 * weight["shop"]


def test_start_page_runs(capsys):
    names = run("docs/tutorials/first-bilevel-model.md")
    output = capsys.readouterr().out
    weights = [float(w) for w in re.search(r"step 399.*\[(.*)\]", output)[1].split(",")]
    assert weights[2] > 2 * weights[1] > 10 * weights[0]  # the rarer, the heavier
    assert names["accuracy"] > 0.8  # 0.65 with equal weights
    assert names["bilevel"].step_count == 66


def test_core_page_runs(capsys):
    names = run("docs/tutorials/first-algorithm.md")
    assert names["ridge"][:5].mean() < names["ridge"][5:].mean() - 1
    assert names["weights"][:60].mean() < names["weights"][60:].mean() - 0.2
    assert (names["state"].omega.value["z"] - names["target"]).abs().max() < 0.02
    assert "relative error" in capsys.readouterr().out


def test_multi_gpu_page_runs(capsys):
    """Here in one process; torchrun starts the same program."""
    names = run("docs/how-to/multi-gpu.md")
    first, second, wrong = names["weights"].weights.tolist()
    assert wrong < 0.1 < 0.5 < min(first, second)
    assert names["result"].num_steps == 300
    assert "{0: " in capsys.readouterr().out


def test_sample_weights_page_runs(capsys):
    names = run("docs/how-to/millions-of-sample-weights.md")
    weights, half = names["weights"], names["n"] // 2
    assert weights[:half].mean() < weights[half:].mean()  # the spoilt half weighs less
    assert names["run"].step_count == 401
    assert "tensor" in capsys.readouterr().out


def _close(names, but=(), near=1e-2):
    return all(gap < near for name, gap in names["gaps"].items() if name not in but)


PAGES = {  # what the comments of each page's examples say
    "index": lambda names: (
        _close(names) and (names["calls"].grad, names["calls"].hvp, names["calls"].mixed_hvp) == (2, 5, 1)
    ),
    "single-loop": lambda names: _close(names, near=0.1) and sum(gap < 1e-10 for gap in names["gaps"].values()) == 3,
    "soba": lambda names: max(names["gaps"]["saba"], names["gaps"]["srba"]) < names["gaps"]["soba"] / 5,
    "unrolled": lambda names: (
        names["scale"].count_nonzero() == 1
        and sorted(names["errors"].values(), reverse=True) == list(names["errors"].values())
        and names["errors"][10] == 0
    ),
    "implicit": lambda names: (
        _close(names, but=("t1_t2",)) and names["gaps"]["t1_t2"] > 1 and abs(names["total"] - 1) < 1e-6
    ),
    "variance-reduced": lambda names: max(names["values"].values()) < 1.3,
    "dense": lambda names: _close(names) and names["lags"]["stable"] < names["lags"]["svrb"] / 2,
    "first-order": lambda names: names["gaps"][40] < 0.6 * names["gaps"][20] < 0.36 * names["gaps"][10] < 0.3,
}


@pytest.mark.parametrize("page", PAGES)
def test_algorithm_page_runs(page, capsys):
    assert PAGES[page](run(f"docs/reference/algorithms/{page}.md"))
    assert capsys.readouterr().out


def test_algorithm_pages_are_all_run():
    assert PAGES.keys() == {path.stem for path in (ROOT / "docs" / "reference" / "algorithms").glob("*.md")}


def test_contributing_algorithm_runs(monkeypatch):
    """A contributor begins with this text, so that it must work unchanged."""
    monkeypatch.setattr(_registry, "_FACTORIES", dict(_registry._FACTORIES))
    block = re.search(r"```py\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.S)[1]
    names = {"__name__": "fsla.algorithms._my_soba"}
    exec(compile(block, "CONTRIBUTING.md", "exec"), names)
    monkeypatch.setattr(fsla.algorithms, "my_soba", names["my_soba"], raising=False)
    assert "my_soba" in fsla.algorithms.list_algorithms()
    room = run_example(fsla.algorithms.__doc__, {}, "fsla.algorithms")[1]
    count, _ = run_example(names["my_soba"].__doc__, room, "my_soba")
    assert count == 1


def test_contributing_commands_name_existing_files():
    """A command that names a file that moved helps nobody."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"\b(?:tests|benchmarks|src|docs)/[\w./-]+\w", text)
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_linked_files_exist(page):
    """The documentation's own links are checked where the site is built."""
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 140
