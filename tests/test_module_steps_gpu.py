"""A step on a GPU leaves the host alone: automatic steps draw on the device, and the guard keeps its copy there."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsla
from support import ClassWeights, class_weighted_loss, plain_loss

pytestmark = pytest.mark.gpu


class RefuseLargeHostTensors(TorchDispatchMode):
    """Raises where an operation makes a tensor of a network's size on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            is_random_state = isinstance(t, torch.Tensor) and t.dtype == torch.uint8
            if isinstance(t, torch.Tensor) and t.device.type == "cpu" and not is_random_state:
                assert t.numel() < 100, f"{func} made {tuple(t.shape)} on the host"
        return out


def make(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 3)).cuda().double()
    losses = {"inner_loss": class_weighted_loss, "outer_loss": plain_loss}
    opt = fsla.SOBA(model, ClassWeights().cuda(), **losses, **options)
    x = torch.randn(60, 4, dtype=torch.float64, device="cuda")
    return opt, (x, torch.arange(60, device="cuda") % 3)


@pytest.mark.parametrize("hvp_method", ["autograd", "finite_difference"])
def test_automatic_step_makes_no_large_host_tensor(hvp_method):
    """98 M random numbers or a copy of the optimiser on the host take seconds."""
    opt, batch = make(hvp_method=hvp_method)
    with RefuseLargeHostTensors():
        for _ in range(21):
            opt.step(batch, batch)
    assert opt.state.measured.curvature > 0
    assert all(t.is_cuda for t in opt._good["tensors"])


def test_rollback_on_gpu_restores_last_good_state():
    """The copy on the device is as good as one on the host."""
    opt, batch = make()
    for _ in range(11):
        opt.step(batch, batch)
    opt.step((batch[0] * math.nan, batch[1]), batch)

    def go_on():
        for _ in range(3):
            opt.step(batch, batch)

    with pytest.warns(fsla.RollbackWarning, match="goes on from step 10"):
        go_on()
    assert all(bool(t.isfinite().all()) for t in opt._problem.moving())


ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0)
CAPTURED = {
    "soba": {},
    "soba, exact": {"hvp_method": "autograd"},
    "fsla": {"algorithm": fsla.algorithms.fsla(momentum="average")},
    "fsla with STORM": {"algorithm": fsla.algorithms.fsla(momentum="storm")},
    "adamw": {"inner_optimizer": ADAMW, "outer_optimizer": partial(torch.optim.Adam, lr=1e-2)},
    "fused adamw": {"inner_optimizer": partial(ADAMW, fused=True)},
    "sgd": {"inner_optimizer": partial(torch.optim.SGD, lr=1e-2, momentum=0.9)},
    "outer_every=3": {"inner_optimizer": ADAMW, "outer_every": 3},
    "a schedule": {"algorithm": fsla.algorithms.soba(fsla.steps.Schedule(0.1, 0.05, 0.05, power=0.5))},
}


def make_captured(engine, *, layers=(), **options):
    """A run whose optimisers count steps on the device in either engine: such counters are in single precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Tanh(), *layers, nn.Linear(64, 3)).cuda().double()
    losses = {"inner_loss": class_weighted_loss, "outer_loss": plain_loss, "hvp_method": "finite_difference"}
    opt = fsla.BilevelOptimizer(model, ClassWeights().cuda(), engine=engine, **losses | options)
    for one in opt._optimizers.values():
        for group in one.param_groups:
            group |= {"capturable": True} if "capturable" in group else {}
    return opt


def take_steps(opt, steps, rows=60):
    generator = torch.Generator("cuda").manual_seed(1)

    def draw():
        x = torch.randn(rows, 4, dtype=torch.float64, device="cuda", generator=generator)
        return x, torch.randint(3, (rows,), device="cuda", generator=generator)

    infos = []
    for _ in range(steps):
        extra = {"independent_batches": (draw(), draw())} if opt.reads_independent_batches else {}
        infos.append(opt.step(draw(), draw(), **extra))
    return infos


@pytest.mark.filterwarnings("error::fsla.train.EngineWarning")
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_steps_of_a_module_match_eager_steps(name):
    eager, captured = (make_captured(engine, **CAPTURED[name]) for engine in ("eager", "graph"))
    expected, infos = take_steps(eager, 40), take_steps(captured, 40)
    assert all(graph is not None for graph in captured._graphs._graphs.values())
    assert len(captured._graphs._graphs) == (2 if "outer_every" in name else 1)
    for a, b in zip(eager._problem.moving(), captured._problem.moving(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-8)
    for a, b in zip(expected, infos, strict=True):
        torch.testing.assert_close(b.inner_loss, a.inner_loss, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(b.adjoint_norm, a.adjoint_norm, rtol=1e-5, atol=1e-8)
    group = captured._optimizers["inner_optimizer"].param_groups[0] if captured._optimizers else {"lr": 0.0}
    assert isinstance(group["lr"], float)


def test_captured_step_follows_a_scheduler():
    eager, captured = (make_captured(engine, inner_optimizer=ADAMW) for engine in ("eager", "graph"))
    for opt in (eager, captured):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt.inner_optimizer, 0.9)
        for _ in range(4):
            take_steps(opt, 5)
            scheduler.step()
    assert len(captured._graphs._graphs) == 1
    for a, b in zip(eager._problem.moving(), captured._problem.moving(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-8)


def test_captured_run_is_saved_and_goes_on_eagerly():
    captured, eager = (make_captured(engine, inner_optimizer=ADAMW) for engine in ("graph", "eager"))
    take_steps(captured, 12)
    eager.model.load_state_dict(captured.model.state_dict())
    eager.outer.load_state_dict(captured.outer.state_dict())
    eager.load_state_dict(captured.state_dict())
    take_steps(captured, 6)
    take_steps(eager, 6)
    for a, b in zip(captured._problem.moving(), eager._problem.moving(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("case", "reason"), [("dropout", "random layers"), ("host", "the host waits"), ("item", "the host waits")]
)
def test_step_that_cannot_be_captured_is_taken_eagerly(case, reason):
    def inner(model, outer, data):
        x, y = data
        x = x + x.sum().item() * 0 if case == "item" else x.cpu().cuda() if case == "host" else x
        return class_weighted_loss(model, outer, (x, y))

    layers = [nn.Dropout(0.2)] if case == "dropout" else []
    pair = [make_captured(engine, layers=layers, inner_loss=inner) for engine in ("eager", "auto")]
    torch.manual_seed(5)
    take_steps(pair[0], 8)
    torch.manual_seed(5)
    with pytest.warns(fsla.train.EngineWarning, match=reason):
        take_steps(pair[1], 8)
    for a, b in zip(*(opt._problem.moving() for opt in pair), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-8)


def test_step_launches_do_not_grow_with_the_layers():
    """The arithmetic between the passes launches some kernels a tree, not some a parameter."""
    torch.manual_seed(0)
    counts = []
    for layers in (20, 40):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))).cuda()
        opt = fsla.SOBA(
            model, ClassWeights().cuda(), inner_loss=class_weighted_loss, outer_loss=plain_loss,
            hvp_method="finite_difference", inner_optimizer=ADAMW,
        )  # fmt: skip
        x, y = torch.randn(60, 8, device="cuda"), torch.arange(60, device="cuda") % 3
        for _ in range(8):
            opt.step((x, y), (x, y))

        def passes(opt=opt, x=x, y=y):
            for loss in (class_weighted_loss, class_weighted_loss, plain_loss):
                opt.model.zero_grad()
                loss(opt.model, opt.outer, (x, y)).backward()

        passes()
        counts.append(launches(lambda opt=opt, x=x, y=y: opt.step((x, y), (x, y))) - launches(passes))
    assert counts[1] < counts[0] + 30
    assert counts[0] < 250


def launches(work):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as seen:
        work()
        torch.cuda.synchronize()
    return sum(event.name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for event in seen.events())
