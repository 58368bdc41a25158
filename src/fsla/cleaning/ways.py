"""The ways to train on data of mixed quality, from doing nothing to weights times mended labels; and their choice.

    trusted samples alone    what can be had without the rest
    everything               doing nothing: all samples count alike
    self-training            a sample counts as far as its label is believed
    mended labels            EM with a transition matrix (one for each group), and training on what a label may be
    group weights            a weight for each group, learnt by FSLA on the trusted samples
    groups and labels        both: labels mended within the groups that are kept
    sample weights           a weight for each sample, learnt by FSLA

All are cross-fitted: what is said of a sample is said by networks that did not see it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fsla.cleaning import transition
from fsla.cleaning.bilevel import Weighed, learn
from fsla.cleaning.material import CrossFit, Losses, Material, cross_fit, evident, soft, trusted_alone

ROUNDS = 3
ALONE = "trusted samples alone"
EVERYTHING = "everything"
GROUPS = "group weights"
SAMPLES = "sample weights"


@dataclass(frozen=True)
class Outcome:
    """What a way of training made."""

    fit: CrossFit
    weight: Tensor
    """Of each sample, in [0, 1]."""
    belief: Tensor | None = None
    """What each sample's label may be, a row of probabilities; None for regressions."""
    transition: Tensor | None = None
    """T, the mean of the groups' where there are several."""


class Bench:
    """The ways to train on one material, which share what they have in common."""

    def __init__(
        self,
        material: Material,
        *,
        repeats: int = 1,
        groups: Weighed | None = None,
    ) -> None:
        self.material = material
        self._repeats = repeats
        self.groups = groups
        """What is known of the groups' weights, from the first way on that needed them."""

    @cached_property
    def alone(self) -> CrossFit:
        return trusted_alone(self.material)

    @cached_property
    def checked(self) -> Tensor:
        """Whether a class has a trusted sample, so that its labels can be checked."""
        return torch.bincount(self.material.trusted_y, minlength=self.material.classes) > 0

    def trusted_alone(self) -> Outcome:
        fit = self.alone
        if self.material.classes:
            return self._outcome(fit, self._believed(fit.unseen))
        return self._outcome(fit, torch.zeros(len(self.material), device=self.material.device))

    def everything(self) -> Outcome:
        return self._trained(None)

    def self_training(self) -> Outcome:
        fit = self.alone
        for last in _rounds():
            fit = self._cross_fit(last, weight=self._believed(fit.unseen))
        return self._outcome(fit, self._believed(fit.unseen))

    def mended_labels(self) -> Outcome:
        return self._mended(None)

    def group_weights(self) -> Outcome:
        return self._trained(self._group_weight())

    def groups_and_labels(self) -> Outcome:
        return self._mended(self._group_weight())

    def sample_weights(self) -> Outcome:
        rows = torch.arange(len(self.material), device=self.material.device)
        return self._trained(learn(self.material, rows, len(rows)).weights)

    # ------------------------------------------------------------------------------------------------------- shared

    def _group_weight(self) -> Tensor:
        material = self.material
        assert material.groups is not None
        if self.groups is None:
            self.groups = learn(material, material.groups, material.group_count)
        return self.groups.weights[material.groups]

    def _trained(self, weight: Tensor | None) -> Outcome:
        fit = self._cross_fit(True, weight=weight)
        return self._outcome(
            fit, torch.ones(len(self.material), device=fit.unseen.device) if weight is None else weight
        )

    def _mended(self, weight: Tensor | None) -> Outcome:
        fit = self.alone
        for _ in range(ROUNDS):
            fit = self._cross_fit(False, weight=weight, losses=evident(self._chances(fit.unseen, weight)))
        belief = transition.posterior(fit.unseen, self._chances(fit.unseen, weight))
        fit = self._cross_fit(True, weight=weight, losses=soft(belief))
        return self._outcome(fit, torch.ones(len(belief), device=belief.device) if weight is None else weight, weight)

    def _cross_fit(self, last: bool, weight: Tensor | None = None, losses: Losses | None = None) -> CrossFit:
        return cross_fit(self.material, weight=weight, losses=losses, repeats=self._repeats if last else 1)

    def _believed(self, p: Tensor) -> Tensor:
        """The probability of each given label; 1 where it cannot be checked."""
        y = self.material.y
        return torch.where(self.checked[y], p.gather(1, y[:, None])[:, 0], 1.0)

    def _transition(self, p: Tensor, weight: Tensor | None) -> Tensor:
        material = self.material
        if material.groups is None:
            return transition.estimate(p, material.y, self.checked, weight)
        return transition.estimate_by_group(p, material.y, self.checked, material.groups, material.group_count, weight)

    def _chances(self, p: Tensor, weight: Tensor | None) -> Tensor:
        return transition.chances(self._transition(p, weight), self.material.y, self.material.groups)

    def _outcome(self, fit: CrossFit, weight: Tensor, counts: Tensor | None = None) -> Outcome:
        if not self.material.classes:
            return Outcome(fit, weight)
        found = self._transition(fit.unseen, counts)
        belief = transition.posterior(fit.unseen, transition.chances(found, self.material.y, self.material.groups))
        if found.ndim == 3:
            assert self.material.groups is not None
            shares = torch.bincount(self.material.groups, minlength=len(found)) / len(self.material)
            found = (shares[:, None, None] * found).sum(0)
        return Outcome(fit, weight, belief, found)


Ways = dict[str, Callable[[Bench], Outcome]]


def usual(material: Material) -> Ways:
    """Those that are tried unless asked otherwise. Where groups are known, single samples are not weighed."""
    known = ways(material)
    return {name: way for name, way in known.items() if name != SAMPLES or GROUPS not in known}


def ways(material: Material) -> Ways:
    """Those that apply: some need groups, some need classes."""
    found: Ways = {ALONE: Bench.trusted_alone, EVERYTHING: Bench.everything}
    if material.classes:
        found |= {"self-training": Bench.self_training, "mended labels": Bench.mended_labels}
    if material.groups is not None and material.group_count > 1:
        found[GROUPS] = Bench.group_weights
        if material.classes:
            found["groups and labels"] = Bench.groups_and_labels
    return found | {SAMPLES: Bench.sample_weights}


def _rounds() -> list[bool]:
    """Whether each round is the last."""
    return [False] * (ROUNDS - 1) + [True]
