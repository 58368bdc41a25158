"""Products from first-order gradients: against exact ones, in every dtype, counted as what they are."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.function import once_differentiable

import fsla
from fsla import Batch, CountedProblem, FiniteDifferenceProblem, OracleCounts, Point, Problem, StepBatches
from fsla import _tree as tree
from fsla_reproduction.problems import Quadratic
from support import F64, network, normal, ridge_logistic

R = fsla.steps.constant(0.05, 0.1, 0.1, 0.5)


def gap(x, y):
    return float(tree.norm(tree.sub(tree.dense(x), tree.dense(y))) / tree.norm(tree.dense(y)))


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 10**6), st.floats(1e-3, 1e3))
@settings(max_examples=25, deadline=None)
def test_finite_difference_on_quadratic_leaves_rounding_only(p, n, seed, size):
    """A quadratic has no truncation error, whatever the size of v."""
    q = Quadratic.random(p, n, seed=seed)
    at = q.point(normal(p, seed=1), normal(n, seed=2))
    v, u = {"omega": size * normal(n, seed=3)}, {"lam": size * normal(p, seed=4)}
    G, exact = FiniteDifferenceProblem(q).inner_at(at, Batch(None)), q.inner_at(at)
    assert gap(G.hvp(v), exact.hvp(v)) < 1e-8
    assert gap(G.mixed_hvp(v), exact.mixed_hvp(v)) < 1e-8
    assert gap(G.mixed_hvp_transpose(u), exact.mixed_hvp_transpose(u)) < 1e-8
    h, j = G.products(v)
    assert gap(h, exact.hvp(v)) < 1e-8
    assert gap(j, exact.mixed_hvp(v)) < 1e-8
    assert gap(G.grad_omega, exact.grad_omega) < 1e-8
    assert torch.allclose(G.value, exact.value, rtol=1e-8)


@pytest.mark.parametrize("make", [ridge_logistic, network])
def test_finite_difference_error_is_second_order(make):
    problem, at, train, _ = make()
    v = tree.unflatten(normal(tree.size(at.omega), seed=5), at.omega)
    exact = problem.inner_at(at, Batch(train)).linearized()
    errors = {}
    for r in (4e-2, 2e-2, 1e-2):
        G = FiniteDifferenceProblem(problem, r).inner_at(at, Batch(train))
        h, j = G.products(v)
        errors[r] = gap(h, exact.hvp(v)), gap(j, exact.mixed_hvp(v)), gap(G.grad_omega, exact.grad_omega)
    for big, small in ((4e-2, 2e-2), (2e-2, 1e-2)):
        for a, b in zip(errors[big], errors[small], strict=True):
            assert 3.8 < a / b < 4.2 or a < 1e-11  # J is linear in ω for the ridge: no truncation there


@pytest.mark.parametrize(("dtype", "step", "bound"), [(F64, 1e-5, 1e-8), (torch.float32, 1e-4, 3e-3)])
def test_finite_difference_default_step_depends_on_dtype(dtype, step, bound):
    problem, at, train, _ = network(dtype)
    v = tree.unflatten(normal(tree.size(at.omega), seed=5).to(dtype), at.omega)
    G, exact = (
        FiniteDifferenceProblem(problem).inner_at(at, Batch(train)),
        problem.inner_at(at, Batch(train)).linearized(),
    )
    assert G.rel_step == step
    assert gap(G.hvp(v), exact.hvp(v)) < bound
    assert gap(G.mixed_hvp(v), exact.mixed_hvp(v)) < bound


def test_finite_difference_under_autocast_stays_float32():
    problem, at, train, valid = network(torch.float32)
    cast = Problem(
        problem.inner_loss, problem.outer_loss, hvp_method="finite_difference", autocast_dtype=torch.bfloat16
    )
    assert cast.inner_at(at, Batch(train)).rel_step == 1e-3
    assert FiniteDifferenceProblem(
        CountedProblem(Problem(problem.inner_loss, problem.outer_loss, autocast_dtype=torch.bfloat16))
    ).inner_at(at, Batch(train)).rel_step == pytest.approx(1e-3)
    algorithm, batches = fsla.algorithms.fsla(R, momentum="average"), StepBatches.shared(train, valid)
    a, b = algorithm.init(cast, at, batches), algorithm.init(problem, at, batches)
    for _ in range(5):
        a, b = algorithm.step(cast, a, batches), algorithm.step(problem, b, batches)
    assert all(t.dtype == torch.float32 for x in (a.lam.value, a.omega.value, a.v, a.direction) for t in x.values())
    moved = tree.sub(b.omega.value, at.omega)
    assert gap(tree.sub(a.omega.value, at.omega), moved) < 0.05  # bfloat16 has three digits
    assert gap(a.v, b.v) < 0.1
    with pytest.raises(ValueError, match=r"autocast_dtype must be torch.bfloat16 or None.*gradient scaler"):
        Problem(problem.inner_loss, problem.outer_loss, autocast_dtype=torch.float16)


def test_finite_difference_at_zero_v_or_omega_is_finite():
    problem, at, train, _ = ridge_logistic()
    zero = tree.zeros_like(at.omega)
    G = FiniteDifferenceProblem(problem).inner_at(at, Batch(train))
    h, j = G.products(zero)
    assert all(torch.equal(t, torch.zeros_like(t)) for x in (h, j, G.mixed_hvp(zero), G.hvp(zero)) for t in x.values())
    assert gap(G.grad_omega, problem.inner_at(at, Batch(train)).grad_omega) < 1e-12
    start = Point(at.lam, zero)
    v = tree.unflatten(normal(tree.size(at.omega), seed=5), at.omega)
    assert (
        gap(
            FiniteDifferenceProblem(problem).inner_at(start, Batch(train)).hvp(v),
            problem.inner_at(start, Batch(train)).hvp(v),
        )
        < 1e-8
    )


COUNTS = {
    "soba": (fsla.algorithms.soba(R), "shared", OracleCounts(grad=2, outer_grad_omega=1, outer_grad_lam=1)),
    "fsla, none": (
        fsla.algorithms.fsla(R, momentum="none"),
        "shared",
        OracleCounts(grad=2, forward=2, outer_grad_omega=1, outer_grad_lam=1),
    ),
    "fsla, storm": (
        fsla.algorithms.fsla(R),
        "grouped",
        OracleCounts(grad=2, forward=4, outer_grad_omega=1, outer_grad_lam=2),
    ),
    "cg": (
        fsla.algorithms.cg(R, hvp_steps=3, momentum="none"),
        "shared",
        OracleCounts(grad=7, forward=2, outer_grad_omega=1, outer_grad_lam=1),
    ),
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_finite_difference_counts_gradients_and_passes(name, wrapped):
    algorithm, mode, expected = COUNTS[name]
    problem, at, train, valid = ridge_logistic()
    difference = Problem(problem.inner_loss, problem.outer_loss, hvp_method="finite_difference")
    counted = CountedProblem(difference if not wrapped else FiniteDifferenceProblem(problem))
    batches = StepBatches.draw(mode, lambda: dict(train), lambda: dict(valid))
    state = algorithm.step(difference, algorithm.init(difference, at, batches), batches)
    algorithm.step(counted, state, batches)
    calls = counted.calls
    expected.inner_views, expected.outer_views = calls.inner_views, calls.outer_views
    assert calls == expected


@pytest.mark.parametrize(
    "method", ["exact", "implicit", "cg", "neumann", "unrolled", "forward_unrolled", "single_loop"]
)
def test_finite_difference_serves_every_estimator(method):
    problem, at, train, valid = ridge_logistic()
    exact = fsla.hypergradient(problem, at, train, valid, method)
    actual = fsla.hypergradient(FiniteDifferenceProblem(problem), at, train, valid, method)
    assert gap(actual.value, exact.value) < 1e-6


def test_check_step_detects_wrong_step():
    problem, at, train, valid = ridge_logistic()
    v = tree.unflatten(normal(tree.size(at.omega), seed=5), at.omega)
    good = FiniteDifferenceProblem(problem).check_step(at, Batch(train), v)
    coarse = FiniteDifferenceProblem(problem, 0.5).check_step(at, Batch(train), v)
    assert good.rel_step == 1e-5
    assert good.hvp_change < 1e-7
    assert coarse.hvp_change > 1e-3
    exact = problem.inner_at(at, Batch(train)).hvp(v)
    error = gap(FiniteDifferenceProblem(problem, 0.5).inner_at(at, Batch(train)).hvp(v), exact)
    assert 0.5 < (4 / 3) * coarse.hvp_change / error < 2
    assert "relative step 5e-01 against half of it: H v changes by" in str(coarse)
    difference = Problem(problem.inner_loss, problem.outer_loss, hvp_method="finite_difference")
    assert difference.check_step(at, Batch(train), v).hvp_change < 1e-7
    assert problem.check_step(at, Batch(train), v) is None
    assert "products by differences" in str(fsla.check_hypergradient(difference, at, train, valid, num_steps=3))
    assert "products by differences" not in str(fsla.check_hypergradient(problem, at, train, valid, num_steps=3))


class Once(torch.autograd.Function):
    """A cube with a first derivative and no second one."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def cubic(cube, **more):
    return Problem(
        lambda lam, omega, batch: (lam["a"] * cube(omega["w"])).sum(),
        lambda lam, omega, batch: omega["w"].square().sum(),
        **more,
    )


AT = Point({"a": normal(3)}, {"w": 1 + normal(3, seed=1).abs()})


def test_loss_without_second_derivative_warns_once():
    v = {"w": normal(3, seed=2)}
    exact = cubic(lambda x: x**3).inner_at(AT, Batch(None)).linearized()
    problem = cubic(Once.apply)
    with pytest.warns(
        fsla.FiniteDifferenceWarning, match=r"no second derivative \(a function that was marked with @once"
    ):
        problem.inner_at(AT, Batch(None))
    for _ in range(3):  # warnings are errors: nothing more is said
        G = problem.inner_at(AT, Batch(None))
        assert gap(G.hvp(v), exact.hvp(v)) < 1e-8
        assert gap(G.mixed_hvp(v), exact.mixed_hvp(v)) < 1e-8
    with pytest.raises(
        NotImplementedError, match=r"second derivative.*once_differentiable.*hvp_method='finite_difference'"
    ):
        cubic(Once.apply, hvp_method="autograd").inner_at(AT, Batch(None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cubic(Once.apply, hvp_method="finite_difference").inner_at(AT, Batch(None)).hvp(v)
    with pytest.raises(ValueError, match=r"'finite_difference'.*Got 'differences'"):
        cubic(Once.apply, hvp_method="differences")


def test_once_differentiable_function_in_network_is_detected():
    """PyTorch leaves its part out of H v without a word."""
    a = normal(3, 3, seed=3)

    def problem(cube, **more):
        return Problem(
            lambda lam, omega, batch: (lam["a"] * (cube(a @ omega["w"]) @ omega["u"]).square()).sum(),
            lambda lam, omega, batch: omega["w"].square().sum(),
            **more,
        )

    at = Point({"a": normal(3)}, {"w": normal(3, 4, seed=1), "u": normal(4, 3, seed=2)})
    v = {"w": normal(3, 4, seed=4), "u": normal(4, 3, seed=5)}
    exact = problem(lambda x: x**3).inner_at(at, Batch(None)).hvp(v)
    with pytest.warns(fsla.FiniteDifferenceWarning, match="@once_differentiable"):
        view = problem(Once.apply).inner_at(at, Batch(None))
    assert gap(view.hvp(v), exact) < 1e-7
    with pytest.raises(NotImplementedError, match="@once_differentiable"):
        problem(Once.apply, hvp_method="autograd").inner_at(at, Batch(None))


def test_detached_backward_is_detected():
    class Cut(Once):
        @staticmethod
        def backward(ctx, grad):
            with torch.no_grad():
                return 3 * ctx.saved_tensors[0] ** 2 * grad.detach()

    with pytest.warns(fsla.FiniteDifferenceWarning, match="an operation whose backward pass is cut off"):
        cubic(Cut.apply).inner_at(AT, Batch(None))


def test_loss_linear_in_omega_has_zero_hessian():
    problem = Problem(lambda lam, omega, _: (lam["a"] * omega["w"]).sum(), lambda lam, omega, _: omega["w"].sum())
    assert torch.equal(problem.inner_at(AT, Batch(None)).hvp({"w": normal(3)})["w"], torch.zeros(3, dtype=F64))


def test_piecewise_linear_loss_is_not_rejected():
    torch.manual_seed(0)
    layers = [nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)]
    omega, net = fsla.make_functional(nn.Sequential(*layers))

    def inner(lam, omega, x):
        return (lam["a"] * net(omega, x).square()).mean()

    for seed in range(5):
        problem = Problem(inner, lambda lam, omega, x: net(omega, x).mean())
        problem.inner_at(
            Point({"a": torch.ones(1)}, omega), Batch(normal(16, 5, seed=seed).float())
        )  # warnings are errors


def test_unrelated_loss_error_propagates():
    def loss(lam, omega, batch):
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        Problem(loss, loss).inner_at(AT, Batch(None))


def test_finite_difference_of_fused_attention_matches_math():
    """Fused attention has no second derivative; in plain operations it has one to compare with."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).to(F64)
    omega, net = fsla.make_functional(attention)
    x, y = normal(4, 6, 8, seed=1), normal(4, 6, 8, seed=2)

    def inner(lam, omega, batch):
        out, _ = net(omega, x, x, x, need_weights=False)
        return (lam["w"].exp() * (out - y).square().mean((1, 2))).mean()

    problem = Problem(inner, lambda lam, omega, batch: inner({"w": torch.zeros(4, dtype=F64)}, omega, batch))
    at, v = Point({"w": normal(4)}, omega), tree.unflatten(normal(tree.size(omega), seed=3), omega)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = Problem(inner, problem.outer_loss, hvp_method="autograd").inner_at(at, Batch(None)).linearized()
        h, j = exact.hvp(v), exact.mixed_hvp(v)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        G = problem.inner_at(at, Batch(None))
    actual, mixed = G.products(v)
    assert gap(actual, h) < 1e-7
    assert gap(mixed, j) < 1e-7


def test_rel_step_not_positive_raises():
    with pytest.raises(ValueError, match=r"'rel_step' of FiniteDifferenceProblem must be positive. Got -1"):
        FiniteDifferenceProblem(cubic(Once.apply), -1.0)
