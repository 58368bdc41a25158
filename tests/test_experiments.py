"""Specifications that refuse what they cannot mean, runs that no clock decides, and claims that follow the records."""

import json
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
import torch

from fsla_reproduction.cleaning import RunSpec, checksum, execute, identity, prepare
from fsla_reproduction.cleaning_claims import all_claims
from fsla_reproduction.cleaning_summary import markdown
from fsla_reproduction.datasets import TaskSpec, make_task
from fsla_reproduction.figures import FIGURES, GROUPS, PRESETS, CleaningSpec, panels
from fsla_reproduction.methods import Bp, Cg, Fsla, NoCleaning, Ns, Oracle
from fsla_reproduction.results import Results, Runs, last_common_step, oracle_calls
from fsla_reproduction.synthetic_summary import steady

TINY = RunSpec(
    TaskSpec("digits", n_train=60, n_valid=40), model="softmax", steps=6, every=3, batch=16,
    delta=10.0, c_tau=0.1, c_beta=0.01, c_eta=0.09,
)  # fmt: skip
METHODS = [
    Fsla(),
    Fsla(v_at="new"),
    Fsla(momentum="none"),
    Fsla(momentum="average"),
    Fsla(curvature="gauss-newton"),
    Bp(3),
    Bp(3, momentum="none"),
    Ns(1, 3),
    Ns(1, 3, beta=0.2),
    Ns(2, 3),
    Cg(1, 3),
    Cg(1, 3, momentum="none"),
    Cg(3, 1),
    NoCleaning(),
    Oracle(),
]


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda: Fsla(v_at="nonsense"), ValueError, "v_at.*must be one of 'old', 'new'"),
        (lambda: Fsla(momentum="strom"), ValueError, "momentum.*Did you mean 'storm'"),
        (lambda: Fsla(curvature="newton"), ValueError, "curvature must be one of.*Got 'newton'"),
        (lambda: Bp(0), ValueError, "'T' of Bp must be at least 1"),
        (lambda: Bp(2.0), TypeError, "'T' of Bp must be a whole number"),
        (lambda: Bp(2, momentum="x"), ValueError, "momentum must be one of"),
        (lambda: Ns(0, 1), ValueError, "'T' of Ns"),
        (lambda: Ns(1, -1), ValueError, "'K' of Ns"),
        (lambda: Ns(1, 1, beta=0.0), ValueError, "'beta' of Ns must be positive"),
        (lambda: Ns(1, 1, beta=None), TypeError, "'beta' of Ns must be a number"),
        (lambda: Ns(1, 1, momentum=""), ValueError, "momentum must be one of"),
        (lambda: Cg(True, 1), TypeError, "'T' of Cg"),
        (lambda: Cg(1, "10"), TypeError, "'K' of Cg"),
        (lambda: Cg(1, 1, momentum="none "), ValueError, "momentum must be one of"),
        (lambda: RunSpec(method="fsla"), TypeError, "'method' of RunSpec must be one of.*Got 'fsla'"),
        (lambda: RunSpec(task="mnist"), TypeError, "'task' of RunSpec must be a TaskSpec"),
        (lambda: RunSpec(model="cn"), ValueError, "Did you mean 'cnn'"),
        (lambda: RunSpec(samples="x"), ValueError, "sampling mode.*must be one of 'independent', 'grouped', 'shared'"),
        (lambda: RunSpec(steps=0), ValueError, "'steps' of RunSpec"),
        (lambda: RunSpec(every=0.5), TypeError, "'every' of RunSpec"),
        (lambda: RunSpec(batch=-1), ValueError, "'batch' of RunSpec"),
        (lambda: RunSpec(delta=0), ValueError, "'delta' of RunSpec must be positive"),
        (lambda: RunSpec(c_tau=float("nan")), ValueError, "'c_tau' of RunSpec must be positive"),
        (lambda: RunSpec(c_beta=None), TypeError, "'c_beta' of RunSpec must be a number"),
        (lambda: RunSpec(c_eta="1"), TypeError, "'c_eta' of RunSpec must be a number"),
        (lambda: RunSpec(budget_s=0), ValueError, "'budget_s' of RunSpec must be positive"),
        (lambda: RunSpec(budget_calls=0), ValueError, "'budget_calls' of RunSpec must be at least 1"),
        (lambda: RunSpec(budget_calls=1.5), TypeError, "'budget_calls' of RunSpec must be a whole number"),
    ],
)
def test_run_spec_invalid_value_raises(build, error, text):
    with pytest.raises(error, match=text):
        build()


def test_method_with_unused_setting_raises():
    with pytest.raises(TypeError, match="curvature"):
        Cg(1, 10, curvature="gauss-newton")
    with pytest.raises(TypeError, match="v_at"):
        Ns(1, 10, v_at="new")
    with pytest.raises(TypeError, match="momentum"):
        NoCleaning(momentum="storm")


def test_run_spec_name_and_json_are_unique():
    specs = [replace(TINY, method=method) for method in METHODS]
    assert len({spec.name for spec in specs}) == len(METHODS)
    assert len({json.dumps(asdict(spec), sort_keys=True) for spec in specs}) == len(METHODS)
    assert asdict(RunSpec(method=Cg(1, 10)))["method"] == {"T": 1, "K": 10, "momentum": "storm", "kind": "cg"}
    for method, start in ((Cg(1, 10), "digits-softmax-cg_1_10-seed0-"), (NoCleaning(), "digits-softmax-none-seed0-")):
        assert replace(TINY, method=method).name.startswith(start)
    assert TINY.with_seed(3).name.startswith("digits-softmax-fsla-seed3-")


def test_method_legends_match_paper():
    legends = [method.legend for method in (Fsla(), Bp(51), Ns(1, 10), Cg(5, 10), NoCleaning(), Oracle())]
    assert legends == ["FSLA", "BP_51", "NS_1_10", "CG_5_10", "no cleaning", "oracle"]
    assert Fsla(momentum="none").legend == "FSLA, no momentum"
    assert len({method.legend for method in METHODS}) == len(METHODS) - 1  # β of NS is not in its name


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_method_step_cost_matches_counts(method):
    """From the second step on: BP has no trajectory before the first."""
    records = execute(replace(TINY, method=method, every=1), engine="eager")
    calls = [oracle_calls(record["oracles"]) for record in records]
    assert {b - a for a, b in pairwise(calls[1:])} == {method.calls}


def test_run_with_shared_batches_reaches_method():
    task = make_task(TINY.task)
    same_samples, _ = prepare(replace(TINY, samples="shared"), task)
    assert len({batch for slot in same_samples.draw().slots for batch in slot}) == 2


def test_checksum_covers_data():
    task = make_task(TINY.task)
    assert checksum(task) == checksum(make_task(TINY.task))
    assert checksum(task) != checksum(make_task(replace(TINY.task, seed=1)))
    other = task.test_x.clone()
    other.view(-1)[0] += 1
    assert checksum(task) != checksum(task._replace(test_x=other))
    assert checksum(task) != checksum(task._replace(train_y=task.train_y.to(torch.int32)))
    assert json.loads(json.dumps(identity(TINY, task))) == identity(TINY, task)
    assert identity(TINY, task) != identity(replace(TINY, c_beta=0.02), task)


@pytest.mark.parametrize("preset", PRESETS)
def test_run_without_timing_has_no_clock(preset):
    every = panels(CleaningSpec(preset)).runs(GROUPS["all"], 1)
    assert {spec.budget_s for spec in every} == {None}
    specs = panels(CleaningSpec(preset, time_limit=5.0)).runs(GROUPS["all"], 1)
    assert {spec.budget_s for spec in specs} == {300.0}  # the limit is in minutes


def test_overview_gives_methods_equal_oracle_calls():
    for preset in PRESETS.values():
        runs = FIGURES["overview"](preset)[0].runs.values()
        for spec in runs:
            assert 0 <= preset.calls - spec.steps * spec.method.calls < spec.method.calls


def test_panels_are_selected_by_name():
    every = panels(CleaningSpec())
    assert every.panel("fig6", "c_β").runs["0.000833"] == every.base
    assert set(every.panel("momentum", "curvature").runs) == {
        "storm",
        "none",
        "storm, Gauss-Newton",
        "none, Gauss-Newton",
    }
    assert every.panel("momentum", "curvature").runs["none, Gauss-Newton"].method == Fsla(
        momentum="none", curvature="gauss-newton"
    )
    with pytest.raises(ValueError, match="panel of fig6 must be one of 'c_τ', 'c_η', 'c_β'"):
        every.panel("fig6", "c_b")
    seeds = every.runs(("fig2",), 2)
    assert [spec.task.seed for spec in seeds] == [0] * 6 + [1] * 6


def record(step, loss, *, seconds=None, auroc=0.9, status="running"):
    oracles = dict.fromkeys(("grad", "hvp", "mixed_hvp", "outer_grad_omega"), step) | {"joint": 0}
    metrics = {
        "step": step,
        "seconds": step * 0.01 if seconds is None else seconds,
        "oracles": oracles,
        "status": status,
    }
    scores = {"valid_accuracy": 0.5, "test_accuracy": 0.5, "weight_auroc": auroc, "confidence_auroc": 0.5}
    return metrics | {"valid_loss": loss} | scores


def curve(*losses, pace=0.01, auroc=0.9, last="finished"):
    """Records at steps 0, 100, …; a step takes `pace` seconds."""
    out = [record(100 * i, loss, seconds=100 * i * pace, auroc=auroc) for i, loss in enumerate(losses)]
    return [*out[:-1], out[-1] | {"status": last}]


def results(figure, **losses):
    """The results of a figure: a curve for each label, else a poor one."""
    every = panels(CleaningSpec())
    runs = {spec.name: label for panel in every.figures[figure] for label, spec in panel.runs.items()}
    return Results(every, {name: losses.get(label, curve(2.0, 1.9, 1.8)) for name, label in runs.items()}, 1)


def results_of_claims(figure, **losses):
    return {claim.text: claim.holds for claim in all_claims((figure,), results(figure, **losses))}


def test_overview_claims_follow_records():
    same_calls = "For the same oracle calls FSLA reaches a lower loss than CG_1_1 and CG_1_10 (all with STORM)"
    auroc_claim = (
        "FSLA's weights rank the wrong labels better than CG's, AUROC at least 0.95 (not a claim of the paper's)"
    )
    twice = "CG_1_1, which costs about as much as FSLA, ends with at least twice its loss"
    helps = "Cleaning helps (not a claim of the paper's)"
    good = curve(2.0, 1.0, 0.5, auroc=0.97)
    won = results_of_claims("overview", **{"FSLA": good, "FSLA, no momentum": good})
    assert [won[claim] for claim in (same_calls, "… also without momentum", twice, helps, auroc_claim)] == [True] * 5
    lost = results_of_claims("overview", **{"CG_1_10": good, "CG_1_10, no momentum": good, "no cleaning": good})
    assert [lost[claim] for claim in (same_calls, "… also without momentum", twice, helps, auroc_claim)] == [False] * 5
    mixed = results_of_claims("overview", **{"FSLA": good, "CG_1_10, no momentum": good})
    assert mixed[same_calls]
    assert not mixed["… also without momentum"]
    assert not mixed[auroc_claim]


def test_time_claims_follow_step_seconds():
    late = "When FSLA ends, CG_1_10 is not as far, since its steps take more time"
    fsla = curve(2.0, 1.0, 0.8)
    assert results_of_claims("overview", FSLA=fsla, CG_1_10=curve(2.0, 1.0, 0.5, pace=0.1))[late]
    assert not results_of_claims("overview", FSLA=fsla, CG_1_10=curve(2.0, 1.0, 0.5, pace=0.01))[late]


def test_fig2_claims_follow_records():
    passes = "FSLA passes the best BP variant around hyper-iteration 500 of 2000 (here: 100 of 400)"
    fsla = curve(2.0, 1.0, 0.8, 0.7, 0.6)
    slow = curve(2.0, 1.9, 1.8, 1.7, 1.6)
    early = {"FSLA": fsla, "BP_1": slow, "BP_5": slow, "BP_20": slow}
    assert results_of_claims("fig2", **early)[passes] is True
    assert results_of_claims("fig2", **early | {"BP_5": curve(2.0, 0.9, 0.75, 0.65, 0.55)})[passes] is False
    assert results_of_claims("fig2", **early | {"BP_20": curve(2.0, 1.9, last="budget")})[passes] is None
    in_time = "FSLA is much faster than BP in time"
    assert results_of_claims("fig2", **early | {"BP_20": curve(2.0, 0.5, 0.4, pace=0.1)})[in_time]
    assert not results_of_claims("fig2", **early | {"BP_1": curve(2.0, 0.5, 0.4), "BP_20": curve(2.0, 1.9, pace=0.1)})[
        in_time
    ]


def test_fig3_claims_follow_records():
    by_steps = "FSLA converges faster than every NS and CG, by iterations"
    good = curve(2.0, 1.0, 0.5)
    won = results_of_claims("fig3", FSLA=good)
    assert won[by_steps] is True
    assert won["FSLA converges faster than every NS and CG, in time"] is True
    assert results_of_claims("fig3", FSLA=good, CG_1_5=curve(2.0, 0.9, 0.4))[by_steps] is False
    assert (
        results_of_claims("fig3", FSLA=curve(2, 1, 0.9, 0.8, 0.5), CG_1_5=curve(2.0, 0.9, last="budget"))[by_steps]
        is None
    )
    saturates = "CG saturates at about K = 10"
    one, ten = curve(2.0, 1.5, 1.2), curve(2.0, 0.9, 0.5)
    assert results_of_claims("fig3", CG_1_1=one, CG_1_10=ten, CG_1_20=curve(2.0, 0.9, 0.45))[saturates] is True
    assert results_of_claims("fig3", CG_1_1=one, CG_1_10=ten, CG_1_20=curve(2.0, 0.9, 0.2))[saturates] is False
    assert results_of_claims("fig3", NS_1_10=good)["Warm start speeds up NS"] is True
    assert results_of_claims("fig3", NS_20_10=good)["Warm start speeds up NS"] is False


def test_other_claims_follow_records():
    storm = "STORM gains over no momentum and over a moving average"
    good = curve(2.0, 1.0, 0.5)
    assert results_of_claims("momentum", storm=good)[storm]
    assert not results_of_claims("momentum", none=good)[storm]
    least = "The smallest batch, 8, does not converge"
    assert results_of_claims("fig5", **{"8": curve(2.0, 1.0, 1.9)})[least]
    assert results_of_claims("fig5", **{"8": curve(2.0, 1.0, None, last="diverged")})[least]
    assert not results_of_claims("fig5")[least]
    most = "c_β five times larger, 0.00417, does not converge"
    assert results_of_claims("fig6", **{"0.00417": curve(2.0, 1.0, 1.9)})[most]
    assert not results_of_claims("fig6")[most]
    assert all(results_of_claims("fig4", FSLA=good).values())
    assert not any(results_of_claims("fig4", CG_1_10=good).values())


def test_summary_lists_every_claim_and_run():
    for figure in FIGURES:
        by_figure = results(figure)
        text = markdown((figure,), by_figure)
        assert all(claim.text in text for claim in all_claims((figure,), by_figure))
        for panel in by_figure.panels.figures[figure]:
            assert f"## {figure}: {panel.title}" in text
            assert all(f"| {label} | 1.800 |" in text for label in panel.runs)


def test_step_seconds_ignore_slow_start():
    """Such as one in which a graph is captured."""
    slow = [record(0, 2.0, seconds=0.0), *(record(100 * i, 1.0, seconds=50 + i) for i in range(1, 5))]
    assert Runs((slow,)).step_seconds == pytest.approx(0.01)
    assert Runs(([record(0, 2.0)],)).step_seconds != Runs(([record(0, 2.0)],)).step_seconds  # NaN: no step was taken


def test_claim_of_diverged_run_fails():
    runs = Runs(([record(0, 2.0), record(3, 0.1, status="diverged")],))
    assert runs.loss == float("inf")
    assert runs.final("weight_auroc") != runs.final("weight_auroc")  # NaN
    assert runs.status == "diverged at step 3"


def test_curves_average_steps_of_all_seeds():
    runs = Runs((curve(2.0, 1.0, 0.5), curve(4.0, 2.0)))
    assert runs.curve() == {0: 3.0, 100: 1.5}
    assert runs.loss == 1.25
    assert runs.spread("valid_loss") == pytest.approx(1.0607, rel=1e-3)
    assert last_common_step((runs, Runs((curve(1.0, 1.0, 1.0, 1.0),)))) == 100
    assert runs.seconds_to(1.0) is None
    assert runs.seconds_to(2.0) == pytest.approx(0.5)
    assert runs.loss_when_ended(Runs((curve(1.0, 1.0, pace=0.005), curve(1.0, 1.0)))) == pytest.approx(2.0)


def test_estimate_times_never_fall_with_k():
    times = {"NS": [0.1, 0.3, 0.2, 0.5, 0.4], "CG": [0.9, 0.1, 0.2, 0.3, 0.4]}
    rows = [{"method": m, "K": K, "s_one": s, "s_every": 9.0} for m, x in times.items() for K, s in enumerate(x, 1)]
    seconds = {m: [r["s_one"] for r in sorted(steady(rows), key=lambda r: r["K"]) if r["method"] == m] for m in times}
    assert seconds == {"NS": [0.1, 0.2, 0.2, 0.4, 0.4], "CG": [0.1, 0.1, 0.2, 0.3, 0.4]}
    assert len(steady(rows)) == len(rows)
    assert {r["s_every"] for r in steady(rows)} == {9.0}
