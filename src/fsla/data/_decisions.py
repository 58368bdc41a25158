"""Decisions on groups: keep, drop or review, from their weights, their suggested labels and held-out trusted rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fsla.data._bilevel import KEEP
from fsla.data._mixture import SMALLEST

SUSPECT = 0.25
"""Share of labels that look wrong, above which a group is in question even if its weight is high."""
SURE = 2.0
"""Standard errors from which a difference is measurable."""
LEAST_LIKELIHOOD = 0.02
"""Difference in log-likelihood per row that matters; certain answers differ measurably by less."""
BETTER, SAME, WORSE = "better", "same", "worse"
KEPT, DROPPED, REVIEWED, NOT_COMPARED = "keep", "drop", "review", "not compared"
DECISIONS = (KEPT, DROPPED, REVIEWED, NOT_COMPARED)
NO_TIME = "time was up"
NONE_LEFT = "no group would be left"


@dataclass(frozen=True)
class Change:
    """Two ways to train, compared row by row on trusted rows that neither was shown."""

    effect: str
    """Of the second: BETTER, WORSE, or SAME where no difference is measurable."""
    before: float
    """Accuracy, or root mean squared error."""
    after: float
    rows: int
    """Trusted rows."""
    stand_ins: int = 0
    """Other rows that stand in for classes without trusted ones."""
    likelihoods: tuple[float, float] | None = None
    """Mean log-likelihoods, where these differ measurably and accuracy does not."""
    regression: bool = False

    def in_units(self, unit: float) -> Change:
        """The same with errors of a regression in other units; accuracies have none."""
        return replace(self, before=unit * self.before, after=unit * self.after) if self.regression else self


@dataclass(frozen=True)
class Removal:
    """Groups in question, and what it changes to leave them out together."""

    groups: tuple[int, ...]
    change: Change | None
    """None if it was not measured."""
    reason: str = ""
    """Why it was not measured."""


Measure = Callable[[Sequence[int], Sequence[int]], Change | None]
"""Of groups that are left out already and groups to leave out besides; None if time is up."""


def compare(before: Tensor, after: Tensor, truths: Tensor, trusted: int) -> Change:
    """Compare two answers to the same rows, of which the first `trusted` in number are trusted ones.

    A difference is measurable if its mean exceeds two standard errors. Accuracy and log-likelihood both count; where
    they contradict each other, nothing is measurable.
    """
    stand_ins = len(truths) - trusted
    if before.ndim == 1:
        squares = [(answers.double() - truths.double()).square() for answers in (before, after)]
        effect = _effect(_sign(squares[0] - squares[1]))
        first, second = (float(square.mean().sqrt()) for square in squares)
        return Change(effect, first, second, trusted, stand_ins, regression=True)
    right = [(answers.argmax(1) == truths).double() for answers in (before, after)]
    logs = [a.double().gather(1, truths[:, None]).clamp(min=SMALLEST).log()[:, 0] for a in (before, after)]
    accuracy, likelihood = _sign(right[1] - right[0]), _sign(logs[1] - logs[0], LEAST_LIKELIHOOD)
    by_likelihood = likelihood != 0 and accuracy == 0
    return Change(
        _effect(accuracy + likelihood),
        float(right[0].mean()),
        float(right[1].mean()),
        trusted,
        stand_ins,
        likelihoods=(float(logs[0].mean()), float(logs[1].mean())) if by_likelihood else None,
    )


def decide(
    low: Sequence[float], high: Sequence[float], flagged: Sequence[int], samples: Sequence[int], measure: Measure
) -> tuple[list[str], list[Removal]]:
    """Decide on each group, from its lowest and highest weight and how many of its labels look wrong.

    Groups in question are left out in up to four sets: first those that every run gives a weight near 0, then those
    with uneven weights; of each, groups with many labels that look wrong first. A set is dropped if the rest does
    measurably better without it: in accuracy or, where the weights agree, in log-likelihood. Otherwise its groups are
    for review.
    """
    groups = range(len(low))
    wrong = [suspect(flagged[g], samples[g]) for g in groups]
    unwanted = [high[g] < KEEP for g in groups]
    doubtful = [not unwanted[g] and (low[g] < KEEP or wrong[g]) for g in groups]
    parts = [
        [g for g in groups if kind[g] and wrong[g] == bad] for kind in (unwanted, doubtful) for bad in (True, False)
    ]
    decisions = [KEPT] * len(low)
    removals = []
    out: list[int] = []
    for part in filter(None, parts):
        left = len(low) - len(out) - len(part)
        change = measure(out, part) if left else None
        if change is not None and change.likelihoods is not None and not unwanted[part[0]]:
            change = replace(change, effect=SAME, likelihoods=None)
        reason = "" if change else (NO_TIME if left else NONE_LEFT)
        removals.append(Removal(tuple(part), change, reason))
        helps = change is not None and change.effect == BETTER
        for group in part:
            decisions[group] = DROPPED if helps else REVIEWED
        out += part if helps else []
    return decisions, removals


def suspect(flagged: int, samples: int) -> bool:
    """Whether clearly more than `SUSPECT` of a group's labels look wrong, by the lower end of Wilson's interval."""
    share = flagged / samples
    spread = SURE * math.sqrt(share * (1 - share) / samples + (SURE / samples) ** 2 / 4)
    return (share + SURE**2 / samples / 2 - spread) / (1 + SURE**2 / samples) > SUSPECT


def _sign(gains: Tensor, least: float = 0.0) -> int:
    """1 or -1 for a mean that differs measurably, and by `least`, from 0."""
    mean = float(gains.mean())
    error = float(gains.std()) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
    return 0 if abs(mean) <= max(SURE * error, least) else int(math.copysign(1, mean))


def _effect(sign: int) -> str:
    return BETTER if sign > 0 else WORSE if sign < 0 else SAME
