"""Downloads that end: a file may neither take too long nor be too large."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, Protocol

_PIECE = 2**16


class DownloadRefused(Exception):
    """A download that failed for good: another try would end alike."""


class Bar(Protocol):
    """A progress bar, as pooch has it."""

    total: int

    def update(self, n: int) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Limits:
    """How long one file may take, all tries together, and how large it may be. Published files have some 30 MB."""

    seconds: float = 900.0
    bytes: int = 128 * 2**20
    silence_s: float = 30.0
    """How long the server may send nothing."""


class Downloader:
    """Downloads one file, however often pooch tries; the time of all tries counts."""

    def __init__(
        self, limits: Limits, *, progress: Bar | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._progress = progress
        self._clock = clock
        self._end = clock() + limits.seconds

    def __call__(self, url: str, output_file: str, pooch: object) -> None:
        """Write what the address serves to a file: pooch's contract for downloaders."""
        import requests
        import urllib3

        with requests.get(
            url, stream=True, timeout=self._timeout(url), headers={"Accept-Encoding": "identity"}
        ) as response:
            response.raise_for_status()
            announced = response.headers.get("Content-Length", "")
            size = int(announced) if announced.isdecimal() else 0
            self._check(url, size)
            if self._progress is not None:
                self._progress.reset()
                self._progress.total = size
            try:
                with open(output_file, "wb") as file:
                    self._copy(url, response.raw.read1, file)
            except urllib3.exceptions.HTTPError as error:  # a connection that broke: pooch tries again
                raise requests.ConnectionError(str(error)) from error
        if self._progress is not None:
            self._progress.close()

    def _copy(self, url: str, read: Callable[[int], bytes], file: BinaryIO) -> None:
        """Copy piece by piece: `read` returns what has arrived, so that the limits are checked in between."""
        received = 0
        while piece := read(_PIECE):
            received += len(piece)
            self._check(url, received)
            file.write(piece)
            if self._progress is not None:
                self._progress.update(len(piece))

    def _timeout(self, url: str) -> float:
        """The longest silence that fits into the time that is left."""
        self._check(url, 0)
        return min(self._limits.silence_s, self._end - self._clock())

    def _check(self, url: str, size: int) -> None:
        if size > self._limits.bytes:
            raise DownloadRefused(
                f"The download of {url} must have at most {self._limits.bytes} bytes. The server sends {size} or more."
            )
        if self._clock() >= self._end:
            raise DownloadRefused(
                f"The download of {url} must end within {self._limits.seconds:g} seconds. It did not. Try again, or "
                "fetch the file by other means."
            )
