"""The trusted samples decide: each way is judged by what it says of trusted samples that it was not shown.

The shares of the ways in the final model are those with which the held-out trusted samples are most likely (stacking).
Where one way is clearly best it has all; where several are as good, their mean is better than each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsla.checks import pick
from fsla.cleaning.bilevel import Weighed
from fsla.cleaning.material import Material, threads
from fsla.cleaning.mixture import Member, Mixture, likelihood, tempered
from fsla.cleaning.ways import EVERYTHING, WITH_GROUPS, Bench, usual, ways
from fsla.ranks import join

FOLDS = 3
TEMPERATURES = tuple(2 ** (step / 4) for step in range(-12, 13))
LEAST = 0.05
"""A way with a smaller share is left out."""


@dataclass
class Candidate:
    """A way, and what it said of the trusted samples that each fold held out, and of those that stand in for them."""

    name: str
    held: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Answers and truths, of each fold."""
    share: float = 0.0
    """In the final model."""

    @property
    def answers(self) -> Tensor:
        """Of all folds, as sure as they should be."""
        return tempered(self._raw, self.temperature)

    @property
    def truths(self) -> Tensor:
        return torch.cat([truths for _, truths in self.held])

    @property
    def temperature(self) -> float:
        """How much too sure its probabilities are: p^(1/T) is most likely. Of a regression it is 1.

        Without that a network that learnt from wrong labels, and so is never sure, would win over one that is right
        more often.
        """
        raw = self._raw
        if raw.ndim == 1:
            return 1.0
        return max(TEMPERATURES, key=lambda temperature: likelihood(tempered(raw, temperature), self.truths))

    @property
    def score(self) -> float:
        """The mean log-likelihood of a trusted sample, at the best temperature."""
        return likelihood(self.answers, self.truths)

    @property
    def error(self) -> float:
        """The share of wrong answers, or the root mean squared error."""
        raw = self._raw
        if raw.ndim == 2:
            return float((raw.argmax(1) != self.truths).float().mean())
        return float((raw - self.truths).square().mean().sqrt())

    @property
    def _raw(self) -> Tensor:
        return torch.cat([answers for answers, _ in self.held])


class Labels(NamedTuple):
    """What is thought of the labels."""

    belief: Tensor
    """(mixed, classes): what each may be."""
    chance: Tensor
    """How far each is believed, with T."""
    quality: Tensor
    """The same, with T and without, times the weight of its group."""
    transition: Tensor
    """T, the mean of the groups' where there are several."""
    noise_rate: float
    """The share of wrong ones."""
    noise_rates: tuple[float, float]
    """Between which it lies: what T explains, and all that the networks doubt."""


@dataclass
class Choice:
    """What was tried, and what was made of it with all trusted samples."""

    candidates: list[Candidate]
    together: Candidate
    """The mixture of the candidates."""
    model: Mixture
    weight: Tensor
    """Of each sample, in [0, 1]."""
    group_weights: Tensor | None
    """(folds, groups)"""
    curve: list[tuple[int, float, list[float]]]
    labels: Labels | None = None
    """None for regressions."""
    skipped: tuple[str, ...] = ()
    """Ways that were not tried, since time was up."""

    @property
    def weighing_helps(self) -> bool:
        """Whether a way that weighs groups does better on the trusted samples than doing nothing; True if unknown."""
        scores = {candidate.name: candidate.score for candidate in self.candidates}
        weighed = [scores[name] for name in WITH_GROUPS if name in scores]
        return not weighed or EVERYTHING not in scores or max(weighed) > scores[EVERYTHING]


Enough = Callable[[], bool]
Report = Callable[[str, int, int], None]
"""Of what is under way, how many ways are done, and of how many."""


def choose(material: Material, **options: Any) -> Choice:
    """Tries the ways on all folds, and trains those that have a share in the model again with all trusted samples.

    The options are those of `Trial`.
    """
    with threads(material):
        return Trial(material, **options).choice()


class Trial:
    """The ways, tried on all folds.

    The weight of a group is the mean over the folds, each of which learnt it from other trusted samples. `enough` says
    that time is up: the ways that are left are skipped, but for the first of them.
    """

    def __init__(
        self,
        material: Material,
        *,
        names: Sequence[str] | None = None,
        folds: int = FOLDS,
        repeats: int = 2,
        enough: Enough = lambda: False,
        report: Report = lambda name, done, total: None,
    ) -> None:
        tried = list(names or usual(material))
        for name in tried:
            pick(name, ways(material), "way to train")
        here = join()
        parts = split(material, folds)
        self._held = Bench(material, [_without(parts, number) for number in range(folds)])
        stand_ins = stand_ins_by_fold(self._held, folds)
        self.candidates: list[Candidate] = []
        for name in tried:
            late: bool = here.from_first(bool(enough()))
            if self.candidates and late:
                break
            report(name, len(self.candidates), len(tried) + 1)
            fit = self._held.go(name).fit
            held = []
            for view, (rows, others) in enumerate(zip(parts, stand_ins, strict=True)):
                answers = torch.cat([fit.answers(view, material.x[rows]), fit.unseen[view, others]])
                held.append((answers, material.y[torch.cat([rows, others])]))
            self.candidates.append(Candidate(name, held))
        self._skipped = tuple(tried[len(self.candidates) :])
        self._report = report
        for candidate, share in zip(self.candidates, here.from_first(shares(self.candidates)), strict=True):
            candidate.share = share
        self.final = Bench(material, repeats=repeats, groups=_mean(self._held.groups))
        """The ways with all trusted samples."""

    def choice(self) -> Choice:
        """Trains the ways that have a share."""
        total = len(self.candidates) + 1
        self._report("the model", len(self.candidates), total)
        taken = [candidate for candidate in self.candidates if candidate.share > 0]
        members = []
        for candidate in taken:
            networks = self.final.go(candidate.name).fit.networks[0]
            members.append(Member(candidate.share, candidate.temperature, tuple(networks)))
        groups = self._held.groups
        choice = Choice(
            self.candidates,
            _together(taken),
            Mixture(tuple(members), self.final.material.classes),
            weight=torch.stack([c.share * self.final.go(c.name).weight[0] for c in taken]).sum(0),
            group_weights=torch.stack([found.weights for found in groups]) if groups else None,
            curve=groups[0].curve if groups else [],
            labels=self._labels(taken) if self.final.material.classes else None,
            skipped=self._skipped,
        )
        self._report("done", total, total)
        return choice

    def _labels(self, taken: Sequence[Candidate]) -> Labels:
        p = _mixed(taken, self.final)
        belief, transition = self.final.believed(p)
        quality = self.final.quality(p, belief)
        held_p = _mixed(taken, self._held)
        held_belief, _ = self._held.believed(held_p)
        explained = self._rates(torch.cat([belief, held_belief]))
        doubted = self._rates(torch.cat([p, held_p]))
        rates = (min(explained), max(doubted + explained))
        chance = self.final.material.chance_of_given(belief)
        return Labels(belief[0], chance[0], quality[0], transition[0], explained[0], rates)

    def _rates(self, belief: Tensor) -> list[float]:
        rates: list[float] = (1 - self.final.material.chance_of_given(belief)).mean(1).tolist()
        return rates


def shares(candidates: Sequence[Candidate]) -> list[float]:
    """Those of the mixture under which the held-out samples are most likely; small ones are left out.

    One thread, since with another number of them sums are in another order, and the search ends elsewhere.
    """
    from scipy.optimize import minimize
    from threadpoolctl import threadpool_limits  # type: ignore[import-not-found, import-untyped, unused-ignore]

    answers = torch.stack([candidate.answers for candidate in candidates]).double()
    truths = candidates[0].truths

    def loss(share: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
        return -likelihood(torch.tensordot(torch.from_numpy(share).to(answers.device), answers, 1), truths)

    count = len(candidates)
    sums_to_one = {"type": "eq", "fun": lambda share: share.sum() - 1}
    even = np.full(count, 1 / count)
    with threadpool_limits(1):
        found = minimize(loss, even, bounds=[(0, 1)] * count, constraints=sums_to_one, method="SLSQP")
    kept = np.where(found.x < LEAST, 0.0, found.x)
    return [float(share) for share in kept / kept.sum()]


def _together(taken: Sequence[Candidate]) -> Candidate:
    answers = torch.stack([candidate.share * candidate.answers for candidate in taken]).sum(0)
    truths = [truths for _, truths in taken[0].held]
    parts = torch.split(answers, [len(part) for part in truths])
    return Candidate("together", list(zip(parts, truths, strict=True)), 1.0)


def _mixed(taken: Sequence[Candidate], bench: Bench) -> Tensor:
    """What the mixture says of the samples of mixed quality, in each view."""
    parts = [c.share * tempered(bench.go(c.name).fit.unseen, c.temperature) for c in taken]
    return torch.stack(parts).sum(0)


def _mean(weighed: Sequence[Weighed]) -> list[Weighed]:
    if not weighed:
        return []
    return [Weighed(torch.stack([found.weights for found in weighed]).mean(0), weighed[0].curve)]


def split(material: Material, folds: int) -> list[Tensor]:
    """Parts of the trusted samples' rows, with each class spread over all of them."""
    rows = material.trusted
    draw = torch.Generator().manual_seed(material.seed)
    order = torch.randperm(len(rows), generator=draw).to(rows.device)
    if material.classes:
        order = order[material.y[rows[order]].argsort(stable=True)]
    return [rows[order[start::folds]] for start in range(folds)]


def stand_ins_by_fold(bench: Bench, folds: int) -> list[Tensor]:
    """Samples that stand in for the trusted ones of classes that have none, in parts: as many as there would be of
    each, were the trusted samples like the others. Without them no held-out sample could tell whether a way knows the
    class."""
    material = bench.material
    rows = material.trusted[:0]
    if material.classes and not bench.known.any(0).all():
        wanted = torch.bincount(material.given, minlength=material.classes) * len(material.trusted) / material.mixed
        draw = torch.Generator().manual_seed(material.seed)
        order = torch.randperm(material.mixed, generator=draw).to(material.device)
        usable = order[bench.stand_ins.all(0)[order]]
        for c in torch.nonzero(~bench.known.any(0))[:, 0].tolist():
            own = usable[material.y[usable] == c]
            rows = torch.cat([rows, own[: max(1, round(float(wanted[c])))]])
    return [rows[start::folds] for start in range(folds)]


def _without(parts: Sequence[Tensor], number: int) -> Tensor:
    return torch.cat([part for other, part in enumerate(parts) if other != number])
