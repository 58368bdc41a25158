"""Section 6.1, Figure 1: the error of the hypergradient at a fixed λ, against K.

For each seed:

    estimators   FSLA, NS, BP and CG after K inner steps, for K = 1 … K_max, and the Hessian-vector products asked for
    sequences    NS with K terms at the states ω_λ + ω̃ K^-a: the error follows the rate of the states
    divergence   NS with steps on both sides of 2/L

and for the first seed `timing`: the estimators by automatic differentiation over all rows, with a clock.

A hypergradient at K costs NS, BP and CG about K products, and they keep nothing for the next; FSLA needs one product
more for the next. So each record has two prices: `_one` of this estimate alone, `_every` of an estimate at each k ≤ K,
which is what an outer loop asks for.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from fsla import algorithms
from fsla._checks import whole_number
from fsla._tree import Leaves, dense, norm, sub
from fsla.hypergradients import (
    ConjugateGradient,
    ConvergenceWarning,
    HypergradientEstimator,
    Neumann,
    ReverseUnroll,
    Solved,
    hypergradient,
)
from fsla.problems import CountedProblem, Oracles, Point, StepBatches
from fsla.steps import Position, Schedule, StepContext, Variable, constant, descend
from fsla_reproduction.folder import Folder, Record
from fsla_reproduction.job import Job, ReportShare, quiet
from fsla_reproduction.problems import Quadratic, Synthetic
from fsla_reproduction.runs import LOCAL, Report, Workers, unseen

METHODS = ("NS", "BP", "CG", "FSLA", "FSLA (v at new ω)")
FULL = StepBatches.shared(None, None)


@dataclass(frozen=True)
class SyntheticSpec:
    """Settings of the experiment; the defaults are the paper's, where it gives them."""

    seeds: int = 20
    K_max: int = 400
    K_timed: int = 200
    K_sequence: int = 10_000
    exponents: tuple[float, ...] = (2.0, 1.0, 0.5, 0.25)
    step: float = 2e-5
    diverging_steps: tuple[float, ...] = (7e-5, 8e-5, 1e-4)
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        for name in ("seeds", "K_max", "K_timed", "K_sequence"):
            whole_number(getattr(self, name), name, "SyntheticSpec")

    def runs(self) -> Iterator[Job]:
        """Yield the runs."""

        def job(name: str, work: Callable[..., list[Record]], seed: int, exclusive: bool = False) -> Job:
            return Job(name, name, partial(work, self, seed), exclusive=exclusive)

        for seed in range(self.seeds):
            yield job(f"estimators-{seed:03d}", _estimators, seed)
            yield job(f"sequences-{seed:03d}", _sequences, seed)
            yield job(f"divergence-{seed:03d}", _divergence, seed)
        yield job("timing", _timing, 0, exclusive=True)


def run(spec: SyntheticSpec, folder: Folder, report: Report = unseen, workers: Workers = LOCAL) -> list[Record]:
    """Do the runs that the folder lacks; return the records of all."""
    runs = list(spec.runs())
    workers.do(folder, runs, report)
    return folder.gather([job.name for job in runs])


class _Meter:
    """Squared error against the exact ∇f, absolute and relative to ‖∇f‖²."""

    def __init__(self, data: Synthetic, quadratic: Quadratic) -> None:
        self.exact = quadratic.gradient(data.lam)
        self.scale = float(self.exact.square().sum())

    def __call__(self, h: Leaves) -> dict[str, float]:
        error = float((dense(h)["lam"] - self.exact).square().sum())
        return {"error": error, "relative_error": error / self.scale}


def _estimators(spec: SyntheticSpec, seed: int, report: ReportShare = quiet) -> list[Record]:
    data = Synthetic.draw(seed, low=spec.low, high=spec.high)
    quadratic = data.quadratic()
    return _curves(spec, seed, data, quadratic, spec.K_max, "estimators", _Meter(data, quadratic))


def _timing(spec: SyntheticSpec, seed: int, report: ReportShare = quiet) -> list[Record]:
    data = Synthetic.draw(seed, low=spec.low, high=spec.high)
    meter = _Meter(data, data.quadratic())
    _curves(spec, seed, data, data.losses(), 10, "warm-up", meter)
    return _curves(spec, seed, data, data.losses(), min(spec.K_timed, spec.K_max), "timing", meter)


def _curves(
    spec: SyntheticSpec, seed: int, data: Synthetic, problem: Oracles, K_max: int, run: str, meter: _Meter
) -> list[Record]:
    """The error of each method for K = 1 … K_max, with products and seconds."""
    records: list[Record] = []
    walk = _Clock()
    path: list[Point] = [data.at]
    for _ in range(K_max):
        last = path[-1]
        with walk:  # NS, BP and CG share the inner descent: one more step of it for each K
            there, _ = descend(_step_context(problem, spec.step), last, Variable(last.omega), 1, keep=dict)
        path.append(Point(there.lam, there.omega, last.trajectory + there.trajectory))

    series: list[Leaves] = []  # the values of NS, to compare BP's with
    for name in METHODS[:3]:
        clock = _Clock()
        counted = CountedProblem(problem)
        for K in range(1, K_max + 1):
            before = counted.calls.hvp
            spent = clock.seconds
            with clock:
                h = _estimate(_estimator(name, K, spec.step), counted, path[K])
            if name == "NS":
                series.append(h)
            distance = norm(sub(h, series[K - 1])) / norm(series[K - 1])
            records.append(
                {"run": run, "seed": seed, "method": name, "K": K, **meter(h), "apart_from_ns": float(distance)}
                | {"hvp_one": counted.calls.hvp - before, "hvp_every": counted.calls.hvp}
                | {"s_one": walk.marks[K - 1] + clock.seconds - spent, "s_every": walk.marks[K - 1] + clock.seconds}
            )
    step_sizes = _step_sizes(spec.step)
    variants = {
        "FSLA": algorithms.fsla(step_sizes, adjoint_at="old_params", momentum="none"),
        "FSLA (v at new ω)": algorithms.fsla(step_sizes, adjoint_at="new_params", momentum="none"),
    }
    for name, solver in variants.items():
        clock = _Clock()
        counted = CountedProblem(problem)
        state = solver.init(problem, data.at, FULL)
        for K in range(1, K_max + 1):
            with clock:
                state = solver.step(counted, state, FULL)
            hvp = {"hvp_one": counted.calls.hvp, "hvp_every": counted.calls.hvp}
            seconds = {"s_one": clock.seconds, "s_every": clock.seconds}
            errors = meter(state.direction)
            records.append({"run": run, "seed": seed, "method": name, "K": K, **errors, **hvp, **seconds})
    return records


def _estimator(name: str, K: int, adjoint_lr: float) -> HypergradientEstimator:
    if name == "BP":
        return ReverseUnroll()
    return Solved(Neumann(K, adjoint_lr) if name == "NS" else ConjugateGradient(K, stop_early=True))


def _step_sizes(lr: float) -> Schedule:
    """Of ω and v; λ stays where it is."""
    return constant(outer_lr=0.0, inner_lr=lr, adjoint_lr=lr)


def _step_context(problem: Oracles, lr: float) -> StepContext:
    """What a single step asks of the whole data."""
    return algorithms.fixed(_step_sizes(lr)).context(problem, 0, None, FULL)


def _estimate(estimator: HypergradientEstimator, problem: Oracles, at: Point) -> Leaves:
    """The hypergradient at a point, where nothing is known yet. The sizes of steps are the estimator's own."""
    return estimator.gradient(_step_context(problem, 0.0), Position(at, {}))


class _Clock:
    def __init__(self) -> None:
        self.seconds = 0.0
        self.marks: list[float] = []
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._start
        self.marks.append(self.seconds)


def _sequences(spec: SyntheticSpec, seed: int, report: ReportShare = quiet) -> list[Record]:
    data = Synthetic.draw(seed, low=spec.low, high=spec.high)
    quadratic = data.quadratic()
    meter = _Meter(data, quadratic)
    minimum = quadratic.omega_of(data.lam)
    offset = torch.rand(len(minimum), generator=torch.Generator().manual_seed(seed + 10**6), dtype=torch.float64)
    grid = sorted({round(10 ** (i / 8)) for i in range(8 * math.ceil(math.log10(spec.K_sequence)) + 1)})
    records = []
    for a in spec.exponents:
        for K in (k for k in grid if k <= spec.K_sequence):
            at = quadratic.point(data.lam, minimum + offset * K**-a)
            h = _estimate(_estimator("NS", K, spec.step), quadratic, at)
            records.append({"run": "sequences", "seed": seed, "exponent": a, "K": K, **meter(h)})
    return records


def _divergence(spec: SyntheticSpec, seed: int, report: ReportShare = quiet) -> list[Record]:
    data = Synthetic.draw(seed, low=spec.low, high=spec.high)
    quadratic = data.quadratic()
    at = quadratic.point(data.lam, quadratic.omega_of(data.lam))
    limit = 2 / float(torch.linalg.eigvalsh(quadratic.H)[-1])
    meter = _Meter(data, quadratic)
    records = []
    for beta in spec.diverging_steps:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            h = hypergradient(quadratic, at, None, None, "neumann", num_steps=200, step_size=beta)
        records.append(
            {"run": "divergence", "seed": seed, "beta": beta, "two_over_L": limit, "K": 200, **meter(h.value)}
            | {"status": "diverged" if caught else "converging"}
        )
    return records
