import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsla import _tree as tree
from fsla.hypergradients import Neumann, RandomNeumann
from fsla.hypergradients import _linear_solvers as linsolve
from fsla.hypergradients._linear_solvers import NeumannTerm
from fsla_reproduction.problems import Quadratic
from support import F64, normal


def system(n=6, kappa=20.0, seed=0, dtype=F64):
    H = Quadratic.random(2, n, kappa=kappa, seed=seed).H.to(dtype)
    calls = []

    def matvec(v):
        calls.append(1)
        return {"x": H @ v["x"]}

    return H, matvec, {"x": normal(n, seed=seed + 1).to(dtype)}, calls


@pytest.mark.parametrize("K", [1, 2, 5, 30])
def test_neumann_equals_gradient_steps_and_series(K):
    H, matvec, b, calls = system()
    beta = 1 / 25
    v = Neumann(K, beta)(matvec, b)["x"]
    assert len(calls) == K - 1  # K terms, not K + 1
    x = torch.zeros(6, dtype=F64)
    for _ in range(K):
        x = x - beta * (H @ x - b["x"])
    series = sum(torch.linalg.matrix_power(torch.eye(6, dtype=F64) - beta * H, j) @ b["x"] for j in range(K)) * beta
    assert torch.allclose(v, x, rtol=1e-12)
    assert torch.allclose(v, series, rtol=1e-12)


def test_neumann_residual_falls_at_theoretical_rate():
    H, matvec, b, _ = system()
    beta = 1 / 20
    rate = float((1 - beta * torch.linalg.eigvalsh(H)).abs().max())
    for K in (10, 100, 400):
        v = Neumann(K, beta)(matvec, b)
        assert float(linsolve.relative_residual(matvec, b, v)) <= rate**K * 1.0001 + 1e-15


def test_random_neumann_mean_equals_series():
    H, matvec, b, _ = system(n=3, kappa=4.0)
    K, beta = 5, 0.2
    target = Neumann(K, beta)(matvec, b)["x"]
    terms = [NeumannTerm(j, K, beta)(matvec, b)["x"] for j in range(K)]
    for j, term in enumerate(terms):
        power = torch.linalg.matrix_power(torch.eye(3, dtype=F64) - beta * H, j)
        assert torch.allclose(term, K * beta * power @ b["x"])
    assert torch.allclose(torch.stack(terms).mean(0), target)


def test_random_neumann_length_is_uniform_by_seed():
    solve = RandomNeumann(5, 0.2)
    lengths = [solve.drawn(seed).length for seed in range(2000)]
    assert lengths == [solve.drawn(seed).length for seed in range(2000)]
    counts = torch.bincount(torch.tensor(lengths), minlength=5)
    assert len(counts) == 5
    assert ((counts - 400).abs() < 4 * (2000 * 0.2 * 0.8) ** 0.5).all()
    with pytest.raises(ValueError, match="needs step batches with a seed"):
        solve.drawn(None)


@given(st.integers(1, 8), st.floats(1.0, 1e4), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_cg_is_exact_after_n_steps(n, kappa, seed):
    H, matvec, b, _ = system(n, kappa, seed)
    v = linsolve.cg(matvec, b, steps=2 * n)["x"]  # a few more, for rounding at large kappa
    assert torch.allclose(H @ v, b["x"], atol=1e-9 * float(b["x"].norm()))


def test_cg_on_scaled_identity_takes_one_step():
    b = {"x": normal(4)}
    for steps in (1, 3, 10):
        v = linsolve.cg(lambda u: tree.scale(2.0, u), b, steps=steps)
        assert torch.allclose(v["x"], b["x"] / 2, rtol=1e-14)


@pytest.mark.parametrize("K", [1, 2, 3, 5])
def test_cg_equals_forward_mode_of_lemma_2(K):
    """x_{k+1} = (I - α_k H) x_k + α_k p_k with p_k = b + γ_k q_{k-1}."""
    H, matvec, b, _ = system()
    history = []
    v = linsolve.cg(matvec, b, steps=K, history=history)
    x = torch.zeros(6, dtype=F64)
    for alpha, p in history:
        x = x - alpha * (H @ x) + alpha * p["x"]
    assert len(history) == K
    assert torch.allclose(x, v["x"], rtol=1e-13)
    if K > 1:
        assert not torch.allclose(history[1].p["x"], b["x"], rtol=1e-3)


def test_cg_counts_and_stops_early():
    _, matvec, b, calls = system()
    linsolve.cg(matvec, b, steps=4)
    assert len(calls) == 4
    calls.clear()
    linsolve.cg(matvec, b, steps=1000, tol=1e-10, stop_early=True)
    assert len(calls) <= 8


def test_cg_float32_is_stable_after_convergence():
    H, matvec, b, _ = system(dtype=torch.float32)
    v = linsolve.cg(matvec, b, steps=500)
    assert float(linsolve.relative_residual(matvec, b, v)) < 1e-5
    zero = linsolve.cg(matvec, tree.zeros_like(b), steps=5)
    assert torch.equal(zero["x"], torch.zeros(6))
    assert H.dtype == v["x"].dtype == torch.float32


def test_cg_on_indefinite_matrix_is_finite():
    H = torch.diag(torch.tensor([1.0, 2.0, -1.0], dtype=F64))
    b = {"x": torch.ones(3, dtype=F64)}
    for steps in (1, 2, 3, 50):
        assert linsolve.cg(lambda v: {"x": H @ v["x"]}, b, steps=steps)["x"].isfinite().all()


def test_largest_eigenvalue_is_approached_from_below():
    for seed in range(5):
        H, matvec, b, _ = system(n=40, kappa=300.0, seed=seed)
        top = float(torch.linalg.eigvalsh(H)[-1])
        actual = linsolve.largest_eigenvalue(matvec, b)
        assert 0.98 * top <= actual <= top * (1 + 1e-12)
    assert linsolve.largest_eigenvalue(lambda v: tree.scale(3.0, v), {"x": torch.ones(5)}) == pytest.approx(
        3.0, rel=1e-6
    )
