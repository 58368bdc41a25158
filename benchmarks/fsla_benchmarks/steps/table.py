"""What a hyper-iteration costs on the small problems, in plain SGD steps of the same model.

On a GPU the SGD step is a captured one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fsla import algorithms
from fsla._checks import pick, whole_number
from fsla.algorithms import Algorithm
from fsla.problems import CountedProblem, GaussNewtonProblem, Oracles, StepBatches
from fsla.problems._batches import Mode
from fsla_benchmarks.steps import jax_scan, module_steps, peers
from fsla_benchmarks.steps.cases import RATES, Case, case
from fsla_benchmarks.steps.memory import peak_mb
from fsla_benchmarks.steps.race import Advance, Key, Report, Row, Units, race, reason


class Candidate(NamedTuple):
    method: str
    momentum: str | None
    samples: Mode
    algorithm: Algorithm[Any]
    captured: bool = False
    """Whether it is also timed as a captured step."""


def _candidates(name: str) -> list[Candidate]:
    rates = RATES[name]
    ns = algorithms.ns(rates, num_terms=10, adjoint_lr=rates.adjoint_lr, momentum="none")
    out = [
        Candidate("textbook fsla", "storm", "independent", algorithms.fsla(rates)),
        Candidate("fsla", "storm", "independent", algorithms.fsla(rates), captured=True),
        Candidate("fsla", "storm", "grouped", algorithms.fsla(rates), captured=True),
        Candidate("fsla", "none", "shared", algorithms.fsla(rates, momentum="none"), captured=True),
        Candidate("fsla, difference", "storm", "grouped", algorithms.fsla(rates), captured=True),
        Candidate("fsla, difference", "none", "shared", algorithms.fsla(rates, momentum="none"), captured=True),
        Candidate("soba", None, "shared", algorithms.soba(rates), captured=True),
        Candidate("soba, difference", None, "shared", algorithms.soba(rates), captured=True),
        Candidate("ma_soba", None, "shared", algorithms.ma_soba(rates)),
        Candidate("ns_1_10", "none", "grouped", ns),
        Candidate("cg_1_10", "none", "grouped", algorithms.cg(rates, hvp_steps=10, momentum="none")),
    ]
    if name != "quadratic":
        out.insert(3, Candidate("fsla, gauss-newton", "storm", "grouped", algorithms.fsla(rates), captured=True))
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
    whole_number(rounds, "rounds", "bench")
    rows = []
    notes = list[str]()
    for name in problems:
        c = case(name, device)
        timed, messages = _steppers(c, device, engines, report)
        notes += messages
        if name != "quadratic":
            report(f"{name}: steps on a module")
            timed |= {key: _repeated(step) for key, step in module_steps.steppers(name, device).items()}
        if with_peers:
            report(f"{name}: a first step of every peer")
            others, messages = peers.steppers(c)
            notes += messages
            timed |= {Key(label): _repeated(step) for label, step in others.items()}
        raced = _measured(name, timed, rounds, device, report)
        rows += raced
        if with_peers or device.type == "cuda":
            jax_rows, messages = _jax_rows(name, device, raced[0], report)
            rows = rows + jax_rows
            notes = notes + messages
    return rows, list(dict.fromkeys(notes))


def _steppers(
    c: Case, device: torch.device, engines: tuple[str, ...], report: Report
) -> tuple[dict[Key, Advance], list[str]]:
    """Everything of ours to be timed, the SGD step that is the unit first."""
    sgd = algorithms.fixed(RATES[c.name])
    timed = dict[Key, Advance]()
    notes = list[str]()
    on_gpu = device.type == "cuda"
    if "graph" in engines and not on_gpu:
        notes.append("graph: steps are captured on a GPU alone")
        engines = ("eager",)

    def add(key: Key, problem: Oracles, algorithm: Algorithm[Any], samples: Mode) -> None:
        report(f"{c.name}: {key.label}")
        try:
            timed[key] = _stepper(c, problem, algorithm, samples, key.engine)
        except Exception as error:  # a capture may fail in any way
            notes.append(f"{c.name}: {key.label}: {reason(error)}")

    if on_gpu:
        add(Key("sgd", engine="graph"), c.difference, sgd, "shared")
    timed[Key("sgd")] = c.sgd()
    for method, momentum, samples, algorithm, captured in _candidates(c.name):
        for engine in engines if captured else ("eager", *(["graph"] if on_gpu else [])):
            add(Key(method, momentum, samples, engine), _problem(c, method), algorithm, samples)
    return timed, notes


def _problem(c: Case, method: str) -> Oracles:
    if method == "textbook fsla":
        return c.general
    if method.endswith(", difference"):
        return c.difference
    return GaussNewtonProblem(c.problem) if method == "fsla, gauss-newton" else c.problem


def _units(timed: dict[Key, Advance]) -> Units:
    """The captured SGD step, if that is timed; a row of a scaling has its own."""
    sgd = next(unit for unit in (Key("sgd", engine="graph"), Key("sgd"), *timed) if unit in timed)

    def units(key: Key) -> tuple[Key, Key]:
        unit = sgd if key.n is None else Key("sgd", n=key.n)
        return unit, unit

    return units


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
    rates = RATES["cnn"]
    timed = dict[Key, Advance]()
    for value in pick(varies, SCALINGS, "scaling") if values is None else values:
        c = case("cnn", device, value if varies == "samples" else 10_000, value if varies == "parameters" else 32)
        chosen = {"fsla": algorithms.fsla(rates)} if varies != "K" else {
            "ns": algorithms.ns(rates, num_terms=value, adjoint_lr=1e-2, momentum="none"),
            "cg": algorithms.cg(rates, hvp_steps=value, momentum="none"),
        }  # fmt: skip
        n = sum(t.numel() for t in c.at.omega.values()) if varies == "parameters" else value
        timed[Key("sgd", n=n)] = c.sgd()
        for method, algorithm in chosen.items():
            key = Key(method, "storm" if method == "fsla" else "none", "grouped", engine, n)
            timed[key] = _stepper(c, c.problem, algorithm, "grouped", engine)
    return [replace(r, varies=varies) for r in _measured("cnn", timed, rounds, device, report)]


def _stepper(c: Case, problem: Oracles, algorithm: Algorithm[Any], samples: Mode, engine: str) -> Advance:
    """A function that takes the next steps of a run."""
    from fsla.train import make_engine

    def draw() -> StepBatches:
        return StepBatches.draw(samples, c.inner, c.outer)

    counted = CountedProblem(problem)
    state = algorithm.init(problem, c.at, draw())
    stepper = make_engine(engine, algorithm, counted, draw, c.generator, state)
    latest = [stepper.advance(state, 4)]  # an engine captures its step, and compares it, at its first steps

    def advance(n: int) -> None:
        latest[0] = stepper.advance(latest[0], n)

    return advance


def _repeated(step: Callable[[], None]) -> Advance:
    def advance(n: int) -> None:
        for _ in range(n):
            step()

    return advance


def _measured(name: str, timed: dict[Key, Advance], rounds: int, device: torch.device, report: Report) -> list[Row]:
    """Warm every step up, measure its memory, then race it; a turn is one step, or several where a step is short."""
    memory: dict[tuple[str | int | None, ...], float] = {}
    for key, advance in timed.items():
        report(f"{name}: {key.label}, memory")
        advance(1)
        if device.type == "cpu" or key.engine == "eager":  # a captured graph holds its memory for good
            memory[key[:5]] = peak_mb(lambda advance=advance: advance(1), device)  # type: ignore[misc]
    turn = 20 if device.type == "cuda" else 1 if name == "cnn" else 10
    rows = race(name, timed, _units(timed), rounds, turn, device, report)
    return [replace(r, memory_mb=memory.get((r.method, r.momentum, r.samples, r.engine, r.n))) for r in rows]
