"""ξ_{k,1} … ξ_{k,5} of Algorithm 1, line 5: the batches that a step reads, and how many an algorithm asks for.

Batches are compared by identity: where two oracles are asked at one point on the same batch object, they share one
pass, and one dropout mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from fsla._checks import pick

Batch = Any
Mode = Literal["independent", "grouped", "shared"]
Source = Callable[[], Batch] | Iterator[Batch]
"""Where batches come from: a function without arguments, or an iterator."""


class Batches(tuple[Batch, ...]):
    """A batch for each of several inner or adjoint steps, in the place of one batch that serves them all."""


class Numbered(NamedTuple):
    """One of several fixed batches, with its number from 0 on: for methods that remember what each batch said."""

    number: Any
    batch: Batch


class Share(NamedTuple):
    """A process's own samples of a batch that is spread over several: rank r brings b_r of its `total` = Σ_r b_r."""

    batch: Batch
    total: int


def batch_of_step(batch: Batch, k: int) -> Batch:
    """Returns the batch of inner step k = 0, 1, …"""
    return batch[k] if isinstance(batch, Batches) else batch


class Sample(NamedTuple):
    """The five batches of a step. Algorithm 1 with STORM needs `outer_lam` and `cross` drawn independently of the rest.

    `seed` fixes what random layers draw: the same mask at all points of the step, another one for each batch. Without
    it networks that draw are refused. `mode` tells how the sample was drawn, where `draw` drew it.
    """

    inner: Batch
    outer_omega: Batch
    hvp: Batch
    outer_lam: Batch
    cross: Batch
    seed: int | None = None
    mode: str | None = None

    @classmethod
    def full(cls, inner: Batch, outer: Batch, *, seed: int | None = None) -> Sample:
        """One inner and one outer batch for everything: full-batch methods."""
        return cls(inner, outer, inner, outer, inner, seed)

    @classmethod
    def draw(cls, mode: Mode, inner: Source, outer: Source, *, seed: int | None = None) -> Sample:
        """Draws a sample from two sources of batches, each a function without arguments or an iterator.

        "independent": five draws, as Algorithm 1 has it. "grouped": {ξ1, ξ2, ξ3} and {ξ4, ξ5}, two inner and two outer
        draws, the fewest that leave STORM unbiased. "shared": one draw of each; right for momentum "none" or
        "average", but under STORM a bias of the order c_β / c_η stays for ever. `fsla.problems.cycle(loader)` makes an
        endless iterator of a DataLoader.
        """
        inner = _function(inner, "inner")
        outer = _function(outer, "outer")
        pick(mode, dict.fromkeys(("independent", "grouped", "shared")), "sampling mode")
        if mode == "shared":
            return cls.full(inner(), outer(), seed=seed)._replace(mode=mode)
        if mode == "independent":
            return cls(inner(), outer(), inner(), outer(), inner(), seed, mode)
        first_inner = inner()
        first_outer = outer()
        second_inner = inner()
        second_outer = outer()
        return cls(first_inner, first_outer, first_inner, second_outer, second_inner, seed, mode)

    @property
    def batches(self) -> tuple[Batch, Batch, Batch, Batch, Batch]:
        """The five batches alone."""
        return self.inner, self.outer_omega, self.hvp, self.outer_lam, self.cross

    @property
    def repeats(self) -> bool:
        """Whether any two oracles of one level get the same batch, so that they may share a pass."""
        inner = self.inner is self.hvp or self.inner is self.cross or self.hvp is self.cross
        return inner or self.outer_omega is self.outer_lam

    def seeds(self) -> dict[int, int]:
        """The seed of each batch, by the batch's id; batches that are one object have one seed."""
        if self.seed is None:
            return {}
        found: dict[int, int] = {}
        for slot, batch in enumerate(self.batches):
            for j, own in enumerate(batch if isinstance(batch, Batches) else (batch,)):
                found.setdefault(id(own), mix_seed(self.seed, slot, j))
        return found


def mix_seed(seed: int, slot: int, j: int) -> int:
    """Return a seed for batch j of a slot, far from those of the others (the constants are those of splitmix64)."""
    x = (seed * 0x9E3779B97F4A7C15 + (slot + 1) * 0xBF58476D1CE4E5B9 + (j + 1) * 0x94D049BB133111EB) % 2**64
    return (x ^ (x >> 31)) % 2**63


def _function(source: Source, name: str) -> Callable[[], Batch]:
    if callable(source):
        return source
    if isinstance(source, Iterator):
        return source.__next__
    hint = " Make an endless iterator of it with fsla.problems.cycle(...)." if hasattr(source, "__iter__") else ""
    raise TypeError(
        f"The {name} source of Sample.draw must be a function without arguments that returns a batch, or an iterator "
        f"of batches. Got {type(source).__name__} instead.{hint}"
    )


class Needs(NamedTuple):
    """How many batches of each kind an algorithm reads in a step; 0 where it reads none."""

    inner: int = 1
    outer_omega: int = 1
    hvp: int = 1
    outer_lam: int = 1
    cross: int = 1

    def check(self, xi: Sample) -> None:
        """Raises if the sample has another number of batches of a kind. A single batch serves any number of steps."""
        for name, wanted, batch in zip(self._fields, self, xi.batches, strict=True):
            if isinstance(batch, Batches) and len(batch) != max(wanted, 1):
                raise ValueError(
                    f"The {name!r} of the sample must be one batch, or Batches of {max(wanted, 1)}, since the "
                    f"algorithm takes so many steps on them. Got Batches of {len(batch)} instead."
                )
