"""Run all trials: python -m faults --seeds 0 1 2 [--only KIND] [--write], from the folder of tests."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from faults import report
from faults.catalogue import KINDS, make_trials
from faults.trials import BAD, run_trial


def main() -> int:
    """Run the trials, print what is bad first, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", choices=sorted(KINDS), action="append", help="kind of trial; default: all")
    parser.add_argument("--name", default="", help="part of the names of trials to run")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/faults.json and the docs' table")
    arguments = parser.parse_args()
    counts = report.Counts()
    for seed in arguments.seeds:
        for kind in arguments.only or KINDS:
            start = time.perf_counter()
            for trial in make_trials(kind, seed):
                if arguments.name not in f"{trial.category}: {trial.name}":
                    continue
                result = run_trial(trial)
                counts.add(result)
                if result.outcome in BAD:
                    print(f"{result.outcome.upper():6} {trial.category}: {trial.name}\n       {result.detail.strip()}")
            print(f"{kind}, seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
    print(report.table(counts.as_dict()))
    if arguments.write:
        report.write(counts, arguments.seeds)
    return int(counts.num_bad > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    sys.exit(main())
