"""What the conformance tests know of each algorithm: a row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import reference
import torch

import fsla
from fsla import Algorithm, CountedProblem, Point, Problem, StepBatches, algorithms
from fsla.steps import GradientDescent, Proximal, Schedule, SoftThreshold, StepSizes
from support import normal

PLAIN = fsla.steps.constant(outer_lr=0.05, inner_lr=0.3, adjoint_lr=0.3, new_grad_weight=0.5)
SERIES = {"hvp_steps": 3, "adjoint_lr": 0.3}
RANDOM_SERIES = {"num_terms": 3, "adjoint_lr": 0.3}


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
    sizes_own_steps: bool = False
    """Whether a step is of another size than the step sizes say, so that a torch optimiser cannot take it."""

    @property
    def reference_options(self) -> dict[str, Any]:
        return self.options if self.reference is None else self.reference


SOBA = {"grad": 1, "hvp": 1, "mixed_hvp": 1, "joint": 1, "outer_grad_omega": 1, "outer_grad_lam": 1}
SOBA_TWICE = {name: 2 * count for name, count in SOBA.items()}
SOBA_BY_DIFFERENCES = {"grad": 2, "outer_grad_omega": 1, "outer_grad_lam": 1}
SLOW = fsla.steps.constant(outer_lr=0.005, inner_lr=0.3, adjoint_lr=0.3, new_grad_weight=0.1)


def _aid(inner_steps: int, products: int) -> dict[str, int]:
    return {"grad": inner_steps, "outer_grad_omega": 1, "outer_grad_lam": 1, "hvp": products, "mixed_hvp": 1}


def _twice(products: int) -> dict[str, int]:
    return {"grad": 2, "outer_grad_omega": 2, "outer_grad_lam": 2, "hvp": 2 * products, "mixed_hvp": 2}


ROWS = {
    "fsla": Row(counts={"grad": 1, "outer_grad_omega": 1, "outer_grad_lam": 2, "hvp": 1, "mixed_hvp": 2}),
    "single_loop": Row(counts=_aid(1, 1)),
    "amigo": Row({"inner_steps": 3, "hvp_steps": 2}, _aid(3, 2)),
    "slip": Row(
        {"warm_up_steps": 2}, _aid(1, 1), rates=Schedule(0.05, 0.15, 0.15, 0.5, power=(0.8, 0, 0, 0)), near=2e-2
    ),
    "soba": Row(counts=SOBA),
    "ma_soba": Row(counts=SOBA),
    "saba": Row(counts=SOBA, reference={"inner_batches": 4, "outer_batches": 4}),
    "srba": Row({"refresh_period": 3}, SOBA_TWICE),
    "one_step": Row(counts=_aid(1, 0), near=None),
    "fdehbo": Row({"max_adjoint_norm": 40.0}, {"grad": 4, "outer_grad_omega": 2, "outer_grad_lam": 2}, exact=False),
    "hjfbio": Row({"max_adjoint_norm": 40.0}, SOBA_BY_DIFFERENCES, exact=False),
    "s_tfbo": Row(counts=SOBA, rates=fsla.steps.constant(10.0, 1.0, 1.0), near=0.05, sizes_own_steps=True),
    "bp": Row(
        {"inner_steps": 3},
        {"grad": 3, "outer_grad_omega": 2, "outer_grad_lam": 2, "hvp": 4, "mixed_hvp": 6, "joint": 4},
        {"inner_steps": 40, "restart": False},
    ),
    "ns": Row({"inner_steps": 1, "num_terms": 4, "adjoint_lr": 0.3}, _twice(3) | {"grad": 1}, {"num_terms": 40}),
    "cg": Row({"inner_steps": 1, "hvp_steps": 2}, _twice(2) | {"grad": 1}, {"hvp_steps": 6}),
    "itd_bio": Row(
        {"inner_steps": 3},
        {"grad": 3, "outer_grad_omega": 1, "outer_grad_lam": 1, "hvp": 2, "mixed_hvp": 3, "joint": 2},
        {"inner_steps": 40},
    ),
    "truncated_bp": Row(
        {"inner_steps": 4, "unroll_length": 2},
        {"grad": 4, "outer_grad_omega": 1, "outer_grad_lam": 1, "hvp": 1, "mixed_hvp": 2, "joint": 1},
        {"inner_steps": 40, "unroll_length": 40},
    ),
    "forward": Row(
        {"inner_steps": 2},
        {"grad": 2, "outer_grad_omega": 1, "outer_grad_lam": 1, "hvp": 4, "mixed_hvp_transpose": 4},
        {"inner_steps": 20},
        near=0.02,
    ),
    "rtho": Row(counts={"grad": 1, "outer_grad_omega": 1, "outer_grad_lam": 1, "hvp": 2, "mixed_hvp_transpose": 2}),
    "reversible": Row(
        {"inner_steps": 3, "decay": 0.8},
        {"grad": 6, "outer_grad_omega": 1, "outer_grad_lam": 1, "hvp": 3, "mixed_hvp": 3, "joint": 3},
        {"inner_steps": 25, "decay": 0.5},
        near=0.02,
    ),
    "bio_bred": Row(
        {"inner_steps": 3, "outer_update": Proximal(SoftThreshold(0.2))},
        {"grad": 3, "outer_grad_omega": 1, "outer_grad_lam": 1, "hvp": 2, "mixed_hvp": 3, "joint": 2},
        {"inner_steps": 40, "outer_update": GradientDescent()},
        reference={"inner_steps": 3, "weight": 0.2},
    ),
    "bda": Row(
        {"inner_steps": 3, "aggregation": 0.4},
        {"grad": 3, "outer_grad_omega": 4, "outer_grad_lam": 1, "hvp": 4, "mixed_hvp": 6, "joint": 4},
        {"inner_steps": 20, "aggregation": 1e-7},
        near=0.02,
    ),
    "bsa": Row(
        {"inner_steps": 2, "growth": 0.5} | RANDOM_SERIES,
        _aid(3, 0),
        {"num_terms": 30, "inner_steps": 1},
        SLOW,
        near=0.1,
        draws=True,
    ),
    "ttsa": Row(RANDOM_SERIES, _aid(1, 0), {"num_terms": 30}, SLOW, near=0.1, draws=True),
    "aid_bio": Row({"inner_steps": 2, "hvp_steps": 3}, _aid(2, 3), {"hvp_steps": 6}),
    "stocbio": Row({"inner_steps": 2} | SERIES, _aid(2, 3), {"hvp_steps": 40}),
    "sbio_bred": Row(
        {"inner_steps": 2} | SERIES, _aid(2, 3), {"hvp_steps": 40, "outer_update": GradientDescent()}, positive=True
    ),
    "implicit_neumann": Row({"inner_steps": 2} | SERIES, _aid(2, 3), {"hvp_steps": 40}),
    "t1_t2": Row({"inner_steps": 2, "adjoint_lr": 0.2}, _aid(2, 0), near=None),
    "aid_fp": Row({"inner_steps": 2, "num_terms": 3, "adjoint_lr": 0.3}, _aid(2, 2), {"num_terms": 40}),
    "aid_cg": Row({"inner_steps": 2, "hvp_steps": 3}, _aid(2, 3), {"hvp_steps": 6}),
    "hoag": Row({"tolerance": 0.01, "decay": 0.9, "max_iter": 20}, {}, {"max_iter": 100}, sizes_own_steps=True),
    "sustain": Row(RANDOM_SERIES, _twice(0), {"num_terms": 30}, SLOW, near=0.1, draws=True),
    "mrbo": Row(SERIES, _twice(3), {"hvp_steps": 40}),
    "vrbo": Row(
        {"inner_steps": 1, "refresh_period": 2} | SERIES,
        {name: 2 * count for name, count in _twice(3).items()},
        {"hvp_steps": 30},
        near=1e-5,
    ),
    "biadam": Row(
        RANDOM_SERIES | {"decay": 0.8, "eps": 0.1},
        _aid(1, 0),
        {"num_terms": 30, "eps": 1.0},
        SLOW,
        near=0.1,
        draws=True,
    ),
    "vr_biadam": Row(
        RANDOM_SERIES | {"decay": 0.8, "eps": 0.1},
        _twice(0),
        {"num_terms": 30, "eps": 1.0},
        SLOW,
        near=0.1,
        draws=True,
    ),
    "accbo": Row(
        {"gamma": 0.5, "average": 0.7} | RANDOM_SERIES,
        {"grad": 1, "outer_grad_omega": 2, "outer_grad_lam": 2, "mixed_hvp": 2},
        {"num_terms": 30},
        fsla.steps.constant(0.002, 0.1, 0.1, 0.02),
        near=0.15,
        draws=True,
    ),
    "stable": Row(
        {"mu": 0.5}, {"grad": 1, "outer_grad_omega": 1, "outer_grad_lam": 1, "hvp": 6, "mixed_hvp": 6, "joint": 6}, {}
    ),
    "svrb": Row(
        {"mu": 0.5}, {"grad": 2, "outer_grad_omega": 2, "outer_grad_lam": 2, "hvp": 6, "mixed_hvp": 6, "joint": 6}, {}
    ),
    "penalty": Row(
        {"inner_steps": 2, "rho": 1.0, "grow": 1.1, "bound": 2.0, "shrink": 0.9},
        {"grad": 3, "outer_grad_omega": 3, "outer_grad_lam": 1, "hvp": 3, "mixed_hvp": 1},
        {"inner_steps": 20, "grow": 1.0, "bound": 1e3, "shrink": 1.0},
        fsla.steps.constant(0.05, 0.08, 0.0),
    ),
    "f2sa": Row(
        {"inner_steps": 2},
        {"grad": 4, "outer_grad_omega": 2, "outer_grad_lam": 1, "forward": 2},
        {"inner_steps": 40},
        fsla.steps.constant(0.05, 0.3, 3e-5),
        near=1e-3,
    ),
    "bome": Row(
        {"inner_steps": 2},
        {"grad": 2, "outer_grad_omega": 1, "outer_grad_lam": 1, "forward": 1},
        {"inner_steps": 20},
        fsla.steps.constant(0.02, 0.1, 0.0, 0.5),
        near=0.05,
    ),
    "sama": Row(
        {"inner_steps": 2, "b1": 0.9, "b2": 0.99, "eps": 1e-3},
        {"grad": 2, "outer_grad_omega": 1, "outer_grad_lam": 1, "forward": 2},
        near=None,
        exact=False,
    ),
}


def row_of(name: str) -> Row:
    """Return the row of a registered algorithm."""
    if name not in ROWS:
        pytest.fail(
            f"The algorithm {name!r} has no row. If the paper asks for the same derivatives as this line, "
            "add it to ROWS in tests/conformance/rows.py, with the algorithm's options:\n\n"
            f'    "{name}": Row(counts={count_calls(algorithms.get_algorithm(name)(step_sizes=PLAIN))}),\n'
        )
    return ROWS[name]


def as_problem(plain: reference.Plain) -> Problem:
    """The reference's problem, for automatic differentiation; batches are numbers."""
    a = {key: torch.from_numpy(array) for key, array in plain.arrays.items()}

    def inner(lam, omega, b):
        x = lam["x"]
        w = omega["w"]
        coupling = x @ a["J"][b] @ (w + 0.1 * w**2)
        return w @ a["H"][b] @ w / 2 + coupling - a["c"][b] @ w + 0.05 * (w**4).sum()

    def outer(lam, omega, b):
        x = lam["x"]
        w = omega["w"]
        loss = w @ a["Q"][b] @ w / 2 - a["q"][b] @ w + 0.02 * (w**4).sum()
        return loss + x @ a["R"][b] @ w + x @ a["S"][b] @ x / 2 - a["s"][b] @ x

    return Problem(inner, outer)


def count_calls(algorithm: Algorithm[Any]) -> dict[str, int]:
    """Return the oracle calls of the second step, on five different batches."""
    counted = CountedProblem(as_problem(reference.Plain.random(seed=3)))
    batches = StepBatches.of((0,), (1,), (2,), (3,), (0,), seed=1)
    at = Point({"x": normal(2).abs()}, {"w": normal(3, seed=1)})
    state = algorithm.step(counted, algorithm.init(counted, at, batches), batches)
    _, calls, _ = counted.counting(lambda: algorithm.step(counted, state, batches))
    return {key: n for key, n in vars(calls).items() if n and key not in ("inner_views", "outer_views")}


def names(selects: Callable[[Row], bool] = lambda row: True) -> list[str]:
    """Return the registered algorithms whose rows are wanted; those without a row are for a test of their own."""
    return [name for name in algorithms.list_algorithms() if name in ROWS and selects(ROWS[name])]


def names_where(holds: Callable[[Algorithm[Any]], bool]) -> list[str]:
    """Return the algorithms of which something holds; one that cannot be built fails in the tests of all."""

    def selects(name: str) -> bool:
        try:
            return holds(make(name))
        except Exception:
            return False

    return list(filter(selects, names()))


def make(name: str, rates: StepSizes[Any] = PLAIN, **more: Any) -> Algorithm[Any]:
    """Return an algorithm with the options of its row."""
    return algorithms.get_algorithm(name)(step_sizes=rates, **(row_of(name).options | more))


def letter_options(name: str) -> dict[str, Any]:
    """Return the options of an algorithm that numbers its batches, for four of each kind."""
    return {"inner_batches": 4, "outer_batches": 4} if name == "saba" else {}


def begin(name: str, at: Point) -> Point:
    """Return a start that suits the algorithm."""
    return Point({key: t.abs() + 0.1 for key, t in at.lam.items()}, at.omega) if row_of(name).positive else at
