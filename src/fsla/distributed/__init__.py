"""The processes of one run, as torchrun starts them.

    torchrun --nproc-per-node 4 train.py

`get_group` reads from the environment who is who; where nothing was started there is rank 0 of 1.
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
