"""What a step may ask: views of one point, one a question; values that passes leave; points that move in place."""

import gc
import weakref

import pytest
import torch

import fsla
from fsla import (
    Batch,
    CountedProblem,
    DampedProblem,
    FiniteDifferenceProblem,
    OracleCounts,
    Point,
    Problem,
    StepBatches,
)
from fsla import _tree as tree
from fsla.problems import ForwardingProblem
from fsla.steps import StepContext, Variable, descend
from support import normal, ridge_logistic

RATES = fsla.steps.constant(0.05, 0.1, 0.1, 0.5)
UPDATES = fsla.algorithms.fsla(RATES).updates


class Watched(ForwardingProblem):
    """Notes which views are created, and which of them move buffers."""

    def __init__(self, problem):
        super().__init__(problem)
        self.views = []

    def inner_at(self, at, batch, *, update_buffers=False):
        self.views.append(("inner", update_buffers))
        return super().inner_at(at, batch, update_buffers=update_buffers)

    def outer_at(self, at, batch):
        self.views.append(("outer", False))
        return super().outer_at(at, batch)


@pytest.fixture
def case():
    problem, at, train, valid = ridge_logistic()
    watched = Watched(problem)
    batches = StepBatches.of((train,), (valid,), None, (valid,), (train,))
    return watched, at, batches, StepContext(watched, batches, RATES.rates(0), UPDATES, RATES)


def moved(at):
    return Point(at.lam, tree.scale(1.1, at.omega))


def test_step_context_caches_view_by_point_and_batch(case):
    """Two oracles at one point on one batch are one pass."""
    watched, at, batches, step = case
    view = step.inner_at(at, batches.inner_grad[0])
    assert step.inner_at(at, batches.hvp[0]) is view  # hvp repeats inner_grad
    assert step.inner_at(at, batches.mixed_hvp[0]) is not view
    assert step.outer_at(at, batches.outer_grad_omega[0]) is step.outer_at(at, batches.outer_grad_omega[0])
    assert len(watched.views) == 3


def test_step_context_frees_views_with_point(case):
    """A view holds a graph, or a gradient of the size of ω: those of one point at a time are held."""
    _, at, batches, step = case
    view = step.inner_at(at, batches.inner_grad[0])
    step.inner_at(moved(at), batches.inner_grad[0])
    assert step.inner_at(at, batches.inner_grad[0]) is not view
    same = Point(at.lam, at.omega)  # A point is its own identity, whatever it holds.
    view = step.inner_at(at, batches.inner_grad[0])
    assert step.inner_at(same, batches.inner_grad[0]) is not view


@pytest.mark.parametrize("update_buffers", [True, False])
def test_step_context_updates_buffers_in_first_inner_view_only(case, update_buffers):
    """Running statistics move once a step, as in plain training; the start of a run moves none."""
    watched, at, batches, _ = case
    step = StepContext(watched, batches, RATES.rates(0), UPDATES, RATES, update_buffers=update_buffers)
    step.outer_at(at, batches.outer_grad_omega[0])
    part = step.reading(batches)
    part.inner_at(at, batches.inner_grad[0])
    step.inner_at(at, batches.inner_grad[0])
    step.inner_at(moved(at), batches.inner_grad[0])
    assert watched.views == [("outer", False), ("inner", update_buffers), ("inner", False), ("inner", False)]


def test_step_context_reading_is_isolated(case):
    """A part of a step that reads other batches, of a wrapped problem, leaves the step as it is."""
    _, at, batches, step = case
    view = step.inner_at(at, batches.inner_grad[0])
    other = StepBatches.shared(batches.mixed_hvp[0].data, batches.outer_grad_lam[0].data)
    part = step.reading(other, lambda problem: DampedProblem(problem, 0.5))
    assert part.batches is other
    assert step.batches is batches
    v = at.omega
    damped = part.inner_at(at, batches.inner_grad[0])
    assert damped is not view
    expected = tree.axpy(0.5, v, view.hvp(v))
    assert float(tree.norm(tree.sub(damped.hvp(v), expected))) < 1e-13
    assert step.inner_at(at, batches.inner_grad[0]) is view
    assert part.rates == step.rates


def test_step_context_losses_are_first_values(case):
    """The losses of a step are of the point where it began; a part of the step counts, and nothing is passed anew."""
    watched, at, batches, step = case
    assert step.losses() == (None, None)
    step.inner_at(at, batches.inner_grad[0])
    assert step.losses() == (None, None)  # The view was asked for nothing.
    _ = step.inner_at(at, batches.inner_grad[0]).grad_omega
    _ = step.inner_at(moved(at), batches.inner_grad[0]).grad_omega
    _ = step.reading(batches).outer_at(at, batches.outer_grad_omega[0]).grad_omega
    passes = len(watched.views)
    inner, outer = step.losses()
    assert len(watched.views) == passes
    assert torch.equal(inner, watched.problem.inner_at(at, batches.inner_grad[0]).value)
    assert torch.equal(outer, watched.problem.outer_at(at, batches.outer_grad_omega[0]).value)


def test_descend_uses_batches_in_order(case):
    """Each move has its own batch where there are several, and the trajectory is noted where it is asked for."""
    watched, at, batches, _ = case
    two = batches._replace(inner_grad=(batches.inner_grad[0], batches.mixed_hvp[0]))
    step = StepContext(watched, two, RATES.rates(0), UPDATES, RATES)
    there, omega = descend(step, at, Variable(at.omega), 2, keep=dict)
    expected = at.omega
    for batch in two.inner_grad:
        expected = tree.axpy(-0.1, watched.problem.inner_at(Point(at.lam, expected), batch).grad_omega, expected)
    assert all(torch.equal(omega.value[name], t) for name, t in expected.items())
    assert [size for _, size in there.trajectory] == [0.1, 0.1]
    assert there.trajectory[0][0] == at.omega


# ----------------------------------------------------------------------------------------------------- values and moves


class Calls:
    def __init__(self, loss):
        self.loss, self.count = loss, 0

    def __call__(self, *arguments):
        self.count += 1
        return self.loss(*arguments)


def quartic(**more):
    inner = Calls(lambda lam, omega, b: (lam["a"] * omega["w"] ** 4).sum())
    outer = Calls(lambda lam, omega, b: omega["w"].square().sum() + lam["a"].sum())
    problem = Problem(inner, outer, **more)
    at = Point({"a": 1 + normal(3).abs()}, {"w": normal(3, seed=1)})
    return problem, at, inner


ASK = {
    "grad_omega": lambda view, v: view.grad_omega,
    "grad_lam": lambda view, v: view.grad_lam,
    "hvp": lambda view, v: view.hvp(v),
    "products": lambda view, v: view.products(v),
    "value": lambda view, v: view.value,
}


@pytest.mark.parametrize("hvp_method", ["autograd", "forward_over_reverse"])
@pytest.mark.parametrize("ask", ASK)
def test_known_value_is_value_of_last_pass(hvp_method, ask):
    """A run reports the losses of its passes, and pays for none."""
    problem, at, inner = quartic(hvp_method=hvp_method)
    problem.select_mode(at, Batch(None))
    inner.count = 0
    view = problem.inner_at(at, Batch(None))
    assert view.known_value is None
    assert inner.count == 0
    ASK[ask](view, {"w": normal(3, seed=2)})
    assert inner.count == 1
    value = float((at.lam["a"] * at.omega["w"] ** 4).sum())
    assert float(view.known_value) == pytest.approx(value, rel=1e-14)
    assert inner.count == 1


def test_known_value_of_finite_difference_is_mean_of_ends():
    """ω itself is not passed where a product alone is asked for."""
    problem, at, inner = quartic(hvp_method="finite_difference")
    view = problem.inner_at(at, Batch(None))
    assert view.known_value is None
    view.hvp({"w": normal(3, seed=2)})
    assert inner.count == 2
    value = float((at.lam["a"] * at.omega["w"] ** 4).sum())
    assert float(view.known_value) == pytest.approx(value, rel=1e-8)
    assert inner.count == 2


def test_known_value_passes_through_wrappers():
    """A wrapped problem reports its losses too."""
    problem, at, inner = quartic()
    view = CountedProblem(DampedProblem(problem, 0.1)).inner_at(at, Batch(None))
    inner.count = 0
    assert view.known_value is None
    _ = view.grad_omega
    assert float(view.known_value) == float(problem.inner_at(at, Batch(None)).value)


@pytest.mark.parametrize("what", ["omega", "lam"])
@pytest.mark.parametrize("hvp_method", ["autograd", "forward_over_reverse", "finite_difference"])
@pytest.mark.parametrize("ask", ["grad_omega", "hvp", "products"])
def test_view_after_in_place_move_raises(what, hvp_method, ask):
    """Derivatives of another point than the one that was asked about would be silently wrong."""
    problem, at, _ = quartic(hvp_method=hvp_method)
    view = problem.inner_at(at, Batch(None))
    next(iter(getattr(at, what).values())).add_(1.0)
    with pytest.raises(RuntimeError, match="before its point moves in place"):
        ASK[ask](view, {"w": normal(3, seed=2)})
    new = problem.inner_at(Point(at.lam, at.omega), Batch(None))  # A new point is looked at anew.
    assert torch.allclose(new.grad_omega["w"], 4 * at.lam["a"] * at.omega["w"] ** 3)


def test_linearized_view_after_in_place_move_raises():
    """Its graph outlives the pass, and PyTorch watches only the tensors that a derivative reads."""
    problem = Problem(lambda lam, omega, b: (lam["a"] * omega["w"]).sum() ** 2, lambda lam, omega, b: omega["w"].sum())
    at = Point({"a": normal(3)}, {"w": normal(3, seed=1)})
    view, v = problem.inner_at(at, Batch(None)).linearized(), {"w": normal(3, seed=2)}
    view.hvp(v)
    at.omega["w"].add_(1.0)
    with pytest.raises(RuntimeError, match="before its point moves in place"):
        view.hvp(v)


def test_view_after_move_returns_cached_values():
    """What was asked before the move stays what it was."""
    problem, at, _ = quartic()
    view = problem.inner_at(at, Batch(None))
    gradient = {name: t.clone() for name, t in view.grad_omega.items()}
    at.omega["w"].add_(1.0)
    assert torch.equal(view.grad_omega["w"], gradient["w"])


def test_fixed_point_view_after_in_place_move_raises():
    """Fixed-point problems keep the same rule."""
    problem = fsla.FixedPointProblem(
        lambda lam, omega, b: {"w": (lam["a"] * omega["w"]).tanh()}, lambda lam, omega, b: omega["w"].square().sum()
    )
    at = Point({"a": normal(3)}, {"w": normal(3, seed=1)})
    view = problem.inner_at(at, Batch(None))
    at.omega["w"].add_(1.0)
    with pytest.raises(RuntimeError, match="before its point moves in place"):
        _ = view.grad_omega


# --------------------------------------------------------------------------------------------------------------- counts

PRODUCTS = {
    "hvp": OracleCounts(grad=2),
    "mixed_hvp": OracleCounts(forward=2),
    "products": OracleCounts(grad=2),
    "mixed_hvp_transpose": OracleCounts(grad=2),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("counted_outside", [True, False])
def test_counted_problem_counts_finite_differences_as_gradients(name, counted_outside):
    """Products by differences cost two gradients, or two forward passes for ∂_λ G alone, whoever wraps whom."""
    problem, at, train, _ = ridge_logistic()
    counted = CountedProblem(FiniteDifferenceProblem(problem) if counted_outside else problem, size=lambda b: 60)
    outermost = counted if counted_outside else FiniteDifferenceProblem(counted)
    direction = at.lam if name == "mixed_hvp_transpose" else at.omega
    getattr(outermost.inner_at(at, Batch(train)), name)(direction)
    expected = PRODUCTS[name]
    calls = counted.calls
    expected.inner_views, expected.outer_views = calls.inner_views, calls.outer_views
    assert calls == expected
    assert counted.samples.grad == 60 * calls.grad


def test_counted_problem_counts_outer_finite_differences():
    """The outer loss has its own names."""
    problem, at, _, valid = ridge_logistic()
    counted = CountedProblem(FiniteDifferenceProblem(problem))
    view = counted.outer_at(at, Batch(valid))
    view.hvp(at.omega)
    assert counted.calls == OracleCounts(outer_grad_omega=2, outer_views=1)
    _ = view.grad_omega  # The mean of both ends, which the product has left.
    assert counted.calls.outer_grad_omega == 2
    _ = view.grad_lam, view.grad_lam
    assert counted.calls.outer_grad_lam == 1


class ReferencedWeakly(ForwardingProblem):
    """Holds weak references to all views."""

    def __init__(self, problem):
        super().__init__(problem)
        self.views = []

    def _wrap_inner(self, view, batch):
        self.views.append(weakref.ref(view))
        return view

    _wrap_outer = _wrap_inner


@pytest.mark.parametrize("name", ["soba", "fsla", "bda"])
def test_views_of_a_step_end_with_the_step(name):
    """A cycle would keep the tensors of a step alive until the garbage collector runs, out of a GPU's sight."""
    problem, at, train, valid = ridge_logistic()
    problem = ReferencedWeakly(problem)
    algorithm = getattr(fsla.algorithms, name)(RATES)
    batches = StepBatches.shared(train, valid)
    gc.disable()
    try:
        state = algorithm.step(problem, algorithm.init(problem, at, batches), batches)
        algorithm.step(problem, state, batches)
        assert len(problem.views) >= 4
        assert not [view for view in problem.views if view() is not None]
    finally:
        gc.enable()
