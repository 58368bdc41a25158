"""The trusted samples decide: each way is judged by what it says of trusted samples that it was not shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsla.checks import pick
from fsla.cleaning.bilevel import Weighed
from fsla.cleaning.material import Material, threads
from fsla.cleaning.ways import Bench, Outcome, usual, ways

FOLDS = 3


@dataclass
class Candidate:
    """A way, and the log-likelihood of the trusted samples that each fold held out."""

    name: str
    scores: list[float] = field(default_factory=list)
    """A mean for each fold."""
    errors: list[float] = field(default_factory=list)
    """The share of wrong answers, or the root mean squared error, of each fold."""
    rates: list[float] = field(default_factory=list)
    """The share of wrong labels that each fold found."""

    @property
    def score(self) -> float:
        return sum(self.scores) / len(self.scores) if self.scores else -math.inf


@dataclass
class Choice:
    """The candidates, the chosen one's outcome with all trusted samples, and the groups' weights of each fold."""

    candidates: list[Candidate]
    chosen: Candidate
    outcome: Outcome
    group_weights: Tensor | None
    """(folds, groups)"""
    curve: list[tuple[int, float, list[float]]]


Enough = Callable[[], bool]


def choose(
    material: Material,
    *,
    names: Sequence[str] | None = None,
    folds: int = FOLDS,
    repeats: int = 2,
    enough: Enough = lambda: False,
) -> Choice:
    """Tries the ways on each fold, takes the best, and trains it again with all trusted samples.

    The weight of a group is the mean over the folds, each of which learnt it from other trusted samples. `enough` says
    that time is up: the folds that are left are skipped, but the first.
    """
    with threads(material):
        return _choose(material, names, folds, repeats, enough)


def _choose(material: Material, names: Sequence[str] | None, folds: int, repeats: int, enough: Enough) -> Choice:
    known = ways(material)
    tried = {name: pick(name, known, "way to train") for name in (names or usual(material))}
    candidates = [Candidate(name) for name in tried]
    weighed = []
    parts = split(material, folds)
    for number, held in enumerate(parts):
        if number and enough():
            break
        rest = torch.cat([part for other, part in enumerate(parts) if other != number])
        bench = Bench(material.with_trusted(rest, material.seed + number + 1))
        for candidate in candidates:
            judge(candidate, tried[candidate.name](bench), material, held)
        if bench.groups is not None:
            weighed.append(bench.groups)
    best = max(candidates, key=lambda candidate: candidate.score)
    groups = torch.stack([found.weights for found in weighed]) if weighed else None
    curve = weighed[0].curve if weighed else []
    mean = None if groups is None else Weighed(groups.mean(0), curve)
    outcome = tried[best.name](Bench(material, repeats=repeats, groups=mean))
    return Choice(candidates, best, outcome, groups, curve)


def judge(candidate: Candidate, outcome: Outcome, material: Material, held: Tensor) -> None:
    """Scores an outcome on trusted samples that it was not shown."""
    answers = outcome.fit.answers(material.trusted_x[held])
    y = material.trusted_y[held]
    if material.classes:
        candidate.scores.append(float(answers.gather(1, y[:, None]).clamp(min=1e-6).log().mean()))
        candidate.errors.append(float((answers.argmax(1) != y).float().mean()))
        assert outcome.belief is not None
        candidate.rates.append(float(1 - outcome.belief.gather(1, material.y[:, None]).mean()))
    else:
        squared = float((answers - y).square().mean())
        candidate.scores.append(-0.5 * math.log(2 * math.pi * math.e * max(squared, 1e-12)))
        candidate.errors.append(squared**0.5)


def split(material: Material, folds: int) -> list[Tensor]:
    """Parts of the trusted samples' numbers, with each class spread over all of them."""
    draw = torch.Generator().manual_seed(material.seed)
    order = torch.randperm(len(material.trusted_y), generator=draw)
    if material.classes:
        order = order[material.trusted_y.cpu()[order].argsort(stable=True)]
    order = order.to(material.device)
    return [order[start::folds] for start in range(folds)]
