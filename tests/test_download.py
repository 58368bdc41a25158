"""Downloads from a loopback server: checked, tried again, and within limits of time and size."""

import contextlib
import functools
import hashlib
import http.server
import threading

import pytest

from fsla_reproduction.datasets import DataError, sets
from fsla_reproduction.datasets.download import Limits
from idx_files import images, labels, write


@pytest.fixture
def server(tmp_path):
    """A loopback server of small files; `failures` makes the next answers fail, `answer` gives them."""
    root = tmp_path / "served"
    root.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        failures = 0
        requests = 0

        answer = None

        def do_GET(self):
            Handler.requests += 1
            if Handler.failures > 0:
                Handler.failures -= 1
                self.send_error(503)
            elif Handler.answer is not None:
                with contextlib.suppress(ConnectionError):  # the client may have seen enough
                    Handler.answer(self)
            else:
                super().do_GET()

        def log_message(self, *args):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(root)))
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield root, f"http://127.0.0.1:{httpd.server_address[1]}/", Handler
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.fixture
def small_source(server, monkeypatch):
    root, home, handler = server
    files = []
    for file, array in zip(sets.SOURCES["mnist"].files, (images(6), labels(6), images(4), labels(4)), strict=True):
        write(root / file.name, array)
        files.append(sets.File(file.name, hashlib.sha256((root / file.name).read_bytes()).hexdigest()))
    monkeypatch.setitem(sets.SOURCES, "mnist", sets.Source(home, *files))
    monkeypatch.setattr("time.sleep", lambda s: None)  # pooch waits between tries
    return root, handler


class Bar:
    def __init__(self):
        self.total, self.done = 0, 0

    def update(self, n):
        self.done += n

    def reset(self):
        self.done = 0

    def close(self):
        pass


def test_download_verifies_stores_and_reports(small_source, tmp_path):
    bar, (_, handler) = Bar(), small_source
    paths = sets.fetch("mnist", tmp_path / "cache", progress=bar)
    assert all(p.exists() for p in paths)
    assert bar.total > 0
    count = handler.requests
    sets.fetch("mnist", tmp_path / "cache")
    assert handler.requests == count  # what is there is not fetched again
    assert all(c.good and "as published" in c.text for c in sets.check("mnist", tmp_path / "cache"))


def test_download_retries(small_source, tmp_path):
    _, handler = small_source
    handler.failures = 2
    assert len(sets.fetch("mnist", tmp_path / "cache")) == 4
    handler.failures = 0


def test_download_with_wrong_checksum_leaves_nothing(small_source, tmp_path):
    root, _ = small_source
    name = sets.SOURCES["mnist"].train_images.name
    write(root / name, images(7))
    with pytest.raises(DataError, match="must have the checksum"):
        sets.fetch("mnist", tmp_path / "cache", tries=0)
    assert not (tmp_path / "cache" / "mnist" / name).exists()


def test_download_without_network_lists_files(small_source, tmp_path, monkeypatch):
    source = sets.SOURCES["mnist"]
    monkeypatch.setitem(sets.SOURCES, "mnist", sets.Source("http://127.0.0.1:9/", *source.files))
    with pytest.raises(DataError, match=r"cannot be downloaded.*Put them in place.*t10k-labels-idx1-ubyte.gz"):
        sets.fetch("mnist", tmp_path / "cache", tries=0)


def served(handler, *pieces, announced=None):
    """Sends pieces, each a text or something to be done between them."""
    handler.send_response(200)
    if announced is not None:
        handler.send_header("Content-Length", str(announced))
    handler.end_headers()
    for piece in pieces:
        if callable(piece):
            piece()
        else:
            handler.wfile.write(piece)
            handler.wfile.flush()


def nothing_is_left(folder):
    return not [p for p in folder.rglob("*") if p.is_file()]


def test_download_announced_too_large_is_not_read(small_source, tmp_path):
    _, handler = small_source
    handler.answer = lambda request: served(request, announced=1001)
    with pytest.raises(DataError, match=r"must have at most 1000 bytes. The server sends 1001 or more"):
        sets.fetch("mnist", tmp_path / "cache", limits=Limits(bytes=1000))
    assert handler.requests == 1  # another try would end in the same way
    assert nothing_is_left(tmp_path / "cache")


def test_download_longer_than_limit_aborts(small_source, tmp_path):
    _, handler = small_source
    handler.answer = lambda request: served(request, *[bytes(100_000)] * 100)
    with pytest.raises(DataError, match="must have at most 1000000 bytes"):
        sets.fetch("mnist", tmp_path / "cache", limits=Limits(bytes=1_000_000))
    assert handler.requests == 1
    assert nothing_is_left(tmp_path / "cache")


def test_download_too_slow_aborts(small_source, tmp_path):
    """It sends a few bytes, the time is over, it sends a few more, and then no more while the client listens."""
    _, handler = small_source
    now = [0.0]
    over = threading.Event()
    handler.answer = lambda request: served(
        request, b"0123456789", lambda: now.__setitem__(0, 1000.0), b"0123456789", over.wait, announced=50_000
    )
    try:
        with pytest.raises(DataError, match=r"must end within 900 seconds. It did not"):
            sets.fetch("mnist", tmp_path / "cache", limits=Limits(seconds=900), clock=lambda: now[0])
    finally:
        over.set()
    assert handler.requests == 1
    assert nothing_is_left(tmp_path / "cache")


def test_download_time_limit_covers_all_tries(small_source, tmp_path):
    _, handler = small_source
    now = [0.0]

    def fail(request):
        now[0] += 400
        request.send_error(503)

    handler.answer = fail
    with pytest.raises(DataError, match="must end within 900 seconds"):
        sets.fetch("mnist", tmp_path / "cache", tries=9, limits=Limits(seconds=900), clock=lambda: now[0])
    assert handler.requests == 3


def test_download_retries_after_broken_connection(small_source, tmp_path):
    root, handler = small_source
    first = root / sets.SOURCES["mnist"].train_images.name

    def break_off(request):
        handler.answer = None
        served(request, first.read_bytes()[:100], announced=first.stat().st_size)
        request.close_connection = True

    handler.answer = break_off
    assert all(p.exists() for p in sets.fetch("mnist", tmp_path / "cache"))
    assert handler.requests == 5
