"""Short runs of every algorithm, recorded so that a redesign can be held to them.

`python tests/golden/trajectories.py` writes `trajectories.safetensors` beside this file; with names of algorithms it
records these anew and leaves all else as it is. The losses use torch alone, so that the file does not depend on how the
library asks for derivatives. `test_golden.py` compares a fresh run with it.

Two kinds of runs are younger than the others: those of `one_step`, and those on a module with automatic steps, in which
λ's unit follows from the force that it exerts on ω.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fsla
from fsla import Batch, BatchSpec, Point, Problem, StepBatches, algorithms
from fsla.algorithms._first_order import F2saState
from fsla.algorithms._penalty import PenaltyState

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

from rows import ROWS

FILE = Path(__file__).with_suffix(".safetensors")
F64 = torch.float64
RATES = fsla.steps.Schedule(0.1, 0.2, 0.15, 0.7, power=0.3)
STEPS = 8
PRODUCTS = {"exact": "reverse_over_reverse", "difference": "finite_difference"}
"""How products are computed, by the name of it in the file."""
MODULE_STEPS = 60
MODULE_EVERY = 5
"""The module's variables are recorded at every fifth step."""
MODULE_RUNS = {
    "fsla": (fsla.FSLA, {}),
    "fsla_average": (fsla.FSLA, {"momentum": "average"}),
    "fsla_storm": (fsla.FSLA, {"momentum": "storm"}),
    "fsla_new": (fsla.FSLA, {"adjoint_at": "new_params"}),
    "soba": (fsla.SOBA, {}),
    "masoba": (fsla.MASOBA, {}),
}
OPTIMIZERS = {
    "automatic": {},
    "torch": {
        "inner_optimizer": partial(torch.optim.Adam, lr=0.02),
        "adjoint_optimizer": partial(torch.optim.SGD, lr=0.2, momentum=0.5),
        "outer_optimizer": partial(torch.optim.Adam, lr=0.01),
    },
}


def batch(*place: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    """Return the samples of one batch: inputs and classes that follow from its place alone."""
    seed = 0
    for number in place:
        seed = 1009 * seed + number + 1
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, generator=generator, dtype=F64)
    noise = torch.randn(rows, generator=generator, dtype=F64)
    return x, (x[:, 0] * x[:, 1] + 0.3 * noise > 0).long()


# ------------------------------------------------------------------------------------------- functions of (lam, omega)


def _scores(omega: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ omega["first"] + omega["shift"]).tanh() @ omega["second"]


def inner_loss(lam: dict[str, Tensor], omega: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
    losses = nn.functional.cross_entropy(_scores(omega, data[0]), data[1], reduction="none")
    ridge = sum(t.square().sum() for t in omega.values())
    return (lam["weight"].exp()[data[1]] * losses).mean() + (0.2 + lam["ridge"].square()) * ridge


def outer_loss(lam: dict[str, Tensor], omega: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
    penalty = lam["weight"].square().sum() + lam["ridge"].square()
    return nn.functional.cross_entropy(_scores(omega, data[0]), data[1]) + 0.01 * penalty


def start() -> Point:
    generator = torch.Generator().manual_seed(0)
    shapes = {"first": (2, 3), "shift": (3,), "second": (3, 2)}
    omega = {name: torch.randn(shape, generator=generator, dtype=F64) / 2 for name, shape in shapes.items()}
    return Point({"weight": torch.tensor([0.1, 0.2], dtype=F64), "ridge": torch.tensor(0.3, dtype=F64)}, omega)


def draws(name: str, spec: BatchSpec) -> Iterator[StepBatches]:
    """Yield five different batches a step; SABA draws from four numbered ones."""
    for k in range(STEPS + 1):
        slots = [tuple(batch(k, slot, j) for j in range(max(count, 1))) for slot, count in enumerate(spec)]
        if name == "saba":
            numbers = [(k + slot) % 4 for slot in range(2)]
            slots[:2] = [(Batch(batch(100 + i, slot), number=i),) for slot, i in enumerate(numbers)]
        yield StepBatches.of(*slots, seed=k)


def run_functional(name: str, products: str) -> dict[str, Tensor]:
    """Return λ, ω, d and, where the algorithm carries a tree of ω's form, that tree as v: one row a step."""
    options = ROWS[name].options | ({"inner_batches": 4, "outer_batches": 4} if name == "saba" else {})
    algorithm = algorithms.get_algorithm(name)(step_sizes=RATES, **options)
    problem = Problem(inner_loss, outer_loss, hvp_method=PRODUCTS[products])
    drawn = draws(name, algorithm.batches)
    state = algorithm.init(problem, start(), next(drawn))
    states = [state]
    for batches in drawn:
        state = algorithm.step(problem, state, batches)
        states.append(state)
    rows = {
        "lam": [_flat(s.lam.value) for s in states],
        "omega": [_flat(s.omega.value) for s in states],
        "d": [_flat(s.direction) for s in states],
    }
    if _carried(state):
        rows["v"] = [_flat(_carried(s)) for s in states]
    return {key: torch.stack(values) for key, values in rows.items()}


def _carried(state: algorithms.State) -> Mapping[str, Tensor]:
    """v, or what takes its place: the multiplier of the penalty method, and the second inner variable of F2SA."""
    if isinstance(state, PenaltyState):
        return state.nu
    return state.y.value if isinstance(state, F2saState) else state.v


# --------------------------------------------------------------------------------------------------- a module in place


class Weights(nn.Module):
    """A weight for each of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor([0.1, 0.2], dtype=F64))


def _module_inner_loss(model: nn.Module, weights: Weights, data: tuple[Tensor, Tensor]) -> Tensor:
    losses = nn.functional.cross_entropy(model(data[0]), data[1], reduction="none")
    return (weights.log.exp()[data[1]] * losses).mean() + 0.1 * sum(p.square().sum() for p in model.parameters())


def _module_outer_loss(model: nn.Module, weights: Weights, data: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(data[0]), data[1]) + 0.01 * weights.log.square().sum()


def run_module(name: str, optimizers: str, products: str) -> dict[str, Tensor]:
    """Return λ, ω, v and d of a run on a small network, one row at every fifth step."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).to(F64)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=F64) / 2)
    weights = Weights()
    kind, options = MODULE_RUNS[name]
    losses = {"inner_loss": _module_inner_loss, "outer_loss": _module_outer_loss}
    bilevel = kind(model, weights, **losses, hvp_method=PRODUCTS[products], **options, **OPTIMIZERS[optimizers])
    rows: dict[str, list[Tensor]] = {"lam": [], "omega": [], "v": [], "d": []}
    for k in range(MODULE_STEPS):
        independent = (batch(k, 12), batch(k, 13)) if name == "fsla_storm" else None
        bilevel.step(batch(k, 10), batch(k, 11), independent_batches=independent, seed=k)
        if (k + 1) % MODULE_EVERY == 0:
            rows["lam"].append(_flat(dict(weights.named_parameters())))
            rows["omega"].append(_flat(dict(model.named_parameters())))
            rows["v"].append(_flat(bilevel.adjoint))
            rows["d"].append(_flat(bilevel.hypergradient))
    return {key: torch.stack(values) for key, values in rows.items()}


def _flat(tree: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tree.values()])


def record(names: Iterable[str], module_runs: Iterable[str]) -> dict[str, Tensor]:
    """Run algorithms as functions and on a module.

    A tensor's name is `function/ALGORITHM/PRODUCTS/VARIABLE` or `module/…`.
    """
    tensors = {}
    for products in PRODUCTS:
        for name in names:
            for variable, rows in run_functional(name, products).items():
                tensors[f"function/{name}/{products}/{variable}"] = rows
        for name in module_runs:
            for optimizers in OPTIMIZERS:
                for variable, rows in run_module(name, optimizers, products).items():
                    tensors[f"module/{name}/{optimizers}/{products}/{variable}"] = rows
    return tensors


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = sys.argv[1:]
    tensors = load_file(FILE) | record(names, ()) if names else record(ROWS, MODULE_RUNS)
    save_file(tensors, FILE, metadata={"torch": torch.__version__, "fsla": fsla.__version__})
    print(f"{FILE}: {FILE.stat().st_size} bytes")
