"""Integrations on two ranks as torchrun and accelerate launch start them: the numbers of one process."""

import os
import sys

import pytest
import torch

from launch import TESTS, finish, torchrun

MISSING = "is not installed; pip install -e '.[dev]' installs it"
for library in ("transformers", "datasets", "accelerate", "lightning"):
    pytest.importorskip(library, reason=f"{library} {MISSING}")

PROGRAM = "integrations_program.py"
STEPS = 12
OFFLINE = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
slow = pytest.mark.slow
KINDS = {
    # The class's own loss is computed in single precision.
    "trainer": 1e-9,
    "groups": 1e-6,
    "accelerate": 1e-9,
    "fully_shard": 1e-9,
    "fully_shard_lora": 1e-9,
    "lightning": 1e-9,
}
"""How far the numbers of two ranks may be from those of one, in float64."""


def one_process(kind, folder, *arguments):
    packages = (TESTS, *(TESTS.parent / name for name in ("src", "reproduction", "benchmarks")))
    path = os.pathsep.join(map(str, packages))
    done = finish(
        sys.executable, TESTS / PROGRAM, kind, folder, *arguments,
        env=os.environ | OFFLINE | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


def load(folder, name):
    return torch.load(folder / f"{name}.pt", weights_only=True)


@pytest.mark.parametrize("kind", ["trainer", *(pytest.param(name, marks=slow) for name in KINDS if name != "trainer")])
def test_two_ranks_equal_one_process(kind, tmp_path):
    """Shares of a batch, hooks of DDP and fully_shard, two micro-batches; the weights are equal on the ranks."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one_process(kind, tmp_path / "one", STEPS)
    torchrun(PROGRAM, kind, tmp_path / "two", STEPS, **OFFLINE)
    one, two = load(tmp_path / "one", f"{kind}-1"), load(tmp_path / "two", f"{kind}-2")
    assert one.dtype == torch.float64
    assert float(one[-5:].abs().max()) > 1e-5
    torch.testing.assert_close(two, one, atol=KINDS[kind], rtol=0)


@slow
@pytest.mark.parametrize("kind", ["trainer", "accelerate", "lightning"])
def test_resumed_ranks_equal_whole_run(kind, tmp_path):
    """Bit for bit on two ranks, from a checkpoint between due steps."""
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    torchrun(PROGRAM, kind, tmp_path / "whole", STEPS, **OFFLINE)
    first_steps = STEPS if kind != "lightning" else 6
    torchrun(PROGRAM, kind, tmp_path / "parts", first_steps, **OFFLINE)
    if kind == "trainer":
        newest = tmp_path / "parts" / f"checkpoint-{STEPS}"
        newest.rename(tmp_path / "newest")
    torchrun(PROGRAM, kind, tmp_path / "parts", STEPS, "resume", **OFFLINE)
    assert torch.equal(load(tmp_path / "parts", f"{kind}-2-resumed"), load(tmp_path / "whole", f"{kind}-2"))


@slow
def test_accelerate_launch_equals_torchrun(tmp_path):
    """`--cpu --num_processes 2` starts one process alone; this is how two are started without a GPU."""
    for name in ("launch", "torchrun"):
        (tmp_path / name).mkdir()
    torchrun(PROGRAM, "accelerate", tmp_path / "torchrun", STEPS, **OFFLINE)
    packages = (TESTS, *(TESTS.parent / name for name in ("src", "reproduction", "benchmarks")))
    settings = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, packages))}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    done = finish(
        *command, TESTS / PROGRAM, "accelerate", tmp_path / "launch", STEPS, env=os.environ | OFFLINE | settings
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert torch.equal(load(tmp_path / "launch", "accelerate-2"), load(tmp_path / "torchrun", "accelerate-2"))
