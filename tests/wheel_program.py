"""Tries a built wheel in a new environment: `python tests/wheel_program.py WHEEL FOLDER CONSTRAINTS`.

Makes an empty environment in FOLDER, installs the wheel with its hard dependencies and takes a step; then, with the
extra `data`, cleans the demonstration's data. Exits with 1 at the first thing that is not as a user expects it.

The pip of the environment that runs this installs into the new one, and compiles nothing: of torch's files most are
never loaded.
"""

import os
import subprocess
import sys
import time
import venv
from pathlib import Path

STEP = """
import importlib.metadata
import torch
from torch import nn
import fsla

assert "site-packages" in fsla.__file__, fsla.__file__
here = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
assert {"fsla", "torch", "numpy", "safetensors"} <= here, here
assert not here & {"pandas", "scikit-learn", "scipy", "typer", "rich", "matplotlib", "joblib", "pillow"}, here
torch.manual_seed(0)
model, weights = nn.Linear(3, 2), fsla.GroupWeights(2)
x, y = torch.randn(32, 3), torch.arange(32) % 2

def loss(model, weights, batch):
    return nn.functional.cross_entropy(model(x), y, reduction="none")

def inner(model, weights, batch):
    return (weights(y) * loss(model, weights, batch)).mean() + 0.1 * model.weight.square().sum()

bilevel = fsla.FSLA(model, weights, inner_loss=inner, outer_loss=lambda *a: loss(*a).mean())
print("one step:", float(bilevel.step(None, None).inner_loss))
result = fsla.fit(bilevel, [None], [None], max_steps=5, output_dir="run")
print("fit:", result.records[-1]["step"], "steps")
"""


def run(*command: object, folder: Path, code: int = 0) -> str:
    """Run a command in the folder, where no variable leads to another copy; exit unless its exit code is this."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != code:
        sys.exit(f"{command} exited with {done.returncode}, not {code}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def main(wheel: Path, folder: Path, constraints: Path) -> None:
    """Install, try, install the extra, try again."""
    started = time.monotonic()
    venv.create(folder / "env", clear=True)
    python, fsla = folder / "env/bin/python", folder / "env/bin/fsla"
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile")
    install += ("--constraint", constraints)
    run(*install, wheel, folder=folder)
    print(run(python, "-c", STEP, folder=folder), end="")
    message = run(fsla, "clean", "--demo", folder=folder, code=2)
    if len(message.splitlines()) != 1 or "pip install 'fsla[data]'" not in message:
        sys.exit(f"Without the extra, fsla clean says:\n{message}")
    print(message, end="")
    run(*install, f"{wheel}[data]", folder=folder)
    message = run(fsla, "reproduce", "synthetic", folder=folder, code=2)
    if "It comes with the repository" not in message:
        sys.exit(f"Without the repository, fsla reproduce says:\n{message}")
    print(run(fsla, "clean", "--demo", "--out", "demo", folder=folder), end="")
    if not (folder / "demo" / "report.html").is_file():
        sys.exit("fsla clean --demo has written no report.html.")
    print(f"The wheel works in an empty environment ({time.monotonic() - started:.0f} s).")


if __name__ == "__main__":
    main(*(Path(argument).resolve() for argument in sys.argv[1:]))
