"""What a hyper-iteration costs, in plain SGD steps of the same model, measured in one interleaved run.

Every round times every candidate, the SGD step among them; a candidate's ratio is the median over rounds of its time
over that round's SGD step, so that a machine that slows down slows both. On a GPU the SGD step is a captured one.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from fsla import algorithms
from fsla.checks import pick, whole
from fsla.experiments.bench import jax_scan, peers
from fsla.experiments.bench.cases import RATES, Advance, Case, case
from fsla.experiments.bench.memory import peak_mb
from fsla.experiments.cleaning import FixedWeights
from fsla.experiments.folder import write_text
from fsla.problem import Oracles, Sample
from fsla.solver import Algorithm
from fsla.training.engine import make_engine
from fsla.training.loop import wait
from fsla.wrap import Counted

Report = Callable[[str], None]


class Key(NamedTuple):
    """What is timed."""

    method: str
    momentum: str | None = None
    samples: str | None = None
    engine: str = "eager"
    n: int | None = None


@dataclass(frozen=True)
class Row:
    """One measurement: the median ratio to an SGD step, its quartiles over rounds, milliseconds and peak memory."""

    problem: str
    method: str
    momentum: str | None
    samples: str | None
    engine: str
    ratio: float
    low: float
    high: float
    ms: float
    memory_mb: float | None = None
    """The most that tensors took during a step beyond what they took before it."""
    varies: str | None = None
    """What a row of a scaling varies: "samples", "parameters" or "K"."""
    n: int | None = None
    """Its value."""


class Candidate(NamedTuple):
    method: str
    momentum: str | None
    samples: str
    algorithm: Algorithm
    captured: bool = False
    """Whether it is also timed under the other engines."""


def _candidates(name: str) -> list[Candidate]:
    rates = RATES[name]
    ns = algorithms.ns(rates, K=10, beta=float(rates(0).beta), momentum="none")
    out = [
        Candidate("textbook fsla", "storm", "independent", algorithms.fsla(rates)),
        Candidate("fsla", "storm", "independent", algorithms.fsla(rates), captured=True),
        Candidate("fsla", "storm", "grouped", algorithms.fsla(rates), captured=True),
        Candidate("fsla", "none", "shared", algorithms.fsla(rates, momentum="none"), captured=True),
        Candidate("soba", None, "shared", algorithms.soba(rates), captured=True),
        Candidate("ma_soba", None, "shared", algorithms.ma_soba(rates)),
        Candidate("ns_1_10", "none", "grouped", ns),
        Candidate("cg_1_10", "none", "grouped", algorithms.cg(rates, K=10, momentum="none")),
    ]
    if name != "quadratic":
        newton = algorithms.fsla(rates, curvature="gauss-newton")
        out.insert(3, Candidate("fsla, gauss-newton", "storm", "grouped", newton, captured=True))
    return out


def measure(
    problems: tuple[str, ...],
    rounds: int,
    device: torch.device,
    report: Report,
    *,
    engines: tuple[str, ...] = ("eager", "graph"),
    with_peers: bool = False,
) -> tuple[list[Row], list[str]]:
    """The table, and a line for whatever could not be measured, with the reason."""
    whole(rounds, "rounds", "bench")
    rows, notes = [], list[str]()
    for name in problems:
        c = case(name, device)
        timed, said = _steppers(c, device, engines, report)
        notes += said
        if with_peers:
            report(f"{name}: a first step of every peer")
            others, said = peers.steppers(c)
            notes += said
            timed |= {Key(label): _repeated(step) for label, step in others.items()}
        raced = _race(name, timed, rounds, device, report)
        rows += raced
        if with_peers or device.type == "cuda":
            found, said = _jax_rows(name, device, raced[0], report)
            rows, notes = rows + found, notes + said
    return rows, list(dict.fromkeys(notes))


def _steppers(
    c: Case, device: torch.device, engines: tuple[str, ...], report: Report
) -> tuple[dict[Key, Advance], list[str]]:
    """Everything of ours to be timed, the SGD step that is the unit first."""
    sgd, timed, notes = FixedWeights(RATES[c.name]), dict[Key, Advance](), list[str]()
    if device.type == "cuda":
        timed[Key("sgd", engine="graph")] = _stepper(c, c.problem, sgd, "shared", "graph")
    timed[Key("sgd")] = c.sgd()
    for method, momentum, samples, algorithm, captured in _candidates(c.name):
        for engine in engines if captured else ("eager", *(["graph"] if device.type == "cuda" else [])):
            report(f"{c.name}: {method}, {engine}")
            problem = c.general if method == "textbook fsla" else c.problem
            try:
                timed[Key(method, momentum, samples, engine)] = _stepper(c, problem, algorithm, samples, engine)
            except Exception as error:  # a compiler may fail in any way
                notes.append(f"{method}, engine {engine}: {(str(error).strip() or repr(error)).splitlines()[0]}")
    return timed, notes


def _jax_rows(name: str, device: torch.device, sgd: Row, report: Report) -> tuple[list[Row], list[str]]:
    """The same step in JAX, not interleaved: the ratio is to this run's SGD step."""
    reason = jax_scan.available()
    if reason is not None:
        return [], [f"jax: {reason}"]
    report(f"{name}: jax")
    fsla_s, sgd_s = jax_scan.seconds_a_step(name, steps=200 if device.type == "cuda" else 10)
    rows = []
    for method, momentum, samples, seconds in (("fsla", "storm", "grouped", fsla_s), ("sgd", None, None, sgd_s)):
        ratio = 1e3 * seconds / sgd.ms
        rows.append(Row(name, method, momentum, samples, "jax scan", ratio, ratio, ratio, 1e3 * seconds))
    return rows, []


SCALINGS = {"samples": (10**4, 10**6, 10**7), "parameters": (8, 16, 32, 64), "K": (1, 5, 10, 20)}
"""What may be varied on the network: training samples, the network's width, or the steps of NS and CG."""


def scaling(
    varies: str,
    rounds: int,
    device: torch.device,
    report: Report,
    values: tuple[int, ...] | None = None,
    engine: str = "eager",
) -> list[Row]:
    """Steps on the network against one quantity, each with an SGD step beside it.

    For "parameters" n is the number of coordinates of ω; for "K", the steps of NS and CG.
    """
    rates, timed = RATES["cnn"], dict[Key, Advance]()
    for value in pick(varies, SCALINGS, "scaling") if values is None else values:
        c = case("cnn", device, value if varies == "samples" else 10_000, value if varies == "parameters" else 32)
        chosen = {"fsla": algorithms.fsla(rates)} if varies != "K" else {
            "ns": algorithms.ns(rates, K=value, beta=1e-2, momentum="none"),
            "cg": algorithms.cg(rates, K=value, momentum="none"),
        }  # fmt: skip
        n = sum(t.numel() for t in c.at.omega.values()) if varies == "parameters" else value
        timed[Key("sgd", n=n)] = c.sgd()
        for method, algorithm in chosen.items():
            key = Key(method, "storm" if method == "fsla" else "none", "grouped", engine, n)
            timed[key] = _stepper(c, c.problem, algorithm, "grouped", engine)
    return [replace(r, varies=varies) for r in _race("cnn", timed, rounds, device, report)]


def _stepper(c: Case, problem: Oracles, algorithm: Algorithm, samples: str, engine: str) -> Advance:
    """A function that takes the next steps of a run."""

    def draw() -> Sample:
        return Sample.draw(samples, c.inner, c.outer)  # type: ignore[arg-type]

    counted = Counted(copy(problem))  # a problem finds out what is asked of it, and remembers
    motor, state = make_engine(engine, algorithm, counted, draw, c.generator, algorithm.init(problem, c.at, draw()))
    held = [motor.advance(state, 4)]  # an engine captures its step, and compares it, at its first steps

    def advance(n: int) -> None:
        held[0] = motor.advance(held[0], n)

    return advance


def _repeated(step: Callable[[], None]) -> Advance:
    def advance(n: int) -> None:
        for _ in range(n):
            step()

    return advance


def _race(name: str, timed: dict[Key, Advance], rounds: int, device: torch.device, report: Report) -> list[Row]:
    """Times every candidate in every round; a turn is one step, or several where a step is short."""
    turn = 20 if device.type == "cuda" else 1 if name == "cnn" else 10
    seconds: dict[Key, list[float]] = {key: [] for key in timed}
    memory: dict[Key, float] = {}
    for r in range(rounds + 1):
        report(f"{name}, round {r} of {rounds}")
        for key, advance in timed.items():
            if not r:  # the first round warms up, and measures memory
                advance(1)
                if device.type == "cpu" or key.engine == "eager":  # a captured graph holds its memory for good
                    memory[key] = peak_mb(lambda advance=advance: advance(1), device)  # type: ignore[misc]
                continue
            wait(device)
            begun = time.perf_counter()
            advance(turn)
            wait(device)
            seconds[key].append((time.perf_counter() - begun) / turn)
    first = next(iter(seconds.values()))
    out = []
    for key, own in seconds.items():
        base = seconds.get(Key("sgd", n=key.n), first) if key.n is not None else first
        ratios = sorted(a / b for a, b in zip(own, base, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]
        ms = statistics.median(own) * 1e3
        out.append(Row(name, *key[:4], statistics.median(ratios), low, high, ms, memory.get(key), n=key.n))
    return out


def save(path: Path, rows: list[Row], device: str, notes: list[str]) -> None:
    precision = torch.get_float32_matmul_precision()
    facts = {"torch": torch.__version__, "device": device, "threads": torch.get_num_threads(), "matmul": precision}
    write_text(path, json.dumps({**facts, "notes": notes, "rows": [asdict(r) for r in rows]}, indent=2) + "\n")
