"""Started by torchrun: every algorithm in several processes against the same run in one; rank 0 writes the gaps."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fsla
from fsla import Point, Problem, StepBatches, WeightedLossProblem, make_functional
from fsla._tree import flatten
from fsla.distributed import SINGLE_PROCESS, DataParallelReducer, get_group
from fsla.train._engine import make_engine
from fsla_reproduction.algorithm_run import Run, run_algorithm
from support import F64, normal

RATES = fsla.steps.Schedule(0.1, 0.2, 0.2, 0.9, power=0.3)
ALGORITHMS = {
    "fsla": fsla.algorithms.fsla(RATES),
    "soba": fsla.algorithms.soba(RATES),
    "amigo": fsla.algorithms.amigo(RATES, inner_steps=2, hvp_steps=2),
    "mrbo": fsla.algorithms.mrbo(RATES, hvp_steps=3, adjoint_lr=0.2),
    "cg": fsla.algorithms.cg(RATES, hvp_steps=5),
    "f2sa": fsla.algorithms.f2sa(RATES),
}
LONG = ("fsla", "soba", "amigo", "f2sa")
UNEVEN = ("fsla", "cg")
"""Those that are given batches that do not divide evenly, too: all share the oracles."""
ROWS = 96


def network(samples_have_weights, device="cpu", reducer=None):
    torch.manual_seed(0)
    omega, net = make_functional(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device, F64))
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
        return Problem(inner, outer, reducer=reducer), Point({"class": torch.zeros(3, dtype=F64, device=device)}, omega)
    problem = WeightedLossProblem(
        each,
        lambda rows, i: rows["w"].sigmoid(),
        outer,
        regularizer=ridge,
        row_index=lambda i: i,
        outer_uses_lam=False,
        reducer=reducer,
    )
    return problem, Point({"w": torch.zeros(ROWS, dtype=F64, device=device)}, omega)


def reduced(samples_have_weights, device="cpu"):
    """The same problem, whose batches the processes share."""
    return network(samples_have_weights, device, DataParallelReducer())


def path(problem, at, algorithm, batch, steps, engine="eager", device="cpu"):
    """λ, ω and d after each step, of captured ones after the last; and how many messages a step sends."""
    generator = torch.Generator(device).manual_seed(0)

    def draw():
        return torch.randint(ROWS, (batch,), generator=generator, device=device)

    def batches():
        return StepBatches.draw("grouped", draw, draw)

    state = algorithm.init(problem, at, batches())
    before = get_group().messages  # those of the steps count
    steps_of = make_engine(engine, algorithm, problem, batches, generator, state)
    values = []
    for n in [1] * steps if engine == "eager" else [steps]:
        state = steps_of.advance(state, n)
        values.append(torch.cat([flatten(state.lam.value), flatten(state.omega.value), flatten(state.direction)]))
    assert steps_of.name == engine
    return torch.stack(values), (get_group().messages - before) / steps


def resumed(folder):
    """The gap between a run in two parts, on all ranks, with a clock that is asked, and one on this rank alone."""
    algorithm = ALGORITHMS["fsla"]
    ends = []
    for several in (False, True):
        problem, at = network(False, reducer=DataParallelReducer() if several else None)
        problem = fsla.CountedProblem(problem)
        generator = torch.Generator().manual_seed(0)

        def draw(generator=generator):
            return StepBatches.draw("grouped", *[lambda: torch.randint(ROWS, (16,), generator=generator)] * 2)

        def start(problem=problem, at=at, draw=draw):
            return algorithm.init(problem, at, draw())

        group = get_group() if several else SINGLE_PROCESS
        for steps in (10, 20) if several else (20,):
            result = run_algorithm(
                Run(algorithm, problem, generator, start, draw, group),
                max_steps=steps,
                eval_every=5,
                eval_fn=lambda state: {"omega": flatten(state.omega.value)},
                output_dir=folder if several else None,
                save_every=5,
                max_seconds=1e6,
                engine="eager",
            )
        ends.append(torch.tensor(result.records[-1]["omega"]))
    assert result.resumed_from == 10
    return float((ends[0] - ends[1]).abs().max())


def main(out, steps, *flags):
    every = "every" in flags
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gaps = {}
    for weights in (False, True):
        for name, algorithm in ALGORITHMS.items():
            for batch in (16, 7, 1) if name in UNEVEN else (16,):
                length = steps if (batch, weights) == (16, False) and (name in LONG or every) else 5
                single, _ = path(*network(weights), algorithm, batch, length)
                all_ranks, messages = path(*reduced(weights), algorithm, batch, length)
                gap = (single - all_ranks).abs().max() / single.abs().max()
                dist.all_reduce(gap, dist.ReduceOp.MAX)
                key = f"{name}, {'weights of samples' if weights else 'weights of classes'}, batches of {batch}"
                gaps[key] = [float(gap), messages]
    gaps["resumed"] = [resumed(f"{out}-run"), 0]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(gaps))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
