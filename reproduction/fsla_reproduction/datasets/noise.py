"""Wrong labels on purpose: which samples, which label instead, and the exact mask of what changed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsla._checks import pick

KINDS = {
    "uniform": "a label drawn anew from all classes, so that one in C stays right: the paper's reading",
    "wrong": "a label drawn from the other classes",
    "pair": "the next class, for each class the same",
}


class Noise(NamedTuple):
    """Labels after corruption, and which of them differ from the true ones."""

    labels: Tensor
    changed: Tensor


def corrupt(labels: Tensor, classes: int, kind: str, rate: float, generator: torch.Generator) -> Noise:
    """Corrupt `rate` of the labels, rounded to whole samples; which ones is drawn from the generator."""
    pick(kind, KINDS, "kind of label noise")
    if not 0 <= rate <= 1:
        raise ValueError(
            f"The share of corrupted labels must lie between 0 and 1. Got {rate}: of {len(labels)} samples, "
            f"{rate * len(labels):.0f} would be corrupted."
        )
    if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        raise ValueError(
            f"Labels must lie between 0 and {classes - 1}. Got {int(labels.min())} to {int(labels.max())}."
        )
    chosen = torch.randperm(len(labels), generator=generator)[: round(rate * len(labels))]
    if kind == "pair":
        shift = torch.ones(len(chosen), dtype=labels.dtype)
    else:
        shift = torch.randint(1 if kind == "wrong" else 0, classes, (len(chosen),), generator=generator)
    noisy = labels.clone()
    noisy[chosen] = (labels[chosen] + shift) % classes
    return Noise(noisy, noisy != labels)


def long_tail(labels: Tensor, classes: int, ratio: float, generator: torch.Generator) -> Tensor:
    """Return indices of a subset whose class sizes fall geometrically, the first class `ratio` times the last."""
    if not ratio >= 1:
        raise ValueError(f"The ratio of the largest to the smallest class must be at least 1. Got {ratio} instead.")
    counts = torch.bincount(labels, minlength=classes)
    selected = []
    for c in range(classes):
        members = torch.nonzero(labels == c)[:, 0]
        keep = max(1, round(float(counts.min()) * ratio ** (-c / max(1, classes - 1)))) if len(members) else 0
        selected.append(members[torch.randperm(len(members), generator=generator)[:keep]])
    order = torch.cat(selected)
    return order[torch.randperm(len(order), generator=generator)]
