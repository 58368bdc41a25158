"""How labels were mixed up: T[c, y], the chance that a sample of class c is given the label y, by EM.

From a network's p(c | x) and the given labels, q(c | x, y) ∝ p(c | x) T[c, y] is what the true label may be, and T is
re-estimated from q; a small prior on the diagonal keeps T from wandering where a class is rare. The label of a class
that cannot be checked, having neither a trusted sample nor any that stands in, is taken as right and never suggested.
"""

from __future__ import annotations

import torch
from torch import Tensor

ITERATIONS = 30
DIAGONAL = 2.0
SMOOTH = 0.1
SHARED = 20.0
"""How many samples of a class the common T counts for in the T of a group."""


def chances(transition: Tensor, y: Tensor, groups: Tensor | None = None) -> Tensor:
    """e[..., i, c] = T[..., c, y_i], of the one T or of that of each sample's group, T[..., g, c, y]."""
    return transition[..., y].mT if groups is None else transition[..., groups, :, y].movedim(0, -2)


def posterior(p: Tensor, e: Tensor) -> Tensor:
    """q(c | x, y) from p(c | x) and the chances of the given labels, a row a sample."""
    q = p.clamp(min=1e-12) * e
    return q / q.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)


def estimate(
    p: Tensor, y: Tensor, checked: Tensor, weight: Tensor | None = None, prior: Tensor | None = None
) -> Tensor:
    """T by EM; `checked` says of each class whether its labels can be checked.

    All but y may have further first dimensions, of several estimates at once.
    """
    eye = torch.eye(p.shape[-1], device=p.device, dtype=p.dtype)
    prior = DIAGONAL * eye + SMOOTH if prior is None else prior
    allowed = torch.where(checked[..., :, None] & checked[..., None, :], 1.0, eye)
    given = eye[y] if weight is None else weight[..., None] * eye[y]
    transition = _rows(allowed * (0.8 * eye + 0.2 / max(1, len(eye) - 1) * (1 - eye)))
    for _ in range(ITERATIONS):
        q = posterior(p, chances(transition, y))
        transition = _rows(allowed * (q.mT @ given + prior))
    return transition


def estimate_by_group(
    p: Tensor, y: Tensor, checked: Tensor, groups: Tensor, count: int, weight: Tensor | None = None
) -> Tensor:
    """A T for each group, drawn towards the common one where a group has few samples of a class."""
    common = estimate(p, y, checked, weight)
    found = []
    for group in range(count):
        own = groups == group
        found.append(estimate(p[..., own, :], y[own], checked, prior=SHARED * common))
    return torch.stack(found, -3)


def _rows(counts: Tensor) -> Tensor:
    return counts / counts.sum(-1, keepdim=True)
