"""Claims of sections 3 to 5 about sampling, stability and relatives, one test each."""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch

import fsla
from fsla import Point, StepBatches
from fsla import _tree as tree
from fsla.steps import Position, Rates, Schedule, Scheduled, Variable, constant
from fsla_reproduction.problems import LeastSquares, Quadratic
from fsla_reproduction.theory import decreasing_step, spectral_abscissa
from support import normal

DATA = LeastSquares.draw(0)


def source(kind, batch=8):
    g = torch.Generator().manual_seed(0)
    draw = lambda: torch.randint(2000, (batch,), generator=g)  # noqa: E731
    while True:
        if kind == "hvp is mixed":
            batches = StepBatches.draw("independent", draw, draw)
            yield batches._replace(mixed_hvp=batches.hvp)
        else:
            yield StepBatches.draw(kind, draw, draw)


def bias(kind, eta, momentum="storm", steps=4000):
    """The mean of d - (∂_λ F - J v) on all rows, at a fixed λ, and its standard error from 50 blocks."""
    problem, q, batches = DATA.losses(), DATA.quadratic(), source(kind)
    algorithm = fsla.algorithms.fsla(constant(0.0, 0.1, 0.1, new_grad_weight=eta), momentum=momentum)
    state = algorithm.init(problem, Point({"lam": normal(4, seed=1)}, {"omega": normal(5, seed=2)}), next(batches))
    gaps = []
    for k in range(steps):
        state = algorithm.step(problem, state, next(batches))
        if k >= 500:
            gaps.append(state.direction["lam"] - (q.S @ state.lam.value["lam"] - q.J @ state.v["omega"]))
    blocks = torch.stack(gaps).reshape(50, -1, 4).mean(1)
    return blocks.mean(0), float((blocks.std(0) / 50**0.5).norm())


@pytest.mark.parametrize("kind", [pytest.param("independent", marks=pytest.mark.slow), "grouped"])
def test_storm_with_independent_batches_is_unbiased(kind):
    mean, deviation = bias(kind, 0.1)
    assert float(mean.norm()) < 3 * deviation


@pytest.mark.filterwarnings("ignore::fsla.algorithms.SharedBatchWarning")
@pytest.mark.parametrize("kind", [pytest.param("shared", marks=pytest.mark.slow), "hvp is mixed"])
def test_storm_with_shared_batch_is_biased(kind):
    """The bias is (β/η) times a covariance: it halves as η doubles, and stays as the steps fall in proportion.

    Without momentum a shared batch leaves β times the covariance, which falls with β.
    """
    (low, deviation), (high, _) = bias(kind, 0.1), bias(kind, 0.2)
    assert float(low.norm()) > 8 * deviation
    assert float(low.norm() / high.norm()) == pytest.approx(2.0, rel=0.15)
    if kind == "shared":
        mean, _ = bias("shared", 0.1, momentum="none")
        assert float(mean.norm() / low.norm()) == pytest.approx(0.1, rel=0.5)


def test_spectral_abscissa_sign_predicts_convergence():
    """Deterministic FSLA with small steps, on quadratics and ratios on both sides of stability."""
    signs = set()
    for seed, ratio in itertools.product(range(4), (0.05, 0.3, 1.0, 3.0)):
        q = Quadratic.random(2, 3, kappa=6.0, seed=seed)
        worst = spectral_abscissa(q.H, q.J, q.Q, q.R, q.S, c_tau=ratio, c_beta=ratio)
        if abs(worst) < 0.01:
            continue  # too slow to tell
        alpha = 0.02 / max(1.0, ratio)
        algorithm = fsla.algorithms.single_loop(constant(alpha, ratio * alpha, ratio * alpha))
        start = torch.linalg.solve(q.hessian(), -q.gradient(torch.zeros(2, dtype=torch.float64)))  # where ∇f = 0
        at = q.point(start + 1e-3, q.omega_of(start))
        batches = StepBatches.shared(None, None)
        state = algorithm.init(q, at, batches)
        state = replace(state, adjoint=Variable({"omega": q.v_of(start)}))
        gap = []
        for k in range(6000):
            state = algorithm.step(q, state, batches)
            if k in (2999, 5999):
                gap.append(float((state.lam.value["lam"] - start).norm()))
        signs.add(worst < 0)
        assert (gap[1] < gap[0]) == (worst < 0), (seed, ratio, worst, gap)
    assert signs == {True, False}


def trajectory(algorithm, problem, at, steps):
    state = algorithm.init(problem, at, steps[0])
    states = [state]
    for batches in steps[1:]:
        state = algorithm.step(problem, state, batches)
        states.append(state)
    return states


@pytest.fixture
def finite_sum():
    g = torch.Generator().manual_seed(3)
    draw = lambda: torch.randint(2000, (16,), generator=g)  # noqa: E731
    steps = [StepBatches.draw("independent", draw, draw) for _ in range(60)]
    return DATA.losses(), Point({"lam": normal(4, seed=1)}, {"omega": normal(5, seed=2)}), steps


def same(x, y, tol=1e-12):
    return float(tree.norm(tree.sub(x, y))) < tol


def test_momentum_with_eta_one_is_plain(finite_sum):
    runs = [
        trajectory(fsla.algorithms.fsla(constant(0.05, 0.1, 0.1, 1.0), momentum=m), *finite_sum)
        for m in ("storm", "average", "none")
    ]
    for storm, average, plain in zip(*runs, strict=True):
        assert same(storm.lam.value, plain.lam.value)
        assert same(average.lam.value, plain.lam.value)


@dataclass(frozen=True)
class LambdaWaits(Scheduled):
    """Other step sizes, with none for λ at the first step."""

    of: Schedule

    def rates(self, k: int, state: None = None) -> Rates:
        rates = self.of.rates(k)
        return rates if k else rates._replace(outer_lr=0.0)


def test_amigo_with_one_step_equals_fsla_without_momentum(finite_sum):
    """Begun with ω and v instead of λ: as if FSLA's first step on λ had no length."""
    step_sizes = constant(0.05, 0.1, 0.1)
    one = trajectory(fsla.algorithms.amigo(step_sizes, inner_steps=1, hvp_steps=1), *finite_sum)
    late = fsla.algorithms.fsla(LambdaWaits(step_sizes), adjoint_at="new_params", momentum="none")
    other = trajectory(late, *finite_sum)
    assert all(same(a.omega.value, b.omega.value) and same(a.v, b.v) for a, b in zip(one, other, strict=True))
    assert all(same(a.lam.value, b.lam.value) for a, b in zip(one[:-1], other[1:], strict=True))


def test_amigo_first_step_is_descent():
    """f = λ, of which ∂_λ F = -3, all that is known before v has moved, has the opposite sign."""
    one, none = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    q = Quadratic(one, -4 * one, none[0], none, -one[0], none, none, 3 * one[0])
    start = q.point(none[0], none[0])
    torch.testing.assert_close(q.gradient(none[0]), one[0])
    algorithm = fsla.algorithms.amigo(constant(0.1, 0.5, 0.5), inner_steps=30, hvp_steps=30)
    batches = StepBatches.shared(None, None)
    state = algorithm.step(q, algorithm.init(q, start, batches), batches)
    assert float(state.lam.value["lam"]) == pytest.approx(-0.1, rel=1e-6)


def test_amigo_matches_its_pseudo_code(finite_sum):
    """ω, then v, then λ, as Arbel and Mairal write it."""
    problem, at, steps = finite_sum
    algorithm = fsla.algorithms.amigo(constant(0.05, 0.1, 0.1), inner_steps=2, hvp_steps=3)
    states = trajectory(algorithm, problem, at, steps)
    lam, omega, v = at.lam, at.omega, tree.zeros_like(at.omega)
    for batches, state in zip(steps[1:], states[1:], strict=True):
        (inner_grad,), (outer_grad_omega,), (hvp,), (outer_grad_lam,), (mixed_hvp,) = batches.slots
        for _ in range(2):
            omega = tree.axpy(-0.1, problem.inner_at(Point(lam, omega), inner_grad).grad_omega, omega)
        point = Point(lam, omega)
        b = problem.outer_at(point, outer_grad_omega).grad_omega
        for _ in range(3):
            v = tree.axpy(0.1, tree.sub(b, problem.inner_at(point, hvp).hvp(v)), v)
        jv = problem.inner_at(point, mixed_hvp).mixed_hvp(v)
        h = tree.sub(problem.outer_at(point, outer_grad_lam).grad_lam, jv)
        lam = tree.axpy(-0.05, h, lam)
        assert same(lam, state.lam.value)
        assert same(h, state.direction)


def test_ma_soba_with_eta_one_equals_delayed_soba(finite_sum):
    """With θ = 1, d is the last D_λ. At a fixed λ-step zero both agree; else λ_{k+1} uses D_λ of step k - 1."""
    problem, at, steps = finite_sum
    states = trajectory(fsla.algorithms.ma_soba(constant(0.05, 0.1, 0.1, 1.0)), problem, at, steps)
    lam, omega, v, late = at.lam, at.omega, tree.zeros_like(at.omega), tree.zeros_like(at.lam)
    for batches, state in zip(steps[1:], states[1:], strict=True):
        point = Point(lam, omega)
        G = problem.inner_at(point, batches.inner_grad[0])
        F = problem.outer_at(point, batches.outer_grad_omega[0])
        d = tree.sub(F.grad_lam, G.mixed_hvp(v))
        lam, late = tree.axpy(-0.05, late, lam), d
        v = tree.axpy(0.1, tree.sub(F.grad_omega, G.hvp(v)), v)
        omega = tree.axpy(-0.1, G.grad_omega, omega)
        assert same(state.lam.value, lam)
        assert same(state.direction, d)
    still = constant(0.0, 0.1, 0.1, 1.0)
    for a, b in zip(
        trajectory(fsla.algorithms.ma_soba(still), *finite_sum),
        trajectory(fsla.algorithms.soba(still), *finite_sum),
        strict=True,
    ):
        assert same(a.direction, b.direction)
        assert same(a.v, b.v)


def test_storm_first_correction_is_at_start(finite_sum):
    """Not at zero: d_1 = g(x_1; ξ) + (1-η)(d_0 - g(x_0; ξ))."""
    problem, at, steps = finite_sum
    algorithm = fsla.algorithms.fsla(constant(0.05, 0.1, 0.1, 0.3))
    first = algorithm.init(problem, at, steps[0])
    second = algorithm.step(problem, first, steps[1])
    step = algorithm.context(problem, 0, None, steps[1])
    gradient = lambda state: algorithm.estimator.gradient(step, Position(state.point, state.v))  # noqa: E731
    expected = tree.axpy(0.7, tree.sub(first.direction, gradient(first)), gradient(second))
    assert same(second.direction, expected)


def test_corollary_2_rate_is_one_over_root_k():
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
