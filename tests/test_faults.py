"""Hostile trials: nothing is silently wrong, nothing hangs, and what is refused is refused in words."""

import json
import time
import warnings

import pytest

pytest.importorskip("pandas", reason="the extra data is not installed")

from torch import nn

import fsla
from faults import report
from faults.catalogue import KINDS, SHARE, make_trials
from faults.trials import BAD, Outcome, SilentlyWrong, Trial, run_trial


def bad_results(trials):
    """Return a line for each trial that failed."""
    results = [run_trial(trial) for trial in trials]
    assert results
    return [f"{r.outcome} {r.trial.category}: {r.trial.name}\n{r.detail}" for r in results if r.outcome in BAD]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if SHARE[kind]])
def test_some_hostile_trials_are_refused_or_come_out_right(kind):
    """Every n-th trial of a kind, so that a change that breaks a promise is seen at once."""
    bad = bad_results(list(make_trials(kind, seed=0))[:: SHARE[kind]])
    assert not bad, "\n".join(bad)


def test_page_has_the_counts_of_the_json():
    """A table that is typed would not be of the trials."""
    text = report.PAGE.read_text(encoding="utf-8")
    content = json.loads(report.RESULTS.read_text(encoding="utf-8"))
    assert report.page_with(text, content) == text
    assert sum(map(len, content["categories"].values())) > 20


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        (lambda: None, Outcome.RIGHT),
        (lambda: {}["x"], Outcome.RAW),
        (lambda: time.sleep(5), Outcome.HANG),
        (lambda: fsla.GroupWeights(["a"]), Outcome.REFUSED),
        (lambda: nn.Linear(-1, 2), Outcome.RAW),
    ],
)
def test_run_trial_judges_each_end(call, outcome):
    """A judge that takes everything for a refusal would pass all trials."""

    def run():
        call()

    assert run_trial(Trial("category", "name", run, limit_s=0.5)).outcome is outcome


def test_run_trial_takes_a_wrong_result_for_silent_unless_fsla_warned():
    def silent():
        raise SilentlyWrong("wrong")

    def warned():
        warnings.warn("wrong", UserWarning, stacklevel=1)
        raise SilentlyWrong("wrong")

    assert run_trial(Trial("category", "name", silent)).outcome is Outcome.SILENT
    assert run_trial(Trial("category", "name", warned)).outcome is Outcome.REFUSED


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_hostile_trials_are_refused_or_come_out_right(kind):
    """Another seed than that of the share."""
    bad = bad_results(make_trials(kind, seed=1))
    assert not bad, "\n".join(bad)
