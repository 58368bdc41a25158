"""Every algorithm through the same checks. A new one adds its row to `rows.py` and its formulas to `reference.py`."""

import inspect
import sys
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import reference
import torch
from rows import ROWS, as_problem, begin, count_calls, letter_options, make, names, names_where, row_of
from torch.utils._python_dispatch import TorchDispatchMode

import fsla
from fsla import Batch, Point, Problem, StepBatches, algorithms
from fsla import _tree as tree
from fsla.hypergradients import RandomNeumann
from fsla.steps import Box, Update, WrappedUpdate
from fsla.train import load_checkpoint, save_checkpoint
from fsla_reproduction.problems import Quadratic
from support import F64, network, normal, ridge_logistic

FALLING = fsla.steps.Schedule(0.06, 0.11, 0.13, 0.6, power=(0.5, 0.3, 0.2, 0.1))


def full(inner=None, outer=None, k=0):
    return StepBatches.shared(inner, outer, seed=k)


FULL = full()


@pytest.fixture(params=algorithms.list_algorithms())
def name(request):
    row_of(request.param)
    return request.param


def test_conformance_covers_every_algorithm(name):
    assert hasattr(reference, name), (
        f"Add a function {name} to tests/conformance/reference.py, with the paper's formulas."
    )
    assert inspect.getdoc(algorithms.get_algorithm(name))


def test_conformance_rows_are_registered():
    """One that is left over would test nothing."""
    assert set(algorithms.list_algorithms()) >= ROWS.keys()


# ---------------------------------------------------------------------------------------------- the formulas themselves


PLAIN_PROBLEM = reference.Plain.random(seed=3)


def draws(name, spec, steps, several, seed=5):
    """Batches of our own, and the same as the reference reads them; with `several`, one for each of many moves."""
    rng = np.random.default_rng(seed)
    row = row_of(name)
    batches_of_steps = []
    draws_of_steps = []
    for k in range(steps + 1):
        numbers = []
        for n in spec:
            many = several and n > 1
            numbers.append([int(b) for b in rng.integers(4, size=n)] if many else int(rng.integers(4)))
        length = RandomNeumann(row.options["num_terms"], 0.1).drawn(k).length if row.draws else 0
        draws_of_steps.append(reference.Draw(*numbers, length))
        lists = [b if isinstance(b, list) else [b] for b in numbers]
        if name == "saba":
            lists[:2] = [[Batch(b, number=b) for b in slot] for slot in lists[:2]]
        batches_of_steps.append(StepBatches.of(*lists, seed=k))
    return batches_of_steps, draws_of_steps


def trajectory(name, several, steps=9, change=lambda algorithm: algorithm):
    """The largest relative difference from the reference, over the steps of a run on changing batches and rates."""
    algorithm = change(make(name, FALLING, **letter_options(name)))
    sampled, reference_draws = draws(name, algorithm.batches, steps, several)
    lam = np.array([0.7, 0.4])
    omega = np.array([0.5, -0.8, 0.3])
    path = getattr(reference, name)(
        PLAIN_PROBLEM, lam, omega, reference_draws, FALLING.rates, **row_of(name).reference_options
    )
    problem = as_problem(PLAIN_PROBLEM)
    state = algorithm.init(problem, Point({"x": torch.from_numpy(lam)}, {"w": torch.from_numpy(omega)}), sampled[0])
    worst = 0.0
    for k, (lam, omega) in enumerate(path):
        if k:
            state = algorithm.step(problem, state, sampled[k])
        for actual, expected in ((state.lam.value["x"], lam), (state.omega.value["w"], omega)):
            worst = max(worst, float(np.linalg.norm(actual.numpy() - expected) / np.linalg.norm(expected)))
    return worst


def tolerance(name):
    return {"reversible": 1e-9}.get(name, 1e-12 if row_of(name).exact else 1e-6)


def test_algorithm_steps_match_reference(name):
    assert trajectory(name, several=False) < tolerance(name)


MANY = [name for name in names_where(lambda algorithm: max(algorithm.batches) > 1) if name != "aid_fp"]
"""(The products of aid_fp come in another order: with a batch for each they are the same in law alone.)"""


@pytest.mark.parametrize("name", MANY)
def test_algorithm_steps_with_batch_per_product_match_reference(name):
    assert trajectory(name, several=True) < tolerance(name)


@dataclass(frozen=True)
class Louder(WrappedUpdate):
    """An update that goes a hundredth too far."""

    update: Update

    def __call__(self, x, g, lr):
        return self.update(x, g, 1.01 * lr)


@pytest.mark.parametrize("name", ["fsla", "soba", "sustain", "f2sa", "stable", "penalty", "saba", "hoag"])
def test_algorithm_with_perturbed_update_differs(name):
    def perturbed(algorithm):
        return replace(algorithm, outer_update=Louder(algorithm.updates.outer))

    assert trajectory(name, several=False, change=perturbed) > 1e-6 > tolerance(name)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("fsla", "fsla.steps._momentum:STORM.__call__"),
        ("mrbo", "fsla.hypergradients._linear_solvers:Neumann.__call__"),
        ("cg", "fsla.hypergradients._linear_solvers:cg"),
        ("saba", "fsla.algorithms._saba:corrected"),
        ("itd_bio", "fsla.hypergradients._estimators:adjoint_recursion"),
        ("amigo", "fsla.steps._schedules:StepSizes.residual"),
    ],
)
def test_algorithm_with_perturbed_part_differs(name, where, monkeypatch):
    """What a part gives is scaled by 1.001."""
    module, _, attribute = where.partition(":")
    owner = sys.modules[module]
    if "." in attribute:
        kind, _, attribute = attribute.partition(".")
        owner = getattr(owner, kind)
    right = getattr(owner, attribute)

    def wrong(*arguments, **options):
        actual = right(*arguments, **options)
        return (tree.scale(1.001, actual[0]), actual[1]) if isinstance(actual, tuple) else tree.scale(1.001, actual)

    monkeypatch.setattr(owner, attribute, wrong)
    assert trajectory(name, several=False) > 1e-6 > tolerance(name)


@pytest.mark.parametrize("name", names(lambda row: bool(row.counts)))
def test_algorithm_oracle_counts_match_paper(name):
    row = row_of(name)
    actual = count_calls(make(name))
    if row.draws:
        products = actual.pop("hvp", 0)
        assert products <= 2 * (row.options["num_terms"] - 1)
    assert actual == {key: n for key, n in row.counts.items() if n}


# --------------------------------------------------------------------------------------------------- what all must do


@pytest.mark.parametrize("name", names(lambda row: row.near is not None))
def test_algorithm_reaches_outer_minimum(name):
    row = row_of(name)
    q = Quadratic.random(3, 6, kappa=3.0, seed=2)
    best = torch.linalg.solve(q.hessian(), -q.gradient(torch.zeros(3, dtype=F64)))
    algorithm = make(name, row.rates, **row.long)
    start = torch.full((3,), 0.1, dtype=F64)
    state = algorithm.init(q, q.point(start, torch.zeros(6, dtype=F64)), FULL)
    gaps = []
    while not gaps or not gaps[-1] <= row.near:
        assert len(gaps) < 20, f"{gaps}: give its row in rows.py smaller `rates`, more in `long`, or another `near`"
        mean = torch.zeros(3, dtype=F64)
        for k in range(200):
            state = algorithm.step(q, state, full(k=200 * len(gaps) + k))
            mean += state.lam.value["lam"] / 200
        actual = mean if row.draws else state.lam.value["lam"]  # random series have a mean that converges
        gaps.append(float((actual - best).norm() / best.norm()))


def test_algorithm_accepts_trees_and_dtypes(name):
    actual = {}
    for dtype in (torch.float32, F64):
        problem, at, train, valid = network(dtype)
        algorithm, batches = make(name), full(train, valid)
        state = algorithm.init(problem, begin(name, at), batches)
        for _ in range(3):
            state = algorithm.step(problem, state, batches)
        assert state.step_count == 3
        for x, like in ((state.lam.value, at.lam), (state.omega.value, at.omega), (state.direction, at.lam)):
            tree.aligned(x, like)  # the same keys, shapes, dtypes and devices
        actual[dtype] = tree.flatten(state.direction).double()
    assert float((actual[torch.float32] - actual[F64]).norm() / actual[F64].norm()) < 2e-3


def test_algorithm_step_is_pure(name):
    problem, at, train, valid = ridge_logistic()
    algorithm, batches = make(name), full(train, valid)
    state = algorithm.step(problem, algorithm.init(problem, begin(name, at), batches), batches)
    before = tree.flatten(state.lam.value).clone()
    once, again = algorithm.step(problem, state, batches), algorithm.step(problem, state, batches)
    assert torch.equal(tree.flatten(once.omega.value), tree.flatten(again.omega.value))
    assert torch.equal(tree.flatten(once.direction), tree.flatten(again.direction))
    assert torch.equal(tree.flatten(state.lam.value), before)


def test_algorithm_state_resumes_exactly(name, tmp_path):
    problem, at, train, valid = ridge_logistic()
    algorithm = make(name)
    state = algorithm.init(problem, begin(name, at), full(train, valid))
    for k in range(2):
        state = algorithm.step(problem, state, full(train, valid, k))
    save_checkpoint(tmp_path / "state", state)
    loaded = load_checkpoint(tmp_path / "state")
    for k in range(2, 5):
        state = algorithm.step(problem, state, full(train, valid, k))
        loaded = algorithm.step(problem, loaded, full(train, valid, k))
    assert loaded.step_count == state.step_count == 5
    for x, y in (
        (loaded.lam.value, state.lam.value),
        (loaded.omega.value, state.omega.value),
        (loaded.direction, state.direction),
    ):
        assert torch.equal(tree.flatten(x), tree.flatten(y))


def test_algorithm_on_autograd_equals_closed_form(name):
    q = Quadratic.random(3, 5, seed=4)
    at = q.point(normal(3, seed=1), normal(5, seed=2))
    algorithm = make(name)
    at = begin(name, at)
    a, b = algorithm.init(q, at, FULL), algorithm.init(q.losses(), at, FULL)
    for _ in range(5):
        a, b = algorithm.step(q, a, FULL), algorithm.step(q.losses(), b, FULL)
    assert torch.allclose(a.lam.value["lam"], b.lam.value["lam"], rtol=1e-11)


def test_algorithm_projection_holds(name):
    problem, at, train, valid = ridge_logistic()
    low, high = (0.1, 1.0) if ROWS[name].positive else (-1.0, 0.0)
    algorithm, batches = make(name, projection=Box(low, high)), full(train, valid)
    state = algorithm.init(problem, Point({"log_ridge": at.lam["log_ridge"].clamp(low, high)}, at.omega), batches)
    for _ in range(5):
        state = algorithm.step(problem, state, batches)
        assert state.lam.value["log_ridge"].min() >= low
        assert state.lam.value["log_ridge"].max() <= high


def test_algorithm_malformed_point_raises(name):
    problem, at, train, valid = ridge_logistic()
    with pytest.raises(TypeError, match="lam must be a mapping"):
        make(name).init(problem, Point(at.lam["log_ridge"], at.omega), full(train, valid))


def test_algorithm_repr_shows_settings(name):
    assert "0x" not in repr(make(name))
    assert make(name) == make(name)
    assert hash(make(name)) == hash(make(name))


def test_algorithm_with_finite_differences_matches_autograd(name):
    problem, at, train, valid = network()
    difference = Problem(problem.inner_loss, problem.outer_loss, hvp_method="finite_difference")
    algorithm, batches = make(name), full(train, valid)
    at = begin(name, at)
    a, b = algorithm.init(problem, at, batches), algorithm.init(difference, at, batches)
    for _ in range(4):
        a, b = algorithm.step(problem, a, batches), algorithm.step(difference, b, batches)
    for x, y in ((a.lam.value, b.lam.value), (a.omega.value, b.omega.value), (a.direction, b.direction)):
        assert float(tree.norm(tree.sub(y, x)) / tree.norm(x)) < 1e-6


def test_algorithm_batch_spec_matches_reads(name):
    problem, at, train, valid = ridge_logistic()
    algorithm, batches = make(name), full(train, valid)
    state = algorithm.init(problem, begin(name, at), batches)
    for slot, n in zip(algorithm.batches._fields, algorithm.batches, strict=True):
        many = batches._replace(**{slot: getattr(batches, slot) * (max(n, 1) + 1)})
        with pytest.raises(ValueError, match=f"'{slot}' of a step must be one batch, or {max(n, 1)},"):
            algorithm.step(problem, state, many)


class NoHost(TorchDispatchMode):
    """Raises where the host asks a tensor for its value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("the host asked a tensor for its value")
        return func(*args, **(kwargs or {}))


def test_algorithm_capturable_step_has_no_host_sync(name):
    """A step that waits for the device leaves it idle, and cannot be captured."""
    algorithm = make(name)
    if not algorithm.capturable:
        pytest.skip("its steps differ from one to the next")
    problem, at, train, valid = ridge_logistic()
    problem = Problem(problem.inner_loss, problem.outer_loss, hvp_method="reverse_over_reverse")
    batches = full(train, valid)
    state = algorithm.step(problem, algorithm.init(problem, begin(name, at), batches), batches)
    with NoHost():
        algorithm.step(problem, state, batches)


# ---------------------------------------------------------------------------------------- what is the same as what else


def same_path(one, other, problem, at, steps, tolerance=1e-13):
    a = one.init(problem, at, steps[0])
    b = other.init(problem, at, steps[0])
    for batches in steps[1:]:
        a = one.step(problem, a, batches)
        b = other.step(problem, b, batches)
    for x, y in ((a.lam.value, b.lam.value), (a.omega.value, b.omega.value)):
        assert float(tree.norm(tree.sub(x, y)) / tree.norm(x)) < tolerance


ONE = fsla.steps.Schedule(0.05, 0.2, 0.2, 1.0, power=(0.5, 0.5, 0.5, 0.0))
STEP = {"adjoint_lr": 0.2}
TTSA = algorithms.ttsa(ONE, num_terms=4, **STEP)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (algorithms.srba(ONE, refresh_period=1), algorithms.soba(ONE)),
        (algorithms.saba(ONE), algorithms.soba(ONE)),
        (algorithms.bsa(ONE, inner_steps=1, growth=0.0, num_terms=4, **STEP), TTSA),
        (algorithms.sustain(ONE, num_terms=4, **STEP), replace(algorithms.sustain(ONE, num_terms=4, **STEP), **{
            key: fsla.steps.NoMomentum() for key in ("inner_momentum", "outer_momentum")})),
        (algorithms.vr_biadam(ONE, num_terms=4, **STEP), algorithms.biadam(ONE, num_terms=4, **STEP)),
        (algorithms.fsla(ONE), algorithms.fsla(ONE, momentum="none")),
        (algorithms.aid_fp(ONE, inner_steps=2, num_terms=4, **STEP),
         algorithms.implicit_neumann(ONE, inner_steps=2, hvp_steps=3, **STEP)),
        (algorithms.stocbio(ONE, inner_steps=2, hvp_steps=3, **STEP),
         algorithms.implicit_neumann(ONE, inner_steps=2, hvp_steps=3, **STEP)),
        (algorithms.forward(ONE, inner_steps=3), algorithms.itd_bio(ONE, inner_steps=3)),
        (algorithms.truncated_bp(ONE, inner_steps=3, unroll_length=3), algorithms.itd_bio(ONE, inner_steps=3)),
        (algorithms.bio_bred(ONE, inner_steps=3), algorithms.itd_bio(ONE, inner_steps=3)),
        (algorithms.hjfbio(ONE, max_adjoint_norm=1e6), replace(algorithms.soba(ONE), finite_differences=True)),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)  # fmt: skip
def test_algorithm_equals_other_with_replaced_part(one, other):
    problem, at, train, valid = ridge_logistic()
    same_path(one, other, problem, at, [full(train, valid, k) for k in range(6)])


def test_amigo_with_one_step_equals_single_loop():
    problem, at, train, valid = ridge_logistic()
    rates = fsla.steps.constant(0.05, 0.2, 0.2)
    amigo = algorithms.amigo(rates, inner_steps=1, hvp_steps=1)
    single = algorithms.single_loop(rates)
    a = amigo.init(problem, at, full(train, valid))
    b = single.init(problem, at, full(train, valid))
    b = replace(b, direction=tree.zeros_like(b.direction))  # λ stays for one step, as AmIGO begins with ω
    for _ in range(5):
        a = amigo.step(problem, a, full(train, valid))
        b = single.step(problem, b, full(train, valid))
        assert torch.allclose(tree.flatten(a.omega.value), tree.flatten(b.omega.value), rtol=1e-13)
    moved = tree.axpy(-0.05, b.direction, b.lam.value)
    assert torch.allclose(tree.flatten(a.lam.value), tree.flatten(moved), rtol=1e-13)


def test_ma_soba_without_memory_equals_delayed_soba():
    problem, at, train, valid = ridge_logistic()
    batches = full(train, valid)
    ma = algorithms.ma_soba(fsla.steps.constant(0.05, 0.2, 0.2, 1.0))
    state = ma.init(problem, at, batches)
    for _ in range(4):
        before = state
        state = ma.step(problem, state, batches)
        step = tree.sub(before.lam.value, state.lam.value)
        assert torch.allclose(tree.flatten(step), 0.05 * tree.flatten(before.direction), atol=1e-14)


def test_f2sa_bias_falls_with_multiplier():
    q = Quadratic.random(3, 5, kappa=3.0, seed=4)
    lam = normal(3, seed=1)
    gaps = []
    for weight in (100.0, 200.0, 400.0, 800.0):
        algorithm = algorithms.f2sa(fsla.steps.constant(0.0, 0.3, 0.3 / (2 * weight)), inner_steps=1)
        state = algorithm.init(q, q.point(lam, q.omega_of(lam)), FULL)
        for _ in range(200):
            state = algorithm.step(q, state, FULL)
        gaps.append(float((state.direction["lam"] - q.gradient(lam)).norm()))
    ratios = [before / after for before, after in pairwise(gaps)]
    assert all(1.85 < ratio < 2.05 for ratio in ratios), ratios
