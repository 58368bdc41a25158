"""The processes of one run, as torchrun starts them.

    torchrun --nproc-per-node 4 train.py

`get_group` reads the environment. In a process that nothing started, there is one rank, as in these examples:

    >>> import torch
    >>> import fsla
    >>> group = fsla.distributed.get_group()
    >>> group.rank, group.world_size
    (0, 1)
"""

from fsla.distributed._group import DistributedError, ProcessGroup, parts
from fsla.distributed._join import SINGLE_PROCESS, get_device, get_group, raise_on_first, should_report, single_process
from fsla.distributed._partition import BatchShard
from fsla.distributed._reducer import DataParallelReducer, Reducer
from fsla.distributed._shards import IndexRange, ShardedSampler

__all__ = [
    "SINGLE_PROCESS",
    "BatchShard",
    "DataParallelReducer",
    "DistributedError",
    "IndexRange",
    "ProcessGroup",
    "Reducer",
    "ShardedSampler",
    "get_device",
    "get_group",
    "parts",
    "raise_on_first",
    "should_report",
    "single_process",
]
