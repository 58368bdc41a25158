"""The examples of the README and of the documentation run unchanged."""

import ast
import re
from pathlib import Path

import pytest

import fsla
from fsla.algorithms import _registry
from test_doctests import run_example

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ELSEWHERE = {"how-to/sample-class-penalty-weights.md"}
"""Pages that other tests run: `tests/test_recipes.py`. The gallery's programs are those of `examples/`."""
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PAGES = sorted(
    str(path.relative_to(DOCS))
    for path in DOCS.rglob("*.md")
    if path.parent.name != "gallery" and BLOCK.search(path.read_text(encoding="utf-8"))
)


def run(path):
    """Run a page's Python blocks one after the other, as a reader would, and return their names."""
    blocks = BLOCK.findall(path.read_text(encoding="utf-8"))
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, path.name, "exec"), names)
    return names


def test_readme_runs():
    names = run(ROOT / "README.md")
    web, forum, vendor = names["weights"].as_dict().values()
    assert vendor < 0.1 < 0.5 < min(web, forum)
    x, y = names["x"][4000:], names["y"][4000:]
    assert (names["model"](x).argmax(1) == y).float().mean() > 0.9  # 0.80 with equal weights


def check_clean_a_csv(names, output):
    result = names["result"]
    assert result.groups.set_index("group")["decision"].to_dict() == {
        "scraper": "drop",
        "agency": "keep",
        "portal": "keep",
    }
    low, high = result.noise_rate[1:]
    assert low < names["wrong"].mean() < high
    assert names["after"] > names["before"] + 0.05
    assert names["right"].mean() > 0.9
    assert result.decision in output


def check_source_weights(names, output):
    weights = names["history"][-1]
    assert weights["vendor"] < 0.1 < 0.5 < min(weights["web"], weights["forum"])
    plain, weighted = re.search(r"equal weights (\S+), learnt weights (\S+)", output).groups()
    assert float(weighted) > float(plain) + 0.05


def check_first_bilevel_model(names, output):
    weights = [float(w) for w in re.search(r"step 399.*\[(.*)\]", output)[1].split(",")]
    assert weights[2] > 2 * weights[1] > 10 * weights[0]  # the rarer, the heavier
    assert names["accuracy"] > 0.8  # 0.65 with equal weights


def check_first_algorithm(names, output):
    assert names["ridge"][:5].mean() < 0.2 < 1 < names["ridge"][5:].mean()
    assert names["weights"][:60].mean() < names["weights"][60:].mean() - 0.2
    assert (names["calls"].grad, names["calls"].outer_grad_omega, names["calls"].joint) == (1, 1, 1)
    assert float(re.search(r"relative error (\S+)", output)[1]) < 1e-3


def check_weigh_sources(names, output):
    table = names["weigher"].group_weights_.set_index("group")
    assert table["decision"].to_dict() == {"west": "drop", "south": "keep", "east": "keep", "north": "keep"}
    weight = names["weights"].set_index("group")["weight"]
    assert weight["forum"] < 0.5 * weight["shop"]


def check_use_in_sklearn(names, output):
    cleaner, X, true = names["cleaner"], names["X"], names["true"]
    assert cleaner.score(X[500:], true[500:]) > 0.95
    assert names["weighted"].score(X[500:], true[500:]) > names["plain"].score(X[500:], true[500:]) + 0.1
    assert names["wrong"][names["worst"]].mean() > 0.9
    assert output.endswith("True\n")


def check_own_optimizers(names, output):
    weights = ast.literal_eval(re.search(r"\{0: .*\}", output)[0])
    assert weights[0] == min(weights.values())  # its labels are wrong
    assert output.endswith("True\n")


def check_long_runs(names, output):
    assert names["result"].num_steps == 200
    assert names["weights"].as_dict()[2] < 0.5  # its labels are wrong
    assert (Path(names["folder"]) / "records.jsonl").is_file()


def check_large_models(names, output):
    assert "3 gradients on every 8th step" in output


def check_debug_divergence(names, output):
    assert names["check"].exact_vs_finite_difference < 1e-6


def check_multi_gpu(names, output):
    """Here in one process; torchrun starts the same program."""
    first, second, wrong = names["weights"].weights.tolist()
    assert wrong < 0.1 < 0.5 < min(first, second)
    assert names["result"].num_steps == 300
    assert "{0: " in output


def check_millions(names, output):
    weights, half = names["weights"], names["n"] // 2
    assert weights[:half].mean() < weights[half:].mean()  # the spoilt half weighs less
    assert names["run"].step_count == 401


def check_fixed_points(names, output):
    assert (names["state"].omega.value["z"] - names["target"]).abs().max() < 0.02


def _close(names, but=(), near=1e-2):
    return all(gap < near for name, gap in names["gaps"].items() if name not in but)


def check_index(names, output):
    assert _close(names)
    assert (names["calls"].grad, names["calls"].hvp, names["calls"].mixed_hvp) == (2, 5, 1)


def check_single_loop(names, output):
    assert _close(names, near=0.1)
    assert sum(gap < 1e-10 for gap in names["gaps"].values()) == 3


def check_soba(names, output):
    assert max(names["gaps"]["saba"], names["gaps"]["srba"]) < names["gaps"]["soba"] / 5


def check_unrolled(names, output):
    assert names["scale"].count_nonzero() == 1
    assert sorted(names["errors"].values(), reverse=True) == list(names["errors"].values())
    assert names["errors"][10] == 0


def check_implicit(names, output):
    assert _close(names, but=("t1_t2",))
    assert names["gaps"]["t1_t2"] > 1
    assert abs(names["total"] - 1) < 1e-6


def check_variance_reduced(names, output):
    assert max(names["values"].values()) < 1.3
    assert _close(names)
    assert names["lags"]["stable"] < names["lags"]["svrb"] / 2


def check_first_order(names, output):
    assert names["gaps"][40] < 0.6 * names["gaps"][20] < 0.36 * names["gaps"][10] < 0.3


CHECKS = {
    "tutorials/clean-a-csv.md": check_clean_a_csv,
    "tutorials/source-weights.md": check_source_weights,
    "tutorials/first-bilevel-model.md": check_first_bilevel_model,
    "tutorials/first-algorithm.md": check_first_algorithm,
    "how-to/weigh-sources.md": check_weigh_sources,
    "how-to/use-in-sklearn.md": check_use_in_sklearn,
    "how-to/own-optimizers.md": check_own_optimizers,
    "how-to/long-runs.md": check_long_runs,
    "how-to/large-models.md": check_large_models,
    "how-to/debug-divergence.md": check_debug_divergence,
    "how-to/multi-gpu.md": check_multi_gpu,
    "how-to/millions-of-sample-weights.md": check_millions,
    "how-to/fixed-points.md": check_fixed_points,
    "reference/algorithms/index.md": check_index,
    "reference/algorithms/single-loop.md": check_single_loop,
    "reference/algorithms/soba.md": check_soba,
    "reference/algorithms/unrolled.md": check_unrolled,
    "reference/algorithms/implicit.md": check_implicit,
    "reference/algorithms/variance-reduced.md": check_variance_reduced,
    "reference/algorithms/first-order.md": check_first_order,
}
"""What the comments and outputs of each page's examples say."""


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE])
def test_page_runs(page, capsys, monkeypatch, tmp_path):
    """A reader who copies a block must get what the page shows."""
    monkeypatch.chdir(tmp_path)  # some pages write files
    names = run(DOCS / page)
    CHECKS[page](names, capsys.readouterr().out)


def test_every_page_with_code_is_checked():
    """A page without a check would run, and could print anything."""
    assert {*CHECKS, *ELSEWHERE} == set(PAGES)


def test_contributing_algorithm_runs(monkeypatch):
    """A contributor begins with this text, so that it must work unchanged."""
    monkeypatch.setattr(_registry, "_FACTORIES", dict(_registry._FACTORIES))
    page = DOCS / "how-to" / "add-an-algorithm.md"
    block = re.search(r"```py\n(.*?)```", page.read_text(encoding="utf-8"), re.S)[1]
    names = {"__name__": "fsla.algorithms._my_soba"}
    exec(compile(block, page.name, "exec"), names)
    monkeypatch.setattr(fsla.algorithms, "my_soba", names["my_soba"], raising=False)
    assert "my_soba" in fsla.algorithms.list_algorithms()
    room = run_example(fsla.algorithms.__doc__, {}, "fsla.algorithms")[1]
    count, _ = run_example(names["my_soba"].__doc__, room, "my_soba")
    assert count == 1


def test_contributing_commands_name_existing_files():
    """A command that names a file that moved helps nobody."""
    for page, least in ((ROOT / "CONTRIBUTING.md", 25), (DOCS / "how-to" / "add-an-algorithm.md", 5)):
        paths = re.findall(r"\b(?:tests|benchmarks|src|docs)/[\w./-]+\w", page.read_text(encoding="utf-8"))
        assert len(paths) > least
        assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_linked_files_exist(page):
    """The documentation's own links are checked where the site is built."""
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 140
