"""The end of a process that sent messages through gloo.

A thread of gloo that is done with a message frees its tensors, and needs Python for that. If Python is being torn down
by then, the process aborts with all its work done, and torchrun takes the run for a failed one (pytorch/pytorch#190489,
before Python 3.14). Those threads live as long as their group, which fully_shard, a captured step or the user may hold
to the end. So before Python ends, a process waits until they are at rest.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple

CHECK_EVERY_S = 0.02
CHECKS = 250
WORKER = "pt_gloo_runloop"
TASKS = Path("/proc/self/task")


class Task(NamedTuple):
    """A thread as the system sees it."""

    state: str
    """S for asleep."""
    sleeps: str
    """How often it went to sleep, which one that waits for Python does again and again."""


def wait_for_gloo_threads() -> None:
    """Wait, without Python's lock, until gloo's threads are seen at rest twice; they need it for moments only."""
    pause = threading.Event()
    before: dict[str, Task] = {}
    for _ in range(CHECKS):
        now = workers()
        if all(task.state == "S" and before.get(number) == task for number, task in now.items()):
            return
        before = now
        pause.wait(CHECK_EVERY_S)


def workers(tasks: Path = TASKS) -> dict[str, Task]:
    """Return gloo's threads by their numbers; {} if the system does not list them."""
    threads = {}
    for path in tasks.glob("*"):
        try:
            status = dict(line.split(":\t", 1) for line in (path / "status").read_text().splitlines() if ":\t" in line)
        except OSError:  # it has ended
            continue
        if status["Name"] == WORKER:
            threads[path.name] = Task(status["State"][:1], status["voluntary_ctxt_switches"])
    return threads
