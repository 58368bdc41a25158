"""The structured problem gives the numbers of the general one."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fsla
from fsla import Batch, Point, Problem, StepBatches, WeightedLossProblem
from fsla import _tree as tree
from support import F64, classifier, normal


def make(dtype=F64, ridge=True, kind="whole", hvp_method="auto"):
    """The weighted problem in one of its forms, the general problem of the same losses, and a point.

    kind: "whole" hands λ over, "rows" the batch's rows of it, "outputs" does so too and knows the network's outputs.
    """
    omega, scores, of_scores = classifier(30, dtype)

    def each(omega, index):
        return of_scores(scores(omega, index), index)

    def outer(lam, omega, index):
        return each(omega, index).mean()

    regularizer = (lambda omega: 0.1 * sum(t.square().sum() for t in omega.values())) if ridge else None
    at = Point({"w": normal(30, seed=1).to(dtype), "scale": normal(30, seed=4).to(dtype)}, omega)
    more = {"regularizer": regularizer, "hvp_method": hvp_method}
    if kind == "whole":
        problem = WeightedLossProblem(
            each, lambda lam, index: lam["w"][index].sigmoid() * lam["scale"][index].exp(), outer, **more
        )
    else:
        more |= {"row_index": lambda index: index, "outer_uses_lam": False}
        weigh = lambda lam, index: lam["w"].sigmoid() * lam["scale"].exp()  # noqa: E731
        if kind == "rows":
            problem = WeightedLossProblem(each, weigh, outer, **more)
        else:
            problem = WeightedLossProblem(of_scores, weigh, outer, model_outputs=scores, **more)
    return problem, Problem(problem.inner_loss, problem.outer_loss, hvp_method="reverse_over_reverse"), at


KINDS = ["whole", "rows", "outputs"]


@pytest.mark.parametrize("hvp_method", ["auto", "forward_over_reverse", "reverse_over_reverse"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ridge", [True, False])
@pytest.mark.parametrize("index", [torch.arange(30), torch.tensor([3, 3, 7, 0])])  # a sample may be drawn twice
def test_weighted_problem_oracles_equal_problem(ridge, index, kind, hvp_method):
    problem, general, at = make(ridge=ridge, kind=kind, hvp_method=hvp_method)
    v = tree.unflatten(normal(tree.size(at.omega), seed=2), at.omega)
    u = tree.unflatten(normal(tree.size(at.lam), seed=3), at.lam)
    H = general.inner_at(at, Batch(index))
    expected = {
        "mixed_hvp": H.mixed_hvp(v),
        "hvp": H.hvp(v),
        "grad_omega": H.grad_omega,
        "mixed_hvp_transpose": H.mixed_hvp_transpose(u),
    }
    for first in ("mixed_hvp", "hvp", "grad_omega", "products", "mixed_hvp_transpose"):  # whatever is asked for first
        G = problem.inner_at(at, Batch(index))
        for name in dict.fromkeys((first, "hvp", "mixed_hvp", "grad_omega", "products", "mixed_hvp_transpose")):
            actual = (
                G.grad_omega if name == "grad_omega" else getattr(G, name)(u if name == "mixed_hvp_transpose" else v)
            )
            pairs = zip(("hvp", "mixed_hvp"), actual, strict=True) if name == "products" else [(name, actual)]
            for oracle, value in pairs:
                value = tree.dense(value)
                assert float(tree.norm(tree.sub(value, expected[oracle]))) < 1e-13
                assert not any(t.requires_grad for t in value.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hvp_method", ["auto", "forward_over_reverse"])
@pytest.mark.parametrize("name", ["fsla", "cg", "bp", "soba", "ma_soba", "single_loop"])
def test_weighted_problem_steps_equal_problem(name, kind, hvp_method):
    problem, general, at = make(kind=kind, hvp_method=hvp_method)
    algorithm = fsla.algorithms.get_algorithm(name)(fsla.steps.constant(0.5, 0.1, 0.1, 0.5))
    g = torch.Generator().manual_seed(0)
    draw = lambda: torch.randint(30, (8,), generator=g)  # noqa: E731
    drawn = [StepBatches.draw("grouped", draw, draw) for _ in range(6)]
    a, b = algorithm.init(problem, at, drawn[0]), algorithm.init(general, at, drawn[0])
    for batches in drawn:
        a, b = algorithm.step(problem, a, batches), algorithm.step(general, b, batches)
    for x, y in ((a.lam.value, b.lam.value), (a.omega.value, b.omega.value), (a.direction, b.direction)):
        assert float(tree.norm(tree.sub(x, y))) < 1e-13


def test_weighted_problem_hypergradient_is_dense():
    problem, general, at = make(kind="rows")
    index = torch.tensor([3, 3, 7, 0])
    actual, expected = (
        fsla.hypergradient(p, at, index, index, "unrolled", num_steps=3, step_size=0.1) for p in (problem, general)
    )
    assert isinstance(actual.value["w"], torch.Tensor)
    assert float(tree.norm(tree.sub(actual.value, expected.value))) < 1e-13


class Large(TorchDispatchMode):
    """Notes the storages of a size that operations make."""

    def __init__(self, size):
        super().__init__()
        self.size, self.tensors = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor) and t.numel() >= self.size:
                self.tensors.append(t)  # kept alive, so that no storage is used twice
        return out


@pytest.mark.parametrize("momentum", ["storm", "average", "none"])
def test_weighted_problem_step_allocates_lam_and_direction_only(momentum):
    n = 5000
    problem, _, at = make(kind="outputs")
    at = Point({name: torch.zeros(n, dtype=F64) for name in ("w", "scale")}, at.omega)
    algorithm = fsla.algorithms.fsla(fsla.steps.constant(0.5, 0.1, 0.1, 0.5), momentum=momentum)
    draw = lambda: torch.tensor([1, 2, 2, 5])  # noqa: E731
    state = algorithm.init(problem, at, StepBatches.draw("grouped", draw, draw))
    with Large(n) as seen:
        after = algorithm.step(problem, state, StepBatches.draw("grouped", draw, draw))
    old = {t.untyped_storage().data_ptr() for x in (state.lam.value, state.direction) for t in x.values()}
    new = {t.untyped_storage().data_ptr() for t in seen.tensors} - old
    assert new == {t.untyped_storage().data_ptr() for x in (after.lam.value, after.direction) for t in x.values()}


def gauss_newton(problem, at, index):
    """Z'ᵀ (∂²_z mean w l) Z' + ∂²r as a matrix, each factor by its own Jacobian."""
    flat, weights = tree.flatten(at.omega), problem.sample_weight(problem.lam_of_batch(at.lam, [index]), index)
    z = lambda flat: problem.model_outputs(tree.unflatten(flat, at.omega), index).reshape(-1)  # noqa: E731
    top = lambda z: (weights * problem.per_sample_loss(z.reshape(len(index), -1), index)).mean()  # noqa: E731
    jacobian = torch.autograd.functional.jacobian(z, flat)
    curve = torch.autograd.functional.hessian(top, z(flat))
    out = jacobian.T @ curve @ jacobian
    if problem.regularizer is not None:
        out = out + torch.autograd.functional.hessian(
            lambda flat: problem.regularizer(tree.unflatten(flat, at.omega)), flat
        )
    return out


@pytest.mark.parametrize("ridge", [True, False])
def test_gauss_newton_product_matches_matrix(ridge):
    problem, general, at = make(kind="outputs", ridge=ridge)
    index = torch.tensor([3, 3, 7, 0, 11])
    matrix = gauss_newton(problem, at, index)
    for seed in range(3):
        v = tree.unflatten(normal(tree.size(at.omega), seed=seed), at.omega)
        G = problem.inner_at(at, Batch(index))
        assert float((tree.flatten(G.gauss_newton(v)) - matrix @ tree.flatten(v)).norm()) < 1e-12
        gradient = general.inner_at(at, Batch(index)).grad_omega
        assert float(tree.norm(tree.sub(G.grad_omega, gradient))) < 1e-13  # left behind
    smallest = float(torch.linalg.eigvalsh(matrix)[0])
    assert smallest > (0.19 if ridge else -1e-12)


def test_gauss_newton_adjoint_is_stable_at_negative_curvature():
    problem, _, at = make(kind="outputs", ridge=False)
    index = torch.tensor([0, 1, 2, 3, 4, 5])
    H = problem.inner_at(at, Batch(index))
    hessian = torch.stack([tree.flatten(H.hvp(e)) for e in tree.basis(at.omega)])
    assert float(torch.linalg.eigvalsh(hessian)[0]) < -1e-3  # the network's own curvature
    batches, norms = StepBatches.shared(index, index), {}
    for curvature in ("hessian", "gauss-newton"):
        algorithm = fsla.algorithms.fsla(fsla.steps.constant(0.0, 0.0, 1.0), momentum="none")
        curved = fsla.DampedProblem(fsla.GaussNewtonProblem(problem) if curvature == "gauss-newton" else problem, 1e-2)
        state = algorithm.init(curved, at, batches)
        for _ in range(200):
            state = algorithm.step(curved, state, batches)
        norms[curvature] = float(tree.norm(state.v))
    p = float(tree.norm(problem.outer_at(at, Batch(index)).grad_omega))
    assert norms["gauss-newton"] < p / 1e-2
    assert norms["hessian"] > 100 * norms["gauss-newton"]


def test_damped_problem_adds_to_diagonal():
    problem, _, at = make(kind="outputs")
    index = torch.arange(12)
    v = tree.unflatten(normal(tree.size(at.omega)), at.omega)
    plain, damped = problem.inner_at(at, Batch(index)), fsla.DampedProblem(problem, 0.5).inner_at(at, Batch(index))
    expected = tree.axpy(0.5, v, plain.hvp(v))
    product, mixed = damped.products(v)
    assert float(tree.norm(tree.sub(damped.hvp(v), expected))) < 1e-14
    assert float(tree.norm(tree.sub(product, expected))) < 1e-14
    assert float(tree.norm(tree.sub(tree.dense(mixed), tree.dense(plain.mixed_hvp(v))))) < 1e-14


def test_gauss_newton_counts_and_errors():
    problem, general, at = make(kind="outputs")
    batches, counted = StepBatches.shared(torch.arange(5), torch.arange(5)), fsla.CountedProblem(problem)
    algorithm = fsla.algorithms.fsla(fsla.steps.constant(0.1, 0.1, 0.1))
    newton = fsla.GaussNewtonProblem(counted)
    state = algorithm.init(newton, at, batches)
    counted.calls = fsla.OracleCounts()
    algorithm.step(newton, state, batches)
    assert counted.calls.hvp == 1
    other = fsla.GaussNewtonProblem(general)
    with pytest.raises(
        TypeError, match=r"knows its network's outputs.*model_outputs=.*without fsla.GaussNewtonProblem"
    ):
        algorithm.step(other, algorithm.init(other, at, batches), batches)
    with pytest.raises(ValueError, match=r"damping must be a finite number, at least 0\. Got -1"):
        fsla.DampedProblem(general, -1)


class NoForward(torch.autograd.Function):
    """A square that PyTorch can differentiate twice in reverse mode and never in forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@pytest.mark.parametrize("oracle", ["hvp", "mixed_hvp", "products"])
def test_weighted_problem_without_forward_mode_uses_reverse(oracle):
    def losses(omega, index):
        return NoForward.apply(omega["w"])[index]

    def weigh(lam, index):
        return lam["w"][index]

    at = Point({"w": normal(6)}, {"w": normal(6, seed=1)})
    problem = WeightedLossProblem(losses, weigh, lambda lam, omega, index: losses(omega, index).sum())
    forced = WeightedLossProblem(losses, weigh, problem.outer_loss, hvp_method="forward_over_reverse")
    index, v = torch.arange(6), {"w": normal(6, seed=2)}
    actual = getattr(problem.inner_at(at, Batch(index)), oracle)(v)
    expected = {"hvp": 2 * at.lam["w"] * v["w"] / 6, "mixed_hvp": 2 * at.omega["w"] * v["w"] / 6}
    parts = zip(("hvp", "mixed_hvp"), actual, strict=True) if oracle == "products" else [(oracle, actual)]
    for name, value in parts:
        assert torch.allclose(value["w"], expected[name])
    with pytest.raises(NotImplementedError):
        getattr(forced.inner_at(at, Batch(index)), oracle)(v)


def test_weighted_problem_length_mismatch_raises():
    problem, _, at = make()
    scalar = WeightedLossProblem(
        lambda omega, i: problem.per_sample_loss(omega, i).mean(), problem.sample_weight, problem.outer_loss
    )
    with pytest.raises(ValueError, match=r"one number for each sample.*\(\) and \(2,\).*reduction='none'"):
        _ = scalar.inner_at(at, Batch(torch.arange(2))).grad_omega


def test_weighted_problem_weights_without_lam_raise():
    problem, _, at = make()
    free = WeightedLossProblem(
        problem.per_sample_loss, lambda lam, i: torch.ones(len(i), dtype=F64), problem.outer_loss
    )
    with pytest.raises(ValueError, match="must depend on lam"):
        free.inner_at(at, Batch(torch.arange(2))).mixed_hvp(at.omega)


@pytest.mark.parametrize("index", [torch.tensor([0.0]), torch.ones(30, dtype=torch.bool), [0, 1], torch.tensor(3)])
def test_weighted_problem_row_index_invalid_raises(index):
    problem, _, at = make(kind="rows")
    with pytest.raises(TypeError, match="row_index must return the samples' indices"):
        problem.inner_at(at, Batch(index))


def test_weighted_problem_row_index_needs_row_per_sample():
    problem, _, at = make(kind="rows")
    with pytest.raises(ValueError, match=r"a row for each sample. \['c'\] have none"):
        problem.inner_at(Point({**at.lam, "c": torch.tensor(1.0)}, at.omega), Batch(torch.arange(3)))
