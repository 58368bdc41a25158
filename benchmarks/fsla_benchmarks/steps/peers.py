"""One hyper-iteration with each of the other libraries, on the benchmark's own problems, to be timed beside ours.

A hyper-iteration is what a user of the library runs once an iteration: the inner SGD step or steps, the hypergradient,
and an SGD step on λ. All of them start where the benchmark starts, share its losses, and draw batches of its size.

    betty       ImplicitProblem: darts (one finite difference), the Neumann series, conjugate gradients
    higher      innerloop_ctx: the derivative of the inner steps taken
    torchopt    custom_root around one inner step: conjugate gradients, the Neumann series
    hypertorch  fixed_point and CG on the map of one inner step (imported as `hypergrad`, from its repository)

What a library leaves open is chosen in its favour: only derivatives by λ are asked for, and the implicit methods
differentiate on the batch of the inner step. Solvers that could stop early take all their steps, so that times compare.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsla._tree import Tree
from fsla_benchmarks.steps.cases import Case, Data

Tensors = tuple[Tensor, ...]


class ParameterHolder(nn.Module):
    """A tree as the parameters of a module, which returns the tree."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self.names = tuple(tree)
        for i, t in enumerate(tree.values()):  # the tree's own names may hold dots
            self.register_parameter(f"p{i}", nn.Parameter(t.detach().clone()))

    def forward(self) -> Tree:
        return {name: getattr(self, f"p{i}") for i, name in enumerate(self.names)}

    def named(self, tensors: Iterable[Tensor]) -> Tree:
        """Other tensors in the place of the parameters."""
        return dict(zip(self.names, tensors, strict=True))

    @torch.no_grad()
    def take(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the parameters."""
        for parameter, new in zip(self.parameters(), tensors, strict=True):
            parameter.copy_(new)


@dataclass(frozen=True)
class Rates:
    """The sizes of the SGD steps on ω, which is also that of a Neumann series, and on λ."""

    inner: float = 1e-2
    outer: float = 1e-3


RATES = {"quadratic": Rates(2e-5, 1e-9)}


class Run:
    """A start on a benchmark problem: both levels as modules, an optimiser for each, and the two losses."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rates = RATES.get(case.name, Rates())
        self.lam = ParameterHolder(case.at.lam)
        self.omega = ParameterHolder(case.at.omega)
        self.inner_optimiser = torch.optim.SGD(self.omega.parameters(), lr=self.rates.inner)
        self.outer_optimiser = torch.optim.SGD(self.lam.parameters(), lr=self.rates.outer)

    def inner_loss(self, lam: Iterable[Tensor], omega: Iterable[Tensor], batch: Data) -> Tensor:
        return self.case.problem.inner_loss(self.lam.named(lam), self.omega.named(omega), batch)

    def outer_loss(self, lam: Iterable[Tensor], omega: Iterable[Tensor], batch: Data) -> Tensor:
        return self.case.problem.outer_loss(self.lam.named(lam), self.omega.named(omega), batch)

    def descend(self, hypergradient: Sequence[Tensor]) -> None:
        """An SGD step on λ."""
        for t, g in zip(self.lam.parameters(), hypergradient, strict=True):
            t.grad = g
        self.outer_optimiser.step()


Step = Callable[[], None]


def betty(run: Run, method: str, count: int) -> Step:
    configs, engine, logs, problems = (_load(f"betty.{part}") for part in ("configs", "engine", "logging", "problems"))
    logs.get_logger().setLevel(logging.WARNING)  # it reports each problem on standard output
    case = run.case
    device = next(run.omega.parameters()).device

    def level(
        name: str,
        module: ParameterHolder,
        optimiser: Any,
        config: Any,
        draw: Callable[[], Data],
        loss: Callable[[Data], Tensor],
    ) -> Any:
        level_problem = problems.ImplicitProblem(name, config, module=module, optimizer=optimiser)
        level_problem.get_batch = draw
        level_problem.training_step = loss
        level_problem.device = device
        level_problem.configure_device = lambda device: None  # not the GPU wherever there is one
        return level_problem

    def inner(batch: Data) -> Tensor:
        return case.problem.inner_loss(run.lam(), run.omega(), batch)

    def outer(batch: Data) -> Tensor:
        return case.problem.outer_loss(run.lam(), run.omega(), batch)

    options: dict[str, float] = {} if method == "darts" else {f"{method}_iterations": count}
    if method == "neumann":
        options["neumann_alpha"] = run.rates.inner
    config = configs.Config(type=method, unroll_steps=1, **options)
    lower = level("lower", run.omega, run.inner_optimiser, config, case.inner, inner)
    upper = level("upper", run.lam, run.outer_optimiser, configs.Config(retain_graph=True), case.outer, outer)
    edges = {"u2l": {upper: [lower]}, "l2u": {lower: [upper]}}
    step: Step = engine.Engine([upper, lower], configs.EngineConfig(), edges).train_step
    return step


def higher(run: Run, method: str, count: int) -> Step:
    unrolling = _load("higher").innerloop_ctx
    problem = run.case.problem
    case = run.case

    def step() -> None:
        with unrolling(run.omega, run.inner_optimiser) as (fast, optimiser):
            for _ in range(count):
                optimiser.step(problem.inner_loss(run.lam(), fast(), case.inner()))
            loss = problem.outer_loss(run.lam(), fast(), case.outer())
            grads = torch.autograd.grad(loss, list(run.lam.parameters()))
            run.omega.take(fast.parameters())
        run.descend(grads)

    return step


def torchopt(run: Run, method: str, count: int) -> Step:
    implicit = _load("torchopt.diff.implicit")
    solvers = _load("torchopt.linear_solve")
    rate = run.rates.inner
    if method == "cg":
        solve = solvers.solve_cg(maxiter=count, rtol=0.0, atol=0.0)
    else:
        solve = solvers.solve_inv(ns=True, maxiter=count, alpha=rate)

    def gradient(omega: Tensors, lam: Tensors, batch: Data) -> Tensors:
        grads: Tensors = torch.func.grad(lambda w: run.inner_loss(lam, w, batch))(omega)
        return grads

    @implicit.custom_root(gradient, argnums=1, solve=solve)  # type: ignore[untyped-decorator]
    def solved(omega: Tensors, lam: Tensors, batch: Data) -> Tensors:
        return tuple(w - rate * g for w, g in zip(omega, gradient(omega, lam, batch), strict=True))

    def step() -> None:
        lam = tuple(run.lam.parameters())
        with warnings.catch_warnings():  # it calls functorch by a name that PyTorch warns of each time
            warnings.simplefilter("ignore")
            omega = solved(tuple(run.omega.parameters()), lam, run.case.inner())
            grads = torch.autograd.grad(run.outer_loss(lam, omega, run.case.outer()), lam)
        run.omega.take(omega)
        run.descend(grads)

    return step


def hypertorch(run: Run, method: str, count: int) -> Step:
    # by submodule, for another project, on PyPI, is imported as `hypergrad` too
    descent = _load("hypergrad.diff_optimizers").GradientDescent
    solvers = _load("hypergrad.hypergradients")
    solve = solvers.CG if method == "cg" else solvers.fixed_point

    def step() -> None:
        lam = list(run.lam.parameters())
        inner = run.case.inner()
        outer = run.case.outer()
        move = descent(lambda w, h: run.inner_loss(h, w, inner), run.rates.inner)
        omega = move(list(run.omega.parameters()), lam, create_graph=False)
        grads = solve(omega, lam, count, move, lambda w, h: run.outer_loss(h, w, outer), tol=0.0, set_grad=False)
        run.omega.take(omega)
        run.descend(grads)

    return step


LIBRARIES: dict[Callable[[Run, str, int], Step], dict[str, tuple[str, int]]] = {
    betty: {"darts": ("darts", 1), "neumann_1": ("neumann", 1), "neumann_10": ("neumann", 10), "cg_10": ("cg", 10)},
    higher: {"unrolled_1": ("unrolled", 1), "unrolled_5": ("unrolled", 5)},
    torchopt: {"cg_10": ("cg", 10), "neumann_10": ("neumann", 10)},
    hypertorch: {"fixed_point_10": ("fixed_point", 10), "cg_10": ("cg", 10)},
}


def steppers(case: Case) -> tuple[dict[str, Callable[[], None]], list[str]]:
    """Return a function that takes the next hyper-iteration for each method of each library, by its label.

    Returns besides a line with the reason for each library that cannot be imported and each method that fails. Every
    method has taken one step, after which λ and ω had moved and were finite.
    """
    steps: dict[str, Callable[[], None]] = {}
    reasons = []
    for build, methods in LIBRARIES.items():
        for label, (method, count) in methods.items():
            run = Run(case)
            try:
                step = build(run, method, count)
                step()
                _check(run)
            except ImportError as error:
                reasons.append(f"{build.__name__}: cannot be imported: {_line(error)}")
                break
            except Exception as error:  # an old library may fail in any way, and is then left out
                reasons.append(f"{build.__name__} {label}: {type(error).__name__}: {_line(error)}")
                continue
            steps[f"{build.__name__} {label}"] = step
    return steps, reasons


def _load(name: str) -> Any:
    """A module of another library; whatever its import raises is an ImportError, and its warnings are its own."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError:
        raise
    except Exception as error:
        raise ImportError(f"{type(error).__name__}: {error}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check(run: Run) -> None:
    at = run.case.at
    for name, values, start in (("lam", run.lam, at.lam), ("omega", run.omega, at.omega)):
        if not all(bool(t.isfinite().all()) for t in values.parameters()):
            raise ValueError(f"{name} must be finite after a step. Got infinities or NaN.")
        if all(torch.equal(t, old) for t, old in zip(values.parameters(), start.values(), strict=True)):
            raise ValueError(f"{name} must move in a step. It is where it started.")
