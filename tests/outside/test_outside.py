"""Our algorithms beside public implementations, on a small problem: the numbers of theirs are in `recorded.json`.

`record.py` wrote that file, and describes how; nothing of the other projects is needed here. Trajectories are those of
benchmark_bilevel's solvers on mini-batches, whose draws both sides take in the same order; hypergradients are those of
higher, TorchOpt and Betty. Where the other side is known to differ, the test accounts for it. Both sides
work in double precision, and agree to its rounding: the tolerance is 1e-12, the largest difference seen 1.2e-16.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_problem import BATCH, INNER_ROWS, LAM, OMEGA, OUTER_ROWS, TARGET, batch_of_draw, inner_data, outer_data
from torch import Tensor

import fsla
from fsla import Batch, Point, Problem, StepBatches, algorithms
from fsla._tree import Tree, axpy, zeros_like
from fsla.hypergradients import RandomNeumann
from fsla.steps import STORM, Position, Rates, Schedule, Scheduled, StepContext

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text())
BENCHMARK_RUNS = RECORDED["benchmark_bilevel"]
GRADIENTS = RECORDED["hypergradients"]
STEPS = len(BENCHMARK_RUNS["soba"]["lam"]) - 1
F64 = torch.float64


def tensors(data: dict[str, np.ndarray]) -> Tree:
    return {name: torch.from_numpy(a) for name, a in data.items()}


def split(data: Tree, rows: int) -> list[Tree]:
    return [{name: t[i : i + BATCH] for name, t in data.items()} for i in range(0, rows, BATCH)]


INNER, OUTER = tensors(inner_data()), tensors(outer_data())
INNER_BATCHES, OUTER_BATCHES = split(INNER, INNER_ROWS), split(OUTER, OUTER_ROWS)


def cross_entropy(margin: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.softplus(margin) - target * margin


def inner_loss(lam: Tree, omega: Tree, b: Tree) -> Tensor:
    weights = (b["z"] @ lam["lam"]).sigmoid()
    ridge = 0.15 * lam["lam"][0].exp() * omega["omega"].square().sum()
    return (weights * cross_entropy(b["x"] @ omega["omega"], b["t"])).mean() + ridge


def outer_loss(lam: Tree, omega: Tree, b: Tree) -> Tensor:
    distance = (lam["lam"] - torch.tensor(TARGET, dtype=F64)).square().sum()
    return cross_entropy(b["c"] @ omega["omega"], b["s"]).mean() + 0.05 * distance


PROBLEM = Problem(inner_loss, outer_loss)
START = Point({"lam": torch.tensor(LAM, dtype=F64)}, {"omega": torch.tensor(OMEGA, dtype=F64)})


def close(got: Tensor, recorded: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got.detach(), torch.tensor(recorded, dtype=F64), rtol=0.0, atol=tolerance)


def test_outside_problem_is_identical():
    for name, function, data in (("inner", inner_loss, INNER), ("outer", outer_loss, OUTER)):
        recorded = RECORDED["start"][name]
        levels = (START.lam, START.omega)
        lam, omega = ({key: t.clone().requires_grad_() for key, t in level.items()} for level in levels)
        loss = function(lam, omega, data)
        by_omega, by_lam = torch.autograd.grad(loss, [omega["omega"], lam["lam"]])
        close(loss, recorded["loss"])
        close(by_omega, recorded["by_omega"])
        close(by_lam, recorded["by_lam"])


def test_outside_record_names_versions():
    made_with = RECORDED["made with"]
    assert {"python", "jax", "torch", "higher", "torchopt", "betty-ml", "benchmark_bilevel"} == set(made_with)
    program = Path(__file__).with_name("record.py").read_text()
    for name, version in made_with.items():
        if name != "python":
            assert version.removesuffix("+cpu") in program, f"record.py's commands do not name {name} {version}"


# -------------------------------------------------------------------------------------- trajectories: benchmark_bilevel


class Draws:
    """The batches in the order in which the other side drew them."""

    def __init__(self) -> None:
        self._inner = self._outer = -1

    def inner_number(self) -> int:
        self._inner += 1
        return batch_of_draw(self._inner, len(INNER_BATCHES))

    def outer_number(self) -> int:
        self._outer += 1
        return batch_of_draw(self._outer, len(OUTER_BATCHES))

    def inner(self) -> Tree:
        return INNER_BATCHES[self.inner_number()]

    def outer(self) -> Tree:
        return OUTER_BATCHES[self.outer_number()]

    def inners(self, count: int, skipped: int = 0) -> list[Tree]:
        return [self.inner() for _ in range(count)] + skipped * [INNER]


def seed_of(length: int, terms: int) -> int:
    """A seed by which a random series of so many terms has the recorded length."""
    return next(seed for seed in range(1000) if RandomNeumann(terms, 1.0).drawn(seed).length == length)


@dataclass(frozen=True)
class OfStep(Scheduled):
    """Step sizes by a function of k."""

    sizes: Callable[[int], Rates]

    def rates(self, k: int, state: None = None) -> Rates:
        return self.sizes(k)


def make_algorithm(name: str, step_sizes: Scheduled, **options: Any) -> Any:
    return algorithms.get_algorithm(name)(step_sizes, **options)


def step_context(algorithm: Any, batches: StepBatches) -> StepContext:
    """What the algorithm's first step may ask on these batches."""
    return algorithm.context(PROBLEM, 0, None, batches)


def steps_of(name: str, alpha: float = 0.0, tau: float = 0.0, beta: float = 0.0, eta: float = 0.0) -> Schedule:
    """Their step sizes: one for ω and v, a fraction of it for λ, each over a power of k + 1."""
    run = BENCHMARK_RUNS[name]
    size = run["step_size"]
    return Schedule(size / run["outer_ratio"], size, size, run.get("eta", 1.0), (alpha, tau, beta, eta))


def trajectory(algorithm: Any, draw: Callable[[int], StepBatches], state: Any = None) -> list[Any]:
    """The states after 0, 1, … steps."""
    first = draw(0)
    states = [algorithm.init(PROBLEM, START, first) if state is None else state]
    for k in range(STEPS):
        states.append(algorithm.step(PROBLEM, states[-1], first if k == 0 else draw(k)))
    return states


def agree(states: list[Any], name: str, *, sign_of_v: int | None = None) -> None:
    """Every λ, and the last ω and v, are the recorded ones. benchmark_bilevel's SOBA and its kin keep -v."""
    run = BENCHMARK_RUNS[name]
    for state, lam in zip(states, run["lam"], strict=True):
        close(state.lam.value["lam"], lam)
    close(states[-1].omega.value["omega"], run["omega"])
    if sign_of_v is not None:
        close(sign_of_v * states[-1].v["omega"], run["v"])


@pytest.mark.parametrize("name", ["soba", "ma_soba"])
def test_soba_matches_outside_run(name):
    """benchmark_bilevel has no MA-SOBA: ω, v and the direction of λ are its SOBA's, the average is of `record.py`."""
    draws = Draws()
    algorithm = make_algorithm(name, steps_of(name, 0.5, 0.5, 0.5))
    agree(trajectory(algorithm, lambda k: StepBatches.shared(draws.inner(), draws.outer())), name, sign_of_v=-1)


def test_saba_matches_outside_run():
    draws = Draws()

    def draw(k: int) -> StepBatches:
        i, j = draws.inner_number(), draws.outer_number()
        return StepBatches.shared(Batch(INNER_BATCHES[i], number=i), Batch(OUTER_BATCHES[j], number=j))

    sizes = {"inner_batches": len(INNER_BATCHES), "outer_batches": len(OUTER_BATCHES)}
    agree(trajectory(make_algorithm("saba", steps_of("saba"), **sizes), draw), "saba", sign_of_v=-1)


def test_srba_matches_outside_run():
    draws, period = Draws(), int(BENCHMARK_RUNS["srba"]["period_frac"] * (INNER_ROWS + OUTER_ROWS) / BATCH)

    def draw(k: int) -> StepBatches:
        return StepBatches.shared(INNER, OUTER) if k % period == 0 else StepBatches.shared(draws.inner(), draws.outer())

    assert 1 < period < STEPS
    agree(trajectory(make_algorithm("srba", steps_of("srba"), refresh_period=period), draw), "srba", sign_of_v=-1)


def test_amigo_matches_outside_run():
    draws, count = Draws(), BENCHMARK_RUNS["amigo"]["n_inner_steps"]

    def draw(k: int) -> StepBatches:
        inner, outer, products = draws.inners(count), draws.outer(), draws.inners(count)
        return StepBatches.of(inner, (outer,), products, (outer,), (draws.inner(),))

    agree(
        trajectory(make_algorithm("amigo", steps_of("amigo"), inner_steps=count, hvp_steps=count), draw),
        "amigo",
        sign_of_v=1,
    )


def test_stocbio_matches_outside_run():
    draws, run = Draws(), BENCHMARK_RUNS["stocbio"]
    steps, products = run["n_inner_steps"], run["n_shia_steps"]

    def draw(k: int) -> StepBatches:
        inner, outer, hvp = draws.inners(steps), draws.outer(), draws.inners(products)
        return StepBatches.of(inner, (outer,), hvp, (outer,), (draws.inner(),))

    algorithm = make_algorithm(
        "stocbio", steps_of("stocbio"), inner_steps=steps, hvp_steps=products, adjoint_lr=run["step_size"]
    )
    agree(trajectory(algorithm, draw), "stocbio")


def test_ttsa_matches_outside_run():
    """Theirs takes the cross product on the batch of the inner step."""
    draws, run = Draws(), BENCHMARK_RUNS["ttsa"]
    terms = run["n_hia_steps"]

    def draw(k: int) -> StepBatches:
        length = run["lengths"][k]
        inner, outer, hvp = draws.inner(), draws.outer(), draws.inners(length, skipped=terms - 1 - length)
        return StepBatches.of((inner,), (outer,), hvp, (outer,), (inner,), seed=seed_of(length, terms))

    algorithm = make_algorithm(
        "ttsa", steps_of("ttsa", alpha=0.6, tau=0.4), num_terms=terms, adjoint_lr=run["step_size"]
    )
    agree(trajectory(algorithm, draw), "ttsa")


@pytest.mark.parametrize("name", ["bsa", "bsa full"])
def test_bsa_matches_outside_run(name):
    """Theirs moves λ and then ω, the same cycle begun elsewhere: after their first step on λ it is ours. (Ours takes
    all the inner steps of an iteration on one batch; the second run has several, on all rows.)"""
    draws, run = Draws(), BENCHMARK_RUNS[name]
    terms, size, full = run["n_hia_steps"], run["step_size"], name == "bsa full"
    lengths = [*run["lengths"], 0]

    def draw(k: int, inner: Tree = INNER) -> StepBatches:
        """The batches of a step: the hypergradient's are those of its number."""
        length = lengths[k]
        outer = (OUTER if full else draws.outer(),)
        hvp = [INNER] if full else draws.inners(length, skipped=terms - 1 - length)
        mixed_hvp = (INNER if full else draws.inner(),)
        return StepBatches.of((inner,), outer, hvp, outer, mixed_hvp, seed=seed_of(length, terms))

    def rates(k: int) -> Rates:
        return Rates(size / run["outer_ratio"] / (k + 2) ** 0.5, size / (k + 1) ** 0.5, 0.0, 1.0)

    options = {"inner_steps": run["n_inner_steps"], "num_terms": terms, "adjoint_lr": size}
    algorithm = make_algorithm("bsa", OfStep(rates), growth=0.0, **options)
    first = draw(0)
    h = algorithm.estimator.gradient(step_context(algorithm, first), Position(START, {}))
    state = algorithm.init(PROBLEM, Point(axpy(-size / run["outer_ratio"], h, START.lam), START.omega), first)
    states = [state]
    for k in range(STEPS):
        inner = INNER if full else draws.inner()
        states.append(algorithm.step(PROBLEM, states[-1], draw(k + 1, inner)))
    for state, lam in zip(states, run["lam"][1:], strict=False):
        close(state.lam.value["lam"], lam)
    close(states[-1].omega.value["omega"], run["omega"])


@pytest.mark.parametrize("name", ["sustain", "mrbo"])
def test_storm_on_both_matches_outside_run(name):
    """Theirs starts the previous points at 0, which η = 1 at the first step makes harmless, and takes the cross product
    on the batch of the inner gradient."""
    draws, run = Draws(), BENCHMARK_RUNS[name]
    count = run["n_hia_steps"] if name == "sustain" else run["n_shia_steps"]

    def draw(k: int) -> StepBatches:
        inner, outer = (draws.inner(),), (draws.outer(),)
        if name == "mrbo":
            return StepBatches.of(inner, outer, draws.inners(count), outer, inner)
        length = run["lengths"][k]
        hvp = draws.inners(length, count - 1 - length)
        return StepBatches.of(inner, outer, hvp, outer, inner, seed=seed_of(length, count))

    assert run["eta"] == 1.0
    terms = {"num_terms" if name == "sustain" else "hvp_steps": count}
    algorithm = make_algorithm(name, steps_of(name, 1 / 3, 1 / 3, 0.0, 2 / 3), adjoint_lr=run["step_size"], **terms)
    agree(trajectory(algorithm, draw), name)


def test_f2sa_matches_outside_run():
    """Theirs moves λ by steps that fall like 4/7 (the paper: 5/7) and adds to the multiplier what makes it grow too
    fast. With the multiplier put back after each step, the two steps on ω and that on λ are ours; without, only the
    first step is."""
    run = BENCHMARK_RUNS["f2sa"]
    algorithm = make_algorithm("f2sa", steps_of("f2sa", 4 / 7, 4 / 7, 5 / 7), inner_steps=run["n_inner_steps"])
    states = trajectory(algorithm, lambda k: StepBatches.shared(INNER, OUTER))
    for state, lam in zip(states, run["lam"], strict=True):
        close(state.lam.value["lam"], lam)
    close(states[-1].omega.value["omega"], run["star"])
    close(states[-1].y.value["omega"], run["omega"])
    as_it_is = torch.tensor(BENCHMARK_RUNS["f2sa as it is"]["lam"], dtype=F64)
    close(as_it_is[1], run["lam"][1])
    assert (as_it_is[-1] - states[-1].lam.value["lam"]).norm() > 1e-5


def test_bome_matches_outside_run():
    algorithm = make_algorithm("bome", steps_of("bome"), inner_steps=BENCHMARK_RUNS["bome"]["n_inner_steps"])
    agree(trajectory(algorithm, lambda k: StepBatches.shared(INNER, OUTER)), "bome")


def test_vrbo_matches_outside_run():
    """Theirs takes no difference across λ. Its first step on λ is ours; the steps on ω that follow are those of ours
    from the new λ on, which differ from ours across λ."""
    draws, run = Draws(), BENCHMARK_RUNS["vrbo"]
    count, products, size = run["n_inner_steps"], run["n_shia_steps"], run["step_size"]
    inner = [INNER]
    for _ in range(count):
        inner.append(draws.inners(1 + products)[0])  # the others are those of the series, which moves λ no more
    batches = StepBatches.of(inner, (OUTER,), (INNER,), (OUTER,), (INNER,))
    options = {"inner_steps": count - 1, "hvp_steps": products, "adjoint_lr": size, "refresh_period": 3}
    algorithm = make_algorithm("vrbo", steps_of("vrbo"), **options)
    first = algorithm.init(PROBLEM, START, batches)
    actual = algorithm.step(PROBLEM, first, batches)
    close(actual.lam.value["lam"], run["lam"][1])
    after = Point(actual.lam.value, START.omega)
    between = replace(first, lam=actual.lam, before=Position(after, {}))
    still = algorithm.context(PROBLEM, 0, None, batches, rates=Rates(0.0, size, 0.0, 0.0))
    expected = algorithm.move(between, still)
    close(expected.omega.value["omega"], run["omega"])
    assert (expected.omega.value["omega"] - actual.omega.value["omega"]).norm() > 1e-3


def fsla_draws() -> Callable[[int], StepBatches]:
    draws = Draws()

    def draw(k: int) -> StepBatches:
        inner, products = (draws.inner(),), (draws.inner(),)
        return StepBatches.of(inner, (draws.outer(),), products, (draws.outer(),), (draws.inner(),))

    return draw


def their_fsla(name: str) -> tuple[Any, Callable[[int], Rates]]:
    """FSLA with v at the new ω. Theirs moves ω, v, d and then λ, the same cycle begun elsewhere: λ's step size is that
    of the step before, and their λ is one move ahead of ours."""
    size, ratio = BENCHMARK_RUNS[name]["step_size"], BENCHMARK_RUNS[name]["outer_ratio"]

    def rates(k: int) -> Rates:
        now = size / (k + 1) ** 0.5
        return Rates(size / ratio / max(k, 1) ** 0.5, now, now, now)

    return algorithms.fsla(OfStep(rates), adjoint_at="new_params"), rates


def agree_one_ahead(states: list[Any], rates: Callable[[int], Rates], name: str) -> None:
    run = BENCHMARK_RUNS[name]
    for state, lam in zip(states[1:], run["lam"], strict=False):
        close(state.lam.value["lam"], lam)
    last = states[-1]
    close(axpy(-rates(STEPS).outer_lr, last.direction, last.lam.value)["lam"], run["lam"][-1])
    close(last.omega.value["omega"], run["omega"])
    close(last.v["omega"], run["v"])


def test_fsla_from_zero_matches_outside_run():
    """Theirs starts d and the previous λ at 0. From λ = 0 the second is no error, and the first is a state to set."""
    name = "fsla from zero"
    algorithm, rates = their_fsla(name)
    draw = fsla_draws()
    at = Point(zeros_like(START.lam), START.omega)
    state = algorithm.init(PROBLEM, at, StepBatches.shared(INNER, OUTER))
    states = trajectory(algorithm, draw, replace(state, direction=zeros_like(at.lam)))
    agree_one_ahead(states, rates, name)


def test_fsla_with_other_previous_point_matches_outside_run():
    """From another λ, their first correction looks back to λ = 0, where the run never was. With that one direction put
    in by hand, all that follows agrees; without it nothing does."""
    algorithm, rates = their_fsla("fsla")
    draw = fsla_draws()
    first = draw(0)
    before = replace(algorithm.init(PROBLEM, START, first), direction=zeros_like(START.lam))
    actual = algorithm.step(PROBLEM, before, first)
    nowhere = Point(zeros_like(START.lam), START.omega)

    step = step_context(algorithm, first)
    new, old = (
        algorithm.estimator.gradient(step, position) for position in (actual.position, Position(nowhere, before.v))
    )
    d = STORM()(new, old, before.direction, rates(0).new_grad_weight)
    expected = replace(actual, direction=d)
    states = [before, expected]
    for k in range(1, STEPS):
        states.append(algorithm.step(PROBLEM, states[-1], draw(k)))
    agree_one_ahead(states, rates, "fsla")
    assert (d["lam"] - actual.direction["lam"]).norm() > 0.2 * d["lam"].norm()


def test_outside_records_are_all_read():
    program = Path(__file__).read_text()
    assert [name for name in BENCHMARK_RUNS if f'"{name}"' not in program] == []


# ------------------------------------------------------------------------- hypergradients: higher, TorchOpt and Betty

INNER_RATE = 0.5


def after_one_step() -> Point:
    """Where the implicit methods are asked."""
    return Point(START.lam, axpy(-INNER_RATE, PROBLEM.inner_at(START, Batch(INNER)).grad_omega, START.omega))


def our_hypergradient(label: str) -> tuple[Tree, Tree]:
    """Our hypergradient by the method of a label, and the ω at which it is taken."""
    _, method, count = label.split()
    if method == "unrolled":
        result = fsla.hypergradient(
            PROBLEM, START, INNER, OUTER, "unrolled", num_steps=int(count), step_size=INNER_RATE
        )
        return result.value, result.omega
    at = after_one_step()
    steps = int(count) + (method == "neumann")  # theirs counts products: a series of K products has K + 1 terms
    step_size = INNER_RATE if method == "neumann" else None
    return fsla.hypergradient(PROBLEM, at, INNER, OUTER, method, num_steps=steps, step_size=step_size).value, at.omega


RIGHT = [label for label in GRADIENTS if label not in ("betty cg 3", "betty darts 1")]


@pytest.mark.parametrize("label", RIGHT)
def test_hypergradient_matches_outside_run(label):
    value, omega = our_hypergradient(label)
    close(value["lam"], GRADIENTS[label]["hypergradient"])
    close(omega["omega"], GRADIENTS[label]["omega"])


def cg_with_the_old_residual(h: Tensor, b: Tensor, steps: int) -> Tensor:
    """Conjugate gradients with one line wrong: the next direction uses the residual before the step."""
    v, residual, direction = torch.zeros_like(b), b, b
    for _ in range(steps):
        size = residual @ residual / (direction @ h @ direction)
        v = v + size * direction
        after = residual - size * (h @ direction)
        direction = residual + (after @ after) / (residual @ residual) * direction
        residual = after
    return v


def test_betty_cg_matches_outside_run():
    """The recorded version takes the old residual for the new direction. One step is right (see above); three of them,
    which must solve a system of three unknowns, do not: ours and TorchOpt's do."""
    at = after_one_step()
    inner, outer = PROBLEM.inner_at(at, Batch(INNER)), PROBLEM.outer_at(at, Batch(OUTER))
    h = torch.stack([inner.hvp({"omega": e})["omega"] for e in torch.eye(3, dtype=F64)])
    v = cg_with_the_old_residual(h, outer.grad_omega["omega"], 3)
    expected = GRADIENTS["betty cg 3"]
    close(outer.grad_lam["lam"] - inner.mixed_hvp({"omega": v})["lam"], expected["hypergradient"])
    close(at.omega["omega"], expected["omega"])

    exact = fsla.hypergradient(PROBLEM, at, INNER, OUTER, "implicit").value["lam"]
    close(exact, our_hypergradient("betty cg 3")[0]["lam"].tolist())
    close(exact, GRADIENTS["torchopt cg 3"]["hypergradient"])
    assert (exact - torch.tensor(expected["hypergradient"], dtype=F64)).norm() > 1e-3


def test_betty_one_sided_difference_matches_outside_run():
    """The identity in the place of H⁻¹, and J p by a difference of two gradients in λ. The recorded version leaves ω at
    the second of the two points."""
    at = after_one_step()
    outer = PROBLEM.outer_at(at, Batch(OUTER))
    p = outer.grad_omega
    width = 0.01 / p["omega"].norm()

    def by_lam(omega: Tree) -> Tensor:
        lam = at.lam["lam"].clone().requires_grad_()
        return torch.autograd.grad(inner_loss({"lam": lam}, omega, INNER), lam)[0]

    plus, minus = axpy(width, p, at.omega), axpy(-width, p, at.omega)
    expected = GRADIENTS["betty darts 1"]
    close(outer.grad_lam["lam"] - (by_lam(plus) - by_lam(minus)) / (2 * width), expected["hypergradient"])
    close(minus["omega"], expected["omega"])
    identity = outer.grad_lam["lam"] - PROBLEM.inner_at(at, Batch(INNER)).mixed_hvp(p)["lam"]
    close(identity, expected["hypergradient"], tolerance=1e-6)
