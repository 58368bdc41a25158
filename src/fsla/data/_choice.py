"""The trusted samples decide: each way is judged by what it says of trusted samples that it was not shown.

The shares of the ways in the final model are those with which the held-out trusted samples are most likely (stacking).
Where one way is clearly best it has all; where several are as good, their mean is better than each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsla._checks import pick
from fsla.data._bilevel import Weighed
from fsla.data._candidate import Candidate
from fsla.data._decisions import Change, Removal, compare, decide
from fsla.data._material import Material, threads
from fsla.data._mixture import Member, Mixture, likelihood, tempered
from fsla.data._training import CrossFit
from fsla.data._ways import EVERYTHING, Bench, usual, ways
from fsla.distributed import get_group

FOLDS = 3
LEAST = 0.05
"""A way with a smaller share is left out."""


class Labels(NamedTuple):
    """What is thought of the labels."""

    belief: Tensor
    """(mixed, classes): what each may be."""
    quality: Tensor
    """How far each given label is believed, with T and without, times the weight of its group."""
    flagged: Tensor
    """Whether another label than the given one is the most probable."""
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
    changes: dict[str, Change] = field(default_factory=dict)
    """Of each way and of the model, against training on everything as it is; empty if that was not tried."""
    decisions: list[str] | None = None
    """On each group; None where groups were not compared."""
    removals: tuple[Removal, ...] = ()
    """What it changes to leave out the groups in question."""


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
        here = get_group()
        self._parts = split(material, folds)
        self._held = Bench(material, [_without(self._parts, number) for number in range(folds)])
        self._stand_ins = stand_ins_by_fold(self._held, folds)
        self.candidates: list[Candidate] = []
        for name in tried:
            late: bool = here.broadcast(bool(enough()))
            if self.candidates and late:
                break
            report(name, len(self.candidates), len(tried) + 1)
            self.candidates.append(self._candidate(name, self._held.go(name).fit))
        self._skipped = tuple(tried[len(self.candidates) :])
        self._report = report
        self._enough = enough
        self._left_out: dict[tuple[int, ...], Candidate] = {}
        for candidate, share in zip(self.candidates, here.broadcast(shares(self.candidates)), strict=True):
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
        together = _together(taken)
        choice = Choice(
            self.candidates,
            together,
            Mixture(tuple(members), self.final.material.classes),
            weight=torch.stack([c.share * self.final.go(c.name).weight[0] for c in taken]).sum(0),
            group_weights=torch.stack([found.weights for found in groups]) if groups else None,
            curve=groups[0].curve if groups else [],
            labels=self._labels(taken) if self.final.material.classes else None,
            skipped=self._skipped,
            changes=self._changes(together),
        )
        self._decide(choice)
        self._report("done", total, total)
        return choice

    def _candidate(self, name: str, fit: CrossFit) -> Candidate:
        x, y = self._held.material.x, self._held.material.y
        held = []
        for view, (rows, others) in enumerate(zip(self._parts, self._stand_ins, strict=True)):
            answers = torch.cat([fit.answers(view, x[rows]), fit.unseen[view, others]])
            held.append((answers, y[torch.cat([rows, others])]))
        return Candidate(name, held)

    def _changes(self, together: Candidate) -> dict[str, Change]:
        named = {candidate.name: candidate for candidate in self.candidates}
        if EVERYTHING not in named:
            return {}
        nothing = named.pop(EVERYTHING)
        return {name: self._change(nothing, other) for name, other in (named | {together.name: together}).items()}

    def _change(self, before: Candidate, after: Candidate) -> Change:
        return compare(before.answers, after.answers, before.truths, sum(len(rows) for rows in self._parts))

    def _decide(self, choice: Choice) -> None:
        """Decides on groups. All ranks decide by the numbers of the first one: each trains what is measured."""
        material = self.final.material
        if material.groups is None or (choice.group_weights is None and material.group_count > 1):
            return
        count = material.group_count
        found = torch.ones(1, count) if choice.group_weights is None else choice.group_weights
        samples = torch.bincount(material.groups, minlength=count)
        flagged = torch.zeros_like(samples)
        if choice.labels is not None:
            flagged.index_add_(0, material.groups, choice.labels.flagged.to(flagged.dtype))
        facts = [part.tolist() for part in (found.min(0).values, found.max(0).values, flagged, samples)]
        low, high, wrong, rows = get_group().broadcast(facts)
        choice.decisions, removals = decide(low, high, wrong, rows, self._without_groups)
        choice.removals = tuple(removals)

    def _without_groups(self, out: Sequence[int], more: Sequence[int]) -> Change | None:
        """What it changes on the held-out samples to train without more groups; None if time is up."""
        here = get_group()
        if here.broadcast(bool(self._enough())):
            return None
        total = len(self.candidates) + 1
        self._report("groups left out", len(self.candidates), total)
        change = self._change(self._trained_without(out), self._trained_without([*out, *more]))
        return replace(change, effect=here.broadcast(change.effect))

    def _trained_without(self, groups: Sequence[int]) -> Candidate:
        key = tuple(groups)
        if key not in self._left_out:
            fit = self._held.without(groups) if groups else self._held.go(EVERYTHING).fit
            self._left_out[key] = self._candidate(EVERYTHING, fit)
        return self._left_out[key]

    def _labels(self, taken: Sequence[Candidate]) -> Labels:
        p = _mixed(taken, self.final)
        belief, transition = self.final.believed(p)
        quality = self.final.quality(p, belief)
        held_p = _mixed(taken, self._held)
        held_belief, _ = self._held.believed(held_p)
        explained = self._rates(torch.cat([belief, held_belief]))
        doubted = self._rates(torch.cat([p, held_p]))
        rates = (min(explained), max(doubted + explained))
        flagged = belief[0].max(1).indices != self.final.material.given
        return Labels(belief[0], quality[0], flagged, transition[0], explained[0], rates)

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
