"""What no other room needs: a weight for each of very many samples, at the cost of a batch.

The examples of this room go on from a run with a weight for each of 100 samples:

    >>> import torch
    >>> import fsla
    >>> data = torch.arange(100) % 2  # every second label is wrong
    >>> problem = fsla.WeightedLossProblem(
    ...     per_sample_loss=lambda omega, index: (omega["w"] - data[index].float()) ** 2 / 2,
    ...     sample_weight=lambda lam, index: lam["logit"].sigmoid(),
    ...     outer_loss=lambda lam, omega, batch: (omega["w"] ** 2).sum() / 2,
    ...     row_index=lambda index: index,
    ...     outer_uses_lam=False,
    ... )
    >>> at = fsla.Point({"logit": torch.zeros(100)}, {"w": torch.ones(1)})
    >>> algorithm = fsla.algorithms.soba(fsla.steps.constant(outer_lr=5.0, inner_lr=0.5, adjoint_lr=0.5))
    >>> def draw():
    ...     return fsla.StepBatches.shared(torch.randint(100, (10,)), None)
    >>> run = fsla.contrib.LazyRowOptimizer(algorithm, problem, at, draw())
    >>> state = run.step(draw())
    >>> run.step_count
    1
"""

from fsla.contrib._lazy_rows import LazyRowOptimizer
from fsla.contrib._shard_files import LoadedShards, load_shards, reshard, save_shards

__all__ = ["LazyRowOptimizer", "LoadedShards", "load_shards", "reshard", "save_shards"]
