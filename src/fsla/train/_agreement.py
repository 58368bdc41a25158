"""Whether two ways to take a step agree.

    ‖a - b‖ ≤ near ‖a - start‖ + few eps ‖a‖      for each of λ, ω, v and d

Where the terms of a part cancel, as those of d do near a minimum, rounding is large beside what is left of them. So
what fails is compared once more with what the step itself makes of a change of its start by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fsla.algorithms._alternating import State
from fsla.problems._nest import map_tensors, tensors


class Tolerance(NamedTuple):
    """The `near` of the formula in single (or less) and in double precision, and its `few`."""

    single: float
    double: float
    few: float


SAME_KERNELS = Tolerance(1e-4, 1e-9, 100.0)
"""For a program: it calls the kernels of the step itself."""
OTHER_KERNELS = Tolerance(5e-2, 1e-3, 1000.0)
"""For a compiler, or a GPU that adds in no fixed order: rounding may put a ReLU on its other side."""
AS_ROUNDING = 100.0


def difference(start: State, a: State, b: State, tolerance: Tolerance, step: Callable[[State], State]) -> str | None:
    """The part in which b does not agree with a = step(start), or None if it agrees."""
    before, one, two = map(_parts, (start, a, b))
    nudged: dict[str, list[Tensor]] | None = None
    for name, expected in one.items():
        gap = _norm(expected, two[name])
        size = _norm(expected)
        single = any(t.dtype != torch.float64 for t in expected)
        eps = torch.finfo(torch.float32 if single else torch.float64).eps
        moved = _norm(expected, before[name]) if len(before[name]) == len(expected) else size
        if gap <= (tolerance.single if single else tolerance.double) * moved + tolerance.few * eps * size:
            continue
        nudged = nudged or _parts(step(map_tensors(_nudge, start)))
        if not gap <= AS_ROUNDING * _norm(expected, nudged[name]):
            return name
    return None


def is_finite(state: State) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors(state[1:]))


def _parts(state: State) -> dict[str, list[Tensor]]:
    omega = (state.at.omega, state.at.trail, state.inner)
    nests = {"lam": (state.at.lam, state.outer), "omega": omega, "v": state.memory, "d": state.d}
    return {name: [t if t.is_floating_point() else t.double() for t in tensors(x)] for name, x in nests.items()}


def _norm(a: list[Tensor], b: list[Tensor] | None = None) -> float:
    """‖a‖ or ‖a - b‖, NaN where anything is."""
    gaps = a if b is None else [x - y for x, y in zip(a, b, strict=True)]
    return float(torch.stack(torch._foreach_norm(gaps, 2, dtype=torch.float64)).norm()) if gaps else 0.0


def _nudge(t: Tensor) -> Tensor:
    """The tensor, every second number of which is larger by one rounding unit, the others smaller."""
    if not t.is_floating_point():
        return t
    signs = 1 - 2 * (torch.arange(t.numel(), device=t.device) % 2)
    return t * (1 + torch.finfo(t.dtype).eps * signs.to(t.dtype)).reshape(t.shape)
