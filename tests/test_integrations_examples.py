"""The examples of integrations run as shown, few lines are new, and killed runs end with the numbers of whole ones."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch import finish, wait_until

MISSING = "is not installed; pip install -e '.[dev]' installs it"
for library in ("transformers", "datasets", "accelerate", "lightning"):
    pytest.importorskip(library, reason=f"{library} {MISSING}")

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "integrations"
TRAINER = ["--use_cpu", "--save_steps", "6", "--disable_tqdm", "true", "--report_to", "none"]
ARGUMENTS = {"trainer": TRAINER, "lora": TRAINER, "lightning_module": [], "accelerate_loop": []}
STEPS = {"trainer": 24, "lora": 24, "lightning_module": 200, "accelerate_loop": 60}
LAST = {
    "trainer": "checkpoint-6/trainer_state.json",
    "lora": "checkpoint-6/trainer_state.json",
    "lightning_module": "last.ckpt",
    "accelerate_loop": "state",
}
"""What of a checkpoint is written last."""
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore",
}  # fmt: skip


def command(name, folder, steps, *more):
    if name == "lora":
        pytest.importorskip("peft", reason="peft is not installed; pip install peft installs it")
    program = FOLDER / f"{name}.py"
    return [sys.executable, program, "--output_dir", folder, "--max_steps", steps, *ARGUMENTS[name], *more]


def weights_of(text):
    (line,) = re.findall(r"^weights: \{.*\}$", text, re.MULTILINE)
    return line


def test_examples_all_run_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*ARGUMENTS, "text"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "trainer" else pytest.mark.slow) for name in ARGUMENTS]
)
def test_example_runs_and_is_short(name, tmp_path):
    """What a reader copies works as it stands."""
    assert len((FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 75
    done = finish(*command(name, tmp_path, 12), env=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "manual" in weights_of(done.stdout)


def test_trainer_example_has_six_new_lines():
    """Imports, weights, settings and the class: all else is a script of plain training."""
    text = (FOLDER / "trainer.py").read_text(encoding="utf-8")
    marks = re.findall(r"# \+(\d+)$", text, re.MULTILINE)
    assert [int(mark) for mark in marks] == [1, 2, 3, 4, 5, 6]
    rest = [line for line in text.splitlines() if not re.search(r"# \+\d+$", line)]
    plain = "\n".join(line for line in rest if "weights" not in line)
    assert not re.search(r"\b(fsla|bilevel|BilevelConfig|config)\b", plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
def test_killed_example_resumes_to_same_numbers(name, tmp_path):
    """SIGKILL, wherever the run is after its first checkpoint."""
    steps = STEPS[name]
    whole = finish(*command(name, tmp_path / "whole", steps), env=ENVIRONMENT, cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr[-3000:]
    folder = tmp_path / "killed"
    with subprocess.Popen(
        list(map(str, command(name, folder, steps))), env=ENVIRONMENT, cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        wait_until(lambda: (folder / LAST[name]).exists() or process.poll() is not None)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    more = []
    if name in ("trainer", "lora"):
        checkpoints = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
        more = ["--resume_from_checkpoint", max(checkpoints, key=lambda path: int(path.name.split("-")[1]))]
    resumed = finish(*command(name, folder, steps, *more), env=ENVIRONMENT, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert weights_of(resumed.stdout) == weights_of(whole.stdout)
