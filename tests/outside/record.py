"""Records what other implementations do on the small problem, for `test_outside.py`. A program, not a test.

These commands wrote the recorded file, on a CPU, all in double precision:

    git clone https://github.com/benchopt/benchmark_bilevel
    git -C benchmark_bilevel checkout 3ad65dccff5cce27a656630a4f98be52920850b4
    python3.11 -m venv others
    others/bin/pip install torch==2.13.0 jax==0.10.2 higher==0.2.1 torchopt==0.7.3 betty-ml==0.1.1
    others/bin/python tests/outside/record.py benchmark_bilevel

Nothing of these projects is in this repository. benchmark_bilevel's solvers run as they are, step by step: their own
`init` and `get_step` (BOME: `run`), with a substitute for the benchmark runner that they import, and with draws of
batches of our own, since their sampler draws the last batch of an epoch twice. Two runs are not theirs alone:
benchmark_bilevel has no MA-SOBA, so its SOBA step gives ω, v and the direction of λ, and the moving average around it
is ours; and its F2SA lets the multiplier grow too fast, so that it is put back after each step. Of a run all λ are
recorded, and the last ω and v; where a solver draws random lengths, so are these.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import logging
import platform
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from small_problem import BATCH, INNER_ROWS, LAM, OMEGA, OUTER_ROWS, TARGET, batch_of_draw, inner_data, outer_data

jax.config.update("jax_enable_x64", True)

LIBRARIES = ("jax", "torch", "higher", "torchopt", "betty-ml")


class Run(NamedTuple):
    """A solver of benchmark_bilevel, its parameters, and how it is run: with `full`, every batch is all the rows."""

    solver: str
    options: dict[str, Any]
    full: bool = False
    steps: int = 6
    lam: tuple[float, float] = LAM


SIZES = {"step_size": 0.5, "outer_ratio": 2.0}
F2SA = {"step_size": 0.3, "outer_ratio": 2.0, "lmbda0": 0.5, "delta_lmbda": 0.1, "n_inner_steps": 2}
RUNS = {
    "fsla": Run("fsla", SIZES),
    "fsla from zero": Run("fsla", SIZES, lam=(0.0, 0.0)),
    "soba": Run("soba", SIZES),
    "ma_soba": Run("soba", SIZES | {"eta": 0.4}),
    "amigo": Run("amigo", SIZES | {"n_inner_steps": 3}),
    "stocbio": Run("stocbio", SIZES | {"n_inner_steps": 3, "n_shia_steps": 4}),
    "bsa": Run("bsa", SIZES | {"n_inner_steps": 1, "n_hia_steps": 4}),
    "bsa full": Run("bsa", SIZES | {"n_inner_steps": 2, "n_hia_steps": 4}, full=True),
    "ttsa": Run("ttsa", SIZES | {"n_hia_steps": 4}),
    "sustain": Run("sustain", SIZES | {"n_hia_steps": 4, "eta": 1.0}),
    "mrbo": Run("mrbo", SIZES | {"n_shia_steps": 4, "eta": 1.0}),
    "vrbo": Run("vrbo", SIZES | {"n_shia_steps": 4, "n_inner_steps": 3, "period_frac": 0.5}, steps=1),
    "saba": Run("saba", SIZES),
    "srba": Run("srba", SIZES | {"period_frac": 0.5}),
    "f2sa": Run("f2sa", F2SA, full=True),
    "f2sa as it is": Run("f2sa", F2SA, full=True),
    "bome": Run("bome", SIZES | {"n_inner_steps": 3, "eta": 0.5, "choice_phi": "grad_norm"}, full=True),
}


# ------------------------------------------------------------------------------------------------- benchmark_bilevel


def install_substitute() -> None:
    """What the solvers import of the benchmark runner, and do not use when they are stepped by hand."""
    runner = types.ModuleType("benchopt")
    stopping = types.ModuleType("benchopt.stopping_criterion")
    runner.BaseSolver = type("BaseSolver", (), {})
    runner.safe_import_context = contextlib.nullcontext
    stopping.SufficientProgressCriterion = lambda **options: None
    sys.modules |= {"benchopt": runner, "benchopt.stopping_criterion": stopping}


def rows(data: dict[str, Any], start: Any, batch_size: int) -> dict[str, Any]:
    return {name: jax.lax.dynamic_slice_in_dim(jnp.asarray(a), start, batch_size) for name, a in data.items()}


def inner_in_jax(omega: Any, lam: Any, start: Any = 0, batch_size: int = INNER_ROWS) -> Any:
    b = rows(inner_data(), start, batch_size)
    m = b["x"] @ omega
    losses = jax.nn.sigmoid(b["z"] @ lam) * (jax.nn.softplus(m) - b["t"] * m)
    return losses.mean() + 0.15 * jnp.exp(lam[0]) * (omega @ omega)


def outer_in_jax(omega: Any, lam: Any, start: Any = 0, batch_size: int = OUTER_ROWS) -> Any:
    b = rows(outer_data(), start, batch_size)
    m = b["c"] @ omega
    return (jax.nn.softplus(m) - b["s"] * m).mean() + 0.05 * jnp.sum((lam - jnp.array(TARGET)) ** 2)


def draw(batch_size: int, state: dict[str, Any]) -> tuple[Any, Any, float, dict[str, Any]]:
    """A sampler with the interface of theirs, and our own order: start, number and weight of the batch, and state."""
    batches = state["batch_order"].shape[0]
    number = batch_of_draw(state["draw"], batches)
    return batch_size * number, number, 1.0 / batches, state | {"draw": state["draw"] + 1}


def prepared(run: Run) -> Any:
    """A solver with its parameters and the problem set, as the benchmark's runner would."""
    solver = importlib.import_module(f"solvers.{run.solver}").Solver()
    for key, value in run.options.items():
        setattr(solver, key, value)
    solver.batch_size, solver.random_state = BATCH, 1
    solver.inner_var0, solver.outer_var0 = jnp.array(OMEGA), jnp.array(run.lam)
    for level, loss, count in (("inner", inner_in_jax, INNER_ROWS), ("outer", outer_in_jax, OUTER_ROWS)):
        size = count if run.full else BATCH
        setattr(solver, f"f_{level}", partial(loss, batch_size=size))
        setattr(solver, f"n_{level}_samples", count)
        setattr(solver, f"batch_size_{level}", size)
        state = {"draw": jnp.array(0), "batch_order": jnp.arange(count // size)}
        setattr(solver, f"state_{level}_sampler", state)
    return solver


def variables(carry: Any) -> dict[str, Any]:
    """The variables of a solver's state; SABA's has a memory beside them."""
    return carry[1] if isinstance(carry, tuple) else carry


def stepped(label: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The variables before and after each step."""
    run = RUNS[label]
    solver = prepared(run)
    sizes = (solver.batch_size_inner, solver.batch_size_outer)
    step = jax.jit(solver.get_step(*(partial(draw, size) for size in sizes)))
    carry = solver.init()
    average = jnp.zeros_like(solver.outer_var0)
    for k in range(run.steps):
        before = variables(carry)
        carry, _ = step(carry, k)
        if label == "ma_soba":  # λ moves by the average so far, which then takes in the direction of the step
            size = run.options["step_size"] / run.options["outer_ratio"] / (k + 1) ** 0.5
            direction = (before["outer_var"] - carry["outer_var"]) / size
            carry["outer_var"] = before["outer_var"] - size * average
            average = (1 - run.options["eta"]) * average + run.options["eta"] * direction
        if label == "f2sa":  # the multiplier is half the ratio of the two step sizes of the next step
            carry["lmbda"] = 0.5 * (k + 2) ** (1 / 7)
        yield before, variables(carry)


def benchmark(label: str) -> dict[str, Any]:
    run = RUNS[label]
    if run.solver == "bome":
        return run.options | called_back(run)
    lams: list[Any] = [list(run.lam)]
    lengths = []
    for before, after in stepped(label):
        lams.append(after["outer_var"].tolist())
        if "key" in before:
            lengths.append(int(jax.random.randint(before["key"], (1,), 0, run.options["n_hia_steps"])[0]))
    recorded = {"lam": lams, "omega": after["inner_var"].tolist()}
    recorded |= {name: after[key].tolist() for name, key in (("v", "v"), ("star", "inner_approx_star")) if key in after}
    return run.options | recorded | ({"lengths": lengths} if lengths else {})


def called_back(run: Run) -> dict[str, Any]:
    solver = prepared(run)
    lams: list[Any] = []

    def go_on() -> bool:
        lams.append(solver.outer_var.tolist())
        return len(lams) <= run.steps

    solver.run(go_on)
    return {"lam": lams, "omega": solver.inner_var.tolist()}


# ---------------------------------------------------------------------------------------------------- PyTorch libraries

INNER_RATE = 0.5
Gradient = dict[str, list[float]]


class ParameterHolder(torch.nn.Module):
    def __init__(self, start: tuple[float, ...]) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        return self.value


def inner_in_torch(omega: torch.Tensor, lam: torch.Tensor) -> torch.Tensor:
    b = {name: torch.from_numpy(a) for name, a in inner_data().items()}
    m = b["x"] @ omega
    losses = (b["z"] @ lam).sigmoid() * (torch.nn.functional.softplus(m) - b["t"] * m)
    return losses.mean() + 0.15 * lam[0].exp() * omega.square().sum()


def outer_in_torch(omega: torch.Tensor, lam: torch.Tensor) -> torch.Tensor:
    b = {name: torch.from_numpy(a) for name, a in outer_data().items()}
    m = b["c"] @ omega
    direct = 0.05 * (lam - torch.tensor(TARGET, dtype=lam.dtype)).square().sum()
    return (torch.nn.functional.softplus(m) - b["s"] * m).mean() + direct


def moved(lam: torch.Tensor, omega: torch.Tensor) -> Gradient:
    return {"hypergradient": lam.detach().tolist(), "omega": omega.detach().tolist()}


def with_higher(steps: int) -> Gradient:
    """Unrolled differentiation through SGD steps."""
    higher = importlib.import_module("higher")
    lam, omega = ParameterHolder(LAM), ParameterHolder(OMEGA)
    optimiser = torch.optim.SGD(omega.parameters(), lr=INNER_RATE)
    with higher.innerloop_ctx(omega, optimiser) as (fast, inner):
        for _ in range(steps):
            inner.step(inner_in_torch(fast(), lam()))
        (grad,) = torch.autograd.grad(outer_in_torch(fast(), lam()), [lam.value])
        return moved(grad, fast())


def with_torchopt_unrolled(steps: int) -> Gradient:
    """The same, by TorchOpt's differentiable optimiser."""
    torchopt = importlib.import_module("torchopt")
    lam, omega = ParameterHolder(LAM), ParameterHolder(OMEGA)
    optimiser = torchopt.MetaSGD(omega, lr=INNER_RATE)
    for _ in range(steps):
        optimiser.step(inner_in_torch(omega(), lam()))
    (grad,) = torch.autograd.grad(outer_in_torch(omega(), lam()), [lam.value])
    return moved(grad, omega())


def with_torchopt(method: str, count: int) -> Gradient:
    """Implicit differentiation at the point after one inner step."""
    implicit = importlib.import_module("torchopt.diff.implicit")
    solvers = importlib.import_module("torchopt.linear_solve")
    cg = method == "cg"
    solve = (
        solvers.solve_cg(maxiter=count, rtol=0.0, atol=0.0)
        if cg
        else solvers.solve_inv(ns=True, maxiter=count, alpha=INNER_RATE)
    )

    def gradient(omega: torch.Tensor, lam: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(inner_in_torch)(omega, lam)

    @implicit.custom_root(gradient, argnums=1, solve=solve)
    def solved(omega: torch.Tensor, lam: torch.Tensor) -> torch.Tensor:
        return omega - INNER_RATE * gradient(omega, lam)

    lam, start = ParameterHolder(LAM).value, ParameterHolder(OMEGA).value.detach()
    omega = solved(start, lam)
    (grad,) = torch.autograd.grad(outer_in_torch(omega, lam), [lam])
    return moved(grad, omega)


def with_betty(method: str, count: int) -> Gradient:
    """One hyper-iteration after one inner step; λ moves by SGD with step 1, which shows the hypergradient."""
    configs, engine, logs, problems = (
        importlib.import_module(f"betty.{part}") for part in ("configs", "engine", "logging", "problems")
    )
    logs.get_logger().setLevel(logging.WARNING)
    lam, omega = ParameterHolder(LAM), ParameterHolder(OMEGA)

    def level(name: str, module: ParameterHolder, rate: float, config: Any, loss: Callable[[Any], torch.Tensor]) -> Any:
        optimiser = torch.optim.SGD(module.parameters(), lr=rate)
        level_problem = problems.ImplicitProblem(name, config, module=module, optimizer=optimiser)
        level_problem.get_batch, level_problem.training_step = lambda: None, loss
        return level_problem

    options = {} if method == "darts" else {f"{method}_iterations": count}
    if method == "neumann":
        options["neumann_alpha"] = INNER_RATE
    config = configs.Config(type=method, unroll_steps=1, **options)
    lower = level("lower", omega, INNER_RATE, config, lambda batch: inner_in_torch(omega(), lam()))
    upper_config = configs.Config(retain_graph=True)
    upper = level("upper", lam, 1.0, upper_config, lambda batch: outer_in_torch(omega(), lam()))
    edges = {"u2l": {upper: [lower]}, "l2u": {lower: [upper]}}
    engine.Engine([upper, lower], configs.EngineConfig(), edges).train_step()
    return moved(torch.tensor(LAM, dtype=torch.float64) - lam(), omega())


HYPERGRADIENTS: dict[str, Callable[[], Gradient]] = {
    "higher unrolled 1": partial(with_higher, 1),
    "higher unrolled 4": partial(with_higher, 4),
    "torchopt unrolled 4": partial(with_torchopt_unrolled, 4),
    "torchopt cg 2": partial(with_torchopt, "cg", 2),
    "torchopt cg 3": partial(with_torchopt, "cg", 3),
    "torchopt neumann 5": partial(with_torchopt, "neumann", 5),
    "betty neumann 5": partial(with_betty, "neumann", 5),
    "betty cg 1": partial(with_betty, "cg", 1),
    "betty cg 3": partial(with_betty, "cg", 3),
    "betty darts 1": partial(with_betty, "darts", 1),
}


# ---------------------------------------------------------------------------------------------------------- the file


def losses_at_the_start() -> dict[str, Any]:
    """Both losses and their derivatives in JAX: to see that everyone works on one problem."""
    at = jnp.array(OMEGA), jnp.array(LAM)
    losses: dict[str, Any] = {}
    for name, loss in (("inner", inner_in_jax), ("outer", outer_in_jax)):
        by_omega, by_lam = jax.grad(loss, argnums=(0, 1))(*at)
        losses[name] = {"loss": float(loss(*at)), "by_omega": by_omega.tolist(), "by_lam": by_lam.tolist()}
    return losses


def written(record: dict[str, Any]) -> str:
    """JSON with a line for each entry of each part."""
    parts = []
    for part, entries in record.items():
        lines = (f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
        parts.append(f"  {json.dumps(part)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(checkout: Path) -> None:
    commit = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    made_with = {"python": platform.python_version(), **versions, "benchmark_bilevel": commit.stdout.strip()}
    install_substitute()
    sys.path.insert(0, str(checkout))
    record = {
        "made with": made_with,
        "start": losses_at_the_start(),
        "benchmark_bilevel": {label: benchmark(label) for label in RUNS},
        "hypergradients": {label: compute() for label, compute in HYPERGRADIENTS.items()},
    }
    Path(__file__).with_name("recorded.json").write_text(written(record))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Usage: python record.py CHECKOUT_OF_BENCHMARK_BILEVEL")
    warnings.simplefilter("ignore")  # the old ones warn of much
    main(Path(sys.argv[1]))
