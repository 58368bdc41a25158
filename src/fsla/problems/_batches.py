"""The batches that one step reads: ξ1 … ξ5 of Algorithm 1, line 5.

A `Batch` is its own identity: two oracles at one point share a pass where they hold the same `Batch`, and it carries
the seed of random layers, so that a dropout mask is the same at every point the batch is seen from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

from fsla._checks import instance, pick

Mode = Literal["independent", "grouped", "shared"]
Source = Callable[[], object] | Iterator[object]
"""Where batches come from: a function without arguments, or an iterator."""


class MicroBatches(tuple[Any, ...]):
    """A batch in parts of equal size: gradients are means over the parts, and memory is that of one part.

    Args:
        parts: the parts, each a batch by itself.

    Raises:
        ValueError: if there are none.

    Examples:
        >>> batch = fsla.MicroBatches(torch.arange(4).split(2))
        >>> len(batch)
        2
    """

    def __new__(cls, parts: Sequence[Any]) -> Self:
        instance(parts, Iterable, "parts", "MicroBatches", "a list of batches")
        parts = tuple(parts)
        if not parts:
            raise ValueError("MicroBatches must hold at least one batch. Got none.")
        return super().__new__(cls, parts)


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch of a step.

    A batch is its own identity: two oracles at one point share a pass if they hold the same `Batch`.

    Args:
        data: argument of the losses.
        seed: seed of the random layers, in every pass over the batch.
        number: which of several fixed batches it is, for methods that remember each one (SAGA).

    Examples:
        >>> fsla.Batch(None, seed=0) == fsla.Batch(None, seed=0)
        False
    """

    data: Any
    seed: int | None = None
    number: Any = None

    @property
    def parts(self) -> tuple[tuple[Any, int | None], ...]:
        """(data, seed) of each micro-batch. Each part has another mask; the first has that of a whole batch."""
        if not isinstance(self.data, MicroBatches):
            return ((self.data, self.seed),)
        return tuple((part, mix_seed(self.seed, 0, j) if j else self.seed) for j, part in enumerate(self.data))


Batches = tuple[Batch, ...]
"""A batch for each of several moves of a step; a single one serves them all."""


def batch_at(batches: Batches, t: int) -> Batch:
    """Return the batch of move t = 0, 1, …"""
    return batches[t] if len(batches) > 1 else batches[0]


class StepBatches(NamedTuple):
    """Batches of one step, each slot named after the oracle that reads it.

    Algorithm 1 with STORM needs `outer_grad_lam` and `mixed_hvp` drawn independently of the others.

    Args:
        inner_grad: batches of ∂_ω G.
        outer_grad_omega: batches of ∂_ω F.
        hvp: batches of H v.
        outer_grad_lam: batches of ∂_λ F.
        mixed_hvp: batches of J v.
        seed: seed of what an algorithm itself draws, such as the length of a random Neumann series.
        mode: how `draw` drew the batches.

    Examples:
        >>> batches = fsla.StepBatches.shared("train", "trusted", seed=0)
        >>> batches.hvp[0] is batches.inner_grad[0]
        True
        >>> source = iter(range(10))
        >>> fsla.StepBatches.draw("independent", source, source).outer_grad_lam[0].data
        3
    """

    inner_grad: Batches
    outer_grad_omega: Batches
    hvp: Batches
    outer_grad_lam: Batches
    mixed_hvp: Batches
    seed: int | None = None
    mode: str | None = None

    @classmethod
    def of(cls, *slots: Sequence[object] | None, seed: int | None = None, mode: str | None = None) -> StepBatches:
        """Return the batches of a step from data; each batch gets another seed.

        Args:
            slots: for each of the five fields in order, the data of its batches, such as ``(data,)``. A `Batch` in
                several slots stays one. A slot that is left out or None repeats another one: `hvp` repeats
                `inner_grad`, `mixed_hvp` the first of `inner_grad`, and `outer_grad_lam` the first of
                `outer_grad_omega`.
            seed: seed that those of the batches follow from.
            mode: how the batches were drawn.
        """
        seen: dict[Batch, Batch] = {}

        def batches(slot: int) -> Batches | None:
            data = slots[slot] if slot < len(slots) else None
            return None if data is None else tuple([batch(x, mix_seed(seed, slot, j)) for j, x in enumerate(data)])

        def batch(data: object, seed: int | None) -> Batch:
            if not isinstance(data, Batch):
                return Batch(data, seed)
            return seen.setdefault(data, data if data.seed is not None else replace(data, seed=seed))

        inner, outer = batches(0), batches(1)
        if inner is None or outer is None:
            raise TypeError("The batches of inner_grad and outer_grad_omega must be given. Got None.")
        hvp, outer_lam, mixed = batches(2) or inner, batches(3) or outer[:1], batches(4) or inner[:1]
        return cls(inner, outer, hvp, outer_lam, mixed, seed, mode)

    @classmethod
    def shared(cls, inner: object, outer: object, *, seed: int | None = None) -> StepBatches:
        """Return one inner and one outer batch for all oracles, as full-batch methods have it."""
        return cls.of((inner,), (outer,), seed=seed)

    @classmethod
    def draw(cls, mode: Mode, inner: Source, outer: Source, *, seed: int | None = None) -> StepBatches:
        """Draw the batches of a step from two sources, each a function without arguments or an iterator.

        Args:
            mode: "independent": five draws, as Algorithm 1 has it. "grouped": {ξ1, ξ2, ξ3} and {ξ4, ξ5}, two inner and
                two outer draws, the fewest that leave STORM unbiased. "shared": one draw of each; right without
                momentum or with an average, but under STORM a bias of the order c_β / c_η stays for ever.
            inner, outer: the sources. `fsla.problems.cycle(loader)` makes an endless iterator of a DataLoader.
            seed: fixes what random layers draw.
        """
        draw_inner = _function(inner, "inner")
        draw_outer = _function(outer, "outer")
        pick(mode, dict.fromkeys(("independent", "grouped", "shared")), "sampling mode")
        first = (draw_inner(),), (draw_outer(),)
        if mode == "shared":
            return cls.of(*first, seed=seed, mode=mode)
        if mode == "grouped":
            second_inner = (draw_inner(),)
            return cls.of(*first, None, (draw_outer(),), second_inner, seed=seed, mode=mode)
        return cls.of(*first, (draw_inner(),), (draw_outer(),), (draw_inner(),), seed=seed, mode=mode)

    @property
    def slots(self) -> tuple[Batches, Batches, Batches, Batches, Batches]:
        """The five slots alone."""
        return self.inner_grad, self.outer_grad_omega, self.hvp, self.outer_grad_lam, self.mixed_hvp


def mix_seed(seed: int | None, slot: int, j: int) -> int | None:
    """Return a seed for batch j of a slot, far from those of the others (the constants are those of splitmix64)."""
    if seed is None:
        return None
    x = (seed * 0x9E3779B97F4A7C15 + (slot + 1) * 0xBF58476D1CE4E5B9 + (j + 1) * 0x94D049BB133111EB) % 2**64
    return (x ^ (x >> 31)) % 2**63


def _function(source: Source, name: str) -> Callable[[], object]:
    if callable(source):
        return source
    if isinstance(source, Iterator):
        return source.__next__
    hint = " Make an endless iterator of it with fsla.problems.cycle(...)." if isinstance(source, Iterable) else ""
    raise TypeError(
        f"The {name} source of StepBatches.draw must be a function without arguments that returns a batch, or an "
        f"iterator of batches. Got {type(source).__name__} instead.{hint}"
    )


class BatchSpec(NamedTuple):
    """How many batches of each kind a step of an algorithm reads; 0 if it reads none.

    Args:
        inner_grad: batches for ∂_ω G.
        outer_grad_omega: batches for ∂_ω F.
        hvp: batches for H v.
        outer_grad_lam: batches for ∂_λ F.
        mixed_hvp: batches for J v.

    Examples:
        >>> fsla.algorithms.soba().batches
        BatchSpec(inner_grad=1, outer_grad_omega=1, hvp=0, outer_grad_lam=0, mixed_hvp=0)
    """

    inner_grad: int = 1
    outer_grad_omega: int = 1
    hvp: int = 1
    outer_grad_lam: int = 1
    mixed_hvp: int = 1

    def check(self, batches: StepBatches) -> None:
        """Raise unless each slot holds one batch, or as many as are read."""
        for name, count, slot in zip(self._fields, self, batches.slots, strict=True):
            if len(slot) not in (1, max(count, 1)):
                raise ValueError(
                    f"The {name!r} of a step must be one batch, or {max(count, 1)}, since the algorithm takes so many "
                    f"moves on them. Got {len(slot)} instead."
                )
