"""A process whose work is done ends well, whatever gloo's threads are doing."""

import threading
from pathlib import Path

import pytest

from fsla.distributed import _gloo_shutdown as leaving
from fsla.distributed._gloo_shutdown import Task, wait_for_gloo_threads, workers
from launch import torchrun


def test_exit_waits_for_gloo_threads(monkeypatch):
    """Not while a thread runs, nor while it goes to sleep again and again, as one does that waits for Python."""
    seen = [
        {"1": Task("R", "5"), "2": Task("S", "9")},
        {"1": Task("S", "6"), "2": Task("S", "9")},
        {"1": Task("S", "7"), "2": Task("S", "9")},
        {"1": Task("S", "7"), "2": Task("S", "9")},
        {"1": Task("R", "8"), "2": Task("S", "9")},
    ]
    polls = iter(seen)
    monkeypatch.setattr(leaving, "workers", lambda: next(polls))
    monkeypatch.setattr(leaving, "CHECK_EVERY_S", 0.0)
    wait_for_gloo_threads()
    assert list(polls) == seen[4:]


def test_exit_without_gloo_does_not_wait(monkeypatch):
    monkeypatch.setattr(threading.Event, "wait", lambda *args: pytest.fail("it waited"))
    wait_for_gloo_threads()


def test_exit_ignores_thread_that_never_rests(monkeypatch):
    monkeypatch.setattr(leaving, "workers", lambda: {"1": Task("R", "5")})
    monkeypatch.setattr(leaving, "CHECK_EVERY_S", 0.0)
    wait_for_gloo_threads()


@pytest.mark.skipif(not leaving.TASKS.exists(), reason="reads /proc/self/task, which this system lacks")
def test_gloo_threads_are_identified_by_name():
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    name = leaving.TASKS / str(thread.native_id) / "comm"
    name.write_text(leaving.WORKER)
    try:
        threads = workers()
    finally:
        end.set()
        thread.join()
    ((number, task),) = threads.items()
    assert number == str(thread.native_id)
    assert task.state in ("R", "S")
    assert task.sleeps.isdigit()
    assert workers(Path("/nowhere")) == {}


@pytest.mark.slow
def test_exit_with_live_group_is_clean():
    """Without the wait every second run aborts."""
    for _ in range(8):
        torchrun("gloo_shutdown_program.py")
