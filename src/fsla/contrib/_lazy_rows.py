"""A weight for each of N samples, at the cost of a batch a step and not of N.

A step runs the algorithm itself, unchanged, on a short λ: the rows of the samples that it reads, brought up to date by
what `_decay` knows. All that it does to λ and d is row by row, so that nothing differs for it, and the rows
that it does not read wait until they are seen again. The numbers are those of the algorithm on the whole of λ, to
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsla import _tree as tree
from fsla._checks import instance
from fsla._tree import Tree
from fsla.algorithms._base import Algorithm, State
from fsla.algorithms._orders import Alternating, Simultaneous
from fsla.contrib._decay import CHUNK, RowTable, check_rows
from fsla.distributed._partition import BatchShard
from fsla.distributed._shards import IndexRange, gather_rows
from fsla.problems._batches import Batch, StepBatches
from fsla.problems._views import Oracles, Point
from fsla.problems._weighted import WeightedLossProblem
from fsla.steps._momentum import Direction
from fsla.steps._projections import Box
from fsla.steps._schedules import Rates
from fsla.steps._updates import GradientDescent, Projected, Update, Variable
from fsla.train._schema import check_forms, check_numbers

S = TypeVar("S", bound=State)


class Rule(NamedTuple):
    """How an algorithm moves a row that its batches do not hold."""

    momentum: Direction
    """Of λ."""
    fresh: bool
    """Whether λ moves by the new direction, or by that of the step before."""
    box: Box | None

    @classmethod
    def of(cls, algorithm: Algorithm[Any]) -> Rule:
        """Raise unless the algorithm moves such a row by a rule that is known beforehand and reads no other row."""
        outer = algorithm.updates.outer
        if isinstance(algorithm, Alternating) and type(algorithm).move is Alternating.move:
            if not algorithm.estimator.row_wise:
                raise _refused(f"the estimator {type(algorithm.estimator).__name__}, which reads λ as a whole")
            return cls(algorithm.momentum, algorithm.outer_last, _box(outer))
        if not (isinstance(algorithm, Simultaneous) and type(algorithm).move is Simultaneous.move):
            raise _refused(type(algorithm).__name__)
        if algorithm.looks_back:
            raise _refused("one in SOBA's order with STORM or SPIDER, which look at the λ of the step before")
        if algorithm.estimator is not None and not algorithm.estimator.row_wise:
            raise _refused(f"the estimator {type(algorithm.estimator).__name__}, which reads λ as a whole")
        return cls(algorithm.outer_momentum, not algorithm.delayed_outer, _box(outer))

    def coefficients(self, rates: Rates) -> tuple[float, float]:
        """Return (α, κ) of `fsla.contrib._decay` for a step with these rates in which λ moves."""
        keep = 1.0 - float(rates.new_grad_weight) if self.momentum.remembers else 0.0
        alpha = float(rates.outer_lr) * (keep if self.fresh else 1.0)
        if self.box is not None and not (alpha >= 0 and keep >= 0):
            raise ValueError(
                "Rows that wait can be kept in a Box only if outer_lr ≥ 0 and new_grad_weight ≤ 1: else they may leave "
                f"a bound again before they are seen. Got outer_lr = {float(rates.outer_lr)}, new_grad_weight = "
                f"{float(rates.new_grad_weight)}. Change the step sizes, or drop the Box."
            )
        return alpha, keep


def _box(update: Update) -> Box | None:
    """The box that λ stays in; raises unless λ moves by plain steps that remember nothing."""
    inside = update.update if isinstance(update, Projected) else update
    box = update.onto if isinstance(update, Projected) else None
    if isinstance(inside, GradientDescent) and (box is None or isinstance(box, Box)):
        return box
    raise _refused(f"an outer update {type(update).__name__}{f' onto {type(box).__name__}' if box else ''}")


def _refused(what: str) -> ValueError:
    return ValueError(
        "The algorithm of LazyRowOptimizer must move each row of λ by itself: λ_j ← λ_j - α d_j, in a Box if anywhere, "
        f"with d plain, averaged or by STORM. Got {what} instead. Use fsla.algorithms.fsla, soba or ma_soba, or step "
        "the algorithm itself on the whole of λ."
    )


class LazyRowOptimizer(Generic[S]):
    """Run of an algorithm that touches only the rows of its batches, with the numbers of one that sweeps over λ.

    Args:
        algorithm: one that moves each row of λ by itself, such as ``fsla.algorithms.fsla``, ``soba`` or ``ma_soba``.
        problem: a `fsla.WeightedLossProblem` with a `row_index`, whose outer loss does not read λ.
        at: where the run starts; λ has a row for each sample that this rank owns.
        batches: the batches that the algorithm starts from.
        index_range: samples that this rank owns; by default all of them.
        wrap_problem: makes the problem that is asked from the one on rows, such as ``fsla.GaussNewtonProblem``.

    Attributes:
        state: state of the run; its λ and d are the rows that the last step touched.

    Raises:
        ValueError: if the algorithm or the outer loss reads λ as a whole, or λ has another number of rows.
        TypeError: if the problem has no `row_index`.

    Examples:
        >>> for _ in range(200):
        ...     state = run.step(draw())
        >>> weights = run.weights()["logit"].sigmoid()
        >>> bool(weights[data == 0].mean() > weights[data == 1].mean())
        True
    """

    def __init__(
        self,
        algorithm: Algorithm[S],
        problem: WeightedLossProblem,
        at: Point,
        batches: StepBatches,
        *,
        index_range: IndexRange | None = None,
        wrap_problem: Callable[[WeightedLossProblem], Oracles] | None = None,
    ) -> None:
        instance(algorithm, Algorithm, "algorithm", "LazyRowOptimizer", "an algorithm, such as fsla.algorithms.soba()")
        if index_range is not None:
            instance(index_range, IndexRange, "index_range", "LazyRowOptimizer", "a fsla.distributed.IndexRange")
        self._rule = Rule.of(algorithm)
        _check_problem(problem)
        assert problem.row_index is not None
        tree.check(at.lam, "lam")
        lengths = {name: len(t) if t.ndim else 0 for name, t in at.lam.items()}
        self.index_range = IndexRange(next(iter(lengths.values()))) if index_range is None else index_range
        if set(lengths.values()) != {len(self.index_range)} or not len(self.index_range):
            raise ValueError(
                f"Every tensor of lam must have a row for each of this rank's {len(self.index_range)} samples, at "
                f"least one. Got {lengths} rows. Give LazyRowOptimizer the rows of its own samples alone: "
                f"{self.index_range}."
            )
        self.algorithm = algorithm
        self._row_index = problem.row_index
        self._index = torch.zeros(0, dtype=torch.long)
        on_rows = problem.on_rows(self._places)
        self._problem: Oracles = on_rows if wrap_problem is None else wrap_problem(on_rows)
        self.table = RowTable.init_rows(at.lam, self._rule.box)
        self._touch(batches)
        lam, _ = self.table.get_rows(self._index)
        self.state: S = algorithm.init(self._problem, Point(lam, at.omega), batches)
        """Where the run is; its λ and d are the rows that the last step touched."""
        self.table.set_rows(self._index, self.state.lam.value, self.state.direction)

    @property
    def step_count(self) -> int:
        """Steps that were taken."""
        return self.state.step_count

    def step(self, batches: StepBatches) -> S:
        """Take a step. The λ and d of the state are the rows of its batches, in the order of their indices."""
        algorithm = self.algorithm
        due = algorithm.due(self.step_count)
        rates = algorithm.step_sizes.rates(self.step_count, self.state.measured)
        alpha, keep = self._rule.coefficients(rates) if due else (0.0, 1.0)
        self._touch(batches)
        lam, d = self.table.get_rows(self._index)
        before = replace(self.state, lam=Variable(lam), direction=d)
        self.state = algorithm.step(self._problem, before, batches)
        self.table.decay.append(alpha, keep)
        self.table.set_rows(self._index, self.state.lam.value, self.state.direction)
        return self.state

    def rows(self, index: Tensor) -> tuple[Tree, Tree]:
        """Return λ and d of some samples as they are now, by their index among all."""
        return self.table.get_rows(self._owned(index))

    def weights(self) -> Tree:
        """Return λ of all samples of this rank as it is now."""
        whole = {name: torch.empty_like(t) for name, t in self.table.lam.items()}
        _fill(whole, self._sweep(CHUNK))
        return whole

    def gather_shards(self, chunk: int = CHUNK, group: dist.ProcessGroup | None = None) -> Iterator[tuple[int, Tree]]:
        """Yield λ of all ranks on rank 0, `chunk` rows at a time: the index of the first, and the rows.

        On other ranks nothing; every rank must exhaust it.
        """
        return gather_rows(self._sweep(chunk), self.index_range, chunk, group)

    def gather(self, chunk: int = CHUNK, group: dist.ProcessGroup | None = None) -> Tree | None:
        """Return λ of all ranks, on rank 0; None on the others. Every rank must call it."""
        whole = None
        if self.index_range.rank == 0:
            count = self.index_range.num_samples
            whole = {name: t.new_empty((count, *t.shape[1:])) for name, t in self.table.lam.items()}
        _fill({} if whole is None else whole, self.gather_shards(chunk, group))
        return whole

    def _sweep(self, chunk: int) -> Iterator[tuple[int, Tree]]:
        for first, lam, _ in self.table.sweep(chunk):
            yield first, lam

    def state_dict(self) -> dict[str, Any]:
        """Return all that the run goes on from, for `save_checkpoint`.

        The tensors are the run's own: the next step changes them.
        """
        return {"index_range": self.index_range, "state": self.state, "rows": self.table.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            ValueError: if it is malformed, or of samples that this rank does not own; then nothing is set.
        """
        _check_saved(saved, self.state)
        if saved["index_range"] != self.index_range:
            raise ValueError(
                f"The saved run must be of the samples that this rank owns: {self.index_range}. Got "
                f"{saved['index_range']} instead. Start as many processes as wrote it, or call fsla.contrib.reshard "
                "first."
            )
        check_rows(saved["rows"], self.table.state_dict())
        if saved["state"].step_count != saved["rows"]["decay"]["k"]:
            raise ValueError("Cannot load state: its parts are of different steps.")
        self.state = saved["state"]
        self.table = RowTable.from_state_dict(saved["rows"], self._rule.box)

    def _touch(self, batches: StepBatches) -> None:
        """Set out which rows the inner batches of a step read, each once, in order."""
        spec = self.algorithm.batches
        slots = (spec.inner_grad, batches.inner_grad), (spec.hvp, batches.hvp), (spec.mixed_hvp, batches.mixed_hvp)
        distinct = dict.fromkeys(batch for count, slot in slots if count for batch in slot)
        named: Tensor = torch.unique(torch.cat([self._named(batch) for batch in distinct]))
        self._index = self._owned(named)

    def _named(self, batch: Batch) -> Tensor:
        """The indices of a batch's samples, where the rows are."""
        return self._indices(batch.data.batch if isinstance(batch.data, BatchShard) else batch.data)

    def _indices(self, data: Any) -> Tensor:
        return self._row_index(data).to(self.table.last.device, torch.long)

    def _owned(self, index: Tensor) -> Tensor:
        """Where samples are among this rank's."""
        local = index - self.index_range.start
        if len(local) and not (int(local.min()) >= 0 and int(local.max()) < len(self.index_range)):
            raise IndexError(
                f"A rank must read samples of its own: {self.index_range}. Got some from {int(index.min())} to "
                f"{int(index.max())}. Draw them with fsla.distributed.ShardedSampler, or from its own range."
            )
        return local

    def _places(self, data: Any) -> Tensor:
        """Where a batch's rows are among those that the step touches."""
        return torch.searchsorted(self._index, self._indices(data) - self.index_range.start)


def _check_saved(saved: Mapping[str, Any], state: State) -> None:
    """Raise a ValueError unless a saved run has the parts of this one, and ω and v of its form."""
    if not isinstance(saved, Mapping) or saved.keys() != {"index_range", "state", "rows"}:
        raise ValueError("Cannot load state: it is not what state_dict returns.")
    if not isinstance(saved["index_range"], IndexRange):
        raise ValueError("Cannot load state: its index_range is malformed.")
    there = saved["state"]
    if type(there) is not type(state):
        raise ValueError(f"Cannot load state: it is of a {type(there).__name__}, expected a {type(state).__name__}.")
    check_numbers("state", there)
    check_forms("omega", there.omega.value, state.omega.value)
    check_forms("adjoint", there.v, state.v)
    for name, t in state.direction.items():
        row = there.direction.get(name)
        if row is None or row.dtype != t.dtype or row.shape[1:] != t.shape[1:] or name not in there.lam.value:
            raise ValueError(f"Cannot load state: the rows of {name!r} that its last step touched are malformed.")


def _check_problem(problem: WeightedLossProblem) -> None:
    if not isinstance(problem, WeightedLossProblem) or problem.row_index is None:
        without = " without row_index" if isinstance(problem, WeightedLossProblem) else ""
        raise TypeError(
            "The problem of LazyRowOptimizer must be a fsla.WeightedLossProblem with row_index, whose λ has a row for "
            f"each sample. Got {type(problem).__name__}{without} instead. Pass what goes around it as wrap_problem=, "
            "such as wrap_problem=fsla.GaussNewtonProblem."
        )
    if problem.outer_uses_lam:
        raise ValueError(
            "The outer loss F of LazyRowOptimizer must not read λ, or every row would have a gradient at every step. "
            "The problem says outer_uses_lam=True. Say outer_uses_lam=False if F does not read λ; if it does, step the "
            "algorithm itself on the whole of λ."
        )


def _fill(whole: Tree, parts: Iterator[tuple[int, Tree]]) -> None:
    for first, rows in parts:
        for name, t in rows.items():
            whole[name][first : first + len(t)] = t
