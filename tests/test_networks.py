"""What the networks that people train do: random layers, running statistics, checkpointing, tied weights, compilers.

Each runs by exact products and by differences of gradients; the two agree where the first exist.
"""

import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsla
from fsla import Batch, Point, Problem, StepBatches
from fsla import _tree as tree
from fsla.steps import Variable
from support import F64, normal

RATES = fsla.steps.constant(0.05, 0.1, 0.1, 0.5)
ROWS = 12
X = normal(ROWS, 6, seed=1)
TOKENS = torch.arange(ROWS * 6).reshape(ROWS, 6) * 7 % 11
Y = torch.arange(ROWS) % 3


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8), nn.GELU())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens).mean(1).tanh())[:, :3]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.lstm = nn.LSTM(5, 4, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0][:, -1])


def attention():
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.2, batch_first=True, activation="gelu")
    return nn.Sequential(nn.Unflatten(1, (1, 6)), layer, nn.Flatten(), nn.Linear(6, 3))


NETWORKS = {
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.4), nn.Linear(16, 3)), X),
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)), X),
    "batch norm and dropout": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)),
        X,
    ),
    "checkpointed": (Checkpointed, X),
    "tied embedding": (Tied, TOKENS),
    "lstm": (Recurrent, TOKENS),
    "attention": (attention, X),
    "random leaky relu": (lambda: nn.Sequential(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, 3)), X),
}


def build(name, *, dtype=F64, hvp_method="autograd", policy="batch", **more):
    """A weight for each sample on one of the networks; returns the problem, a point, the network and the model."""
    torch.manual_seed(0)
    make, data = NETWORKS[name]
    model = make().to(dtype)
    data = data.to(dtype) if data.is_floating_point() else data
    omega, net = fsla.make_functional(model, batch_norm=policy)

    def each(omega, index):
        return nn.functional.cross_entropy(net(omega, data[index]), Y[index], reduction="none")

    def inner(lam, omega, index):
        ridge = sum(t.square().sum() for t in omega.values())
        return (lam["w"][index].sigmoid() * each(omega, index)).mean() + 0.05 * ridge

    problem = Problem(inner, lambda lam, omega, index: each(omega, index).mean(), hvp_method=hvp_method, **more)
    at = Point(
        {"w": normal(ROWS).to(dtype)}, {key: t + 0.1 * normal(*t.shape, seed=9).to(dtype) for key, t in omega.items()}
    )
    return problem, at, net, model


def gap(x, y):
    return float(tree.norm(tree.sub(x, y)) / tree.norm(y))


def some_v(at):
    return tree.unflatten(normal(tree.size(at.omega), seed=5).to(next(iter(at.omega.values())).dtype), at.omega)


@pytest.mark.parametrize("name", NETWORKS)
def test_network_finite_differences_match_autograd(name):
    problem, at, _, _ = build(name)
    by_difference = Problem(problem.inner_loss, problem.outer_loss, hvp_method="finite_difference")
    index, v = torch.arange(ROWS), some_v(at)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = problem.inner_at(at, Batch(index, 7)).linearized()
        expected = exact.hvp(v), exact.mixed_hvp(v), exact.grad_omega
    G = by_difference.inner_at(at, Batch(index, 7))
    actual = (*G.products(v), G.grad_omega)
    for a, b in zip(actual, expected, strict=True):
        assert gap(a, b) < 1e-6


def test_network_activation_checkpoint_recomputes_at_point():
    problem, at, _, model = build("checkpointed")
    plain = nn.Sequential(model.body, model.head).eval()
    model.eval()
    parameters = {name.replace("body", "0").replace("head", "1"): t for name, t in at.omega.items()}
    leaves = {name: t.clone().requires_grad_() for name, t in parameters.items()}
    index = torch.arange(ROWS)
    losses = nn.functional.cross_entropy(torch.func.functional_call(plain, leaves, (X,)), Y, reduction="none")
    ridge = sum(t.square().sum() for t in leaves.values())
    value = (at.lam["w"].sigmoid() * losses).mean() + 0.05 * ridge
    expected = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
    actual = problem.inner_at(at, Batch(index)).grad_omega
    for name, t in actual.items():
        assert torch.allclose(t, expected[name.replace("body", "0").replace("head", "1")])


@pytest.mark.parametrize("hvp_method", ["autograd", "finite_difference"])
@pytest.mark.parametrize("name", ["dropout", "lstm", "checkpointed", "random leaky relu"])
def test_network_seed_fixes_dropout_mask_only(name, hvp_method):
    problem, at, _, _ = build(name, hvp_method=hvp_method)
    index = torch.arange(ROWS)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    same = [problem.inner_at(at, Batch(index, seed)).grad_omega for seed in (7, 7, 8)]
    assert torch.equal(torch.get_rng_state(), before)
    assert gap(same[0], same[1]) == 0
    assert gap(same[0], same[2]) > 1e-3
    moved = Point(at.lam, tree.axpy(1e-6, at.omega, at.omega))
    near = problem.inner_at(moved, Batch(index, 7)).grad_omega
    assert gap(near, same[0]) < 1e-4  # the same mask at another point
    with pytest.raises(ValueError, match=r"Give the step.s batches a seed"):
        _ = problem.inner_at(at, Batch(index)).grad_omega


@pytest.mark.parametrize("hvp_method", ["autograd", "finite_difference"])
@pytest.mark.parametrize("algorithm", ["fsla", "soba", "cg", "bp", "amigo"])
def test_network_dropout_step_depends_on_batch_seed(algorithm, hvp_method):
    """With one seed a step repeats; with another it differs; and STORM's two points have one mask."""
    problem, at, _, _ = build("dropout", hvp_method=hvp_method)
    stepper = fsla.algorithms.get_algorithm(algorithm)(RATES)
    g = torch.Generator().manual_seed(0)
    indices = [[(torch.randint(ROWS, (6,), generator=g),) for _ in range(4)] for _ in range(3)]

    def grouped(k, seed):
        inner, outer, second_inner, second_outer = indices[k]
        return StepBatches.of(inner, outer, None, second_outer, second_inner, seed=seed, mode="grouped")

    drawn = [grouped(k, k) for k in range(3)]
    state = stepper.step(problem, stepper.init(problem, at, drawn[0]), drawn[1])
    once, again = (stepper.step(problem, state, drawn[2]) for _ in range(2))
    other = stepper.step(problem, state, grouped(2, 99))
    assert torch.equal(tree.flatten(once.direction), tree.flatten(again.direction))
    assert not torch.equal(tree.flatten(once.omega.value), tree.flatten(other.omega.value))
    if algorithm == "fsla":  # at rest (no step moves) STORM's correction vanishes: g_new = g_old on one mask
        still = fsla.algorithms.fsla(fsla.steps.constant(0.0, 0.0, 0.0, 0.5))
        one = replace(still.init(problem, at, drawn[0]), adjoint=Variable(some_v(at)))
        g = still.estimator.gradient(still.context(problem, 0, None, drawn[1]), one.position)
        expected = tree.axpy(0.5, one.direction, tree.scale(0.5, g))
        assert gap(still.step(problem, one, drawn[1]).direction, expected) < 1e-12


def test_network_dropout_mask_differs_per_slot():
    a, b = torch.arange(3), torch.arange(3)

    def seeds(seed):
        first, other = Batch(a), Batch(b)
        batches = StepBatches.of((first,), (first,), (other,), (first,), (other,), seed=seed)
        return [batch.seed for (batch,) in batches.slots]

    assert len(set(seeds(5))) == 2
    assert seeds(5)[0] == seeds(5)[1] == seeds(5)[3]
    assert seeds(5)[0] != seeds(5)[2] == seeds(5)[4]
    assert seeds(6)[0] != seeds(5)[0]
    assert seeds(None) == [None] * 5


def test_network_running_statistics_update_once():
    problem, at, net, model = build("batch norm", policy="batch")
    reference = nn.Sequential(*model).train()
    layer, index = model[1], torch.arange(ROWS)
    mean = layer.running_mean.clone()
    algorithm, batches = fsla.algorithms.fsla(RATES, momentum="none"), StepBatches.shared(index, index)
    state = algorithm.step(problem, algorithm.init(problem, at, batches), batches)
    assert torch.equal(layer.running_mean, mean)  # no pass has moved them
    assert int(layer.num_batches_tracked) == 0
    net.update_running_stats(state.omega.value, X)
    assert int(layer.num_batches_tracked) == 1
    hidden = nn.functional.linear(X, state.omega.value["0.weight"], state.omega.value["0.bias"])
    assert torch.allclose(layer.running_mean, 0.9 * mean + 0.1 * hidden.mean(0))
    assert torch.allclose(net(at.omega, X), torch.func.functional_call(reference, at.omega, (X,)))


def test_network_frozen_statistics_equal_eval_mode():
    _, at, net, model = build("batch norm", policy="frozen")
    model[1].running_mean.copy_(normal(8, seed=3))
    model[1].running_var.copy_(normal(8, seed=4).abs() + 0.5)
    model.eval()
    expected = torch.func.functional_call(model, at.omega, (X,))
    model.train()
    assert torch.allclose(net(at.omega, X), expected)
    assert model[1].training
    assert model[1].track_running_stats


@pytest.mark.parametrize("name", ["dropout", "attention", "tied embedding"])
def test_network_autocast_keeps_state_float32(name):
    problem, at, _, _ = build(name, dtype=torch.float32, hvp_method="finite_difference")
    cast = Problem(
        problem.inner_loss, problem.outer_loss, hvp_method="finite_difference", autocast_dtype=torch.bfloat16
    )
    algorithm, index = fsla.algorithms.soba(RATES), torch.arange(ROWS)
    batches = StepBatches.shared(index, index, seed=1)
    a, b = algorithm.init(cast, at, batches), algorithm.init(problem, at, batches)
    for _ in range(3):
        a, b = algorithm.step(cast, a, batches), algorithm.step(problem, b, batches)
    assert all(t.dtype == torch.float32 for x in (a.lam.value, a.omega.value, a.v, a.direction) for t in x.values())
    assert gap(tree.sub(a.omega.value, at.omega), tree.sub(b.omega.value, at.omega)) < 0.05


def test_network_learns_to_down_weight_wrong_labels():
    """A real run, end to end: float32, dropout, mini-batches, products from first-order gradients alone."""
    torch.manual_seed(0)
    truth = torch.randn(8)
    x, z = torch.randn(200, 8), torch.randn(200, 8)
    y, trusted = (x @ truth > 0).long(), (z @ truth > 0).long()
    y[:60] = 1 - y[:60]
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    omega, net = fsla.make_functional(model)
    loss = nn.functional.cross_entropy
    problem = fsla.WeightedLossProblem(
        lambda omega, j: loss(net(omega, x[j]), y[j], reduction="none"),
        lambda rows, j: rows["w"].sigmoid(),
        lambda lam, omega, j: loss(net(omega, z[j]), trusted[j]),
        row_index=lambda j: j,
        outer_uses_lam=False,
        hvp_method="finite_difference",
    )
    g = torch.Generator().manual_seed(0)
    draw = lambda: torch.randint(200, (32,), generator=g)  # noqa: E731
    algorithm = fsla.algorithms.fsla(fsla.steps.constant(2.0, 0.3, 0.1, 0.5), momentum="average")
    state = algorithm.init(
        problem, Point({"w": torch.zeros(200)}, omega), StepBatches.draw("shared", draw, draw, seed=0)
    )
    for k in range(1, 600):
        state = algorithm.step(problem, state, StepBatches.draw("shared", draw, draw, seed=k))
    weights = state.lam.value["w"].sigmoid()
    assert float(weights[:60].mean()) < 0.3
    assert float(weights[60:].mean()) > 0.55


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")),
    reason="there is no C++ compiler; apt-get install g++ installs one",
)
def test_network_compiled_module_has_products():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(F64)
    omega, plain = fsla.make_functional(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        compiled = torch.compile(model)
        _, net = fsla.make_functional(compiled)
        prefix = next(iter(fsla.make_functional(compiled)[0])).removesuffix(next(iter(omega)))

        def problem(call):
            def inner(lam, omega, index):
                losses = nn.functional.cross_entropy(call(omega, X[index]), Y[index], reduction="none")
                return (lam["w"][index].sigmoid() * losses).mean()

            return Problem(inner, inner, hvp_method="auto")

        at = Point({"w": normal(ROWS)}, omega)
        renamed = Point(at.lam, {prefix + name: t for name, t in omega.items()})
        index, v = torch.arange(ROWS), some_v(at)
        exact = problem(plain).inner_at(at, Batch(index)).linearized()
        G = problem(net).inner_at(renamed, Batch(index))
        h, j = G.products({prefix + name: t for name, t in v.items()})
    assert gap({name: h[prefix + name] for name in omega}, exact.hvp(v)) < 1e-7
    assert gap(j, exact.mixed_hvp(v)) < 1e-7
