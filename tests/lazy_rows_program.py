"""Rows that live on several ranks, against one process that sweeps over all of λ; started by torchrun, with a folder.

Rank 0 writes the gaps and the messages of a step to `gaps`, and leaves a saved run for one process to go on with.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fsla
from fsla import LazyRowOptimizer, Point, StepBatches, WeightedLossProblem, make_functional
from fsla._tree import flatten
from fsla.contrib import load_shards, save_shards
from fsla.distributed import DataParallelReducer, IndexRange, ShardedSampler, get_group
from fsla.steps import Box
from support import F64, normal

SAMPLES, TRUSTED, SIZE = 101, 40, 9
FALLING = fsla.steps.Schedule(5.0, 0.2, 0.2, 0.9, power=0.5)
ALGORITHMS = {
    "storm": fsla.algorithms.fsla(FALLING),
    "none": fsla.algorithms.fsla(FALLING, momentum="none"),
    "soba": fsla.algorithms.soba(FALLING),
    "ma_soba in a box": fsla.algorithms.ma_soba(fsla.steps.constant(5.0, 0.2, 0.2, 0.05), projection=Box(-0.1, 0.1)),
}


def weighted(reducer=None):
    """A weight and a temperature for each sample; F does not read λ."""
    torch.manual_seed(0)
    omega, net = make_functional(nn.Linear(6, 3).to(F64))
    x, y = normal(SAMPLES, 6, seed=1), torch.arange(SAMPLES) % 3
    z, t = normal(TRUSTED, 6, seed=2), torch.arange(TRUSTED) % 3

    def each(omega, i):
        return nn.functional.cross_entropy(net(omega, x[i]), y[i], reduction="none")

    def outer(lam, omega, i):
        return nn.functional.cross_entropy(net(omega, z[i]), t[i])

    problem = WeightedLossProblem(
        each,
        lambda rows, i: (rows["w"] + rows["pair"].sum(1)).sigmoid(),
        outer,
        regularizer=lambda omega: 0.05 * sum(p.square().sum() for p in omega.values()),
        row_index=lambda i: i,
        outer_uses_lam=False,
        reducer=reducer,
    )
    lam = {"w": 0.1 * normal(SAMPLES, seed=5), "pair": 0.1 * normal(SAMPLES, 2, seed=6)}
    return problem, Point(lam, omega)


def draw(inner, trusted):
    """Two inner batches, one for ω and v and one for d, and one outer batch, which all ranks draw and share out."""
    return StepBatches.draw("grouped", inner, trusted)


def trusted_draws():
    generator = torch.Generator().manual_seed(7)
    return lambda: torch.randint(TRUSTED, (5,), generator=generator)


def swept(algorithm, steps, world_size):
    """The run that sweeps, in one process, on the batches of all ranks."""
    problem, at = weighted()
    inner, trusted = ShardedSampler.global_batches(SAMPLES, world_size, SIZE, seed=3), trusted_draws()
    state = algorithm.init(problem, at, draw(inner, trusted))
    for _ in range(steps):
        state = algorithm.step(problem, state, draw(inner, trusted))
    return state


class Run:
    """A run on this rank's rows, with its samplers."""

    def __init__(self, algorithm, index_range, saved=None):
        problem, at = weighted(DataParallelReducer())
        self.inner, self.trusted = ShardedSampler(index_range, SIZE, seed=3), trusted_draws()
        local = {name: t[index_range.start : index_range.stop] for name, t in at.lam.items()}
        first = draw(self.inner, self.trusted)
        self.lazy = LazyRowOptimizer(algorithm, problem, Point(local, at.omega), first, index_range=index_range)
        if saved is not None:
            self.lazy.load_state_dict(saved.state)
            self.inner.load_state_dict(saved.extra)
            for _ in range(2 * self.lazy.step_count):
                self.trusted()

    def advance(self, steps):
        for _ in range(steps):
            self.lazy.step(draw(self.inner, self.trusted))


def gap(a, b):
    return float((flatten(a) - flatten(b)).abs().max() / flatten(b).abs().max())


def main(folder, steps):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    index_range = IndexRange.for_this_rank(SAMPLES)
    gaps_by_name = {}
    for name, algorithm in ALGORITHMS.items():
        run = Run(algorithm, index_range)
        before = get_group().messages
        run.advance(steps // 2)
        messages = (get_group().messages - before) / (steps // 2)
        save_shards(folder / name, run.lazy, run.inner.state_dict())
        run.advance(steps - steps // 2)
        if name == "storm":
            again = Run(algorithm, index_range, load_shards(folder / name, index_range))
            again.advance(steps - steps // 2)
            assert torch.equal(flatten(again.lazy.weights()), flatten(run.lazy.weights()))
        save_shards(folder / name, run.lazy, run.inner.state_dict())
        lam = run.lazy.gather(chunk=7)
        if index_range.rank == 0:
            expected = swept(algorithm, steps, index_range.world_size)
            gaps = [gap(lam, expected.lam.value), gap(run.lazy.state.omega.value, expected.omega.value)]
            gaps_by_name[name] = {"gaps": gaps, "messages": messages}
        else:
            assert lam is None
    if index_range.rank == 0:
        (folder / "gaps").write_text(json.dumps(gaps_by_name))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
