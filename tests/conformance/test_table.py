"""The table of all algorithms in docs/reference/algorithms/index.md agrees with what is measured."""

import re
from pathlib import Path

import pytest
import torch
from rows import make, row_of

from fsla import StepBatches, algorithms
from fsla._state_tree import tensors_of
from fsla_reproduction.problems import Quadratic

DOCS = Path(__file__).parent.parent.parent / "docs" / "reference" / "algorithms"
COLUMNS = {
    "∂_ω G": ("grad",),
    "∂_λ G": ("forward",),
    "∂_ω F": ("outer_grad_omega",),
    "∂_λ F": ("outer_grad_lam",),
    "H v": ("hvp",),
    "J v": ("mixed_hvp", "mixed_hvp_transpose"),
}
VARIES = ("grows", "varies", "≤")
SYMBOLS = {"inner_steps": "T", "hvp_steps": "Q", "num_terms": "K", "unroll_length": "R"}
"""How the table writes the arguments."""


def table():
    lines = [line for line in (DOCS / "index.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    head = next(line for line in lines if line.startswith("| algorithm | ∂_ω G"))
    titles = [cell.strip() for cell in head.strip("|").split("|")]
    texts = {}
    for line in lines:
        name = re.match(r"\| \[`(\w+)`\]\((\S+)\.md#(\w+)\)", line)
        if name:
            assert name[1] == name[3]
            cells = [re.sub(r"\[.\]\(#notes\)", "", cell).strip() for cell in line.strip("|").split("|")]
            texts[name[1]] = dict(zip(titles, cells, strict=True)) | {"page": name[2]}
    return texts


TABLE = table()


def number(cell, names):
    """The value of a cell such as 2(T - 1)*, for numbers by name."""
    formula = re.sub(r"(?<=[\w)])(?=[A-Za-z(])", "*", cell.rstrip("*"))
    return eval(formula, {}, names) if formula else 0


def test_cost_table_cell_evaluates_formula():
    assert number("2(m + 1)Q", {"m": 2, "Q": 3}) == 18
    assert number("nn + pn + 3p", {"n": 2, "p": 5}) == 29
    assert number("(R - 1)*", {"R": 3}) == 2
    assert number("", {}) == 0


def numbers_kept(algorithm, p=2, n=3):
    """Return how many numbers a state holds beside λ and ω."""
    q = Quadratic.random(p, n, kappa=3.0)
    at = q.point(torch.full((p,), 0.3, dtype=torch.float64), torch.full((n,), 0.1, dtype=torch.float64))
    batches = [StepBatches.shared(None, None, seed=k) for k in range(2)]
    state = algorithm.init(q, at, batches[0])
    for k in range(2):
        state = algorithm.step(q, state, batches[k])
    storage = {t.data_ptr(): t.numel() for t in tensors_of(state)}
    return sum(storage.values()) - n - p


def measured_row(name):
    """Return a line of the table with what was measured in the place of formulas."""
    row = row_of(name)
    algorithm = make(name)
    calls = [sum(row.counts.get(kind, 0) for kind in kinds) or "" for kinds in COLUMNS.values()]
    if "joint" in row.counts:
        calls[-2:] = [f"{count}*" for count in calls[-2:]]
    memory = f"{numbers_kept(algorithm)} for p = 2, n = 3"
    cells = [f"[`{name}`](PAGE.md#{name})", *calls, memory, "", "yes" if row.draws else ""]
    return "| " + " | ".join(map(str, [*cells, "yes" if algorithm.capturable else "no"])) + " |"


@pytest.mark.parametrize("name", sorted({*TABLE, *algorithms.list_algorithms()}))
def test_cost_table_lists_every_algorithm(name):
    assert name in algorithms.list_algorithms()
    assert name in TABLE, f"Add a row to docs/reference/algorithms/index.md, with its page:\n\n{measured_row(name)}"


def test_measured_row_has_the_table_s_columns():
    """A contributor pastes it."""
    assert (
        measured_row("soba") == "| [`soba`](PAGE.md#soba) | 1 |  | 1 | 1 | 1* | 1* | 5 for p = 2, n = 3 |  |  | yes |"
    )


@pytest.mark.parametrize("name", TABLE)
def test_cost_table_row_matches_counts(name):
    cells = TABLE[name]
    row = row_of(name)
    p, n = 2, 3  # those of the problem on which the counts are tested
    arguments = {key: value for key, value in row.options.items() if isinstance(value, int | float)}
    sizes = {SYMBOLS.get(key, key): value for key, value in arguments.items()} | {"p": p, "n": n}
    for title, kinds in COLUMNS.items():
        if row.counts and not cells[title].startswith(VARIES):
            assert number(cells[title], sizes) == sum(row.counts.get(kind, 0) for kind in kinds), title
    assert cells["H v"].endswith("*") == cells["J v"].endswith("*") == ("joint" in row.counts)
    algorithm = make(name)
    assert cells["captured"] == ("yes" if algorithm.capturable else "no")
    assert cells["seed"] == ("yes" if row.draws else "")
    page = (DOCS / f"{cells['page']}.md").read_text(encoding="utf-8")
    assert f"{{ #{name} }}" in page
    assert numbers_kept(algorithm) == number(cells["kept"], sizes)
