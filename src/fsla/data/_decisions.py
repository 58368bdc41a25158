"""Decisions on groups, labels and rows, each from figures of a `DataFit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fsla.data._data_fit import DataFit, GroupFit
from fsla.data._dataset import Array, TrainingData
from fsla.data._result import Comparison, Correction, Effect, Estimate

Relabel = Literal["never", "sure", "all"]
Decision = Literal["keep", "drop", "review", "not_evaluated"]
DECISIONS: tuple[Decision, ...] = ("drop", "review", "keep", "not_evaluated")
SURE = 0.9
"""Probability from which a label is corrected."""
LOW_WEIGHT = 0.3
"""A group with a lower weight, by its whole interval, is in question."""
SUSPECT_RATE = 0.25
"""A group with a higher share of wrong labels is in question."""
MIN_EXPECTED = 7.0
"""Checked labels that a group would have in a random sample; none at all then has a probability below .001."""
UNLIKELY = 0.001
"""Tail probability below which a number looks wrong."""
MOSTLY_WRONG = 0.5
"""A group with a higher share of wrong labels, by its whole interval, is dropped unless that does harm."""
MIN_LABELS = 5
"""A group with fewer labels is not evaluated."""


@dataclass(frozen=True)
class GroupDecision:
    """What to do with a group, and why."""

    decision: Decision
    reason: str


@dataclass(frozen=True, eq=False)
class Decisions:
    """What to do with each group and row of the data."""

    effect: Effect
    """Of the recommended choice on checked rows, against doing nothing."""
    groups: tuple[GroupDecision, ...]
    given_label: Array
    """Index of the label that a row has (of several: the most frequent one), -1 without; numbers in regression."""
    suggested: Array
    """Index of the most probable label; numbers in regression."""
    probability: Array
    """Of the suggested label; NaN in regression."""
    quality: Array
    """How probable the given label is, in [0, 1]."""
    is_issue: Array
    corrected: Array
    """Rows whose label is replaced by the suggested one."""
    dropped: Array
    """Rows that are left out."""
    rescued: Array
    """Rows of dropped groups that stay, with their most probable label."""
    correction: Correction | None


def decide(fit: DataFit, relabel: Relabel) -> Decisions:
    """Decide on groups first, then on labels, then on the rows of dropped groups.

    With "sure", labels are corrected from a probability of .9, unless checked rows show that this does harm. Rows of a
    dropped group whose most probable label is as sure stay, with that label.
    """
    data = fit.data
    effect = measured_effect(fit.comparison)
    groups = _decide_groups(fit, effect)
    given_label = given_labels(data)
    if data.task == "regression":
        return _decide_numbers(fit, effect, groups, given_label, relabel)
    suggested, probability = fit.posterior.argmax(1), fit.posterior.max(1)
    correction = _measure_correction(data, given_label, suggested, probability)
    labeled = given_label >= 0
    quality = np.where(labeled, fit.posterior[np.arange(len(labeled)), np.maximum(given_label, 0)], np.nan)
    differs = (suggested != given_label) & ~data.is_checked
    harmful = effect == "worse" or (correction is not None and correction.broken > correction.fixed)
    if relabel == "all":
        believed_rows = np.ones(len(labeled), dtype=bool)
    elif relabel == "never" or harmful or effect == "unknown":
        believed_rows = np.zeros(len(labeled), dtype=bool)
    else:
        believed_rows = probability >= SURE
    of_dropped = _votes_all_dropped(data, groups) & ~data.is_checked
    return Decisions(
        effect,
        groups,
        given_label,
        suggested,
        probability,
        quality,
        is_issue=differs & labeled,
        corrected=differs & believed_rows,
        dropped=of_dropped & ~believed_rows,
        rescued=of_dropped & believed_rows,
        correction=correction,
    )


def _decide_numbers(
    fit: DataFit, effect: Effect, groups: tuple[GroupDecision, ...], given_label: Array, relabel: Relabel
) -> Decisions:
    """Flag numbers far from the prediction. A single number is not replaced, several have a consensus."""
    data = fit.data
    suggested = np.asarray(fit.posterior, dtype=np.float64)
    quality = _number_quality(given_label, suggested)
    several = np.bincount(data.votes.row, minlength=len(suggested)) > 1
    has_consensus = relabel == "all" or (relabel == "sure" and effect in ("better", "same"))
    return Decisions(
        effect,
        groups,
        given_label,
        suggested,
        np.full(len(suggested), np.nan),
        quality,
        is_issue=(quality < UNLIKELY) & ~data.is_checked,
        corrected=several & ~data.is_checked & has_consensus,
        dropped=_votes_all_dropped(data, groups) & ~data.is_checked,
        rescued=np.zeros(len(suggested), dtype=bool),
        correction=None,
    )


def measured_effect(comparison: Comparison | None) -> Effect:
    """Return what the 95 % interval of the gain says."""
    if comparison is None:
        return "unknown"
    return sign_of(comparison.gain)


def uncovered_groups(fit: DataFit) -> list[str]:
    """Return the groups that a random sample of checked rows would have met, and this one has not."""
    if fit.groups is None:
        return []
    labels = np.bincount(fit.data.votes.group, minlength=fit.data.num_groups)
    checked = fit.groups.num_checked_votes
    expected = checked.sum() * labels / max(labels.sum(), 1)
    return [str(name) for name in fit.data.group_names[(checked == 0) & (expected >= MIN_EXPECTED)]]


def sign_of(gain: Estimate) -> Effect:
    """Return whether an interval lies above zero, below, or holds it."""
    return "better" if gain.low > 0 else "worse" if gain.high < 0 else "same"


def given_labels(data: TrainingData) -> Array:
    """Return a label a row: the most frequent vote (-1 without), in regression the mean (NaN without)."""
    rows = len(data.features)
    votes = data.votes
    counts = np.bincount(votes.row, minlength=rows)
    if data.task == "regression":
        sums = np.bincount(votes.row, weights=votes.label, minlength=rows)
        means: Array = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        return means
    table = np.zeros((rows, data.num_classes))
    np.add.at(table, (votes.row, votes.label.astype(np.int64)), 1.0)
    winners: Array = np.where(counts > 0, table.argmax(1), -1)
    return winners


def _number_quality(given_label: Array, suggested: Array) -> Array:
    """Return the two-sided tail probability of each residual, by the median and the spread of all."""
    from scipy.stats import norm

    residual = given_label - suggested
    labeled = np.isfinite(residual)
    if not labeled.any():
        return np.full(len(given_label), np.nan)
    residual = residual - np.median(residual[labeled])
    spread = 1.4826 * np.median(np.abs(residual[labeled]))
    quality: Array = 2 * norm.sf(np.abs(residual) / max(spread, 1e-9 * float(np.abs(suggested).max() + 1)))
    return quality


def _measure_correction(
    data: TrainingData, given_label: Array, suggested: Array, probability: Array
) -> Correction | None:
    """Compare labels before and after correction on random checked rows that carry votes."""
    if data.task == "regression":
        return None
    random = np.ones(len(data.checked_rows), dtype=bool) if data.random_rows is None else data.random_rows
    usable = random & (given_label[data.checked_rows] >= 0)
    rows, true = data.checked_rows[usable], data.checked_labels[usable]
    if not len(rows):
        return None
    before = given_label[rows] == true
    label = np.where(probability[rows] >= SURE, suggested[rows], given_label[rows])
    after = label == true
    return Correction(len(rows), int(before.sum()), int((~before & after).sum()), int((before & ~after).sum()))


def _votes_all_dropped(data: TrainingData, groups: Sequence[GroupDecision]) -> Array:
    """Return a mask of rows with votes, all of them of groups that are dropped."""
    rows = len(data.features)
    if not groups:
        return np.zeros(rows, dtype=bool)
    drop = np.array([group.decision == "drop" for group in groups])
    votes = np.bincount(data.votes.row, minlength=rows)
    bad = np.bincount(data.votes.row, weights=drop[data.votes.group], minlength=rows)
    mask: Array = (votes > 0) & (bad == votes)
    return mask


def _decide_groups(fit: DataFit, effect: Effect) -> tuple[GroupDecision, ...]:
    groups = fit.groups
    if groups is None:
        return ()
    count = fit.data.num_groups
    labels = np.bincount(fit.data.votes.group, minlength=count)
    metric = "accuracy" if fit.comparison is None else fit.comparison.metric
    suspicions = [_suspicions(groups, g) for g in range(count)]
    in_question = sum(bool(suspicion) for suspicion in suspicions)
    decisions = []
    for g in range(count):
        if labels[g] < MIN_LABELS:
            decisions.append(GroupDecision("not_evaluated", f"{labels[g]} label{'s' if labels[g] != 1 else ''} only"))
        elif effect == "unknown":
            decisions.append(GroupDecision("not_evaluated", "no row is checked"))
        else:
            decisions.append(_decide_group(groups, g, suspicions[g], in_question, effect, metric))
    if all(d.decision in ("drop", "not_evaluated") for d in decisions):  # an empty data set helps nobody
        decisions = [
            GroupDecision("review", f"{d.reason}; no group would remain") if d.decision == "drop" else d
            for d in decisions
        ]
    return tuple(decisions)


def _suspicions(groups: GroupFit, g: int) -> list[str]:
    """Return what puts a group in question, in figures."""
    suspicions, rate = [], groups.noise_rate[g]
    if rate is not None and rate.low > SUSPECT_RATE:
        suspicions.append(f"{percent(rate.value)} of its labels are wrong ({percent_range(rate)})")
    if groups.weight_high[g] < LOW_WEIGHT:
        weight = f"{groups.weight[g]:.2f} ({groups.weight_low[g]:.2f} to {groups.weight_high[g]:.2f})"
        suspicions.append(f"weight {weight}")
    return suspicions


def _decide_group(
    groups: GroupFit, g: int, suspicions: list[str], in_question: int, effect: Effect, metric: str
) -> GroupDecision:
    """Drop a group in question if the data is better without it.

    Either that is measured by leaving it out, with an interval for all groups in question at once. Or a model that is
    better as a whole hardly uses the group. Or most of its labels are wrong, by the whole interval.
    """
    gain, rate = groups.gain_without[g], groups.noise_rate[g]
    if not suspicions:
        weight = f"weight {groups.weight[g]:.2f}"
        few = "" if rate is None else f"{percent(rate.value)} of its labels are wrong ({percent_range(rate)}), "
        return GroupDecision("keep", few + weight)
    sign: Effect = "unknown" if gain is None else sign_of(_widen(gain, in_question))
    reason = "; ".join([*suspicions, *([] if gain is None else [_describe_gain(gain, metric)])])
    if sign == "worse":
        return GroupDecision("keep", reason)
    is_unused = effect == "better" and groups.weight_high[g] < LOW_WEIGHT and gain is not None and gain.value > 0
    is_mostly_wrong = rate is not None and rate.low > MOSTLY_WRONG
    helps = sign == "better" or is_unused or is_mostly_wrong
    return GroupDecision("drop" if helps and effect != "worse" else "review", reason)


def _widen(gain: Estimate, comparisons: int) -> Estimate:
    """Return an interval that holds for several groups at once (Bonferroni)."""
    from scipy.stats import norm

    factor = float(norm.isf(0.025 / max(comparisons, 1)) / norm.isf(0.025))
    return Estimate(
        gain.value, gain.value - factor * (gain.value - gain.low), gain.value + factor * (gain.high - gain.value)
    )


def _describe_gain(gain: Estimate, metric: str) -> str:
    if metric == "accuracy":
        return f"accuracy without it {points(gain)}"
    return f"squared error without it {-gain.value:+.3g} ({-gain.high:+.3g} to {-gain.low:+.3g})"


def percent(fraction: float) -> str:
    """Return a share as text."""
    return f"{100 * fraction:.0f} %"


def percent_range(estimate: Estimate) -> str:
    """Return the interval of a share as text."""
    return f"{100 * estimate.low:.0f} to {100 * estimate.high:.0f} %"


def points(gain: Estimate) -> str:
    """Return a difference of shares as text, with its interval."""
    return f"{100 * gain.value:+.1f} points ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"
