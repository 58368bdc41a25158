"""`backward` in a loop that keeps its own optimiser step: the numbers of `step`, and of plain training between."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import fsla
from fsla import FSLA, MASOBA, SOBA, BilevelOptimizer, MicroBatches
from support import ClassWeights, cross_entropy, normal
from support import class_weighted_loss as inner_loss
from support import plain_loss as outer_loss

F64 = torch.float64
SGD = torch.optim.SGD
LOSSES = {"inner_loss": inner_loss, "outer_loss": outer_loss}
METHODS = ["autograd", "finite_difference"]
TRUSTED = normal(20, 4, seed=9), torch.arange(20) % 3
s_tfbo = partial(BilevelOptimizer, algorithm=fsla.algorithms.s_tfbo(fsla.steps.constant(1.0, 1.0, 1.0)))
KINDS = {"soba": SOBA, "ma_soba": partial(MASOBA, new_grad_weight=0.3), "s_tfbo": s_tfbo}
OPTIMIZERS = {
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "decay": partial(SGD, lr=0.1, weight_decay=0.03),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}


@pytest.fixture(autouse=True)
def _no_advice():
    """Other tests hold the warning about AdamW's decay."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="AdamW's decoupled weight decay")
        yield


def network(dropout=0.3):
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3)
    return nn.Sequential(*layers).to(F64)


def batch(k):
    return normal(16, 4, seed=k), torch.arange(k, k + 16) % 3


def in_parts(data, parts=4):
    return MicroBatches(list(zip(*(t.chunk(parts) for t in data), strict=True)))


class Run:
    """A model in training; `values` are all the numbers that a run has."""

    def __init__(self, kind=SOBA, inner_optimizer=OPTIMIZERS["momentum"], **options):
        self.model, self.weights = network(), ClassWeights()
        self.bilevel = kind(self.model, self.weights, inner_optimizer=inner_optimizer, **options)
        torch.manual_seed(5)

    def values(self):
        opt = self.bilevel
        return {
            **{f"model.{name}": t.clone() for name, t in self.model.state_dict().items()},
            **{f"weights.{name}": t.clone() for name, t in self.weights.state_dict().items()},
            **{f"v.{name}": t.clone() for name, t in opt.adjoint.items()},
            **({} if opt.state is None else {f"d.{name}": t.clone() for name, t in opt.hypergradient.items()}),
            "random": torch.get_rng_state(),
        }

    def move(self):
        self.bilevel.inner_optimizer.step()
        self.bilevel.inner_optimizer.zero_grad()


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, t in expected.items():
        assert torch.equal(actual[name], t), name


# ---------------------------------------------------------------------------------------------------- equal to `step`


@pytest.mark.parametrize("outer_every", [1, 3])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_backward_then_optimizer_step_equals_step(kind, optimizer, method, outer_every):
    """Bit for bit, with dropout and batch normalisation: users may move from one to the other at will."""
    options = LOSSES | {"hvp_method": method, "outer_every": outer_every}
    one = Run(KINDS[kind], OPTIMIZERS[optimizer], **options)
    for k in range(14):
        info = one.bilevel.step(batch(k), TRUSTED)
    expected = one.values()
    two = Run(KINDS[kind], OPTIMIZERS[optimizer], **options)
    for k in range(14):
        loss = two.bilevel.backward(batch(k), TRUSTED)
        assert not loss.requires_grad
        two.move()
    assert_equal(two.values(), expected)
    assert torch.equal(loss, info.inner_loss)


def test_backward_alternating_with_step_equals_step():
    """A state of one is a state of the other."""
    one, two = Run(**LOSSES), Run(**LOSSES)
    for k in range(8):
        one.bilevel.step(batch(k), TRUSTED)
    expected = one.values()
    torch.manual_seed(5)
    for k in range(8):
        if k % 2:
            two.bilevel.step(batch(k), TRUSTED)
        else:
            two.bilevel.backward(batch(k), TRUSTED)
            two.move()
    assert_equal(two.values(), expected)


def closures(run, inner, outer):
    """What a loop of somebody else's does: forward, backward, micro-batches."""

    def pass_over(loss, data):
        parts = list(data) if isinstance(data, MicroBatches) else [data]
        values = []
        for part in parts:
            value = loss(run.model, run.weights, part) / len(parts)
            value.backward()
            values.append(value.detach())
        return sum(values[1:], values[0])

    return partial(pass_over, inner_loss, inner), partial(pass_over, outer_loss, outer)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_backward_of_closures_equals_batches(kind, optimizer, parts):
    """Micro-batches, dropout and batch normalisation included: a closure is a pass over a batch."""
    inner = [in_parts(batch(k), parts) if parts > 1 else batch(k) for k in range(12)]
    one = Run(KINDS[kind], OPTIMIZERS[optimizer], hvp_method="finite_difference", **LOSSES)
    losses = []
    for part in inner:
        losses.append(one.bilevel.backward(part, TRUSTED))
        one.move()
    expected = one.values()
    two = Run(KINDS[kind], OPTIMIZERS[optimizer])
    for part, loss in zip(inner, losses, strict=True):
        assert torch.equal(two.bilevel.backward(*closures(two, part, TRUSTED)), loss)
        two.move()
    assert_equal(two.values(), expected)


def test_backward_accumulates_gradients():
    """A loop may accumulate a penalty's gradient, or that of other batches, before."""
    one, two = Run(**LOSSES), Run(**LOSSES)
    for run in (one, two):
        torch.manual_seed(5)
        run.bilevel.backward(batch(0), TRUSTED)
        run.move()
    before = {name: torch.full_like(p, 0.25) for name, p in one.model.named_parameters()}
    for name, p in one.model.named_parameters():
        p.grad = before[name].clone()
    grad = one.model[0].weight.grad
    states = torch.get_rng_state()
    one.bilevel.backward(batch(1), TRUSTED)
    torch.set_rng_state(states)
    two.bilevel.backward(batch(1), TRUSTED)
    assert one.model[0].weight.grad is grad
    for (name, p), q in zip(one.model.named_parameters(), two.model.parameters(), strict=True):
        assert torch.equal(p.grad, before[name] + q.grad)
    assert_equal(one.values(), two.values())


def test_backward_direction_ignores_gradients_changed_by_loop():
    """Clipping is in place; what a momentum inside the algorithm remembers must not shrink with it."""
    algorithm = fsla.Simultaneous(inner_momentum=fsla.steps.EMA())
    run = Run(partial(BilevelOptimizer, algorithm=algorithm), partial(SGD, lr=0.1), **LOSSES)
    for k in range(3):
        run.bilevel.backward(batch(k), TRUSTED)
        remembered = {name: t.clone() for name, t in run.bilevel.state.omega_direction.items()}
        clip_grad_norm_(run.model.parameters(), 1e-3)
        assert_equal(run.bilevel.state.omega_direction, remembered)
        run.move()


def test_backward_adjoint_sees_weight_decay():
    """v solves (H + decay) v = ∂_ω F, since the minimum that is trained to is that of the penalised loss."""

    def plain(model, weights, data):
        return (weights(data[1]) * cross_entropy(model, data)).mean()

    def penalised(model, weights, data):
        return plain(model, weights, data) + 0.02 * sum(p.square().sum() for p in model.parameters())

    adjoints = []
    for loss, decay in ((plain, 0.04), (penalised, 0.0)):
        run = Run(SOBA, partial(SGD, lr=0.1, weight_decay=decay), inner_loss=loss, outer_loss=outer_loss,
                  adjoint_optimizer=partial(SGD, lr=0.1))  # fmt: skip
        for k in range(6):
            run.bilevel.backward(batch(k), TRUSTED)
            run.move()
        adjoints.append(torch.cat([t.flatten() for t in run.bilevel.adjoint.values()]))
    torch.testing.assert_close(*adjoints, rtol=1e-10, atol=1e-12)


# -------------------------------------------------------------------------------------------------------- plain steps


class Recorded:
    """An iterator of outer batches that counts how many were drawn."""

    def __init__(self):
        self.drawn = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.drawn += 1
        return TRUSTED


@pytest.mark.parametrize("closed", [False, True])
def test_step_not_due_equals_plain_training(closed):
    """The same gradients, random stream and buffers; the outer batch is not touched, and v and λ stay."""
    run = Run(outer_every=5, **({} if closed else LOSSES | {"hvp_method": "finite_difference"}))
    plain = copy.deepcopy(run.model)
    optimizer = OPTIMIZERS["momentum"](plain.parameters())
    trusted, called, due = Recorded(), [], []
    for k in range(20):
        if run.bilevel.due:  # Both models go on from the same numbers afterwards.
            arguments = closures(run, batch(k), TRUSTED) if closed else (batch(k), trusted)
            run.bilevel.backward(*arguments)
            run.move()
            plain.load_state_dict(copy.deepcopy(run.model.state_dict()))
            optimizer.load_state_dict(copy.deepcopy(run.bilevel.inner_optimizer.state_dict()))
            due.append(k)
            continue
        states = torch.get_rng_state()
        before = {name: t for name, t in run.values().items() if name.startswith(("v.", "d.", "weights."))}
        if closed:
            loss = run.bilevel.backward(closures(run, batch(k), TRUSTED)[0], lambda: called.append(1))
        else:
            loss = run.bilevel.backward(batch(k), trusted)
        run.move()
        after = torch.get_rng_state()
        torch.set_rng_state(states)
        expected = inner_loss(plain, run.weights, batch(k))
        torch.autograd.backward(expected, inputs=list(plain.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(loss, expected.detach())
        assert torch.equal(after, torch.get_rng_state())
        assert_equal(dict(run.model.state_dict()), dict(plain.state_dict()))
        assert_equal({name: t for name, t in run.values().items() if name in before}, before)
    assert [k // 5 for k in due] == [0, 1, 2, 3]
    assert [k % 5 for k in due] != [due[0]] * 4
    assert not called
    assert closed or trusted.drawn == 4


@pytest.mark.parametrize("kind", [SOBA, FSLA])
def test_step_draws_from_iterator_only_when_due(kind):
    """Trusted data are few; a batch that nobody reads is not taken from them."""
    run, trusted = Run(kind, outer_every=4, **LOSSES), Recorded()
    due = 0
    for k in range(12):
        due += run.bilevel.due
        info = run.bilevel.step(batch(k), trusted)
        assert (info.outer_loss is None) == (trusted.drawn == due - run.bilevel.algorithm.due(k))
        assert trusted.drawn == due
    assert due == 3


def test_step_with_outer_batch_of_wrong_type_raises():
    """A loader is no batch, and an iterator that ends is none that a run can draw from."""
    run = Run(**LOSSES)
    with pytest.raises(TypeError, match=r"Got a DataLoader.*fsla.problems.cycle\(loader\)"):
        run.bilevel.step(batch(0), torch.utils.data.DataLoader([1, 2]))
    with pytest.raises(ValueError, match=r"has ended. fsla.problems.cycle\(loader\)"):
        run.bilevel.step(batch(0), iter([]))


# ---------------------------------------------------------------------------------------------------- random numbers


class WatchedDropout(nn.Dropout):
    """Records the mask of every pass."""

    def __init__(self):
        super().__init__(0.5)
        self.masks = []

    def forward(self, x):
        y = super().forward(x)
        self.masks.append((y != 0).numpy().tobytes())
        return y


def watched(kind=SOBA, **options):
    torch.manual_seed(0)
    dropout = WatchedDropout()
    model = nn.Sequential(nn.Linear(4, 64), dropout, nn.Linear(64, 3)).to(F64)
    bilevel = kind(model, ClassWeights(), inner_optimizer=partial(SGD, lr=0.1), **LOSSES | options)
    torch.manual_seed(7)
    return model, dropout, bilevel


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("outer_every", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_random_stream_after_step_equals_plain_training(method, outer_every, parts):
    """Turning the bilevel step on changes no shuffle, no augmentation and no mask of what comes after."""
    model, dropout, bilevel = watched(hvp_method=method, outer_every=outer_every)
    plain = copy.deepcopy(model)
    for k in range(8):
        data = in_parts(batch(k), parts) if parts > 1 else batch(k)
        torch.manual_seed(k)
        dropout.masks.clear()
        bilevel.step(data, TRUSTED)
        after = torch.get_rng_state()
        torch.manual_seed(k)
        plain[1].masks.clear()
        for part in data if parts > 1 else [data]:
            inner_loss(plain, ClassWeights(), part)
        assert torch.equal(torch.get_rng_state(), after)
        assert set(plain[1].masks) <= set(dropout.masks)  # The masks of the inner batch are those of plain training.
        assert len(set(plain[1].masks)) == parts


@pytest.mark.parametrize("method", METHODS)
def test_step_draws_one_mask_per_batch(method):
    """Inner, outer and independent batches of equal size: equal masks would couple what must be independent."""
    _, dropout, bilevel = watched(partial(FSLA, momentum="storm"), hvp_method=method)
    data = batch(0)
    for _ in range(3):
        dropout.masks.clear()
        bilevel.step(data, data, independent_batches=(data, data))
        assert len(set(dropout.masks)) == 4


def test_step_seed_fixes_masks_and_keeps_stream():
    """For comparisons, and for runs of which each step must be repeatable by itself."""
    seen = []
    for stream in (1, 2):
        model, dropout, bilevel = watched()
        torch.manual_seed(stream)
        before = torch.get_rng_state()
        for k in range(3):
            bilevel.step(batch(k), TRUSTED, seed=k)
        assert torch.equal(torch.get_rng_state(), before)
        seen.append((list(dropout.masks), model[0].weight.detach().clone()))
    assert seen[0][0] == seen[1][0]
    assert torch.equal(seen[0][1], seen[1][1])


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("algorithm", "name"), [("fsla", "fsla"), ("aid_bio", "aid_bio"), (fsla.algorithms.single_loop(), "Alternating")]
)
def test_backward_of_alternating_algorithm_raises(algorithm, name):
    """The message has the reason, and what to use."""
    if algorithm == "aid_bio":
        algorithm = fsla.algorithms.aid_bio(fsla.steps.constant(0.1, 0.1, 0.1))
        name = "Alternating"
    run = Run(partial(BilevelOptimizer, algorithm=algorithm), **LOSSES)
    with pytest.raises(TypeError, match=f"at one point.*{name} asks after the model has moved; use step"):
        run.bilevel.backward(batch(0), TRUSTED)


def test_backward_with_max_grad_norm_raises():
    """The loop clips what is in `.grad`; two clips could not be distinguished."""
    run = Run(max_grad_norm=1.0, **LOSSES)
    with pytest.raises(TypeError, match="max_grad_norm is for step"):
        run.bilevel.backward(batch(0), TRUSTED)


def test_optimizer_without_losses_step_raises():
    """Closures are for backward alone."""
    run = Run()
    with pytest.raises(TypeError, match="step needs inner_loss= and outer_loss="):
        run.bilevel.step(batch(0), TRUSTED)
    with pytest.raises(TypeError, match=r"backward takes closures.*Got tuple"):
        run.bilevel.backward(batch(0), TRUSTED)


# -------------------------------------------------------------------------------------------------- interrupted passes


class Interrupting:
    """A loss that raises at its n-th call, in the forward pass or in the backward pass."""

    def __init__(self, loss, calls, where):
        self.loss, self.calls, self.where = loss, calls, where

    def __call__(self, model, weights, data):
        self.calls["left"] -= 1
        last = self.calls["left"] == 0
        value = self.loss(model, weights, data)
        if last and self.where == "forward":
            raise KeyboardInterrupt
        if last:
            value.register_hook(self._stop)
        return value

    def _stop(self, _):
        raise KeyboardInterrupt


def start_loop(loop, method, losses):
    """A run after its first step, with other gradients in `.grad`; and what takes its next step."""
    run = Run(FSLA if loop == "fsla" else SOBA, hvp_method=method, **losses)
    take = run.bilevel.backward if loop == "backward" else run.bilevel.step
    take(batch(0), TRUSTED)
    for p in (*run.model.parameters(), *run.weights.parameters()):
        p.grad = torch.full_like(p, 0.5)
    return run, take


def with_gradients(run):
    named = (*run.model.named_parameters(), *run.weights.named_parameters())
    return run.values() | {f"grad.{name}": p.grad.clone() for name, p in named}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loop", ["step", "backward", "fsla"])
def test_backward_interrupted_changes_nothing(loop, method, where):
    """Ctrl-C in a notebook, at each pass in turn: the step is as if it had not begun, also what earlier passes moved.

    FSLA asks after λ and ω have moved: each is before its move or after it.
    """
    run, take = start_loop(loop, method, LOSSES)
    take(batch(1), TRUSTED)
    done = with_gradients(run)
    calls = {"left": 0}
    losses = {name: Interrupting(loss, calls, where) for name, loss in LOSSES.items()}
    for number in range(1, 20):
        calls["left"] = 0
        run, take = start_loop(loop, method, losses)
        saved = with_gradients(run)
        calls["left"] = number
        try:
            take(batch(1), TRUSTED)
        except KeyboardInterrupt:
            pass
        else:
            break
        for name, t in with_gradients(run).items():
            moves_in_a_pass = name == "random" or "running" in name or "num_batches" in name
            may_have_moved = loop == "fsla" and not moves_in_a_pass
            assert torch.equal(t, saved[name]) or (may_have_moved and torch.equal(t, done[name])), (number, name)
        assert all(p.requires_grad for p in (*run.model.parameters(), *run.weights.parameters()))
        take(batch(2), TRUSTED)
    assert number > 2
