"""The methods of the comparison: how each is given batches, which of its rates are searched, and in what units.

A new algorithm of `fsla.algorithms.ALL` is one row of METHODS. Options that a method's authors leave open are the
same for all: ten inner steps, ten products of a series.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from fsla import algorithms
from fsla.algorithms import Algorithm
from fsla.steps import Adaptive, Schedule
from fsla.train import FSLA, SOBA, BilevelOptimizer
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
"""The powers by which rates of methods with STORM fall in their papers: α, τ, β as a cube root, η as its square."""
RANGES = {"alpha": (1e-3, 3.0), "tau": (0.03, 1.0), "beta": (0.03, 1.0), "eta": (0.03, 1.0)}
"""Between which multiples of its unit each rate is drawn, log-uniformly."""


@dataclass(frozen=True)
class Method:
    """How an algorithm takes part. `rates` names what is searched; without any there is no search."""

    samples: Samples
    rates: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    step: str = ""
    """The option that is given the searched β: the step of a Neumann series."""
    alpha: Unit = "slope"
    tau: Unit = "curvature"
    powers: tuple[float | tuple[float, ...], ...] = (0.0, 0.5)
    """Of these one is drawn, by which the rates fall."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    seeded: bool = False
    """Whether samples must have a seed, which draws the length of a series."""
    again: bool = False
    """Whether products are taken on the batches of the inner steps."""
    of_task: Callable[[Task], Mapping[str, Any]] = lambda task: {}
    """Options that depend on the problem."""
    most_n: float = math.inf
    most_p: float = math.inf
    """The most coordinates of ω, and of λ, that it can be asked to carry matrices for."""
    automatic: type[BilevelOptimizer] | None = None
    """A class of the front end with automatic steps, in the place of an algorithm."""

    @property
    def searched(self) -> tuple[str, ...]:
        return tuple(self.rates.split())

    def takes(self, task: Task) -> bool:
        return task.n <= self.most_n and task.p <= self.most_p


ABT = "alpha beta tau"
TEN = {"T": 10, "Q": 10}
TEN_K = {"T": 10, "K": 10}
METHODS: dict[str, Method] = {
    "fsla_automatic": Method("shared", automatic=FSLA),
    "soba_automatic": Method("shared", automatic=SOBA),
    "fsla": Method("independent", f"{ABT} eta power"),
    "single_loop": Method("full", ABT),
    "amigo": Method("independent", f"{ABT} power", TEN),
    "slip": Method("independent", f"{ABT} eta power", {"T0": 20}, alpha="length"),
    "soba": Method("shared", f"{ABT} power"),
    "ma_soba": Method("shared", f"{ABT} eta power"),
    "saba": Method("numbered", ABT, of_task=lambda task: _tables(task)),
    "srba": Method("refreshed", ABT, {"period": PERIOD}),
    "fdehbo": Method("shared", f"{ABT} eta power", of_task=lambda task: _radius(task), powers=(0.0, THIRD)),
    "hjfbio": Method("full", ABT, of_task=lambda task: _radius(task)),
    "s_tfbo": Method("shared"),
    "bp": Method("independent", "alpha tau eta power", {"T": 10, "restart": False}, again=True),
    "ns": Method("independent", f"{ABT} eta power", {"K": 10}, step="beta"),
    "cg": Method("independent", "alpha tau eta power", {"K": 10}),
    "itd_bio": Method("full", "alpha tau", {"T": 10}),
    "truncated_bp": Method("independent", "alpha tau power", {"T": 10, "R": 5}, again=True),
    "forward": Method("independent", "alpha tau power", {"T": 10}, again=True, most_p=64),
    "rtho": Method("independent", "alpha tau power", again=True, most_p=64),
    "reversible": Method("independent", "alpha tau power", {"T": 10}, ranges={"tau": (0.1, 5.0)}),
    "bio_bred": Method("full", "alpha tau", {"T": 10, "outer": Adaptive()}, alpha="coordinate"),
    "bda": Method("independent", f"{ABT} power", {"T": 10}),
    "bsa": Method("independent", f"{ABT} power", {"Q": 10}, step="step", seeded=True),
    "ttsa": Method("independent", f"{ABT} power", {"Q": 10}, "step", powers=(0.0, (0.6, 0.4, 0.0, 0.0)), seeded=True),
    "aid_bio": Method("full", "alpha tau", TEN),
    "stocbio": Method("independent", f"{ABT} power", TEN, step="step"),
    "sbio_bred": Method("independent", f"{ABT} power", {**TEN, "outer": Adaptive()}, "step", alpha="coordinate"),
    "implicit_neumann": Method("independent", f"{ABT} power", {"Q": 10}, step="step"),
    "t1_t2": Method("independent", f"{ABT} power", step="step"),
    "aid_fp": Method("full", ABT, TEN_K, step="step"),
    "aid_cg": Method("full", "alpha tau", TEN_K),
    "hoag": Method("full", "alpha tau"),
    "sustain": Method("independent", f"{ABT} eta power", {"Q": 10}, "step", powers=(0.0, THIRD), seeded=True),
    "mrbo": Method("independent", f"{ABT} eta power", {"Q": 10}, "step", powers=(0.0, THIRD)),
    "vrbo": Method("led", ABT, {"Q": 10, "m": 3, "period": PERIOD}, step="step"),
    "biadam": Method(
        "independent", f"{ABT} eta power", {"Q": 10}, "step", alpha="coordinate", tau="length", seeded=True
    ),
    "vr_biadam": Method(
        "independent", f"{ABT} eta power", {"Q": 10}, "step", "coordinate", "length", (0.0, THIRD), seeded=True
    ),
    "accbo": Method(
        "independent", f"{ABT} eta power", {"Q": 10}, "step", alpha="length", powers=(0.0, THIRD), seeded=True
    ),
    "stable": Method("independent", "alpha tau eta power", most_n=64),
    "svrb": Method("independent", "alpha tau eta power", powers=(0.0, THIRD), most_n=64),
    "penalty": Method("independent", "alpha tau power", {"T": 10}, of_task=lambda task: {"rho": 1 / task.curvature}),
    "f2sa": Method(
        "independent", f"{ABT} power", powers=(0.0, (5 / 7, 4 / 7, 5 / 7, 0.0)), ranges={"beta": (1e-3, 0.1)}
    ),
    "bome": Method("full", "alpha tau eta", {"T": 10}),
    "sama": Method("independent", "alpha tau power", tau="coordinate"),
}


def known() -> dict[str, Method]:
    """The rows whose algorithm is there."""
    return {name: method for name, method in METHODS.items() if method.automatic or name in algorithms.ALL}


def label(name: str) -> str:
    return name.replace("_automatic", ", automatic")


def _tables(task: Task) -> dict[str, int]:
    return {"inner_batches": len(task.inner_batches), "outer_batches": len(task.outer_batches)}


def _radius(task: Task) -> dict[str, float]:
    """A ball that holds v at the start ten times over."""
    return {"radius": 10 * task.scales.adjoint}


def make(name: str, task: Task, setting: Setting) -> Algorithm:
    """The algorithm with its options and these rates."""
    method = METHODS[name]
    options = {**method.options, **method.of_task(task)}
    if method.step:
        options[method.step] = setting["beta"]
    power = setting["power"]
    schedule = Schedule(
        setting["alpha"],
        setting["tau"],
        setting["beta"],
        setting["eta"],
        tuple(power) if isinstance(power, list | tuple) else power,
    )
    return algorithms.ALL[name](schedule, **options)


def settings(name: str, task: Task, trials: int) -> list[Setting]:
    """So many settings, drawn from a seed that depends on the problem and the method alone."""
    method = METHODS[name]
    generator = torch.Generator().manual_seed(seed_of("search", task.name, name))
    units = _units(method, task)
    found = []
    for _ in range(trials):
        setting: Setting = {}
        for rate in ("alpha", "tau", "beta", "eta"):  # all are drawn, whether searched or not
            low, high = method.ranges.get(rate, RANGES[rate])
            drawn = low * (high / low) ** float(torch.rand((), generator=generator, dtype=torch.float64))
            setting[rate] = units[rate] * drawn if rate in method.searched else 1.0
        power = method.powers[int(torch.randint(len(method.powers), (), generator=generator))]
        setting["power"] = power if "power" in method.searched else 0.0
        found.append(setting)
    return found


def _units(method: Method, task: Task) -> dict[str, float]:
    """The size of one unit of each rate."""
    step = task.scales.reach / 10  # of ω, where the size of a step is not that of the gradient
    of_lam = {"slope": 1 / task.scales.slope, "length": math.sqrt(task.p), "coordinate": 1.0}
    of_omega = {"curvature": 1 / task.curvature, "length": step, "coordinate": step / math.sqrt(task.n)}
    return {"alpha": of_lam[method.alpha], "tau": of_omega[method.tau], "beta": 1 / task.curvature, "eta": 1.0}


def seed_of(*parts: object) -> int:
    """A whole number that depends on these parts alone, on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")
