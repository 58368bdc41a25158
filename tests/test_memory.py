"""The memory of a process stays flat however many steps it takes."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

MEBIBYTE = 2**20
SCRIPT = """
import gc, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import fsla

torch.set_num_threads(1)
torch.manual_seed(0)
steps, folder = int(sys.argv[1]), sys.argv[2]
data = TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))
model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
weights = nn.Parameter(torch.zeros(3))


def losses(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def inner_loss(model, weights, batch):
    ridge = sum(p.square().sum() for p in model.parameters())
    return (weights.exp()[batch[1]] * losses(model, batch)).mean() + 0.01 * ridge


def outer_loss(model, weights, batch):
    return losses(model, batch).mean() + 0.01 * weights.square().sum()


def resident(opt, record):
    if record["step"] % (steps // 10) == 0:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        print(record["step"], pages * 4096, flush=True)


opt = fsla.FSLA(model, weights, inner_loss=inner_loss, outer_loss=outer_loss)
fsla.fit(
    opt, DataLoader(data, 16, shuffle=True), DataLoader(data, 32, shuffle=True),
    max_steps=steps, output_dir=folder, callbacks=[resident], eval_fn=lambda model: float(model.training),
    eval_every=steps // 100, save_every=steps // 20, progress_bar=False,
)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc/self/statm, which this system lacks")
@pytest.mark.parametrize(("steps", "bytes_a_step"), [(1000, 1024), pytest.param(100_000, 50, marks=pytest.mark.slow)])
def test_step_memory_over_long_run_is_constant(tmp_path, steps, bytes_a_step):
    """A leak grows in every tenth of the run. An allocator that takes a new arena, once, is none."""
    command = [sys.executable, "-c", SCRIPT, str(steps), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MALLOC_ARENA_MAX": "1"})
    assert done.returncode == 0, done.stderr
    sizes = {int(step): int(size) for step, size in map(str.split, done.stdout.splitlines())}
    print({step: f"{size / MEBIBYTE:.1f} MiB" for step, size in sizes.items()})
    assert len(sizes) == 10
    resident = [sizes[step] for step in sorted(sizes)][1:]
    growth = [later - earlier for earlier, later in pairwise(resident)]
    assert median(growth) < bytes_a_step * steps / 10, sizes
