"""What a step costs by the number of weights, with rows that wait and with a sweep over all of them.

    python -m fsla_benchmarks.steps.rows 10000 1000000 100000000
    torchrun --nproc-per-node 2 -m fsla_benchmarks.steps.rows 10000 100000000

A small classifier (64 features, 10 classes, float32) with a weight for each of N samples, FSLA with STORM on batches of
64. The features are a table of 4096 rows that samples share, so that N weights need no memory but their own.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsla import algorithms
from fsla._tree import Tree
from fsla.algorithms import AlternatingState
from fsla.contrib import LazyRowOptimizer
from fsla.distributed import DataParallelReducer, IndexRange, ShardedSampler
from fsla.problems import Point, StepBatches, WeightedLossProblem
from fsla.steps import Schedule

KINDS = 4096
BATCH = 64
SWEPT = 10**7
"""The most weights for which a step that sweeps over all of them is timed too."""


class Cost(NamedTuple):
    """The median milliseconds of a step over all rounds, the median ratio to the step with the fewest weights of the
    same round, and the bytes that each weight takes on its rank."""

    n: int
    ms: float
    ratio: float
    bytes: float
    swept_ms: float | None


def problem() -> tuple[WeightedLossProblem, Tree]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(KINDS, 64, generator=generator)
    y = torch.randint(10, (KINDS,), generator=generator)

    def each(omega: Tree, index: Tensor) -> Tensor:
        kind = index % KINDS
        return nn.functional.cross_entropy(x[kind] @ omega["w"], y[kind], reduction="none")

    def outer(lam: Tree, omega: Tree, index: Tensor) -> Tensor:
        return each(omega, index).mean()

    weighted = WeightedLossProblem(
        each,
        lambda rows, index: rows["weight"].sigmoid(),
        outer,
        regularizer=lambda omega: 0.01 * omega["w"].square().sum(),
        row_index=lambda index: index,
        outer_uses_lam=False,
        reducer=DataParallelReducer(),
    )
    return weighted, {"w": torch.zeros(64, 10)}


def measured(counts: list[int], rounds: int = 60, turn: int = 10) -> list[Cost]:
    """Times steps for each number of weights, interleaved; on several ranks where there is a process group."""
    lazy = {n: _lazy(n) for n in counts}
    swept = {n: _swept(n) for n in counts if n <= SWEPT and not dist.is_initialized()}
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for n, (_, step) in lazy.items():
            seconds.setdefault(("lazy", n), []).append(_timed(step, turn))
        for n, step in swept.items():
            seconds.setdefault(("swept", n), []).append(_timed(step, max(1, turn * 10**5 // n)))
    costs = []
    for n, (run, _) in lazy.items():
        table = run.table
        tensors = [*table.lam.values(), *table.d.values(), table.last]
        size = sum(t.numel() * t.element_size() for t in tensors) / len(table)
        ms = {name: 1e3 * statistics.median(times) for (name, m), times in seconds.items() if m == n}
        pairs = zip(seconds["lazy", n], seconds["lazy", min(counts)], strict=True)
        ratio = statistics.median(time / unit for time, unit in pairs)
        costs.append(Cost(n, ms["lazy"], ratio, size, ms.get("swept")))
    return costs


def _timed(step: Callable[[], None], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - started) / count


ALGORITHM = algorithms.fsla(Schedule(100.0, 0.2, 0.2, 0.9, power=0.5))
Draw = Callable[[], StepBatches]


def _source(index_range: IndexRange) -> Draw:
    """Batches of the rank's own samples."""
    kinds = IndexRange(KINDS, index_range.rank, index_range.world_size)
    inner = ShardedSampler(index_range, BATCH, seed=0)
    outer = ShardedSampler(kinds, BATCH, seed=1)
    return lambda: StepBatches.draw("grouped", inner, outer)


def _lazy(n: int) -> tuple[LazyRowOptimizer[AlternatingState], Callable[[], None]]:
    index_range = IndexRange.for_this_rank(n)
    draw = _source(index_range)
    weighted, omega = problem()
    lam = {"weight": torch.zeros(1).expand(len(index_range))}
    run = LazyRowOptimizer(ALGORITHM, weighted, Point(lam, omega), draw(), index_range=index_range)
    for t in (*run.table.lam.values(), *run.table.d.values(), run.table.last):
        t.add_(0)  # or a row's first visit would wait for the system to give its page
    return run, lambda: _discard(run.step(draw()))


def _swept(n: int) -> Callable[[], None]:
    weighted, omega = problem()
    draw = _source(IndexRange(n))
    state = [ALGORITHM.init(weighted, Point({"weight": torch.zeros(n)}, omega), draw())]

    def step() -> None:
        state[0] = ALGORITHM.step(weighted, state[0], draw())

    return step


def _discard(result: object) -> None:
    """A step is taken for what it does."""


def main(counts: list[int]) -> None:
    torch.set_num_threads(1)
    distributed = dist.is_torchelastic_launched()
    if distributed:
        dist.init_process_group("gloo")
    costs = measured(counts)
    if not distributed or dist.get_rank() == 0:
        print(f"{'weights':>12}  {'ms a step':>9}  {'ratio':>5}  {'bytes a weight':>14}  {'ms a step that sweeps':>21}")
        for cost in costs:
            swept = "" if cost.swept_ms is None else f"{cost.swept_ms:.2f}"
            print(f"{cost.n:>12}  {cost.ms:>9.2f}  {cost.ratio:>5.2f}  {cost.bytes:>14.1f}  {swept:>21}")
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main([int(n) for n in sys.argv[1:]] or [10**4, 10**6])
