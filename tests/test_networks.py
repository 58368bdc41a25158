"""What the networks that people train do: random layers, running statistics, checkpointing, tied weights, compilers.

Each runs by exact products and by differences of gradients; the two agree where the first exist.
"""

import shutil
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsla
from fsla import Point, Problem, Sample
from fsla import _tree as tree
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


def build(name, *, dtype=F64, mode="exact", policy="batch", **more):
    """A weight for each sample on one of the networks; returns the problem, a point, the network and the model."""
    torch.manual_seed(0)
    make, data = NETWORKS[name]
    model = make().to(dtype)
    data = data.to(dtype) if data.is_floating_point() else data
    omega, net = fsla.functional(model, batch_norm=policy)

    def each(omega, index):
        return nn.functional.cross_entropy(net(omega, data[index]), Y[index], reduction="none")

    def inner(lam, omega, index):
        ridge = sum(t.square().sum() for t in omega.values())
        return (lam["w"][index].sigmoid() * each(omega, index)).mean() + 0.05 * ridge

    problem = Problem(inner, lambda lam, omega, index: each(omega, index).mean(), mode=mode, **more)
    at = Point(
        {"w": normal(ROWS).to(dtype)}, {key: t + 0.1 * normal(*t.shape, seed=9).to(dtype) for key, t in omega.items()}
    )
    return problem, at, net, model


def gap(x, y):
    return float(tree.norm(tree.sub(x, y)) / tree.norm(y))


def some_v(at):
    return tree.unflatten(normal(tree.size(at.omega), seed=5).to(next(iter(at.omega.values())).dtype), at.omega)


@pytest.mark.parametrize("name", NETWORKS)
def test_differences_give_the_products_that_exact_ones_give(name):
    problem, at, _, _ = build(name)
    by_difference = Problem(problem.inner_loss, problem.outer_loss, mode="difference")
    index, v = torch.arange(ROWS), some_v(at)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = problem.inner_at(at, index, 7).linearised()
        expected = exact.hvp(v), exact.cross(v), exact.grad
    G = by_difference.inner_at(at, index, 7)
    found = (*G.hvp_cross(v), G.grad)
    for a, b in zip(found, expected, strict=True):
        assert gap(a, b) < 1e-6


def test_checkpoints_recompute_at_the_point_and_not_with_the_models_own_parameters():
    problem, at, _, model = build("checkpointed")
    plain = nn.Sequential(model.body, model.head).eval()
    model.eval()
    own = {name.replace("body", "0").replace("head", "1"): t for name, t in at.omega.items()}
    leaves = {name: t.clone().requires_grad_() for name, t in own.items()}
    index = torch.arange(ROWS)
    losses = nn.functional.cross_entropy(torch.func.functional_call(plain, leaves, (X,)), Y, reduction="none")
    ridge = sum(t.square().sum() for t in leaves.values())
    value = (at.lam["w"].sigmoid() * losses).mean() + 0.05 * ridge
    expected = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
    found = problem.inner_at(at, index).grad
    for name, t in found.items():
        assert torch.allclose(t, expected[name.replace("body", "0").replace("head", "1")])


@pytest.mark.parametrize("mode", ["exact", "difference"])
@pytest.mark.parametrize("name", ["dropout", "lstm", "checkpointed", "random leaky relu"])
def test_a_seed_fixes_the_mask_at_all_points_and_nothing_else(name, mode):
    problem, at, _, _ = build(name, mode=mode)
    index = torch.arange(ROWS)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    same = [problem.inner_at(at, index, seed).grad for seed in (7, 7, 8)]
    assert torch.equal(torch.get_rng_state(), before)
    assert gap(same[0], same[1]) == 0
    assert gap(same[0], same[2]) > 1e-3
    moved = Point(at.lam, tree.axpy(1e-6, at.omega, at.omega))
    near = problem.inner_at(moved, index, 7).grad
    assert gap(near, same[0]) < 1e-4  # the same mask at another point
    with pytest.raises(ValueError, match=r"Give the sample a seed"):
        _ = problem.inner_at(at, index).grad


@pytest.mark.parametrize("mode", ["exact", "difference"])
@pytest.mark.parametrize("algorithm", ["fsla", "soba", "cg", "bp", "amigo"])
def test_algorithms_with_dropout_are_functions_of_the_sample(algorithm, mode):
    """With one seed a step repeats; with another it differs; and STORM's two points have one mask."""
    problem, at, _, _ = build("dropout", mode=mode)
    solver = fsla.algorithms.ALL[algorithm](RATES)
    g = torch.Generator().manual_seed(0)
    draw = lambda: torch.randint(ROWS, (6,), generator=g)  # noqa: E731
    samples = [Sample.draw("grouped", draw, draw, seed=k) for k in range(3)]
    state = solver.step(problem, solver.init(problem, at, samples[0]), samples[1])
    once, again = (solver.step(problem, state, samples[2]) for _ in range(2))
    other = solver.step(problem, state, samples[2]._replace(seed=99))
    assert torch.equal(tree.flatten(once.d), tree.flatten(again.d))
    assert not torch.equal(tree.flatten(once.at.omega), tree.flatten(other.at.omega))
    if algorithm == "fsla":  # at rest (no step moves) STORM's correction vanishes: g_new = g_old on one mask
        still = fsla.algorithms.fsla(fsla.steps.constant(0.0, 0.0, 0.0, 0.5))
        one = still.init(problem, at, samples[0])._replace(memory=some_v(at))
        g = still.estimator.gradient(fsla.problems.Seeded(problem, samples[1]), one.at, one.memory, samples[1])
        expected = tree.axpy(0.5, one.d, tree.scale(0.5, g))
        assert gap(still.step(problem, one, samples[1]).d, expected) < 1e-12


def test_batches_of_one_sample_have_masks_of_their_own():
    a, b = torch.arange(3), torch.arange(3)
    seeds = Sample(a, a, b, a, b, seed=5).seeds()
    assert len(set(seeds.values())) == 2
    assert seeds[id(a)] != seeds[id(b)]
    assert Sample(a, a, b, a, b, seed=6).seeds()[id(a)] != seeds[id(a)]
    assert Sample(a, a, b, a, b).seeds() == {}


def test_batch_statistics_in_every_pass_and_running_ones_moved_once():
    problem, at, net, model = build("batch norm", policy="batch")
    reference = nn.Sequential(*model).train()
    layer, index = model[1], torch.arange(ROWS)
    mean = layer.running_mean.clone()
    solver, xi = fsla.algorithms.fsla(RATES, momentum="none"), Sample.full(index, index)
    state = solver.step(problem, solver.init(problem, at, xi), xi)
    assert torch.equal(layer.running_mean, mean)  # no pass has moved them
    assert int(layer.num_batches_tracked) == 0
    net.track(state.at.omega, X)
    assert int(layer.num_batches_tracked) == 1
    hidden = nn.functional.linear(X, state.at.omega["0.weight"], state.at.omega["0.bias"])
    assert torch.allclose(layer.running_mean, 0.9 * mean + 0.1 * hidden.mean(0))
    assert torch.allclose(net(at.omega, X), torch.func.functional_call(reference, at.omega, (X,)))


def test_frozen_statistics_are_those_of_eval_mode():
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
def test_bfloat16_autocast_keeps_the_state_in_float32(name):
    problem, at, _, _ = build(name, dtype=torch.float32, mode="difference")
    cast = Problem(problem.inner_loss, problem.outer_loss, mode="difference", autocast_dtype=torch.bfloat16)
    solver, index = fsla.algorithms.soba(RATES), torch.arange(ROWS)
    xi = Sample.full(index, index, seed=1)
    a, b = solver.init(cast, at, xi), solver.init(problem, at, xi)
    for _ in range(3):
        a, b = solver.step(cast, a, xi), solver.step(problem, b, xi)
    assert all(t.dtype == torch.float32 for x in (a.at.lam, a.at.omega, a.memory, a.d) for t in x.values())
    assert gap(tree.sub(a.at.omega, at.omega), tree.sub(b.at.omega, at.omega)) < 0.05


def test_a_network_is_trained_to_weigh_down_wrong_labels_by_differences_with_dropout():
    """A real run, end to end: float32, dropout, mini-batches, products from first-order gradients alone."""
    torch.manual_seed(0)
    truth = torch.randn(8)
    x, z = torch.randn(200, 8), torch.randn(200, 8)
    y, trusted = (x @ truth > 0).long(), (z @ truth > 0).long()
    y[:60] = 1 - y[:60]
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    omega, net = fsla.functional(model)
    loss = nn.functional.cross_entropy
    problem = fsla.WeightedProblem(
        lambda omega, j: loss(net(omega, x[j]), y[j], reduction="none"),
        lambda rows, j: rows["w"].sigmoid(),
        lambda lam, omega, j: loss(net(omega, z[j]), trusted[j]),
        rows=lambda j: j,
        direct=False,
        mode="difference",
    )
    g = torch.Generator().manual_seed(0)
    draw = lambda: torch.randint(200, (32,), generator=g)  # noqa: E731
    solver = fsla.algorithms.fsla(fsla.steps.constant(2.0, 0.3, 0.1, 0.5), momentum="average")
    state = solver.init(problem, Point({"w": torch.zeros(200)}, omega), Sample.draw("shared", draw, draw, seed=0))
    for k in range(1, 600):
        state = solver.step(problem, state, Sample.draw("shared", draw, draw, seed=k))
    weights = state.at.lam["w"].sigmoid()
    assert float(weights[:60].mean()) < 0.3
    assert float(weights[60:].mean()) > 0.55


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")),
    reason="there is no C++ compiler; apt-get install g++ installs one",
)
def test_a_compiled_module_has_first_derivatives_and_so_products():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(F64)
    omega, plain = fsla.functional(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        compiled = torch.compile(model)
        _, net = fsla.functional(compiled)
        prefix = next(iter(fsla.functional(compiled)[0])).removesuffix(next(iter(omega)))

        def problem(call):
            def inner(lam, omega, index):
                losses = nn.functional.cross_entropy(call(omega, X[index]), Y[index], reduction="none")
                return (lam["w"][index].sigmoid() * losses).mean()

            return Problem(inner, inner, mode="auto")

        at = Point({"w": normal(ROWS)}, omega)
        renamed = Point(at.lam, {prefix + name: t for name, t in omega.items()})
        index, v = torch.arange(ROWS), some_v(at)
        exact = problem(plain).inner_at(at, index).linearised()
        G = problem(net).inner_at(renamed, index)
        h, j = G.hvp_cross({prefix + name: t for name, t in v.items()})
    assert gap({name: h[prefix + name] for name in omega}, exact.hvp(v)) < 1e-7
    assert gap(j, exact.cross(v)) < 1e-7
