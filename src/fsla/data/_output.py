"""The folder of a run: all of its files or none, and never a file that fsla did not write."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fsla._storage._files import (
    ensure_folder,
    foreign,
    mend_folder,
    naming,
    open_regular,
    publish_folder,
    some,
    temporary_folder,
    write_text,
)
from fsla._storage._locks import locked
from fsla._version import __version__

if TYPE_CHECKING:
    import pandas as pd

SUMMARY = "summary.json"
FILES = frozenset(
    {
        "report.html",
        "label_issues.csv",
        "group_weights.csv",
        "annotators.csv",
        "cleaned.csv",
        "review.csv",
        "model.safetensors",
        SUMMARY,
    }
)
"""Every name that a run may write."""
GENERATOR = "fsla"
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters from which a spreadsheet takes a cell for a formula."""


@contextmanager
def claim_folder(out: Path) -> Iterator[None]:
    """Keep other processes from writing a folder inside the block.

    Raises:
        ValueError: if `out` is no folder, holds a file that no earlier run wrote, or another process has it.
        OSError: if no folder can be made there.
    """
    place = _resolve(out)
    if os.path.lexists(place) and not place.is_dir():
        raise ValueError(f"Cannot write {out}: it is not a folder. Choose another --out.")
    ensure_folder(place.parent)
    with locked(place.with_name(f".{place.name}.lock"), out):
        with naming(place):
            mend_folder(place, FILES)
            others = foreign(place, _listed_files(place)) if place.is_dir() else []
        if others:
            raise ValueError(
                f"Cannot use --out {out}: no summary.json of fsla lists {some(others)}. Move what you want to keep "
                "elsewhere, or choose another --out."
            )
        yield


def publish(out: Path, writers: Mapping[str, Callable[[Path], None]], summary: Mapping[str, object]) -> None:
    """Write a folder as a whole: it has all files, or stays as it was. The caller has claimed it.

    Args:
        out: the folder.
        writers: writes each file, by name.
        summary: the content of summary.json.
    """
    place = _resolve(out)
    with temporary_folder(place, FILES) as folder:
        for name, write in writers.items():
            write(folder / name)
        content = {
            "generator": {"name": GENERATOR, "version": __version__},
            **summary,
            "files": sorted([*writers, SUMMARY]),
        }
        write_text(folder / SUMMARY, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        publish_folder(folder, place, _listed_files)


def table_for_people(table: pd.DataFrame) -> str:
    """Return a table as CSV that a spreadsheet can open: text that looks like a formula gets an apostrophe."""
    safe = table.copy()
    for column in safe.columns:
        safe[column] = [_defuse(cell) for cell in safe[column]]
    safe.columns = [_defuse(str(column)) for column in table.columns]
    return _to_csv(safe)


def table_for_programs(table: pd.DataFrame) -> str:
    """Return a table as CSV with every cell as it is."""
    return _to_csv(table)


def _defuse(cell: object) -> object:
    if not isinstance(cell, str) or not cell.startswith(_FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def _to_csv(table: pd.DataFrame) -> str:
    text = io.StringIO()
    writer, quoting = (
        csv.writer(text, lineterminator="\n"),
        csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n"),
    )
    columns = [[_plain(cell) for cell in table[column]] for column in table.columns]
    for row in (tuple(table.columns), *zip(*columns, strict=True)):
        returns = any(isinstance(cell, str) and "\r" in cell for cell in row)  # The writer would leave it unquoted.
        (quoting if returns else writer).writerow(row)
    return text.getvalue()


def _plain(cell: object) -> object:
    """Return a cell without a missing value's name and without digits that mean nothing."""
    if isinstance(cell, bool | np.bool_):
        return str(bool(cell)).lower()
    if isinstance(cell, float | np.floating):
        return "" if cell != cell else f"{cell:.6g}"
    return "" if cell is None else cell


def _resolve(out: Path) -> Path:
    """Return where a folder is: a link that the user names is followed."""
    return Path(os.path.realpath(out))


def _listed_files(folder: Path) -> frozenset[str]:
    """Return the files that a run wrote into a folder, by its summary; none where no run did."""
    try:
        with open(open_regular(folder / SUMMARY, os.O_RDONLY), encoding="utf-8") as file:
            summary = json.load(file)
        return FILES.intersection(summary["files"]) if summary["generator"]["name"] == GENERATOR else frozenset()
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return frozenset()
