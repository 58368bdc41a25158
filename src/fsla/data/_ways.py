"""The ways to train on data of mixed quality, from doing nothing to weights times mended labels.

    trusted samples alone    what can be had without the rest
    everything               doing nothing: all samples count alike
    agreement                labels that networks trained on everything do not predict are left out
    self-training            a sample counts as far as its label is believed
    mended labels            EM with a transition matrix (one for each group), and training on what a label may be
    group weights            a weight for each group, learnt by FSLA on the trusted samples
    groups and labels        both: labels mended within the groups that are kept
    sample weights           a weight for each sample, learnt by FSLA

All are cross-fitted: what is said of a sample is said by networks that did not see it. Each is gone for several views
(parts of the trusted samples) at once, and what it makes has the view as its first dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fsla._checks import pick
from fsla.data import _transition as transition
from fsla.data._bilevel import Weighed, acted_on, learn
from fsla.data._material import Losses, Material, evident, soft
from fsla.data._training import CrossFit, cross_fit, trusted_alone
from fsla.distributed import get_group, parts, single_process

ROUNDS = 3
ALONE = "trusted samples alone"
EVERYTHING = "everything"
AGREEMENT = "agreement"
SELF = "self-training"
MENDED = "mended labels"
GROUPS = "group weights"
BOTH = "groups and labels"
WITH_GROUPS = (GROUPS, BOTH)
SAMPLES = "sample weights"


@dataclass(frozen=True)
class Outcome:
    """What a way of training made, for each view."""

    fit: CrossFit
    weight: Tensor
    """(views, mixed): how much each sample counts with the label that it was given, in [0, 1]."""


class Bench:
    """The ways to train on one material, which share what they have in common."""

    def __init__(
        self,
        material: Material,
        views: Sequence[Tensor] = (),
        *,
        repeats: int = 1,
        groups: Sequence[Weighed] = (),
    ) -> None:
        self.material = material
        self.views = views or [material.trusted]
        """The rows of the trusted samples that each view may see; by default one view of all of them."""
        self._repeats = repeats
        self.groups = groups
        """What is known of the groups' weights in each view, from the first way on that needed them."""
        self.outcomes: dict[str, Outcome] = {}
        """Of the ways that were gone."""

    def go(self, name: str) -> Outcome:
        """The outcome of a way, which is gone once."""
        if name not in self.outcomes:
            self.outcomes[name] = pick(name, ways(self.material), "way to train")(self)
        return self.outcomes[name]

    @cached_property
    def alone(self) -> CrossFit:
        return trusted_alone(self.material, self.views)

    @cached_property
    def known(self) -> Tensor:
        """(views, classes): whether a class has a trusted sample."""
        y = self.material.y
        return torch.stack([torch.bincount(y[rows], minlength=self.material.classes) > 0 for rows in self.views])

    @cached_property
    def stand_ins(self) -> Tensor:
        """(views, mixed): which samples stand in for the trusted ones that their class lacks: those whose label is
        predicted by networks that learnt from everything but them."""
        given = self.material.given
        lacking = ~self.known[:, given]
        if lacking.any():
            lacking &= self.go(EVERYTHING).fit.unseen.argmax(-1) == given
        return lacking

    @cached_property
    def checked(self) -> Tensor:
        """(views, classes): whether labels of a class can be checked, by trusted samples or those that stand in."""
        found = torch.zeros(self.known.shape, device=self.known.device)
        return self.known | (found.index_add_(1, self.material.given, self.stand_ins.float()) > 0)

    @cached_property
    def start(self) -> CrossFit:
        """Networks from the trusted samples and those that stand in."""
        return self._cross_fit(self.stand_ins.float()) if self.stand_ins.any() else self.alone

    def trusted_alone(self) -> Outcome:
        fit = self.alone
        if not self.material.classes:
            return Outcome(fit, 0 * self._all)
        chance = self.material.chance_of_given(fit.unseen)
        return Outcome(fit, torch.where(self.known[:, self.material.given], chance, 1.0))

    def everything(self) -> Outcome:
        return self._trained(self._all)

    def agreement(self) -> Outcome:
        said = self.go(EVERYTHING).fit.unseen.argmax(-1)
        return self._trained(self._where_checked((said == self.material.given).float()))

    def self_training(self) -> Outcome:
        fit = self.start
        for number in range(ROUNDS):
            weight = torch.where(self.stand_ins, 1.0, self._trust(fit.unseen))
            fit = self._cross_fit(weight, repeats=self._repeats if number == ROUNDS - 1 else 1)
        return Outcome(fit, self._trust(fit.unseen))

    def mended_labels(self) -> Outcome:
        return self._mended(self._all)

    def group_weights(self) -> Outcome:
        return self._trained(self._group_weight())

    def groups_and_labels(self) -> Outcome:
        return self._mended(self._group_weight())

    def sample_weights(self) -> Outcome:
        rows = torch.arange(self.material.mixed, device=self.material.device)
        return self._trained(torch.stack([found.weights for found in self._learn(rows, len(rows))]))

    def without(self, groups: Sequence[int]) -> CrossFit:
        """Train on everything but some groups."""
        assert self.material.groups is not None
        out = torch.isin(self.material.groups, torch.tensor(groups, device=self.material.device))
        return self._cross_fit(self._all * ~out, repeats=self._repeats)

    def believed(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """What the label of each sample may be, from p(c | x) in each view: (views, mixed, classes); and T: (views,
        classes, classes), the mean of the groups' where there are several."""
        material = self.material
        found = self._transition(p)
        belief = transition.posterior(p, transition.chances(found, material.given, material.groups))
        if material.groups is not None:
            shares = torch.bincount(material.groups, minlength=material.group_count) / material.mixed
            found = (shares[:, None, None] * found).sum(1)
        return belief, found

    def quality(self, p: Tensor, belief: Tensor) -> Tensor:
        """How far each given label is believed, without T and with it, times the weight of its group where known.

        T knows of flips between classes, and nothing of samples that are hard: the mean of both ranks best.
        """
        chance = (self._trust(p) + self.material.chance_of_given(belief)) / 2
        return chance * self._by_sample(self.groups) if self.groups else chance

    # ------------------------------------------------------------------------------------------------------- shared

    @cached_property
    def _all(self) -> Tensor:
        """The weights where every sample counts."""
        return torch.ones(len(self.views), self.material.mixed, device=self.material.device)

    def _learn(self, index: Tensor, count: int) -> list[Weighed]:
        """The weights of each view; several ranks share the views out."""
        here = get_group()
        own = here.local_slice(len(self.views))
        found = []
        with single_process():
            for view in range(own.start, own.stop):
                found.append(learn(self.material, index, count, self.views[view], view))
        curves = [curve for told in here.gather([weighed.curve for weighed in found]) for curve in told]
        weights = torch.zeros(len(self.views), count, device=self.material.device)
        if found:
            weights[own] = torch.stack([weighed.weights for weighed in found])
        for rank, theirs in enumerate(parts(len(self.views), here.world_size)):
            here.copy_from(rank, [weights[theirs]])
        return [Weighed(weight, _curve(curve)) for weight, curve in zip(weights, curves, strict=True)]

    def _group_weight(self) -> Tensor:
        material = self.material
        assert material.groups is not None
        if not self.groups:
            self.groups = self._learn(material.groups, material.group_count)
        return acted_on(self._by_sample(self.groups))

    def _by_sample(self, groups: Sequence[Weighed]) -> Tensor:
        return torch.stack([found.weights[self.material.groups] for found in groups])

    def _trained(self, weight: Tensor) -> Outcome:
        return Outcome(self._cross_fit(weight, repeats=self._repeats), weight)

    def _mended(self, weight: Tensor) -> Outcome:
        fit = self.start
        for _ in range(ROUNDS):
            fit = self._cross_fit(weight, evident(self._chances(fit.unseen, weight)))
        belief = transition.posterior(fit.unseen, self._chances(fit.unseen, weight))
        return Outcome(
            self._cross_fit(weight, soft(belief), self._repeats), weight * self.material.chance_of_given(belief)
        )

    def _cross_fit(self, weight: Tensor, losses: Losses | None = None, repeats: int = 1) -> CrossFit:
        return cross_fit(self.material, self.views, weight=weight, losses=losses, repeats=repeats)

    def _trust(self, p: Tensor) -> Tensor:
        """The probability of each given label."""
        return self._where_checked(self.material.chance_of_given(p))

    def _where_checked(self, values: Tensor) -> Tensor:
        """Of each sample; 1 where its label cannot be checked."""
        return torch.where(self.checked[:, self.material.given], values, 1.0)

    def _transition(self, p: Tensor, weight: Tensor | None = None) -> Tensor:
        material = self.material
        y = material.given
        if material.groups is None:
            return transition.estimate(p, y, self.checked, weight)
        return transition.estimate_by_group(p, y, self.checked, material.groups, material.group_count, weight)

    def _chances(self, p: Tensor, weight: Tensor) -> Tensor:
        """Of the given labels, were each class the true one; those of samples that stand in are right."""
        given = self.material.given
        found = transition.chances(self._transition(p, weight), given, self.material.groups)
        right = one_hot(given, self.material.classes).to(found.dtype)
        return torch.where(self.stand_ins[..., None], right, found)


def _curve(told: Sequence[Sequence[Any]]) -> list[tuple[int, float, list[float]]]:
    return [(step, loss, weights) for step, loss, weights in told]


Ways = dict[str, Callable[[Bench], Outcome]]


def usual(material: Material) -> Ways:
    """Those that are tried unless asked otherwise: single samples are weighed where nothing better is known."""
    known = ways(material)
    better = material.classes or GROUPS in known
    return {name: way for name, way in known.items() if name != SAMPLES or not better}


def ways(material: Material) -> Ways:
    """Those that apply: some need groups, some need classes."""
    found: Ways = {ALONE: Bench.trusted_alone, EVERYTHING: Bench.everything}
    if material.classes:
        found |= {AGREEMENT: Bench.agreement, SELF: Bench.self_training, MENDED: Bench.mended_labels}
    if material.groups is not None and material.group_count > 1:
        found[GROUPS] = Bench.group_weights
        if material.classes:
            found[BOTH] = Bench.groups_and_labels
    return found | {SAMPLES: Bench.sample_weights}
