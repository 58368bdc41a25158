"""The processes of one run, as torchrun starts them.

    torchrun --nproc-per-node 4 train.py

`join` reads from the environment who is who; where nothing was started there is rank 0 of 1.
"""

from fsla.distributed._group import RankError, Ranks, parts
from fsla.distributed._join import ALONE, apart, device, join, raise_once, speaks

__all__ = [
    "ALONE",
    "RankError",
    "Ranks",
    "apart",
    "device",
    "join",
    "parts",
    "raise_once",
    "speaks",
]
