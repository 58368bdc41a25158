"""Programs of the tests in several processes, as torchrun starts them."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def torchrun(program, *arguments, processes=2, restarts=0, succeeds=True, **environment):
    """Runs a program of this folder, or "-m" a module; returns what it wrote to stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [
        "--max-restarts",
        str(restarts),
        program if program == "-m" else str(HERE / program),
        *map(str, arguments),
    ]
    paths = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
    settings = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode == 0) == succeeds, done.stderr[-4000:]
    return done.stderr
