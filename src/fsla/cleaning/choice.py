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
TEMPERATURES = tuple(2 ** (step / 4) for step in range(-12, 13))


@dataclass
class Candidate:
    """A way, and what it said of the trusted samples that each fold held out."""

    name: str
    held: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Answers and truths, of each fold."""
    errors: list[float] = field(default_factory=list)
    """The share of wrong answers, or the root mean squared error, of each fold."""
    rates: list[float] = field(default_factory=list)
    """The share of wrong labels that each fold found."""

    @property
    def temperature(self) -> float:
        """How much too sure its probabilities are: p^(1/T) is most likely. Of a regression it is 1."""
        return max(TEMPERATURES, key=self._likelihood) if self._classifies else 1.0

    @property
    def score(self) -> float:
        """The mean log-likelihood of a trusted sample, at the best temperature.

        Without that a network that learnt from wrong labels, and so is never sure, would win over one that is right
        more often.
        """
        return self._likelihood(self.temperature)

    @property
    def _classifies(self) -> bool:
        return self.held[0][0].ndim == 2

    def _likelihood(self, temperature: float) -> float:
        answers = torch.cat([answers for answers, _ in self.held])
        truths = torch.cat([truths for _, truths in self.held])
        if not self._classifies:
            squared = float((answers - truths).square().mean())
            return -0.5 * math.log(2 * math.pi * math.e * max(squared, 1e-12))
        logs = (answers.clamp(min=1e-9).log() / temperature).log_softmax(1)
        return float(logs.gather(1, truths[:, None]).mean())


@dataclass
class Choice:
    """The candidates, the chosen one's outcome with all trusted samples, and the groups' weights of each fold."""

    candidates: list[Candidate]
    chosen: Candidate
    outcome: Outcome
    """Of one view, which has all trusted samples."""
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
    """Tries the ways on all folds, takes the best, and trains it again with all trusted samples.

    The weight of a group is the mean over the folds, each of which learnt it from other trusted samples. `enough` says
    that time is up: the ways that are left are skipped, but for the first of them.
    """
    with threads(material):
        return _choose(material, names, folds, repeats, enough)


def _choose(material: Material, names: Sequence[str] | None, folds: int, repeats: int, enough: Enough) -> Choice:
    known = ways(material)
    tried = {name: pick(name, known, "way to train") for name in (names or usual(material))}
    parts = split(material, folds)
    bench = Bench(material, [_without(parts, number) for number in range(folds)])
    candidates: list[Candidate] = []
    for name, way in tried.items():
        if candidates and enough():
            break
        candidates.append(_judged(name, way(bench), material, parts))
    best = max(candidates, key=lambda candidate: candidate.score)
    weighed = list(bench.groups)
    groups = torch.stack([found.weights for found in weighed]) if weighed else None
    curve = weighed[0].curve if weighed else []
    mean = [] if groups is None else [Weighed(groups.mean(0), curve)]
    outcome = tried[best.name](Bench(material, repeats=repeats, groups=mean))
    return Choice(candidates, best, outcome, groups, curve)


def _judged(name: str, outcome: Outcome, material: Material, parts: Sequence[Tensor]) -> Candidate:
    """What a way says in each view of the trusted samples that it was not shown."""
    candidate = Candidate(name)
    for view, held in enumerate(parts):
        answers = outcome.fit.answers(view, material.x[held])
        truths = material.y[held]
        candidate.held.append((answers, truths))
        if material.classes:
            candidate.errors.append(float((answers.argmax(1) != truths).float().mean()))
            assert outcome.belief is not None
            candidate.rates.append(float(1 - outcome.belief[view].gather(1, material.given[:, None]).mean()))
        else:
            candidate.errors.append(float((answers - truths).square().mean()) ** 0.5)
    return candidate


def split(material: Material, folds: int) -> list[Tensor]:
    """Parts of the trusted samples' rows, with each class spread over all of them."""
    rows = material.trusted
    draw = torch.Generator().manual_seed(material.seed)
    order = torch.randperm(len(rows), generator=draw).to(rows.device)
    if material.classes:
        order = order[material.y[rows[order]].argsort(stable=True)]
    return [rows[order[start::folds]] for start in range(folds)]


def _without(parts: Sequence[Tensor], number: int) -> Tensor:
    return torch.cat([part for other, part in enumerate(parts) if other != number])
