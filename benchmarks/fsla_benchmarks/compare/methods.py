"""The methods of the comparison: how each receives batches, which of its rates are searched, and in what units.

A new algorithm of `fsla.algorithms` is one row of METHODS. Options that a method's authors leave open are the
same for all: ten inner steps, ten products of a series.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from fsla.algorithms import Algorithm, get_algorithm, list_algorithms
from fsla.steps import Adaptive, Automatic, Schedule
from fsla_benchmarks.compare.task import Task

Samples = Literal["independent", "shared", "full", "numbered", "refreshed", "led"]
"""Batches: five of their own; one of each level; all samples; one of N fixed ones that says which; all samples at every
tenth step; all samples and then a batch for each inner step."""
Unit = Literal["slope", "curvature", "length", "coordinate"]
"""What a rate is in: one over the size of the hypergradient, or over the curvature of G, both at the start; or, for
steps that do not know the size of the gradient, how far the variable moves, as a whole or in each coordinate."""
Setting = dict[str, Any]
PERIOD = 10
THIRD = (1 / 3, 1 / 3, 1 / 3, 2 / 3)
"""The powers by which rates of methods with STORM fall in their papers: step sizes as a cube root, weights as its
square."""
RANGES = {"outer_lr": (1e-3, 3.0), "inner_lr": (0.03, 1.0), "adjoint_lr": (0.03, 1.0), "new_grad_weight": (0.03, 1.0)}
"""Between which multiples of its unit each rate is drawn, log-uniformly."""


@dataclass(frozen=True)
class Method:
    """How an algorithm takes part. `rates` names what is searched; without any there is no search."""

    samples: Samples
    rates: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    series: bool = False
    """Whether the searched adjoint_lr is an option of the algorithm too: the step of a Neumann series."""
    outer_unit: Unit = "slope"
    inner_unit: Unit = "curvature"
    powers: tuple[float | tuple[float, ...], ...] = (0.0, 0.5)
    """Of these one is drawn, by which the rates fall."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    needs_seed: bool = False
    """Whether steps must have a seed, which draws the length of a series."""
    again: bool = False
    """Whether products are taken on the batches of the inner steps."""
    of_task: Callable[[Task], Mapping[str, Any]] = lambda task: {}
    """Options that depend on the problem."""
    most_n: float = math.inf
    most_p: float = math.inf
    """The most coordinates of ω, and of λ, that it can be asked to carry matrices for."""
    automatic: str = ""
    """The algorithm that runs with automatic step sizes."""

    @property
    def searched(self) -> tuple[str, ...]:
        return tuple(self.rates.split())

    def takes(self, task: Task) -> bool:
        return task.n <= self.most_n and task.p <= self.most_p


OI = "outer_lr inner_lr"
ALL = f"{OI} adjoint_lr"
WEIGHT = "new_grad_weight"
TEN = {"inner_steps": 10}
PRODUCTS = {"hvp_steps": 10}
TEN_TEN = {**TEN, **PRODUCTS}
TERMS = {"num_terms": 10}
METHODS: dict[str, Method] = {
    "fsla_automatic": Method("shared", options={"momentum": "none"}, automatic="fsla"),
    "soba_automatic": Method("shared", automatic="soba"),
    "fsla": Method("independent", f"{ALL} {WEIGHT} power"),
    "single_loop": Method("full", ALL),
    "amigo": Method("independent", f"{ALL} power", TEN_TEN),
    "slip": Method("independent", f"{ALL} {WEIGHT} power", {"warm_up_steps": 20}, outer_unit="length"),
    "soba": Method("shared", f"{ALL} power"),
    "ma_soba": Method("shared", f"{ALL} {WEIGHT} power"),
    "saba": Method("numbered", ALL, of_task=lambda task: _tables(task)),
    "srba": Method("refreshed", ALL, {"refresh_period": PERIOD}),
    "fdehbo": Method("shared", f"{ALL} {WEIGHT} power", of_task=lambda task: _radius(task), powers=(0.0, THIRD)),
    "hjfbio": Method("full", ALL, of_task=lambda task: _radius(task)),
    "one_step": Method("shared", f"{ALL} power"),
    "s_tfbo": Method("shared"),
    "bp": Method("independent", f"{OI} {WEIGHT} power", {**TEN, "restart": False}, again=True),
    "ns": Method("independent", f"{ALL} {WEIGHT} power", TERMS, series=True),
    "cg": Method("independent", f"{OI} {WEIGHT} power", PRODUCTS),
    "itd_bio": Method("full", OI, TEN),
    "truncated_bp": Method("independent", f"{OI} power", {**TEN, "unroll_length": 5}, again=True),
    "forward": Method("independent", f"{OI} power", TEN, again=True, most_p=64),
    "rtho": Method("independent", f"{OI} power", again=True, most_p=64),
    "reversible": Method("independent", f"{OI} power", TEN, ranges={"inner_lr": (0.1, 5.0)}),
    "bio_bred": Method("full", OI, {**TEN, "outer_update": Adaptive()}, outer_unit="coordinate"),
    "bda": Method("independent", f"{ALL} power", TEN),
    "bsa": Method("independent", f"{ALL} power", TERMS, series=True, needs_seed=True),
    "ttsa": Method("independent", f"{ALL} power", TERMS, True, powers=(0.0, (0.6, 0.4, 0.0, 0.0)), needs_seed=True),
    "aid_bio": Method("full", OI, TEN_TEN),
    "stocbio": Method("independent", f"{ALL} power", TEN_TEN, series=True),
    "sbio_bred": Method(
        "independent", f"{ALL} power", {**TEN_TEN, "outer_update": Adaptive()}, True, outer_unit="coordinate"
    ),
    "implicit_neumann": Method("independent", f"{ALL} power", PRODUCTS, series=True),
    "t1_t2": Method("independent", f"{ALL} power", series=True),
    "aid_fp": Method("full", ALL, {**TEN, **TERMS}, series=True),
    "aid_cg": Method("full", OI, TEN_TEN),
    "hoag": Method("full", OI),
    "sustain": Method("independent", f"{ALL} {WEIGHT} power", TERMS, True, powers=(0.0, THIRD), needs_seed=True),
    "mrbo": Method("independent", f"{ALL} {WEIGHT} power", PRODUCTS, True, powers=(0.0, THIRD)),
    "vrbo": Method("led", ALL, {"hvp_steps": 10, "inner_steps": 3, "refresh_period": PERIOD}, series=True),
    "biadam": Method(
        "independent",
        f"{ALL} {WEIGHT} power",
        TERMS,
        True,
        outer_unit="coordinate",
        inner_unit="length",
        needs_seed=True,
    ),
    "vr_biadam": Method(
        "independent", f"{ALL} {WEIGHT} power", TERMS, True, "coordinate", "length", (0.0, THIRD), needs_seed=True
    ),
    "accbo": Method(
        "independent", f"{ALL} {WEIGHT} power", TERMS, True, outer_unit="length", powers=(0.0, THIRD), needs_seed=True
    ),
    "stable": Method("independent", f"{OI} {WEIGHT} power", most_n=64),
    "svrb": Method("independent", f"{OI} {WEIGHT} power", powers=(0.0, THIRD), most_n=64),
    "penalty": Method("independent", f"{OI} power", TEN, of_task=lambda task: {"rho": 1 / task.curvature}),
    "f2sa": Method(
        "independent", f"{ALL} power", powers=(0.0, (5 / 7, 4 / 7, 5 / 7, 0.0)), ranges={"adjoint_lr": (1e-3, 0.1)}
    ),
    "bome": Method("full", f"{OI} {WEIGHT}", TEN),
    "sama": Method("independent", f"{OI} power", inner_unit="coordinate"),
}
METHODS |= {name: Method("independent", f"{ALL} power") for name in list_algorithms() if name not in METHODS}


def label(name: str) -> str:
    return name.replace("_automatic", ", automatic")


def _tables(task: Task) -> dict[str, int]:
    return {"inner_batches": len(task.inner_batches), "outer_batches": len(task.outer_batches)}


def _radius(task: Task) -> dict[str, float]:
    """A ball that holds v at the start ten times over."""
    return {"max_adjoint_norm": 10 * task.scales.adjoint}


def make(name: str, task: Task, setting: Setting) -> Algorithm[Any]:
    """The algorithm with its options and these rates."""
    method = METHODS[name]
    options = {**method.options, **method.of_task(task)}
    if method.automatic:
        return get_algorithm(method.automatic)(Automatic(), **options)
    if method.series:
        options["adjoint_lr"] = setting["adjoint_lr"]
    power = setting["power"]
    rates = {rate: setting[rate] for rate in RANGES}
    schedule = Schedule(**rates, power=tuple(power) if isinstance(power, list | tuple) else power)
    return get_algorithm(name)(schedule, **options)


def settings(name: str, task: Task, trials: int) -> list[Setting]:
    """So many settings, drawn from a seed that depends on the problem and the method alone."""
    method = METHODS[name]
    generator = torch.Generator().manual_seed(seed_of("search", task.name, name))
    units = _units(method, task)
    sampled = []
    for _ in range(trials):
        setting: Setting = {}
        for rate, default in RANGES.items():  # all are drawn, whether searched or not
            low, high = method.ranges.get(rate, default)
            drawn = low * (high / low) ** float(torch.rand((), generator=generator, dtype=torch.float64))
            setting[rate] = units[rate] * drawn if rate in method.searched else 1.0
        power = method.powers[int(torch.randint(len(method.powers), (), generator=generator))]
        setting["power"] = power if "power" in method.searched else 0.0
        sampled.append(setting)
    return sampled


def _units(method: Method, task: Task) -> dict[str, float]:
    """The size of one unit of each rate."""
    step = task.scales.reach / 10  # of ω, where the size of a step is not that of the gradient
    of_lam = {"slope": 1 / task.scales.slope, "length": math.sqrt(task.p), "coordinate": 1.0}
    of_omega = {"curvature": 1 / task.curvature, "length": step, "coordinate": step / math.sqrt(task.n)}
    return {
        "outer_lr": of_lam[method.outer_unit],
        "inner_lr": of_omega[method.inner_unit],
        "adjoint_lr": 1 / task.curvature,
        "new_grad_weight": 1.0,
    }


def seed_of(*parts: object) -> int:
    """A whole number that depends on these parts alone, on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")
