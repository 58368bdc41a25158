"""Data sets for runs: read once by each process, and known by what they hold."""

from __future__ import annotations

from pathlib import Path

from fsla_reproduction.datasets import Images, fingerprint, load
from fsla_reproduction.folder import RunError

_LOADED: dict[str, Images] = {}
"""By fingerprint."""


def hold(images: Images) -> str:
    """Keep a data set for the runs that this process will do; return its fingerprint."""
    known = fingerprint(images)
    _LOADED[known] = images
    return known


def load_once(name: str, known: str, data_dir: Path | None) -> Images:
    """The data set of a fingerprint. A worker that does not hold it reads it."""
    if known not in _LOADED and hold(load(name, data_dir)) != known:
        raise RunError(
            f"Every worker must read the same data. One read other images or labels of {name} than the process that "
            "started it. Give all of them the same files, with --data-dir or FSLA_DATA."
        )
    return _LOADED[known]
