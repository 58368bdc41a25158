"""The evaluation of `fsla reproduce weights`: its tasks, its measures and its summary."""

import pytest
import torch
from sklearn.metrics import roc_auc_score

from fsla_benchmarks.data_quality.experiment import PAPER, Cell, WeightsSpec, auroc, reproduce
from fsla_benchmarks.data_quality.plot import draw
from fsla_benchmarks.data_quality.report import CHOSEN, ORACLE, claims, markdown, summarise
from fsla_benchmarks.data_quality.tasks import KINDS, RIGHT, make
from fsla_reproduction.datasets import load

DIGITS = load("digits")


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_is_drawn_from_its_seed_and_keeps_its_parts_apart(kind):
    one = make(kind, DIGITS, 3, 0.4, 50, 300, None)
    again = make(kind, DIGITS, 3, 0.4, 50, 300, None)
    assert all(a is None or torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert len(one.trusted_y) == 50
    assert len(one.x) == len(one.y) == len(one.wrong) == 300
    known = {row.numpy().tobytes() for row in one.trusted_x}
    assert sum(row.numpy().tobytes() in known for row in one.x) == 0
    other = make(kind, DIGITS, 4, 0.4, 50, 300, None)
    assert not torch.equal(one.x, other.x)


def test_a_data_set_that_is_too_small_is_said():
    with pytest.raises(ValueError, match="must have 1200 samples and 50 trusted ones of the kind 'tail'"):
        make("tail", DIGITS, 3, 0.4, 50, 1200, None)


def test_the_right_sources_are_right_and_rates_are_kept():
    data = make("sources", DIGITS, 3, 0.6, 50, 1000, None)
    for group in range(10):
        share = float(data.wrong[data.groups == group].float().mean())
        assert (share == 0) == (group in (*RIGHT, 8)), group
    flips = make("uniform", DIGITS, 3, 0.4, 50, 1000, None)
    assert float(flips.wrong.float().mean()) == pytest.approx(0.4, abs=0.05)
    hard = make("instance", DIGITS, 3, 0.3, 50, 1000, None)
    assert 0.1 < float(hard.wrong.float().mean()) < 0.4


def test_the_area_is_scikit_learn_s():
    generator = torch.Generator().manual_seed(0)
    quality = torch.randint(20, (500,), generator=generator) / 20  # with ties
    wrong = torch.rand(500, generator=generator) < 0.3
    assert auroc(quality, wrong) == pytest.approx(roc_auc_score(wrong, -quality.numpy()))


def records(chosen, other, cell="uniform 0.4, 100 trusted", key="accuracy", oracle=None):
    head = {"cell": cell, "kind": cell.split()[0], "s_taken": 1.0}
    found = []
    for seed, (a, b) in enumerate(zip(chosen, other, strict=True)):
        found.append(head | {"seed": seed, "method": "mended labels", key: b})
        found.append(head | {"seed": seed, "method": CHOSEN, key: a, "shares": {"everything": 1.0 - seed}})
        if oracle is not None:
            found.append(head | {"seed": seed, "method": ORACLE, key: oracle})
    return found


def test_claims_hold_within_the_spread_and_fail_beyond_it():
    assert claims(summarise(records([0.80, 0.82], [0.81, 0.83])))[0].holds
    lost = summarise(records([0.70, 0.70], [0.80, 0.80]))
    assert not claims(lost)[0].holds
    text = markdown("Two seeds.", lost)
    assert "| .700 ± .000 | **.800 ± .000** |" in text
    assert "everything 0.50" in text
    near = records([0.2, 0.2], [0.3, 0.3], "regression 0.6, 100 trusted", "error", oracle=0.19)
    assert claims(summarise(near))[0].holds
    assert not claims(summarise([r | {"error": 0.25} if r["method"] == CHOSEN else r for r in near]))[0].holds


def test_the_figure_shows_every_method(tmp_path):
    rows = summarise(records([0.80, 0.82], [0.81, 0.83]))
    (path,) = draw(tmp_path, rows)
    assert path.stat().st_size > 10_000
    assert draw(tmp_path, summarise(records([0.2, 0.2], [0.3, 0.3], "regression 0.6, 100 trusted", "error"))) == []


def test_cells_cover_what_was_asked():
    assert {cell.kind for cell in PAPER} == set(KINDS)
    assert {cell.rate for cell in PAPER if cell.kind == "uniform"} == {0.1, 0.2, 0.4, 0.8}
    assert {cell.trusted for cell in PAPER} >= {50, 100, 500, 5000}
    assert [cell.kind for cell in WeightsSpec("paper", kinds=("pair",)).cells] == ["pair", "pair"]
    with pytest.raises(ValueError, match="kind of mixed data"):
        Cell("uniforms", 0.4, 100)
    with pytest.raises(ValueError, match="The scale must be one of"):
        WeightsSpec("papers")


@pytest.mark.slow
def test_the_smoke_scale_runs_and_resumes(tmp_path):
    spec = WeightsSpec(kinds=("regression",))
    _, first = reproduce(tmp_path / "out", spec)
    assert any("right sources alone" in claim.text for claim in first.claims)
    _, again = reproduce(tmp_path / "out", spec)
    assert again.text == first.text
