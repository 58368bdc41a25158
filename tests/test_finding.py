"""What `fsla clean` and `fsla weigh` decide and say: from constructed facts, and from a run on a case of ties."""

import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import fsla
from fsla.cli import app
from fsla.data._decisions import Change, compare, decide, suspect
from fsla.data._finding import Facts, Group, LeftOut, lines

TIE = Change("same", 0.973, 0.973, 147)
HELPS = Change("better", 0.901, 0.952, 147)
HARMS = Change("worse", 0.973, 0.919, 147)
SURER = Change("better", 0.973, 0.973, 147, likelihoods=(-0.35, -0.12))


def facts(decision="review", change=TIE, **more):
    """Four sites, of which C has 170 wrong labels."""
    kept = [Group(name, 375, "keep", 0.9, 0.88, 0.93, 0) for name in "BAD"]
    site = Group("C", 375, decision, 0.01, 0.0, 0.02, 170, suspect=True)
    out = (LeftOut(("C",), change),)
    usual = {"flagged": 170, "relabelled": 170, "noise": (0.10, 0.19), "corrected": TIE, "model": TIE}
    return Facts(1500, **{"cleaned": 1500, "groups": (*kept, site), "left_out": out, **usual} | more)


def starting(found, start):
    """The one line that starts so."""
    (line,) = [line for line in found if line.startswith(start)]
    return line


# ------------------------------------------------------------------------------------------------------ the sentences


def test_finding_of_ties_asks_for_review_with_all_figures_in_one_sentence():
    """The defect: a flagged group was neutral, and nothing helped while 170 labels were flagged."""
    found = lines(facts())
    assert found[0] == "Keep B, A, D."
    assert found[1] == (
        "Review C (45 % of its labels look wrong, weight 0.01): accuracy on 147 held-out trusted rows is 97.3 % with "
        "it and 97.3 % without, no measurable change."
    )
    assert starting(found, "170 of 1500 labels (11 %)").endswith("estimated at 10 to 19 %.")
    assert starting(found, "Training on corrected").endswith(
        "no measurable change in accuracy on 147 held-out trusted rows (97.3 % → 97.3 %): check C by hand before you "
        "use cleaned.csv."
    )
    assert found[-1].endswith("The 375 rows of C stay in it.")


def test_finding_of_a_group_that_harms_drops_it_with_both_accuracies():
    """A drop is told with what it brings, and cleaned.csv follows."""
    found = lines(facts("drop", HELPS, cleaned=1125, relabelled=0, corrected=HELPS, corrected_and_weighed=True))
    assert starting(found, "Drop C").endswith("rises from 90.1 % with it to 95.2 % without.")
    assert starting(found, "Training on").endswith("(90.1 % → 95.2 %): use cleaned.csv.")
    assert (
        found[-1] == "cleaned.csv has 1125 of 1500 rows, 0 of them with another label. The 375 rows of C are left out."
    )
    assert not any("eview" in line for line in found)


def test_finding_of_a_group_that_is_needed_keeps_its_rows():
    """Worse is another fact than no change."""
    found = lines(facts(change=HARMS, corrected=HARMS))
    assert starting(found, "Review C").endswith("falls from 97.3 % with it to 91.9 % without: keep its rows.")
    assert "lowers accuracy" in starting(found, "Training on")
    assert "no measurable change" not in " ".join(found)


def test_finding_by_likelihood_shows_likelihood_and_accuracy():
    """A drop at one and the same accuracy would look like a contradiction."""
    line = starting(lines(facts("drop", SURER)), "Drop C")
    assert "97.3 % with it and 97.3 % without" in line
    assert "log-likelihood per row rises from -0.350 to -0.120" in line


def test_finding_without_groups_starts_with_the_labels():
    """Advice then points to the file instead of a group."""
    found = lines(facts(groups=(), left_out=()))
    assert found[0].startswith("170 of 1500 labels")
    assert "check issues.csv by hand" in starting(found, "Training on")
    assert len(found) == 4


def test_finding_of_a_regression_has_errors_instead_of_accuracies():
    """Numbers have no labels that look wrong, and an error falls where accuracy would rise."""
    change = Change("better", 2.0, 1.25, 100, regression=True)
    groups = (Group("east", 10, "keep", 1.0, 1.0, 1.0), Group("west", 5, "drop", 0.0, 0.0, 0.0))
    given = Facts(15, 10, groups, (LeftOut(("west",), change),), model=change, regression=True)
    found = lines(given)
    assert found[1] == (
        "Drop west (weight 0.00): root mean square error on 100 held-out trusted rows falls from 2 with it to 1.25 "
        "without."
    )
    assert "issues.csv" not in " ".join(found)
    rises = LeftOut(("west",), replace(change, effect="worse", after=3.0))
    reviewed = replace(given, groups=(groups[0], replace(groups[1], decision="review")), left_out=(rises,))
    assert "rises from 2 with it to 3 without: keep its rows" in lines(reviewed)[1]


def test_finding_of_skipped_strategies_says_what_was_not_compared():
    """A high share of flagged labels is said even where time was up."""
    given = facts(left_out=(), corrected=None, model=None, skipped=("everything", "group weights"))
    groups = tuple(replace(group, decision="not compared") for group in given.groups)
    found = lines(replace(given, groups=groups))
    assert found[0] == "Not compared: B, A, D, C (45 % of its labels look wrong)."
    assert "was not compared with the labels as given" in starting(found, "Training on")
    assert starting(found, "Time was up").endswith("everything, group weights.")


@pytest.mark.parametrize("reason", ["time was up", "no group would be left"])
def test_finding_of_a_group_that_was_not_left_out_gives_the_reason(reason):
    """A figure that is missing is not a tie."""
    found = lines(facts(left_out=(LeftOut(("C",), None, reason),)))
    assert starting(found, "Review C").endswith(f"leaving it out was not compared, because {reason}.")


def test_finding_of_a_model_of_everything_names_the_flags_in_the_same_sentence():
    """It once said that nothing helps, beside 171 flags."""
    line = starting(lines(facts(model_is_everything=True)), "The model is trained on all rows")
    assert "although 170 of these look wrong" in line


@pytest.mark.parametrize(("noise", "text"), [((0.15, 0.3), "more labels are in doubt"), ((0.0, 0.05), "may be right")])
def test_finding_reconciles_flags_with_an_estimate_that_lies_elsewhere(noise, text):
    """The share of flags and the estimate come from different rules."""
    assert text in starting(lines(facts(noise=noise)), "170 of 1500")


# ------------------------------------------------------------------------------------------------------ the decisions


def test_group_in_question_without_measurable_gain_is_for_review():
    """Of all groups in question; dropped are those alone whose absence helps."""
    asked = []

    def measure(out, more, change=TIE):
        asked.append((list(out), list(more)))
        return change

    low, high = [0.9, 0.0, 0.1, 0.8], [1.0, 0.02, 0.9, 0.9]
    decisions, removals = decide(low, high, [0, 170, 0, 180], [375] * 4, measure)
    assert decisions == ["keep", "review", "review", "review"]
    assert asked == [([], [1]), ([], [3]), ([], [2])]
    assert [removal.change for removal in removals] == [TIE] * 3
    decisions, _ = decide(low, high, [0, 170, 0, 180], [375] * 4, lambda out, more: HELPS if more == [1] else HARMS)
    assert decisions == ["keep", "drop", "review", "review"]


def test_group_of_high_weight_is_not_dropped_for_likelihood_alone():
    """The weight says keep and accuracy is level: a person decides."""
    assert decide([0.9, 0.8], [1.0, 0.9], [0, 180], [375] * 2, lambda *_: SURER)[0] == ["keep", "review"]
    assert decide([0.9, 0.0], [1.0, 0.1], [0, 180], [375] * 2, lambda *_: SURER)[0] == ["keep", "drop"]


def test_all_groups_in_question_are_for_review():
    """An empty cleaned.csv would help nobody."""
    decisions, (removal,) = decide([1.0, 1.0], [1.0, 1.0], [200, 210], [375] * 2, lambda *_: HELPS)
    assert decisions == ["review", "review"]
    assert removal.reason == "no group would be left"


@pytest.mark.parametrize(
    ("flagged", "samples", "many"), [(1, 1, False), (3, 8, False), (170, 375, True), (75, 375, False)]
)
def test_suspect_needs_a_clearly_high_share(flagged, samples, many):
    """A few flags in a small group are chance."""
    assert suspect(flagged, samples) is many


def answers(right, sure, n=100):
    """Answers of two classes to n rows of class 0, of which the first `right` are right."""
    p = torch.full((n, 2), 1 - sure)
    p[:right, 0] = sure
    p[right:, 1] = sure
    return p


@pytest.mark.parametrize(
    ("before", "after", "effect", "by_likelihood"),
    [
        (answers(97, 0.9), answers(97, 0.9), "same", False),
        (answers(97, 0.9), answers(98, 0.9), "same", False),
        (answers(88, 0.9), answers(97, 0.9), "better", False),
        (answers(97, 0.9), answers(88, 0.9), "worse", False),
        (answers(100, 0.6), answers(100, 0.9), "better", True),
        (answers(100, 0.9), answers(100, 0.6), "worse", True),
        (answers(100, 0.999), answers(100, 0.9999), "same", False),
    ],
)
def test_compare_calls_a_difference_beyond_two_standard_errors_measurable(before, after, effect, by_likelihood):
    """One row of a hundred is nothing, nine are something."""
    found = compare(before, after, torch.zeros(100, dtype=torch.long), trusted=90)
    assert found.effect == effect
    assert (found.likelihoods is not None) is by_likelihood
    assert (found.rows, found.stand_ins) == (90, 10)


def test_compare_of_numbers_takes_squared_errors():
    """A regression has no accuracy."""
    truths = torch.linspace(0, 1, 50)
    found = compare(truths + 1, truths + 0.5, truths, 50)
    assert (found.effect, found.before, found.after) == ("better", pytest.approx(1), pytest.approx(0.5))
    assert found.in_units(10).after == pytest.approx(5)
    assert compare(truths + 1, truths + 1, truths, 50).effect == "same"


# ---------------------------------------------------------------------------------------------------- the whole command


def sites(n, random, centres):
    """A table of four sites; in C, 45 % of the labels are wrong."""
    true = random.integers(3, size=n)
    x = centres[true] + random.standard_normal((n, 8))
    table = pd.DataFrame(x.round(3), columns=[f"x{i}" for i in range(8)])
    table["site"] = np.array(list("ABCD"))[np.arange(n) % 4]
    wrong = (table["site"] == "C").to_numpy() & (random.random(n) < 0.45)
    given = np.where(wrong, (true + random.integers(1, 3, size=n)) % 3, true)
    names = np.array(["low", "mid", "high"])
    return table.assign(label=names[given], id=[f"r{i}" for i in range(n)]), names[true]


@pytest.fixture(scope="module")
def clean_run(tmp_path_factory):
    """The command on 600 rows; the model is right on nearly all trusted rows either way."""
    folder = tmp_path_factory.mktemp("sites")
    random = np.random.default_rng(0)
    centres = 1.7 * random.standard_normal((3, 8))
    sites(600, random, centres)[0].to_csv(folder / "data.csv", index=False)
    trusted, true = sites(147, random, centres)
    trusted.assign(label=true).drop(columns=["site", "id"]).to_csv(folder / "trusted.csv", index=False)
    with pytest.MonkeyPatch.context() as patch:
        start = fsla.HyperCleaner.__init__
        quick = {"steps": 100, "bilevel_steps": 40, "folds": 2}
        patch.setattr(fsla.HyperCleaner, "__init__", lambda self, **given: start(self, **given | quick))
        given = ["--trusted", folder / "trusted.csv", "--group", "site", "--id", "id", "--device", "cpu"]
        done = CliRunner().invoke(
            app, [str(a) for a in ("clean", folder / "data.csv", *given, "--out", folder / "out")]
        )
    assert done.exit_code == 0, done.output
    return done.output, folder / "out"


def test_clean_reviews_a_bad_site_that_changes_nothing_on_trusted_rows(clean_run):
    """The case that was seen: everything is right on 97 % with the bad site and without."""
    text, out = clean_run
    groups = pd.read_csv(out / "weights.csv").set_index("group")
    assert groups["decision"].to_dict() == {"A": "keep", "B": "keep", "D": "keep", "C": "review"}
    found = starting(text.splitlines(), "Review C")
    before, after = map(float, re.search(r"is (\S+) % with it and (\S+) % without", found).groups())
    assert min(before, after) > 95
    assert "147 held-out trusted rows" in found
    assert "no measurable change" in found


def test_clean_says_the_same_counts_in_all_files(clean_run):
    """Terminal, issues.csv, weights.csv, cleaned.csv, report and summary are of one set of facts."""
    text, out = clean_run
    said = json.loads((out / "summary.json").read_text(encoding="utf-8"))["finding"]
    assert "\n".join(said) in text
    page = (out / "report.html").read_text(encoding="utf-8").replace("\u00a0", " ")
    assert all(f"<li>{line}</li>" in page for line in said)
    issues = pd.read_csv(out / "issues.csv")
    flagged = int(issues["is_label_issue"].sum())
    assert starting(said, f"{flagged} of 600 labels ({100 * flagged / 600:.0f} %) look wrong")
    share = issues.groupby("group")["is_label_issue"].mean()
    weights = pd.read_csv(out / "weights.csv").set_index("group")
    np.testing.assert_allclose(weights["wrong_labels"], share[weights.index])
    assert f"Review C ({100 * share['C']:.0f} % of its labels look wrong" in text
    cleaned = pd.read_csv(out / "cleaned.csv")
    changed = int((cleaned["label"] != cleaned["given_label"]).sum())
    assert said[-1] == f"cleaned.csv has {len(cleaned)} of 600 rows, {changed} of them with another label. " + (
        f"The {(cleaned['site'] == 'C').sum()} rows of C stay in it."
    )
