"""Started by torchrun: every algorithm in several processes against the same run in one; rank 0 writes the gaps."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fsla
from fsla import Point, Problem, Sample, WeightedProblem, functional
from fsla._tree import flatten
from fsla.train import Run, make_engine, train
from support import F64, normal

RATES = fsla.steps.Schedule(0.1, 0.2, 0.2, 0.9, power=0.3)
ALGORITHMS = {
    "fsla": fsla.algorithms.fsla(RATES),
    "soba": fsla.algorithms.soba(RATES),
    "amigo": fsla.algorithms.amigo(RATES, T=2, Q=2),
    "mrbo": fsla.algorithms.mrbo(RATES, Q=3, step=0.2),
    "cg": fsla.algorithms.cg(RATES, K=5),
    "f2sa": fsla.algorithms.f2sa(RATES),
}
LONG = ("fsla", "soba", "amigo", "f2sa")
UNEVEN = ("fsla", "cg")
"""Those that are given batches that do not divide evenly, too: all share the oracles."""
ROWS = 96


def network(samples_have_weights, device="cpu"):
    torch.manual_seed(0)
    omega, net = functional(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device, F64))
    x, z = normal(ROWS, 6, seed=1).to(device), normal(ROWS, 6, seed=2).to(device)
    y = torch.arange(ROWS, device=device) % 3

    def ridge(omega):
        return 0.3 * sum(t.square().sum() for t in omega.values())

    def each(omega, i):
        return nn.functional.cross_entropy(net(omega, x[i]), y[i], reduction="none")

    def inner(lam, omega, i):
        return (lam["class"].exp()[y[i]] * each(omega, i)).mean() + ridge(omega)

    def outer(lam, omega, i):
        direct = 0.0 if samples_have_weights else 0.01 * lam["class"].square().sum()
        return nn.functional.cross_entropy(net(omega, z[i]), y[i]) + direct

    if not samples_have_weights:
        return Problem(inner, outer), Point({"class": torch.zeros(3, dtype=F64, device=device)}, omega)
    problem = WeightedProblem(
        each, lambda rows, i: rows["w"].sigmoid(), outer, regulariser=ridge, rows=lambda i: i, direct=False
    )
    return problem, Point({"w": torch.zeros(ROWS, dtype=F64, device=device)}, omega)


def path(problem, at, algorithm, batch, steps, engine="eager", device="cpu"):
    """λ, ω and d after each step; of a captured one, after the last."""
    generator = torch.Generator(device).manual_seed(0)

    def draw():
        return torch.randint(ROWS, (batch,), generator=generator, device=device)

    def sample():
        return Sample.draw("grouped", draw, draw)

    state = algorithm.init(problem, at, sample())
    if isinstance(problem, fsla.Reduced):
        problem.messages = 0  # those of the steps count
    steps_of = make_engine(engine, algorithm, problem, sample, generator, state)
    found = []
    for n in [1] * steps if engine == "eager" else [steps]:
        state = steps_of.advance(state, n)
        found.append(torch.cat([flatten(state.at.lam), flatten(state.at.omega), flatten(state.d)]))
    assert steps_of.name == engine
    return torch.stack(found)


def trained(checkpoint):
    """The gap between a run in two parts, on all ranks, with a clock that is asked, and one on this rank alone."""
    algorithm = ALGORITHMS["fsla"]
    ends = []
    for reduced in (False, True):
        problem, at = network(False)
        problem = fsla.Counted(fsla.Reduced(problem) if reduced else problem)
        generator = torch.Generator().manual_seed(0)

        def draw(generator=generator):
            return Sample.draw("grouped", *[lambda: torch.randint(ROWS, (16,), generator=generator)] * 2)

        run = Run(algorithm, problem, generator, lambda p=problem, a=at, d=draw: algorithm.init(p, a, d()), draw)
        for steps in (10, 20) if reduced else (20,):
            records = train(
                run,
                steps=steps,
                every=5,
                measure=lambda state: {"omega": flatten(state.at.omega)},
                checkpoint=checkpoint if reduced else None,
                save_every=5,
                budget_s=1e6,
                engine="eager",
            )
        ends.append(torch.tensor(records[-1]["omega"]))
    return float((ends[0] - ends[1]).abs().max())


def main(out, steps, *engines):
    every = len(engines) > 1
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gaps = {}
    for weights in (False, True):
        for name, algorithm in ALGORITHMS.items():
            for batch in (16, 7, 1) if name in UNEVEN else (16,):
                length = steps if (batch, weights) == (16, False) and (name in LONG or every) else 5
                problem, at = network(weights)
                alone = path(problem, at, algorithm, batch, length)
                reduced = fsla.Reduced(problem)
                together = path(reduced, at, algorithm, batch, length)
                gap = (alone - together).abs().max() / alone.abs().max()
                dist.all_reduce(gap, dist.ReduceOp.MAX)
                key = f"{name}, {'weights of samples' if weights else 'weights of classes'}, batches of {batch}"
                gaps[key] = [float(gap), reduced.messages / length]
        for engine in engines:
            problem, at = network(weights)
            alone = path(problem, at, ALGORITHMS["fsla"], 16, 10)[-1]
            replayed = path(fsla.Reduced(problem), at, ALGORITHMS["fsla"], 16, 10, engine)[-1]
            gaps[f"{engine}, {weights}"] = [float((alone - replayed).abs().max()), 0]
    gaps["train"] = [trained(f"{out}.safetensors"), 0]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(gaps))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
