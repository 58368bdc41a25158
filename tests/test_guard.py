"""The guard: quantities that start at 0 may grow, runs that diverge go back, and what it keeps is what is trained."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

import fsla
from fsla.train._guard import KNOWN, SHORTEST, Rise, Scale
from support import ClassWeights, class_weighted_loss, plain_loss

F64 = torch.float64
SGD = torch.optim.SGD


class Parameters(nn.Module):
    """Tensors to train, by name."""

    def __init__(self, **tensors):
        super().__init__()
        for name, t in tensors.items():
            setattr(self, name, nn.Parameter(t.clone()))


def quadratic(seed, condition=10.0, unit=1.0):
    """ω starts at 0, where G = 0; its target is far away."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=F64))
    h = basis @ torch.diag(torch.logspace(0, -math.log10(condition), 6, dtype=F64)) @ basis.T
    j = torch.randn(6, 3, generator=generator, dtype=F64)
    target = unit * torch.randn(6, generator=generator, dtype=F64)
    model = Parameters(w=torch.zeros(6, dtype=F64))
    outer = Parameters(lam=torch.randn(3, generator=generator, dtype=F64))
    return model, outer, {
        "inner_loss": lambda model, outer, batch: model.w @ h @ model.w / 2 - model.w @ j @ outer.lam,
        "outer_loss": lambda model, outer, batch: (model.w - target).square().sum() / 2,
    }  # fmt: skip


def run(problem, kind=fsla.SOBA, steps=120, **options):
    model, outer, losses = problem
    opt = kind(model, outer, **losses, **options)
    for _ in range(steps):
        opt.step(None)
    return model, outer, opt


@pytest.mark.parametrize("kind", [fsla.FSLA, fsla.SOBA])
@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("condition", [1.0, 100.0])
def test_guard_accepts_quadratic_from_zero(kind, unit, condition):
    """A rescue would be a warning, which fails here, and would change the numbers."""
    watched = run(quadratic(0, condition, unit), kind)[0]
    unwatched = run(quadratic(0, condition, unit), kind, max_rollbacks=None)[0]
    assert watched.w.norm() > 0
    assert torch.equal(watched.w, unwatched.w)


def chain(states=6, slip=0.2, discount=0.9):
    """A walk with a reward at its end: Q of each state and move, their expected value, and the best policy's value."""
    to, reward = torch.zeros(states, 2, states, dtype=F64), torch.zeros(states, 2, dtype=F64)
    for state in range(states - 1):
        for move, step in enumerate((-1, 1)):
            for taken, p in ((step, 1 - slip), (-step, slip)):
                new = min(max(state + taken, 0), states - 1)
                if new == states - 1:
                    reward[state, move] += p
                else:
                    to[state, move, new] += p

    def value(policy):
        moves = torch.einsum("sa,sat->st", policy, to)
        return torch.linalg.solve(torch.eye(states, dtype=F64) - discount * moves, (policy * reward).sum(1))[0]

    def bellman(critic, actor, batch):
        values = (actor.logits.softmax(1) * critic.q).sum(1)
        return (reward + discount * to @ values - critic.q).square().sum() / 2

    def minus_value(critic, actor, batch):
        return -(actor.logits[0].softmax(0) * critic.q[0]).sum()

    zeros = torch.zeros(states, 2, dtype=F64)
    problem = (Parameters(q=zeros), Parameters(logits=zeros), {"inner_loss": bellman, "outer_loss": minus_value})
    return problem, value, value(torch.tensor([0.0, 1.0], dtype=F64).repeat(states, 1))


def test_guard_accepts_critic_growing_from_zero():
    """F, v and d start at 0 and rightly grow by more than a hundredfold; the policy reaches the optimum."""
    problem, value, best = chain()
    _, actor, _ = run(problem, fsla.FSLA, steps=800)
    assert value(actor.logits.softmax(1)) > 0.99 * best


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"inner_optimizer": partial(SGD, lr=3.0)}, "inner loss and outer loss"),
        ({"adjoint_optimizer": partial(SGD, lr=3.0)}, "v and hypergradient"),
        ({"outer_optimizer": partial(SGD, lr=1e3)}, "inner loss and outer loss"),
    ],
    ids=["inner", "adjoint", "outer"],
)
def test_guard_detects_large_steps_from_zero(options, names):
    """Exponential growth differs from a start at 0 long before anything overflows."""
    with pytest.warns(fsla.RollbackWarning, match=f"{names}.* not finite or 100 times") as caught:
        _, _, opt = run(quadratic(1), steps=40, max_rollbacks=30, **options)
    assert all("diverged at step" in str(warning.message) for warning in caught)
    assert all(bool(t.isfinite().all()) for t in opt._problem.moving())


def test_guard_detects_jump_of_positive_losses():
    """Dead units end a blow-up on a plateau, which never grows again."""

    def shifted(model, outer, batch):
        return class_weighted_loss(model, outer, batch[:2]) + batch[2]

    batch = torch.ones(6, 4, dtype=F64), torch.arange(6) % 3
    opt = fsla.SOBA(nn.Linear(4, 3, dtype=F64), ClassWeights(), inner_loss=shifted, outer_loss=plain_loss)
    for _ in range(2):
        opt.step((*batch, 0.0), batch)
    for _ in range(2):
        opt.step((*batch, 1e4), batch)
    with pytest.warns(fsla.RollbackWarning, match="at step 5: inner loss not finite or 100 times"):
        opt.step((*batch, 1e4), batch)


@pytest.mark.parametrize(
    ("sizes", "diverges"),
    [
        ([1.0] * KNOWN + [50.0, 99.0, 101.0], False),
        ([1.0] * (KNOWN + 1) + [101.0], True),
        ([1.0] * KNOWN + [101.0], False),
        ([0.0] * 50 + [1e-9, 1.0, 2.0], False),
        ([1e-9, 1e-6, 1e-3, 1e-2], False),
        ([1e-9, 1e-6, 1e-3, 1.0], True),
        ([1e-9, 1e-6, 1e-3, 1e-3, 1.0, 1e3], False),
        ([math.nan], True),
        ([1.0, math.inf], True),
    ],
)
def test_scale_separates_divergence_from_growth(sizes, diverges):
    """The first size is the scale; growth counts against a known scale, or as often in a row as makes one known."""
    scale = Scale()
    for size in sizes:
        scale.observe(size)
    assert (scale.growths >= KNOWN) == diverges


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_guard_accepts_inner_loss_that_leaves_its_minimum(unit):
    """ω starts at ω*(λ), so that G rises from rounding to what a moving λ leaves of it, and stays there."""

    def inner_loss(model, outer, batch):
        return unit * (model.w - outer.lam).square().sum()

    def outer_loss(model, outer, batch):
        return (model.w - 3).square().sum()

    start = Parameters(w=torch.zeros(4, dtype=F64)), Parameters(lam=torch.zeros(4, dtype=F64))
    model, _, _ = run((*start, {"inner_loss": inner_loss, "outer_loss": outer_loss}), steps=400)
    assert (model.w - 3).norm() < 1


class Uphill(torch.optim.SGD):
    """An optimiser that walks in the wrong direction."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = -p.grad
        return super().step(closure)


def test_guard_says_once_that_outer_loss_stays_high_and_shortens_steps():
    """Nothing diverges where λ circles above its start, and nobody would notice."""
    uphill = {"outer_optimizer": partial(Uphill, lr=0.01), "projection": fsla.steps.Box(-2, 2)}
    with pytest.warns(fsla.RisingLossWarning, match="has been above") as caught:
        _, _, opt = run(quadratic(0), steps=400, **uphill)
    assert len(caught) == 1
    assert opt.outer_optimizer.param_groups[0]["lr"] < 0.005
    saved = opt.state_dict()
    opt.load_state_dict(saved)
    assert opt._guard.rise.reported


def test_guard_shortens_automatic_steps_but_not_for_good():
    """A λ that could not move any more would never come back."""
    opt = fsla.SOBA(*quadratic(0)[:2], **quadratic(0)[2])
    opt._guard.rise.start = 1.0
    with pytest.warns(fsla.RisingLossWarning):
        halved = [opt._guard.shorten(step) for step in range(10)]
    assert halved == [True] * 4 + [False] * 6
    assert opt._algorithm_now.outer_update.factor == SHORTEST


@pytest.mark.parametrize(
    ("losses", "rises"),
    [
        ([1.0] * 500, False),
        ([1.0, 2.0, *[1.9] * 500], False),
        ([1.0] * 50 + [1.1] * 70 + [0.9] * 100, False),
        ([1.0] * 50 + ([1.1] * 10 + [0.9] * 10) * 50, False),
        ([1.0] * 50 + [1e6] + [0.9] * 300, False),
        ([1.0] * 50 + [1.1] * 120, True),
        ([1.0] * 50 + [1.1] * 40 + [0.9] * 10 + [1.1] * 100, True),
        ([-1.0] * 50 + [-0.9] * 120, True),
        ([0.0] * 50 + [1e-9] * 120, True),
    ],
)
def test_rise_needs_most_losses_of_100_steps_above_the_start(losses, rises):
    """The noise of batches goes both ways, and a λ that circles is above its start most of the time."""
    rise = Rise()
    reported = [rise.observe(loss, step) for step, loss in enumerate(losses)]
    assert any(reported) == rises


def test_guard_does_not_copy_frozen_backbone(tmp_path):
    """A copy of a frozen base of a fine-tuned model costs as much as the base; a checkpoint would hold it twice."""
    frozen = nn.Linear(4, 20_000, dtype=F64).requires_grad_(False)
    model = nn.Sequential(frozen, nn.Flatten(), nn.Linear(20_000, 3, dtype=F64))
    batch = torch.ones(6, 4, dtype=F64), torch.arange(6) % 3
    opt = fsla.SOBA(model, ClassWeights(), inner_loss=class_weighted_loss, outer_loss=plain_loss)
    opt.step(batch, batch)
    assert all(t.shape != frozen.weight.shape for t in opt._good["tensors"])
    assert sum(t.numel() for t in opt._good["tensors"]) == sum(
        p.numel() for p in (*model[2].parameters(), *opt._problem.lam.values())
    )


def test_guard_reuses_memory_of_last_good_state():
    """Two copies at once would double what the guard costs."""
    model = nn.Linear(4, 3, dtype=F64)
    batch = torch.ones(6, 4, dtype=F64), torch.arange(6) % 3
    opt = fsla.SOBA(model, ClassWeights(), inner_loss=class_weighted_loss, outer_loss=plain_loss)
    opt.step(batch, batch)
    places = [t.data_ptr() for t in opt._good["tensors"]]
    for _ in range(9):
        opt.step(batch, batch)
    assert [t.data_ptr() for t in opt._good["tensors"]] == places
    assert dict(opt._good["state"]["json"]["mapping"])["step_count"] == 10
    assert torch.equal(opt._good["tensors"][0], model.weight)
    opt.step(batch, batch)
    assert not torch.equal(opt._good["tensors"][0], model.weight)


def test_guard_without_rollbacks_stores_nothing():
    """`max_rollbacks=0` stops at a divergence, at no cost in memory."""
    batch = torch.ones(6, 4, dtype=F64), torch.arange(6) % 3
    losses = {"inner_loss": class_weighted_loss, "outer_loss": plain_loss}
    opt = fsla.SOBA(nn.Linear(4, 3, dtype=F64), ClassWeights(), **losses, max_rollbacks=0)
    for _ in range(9):
        opt.step(batch, batch)
    assert opt._good is None
    with pytest.raises(fsla.DivergenceError, match="inner loss"):
        opt.step((batch[0] * math.nan, batch[1]), batch)


# -------------------------------------------------------------------------------------- in a loop of somebody else's


BATCH = torch.ones(6, 4, dtype=F64) * torch.arange(1, 7, dtype=F64)[:, None], torch.arange(6) % 3
LOSSES = {"inner_loss": class_weighted_loss, "outer_loss": plain_loss}


def in_a_loop(opt, steps, batch=BATCH):
    for _ in range(steps):
        opt.backward(batch, batch)
        opt.inner_optimizer.step()
        opt.inner_optimizer.zero_grad()


def take(opt, steps):
    for _ in range(steps):
        opt.step(BATCH, BATCH)


def build(**options):
    torch.manual_seed(0)
    options = {"inner_optimizer": partial(torch.optim.Adam, lr=0.01)} | options
    return fsla.SOBA(nn.Linear(4, 3, dtype=F64), ClassWeights(), **LOSSES | options)


def test_guard_in_user_loop_stores_adjoint_and_outer_only():
    """The model and its optimiser are not ours to copy: no second copy of them is held."""
    opt = build()
    in_a_loop(opt, 12)
    assert [tuple(t.shape) for t in opt._good["tensors"]] == [(3,)]
    assert not any(path.startswith("optimizers") for path in opt._good["state"]["tensors"])


def test_guard_in_user_loop_resets_adjoint_and_halves_steps():
    """The model goes on from where it is; the weights go back to their last good value."""
    opt = build(adjoint_optimizer=partial(SGD, lr=0.02), outer_optimizer=partial(SGD, lr=0.02))
    in_a_loop(opt, 16)
    good = opt._good["tensors"][0].clone()
    before = [p.detach().clone() for p in opt.model.parameters()]
    moments = copy.deepcopy(opt.inner_optimizer.state_dict()["state"])
    with pytest.warns(fsla.RollbackWarning, match="at step 17: .*v begins anew, and their steps are half as long; 2"):
        opt.backward(BATCH, (BATCH[0] * math.nan, BATCH[1]))
    assert all(bool(p.grad.isfinite().all()) for p in opt.model.parameters())
    assert opt.step_count == 17
    assert torch.equal(opt.outer.w.detach(), good)
    assert not any(t.any() for t in opt.adjoint.values())
    assert [o.param_groups[0]["lr"] for o in (opt.adjoint_optimizer, opt.outer_optimizer)] == [0.01, 0.01]
    assert opt.inner_optimizer.param_groups[0]["lr"] == 0.01
    assert all(torch.equal(p, old) for p, old in zip(opt.model.parameters(), before, strict=True))
    assert repr(opt.inner_optimizer.state_dict()["state"]) == repr(moments)
    in_a_loop(opt, 20)
    trained = *opt.model.parameters(), *opt.adjoint.values(), *opt.outer.parameters()
    assert all(bool(t.isfinite().all()) for t in trained)


def test_guard_halves_automatic_steps():
    """They have no optimiser whose rate could be halved; the factor is part of what is measured."""
    opt = build()
    in_a_loop(opt, 16)
    with pytest.warns(fsla.RollbackWarning):
        opt.backward(BATCH, (BATCH[0] * math.nan, BATCH[1]))
    assert float(opt.state.measured.step_scale) == 0.5


def test_guard_halves_scheduled_steps():
    """A rollback with the same steps would end where it began."""
    algorithm = fsla.algorithms.soba(fsla.steps.constant(0.001, 0.01, 0.7))
    torch.manual_seed(0)
    opt = fsla.BilevelOptimizer(
        nn.Linear(4, 3, dtype=F64), ClassWeights(), algorithm=algorithm, max_rollbacks=12, **LOSSES
    )
    with pytest.warns(fsla.RollbackWarning):
        take(opt, 150)
    assert opt._algorithm_now.step_sizes.rates(0).adjoint_lr <= 0.35
    saved = opt.state_dict()
    opt.load_state_dict(saved)
    assert opt._algorithm_now.step_sizes.rates(0).adjoint_lr <= 0.35


def test_guard_compares_adjoint_only_after_a_move():
    """Between two steps of v many checks see the same number, which does not show its scale."""
    opt = build(outer_every=40)
    in_a_loop(opt, 100)
    assert opt._guard._scales["v"].quiet + opt._guard._scales["v"].growths <= 3


@pytest.mark.parametrize("max_rollbacks", [0, None])
def test_guard_in_user_loop_without_rollbacks_stores_nothing(max_rollbacks):
    """0 raises at a divergence, None checks nothing."""
    opt = build(max_rollbacks=max_rollbacks)
    in_a_loop(opt, 9)
    assert opt._good is None
    bad = BATCH[0], BATCH[1]
    if max_rollbacks is None:
        opt.backward(bad, (BATCH[0] * math.nan, BATCH[1]))
        return
    with pytest.raises(fsla.DivergenceError, match="outer loss"):
        opt.backward(bad, (BATCH[0] * math.nan, BATCH[1]))


def test_rollback_keeps_stored_state():
    """Optimisers write into their moments; the copy must serve a second rollback."""
    opt = build()
    take(opt, 16)
    opt.step((BATCH[0] * math.nan, BATCH[1]), BATCH)
    with pytest.warns(fsla.RollbackWarning):
        take(opt, 3)
    before = {path: t.clone() for path, t in opt._good["state"]["tensors"].items()}
    assert any(path.startswith("optimizers/inner_optimizer") for path in before)
    take(opt, 3)
    assert all(torch.equal(t, before[path]) for path, t in opt._good["state"]["tensors"].items())
