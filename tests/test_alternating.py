"""Algorithm 1 against an independent plain-numpy one, its oracle counts, and what a run may not do."""

import gc
import itertools
import resource
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import fsla
from fsla import Batch, CountedProblem, OracleCounts, Point, StepBatches
from fsla import _tree as tree
from fsla.algorithms import Alternating, SharedBatchWarning
from fsla.steps import Ball, Box, Variable
from fsla_reproduction.problems import LeastSquares, Quadratic
from support import PlainLeastSquares, network, normal, plain_algorithm_1, ridge_logistic

DATA = LeastSquares.draw(0)
STEPS = 1000
OPTIONS = list(
    itertools.product(["old_params", "new_params"], ["storm", "average", "none"], ["sqrt", "horizon", "constant"])
)
SCHEDULES = {
    "sqrt": fsla.steps.inverse_sqrt(delta=0.1, c_tau=3.0, c_beta=3.0, c_eta=12.0),  # η > 1 at first: clipped
    "horizon": fsla.steps.constant_over_horizon(STEPS, delta=0.6, c_tau=5.0, c_beta=5.0, c_eta=20.0),
    "constant": fsla.steps.constant(outer_lr=0.02, inner_lr=0.1, adjoint_lr=0.1, new_grad_weight=0.3),
}


def plain_rates(schedule):
    """The schedules as the paper has them, written again."""

    def at(k):
        if schedule == "sqrt":
            a = 0.1 / np.sqrt(k + 1)
            return a, 3 * a, 3 * a, min(1.0, 12 * a)
        if schedule == "horizon":
            a = 0.6 / np.sqrt(STEPS)
            return a, 5 * a, 5 * a, 20 * a
        return 0.02, 0.1, 0.1, 0.3

    return at


def draw(mode, steps, seed=0, batch=8):
    g = torch.Generator().manual_seed(seed)
    source = lambda: torch.randint(2000, (batch,), generator=g)  # noqa: E731
    return [StepBatches.draw(mode, source, source) for _ in range(steps + 1)]


def run_both(adjoint_at, momentum, schedule, mode="independent", projection=None, plain_projection=lambda x: x):
    drawn = draw(mode, STEPS)
    lam, omega = normal(4, seed=1), normal(5, seed=2)
    algorithm = fsla.algorithms.fsla(
        SCHEDULES[schedule], adjoint_at=adjoint_at, momentum=momentum, projection=projection
    )
    problem = DATA.losses()
    state = algorithm.init(problem, Point({"lam": lam}, {"omega": omega}), drawn[0])
    plain = PlainLeastSquares(
        *(getattr(DATA, k).numpy() for k in ("a", "x", "b", "c", "e")), DATA.rho_omega, DATA.rho_lam
    )
    reference = plain_algorithm_1(
        plain,
        plain_projection(lam.numpy()),
        omega.numpy(),
        [tuple(slot[0].data.numpy() for slot in batches.slots) for batches in drawn],
        plain_rates(schedule),
        adjoint_at=adjoint_at,
        momentum=momentum,
        projection=plain_projection,
    )
    gap = 0.0
    for k, batches in enumerate(drawn[1:]):
        state = algorithm.step(problem, state, batches)
        actual = state.lam.value["lam"], state.omega.value["omega"], state.v["omega"], state.direction["lam"]
        gap = max(gap, *(float(np.abs(a.numpy() - b).max()) for a, b in zip(actual, reference[k + 1], strict=True)))
    assert state.step_count == STEPS
    return gap, reference


@pytest.mark.parametrize(("adjoint_at", "momentum", "schedule"), OPTIONS)
def test_fsla_trajectory_equals_independent_algorithm_1(adjoint_at, momentum, schedule):
    gap, reference = run_both(adjoint_at, momentum, schedule)
    assert gap < 1e-10
    assert np.abs(reference[-1][0] - reference[0][0]).max() > 0.1  # it went somewhere


@pytest.mark.parametrize("mode", ["grouped", "shared"])
def test_fsla_with_grouped_and_shared_batches_equals_reference(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SharedBatchWarning)
        assert run_both("old_params", "storm", "sqrt", mode)[0] < 1e-10


@pytest.mark.parametrize(
    ("projection", "plain"),
    [
        (Box(-0.2, 0.3), lambda x: np.clip(x, -0.2, 0.3)),
        (Ball(0.5), lambda x: x * min(1.0, 0.5 / np.linalg.norm(x))),
    ],
)
def test_fsla_with_projection_equals_reference(projection, plain):
    gap, reference = run_both("old_params", "storm", "sqrt", projection=projection, plain_projection=plain)
    assert gap < 1e-10
    assert all(np.allclose(plain(lam), lam) for lam, *_ in reference)


def test_fsla_new_grad_weight_clipping():
    assert fsla.steps.inverse_sqrt(delta=10.0, c_eta=0.9).rates(0).new_grad_weight == 1.0
    assert fsla.steps.Schedule(1, 1, 1, new_grad_weight=9.0, clip_weight=False).rates(0).new_grad_weight == 9.0


def test_fsla_deterministic_equals_single_loop_equation():
    q = Quadratic.random(3, 5, seed=1)
    H, J, Q, R, S = q.H, q.J, q.Q, q.R, q.S
    alpha, tau, beta = 0.05, 0.08, 0.08
    lam, omega, v = normal(3, seed=1), normal(5, seed=2), torch.zeros(5, dtype=torch.float64)
    algorithm = fsla.algorithms.single_loop(fsla.steps.constant(alpha, tau, beta))
    batches = StepBatches.shared(None, None)
    state = algorithm.init(q.losses(), q.point(lam, omega), batches)
    h = R @ omega + S @ lam - q.s - J @ v
    for _ in range(200):
        lam = lam - alpha * h
        omega = omega - tau * (H @ omega + J.T @ lam - q.c)
        v = beta * (Q @ omega + R.T @ lam - q.q) + v - beta * (H @ v)
        h = R @ omega + S @ lam - q.s - J @ v
        state = algorithm.step(q.losses(), state, batches)
        assert torch.allclose(state.lam.value["lam"], lam, atol=1e-12)
        assert torch.allclose(state.v["omega"], v, atol=1e-12)
        assert torch.allclose(state.direction["lam"], h, atol=1e-12)


def test_fsla_adjoint_equals_closed_form_sum():
    """v_K = Σ β_k P_K … P_{k+1} ∂_ω F(λ_k, ω_k), the corrected expansion of section 4."""
    problem, at, train, valid = ridge_logistic()
    batches, beta = StepBatches.shared(train, valid), 0.3
    algorithm = fsla.algorithms.single_loop(fsla.steps.constant(0.05, 0.2, beta))
    state = algorithm.init(problem, at, batches)
    seen = []
    for _ in range(6):
        state = algorithm.step(problem, state, batches)
        seen.append(state.point)
    total = tree.zeros_like(at.omega)
    for k, point in enumerate(seen):
        term = tree.scale(beta, problem.outer_at(point, Batch(valid)).grad_omega)
        for later in seen[k + 1 :]:
            term = tree.axpy(-beta, problem.inner_at(later, Batch(train)).hvp(term), term)
        total = tree.axpy(1.0, term, total)
    assert float(tree.norm(tree.sub(total, state.v))) < 1e-13


def test_alternating_step_is_pure():
    problem, at, train, valid = network()
    algorithm, batches = fsla.algorithms.fsla(fsla.steps.constant(0.1, 0.1, 0.1, 0.5)), StepBatches.shared(train, valid)
    first = algorithm.init(problem, at, batches)
    copies = [
        {n: t.clone() for n, t in x.items()} for x in (first.lam.value, first.omega.value, first.v, first.direction)
    ]
    one = algorithm.step(problem, first, batches)
    two = algorithm.step(problem, first, batches)
    for x, y in zip((first.lam.value, first.omega.value, first.v, first.direction), copies, strict=True):
        assert all(torch.equal(x[n], y[n]) for n in y)
    assert all(torch.equal(one.direction[n], two.direction[n]) for n in one.direction)
    assert one.step_count == two.step_count == 1


def count_step(algorithm, mode="independent"):
    drawn = draw(mode, 2)
    problem = CountedProblem(DATA.losses(), size=len)
    state = algorithm.init(DATA.losses(), Point({"lam": normal(4)}, {"omega": normal(5)}), drawn[0])
    state = algorithm.step(DATA.losses(), state, drawn[1])
    algorithm.step(problem, state, drawn[2])
    return problem


R = fsla.steps.constant(0.01, 0.1, 0.1, 0.5)
STORM = {
    "fsla": (fsla.algorithms.fsla(R), OracleCounts(grad=1, outer_grad_omega=1, hvp=1, outer_grad_lam=2, mixed_hvp=2)),
    "fsla, v at new": (
        fsla.algorithms.fsla(R, adjoint_at="new_params"),
        OracleCounts(grad=1, outer_grad_omega=1, hvp=1, outer_grad_lam=2, mixed_hvp=2),
    ),
    "fsla, average": (
        fsla.algorithms.fsla(R, momentum="average"),
        OracleCounts(grad=1, outer_grad_omega=1, hvp=1, outer_grad_lam=1, mixed_hvp=1),
    ),
    "fsla, none": (
        fsla.algorithms.fsla(R, momentum="none"),
        OracleCounts(grad=1, outer_grad_omega=1, hvp=1, outer_grad_lam=1, mixed_hvp=1),
    ),
    "ns": (
        fsla.algorithms.ns(R, inner_steps=3, num_terms=5),
        OracleCounts(grad=3, outer_grad_omega=2, hvp=8, outer_grad_lam=2, mixed_hvp=2),
    ),
    "ns, none": (
        fsla.algorithms.ns(R, num_terms=5, momentum="none"),
        OracleCounts(grad=1, outer_grad_omega=1, hvp=4, outer_grad_lam=1, mixed_hvp=1),
    ),
    "cg": (
        fsla.algorithms.cg(R, inner_steps=3, hvp_steps=5),
        OracleCounts(grad=3, outer_grad_omega=2, hvp=10, outer_grad_lam=2, mixed_hvp=2),
    ),
    "cg, none": (
        fsla.algorithms.cg(R, hvp_steps=5, momentum="none"),
        OracleCounts(grad=1, outer_grad_omega=1, hvp=5, outer_grad_lam=1, mixed_hvp=1),
    ),
    "bp": (
        fsla.algorithms.bp(R, inner_steps=4),
        OracleCounts(grad=4, outer_grad_omega=2, hvp=6, outer_grad_lam=2, mixed_hvp=8, joint=6),
    ),
    "bp, none": (
        fsla.algorithms.bp(R, inner_steps=4, momentum="none"),
        OracleCounts(grad=4, outer_grad_omega=1, hvp=3, outer_grad_lam=1, mixed_hvp=4, joint=3),
    ),
    "bp, truncated": (
        fsla.algorithms.bp(R, inner_steps=4, unroll_length=2, momentum="none"),
        OracleCounts(grad=4, outer_grad_omega=1, hvp=1, outer_grad_lam=1, mixed_hvp=2, joint=1),
    ),
    "soba": (
        fsla.algorithms.soba(R),
        OracleCounts(grad=1, outer_grad_omega=1, hvp=1, outer_grad_lam=1, mixed_hvp=1, joint=1),
    ),
    "ma_soba": (
        fsla.algorithms.ma_soba(R),
        OracleCounts(grad=1, outer_grad_omega=1, hvp=1, outer_grad_lam=1, mixed_hvp=1, joint=1),
    ),
    "amigo": (
        fsla.algorithms.amigo(R, inner_steps=3, hvp_steps=4),
        OracleCounts(grad=3, outer_grad_omega=1, hvp=4, outer_grad_lam=1, mixed_hvp=1),
    ),
}


@pytest.mark.parametrize("name", STORM)
def test_alternating_step_oracle_counts(name):
    algorithm, expected = STORM[name]
    actual = count_step(algorithm).calls
    expected.inner_views, expected.outer_views = actual.inner_views, actual.outer_views
    assert actual == expected


def test_counted_problem_counts_samples():
    assert count_step(fsla.algorithms.fsla(R)).samples.hvp == 8
    assert count_step(fsla.algorithms.fsla(R)).samples.mixed_hvp == 16


@pytest.mark.parametrize(
    ("algorithm", "mode", "inner", "outer"),
    [
        (fsla.algorithms.fsla(R), "independent", 4, 3),  # ξ1, ξ3, ξ5 at the new and at the old point; ξ2, ξ4 twice
        (fsla.algorithms.fsla(R), "grouped", 3, 3),  # ∂_ω G and HVP from one view
        (fsla.algorithms.fsla(R, momentum="none", adjoint_at="new_params"), "shared", 2, 1),  # both products from one
        (fsla.algorithms.soba(R), "shared", 1, 1),
        # The inner steps, and each again for its product: one point is looked at, and its view kept, at a time.
        (fsla.algorithms.bp(R, inner_steps=5, momentum="none"), "shared", 10, 1),
    ],
)
def test_views_of_same_point_and_batch_share_graph(algorithm, mode, inner, outer):
    calls = count_step(algorithm, mode).calls
    assert (calls.inner_views, calls.outer_views) == (inner, outer)


def test_view_sharing_changes_no_number():
    problem, at, train, valid = network()
    algorithm = fsla.algorithms.fsla(fsla.steps.constant(0.1, 0.1, 0.1, 0.5))
    one_batch = StepBatches.shared(train, valid)
    copies = StepBatches(*(tuple(Batch(b.data) for b in slot) for slot in one_batch.slots))
    a = algorithm.init(problem, at, one_batch)
    for _ in range(3):
        a, b = algorithm.step(problem, a, one_batch), algorithm.step(problem, a, copies)
        assert float(tree.norm(tree.sub(a.direction, b.direction))) < 1e-15


def test_inner_steps_use_batches_in_order():
    problem, at = DATA.losses(), Point({"lam": normal(4)}, {"omega": normal(5)})
    drawn = draw("independent", 3)
    algorithm = fsla.algorithms.amigo(R, inner_steps=3, hvp_steps=1)
    inner = tuple(x.inner_grad[0] for x in drawn[:3])
    many = drawn[0]._replace(inner_grad=inner)
    after = algorithm.step(problem, algorithm.init(problem, at, drawn[0]), many)
    omega = at.omega
    for batch in inner:
        omega = tree.axpy(-0.1, problem.inner_at(Point(at.lam, omega), batch).grad_omega, omega)
    assert torch.allclose(after.omega.value["omega"], omega["omega"])
    state = algorithm.init(problem, at, drawn[0])
    for n in (2, 4):
        with pytest.raises(ValueError, match=rf"'inner_grad' of a step must be one batch, or 3.*Got {n}"):
            algorithm.step(problem, state, many._replace(inner_grad=(inner * 2)[:n]))


def test_unused_batches_raise():
    problem, at = DATA.losses(), Point({"lam": normal(4)}, {"omega": normal(5)})
    drawn = draw("independent", 4)
    four = drawn[0]._replace(hvp=tuple(x.hvp[0] for x in drawn[:4]))
    algorithm = fsla.algorithms.ns(R, num_terms=4)
    state = algorithm.init(problem, at, drawn[0])
    with pytest.raises(ValueError, match=r"'hvp' of a step must be one batch, or 3.*Got 4"):
        algorithm.step(problem, state, four)
    assert algorithm.batches == fsla.BatchSpec(hvp=3)
    assert fsla.algorithms.amigo(R, inner_steps=3, hvp_steps=4).batches == fsla.BatchSpec(inner_grad=3, hvp=4)
    assert fsla.algorithms.bp(R, inner_steps=5).batches == fsla.BatchSpec(inner_grad=5, hvp=5)


def test_restart_begins_at_first_omega():
    problem, at, train, valid = ridge_logistic()
    batches = StepBatches.shared(train, valid)
    for T, restart, cold in ((1, None, False), (3, None, True), (3, False, False), (1, True, True)):
        algorithm = fsla.algorithms.cg(R, inner_steps=T, restart=restart)
        state = algorithm.init(problem, at, batches)
        for _ in range(4):
            before = state
            state = algorithm.step(problem, state, batches)
        omega = at.omega if cold else before.omega.value
        for _ in range(T):
            omega = tree.axpy(-0.1, problem.inner_at(Point(state.lam.value, omega), Batch(train)).grad_omega, omega)
        assert float(tree.norm(tree.sub(omega, state.omega.value))) < 1e-14


def test_max_adjoint_norm_bounds_adjoint():
    problem, at, train, valid = ridge_logistic()
    batches = StepBatches.shared(train, valid)
    algorithm = fsla.algorithms.fsla(fsla.steps.constant(0.0, 0.1, 0.5), max_adjoint_norm=0.01)
    state = algorithm.init(problem, at, batches)
    for _ in range(50):
        state = algorithm.step(problem, state, batches)
        assert float(tree.norm(state.v)) <= 0.01 * (1 + 1e-12)


def test_step_memory_does_not_grow():
    problem, at = DATA.losses(), Point({"lam": normal(4)}, {"omega": normal(5)})
    drawn = draw("grouped", 7)
    algorithm = fsla.algorithms.fsla(fsla.steps.inverse_sqrt(delta=0.1, c_tau=3.0, c_beta=3.0, c_eta=5.0))
    state = algorithm.init(problem, at, drawn[0])
    alive, peak = [], []
    for k in range(2001):
        state = algorithm.step(problem, state, drawn[k % 8])
        if k % 500 == 0:
            gc.collect()
            alive.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
            peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # KiB
    assert alive[-1] == alive[1] == alive[2]
    assert peak[-1] - peak[1] < 4096
    assert not any(t.requires_grad or t.grad_fn is not None for t in (*state.direction.values(), *state.v.values()))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: fsla.algorithms.fsla(R, adjoint_at="now"), ValueError, "'old_params' or 'new_params'. Got 'now'"),
        (lambda: fsla.algorithms.fsla(R, momentum="strom"), ValueError, "momentum.*Got 'strom'.*Did you mean 'storm'"),
        (lambda: fsla.algorithms.fsla(R, max_adjoint_norm=-1.0), ValueError, "'max_adjoint_norm'.*positive"),
        (lambda: Alternating(step_sizes=R, outer_last=True), ValueError, r"must not look back\. Got STORM\(\)"),
        (lambda: fsla.algorithms.ns(R, num_terms=0), ValueError, "'num_terms' of Neumann.*at least 1"),
        (lambda: fsla.algorithms.ns(R, adjoint_lr=0.0), ValueError, "'adjoint_lr' of Neumann.*positive"),
        (lambda: fsla.algorithms.cg(R, hvp_steps=2.0), TypeError, "whole number"),
        (lambda: fsla.algorithms.bp(R, inner_steps=-1), ValueError, "'inner_steps' of the algorithm.*Got -1"),
        (lambda: fsla.algorithms.bp(R, unroll_length=0), ValueError, "'unroll_length' of ReverseUnroll"),
        (lambda: fsla.steps.constant(-0.1, 0.1, 0.1), ValueError, "'outer_lr'.*at least 0. Got -0.1"),
        (lambda: fsla.steps.constant(0.1, float("nan"), 0.1), ValueError, "'inner_lr'.*finite"),
        (
            lambda: fsla.steps.constant_over_horizon(0, 1.0, 1.0, 1.0, 1.0),
            ValueError,
            "'steps' of constant_over_horizon",
        ),
        (lambda: Box(1.0, 0.0), ValueError, "low ≤ high"),
        (lambda: Ball(0.0), ValueError, "'radius' of Ball"),
        (lambda: StepBatches.draw("both", int, int), ValueError, "'independent', 'grouped', 'shared'. Got 'both'"),
    ],
)
def test_alternating_invalid_setting_raises(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_init_accepts_batches():
    problem, at = DATA.losses(), Point({"lam": normal(4)}, {"omega": normal(5)})
    drawn = draw("independent", 3)
    several = {"inner_grad": tuple(x.inner_grad[0] for x in drawn[:3]), "hvp": tuple(x.hvp[0] for x in drawn[:2])}
    batches = drawn[0]._replace(**several)
    algorithm = fsla.algorithms.amigo(R, inner_steps=3, hvp_steps=2)
    assert algorithm.step(problem, algorithm.init(problem, at, batches), batches).step_count == 1


@pytest.mark.parametrize("name", ["fsla", "soba", "ma_soba"])
def test_init_projects_start(name):
    problem, at, train, valid = ridge_logistic()
    algorithm = fsla.algorithms.get_algorithm(name)(R, projection=Box(0.0, 1.0))
    state = algorithm.init(
        problem,
        Point({"log_ridge": torch.full((6,), 5.0, dtype=torch.float64)}, at.omega),
        StepBatches.shared(train, valid),
    )
    assert state.lam.value["log_ridge"].max() == 1.0


def test_state_is_finite_checks_all_parts():
    problem, at, train, valid = ridge_logistic()
    batches, algorithm = StepBatches.shared(train, valid), fsla.algorithms.fsla(fsla.steps.constant(0.1, 1e200, 0.1))
    state = algorithm.init(problem, at, batches)
    assert state.is_finite()
    for _ in range(5):
        state = algorithm.step(problem, state, batches)
    assert not state.is_finite()


def test_state_is_finite_checks_adjoint():
    problem, at, train, valid = ridge_logistic()
    algorithm = fsla.algorithms.fsla(R)
    state = algorithm.init(problem, at, StepBatches.shared(train, valid))
    for bad in (torch.nan, torch.inf):
        adjoint = Variable({**state.v, "b": torch.tensor(bad)})
        assert not replace(state, adjoint=adjoint).is_finite()


def test_state_to_dtype_converts_all_parts():
    problem, at, train, valid = ridge_logistic()
    batches, algorithm = StepBatches.shared(train, valid), fsla.algorithms.bp(R, inner_steps=2)
    state = algorithm.step(problem, algorithm.init(problem, at, batches), batches).to(torch.float32)
    parts = (state.lam.value, state.omega.value, state.direction, state.trajectory[0][0], at.to(torch.float32).omega)
    assert all(t.dtype == torch.float32 for x in parts for t in x.values())
    assert state.step_count == 1


def test_storm_on_shared_batches_warns():
    problem, at = DATA.losses(), Point({"lam": normal(4)}, {"omega": normal(5)})
    (batches, *_), (grouped, *_) = draw("shared", 1), draw("grouped", 1)
    with pytest.warns(UserWarning, match=r"STORM needs.*independently.*momentum='none'"):
        fsla.algorithms.fsla(R).init(problem, at, batches)
    fsla.algorithms.fsla(R).init(problem, at, grouped)  # warnings are errors here
    fsla.algorithms.fsla(R, momentum="average").init(problem, at, batches)


def test_alternating_argument_of_wrong_type_raises():
    with pytest.raises(TypeError, match=r"step_sizes must be step sizes.*Got tuple"):
        fsla.algorithms.fsla((0.1, 0.1))
    with pytest.raises(TypeError, match=r"step_sizes must be step sizes"):
        fsla.algorithms.soba(0.1)
    with pytest.raises(TypeError, match=r"outer source of StepBatches.draw must be a function.*Got float"):
        StepBatches.draw("grouped", int, 1.0)
    with pytest.raises(TypeError, match=r"inner source of StepBatches.draw.*Got list instead.*fsla.problems.cycle"):
        StepBatches.draw("grouped", [1, 2], int)
    drawn = StepBatches.draw("independent", iter("abc"), iter("xy"))
    assert [batch.data for (batch,) in drawn.slots] == ["a", "x", "b", "y", "c"]
