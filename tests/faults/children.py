"""Work in a forked child that is killed, or whose system calls fail, at the n-th change of a file."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.trials import ProgramRaw, Refused, is_worded

CHANGES = frozenset(
    {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "shutil.rmtree"}
)
"""Audit events that change names or files; `open` is one where it writes."""
_WRITES = os.O_WRONLY | os.O_RDWR
_DONE, _REFUSED, _RAW = 0, 3, 4


def run_child(
    work: Callable[[], None], folder: Path, at: int | None = None, act: Callable[[], None] | None = None
) -> int | None:
    """Run work in a child and return how many changes of files in a folder it made, or None if it was killed.

    Args:
        work: what the child does.
        folder: whose changes count.
        at: number of the change before which `act` is called.
        act: kills the child, or raises what a system call raises.

    Raises:
        Refused, ProgramRaw: if the work raised, in words or not.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover (the child)
        os.close(read)
        _work(work, folder, at, act, write)
    os.close(write)
    with os.fdopen(read, encoding="utf-8", errors="replace") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return None
    if os.WEXITSTATUS(status) == _REFUSED:
        raise Refused(text)
    if os.WEXITSTATUS(status) != _DONE:
        raise ProgramRaw(text)
    return int(text)


def _work(
    work: Callable[[], None], folder: Path, at: int | None, act: Callable[[], None] | None, pipe: int
) -> None:  # pragma: no cover (the child)
    count = 0
    place = str(folder)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        writes = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & _WRITES)
        if not writes and event not in CHANGES:
            return
        if not isinstance(arguments[0], int) and not os.fsdecode(arguments[0]).startswith(place):
            return
        count += 1
        if count == at and act is not None:
            act()

    code, text = _RAW, ""
    try:
        os.chdir("/")
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        _count_renames_and_syncs(hook, place)
        sys.addaudithook(hook)
        work()
        code, text = _DONE, str(count)
    except Exception as error:
        code = _REFUSED if is_worded(error) else _RAW
        text = f"{type(error).__name__}: {error}" if code == _REFUSED else "".join(traceback.format_exception(error))
    finally:
        os.write(pipe, text.encode()[-60000:])
        os._exit(code)


def _count_renames_and_syncs(hook: Callable[[str, tuple[Any, ...]], None], place: str) -> None:
    """Make calls count that Python does not audit: fsync, and the exchange of two names."""
    from fsla._storage import _files as files

    sync, exchange = os.fsync, files._exchange_names

    def counted_sync(descriptor: int) -> None:
        hook("os.truncate", (f"{place}/",))
        sync(descriptor)

    def counted_exchange(a: Path, b: Path) -> bool:
        hook("os.rename", (str(a),))
        done = exchange(a, b)
        hook("os.rename", (str(a),))
        return done

    os.fsync = counted_sync
    files._exchange_names = counted_exchange


def kill() -> None:
    """End the process as kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def failing(code: int) -> Callable[[], None]:
    """Return what fails as a system call does."""

    def fail() -> None:
        raise OSError(code, os.strerror(code), "the file of this call")

    return fail
