"""Markup and formulas in a table: text in the report, and no formula in the tables for people."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

import fsla
from faults.trials import SilentlyWrong, Trial, new_folder

REPORT, FORMULAS, TRAVERSAL = "markup of a table in report.html", "formulas of a table in csv", "images by path"
PAYLOADS = (
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "' onfocus='alert(1)' autofocus='",
    "<svg/onload=alert(1)>",
    "javascript:alert(1)",
    "<!--",
    "]]>",
    "{{ 7 * 7 }}{% for x in y %}",
    "&lt;script&gt;",
    "</title></style></textarea><b>",
    "\u2028\u2029</script>",
)
CELLS = ("=1+1", "=cmd|' /C calc'!A0", "+SUM(A1)", "-SUM(A1)", "@SUM(A1)", "\t=1+1", "\r=1+1")


@cache
def written(texts: tuple[str, ...]) -> Path:
    """Clean a table with these texts as names, groups, labels and cells, and return the folder."""
    import pandas as pd

    rng = np.random.default_rng(0)
    number = 60
    x = rng.standard_normal(number)
    label = np.where(x > 0, f"a{texts[0]}", f"b{texts[0]}").astype(object)
    wrong = rng.random(number) < 0.2
    seen = np.where(wrong, np.where(x > 0, f"b{texts[0]}", f"a{texts[0]}"), label)
    table = pd.DataFrame(
        {
            "x": x.round(3).astype(str),
            f"note {texts[0]}": [texts[i % len(texts)] for i in range(number)],
            "name": [f"{texts[i % len(texts)]} {i}" for i in range(number)],
            "source": [texts[0] if i % 2 else "plain source" for i in range(number)],
            "label": seen,
            "checked": np.where(np.arange(number) % 2 == 0, label, ""),
        }
    )
    try:
        result = fsla.data.clean(
            table,
            checked="checked",
            id="name",
            group="source",
            strategies=["trusted_only", "all_data"],
            learners=["linear"],
        )
    except ValueError as error:  # These texts are allowed: a refusal would make the trial empty.
        raise SilentlyWrong(f"refused: {error}") from error
    folder = new_folder() / "out"
    result.save(folder)
    return folder


class _Elements(HTMLParser):
    """Counts elements, and collects the names of attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.count[tag] += 1
        self.attributes |= {name for name, _ in attrs}


def _elements(page: Path) -> _Elements:
    parser = _Elements()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser


def trials(seed: int) -> Iterator[Trial]:
    """Yield each text in a report, each formula in the tables, and each path of an image."""
    for i, payload in enumerate(PAYLOADS):
        yield Trial(REPORT, f"{i}: {payload!r}", partial(_inert, payload), limit_s=120.0)
    for i, cell in enumerate(CELLS):
        yield Trial(FORMULAS, f"{i}: {cell!r}", partial(_defused, cell), limit_s=120.0)
    for name, path in _PATHS.items():
        yield Trial(TRAVERSAL, name, partial(_image, path), limit_s=60.0)


def _inert(payload: str) -> None:
    """The page has the elements and attributes that it has with a plain text, and no others."""
    page, plain = _elements(written((payload,)) / "report.html"), _elements(written(("plain",)) / "report.html")
    active = ("script", "img", "svg", "iframe", "object", "embed", "link", "style", "base", "form", "title")
    for tag in active:
        if page.count[tag] != plain.count[tag]:
            raise SilentlyWrong(f"{page.count[tag]} elements {tag}, not {plain.count[tag]}")
    if page.attributes - plain.attributes:
        raise SilentlyWrong(f"the attributes {page.attributes - plain.attributes}")
    text = (written((payload,)) / "report.html").read_text(encoding="utf-8")
    if "{{ 7 * 7 }}" in payload and "{{ 7 * 7 }}" not in text:
        raise SilentlyWrong("a template was run")


def _defused(cell: str) -> None:
    """No cell of the tables for people begins as a formula; cleaned.csv has the cell itself."""
    folder = written((cell,))
    for name in ("label_issues.csv", "group_weights.csv", "review.csv"):
        with open(folder / name, newline="", encoding="utf-8") as file:
            cells = [text for row in csv.reader(file) for text in row]
        for text in cells:
            if text[:1] in ("=", "+", "@", "\t", "\r") or (text[:1] == "-" and not _is_number(text)):
                raise SilentlyWrong(f"{name} has the cell {text!r}")
    with open(folder / "cleaned.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or {row["source"] for row in rows} != {cell, "plain source"}:
        raise SilentlyWrong(f"cleaned.csv has the groups { ({row['source'] for row in rows}) }")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_PATHS = {
    "above the folder": "../outside.png",
    "absolute": "{outside}",
    "a link that leads out": "link.png",
    "a pipe": "pipe.png",
    "/dev/zero": "/dev/zero",
    "a folder": "folder",
    "missing": "missing.png",
    "empty": "",
    "no image": "text.png",
    "ends early": "cut.png",
    "a decompression bomb": "bomb.png",
    "of 1 x 100000 pixels": "thin.png",
    "a null byte": "a\0.png",
    "a long name": "x" * 5000,
}


def _image(path: str) -> None:
    """One image of a table is hostile: it is refused, or left out with a word, and nothing outside is shown."""
    import pandas as pd
    from PIL import Image

    folder = new_folder() / "data"
    folder.mkdir()
    rng = np.random.default_rng(0)
    names = []
    for i in range(24):
        Image.fromarray(rng.integers(255, size=(8, 8), dtype=np.uint8)).save(folder / f"{i}.png")
        names.append(f"{i}.png")
    outside = folder.parent / "outside.png"
    Image.new("L", (8, 8)).save(outside)
    (folder / "link.png").symlink_to(outside)
    os.mkfifo(folder / "pipe.png")
    (folder / "folder").mkdir()
    (folder / "text.png").write_text("no image")
    (folder / "cut.png").write_bytes((folder / "0.png").read_bytes()[:40])
    (folder / "bomb.png").write_bytes(_bomb())
    Image.new("L", (1, 100_000)).save(folder / "thin.png")
    names[3] = path.replace("{outside}", str(outside))
    table = pd.DataFrame({"image": names, "label": ["a", "b"] * 12, "checked": ["a", "b"] * 12})
    file = folder / "data.csv"
    table.to_csv(file, index=False)
    from fsla.data._loading import load_data

    loaded = load_data(file, label="label", checked="checked", image="image")
    if path not in ("thin.png",) and not any("3" in note or "image" in note for note in loaded.notes):
        raise SilentlyWrong("the image was taken without a word")


def _bomb() -> bytes:
    """Return a PNG whose header says 60000 x 60000 pixels."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(10_000))) + chunk(b"IEND", b"")
    )
