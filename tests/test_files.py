"""Files are written whole or not at all, into what is there where it is no plain file, and orphans are removed."""

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fsla.files import ensure_writable, remove_orphans, write_bytes, write_text


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


def test_orphans_of_dead_processes_are_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    kept = [f".x.{os.getpid()}.tmp", "x", ".hidden", f"x.{dead.pid}.tmp", ".x.abc.tmp", ".x.99999999999.tmp"]
    for name in [*kept, f".x.json.{dead.pid}.tmp"]:
        (tmp_path / name).write_text("half")
    (tmp_path / f".folder.{dead.pid}.tmp").mkdir()
    remove_orphans(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {*kept, f".folder.{dead.pid}.tmp"}
