"""Every algorithm through the same checks. A new one adds its row to SETTINGS."""

import inspect
import shutil

import pytest
import torch

import fsla
from fsla import Batches, Counted, Point, Problem, Sample, algorithms, tree
from fsla.problems import Quadratic
from fsla.projection import Box
from fsla.training.engine import make_engine
from support import F64, network, normal, ridge_logistic

FULL = Sample.full(None, None)
PLAIN = fsla.rates.constant(alpha=0.02, tau=0.15, beta=0.15, eta=0.5)

# name -> (options, relative distance to the minimiser of f that it must reach on the quadratic)
SETTINGS = {
    "fsla": ({}, 1e-6),
    "single_loop": ({}, 1e-6),
    "bp": ({"T": 100, "restart": False}, 1e-6),
    "ns": ({"T": 1, "K": 100, "beta": 0.15}, 1e-6),
    "cg": ({"T": 1, "K": 6}, 1e-6),
    "soba": ({}, 1e-6),
    "ma_soba": ({}, 1e-6),
    "amigo": ({"T": 3, "Q": 3}, 1e-6),
}


def make(name, rates=PLAIN, **more):
    return algorithms.ALL[name](rates, **SETTINGS[name][0], **more)


@pytest.fixture(params=algorithms.ALL)
def name(request):
    return request.param


def test_every_algorithm_has_a_row():
    assert SETTINGS.keys() == algorithms.ALL.keys()
    assert all(inspect.getdoc(f) for f in algorithms.ALL.values())


def test_it_finds_the_minimum_of_f(name):
    q = Quadratic.random(3, 6, kappa=6.0, seed=2)
    best = torch.linalg.solve(q.hessian(), -q.gradient(torch.zeros(3, dtype=F64)))
    solver = make(name)
    state = solver.init(q, q.point(torch.zeros(3, dtype=F64), torch.zeros(6, dtype=F64)), FULL)
    gaps = []
    while not gaps or gaps[-1] > SETTINGS[name][1]:
        assert len(gaps) < 20, gaps
        for _ in range(200):
            state = solver.step(q, state, FULL)
        gaps.append(float((state.at.lam["lam"] - best).norm() / best.norm()))


def test_it_runs_on_trees_of_many_tensors_in_float32_and_float64(name):
    found = {}
    for dtype in (torch.float32, F64):
        problem, at, train, valid = network(dtype)
        solver, xi = make(name), Sample.full(train, valid)
        state = solver.init(problem, at, xi)
        for _ in range(3):
            state = solver.step(problem, state, xi)
        assert state.k == 3
        for x, like in ((state.at.lam, at.lam), (state.at.omega, at.omega), (state.d, at.lam)):
            tree.aligned(x, like)  # the same keys, shapes, dtypes and devices
        found[dtype] = tree.flatten(state.d).double()
    assert float((found[torch.float32] - found[F64]).norm() / found[F64].norm()) < 1e-3


def test_a_step_is_pure_and_repeatable(name):
    problem, at, train, valid = ridge_logistic()
    solver, xi = make(name), Sample.full(train, valid)
    state = solver.step(problem, solver.init(problem, at, xi), xi)
    before = tree.flatten(state.at.lam).clone()
    once, again = solver.step(problem, state, xi), solver.step(problem, state, xi)
    assert torch.equal(tree.flatten(once.at.omega), tree.flatten(again.at.omega))
    assert torch.equal(tree.flatten(once.d), tree.flatten(again.d))
    assert torch.equal(tree.flatten(state.at.lam), before)


def test_automatic_differentiation_and_closed_form_agree(name):
    q = Quadratic.random(3, 5, seed=4)
    at = q.point(normal(3, seed=1), normal(5, seed=2))
    solver = make(name)
    a, b = solver.init(q, at, FULL), solver.init(q.losses(), at, FULL)
    for _ in range(5):
        a, b = solver.step(q, a, FULL), solver.step(q.losses(), b, FULL)
    assert torch.allclose(a.at.lam["lam"], b.at.lam["lam"], rtol=1e-11)


def test_the_projection_holds(name):
    problem, at, train, valid = ridge_logistic()
    solver, xi = make(name, project=Box(-1.0, 0.0)), Sample.full(train, valid)
    state = solver.init(problem, Point({"log_ridge": at.lam["log_ridge"].clamp(-1, 0)}, at.omega), xi)
    for _ in range(5):
        state = solver.step(problem, state, xi)
        assert state.at.lam["log_ridge"].min() >= -1.0
        assert state.at.lam["log_ridge"].max() <= 0.0


def test_a_point_of_the_wrong_form_is_refused(name):
    problem, at, train, valid = ridge_logistic()
    with pytest.raises(TypeError, match="lam must be a mapping"):
        make(name).init(problem, Point(at.lam["log_ridge"], at.omega), Sample.full(train, valid))


def test_it_prints_its_settings(name):
    assert "0x" not in repr(make(name))
    assert make(name) == make(name)
    assert hash(make(name)) == hash(make(name))


def test_products_by_differences_serve_it_as_exact_ones_do(name):
    problem, at, train, valid = network()
    difference = Problem(problem.inner_loss, problem.outer_loss, mode="difference")
    solver, xi = make(name), Sample.full(train, valid)
    a, b = solver.init(problem, at, xi), solver.init(difference, at, xi)
    for _ in range(4):
        a, b = solver.step(problem, a, xi), solver.step(difference, b, xi)
    for x, y in ((a.at.lam, b.at.lam), (a.at.omega, b.at.omega), (a.d, b.d)):
        assert float(tree.norm(tree.sub(y, x)) / tree.norm(x)) < 1e-6


def test_it_says_which_batches_it_reads(name):
    problem, at, train, valid = ridge_logistic()
    solver, xi = make(name), Sample.full(train, valid)
    state = solver.init(problem, at, xi)
    for slot, n in zip(solver.needs._fields, solver.needs, strict=True):
        many = xi._replace(**{slot: Batches([getattr(xi, slot)] * (max(n, 1) + 1))})
        with pytest.raises(ValueError, match=f"'{slot}' of the sample must be one batch, or Batches of {max(n, 1)}"):
            solver.step(problem, state, many)


@pytest.mark.parametrize("engine", ["graph", "compile"])
def test_every_engine_takes_the_same_steps(name, engine):
    if engine == "compile" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler")
    short = {key: min(value, 2) if key in ("T", "K", "Q") else value for key, value in SETTINGS[name][0].items()}
    solver = algorithms.ALL[name](fsla.rates.Schedule(0.02, 0.1, 0.1, 0.5, power=0.5), **short)
    problem, at, train, valid = ridge_logistic()
    xi, states = Sample.full(train, valid), []
    for choice in ("eager", engine):
        counted = Counted(problem)
        state = solver.init(counted, at, xi)
        motor = make_engine(choice, solver, counted, lambda: xi, torch.Generator(), state)
        states.append((motor.advance(state, 6 - state.k), counted.calls))
    (a, calls), (b, same) = states
    assert calls == same
    assert a.k == b.k == 6
    for x, y in ((a.at.lam, b.at.lam), (a.at.omega, b.at.omega), (a.d, b.d)):
        assert float(tree.norm(tree.sub(x, y)) / tree.norm(x)) < 1e-12
