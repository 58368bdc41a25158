"""What a hyper-iteration costs, in plain SGD steps of the same model, measured in one interleaved run.

Every round times every candidate once, the SGD step among them; a candidate's ratio is the median over rounds of its
time over that round's SGD step, so that a machine that slows down slows both. Three problems:

    cnn         the four-layer network on 28 x 28 images, batch 256, a weight for each sample
    softmax     softmax regression 784 x 10 with a ridge, batch 256, a weight for each sample
    quadratic   the synthetic experiment: 5 dimensions, 10 000 rows, full batches
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from fsla import algorithms
from fsla.autodiff import Problem
from fsla.checks import pick, whole
from fsla.experiments.folder import write_text
from fsla.problem import Batch, Oracles, Point, Sample
from fsla.problems import Reweighting, Synthetic
from fsla.problems.networks import RIDGE, build
from fsla.rates import constant
from fsla.solver import Algorithm
from fsla.training.engine import make_engine
from fsla.wrap import Counted

BATCH = 256
_IMAGES = 2_000
Key = tuple[str, str | None, str | None, str]


@dataclass(frozen=True)
class Row:
    """One measurement: the median ratio to an SGD step, its quartiles over rounds, and the median milliseconds."""

    problem: str
    method: str
    momentum: str | None
    samples: str | None
    engine: str
    ratio: float
    low: float
    high: float
    ms: float
    n: int | None = None
    """Number of training samples, where it is what varies."""


@dataclass
class Case:
    """A problem to measure on: its oracles, a start, two sources of batches, and the step of plain SGD."""

    name: str
    problem: Problem
    general: Problem
    at: Point
    inner: Callable[[], Batch]
    outer: Callable[[], Batch]
    generator: torch.Generator

    def sgd(self) -> Callable[[], None]:
        lam, loss = self.at.lam, self.problem.inner_loss

        def step() -> None:
            omega = {name: t.detach().requires_grad_() for name, t in self.at.omega.items()}
            leaves = list(omega.values())
            grads = torch.autograd.grad(loss(lam, omega, self.inner()), leaves)
            torch._foreach_add(leaves, list(grads), alpha=-0.1)

        return step


def case(name: str, device: torch.device, n: int = 10_000) -> Case:
    """A benchmark problem on random data."""
    pick(name, dict.fromkeys(PROBLEMS), "problem")
    generator = torch.Generator(device).manual_seed(0)
    if name == "quadratic":
        drawn = Synthetic.draw(0)
        synthetic = Synthetic(*(getattr(drawn, f).to(device) for f in Synthetic.__dataclass_fields__))
        problem = synthetic.losses()
        return Case(name, problem, problem, synthetic.at, lambda: None, lambda: None, generator)
    images = torch.randn(_IMAGES, 1, 28, 28, device=device, generator=generator)
    labels = torch.randint(10, (_IMAGES,), device=device, generator=generator)
    few = cast(Tensor, _Wrapped(images)), cast(Tensor, _Wrapped(labels))
    data = Reweighting(build(name, 28, 10, seed=0, device=device), *few, images, labels, ridge=RIDGE.get(name, 0.0))
    weighted = data.losses()
    at = Point({"weight_logits": torch.zeros(n, device=device)}, data.start().omega)

    def batch(size: int) -> Tensor:
        return torch.randint(size, (BATCH,), device=device, generator=generator)

    general = Problem(weighted.inner_loss, weighted.outer_loss, direct=False)
    return Case(name, weighted, general, at, lambda: batch(n), lambda: batch(_IMAGES), generator)


class _Wrapped:
    """Rows of a small tensor under the indices of a large data set, so that n weights need no n images."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def __getitem__(self, index: Tensor) -> Tensor:
        return self._rows[index % len(self._rows)]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def device(self) -> torch.device:
        return self._rows.device


PROBLEMS = ("cnn", "softmax", "quadratic")
_RATES = {name: constant(1e-3, 1e-2, 1e-2, 0.5) for name in ("cnn", "softmax")} | {
    "quadratic": constant(1e-9, 2e-5, 2e-5, 0.5)
}


def _candidates(name: str) -> list[tuple[str, str | None, str, Algorithm]]:
    """(method, momentum, samples, algorithm) for a problem."""
    rates = _RATES[name]
    out: list[tuple[str, str | None, str, Algorithm]] = [
        ("textbook fsla", "storm", "independent", algorithms.fsla(rates)),
        ("fsla", "storm", "independent", algorithms.fsla(rates)),
        ("fsla", "storm", "grouped", algorithms.fsla(rates)),
        ("fsla", "none", "shared", algorithms.fsla(rates, momentum="none")),
        ("soba", None, "shared", algorithms.soba(rates)),
        ("ma_soba", None, "shared", algorithms.ma_soba(rates)),
        ("ns_1_10", "none", "grouped", algorithms.ns(rates, K=10, beta=rates(0).beta, momentum="none")),  # type: ignore[arg-type]
        ("cg_1_10", "none", "grouped", algorithms.cg(rates, K=10, momentum="none")),
    ]
    return out


def measure(problems: tuple[str, ...], rounds: int, device: torch.device, report: Callable[[str], None]) -> list[Row]:
    """The table: every method on every problem, eager, and on a GPU also captured."""
    whole(rounds, "rounds", "bench")
    rows = []
    for name in problems:
        c = case(name, device)
        timed: dict[Key, Callable[[], None]] = {("sgd", None, None, "eager"): c.sgd()}
        for method, momentum, samples, algorithm in _candidates(name):
            for engine in ("eager", "graph") if device.type == "cuda" else ("eager",):
                problem = c.general if method == "textbook fsla" else c.problem
                timed[method, momentum, samples, engine] = _stepper(c, problem, algorithm, samples, engine)
        rows += _race(name, timed, rounds, device, report)
    return rows


def scaling(sizes: tuple[int, ...], rounds: int, device: torch.device, report: Callable[[str], None]) -> list[Row]:
    """One FSLA step on the network against the number of training samples, whose weights are all learnt."""
    rows = []
    for n in sizes:
        c = case("cnn", device, n)
        step = _stepper(c, c.problem, algorithms.fsla(_RATES["cnn"]), "grouped", "eager")
        timed: dict[Key, Callable[[], None]] = {
            ("sgd", None, None, "eager"): c.sgd(),
            ("fsla", "storm", "grouped", "eager"): step,
        }
        rows += [replace(r, n=n) for r in _race("cnn", timed, rounds, device, report)]
    return rows


def _stepper(c: Case, problem: Oracles, algorithm: Algorithm, samples: str, engine: str) -> Callable[[], None]:
    """A function that takes the next step of a run."""

    def draw() -> Sample:
        return Sample.draw(samples, c.inner, c.outer)  # type: ignore[arg-type]

    counted = Counted(problem)
    motor, state = make_engine(engine, algorithm, counted, draw, c.generator, algorithm.init(problem, c.at, draw()))
    held = [state]

    def step() -> None:
        held[0] = motor.advance(held[0], 1)

    return step


def _race(
    name: str, timed: dict[Key, Callable[[], None]], rounds: int, device: torch.device, report: Callable[[str], None]
) -> list[Row]:
    seconds: dict[Key, list[float]] = {key: [] for key in timed}
    for r in range(rounds + 1):
        report(f"{name}, round {r} of {rounds}")
        for key, step in timed.items():
            _wait(device)
            begun = time.perf_counter()
            step()
            _wait(device)
            if r:  # the first round warms up
                seconds[key].append(time.perf_counter() - begun)
    base = next(iter(seconds.values()))
    out = []
    for (method, momentum, samples, engine), own in seconds.items():
        ratios = sorted(a / b for a, b in zip(own, base, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]
        ms = statistics.median(own) * 1e3
        out.append(Row(name, method, momentum, samples, engine, statistics.median(ratios), low, high, ms))
    return out


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def save(path: Path, rows: list[Row], device: str) -> None:
    facts = {"torch": torch.__version__, "device": device, "threads": torch.get_num_threads()}
    write_text(path, json.dumps({**facts, "rows": [asdict(r) for r in rows]}, indent=2) + "\n")
