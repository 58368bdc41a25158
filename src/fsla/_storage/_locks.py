"""Locks: one process at a time writes a folder."""

from __future__ import annotations

import errno
import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

from fsla._storage._files import FileError, naming, open_regular

_locked_paths: set[Path] = set()
_guard = threading.Lock()


@contextmanager
def locked(path: Path, folder: Path) -> Iterator[None]:
    """Keep other processes, and other runs of this one, out of a folder.

    The system releases the lock when the process ends, also when it is killed: a file of a dead process locks nothing.
    Child processes do not have it.

    Args:
        path: the file to lock. It is created, and removed at the end.
        folder: what the lock is of, for messages.

    Raises:
        FileError: if another process holds the lock, or the file is none of fsla's.
    """
    path = Path(os.path.realpath(path.parent)) / path.name
    with _guard:
        if path in _locked_paths:
            raise _busy(folder, f"{os.getpid()} (this one)")
        with naming(path):
            file = _take(path, folder)
        _locked_paths.add(path)
    try:
        yield
    finally:
        with _guard:
            if file is not None:
                with suppress(OSError):  # A file that stays locks nothing.
                    if _is_at(path, file):
                        path.unlink()
                os.close(file)
            _locked_paths.discard(path)


def _take(path: Path, folder: Path) -> int | None:
    """Return the descriptor of the locked file. Nothing is written before the lock is held."""
    if fcntl is None:
        return None
    while True:
        file = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            owner = os.read(file, 32).decode(errors="replace")
            if not re.fullmatch(r"[0-9]*\n?", owner):
                raise FileError(
                    f"Cannot use {path}: it is not a lock of fsla. Move it elsewhere, or name another folder."
                )
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise _busy(folder, owner.strip() or "unknown") from None
                warnings.warn(
                    f"{folder} is on a file system without locks ({error.strerror}): nothing keeps a second process "
                    "out.",
                    UserWarning,
                    stacklevel=5,
                )
            if _is_at(path, file):  # else its last owner removed it between the two calls
                with suppress(OSError):  # the number is for messages alone
                    os.ftruncate(file, 0)
                    os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _is_at(path: Path, file: int) -> bool:
    """Whether a path still names an open file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _busy(folder: Path, owner: str) -> FileError:
    return FileError(
        f"{folder} must be used by one run at a time. The process {owner} is using it. Wait until it ends, stop it, or "
        "name another folder."
    )
