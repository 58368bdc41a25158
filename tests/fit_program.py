"""Started by torchrun: `fit` in several processes, as the first argument asks."""

import json
import os
import signal
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fsla
from fsla import distributed as distributed
from fsla.distributed import _join as joining
from fsla.distributed import _watchdog as watch
from fsla.train import CheckpointError
from launch import LIMIT_S
from support import F64, normal

ROWS = 96
X = normal(ROWS, 6, seed=1)
Y = torch.arange(ROWS) % 3
X_TRUSTED = normal(48, 6, seed=2)
Y_TRUSTED = torch.arange(48) % 3


def network(kind, device="cpu"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).to(device, F64)
    if kind == "replicas":
        return DistributedDataParallel(model)
    if kind == "shards":
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        return fully_shard(model)
    return model


def inner_loss(model, weights, batch):
    x, y, i = batch
    return (weights(i) * nn.functional.cross_entropy(model(x), y, reduction="none")).mean()


def outer_loss(model, weights, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def values(model, weights):
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([*(p.detach().reshape(-1) for p in parts), weights.logit.detach()])


def sgd(rate):
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


USER_OPTIMIZERS = {"inner_optimizer": sgd(0.1), "adjoint_optimizer": sgd(0.1), "outer_optimizer": sgd(0.5)}
CASES = {
    "storm, exact": (fsla.FSLA, {"momentum": "storm", "hvp_method": "autograd", **USER_OPTIMIZERS}),
    "soba, exact": (fsla.SOBA, {"hvp_method": "autograd", **USER_OPTIMIZERS}),
    "ma-soba, differences": (fsla.MASOBA, {"hvp_method": "finite_difference", **USER_OPTIMIZERS}),
    "automatic, exact": (fsla.FSLA, {"hvp_method": "auto"}),
    "automatic, differences": (fsla.FSLA, {"hvp_method": "finite_difference", "momentum": "average"}),
    "batches in parts, differences": (fsla.SOBA, {"hvp_method": "finite_difference", **USER_OPTIMIZERS}),
    "batches in parts, exact": (fsla.SOBA, {"hvp_method": "autograd", **USER_OPTIMIZERS}),
}


def path(kind, algorithm, options, steps, *, single=False, in_parts=False, device="cpu"):
    """λ and ω after each step, on batches that do not divide evenly and, under STORM, on one sample."""
    model = network(kind, device)
    weights = fsla.SampleWeights(ROWS).to(device, F64)
    with distributed.single_process() if single else nullcontext():
        opt = algorithm(model, weights, inner_loss=inner_loss, outer_loss=outer_loss, **options)
    generator = torch.Generator().manual_seed(3)

    def draw(inner, outer):
        i = torch.randint(ROWS, (inner,), generator=generator)
        j = torch.randint(48, (outer,), generator=generator)
        drawn = (X[i], Y[i], i), (X_TRUSTED[j], Y_TRUSTED[j])
        return tuple(tuple(t.to(device) for t in part) for part in drawn)

    values_by_step = []
    for k in range(steps):
        independent = draw(5, 1) if options.get("momentum") == "storm" else None
        inner, outer = draw(16, 7)
        if in_parts:
            inner = fsla.MicroBatches([tuple(t[:8] for t in inner), tuple(t[8:] for t in inner)])
        opt.step(inner, outer, independent_batches=independent, seed=k)
        values_by_step.append(values(model, weights))
    return torch.stack(values_by_step)


def trajectories(out, steps):
    group = distributed.get_group()
    gaps = {}
    for name, (algorithm, options) in CASES.items():
        in_parts = "in parts" in name
        single = path("plain", algorithm, options, steps, single=True, in_parts=in_parts)
        for kind in ("plain", "replicas", "shards"):
            if kind == "shards" and "exact" in name:
                continue
            all_ranks = path(kind, algorithm, options, steps, in_parts=in_parts)
            gaps[f"{name}, {kind}"] = float((single - all_ranks).abs().max())
    gaps["moved"] = float((single[-1] - single[0]).abs().max())
    if group.is_first:
        Path(out).write_text(json.dumps(gaps))


def fit(out, folder, kinds, steps, kills=""):
    """Runs of fit of several kinds, and what went wrong in them; a rank is killed at that message of each attempt
    ("rank:message,…")."""
    group = distributed.get_group()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    plan = [kill.split(":") for kill in kills.split(",") if kill]
    if attempt < len(plan) and int(plan[attempt][0]) == group.rank:
        die_at(group, int(plan[attempt][1]))
    summary = {}
    for kind in kinds.split(","):
        try:
            summary[kind] = fit_one(group, Path(folder) / kind, kind, steps)
        except (CheckpointError, SystemExit) as error:
            summary[kind] = f"{type(error).__name__}: {error}"
    if group.is_first:
        Path(out).write_text(json.dumps(summary))


def fit_one(group, folder, kind, steps):
    own_samples = kind == "own samples"
    model = network(kind)
    weights = fsla.SampleWeights(ROWS).to(F64)
    opt = fsla.FSLA(
        model,
        weights,
        inner_loss=inner_loss,
        outer_loss=outer_loss,
        hvp_method="finite_difference",
        momentum="average",
        split_batches=not own_samples,
    )
    torch.manual_seed(5 if group.is_first else 99)  # rank 0's holds
    mixed = TensorDataset(X, Y, torch.arange(ROWS))
    train = DataLoader(mixed, batch_size=10, shuffle=True)
    if own_samples:
        sampler = DistributedSampler(mixed, num_replicas=group.world_size, rank=group.rank, seed=7)
        train = DataLoader(mixed, batch_size=5, sampler=sampler)
    trusted = DataLoader(TensorDataset(X_TRUSTED, Y_TRUSTED), batch_size=7, shuffle=True)
    before = group.messages

    def evaluate(model):
        return {"loss": float(nn.functional.cross_entropy(model(X_TRUSTED), Y_TRUSTED))}

    result = fsla.fit(
        opt,
        train,
        trusted,
        max_steps=steps,
        output_dir=folder,
        save_every=4,
        eval_fn=evaluate,
        eval_every=5,
        progress_bar=False,
    )
    summary = {"steps": result.num_steps, "resumed_from": result.resumed_from, "messages": group.messages - before}
    return summary | {"records": result.records, "values": values(model, weights).tolist()}


def die_at(group, message):
    """Kills this process as it begins a message, counted from now."""
    count, last = group.count, group.messages + message

    def counted(x):
        count(x)
        if group.messages >= last:
            os.kill(os.getpid(), signal.SIGKILL)

    group.count = counted


def begin(weights, **options):
    options = {"inner_loss": inner_loss, "outer_loss": outer_loss, "hvp_method": "finite_difference"} | options
    return fsla.SOBA(network(options.pop("kind", "plain")), weights, **options)


class Hours:
    """The clock of the watch. A minute passes at each look once this rank waits for one that hangs, and none before."""

    def __init__(self):
        self.now = 0.0
        self.runs = False

    def __call__(self):
        self.now += 60.0 * self.runs
        return self.now


HOURS = Hours()


def wrong(out, *uses):
    """Wrong uses of several processes: all that are named, one after the other, or the last to its end."""
    joining.REPORT_S = LIMIT_S  # on a busy machine rank 0 may be late to say what is wrong
    if "hang" in uses:
        watch.monotonic, watch.BEATS = HOURS, 100_000
    group = distributed.get_group()
    messages = {}
    for what in uses:
        try:
            use_wrongly(group, what)
        except (RuntimeError, ValueError, TypeError, SystemExit) as error:
            if len(uses) == 1:
                raise
            messages[what] = f"{type(error).__name__}: {error}"
    Path(f"{out}{group.rank}").write_text(json.dumps(messages))


def use_wrongly(group, what):
    inner, outer = (X[:8], Y[:8], torch.arange(8)), (X_TRUSTED, Y_TRUSTED)
    weights = fsla.SampleWeights(ROWS + (group.rank if what == "data" else 0)).to(F64)
    if what == "settings":
        begin(weights, hvp_method="finite_difference" if group.rank else "autograd")
    if what == "data":
        begin(weights)
    if what == "exact":
        begin(weights, kind="shards", hvp_method="autograd")
    if what == "uneven":
        size = 8 - group.rank
        begin(weights, split_batches=False).step((X[:size], Y[:size], torch.arange(size)), outer)
    if what == "unsplit":
        begin(weights).step(({"texts": "no tensors"},), outer)
    if what == "batches":
        other = (X[8:16], Y[8:16], torch.arange(8, 16)) if group.rank else inner
        fsla.fit(begin(weights), [other], [outer], max_steps=2, progress_bar=False)
    if what == "sampler":
        mixed = TensorDataset(X, Y, torch.arange(ROWS))
        loader = DataLoader(mixed, sampler=DistributedSampler(mixed))
        fsla.fit(begin(weights), loader, [outer], max_steps=2, progress_bar=False)
    if what == "hang":
        opt = begin(weights)
        opt.step(inner, outer)
        if group.rank == 1:
            threading.Event().wait()
        HOURS.runs = True
        opt.step(inner, outer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, *arguments = sys.argv[1:]
    arguments_given = [int(text) if text.isdigit() else text for text in arguments]
    {"trajectories": trajectories, "fit": fit, "wrong": wrong}[what](*arguments_given)
    if dist.is_initialized():
        dist.destroy_process_group()
