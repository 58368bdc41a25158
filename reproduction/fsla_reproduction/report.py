"""The result of an experiment in words, and the small parts of every summary.md: tables and claims."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fsla._storage._files import publish_file


class Claim(NamedTuple):
    """A statement, whether it held (None: the runs do not decide it), and the figures that show it."""

    text: str
    holds: bool | None
    figures: str


@dataclass(frozen=True)
class Summary:
    """The claims, the numbers of summary.json, and the text of summary.md."""

    claims: tuple[Claim, ...]
    numbers: Mapping[str, object]
    text: str

    def save(self, folder: Path) -> None:
        """Write summary.json and summary.md."""
        numbers = json.dumps(self.numbers, indent=2, ensure_ascii=False) + "\n"
        publish_file(folder / "summary.json", numbers.encode())
        publish_file(folder / "summary.md", self.text.encode())


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; None is shown as a dash, floats with three digits."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(c) for c in line) + " |" for line in lines) + "\n"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e6 else f"{value:.3g}"
    return str(value)


_YES_NO = {True: "yes", False: "**no**", None: "not decided"}


def claims(rows: Sequence[tuple[str, bool | None, str]]) -> str:
    """A Markdown table of claims: the statement of the paper, whether it held, and the figures."""
    return table(["claim", "held", "figures"], [(text, _YES_NO[holds], seen) for text, holds, seen in rows])
