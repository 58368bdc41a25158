"""Hypergradients at a point: the exact one against differences, the others against it at the theory's rate."""

import warnings

import pytest
import torch

import fsla
from fsla import Batch, Point
from fsla import _tree as tree
from fsla.hypergradients._check import METHODS
from fsla.hypergradients._exact import hessian_matrix, solve_inner
from fsla_reproduction.problems import Quadratic
from support import F64, network, normal, ridge_logistic

QUADRATIC = Quadratic.random(4, 7, kappa=12.0, seed=3)


def quadratic():
    return QUADRATIC.losses(), QUADRATIC.point(normal(4, seed=1), normal(7, seed=2)), None, None


PROBLEMS = {"quadratic": quadratic, "ridge logistic": ridge_logistic}


@pytest.fixture(params=PROBLEMS)
def case(request):
    return PROBLEMS[request.param]()


def error(actual, exact):
    return float(tree.norm(tree.sub(actual.value, exact.value)) / tree.norm(exact.value))


def test_hypergradient_exact_matches_closed_form():
    problem, at, *batches = quadratic()
    h = fsla.hypergradient(problem, at, *batches, "exact")
    lam = at.lam["lam"]
    assert torch.allclose(h.value["lam"], QUADRATIC.gradient(lam), rtol=1e-12)
    assert torch.allclose(h.adjoint["omega"], QUADRATIC.v_of(lam), rtol=1e-12)
    assert torch.allclose(h.omega["omega"], QUADRATIC.omega_of(lam), rtol=1e-12)
    assert h.converged
    assert h.residual < 1e-13


def test_hypergradient_exact_matches_central_differences(case):
    """Every coordinate of ∇f, relative 1e-6, with f itself solved to machine precision."""
    problem, at, train, valid = case
    exact = fsla.hypergradient(problem, at, train, valid, "exact")

    def f(flat):
        lam = tree.unflatten(flat, at.lam)
        omega = solve_inner(lambda at: problem.inner_at(at, Batch(train)), Point(lam, exact.omega))
        return float(problem.outer_at(Point(lam, omega), Batch(valid)).value)

    flat, step = tree.flatten(at.lam), 1e-5
    for i, slope in enumerate(tree.flatten(exact.value)):
        e = torch.zeros_like(flat)
        e[i] = step
        assert (f(flat + e) - f(flat - e)) / (2 * step) == pytest.approx(float(slope), rel=1e-6, abs=1e-9)


def test_hypergradient_exact_on_large_problem_is_iterative(monkeypatch, case):
    problem, at, train, valid = case
    dense = fsla.hypergradient(problem, at, train, valid, "exact")
    monkeypatch.setattr("fsla.hypergradients._exact.DENSE", 0)
    assert error(fsla.hypergradient(problem, at, train, valid, "exact"), dense) < 1e-11


def spectrum(problem, at, train):
    values = torch.linalg.eigvalsh(hessian_matrix(problem.inner_at(at, Batch(train)).hvp, at.omega))
    return float(values[0]), float(values[-1])


@pytest.mark.parametrize("method", ["neumann", "unrolled", "forward_unrolled", "single_loop"])
def test_hypergradient_linear_methods_converge_at_theoretical_rate(case, method):
    """Error ratio over 10 steps at most (1-βμ)^10, near ω_λ; FSLA's double pole (τ = β) allows a factor linear in K."""
    problem, at, train, valid = case
    exact = fsla.hypergradient(problem, at, train, valid, "exact")
    point = Point(at.lam, exact.omega)
    mu, L = spectrum(problem, point, train)
    beta, start = 1 / L, point if method == "neumann" else Point(at.lam, tree.axpy(1e-3, at.omega, exact.omega))
    errors = {
        K: error(fsla.hypergradient(problem, start, train, valid, method, num_steps=K, step_size=beta), exact)
        for K in (20, 30, 40, 400)
    }
    slack = 1.02 if method != "single_loop" else 2.0
    assert errors[30] <= slack * (1 - beta * mu) ** 10 * errors[20]
    assert errors[40] <= slack * (1 - beta * mu) ** 10 * errors[30]
    assert errors[400] < 1e-9 or errors[400] <= 2 * 400 * (1 - beta * mu) ** 400


def test_hypergradient_cg_converges_at_theoretical_rate(case):
    problem, at, train, valid = case
    exact = fsla.hypergradient(problem, at, train, valid, "exact")
    point = Point(at.lam, exact.omega)
    mu, L = spectrum(problem, point, train)
    rate = ((L / mu) ** 0.5 - 1) / ((L / mu) ** 0.5 + 1)
    v_star = tree.flatten(exact.adjoint)
    H = hessian_matrix(problem.inner_at(point, Batch(train)).hvp, point.omega)
    for K in range(1, 8):
        h = fsla.hypergradient(problem, point, train, valid, "cg", num_steps=K)
        gap = tree.flatten(h.adjoint) - v_star
        assert float(gap @ H @ gap) ** 0.5 <= 2 * rate**K * float(v_star @ H @ v_star) ** 0.5 + 1e-12
    assert h.converged
    assert error(h, exact) < 1e-10


def test_hypergradient_error_is_bounded_by_omega_error(case):
    """‖∇f_K - ∇f‖ ~ ‖ω - ω_λ‖ for K large: halving the distance halves the error."""
    problem, at, train, valid = case
    exact = fsla.hypergradient(problem, at, train, valid, "exact")
    errors = []
    for scale in (1e-3, 5e-4):
        start = Point(at.lam, tree.axpy(scale, tree.sub(at.omega, exact.omega), exact.omega))
        errors.append(error(fsla.hypergradient(problem, start, train, valid, "cg", num_steps=200), exact))
    assert errors[0] > 1e-6
    assert errors[0] / errors[1] == pytest.approx(2.0, rel=1e-2)


def test_hypergradient_bp_ns_and_forward_agree_on_quadratic(case):
    problem, at, train, valid = case
    for K in (1, 2, 7, 30):
        bp = fsla.hypergradient(problem, at, train, valid, "unrolled", num_steps=K, step_size=0.05)
        tangent = fsla.hypergradient(problem, at, train, valid, "forward_unrolled", num_steps=K, step_size=0.05)
        assert error(tangent, bp) < 1e-12
        ns = fsla.hypergradient(problem, Point(at.lam, bp.omega), train, valid, "neumann", num_steps=K, step_size=0.05)
        if train is None:
            assert error(ns, bp) < 1e-12
        elif K > 1:
            assert error(ns, bp) > 1e-6  # elsewhere they differ


def test_hypergradient_truncation_keeps_last_terms():
    problem, at, train, valid = ridge_logistic()
    full = fsla.hypergradient(problem, at, train, valid, "unrolled", num_steps=10, step_size=0.2)
    same = fsla.hypergradient(problem, at, train, valid, "unrolled", num_steps=10, step_size=0.2, unroll_length=10)
    assert error(same, full) < 1e-15
    gaps = [
        error(
            fsla.hypergradient(problem, at, train, valid, "unrolled", num_steps=10, step_size=0.2, unroll_length=R),
            full,
        )
        for R in (1, 4, 7, 9)
    ]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] > 0


def test_hypergradient_default_step_converges(case):
    problem, at, train, valid = case
    exact = fsla.hypergradient(problem, at, train, valid, "exact")
    for method in ("unrolled", "single_loop"):
        assert error(fsla.hypergradient(problem, at, train, valid, method, num_steps=400), exact) < 1e-6
    h = fsla.hypergradient(problem, Point(at.lam, exact.omega), train, valid, "neumann", num_steps=400)
    assert h.converged
    assert error(h, exact) < 1e-6


def test_hypergradient_reports_convergence(case):
    problem, at, train, valid = case
    few = fsla.hypergradient(problem, at, train, valid, "cg", num_steps=2)
    assert few.converged is False
    assert few.residual > 1e-6
    b, G = problem.outer_at(at, Batch(valid)).grad_omega, problem.inner_at(at, Batch(train))
    true = tree.norm(tree.sub(b, G.hvp(few.adjoint))) / tree.norm(b)
    assert few.residual == pytest.approx(float(true), rel=1e-12)
    counted = fsla.CountedProblem(problem)
    loose = fsla.hypergradient(counted, at, train, valid, "cg", num_steps=50, tol=0.3)
    assert loose.converged is True
    assert loose.residual <= 0.3
    assert counted.calls.hvp < 7  # it stopped there, and did not go on to n steps
    assert fsla.hypergradient(problem, at, train, valid, "neumann", num_steps=3).converged is False


@pytest.mark.parametrize("factor", [2.02, 3.0])
@pytest.mark.parametrize("steps", [1, 3, 50])
def test_hypergradient_neumann_step_too_large_is_reported(case, factor, steps):
    problem, at, train, valid = case
    _, L = spectrum(problem, at, train)
    with pytest.warns(fsla.ConvergenceWarning, match="must be under 2/L.*Leave step_size out"):
        h = fsla.hypergradient(problem, at, train, valid, "neumann", num_steps=steps, step_size=factor / L)
    assert h.converged is False
    assert "diverges" in h.message


def test_hypergradient_indefinite_hessian_is_reported():
    problem = fsla.Problem(
        lambda lam, omega, batch: (lam["a"] * omega["w"].square()).sum() + omega["w"].sum(),
        lambda lam, omega, batch: (omega["w"] - 1).square().sum(),
    )
    at = Point({"a": torch.tensor([1.0, -1.0, 2.0], dtype=F64)}, {"w": torch.tensor([0.0, 5.0, 1.0], dtype=F64)})
    with pytest.warns(fsla.ConvergenceWarning, match="curvature of G is not positive in every direction"):
        fsla.hypergradient(problem, at, None, None, "cg")
    for method in ("exact", "implicit"):
        with pytest.raises(ValueError, match=r"positive definite Hessian.*-2"):
            fsla.hypergradient(problem, at, None, None, method)


def test_hypergradient_singular_inner_problem_is_reported():
    problem = fsla.Problem(
        lambda lam, omega, batch: (lam["a"] * -omega["w"]).exp().sum(), lambda lam, omega, batch: omega["w"].sum()
    )
    at = Point({"a": torch.ones(1, dtype=F64)}, {"w": torch.zeros(1, dtype=F64)})
    with pytest.raises(ValueError, match="solvable by Newton"):
        fsla.hypergradient(problem, at, None, None, "exact")


@pytest.mark.parametrize(
    ("options", "error_type", "text"),
    [
        ({"method": "neuman"}, ValueError, "'neuman'.*Did you mean 'neumann'"),
        ({"method": "zzz"}, ValueError, "one of 'exact'"),
        ({"num_steps": 0}, ValueError, "'num_steps'.*at least 1. Got 0"),
        ({"num_steps": 1.5}, TypeError, "whole number. Got 1.5"),
        ({"num_steps": True}, TypeError, "whole number"),
        ({"method": "neumann", "step_size": -0.1}, ValueError, "'step_size'.*positive. Got -0.1"),
        ({"tol": 0.0}, ValueError, "'tol'.*positive"),
        ({"method": "unrolled", "unroll_length": 0}, ValueError, "'unroll_length'.*at least 1"),
    ],
)
def test_hypergradient_invalid_option_raises(options, error_type, text):
    problem, at, train, valid = ridge_logistic()
    with pytest.raises(error_type, match=text):
        fsla.hypergradient(problem, at, train, valid, **options)


def test_hypergradient_malformed_point_raises():
    problem, at, train, valid = ridge_logistic()
    with pytest.raises(TypeError, match="lam must be a mapping"):
        fsla.hypergradient(problem, Point(at.lam["log_ridge"], at.omega), train, valid)
    with pytest.raises(ValueError, match="omega must hold at least one"):
        fsla.hypergradient(problem, Point(at.lam, {}), train, valid)


@pytest.mark.parametrize("method", ["cg", "neumann", "single_loop", "unrolled", "implicit"])
def test_hypergradient_float32_network_matches_float64(method):
    """Relative 1e-4, a thousand rounding units; and nothing warns (warnings are errors here)."""
    values = {}
    for dtype in (torch.float32, F64):
        problem, at, train, valid = network(dtype)
        h = fsla.hypergradient(problem, at, train, valid, method, num_steps=40, step_size=0.3)
        assert all(t.dtype == dtype for t in h.value.values())
        values[dtype] = tree.flatten(h.value).double()
    assert float((values[torch.float32] - values[F64]).norm() / values[F64].norm()) < 1e-4


def test_products_float32_network_match_float64():
    products = {}
    for dtype in (torch.float32, F64):
        problem, at, train, _ = network(dtype)
        products[dtype] = tree.flatten(problem.inner_at(at, Batch(train)).hvp(at.omega)).double()
    assert float((products[torch.float32] - products[F64]).norm() / products[F64].norm()) < 1e-5


def test_check_hypergradient_covers_methods_and_prints_table(case):
    problem, at, train, valid = case
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = fsla.check_hypergradient(problem, at, train, valid, num_steps=(5, 50))
    assert {r.method for r in report.rows} == METHODS.keys() - {"exact"}
    assert report.exact_vs_finite_difference < 1e-6
    by = {(r.method, r.num_steps): r for r in report.rows}
    assert by["cg", 50].error_at_minimum < 1e-10
    assert by["implicit", None].error_at_minimum < 1e-12
    assert by["neumann", 50].error_at_minimum < by["neumann", 5].error_at_minimum
    text = str(report)
    assert all(method in text for method in METHODS)
    assert len(text.splitlines()) == 4 + len(report.rows)


def test_check_hypergradient_detects_wrong_gradient():
    """An outer loss with a detached path has a wrong ∂_λ F; the central difference shows it."""
    problem, at, train, valid = ridge_logistic()
    wrong = fsla.Problem(
        problem.inner_loss,
        lambda lam, omega, b: problem.outer_loss({"log_ridge": lam["log_ridge"].detach()}, omega, b),
    )
    assert fsla.check_hypergradient(wrong, at, train, valid, num_steps=(5,)).exact_vs_finite_difference > 1e-3


def ridge_setup():
    x, y = normal(50, 5, seed=1), normal(50, seed=2)

    def mse(omega, b):
        return (b[0] @ omega["w"] - b[1]).square().mean()

    problem = fsla.Problem(
        lambda lam, o, b: mse(o, b) + (lam["r"].exp() * o["w"] ** 2).sum(), lambda lam, o, b: mse(o, b)
    )
    return problem, Point({"r": torch.zeros(5, dtype=F64)}, {"w": torch.zeros(5, dtype=F64)}), (x, y)


@pytest.mark.parametrize("method", ["single_loop", "unrolled", "forward_unrolled", "neumann"])
def test_hypergradient_nonfinite_is_not_converged(method):
    problem, at, batch = ridge_setup()
    with pytest.warns(fsla.ConvergenceWarning, match="diverge"):
        h = fsla.hypergradient(problem, at, batch, batch, method, step_size=1e200, num_steps=20)
    assert not h.converged


def test_hypergradient_of_grad_tensors_leaves_no_graph():
    problem, at, batch = ridge_setup()
    leaves = Point(at.lam, {"w": at.omega["w"].clone().requires_grad_()})
    h = fsla.hypergradient(problem, leaves, batch, batch, "exact")
    assert not any(t.requires_grad for x in (h.value, h.adjoint, h.omega) for t in x.values())
    batches = fsla.StepBatches.shared(batch, batch)
    for name in ("fsla", "soba"):
        algorithm = fsla.algorithms.get_algorithm(name)(fsla.steps.constant(0.1, 0.1, 0.1))
        state = algorithm.step(problem, algorithm.init(problem, leaves, batches), batches)
        assert not any(
            t.requires_grad for x in (state.lam.value, state.omega.value, state.direction) for t in x.values()
        )


def test_hypergradient_nonfinite_start_is_reported():
    problem, at, batch = ridge_setup()
    spiky = fsla.Problem(
        lambda lam, o, b: problem.inner_loss(lam, o, b) + o["w"].square().sum().sqrt(), problem.outer_loss
    )
    with pytest.raises(ValueError, match=r"gradient of the inner loss G in omega must be finite.*\['w'\]"):
        fsla.hypergradient(spiky, at, batch, batch)


def test_hypergradient_default_step_without_curvature_raises():
    flat = fsla.Problem(lambda lam, o, b: (lam["a"].exp() * o["w"]).sum(), lambda lam, o, b: o["w"].square().sum())
    at = Point({"a": torch.zeros(2, dtype=F64)}, {"w": torch.ones(2, dtype=F64)})
    with pytest.raises(ValueError, match=r"must curve upwards.*Give step_size"):
        fsla.hypergradient(flat, at, None, None, "single_loop")


def test_hypergradient_odd_argument_raises():
    problem, at, batch = ridge_setup()
    with pytest.raises(ValueError, match="unroll_length is for method='unrolled' alone"):
        fsla.hypergradient(problem, at, batch, batch, "cg", unroll_length=3)
    with pytest.raises(ValueError, match="'num_steps' of check_hypergradient must be at least 1"):
        fsla.check_hypergradient(problem, at, batch, batch, num_steps=(0,))
    with pytest.raises(TypeError, match=r"must be a number. Got '0.1'"):
        fsla.hypergradient(problem, at, batch, batch, "neumann", step_size="0.1")
    with pytest.raises(TypeError, match=r"must be a fsla\.Point\. Got tuple"):
        fsla.hypergradient(problem, (at.lam, at.omega), batch, batch)
    with pytest.raises(ValueError, match="Did you mean 'cg'"):
        fsla.hypergradient(problem, at, batch, batch, "CG")
    with pytest.raises(KeyError) as error:
        fsla.hypergradient(problem, Point(at.lam, {"v": at.omega["w"]}), batch, batch)
    assert "while the inner loss G was called with lam ['r'] and omega ['v']" in error.value.__notes__[0]
    assert len(fsla.check_hypergradient(problem, at, batch, batch, num_steps=3).rows) == 6


def test_hypergradient_ill_conditioned_float32_is_reported():
    scales = torch.logspace(-5, 0, 60, dtype=torch.float64).float()
    problem = fsla.Problem(
        lambda lam, o, b: (scales * o["w"].square()).sum() / 2 + (lam["a"] * o["w"]).sum(),
        lambda lam, o, b: (o["w"] * torch.linspace(1, 2, 60)).sum(),
    )
    at = Point({"a": torch.zeros(60)}, {"w": torch.zeros(60)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        h = fsla.hypergradient(problem, at, None, None, "cg", num_steps=2000)
    assert h.converged or "too ill-conditioned for this dtype" in str(caught[0].message)
