"""A weight for each of N samples, at the cost of a batch a step and not of N.

A step runs the algorithm itself, unchanged, on a short λ: the rows of the samples that it reads, brought up to date by
what `_decay` knows. All that it does to λ and d is row by row, so that it cannot tell the difference, and the rows
that it does not read wait until they are seen again. The numbers are those of the algorithm on the whole of λ, to
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsla import _tree as tree
from fsla._tree import Tree
from fsla.algorithms._alternating import Algorithm, Solver, State
from fsla.algorithms._around import ByDifferences, Growing, WarmedUp
from fsla.algorithms._simultaneous import Jacobi
from fsla.contrib._decay import CHUNK, RowTable
from fsla.hypergradients._estimators import Implicit, Tracked, Unrolled, Warm
from fsla.problems._batches import Batch, Batches, Sample, Share
from fsla.problems._problem import Oracles, Point
from fsla.problems._shards import Shard, gather
from fsla.problems._weighted import WeightedProblem
from fsla.steps import _momentum as direction
from fsla.steps._momentum import EMA, SPIDER, STORM
from fsla.steps._projections import Box
from fsla.steps._schedules import Rates
from fsla.steps._updates import GradientDescent, Projected, Update


class Rule(NamedTuple):
    """How an algorithm moves a row that its batches do not hold."""

    keeps: bool
    """Whether d is kept, by 1 - η, or forgotten."""
    fresh: bool
    """Whether λ moves by the new direction, or by that of the step before."""
    box: Box | None

    @classmethod
    def of(cls, algorithm: Algorithm) -> Rule:
        """Raises unless the algorithm moves such a row by a rule that is known beforehand and reads no other row."""
        inner = algorithm.of if isinstance(algorithm, ByDifferences) else algorithm
        if type(inner) in (Solver, WarmedUp, Growing):
            assert isinstance(inner, Solver)
            if type(inner.estimator) not in (Tracked, Implicit, Warm, Unrolled):
                raise _refused(f"the estimator {type(inner.estimator).__name__}, whose memory may be as long as λ")
            return cls(_keeps(inner.direction), inner.lam_last, _box(inner.outer))
        if type(inner) is not Jacobi:
            raise _refused(type(inner).__name__)
        if any(isinstance(f, STORM) for f in (inner.omega_filter, inner.v_filter, inner.lam_filter)):
            raise _refused("one in SOBA's order with STORM or SPIDER, which look at the λ of the step before")
        return cls(_keeps(inner.lam_filter), not inner.delayed, _box(inner.lam_update))

    def coefficients(self, rate: Rates) -> tuple[float, float]:
        """(α, κ) of `fsla.contrib._decay` for a step with these rates."""
        keep = 1.0 - float(rate.eta) if self.keeps else 0.0
        alpha = float(rate.alpha) * (keep if self.fresh else 1.0)
        if self.box is not None and not (alpha >= 0 and keep >= 0):
            raise ValueError(
                "Rows that wait can be kept in a Box only if α ≥ 0 and η ≤ 1: else they may leave a bound again before "
                f"they are seen. Got α = {float(rate.alpha)}, η = {float(rate.eta)}. Change the rates, or drop the Box."
            )
        return alpha, keep


def _keeps(filter: object) -> bool:
    if type(filter) not in (direction.NoMomentum, EMA, STORM, SPIDER):
        raise _refused(f"the direction {type(filter).__name__}")
    return type(filter) is not direction.NoMomentum


def _box(update: Update) -> Box | None:
    if type(update) is GradientDescent:
        return None
    if type(update) is Projected and type(update.onto) is Box and type(update.update) is GradientDescent:
        return update.onto
    inside = None
    if isinstance(update, Projected) and type(update.update) is GradientDescent:
        inside = type(update.onto).__name__
    raise _refused(f"an outer update {type(update).__name__}{f' onto {inside}' if inside else ''}")


def _refused(what: str) -> ValueError:
    return ValueError(
        "The algorithm of LazyRows must move each row of λ by itself: λ_j ← λ_j - α d_j, in a Box if anywhere, with d "
        f"plain, averaged or by STORM. Got {what} instead. Use fsla.algorithms.fsla, soba or ma_soba, or step the "
        "algorithm itself on the whole of λ."
    )


class LazyRows:
    """A run of an algorithm that touches the rows of its batches alone, with the numbers of one that sweeps over λ.

    Args:
        algorithm: one that moves each row by itself: `fsla`, `single_loop`, `soba`, `ma_soba`, `amigo` and their like,
            with `project=fsla.steps.Box(...)` or none. Others are refused.
        problem: a WeightedProblem with `rows`, and `direct=False`.
        at: the start. λ has a row for each sample that this rank owns, and is copied.
        xi: the sample that the start reads.
        shard: the samples that this rank owns; by default all. `rows` names samples by their number among all.
        around: wraps the problem, such as `fsla.GaussNewton` or, in several processes, `fsla.Reduced`.

    The run holds 12 bytes for each float32 weight (λ, d, the step of the last visit), and changes them in place, so
    that there is no going back to an old state.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        problem: WeightedProblem,
        at: Point,
        xi: Sample,
        *,
        shard: Shard | None = None,
        around: Callable[[WeightedProblem], Oracles] | None = None,
    ) -> None:
        self._prepare(algorithm, problem, around)
        tree.check(at.lam, "lam")
        lengths = {name: len(t) if t.ndim else 0 for name, t in at.lam.items()}
        length = next(iter(lengths.values()))
        self.shard = Shard(length) if shard is None else shard
        if set(lengths.values()) != {self.shard.size} or not length:
            raise ValueError(
                f"Every tensor of lam must have a row for each of this rank's {self.shard.size} samples, at least one. "
                f"Got {lengths} rows. Give LazyRows the rows of its shard alone: {self.shard}."
            )
        self.table = RowTable.begun(at.lam, self._rule.box)
        self._touch(xi)
        lam, _ = self.table.at(self._index)
        self.state: State = algorithm.init(self._problem, Point(lam, at.omega), xi)
        """Where the run stands; its λ and d are the rows that the last step touched."""
        self.table.put(self._index, self.state.at.lam, self.state.d)

    def _prepare(
        self,
        algorithm: Algorithm,
        problem: WeightedProblem,
        around: Callable[[WeightedProblem], Oracles] | None,
    ) -> None:
        self.algorithm = algorithm
        self._rule = Rule.of(algorithm)
        if not isinstance(problem, WeightedProblem) or problem.rows is None:
            raise TypeError(
                "The problem of LazyRows must be a fsla.WeightedProblem with rows, whose λ has a row for each sample. "
                f"Got {type(problem).__name__}{' without rows' if isinstance(problem, WeightedProblem) else ''} "
                "instead. Pass what goes around it as around=, such as around=fsla.GaussNewton."
            )
        if problem.direct:
            raise ValueError(
                "The outer loss F of LazyRows must not read λ, or every row would have a gradient at every step. The "
                "problem says direct=True. Say direct=False if F does not read λ; if it does, step the algorithm "
                "itself on the whole of λ."
            )
        self._rows = problem.rows
        self._index = torch.zeros(0, dtype=torch.long)
        renumbered = problem.on_rows(self._places)
        self._problem: Oracles = renumbered if around is None else around(renumbered)

    @property
    def k(self) -> int:
        return self.state.k

    def step(self, xi: Sample) -> State:
        """Takes a step. The state's λ and d are the rows of the sample's batches, in the order of their numbers."""
        rate = self.algorithm.rates(self.k)
        alpha, keep = self._rule.coefficients(rate)
        self._touch(xi)
        lam, d = self.table.at(self._index)
        before = self.state._replace(at=self.state.at._replace(lam=lam), d=d)
        self.state = self.algorithm.move(self._problem, before, xi, rate)
        self.table.decay.append(alpha, keep)
        self.table.put(self._index, self.state.at.lam, self.state.d)
        return self.state

    def rows(self, index: Tensor) -> tuple[Tree, Tree]:
        """λ and d of some samples, by their number among all, as they stand now."""
        return self.table.at(self._owned(index))

    def weights(self) -> Tree:
        """λ of all samples of this rank as it stands now."""
        whole = {name: torch.empty_like(t) for name, t in self.table.lam.items()}
        _fill(whole, self._sweep(CHUNK))
        return whole

    def gathered_parts(self, chunk: int = CHUNK, group: dist.ProcessGroup | None = None) -> Iterator[tuple[int, Tree]]:
        """Yields λ of all ranks on rank 0, `chunk` rows at a time: the number of the first, and the rows.

        On other ranks nothing; every rank must exhaust it.
        """
        return gather(self._sweep(chunk), self.shard, chunk, group)

    def gathered(self, chunk: int = CHUNK, group: dist.ProcessGroup | None = None) -> Tree | None:
        """λ of all ranks, on rank 0; None on the others. Every rank must call it."""
        whole = None
        if self.shard.rank == 0:
            whole = {name: t.new_empty((self.shard.n, *t.shape[1:])) for name, t in self.table.lam.items()}
        _fill({} if whole is None else whole, self.gathered_parts(chunk, group))
        return whole

    def _sweep(self, chunk: int) -> Iterator[tuple[int, Tree]]:
        for first, lam, _ in self.table.sweep(chunk):
            yield first, lam

    def state_dict(self) -> dict[str, Any]:
        """All that the run goes on from, for `save_checkpoint`. The tensors are the run's own: the next step changes
        them."""
        return {"shard": tuple(self.shard), "state": self.state, "rows": self.table.state_dict()}

    @classmethod
    def restored(
        cls,
        algorithm: Algorithm,
        problem: WeightedProblem,
        saved: Mapping[str, Any],
        *,
        shard: Shard | None = None,
        around: Callable[[WeightedProblem], Oracles] | None = None,
    ) -> LazyRows:
        """The run that a `state_dict` is of, as it would have gone on; the other arguments as for a new one."""
        run = cls.__new__(cls)
        run._prepare(algorithm, problem, around)
        run.shard = Shard(*saved["shard"])
        wanted = Shard(run.shard.n) if shard is None else shard
        if run.shard != wanted:
            raise ValueError(
                f"The saved run must be of the samples that this rank owns: {wanted}. Got {run.shard} instead. "
                "Start as many processes as wrote it, or call fsla.contrib.reshard first."
            )
        run.state = saved["state"]
        run.table = RowTable.restored(saved["rows"], run._rule.box)
        return run

    def _touch(self, xi: Sample) -> None:
        """Sets out which rows the sample's inner batches read, each once, in order."""
        needs = self.algorithm.needs
        asked = ((needs.inner, xi.inner), (needs.hvp, xi.hvp), (needs.cross, xi.cross))
        batches = {id(b): b for count, slot in asked if count for b in (slot if isinstance(slot, Batches) else [slot])}
        named: Tensor = torch.unique(torch.cat([self._named(batch) for batch in batches.values()]))
        self._index = self._owned(named)

    def _named(self, batch: Batch) -> Tensor:
        """The numbers of a batch's samples, where the rows are."""
        index = self._rows(batch.batch if isinstance(batch, Share) else batch)
        return index.to(self.table.last.device, torch.long)

    def _owned(self, index: Tensor) -> Tensor:
        """Where samples stand among this rank's."""
        own = index - self.shard.first
        if len(own) and not (int(own.min()) >= 0 and int(own.max()) < self.shard.size):
            raise IndexError(
                f"A rank must read samples of its own: {self.shard}. Got some from {int(index.min())} to "
                f"{int(index.max())}. Draw them with fsla.ShardSampler, or from the shard's first to its last."
            )
        return own

    def _places(self, batch: Batch) -> Tensor:
        """Where a batch's rows stand among those that the step touches."""
        return torch.searchsorted(self._index, self._named(batch) - self.shard.first)


def _fill(whole: Tree, parts: Iterator[tuple[int, Tree]]) -> None:
    for first, rows in parts:
        for name, t in rows.items():
            whole[name][first : first + len(t)] = t
