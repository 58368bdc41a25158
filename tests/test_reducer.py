"""Batches shared out among processes: the numbers of one process, in a few messages a step."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsla import Batch, Point, Problem, WeightedLossProblem, make_functional
from fsla._tree import dense, flatten
from fsla.distributed import BatchShard, DataParallelReducer, get_group
from fsla_reproduction.problems import LeastSquares
from launch import torchrun
from support import F64, normal


@pytest.mark.parametrize(
    ("count", "flags"),
    [pytest.param(2, []), pytest.param(4, ["every"], marks=pytest.mark.slow)],
    ids=["two", "four"],
)
def test_reducer_on_processes_equals_one(count, flags, tmp_path):
    """With batches that do not divide evenly, and with fewer samples than processes, too."""
    torchrun("reducer_program.py", tmp_path / "gaps", 200, *flags, processes=count)
    gaps = json.loads((tmp_path / "gaps").read_text())
    assert len(gaps) == 20 + 1  # and a run that is resumed
    assert all(gap < 1e-9 for gap, _ in gaps.values()), gaps
    messages = {key.removesuffix(", batches of 16"): n for key, (_, n) in gaps.items()}
    assert messages["fsla, weights of classes"] == 6
    assert messages["fsla, weights of samples"] == 4
    assert messages["soba, weights of classes"] == messages["soba, weights of samples"] == 2


@pytest.fixture
def group_of_one(tmp_path):
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def distributed(problem):
    """The same problem, whose batches the processes share."""
    return Problem(problem.inner_loss, problem.outer_loss, reducer=DataParallelReducer())


def test_reducer_with_group_of_one_equals_problem(group_of_one):
    data = LeastSquares.draw(0)
    at = Point({"lam": normal(4)}, {"omega": normal(5)})
    batch = Batch(torch.arange(12))
    plain, reduced = data.losses(), distributed(data.losses())
    v = {"omega": normal(5, seed=3)}
    u = {"lam": normal(4)}
    actual_view, expected_view = reduced.inner_at(at, batch), plain.inner_at(at, batch)
    assert torch.allclose(actual_view.value, expected_view.value, rtol=1e-14)
    assert torch.allclose(actual_view.grad_omega["omega"], expected_view.grad_omega["omega"], rtol=1e-14)
    assert torch.allclose(actual_view.mixed_hvp_transpose(u)["omega"], expected_view.mixed_hvp_transpose(u)["omega"])
    for actual_product, expected in zip(
        actual_view.linearized().products(v), expected_view.linearized().products(v), strict=True
    ):
        (name,) = actual_product
        assert torch.allclose(actual_product[name], expected[name], rtol=1e-14)
    assert torch.allclose(reduced.outer_at(at, batch).value, plain.outer_at(at, batch).value, rtol=1e-14)


def test_reducer_with_indivisible_batch_raises(group_of_one):
    reduced = Problem(lambda lam, omega, b: 0.0, lambda lam, omega, b: 0.0, reducer=DataParallelReducer())
    at = Point({"x": torch.zeros(1, dtype=F64)}, {"w": torch.zeros(1, dtype=F64)})
    for data in (None, torch.tensor(3), (torch.zeros(4), torch.zeros(5))):
        with pytest.raises(TypeError, match="with a row for each sample"):
            reduced.inner_at(at, Batch(data))


def weighted(reducer, *, rows, hvp_method):
    """Weights of samples, which both losses read: G by its batch's samples, F all of them."""
    torch.manual_seed(0)
    omega, net = make_functional(nn.Linear(4, 3).to(F64))
    x, y = normal(20, 4), torch.arange(20) % 3

    def weigh(lam, i):
        return lam["w"].sigmoid() if rows else lam["w"][i].sigmoid()

    def outer(lam, omega, i):
        return nn.functional.cross_entropy(net(omega, x[i]), y[i]) + lam["w"].square().sum()

    problem = WeightedLossProblem(
        lambda scores, i: nn.functional.cross_entropy(scores, y[i], reduction="none"),
        weigh,
        outer,
        regularizer=lambda omega: sum(t.square().sum() for t in omega.values()),
        row_index=(lambda i: i) if rows else None,
        model_outputs=lambda omega, i: net(omega, x[i]),
        hvp_method=hvp_method,
        reducer=reducer,
    )
    return problem, Point({"w": normal(20, seed=3)}, omega)


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "all of λ"])
@pytest.mark.parametrize("hvp_method", ["auto", "forward_over_reverse", "reverse_over_reverse"])
@pytest.mark.parametrize("product", ["products", "mixed_hvp", "hvp", "gauss_newton"])
def test_reducer_rank_without_samples_sends_all_messages(product, hvp_method, rows, group_of_one):
    """Else the others would wait for it; and a mean over no samples must not reach their numbers."""
    problem, at = weighted(DataParallelReducer(), rows=rows, hvp_method=hvp_method)
    plain, _ = weighted(None, rows=rows, hvp_method=hvp_method)
    v = {name: normal(*t.shape, seed=4) for name, t in at.omega.items()}
    index = torch.tensor([3, 7, 1, 9])
    problem.inner_at(at, Batch(index))  # settles how products are computed

    def ask(problem, data):
        before = get_group().messages
        value = getattr(problem.inner_at(at, Batch(data)), product)(v)
        trees = value if isinstance(value, tuple) else (value,)
        return torch.cat([flatten(dense(tree)) for tree in trees]), get_group().messages - before

    expected, _ = ask(plain, index)
    of_shard, messages = ask(problem, BatchShard(index, 8))
    nothing, as_many = ask(problem, BatchShard(index[:0], 8))
    assert torch.allclose(of_shard, expected / 2, rtol=1e-13)
    assert not nothing.any()
    assert messages == as_many


@pytest.mark.parametrize("reducer", [lambda: None, DataParallelReducer], ids=["alone", "shared"])
def test_reducer_outer_loss_reads_full_lam_with_rows(reducer, group_of_one):
    """Not the rows of its batch, whose samples are others."""
    problem, at = weighted(reducer(), rows=True, hvp_method="auto")
    by_lam = dense(problem.outer_at(at, Batch(torch.tensor([3, 7]))).grad_lam)["w"]
    assert torch.allclose(by_lam, 2 * at.lam["w"], rtol=1e-14)


def test_reducer_on_one_rank_equals_problem():
    data = LeastSquares.draw(0)
    at = Point({"lam": normal(4)}, {"omega": normal(5)})
    reduced = distributed(data.losses())
    group = reduced.reducer.process_group
    assert (group.rank, group.world_size) == (0, 1)
    batch = Batch(torch.arange(12))
    grad = reduced.inner_at(at, batch).grad_omega["omega"]
    assert torch.allclose(grad, data.losses().inner_at(at, batch).grad_omega["omega"], rtol=1e-14)
    assert group.messages == 0
