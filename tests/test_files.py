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

from fsla._storage import _files as files
from fsla._storage._files import (
    FileError,
    ensure_writable,
    mend_folder,
    open_regular,
    publish_file,
    publish_folder,
    remove_orphans,
    temporary_folder,
    write_bytes,
    write_text,
)


def test_write_bytes_round_trip(tmp_path):
    write_text(tmp_path / "x", "δ\n")
    assert (tmp_path / "x").read_bytes() == "δ\n".encode()
    write_bytes(tmp_path / "x", b"\0\xff")
    assert (tmp_path / "x").read_bytes() == b"\0\xff"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_write_bytes_failed_rename_keeps_old_file(tmp_path, monkeypatch):
    write_text(tmp_path / "x", "old")
    monkeypatch.setattr("pathlib.Path.replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_text(tmp_path / "x", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "old"


def test_write_bytes_interrupted_keeps_old_file(tmp_path):
    """A limit on the size of files breaks a write off midway, as a full disk does."""
    write_text(tmp_path / "x", "old")
    code = (
        "import resource, sys; from pathlib import Path; from fsla._storage._files import write_bytes\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "write_bytes(Path(sys.argv[1]), bytes(5000))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], capture_output=True, text=True)
    assert f"{os.strerror(errno.EFBIG)}: {str(tmp_path / 'x')!r}" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "old"


def test_write_bytes_to_pipe_writes_into_it(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    seen = []
    reader = threading.Thread(target=lambda: seen.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "through")
    reader.join()
    assert seen == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_write_bytes_follows_link(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "deep" / "real").read_text() == "new"


def test_check_writable_fails_before_writing(tmp_path):
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


def test_remove_orphans_removes_files_of_dead_local_processes_only(tmp_path, dead):
    """Another host has other processes, and a name of another form is of another program."""
    remaining = [temporary(os.getpid()), temporary(dead, host="0123abcd"), "x", f".x.{dead}.tmp", f".x.fsla-{dead}.tmp"]
    for name in [*remaining, temporary(dead), temporary(9_999_999_999)]:
        (tmp_path / name).write_text("half")
    folder, link = temporary(dead, "folder"), temporary(dead, "link")
    (tmp_path / folder).mkdir()
    (tmp_path / link).symlink_to(tmp_path / "x")
    remove_orphans(tmp_path)
    assert names(tmp_path) == sorted([*remaining, folder, link])


def test_write_bytes_ignores_planted_link(tmp_path):
    """In a shared folder another user's link would have the content written through it."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / f".x.{os.getpid()}.tmp").symlink_to(tmp_path / "victim")
    write_text(tmp_path / "x", "new")
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "x").is_symlink()


def test_write_bytes_skips_taken_temporary_name(tmp_path, monkeypatch):
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
def test_write_bytes_permissions_follow_umask(tmp_path, umask, mode):
    """A temporary file that only its owner can read would stay so under its last name."""
    before = os.umask(umask)
    try:
        write_text(tmp_path / "x", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == mode


def test_write_bytes_accepts_names_of_255_bytes(tmp_path):
    """The temporary name is longer than the name, and must not be too long for the system."""
    write_text(tmp_path / ("x" * 255), "new")
    write_text(tmp_path / ("δ" * 127), "new")
    assert len(names(tmp_path)) == 2


def test_publish_file_syncs_directory(tmp_path, monkeypatch):
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
        occupant = socket.socket(socket.AF_UNIX)
        occupant.bind(str(path))
        return occupant
    return None


KINDS = ["link", "hanging link", "loop", "link to a device", "pipe", "folder", "socket"]


@pytest.mark.parametrize("kind", KINDS)
def test_open_regular_of_irregular_file_raises(tmp_path, monkeypatch, kind):
    """Nothing is read, written or waited for, whatever is in the place of a file."""
    monkeypatch.chdir(tmp_path)  # a socket has a short path
    Path("victim").write_text("precious")
    occupant = planted(Path("x"), kind, "victim")
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
    assert occupant is None or occupant.close() is None


@pytest.mark.parametrize("kind", ["link", "hanging link", "pipe"])
def test_open_regular_detects_swap_after_check(tmp_path, monkeypatch, kind):
    """The descriptor is checked too, so that no moment is left."""
    (tmp_path / "victim").write_text("precious")
    planted(tmp_path / "x", kind, tmp_path / "victim")
    checks = iter([None])
    real = files.check_regular
    monkeypatch.setattr(files, "check_regular", lambda path: next(checks) if checks.__length_hint__() else real(path))
    with pytest.raises(FileError, match="not a regular file"):
        open_regular(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    assert names(tmp_path) == ["victim", "x"]


# ------------------------------------------------------------------------------------------------------------- folders

FILES = {"a", "b"}


def write_folder(folder, text):
    for name in FILES:
        (folder / name).write_text(text)


def text_of(folder):
    """The text that all files of a folder have."""
    assert set(names(folder)) == FILES
    (text,) = {p.read_text() for p in folder.iterdir()}
    return text


@pytest.fixture(params=["swapped at once", "renamed twice"])
def publish_variant(request, monkeypatch):
    """How folders change places: as the file system can, and as on one that cannot exchange names."""
    if request.param == "renamed twice":
        monkeypatch.setattr(files, "_exchange_names", lambda a, b: False)
    return request.param


@pytest.mark.parametrize("before", ["none", "empty", "old"])
def test_publish_folder_replaces_listed_files(tmp_path, publish_variant, before):
    target = tmp_path / "out"
    if before != "none":
        target.mkdir()
    if before == "old":
        write_folder(target, "old")
    with temporary_folder(target, FILES) as temporary:
        write_folder(temporary, "new")
        publish_folder(temporary, target, lambda folder: FILES)
    assert text_of(target) == "new"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("at", ["before", "at the last moment"])
@pytest.mark.parametrize("kind", ["file", "folder", "link", "file in place"])
def test_publish_folder_keeps_files_that_appear(tmp_path, monkeypatch, publish_variant, at, kind):
    """A file may be put into the folder while the training runs, and up to the swap."""
    target = tmp_path / "out"
    target.mkdir()
    write_folder(target, "old")
    (tmp_path / "elsewhere").write_text("precious")

    def come():
        if kind == "file":
            (target / "thesis").write_text("precious")
        elif kind == "folder":
            (target / "thesis").mkdir()
            (target / "thesis" / "a").write_text("precious")
        elif kind == "link":
            (target / "a").unlink()
            (target / "a").symlink_to(tmp_path / "elsewhere")
        else:
            (target / "a").unlink()
            (target / "a").mkdir()

    if at == "before":
        come()
    else:
        real = files._swap
        swaps = iter([come])
        monkeypatch.setattr(files, "_swap", lambda a, b: (next(swaps, lambda: None)(), real(a, b)))
    with temporary_folder(target, FILES) as temporary:
        write_folder(temporary, "new")
        with pytest.raises(FileError) as caught:
            publish_folder(temporary, target, lambda folder: FILES)
    (aside_folder,) = (p for p in tmp_path.iterdir() if p.name.startswith("out-"))
    assert text_of(aside_folder) == "new"
    name = "thesis" if kind in ("file", "folder") else "a"
    assert str(caught.value) == (
        f"Cannot replace {target}: fsla did not write {name}. The folder is as it was, and the new results are in "
        f"{aside_folder}."
    )
    assert (target / "b").read_text() == "old"
    assert (target / name).is_symlink() if kind == "link" else (target / name).exists()
    assert kind != "folder" or (target / "thesis" / "a").read_text() == "precious"
    assert (tmp_path / "elsewhere").read_text() == "precious"
    assert names(tmp_path) == sorted(["elsewhere", "out", aside_folder.name])


KILLED = """
import importlib.util, os, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("files", sys.argv[1])
files = importlib.util.module_from_spec(spec)
sys.modules["files"] = files
spec.loader.exec_module(files)
target, left, names = Path(sys.argv[2]), int(sys.argv[4]), {"a", "b"}
exchanged = files._exchange_names if sys.argv[3] == "swapped at once" else lambda a, b: False

def reached(event, *_):
    global left
    if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "open", "swap"):
        left -= 1
        if left < 0:
            os._exit(9)

def swap(a, b):
    reached("swap")
    done = exchanged(a, b)
    reached("swap")
    return done

files._exchange_names = swap
files._host()
sys.addaudithook(reached)
with files.temporary_folder(target, names) as made:
    for name in names:
        files.write_text(made / name, "new")
    files.publish_folder(made, target, lambda folder: names)
"""


def test_publish_folder_killed_anywhere_leaves_old_or_new(tmp_path, publish_variant):
    """The process ends before each of its changes in turn; the next run removes what was left."""
    target = tmp_path / "out"
    target.mkdir()
    write_folder(target, "old")
    seen = []
    for moment in range(200):
        done = subprocess.run(
            [sys.executable, "-S", "-c", KILLED, files.__file__, target, publish_variant, str(moment)]
        )
        if publish_variant == "swapped at once":
            assert text_of(target) in ("old", "new")
        mend_folder(target, FILES)
        assert names(tmp_path) == ["out"], moment
        seen.append(text_of(target))
        if done.returncode == 0:
            break
        assert done.returncode == 9
        write_folder(target, "old")
    assert len(seen) > 15
    assert set(seen[:-1]) == {"old", "new"}
    assert seen[-1] == "new"


def test_mend_folder_keeps_files_of_others(tmp_path, dead):
    """A name with a dead process's number may hold a user's file, be another host's, or lead elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    write_folder(tmp_path / "elsewhere", "precious")
    local, other, host = temporary(dead, "out"), temporary(dead, "out2"), temporary(dead, "out", host="0123abcd")
    for name in (local, other, host):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis").write_text("precious")
        (tmp_path / name / "a").write_text("half")
    link = temporary(9_999_999_999, "out")
    (tmp_path / link).symlink_to(tmp_path / "elsewhere")
    mend_folder(tmp_path / "out", FILES)
    assert names(tmp_path) == sorted([local, other, host, link, "elsewhere"])
    assert names(tmp_path / local) == ["thesis"]
    assert names(tmp_path / other) == names(tmp_path / host) == ["a", "thesis"]
    assert text_of(tmp_path / "elsewhere") == "precious"
