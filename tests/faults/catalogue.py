"""All kinds of trials."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from faults import api_misuse, disks, dying_ranks, files, kills, markup, memory, problems, states, tables, two_processes
from faults.trials import Trial

KINDS: dict[str, Callable[[int], Iterator[Trial]]] = {
    "files": files.trials,
    "states": states.trials,
    "kills": kills.trials,
    "api_misuse": api_misuse.trials,
    "tables": tables.trials,
    "markup": markup.trials,
    "disks": disks.trials,
    "two_processes": two_processes.trials,
    "dying_ranks": dying_ranks.trials,
    "memory": memory.trials,
    "problems": problems.trials,
}
SHARE = {
    "files": 20,
    "states": 10,
    "kills": 30,
    "api_misuse": 15,
    "tables": 12,
    "markup": 6,
    "disks": 5,
    "two_processes": 4,
    "dying_ranks": 0,
    "memory": 0,
    "problems": 30,
}
"""The default suite runs every n-th trial of a kind, and all of them where it is told to; 0 stands for none."""


def make_trials(kind: str, seed: int) -> Iterator[Trial]:
    """Yield the trials of a kind."""
    return KINDS[kind](seed)
