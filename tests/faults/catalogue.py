"""All kinds of trials."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from faults import api_misuse, files, kills, problems, states, tables
from faults.trials import Trial

KINDS: dict[str, Callable[[int], Iterator[Trial]]] = {
    "files": files.trials,
    "states": states.trials,
    "kills": kills.trials,
    "api_misuse": api_misuse.trials,
    "tables": tables.trials,
    "problems": problems.trials,
}
SHARE = {"files": 20, "states": 10, "kills": 30, "api_misuse": 15, "tables": 12, "problems": 30}
"""The default suite runs every n-th trial of a kind, and all of them where it is told to; 0 stands for none."""


def make_trials(kind: str, seed: int) -> Iterator[Trial]:
    """Yield the trials of a kind."""
    return KINDS[kind](seed)
