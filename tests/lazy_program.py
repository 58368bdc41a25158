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
from fsla import LazyRows, Point, Reduced, Sample, Shard, ShardSampler, WeightedProblem, functional
from fsla._tree import flatten
from fsla.contrib import load_shards, save_shards
from fsla.steps import Box
from support import F64, normal

SAMPLES, TRUSTED, SIZE = 101, 40, 9
FALLING = fsla.steps.Schedule(5.0, 0.2, 0.2, 0.9, power=0.5)
ALGORITHMS = {
    "storm": fsla.algorithms.fsla(FALLING),
    "none": fsla.algorithms.fsla(FALLING, momentum="none"),
    "soba": fsla.algorithms.soba(FALLING),
    "ma_soba in a box": fsla.algorithms.ma_soba(fsla.steps.constant(5.0, 0.2, 0.2, 0.05), project=Box(-0.1, 0.1)),
}


def weighted():
    """A weight and a temperature for each sample; F does not read λ."""
    torch.manual_seed(0)
    omega, net = functional(nn.Linear(6, 3).to(F64))
    x, y = normal(SAMPLES, 6, seed=1), torch.arange(SAMPLES) % 3
    z, t = normal(TRUSTED, 6, seed=2), torch.arange(TRUSTED) % 3

    def each(omega, i):
        return nn.functional.cross_entropy(net(omega, x[i]), y[i], reduction="none")

    def outer(lam, omega, i):
        return nn.functional.cross_entropy(net(omega, z[i]), t[i])

    problem = WeightedProblem(
        each,
        lambda rows, i: (rows["w"] + rows["pair"].sum(1)).sigmoid(),
        outer,
        regulariser=lambda omega: 0.05 * sum(p.square().sum() for p in omega.values()),
        rows=lambda i: i,
        direct=False,
    )
    lam = {"w": 0.1 * normal(SAMPLES, seed=5), "pair": 0.1 * normal(SAMPLES, 2, seed=6)}
    return problem, Point(lam, omega)


def sample(inner, trusted):
    """Two inner batches, one for ω and v and one for d, and one outer batch, which all ranks draw and share out."""
    return Sample.draw("grouped", inner, trusted)


def trusted_draws():
    generator = torch.Generator().manual_seed(7)
    return lambda: torch.randint(TRUSTED, (5,), generator=generator)


def swept(algorithm, steps, world):
    """The run that sweeps, in one process, on the batches of all ranks."""
    problem, at = weighted()
    inner, trusted = ShardSampler.whole(SAMPLES, world, SIZE, seed=3), trusted_draws()
    state = algorithm.init(problem, at, sample(inner, trusted))
    for _ in range(steps):
        state = algorithm.step(problem, state, sample(inner, trusted))
    return state


class Run:
    """A run on this rank's rows, with its samplers."""

    def __init__(self, algorithm, shard, saved=None):
        problem, at = weighted()
        self.reduced = []
        self.inner, self.trusted = ShardSampler(shard, SIZE, seed=3), trusted_draws()
        if saved is not None:
            self.inner.load_state_dict(saved.also)
            for _ in range(2 * (saved.run["state"].k + 1)):
                self.trusted()
            self.lazy = LazyRows.restored(algorithm, problem, saved.run, shard=shard, around=self.around)
            return
        own = {name: t[shard.first : shard.last] for name, t in at.lam.items()}
        first = sample(self.inner, self.trusted)
        self.lazy = LazyRows(algorithm, problem, Point(own, at.omega), first, shard=shard, around=self.around)

    def around(self, problem):
        self.reduced.append(Reduced(problem))
        return self.reduced[0]

    def advance(self, steps):
        for _ in range(steps):
            self.lazy.step(sample(self.inner, self.trusted))


def gap(a, b):
    return float((flatten(a) - flatten(b)).abs().max() / flatten(b).abs().max())


def main(folder, steps):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shard = Shard.own(SAMPLES)
    found = {}
    for name, algorithm in ALGORITHMS.items():
        run = Run(algorithm, shard)
        run.reduced[0].messages = 0
        run.advance(steps // 2)
        messages = run.reduced[0].messages / (steps // 2)
        save_shards(folder / name, run.lazy, run.inner.state_dict())
        run.advance(steps - steps // 2)
        if name == "storm":
            again = Run(algorithm, shard, load_shards(folder / name, shard))
            again.advance(steps - steps // 2)
            assert torch.equal(flatten(again.lazy.weights()), flatten(run.lazy.weights()))
        save_shards(folder / name, run.lazy, run.inner.state_dict())
        lam = run.lazy.gathered(chunk=7)
        if shard.rank == 0:
            expected = swept(algorithm, steps, shard.world)
            gaps = [gap(lam, expected.at.lam), gap(run.lazy.state.at.omega, expected.at.omega)]
            found[name] = {"gaps": gaps, "messages": messages}
        else:
            assert lam is None
    if shard.rank == 0:
        (folder / "gaps").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
