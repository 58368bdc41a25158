"""Hostile tables: refused in words, or every cell of what comes out is the cell that went in."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from faults.children import run_child
from faults.trials import ProgramRaw, Refused, SilentlyWrong, Trial, new_folder

CATEGORY, COMMAND = "hostile tables", "hostile tables at the command line"
HEADER = ["name", "zip", "x", "source", "label", "checked"]
OPTIONS: dict[str, Any] = {
    "checked": "checked",
    "id": "name",
    "group": "source",
    "strategies": ["trusted_only"],
    "learners": ["linear"],
}
Rows = list[list[str]]


def base(seed: int, number: int = 40) -> Rows:
    """Return rows whose cells are texts that a guess of types would change."""
    random = Random(seed)
    rows = []
    for i in range(number):
        x = random.gauss(0, 1)
        label = "1" if x > 0 else "01"
        rows.append(
            [f"{i:04}", f"0{random.randrange(1000, 9999)}", f"{x:.3f}", f"0{i % 2}", label, label if i % 2 else ""]
        )
    return rows


def as_csv(rows: Rows, header: list[str] | None = None, **options: Any) -> bytes:
    """Return rows as a CSV file."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, **options)
    writer.writerows([HEADER if header is None else header, *rows])
    return text.getvalue().encode("utf-8", "surrogatepass")


def _check_cells(result: Any, rows: Rows, header: list[str]) -> None:
    """Raise unless the cells of cleaned.csv, as a program reads them, are those of the table."""
    folder = new_folder() / "out"
    result.save(folder)
    with open(folder / "cleaned.csv", newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    by_name = {row[header.index("name")]: row for row in rows}
    for line in read:
        original = by_name.get(line["name"])
        if original is None:
            raise SilentlyWrong(f"cleaned.csv has a row {line['name']!r} that the table has not")
        for column, cell in zip(header, original, strict=True):
            if column not in ("label", "checked") and column in line and line[column] != cell:
                raise SilentlyWrong(f"the cell {cell!r} of {column!r} became {line[column]!r}")
        labels = {row[header.index("label")] for row in rows} | {row[header.index("checked")] for row in rows}
        if line["label"] not in labels:
            raise SilentlyWrong(f"a label {line['label']!r} that the table has not")


def _accepted(rows: Rows, header: list[str] | None = None, encoding: str = "") -> Callable[[], None]:
    """Return what cleans a table of these cells, which may be refused, and compares the cells."""

    def run() -> None:
        import fsla

        path = new_folder() / "data.csv"
        content = as_csv(rows, header)
        path.write_bytes(content.decode().encode(encoding) if encoding else content)
        _check_cells(fsla.data.clean(path, **OPTIONS), rows, header or HEADER)

    return run


def _refused(content: bytes, name: str = "data.csv", **options: Any) -> Callable[[], None]:
    """Return what cleans a file that must be refused."""

    def run() -> None:
        import fsla

        path = new_folder() / name
        path.write_bytes(content)
        fsla.data.clean(path, **OPTIONS | options)
        raise SilentlyWrong("the file was taken")

    return run


def trials(seed: int) -> Iterator[Trial]:
    """Yield hostile cells, headers, encodings, formats and roles."""
    random = Random(f"tables {seed}")
    for name, run in _cells(random, seed).items():
        yield Trial(CATEGORY, f"cells: {name}", run, limit_s=60.0)
    for name, run in _files(seed).items():
        yield Trial(CATEGORY, f"file: {name}", run, limit_s=60.0)
    for name, options in _ROLES.items():
        yield Trial(CATEGORY, f"roles: {name}", _refused(as_csv(base(seed)), **options), limit_s=60.0)
    for name, (content, arguments) in _commands(seed).items():
        yield Trial(COMMAND, name, _command(content, arguments), limit_s=120.0)


STRANGE = {
    "formula": "=1+1",
    "command": "=cmd|' /C calc'!A0",
    "at": "@SUM(A1)",
    "minus": "-1+1",
    "tab": "\tx",
    "escape": "\x1b[2J\x1b]0;x\x07",
    "bell": "\x07",
    "right to left": "\u202egnp.exe",
    "zero width": "a\u200bb",
    "markup": "<script>alert(1)</script>",
    "entity": "&lt;b&gt;",
    "quote": 'say "hi"',
    "newline": "two\nlines",
    "carriage return": "two\rlines",
    "comma": "a,b",
    "emoji": "👩‍👩‍👧‍👦",
    "combining": "e\u0301",
    "blank": "   ",
    "NA": "NA",
    "None": "None",
    "nan": "nan",
    "null": "null",
    "true": "TRUE",
    "exponent": "1e5",
    "hexadecimal": "0x1F",
    "large": "12345678901234567890",
    "infinite": "inf",
    "1e400": "1e400",
    "minus zero": "-0",
    "plus": "+5",
    "thousands": "1,234.50",
    "decimal comma": "1234,5",
    "date": "03/04/2021",
    "percent": "50%",
    "apostrophe": "'quoted",
    "underscore": "1_000",
    "arabic digits": "١٢٣",
    "long": "x" * 5000,
    "jinja": "{{ 7 * 7 }}",
    "rich": "[bold red]x[/]",
    "path": "../../etc/passwd",
    "null byte name": "%00",
    "line separator": "a\u2028b",
    "BOM": "\ufeffx",
}


def _cells(random: Random, seed: int) -> dict[str, Callable[[], None]]:
    runs: dict[str, Callable[[], None]] = {"as it is": _accepted(base(seed))}
    for name, cell in STRANGE.items():
        for column in random.sample(("name", "zip", "source", "label"), 2):
            rows = base(seed)
            place = HEADER.index(column)
            for row in random.sample(rows, 1 if column == "name" else 12):
                row[place] = cell
                if column == "label" and row[place + 1]:
                    row[place + 1] = cell
            runs[f"{name} in {column}"] = _accepted(rows)
        header = [f"zip {cell}" if column == "zip" else column for column in HEADER]
        runs[f"{name} in the header"] = _accepted(base(seed), header)
    return runs


_ROLES: dict[str, dict[str, Any]] = {
    "label = group": {"group": "label"},
    "label = id": {"id": "label"},
    "label among the features": {"features": ["x", "label"]},
    "checked among the features": {"features": ["x", "checked"]},
    "label ignored": {"ignore": ["label"]},
    "group = checked": {"group": "checked"},
    "unknown label column": {"label": "nope"},
    "unknown checked column": {"checked": "nope"},
    "unknown feature": {"features": ["nope"]},
    "unknown ignored column": {"ignore": ["nope"]},
    "no feature left": {"ignore": ["x", "zip"]},
    "duplicate ids": {"id": "source"},
    "unknown image column": {"image": "nope"},
    "group with one value a row": {"label": "name"},
}


def _files(seed: int) -> dict[str, Callable[[], None]]:
    rows = base(seed)
    good = as_csv(rows)
    array = io.BytesIO()
    np.save(array, np.zeros((2, 2)))
    huge = array.getvalue().replace(b"(2, 2)", b"(9999999, 9999999)").replace(b" " * 14, b"", 1)
    pickled = io.BytesIO()
    np.savez(pickled, X=np.array([{"a": 1}], dtype=object), y=np.zeros(1))
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("X.npy", bytes(300_000_000))
    width = 100_000
    twice = [*HEADER[:-1], "x"]
    return {
        "empty": _refused(b""),
        "header alone": _refused(as_csv([])),
        "one row": _refused(as_csv(rows[:1])),
        "two rows": _refused(as_csv(rows[:2])),
        "noise": _refused(Random(seed).randbytes(5000)),
        "null bytes": _refused(good[:100] + b"\0" + good[100:]),
        "UTF-16 without a mark": _accepted(rows, encoding="utf-16-le"),
        "UTF-16": _accepted(rows, encoding="utf-16"),
        "latin-1": _refused(good.replace(b"name", "naméé".encode("latin-1"))),
        "duplicate header": _refused(as_csv([[*row] for row in rows], twice)),
        "empty header": _refused(as_csv(rows, ["name", "", "x", "source", "label", "checked"])),
        "ragged, more": _refused(as_csv([*rows[:5], [*rows[5], "more"], *rows[6:]])),
        "ragged, less": _refused(as_csv([*rows[:5], rows[5][:-1], *rows[6:]])),
        "quote without an end": _refused(good[:-20] + b'"' + good[-20:-10]),
        "100 000 columns": _refused(as_csv([["0"] * width] * 3, [f"c{i}" for i in range(width)])),
        "cell of 20 MB": _refused(as_csv([*rows, ["9999", "0", "x" * 20_000_000, "0", "1", "1"]])),
        "one label": _refused(as_csv([[*row[:4], "a", "a"] for row in rows])),
        "no labels": _refused(as_csv([[*row[:4], "", ""] for row in rows])),
        "no checked rows": _accepted([[*row[:5], ""] for row in rows]),
        "checked labels that no row has": _accepted([[*row[:5], "zebra"] for row in rows]),
        "a label for each row": _refused(as_csv([[*row[:4], f"l{i}", f"l{i}"] for i, row in enumerate(rows)])),
        "gzip that ends early": _refused(gzip.compress(good)[:-20], "data.csv.gz"),
        "gzip that is none": _refused(good, "data.csv.gz"),
        "gzip bomb": _refused(gzip.compress(bytes(2**30 + 2**29), 1), "data.csv.gz"),
        "array of 71 PiB": _refused(huge, "data.npy"),
        "pickled array": _refused(pickled.getvalue(), "data.npz"),
        "zip bomb": _refused(bomb.getvalue(), "data.npz"),
        "npz that is none": _refused(good, "data.npz"),
        "xlsx that is none": _refused(good, "data.xlsx"),
        "parquet that is none": _refused(b"PAR1" + good + b"PAR1", "data.parquet"),
        "parquet that ends early": _refused(b"PAR1" + struct.pack("<I", 2**31 - 1) + b"PAR1", "data.parquet"),
        "JSON lines, deep": _refused(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "data.jsonl"),
        "JSON lines, lists": _refused(b"[1, 2]\n[3, 4]\n", "data.jsonl"),
        "JSON lines, nested": _refused(b'{"x": {"y": 1}, "label": "a"}\n' * 20, "data.jsonl"),
        "JSON lines, a name twice": _refused(
            b'{"x": 1, "x": 2, "name": "a", "source": "s", "label": "a", "checked": "a"}\n', "data.jsonl"
        ),
        "JSON lines, cut": _refused(json.dumps(dict(zip(HEADER, rows[0], strict=True))).encode()[:-5], "data.jsonl"),
        "unknown suffix": _refused(good, "data.doc"),
        "no suffix": _refused(good, "data"),
        "missing": _special(lambda path: None),
        "pipe": _special(os.mkfifo),
        "link to /dev/zero": _special(lambda path: path.symlink_to("/dev/zero")),
        "link to itself": _special(lambda path: path.symlink_to(path.name)),
        "empty folder": _special(lambda path: (path.unlink(missing_ok=True), path.mkdir())),
        "folder of itself": _special(lambda path: (path.mkdir(), (path / "a").symlink_to("..", True))),
    }


def _special(make: Callable[[Path], Any]) -> Callable[[], None]:
    def run() -> None:
        import fsla

        path = new_folder() / "data.csv"
        make(path)
        fsla.data.clean(path, **OPTIONS)
        raise SilentlyWrong("it was taken")

    return run


def _commands(seed: int) -> dict[str, tuple[bytes, list[str]]]:
    rows = base(seed)
    good = ["--checked-column", "checked", "--id-column", "name", "--group-column", "source"]
    strange = [[*row] for row in rows]
    strange[3][3] = "\x1b[2J\x1b]0;owned\x07"
    return {
        "as it is": (as_csv(rows), good),
        "escape sequences": (as_csv(strange), good),
        "escape sequences in a refusal": (as_csv(rows), [*good, "--ignore-columns", "\x1b[2J"]),
        "noise": (Random(seed).randbytes(4000), good),
        "label as a feature": (as_csv(rows), [*good, "--feature-columns", "x,label"]),
        "unknown option": (as_csv(rows), [*good, "--nope"]),
        "bad number": (as_csv(rows), [*good, "--review", "x"]),
        "negative seed": (as_csv(rows), [*good, "--seed", "-1"]),
        "unknown device": (as_csv(rows), [*good, "--device", "abacus"]),
        "null byte in a path": (as_csv(rows), [*good, "-o", "out\0"]),
        "out is a file": (as_csv(rows), [*good, "-o", "{data}"]),
        "out in a file": (as_csv(rows), [*good, "-o", "{data}/out"]),
        "out is /proc": (as_csv(rows), [*good, "-o", "/proc/fsla"]),
        "out with a long name": (as_csv(rows), [*good, "-o", "x" * 300]),
        "no data": (b"", []),
    }


def _command(content: bytes, arguments: list[str]) -> Callable[[], None]:
    """Return what runs the command in a child: its exit must be 0 or 2, its output free of control characters."""

    def run() -> None:
        folder = new_folder()
        data = folder / "data.csv"
        data.write_bytes(content)
        output = folder / "output"

        def work() -> None:
            from fsla import cli

            os.chdir(folder)
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (the process ends)
            sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            completed = [argument.replace("{data}", str(data)) for argument in arguments]
            sys.argv = ["fsla", "clean", str(data), *completed]
            if "-o" not in arguments:
                sys.argv += ["-o", str(folder / "out")]
            try:
                cli.main()
            except SystemExit as end:
                sys.stdout.flush()
                sys.stderr.flush()
                with open(folder / "code", "w", encoding="utf-8") as file:
                    file.write(str(end.code or 0))

        run_child(work, folder / "nothing")
        text = output.read_text(encoding="utf-8", errors="replace")
        code = int((folder / "code").read_text() if (folder / "code").exists() else 0)
        if set(text) & set("\x1b\x07\x9b"):
            raise SilentlyWrong("control characters reached the terminal")
        if code == 2:
            if "Traceback" in text:
                raise ProgramRaw(text)
            raise Refused(text)
        if code != 0:
            raise ProgramRaw(f"exit code {code}: {text}")

    return run
