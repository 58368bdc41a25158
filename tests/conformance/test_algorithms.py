"""Every algorithm through the same checks. A new one adds its row to `rows.py` and its formulas to `reference.py`."""

import inspect
import shutil
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import reference
import torch
from rows import PLAIN, ROWS

import fsla
from fsla import Batches, Counted, Numbered, Point, Problem, Sample, algorithms
from fsla import _tree as tree
from fsla.algorithms import ByDifferences
from fsla.hypergradients import RandomNeumann
from fsla.steps import Box
from fsla.train import load_checkpoint, make_engine, save_checkpoint
from fsla.train._program import CaptureError
from fsla_reproduction.problems import Quadratic
from support import F64, network, normal, ridge_logistic

FALLING = fsla.steps.Schedule(0.06, 0.11, 0.13, 0.6, power=(0.5, 0.3, 0.2, 0.1))


def full(inner=None, outer=None, k=0):
    return Sample.full(inner, outer, seed=k)


FULL = full()


def make(name, rates=PLAIN, **more):
    return algorithms.ALL[name](rates, **(ROWS[name].options | more))


def begin(name, at):
    """A start that suits the algorithm."""
    return Point({key: t.abs() + 0.1 for key, t in at.lam.items()}, at.omega) if ROWS[name].positive else at


@pytest.fixture(params=algorithms.ALL)
def name(request):
    return request.param


def test_every_algorithm_has_a_row_and_a_reference():
    assert ROWS.keys() == algorithms.ALL.keys() == reference.ALL.keys()
    assert all(inspect.getdoc(f) for f in algorithms.ALL.values())


# ---------------------------------------------------------------------------------------------- the formulas themselves


PLAIN_PROBLEM = reference.Plain.random(seed=3)


def as_problem(plain):
    """The reference's problem, for automatic differentiation; batches are numbers."""
    a = {key: torch.from_numpy(array) for key, array in plain.arrays.items()}

    def inner(lam, omega, b):
        x = lam["x"]
        w = omega["w"]
        coupling = x @ a["J"][b] @ (w + 0.1 * w**2)
        return w @ a["H"][b] @ w / 2 + coupling - a["c"][b] @ w + 0.05 * (w**4).sum()

    def outer(lam, omega, b):
        x = lam["x"]
        w = omega["w"]
        own = w @ a["Q"][b] @ w / 2 - a["q"][b] @ w + 0.02 * (w**4).sum()
        return own + x @ a["R"][b] @ w + x @ a["S"][b] @ x / 2 - a["s"][b] @ x

    return Problem(inner, outer)


def draws(name, needs, steps, several, seed=5):
    """Samples of our own, and the same as the reference reads them; with `several`, a batch for each of many steps."""
    rng = np.random.default_rng(seed)
    row = ROWS[name]
    ours = []
    theirs = []
    for k in range(steps + 1):
        batches = []
        for n in needs:
            many = several and n > 1
            batches.append([int(b) for b in rng.integers(4, size=n)] if many else int(rng.integers(4)))
        length = RandomNeumann(row.options["Q"], 0.1).drawn(k).length if row.draws else 0
        theirs.append(reference.Draw(*batches, length))
        mine = [Batches(b) if isinstance(b, list) else b for b in batches]
        if name == "saba":
            mine[:2] = [Numbered(b, b) for b in mine[:2]]
        ours.append(Sample(*mine, seed=k))
    return ours, theirs


def trajectory(name, several, steps=9, **more):
    """The largest relative difference from the reference, over the steps of a run on changing batches and rates."""
    row = ROWS[name]
    options = {"inner_batches": 4, "outer_batches": 4} if name == "saba" else {}
    solver = algorithms.ALL[name](FALLING, **(row.options | options | more))
    ours, theirs = draws(name, solver.needs, steps, several)
    lam = np.array([0.7, 0.4])
    omega = np.array([0.5, -0.8, 0.3])
    path = reference.ALL[name](PLAIN_PROBLEM, lam, omega, theirs, FALLING, **row.reference_options)
    problem = as_problem(PLAIN_PROBLEM)
    state = solver.init(problem, Point({"x": torch.from_numpy(lam)}, {"w": torch.from_numpy(omega)}), ours[0])
    worst = 0.0
    for k, (lam, omega) in enumerate(path):
        if k:
            state = solver.step(problem, state, ours[k])
        for found, expected in ((state.at.lam["x"], lam), (state.at.omega["w"], omega)):
            worst = max(worst, float(np.linalg.norm(found.numpy() - expected) / np.linalg.norm(expected)))
    return worst


def tolerance(name):
    return {"reversible": 1e-9}.get(name, 1e-12 if ROWS[name].exact else 1e-6)


def test_its_steps_are_those_of_the_formulas(name):
    assert trajectory(name, several=False) < tolerance(name)


MANY = [name for name in ROWS if max(make(name).needs) > 1 and name != "aid_fp"]
"""(The products of aid_fp come in another order: with a batch for each they are the same in law alone.)"""


@pytest.mark.parametrize("name", MANY)
def test_its_steps_are_those_of_the_formulas_with_a_batch_for_each_product(name):
    assert trajectory(name, several=True) < tolerance(name)


class Louder:
    """An update that goes a hundredth too far."""

    def __init__(self, of):
        self.of = of

    def init(self, x):
        return self.of.init(x)

    def __call__(self, x, g, rate, memory):
        return self.of(x, g, 1.01 * rate, memory)


@pytest.mark.parametrize("name", ["fsla", "soba", "sustain", "f2sa", "stable", "penalty", "saba", "hoag"])
def test_a_perturbed_update_is_noticed(name, monkeypatch):
    made = algorithms.ALL[name]

    def perturbed(rates, **options):
        solver = made(rates, **options)
        field = "lam_update" if hasattr(solver, "lam_update") else "outer"
        return replace(solver, **{field: Louder(getattr(solver, field))})

    monkeypatch.setitem(algorithms.ALL, name, perturbed)
    assert trajectory(name, several=False) > 1e-6 > tolerance(name)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("fsla", "fsla.steps._momentum:STORM.__call__"),
        ("mrbo", "fsla.hypergradients._linsolve:neumann"),
        ("cg", "fsla.hypergradients._linsolve:cg"),
        ("saba", "fsla.algorithms._saba:corrected"),
        ("itd_bio", "fsla.hypergradients._estimators:adjoint_recursion"),
        ("amigo", "fsla.hypergradients._estimators:vector_recursion"),
    ],
)
def test_a_perturbed_part_is_noticed(name, where, monkeypatch):
    """What a part gives is scaled by 1.001."""
    module, _, attribute = where.partition(":")
    owner = sys.modules[module]
    if "." in attribute:
        kind, _, attribute = attribute.partition(".")
        owner = getattr(owner, kind)
    right = getattr(owner, attribute)

    def wrong(*arguments, **options):
        found = right(*arguments, **options)
        return (tree.scale(1.001, found[0]), found[1]) if isinstance(found, tuple) else tree.scale(1.001, found)

    monkeypatch.setattr(owner, attribute, wrong)
    assert trajectory(name, several=False) > 1e-6 > tolerance(name)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.counts])
def test_it_asks_for_what_the_papers_say(name):
    row = ROWS[name]
    solver = make(name)
    counted = Counted(as_problem(PLAIN_PROBLEM))
    xi = Sample(*(torch.tensor(b) for b in (0, 1, 2, 3, 0)), seed=1)
    at = Point({"x": normal(2).abs()}, {"w": normal(3, seed=1)})
    state = solver.step(counted, solver.init(counted, at, xi), xi)
    _, calls, _ = counted.counting(lambda: solver.step(counted, state, xi))
    found = {key: n for key, n in vars(calls).items() if n and key not in ("inner_views", "outer_views")}
    if row.draws:
        products = found.pop("hvp", 0)
        assert products <= 2 * (row.options["Q"] - 1)
    assert found == {key: n for key, n in row.counts.items() if n}


# --------------------------------------------------------------------------------------------------- what all must do


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.near is not None])
def test_it_finds_the_minimum_of_f(name):
    row = ROWS[name]
    q = Quadratic.random(3, 6, kappa=3.0, seed=2)
    best = torch.linalg.solve(q.hessian(), -q.gradient(torch.zeros(3, dtype=F64)))
    solver = make(name, row.rates, **row.long)
    start = torch.full((3,), 0.1, dtype=F64)
    state = solver.init(q, q.point(start, torch.zeros(6, dtype=F64)), FULL)
    gaps = []
    while not gaps or not gaps[-1] <= row.near:
        assert len(gaps) < 20, gaps
        mean = torch.zeros(3, dtype=F64)
        for k in range(200):
            state = solver.step(q, state, full(k=200 * len(gaps) + k))
            mean += state.at.lam["lam"] / 200
        found = mean if row.draws else state.at.lam["lam"]  # random series have a mean that converges
        gaps.append(float((found - best).norm() / best.norm()))


def test_it_runs_on_trees_of_many_tensors_in_float32_and_float64(name):
    found = {}
    for dtype in (torch.float32, F64):
        problem, at, train, valid = network(dtype)
        solver, xi = make(name), full(train, valid)
        state = solver.init(problem, begin(name, at), xi)
        for _ in range(3):
            state = solver.step(problem, state, xi)
        assert state.k == 3
        for x, like in ((state.at.lam, at.lam), (state.at.omega, at.omega), (state.d, at.lam)):
            tree.aligned(x, like)  # the same keys, shapes, dtypes and devices
        found[dtype] = tree.flatten(state.d).double()
    assert float((found[torch.float32] - found[F64]).norm() / found[F64].norm()) < 2e-3


def test_a_step_is_pure_and_repeatable(name):
    problem, at, train, valid = ridge_logistic()
    solver, xi = make(name), full(train, valid)
    state = solver.step(problem, solver.init(problem, begin(name, at), xi), xi)
    before = tree.flatten(state.at.lam).clone()
    once, again = solver.step(problem, state, xi), solver.step(problem, state, xi)
    assert torch.equal(tree.flatten(once.at.omega), tree.flatten(again.at.omega))
    assert torch.equal(tree.flatten(once.d), tree.flatten(again.d))
    assert torch.equal(tree.flatten(state.at.lam), before)


def test_a_state_that_was_saved_goes_on_as_before(name, tmp_path):
    problem, at, train, valid = ridge_logistic()
    solver = make(name)
    state = solver.init(problem, begin(name, at), full(train, valid))
    for k in range(2):
        state = solver.step(problem, state, full(train, valid, k))
    save_checkpoint(tmp_path / "state", state)
    loaded = load_checkpoint(tmp_path / "state")
    for k in range(2, 5):
        state = solver.step(problem, state, full(train, valid, k))
        loaded = solver.step(problem, loaded, full(train, valid, k))
    assert loaded.k == state.k == 5
    for x, y in ((loaded.at.lam, state.at.lam), (loaded.at.omega, state.at.omega), (loaded.d, state.d)):
        assert torch.equal(tree.flatten(x), tree.flatten(y))


def test_automatic_differentiation_and_closed_form_agree(name):
    q = Quadratic.random(3, 5, seed=4)
    at = q.point(normal(3, seed=1), normal(5, seed=2))
    solver = make(name)
    at = begin(name, at)
    a, b = solver.init(q, at, FULL), solver.init(q.losses(), at, FULL)
    for _ in range(5):
        a, b = solver.step(q, a, FULL), solver.step(q.losses(), b, FULL)
    assert torch.allclose(a.at.lam["lam"], b.at.lam["lam"], rtol=1e-11)


def test_the_projection_holds(name):
    problem, at, train, valid = ridge_logistic()
    low, high = (0.1, 1.0) if ROWS[name].positive else (-1.0, 0.0)
    solver, xi = make(name, project=Box(low, high)), full(train, valid)
    state = solver.init(problem, Point({"log_ridge": at.lam["log_ridge"].clamp(low, high)}, at.omega), xi)
    for _ in range(5):
        state = solver.step(problem, state, xi)
        assert state.at.lam["log_ridge"].min() >= low
        assert state.at.lam["log_ridge"].max() <= high


def test_a_point_of_the_wrong_form_is_refused(name):
    problem, at, train, valid = ridge_logistic()
    with pytest.raises(TypeError, match="lam must be a mapping"):
        make(name).init(problem, Point(at.lam["log_ridge"], at.omega), full(train, valid))


def test_it_prints_its_settings(name):
    assert "0x" not in repr(make(name))
    assert make(name) == make(name)
    assert hash(make(name)) == hash(make(name))


def test_products_by_differences_serve_it_as_exact_ones_do(name):
    problem, at, train, valid = network()
    difference = Problem(problem.inner_loss, problem.outer_loss, mode="difference")
    solver, xi = make(name), full(train, valid)
    at = begin(name, at)
    a, b = solver.init(problem, at, xi), solver.init(difference, at, xi)
    for _ in range(4):
        a, b = solver.step(problem, a, xi), solver.step(difference, b, xi)
    for x, y in ((a.at.lam, b.at.lam), (a.at.omega, b.at.omega), (a.d, b.d)):
        assert float(tree.norm(tree.sub(y, x)) / tree.norm(x)) < 1e-6


def test_it_says_which_batches_it_reads(name):
    problem, at, train, valid = ridge_logistic()
    solver, xi = make(name), full(train, valid)
    state = solver.init(problem, begin(name, at), xi)
    for slot, n in zip(solver.needs._fields, solver.needs, strict=True):
        many = xi._replace(**{slot: Batches([getattr(xi, slot)] * (max(n, 1) + 1))})
        with pytest.raises(ValueError, match=f"'{slot}' of the sample must be one batch, or Batches of {max(n, 1)}"):
            solver.step(problem, state, many)


@pytest.mark.parametrize("name", [name for name in ROWS if not make(name).capturable])
def test_what_differs_from_step_to_step_is_never_captured(name):
    solver = make(name)
    problem, at, train, valid = ridge_logistic()
    xi = full(train, valid)
    state = solver.init(problem, begin(name, at), xi)
    for choice in ("graph", "compile"):
        with pytest.raises(CaptureError, match="does not take the same operations at every step"):
            make_engine(choice, solver, problem, lambda: xi, torch.Generator(), state)
    assert make_engine("auto", solver, problem, lambda: xi, torch.Generator(), state, steps=10**6).name == "eager"


COMPILED = ("fsla", "cg", "soba")
"""(Compiling takes seconds: the others are slow tests.)"""


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        pytest.param(name, engine, marks=[pytest.mark.slow] if engine == "compile" and name not in COMPILED else [])
        for name in algorithms.ALL
        if make(name).capturable
        for engine in ("graph", "compile")
    ],
)
def test_every_engine_takes_the_same_steps(name, engine):
    if engine == "compile" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("there is no C++ compiler; apt-get install g++ installs one")
    solver = make(name, fsla.steps.Schedule(0.02, 0.1, 0.1, 0.5, power=0.5))
    problem, at, train, valid = ridge_logistic()
    xi, states = Sample.full(train, valid), []
    for choice in ("eager", engine):
        counted = Counted(problem)
        state = solver.init(counted, begin(name, at), xi)
        motor = make_engine(choice, solver, counted, lambda: xi, torch.Generator(), state)
        states.append((motor.advance(state, 6 - state.k), counted.calls))
    (a, calls), (b, same) = states
    assert calls == same
    assert a.k == b.k == 6
    for x, y in ((a.at.lam, b.at.lam), (a.at.omega, b.at.omega), (a.d, b.d)):
        assert float(tree.norm(tree.sub(x, y)) / tree.norm(x)) < (1e-12 if ROWS[name].exact else 1e-6)


# ---------------------------------------------------------------------------------------- what is the same as what else


def same_path(one, other, problem, at, samples, tolerance=1e-13):
    a = one.init(problem, at, samples[0])
    b = other.init(problem, at, samples[0])
    for xi in samples[1:]:
        a = one.step(problem, a, xi)
        b = other.step(problem, b, xi)
    for x, y in ((a.at.lam, b.at.lam), (a.at.omega, b.at.omega)):
        assert float(tree.norm(tree.sub(x, y)) / tree.norm(x)) < tolerance


ONE = fsla.steps.Schedule(0.05, 0.2, 0.2, 1.0, power=(0.5, 0.5, 0.5, 0.0))
STEP = 0.2
TTSA = algorithms.ttsa(ONE, Q=4, step=STEP)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (algorithms.srba(ONE, period=1), algorithms.soba(ONE)),
        (algorithms.saba(ONE), algorithms.soba(ONE)),
        (algorithms.bsa(ONE, T=1, growth=0.0, Q=4, step=STEP), TTSA),
        (algorithms.sustain(ONE, Q=4, step=STEP), replace(algorithms.sustain(ONE, Q=4, step=STEP), **{
            key: fsla.steps.NoMomentum() for key in ("omega_filter", "lam_filter")})),
        (algorithms.vr_biadam(ONE, Q=4, step=STEP), algorithms.biadam(ONE, Q=4, step=STEP)),
        (algorithms.fsla(ONE), algorithms.fsla(ONE, momentum="none")),
        (algorithms.aid_fp(ONE, T=2, K=4, step=STEP), algorithms.implicit_neumann(ONE, T=2, Q=3, step=STEP)),
        (algorithms.stocbio(ONE, T=2, Q=3, step=STEP), algorithms.implicit_neumann(ONE, T=2, Q=3, step=STEP)),
        (algorithms.forward(ONE, T=3), algorithms.itd_bio(ONE, T=3)),
        (algorithms.truncated_bp(ONE, T=3, R=3), algorithms.itd_bio(ONE, T=3)),
        (algorithms.bio_bred(ONE, T=3), algorithms.itd_bio(ONE, T=3)),
        (algorithms.hjfbio(ONE, radius=1e6), ByDifferences(algorithms.soba(ONE))),
    ],
    ids=lambda solver: type(solver).__name__,
)  # fmt: skip
def test_some_are_others_with_a_part_exchanged(one, other):
    problem, at, train, valid = ridge_logistic()
    same_path(one, other, problem, at, [full(train, valid, k) for k in range(6)])


def test_amigo_with_one_step_each_is_the_single_loop_begun_elsewhere():
    problem, at, train, valid = ridge_logistic()
    rates = fsla.steps.constant(0.05, 0.2, 0.2)
    amigo = algorithms.amigo(rates, T=1, Q=1)
    single = algorithms.single_loop(rates)
    a = amigo.init(problem, at, full(train, valid))
    b = single.init(problem, at, full(train, valid))
    b = b._replace(d=tree.zeros_like(b.d))  # λ stays for one step, as AmIGO begins with ω
    for _ in range(5):
        a = amigo.step(problem, a, full(train, valid))
        b = single.step(problem, b, full(train, valid))
        assert torch.allclose(tree.flatten(a.at.omega), tree.flatten(b.at.omega), rtol=1e-13)
    moved = tree.axpy(-0.05, b.d, b.at.lam)
    assert torch.allclose(tree.flatten(a.at.lam), tree.flatten(moved), rtol=1e-13)


def test_ma_soba_that_forgets_all_is_soba_one_step_late():
    problem, at, train, valid = ridge_logistic()
    xi = full(train, valid)
    ma = algorithms.ma_soba(fsla.steps.constant(0.05, 0.2, 0.2, 1.0))
    state = ma.init(problem, at, xi)
    for _ in range(4):
        before = state
        state = ma.step(problem, state, xi)
        step = tree.sub(before.at.lam, state.at.lam)
        assert torch.allclose(tree.flatten(step), 0.05 * tree.flatten(before.d), atol=1e-14)


def test_the_bias_of_f2sa_falls_as_its_multiplier_grows():
    q = Quadratic.random(3, 5, kappa=3.0, seed=4)
    lam = normal(3, seed=1)
    gaps = []
    for weight in (100.0, 200.0, 400.0, 800.0):
        solver = algorithms.f2sa(fsla.steps.constant(0.0, 0.3, 0.3 / (2 * weight)), T=1)
        state = solver.init(q, q.point(lam, q.omega_of(lam)), FULL)
        for _ in range(200):
            state = solver.step(q, state, FULL)
        gaps.append(float((state.d["lam"] - q.gradient(lam)).norm()))
    ratios = [before / after for before, after in pairwise(gaps)]
    assert all(1.85 < ratio < 2.05 for ratio in ratios), ratios
