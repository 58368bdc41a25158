"""The structured problem gives the numbers of the general one."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fsla
from fsla import Point, Problem, Sample, WeightedProblem
from fsla import _tree as tree
from support import F64, classifier, normal


def make(dtype=F64, ridge=True, kind="whole", mode="auto"):
    """The weighted problem in one of its forms, the general problem of the same losses, and a point.

    kind: "whole" hands λ over, "rows" the batch's rows of it, "outputs" does so too and knows the network's outputs.
    """
    omega, scores, of_scores = classifier(30, dtype)

    def each(omega, index):
        return of_scores(scores(omega, index), index)

    def outer(lam, omega, index):
        return each(omega, index).mean()

    regulariser = (lambda omega: 0.1 * sum(t.square().sum() for t in omega.values())) if ridge else None
    at = Point({"w": normal(30, seed=1).to(dtype), "scale": normal(30, seed=4).to(dtype)}, omega)
    more = {"regulariser": regulariser, "mode": mode}
    if kind == "whole":
        problem = WeightedProblem(
            each, lambda lam, index: lam["w"][index].sigmoid() * lam["scale"][index].exp(), outer, **more
        )
    else:
        more |= {"rows": lambda index: index, "direct": False}
        weigh = lambda lam, index: lam["w"].sigmoid() * lam["scale"].exp()  # noqa: E731
        if kind == "rows":
            problem = WeightedProblem(each, weigh, outer, **more)
        else:
            problem = WeightedProblem(of_scores, weigh, outer, outputs=scores, **more)
    return problem, Problem(problem.inner_loss, problem.outer_loss, mode="reverse"), at


KINDS = ["whole", "rows", "outputs"]


@pytest.mark.parametrize("mode", ["auto", "forward", "reverse"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ridge", [True, False])
@pytest.mark.parametrize("index", [torch.arange(30), torch.tensor([3, 3, 7, 0])])  # a sample may be drawn twice
def test_every_oracle_is_that_of_the_general_problem(ridge, index, kind, mode):
    problem, general, at = make(ridge=ridge, kind=kind, mode=mode)
    v = tree.unflatten(normal(tree.size(at.omega), seed=2), at.omega)
    u = tree.unflatten(normal(tree.size(at.lam), seed=3), at.lam)
    H = general.inner_at(at, index)
    expected = {"cross": H.cross(v), "hvp": H.hvp(v), "grad": H.grad, "cross_t": H.cross_t(u)}
    for first in ("cross", "hvp", "grad", "hvp_cross", "cross_t"):  # whatever is asked for first
        G = problem.inner_at(at, index)
        for name in dict.fromkeys((first, "hvp", "cross", "grad", "hvp_cross", "cross_t")):
            found = G.grad if name == "grad" else getattr(G, name)(u if name == "cross_t" else v)
            pairs = zip(("hvp", "cross"), found, strict=True) if name == "hvp_cross" else [(name, found)]
            for oracle, value in pairs:
                value = tree.dense(value)
                assert float(tree.norm(tree.sub(value, expected[oracle]))) < 1e-13
                assert not any(t.requires_grad for t in value.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["auto", "forward"])
@pytest.mark.parametrize("name", ["fsla", "cg", "bp", "soba", "ma_soba", "single_loop"])
def test_algorithms_take_the_same_steps(name, kind, mode):
    problem, general, at = make(kind=kind, mode=mode)
    solver = fsla.algorithms.ALL[name](fsla.steps.constant(0.5, 0.1, 0.1, 0.5))
    g = torch.Generator().manual_seed(0)
    draw = lambda: torch.randint(30, (8,), generator=g)  # noqa: E731
    samples = [Sample.draw("grouped", draw, draw) for _ in range(6)]
    a, b = solver.init(problem, at, samples[0]), solver.init(general, at, samples[0])
    for xi in samples:
        a, b = solver.step(problem, a, xi), solver.step(general, b, xi)
    for x, y in ((a.at.lam, b.at.lam), (a.at.omega, b.at.omega), (a.d, b.d)):
        assert float(tree.norm(tree.sub(x, y))) < 1e-13


def test_a_hypergradient_is_written_out():
    problem, general, at = make(kind="rows")
    index = torch.tensor([3, 3, 7, 0])
    found, expected = (
        fsla.hypergradient(p, at, index, index, "unrolled", steps=3, beta=0.1) for p in (problem, general)
    )
    assert isinstance(found.value["w"], torch.Tensor)
    assert float(tree.norm(tree.sub(found.value, expected.value))) < 1e-13


class Large(TorchDispatchMode):
    """Notes the storages of a size that operations make."""

    def __init__(self, size):
        super().__init__()
        self.size, self.kept = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor) and t.numel() >= self.size:
                self.kept.append(t)  # kept alive, so that no storage is used twice
        return out


@pytest.mark.parametrize("momentum", ["storm", "average", "none"])
def test_a_step_makes_nothing_of_the_data_sets_size_but_lam_and_d(momentum):
    n = 5000
    problem, _, at = make(kind="outputs")
    at = Point({name: torch.zeros(n, dtype=F64) for name in ("w", "scale")}, at.omega)
    solver = fsla.algorithms.fsla(fsla.steps.constant(0.5, 0.1, 0.1, 0.5), momentum=momentum)
    draw = lambda: torch.tensor([1, 2, 2, 5])  # noqa: E731
    state = solver.init(problem, at, Sample.draw("grouped", draw, draw))
    with Large(n) as seen:
        after = solver.step(problem, state, Sample.draw("grouped", draw, draw))
    old = {t.untyped_storage().data_ptr() for x in (state.at.lam, state.d) for t in x.values()}
    new = {t.untyped_storage().data_ptr() for t in seen.kept} - old
    assert new == {t.untyped_storage().data_ptr() for x in (after.at.lam, after.d) for t in x.values()}


def gauss_newton(problem, at, index):
    """Z'ᵀ (∂²_z mean w l) Z' + ∂²r as a matrix, each factor by its own Jacobian."""
    flat, weights = tree.flatten(at.omega), problem.sample_weights(problem.of_batch(at.lam, index), index)
    z = lambda flat: problem.outputs(tree.unflatten(flat, at.omega), index).reshape(-1)  # noqa: E731
    top = lambda z: (weights * problem.sample_losses(z.reshape(len(index), -1), index)).mean()  # noqa: E731
    jacobian = torch.autograd.functional.jacobian(z, flat)
    curve = torch.autograd.functional.hessian(top, z(flat))
    out = jacobian.T @ curve @ jacobian
    if problem.regulariser is not None:
        out = out + torch.autograd.functional.hessian(
            lambda flat: problem.regulariser(tree.unflatten(flat, at.omega)), flat
        )
    return out


@pytest.mark.parametrize("ridge", [True, False])
def test_the_gauss_newton_product_is_that_of_the_matrix(ridge):
    problem, general, at = make(kind="outputs", ridge=ridge)
    index = torch.tensor([3, 3, 7, 0, 11])
    matrix = gauss_newton(problem, at, index)
    for seed in range(3):
        v = tree.unflatten(normal(tree.size(at.omega), seed=seed), at.omega)
        G = problem.inner_at(at, index)
        assert float((tree.flatten(G.gnvp(v)) - matrix @ tree.flatten(v)).norm()) < 1e-12
        assert float(tree.norm(tree.sub(G.grad, general.inner_at(at, index).grad))) < 1e-13  # left behind
    smallest = float(torch.linalg.eigvalsh(matrix)[0])
    assert smallest > (0.19 if ridge else -1e-12)


def test_along_negative_curvature_v_runs_away_with_the_hessian_and_stays_with_gauss_newton():
    problem, _, at = make(kind="outputs", ridge=False)
    index = torch.tensor([0, 1, 2, 3, 4, 5])
    H = problem.inner_at(at, index)
    hessian = torch.stack([tree.flatten(H.hvp(e)) for e in tree.basis(at.omega)])
    assert float(torch.linalg.eigvalsh(hessian)[0]) < -1e-3  # the network's own curvature
    xi, norms = Sample.full(index, index), {}
    for curvature in ("hessian", "gauss-newton"):
        solver = fsla.algorithms.fsla(fsla.steps.constant(0.0, 0.0, 1.0), momentum="none")
        curved = fsla.Damped(fsla.GaussNewton(problem) if curvature == "gauss-newton" else problem, 1e-2)
        state = solver.init(curved, at, xi)
        for _ in range(200):
            state = solver.step(curved, state, xi)
        norms[curvature] = float(tree.norm(state.memory))
    p = float(tree.norm(problem.outer_at(at, index).d_omega))
    assert norms["gauss-newton"] < p / 1e-2
    assert norms["hessian"] > 100 * norms["gauss-newton"]


def test_damping_is_added_to_the_diagonal():
    problem, _, at = make(kind="outputs")
    index = torch.arange(12)
    v = tree.unflatten(normal(tree.size(at.omega)), at.omega)
    plain, damped = problem.inner_at(at, index), fsla.Damped(problem, 0.5).inner_at(at, index)
    expected = tree.axpy(0.5, v, plain.hvp(v))
    product, cross = damped.hvp_cross(v)
    assert float(tree.norm(tree.sub(damped.hvp(v), expected))) < 1e-14
    assert float(tree.norm(tree.sub(product, expected))) < 1e-14
    assert float(tree.norm(tree.sub(tree.dense(cross), tree.dense(plain.cross(v))))) < 1e-14


def test_curvature_is_counted_and_its_errors_are_clear():
    problem, general, at = make(kind="outputs")
    xi, counted = Sample.full(torch.arange(5), torch.arange(5)), fsla.Counted(problem)
    solver = fsla.algorithms.fsla(fsla.steps.constant(0.1, 0.1, 0.1))
    newton = fsla.GaussNewton(counted)
    state = solver.init(newton, at, xi)
    counted.calls = fsla.Counts()
    solver.step(newton, state, xi)
    assert counted.calls.hvp == 1
    other = fsla.GaussNewton(general)
    with pytest.raises(TypeError, match=r"knows its network's outputs.*outputs=.*without fsla.GaussNewton"):
        solver.step(other, solver.init(other, at, xi), xi)
    with pytest.raises(ValueError, match=r"damping must be a finite number, at least 0\. Got -1"):
        fsla.Damped(general, -1)


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


@pytest.mark.parametrize("oracle", ["hvp", "cross", "hvp_cross"])
def test_where_there_is_no_forward_mode_reverse_mode_is_used(oracle):
    def losses(omega, index):
        return NoForward.apply(omega["w"])[index]

    def weigh(lam, index):
        return lam["w"][index]

    at = Point({"w": normal(6)}, {"w": normal(6, seed=1)})
    problem = WeightedProblem(losses, weigh, lambda lam, omega, index: losses(omega, index).sum())
    forced = WeightedProblem(losses, weigh, problem.outer_loss, mode="forward")
    index, v = torch.arange(6), {"w": normal(6, seed=2)}
    found = getattr(problem.inner_at(at, index), oracle)(v)
    expected = {"hvp": 2 * at.lam["w"] * v["w"] / 6, "cross": 2 * at.omega["w"] * v["w"] / 6}
    parts = zip(("hvp", "cross"), found, strict=True) if oracle == "hvp_cross" else [(oracle, found)]
    for name, value in parts:
        assert torch.allclose(value["w"], expected[name])
    with pytest.raises(NotImplementedError):
        getattr(forced.inner_at(at, index), oracle)(v)


def test_losses_and_weights_must_be_vectors_of_one_length():
    problem, _, at = make()
    scalar = WeightedProblem(
        lambda omega, i: problem.sample_losses(omega, i).mean(), problem.sample_weights, problem.outer_loss
    )
    with pytest.raises(ValueError, match=r"one number for each sample.*\(\) and \(2,\).*reduction='none'"):
        _ = scalar.inner_at(at, torch.arange(2)).grad


def test_weights_must_depend_on_lam():
    problem, _, at = make()
    free = WeightedProblem(problem.sample_losses, lambda lam, i: torch.ones(len(i), dtype=F64), problem.outer_loss)
    with pytest.raises(ValueError, match="must depend on lam"):
        free.inner_at(at, torch.arange(2)).cross(at.omega)


@pytest.mark.parametrize("index", [torch.tensor([0.0]), torch.ones(30, dtype=torch.bool), [0, 1], torch.tensor(3)])
def test_rows_must_be_indices(index):
    problem, _, at = make(kind="rows")
    with pytest.raises(TypeError, match="rows must return the samples' indices"):
        problem.inner_at(at, index)


def test_with_rows_lam_has_a_row_for_each_sample():
    problem, _, at = make(kind="rows")
    with pytest.raises(ValueError, match=r"a row for each sample. \['c'\] have none"):
        problem.inner_at(Point({**at.lam, "c": torch.tensor(1.0)}, at.omega), torch.arange(3))
