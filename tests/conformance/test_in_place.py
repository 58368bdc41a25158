"""Every algorithm moves a module in place as it moves functions of (λ, ω), and resumes there bit for bit."""

import io
from functools import partial

import pytest
import torch
from rows import letter_options, make, names, names_where, row_of
from torch import nn
from torch.func import functional_call

import fsla
from fsla import Batch, Point, Problem, StepBatches, algorithms
from fsla.steps import GradientDescent, WrappedUpdate
from support import F64

LRS = {"outer_lr": 0.05, "inner_lr": 0.1, "adjoint_lr": 0.08}
CONSTANT = fsla.steps.constant(**LRS, new_grad_weight=0.7)
STEPS = 6
METHODS = {"exact": ("reverse_over_reverse", "autograd"), "differences": ("finite_difference", "finite_difference")}
"""How products are computed by the functional core, and on a module."""


def batch(*place, rows=10):
    seed = 0
    for number in place:
        seed = 1009 * seed + number + 1
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator, dtype=F64), torch.randint(3, (rows,), generator=generator)


def draw(name, spec, k):
    """Batches of step k, all different."""
    slots = [tuple(batch(k, slot, j) for j in range(max(count, 1))) for slot, count in enumerate(spec)]
    if letter_options(name):
        slots[:2] = [(Batch(batch(100 + k % 4, slot), number=k % 4),) for slot in range(2)]
    return StepBatches.of(*slots, seed=k)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).to(F64)


class ClassWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(0.2 * torch.arange(1, 4, dtype=F64))


def inner_loss(model, outer, batch):
    losses = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (outer.w.exp()[batch[1]] * losses).mean() + 0.1 * sum(p.square().sum() for p in model.parameters())


def outer_loss(model, outer, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1]) + 0.05 * outer.w.square().sum()


def functional(hvp_method):
    """The same losses as functions of (λ, ω), and where the module starts."""
    net = network()

    def inner(lam, omega, batch):
        losses = nn.functional.cross_entropy(functional_call(net, dict(omega), (batch[0],)), batch[1], reduction="none")
        return (lam["w"].exp()[batch[1]] * losses).mean() + 0.1 * sum(t.square().sum() for t in omega.values())

    def outer(lam, omega, batch):
        return nn.functional.cross_entropy(functional_call(net, dict(omega), (batch[0],)), batch[1]) + 0.05 * (
            lam["w"].square().sum()
        )

    at = Point({"w": ClassWeights().w.detach()}, {name: p.detach().clone() for name, p in net.named_parameters()})
    return Problem(inner, outer, hvp_method=hvp_method), at


def relative(x, y):
    """The largest difference of two trees, each tensor's relative to its largest entry."""
    assert x.keys() == y.keys()
    return max(float((x[n] - y[n]).detach().abs().max()) / max(1e-3, float(y[n].detach().abs().max())) for n in y)


def follow(name, method, **options):
    """The largest relative difference of a module in place from the functional core, over some steps."""
    algorithm = make(name, CONSTANT, **letter_options(name))
    of_functions, of_module = METHODS[method]
    problem, at = functional(of_functions)
    state = algorithm.init(problem, at, draw(name, algorithm.batches, 0))
    model, weights = network(), ClassWeights()
    bilevel = fsla.BilevelOptimizer(
        model,
        weights,
        inner_loss=inner_loss,
        outer_loss=outer_loss,
        algorithm=algorithm,
        hvp_method=of_module,
        max_rollbacks=None,
        **options,
    )
    worst = 0.0
    for k in range(STEPS):
        batches = draw(name, algorithm.batches, k)
        state = algorithm.step(problem, state, batches)
        info = bilevel.advance(batches)
        worst = max(worst, relative(dict(model.named_parameters()), state.omega.value))
        worst = max(worst, relative({"w": weights.w}, state.lam.value))
        worst = max(worst, relative(bilevel.hypergradient, state.direction))
        assert bilevel.adjoint.keys() == state.v.keys()
        worst = max(worst, relative(bilevel.adjoint, state.v)) if state.v else worst
        assert info.step == k
        assert info.inner_loss is not None
    assert relative(dict(model.named_parameters()), at.omega) > 1e-3
    assert relative({"w": weights.w}, at.lam) > 1e-3
    assert all(p.grad is None and p.requires_grad for p in (*model.parameters(), weights.w))
    return worst


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", algorithms.list_algorithms())
def test_module_with_own_updates_equals_functional_core(name, method):
    """One `move` serves both: what it asks, it asks before the module's parameters move under it."""
    row_of(name)
    assert follow(name, method) < 1e-10


def moves_by_plain_steps(name):
    """Whether SGD can take the steps of all its variables."""

    def innermost(update):
        return innermost(update.update) if isinstance(update, WrappedUpdate) else update

    plain = all(isinstance(innermost(update), GradientDescent) for update in make(name).updates)
    return plain and not row_of(name).sizes_own_steps


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [name for name in names() if moves_by_plain_steps(name)])
def test_module_with_torch_sgd_equals_functional_core(name, method):
    """Torch's optimisers take the place of plain steps, also where an algorithm uses the step itself."""
    moved = ["inner", "outer", "adjoint"] if make(name).moves_adjoint else ["inner", "outer"]
    optimizers = {f"{which}_optimizer": partial(torch.optim.SGD, lr=LRS[f"{which}_lr"]) for which in moved}
    assert follow(name, method, **optimizers) < 1e-10


@pytest.mark.parametrize("name", names_where(lambda algorithm: not algorithm.moves_adjoint))
def test_adjoint_optimizer_without_moving_adjoint_raises(name):
    """It would be ignored, and its learning rate would be searched for in vain."""
    with pytest.raises(TypeError, match="adjoint_optimizer moves v"):
        start(name, adjoint_optimizer=partial(torch.optim.SGD, lr=0.1))


def test_algorithm_without_in_place_form_raises():
    """An algorithm of somebody else's may keep what a module overwrites."""

    class Remembering(algorithms.Simultaneous):
        @property
        def in_place(self):
            return False

    with pytest.raises(TypeError, match="Remembering has no form that moves a module in place"):
        fsla.BilevelOptimizer(
            network(), ClassWeights(), inner_loss=inner_loss, outer_loss=outer_loss, algorithm=Remembering()
        )


def start(name, **options):
    algorithm = make(name, CONSTANT, **letter_options(name))
    model, weights = network(), ClassWeights()
    options |= {"inner_loss": inner_loss, "outer_loss": outer_loss, "hvp_method": "autograd"}
    return model, weights, fsla.BilevelOptimizer(model, weights, algorithm=algorithm, **options)


@pytest.mark.parametrize("name", algorithms.list_algorithms())
def test_module_state_resumes_exactly(name):
    """A state that left something out would go on with other numbers, and nobody would know."""
    model, weights, bilevel = start(name)
    spec = bilevel.algorithm.batches
    for k in range(3):
        bilevel.advance(draw(name, spec, k))
    file = io.BytesIO()
    parts = {"model": model.state_dict(), "weights": weights.state_dict(), "bilevel": bilevel.state_dict()}
    torch.save(parts, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again_model, again_weights, again = start(name)
    again_model.load_state_dict(saved["model"])
    again_weights.load_state_dict(saved["weights"])
    again.load_state_dict(saved["bilevel"])
    for k in range(3, 6):
        batches = draw(name, spec, k)
        bilevel.advance(batches)
        again.advance(batches)
        for x, y in ((model, again_model), (weights, again_weights)):
            assert all(torch.equal(p, q) for p, q in zip(x.parameters(), y.parameters(), strict=True))
        for tensors, other in ((bilevel.hypergradient, again.hypergradient), (bilevel.adjoint, again.adjoint)):
            assert tensors.keys() == other.keys()
            assert all(torch.equal(tensors[key], other[key]) for key in tensors)
