"""One process with nccl on a GPU: the numbers of a process without it, captured steps, and checkpoints of shards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fit_program
import fsla
import reducer_program
from support import F64

pytestmark = pytest.mark.gpu


@pytest.fixture
def group_of_one(tmp_path):
    """A process group of one."""
    method = f"file://{tmp_path / 'meet'}"
    device = torch.device("cuda", 0)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=method, rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("weights", [False, True], ids=["of classes", "of samples"])
@pytest.mark.parametrize("name", reducer_program.ALGORITHMS)
def test_reducer_on_gpu_equals_plain_steps(name, weights, group_of_one):
    algorithm = reducer_program.ALGORITHMS[name]
    expected, _ = reducer_program.path(*reducer_program.network(weights, "cuda"), algorithm, 16, 200, device="cuda")
    actual, messages = reducer_program.path(
        *reducer_program.reduced(weights, "cuda"), algorithm, 16, 200, device="cuda"
    )
    assert messages > 0
    assert float((actual - expected).abs().max()) < 1e-9


@pytest.mark.parametrize("weights", [False, True], ids=["of classes", "of samples"])
@pytest.mark.parametrize("name", ["fsla", "soba"])
def test_captured_reducer_equals_plain_steps(name, weights, group_of_one):
    """The messages are captured with the step."""
    algorithm = reducer_program.ALGORITHMS[name]
    expected, _ = reducer_program.path(*reducer_program.network(weights, "cuda"), algorithm, 16, 50, device="cuda")
    actual, _ = reducer_program.path(*reducer_program.reduced(weights, "cuda"), algorithm, 16, 50, "graph", "cuda")
    assert float((actual[-1] - expected[-1]).abs().max()) < 1e-9


@pytest.mark.parametrize("kind", ["replicas", "shards"])
@pytest.mark.parametrize("name", fit_program.CASES)
def test_wrapped_model_on_gpu_equals_plain_model(name, kind, group_of_one):
    if kind == "shards" and "exact" in name:
        pytest.skip("exact products are refused in shards")
    algorithm, options = fit_program.CASES[name]
    expected = fit_program.path("plain", algorithm, options, 30, device="cuda")
    actual = fit_program.path(kind, algorithm, options, 30, device="cuda")
    assert float((actual - expected).abs().max()) < 1e-9


@pytest.mark.filterwarnings("ignore::fsla.train.OverfittingWarning")
@pytest.mark.parametrize("kind", ["plain", "shards"])
def test_fit_on_gpu_resumes(kind, group_of_one, tmp_path):
    whole, first, second = (fitted(tmp_path / name, kind, steps) for name, steps in (("a", 12), ("b", 8), ("b", 12)))
    assert first.num_steps == 8
    assert second.resumed_from == 8
    assert second.records[-1] == whole.records[-1]


def fitted(folder, kind, steps):
    model = fit_program.network(kind, "cuda")
    weights = fsla.SampleWeights(fit_program.ROWS).to("cuda", F64)
    opt = fsla.FSLA(
        model,
        weights,
        inner_loss=fit_program.inner_loss,
        outer_loss=fit_program.outer_loss,
        hvp_method="finite_difference",
        momentum="average",
    )
    index = torch.arange(fit_program.ROWS)
    inner = [tuple(t[i::4].cuda() for t in (fit_program.X, fit_program.Y, index)) for i in range(4)]
    outer = [(fit_program.X_TRUSTED.cuda(), fit_program.Y_TRUSTED.cuda())]

    def evaluate(model):
        return float(nn.functional.cross_entropy(model(outer[0][0]), outer[0][1]))

    return fsla.fit(
        opt, inner, outer, max_steps=steps, output_dir=folder, eval_fn=evaluate, eval_every=4, progress_bar=False
    )
