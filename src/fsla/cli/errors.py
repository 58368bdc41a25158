"""The one place where an error of a command becomes a message and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import traceback

import torch

from fsla._extras import install_hint
from fsla._storage._files import FileError
from fsla.cli.screen import print_error
from fsla.distributed import DistributedError, should_report
from fsla.train import CheckpointError, DivergenceError

INTERRUPTED = 130
DEFECT = 70
"""Exit code of an error that is fsla's own."""
BAD_INPUT = 2
_WORDED = (DistributedError, DivergenceError, CheckpointError, FileError)
_NO_MEMORY = "There is not enough memory. Use fewer rows or columns, smaller images, or a machine with more."


def report(error: BaseException) -> int:
    """Print one message for an error and return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        print_error("interrupted.")
        return INTERRUPTED
    text = message_of(error)
    if text is None:
        print_error(_defect(error), always=True)
        return DEFECT
    if isinstance(error, BrokenPipeError):  # Or Python complains once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if should_report(text):
        print_error(text, always=True)
    return BAD_INPUT


def message_of(error: BaseException) -> str | None:
    """Return the message of an error that the user can mend; None for a defect."""
    if isinstance(error, ModuleNotFoundError):
        return install_hint(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return _NO_MEMORY
    if isinstance(error, OSError) and error.strerror is not None:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = " Free some room and give the same command again; experiments resume." if full else ""
        return f"{error.filename or 'Every file'} must be usable. It is not: {error.strerror}.{hint}"
    if isinstance(error, _WORDED) or (isinstance(error, ValueError | OSError) and _is_raised_here(error)):
        return str(error)
    return None


def _is_raised_here(error: BaseException) -> bool:
    """Return whether fsla raised an error, rather than a library that it called with what it should not have."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    return module.partition(".")[0].startswith("fsla")


def _defect(error: BaseException) -> str:
    """Write the traceback into a file, and return the message that names it."""
    what = f"{type(error).__name__}: {error}".rstrip(": ").rstrip(".")
    text = "".join(traceback.format_exception(error))
    try:
        descriptor, path = tempfile.mkstemp(prefix="fsla-traceback-", suffix=".txt")
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        print(text, file=sys.stderr)
        path = "the lines above"
    return f"This is a defect of fsla ({what}). The traceback is in {path}. Please report it with that text."
