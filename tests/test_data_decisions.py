"""What is decided on groups and labels, and that every sentence fits the figures of the same result."""

import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest

from fabricated import fabricate, fabricated_result
from fsla.data._clean import build_result
from fsla.data._dataset import Votes
from fsla.data._decisions import SURE, decide, given_labels, sign_of, uncovered_groups
from fsla.data._report import render
from fsla.data._result import Correction, Estimate
from fsla.data._review import select_review
from fsla.data._sentences import Figures, write_decision, write_facts

EFFECTS = ("better", "same", "worse", "unknown")


def result_of(effect, **options):
    return fabricated_result(effect, **{"checked": 0 if effect == "unknown" else 40, **options})


def the_line(lines, start):
    """Return the one line that starts so."""
    (line,) = [line for line in lines if line.startswith(start)]
    return line


def numbers(text):
    return [float(number) for number in re.findall(r"[-+]?\d+(?:\.\d+)?", text)]


# -------------------------------------------------------------------------------- text against figures


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("relabel", ["never", "sure", "all"])
def test_facts_count_what_the_tables_hold(effect, relabel):
    """A reader who counts rows in a file must get the number of the sentence."""
    result = result_of(effect, relabel=relabel)
    issues, cleaned = result.label_issues, result.cleaned
    flagged = int(issues["is_label_issue"].sum())
    line = the_line(result.facts, f"{flagged} of ")
    assert numbers(line)[:3] == [flagged, 120, round(100 * flagged / 120)]
    (rows,) = [line for line in result.facts if re.fullmatch(r"cleaned\.csv has \d+ of \d+ rows\.", line)]
    assert numbers(rows)[:2] == [len(cleaned), len(result.table)]
    changed = int((cleaned["label"] != cleaned["original_label"]).sum())
    checked_wrong = int((cleaned["label"] != cleaned["original_label"])[: result.num_checked].sum())
    corrections = [line for line in result.facts if "corrected labels" in line]
    assert [numbers(line)[0] for line in corrections] == ([changed - checked_wrong] if changed > checked_wrong else [])
    if relabel == "never":
        assert changed == checked_wrong


@pytest.mark.parametrize("effect", EFFECTS)
def test_decisions_in_text_are_those_of_the_group_table(effect):
    """Decision line, facts and group_weights.csv name the same groups."""
    result = result_of(effect)
    decisions = dict(zip(result.groups["group"], result.groups["decision"], strict=True))
    lines = [result.decision, *result.facts]
    assert len(set(lines)) == len(lines)  # a line that is there twice reads as two facts
    text = "\n".join(lines)
    for name, decision in decisions.items():
        for word in ("Drop", "Review", "Keep"):
            mentioned = bool(re.search(rf"^{word} [^.:]*\b{name}\b", text, re.MULTILINE))
            assert mentioned == (decision == word.lower()), (name, word, text)


def test_helpful_cleaning_recommends_the_cleaned_table_with_both_accuracies():
    """The figure that supports the decision is in the same line."""
    result = result_of("better")
    comparison = result.comparison
    assert result.decision.startswith("Drop forum; use the model and cleaned.csv: accuracy on 40 checked rows is")
    shown = numbers(result.decision.split("rows is")[1])
    assert shown[0] == pytest.approx(100 * comparison.recommended.value)
    assert shown[3] == pytest.approx(100 * comparison.nothing.value)
    assert not any("no measurable" in line or "worse" in line for line in result.facts)


def test_cleaning_without_effect_asks_for_a_look_first():
    """No measurable difference is no recommendation."""
    result = result_of("same", forum_gain=(0.0, -0.04, 0.04))
    assert result.decision.startswith("Use the data as it is and review forum: accuracy on 40 checked rows is 80.0 %")
    assert result.decision.endswith("no measurable difference (+0.0 points, -2.0 to +2.0).")
    assert "Drop" not in "".join(result.facts)
    clean_forum = result_of("same", forum_gain=(0.0, -0.04, 0.04), noise=0.0, forum_weight=(0.9, 0.8, 1.0))
    assert clean_forum.decision.startswith("Use the data as it is: accuracy on 40 checked rows")


def test_data_with_many_wrong_labels_is_not_recommended_as_it_is():
    """Where nothing helps measurably, that half of the labels are wrong is the news."""
    _, fit = fabricate("same")
    rate = Estimate(0.44, 0.35, 0.53)
    decision = write_decision(figures_of(comparison=fit.comparison, noise_rate=rate))
    assert decision.startswith("Check more rows: 44 % of the labels are wrong (35 to 53 %), and nothing is measurably")
    assert "Accuracy on 40 checked rows is 80.0 %" in decision
    facts = write_facts(figures_of(comparison=fit.comparison, noise_rate=rate))
    assert not any(line.startswith("Accuracy") for line in facts)  # once is enough
    few = write_decision(figures_of(comparison=fit.comparison, noise_rate=Estimate(0.1, 0.05, 0.2)))
    assert few.startswith("Use the data as it is: accuracy")


def test_harmful_cleaning_changes_no_label_and_drops_no_group():
    """What is recommended is what cleaned.csv holds."""
    result = result_of("worse")
    assert result.decision.startswith("Use the data as it is, not the model: accuracy on 40 checked rows is 71.0 %")
    assert set(result.groups["decision"]) == {"keep", "review"}
    unchecked = result.cleaned.iloc[result.num_checked :]
    assert (unchecked["label"] == unchecked["original_label"]).all()
    assert len(result.cleaned) == len(result.table)
    assert "cleaned.csv has the labels as they are: the model does worse than everything as it is." in result.facts


def test_data_without_checked_rows_get_flags_and_no_recommendation():
    """Disagreement can be shown; what it means nobody knows."""
    result = result_of("unknown")
    assert result.decision.startswith("No recommendation: no row is checked.")
    assert result.label_issues["is_label_issue"].any()
    assert set(result.groups["decision"]) == {"not_evaluated"}
    assert (result.cleaned["label"] == result.cleaned["original_label"]).all()
    assert not any("Share of wrong labels" in line for line in result.facts)


def test_corrections_that_break_checked_labels_are_not_made():
    """Nothing is used unless it helps."""
    _, fit = fabricate("better", noise=0.0)
    posterior = np.roll(fit.posterior, 1, axis=1)  # sure of the wrong labels
    decisions = decide(replace(fit, posterior=posterior), "sure")
    assert decisions.correction.broken == 40
    assert not decisions.corrected.any()
    assert decide(replace(fit, posterior=posterior), "all").corrected.sum() == 80  # the user asked for it


@pytest.mark.parametrize(("flagged_share", "text"), [(-0.2, "flagged than are wrong"), (0.2, "wrong than are flagged")])
def test_facts_reconcile_flags_with_an_estimate_that_lies_elsewhere(flagged_share, text):
    """Flags and the estimate come from different rules."""
    _, fit = fabricate("better")
    flagged = float(np.mean(fit.posterior.argmax(1)[40:] != given_labels(fit.data)[40:])) * 80 / 120
    rate = flagged + flagged_share
    figures = figures_of(noise_rate=Estimate(rate, max(rate - 0.05, 0), rate + 0.05), num_issues=round(120 * flagged))
    assert text in "\n".join(write_facts(figures))


def figures_of(**changes):
    base = {
        "task": "classification", "relabel": "sure", "effect": "same", "comparison": None, "groups": [],
        "num_rows": 120, "num_labeled": 120, "num_issues": 10, "num_corrected": 0, "num_filled": 0,
        "num_cleaned": 120, "num_rescued": 0, "num_checked": 40, "correction": None, "noise_rate": None,
        "uncovered": (),        "largest": None, "skipped": (),
    }  # fmt: skip
    return Figures(**base | changes)


def test_facts_of_regression_speak_of_numbers_and_squared_errors():
    """Numbers have no corrected labels, and an error falls where an accuracy would rise."""
    _, fit = fabricate("better")
    error = replace(
        fit.comparison,
        metric="root mean squared error",
        nothing=Estimate(2.0, 1.8, 2.2),
        recommended=Estimate(1.25, 1.1, 1.4),
        trusted_only=None,
    )
    figures = figures_of(task="regression", effect="better", comparison=error)
    assert "root mean squared error on 40 checked rows is 1.25 (1.1 to 1.4) with the model" in write_decision(figures)
    text = "\n".join(write_facts(figures))
    assert "10 of 120 numbers (8 %) lie far from the prediction" in text
    assert "accuracy" not in text
    assert "%" not in write_decision(figures)


def test_facts_name_what_could_not_be_tried():
    """A time limit changes the result: that must be said."""
    skipped = ("Time was up before these strategies: em.",)
    assert write_facts(figures_of(skipped=skipped))[-1] == skipped[0]


# -------------------------------------------------------------------------------- decisions


@pytest.mark.parametrize(
    ("effect", "gain", "weight", "expected"),
    [
        ("better", (0.08, 0.02, 0.14), (0.05, 0.0, 0.15), "drop"),
        ("same", (0.08, 0.02, 0.14), (0.05, 0.0, 0.15), "drop"),
        ("worse", (0.08, 0.02, 0.14), (0.05, 0.0, 0.15), "review"),
        ("better", (0.01, -0.01, 0.03), (0.05, 0.0, 0.15), "drop"),  # it counts nothing in a model that is better
        ("better", (0.00, -0.02, 0.02), (0.05, 0.0, 0.15), "review"),
        ("same", (0.00, -0.02, 0.02), (0.05, 0.0, 0.15), "review"),
        ("better", (-0.01, -0.03, 0.01), (0.05, 0.0, 0.15), "review"),
        ("better", (-0.08, -0.14, -0.02), (0.05, 0.0, 0.15), "keep"),
        ("better", (0.08, 0.02, 0.14), (0.9, 0.8, 1.0), "drop"),  # most of its labels are wrong
    ],
)
def test_group_in_question_is_dropped_only_where_figures_say_so(effect, gain, weight, expected):
    """A group is dropped if accuracy rises without it, or if a better model does not use it."""
    _, fit = fabricate(effect, forum_gain=gain, forum_weight=weight)
    assert [group.decision for group in decide(fit, "sure").groups] == ["keep", "keep", expected]


@pytest.mark.parametrize(("effect", "expected"), [("better", "drop"), ("same", "drop"), ("worse", "review")])
def test_group_with_mostly_wrong_labels_is_dropped_unless_that_does_harm(effect, expected):
    """Nobody keeps a trainee who guesses because a forest can live with it."""
    _, fit = fabricate(effect, noise=1.0, forum_gain=(0.0, -0.02, 0.02))
    assert fit.groups.noise_rate[2].low > 0.5
    assert decide(fit, "sure").groups[2].decision == expected
    _, fit = fabricate(effect, noise=1.0, forum_gain=(-0.08, -0.14, -0.02))
    assert decide(fit, "sure").groups[2].decision == "keep"


def test_group_that_is_not_in_question_is_not_dropped_by_chance():
    """Of a hundred groups, two or three gain something without them by chance alone."""
    _, fit = fabricate("better", noise=0.0, forum_weight=(0.9, 0.8, 1.0), forum_gain=(0.02, 0.01, 0.03))
    assert decide(fit, "sure").groups[2].decision == "keep"


def test_groups_are_not_all_dropped():
    """An empty cleaned.csv would help nobody."""
    _, fit = fabricate("better")
    gain = Estimate(0.08, 0.02, 0.14)
    groups = replace(fit.groups, weight_high=np.full(3, 0.1), gain_without=(gain,) * 3)
    decisions = decide(replace(fit, groups=groups), "sure").groups
    assert [group.decision for group in decisions] == ["review"] * 3
    assert decisions[0].reason.endswith("no group would remain")


def test_dropped_group_keeps_the_rows_whose_label_is_sure():
    """Rows whose label can be corrected are not lost."""
    _, fit = fabricate("better")
    unsure = np.arange(120) % 2 == 1
    fit.posterior[unsure] = 0.1 + 0.7 * (fit.posterior[unsure] > 0.5)
    decisions = decide(fit, "sure")
    of_forum = (np.arange(120) % 3 == 2) & (np.arange(120) >= 40)
    np.testing.assert_array_equal(decisions.dropped, of_forum & unsure)
    np.testing.assert_array_equal(decisions.rescued, of_forum & ~unsure)
    assert decide(fit, "never").dropped.sum() == of_forum.sum()
    assert not decide(fit, "all").dropped.any()


def test_labels_are_corrected_from_the_stated_probability():
    """Sure means .9."""
    for probability in (SURE - 0.01, SURE + 0.01):
        _, fit = fabricate("better", probability=probability)
        decisions = decide(fit, "sure")
        assert decisions.corrected.any() == (probability > SURE)
        assert decisions.is_issue.any()
        assert not decisions.corrected[:40].any()  # checked rows have their checked label


def test_correction_effect_is_that_of_a_sign_test():
    """Ten of ten is something, three of four is nothing."""
    assert Correction(60, 40, 10, 0).effect == "better"
    assert Correction(60, 40, 0, 10).effect == "worse"
    assert Correction(60, 40, 3, 1).effect == "same"
    assert Correction(60, 40, 10, 0).right_after == 50
    assert binomtest(3, 4).pvalue > 0.05


def test_correction_is_measured_on_random_checked_rows_alone():
    """Rows that were picked because they look wrong would flatter it."""
    _, fit = fabricate("better", checked=60)
    random = np.arange(60) < 25
    fit = replace(fit, data=replace(fit.data, random_rows=random))
    assert decide(fit, "sure").correction.rows == 25


def test_group_is_not_dropped_because_one_of_many_seems_to_help():
    """Of fifty groups in question, one or two gain something by chance."""
    _, fit = fabricate("same", forum_gain=(0.08, 0.02, 0.14))
    assert decide(fit, "sure").groups[2].decision == "drop"
    groups = replace(fit.groups, weight_high=np.full(3, 0.1))  # three in question
    decisions = decide(replace(fit, groups=replace(groups, gain_without=(None, None, groups.gain_without[2]))), "sure")
    assert decisions.groups[2].decision == "drop"
    close = Estimate(0.08, 0.01, 0.15)
    decisions = decide(replace(fit, groups=replace(groups, gain_without=(None, None, close))), "sure")
    assert decisions.groups[2].decision == "review"


def test_labels_that_are_measurably_better_are_recommended_without_a_better_model():
    """Right labels are worth having whatever the model gains."""
    result = result_of("same", forum_gain=(0.0, -0.04, 0.04), noise=0.9, checked=60)
    before, after = re.search(r"(\d+) have a right label as it is and (\d+) after", result.decision).groups()
    assert result.decision.startswith("Drop forum; use the labels of cleaned.csv: of 60 checked rows")
    assert int(before) < int(after) == 60
    assert any(line.startswith("Accuracy on 60 checked rows") for line in result.facts)


def test_sign_of_an_interval():
    assert [sign_of(Estimate(0, *ends)) for ends in ((0.1, 1), (-1, 1), (-1, -0.1))] == ["better", "same", "worse"]


# -------------------------------------------------------------------------------- rows to review


def test_review_is_half_random_and_never_shows_a_checked_row():
    """The random half keeps the interval of the share of wrong labels valid."""
    _, fit = fabricate("better", n=600)
    decisions = decide(fit, "sure")
    chosen = select_review(fit.data, decisions, 600, 50, seed=0)
    assert chosen.is_random.sum() == 25
    assert len(set(chosen.rows)) == 50
    assert chosen.rows.min() >= 40
    wrong = decisions.is_issue[chosen.rows]
    assert wrong[~chosen.is_random].mean() == 1
    assert wrong[chosen.is_random].mean() == pytest.approx(decisions.is_issue[40:].mean(), abs=0.2)
    assert chosen.is_random[1::2].all()


def test_random_rows_to_review_do_not_depend_on_what_looks_wrong():
    """Otherwise they were no random sample."""
    _, fit = fabricate("better", n=600)
    flat = replace(fit, posterior=np.full((600, 3), 1 / 3))
    picks = [select_review(f.data, decide(f, "sure"), 600, 50, seed=3) for f in (fit, flat)]
    np.testing.assert_array_equal(*[np.sort(p.rows[p.is_random]) for p in picks])


def test_random_rows_to_review_are_uniform():
    """Every row without a check has the same chance."""
    _, fit = fabricate("better", n=60)
    decisions = decide(fit, "sure")
    counts = np.zeros(60)
    for seed in range(400):
        chosen = select_review(fit.data, decisions, 60, 10, seed)
        counts[chosen.rows[chosen.is_random]] += 1
    assert counts[:40].sum() == 0
    expected = 400 * 5 / 20
    assert (counts[40:] > expected - 40).all()
    assert (counts[40:] < expected + 40).all()
    assert counts.sum() == 2000


def test_review_of_few_rows_takes_all():
    _, fit = fabricate("better", n=43)
    chosen = select_review(fit.data, decide(fit, "sure"), 43, 50, 0)
    assert sorted(chosen.rows) == [40, 41, 42]


def test_share_of_wrong_labels_is_unknown_if_checked_rows_miss_a_group():
    """Checked rows of one hospital are no random sample of four."""
    loaded, fit = fabricate("better", n=300, checked=60)
    inside = fit.data.votes.group[:60] != 2
    data = replace(fit.data, checked_rows=fit.data.checked_rows[inside], checked_labels=fit.data.checked_labels[inside])
    groups = replace(fit.groups, num_checked_votes=np.array([20, 20, 0]))
    fit = replace(fit, data=data, groups=groups)
    assert uncovered_groups(fit) == ["forum"]
    loaded.data = data
    result = build_result(loaded, fit, relabel="sure", review=0, seed=0, inputs={})
    assert result.noise_rate is None
    assert "Share of wrong labels: unknown, because no checked row is of forum." in result.facts


def test_many_groups_to_review_share_a_line():
    """Twenty lines that ask for a look are read by nobody."""
    groups = [(f"g{i}", 50, "review", "weight 0.10") for i in range(9)]
    _, fit = fabricate("same")
    facts = write_facts(figures_of(groups=groups, comparison=fit.comparison))
    assert "Review 9 groups → group_weights.csv: g0, g1, g2, g3, g4, g5 and 3 more." in facts
    few = write_facts(figures_of(groups=groups[:2], comparison=fit.comparison))
    assert few[:2] == ("Review g0: weight 0.10.", "Review g1: weight 0.10.")


def several_numbers(effect="same"):
    """Return a fit of 60 rows with three numbers each, of which the third annotator's are 5 too high."""
    rng = np.random.default_rng(0)
    true = rng.standard_normal(60)
    numbers = true[:, None] + 0.1 * rng.standard_normal((60, 3)) + np.array([0.0, 0.0, 5.0])
    loaded, fit = fabricate(effect, n=60, checked=20)
    data = replace(
        fit.data,
        task="regression",
        votes=Votes(np.repeat(np.arange(60), 3), np.tile(np.arange(3), 60), numbers.ravel()),
        checked_labels=true[:20],
        classes=None,
    )
    groups = replace(fit.groups, noise_rate=(None, None, None))
    comparison = replace(fit.comparison, metric="root mean squared error")
    loaded.given_labels = numbers.mean(1).astype(object)
    loaded.data = data
    changes = {"posterior": true, "out_of_fold": true, "confusion": None, "noise_rate": None}
    vote_weight = np.ones(180)
    fit = replace(fit, data=data, groups=groups, comparison=comparison, vote_weight=vote_weight, **changes)
    return loaded, fit, true


def test_several_numbers_a_row_have_a_consensus():
    """The mean of three is that of two and a biased one."""
    loaded, fit, true = several_numbers()
    result = build_result(loaded, fit, relabel="sure", review=5, seed=0, inputs={})
    written = result.cleaned["label"].astype(float).to_numpy()
    np.testing.assert_allclose(written, true, atol=1e-4)
    assert "40 rows have several numbers; cleaned.csv has their consensus." in result.facts
    assert np.isfinite(result.sample_weight).all()
    bias = result.annotators.set_index("annotator")["bias"]
    assert bias["forum"] == pytest.approx(5, abs=0.2)
    assert abs(bias[["web", "book"]]).max() < 0.2
    never = build_result(loaded, fit, relabel="never", review=5, seed=0, inputs={})
    means = never.cleaned["label"].astype(float).to_numpy()[20:]
    np.testing.assert_allclose(means, np.array(loaded.given_labels[20:], dtype=float), rtol=1e-4)
    assert "accuracy" not in render(result).replace("accuracy-", "")


def test_numbers_far_from_the_prediction_are_flagged():
    """One number in a hundred that has lost its point."""
    _, fit, true = several_numbers()
    one = Votes(np.arange(60), np.zeros(60, dtype=int), np.where(np.arange(60) == 50, 1000.0, true + 0.1))
    fit = replace(fit, data=replace(fit.data, votes=one), vote_weight=np.ones(60))
    decisions = decide(fit, "sure")
    assert np.flatnonzero(decisions.is_issue).tolist() == [50]
    assert not decisions.corrected.any()
