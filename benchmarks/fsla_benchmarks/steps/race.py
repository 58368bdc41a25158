"""The race between steps: every round times every one of them, interleaved, and a ratio is to the same round's unit.

So a machine that slows down slows both, and a ratio is the median over rounds, with its quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

Report = Callable[[str], None]
Advance = Callable[[int], None]
"""Takes the next n steps."""


class Key(NamedTuple):
    """What is timed."""

    method: str
    momentum: str | None = None
    samples: str | None = None
    engine: str = "eager"
    n: int | None = None
    precision: str | None = None

    @property
    def label(self) -> str:
        parts = (self.method, self.momentum, self.samples, self.engine, self.precision)
        return ", ".join(x for x in parts if x)


@dataclass(frozen=True)
class Row:
    """One measurement: the median ratio to the unit, its quartiles over rounds, milliseconds and peak memory."""

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
    precision: str | None = None
    """"float32", "tf32", or "bfloat16" for autocast, where the problem is measured in several."""
    unit: str = "sgd"
    """The step that the ratio counts."""
    plain_ratio: float | None = None
    """The ratio to the unit that is not compiled, where the row's own unit is."""
    peak_mb: float | None = None
    """The most that tensors took at once in a process that does nothing else: states and step together."""
    peak_ratio: float | None = None
    """The same in peaks of the unit."""


Units = Callable[[Key], tuple[Key, Key]]
"""The step that a row's ratio counts, and the one that is not compiled."""


def race(
    name: str,
    timed: dict[Key, Advance],
    units: Units,
    rounds: int,
    turn: int,
    device: torch.device,
    report: Report,
) -> list[Row]:
    """Times every step in every round, `turn` steps at a time."""
    seconds: dict[Key, list[float]] = {key: [] for key in timed}
    for r in range(rounds):
        report(f"{name}, round {r + 1} of {rounds}")
        for key, advance in timed.items():
            wait(device)
            started = time.perf_counter()
            advance(turn)
            wait(device)
            seconds[key].append((time.perf_counter() - started) / turn)
    rows = []
    for key, times in seconds.items():
        unit, plain = units(key)
        low, middle, high = _quartiles(times, seconds[unit])
        row = Row(name, *key[:4], middle, low, high, statistics.median(times) * 1e3, n=key.n, precision=key.precision)
        against = None if unit == plain else _quartiles(times, seconds[plain])[1]
        rows.append(replace(row, unit=_unit_name(unit), plain_ratio=against))
    return rows


def _quartiles(times: list[float], unit: list[float]) -> tuple[float, float, float]:
    ratios = sorted(a / b for a, b in zip(times, unit, strict=True))
    return ratios[len(ratios) // 4], statistics.median(ratios), ratios[(3 * len(ratios)) // 4]


def _unit_name(key: Key) -> str:
    return key.method if key.engine == "eager" else f"{key.method}, {key.engine}"


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reason(error: BaseException) -> str:
    """The text of an error, in one line."""
    return (str(error).strip() or repr(error)).splitlines()[0]


_TABLE = "{:11} {:38} {:8} {:9} {:>6} {:>13} {:15} {:>6} {:>9} {:>7} {:>8} {:>6} {:>16}"
_TIMES = ("problem", "step", "engine", "precision", "ratio", "quartiles", "unit", "plain", "ms")
_MEMORY = ("MB", "peak MB", "ratio")


def lines(rows: list[Row]) -> list[str]:
    """The table. "plain" is the ratio to the unit that is not compiled; the last ratio is that of the peaks."""

    def number(x: float | None, digits: int = 0) -> str:
        return "" if x is None else f"{x:.{digits}f}"

    out = [_TABLE.format(*_TIMES, *_MEMORY, "varied").rstrip()]
    for r in rows:
        step = ", ".join(x for x in (r.method, r.momentum, r.samples) if x)
        spread = f"{r.low:.2f}-{r.high:.2f}"
        varied = "" if r.n is None else f"{r.varies} {r.n}"
        times = (number(r.ratio, 2), spread, r.unit, number(r.plain_ratio, 2), f"{r.ms:.2f}")
        memory = (number(r.memory_mb), number(r.peak_mb), number(r.peak_ratio, 2))
        out.append(_TABLE.format(r.problem, step, r.engine, r.precision or "", *times, *memory, varied).rstrip())
    return out


def write_rows(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table in Markdown, from what a file of results holds."""
    table = ["| problem | step | engine | unit steps (quartiles) | unit | ms |", "| --- | --- | --- | --- | --- | --- |"]
    for r in (Row(**row) for row in result["rows"]):
        step = ", ".join(x for x in (r.method, r.momentum, r.samples) if x)
        cells = (r.problem, step, r.engine, f"{r.ratio:.2f} ({r.low:.2f}–{r.high:.2f})", r.unit, f"{r.ms:.2f}")
        table.append(f"| {' | '.join(cells)} |")
    return table
