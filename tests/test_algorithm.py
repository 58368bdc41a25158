"""What all algorithms have: names, the steps on which λ moves, and automatic step sizes, on trees as on a module."""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn

import fsla
from fsla import Point, Problem, StepBatches
from fsla import _tree as tree
from fsla.algorithms import _registry, get_algorithm, list_algorithms, register
from fsla.steps import Automatic, Momentum, Update
from support import F64, ClassWeights, class_weighted_loss, normal, plain_loss, ridge_logistic

RATES = fsla.steps.constant(0.05, 0.1, 0.1, 0.5)


@pytest.fixture
def _own_names(monkeypatch):
    monkeypatch.setattr(_registry, "_FACTORIES", dict(_registry._FACTORIES))


@pytest.mark.usefixtures("_own_names")
def test_register_class_sets_its_name():
    """A new algorithm is one class, known by its name everywhere."""

    @register("heavy_soba")
    @dataclass(frozen=True, kw_only=True)
    class HeavySoba(fsla.Simultaneous):
        outer_update: Update = field(default_factory=lambda: Momentum(0.9))

    assert get_algorithm("heavy_soba") is HeavySoba
    assert "heavy_soba" in list_algorithms()
    problem, at, train, valid = ridge_logistic()
    batches = StepBatches.shared(train, valid)
    algorithm = get_algorithm("heavy_soba")(step_sizes=RATES)
    state = algorithm.step(problem, algorithm.init(problem, at, batches), batches)
    assert set(state.lam.memory) == {"mean"}


@pytest.mark.usefixtures("_own_names")
def test_register_taken_name_raises():
    """Two algorithms under one name would be one, whichever was imported last; the same one may be imported again."""

    def other():
        return fsla.algorithms.soba()

    with pytest.raises(ValueError, match="'soba' belongs to soba already"):
        register("soba")(other)
    assert get_algorithm("soba") is fsla.algorithms.soba
    assert register("soba")(fsla.algorithms.soba) is fsla.algorithms.soba


@pytest.mark.parametrize("name", ["my-soba", "my soba", "2soba", ""])
def test_register_invalid_identifier_raises(name):
    """The name is also that of a test and of a page."""
    with pytest.raises(ValueError, match=f"must be an identifier. Got {name!r}"):
        register(name)


def test_get_algorithm_unknown_name_suggests_nearest():
    """A typing error is an error at once."""
    with pytest.raises(ValueError, match=r"Got 'sobba' instead\. Did you mean 'soba'"):
        get_algorithm("sobba")


# --------------------------------------------------------------------------------------------------- due and not due


@pytest.mark.parametrize("m", [1, 2, 7, 16])
def test_due_draws_one_step_per_block(m):
    """A fixed place in the block would alias with an epoch of as many steps."""
    algorithm = replace(fsla.algorithms.soba(RATES), outer_every=m)
    due = [k for k in range(200 * m) if algorithm.due(k)]
    assert [k // m for k in due] == list(range(200))
    places = Counter(k % m for k in due)
    assert len(places) == m
    assert max(places.values()) < 200 / m + 5 * (200 / m) ** 0.5
    again = replace(fsla.algorithms.fsla(RATES), outer_every=m)
    assert [k for k in range(200 * m) if again.due(k)] == due  # of the block alone


@pytest.mark.parametrize("name", ["soba", "fsla", "cg"])
def test_step_not_due_moves_omega_only(name):
    """They are plain training, and cost as much."""
    problem, at, train, valid = ridge_logistic()
    batches = StepBatches.of((train,), (valid,), None, (valid,), (train,), mode="grouped")
    algorithm = replace(get_algorithm(name)(step_sizes=RATES), outer_every=4)
    state = algorithm.init(problem, at, batches)
    for k in range(12):
        counted = fsla.CountedProblem(problem)
        after = algorithm.step(counted, state, batches)
        if not algorithm.due(k):
            assert after.lam is state.lam
            assert after.v is state.v
            assert after.direction is state.direction
            g = problem.inner_at(state.point, batches.inner_grad[0]).grad_omega
            expected = tree.axpy(-0.1, g, state.omega.value)
            assert float(tree.norm(tree.sub(after.omega.value, expected))) < 1e-15
            assert counted.calls == fsla.OracleCounts(grad=1, inner_views=1)
        else:
            assert not torch.equal(after.lam.value["log_ridge"], state.lam.value["log_ridge"])
        assert after.step_count == k + 1
        state = after


def test_outer_every_not_an_integer_raises():
    """Zero would be a block without a step."""
    with pytest.raises(ValueError, match="'outer_every' of Simultaneous must be at least 1"):
        replace(fsla.algorithms.soba(RATES), outer_every=0)


# ----------------------------------------------------------------------------------------------- automatic step sizes


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(F64)


def batch(seed):
    return normal(12, 4, seed=seed), torch.arange(12) % 3


def functional_problem():
    """The losses of the module as functions, of the same tensors in the same order."""
    model, weights = network(), ClassWeights()
    omega, net = fsla.make_functional(model)
    _, weigh = fsla.make_functional(weights)

    class Bound:
        def __init__(self, function, tensors):
            self._function, self._tensors = function, tensors
            self.w = tensors.get("w")

        def __call__(self, *inputs):
            return self._function(self._tensors, *inputs)

        def parameters(self):
            return self._tensors.values()

    def of(loss):
        return lambda lam, omega, b: loss(Bound(net, omega), Bound(weigh, lam), b)

    lam = {name: p.detach().clone() for name, p in weights.named_parameters()}
    return Problem(of(class_weighted_loss), of(plain_loss)), Point(lam, omega)


@pytest.mark.parametrize("outer_every", [1, 3])
@pytest.mark.parametrize("name", ["soba", "ma_soba", "one_step", "fsla", "single_loop"])
def test_automatic_steps_on_trees_equal_module(name, outer_every):
    """There is one core: what a user of BilevelOptimizer runs is the algorithm that the conformance tests check."""
    model, weights = network(), ClassWeights()
    sizes = Automatic(wait=False) if name == "one_step" else Automatic(block=5)
    options = {"momentum": "none"} if name == "fsla" else {}
    algorithm = get_algorithm(name)(step_sizes=sizes, **options)
    bilevel = fsla.BilevelOptimizer(
        model,
        weights,
        inner_loss=class_weighted_loss,
        outer_loss=plain_loss,
        algorithm=algorithm,
        outer_every=outer_every,
        hvp_method="autograd",
        max_rollbacks=0,
    )
    algorithm = replace(algorithm, outer_every=outer_every)
    problem, at = functional_problem()
    state = None
    for k in range(40):
        inner, outer = batch(k), batch(1000 + k)
        bilevel.step(inner, outer, seed=k)
        batches = StepBatches.of((inner,), (outer,), seed=k, mode="shared")
        state = algorithm.init(problem, at, batches) if state is None else state
        state = algorithm.step(problem, state, batches)
    pairs = [
        (dict(model.named_parameters()), state.omega.value),
        (dict(weights.named_parameters()), state.lam.value),
        (bilevel.adjoint, state.v),
        (bilevel.hypergradient, state.direction),
    ]
    for actual, expected in pairs:
        assert actual.keys() == expected.keys()
        for key, t in actual.items():
            torch.testing.assert_close(t.detach(), expected[key], rtol=1e-12, atol=1e-12)
    moved = float(tree.norm(tree.sub(state.lam.value, at.lam)))
    assert moved > 1e-3
    measured = bilevel.state.measured
    torch.testing.assert_close(measured.curvature, state.measured.curvature, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(measured.unsolved, state.measured.unsolved, rtol=1e-12, atol=1e-15)


def test_automatic_steps_measure_quadratic_hessian_norm():
    """ω and v move by 1/L, with L from products alone."""
    h = torch.linspace(1.0, 20.0, 8, dtype=F64)
    problem = Problem(
        lambda lam, omega, b: (h * omega["w"].square()).sum() / 2 - (lam["a"] * omega["w"]).sum(),
        lambda lam, omega, b: (omega["w"] - 0.05).square().sum() / 2,
    )
    at = Point({"a": torch.zeros(8, dtype=F64)}, {"w": normal(8)})
    batches = StepBatches.shared(None, None)
    algorithm = fsla.algorithms.soba()
    state = algorithm.init(problem, at, batches)
    for _ in range(300):
        state = algorithm.step(problem, state, batches)
    rates = algorithm.step_sizes.rates(state.step_count, state.measured)
    assert 1 / 22 < float(rates.inner_lr) < 1 / 17
    assert float(rates.adjoint_lr) == float(rates.inner_lr)
    assert float(rates.outer_lr) > 0
