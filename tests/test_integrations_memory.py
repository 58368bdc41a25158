"""What closures keep: the adjoint and its copy between steps, and never a copy of a frozen base."""

import json
import sys
from pathlib import Path

import pytest

from launch import finish

PROGRAM = Path(__file__).parent / "integrations_memory_program.py"

pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[dev]' installs it")


@pytest.mark.parametrize("trained", ["all", "lora"])
def test_due_step_keeps_few_copies_of_what_is_trained(trained):
    """Between steps v and the guard's copy of it; in a step two more. With LoRA that is of the adapters alone."""
    if trained == "lora":
        pytest.importorskip("peft", reason="peft is not installed; pip install peft installs it")
    done = finish(sys.executable, str(PROGRAM), trained)
    assert done.returncode == 0, done.stderr
    plain, learns = json.loads(done.stdout.splitlines()[-1])
    size = plain[2]
    assert learns[2] == size
    assert (learns[0] - plain[0]) / size < 2.5
    assert (learns[1] - plain[1]) / size < 4.5
