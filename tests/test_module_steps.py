"""Steps on a module in place equal those on functions, for the networks that people train."""

import copy
import warnings
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fsla
from fsla import FSLA, MASOBA, SOBA, DivergenceError, MicroBatches, Point, Problem, RollbackWarning, StepBatches
from fsla import _tree as tree
from fsla.algorithms import SharedBatchWarning
from fsla.problems import Batch
from fsla.problems import _module as module_problem
from fsla.steps import Automatic, ScaleFree
from fsla.steps._schedules import Push
from support import ClassWeights, cross_entropy
from support import class_weighted_loss as inner_loss
from support import plain_loss as outer_loss

F64 = torch.float64
SGD = torch.optim.SGD
ALPHA, TAU, BETA = 0.3, 0.1, 0.05
MANUAL = {"inner_optimizer": TAU, "adjoint_optimizer": BETA, "outer_optimizer": ALPHA}


def manual():
    return {name: partial(SGD, lr=rate) for name, rate in MANUAL.items()}


def network(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *middle, nn.Linear(6, 3)).to(F64)


def data(n=40, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=g, dtype=F64), torch.randint(3, (n,), generator=g)


TRAIN = data(40, 1)
VALID = data(20, 2)


def batches(k):
    g = torch.Generator().manual_seed(k)
    i = torch.randint(40, (16,), generator=g)
    j = torch.randint(20, (10,), generator=g)
    return (TRAIN[0][i], TRAIN[1][i]), (VALID[0][j], VALID[1][j])


def take(opt, steps):
    for k in range(steps):
        opt.step(*batches(k))


def core(momentum, mode):
    """The same problem for the functional core."""
    omega, net = fsla.make_functional(network())

    def each(omega, batch):
        return nn.functional.cross_entropy(net(omega, batch[0]), batch[1], reduction="none")

    def inner(lam, omega, batch):
        ridge = sum(t.square().sum() for t in omega.values())
        return (lam["w"].exp()[batch[1]] * each(omega, batch)).mean() + 0.02 * ridge

    def outer(lam, omega, batch):
        return each(omega, batch).mean() + 0.01 * lam["w"].square().sum()

    rates = fsla.steps.constant(ALPHA, TAU, BETA, new_grad_weight=0.3)
    algorithm = {
        "soba": fsla.algorithms.soba,
        "ma_soba": fsla.algorithms.ma_soba,
        "new": partial(fsla.algorithms.fsla, momentum="none", adjoint_at="new_params"),
    }.get(momentum, lambda rates: fsla.algorithms.fsla(rates, momentum=momentum))(rates)
    return Problem(inner, outer, hvp_method=mode), Point({"w": torch.zeros(3, dtype=F64)}, omega), algorithm


KINDS = {
    "none": FSLA,
    "average": partial(FSLA, momentum="average", new_grad_weight=0.3),
    "storm": partial(FSLA, momentum="storm", new_grad_weight=0.3),
    "new": partial(FSLA, adjoint_at="new_params"),
    "soba": SOBA,
    "ma_soba": partial(MASOBA, new_grad_weight=0.3),
}


@pytest.mark.filterwarnings("ignore::fsla.algorithms.SharedBatchWarning")
@pytest.mark.parametrize("hvp_method", ["autograd", "finite_difference"])
@pytest.mark.parametrize("kind", KINDS)
def test_step_equals_functional_core(kind, hvp_method):
    problem, at, algorithm = core(kind, hvp_method)
    model = network()
    weights = ClassWeights()
    opt = KINDS[kind](
        model, weights, inner_loss=inner_loss, outer_loss=outer_loss, hvp_method=hvp_method, max_rollbacks=0, **manual()
    )
    state = algorithm.init(problem, at, StepBatches.shared(*batches(0)))
    for k in range(6):
        state = algorithm.step(problem, state, StepBatches.shared(*batches(k)))
        info = opt.step(*batches(k))
    assert info.step == 5
    assert opt.step_count == 6
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)
    for name, p in model.named_parameters():
        close(p.detach(), state.omega.value[name])
        close(opt.adjoint[name].detach(), state.v[name])
    close(weights.w.detach(), state.lam.value["w"])
    close(opt.hypergradient["w"], state.direction["w"])
    assert all(p.grad is None for p in (*model.parameters(), *weights.parameters()))


def test_mixed_hvp_transpose_equals_functional_core():
    problem, at, _ = core("none", "autograd")
    model = network()
    opt = FSLA(model, ClassWeights(), inner_loss=inner_loss, outer_loss=outer_loss, hvp_method="autograd")
    u = {"w": torch.tensor([1.0, -2.0, 0.5], dtype=F64)}
    halves = MicroBatches([(TRAIN[0][:20], TRAIN[1][:20]), (TRAIN[0][20:], TRAIN[1][20:])])
    expected = problem.inner_at(at, Batch(TRAIN)).mixed_hvp_transpose(u)
    for batch in (TRAIN, halves):
        actual = opt._problem.inner_at(opt._problem.point(), Batch(batch)).mixed_hvp_transpose(u)
        for name, t in expected.items():
            torch.testing.assert_close(actual[name], t)


def test_nested_outer_buffers_update_once_per_step():
    counter = nn.BatchNorm1d(4, dtype=F64)
    outer = {"some": [counter, {"w": ClassWeights()}]}

    def inner(model, outer, batch):
        return inner_loss(model, outer["some"][1]["w"], (outer["some"][0](batch[0]), batch[1]))

    opt = FSLA(network(), outer, inner_loss=inner, outer_loss=lambda m, o, b: cross_entropy(m, b).mean(), **manual())
    for k in range(3):
        opt.step(*batches(k))
    assert int(counter.num_batches_tracked) == 3
    assert sorted(opt.hypergradient) == ["some.0.bias", "some.0.weight", "some.1.w.w"]


def test_finite_difference_step_is_second_order():
    errors = {}
    for hvp_method in ("autograd", "finite_difference"):
        model = network()
        weights = ClassWeights()
        opt = FSLA(model, weights, inner_loss=inner_loss, outer_loss=outer_loss, hvp_method=hvp_method, **manual())
        for k in range(5):
            opt.step(*batches(k))
        errors[hvp_method] = torch.cat([weights.w.detach(), *(p.detach().flatten() for p in model.parameters())])
    assert float((errors["autograd"] - errors["finite_difference"]).norm() / errors["autograd"].norm()) < 1e-8


# ------------------------------------------------------------------------------------------------ what networks do


@pytest.mark.parametrize("hvp_method", ["autograd", "finite_difference"])
def test_dropout_mask_is_shared_within_step(hvp_method):
    """With the mask of the step fixed from outside, the numbers are those of a network with that mask."""
    masks = []

    class Watched(nn.Dropout):
        def forward(self, x):
            y = super().forward(x)
            masks.append((y != 0).detach())
            return y

    model = network(Watched(0.5))
    opt = SOBA(
        model,
        ClassWeights(),
        inner_loss=inner_loss,
        outer_loss=outer_loss,
        hvp_method=hvp_method,
        max_rollbacks=0,
        **manual(),
    )
    opt.step(TRAIN, VALID)
    masks.clear()
    opt.step(TRAIN, VALID)
    inner = [m for m in masks if len(m) == 40]
    assert len(inner) == (2 if hvp_method == "finite_difference" else 1)
    assert all(torch.equal(m, inner[0]) for m in inner)
    masks.clear()
    opt.step(TRAIN, VALID)
    assert not torch.equal(masks[0], inner[0])  # another step, another mask


class WatchedDropout(nn.Dropout):
    """Records the mask of every pass."""

    def __init__(self):
        super().__init__(0.5)
        self.masks = []

    def forward(self, x):
        y = super().forward(x)
        self.masks.append((y != 0).detach())
        return y


@pytest.mark.parametrize("hvp_method", ["autograd", "finite_difference"])
def test_dropout_mask_differs_for_independent_storm_batches(hvp_method):
    """Equal masks would make the gradients dependent that STORM needs to be independent."""
    dropout = WatchedDropout()
    losses = {"inner_loss": inner_loss, "outer_loss": outer_loss}
    opt = FSLA(network(dropout), ClassWeights(), momentum="storm", hvp_method=hvp_method, **losses, **manual())
    batches = TRAIN, TRAIN  # Of one size for both losses, so that every two masks can be compared.
    opt.step(*batches, independent_batches=batches)
    dropout.masks.clear()
    opt.step(*batches, independent_batches=batches)
    distinct = {m.numpy().tobytes() for m in dropout.masks}
    assert len(distinct) == 4  # the inner and the outer batch of ω and v, and those of λ
    assert len(dropout.masks) > 4


@pytest.mark.parametrize("hvp_method", ["autograd", "finite_difference"])
def test_dropout_mask_differs_per_micro_batch(hvp_method):
    """Equal masks would give a batch in four parts a quarter of the masks of a whole one."""
    dropout = WatchedDropout()
    losses = {"inner_loss": inner_loss, "outer_loss": outer_loss}
    opt = SOBA(network(dropout), ClassWeights(), hvp_method=hvp_method, **losses, **manual())
    parts = [MicroBatches(zip(x.chunk(4), y.chunk(4), strict=True)) for x, y in (TRAIN, TRAIN)]
    opt.step(*parts)
    dropout.masks.clear()
    opt.step(*parts)
    masks = [m.numpy().tobytes() for m in dropout.masks]
    assert len(set(masks)) == 8
    passes = [masks[start : start + 4] for start in range(0, len(masks), 4)]
    assert len({tuple(part) for part in passes}) == 2  # Both ends of a difference have the masks of one pass.


@pytest.mark.parametrize("hvp_method", ["autograd", "finite_difference"])
@pytest.mark.parametrize("kind", [FSLA, SOBA])
def test_running_statistics_update_once_per_step(kind, hvp_method):
    model = network(nn.BatchNorm1d(6, dtype=F64))
    opt = kind(model, ClassWeights(), inner_loss=inner_loss, outer_loss=outer_loss, hvp_method=hvp_method, **manual())
    for k in range(3):
        opt.step(*batches(k))
    assert int(model[2].num_batches_tracked) == 3
    plain = network(nn.BatchNorm1d(6, dtype=F64))
    plain(batches(0)[0][0])
    again = network(nn.BatchNorm1d(6, dtype=F64))
    opt = kind(again, ClassWeights(), inner_loss=inner_loss, outer_loss=outer_loss, hvp_method=hvp_method, **manual())
    opt.step(*batches(0))
    torch.testing.assert_close(again[2].running_mean, plain[2].running_mean, rtol=1e-3, atol=1e-4)


def test_frozen_parameters_stay_fixed():
    model = network()
    model[0].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    opt = FSLA(model, ClassWeights(), inner_loss=inner_loss, outer_loss=outer_loss)
    for k in range(3):
        opt.step(*batches(k))
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[2].weight, before["2.weight"])
    assert model[2].weight.requires_grad
    assert not model[0].weight.requires_grad
    model(TRAIN[0]).sum().backward()


@dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("form", [dict, Record, lambda x, y: {"x": x, "rest": [y]}], ids=["dict", "dataclass", "nest"])
def test_step_accepts_any_batch_type(form):
    def unpack(batch):
        if isinstance(batch, Record):
            return batch.x, batch.y
        return batch["x"], batch["y"] if "y" in batch else batch["rest"][0]

    x, y = TRAIN
    opt = FSLA(
        network(),
        ClassWeights(),
        inner_loss=lambda m, w, b: inner_loss(m, w, unpack(b)),
        outer_loss=lambda m, w, b: outer_loss(m, w, unpack(b)),
    )
    info = opt.step(form(x=x, y=y), form(x=VALID[0], y=VALID[1]))
    assert info.inner_loss.isfinite()


@pytest.mark.parametrize("hvp_method", ["autograd", "finite_difference"])
def test_step_with_micro_batches_equals_mean(hvp_method):
    results = []
    for parts in (1, 4):
        model = network()
        weights = ClassWeights()
        opt = FSLA(model, weights, inner_loss=inner_loss, outer_loss=outer_loss, hvp_method=hvp_method, **manual())
        for _ in range(3):
            whole = []
            for batch in (TRAIN, VALID):
                pieces = list(zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True))
                whole.append(MicroBatches(pieces) if parts > 1 else batch)
            info = opt.step(*whole)
        results.append((weights.w.detach(), info.inner_loss, info.outer_loss, model[0].weight.detach()))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    with pytest.raises(ValueError, match="at least one batch"):
        MicroBatches([])


def test_outer_accepts_modules_and_parameters():
    penalties = nn.ParameterList([nn.Parameter(torch.zeros((), dtype=F64)) for _ in range(4)])
    outer = {"weights": ClassWeights(), "penalties": penalties, "scale": nn.Parameter(torch.ones((), dtype=F64))}

    def inner(model, outer, batch):
        ridge = sum(c.exp() * p.square().sum() for c, p in zip(outer["penalties"], model.parameters(), strict=True))
        return outer["scale"] * (outer["weights"](batch[1]) * cross_entropy(model, batch)).mean() + 0.01 * ridge

    opt = FSLA(network(), outer, inner_loss=inner, outer_loss=lambda m, o, b: cross_entropy(m, b).mean())
    for k in range(30):
        opt.step(*batches(k))
    assert sorted(opt.hypergradient) == [*(f"penalties.{i}" for i in range(4)), "scale", "weights.w"]
    assert float(outer["weights"].w.detach().norm()) > 0
    assert all(p.item() != 0 for p in penalties)


class Augmentation(nn.Module):
    """Adds noise of a learnt strength."""

    def __init__(self):
        super().__init__()
        self.strength = nn.Parameter(torch.tensor(-1.0, dtype=F64))

    def loss(self, model, batch):
        x, y = batch
        return cross_entropy(model, (x + self.strength.exp() * torch.randn_like(x), y)).mean()


class LearnedLoss(nn.Module):
    """A small network of the logits and the label returns how bad an answer is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).to(F64)

    def loss(self, model, batch):
        x, y = batch
        features = torch.cat([model(x), nn.functional.one_hot(y, 3).to(F64)], 1)
        return cross_entropy(model, batch).mean() + self.net(features).square().mean()


class PenaltyOfEachParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.logs = nn.ParameterList([nn.Parameter(torch.full_like(p, -4.0)) for p in network().parameters()])

    def loss(self, model, batch):
        ridge = sum((c.exp() * p.square()).sum() for c, p in zip(self.logs, model.parameters(), strict=True))
        return cross_entropy(model, batch).mean() + ridge


@pytest.mark.parametrize("kind", [Augmentation, LearnedLoss, PenaltyOfEachParameter])
def test_outer_parameters_read_by_inner_loss_move(kind):
    """By exact products and by differences alike: random passes of a step draw the same numbers."""
    results = []
    for hvp_method in ("autograd", "finite_difference"):
        outer = kind()
        opt = FSLA(
            network(),
            outer,
            inner_loss=lambda m, o, b: o.loss(m, b) + 0.01 * sum(p.square().sum() for p in m.parameters()),
            outer_loss=lambda m, o, b: cross_entropy(m, b).mean(),
            hvp_method=hvp_method,
            **manual(),
        )
        for k in range(5):
            opt.step(*batches(k), seed=k)
        results.append((torch.cat([p.detach().flatten() for p in outer.parameters()]), opt.hypergradient))
    (a, d), (b, e) = results
    start = torch.cat([p.detach().flatten() for p in kind().parameters()])
    assert float((a - start).norm()) > 1e-4
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    for name, t in d.items():
        torch.testing.assert_close(t, e[name], rtol=1e-4, atol=1e-6)


def test_model_without_second_derivative_warns_once():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.tanh()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            return g * (1 - ctx.saved_tensors[0].tanh() ** 2)

    class Layer(nn.Module):
        def forward(self, x):
            return Once.apply(x)

    opt = FSLA(network(Layer()), ClassWeights(), inner_loss=inner_loss, outer_loss=outer_loss)
    with pytest.warns(fsla.FiniteDifferenceWarning, match="once_differentiable"):
        opt.step(TRAIN, VALID)
    opt.step(TRAIN, VALID)


def test_large_model_uses_finite_differences(monkeypatch):
    monkeypatch.setattr(module_problem, "EXACT_UP_TO", 10)
    with pytest.warns(fsla.FiniteDifferenceWarning, match="51 parameters"):
        opt = FSLA(network(), ClassWeights(), inner_loss=inner_loss, outer_loss=outer_loss)
    assert opt._problem.hvp_method == "finite_difference"


def test_autocast_bfloat16_keeps_variables_float32():
    model = network().float()
    weights = ClassWeights().float()
    opt = FSLA(model, weights, inner_loss=inner_loss, outer_loss=outer_loss, autocast_dtype=torch.bfloat16, **manual())
    for _ in range(3):
        opt.step((TRAIN[0].float(), TRAIN[1]), (VALID[0].float(), VALID[1]))
    assert {p.dtype for p in (*model.parameters(), *weights.parameters(), *opt.adjoint.values())} == {torch.float32}
    with pytest.raises(ValueError, match=r"bfloat16 or None.*gradient scaler"):
        FSLA(model, weights, inner_loss=inner_loss, outer_loss=outer_loss, autocast_dtype=torch.float16)


def test_weight_decay_enters_adjoint_hessian():
    def plain(model, weights, batch):
        return (weights(batch[1]) * cross_entropy(model, batch)).mean()

    adjoints = []
    for decay, loss in ((0.04, plain), (0.0, inner_loss)):  # 0.02 ‖ω‖² has the gradient 0.04 ω
        model = network()
        weights = ClassWeights()
        options = manual() | {"inner_optimizer": partial(SGD, lr=TAU, weight_decay=decay)}
        opt = FSLA(model, weights, inner_loss=loss, outer_loss=outer_loss, **options)
        for k in range(5):
            opt.step(*batches(k))
        adjoints.append(torch.cat([weights.w.detach(), *(p.detach().flatten() for p in opt.adjoint.values())]))
    torch.testing.assert_close(*adjoints, rtol=1e-10, atol=1e-12)
    with pytest.warns(UserWarning, match="decoupled weight decay"):
        FSLA(network(), ClassWeights(), inner_loss=plain, outer_loss=outer_loss, inner_optimizer=torch.optim.AdamW)


def test_max_grad_norm_clips_and_max_adjoint_norm_bounds():
    model = network()
    before = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
    opt = SOBA(
        model,
        ClassWeights(),
        inner_loss=inner_loss,
        outer_loss=outer_loss,
        max_grad_norm=0.01,
        max_adjoint_norm=0.001,
        **manual(),
    )
    opt.step(TRAIN, VALID)
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    assert float(moved.norm()) == pytest.approx(TAU * 0.01, rel=1e-6)
    assert float(tree.norm({n: p.detach() for n, p in opt.adjoint.items()})) <= 0.001 * (1 + 1e-9)


def test_scheduler_changes_user_optimizer():
    opt = FSLA(network(), ClassWeights(), inner_loss=inner_loss, outer_loss=outer_loss, **manual())
    schedule = torch.optim.lr_scheduler.StepLR(opt.inner_optimizer, step_size=1, gamma=0.5)
    opt.step(TRAIN, VALID)
    schedule.step()
    assert opt.inner_optimizer.param_groups[0]["lr"] == TAU / 2


# ------------------------------------------------------------------------------------------------------ automatic


def test_hessian_norm_estimates_largest_eigenvalue():
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(12, 12, dtype=F64))[0]
    values = torch.linspace(1, 50, 12, dtype=F64)
    H = basis @ values.diag() @ basis.T
    problem = Problem(lambda lam, omega, _: omega["x"] @ H @ omega["x"] / 2, lambda lam, omega, _: omega["x"].sum())
    at = Point({}, {"x": torch.zeros(12, dtype=F64)})
    sizes = Automatic()
    measured = sizes.measure(problem.inner_at(at, Batch(None)).linearized(), 60, sizes.init(at.omega))
    assert 45 < float(measured.curvature) <= 50 * (1 + 1e-9)


def test_outer_step_scale_rises_as_adjoint_and_model_converge():
    """λ would else move along a direction that means nothing yet, or away from an ω that follows it too slowly."""
    g = torch.Generator().manual_seed(0)
    b = torch.ones(400, dtype=F64)

    def run(residual, noise, decay=0.5):
        sizes = Automatic(inner=False, adjoint=False)
        measured = sizes.init({"x": b})
        gradient = 1.0
        for _ in range(100):
            r = residual * b + noise * torch.randn(400, generator=g, dtype=F64)
            seen = b + noise * torch.randn(400, generator=g, dtype=F64)
            view = SimpleNamespace(grad_omega={"x": gradient * b})
            _, measured = sizes.residual({"x": b}, {"x": seen - r}, {"x": seen}, measured, view)
            gradient *= decay
        return float(sizes.outer_scale(measured))

    assert run(1.0, 0.0) == pytest.approx(1 / 26, rel=1e-3)
    assert run(0.2, 0.0) == pytest.approx(0.5, rel=1e-3)
    assert run(0.0, 1.0) > 0.8
    assert run(0.0, 0.0, decay=1.0) == pytest.approx(1 / 26)


@pytest.mark.parametrize("outer_every", [4, 8])
def test_automatic_steps_count_training_steps(outer_every):
    """A run of 400 training steps would else wait for all of them at outer_every=8."""
    b = {"x": torch.ones(3, dtype=F64)}
    sizes = Automatic(inner=False, adjoint=False).spaced(outer_every)
    measured = sizes.init(b)
    due = 0
    view = SimpleNamespace(grad_omega=tree.zeros_like(b))
    while float(sizes.outer_scale(measured)) < 0.5:
        _, measured = sizes.residual(b, b, b, measured, view)
        due += 1
    assert 20 <= due * outer_every < 20 + 2 * outer_every


class LogWeights(nn.Module):
    """Logs of class weights, in another unit."""

    def __init__(self, unit):
        super().__init__()
        self.unit, self.scaled = unit, nn.Parameter(torch.zeros(3, dtype=F64))

    def forward(self):
        return self.unit * self.scaled


def log_weighted_loss(model, weights, batch):
    ridge = sum(p.square().sum() for p in model.parameters())
    return (weights().exp()[batch[1]] * cross_entropy(model, batch)).mean() + 0.02 * ridge


def unweighted_loss(model, weights, batch):
    return cross_entropy(model, batch).mean()


@pytest.mark.parametrize("algorithm", ["soba", "single_loop", "one_step"])
def test_automatic_run_is_invariant_to_unit_of_outer_variable(algorithm):
    """What suits a log would else be silly for pixels, filters or the weights of a network."""
    ends = []
    for unit in (1e-3, 1.0, 1e3):
        weights = LogWeights(unit)
        losses = {"inner_loss": log_weighted_loss, "outer_loss": unweighted_loss}
        opt = fsla.BilevelOptimizer(network(), weights, algorithm=algorithm, hvp_method="autograd", **losses)
        for k in range(80):
            opt.step(*batches(k), seed=k)
        ends.append(weights().detach())
    assert float(ends[1].abs().max()) > 0.02
    torch.testing.assert_close(ends[0], ends[1], rtol=0.05, atol=1e-3)
    torch.testing.assert_close(ends[2], ends[1], rtol=0.05, atol=1e-3)


def test_user_outer_optimizer_waits_until_adjoint_converges():
    """λ would else move from step 0 along a v that is 0."""

    def moves(**options):
        weights = LogWeights(1.0)
        options |= {"inner_loss": log_weighted_loss, "outer_loss": unweighted_loss}
        opt = SOBA(network(), weights, hvp_method="autograd", outer_optimizer=partial(SGD, lr=1.0), **options)
        shares, scales = [], []
        for k in range(60):
            before = weights.scaled.detach().clone()
            scales.append(opt.step(*batches(0), seed=k).outer_step_scale)
            shares.append(float((before - weights.scaled.detach()).norm() / tree.norm(opt.hypergradient)))
        return shares[1:], scales[:-1]

    shares, scales = moves()
    assert shares[0] < 0.01
    assert max(shares) > 0.2
    torch.testing.assert_close(torch.tensor(shares), torch.tensor(scales, dtype=torch.float32), rtol=1e-3, atol=1e-5)
    shares, scales = moves(adjoint_optimizer=partial(SGD, lr=0.1))
    assert shares == pytest.approx([1.0] * len(shares))
    assert scales == [None] * len(scales)


@pytest.mark.parametrize("start", [-9.0, 3.0])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_outer_unit_stays_short_where_effect_saturates(start, sign):
    """A log penalty of -9 that moves down changes nothing, however far it goes; one that moves up explodes."""
    problem = Problem(
        lambda lam, omega, _: ((omega["x"] - 1).square() + lam["p"].exp() * omega["x"].square()).sum() / 2,
        lambda lam, omega, _: omega["x"].sum(),
    )
    at = Point({"p": torch.tensor([start], dtype=F64)}, {"x": torch.full((4,), 0.9, dtype=F64)})

    def gradient(length):
        return problem.inner_at(Point({"p": at.lam["p"] + sign * length}, at.omega), Batch(None)).grad_omega

    sizes = Automatic()
    view = problem.inner_at(at, Batch(None)).linearized()
    measured = sizes.measure(view, 20, sizes.init(at.omega), Push(at.omega, gradient))
    assert 0.1 < float(measured.outer_unit) < 5


def test_spaced_update_forgets_as_several_steps():
    """The memories of λ's step then reach as far back in training at every outer_every."""
    one, four = ScaleFree(), ScaleFree().spaced(4)
    x, g = {"x": torch.ones(2, dtype=F64)}, {"x": torch.tensor([1.0, 3.0], dtype=F64)}
    after = one(one.init(x), tree.scale(0.0, g), 1.0)
    for _ in range(4):
        after = one(after, g, 1.0)
    spaced = four(four(four.init(x), tree.scale(0.0, g), 1.0), g, 1.0)
    for name in ("mean", "square"):
        torch.testing.assert_close(spaced.memory[name], after.memory[name])
    assert one.spaced(1) == one


def test_scale_free_adam_ignores_gradient_scale():
    ends = []
    for size in (1e-6, 1.0, 1e6):
        update = ScaleFree()
        x = update.init({"x": torch.tensor([1.0, -2.0], dtype=F64)})
        for _ in range(200):
            x = update(x, {"x": size * (x.value["x"] - torch.tensor([0.5, 0.5]))}, 1.0)
        ends.append(x.value["x"])
    torch.testing.assert_close(ends[0], ends[1])
    torch.testing.assert_close(ends[2], ends[1])
    assert float((ends[1] - 0.5).abs().max()) < 0.2


@pytest.mark.parametrize("scale", [1.0, 100.0, 0.01])
def test_automatic_steps_solve_ridge_at_any_scale(scale):
    """The penalty that minimises the validation loss, without a rate, whatever the unit of the losses is."""
    g = torch.Generator().manual_seed(0)
    truth = torch.randn(10, 1, generator=g, dtype=F64) * torch.tensor([1.0] * 3 + [0.0] * 7, dtype=F64)[:, None]
    x = torch.randn(60, 10, generator=g, dtype=F64)
    y = x @ truth + torch.randn(60, 1, generator=g, dtype=F64)
    train, valid = (x[:30], y[:30]), (x[30:], y[30:])
    model = nn.Linear(10, 1, bias=False, dtype=F64)
    nn.init.zeros_(model.weight)
    penalty = nn.Parameter(torch.full((10,), -1.0, dtype=F64))

    def inner(model, penalty, batch):
        error = (model(batch[0]) - batch[1]).square().mean()
        return scale * (error + (penalty.exp() * model.weight.square()).sum())

    def outer(model, penalty, batch):
        return scale * (model(batch[0]) - batch[1]).square().mean()

    def f(log_penalty):
        H = train[0].T @ train[0] / 30 + log_penalty.exp().diag()
        w = torch.linalg.solve(H, train[0].T @ train[1] / 30)
        return float((valid[0] @ w - valid[1]).square().mean())

    start = f(penalty.detach())
    opt = FSLA(model, penalty, inner_loss=inner, outer_loss=outer)
    for _ in range(600):
        opt.step(train, valid)
    reference = penalty.detach().clone().requires_grad_()
    search = torch.optim.LBFGS([reference], max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        search.zero_grad()
        H = train[0].T @ train[0] / 30 + reference.exp().diag()
        w = torch.linalg.solve(H, train[0].T @ train[1] / 30)
        value = (valid[0] @ w - valid[1]).square().mean()
        value.backward()
        return value

    search.step(closure)
    best = f(reference.detach())
    assert f(penalty.detach()) - best < 0.1 * (start - best)


# ---------------------------------------------------------------------------------------------------------- guard


def test_diverging_run_rolls_back_and_warns():
    model = network()
    options = manual() | {"adjoint_optimizer": partial(SGD, lr=20.0)}
    opt = FSLA(model, ClassWeights(), inner_loss=inner_loss, outer_loss=outer_loss, max_rollbacks=8, **options)
    with pytest.warns(RollbackWarning, match=r"diverged at step \d+: .*v.*half as long"):
        take(opt, 150)
    assert opt.adjoint_optimizer.param_groups[0]["lr"] < 20.0
    assert all(bool(p.isfinite().all()) for p in (*model.parameters(), *opt.adjoint.values()))


def test_loss_rising_to_start_is_no_divergence():
    """It falls a thousandfold at once, and rises again as λ lets go: still far below its start."""
    rises = []

    def shifted(model, weights, batch):
        rises.append(1)
        return inner_loss(model, weights, batch) + (1000.0 if len(rises) < 30 else 0.1 if len(rises) < 60 else 200.0)

    opt = FSLA(network(), ClassWeights(), inner_loss=shifted, outer_loss=outer_loss, **manual())
    take(opt, 40)
    assert opt.step_count == 40


@pytest.mark.parametrize("before", [3, 12, 15])
def test_nan_batch_with_automatic_steps_rolls_back(before):
    """Also where the curvature is measured next."""
    model = network()
    opt = FSLA(model, ClassWeights(), inner_loss=inner_loss, outer_loss=outer_loss)
    take(opt, before)
    opt.step((TRAIN[0] * float("nan"), TRAIN[1]), VALID)
    with pytest.warns(RollbackWarning, match="not finite"):
        take(opt, 15)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    take(opt, 20)


def test_frozen_outer_parameter_stays_fixed():
    frozen = nn.Parameter(torch.zeros(3, dtype=F64), requires_grad=False)
    outer = {"weights": ClassWeights(), "shift": frozen}

    def shifted(model, outer, batch):
        return inner_loss(model, outer["weights"], batch) + 0.1 * (model(batch[0]) * outer["shift"].exp()).mean()

    opt = FSLA(network(), outer, inner_loss=shifted, outer_loss=lambda m, o, b: outer_loss(m, o["weights"], b))
    take(opt, 5)
    assert not frozen.requires_grad
    assert not frozen.any()
    with pytest.raises(ValueError, match="outer must have at least one parameter that requires a gradient"):
        FSLA(network(), frozen, inner_loss=inner_loss, outer_loss=outer_loss)


def test_rollback_restores_running_statistics():
    model = network(nn.BatchNorm1d(6, dtype=F64))
    opt = FSLA(model, ClassWeights(), inner_loss=inner_loss, outer_loss=outer_loss)
    take(opt, 15)
    opt.step((TRAIN[0] * float("nan"), TRAIN[1]), VALID)
    assert model[2].running_mean.isnan().any()
    with pytest.warns(RollbackWarning, match="not finite"):
        take(opt, 15)
    assert all(bool(t.isfinite().all()) for t in model.state_dict().values())


def test_rollbacks_used_up_raises_divergence_error():
    options = manual() | {"adjoint_optimizer": partial(SGD, lr=1e6)}
    opt = FSLA(network(), ClassWeights(), inner_loss=inner_loss, outer_loss=outer_loss, max_rollbacks=1, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RollbackWarning)
        with pytest.raises(DivergenceError, match=r"diverged at step \d+: .*max_adjoint_norm="):
            take(opt, 100)


def test_run_without_rollbacks_is_unguarded():
    options = manual() | {"adjoint_optimizer": partial(SGD, lr=1e6)}
    opt = FSLA(network(), ClassWeights(), inner_loss=inner_loss, outer_loss=outer_loss, max_rollbacks=None, **options)
    take(opt, 100)
    assert not all(bool(t.isfinite().all()) for t in opt.adjoint.values())


# --------------------------------------------------------------------------------------------------------- resume


@pytest.mark.filterwarnings("ignore::fsla.algorithms.SharedBatchWarning")
@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_resumes_exactly(kind, automatic):
    def make():
        model = network(nn.Dropout(0.2), nn.BatchNorm1d(6, dtype=F64))
        weights = ClassWeights()
        options = {} if automatic else manual() | {"inner_optimizer": torch.optim.Adam}
        return model, weights, KINDS[kind](model, weights, inner_loss=inner_loss, outer_loss=outer_loss, **options)

    def numbers(model, weights, opt):
        return [
            *model.state_dict().values(),
            *weights.state_dict().values(),
            *opt.adjoint.values(),
            *opt.hypergradient.values(),
        ]

    torch.manual_seed(3)
    model, weights, opt = make()
    for k in range(31):
        if k == 17:
            saved = copy.deepcopy((model.state_dict(), weights.state_dict(), opt.state_dict(), torch.get_rng_state()))
        opt.step(*batches(k))
    whole = numbers(model, weights, opt)
    model, weights, opt = make()
    model.load_state_dict(saved[0])
    weights.load_state_dict(saved[1])
    opt.load_state_dict(saved[2])
    torch.set_rng_state(saved[3])
    for k in range(17, 31):
        opt.step(*batches(k))
    for a, b in zip(whole, numbers(model, weights, opt), strict=True):
        assert torch.equal(a.detach(), b.detach())


def test_load_state_dict_of_other_model_raises():
    opt = FSLA(network(), ClassWeights(), inner_loss=inner_loss, outer_loss=outer_loss)
    opt.step(TRAIN, VALID)
    state = opt.state_dict()
    with pytest.raises(ValueError, match=r"another run \(optimizer: 'FSLA' there, 'SOBA' wanted"):
        SOBA(network(), ClassWeights(), inner_loss=inner_loss, outer_loss=outer_loss).load_state_dict(state)
    other = FSLA(nn.Linear(4, 3, dtype=F64), ClassWeights(), inner_loss=inner_loss, outer_loss=outer_loss)
    with pytest.raises(ValueError, match=r"omega\.0\.weight: 'float64\[6, 4\]' there, nothing wanted"):
        other.load_state_dict(state)
    other = FSLA(network(), ClassWeights(), inner_loss=inner_loss, outer_loss=outer_loss, **manual())
    with pytest.raises(ValueError, match=r"inner_update\.type: 'InPlace' there, 'TorchUpdate' wanted"):
        other.load_state_dict(state)


# ------------------------------------------------------------------------------------------------------- refusals


def make(model=None, outer=None, **options):
    losses = {"inner_loss": inner_loss, "outer_loss": outer_loss} | options
    return FSLA(network() if model is None else model, ClassWeights() if outer is None else outer, **losses)


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda: make(model=3), TypeError, "model must be a torch.nn.Module. Got int"),
        (lambda: make(outer=torch.zeros(3)), TypeError, "outer must be a torch.nn.Module, a torch.nn.Parameter"),
        (lambda: make(outer=nn.ReLU()), ValueError, "outer must have at least one parameter"),
        (lambda: make(model=nn.ReLU()), ValueError, "model must have at least one parameter"),
        (lambda: make(inner_loss=3), TypeError, "inner_loss must be callable"),
        (lambda: make(inner_loss=None), TypeError, "FSLA takes both inner_loss= and outer_loss=, or neither"),
        (
            lambda: make(lr=0.1),
            TypeError,
            r"FSLA has no lr=.*inner_optimizer=functools.partial\(torch.optim.SGD, lr=0.1",
        ),
        (lambda: make(inner_optimiser=None, steps=3), TypeError, "FSLA has no argument 'inner_optimiser', 'steps'"),
        (lambda: make(algorithm="soba"), TypeError, "FSLA is an algorithm"),
        (lambda: make(momentum="strom"), ValueError, "momentum.*Did you mean 'storm'"),
        (lambda: make(new_grad_weight=0.0), ValueError, "'new_grad_weight' must lie in"),
        (lambda: make(adjoint_at="now"), ValueError, "'adjoint_at' must be 'old_params' or 'new_params'"),
        (lambda: make(hvp_method="autograt"), ValueError, "hvp_method.*Did you mean 'autograd'"),
        (lambda: make(max_grad_norm=-1.0), ValueError, "'max_grad_norm' of FSLA must be positive"),
        (lambda: make(max_rollbacks=-1), ValueError, "'max_rollbacks' of FSLA must be at least 0"),
        (lambda: make(max_rollbacks=0.5), TypeError, "'max_rollbacks' of FSLA must be a whole number"),
        (lambda: make(inner_optimizer=3), TypeError, "'int' object is not callable|optimizer must be"),
        (lambda: make(inner_optimizer=lambda p: 3), TypeError, "optimizer must be a torch.optim.Optimizer"),
        (
            lambda: make(inner_optimizer=SGD([nn.Parameter(torch.ones(1))], lr=1)),
            ValueError,
            "inner_optimizer is missing parameters: 0.weight",
        ),
        (
            lambda: make(adjoint_optimizer=SGD([nn.Parameter(torch.ones(1))], lr=1)),
            ValueError,
            "adjoint_optimizer is missing parameters.*v's tensors are made here",
        ),
    ],
)
def test_optimizer_invalid_argument_raises(build, error, text):
    with pytest.raises(error, match=text):
        build()


def test_parameters_on_several_devices_raise():
    model = network()
    model[2] = nn.Linear(6, 3, device="meta", dtype=F64)
    with pytest.raises(ValueError, match=r"on one device\. Got cpu, meta"):
        make(model=model)


def test_invalid_loss_raises():
    with pytest.raises(ValueError, match="inner loss G must depend on outer"):
        make(inner_loss=lambda m, w, b: cross_entropy(m, b).mean()).step(TRAIN, VALID)
    with pytest.raises(ValueError, match=r"inner loss G must depend on omega.* the model"):
        make(inner_loss=lambda m, w, b: w.w.sum()).step(TRAIN, VALID)
    with pytest.raises(ValueError, match="outer loss F must return a real 0-d tensor"):
        make(outer_loss=lambda m, w, b: cross_entropy(m, b)).step(TRAIN, VALID)
    with pytest.raises(ValueError, match="must be finite at the starting point"):
        make(outer_loss=lambda m, w, b: cross_entropy(m, b).mean() / 0).step(TRAIN, VALID)
    with pytest.raises(IndexError) as caught:
        make(inner_loss=lambda m, w, b: b[7]).step(TRAIN, VALID)
    assert "inner loss G was called" in caught.value.__notes__[0]


def test_loss_error_leaves_model_unchanged():
    model = network()
    calls = []

    def breaking(m, w, b):
        calls.append(1)
        if len(calls) > 12:
            raise KeyboardInterrupt
        return inner_loss(m, w, b)

    opt = make(model=model, inner_loss=breaking, hvp_method="finite_difference", **manual())
    opt.step(TRAIN, VALID)
    calls[:] = [1] * 11
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyboardInterrupt):
        opt.step(TRAIN, VALID)  # breaks at ω - εv
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name])
    assert all(p.requires_grad for p in model.parameters())


def test_optimizer_missing_attribute_is_explained():
    opt = make()
    with pytest.raises(AttributeError, match=r"three optimisers.*GradScaler is not supported"):
        _ = opt.param_groups
    with pytest.raises(RuntimeError, match="no hypergradient before the first step"):
        _ = opt.hypergradient


def test_storm_on_shared_batches_warns():
    opt = make(momentum="storm")
    with pytest.warns(SharedBatchWarning, match="independent_batches="):
        opt.step(TRAIN, VALID)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(momentum="storm").step(TRAIN, VALID, independent_batches=batches(3))
