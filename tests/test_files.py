"""Files and folders are published whole or not at all, links are not followed, and orphans are removed."""

import errno
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fsla import files
from fsla.files import (
    FileError,
    ensure_writable,
    open_regular,
    publish_file,
    remove_orphans,
    write_bytes,
    write_text,
)


def test_text_and_bytes_come_back(tmp_path):
    write_text(tmp_path / "x", "δ\n")
    assert (tmp_path / "x").read_bytes() == "δ\n".encode()
    write_bytes(tmp_path / "x", b"\0\xff")
    assert (tmp_path / "x").read_bytes() == b"\0\xff"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_failed_rename_leaves_the_old_file(tmp_path, monkeypatch):
    write_text(tmp_path / "x", "old")
    monkeypatch.setattr("pathlib.Path.replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_text(tmp_path / "x", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "old"


def test_a_write_that_breaks_off_leaves_the_old_file_and_names_it(tmp_path):
    """A limit on the size of files breaks a write off midway, as a full disk does."""
    write_text(tmp_path / "x", "old")
    code = (
        "import resource, sys; from pathlib import Path; from fsla.files import write_bytes\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "write_bytes(Path(sys.argv[1]), bytes(5000))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], capture_output=True, text=True)
    assert f"{os.strerror(errno.EFBIG)}: {str(tmp_path / 'x')!r}" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "old"


def test_a_pipe_is_written_into(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    seen = []
    reader = threading.Thread(target=lambda: seen.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "through")
    reader.join()
    assert seen == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_is_followed(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "deep" / "real").read_text() == "new"


def test_what_cannot_be_written_is_noticed_before(tmp_path):
    ensure_writable(tmp_path / "new" / "deeper" / "x")
    assert list((tmp_path / "new" / "deeper").iterdir()) == []
    with pytest.raises(IsADirectoryError):
        ensure_writable(tmp_path)
    with pytest.raises(OSError, match="/proc/x'"):
        ensure_writable(Path("/proc/x"))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="file/x"):
        ensure_writable(tmp_path / "file" / "x")


@pytest.fixture
def dead():
    """The number of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def temporary(process, name="x", host=None, ending="tmp"):
    return f".{name}.fsla-{host or files._host()}-{process}-{'0' * 16}.{ending}"


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_remove_orphans_keeps_all_but_those_of_dead_processes_of_this_host(tmp_path, dead):
    """Another host has processes of its own, and a name of another form is of another program."""
    kept = [temporary(os.getpid()), temporary(dead, host="0123abcd"), "x", f".x.{dead}.tmp", f".x.fsla-{dead}.tmp"]
    for name in [*kept, temporary(dead), temporary(9_999_999_999)]:
        (tmp_path / name).write_text("half")
    folder, link = temporary(dead, "folder"), temporary(dead, "link")
    (tmp_path / folder).mkdir()
    (tmp_path / link).symlink_to(tmp_path / "x")
    remove_orphans(tmp_path)
    assert names(tmp_path) == sorted([*kept, folder, link])


def test_write_bytes_ignores_a_link_at_a_known_temporary_name(tmp_path):
    """In a shared folder another user's link would have the content written through it."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / f".x.{os.getpid()}.tmp").symlink_to(tmp_path / "victim")
    write_text(tmp_path / "x", "new")
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "x").is_symlink()


def test_write_bytes_opens_no_temporary_name_that_is_taken(tmp_path, monkeypatch):
    """Even a random name that was guessed is not opened."""
    (tmp_path / "victim").write_text("precious")
    link = tmp_path / temporary(os.getpid())
    link.symlink_to(tmp_path / "victim")
    monkeypatch.setattr(os, "urandom", bytes)
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "x", "new")
    assert (tmp_path / "victim").read_text() == "precious"
    assert link.is_symlink()
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_write_bytes_leaves_the_permissions_to_the_umask(tmp_path, umask, mode):
    """A temporary file that only its owner can read would stay so under its last name."""
    before = os.umask(umask)
    try:
        write_text(tmp_path / "x", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == mode


def test_write_bytes_takes_names_of_255_bytes(tmp_path):
    """The temporary name is longer than the name, and must not be too long for the system."""
    write_text(tmp_path / ("x" * 255), "new")
    write_text(tmp_path / ("δ" * 127), "new")
    assert len(names(tmp_path)) == 2


def test_publish_file_brings_the_name_to_the_disk(tmp_path, monkeypatch):
    """A crash of the machine could else undo the rename, after older files were removed."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(stat.S_ISDIR(os.fstat(file).st_mode)))
    publish_file(tmp_path / "x", b"new")
    assert synced == [False, True]


def planted(path, kind, victim):
    """Put something in the place of a file; returns what keeps it there."""
    if kind in ("link", "hanging link", "loop", "link to a device"):
        path.symlink_to({"link": victim, "hanging link": path.parent / "none", "loop": path}.get(kind, "/dev/zero"))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        held = socket.socket(socket.AF_UNIX)
        held.bind(str(path))
        return held
    return None


KINDS = ["link", "hanging link", "loop", "link to a device", "pipe", "folder", "socket"]


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened_and_replaced(tmp_path, monkeypatch, kind):
    """Nothing is read, written or waited for, whatever is in the place of a file."""
    monkeypatch.chdir(tmp_path)  # a socket has a short path
    Path("victim").write_text("precious")
    held = planted(Path("x"), kind, "victim")
    before = os.lstat("x")
    what = f"a {kind}" if kind in ("pipe", "folder", "socket") else "a symbolic link"
    for act in (
        lambda: open_regular(Path("x"), os.O_RDWR | os.O_CREAT),
        lambda: open_regular(Path("x"), os.O_RDONLY),
        lambda: publish_file(Path("x"), b"new"),
    ):
        with pytest.raises(FileError, match=f"Cannot use x: it is {what}, not a regular file. Move it elsewhere"):
            act()
    assert os.lstat("x") == before
    assert Path("victim").read_text() == "precious"
    assert names(Path()) == ["victim", "x"]
    assert held is None or held.close() is None


@pytest.mark.parametrize("kind", ["link", "hanging link", "pipe"])
def test_open_regular_notices_what_was_planted_after_the_look(tmp_path, monkeypatch, kind):
    """The descriptor is looked at too, so that no moment is left."""
    (tmp_path / "victim").write_text("precious")
    planted(tmp_path / "x", kind, tmp_path / "victim")
    looks = iter([None])
    real = files.check_regular
    monkeypatch.setattr(files, "check_regular", lambda path: next(looks) if looks.__length_hint__() else real(path))
    with pytest.raises(FileError, match="not a regular file"):
        open_regular(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    assert names(tmp_path) == ["victim", "x"]
