"""All kinds of trials."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from faults import files, problems, states
from faults.trials import Trial

KINDS: dict[str, Callable[[int], Iterator[Trial]]] = {
    "files": files.trials,
    "states": states.trials,
    "problems": problems.trials,
}


def make_trials(kind: str, seed: int) -> Iterator[Trial]:
    """Yield the trials of a kind."""
    return KINDS[kind](seed)
