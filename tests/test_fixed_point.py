"""Maps in the place of gradient steps: the hypergradient of an equilibrium, and who can compute it."""

import pytest
import torch

import fsla
from fsla import Batch, FixedPointProblem, Point, StepBatches, algorithms
from fsla import _tree as tree
from support import F64, normal, ridge_logistic

FULL = StepBatches.shared(None, None)


def equilibrium():
    """ω = tanh(A ω + B λ + b), with ‖A‖ < 1 and A not symmetric; F = ½ ‖ω - target‖² + small ridge on λ."""
    a = normal(4, 4, seed=1)
    a = 0.6 * a / torch.linalg.matrix_norm(a, 2)
    b = normal(4, 2, seed=2)
    shift = normal(4, seed=3)
    target = normal(4, seed=4) / 2

    def phi(lam, omega, batch):
        return {"z": torch.tanh(a @ omega["z"] + b @ lam["x"] + shift)}

    def outer(lam, omega, batch):
        return (omega["z"] - target).square().sum() / 2 + 0.05 * lam["x"].square().sum()

    def solved(lam):
        omega = {"z": torch.zeros(4, dtype=F64)}
        for _ in range(300):
            omega = phi(lam, omega, None)
        return omega

    def f(x):
        return outer({"x": x}, solved({"x": x}), None)

    return FixedPointProblem(phi, outer), f, solved


LAM = {"x": torch.tensor([0.3, -0.2], dtype=F64)}


def test_fixed_point_iteration_gives_implicit_derivative():
    problem, f, solved = equilibrium()
    x = LAM["x"].clone().requires_grad_()
    (want,) = torch.autograd.grad(f(x), x)
    at = Point(LAM, solved(LAM))
    actual = fsla.hypergradient(problem, at, None, None, "neumann", num_steps=200, step_size=1.0)
    assert torch.allclose(actual.value["x"], want, rtol=1e-10)


@pytest.mark.parametrize(
    "algorithm",
    [
        algorithms.aid_fp(fsla.steps.constant(0.2, 1.0, 0.0), inner_steps=20, num_terms=20, adjoint_lr=1.0),
        algorithms.fsla(fsla.steps.constant(0.1, 1.0, 1.0, 0.5)),
        algorithms.soba(fsla.steps.constant(0.1, 1.0, 1.0)),
        algorithms.amigo(fsla.steps.constant(0.2, 1.0, 1.0), inner_steps=5, hvp_steps=5),
        algorithms.itd_bio(fsla.steps.constant(0.2, 1.0, 0.0), inner_steps=40),
    ],
    ids=["aid_fp", "fsla", "soba", "amigo", "itd_bio"],
)
def test_fixed_point_algorithms_reach_best_equilibrium(algorithm):
    problem, f, _ = equilibrium()
    state = algorithm.init(problem, Point(LAM, {"z": torch.zeros(4, dtype=F64)}), FULL)
    for _ in range(600):
        state = algorithm.step(problem, state, FULL)
    x = state.lam.value["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(f(x), x)
    assert float(slope.norm()) < 1e-5


def test_fixed_point_of_gradient_step_equals_gradient_method():
    problem, at, train, valid = ridge_logistic()
    rate = 0.2

    def phi(lam, omega, batch):
        leaves = {name: t if t.requires_grad else t.requires_grad_() for name, t in omega.items()}
        loss = problem.inner_loss(lam, leaves, batch)
        grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        return {name: t - rate * g for (name, t), g in zip(leaves.items(), grads, strict=True)}

    mapped = FixedPointProblem(phi, problem.outer_loss)
    batches = StepBatches.shared(train, valid)
    of_map = algorithms.aid_fp(fsla.steps.constant(0.05, rate, 0.0), inner_steps=3, num_terms=4, adjoint_lr=rate)
    of_gradient = algorithms.aid_fp(fsla.steps.constant(0.05, 1.0, 0.0), inner_steps=3, num_terms=4, adjoint_lr=1.0)
    a, b = of_map.init(problem, at, batches), of_gradient.init(mapped, at, batches)
    for _ in range(3):
        a, b = of_map.step(problem, a, batches), of_gradient.step(mapped, b, batches)
    assert float(tree.norm(tree.sub(a.lam.value, b.lam.value))) < 1e-13
    assert float(tree.norm(tree.sub(a.omega.value, b.omega.value))) < 1e-13


def test_fixed_point_unsupported_call_raises():
    problem, _, solved = equilibrium()
    at = Point(LAM, solved(LAM))
    with pytest.raises(ValueError, match=r"needs a symmetric Hessian.*method='neumann' with step_size=1"):
        fsla.hypergradient(problem, at, None, None, "implicit")
    for algorithm in (
        algorithms.f2sa(fsla.steps.constant(0.1, 1.0, 0.1)),
        algorithms.rtho(fsla.steps.constant(0.1, 1.0, 1.0)),
        algorithms.hjfbio(fsla.steps.constant(0.1, 1.0, 1.0), max_adjoint_norm=10.0),
    ):
        state = algorithm.init(problem, at, FULL)
        with pytest.raises(NotImplementedError, match="A fixed-point problem has no"):
            algorithm.step(problem, state, FULL)
    loose = FixedPointProblem(lambda lam, omega, batch: omega["z"], lambda lam, omega, batch: 0.0)
    with pytest.raises(TypeError, match="fixed_point_map must return a mapping"):
        _ = loose.inner_at(at, Batch(None)).grad_omega
    with pytest.raises(TypeError, match="fixed_point_map must be callable"):
        FixedPointProblem("phi", lambda lam, omega, batch: 0.0)
