"""The finding in sentences, decisions first: terminal, report and summary show the same lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsla.data._decisions import BETTER, DECISIONS, DROPPED, KEPT, NOT_COMPARED, REVIEWED, SAME, Change

SHOWN = 8
"""Groups that a line names."""
STEADY = 0.1
"""Spread of a weight over the runs, up to which its mean is said."""
MENDED = "Training on corrected labels"
MENDED_AND_WEIGHED = "Training on weighed groups with corrected labels"


@dataclass(frozen=True)
class Group:
    """A group of rows, and the decision on it."""

    name: str
    rows: int
    decision: str
    weight: float
    low: float
    high: float
    flagged: int | None = None
    """Labels that look wrong; None for a regression."""
    suspect: bool = False
    """Whether these are clearly many."""


@dataclass(frozen=True)
class LeftOut:
    """Groups in question, and what it changes to leave them out."""

    names: tuple[str, ...]
    change: Change | None
    reason: str = ""


@dataclass(frozen=True)
class Facts:
    """All that the sentences are made from."""

    rows: int
    cleaned: int
    """Rows of cleaned.csv."""
    groups: tuple[Group, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    flagged: int | None = None
    """Labels that look wrong; None if labels are not corrected."""
    relabelled: int = 0
    """Of these, the ones in cleaned.csv."""
    noise: tuple[float, float] = (0.0, 1.0)
    """Range of the share of wrong labels."""
    corrected: Change | None = None
    """Training on corrected labels, against everything as it is; None if not both were tried."""
    corrected_and_weighed: bool = False
    model: Change | None = None
    """The model, against everything as it is; None if that was not tried."""
    model_is_everything: bool = False
    skipped: tuple[str, ...] = ()
    regression: bool = False

    def named(self, decision: str) -> list[str]:
        return [group.name for group in self.groups if group.decision == decision]


def lines(facts: Facts) -> list[str]:
    """The finding: one fact a line, what to do with the groups first."""
    return [
        *_decisions(facts),
        *_labels(facts),
        *_model(facts),
        *([f"Time was up before these ways were tried: {', '.join(facts.skipped)}."] if facts.skipped else []),
        *(["The targets were taken for numbers."] if facts.regression else []),
        _cleaned(facts),
    ]


def _decisions(facts: Facts) -> list[str]:
    by_name = {group.name: group for group in facts.groups}
    if len(by_name) < 2 and not facts.named(REVIEWED):
        return []
    found = []
    for decision in DECISIONS:
        names = facts.named(decision)
        if decision == KEPT and names:
            found.append(f"Keep {_listed(names)}.")
        elif decision == NOT_COMPARED and names:
            shown = [_described(by_name[name]) if by_name[name].suspect else name for name in names]
            found.append(f"Not compared: {_listed(shown)}.")
        else:
            found += [_left_out(removal, by_name) for removal in facts.left_out if removal.names[0] in names]
    return found


def _left_out(removal: LeftOut, by_name: dict[str, Group]) -> str:
    groups = [by_name[name] for name in removal.names]
    decided = f"{groups[0].decision.capitalize()} {_listed([_described(group) for group in groups])}: "
    them = "it" if len(groups) == 1 else "them"
    change = removal.change
    if change is None:
        return f"{decided}leaving {them} out was not compared, because {removal.reason}."
    what, before, after = _figures(change)
    where = f"{what} on {_rows(change)}"
    pair = f"{before} with {them} and {after} without"
    if change.effect == SAME:
        text = f"{where} is {pair}, no measurable change"
    elif change.likelihoods is None:
        text = f"{where} {_verb(change)} from {before} with {them} to {after} without"
    else:
        text = f"{where} is {pair}, and log-likelihood per row {_verb(change)} from {_likelihoods(change, ' to ')}"
    worse = "" if change.effect in (SAME, BETTER) else ": keep its rows" if len(groups) == 1 else ": keep their rows"
    return f"{decided}{text}{worse}."


def _described(group: Group) -> str:
    weight = f"{group.low:.2f} to {group.high:.2f}" if group.high - group.low > STEADY else f"{group.weight:.2f}"
    facts = [] if group.flagged is None else [f"{_percent(group.flagged / group.rows)} of its labels look wrong"]
    if group.decision != NOT_COMPARED:
        facts.append(f"weight {weight}")
    return f"{group.name} ({', '.join(facts)})" if facts else group.name


def _labels(facts: Facts) -> list[str]:
    if facts.flagged is None:
        return []
    share = f"{100 * facts.flagged / facts.rows:.0f}"
    low, high = (f"{100 * end:.0f}" for end in facts.noise)
    text = f"{facts.flagged} of {facts.rows} labels ({share} %) look wrong"
    text += ": see issues.csv." if facts.flagged else "."
    range_ = f" The share of wrong labels is estimated at {low} to {high} %"
    if int(share) < int(low):
        range_ += ", so more labels are in doubt than are flagged"
    elif int(share) > int(high):
        range_ += ", so some flagged labels may be right"
    return [f"{text}{range_}.", *([_correction(facts)] if facts.flagged else [])]


def _correction(facts: Facts) -> str:
    reviewed = _listed([g.name for g in facts.groups if g.decision == REVIEWED and g.suspect]) or "issues.csv"
    what = MENDED_AND_WEIGHED if facts.corrected_and_weighed else MENDED
    change = facts.corrected
    if change is None:
        return f"{what} was not compared with the labels as given: check {reviewed} by hand before you use cleaned.csv."
    name, before, after = _figures(change)
    on = f"{name} on {_rows(change)}"
    pair = f"({before} → {after})"
    advice = f"check {reviewed} by hand before you use cleaned.csv"
    verb = "raises" if change.effect == BETTER else "lowers"
    if change.effect == SAME:
        text = f"{what} makes no measurable change in {on} {pair}"
    elif change.likelihoods is None:
        text = f"{what} {verb} {on} {pair}"
    else:
        text = f"{what} {verb} log-likelihood per row ({_likelihoods(change)}; {on}: {before} → {after})"
    if change.effect == BETTER:
        advice = f"use cleaned.csv{f' after you check {reviewed}' if facts.named(REVIEWED) else ''}"
    return f"{text}: {advice}."


def _model(facts: Facts) -> list[str]:
    change = facts.model
    if change is None:
        return []
    name, before, after = _figures(change)
    if facts.model_is_everything:
        although = f", although {facts.flagged} of these look wrong" if facts.flagged else ""
        given = "targets" if facts.regression else "labels"
        return [
            f"The model is trained on all rows with the {given} as given{although}: this fits the trusted rows best "
            f"({name} {after} on {_rows(change)})."
        ]
    effect = "no measurable difference" if change.effect == SAME else f"measurably {change.effect}"
    if change.effect != SAME and change.likelihoods is not None:
        effect += f" by log-likelihood per row ({_likelihoods(change)})"
    return [f"The model has {name} {after} on {_rows(change)}, training on everything as given {before}: {effect}."]


def _cleaned(facts: Facts) -> str:
    changed = "" if facts.flagged is None else f", {facts.relabelled} of them with another label"
    text = f"cleaned.csv has {facts.cleaned} of {facts.rows} rows{changed}."
    for decision, what in ((DROPPED, "are left out"), (REVIEWED, "stay in it")):
        names = facts.named(decision)
        if names:
            count = sum(group.rows for group in facts.groups if group.decision == decision)
            text += f" The {count} rows of {_listed(names)} {what}."
    return text


def _figures(change: Change) -> tuple[str, str, str]:
    """What was measured, before and after."""
    if change.regression:
        return "root mean square error", f"{change.before:.3g}", f"{change.after:.3g}"
    return "accuracy", f"{100 * change.before:.1f} %", f"{100 * change.after:.1f} %"


def _likelihoods(change: Change, between: str = " → ") -> str:
    return between.join(f"{value:.3f}" for value in change.likelihoods or ())


def _verb(change: Change) -> str:
    return "falls" if change.regression == (change.effect == BETTER) else "rises"


def _rows(change: Change) -> str:
    others = f" and {change.stand_ins} that stand in" if change.stand_ins else ""
    return f"{change.rows} held-out trusted rows{others}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
