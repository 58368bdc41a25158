"""Read tables, arrays and folders of images as text cells, exactly as they are written."""

from __future__ import annotations

import codecs
import csv
import datetime
import gzip
import io
import json
import math
import os
import stat
import tokenize
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from fsla._extras import require
from fsla._storage._files import open_regular, some
from fsla.data._dataset import Array

if TYPE_CHECKING:
    import pandas as pd

MAX_BYTES = 2 * 1024**3
"""Size of a file after decompression."""
MAX_COLUMNS = 10_000
MAX_CELL = 131_072
"""Characters of a cell; the limit of Python's csv module."""
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_BOMS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
FILE = "file"
"""Column with the path of each image of a folder."""
UNNAMED = "Unnamed: 0"
"""Name of a first column without one: pandas and R write their row names so."""


@dataclass(frozen=True, eq=False)
class RawTable:
    """Rows as they were read."""

    frame: pd.DataFrame
    """Cells as text, as written; a cell that is missing is empty."""
    name: str
    """The source, for messages."""
    notes: tuple[str, ...] = ()
    folder: Path | None = None
    """The folder that images in the cells of a file must lie in."""
    pictures: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Images that are part of the source, by column."""
    x: Array | None = None
    """Features of a source of arrays: rows x columns, or images."""
    is_folder: bool = False
    """Whether the rows are the images of a folder."""

    def __len__(self) -> int:
        return len(self.frame)


def read_table(source: Any, label: str | None = None) -> RawTable:
    """Read a file, a folder of images, a DataFrame or a Hugging Face dataset.

    Args:
        source: a path, a pandas DataFrame, or a `datasets.Dataset`.
        label: name of the label column for sources that name none (arrays and folders).

    Returns:
        The rows as text.

    Raises:
        ValueError: if the source cannot be read; the message says what to change.
    """
    if isinstance(source, str | Path):
        return _read_path(Path(source), label or "label")
    if hasattr(source, "iloc") and hasattr(source, "columns"):
        return _from_columns({name: source.iloc[:, i] for i, name in enumerate(_names(source.columns))}, "the table")
    if hasattr(source, "column_names") and hasattr(source, "features"):
        return _from_dataset(source)
    if isinstance(source, Mapping):
        raise ValueError(f"Cannot read a mapping of {_listed(source)}. Choose one part of it, for example the split.")
    raise ValueError(
        f"Cannot read data of type {type(source).__name__}. Pass a path, a pandas DataFrame or a datasets.Dataset."
    )


def _read_path(path: Path, label: str) -> RawTable:
    try:
        if path.is_dir():
            return _read_folder(path, label)
        suffix = _suffix(path)
        reader = _READERS.get(suffix)
        if reader is None:
            hint = "Save it as .xlsx or .csv." if suffix in (".xls", ".ods") else f"Known are: {', '.join(_READERS)}."
            raise ValueError(f"Cannot read {path}: the format {suffix or 'without a suffix'} is unknown. {hint}")
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            return reader(file, path, label)
    except FileNotFoundError as error:
        raise ValueError(f"Cannot read {path}: no such file or folder.") from error
    except OSError as error:
        raise ValueError(f"Cannot read {path}: {(error.strerror or str(error)).lower()}.") from error


def _suffix(path: Path) -> str:
    """Return the format's suffix, that of the compressed file included."""
    last = path.suffix.lower()
    return Path(path.stem).suffix.lower() + last if last == ".gz" else last


# Text files


def _content(file: IO[bytes], path: Path) -> bytes:
    """Return the bytes of a file, decompressed as far as the cap."""
    compressed = path.suffix.lower() == ".gz"
    try:
        content = (gzip.GzipFile(fileobj=file) if compressed else file).read(MAX_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"Cannot read {path}: its gzip compression is damaged ({error}).") from error
    if len(content) > MAX_BYTES:
        what = "decompresses to" if compressed else "has"
        raise ValueError(f"Cannot read {path}: it {what} more than {_size(MAX_BYTES)}. Split it into smaller files.")
    return content


def _decode(content: bytes, path: Path) -> tuple[str, tuple[str, ...]]:
    """Return the text of a file and what to say of its encoding."""
    for mark, encoding in _BOMS.items():
        if content.startswith(mark):
            try:
                text = content.decode(encoding)
            except UnicodeDecodeError as error:
                raise ValueError(f"Cannot read {path}: it begins as {encoding} but is not ({error.reason}).") from error
            return text, () if encoding == "utf-8-sig" else (f"{path.name} is encoded as {encoding.upper()}.",)
    wide = _wide(content)
    for encoding in [wide] if wide else ["utf-8", "cp1252", "latin-1"]:
        try:
            text = content.decode(encoding)
        except UnicodeDecodeError:
            continue
        if encoding == "utf-8":
            return text, ()
        name = {"cp1252": "Windows-1252 (Western European)", "latin-1": "Latin-1"}.get(encoding, encoding.upper())
        note = f"{path.name} is not UTF-8 and is read as {name}. If letters look wrong, save it as UTF-8."
        return text, (note,)
    raise ValueError(f"Cannot read {path}: it is neither UTF-8 nor {wide}. Save it as UTF-8.")


def _wide(content: bytes) -> str | None:
    """Return UTF-16 without a mark, which shows by a NUL in every second byte of Latin text."""
    sample = np.frombuffer(content[:4096], dtype=np.uint8)
    if len(sample) < 4 or len(content) % 2:
        return None
    even, odd = (float(np.mean(sample[start::2] == 0)) for start in (0, 1))
    return "utf-16-le" if odd > 0.6 > even else "utf-16-be" if even > 0.6 > odd else None


def _read_csv(file: IO[bytes], path: Path, label: str) -> RawTable:
    text, notes = _decode(_content(file, path), path)
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ValueError(f"Cannot read {path}: line {line} holds a NUL byte. It is no text file, or it is damaged.")
    delimiter, text = _delimiter(text, "\t" if ".tsv" in path.suffixes else ",")
    if delimiter != ("\t" if ".tsv" in path.suffixes else ","):
        notes += (f"The columns of {path.name} are separated by {DELIMITERS[delimiter]}.",)
    rows: list[list[str]] = []
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except csv.Error as error:
        if "field limit" in str(error):
            raise _long_cell(path) from error
        rows, how = _read_other_quotes(text, delimiter, path, error)
        notes += (f"Quotes in {path.name} {how}.",)
    return _from_rows(rows, path, notes, lambda row: _line(text, delimiter, row))


def _read_other_quotes(text: str, delimiter: str, path: Path, error: csv.Error) -> tuple[list[list[str]], str]:
    """Return rows of a file that quotes in another form, and that form, if each row then fits the header."""
    forms: dict[str, dict[str, Any]] = {
        "are escaped by backslashes": {"doublequote": False, "escapechar": "\\", "strict": True},
        "do not enclose cells; they are part of the text": {"quoting": csv.QUOTE_NONE},
    }
    for how, form in forms.items():
        if "escapechar" in form and '\\"' not in text:
            continue
        try:
            rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, **form))
        except csv.Error:
            continue
        if len({len(row) for row in rows if row}) == 1:
            return rows, how
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    with suppress(csv.Error):
        for _ in reader:
            pass
    raise ValueError(
        f"Cannot read {path}: a quote in line {reader.line_num} is not closed or not doubled ({error}). "
        "Write a quote inside a quoted cell twice."
    ) from error


def _delimiter(text: str, default: str) -> tuple[str, str]:
    """Return what separates columns, by the header and the first rows, and the text without Excel's `sep=` line."""
    head = text[:6].lower()
    if head.startswith("sep=") and len(text) > 4 and text[4] in DELIMITERS:
        return text[4], text[5:].lstrip("\r").removeprefix("\n")
    sample = text[:262_144]
    widths = {}
    for delimiter in sorted(DELIMITERS, key=lambda d: d != default):
        reader = csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter)
        try:
            counts = [len(row) for row in islice(reader, 51) if row]
        except csv.Error:
            continue
        if len(sample) < len(text) and len(counts) < 50:
            counts = counts[:-1] or counts  # the last row is cut
        if counts and counts[0] > 1 and len(set(counts)) == 1:
            widths[delimiter] = counts[0]
    return max(widths, key=lambda d: widths[d], default=default), text


def _line(text: str, delimiter: str, row: int) -> str:
    """Return where a row begins, as a person finds it."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    for _ in islice(reader, row):
        pass
    return f"Line {reader.line_num + 1}"


def _read_jsonl(file: IO[bytes], path: Path, label: str) -> RawTable:
    text, notes = _decode(_content(file, path), path)
    records: list[dict[str, Any]] = []
    blank = 0
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            blank += 1
            continue
        try:
            # Numbers stay as written: 1.50 is not 1.5.
            record = json.loads(line, parse_float=str, parse_int=str, parse_constant=str, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"Cannot read {path}: line {number} is no JSON object ({error}).") from error
        if not isinstance(record, dict):
            raise ValueError(f"Cannot read {path}: line {number} is no JSON object. Write one object a line.")
        records.append(record)
    blank -= text.endswith("\n")  # what follows the last line's end is no line
    if blank:
        notes += (_blank_note(blank, path),)
    names = list(dict.fromkeys(name for record in records for name in record))
    _check_width(len(names), path)
    lacking = [name for name in names if any(name not in record for record in records)]
    if lacking:
        notes += (f"Some rows of {path.name} lack {_listed(lacking)}; these cells are missing.",)
    cells = [[_json_text(record.get(name)) for name in names] for record in records]
    return _from_rows([names, *cells], path, notes, lambda row: f"Object {row}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        raise ValueError(f"it holds {_listed(n for n, c in Counter(n for n, _ in pairs).items() if c > 1)} twice")
    return names


def _json_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


# Spreadsheets and Parquet


def _read_xlsx(file: IO[bytes], path: Path, label: str) -> RawTable:
    _require("excel", path)
    import openpyxl

    _check_archive(file, path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of styles and validations, which no cell depends on
            book = openpyxl.load_workbook(file, read_only=True, data_only=True)
            sheet = book.worksheets[0]
            sheet.reset_dimensions()  # the file's own may be wrong
            rows = [[_excel_text(cell) for cell in row] for row in sheet.iter_rows(max_col=MAX_COLUMNS + 1)]
        others = book.sheetnames[1:]
    except Exception as error:  # damaged parts make openpyxl raise errors of every kind
        raise ValueError(f"Cannot read {path}: openpyxl cannot read it as a workbook ({_reason(error)}).") from error
    notes = (f"The first sheet of {path.name} is read; {_listed(others)} are not.",) if others else ()
    while rows and not any(rows[-1]):
        rows.pop()
    width = max((i + 1 for i, cell in enumerate(rows[0]) if cell), default=0) if rows else 0
    rows = [[*row[:width], *[""] * (width - len(row)), *_rest(row[width:])] for row in rows]
    return _from_rows([row if any(row) else [] for row in rows], path, notes, lambda row: f"Row {row + 1}")


def _rest(cells: list[str]) -> list[str]:
    """Return cells without the empty ones at the end."""
    return cells[: max((i + 1 for i, cell in enumerate(cells) if cell), default=0)]


def _excel_text(cell: Any) -> str:
    """Return a cell as a spreadsheet shows it, as far as whole numbers go."""
    value = cell.value
    pattern = getattr(cell, "number_format", "")
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and pattern.strip("0") == ""
        and value == value // 1
    ):
        return str(int(value)).zfill(len(pattern))
    return _text_of(value)


def _read_parquet(file: IO[bytes], path: Path, label: str) -> RawTable:
    _require("parquet", path)
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
        meta = table.metadata
        _check_width(len(table.schema_arrow.names), path)
        _check_unpacked(sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups)), path)
        content = table.read()
        columns = [content.column(i).to_pylist() for i in range(content.num_columns)]
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"Cannot read {path}: {_reason(error)}.") from error
    return _from_columns(dict(zip(_names(content.column_names, path), columns, strict=True)), str(path), path.parent)


# Arrays


def _read_npz(file: IO[bytes], path: Path, label: str) -> RawTable:
    arrays = {}
    _check_archive(file, path)
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                with archive.open(info) as member:
                    arrays[info.filename.removesuffix(".npy")] = _array(member, info.file_size, path)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"Cannot read {path}: it is no .npz file ({_reason(error)}).") from error
    lacking = [name for name in ("X", "y") if name not in arrays]
    if lacking:
        raise ValueError(f"{path} lacks the arrays {_listed(lacking)}. It holds {_listed(arrays)}.")
    x = arrays.pop("X")
    columns = {label: arrays.pop("y"), **arrays}
    for name, values in columns.items():
        if values.ndim != 1 or len(values) != len(x):
            raise ValueError(f"{name} in {path} has shape {values.shape}, but X has {len(x)} rows.")
    return _of_arrays(x, columns, path)


def _read_npy(file: IO[bytes], path: Path, label: str) -> RawTable:
    array = _array(file, os.fstat(file.fileno()).st_size, path)
    if array.dtype.names is not None:
        return _from_columns({name: array[name] for name in array.dtype.names}, str(path), path.parent)
    if array.ndim != 2 or array.shape[1] < 2:
        raise ValueError(f"{path} has shape {array.shape}. Store one row a sample, with the label in the last column.")
    return _of_arrays(array[:, :-1], {label: array[:, -1]}, path)


def _of_arrays(x: Array, columns: Mapping[str, Array], path: Path) -> RawTable:
    if x.ndim not in (2, 4) or x.dtype.kind not in "biuf":
        raise ValueError(
            f"The features in {path} have shape {x.shape} and type {x.dtype}. Store numbers as rows x columns, or "
            "images as rows x channels x height x width."
        )
    _check_width(x.shape[1] if x.ndim == 2 else 1, path)
    table = _from_columns(columns, str(path), path.parent)
    return RawTable(table.frame, table.name, table.notes, path.parent, x=x)


def _array(file: IO[bytes], size: int, path: Path) -> Array:
    """Read one array without pickle, and allocate no more than the file has."""
    try:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read_header(file)
        length = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or length > min(size, MAX_BYTES):
            reason = "it holds Python objects" if dtype.hasobject else f"its header promises {_size(length)}"
            raise ValueError(reason)
        flat = np.frombuffer(file.read(length), dtype=dtype)
        return flat.reshape(shape, order="F" if fortran else "C")
    except (ValueError, TypeError, SyntaxError, EOFError, tokenize.TokenError) as error:  # of the header's parser
        raise ValueError(f"Cannot read {path}: it is no plain array ({_reason(error)}).") from error


# Folders


def _read_folder(path: Path, label: str) -> RawTable:
    classes = sorted(e.name for e in os.scandir(path) if e.is_dir() and not e.name.startswith("."))
    files: list[str] = []
    others: list[str] = []
    for name in classes:
        for entry in sorted(os.scandir(path / name), key=lambda e: e.name):
            if entry.name.startswith("."):
                continue
            is_image = Path(entry.name).suffix.lower() in IMAGE_SUFFIXES and stat.S_ISREG(entry.stat().st_mode)
            (files if is_image else others).append(f"{name}/{entry.name}")
    if not files:
        raise ValueError(
            f"{path} holds no images in {len(classes)} folders. Put the images of each class into a folder with the "
            "name of the class."
        )
    if label == FILE:
        raise ValueError(f"The label column of a folder of images cannot be named {FILE!r}. Choose another name.")
    notes = (f"{len(others)} entries in {path} are no images and are skipped: {some(others)}.",) if others else ()
    frame = _frame({FILE: files, label: [name.partition("/")[0] for name in files]})
    return RawTable(frame, str(path), notes, path, is_folder=True)


# Tables that are in memory


def _from_dataset(dataset: Any) -> RawTable:
    """Return the rows of a Hugging Face dataset, with the names of its classes."""
    columns: dict[str, Any] = {}
    for name in dataset.column_names:
        values = list(dataset[name])
        names = getattr(dataset.features[name], "names", None)
        if names is not None:  # a ClassLabel; -1 is a missing label there
            values = [None if v is None or v < 0 else names[v] for v in values]
        columns[name] = values
    return _from_columns(columns, "the dataset")


def _from_columns(columns: Mapping[str, Any], name: str, folder: Path | None = None) -> RawTable:
    """Return a table of values of any type."""
    _check_width(len(columns), name)
    cells, pictures = {}, {}
    for column, values in columns.items():
        dtype = getattr(values, "dtype", None)
        if dtype is not None and getattr(dtype, "kind", "O") in "iub":
            cells[column] = list(map(str, values.tolist()))
            continue
        if dtype is not None and getattr(dtype, "kind", "O") == "f":
            cells[column] = _float_texts(np.asarray(values))
            continue
        values = list(values)
        images = [_picture(value) for value in values]
        if any(image is not None for image in images):
            pictures[column] = images
            cells[column] = [_picture_name(value, i) for i, value in enumerate(values)]
        elif values and all(isinstance(v, float) or v is None for v in values):
            cells[column] = _float_texts(np.array(values, dtype=float))
        else:
            cells[column] = list(map(_text_of, values))
    frame = _frame(cells)
    _check_cells(frame, name)
    return RawTable(frame, name, (), folder, pictures)


def _float_texts(values: Array) -> list[str]:
    """Return floats as text. Whole numbers have no point: a missing cell has turned them into floats."""
    values = values.astype(values.dtype if values.dtype.itemsize > 4 else np.float32)
    finite = values[np.isfinite(values)]
    whole = bool((finite == np.floor(finite)).all() and (np.abs(finite) < 2**53).all())
    if whole:
        return ["" if v != v else str(int(v)) if math.isfinite(v) else repr(v) for v in values.tolist()]
    # A float32 has fewer digits than the float that tolist makes of it.
    texts = map(str, values) if values.dtype.itemsize <= 4 else map(repr, values.tolist())
    return ["" if text == "nan" else text for text in texts]


def _text_of(value: Any) -> str:
    if value is None or value is getattr(value, "NaT", 0):
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, float | np.floating):
        whole = bool(value == value // 1 and abs(float(value)) < 2**53)
        return "" if value != value else str(int(value)) if whole else str(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, datetime.datetime):
        text = "" if value != value else value.isoformat(sep=" ")
        return text.removesuffix(" 00:00:00")
    if isinstance(value, list | tuple | dict | np.ndarray):
        try:
            return json.dumps(value.tolist() if isinstance(value, np.ndarray) else value, ensure_ascii=False)
        except (TypeError, ValueError):
            return str(value)
    text = str(value)
    return "" if text in ("<NA>", "NaT") else text


def _picture(value: Any) -> Any:
    """Return what can be opened as an image, or None."""
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):
        return value["bytes"]
    if isinstance(value, bytes) and value.startswith((b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF")):
        return value
    is_array = isinstance(value, np.ndarray) and value.ndim in (2, 3) and value.dtype.kind in "uif"
    return value if is_array or (hasattr(value, "convert") and hasattr(value, "size")) else None


def _picture_name(value: Any, row: int) -> str:
    name = value.get("path") if isinstance(value, Mapping) else getattr(value, "filename", None)
    return Path(name).name if name else f"image {row}"


# What all share


def _from_rows(rows: list[list[str]], path: Path, notes: tuple[str, ...], place: Callable[[int], str]) -> RawTable:
    """Check header and row lengths, and return the table. `place` names a row for a person."""
    blank = sum(not row for row in rows)
    if not rows or blank == len(rows):
        raise ValueError(f"Cannot read {path}: it is empty. The first line must name the columns.")
    first = next(i for i, row in enumerate(rows) if row)
    names = _names(rows[first], path)
    _check_width(len(names), path)
    if names[0] == UNNAMED and rows[first][0].strip() == "":
        notes += (f"The first column of {path.name} has no name and is called {UNNAMED!r}.",)
    for i, row in enumerate(rows):
        if row and len(row) != len(names):
            number = sum(len(r) not in (0, len(names)) for r in rows)
            raise ValueError(
                f"Cannot read {path}: {place(i)} has {len(row)} cells, but the header has {len(names)}"
                f"{f' ({number} such rows)' if number > 1 else ''}. Quote cells that hold the delimiter."
            )
    body = [row for row in rows[first + 1 :] if row]
    if not body:
        raise ValueError(f"{path} has no rows below its header.")
    if blank:
        notes += (_blank_note(blank, path),)
    frame = _frame(dict(zip(names, map(list, zip(*body, strict=True)), strict=True)))
    _check_cells(frame, str(path))
    return RawTable(frame, str(path), notes, path.parent)


def _blank_note(number: int, path: Path) -> str:
    return (
        f"{number} blank {'line' if number == 1 else 'lines'} in {path.name} {'is' if number == 1 else 'are'} skipped."
    )


def _names(header: Iterable[Any], path: Path | str = "the table") -> list[str]:
    """Return the names of columns without blanks around them; each must be there once."""
    names = [str(name).strip() for name in header]
    if names and not names[0] and UNNAMED not in names:
        names[0] = UNNAMED
    empty = [str(i + 1) for i, name in enumerate(names) if not name]
    if empty:
        raise ValueError(f"Cannot read {path}: column {some(empty)} of the header has no name. Name every column.")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"Cannot read {path}: the header has {some(twice)} more than once. Rename the columns.")
    return names


def _frame(cells: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame({name: _objects(values) for name, values in cells.items()}, copy=False)


def _objects(values: Sequence[str]) -> Any:
    import pandas as pd

    return pd.Series(values, dtype=object)


def _check_width(number: int, path: Path | str) -> None:
    if number > MAX_COLUMNS:
        raise ValueError(
            f"{path} has {number} columns, more than {MAX_COLUMNS}. Keep the columns that matter, or reduce them first."
        )


def _check_cells(frame: pd.DataFrame, name: str) -> None:
    if not len(frame):
        raise ValueError(f"{name} has no rows.")
    for column in frame.columns:
        cells = frame[column].tolist()
        if max(map(len, cells)) > MAX_CELL:
            raise _long_cell(name)
        try:
            text = "".join(cells)
            if "\0" in text:
                raise ValueError(f"Cannot read {name}: the column {column!r} holds a NUL character. Remove it.")
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"Cannot read {name}: the column {column!r} holds half a character ({error}).") from error


def _long_cell(path: Path | str) -> ValueError:
    return ValueError(
        f"Cannot read {path}: a cell has more than {MAX_CELL} characters. Shorten it, or close a quote that is open."
    )


def _check_unpacked(size: int, path: Path) -> None:
    if size > MAX_BYTES:
        raise ValueError(f"Cannot read {path}: it decompresses to {_size(size)}, more than {_size(MAX_BYTES)}.")


def _check_archive(file: IO[bytes], path: Path) -> None:
    """Raise unless a file is a zip archive that does not unpack to too much."""
    try:
        with zipfile.ZipFile(file) as archive:
            size = sum(info.file_size for info in archive.infolist())
    except (zipfile.BadZipFile, EOFError, ValueError, OSError, NotImplementedError) as error:
        raise ValueError(f"Cannot read {path}: it is no zip archive, as {path.suffix} files are ({error}).") from error
    _check_unpacked(size, path)
    file.seek(0)


def _require(extra: str, path: Path) -> None:
    try:
        require(extra)
    except ModuleNotFoundError as error:
        raise ValueError(f"Cannot read {path} without {error.name}. Install it: pip install 'fsla[{extra}]'") from error


def _reason(error: Exception) -> str:
    """Return the first line of what another library says, without the point at its end."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _size(number: int) -> str:
    power = min(max(int(math.log(max(number, 1), 1024)), 0), 4)
    return f"{number / 1024**power:.3g} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"


def _listed(names: Iterable[Any]) -> str:
    return some([str(name) for name in names])


_READERS: dict[str, Callable[[IO[bytes], Path, str], RawTable]] = {
    **{suffix + end: _read_csv for suffix in (".csv", ".tsv", ".txt") for end in ("", ".gz")},
    **{suffix + end: _read_jsonl for suffix in (".jsonl", ".ndjson") for end in ("", ".gz")},
    ".xlsx": _read_xlsx,
    ".parquet": _read_parquet,
    ".npz": _read_npz,
    ".npy": _read_npy,
}
