"""Started by torchrun: what networks, losses, batches and loops do that ranks may see differently; each rank writes
its results."""

import json
import sys
from collections import UserDict
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, TensorDataset

import fsla
from fit_program import X_TRUSTED, Y_TRUSTED, X, Y, inner_loss, network, outer_loss, values
from fsla import Point, Problem, StepBatches
from fsla import distributed as distributed
from support import F64

ROWS = len(X)
INDEX = torch.arange(ROWS)


def make_optimizer(algorithm=fsla.FSLA, model=None, inner=inner_loss, **options):
    model = network("plain") if model is None else model
    weights = fsla.SampleWeights(ROWS).to(F64)
    return algorithm(model, weights, inner_loss=inner, outer_loss=outer_loss, **options)


def ended(opt, batch, *, steps=3):
    """Where a few steps on one batch lead."""
    for k in range(steps):
        opt.step(batch, (X_TRUSTED, Y_TRUSTED), seed=k)
    return values(opt.model, opt.outer)


def gap(inner):
    batch = (X[:12], Y[:12], INDEX[:12])
    with distributed.single_process():
        single = ended(make_optimizer(inner=inner, hvp_method="autograd"), batch)
    return float((ended(make_optimizer(inner=inner, hvp_method="autograd"), batch) - single).abs().max())


def weights_of_some(model, weights, batch):
    """Weights only samples of the second half: the first ranks' shares do not read λ."""
    x, y, i = batch
    losses = cross_entropy(model(x), y, reduction="none")
    late = i >= 6
    return (torch.where(late, weights(i) * losses, losses) if late.any() else losses).mean()


def losses_of_some(model, weights, batch):
    """Leaves samples of the first half out: the first ranks' shares do not reach the model."""
    x, y, i = batch
    late = i >= 6
    if not late.any():
        return x.new_zeros(())
    return (late * weights(i) * cross_entropy(model(x), y, reduction="none")).mean()


class WithBuffers(nn.Module):
    """Batch normalisation, and buffers that stay as they are."""

    def __init__(self):
        super().__init__()
        self.layer = network("plain")
        self.norm = nn.BatchNorm1d(6).to(F64)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf], dtype=F64))
        self.register_buffer("in_bfloat16", torch.tensor([1.3], dtype=torch.bfloat16))
        self.register_buffer("in_float8", torch.tensor([1.3]).to(torch.float8_e4m3fn))

    def forward(self, x):
        return self.layer(self.norm(x))


def buffers():
    opt = make_optimizer(fsla.SOBA, model=WithBuffers(), hvp_method="finite_difference")
    for k in range(5):
        opt.step((X[:10], Y[:10], INDEX[:10]), (X_TRUSTED, Y_TRUSTED), seed=k)
    buffers_by_name = dict(opt.model.named_buffers())
    return {
        name: buffers_by_name[name].float().tolist()
        for name in ("mask", "in_bfloat16", "in_float8", "norm.running_mean")
    }


class Encoded(UserDict):
    """A batch as tokenisers have it."""

    def tensors(self):
        return self["x"].to(F64), self["y"], self["i"]


def encoded(model, weights, batch):
    return inner_loss(model, weights, batch.tensors())


def fit_other_batches():
    batch = Encoded(x=X[:12].to(torch.bfloat16), y=Y[:12], i=INDEX[:12])
    history = fsla.fit(
        make_optimizer(inner=encoded), [batch], [(X_TRUSTED, Y_TRUSTED)], max_steps=3, progress_bar=False
    )
    return history.records[-1]["inner_loss"]


def fit_with_a_callback_that_draws(group):
    """Rank 0 draws after each record; the numbers of the samples of this rank in each pass."""
    seen = []

    def noted(model, weights, batch):
        seen.append(batch[2].tolist())
        return inner_loss(model, weights, batch)

    def draw(opt, record):
        if group.is_first:
            torch.rand(3)

    train = DataLoader(TensorDataset(X, Y, INDEX), batch_size=48, shuffle=True)
    opt = make_optimizer(fsla.SOBA, inner=noted, hvp_method="finite_difference")
    trusted = [(X_TRUSTED, Y_TRUSTED)]
    fsla.fit(opt, train, trusted, max_steps=6, eval_every=1, callbacks=[draw], progress_bar=False)
    return seen


class Drawing(Dataset):
    """Draws more often for some samples than for others."""

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        for _ in range(i % 3):
            torch.rand(())
        return X[i] + 0.1 * torch.randn(6, dtype=F64), Y[i], INDEX[i]


def fit_own_samples(group, folder):
    """Through a batch sampler; in one go, and in two."""
    ends = []
    for parts in ((8,), (3, 8)):
        place = folder / str(len(parts))
        for steps in parts:
            data = Drawing()
            opt = make_optimizer(fsla.SOBA, hvp_method="finite_difference", split_batches=False)
            train = DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data), 8, drop_last=True))
            trusted = TensorDataset(X_TRUSTED, Y_TRUSTED)
            outer = DataLoader(trusted, batch_size=8, sampler=DistributedSampler(trusted), drop_last=True)
            torch.manual_seed(5)
            fsla.fit(opt, train, outer, max_steps=steps, output_dir=place, save_every=3, progress_bar=False)
        ends.append(values(opt.model, opt.outer).tolist())
    return ends


def orders():
    """The numbers of the samples of two epochs."""
    seen = []

    def noted(model, weights, batch):
        seen.append(batch[2].tolist())
        return inner_loss(model, weights, batch)

    data = TensorDataset(X, Y, INDEX)
    train = DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data), 16, drop_last=True))
    opt = make_optimizer(fsla.SOBA, inner=noted, hvp_method="finite_difference", split_batches=False)
    fsla.fit(opt, train, [(X_TRUSTED, Y_TRUSTED)], max_steps=4, progress_bar=False)
    return [*dict.fromkeys(map(tuple, seen))]


def reduced_differences():
    """One sample on several ranks, in bfloat16, which has another step for differences: λ here, and alone."""
    x, y = X[:, :5].float(), X[:, 5].float()

    def error(omega, i):
        return (nn.functional.linear(x[i], omega["w"])[:, 0].float() - y[i]).square().mean()

    def inner(lam, omega, i):
        return error(omega, i) + (lam["penalty"].exp() * omega["w"].square()).sum()

    algorithm = replace(fsla.algorithms.fsla(fsla.steps.constant(0.1, 0.1, 0.1, 0.5)), finite_differences=True)
    at = Point({"penalty": torch.full((1, 5), -2.0)}, {"w": torch.ones(1, 5)})
    batches = StepBatches.shared(torch.tensor([3]), torch.tensor([3]))
    ends = []
    for reducer in (distributed.DataParallelReducer(), None):
        problem = Problem(inner, lambda lam, omega, i: error(omega, i), autocast_dtype=torch.bfloat16, reducer=reducer)
        state = algorithm.init(problem, at, batches)
        for _ in range(10):
            state = algorithm.step(problem, state, batches)
        ends.append(state.lam.value["penalty"][0].tolist())
    return ends


def main(folder):
    group = distributed.get_group()
    results = {
        "a share does not read λ": gap(weights_of_some),
        "a share does not reach ω": gap(losses_of_some),
        "buffers": buffers(),
        "other batches": fit_other_batches(),
        "callback": fit_with_a_callback_that_draws(group),
        "own samples": fit_own_samples(group, folder / "runs"),
        "orders": orders(),
        "reduced": reduced_differences(),
    }
    (folder / f"found{group.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
