"""The counts of trials, as JSON and as the table of docs/explanation/reliability.md."""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fsla
from faults.problems import EASY
from faults.trials import BAD, Outcome, Result

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
PAGE = ROOT / "docs" / "explanation" / "reliability.md"
_TABLE = re.compile(r"(?<=<!-- counts -->\n).*(?=<!-- end of counts -->)", re.DOTALL)


class Counts:
    """How many trials of each category ended how."""

    def __init__(self) -> None:
        self.rows: dict[str, Counter[str]] = {}
        self.remarks: Counter[str] = Counter()

    def add(self, result: Result) -> None:
        """Count a trial."""
        self.rows.setdefault(result.trial.category, Counter())[result.outcome] += 1
        if result.trial.tag == EASY:
            self.remarks["easy problems"] += 1
            self.remarks["easy problems converged"] += result.detail == "converged"
            self.remarks["false alarms"] += result.outcome is Outcome.REFUSED
        self.remarks["stalled problems"] += result.detail == "stalled"

    @property
    def num_bad(self) -> int:
        """Raw, silent and hanging trials."""
        return sum(row[outcome] for row in self.rows.values() for outcome in BAD)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as JSON."""
        rows = {name: {str(outcome): row[outcome] for outcome in Outcome} for name, row in self.rows.items()}
        return {"categories": rows, "problems": dict(self.remarks)}


def table(content: dict[str, Any]) -> str:
    """Return the counts as Markdown."""
    rows = content["categories"]
    total = {str(outcome): sum(row[outcome] for row in rows.values()) for outcome in Outcome}
    head = ["", "trials", *map(str, Outcome)]
    lines = [head, ["---", *["--:"] * (len(head) - 1)]]
    for name, row in [*rows.items(), ("**all**", total)]:
        lines.append([name, *map(str, (sum(row[o] for o in Outcome), *(row[o] for o in Outcome)))])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page_with(text: str, content: dict[str, Any]) -> str:
    """Return the page with the table of these counts."""
    return _TABLE.sub(lambda match: table(content), text)


def write(counts: Counts, seeds: Sequence[int]) -> None:
    """Write the counts into the JSON, where other categories stay, and the table into the page."""
    content = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"categories": {}}
    fresh = counts.as_dict()
    for name, row in fresh["categories"].items():
        content["categories"][name] = row | {"seeds": list(seeds)}
    if "hard problems" in fresh["categories"]:
        content["problems"] = fresh["problems"]
    content |= {"fsla": fsla.__version__, "torch": torch.__version__, "python": platform.python_version()}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), content), encoding="utf-8")
