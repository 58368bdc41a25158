"""What a BilevelOptimizer prints, saves, refuses and solves: its public face apart from the numbers of its steps."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fsla
from fsla import FSLA, MASOBA, SOBA, BilevelOptimizer
from fsla.algorithms import get_algorithm, list_algorithms
from support import ClassWeights, cross_entropy, normal
from support import class_weighted_loss as inner_loss
from support import plain_loss as outer_loss

F64 = torch.float64
OPTIMIZERS = ("inner_optimizer", "adjoint_optimizer", "outer_optimizer")
SGD, Adam = torch.optim.SGD, torch.optim.Adam
LOSSES = {"inner_loss": inner_loss, "outer_loss": outer_loss}
TRAIN, TRUSTED = (normal(30, 4, seed=1), torch.arange(30) % 3), (normal(20, 4, seed=2), torch.arange(20) % 3)


def network(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *middle, nn.Linear(6, 3)).to(F64)


def make(kind=SOBA, model=None, weights=None, **options):
    return kind(model or network(), weights or ClassWeights(), **LOSSES | options)


# ----------------------------------------------------------------------------------------------------- outer variables


class Mixed(nn.Module):
    """A network that holds its own hyper-parameter, as architectures do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 3).to(F64), nn.Linear(4, 3).to(F64)
        self.alpha = nn.Parameter(torch.zeros(2, dtype=F64))

    def forward(self, x):
        mix = self.alpha.softmax(0)
        return mix[0] * self.first(x) + mix[1] * self.second(x).tanh()


def mixed_inner(model, alpha, batch):
    return cross_entropy(model, batch).mean() + 0.01 * sum(p.square().sum() for p in model.first.parameters())


def mixed_outer(model, alpha, batch):
    return cross_entropy(model, batch).mean()


@pytest.mark.parametrize("hvp_method", ["autograd", "finite_difference"])
def test_outer_parameter_inside_model_leaves_rest_inner(hvp_method):
    """Both optimisers would move it otherwise."""
    model = Mixed()
    assert_moves = copy.deepcopy(model.state_dict())
    opt = SOBA(
        model,
        model.alpha,
        inner_loss=mixed_inner,
        outer_loss=mixed_outer,
        hvp_method=hvp_method,
        inner_optimizer=partial(SGD, lr=0.1),
    )
    for _ in range(20):
        opt.step(TRAIN, TRUSTED)
    assert list(opt.hypergradient) == ["outer"]
    assert sorted(opt.adjoint) == ["first.bias", "first.weight", "second.bias", "second.weight"]
    inner_parameters = {p for group in opt.inner_optimizer.param_groups for p in group["params"]}
    assert model.alpha not in inner_parameters
    assert all(not torch.equal(t, assert_moves[name]) for name, t in model.state_dict().items())


def test_hypergradient_of_parameter_inside_model_equals_outside():
    """What λ is called must not change its derivative."""
    model = Mixed()
    opt = SOBA(model, model.alpha, inner_loss=mixed_inner, outer_loss=mixed_outer, hvp_method="autograd")
    opt.step(TRAIN, TRUSTED)
    problem, at = opt.problem_at_point()
    inner = problem.inner_at(at, fsla.Batch(TRAIN))
    v = {name: torch.ones_like(t) for name, t in at.omega.items()}
    parameters = list(opt._problem.omega.values())
    grads = torch.autograd.grad(mixed_inner(model, None, TRAIN), parameters, create_graph=True)
    expected = torch.autograd.grad(sum(g.sum() for g in grads), model.alpha)[0]
    torch.testing.assert_close(inner.mixed_hvp(v)["outer"], expected)


class Wrapped(DistributedDataParallel):
    """A replica without processes."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module

    def forward(self, x):
        return self.module(x)


def test_outer_parameter_inside_ddp_model_raises():
    """DistributedDataParallel would reduce its gradient as one of ω."""
    model = Wrapped(Mixed())
    with pytest.raises(ValueError, match=r"Under \w+ the outer parameters must not lie inside.*Keep them in a module"):
        SOBA(model, model.module.alpha, inner_loss=mixed_inner, outer_loss=mixed_outer)


@pytest.mark.parametrize("outer_optimizer", [None, partial(SGD, lr=5.0)])
def test_projection_bounds_outer_variable(outer_optimizer):
    """From the first step on, also where a torch optimiser moves it."""
    weights = ClassWeights()
    nn.init.constant_(weights.w, 2.0)
    opt = make(weights=weights, projection=fsla.steps.Box(-0.01, 0.02), outer_optimizer=outer_optimizer)
    for _ in range(30):
        opt.step(TRAIN, TRUSTED)
        assert -0.01 <= float(weights.w.detach().min()) <= float(weights.w.detach().max()) <= 0.02
    assert float(weights.w.detach().min()) < 0.02


# --------------------------------------------------------------------------------------------------------- what it says


def test_repr_shows_algorithm_and_cost():
    """A user sees at once what moves what, and what a step costs."""
    opt = make(hvp_method="finite_difference", outer_every=8, inner_optimizer=partial(SGD, lr=0.1))
    assert repr(opt).splitlines() == [
        "SOBA(",
        "    algorithm: SOBA",
        "    inner: 51 parameters, moved by SGD(lr=0.1)",
        "    adjoint: moved by GradientDescent with automatic step sizes",
        "    outer: 3 parameters, moved by ScaleFree with automatic step sizes",
        "    cost: 3 gradients on every 8th step: about 1.25 plain steps",
        ")",
    ]


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({"algorithm": "one_step"}, ["algorithm: one_step", "adjoint: none"]),
        ({"algorithm": fsla.algorithms.soba()}, ["algorithm: Simultaneous"]),
        ({"hvp_method": "autograd"}, ["algorithm: soba", "cost: 2 gradients and 1 pass for second derivatives"]),
        ({"hvp_method": "finite_difference"}, ["cost: 3 gradients: about 3 plain steps"]),
        ({"outer_optimizer": partial(Adam, lr=0.01), "max_grad_norm": 1.0}, ["moved by Adam(lr=0.01)"]),
        ({"algorithm": fsla.algorithms.soba(fsla.steps.constant(1, 1, 1))}, ["outer: 3 parameters, moved by Grad"]),
    ],
)
def test_repr_shows_algorithm_by_registered_name(options, lines):
    """By the name or the class that the user passed."""
    text = repr(make(BilevelOptimizer, **options))
    assert all(line in text for line in lines), text


def test_repr_without_losses_names_inner_optimizer():
    """Nothing here moves ω."""
    text = repr(SOBA(network(), ClassWeights()))
    assert "inner: 51 parameters, moved by the loop that calls" in text


@pytest.mark.parametrize("name", list_algorithms())
def test_repr_shows_cost_of_every_automatic_algorithm(name):
    """The toy problem on which a step is counted must suit them all."""
    try:
        opt = make(BilevelOptimizer, algorithm=name)
    except TypeError as error:
        assert f"algorithm={name!r} has no automatic step sizes" in str(error)  # noqa: PT017
    else:
        assert "cost: " in repr(opt)


# ----------------------------------------------------------------------------------------------------------- algorithms


@pytest.mark.parametrize("name", ["one_step", "soba", "ma_soba", "fsla", "single_loop", "amigo", "cg", "aid_bio"])
def test_algorithm_by_name_equals_registered(name):
    """Where its step sizes are automatic."""
    by_name = make(BilevelOptimizer, algorithm=name, hvp_method="autograd")
    by_object = make(BilevelOptimizer, algorithm=get_algorithm(name)(), hvp_method="autograd")
    for opt in (by_name, by_object):
        for k in range(3):
            opt.step(TRAIN, TRUSTED, independent_batches=(TRAIN, TRUSTED), seed=k)
    assert torch.equal(by_name.hypergradient["w"], by_object.hypergradient["w"])


def test_algorithm_by_name_without_automatic_steps_raises():
    """The message shows what to write instead."""
    with pytest.raises(TypeError, match=r"algorithm='saba' has no automatic.*fsla.algorithms.saba\(fsla.steps"):
        make(BilevelOptimizer, algorithm="saba")
    with pytest.raises(ValueError, match="Did you mean 'soba'"):
        make(BilevelOptimizer, algorithm="sobo")
    with pytest.raises(TypeError, match=r"must be an algorithm.*Got int"):
        make(BilevelOptimizer, algorithm=3)


def functional_loss(net, omega, batch, weights, ridge):
    losses = nn.functional.cross_entropy(net(omega, batch[0]), batch[1], reduction="none")
    return (weights * losses).mean() + ridge * sum(t.square().sum() for t in omega.values())


def test_algorithm_object_on_module_equals_trees():
    """stocBiO needs several batches of a kind, which `advance` takes one by one."""
    algorithm = fsla.algorithms.stocbio(fsla.steps.constant(0.1, 0.1, 0.1), inner_steps=2, hvp_steps=2)
    halves = [tuple(t[i::2] for t in TRAIN) for i in range(2)]
    opt = make(BilevelOptimizer, algorithm=algorithm, hvp_method="autograd")
    start, net = fsla.make_functional(network())
    problem = fsla.Problem(
        lambda lam, omega, batch: functional_loss(net, omega, batch, lam["w"].exp()[batch[1]], 0.02),
        lambda lam, omega, batch: functional_loss(net, omega, batch, 1.0, 0.0) + 0.01 * lam["w"].square().sum(),
        hvp_method="autograd",
    )
    batches = fsla.StepBatches.of(halves, (TRUSTED,), halves, seed=0)
    state = algorithm.init(problem, fsla.Point({"w": torch.zeros(3, dtype=F64)}, start), batches)
    for _ in range(4):
        state = algorithm.step(problem, state, batches)
        info = opt.advance(batches)
    assert info.step == 3
    for name, p in opt.model.named_parameters():
        torch.testing.assert_close(p.detach(), state.omega.value[name], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(opt.hypergradient["w"], state.direction["w"], rtol=1e-12, atol=1e-13)


# ----------------------------------------------------------------------------------------------- checked and solved


class Ridge:
    """Least squares with a weight for each of three groups of rows, and a ridge in the loss or in the optimiser."""

    def __init__(self, decay, *, in_loss):
        self.x, truth = normal(30, 5, seed=3), normal(5, seed=4)
        self.y, self.decay, self.in_loss = self.x @ truth + normal(30, seed=5), decay, in_loss
        self.model = nn.Linear(5, 1, bias=False).to(F64)
        self.weights = ClassWeights()

    def inner(self, model, weights, batch):
        losses = (model(self.x)[:, 0] - self.y).square() / 2
        ridge = self.decay / 2 * model.weight.square().sum() if self.in_loss else 0.0
        return (weights(torch.arange(30) % 3) * losses).mean() + ridge

    def outer(self, model, weights, batch):
        return (model(TRUSTED[0].new_ones(7, 5)) - 1.0).square().mean()

    def closed_form(self):
        w = self.weights.w.detach().exp()[torch.arange(30) % 3] / 30
        hessian = self.x.T @ (w[:, None] * self.x) + self.decay * torch.eye(5, dtype=F64)
        return torch.linalg.solve(hessian, self.x.T @ (w * self.y))

    def bilevel(self, **options):
        decay = 0.0 if self.in_loss else self.decay
        optimizer = partial(SGD, lr=0.1, weight_decay=decay)
        losses = {"inner_loss": self.inner, "outer_loss": self.outer}
        return SOBA(self.model, self.weights, inner_optimizer=optimizer, **losses, **options)


@pytest.mark.parametrize("in_loss", [False, True])
def test_solve_ridge_reaches_minimum(in_loss):
    """Also where the penalty is the optimiser's weight decay, which is part of what training minimises."""
    problem = Ridge(0.1, in_loss=in_loss)
    nn.init.normal_(problem.weights.w, generator=torch.Generator().manual_seed(0))
    opt = problem.bilevel()
    weights = torch.ones_like(problem.model.weight)
    problem.model.weight.grad = weights
    opt.solve(None, tol=1e-7)
    torch.testing.assert_close(problem.model.weight.detach()[0], problem.closed_form(), rtol=1e-6, atol=1e-7)
    assert problem.model.weight.grad is weights
    assert opt.step_count == 0


def test_solve_without_convergence_warns():
    """Weights must not be judged by a model that is half trained."""
    with pytest.warns(fsla.ConvergenceWarning, match=r"after 2 iterations.*Raise max_iter= or tol="):
        Ridge(0.01, in_loss=True).bilevel().solve(None, max_iter=2)


@pytest.mark.parametrize("in_loss", [False, True])
def test_check_hypergradient_on_module_matches_exact(in_loss):
    """With the ridge of weight decay too, whose curvature v must know; nothing of the module changes."""
    problem = Ridge(0.3, in_loss=in_loss)
    opt = problem.bilevel(hvp_method="autograd")
    opt.solve(None, tol=1e-7)
    before = copy.deepcopy((problem.model.state_dict(), problem.weights.state_dict())), torch.get_rng_state()
    check = fsla.check_hypergradient(opt, None, None, num_steps=200)
    rows = {row.method: row for row in check.rows}
    assert check.exact_vs_finite_difference < 1e-6
    assert check.distance_to_inner_minimum < 1e-5
    assert max(rows[name].error for name in ("cg", "implicit")) < 1e-5
    after = (problem.model.state_dict(), problem.weights.state_dict())
    for old, new in zip(before[0], after, strict=True):
        assert all(torch.equal(t, new[name]) for name, t in old.items())
    assert torch.equal(torch.get_rng_state(), before[1])
    assert problem.model.weight.grad is None


# --------------------------------------------------------------------------------------------------------------- saved


def storm(model, weights, **options):
    return FSLA(model, weights, momentum="storm", new_grad_weight=0.3, **options)


STATES = {
    "automatic": (SOBA, {}),
    "Adam": (SOBA, {"inner_optimizer": partial(Adam, lr=0.01)}),
    "v's optimiser": (SOBA, {"adjoint_optimizer": partial(SGD, lr=0.1, momentum=0.9)}),
    "all made here": (MASOBA, dict.fromkeys(OPTIMIZERS, partial(Adam, lr=0.01))),
    "storm": (storm, {}),
    "storm, v's optimiser": (storm, {"adjoint_optimizer": partial(SGD, lr=0.1, momentum=0.9)}),
    "outer_every": (SOBA, {"outer_every": 7, "inner_optimizer": partial(Adam, lr=0.01)}),
    "differences": (SOBA, {"hvp_method": "finite_difference", "max_adjoint_norm": 5.0}),
    "schedule": (
        lambda model, weights, **options: BilevelOptimizer(
            model, weights, algorithm=fsla.algorithms.slip(fsla.steps.inverse_sqrt(0.1, 1.0, 1.0, 1.0)), **options
        ),
        {},
    ),
}  # fmt: skip


def numbers(opt):
    return [
        *opt.model.state_dict().values(),
        *opt.outer.state_dict().values(),
        *opt.adjoint.values(),
        *opt.hypergradient.values(),
    ]


@pytest.mark.parametrize("name", STATES)
def test_state_dict_through_torch_save_resumes_exactly(name):
    """Written by torch.save and read with weights_only=True, as Accelerate, Lightning and scripts keep it."""
    kind, options = STATES[name]

    def begin():
        return make(kind, network(nn.Dropout(0.2), nn.BatchNorm1d(6, dtype=F64)), **options)

    def take(opt, steps):
        for k in steps:
            opt.step(TRAIN, TRUSTED, independent_batches=(TRAIN, TRUSTED) if "storm" in name else None)
            assert opt.step_count == k + 1

    torch.manual_seed(3)
    opt = begin()
    torch.manual_seed(4)
    take(opt, range(17))
    file = io.BytesIO()
    states = {"opt": opt.state_dict(), "model": opt.model.state_dict(), "outer": opt.outer.state_dict()}
    torch.save(states | {"random": torch.get_rng_state()}, file)
    assert type(states["opt"]) is dict
    take(opt, range(17, 40))
    expected = numbers(opt)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = begin()
    again.model.load_state_dict(saved["model"])
    again.outer.load_state_dict(saved["outer"])
    again.load_state_dict(saved["opt"])
    torch.set_rng_state(saved["random"])
    take(again, range(17, 40))
    for a, b in zip(numbers(again), expected, strict=True):
        assert torch.equal(a, b)


def test_state_dict_omits_optimizer_of_user():
    """Its owner saves it; two copies would disagree."""
    model = network()
    optimizer = Adam(model.parameters(), lr=0.01)
    opt = make(model=model, inner_optimizer=optimizer)
    opt.step(TRAIN, TRUSTED)
    state = opt.state_dict()
    assert not any(path.startswith("optimizers") for path in state["tensors"])
    moments = optimizer.state_dict()
    opt.load_state_dict(state)
    assert optimizer.state_dict()["state"][0]["exp_avg"] is moments["state"][0]["exp_avg"]
    made_here = make(inner_optimizer=partial(Adam, lr=0.01))
    before = copy.deepcopy(made_here.state_dict())
    with pytest.raises(ValueError, match="does not hold inner_optimizer"):
        made_here.load_state_dict(state)
    assert repr(made_here.state_dict()) == repr(before)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda: make(MASOBA), "optimizer: 'SOBA' there, 'MASOBA' wanted"),
        (lambda: make(outer_every=2), "outer_every: 1 there, 2 wanted"),
        (lambda: make(model=nn.Linear(4, 3, dtype=F64)), "omega.0.weight: 'float64"),
        (lambda: make(weights=ClassWeights(4)), "lam.w: 'float64.3.' there, 'float64.4.' wanted"),
        (lambda: make(inner_optimizer=partial(Adam, lr=0.1)), "'InPlace' there, 'TorchUpdate' wanted"),
        (lambda: make(hvp_method="finite_difference"), "hvp_method: 'auto' there"),
    ],
)
def test_load_state_dict_of_other_run_raises_and_sets_nothing(other, text):
    """The message names what differs."""
    opt = make()
    opt.step(TRAIN, TRUSTED)
    state = opt.state_dict()
    other = other()
    before = other.state_dict()
    with pytest.raises(ValueError, match=text):
        other.load_state_dict(state)
    assert repr(other.state_dict()) == repr(before)
    assert other.state is None


def damaged_states(state):
    """A saved state with each of its entries missing, each tensor in another form, and other damage."""
    yield 3
    yield {}
    for name in state:
        yield {key: value for key, value in state.items() if key != name}
    yield {**state, "tensors": list(state["tensors"])}
    yield {**state, "json": {"UnknownState": []}}
    for path, t in state["tensors"].items():
        for tensors in ({path: t.new_zeros(7)}, {path: t.to(torch.complex64)}, {path: 3}):
            yield {**state, "tensors": state["tensors"] | tensors}
        yield {**state, "tensors": {key: value for key, value in state["tensors"].items() if key != path}}


def test_load_state_dict_of_damaged_state_raises_and_sets_nothing():
    """A state from a file of somebody else's may hold anything; half of it would be set before the error."""
    opt = make(inner_optimizer=partial(Adam, lr=0.01))
    for _ in range(2):
        opt.step(TRAIN, TRUSTED)
    before = repr(opt.state_dict())
    for damaged in damaged_states(copy.deepcopy(opt.state_dict())):
        with pytest.raises(ValueError, match=r"^Cannot load state: .*\.$"):
            opt.load_state_dict(damaged)
        assert repr(opt.state_dict()) == before


def test_load_state_dict_keeps_saved_tensors():
    """A state in memory must serve twice."""
    opt = make(inner_optimizer=partial(Adam, lr=0.01), adjoint_optimizer=partial(SGD, lr=0.1, momentum=0.9))
    for _ in range(3):
        opt.step(TRAIN, TRUSTED)
    state = copy.deepcopy(opt.state_dict())
    before = {path: t.clone() for path, t in state["tensors"].items()}
    opt.load_state_dict(state)
    for _ in range(3):
        opt.step(TRAIN, TRUSTED)
    assert all(torch.equal(t, before[path]) for path, t in state["tensors"].items())


def test_state_dict_loads_after_scheduler_changes_lr():
    """OneCycleLR adds to the groups of an optimiser and moves its momentum; that is no other run."""
    opt = make(inner_optimizer=partial(SGD, lr=0.1, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt.inner_optimizer, 0.1, total_steps=20)
    for _ in range(5):
        opt.step(TRAIN, TRUSTED)
        scheduler.step()
    again = make(inner_optimizer=partial(SGD, lr=0.1, momentum=0.9))
    again.load_state_dict(opt.state_dict())
    assert again.inner_optimizer.param_groups[0]["momentum"] == opt.inner_optimizer.param_groups[0]["momentum"]


# -------------------------------------------------------------------------------------------------- passes of a step


class Passes:
    """Counts calls of a loss."""

    def __init__(self, loss):
        self.loss, self.calls = loss, 0

    def __call__(self, *arguments):
        self.calls += 1
        return self.loss(*arguments)


@pytest.mark.parametrize(
    ("kind", "hvp_method", "inner", "outer"),
    [
        (SOBA, "autograd", 1, 1),
        (SOBA, "finite_difference", 2, 1),
        (FSLA, "autograd", 2, 1),
        (FSLA, "finite_difference", 4, 1),
    ],
)
def test_step_runs_as_many_passes_as_oracles(kind, hvp_method, inner, outer):
    """One pass serves several oracles; F that does not read λ is not passed over for ∂_λ F."""
    inner_passes, outer_passes = Passes(inner_loss), Passes(lambda m, w, b: cross_entropy(m, b).mean())
    opt = make(
        kind,
        **dict.fromkeys(OPTIMIZERS, partial(SGD, lr=0.1)),
        inner_loss=inner_passes,
        outer_loss=outer_passes,
        hvp_method=hvp_method,
    )
    opt.step(TRAIN, TRUSTED)
    inner_passes.calls = outer_passes.calls = 0
    for _ in range(3):
        opt.step(TRAIN, TRUSTED)
    assert (inner_passes.calls, outer_passes.calls) == (3 * inner, 3 * outer)
