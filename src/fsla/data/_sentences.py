"""The outcome in words: one decision and its facts, all from the same figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsla.data._dataset import Task
from fsla.data._decisions import (
    MIN_LABELS,
    SURE,
    SUSPECT_RATE,
    Relabel,
    percent,
    percent_range,
    points,
)
from fsla.data._result import Comparison, Correction, Effect, Estimate

NAMED = 6
"""Groups that a line names."""
REASONS = 4
"""Groups to review of which each has a line of its own."""


@dataclass(frozen=True)
class Figures:
    """All that the sentences are made from."""

    task: Task
    relabel: Relabel
    effect: Effect
    comparison: Comparison | None
    groups: Sequence[tuple[str, int, str, str]]
    """Name, labels, decision, reason."""
    num_rows: int
    num_labeled: int
    num_issues: int
    num_corrected: int
    """Labels that cleaned.csv replaces."""
    num_filled: int
    """Labels that cleaned.csv adds to rows without one."""
    num_cleaned: int
    """Rows of cleaned.csv."""
    num_rescued: int
    """Rows of dropped groups in cleaned.csv."""
    num_checked: int
    correction: Correction | None
    noise_rate: Estimate | None
    uncovered: Sequence[str]
    """Groups that checked rows say nothing of."""
    largest: tuple[str, str, float, int] | None
    """Strategy, learner and weight of the candidate that counts most, and how many there are."""
    skipped: Sequence[str]

    @property
    def corrects_well(self) -> bool:
        """Return whether labels are corrected, and measurably better for it."""
        return self.num_corrected > 0 and self.correction is not None and self.correction.effect == "better"

    def reason(self, group: str) -> str:
        """Return why a group has its decision."""
        return next(reason for name, _, _, reason in self.groups if name == group)

    def names(self, decision: str) -> list[str]:
        """Return the groups with a decision."""
        return [name for name, _, of_group, _ in self.groups if of_group == decision]


def write_decision(figures: Figures) -> str:
    """Return one line: what to do, and the figure that supports it."""
    comparison, drops, reviews = figures.comparison, figures.names("drop"), figures.names("review")
    if comparison is None:
        return (
            "No recommendation: no row is checked. Check the rows to review, then run again with --trusted "
            "reviewed.csv."
        )
    measured = _describe_comparison(comparison)
    corrected = figures.corrects_well
    if figures.effect == "better":
        table = " and cleaned.csv" if drops or corrected else ""
        start = f"Drop {join_names(drops)}; use" if drops else "Use"
        return f"{start} the model{table}: {measured}."
    if figures.effect == "worse":
        return f"Use the data as it is, not the model: {measured}."
    unclear = f"{measured}, no measurable difference {_describe_gain(comparison)}"
    if corrected and figures.correction is not None:
        start = f"Drop {join_names(drops)}; use" if drops else "Use"
        return f"{start} the labels of cleaned.csv: {_describe_correction(figures.correction)}."
    if drops:
        return f"Drop {join_names(drops)}: {figures.reason(drops[0])}."
    rate = figures.noise_rate
    if rate is not None and rate.low > SUSPECT_RATE:
        wrong = f"{percent(rate.value)} of the labels are wrong ({percent_range(rate)})"
        return f"Check more rows: {wrong}, and nothing is measurably better. {_capital(unclear)}."
    review = f" and review {join_names(reviews)}" if 0 < len(reviews) <= 3 else ""
    return f"Use the data as it is{review}: {unclear}."


def write_facts(figures: Figures, unsaved: str | None = None) -> tuple[str, ...]:
    """Return further lines, one fact each; `unsaved` is why the model has no file."""
    return (
        *_comparison_lines(figures),
        *_group_lines(figures),
        *_label_lines(figures),
        *_cleaned_lines(figures),
        *_model_lines(figures),
        *figures.skipped,
        *([f"model.safetensors is not written: {unsaved}"] if unsaved else []),
    )


def join_names(names: Sequence[str], limit: int = NAMED) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def _comparison_lines(figures: Figures) -> list[str]:
    """Say how the model does where the decision rests on something else."""
    comparison = figures.comparison
    if comparison is None or _describe_comparison(comparison).lower() in write_decision(figures).lower():
        return []
    difference = f"no measurable difference {_describe_gain(comparison)}"
    return [f"{_capital(_describe_comparison(comparison))}, {difference}."]


def _group_lines(figures: Figures) -> list[str]:
    if len(figures.groups) < 2:
        return []
    lines = []
    for decision in ("drop", "review"):
        chosen = [(name, reason) for name, _, of_group, reason in figures.groups if of_group == decision]
        if decision == "review" and len(chosen) > REASONS:
            names = join_names([name for name, _ in chosen])
            lines.append(f"Review {len(chosen)} groups → group_weights.csv: {names}.")
            continue
        each = [f"{decision.capitalize()} {name}: {reason}." for name, reason in chosen[:NAMED]]
        lines += [line for line in each if line != write_decision(figures)]
        if len(chosen) > NAMED:
            lines.append(f"{len(chosen) - NAMED} more groups to {decision} → group_weights.csv.")
    if figures.names("keep"):
        lines.append(f"Keep {join_names(figures.names('keep'))}.")
    if figures.names("not_evaluated"):
        why = "no row is checked" if figures.comparison is None else f"fewer than {MIN_LABELS} labels"
        lines.append(f"Not evaluated, {why}: {join_names(figures.names('not_evaluated'))}.")
    return lines


def _label_lines(figures: Figures) -> list[str]:
    appearance = "look wrong" if figures.task == "classification" else "lie far from the prediction"
    what = "labels" if figures.task == "classification" else "numbers"
    flagged_share = figures.num_issues / max(figures.num_labeled, 1)
    flagged = f"{figures.num_issues} of {figures.num_labeled} {what} ({percent(flagged_share)})"
    lines = [f"{flagged} {appearance} → label_issues.csv."]
    rate, correction = figures.noise_rate, figures.correction
    if figures.uncovered:
        names = join_names(figures.uncovered)
        lines.append(f"Share of wrong labels: unknown, because no checked row is of {names}.")
    elif rate is not None:
        rows = "the checked rows" if correction is None else f"the {correction.rows} checked rows"
        lines.append(
            f"Share of wrong labels: {percent(rate.value)} ({percent_range(rate)}), if {rows} are a random sample."
        )
        if flagged_share < rate.low:
            lines.append("More labels are wrong than are flagged.")
        elif flagged_share > rate.high:
            lines.append("More labels are flagged than are wrong: some flagged labels are right.")
    if figures.task == "regression":
        return lines
    if correction is not None and correction.fixed + correction.broken:
        line = _describe_correction(correction)
        lines += [] if line in write_decision(figures) else [f"{_capital(line)}."]
    return lines


def _cleaned_lines(figures: Figures) -> list[str]:
    lines = [f"cleaned.csv has {figures.num_cleaned} of {figures.num_rows} rows."]
    left_out = figures.num_rows - figures.num_cleaned
    if figures.names("drop") and figures.num_rescued:
        label = "their most probable label"
        if figures.relabel == "sure":
            label = f"a label of at least {percent(SURE)} probability"
        lines.append(f"{figures.num_rescued} unchecked rows of dropped groups stay in cleaned.csv, with {label}.")
    if left_out:
        lines.append(f"{left_out} rows of dropped groups are left out of cleaned.csv.")
    if figures.task == "regression":
        if figures.num_corrected:
            lines.append(f"{figures.num_corrected} rows have several numbers; cleaned.csv has their consensus.")
        return lines
    if figures.num_corrected:
        sure = f"those with a probability of at least {percent(SURE)}"
        which = sure if figures.relabel == "sure" else "all that look wrong (--relabel all)"
        check = " Check them before you use it." if figures.effect == "same" and not figures.corrects_well else ""
        lines.append(f"cleaned.csv has {figures.num_corrected} corrected labels: {which}.{check}")
    elif figures.num_issues:
        lines.append(f"cleaned.csv has the labels as they are: {_why_not_corrected(figures)}.")
    missing = figures.num_rows - figures.num_labeled
    if missing:
        lines.append(f"{missing} rows have no label. cleaned.csv has one for {figures.num_filled} of them.")
    return lines


def _why_not_corrected(figures: Figures) -> str:
    correction = figures.correction
    if figures.relabel == "never":
        return "--relabel never"
    if figures.effect == "unknown":
        return "no row is checked"
    if figures.effect == "worse":
        return "the model does worse than everything as it is"
    if correction is not None and correction.broken > correction.fixed:
        return f"on checked rows, correction mends {correction.fixed} labels and breaks {correction.broken}"
    return f"no other label has a probability of {percent(SURE)}"


def _model_lines(figures: Figures) -> list[str]:
    lines = []
    comparison = figures.comparison
    if comparison is not None and comparison.trusted_only is not None:
        value = _with_range(comparison.trusted_only, comparison.metric)
        lines.append(f"Training on the {figures.num_checked} checked rows alone: {comparison.metric} {value}.")
    if figures.largest is not None:
        strategy, learner, weight, count = figures.largest
        if count > 1:
            most = f"{strategy} with {learner} counts {percent(weight)}"
            lines.append(f"The model is the average of {count} candidates; {most}.")
        elif strategy == "nothing":
            lines.append(f"The model is trained on everything as it is ({learner}).")
        else:
            lines.append(f"The model is {strategy} with {learner}.")
    return lines


def _describe_comparison(comparison: Comparison) -> str:
    metric = comparison.metric
    return (
        f"{metric} on {comparison.rows} checked rows is {_with_range(comparison.recommended, metric)} with the model "
        f"and {_with_range(comparison.nothing, metric)} with everything as it is"
    )


def _describe_correction(correction: Correction) -> str:
    return (
        f"of {correction.rows} checked rows, {correction.right_before} have a right label as it is and "
        f"{correction.right_after} after correction"
    )


def _describe_gain(comparison: Comparison) -> str:
    gain = comparison.gain
    if comparison.metric == "accuracy":
        return f"({points(gain).replace(' (', ', ')}"
    return f"({gain.value:+.3g}, {gain.low:+.3g} to {gain.high:+.3g})"


def _with_range(value: Estimate, metric: str) -> str:
    if metric == "accuracy":
        return f"{100 * value.value:.1f} % ({100 * value.low:.0f} to {100 * value.high:.0f} %)"
    return f"{value.value:.3g} ({value.low:.3g} to {value.high:.3g})"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
