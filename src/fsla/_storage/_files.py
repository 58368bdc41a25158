"""Files and folders: only regular files are opened, each is published whole, and killed processes leave nothing."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import socket
import stat
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_TEMPORARY = re.compile(r"\..+\.fsla-([0-9a-f]{8})-([0-9]{1,10})-[0-9a-f]{16}\.(tmp|old)")
"""The name of a temporary file or folder: host, process and a random part."""
_SAFE = sum(getattr(os, f"O_{name}", 0) for name in ("NOFOLLOW", "NONBLOCK", "CLOEXEC", "BINARY"))
_PROBE = "probe"
"""Name of the file that shows whether a folder can be written."""
_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


class FileError(ValueError):
    """A file or folder that fsla refuses to use; the text is the whole message."""


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file and return its descriptor.

    No link is followed, and no other kind of file waits or changes because it is opened.

    Raises:
        FileError: if the path names anything but a regular file.
        OSError: if the file cannot be opened.
    """
    check_regular(path)
    try:
        file = os.open(path, flags | _SAFE, 0o666)
    except OSError:
        check_regular(path)
        raise
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):
        os.close(file)
        raise _refused(path, mode)
    return file


def check_regular(path: Path) -> None:
    """Raise a FileError if the path names anything but a regular file."""
    with suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            raise _refused(path, mode)


def publish_file(path: Path, content: bytes) -> None:
    """Write a file of fsla's own, whole or not at all.

    Raises:
        FileError: if the path names a link or anything else but a regular file.
        OSError: if the file cannot be written; it names `path`, and what was there stays.
    """
    with naming(path):
        check_regular(path)
        _replace(path, content)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file that the user named, whole or not at all.

    A link is followed. What is there and is no regular file, such as /dev/null or a pipe, is written into, since a
    rename would replace it. An OSError names `path`, not the temporary file.
    """
    with naming(path):
        if _special(path):
            path.write_bytes(content)
        else:
            _replace(Path(os.path.realpath(path)), content)


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"))


def ensure_writable(path: Path) -> None:
    """Make the folder of a file and raise an OSError unless the file can be written: asked before long work."""
    with naming(path):
        if _special(path):
            problem = errno.EISDIR if path.is_dir() else 0 if os.access(path, os.W_OK) else errno.EACCES
            if problem:
                raise OSError(problem, os.strerror(problem))
            return
        ensure_folder(Path(os.path.realpath(path)).parent)


def ensure_folder(folder: Path) -> None:
    """Make a folder and raise an OSError, which names it, unless files can be written in it."""
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = _temporary(folder / _PROBE)
        os.close(_create(probe))
        probe.unlink()


def remove_orphans(folder: Path) -> None:
    """Remove the temporary files that dead processes of this host left in a folder that is about to be written."""
    for path in folder.iterdir():
        if _is_orphan(path) and stat.S_ISREG(os.lstat(path).st_mode):
            with suppress(OSError):  # another user's
                path.unlink()


def is_temporary(path: Path) -> bool:
    """Return whether a path is named as a temporary file of fsla."""
    return bool(_TEMPORARY.fullmatch(path.name))


@contextmanager
def temporary_folder(target: Path, names: Collection[str]) -> Iterator[Path]:
    """Make a folder beside `target`, to be filled and published; its files with these names are removed at the end."""
    folder = _temporary(target)
    with naming(target):
        folder.mkdir()
    try:
        yield folder
    finally:
        with suppress(OSError):  # What stays has a temporary name, and the next run removes it.
            _clear(folder, names)


def publish_folder(folder: Path, target: Path, listed: Callable[[Path], Collection[str]]) -> None:
    """Put a folder of `temporary_folder` in the place of `target`, which then has the temporary name.

    Linux swaps the two names in one system call, so that the old folder or the new one is always there. Without that
    call (other systems, NFS) the old folder has a name aside between two renames: a process that is killed then leaves
    it there, and `mend_folder` puts it back.

    Args:
        folder: the new, complete folder.
        target: its place.
        listed: returns the names of the files in an old folder that may be removed.

    Raises:
        FileError: if `target` holds anything else. It stays, and the new folder gets another name.
    """
    with naming(target):
        for path in (*folder.iterdir(), folder):
            sync(path)
        others = _exchange(folder, target, listed)
        if not others:
            return
        spare = target.with_name(f"{target.name}-{os.urandom(4).hex()}")
        folder.rename(spare)
    raise FileError(
        f"Cannot replace {target}: fsla did not write {some(others)}. The folder is as it was, and the new results are "
        f"in {spare}."
    )


def _exchange(folder: Path, target: Path, listed: Callable[[Path], Collection[str]]) -> list[str]:
    """Put a folder in the place of another, unless that holds names that are not listed: return these."""
    if not os.path.lexists(target):
        folder.rename(target)
        sync(target.parent)
        return []
    others = foreign(target, listed(target))
    if others:
        return others
    _swap(folder, target)
    sync(target.parent)
    others = foreign(folder, listed(folder))  # since a file may have come between the look and the swap
    if others:
        _swap(folder, target)
    return others


def foreign(folder: Path, names: Collection[str]) -> list[str]:
    """Return the names in a folder that are not among these, or are no regular files."""
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        return [folder.name]
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.name not in names or not e.is_file(follow_symlinks=False))


def mend_folder(target: Path, names: Collection[str]) -> None:
    """Remove what dead processes of this host left while they wrote `target`, or put its old folder back.

    Only files with these names are removed. The caller holds the lock of `target`.
    """
    for path in target.parent.iterdir():
        if path.name.startswith(_start(path.with_name(_PROBE))) and _is_orphan(path):
            with suppress(OSError):
                path.unlink()
        if not _is_orphan(path) or not path.name.startswith(_start(target)) or path.is_symlink() or not path.is_dir():
            continue
        if path.suffix == ".old" and not os.path.lexists(target):
            path.rename(target)
            continue
        remove_orphans(path)
        with suppress(OSError):  # something else is in it
            _clear(path, names)


def some(names: list[str]) -> str:
    """Return the first names as text, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _clear(folder: Path, names: Collection[str]) -> None:
    """Remove the files with these names, and the folder, which must be empty then."""
    with suppress(FileNotFoundError):
        for name in names:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _swap(a: Path, b: Path) -> None:
    """Exchange the names of two folders."""
    if _exchange_names(a, b):
        return
    temporary = _temporary(b, "old")
    b.rename(temporary)
    try:
        a.rename(b)
    except BaseException:
        temporary.rename(b)
        raise
    temporary.rename(a)


def _exchange_names(a: Path, b: Path) -> bool:
    """Exchange two names in one system call, and return whether the system could."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    at_cwd, exchange = -100, 2
    return rename is not None and rename(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0


def _replace(target: Path, content: bytes) -> None:
    """Write to a temporary name in the same folder and rename it."""
    temporary = _temporary(target)
    descriptor = _create(temporary)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or a crash of the machine may leave the new name with no content
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    sync(target.parent)


def _create(path: Path) -> int:
    """Create a file, which must not be there, with the permissions that the umask leaves."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o666)


def sync(path: Path) -> None:
    """Bring a file, or a folder's names, to the disk, where the system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _SAFE)
    except OSError:  # Windows opens no folder, and others none that the user cannot read
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _start(path: Path) -> str:
    """How the temporary names of a path begin; cut, since the system limits names to 255 bytes."""
    return f".{path.name[:40]}.fsla-"


def _temporary(path: Path, ending: str = "tmp") -> Path:
    return path.with_name(f"{_start(path)}{_host()}-{os.getpid()}-{os.urandom(8).hex()}.{ending}")


@cache
def _host() -> str:
    """Identify this host among those that share a disk; a container counts as a host."""
    known = [socket.gethostname()]
    with suppress(OSError):
        known.append(os.readlink("/proc/self/ns/pid"))
    with suppress(OSError):
        known.append(Path("/etc/machine-id").read_text(encoding="ascii"))
    return hashlib.blake2b("\n".join(known).encode(), digest_size=4).hexdigest()


def _is_orphan(path: Path) -> bool:
    """Whether a temporary name is of a process of this host that no longer runs."""
    match = _TEMPORARY.fullmatch(path.name)
    return match is not None and match[1] == _host() and not _runs(int(match[2]))


def _special(path: Path) -> bool:
    """Whether something other than a regular file is there."""
    return path.exists() and not path.is_file()


def _refused(path: Path, mode: int) -> FileError:
    kind = _KINDS.get(stat.S_IFMT(mode), "a device")
    return FileError(f"Cannot use {path}: it is {kind}, not a regular file. Move it elsewhere, or name another place.")


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
def naming(path: Path) -> Iterator[None]:
    """Make an OSError from inside name the path, whatever file it came from."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
