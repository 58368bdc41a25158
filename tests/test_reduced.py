"""Batches shared out among processes: the numbers of one process, in a few messages a step."""

import json

import pytest
import torch
import torch.distributed as dist

import fsla
from fsla import Point, Reduced
from fsla_reproduction.problems import LeastSquares
from launch import torchrun
from support import F64, normal


@pytest.mark.parametrize(
    ("count", "engines"),
    [pytest.param(2, ["graph"]), pytest.param(4, ["graph", "compile"], marks=pytest.mark.slow)],
    ids=["two", "four"],
)
def test_several_processes_take_the_steps_of_one(count, engines, tmp_path):
    """With batches that do not divide evenly, and with fewer samples than processes, too."""
    torchrun("reduced_program.py", tmp_path / "gaps", 200, *engines, processes=count)
    found = json.loads((tmp_path / "gaps").read_text())
    assert len(found) == 20 + 2 * len(engines) + 1  # captured steps of two problems, and a run that is taken up
    assert all(gap < 1e-9 for gap, _ in found.values()), found
    messages = {key.removesuffix(", batches of 16"): n for key, (_, n) in found.items()}
    assert messages["fsla, weights of classes"] == 7
    assert messages["fsla, weights of samples"] == 5
    assert messages["soba, weights of classes"] == messages["soba, weights of samples"] == 3


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_group_of_one_changes_nothing(alone):
    data = LeastSquares.draw(0)
    at = Point({"lam": normal(4)}, {"omega": normal(5)})
    batch = torch.arange(12)
    plain, reduced = data.losses(), Reduced(data.losses())
    v = {"omega": normal(5, seed=3)}
    ours, theirs = reduced.inner_at(at, batch), plain.inner_at(at, batch)
    assert torch.allclose(ours.value, theirs.value, rtol=1e-14)
    assert torch.allclose(ours.grad["omega"], theirs.grad["omega"], rtol=1e-14)
    assert torch.allclose(ours.cross_t({"lam": normal(4)})["omega"], theirs.cross_t({"lam": normal(4)})["omega"])
    for found, expected in zip(ours.linearised().hvp_cross(v), theirs.linearised().hvp_cross(v), strict=True):
        (name,) = found
        assert torch.allclose(found[name], expected[name], rtol=1e-14)
    assert torch.allclose(reduced.outer_at(at, batch).value, plain.outer_at(at, batch).value, rtol=1e-14)


def test_batches_that_cannot_be_shared_out_are_refused(alone):
    reduced = Reduced(fsla.Problem(lambda lam, omega, b: 0.0, lambda lam, omega, b: 0.0))
    at = Point({"x": torch.zeros(1, dtype=F64)}, {"w": torch.zeros(1, dtype=F64)})
    for batch in (None, torch.tensor(3), (torch.zeros(4), torch.zeros(5))):
        with pytest.raises(TypeError, match="with a row for each sample"):
            reduced.inner_at(at, batch)


def test_alone_it_is_the_problem():
    data = LeastSquares.draw(0)
    at = Point({"lam": normal(4)}, {"omega": normal(5)})
    reduced = Reduced(data.losses())
    assert (reduced.rank, reduced.world) == (0, 1)
    grad = reduced.inner_at(at, torch.arange(12)).grad["omega"]
    assert torch.allclose(grad, data.losses().inner_at(at, torch.arange(12)).grad["omega"], rtol=1e-14)
    assert reduced.messages == 0
