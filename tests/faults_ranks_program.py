"""A run on two ranks, started by torchrun: FOLDER STEPS SEED [END]. Writes its weights to END.

FSLA_TEST_DIES=RANK:N kills that rank before its N-th change of a file in the folder.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from faults.saved import run_fit

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")


def die_at(folder, count):
    """Kill this process before a change of a file."""
    left = count

    def hook(event, arguments):
        nonlocal left
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in CHANGES) and str(arguments[0]).startswith(str(folder)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def main():
    folder, steps, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    rank, _, count = os.environ.get("FSLA_TEST_DIES", "").partition(":")
    if rank == str(dist.get_rank()):
        die_at(folder, int(count))
    weights = run_fit(folder, steps, seed)
    if len(sys.argv) > 4 and dist.get_rank() == 0:
        Path(sys.argv[4]).write_text(repr([w.tolist() for w in weights]))
    dist.destroy_process_group()


torch.set_num_threads(1)
if __name__ == "__main__":
    main()
