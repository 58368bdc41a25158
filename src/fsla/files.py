"""Files: written whole or not at all; what killed processes left behind is removed."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TEMPORARY = re.compile(r"\..+\.([0-9]{1,10})\.tmp")


def write_bytes(path: Path, content: bytes) -> None:
    """Writes to a temporary name in the same folder and renames it, so that the file is never half-written.

    A link is followed. What is there and is no plain file, such as /dev/null or a pipe, is written into, since a rename
    would replace it. An OSError names `path`, not the temporary file.
    """
    with _named(path):
        if _special(path):
            path.write_bytes(content)
            return
        target = path.resolve()
        temporary = _temporary(target)
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # or a crash of the machine may leave the new name with no content
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes text as UTF-8, whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def ensure_writable(path: Path) -> None:
    """Makes the folder of a file and raises an OSError unless the file can be written: to be asked before long work."""
    with _named(path):
        if _special(path):
            problem = errno.EISDIR if path.is_dir() else 0 if os.access(path, os.W_OK) else errno.EACCES
            if problem:
                raise OSError(problem, os.strerror(problem))
            return
        target = path.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        probe = _temporary(target)
        try:
            probe.touch()
        finally:
            probe.unlink(missing_ok=True)


def remove_orphans(folder: Path) -> None:
    """Removes the temporary files of processes that no longer run; those of running ones stay."""
    for path in folder.iterdir():
        found = _TEMPORARY.fullmatch(path.name)
        if found and not path.is_symlink() and path.is_file() and not _runs(int(found[1])):
            path.unlink(missing_ok=True)


def is_temporary(path: Path, of: str) -> bool:
    """Whether a path is named as a temporary file of the file `of`."""
    return bool(_TEMPORARY.fullmatch(path.name)) and path.name.startswith(f".{of}.")


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _special(path: Path) -> bool:
    """Whether something other than a plain file is there."""
    return path.exists() and not path.is_file()


def _runs(process: int) -> bool:
    """Whether a process of this number runs. Where signal 0 does not ask that question, the answer is yes."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):  # no process has a number that the system has not
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """An OSError from inside names the path, whatever file it came from."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
