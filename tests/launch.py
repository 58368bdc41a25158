"""Programs that tests start: by themselves, and in several processes as torchrun starts them."""

import os
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent
LIMIT_S = 3600.0
"""Ends a test that would hang for ever. No program needs a tenth of it, however busy the machine is."""


def finish(*command, **options):
    """Run a command to its end; return its exit code and what it wrote."""
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=LIMIT_S, **options)


def wait_until(condition):
    """Return as soon as a condition holds."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "The condition does not hold."
        time.sleep(0.02)


def torchrun(program, *arguments, processes=2, restarts=0, succeeds=True, **environment):
    """Run a program of this folder, or "-m" a module; return what it wrote to stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    command += ["--max-restarts", restarts, program if program == "-m" else TESTS / program, *arguments]
    # A rank that others wait for is named before the limit ends them all.
    settings = {"OMP_NUM_THREADS": "1", "FSLA_RANK_TIMEOUT": str(LIMIT_S / 2)}
    packages = (TESTS, *(TESTS.parent / name for name in ("src", "reproduction", "benchmarks")))
    settings["PYTHONPATH"] = os.pathsep.join(map(str, packages))
    done = finish(*command, env=os.environ | settings | environment)
    assert (done.returncode == 0) == succeeds, done.stderr[-4000:]
    return done.stderr
