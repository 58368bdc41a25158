"""Sources of batches: endless ones, and samples with as many batches as an algorithm needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import TypeVar

from fsla.problems._batches import Batch, Batches, Mode, Needs, Sample

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


class Sampler:
    """Draws the sample of a step: what an algorithm needs, from two sources of batches.

    Args:
        needs: the algorithm's, as in ``Sampler(solver.needs, train_loader, trusted_loader)``.
        inner, outer: functions without arguments that return a batch, or iterables, which are cycled through.
        mode: as in `fsla.Sample.draw`.
        seed: if given, samples have the seeds seed, seed + 1, …, for networks with random layers.
        steps_again: the products are taken on the batches of the inner steps: what unrolled differentiation wants.
    """

    def __init__(
        self,
        needs: Needs,
        inner: Callable[[], Batch] | Iterable[Batch],
        outer: Callable[[], Batch] | Iterable[Batch],
        mode: Mode = "independent",
        *,
        seed: int | None = None,
        steps_again: bool = False,
    ) -> None:
        self.needs = needs
        self.inner = inner if callable(inner) else cycle(inner).__next__
        self.outer = outer if callable(outer) else cycle(outer).__next__
        self.mode = mode
        self.seed = seed
        self.steps_again = steps_again

    def __call__(self) -> Sample:
        seed = self.seed
        self.seed = None if seed is None else seed + 1
        if self.needs == Needs(self.needs.inner, 0, 0, 0, 0):
            xi = Sample.full(self.inner(), None, seed=seed)
        else:
            xi = Sample.draw(self.mode, self.inner, self.outer, seed=seed)
        needs = self.needs
        xi = xi._replace(
            inner=_several(xi.inner, needs.inner, self.inner),
            outer_omega=_several(xi.outer_omega, needs.outer_omega, self.outer),
            outer_lam=_several(xi.outer_lam, needs.outer_lam, self.outer),
            cross=_several(xi.cross, needs.cross, self.inner),
        )
        if self.steps_again:
            return xi._replace(hvp=xi.inner)
        return xi._replace(hvp=_several(xi.hvp, needs.hvp, self.inner))


def _several(first: Batch, n: int, source: Callable[[], Batch]) -> Batch:
    """A batch for each of n steps, or the one that there is."""
    return Batches([first, *(source() for _ in range(n - 1))]) if n > 1 else first
