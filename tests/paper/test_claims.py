"""Claims of sections 3 to 5 about sampling, stability and relatives, one test each."""

import itertools
import math

import pytest
import torch

import fsla
from fsla import Counted, Point, Sample
from fsla import _tree as tree
from fsla.train import make_engine
from fsla_reproduction.problems import LeastSquares, Quadratic
from fsla_reproduction.theory import decreasing_step, spectral_abscissa
from support import normal

DATA = LeastSquares.draw(0)


def source(kind, batch=8):
    g = torch.Generator().manual_seed(0)
    draw = lambda: torch.randint(2000, (batch,), generator=g)  # noqa: E731
    while True:
        if kind == "hvp is cross":
            xi = Sample.draw("independent", draw, draw)
            yield xi._replace(cross=xi.hvp)
        else:
            yield Sample.draw(kind, draw, draw)


def bias(kind, eta, momentum="storm", steps=4000):
    """The mean of d - (∂_λ F - J v) on all rows, at a fixed λ, and its standard error from 50 blocks."""
    problem, q, samples = DATA.losses(), DATA.quadratic(), source(kind)
    solver = fsla.algorithms.fsla(fsla.steps.constant(alpha=0.0, tau=0.1, beta=0.1, eta=eta), momentum=momentum)
    state = solver.init(problem, Point({"lam": normal(4, seed=1)}, {"omega": normal(5, seed=2)}), next(samples))
    engine = make_engine("graph", solver, Counted(problem), lambda: next(samples), torch.Generator(), state)
    gaps = []
    for k in range(steps):
        state = engine.advance(state, 1)
        if k >= 500:
            gaps.append(state.d["lam"] - (q.S @ state.at.lam["lam"] - q.J @ state.memory["omega"]))
    blocks = torch.stack(gaps).reshape(50, -1, 4).mean(1)
    return blocks.mean(0), float((blocks.std(0) / 50**0.5).norm())


@pytest.mark.parametrize("kind", [pytest.param("independent", marks=pytest.mark.slow), "grouped"])
def test_storm_has_no_bias_where_the_products_have_their_own_batches(kind):
    mean, deviation = bias(kind, 0.1)
    assert float(mean.norm()) < 3 * deviation


@pytest.mark.filterwarnings("ignore::fsla.algorithms.SharedBatchWarning")
@pytest.mark.parametrize("kind", [pytest.param("shared", marks=pytest.mark.slow), "hvp is cross"])
def test_storm_is_biased_where_the_hvp_and_the_cross_product_share_a_batch(kind):
    """The bias is (β/η) times a covariance: it halves as η doubles, and stays as the steps fall in proportion.

    Without momentum a shared batch leaves β times the covariance, which falls with β.
    """
    (low, deviation), (high, _) = bias(kind, 0.1), bias(kind, 0.2)
    assert float(low.norm()) > 8 * deviation
    assert float(low.norm() / high.norm()) == pytest.approx(2.0, rel=0.15)
    if kind == "shared":
        mean, _ = bias("shared", 0.1, momentum="none")
        assert float(mean.norm() / low.norm()) == pytest.approx(0.1, rel=0.5)


def test_the_sign_of_the_spectral_abscissa_predicts_convergence():
    """Deterministic FSLA with small steps, on quadratics and ratios on both sides of stability."""
    signs = set()
    for seed, ratio in itertools.product(range(4), (0.05, 0.3, 1.0, 3.0)):
        q = Quadratic.random(2, 3, kappa=6.0, seed=seed)
        worst = spectral_abscissa(q.H, q.J, q.Q, q.R, q.S, c_tau=ratio, c_beta=ratio)
        if abs(worst) < 0.01:
            continue  # too slow to tell
        alpha = 0.02 / max(1.0, ratio)
        solver = fsla.algorithms.single_loop(fsla.steps.constant(alpha, ratio * alpha, ratio * alpha))
        start = torch.linalg.solve(q.hessian(), -q.gradient(torch.zeros(2, dtype=torch.float64)))  # where ∇f = 0
        at = q.point(start + 1e-3, q.omega_of(start))
        state, xi = solver.init(q, at, Sample.full(None, None)), Sample.full(None, None)
        state = state._replace(memory={"omega": q.v_of(start)})
        gap = []
        for k in range(6000):
            state = solver.step(q, state, xi)
            if k in (2999, 5999):
                gap.append(float((state.at.lam["lam"] - start).norm()))
        signs.add(worst < 0)
        assert (gap[1] < gap[0]) == (worst < 0), (seed, ratio, worst, gap)
    assert signs == {True, False}


def trajectory(solver, problem, at, samples):
    state = solver.init(problem, at, samples[0])
    states = [state]
    for xi in samples[1:]:
        state = solver.step(problem, state, xi)
        states.append(state)
    return states


@pytest.fixture
def finite_sum():
    g = torch.Generator().manual_seed(3)
    draw = lambda: torch.randint(2000, (16,), generator=g)  # noqa: E731
    samples = [Sample.draw("independent", draw, draw) for _ in range(60)]
    return DATA.losses(), Point({"lam": normal(4, seed=1)}, {"omega": normal(5, seed=2)}), samples


def same(x, y, tol=1e-12):
    return float(tree.norm(tree.sub(x, y))) < tol


def test_with_eta_one_every_momentum_is_plain(finite_sum):
    runs = [
        trajectory(fsla.algorithms.fsla(fsla.steps.constant(0.05, 0.1, 0.1, 1.0), momentum=m), *finite_sum)
        for m in ("storm", "average", "none")
    ]
    for storm, average, plain in zip(*runs, strict=True):
        assert same(storm.at.lam, plain.at.lam)
        assert same(average.at.lam, plain.at.lam)


def test_amigo_with_one_step_each_is_fsla_without_momentum(finite_sum):
    """Begun with ω and v instead of λ: as if FSLA's first step on λ had no length."""
    rates = fsla.steps.constant(0.05, 0.1, 0.1)
    one = trajectory(fsla.algorithms.amigo(rates, T=1, Q=1), *finite_sum)
    late = lambda k: rates(k)._replace(alpha=0.05 if k else 0.0)  # noqa: E731
    other = trajectory(fsla.algorithms.fsla(late, v_at="new", momentum="none"), *finite_sum)
    assert all(same(a.at.omega, b.at.omega) and same(a.memory, b.memory) for a, b in zip(one, other, strict=True))
    assert all(same(a.at.lam, b.at.lam) for a, b in zip(one[:-1], other[1:], strict=True))


def test_amigo_s_first_step_is_downhill():
    """f = λ, of which ∂_λ F = -3, all that is known before v has moved, says the opposite."""
    one, none = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    q = Quadratic(one, -4 * one, none[0], none, -one[0], none, none, 3 * one[0])
    start = q.point(none[0], none[0])
    torch.testing.assert_close(q.gradient(none[0]), one[0])
    solver = fsla.algorithms.amigo(fsla.steps.constant(0.1, 0.5, 0.5), T=30, Q=30)
    state = solver.step(q, solver.init(q, start, Sample.full(None, None)), Sample.full(None, None))
    assert float(state.at.lam["lam"]) == pytest.approx(-0.1, rel=1e-6)


def test_amigo_against_its_own_pseudo_code(finite_sum):
    """ω, then v, then λ, as Arbel and Mairal write it."""
    problem, at, samples = finite_sum
    states = trajectory(fsla.algorithms.amigo(fsla.steps.constant(0.05, 0.1, 0.1), T=2, Q=3), problem, at, samples)
    lam, omega, v = at.lam, at.omega, tree.zeros_like(at.omega)
    for xi, state in zip(samples[1:], states[1:], strict=True):
        for _ in range(2):
            omega = tree.axpy(-0.1, problem.inner_at(Point(lam, omega), xi.inner).grad, omega)
        here = Point(lam, omega)
        b = problem.outer_at(here, xi.outer_omega).d_omega
        for _ in range(3):
            v = tree.axpy(0.1, tree.sub(b, problem.inner_at(here, xi.hvp).hvp(v)), v)
        h = tree.sub(problem.outer_at(here, xi.outer_lam).d_lam, problem.inner_at(here, xi.cross).cross(v))
        lam = tree.axpy(-0.05, h, lam)
        assert same(lam, state.at.lam)
        assert same(h, state.d)


def test_ma_soba_with_eta_one_is_soba_with_lambda_one_step_late(finite_sum):
    """With θ = 1, d is the last D_λ. At a fixed λ-step zero both agree; else λ_{k+1} uses D_λ of step k - 1."""
    problem, at, samples = finite_sum
    rates = fsla.steps.constant(0.05, 0.1, 0.1, 1.0)
    states = trajectory(fsla.algorithms.ma_soba(rates), problem, at, samples)
    lam, omega, v, late = at.lam, at.omega, tree.zeros_like(at.omega), tree.zeros_like(at.lam)
    for xi, state in zip(samples[1:], states[1:], strict=True):
        G, F = problem.inner_at(Point(lam, omega), xi.inner), problem.outer_at(Point(lam, omega), xi.outer_omega)
        d = tree.sub(F.d_lam, G.cross(v))
        lam, late = tree.axpy(-0.05, late, lam), d
        v = tree.axpy(0.1, tree.sub(F.d_omega, G.hvp(v)), v)
        omega = tree.axpy(-0.1, G.grad, omega)
        assert same(state.at.lam, lam)
        assert same(state.d, d)
    still = fsla.steps.constant(0.0, 0.1, 0.1, 1.0)
    for a, b in zip(
        trajectory(fsla.algorithms.ma_soba(still), *finite_sum),
        trajectory(fsla.algorithms.soba(still), *finite_sum),
        strict=True,
    ):
        assert same(a.d, b.d)
        assert same(a.memory, b.memory)


def test_the_first_storm_correction_is_taken_at_the_starting_point(finite_sum):
    """Not at zero: d_1 = g(x_1; ξ) + (1-η)(d_0 - g(x_0; ξ))."""
    problem, at, samples = finite_sum
    solver = fsla.algorithms.fsla(fsla.steps.constant(0.05, 0.1, 0.1, 0.3))
    first = solver.init(problem, at, samples[0])
    second = solver.step(problem, first, samples[1])
    gradient = lambda s: solver.estimator.gradient(problem, s.at, s.memory, samples[1])  # noqa: E731
    expected = tree.axpy(0.7, tree.sub(first.d, gradient(first)), gradient(second))
    assert same(second.d, expected)


def test_corollary_2_a_rate_of_one_over_root_k():
    """β_k = θ/(k+k_0), e_ω = k^-1/2: the error of the matrix recursion falls like K^-1/2."""
    mu, L = 1.0, 20.0
    step = decreasing_step(mu, L, theta=1.0)
    errors = {}
    a = 0.0  # one eigenvalue μ, J perturbed by e_ω: A* = 1
    for k in range(400_000):
        beta = step(k)
        a = a * (1 - beta * mu) + beta * (1 + (k + 1) ** -0.5)
        errors[k + 1] = abs(a - 1)
    assert math.log10(errors[400_000] / errors[40_000]) == pytest.approx(-0.5, abs=0.02)
