"""A step on a GPU leaves the host alone: automatic steps draw on the device, and the guard keeps its copy there."""

import math

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
            if isinstance(t, torch.Tensor) and t.device.type == "cpu":
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
    for _ in range(2):
        opt.step(batch, batch)
    with pytest.warns(fsla.RollbackWarning, match="goes on from step 10"):
        opt.step(batch, batch)
    assert all(bool(t.isfinite().all()) for t in opt._problem.moving())
