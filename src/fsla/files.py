"""Files and folders: only regular files are opened, each is published whole, and killed processes leave nothing."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_TEMPORARY = re.compile(r"\..+\.fsla-([0-9a-f]{8})-([0-9]{1,10})-[0-9a-f]{16}\.(tmp|old)")
"""The name of a temporary file or folder: host, process and a random part."""
_SAFE = sum(getattr(os, f"O_{name}", 0) for name in ("NOFOLLOW", "NONBLOCK", "CLOEXEC", "BINARY"))
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
    check_regular(path)
    with _named(path):
        _replace(path, content)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file that the user named, whole or not at all.

    A link is followed. What is there and is no regular file, such as /dev/null or a pipe, is written into, since a
    rename would replace it. An OSError names `path`, not the temporary file.
    """
    with _named(path):
        if _special(path):
            path.write_bytes(content)
        else:
            _replace(Path(os.path.realpath(path)), content)


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"))


def ensure_writable(path: Path) -> None:
    """Make the folder of a file and raise an OSError unless the file can be written: asked before long work."""
    with _named(path):
        if _special(path):
            problem = errno.EISDIR if path.is_dir() else 0 if os.access(path, os.W_OK) else errno.EACCES
            if problem:
                raise OSError(problem, os.strerror(problem))
            return
        ensure_folder(Path(os.path.realpath(path)).parent)


def ensure_folder(folder: Path) -> None:
    """Make a folder and raise an OSError, which names it, unless files can be made in it."""
    with _named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = _temporary(folder / "probe")
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
    _sync(target.parent)


def _create(path: Path) -> int:
    """Create a file, which must not be there, with the permissions that the umask leaves."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o666)


def _sync(path: Path) -> None:
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
    """What tells the processes of this host from those of others on a shared disk; a container is its own host."""
    known = [socket.gethostname()]
    with suppress(OSError):
        known.append(os.readlink("/proc/self/ns/pid"))
    with suppress(OSError):
        known.append(Path("/etc/machine-id").read_text(encoding="ascii"))
    return hashlib.blake2b("\n".join(known).encode(), digest_size=4).hexdigest()


def _is_orphan(path: Path) -> bool:
    """Whether a temporary name is of a process of this host that no longer runs."""
    found = _TEMPORARY.fullmatch(path.name)
    return found is not None and found[1] == _host() and not _runs(int(found[2]))


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
def _named(path: Path) -> Iterator[None]:
    """An OSError from inside names the path, whatever file it came from."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
