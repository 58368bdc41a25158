"""Theorem 5's constants, Lemma 3's bounds, the step rules."""

import math
import random
from fractions import Fraction

import pytest
import torch

from fsla import Batch, Point
from fsla import _tree as tree
from fsla.hypergradients._exact import hessian_matrix
from fsla_reproduction import theory
from fsla_reproduction.problems import Quadratic
from fsla_reproduction.theory import Constants, theorem5
from lemma2 import Term, vector_recursion
from support import normal, ridge_logistic


def test_theorem5_values_for_unit_constants():
    t = theorem5(Constants(1, 1, 1, 1, 1, 1, 1, 1))
    assert (t.gamma_v, t.gamma_omega, t.c_eta, t.c_beta) == (512, 48, 3, 3074)
    assert float(t.c_tau) == pytest.approx(24706, abs=0.5)
    assert float(t.delta_bound) == pytest.approx(1.1e-7, rel=0.05)
    assert float(t.C_bar) == pytest.approx(6.2e9, rel=0.01)


def draw_constants(rng):
    """Log-uniform over four decades, in three digits: Fractions of 53 bits are four times as slow.

    L_J, L_H and L_F_lam are 0 now and then.
    """

    def draw(low, high):
        return Fraction(f"{10 ** rng.uniform(low, high):.3g}")

    mu, *values = (draw(-2, 2) for _ in range(7))
    for i in (1, 2, 3):
        values[i] *= rng.random() > 0.1
    return Constants(mu, mu * draw(0, 3), *values)


def test_theorem5_inequalities_hold_exactly():
    rng = random.Random(0)
    extra = 0
    for _ in range(1500):
        t = theorem5(draw_constants(rng))
        for part in (Fraction(999, 1000), Fraction(1, 10), Fraction(1, 10**6)):
            assert max(t.margins(part * t.delta_bound)) < 0
        limit = 2 / (t.c_beta * (t.constants.L + t.constants.mu))
        assert t.delta_bound <= limit
        extra += t.delta_bound == limit
    assert extra > 0  # the bound that the paper leaves out is the active one at times


def test_theorem5_strict_constants_tend_to_printed():
    t = theorem5(Constants(1, 2, 1, 1, 1, 1, 1, 1))
    printed, tiny = t.lemma_constants(), t.lemma_constants(Fraction(1, 10**30))
    for strict, plain, near in zip(t.lemma_constants(t.delta_bound), printed, tiny, strict=True):
        assert strict > plain
        assert float(near / plain) == pytest.approx(1.0, abs=1e-12)
    assert max(t.margins(t.delta_bound / 10**6, strict=True)) < 0


def test_theorem5_gamma2_zero_is_handled():
    t = theorem5(Constants(1, 10, 2, 0, 0, 0, 3, 5))  # F does not read λ, J and H constant: the synthetic problem
    assert t.gamma2_sq > 0
    assert math.isfinite(float(t.c_tau))
    assert max(t.margins(Fraction(999, 1000) * t.delta_bound)) < 0


def test_theorem5_constants_bound_quadratics():
    for seed in range(50):
        q = Quadratic.random(3, 4, kappa=5.0, seed=seed)
        norm = lambda m: float(torch.linalg.matrix_norm(m, 2)) * (1 + 1e-9)  # noqa: E731
        t = theorem5(
            Constants(
                0.999999,
                5.000001,
                norm(q.J),
                0,
                0,
                norm(torch.cat([q.S, q.R], 1)),
                norm(torch.cat([q.R.T, q.Q], 1)),
                10,
            )
        )
        assert norm(q.hessian()) <= t.L_f * (1 + 1e-6)
        assert norm(torch.linalg.solve(q.H, q.J.T)) <= t.C_omega * (1 + 1e-6)


def test_theorem5_bound_as_function_of_k():
    t = theorem5(Constants(1, 1, 1, 1, 1, 1, 1, 1))
    args = {"potential": 3.0, "sigma_sq": 2.0, "delta": 1e-8}
    by_hand = 2 * 3.0 / (1e-8 * 10) + 2 * 1e-8 * float(t.C_bar) * 2.0 * (1 + math.log(100)) / 10
    assert t.bound(100, **args) == pytest.approx(by_hand)
    assert t.bound(100, horizon=True, **args) < t.bound(100, **args)
    assert t.bound(10_000, horizon=True, **args) == pytest.approx(t.bound(100, horizon=True, **args) / 10)
    for bad in ({"K": 0}, {"delta": 1.0}, {"delta": 0.0}):
        with pytest.raises(ValueError, match="0 < delta <"):
            t.bound(**({"K": 1, **args} | bad))


@pytest.mark.parametrize(
    ("changed", "text"),
    [({"mu": 0}, "'mu' must be finite and positive"), ({"C_J": 0}, "'C_J'"), ({"L_H": -1}, "'L_H'.*at least 0"),
     ({"L": float("inf")}, "'L' must be finite"), ({"mu": 2}, "mu must not exceed L")],
)  # fmt: skip
def test_constants_invalid_value_raises(changed, text):
    ones = dict.fromkeys(Constants.__dataclass_fields__, 1)
    with pytest.raises(ValueError, match=text):
        Constants(**(ones | changed))


def test_lemma3_bounds_vector_recursion():
    """Along a sequence ω_k -> ω_λ on ridge logistic regression, with measured constants."""
    problem, at, train, valid = ridge_logistic()
    import fsla

    exact = fsla.hypergradient(problem, at, train, valid, "exact")
    minimum = Point(at.lam, exact.omega)
    p_star = problem.outer_at(minimum, Batch(valid)).grad_omega
    H_star = hessian_matrix(problem.inner_at(minimum, Batch(train)).hvp, at.omega)
    betas, terms, e_omega, e_p, drift = [], [], [], [], 0.0
    offset = tree.unflatten(normal(7, seed=9), at.omega)
    mus, Ls = [], []
    for k in range(60):
        omega = tree.axpy((k + 1.0) ** -0.5, offset, exact.omega)
        inner = problem.inner_at(Point(at.lam, omega), Batch(train))
        H = hessian_matrix(inner.hvp, omega)
        values = torch.linalg.eigvalsh(H)
        mus.append(float(values[0]))
        Ls.append(float(values[-1]))
        e_omega.append(float(tree.norm(tree.sub(omega, exact.omega))))
        drift = max(drift, float(torch.linalg.matrix_norm(H - H_star, 2)) / e_omega[-1])
        p = problem.outer_at(Point(at.lam, omega), Batch(valid)).grad_omega
        e_p.append(float(tree.norm(tree.sub(p, p_star))))
        terms.append((inner, p))
    mu, L = min(mus), max(Ls)
    betas = [0.9 * theory.neumann_step(mu, L)] * 60
    v = vector_recursion([Term(i, b, p) for (i, p), b in zip(terms, betas, strict=True)], tree.zeros_like(at.omega))
    result = theory.lemma3(mu, L, betas, e_omega, e_p)
    gap, size = float(tree.norm(tree.sub(v, exact.adjoint))), float(tree.norm(exact.adjoint))
    bound = result.vector_bound(size, C_2=drift * size)  # L_H ‖v*‖ stands for C_F L_H / μ, which is larger
    assert gap <= bound
    assert bound < size  # and it says something
    product, by_sum = 1.0, 0.0
    for b in betas:
        product *= 1 - mu * b
    assert result.m[-1] == pytest.approx(product)
    m = 1.0
    for b, e in zip(betas, e_omega, strict=True):
        m *= 1 - mu * b
        by_sum += b * e / m
    assert result.omega[-1] == pytest.approx(m * by_sum)


def test_lemma3_fails_with_finite_sum_only():
    """With e_p constant the forward quantity is finite, and so is the error: the paper's condition does not suffice."""
    K = 2000
    result = theory.lemma3(1.0, 2.0, [0.5] * K, [0.0] * K, [0.5] * K)
    assert result.m[-1] < 1e-100
    assert result.p[-1] == pytest.approx(0.5)


def test_corollary_step_rules():
    assert theory.neumann_step(1.0, 3.0) == 0.5
    step = theory.decreasing_step(1.0, 20.0, theta=1.0)
    assert step(0) == pytest.approx(1 / 11)  # the offset of the specification
    assert all(step(k) <= theory.neumann_step(1.0, 20.0) for k in range(100))
    with pytest.raises(ValueError, match=r"theta must exceed 1/\(2 mu\)"):
        theory.decreasing_step(1.0, 20.0, theta=0.5)
    for betas, text in (([0.9], "beta_0 = 0.9"), ([0.0], "beta_0 = 0"), ([], "one length")):
        with pytest.raises(ValueError, match=text):
            theory.lemma3(1.0, 3.0, betas, [0.0] * len(betas), [0.0] * len(betas))


def test_step_rule_offset_avoids_transient():
    """A_{k+1} = (1-β_k h) A_k + β_k for h = 20 μ: without the offset it passes through thousands, with it under 0.1."""

    def largest(step):
        a, top = 0.0, 0.0
        for k in range(200):
            a = (1 - step(k) * 20) * a + step(k)
            top = max(top, abs(a))
        return top

    assert largest(lambda k: 1 / (k + 1)) > 1e3
    assert largest(theory.decreasing_step(1.0, 20.0, theta=1.0)) < 0.1
