"""Algorithm 1 against an independent plain-numpy one, its oracle counts, and what a run may not do."""

import gc
import itertools
import resource
import warnings

import numpy as np
import pytest
import torch

import fsla
from fsla import Batches, Counted, Counts, Point, Sample
from fsla import _tree as tree
from fsla.algorithms import SharedBatchWarning, Solver
from fsla.hypergradients import Tracked
from fsla.steps import Ball, Box
from fsla_reproduction.problems import LeastSquares, Quadratic
from support import PlainLeastSquares, network, normal, plain_algorithm_1, ridge_logistic

DATA = LeastSquares.draw(0)
STEPS = 1000
OPTIONS = list(itertools.product(["old", "new"], ["storm", "average", "none"], ["sqrt", "horizon", "constant"]))
SCHEDULES = {
    "sqrt": fsla.steps.paper(delta=0.1, c_tau=3.0, c_beta=3.0, c_eta=12.0),  # η > 1 at first: clipped
    "horizon": fsla.steps.horizon(STEPS, delta=0.6, c_tau=5.0, c_beta=5.0, c_eta=20.0),
    "constant": fsla.steps.constant(alpha=0.02, tau=0.1, beta=0.1, eta=0.3),
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
    return [Sample.draw(mode, source, source) for _ in range(steps + 1)]


def run_both(v_at, momentum, schedule, mode="independent", project=None, plain_project=lambda x: x):
    samples = draw(mode, STEPS)
    lam, omega = normal(4, seed=1), normal(5, seed=2)
    solver = fsla.algorithms.fsla(SCHEDULES[schedule], v_at=v_at, momentum=momentum, project=project)
    problem = DATA.losses()
    state = solver.init(problem, Point({"lam": lam}, {"omega": omega}), samples[0])
    plain = PlainLeastSquares(
        *(getattr(DATA, k).numpy() for k in ("a", "x", "b", "c", "e")), DATA.rho_omega, DATA.rho_lam
    )
    reference = plain_algorithm_1(
        plain,
        plain_project(lam.numpy()),
        omega.numpy(),
        [tuple(b.numpy() for b in xi.batches) for xi in samples],
        plain_rates(schedule),
        v_at=v_at,
        momentum=momentum,
        project=plain_project,
    )
    gap = 0.0
    for k, xi in enumerate(samples[1:]):
        state = solver.step(problem, state, xi)
        found = state.at.lam["lam"], state.at.omega["omega"], state.memory["omega"], state.d["lam"]
        gap = max(gap, *(float(np.abs(a.numpy() - b).max()) for a, b in zip(found, reference[k + 1], strict=True)))
    assert state.k == STEPS
    return gap, reference


@pytest.mark.parametrize(("v_at", "momentum", "schedule"), OPTIONS)
def test_the_trajectory_is_that_of_an_independent_algorithm_1(v_at, momentum, schedule):
    gap, reference = run_both(v_at, momentum, schedule)
    assert gap < 1e-10
    assert np.abs(reference[-1][0] - reference[0][0]).max() > 0.1  # it went somewhere


@pytest.mark.parametrize("mode", ["grouped", "shared"])
def test_grouped_and_shared_samples_follow_it_too(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SharedBatchWarning)
        assert run_both("old", "storm", "sqrt", mode)[0] < 1e-10


@pytest.mark.parametrize(
    ("project", "plain"),
    [
        (Box(-0.2, 0.3), lambda x: np.clip(x, -0.2, 0.3)),
        (Ball(0.5), lambda x: x * min(1.0, 0.5 / np.linalg.norm(x))),
    ],
)
def test_projections_follow_it_too(project, plain):
    gap, reference = run_both("old", "storm", "sqrt", project=project, plain_project=plain)
    assert gap < 1e-10
    assert all(np.allclose(plain(lam), lam) for lam, *_ in reference)


def test_eta_is_clipped_or_not():
    assert fsla.steps.paper(delta=10.0, c_eta=0.9)(0).eta == 1.0
    assert fsla.steps.Schedule(1, 1, 1, eta=9.0, clip_eta=False)(0).eta == 9.0


def test_the_deterministic_run_is_the_single_loop_equation():
    q = Quadratic.random(3, 5, seed=1)
    H, J, Q, R, S = q.H, q.J, q.Q, q.R, q.S
    alpha, tau, beta = 0.05, 0.08, 0.08
    lam, omega, v = normal(3, seed=1), normal(5, seed=2), torch.zeros(5, dtype=torch.float64)
    solver = fsla.algorithms.single_loop(fsla.steps.constant(alpha, tau, beta))
    xi = Sample.full(None, None)
    state = solver.init(q.losses(), q.point(lam, omega), xi)
    h = R @ omega + S @ lam - q.s - J @ v
    for _ in range(200):
        lam = lam - alpha * h
        omega = omega - tau * (H @ omega + J.T @ lam - q.c)
        v = beta * (Q @ omega + R.T @ lam - q.q) + v - beta * (H @ v)
        h = R @ omega + S @ lam - q.s - J @ v
        state = solver.step(q.losses(), state, xi)
        assert torch.allclose(state.at.lam["lam"], lam, atol=1e-12)
        assert torch.allclose(state.memory["omega"], v, atol=1e-12)
        assert torch.allclose(state.d["lam"], h, atol=1e-12)


def test_the_memory_is_the_closed_form_sum():
    """v_K = Σ β_k P_K … P_{k+1} ∂_ω F(λ_k, ω_k), the corrected expansion of section 4."""
    problem, at, train, valid = ridge_logistic()
    xi, beta = Sample.full(train, valid), 0.3
    solver = fsla.algorithms.single_loop(fsla.steps.constant(0.05, 0.2, beta))
    state = solver.init(problem, at, xi)
    seen = []
    for _ in range(6):
        state = solver.step(problem, state, xi)
        seen.append(state.at)
    total = tree.zeros_like(at.omega)
    for k, point in enumerate(seen):
        term = tree.scale(beta, problem.outer_at(point, valid).d_omega)
        for later in seen[k + 1 :]:
            term = tree.axpy(-beta, problem.inner_at(later, train).hvp(term), term)
        total = tree.axpy(1.0, term, total)
    assert float(tree.norm(tree.sub(total, state.memory))) < 1e-13


def test_a_step_is_pure():
    problem, at, train, valid = network()
    solver, xi = fsla.algorithms.fsla(fsla.steps.constant(0.1, 0.1, 0.1, 0.5)), Sample.full(train, valid)
    first = solver.init(problem, at, xi)
    copies = [{n: t.clone() for n, t in x.items()} for x in (first.at.lam, first.at.omega, first.memory, first.d)]
    one = solver.step(problem, first, xi)
    two = solver.step(problem, first, xi)
    for x, y in zip((first.at.lam, first.at.omega, first.memory, first.d), copies, strict=True):
        assert all(torch.equal(x[n], y[n]) for n in y)
    assert all(torch.equal(one.d[n], two.d[n]) for n in one.d)
    assert one.k == two.k == 1


def count_step(solver, mode="independent", T=1):
    samples = draw(mode, 2)
    if T > 1:
        samples = [xi._replace(inner=Batches([xi.inner] * T)) for xi in samples]
    problem = Counted(DATA.losses(), size=lambda b: 0 if isinstance(b, Batches) else len(b))
    state = solver.init(DATA.losses(), Point({"lam": normal(4)}, {"omega": normal(5)}), samples[0])
    state = solver.step(DATA.losses(), state, samples[1])
    solver.step(problem, state, samples[2])
    return problem


R = fsla.steps.constant(0.01, 0.1, 0.1, 0.5)
STORM = {
    "fsla": (fsla.algorithms.fsla(R), Counts(grad=1, d_omega=1, hvp=1, d_lam=2, cross=2)),
    "fsla, v at new": (fsla.algorithms.fsla(R, v_at="new"), Counts(grad=1, d_omega=1, hvp=1, d_lam=2, cross=2)),
    "fsla, average": (fsla.algorithms.fsla(R, momentum="average"), Counts(grad=1, d_omega=1, hvp=1, d_lam=1, cross=1)),
    "fsla, none": (fsla.algorithms.fsla(R, momentum="none"), Counts(grad=1, d_omega=1, hvp=1, d_lam=1, cross=1)),
    "ns": (fsla.algorithms.ns(R, T=3, K=5), Counts(grad=3, d_omega=2, hvp=8, d_lam=2, cross=2)),
    "ns, none": (fsla.algorithms.ns(R, K=5, momentum="none"), Counts(grad=1, d_omega=1, hvp=4, d_lam=1, cross=1)),
    "cg": (fsla.algorithms.cg(R, T=3, K=5), Counts(grad=3, d_omega=2, hvp=10, d_lam=2, cross=2)),
    "cg, none": (fsla.algorithms.cg(R, K=5, momentum="none"), Counts(grad=1, d_omega=1, hvp=5, d_lam=1, cross=1)),
    "bp": (fsla.algorithms.bp(R, T=4), Counts(grad=4, d_omega=2, hvp=6, d_lam=2, cross=8, joint=6)),
    "bp, none": (
        fsla.algorithms.bp(R, T=4, momentum="none"),
        Counts(grad=4, d_omega=1, hvp=3, d_lam=1, cross=4, joint=3),
    ),
    "bp, truncated": (
        fsla.algorithms.bp(R, T=4, truncate=2, momentum="none"),
        Counts(grad=4, d_omega=1, hvp=1, d_lam=1, cross=2, joint=1),
    ),
    "soba": (fsla.algorithms.soba(R), Counts(grad=1, d_omega=1, hvp=1, d_lam=1, cross=1, joint=1)),
    "ma_soba": (fsla.algorithms.ma_soba(R), Counts(grad=1, d_omega=1, hvp=1, d_lam=1, cross=1, joint=1)),
    "amigo": (fsla.algorithms.amigo(R, T=3, Q=4), Counts(grad=3, d_omega=1, hvp=4, d_lam=1, cross=1)),
}


@pytest.mark.parametrize("name", STORM)
def test_oracle_calls_of_a_step(name):
    solver, expected = STORM[name]
    found = count_step(solver).calls
    expected.inner_views, expected.outer_views = found.inner_views, found.outer_views
    assert found == expected


def test_samples_are_counted_too():
    assert count_step(fsla.algorithms.fsla(R)).samples.hvp == 8
    assert count_step(fsla.algorithms.fsla(R)).samples.cross == 16


@pytest.mark.parametrize(
    ("solver", "mode", "inner", "outer"),
    [
        (fsla.algorithms.fsla(R), "independent", 4, 3),  # ξ1, ξ3, ξ5 at the new and at the old point; ξ2, ξ4 twice
        (fsla.algorithms.fsla(R), "grouped", 3, 3),  # ∂_ω G and HVP from one graph
        (fsla.algorithms.fsla(R, momentum="none", v_at="new"), "shared", 2, 1),  # HVP and cross from one graph
        (fsla.algorithms.soba(R), "shared", 1, 1),
        (fsla.algorithms.bp(R, T=5, momentum="none"), "shared", 5, 1),  # the inner steps' graphs serve the products
    ],
)
def test_graphs_are_shared_where_point_and_batch_are_the_same(solver, mode, inner, outer):
    calls = count_step(solver, mode).calls
    assert (calls.inner_views, calls.outer_views) == (inner, outer)


def test_sharing_changes_no_number():
    problem, at, train, valid = network()
    solver = fsla.algorithms.fsla(fsla.steps.constant(0.1, 0.1, 0.1, 0.5))
    shared = Sample.full(train, valid)
    copies = Sample(*(tuple(t.clone() for t in b) for b in shared.batches))
    a = solver.init(problem, at, shared)
    for _ in range(3):
        a, b = solver.step(problem, a, shared), solver.step(problem, a, copies)
        assert float(tree.norm(tree.sub(a.d, b.d))) < 1e-15


def test_batches_serve_the_inner_steps_one_by_one():
    problem, at = DATA.losses(), Point({"lam": normal(4)}, {"omega": normal(5)})
    xi = draw("independent", 3)
    solver = fsla.algorithms.amigo(R, T=3, Q=1)
    many = Sample(Batches([x.inner for x in xi[:3]]), *xi[0][1:])
    after = solver.step(problem, solver.init(problem, at, xi[0]), many)
    omega = at.omega
    for x in xi[:3]:
        omega = tree.axpy(-0.1, problem.inner_at(Point(at.lam, omega), x.inner).grad, omega)
    assert torch.allclose(after.at.omega["omega"], omega["omega"])
    for n in (2, 4):
        with pytest.raises(ValueError, match=rf"'inner' of the sample must be one batch, or Batches of 3.*Got .* {n}"):
            solver.step(problem, solver.init(problem, at, xi[0]), many._replace(inner=Batches((many.inner * 2)[:n])))


def test_batches_that_no_step_would_read_are_refused():
    problem, at = DATA.losses(), Point({"lam": normal(4)}, {"omega": normal(5)})
    xi = draw("independent", 4)
    four = xi[0]._replace(hvp=Batches([x.hvp for x in xi[:4]]))
    solver = fsla.algorithms.ns(R, K=4)
    state = solver.init(problem, at, xi[0])
    with pytest.raises(ValueError, match=r"'hvp' of the sample must be one batch, or Batches of 3.*Got Batches of 4"):
        solver.step(problem, state, four)
    assert solver.needs == fsla.Needs(hvp=3)
    assert fsla.algorithms.amigo(R, T=3, Q=4).needs == fsla.Needs(inner=3, hvp=4)
    assert fsla.algorithms.bp(R, T=5).needs == fsla.Needs(inner=5, hvp=5)


def test_cold_restarts_begin_at_the_first_omega():
    problem, at, train, valid = ridge_logistic()
    xi = Sample.full(train, valid)
    for T, restart, cold in ((1, None, False), (3, None, True), (3, False, False), (1, True, True)):
        solver = fsla.algorithms.cg(R, T=T, restart=restart)
        state = solver.init(problem, at, xi)
        for _ in range(4):
            before = state
            state = solver.step(problem, state, xi)
        omega = at.omega if cold else before.at.omega
        for _ in range(T):
            omega = tree.axpy(-0.1, problem.inner_at(Point(state.at.lam, omega), train).grad, omega)
        assert float(tree.norm(tree.sub(omega, state.at.omega))) < 1e-14


def test_the_radius_bounds_v():
    problem, at, train, valid = ridge_logistic()
    xi = Sample.full(train, valid)
    solver = fsla.algorithms.fsla(fsla.steps.constant(0.0, 0.1, 0.5), radius=0.01)
    state = solver.init(problem, at, xi)
    for _ in range(50):
        state = solver.step(problem, state, xi)
        assert float(tree.norm(state.memory)) <= 0.01 * (1 + 1e-12)


def test_memory_does_not_grow_over_thousands_of_steps():
    problem, at = DATA.losses(), Point({"lam": normal(4)}, {"omega": normal(5)})
    samples = draw("grouped", 7)
    solver = fsla.algorithms.fsla(fsla.steps.paper(delta=0.1, c_tau=3.0, c_beta=3.0, c_eta=5.0))
    state = solver.init(problem, at, samples[0])
    alive, peak = [], []
    for k in range(2001):
        state = solver.step(problem, state, samples[k % 8])
        if k % 500 == 0:
            gc.collect()
            alive.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
            peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # KiB
    assert alive[-1] == alive[1] == alive[2]
    assert peak[-1] - peak[1] < 4096
    assert not any(t.requires_grad or t.grad_fn is not None for t in (*state.d.values(), *state.memory.values()))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: fsla.algorithms.fsla(R, v_at="now"), ValueError, "'v_at'.*'old' or 'new'. Got 'now'"),
        (lambda: fsla.algorithms.fsla(R, momentum="strom"), ValueError, "momentum.*Got 'strom'.*Did you mean 'storm'"),
        (lambda: fsla.algorithms.fsla(R, radius=-1.0), ValueError, "'radius'.*positive"),
        (lambda: Solver(Tracked(), R, lam_last=True), ValueError, r"must not look back\. Got STORM\(\)"),
        (lambda: fsla.algorithms.ns(R, K=0), ValueError, "'steps' of Neumann.*at least 1"),
        (lambda: fsla.algorithms.ns(R, beta=0.0), ValueError, "'beta' of Neumann.*positive"),
        (lambda: fsla.algorithms.cg(R, K=2.0), TypeError, "whole number"),
        (lambda: fsla.algorithms.bp(R, T=-1), ValueError, "'steps' of Descent.*Got -1"),
        (lambda: fsla.algorithms.bp(R, truncate=0), ValueError, "'truncate' of Unrolled"),
        (lambda: fsla.steps.constant(-0.1, 0.1, 0.1), ValueError, "'alpha'.*at least 0. Got -0.1"),
        (lambda: fsla.steps.constant(0.1, float("nan"), 0.1), ValueError, "'tau'.*finite"),
        (lambda: fsla.steps.horizon(0, 1.0, 1.0, 1.0, 1.0), ValueError, "'steps' of horizon"),
        (lambda: Box(1.0, 0.0), ValueError, "low ≤ high"),
        (lambda: Ball(0.0), ValueError, "'radius' of Ball"),
        (lambda: Sample.draw("both", int, int), ValueError, "'independent', 'grouped', 'shared'. Got 'both'"),
    ],
)
def test_bad_settings_get_one_message(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_batches_are_taken_at_the_start_too():
    problem, at = DATA.losses(), Point({"lam": normal(4)}, {"omega": normal(5)})
    b = draw("independent", 3)
    xi = Sample(Batches([x.inner for x in b[:3]]), b[0].outer_omega, Batches([x.hvp for x in b[:2]]), *b[0][3:])
    solver = fsla.algorithms.amigo(R, T=3, Q=2)
    assert solver.step(problem, solver.init(problem, at, xi), xi).k == 1


@pytest.mark.parametrize("name", ["fsla", "soba", "ma_soba"])
def test_the_start_is_projected(name):
    problem, at, train, valid = ridge_logistic()
    solver = fsla.algorithms.ALL[name](R, project=Box(0.0, 1.0))
    state = solver.init(
        problem, Point({"log_ridge": torch.full((6,), 5.0, dtype=torch.float64)}, at.omega), Sample.full(train, valid)
    )
    assert state.at.lam["log_ridge"].max() == 1.0


def test_a_state_tells_whether_it_is_finite():
    problem, at, train, valid = ridge_logistic()
    xi, solver = Sample.full(train, valid), fsla.algorithms.fsla(fsla.steps.constant(0.1, 1e200, 0.1))
    state = solver.init(problem, at, xi)
    assert state.is_finite()
    for _ in range(5):
        state = solver.step(problem, state, xi)
    assert not state.is_finite()


def test_a_state_whose_v_alone_is_not_finite_is_not_finite():
    problem, at, train, valid = ridge_logistic()
    solver = fsla.algorithms.fsla(R)
    state = solver.init(problem, at, Sample.full(train, valid))
    for bad in (torch.nan, torch.inf):
        assert not state._replace(memory={**state.memory, "b": torch.tensor(bad)}).is_finite()


def test_states_and_points_move_to_another_dtype():
    problem, at, train, valid = ridge_logistic()
    xi, solver = Sample.full(train, valid), fsla.algorithms.bp(R, T=2)
    state = solver.step(problem, solver.init(problem, at, xi), xi).to(torch.float32)
    parts = (state.at.lam, state.at.omega, state.d, state.at.trail[0][0], at.to(torch.float32).omega)
    assert all(t.dtype == torch.float32 for x in parts for t in x.values())
    assert state.k == 1


def test_storm_on_shared_batches_warns():
    problem, at = DATA.losses(), Point({"lam": normal(4)}, {"omega": normal(5)})
    (xi, *_), (grouped, *_) = draw("shared", 1), draw("grouped", 1)
    with pytest.warns(UserWarning, match=r"STORM needs.*independently.*momentum='none'"):
        fsla.algorithms.fsla(R).init(problem, at, xi)
    fsla.algorithms.fsla(R).init(problem, at, grouped)  # warnings are errors here
    fsla.algorithms.fsla(R, momentum="average").init(problem, at, xi)


def test_wrong_kinds_of_arguments_get_one_message():
    with pytest.raises(TypeError, match=r"rates must be a function of k.*Got tuple"):
        fsla.algorithms.fsla((0.1, 0.1))
    with pytest.raises(TypeError, match=r"rates must be a function of k"):
        fsla.algorithms.soba(0.1)
    with pytest.raises(TypeError, match=r"outer source of Sample.draw must be a function.*Got float"):
        Sample.draw("grouped", int, 1.0)
    with pytest.raises(TypeError, match=r"inner source of Sample.draw.*Got list instead.*fsla.problems.cycle"):
        Sample.draw("grouped", [1, 2], int)
    assert Sample.draw("independent", iter("abc"), iter("xy")).batches == ("a", "x", "b", "y", "c")
