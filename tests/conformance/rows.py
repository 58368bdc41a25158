"""What the conformance tests know of each algorithm: a row each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import fsla
from fsla.steps import Schedule
from fsla.steps import _updates as update

PLAIN = fsla.steps.constant(alpha=0.05, tau=0.3, beta=0.3, eta=0.5)
SERIES = {"Q": 3, "step": 0.3}


@dataclass(frozen=True)
class Row:
    """An algorithm's options, as far as it has any."""

    options: dict[str, Any] = field(default_factory=dict)
    """Short ones, for all checks but convergence."""
    counts: dict[str, int] = field(default_factory=dict)
    """The oracle calls of a step with the short options, on five different batches."""
    long: dict[str, Any] = field(default_factory=dict)
    """What it needs more of to converge."""
    rates: Schedule = PLAIN
    """With which it converges on the quadratic."""
    near: float | None = 1e-6
    """The relative distance to the minimiser of f that it must reach there; None for one that goes elsewhere."""
    draws: bool = False
    """Whether it draws the length of a series, so that its samples need seeds and its counts vary."""
    positive: bool = False
    """Whether λ must be positive."""
    reference: dict[str, Any] | None = None
    """Options of the reference in NumPy, where they are not these."""
    exact: bool = True
    """Whether its products are exact; a difference has an error."""

    @property
    def reference_options(self) -> dict[str, Any]:
        return self.options if self.reference is None else self.reference


SOBA = {"grad": 1, "hvp": 1, "cross": 1, "joint": 1, "d_omega": 1, "d_lam": 1}
SOBA_TWICE = {name: 2 * count for name, count in SOBA.items()}
SOBA_BY_DIFFERENCES = {"grad": 2, "d_omega": 1, "d_lam": 1}
SLOW = fsla.steps.constant(alpha=0.005, tau=0.3, beta=0.3, eta=0.1)


def _aid(T: int, products: int) -> dict[str, int]:
    return {"grad": T, "d_omega": 1, "d_lam": 1, "hvp": products, "cross": 1}


def _twice(products: int) -> dict[str, int]:
    return {"grad": 2, "d_omega": 2, "d_lam": 2, "hvp": 2 * products, "cross": 2}


ROWS = {
    "fsla": Row(counts={"grad": 1, "d_omega": 1, "d_lam": 2, "hvp": 1, "cross": 2}),
    "single_loop": Row(counts=_aid(1, 1)),
    "amigo": Row({"T": 3, "Q": 2}, _aid(3, 2)),
    "slip": Row({"T0": 2}, _aid(1, 1), rates=Schedule(0.05, 0.15, 0.15, 0.5, power=(0.8, 0, 0, 0)), near=2e-2),
    "soba": Row(counts=SOBA),
    "ma_soba": Row(counts=SOBA),
    "saba": Row(counts=SOBA, reference={"inner_batches": 4, "outer_batches": 4}),
    "srba": Row({"period": 3}, SOBA_TWICE),
    "fdehbo": Row({"radius": 40.0}, {"grad": 4, "d_omega": 2, "d_lam": 2}, exact=False),
    "hjfbio": Row({"radius": 40.0}, SOBA_BY_DIFFERENCES, exact=False),
    "s_tfbo": Row(counts=SOBA, rates=fsla.steps.constant(10.0, 1.0, 1.0), near=0.05),
    "bp": Row(
        {"T": 3},
        {"grad": 3, "d_omega": 2, "d_lam": 2, "hvp": 4, "cross": 6, "joint": 4},
        {"T": 40, "restart": False},
    ),
    "ns": Row(
        {"T": 1, "K": 4, "beta": 0.3}, _twice(3) | {"grad": 1}, {"K": 40}, reference={"T": 1, "K": 4, "step": 0.3}
    ),
    "cg": Row({"T": 1, "K": 2}, _twice(2) | {"grad": 1}, {"K": 6}),
    "itd_bio": Row({"T": 3}, {"grad": 3, "d_omega": 1, "d_lam": 1, "hvp": 2, "cross": 3, "joint": 2}, {"T": 40}),
    "truncated_bp": Row(
        {"T": 4, "R": 2}, {"grad": 4, "d_omega": 1, "d_lam": 1, "hvp": 1, "cross": 2, "joint": 1}, {"T": 40, "R": 40}
    ),
    "forward": Row({"T": 2}, {"grad": 2, "d_omega": 1, "d_lam": 1, "hvp": 4, "cross_t": 4}, {"T": 20}, near=0.02),
    "rtho": Row(counts={"grad": 1, "d_omega": 1, "d_lam": 1, "hvp": 2, "cross_t": 2}),
    "reversible": Row(
        {"T": 3, "decay": 0.8},
        {"grad": 6, "d_omega": 1, "d_lam": 1, "hvp": 3, "cross": 3, "joint": 3},
        {"T": 25, "decay": 0.5},
        near=0.02,
    ),
    "bio_bred": Row(
        {"T": 3, "outer": update.Proximal(update.SoftThreshold(0.2))},
        {"grad": 3, "d_omega": 1, "d_lam": 1, "hvp": 2, "cross": 3, "joint": 2},
        {"T": 40, "outer": update.GradientDescent()},
        reference={"T": 3, "weight": 0.2},
    ),
    "bda": Row(
        {"T": 3, "a": 0.4},
        {"grad": 6, "d_omega": 1, "d_lam": 1, "hvp": 4, "cross": 6, "joint": 4},
        {"T": 20, "a": 1e-7},
        near=0.02,
    ),
    "bsa": Row({"T": 2, "growth": 0.5} | SERIES, _aid(3, 0), {"Q": 30, "T": 1}, SLOW, near=0.1, draws=True),
    "ttsa": Row(SERIES, _aid(1, 0), {"Q": 30}, SLOW, near=0.1, draws=True),
    "aid_bio": Row({"T": 2, "Q": 3}, _aid(2, 3), {"Q": 6}),
    "stocbio": Row({"T": 2} | SERIES, _aid(2, 3), {"Q": 40}),
    "sbio_bred": Row(
        {"T": 2} | SERIES, _aid(2, 3), {"Q": 40, "outer": update.GradientDescent()}, positive=True
    ),
    "implicit_neumann": Row({"T": 2} | SERIES, _aid(2, 3), {"Q": 40}),
    "t1_t2": Row({"T": 2, "step": 0.2}, _aid(2, 0), near=None),
    "aid_fp": Row({"T": 2, "K": 3, "step": 0.3}, _aid(2, 2), {"K": 40}),
    "aid_cg": Row({"T": 2, "K": 3}, _aid(2, 3), {"K": 6}),
    "hoag": Row({"tolerance": 0.01, "decay": 0.9, "most": 20}, {}, {"most": 100}),
    "sustain": Row(SERIES, _twice(0), {"Q": 30}, SLOW, near=0.1, draws=True),
    "mrbo": Row(SERIES, _twice(3), {"Q": 40}),
    "vrbo": Row(
        {"m": 1, "period": 2} | SERIES, {name: 2 * count for name, count in _twice(3).items()}, {"Q": 30}, near=1e-5
    ),
    "biadam": Row(
        SERIES | {"decay": 0.8, "floor": 0.1}, _aid(1, 0), {"Q": 30, "floor": 1.0}, SLOW, near=0.1, draws=True,
        reference=SERIES | {"decay": 0.8, "floor": 0.1},
    ),
    "vr_biadam": Row(
        SERIES | {"decay": 0.8, "floor": 0.1}, _twice(0), {"Q": 30, "floor": 1.0}, SLOW, near=0.1, draws=True,
        reference=SERIES | {"decay": 0.8, "floor": 0.1},
    ),
    "accbo": Row(
        {"gamma": 0.5, "average": 0.7} | SERIES, {"grad": 1, "d_omega": 2, "d_lam": 2, "cross": 2}, {"Q": 30},
        fsla.steps.constant(0.002, 0.1, 0.1, 0.02), near=0.15, draws=True,
    ),
    "stable": Row(
        {"mu": 0.5}, {"grad": 1, "d_omega": 1, "d_lam": 1, "hvp": 6, "cross": 6, "joint": 6}, {}
    ),
    "svrb": Row(
        {"mu": 0.5}, {"grad": 2, "d_omega": 2, "d_lam": 2, "hvp": 6, "cross": 6, "joint": 6}, {}
    ),
    "penalty": Row(
        {"T": 2, "rho": 1.0, "grow": 1.1, "bound": 2.0, "shrink": 0.9},
        {"grad": 3, "d_omega": 3, "d_lam": 1, "hvp": 3, "cross": 1},
        {"T": 20, "grow": 1.0, "bound": 1e3, "shrink": 1.0},
        fsla.steps.constant(0.05, 0.08, 0.0),
    ),
    "f2sa": Row(
        {"T": 2}, {"grad": 4, "d_omega": 2, "d_lam": 1, "forward": 2}, {"T": 40},
        fsla.steps.constant(0.05, 0.3, 3e-5), near=1e-3,
    ),
    "bome": Row(
        {"T": 2}, {"grad": 3, "d_omega": 1, "d_lam": 1, "forward": 1}, {"T": 20},
        fsla.steps.constant(0.02, 0.1, 0.0, 0.5), near=0.05,
    ),
    "sama": Row(
        {"T": 2, "first": 0.9, "second": 0.99, "floor": 1e-3},
        {"grad": 2, "d_omega": 1, "d_lam": 1, "forward": 2},
        near=None,
        exact=False,
    ),
}  # fmt: skip
