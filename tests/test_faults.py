"""Hostile trials: nothing is silently wrong, nothing hangs, and what is refused is refused in words."""

import pytest

pytest.importorskip("pandas", reason="the extra data is not installed")

from faults.catalogue import KINDS, SHARE, make_trials
from faults.trials import BAD, run_trial


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_hostile_trials_are_refused_or_come_out_right(kind):
    """Another seed than that of the share."""
    bad = bad_results(make_trials(kind, seed=1))
    assert not bad, "\n".join(bad)
