import gc
import itertools
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsla
from fsla import Batch, Point, Problem
from fsla import _tree as tree
from fsla_reproduction.problems import LeastSquares, Quadratic, Synthetic
from support import F64, network, normal, ridge_logistic


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_oracles_match_closed_form(p, n, seed):
    q = Quadratic.random(p, n, seed=seed)
    at = q.point(normal(p, seed=1), normal(n, seed=2))
    v, u = {"omega": normal(n, seed=3)}, {"lam": normal(p, seed=4)}
    for actual, exact in ((q.losses().inner_at(at, Batch(None)), q.inner_at(at)),):
        assert torch.allclose(actual.value, exact.value)
        assert torch.allclose(actual.grad_omega["omega"], exact.grad_omega["omega"])
        assert torch.allclose(actual.hvp(v)["omega"], exact.hvp(v)["omega"])
        assert torch.allclose(actual.mixed_hvp(v)["lam"], exact.mixed_hvp(v)["lam"])
        assert torch.allclose(actual.mixed_hvp_transpose(u)["omega"], exact.mixed_hvp_transpose(u)["omega"])
        h, j = actual.products(v)
        assert torch.allclose(h["omega"], exact.hvp(v)["omega"])
        assert torch.allclose(j["lam"], exact.mixed_hvp(v)["lam"])
    actual, exact = q.losses().outer_at(at, Batch(None)), q.outer_at(at)
    assert torch.allclose(actual.value, exact.value)
    assert torch.allclose(actual.grad_lam["lam"], exact.grad_lam["lam"])
    assert torch.allclose(actual.grad_omega["omega"], exact.grad_omega["omega"])


@pytest.mark.parametrize("make", [ridge_logistic, network])
def test_products_on_many_tensors_match_dense_derivatives(make):
    problem, at, train, _ = make()

    def flat_loss(lam, omega):
        return problem.inner_loss(tree.unflatten(lam, at.lam), tree.unflatten(omega, at.omega), train)

    flat = tree.flatten(at.lam), tree.flatten(at.omega)
    (_, J), (_, H) = torch.autograd.functional.hessian(flat_loss, flat)
    v, u = tree.unflatten(normal(tree.size(at.omega)), at.omega), tree.unflatten(normal(tree.size(at.lam)), at.lam)
    G = problem.inner_at(at, Batch(train))
    assert torch.allclose(tree.flatten(G.hvp(v)), H @ tree.flatten(v), atol=1e-12)
    assert torch.allclose(tree.flatten(G.mixed_hvp(v)), J @ tree.flatten(v), atol=1e-12)
    assert torch.allclose(tree.flatten(G.mixed_hvp_transpose(u)), J.T @ tree.flatten(u), atol=1e-12)


def test_least_squares_problem_matches_closed_form():
    for data, at in (
        (s := Synthetic.draw(3, rows=50), s.at),
        (LeastSquares.draw(1, rows=40), Point({"lam": normal(4)}, {"omega": normal(5)})),
    ):
        rows = torch.arange(40)
        G, exact = data.losses().inner_at(at, Batch(rows)), data.quadratic().inner_at(at)
        F, outer = data.losses().outer_at(at, Batch(rows)), data.quadratic().outer_at(at)
        v = {"omega": normal(5, seed=5)}
        assert torch.allclose(G.grad_omega["omega"], exact.grad_omega["omega"])
        assert torch.allclose(G.hvp(v)["omega"], exact.hvp(v)["omega"])
        assert torch.allclose(G.mixed_hvp(v)["lam"], exact.mixed_hvp(v)["lam"])
        assert torch.allclose(F.grad_omega["omega"], outer.grad_omega["omega"])
        assert torch.allclose(F.grad_lam["lam"], outer.grad_lam["lam"])


class Calls:
    """A loss that counts its evaluations."""

    def __init__(self, loss):
        self.loss, self.count = loss, 0

    def __call__(self, lam, omega, batch):
        self.count += 1
        return self.loss(lam, omega, batch)


def test_oracles_are_lazy_and_share_one_graph():
    inner = Calls(lambda lam, omega, batch: (lam["a"] * omega["w"].square()).sum())
    outer = Calls(lambda lam, omega, batch: omega["w"].square().sum())
    problem, at = Problem(inner, outer), Point({"a": torch.ones(2)}, {"w": torch.ones(2)})
    v = {"w": torch.ones(2)}
    problem.select_mode(at, Batch(None))
    for _ in range(2):  # nothing is remembered from one point to the next
        inner.count = outer.count = 0
        G, F = problem.inner_at(at, Batch(None)).linearized(), problem.outer_at(at, Batch(None))
        assert (inner.count, outer.count) == (0, 0)
        for _ in range(3):
            _ = G.grad_omega, G.hvp(v), G.mixed_hvp(v), G.products(v), G.value, F.grad_omega, F.grad_lam, F.value
        assert (inner.count, outer.count) == (1, 1)


def test_view_without_linearize_rebuilds_graph():
    inner = Calls(lambda lam, omega, batch: (lam["a"] * omega["w"].square()).sum())
    problem = Problem(inner, GOOD_F)
    at, v = Point({"a": torch.ones(2)}, {"w": torch.ones(2)}), {"w": torch.ones(2)}
    problem.select_mode(at, Batch(None))
    inner.count = 0
    G = problem.inner_at(at, Batch(None))
    _ = G.hvp(v), G.grad_omega, G.value  # the first product leaves the gradient and the value
    assert inner.count == 1
    _ = G.hvp(v)
    assert inner.count == 2


def test_problem_after_run_is_unchanged():
    problem, at, train, valid = network()
    problem.select_mode(at, Batch(train))
    before = dict(vars(problem))
    batches = fsla.StepBatches.shared(train, valid)
    for name in ("fsla", "cg", "bp", "soba"):
        algorithm = fsla.algorithms.get_algorithm(name)(fsla.steps.constant(0.1, 0.1, 0.1, 0.5))
        algorithm.step(problem, algorithm.init(problem, at, batches), batches)
    fsla.hypergradient(problem, at, train, valid, "forward_unrolled", num_steps=2)
    assert vars(problem) == before


def test_lam_gradient_of_some_batches_only_is_not_zero():
    outer = lambda lam, omega, batch: (omega["w"] * (lam["a"] if batch else 1)).square().sum()  # noqa: E731
    problem = Problem(GOOD_G, outer)
    assert torch.equal(problem.outer_at(AT, Batch(False)).grad_lam["a"], torch.zeros(2))
    assert torch.equal(problem.outer_at(AT, Batch(True)).grad_lam["a"], torch.full((2,), 2.0))


def test_loss_rebinding_arguments_has_no_side_effect():
    def inner(lam, omega, batch):
        lam["a"] = 2 * lam["a"]
        omega["w"] = omega["w"] ** 2
        return (lam["a"] * omega["w"]).sum()

    plain = Problem(lambda lam, omega, batch: (2 * lam["a"] * omega["w"] ** 2).sum(), GOOD_F)
    at = Point({"a": normal(2)}, {"w": normal(2, seed=1)})
    v = {"w": normal(2, seed=2)}
    for hvp_method in ("auto", "forward_over_reverse", "reverse_over_reverse", "finite_difference"):
        G, H = Problem(inner, GOOD_F, hvp_method=hvp_method).inner_at(at, Batch(None)), plain.inner_at(at, Batch(None))
        for _ in range(2):
            assert torch.allclose(G.hvp(v)["w"], H.hvp(v)["w"])
            assert torch.allclose(G.mixed_hvp(v)["a"], H.mixed_hvp(v)["a"])
            assert torch.allclose(G.grad_omega["w"], H.grad_omega["w"])
            assert torch.allclose(G.grad_lam["a"], H.grad_lam["a"])


@pytest.mark.parametrize("make", [ridge_logistic, network])
def test_inner_first_derivatives_separate_or_joint_agree(make):
    problem, at, train, _ = make()
    lam = {name: t.clone().requires_grad_() for name, t in at.lam.items()}
    value = problem.inner_loss(lam, at.omega, train)
    expected = dict(zip(lam, torch.autograd.grad(value, list(lam.values())), strict=True))
    for hvp_method in ("reverse_over_reverse", "forward_over_reverse", "finite_difference"):
        G = Problem(problem.inner_loss, problem.outer_loss, hvp_method=hvp_method).inner_at(at, Batch(train))
        grad, d_lam = G.gradients()
        for name, t in expected.items():
            assert torch.allclose(G.grad_lam[name], t)
            assert torch.allclose(d_lam[name], t)
        for name, t in problem.inner_at(at, Batch(train)).grad_omega.items():
            assert torch.allclose(grad[name], t)


@pytest.mark.parametrize("hvp_method", ["forward_over_reverse", "reverse_over_reverse"])
def test_products_in_any_order_are_equal(hvp_method):
    """The first product frees the graph, and later ones build it again."""
    v, u = {"w": normal(3, seed=1)}, {"a": normal(3, seed=2)}
    at = Point({"a": normal(3)}, {"w": normal(3, seed=3)})
    queries = {
        "grad_omega": lambda G: G.grad_omega["w"],
        "value": lambda G: G.value,
        "hvp": lambda G: G.hvp(v)["w"],
        "mixed_hvp": lambda G: G.mixed_hvp(v)["a"],
        "products": lambda G: torch.cat([G.products(v)[0]["w"], G.products(v)[1]["a"]]),
        "mixed_hvp_transpose": lambda G: G.mixed_hvp_transpose(u)["w"],
    }

    def problem():
        return Problem(
            lambda lam, omega, _: (lam["a"] * omega["w"] ** 3).sum(), lambda *a: a[1]["w"].sum(), hvp_method=hvp_method
        )

    separate = {name: ask(problem().inner_at(at, Batch(None))) for name, ask in queries.items()}
    assert torch.allclose(separate["hvp"], 6 * at.lam["a"] * at.omega["w"] * v["w"])
    assert torch.allclose(separate["mixed_hvp"], 3 * at.omega["w"] ** 2 * v["w"])
    for order in itertools.permutations(queries):
        G = problem().inner_at(at, Batch(None))
        for name in order:
            assert torch.allclose(queries[name](G), separate[name]), (order, name)


def test_rejected_product_changes_nothing():
    problem = Problem(lambda lam, omega, _: (lam["a"] * omega["w"] ** 3).sum(), lambda *a: a[1]["w"].sum())
    G = problem.inner_at(Point({"a": torch.ones(2)}, {"w": torch.ones(2)}), Batch(None))
    with pytest.raises(ValueError, match="same keys"):
        G.hvp({"x": torch.ones(2)})
    assert torch.equal(G.hvp({"w": torch.ones(2)})["w"], torch.full((2,), 6.0))


def test_graph_after_only_product_is_freed():
    saved = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            saved.append(weakref.ref(ctx))
            return x * x

        @staticmethod
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0]

    problem = Problem(lambda lam, omega, _: (lam["a"] * Square.apply(omega["w"])).sum(), lambda *a: a[1]["w"].sum())
    G = problem.inner_at(Point({"a": torch.ones(2)}, {"w": torch.ones(2)}), Batch(None))
    assert torch.equal(G.hvp({"w": torch.ones(2)})["w"], torch.full((2,), 2.0))
    assert torch.equal(G.grad_omega["w"], torch.full((2,), 2.0))
    gc.collect()
    assert all(ref() is None for ref in saved)


def test_outer_loss_without_lam_skips_lam_gradient():
    outer = Calls(lambda lam, omega, batch: omega["w"].square().sum())
    at = Point({"a": torch.ones(2)}, {"w": torch.ones(2)})
    for outer_uses_lam, count in ((False, 0), (True, 5)):
        problem = Problem(GOOD_G, outer, outer_uses_lam=outer_uses_lam)
        for _ in range(5):
            assert torch.equal(problem.outer_at(at, Batch(None)).grad_lam["a"], torch.zeros(2))
        assert outer.count == count


def test_losses_under_no_grad_leave_no_graph():
    problem, at, train, valid = ridge_logistic()
    with torch.no_grad():
        G, F = problem.inner_at(at, Batch(train)), problem.outer_at(at, Batch(valid))
        out = [
            G.grad_omega,
            G.hvp(at.omega),
            G.mixed_hvp(at.omega),
            G.mixed_hvp_transpose(at.lam),
            F.grad_lam,
            F.grad_omega,
            *G.products(at.omega),
        ]
    assert not any(t.requires_grad for x in out for t in x.values())


def test_gradient_of_unreached_tensor_is_zero():
    problem = Problem(
        lambda lam, omega, batch: (lam["a"] * omega["w"]).square().sum(), lambda lam, omega, batch: omega["w"].sum()
    )
    at = Point({"a": torch.ones(2), "spare": torch.ones(3)}, {"w": torch.ones(2), "spare": torch.ones(1)})
    G = problem.inner_at(at, Batch(None))
    v = {"w": torch.ones(2), "spare": torch.ones(1)}
    assert torch.equal(G.grad_omega["spare"], torch.zeros(1))
    assert torch.equal(G.hvp(v)["spare"], torch.zeros(1))
    assert torch.equal(G.mixed_hvp(v)["spare"], torch.zeros(3))
    assert torch.equal(problem.outer_at(at, Batch(None)).grad_omega["spare"], torch.zeros(1))


AT = Point({"a": torch.ones(2)}, {"w": torch.ones(2)})
GOOD_G = lambda lam, omega, batch: (lam["a"] * omega["w"].square()).sum()  # noqa: E731
GOOD_F = lambda lam, omega, batch: omega["w"].square().sum()  # noqa: E731


@pytest.mark.parametrize(
    ("inner", "outer", "error", "text"),
    [
        (lambda lam, omega, b: omega["w"] * lam["a"], GOOD_F, ValueError, r"inner loss G.*0-d.*\(2,\).*\.mean\(\)"),
        (lambda lam, omega, b: 1.0, GOOD_F, TypeError, "inner loss G.*0-d tensor.*float"),
        (lambda lam, omega, b: GOOD_G(lam, omega, b) / 0, GOOD_F, ValueError, "inner loss G must be finite.*inf"),
        (GOOD_G, lambda lam, omega, b: omega["w"].sum() * torch.nan, ValueError, "outer loss F must be finite.*nan"),
        (lambda lam, omega, b: lam["a"].sum(), GOOD_F, ValueError, "inner loss G must depend on omega"),
        (lambda lam, omega, b: torch.tensor(1.0), GOOD_F, ValueError, "inner loss G must depend on omega"),
        (lambda lam, omega, b: GOOD_G(lam, {"w": omega["w"].detach()}, b), GOOD_F, ValueError, "must depend on omega"),
        (GOOD_G, lambda lam, omega, b: lam["a"].sum(), ValueError, "outer loss F must depend on omega"),
        (GOOD_G, lambda lam, omega, b: torch.tensor(1.0), ValueError, "outer loss F must depend on omega"),
        (lambda lam, omega, b: omega["w"].square().sum(), GOOD_F, ValueError, "inner loss G must depend on lam"),
        (lambda lam, omega, b: omega["w"].square().sum() + lam["a"].sum(), GOOD_F, ValueError, "must depend on lam"),
    ],
)
@pytest.mark.parametrize("entry_point", ["hypergradient", "init"])
def test_invalid_loss_value_raises(inner, outer, error, text, entry_point):
    def use(problem):
        if entry_point == "hypergradient":
            return fsla.hypergradient(problem, AT, None, None, "cg", num_steps=1)
        algorithm, batches = (
            fsla.algorithms.fsla(fsla.steps.constant(0.1, 0.1, 0.1)),
            fsla.StepBatches.shared(None, None),
        )
        return algorithm.step(problem, algorithm.init(problem, AT, batches), batches)

    with pytest.raises(error, match=text):
        use(Problem(inner, outer))


def test_problem_with_uncallable_loss_raises():
    with pytest.raises(TypeError, match=r"outer_loss must be callable.*int"):
        Problem(GOOD_G, 3)


def test_product_with_malformed_vector_raises():
    G = Problem(GOOD_G, GOOD_F).inner_at(AT, Batch(None))
    for v, text in (
        ({"x": torch.ones(2)}, "same keys"),
        ({"w": torch.ones(1)}, "shape"),
        ({"w": torch.ones(2, dtype=F64)}, "dtype"),
    ):
        with pytest.raises(ValueError, match=text):
            G.hvp(v)
        with pytest.raises(ValueError, match=text):
            G.mixed_hvp(v)
