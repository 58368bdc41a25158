"""Sources of batches: endless ones, and those of whole steps with as many batches as an algorithm reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import TypeVar, get_args

from fsla._checks import instance, pick, whole_number
from fsla.problems._batches import Batch, Batches, BatchSpec, Mode, StepBatches

T = TypeVar("T")


def cycle(batches: Iterable[T]) -> Iterator[T]:
    """Yield the batches of a DataLoader, a list or any other iterable, again and again.

    It iterates anew each time, so that a DataLoader that shuffles does so each time.

    Args:
        batches: an iterable that can be iterated again.

    Raises:
        ValueError: when the next batch is asked for, if there is none.

    Examples:
        >>> stream = fsla.problems.cycle(["a", "b"])
        >>> [next(stream) for _ in range(3)]
        ['a', 'b', 'a']
    """
    instance(batches, Iterable, "batches", "cycle", "an iterable of batches")
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
    """Sampler of a step's batches: as many as an algorithm reads, from two sources.

    Args:
        spec: the algorithm's `batches`.
        inner: function without arguments that returns an inner batch, or an iterable, which is cycled through.
        outer: the same for outer batches.
        mode: as in `StepBatches.draw`.
        seed: with a seed, steps have the seeds seed, seed + 1, …, for networks with random layers.
        steps_again: whether products read the batches of the inner steps, which unrolled differentiation wants.

    Examples:
        >>> algorithm = fsla.algorithms.amigo(inner_steps=2, hvp_steps=3)
        >>> draw = fsla.problems.Sampler(algorithm.batches, range(10), ["trusted"])
        >>> [len(slot) for slot in draw().slots]
        [2, 1, 3, 1, 1]
    """

    def __init__(
        self,
        spec: BatchSpec,
        inner: Callable[[], object] | Iterable[object],
        outer: Callable[[], object] | Iterable[object],
        mode: Mode = "independent",
        *,
        seed: int | None = None,
        steps_again: bool = False,
    ) -> None:
        instance(spec, BatchSpec, "spec", "Sampler", "a fsla.BatchSpec, such as algorithm.batches")
        for name, source in (("inner", inner), ("outer", outer)):
            if not callable(source):
                instance(source, Iterable, name, "Sampler", "a function or an iterable")
        pick(mode, dict.fromkeys(get_args(Mode)), "mode")
        if seed is not None:
            whole_number(seed, "seed", "Sampler", least=-(2**63))
        self.spec = spec
        self.inner = inner if callable(inner) else cycle(inner).__next__
        self.outer = outer if callable(outer) else cycle(outer).__next__
        self.mode = mode
        self.seed = seed
        self.steps_again = steps_again

    def __call__(self) -> StepBatches:
        seed = self.seed
        self.seed = None if seed is None else seed + 1
        spec = self.spec
        if spec == BatchSpec(spec.inner_grad, 0, 0, 0, 0):
            batches = StepBatches.shared(self.inner(), None)
        else:
            batches = StepBatches.draw(self.mode, self.inner, self.outer)
        inner_grad, outer_omega, hvp, outer_lam, mixed = batches.slots
        inner = _several(inner_grad, spec.inner_grad, self.inner)
        outer = _several(outer_omega, spec.outer_grad_omega, self.outer)
        last_outer = _several(outer_lam, spec.outer_grad_lam, self.outer)
        last_inner = _several(mixed, spec.mixed_hvp, self.inner)
        products = inner if self.steps_again else _several(hvp, spec.hvp, self.inner)
        return StepBatches.of(inner, outer, products, last_outer, last_inner, seed=seed, mode=batches.mode)


def _several(first: Batches, n: int, source: Callable[[], object]) -> Batches:
    """Batches for each of n moves, or the one that there is."""
    drawn = (source() for _ in range(n - 1))
    return (first[0], *(data if isinstance(data, Batch) else Batch(data) for data in drawn))
