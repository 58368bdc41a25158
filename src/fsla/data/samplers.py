"""Endless sources of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import TypeVar

T = TypeVar("T")


def cycle(batches: Iterable[T]) -> Iterator[T]:
    """Yields the batches of a DataLoader, a list or any other iterable, again and again without end.

    Each time round the iterable is asked anew, so that a DataLoader that shuffles does so each time. One that has no
    batch, or that has ended and does not begin again, is a ValueError when its next batch is asked for.
    """
    for turn in count():
        number = 0
        for number, batch in enumerate(batches, 1):  # noqa: B007 (counts what was given)
            yield batch
        if not number:
            kind = type(batches).__name__
            came = f"The {kind} is empty" if not turn else f"The {kind} gave its batches once and has ended"
            raise ValueError(
                f"What is cycled through must give at least one batch each time round. {came}. Pass a DataLoader, a "
                "list, or another iterable that begins anew and is not empty."
            )
