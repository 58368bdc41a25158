"""What each column of a table is: its role, its kind, and its values as numbers, dates, categories or text."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import numpy as np

from fsla._storage._files import some
from fsla.data._dataset import Array

Kind = Literal["number", "boolean", "date", "category", "text", "image", "id", "constant", "empty"]
FEATURE_KINDS = ("number", "boolean", "date", "category", "text", "image")
MISSING = frozenset({"", "na", "n/a", "#n/a", "nan", "<na>", "nat", "null", "none", "nil", "?", "-", "--", "."})
"""Cells of features that mean "missing", in lower case without blanks around them."""
MISSING_LABELS = frozenset({"", "NA", "N/A", "#N/A", "NaN", "nan", "<NA>", "NaT", "NULL", "null"})
"""Labels that mean "missing": what programs write. "none" and "?" may be classes."""
TOKENS = {
    **dict.fromkeys(("true", "yes", "y", "t", "on"), True),
    **dict.fromkeys(("false", "no", "n", "f", "off"), False),
}
_PAIRS = [{"true", "false"}, {"yes", "no"}, {"y", "n"}, {"t", "f"}, {"on", "off"}]
SPLITS = frozenset({"train", "training", "test", "testing", "dev", "val", "valid", "validation", "eval", "unlabeled"})
STRAY = 0.1
"""Share of cells of a column of numbers or dates that may be neither."""
FEW_VALUES = 10
"""A number with at most so many whole values is a category as well."""
MAX_LEVELS = 50
"""Levels of a category that are features of their own; the rest are one more."""
_MANY = 0.95
"""Share of distinct values from which a column of texts is an id."""
_ID_NAME = re.compile(r"(?:^|[_\s.-])(?:id|ids|idx|index|key|uid|uuid|guid|rowid|row)$|^[a-z]+I[dD]$", re.IGNORECASE)
_CURRENCY = r"(?:[$€£¥₹]|USD|EUR|GBP|CHF|JPY)"
_SIGN = r"[+\-\u2212]?"
_GAPS = "[ \u00a0\u2009\u202f'\u2019]"
_WHOLE = rf"\d{{1,3}}(?:{_GAPS}\d{{3}})+|\d+"
_POINT = re.compile(rf"(?:(?:\d{{1,3}}(?:,\d{{3}})+|{_WHOLE})(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_COMMA = re.compile(rf"(?:\d{{1,3}}(?:\.\d{{3}})+|{_WHOLE})(?:,\d+)?(?:[eE][+-]?\d+)?")
_DRESSED = re.compile(rf"({_SIGN})\s*{_CURRENCY}?\s*({_SIGN})\s*([\d.,'’\s\u00a0eE+-]*?)\s*(?:{_CURRENCY}|%)?")
_CODE = re.compile(r"[+-]?0\d+")
_DATE = re.compile(
    r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}(?!\d)|\d{4}-\d{2}$|\d{1,2}[ -][A-Za-z]{3,9}[ -]\d{4}|[A-Za-z]{3,9} \d{1,2}, \d{4}"
)
_TIMES = ("", " %H:%M", " %H:%M:%S")
_DAYS = (
    "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d", "%Y.%m.%d", "%Y-%m", "%d.%m.%y",
    "%m/%d/%y", "%d/%m/%y", "%d %b %Y", "%d %B %Y", "%d-%b-%Y", "%b %d, %Y", "%B %d, %Y",
)  # fmt: skip
ISO = "ISO8601"
DATE_FORMATS = (ISO, *(day + time for day in _DAYS for time in _TIMES))


@dataclass(frozen=True)
class Column:
    """A column and how its cells become values."""

    name: str
    kind: Kind
    note: str = ""
    decimal: Literal[".", ","] = "."
    """Decimal mark of numbers."""
    date_format: str = ""
    levels: int = 0
    """Distinct values that are not missing."""
    as_category: bool = False
    """Whether a number with few values is a category as well."""


def describe_column(name: str, cells: Any, forced: Kind | None = None) -> Column:
    """Return what a column holds.

    Args:
        name: name of the column; ids are recognised by it too.
        cells: texts, or numbers.
        forced: a kind that the user chose.
    """
    dtype = getattr(cells, "dtype", None)
    if forced is None and dtype is not None and getattr(dtype, "kind", "O") in "iufb":
        values = np.asarray(cells)
        finite = values[np.isfinite(values)]
        return _described_number(Column(name, "number"), finite, len(values))
    codes, texts = factorize(cells)
    counts = np.bincount(codes[codes >= 0], minlength=len(texts))
    if forced is not None:
        return Column(name, forced, levels=len(texts))
    present = int(counts.sum())
    if present == 0:
        return Column(name, "empty", "every cell is missing")
    if len(texts) == 1 and present == len(codes):
        return Column(name, "constant", f"every cell is {_short(texts[0])}", levels=1)
    if set(map(str.lower, texts)) in _PAIRS:
        return Column(name, "boolean", _missing_note(len(codes) - present), levels=2)
    return (
        _as_number(name, texts, counts, len(codes))
        or _as_date(name, texts, counts, len(codes))
        or _as_words(name, texts, counts, len(codes))
    )


def as_number_or_category(column: Column, cells: Any) -> Column:
    """Return a column that would be left out, such as an id, as a feature."""
    _, texts = factorize(cells)
    is_number = len(texts) > 0 and not np.isnan(parse_numbers(texts)).any()
    return Column(column.name, "number" if is_number else "category", levels=len(texts))


def factorize(cells: Any) -> tuple[Array, Array]:
    """Return a code a cell, -1 where it is missing, and the distinct texts without blanks around them."""
    import pandas as pd

    codes, texts = pd.factorize(np.asarray(cells, dtype=object))  # None and NaN have the code -1
    stripped = [cell_text(text) for text in texts]
    known: dict[str, int] = {}
    merged = np.array(
        [-1 if t.lower() in MISSING else known.setdefault(t, len(known)) for t in stripped] + [-1], dtype=np.int64
    )
    return merged[codes], np.array(list(known), dtype=object)


def cell_text(value: Any) -> str:
    """Return a cell as text without blanks around it; 3.0 is 3, as in a column of whole numbers."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, float | np.floating) and value == value and value == value // 1:
        return str(int(value))
    return "" if value is None or value != value else str(value).strip()


# Numbers


def parse_number(text: str, decimal: str = ".") -> float:
    """Return a number that has separators, a currency or a percent sign; NaN if it is none."""
    negative = text.startswith("(") and text.endswith(")")  # accounting
    match = _DRESSED.fullmatch(text[1:-1] if negative else text)
    if match is None:
        return float("nan")
    sign, second, digits = match.groups()
    if not any(map(str.isdigit, digits)) or (sign and second):
        return float("nan")
    if not (_POINT if decimal == "." else _COMMA).fullmatch(digits):
        return float("nan")
    digits = re.sub(_GAPS, "", digits)
    digits = digits.replace(",", "") if decimal == "." else digits.replace(".", "").replace(",", ".")
    value = float(digits)
    return -value if negative or (sign or second) in ("-", "\u2212") else value


def parse_numbers(texts: Array, decimal: str = ".") -> Array:
    """Return numbers, NaN where a text is none or not finite."""
    import pandas as pd

    values = np.full(len(texts), np.nan)
    if decimal == ".":
        values = np.array(pd.to_numeric(np.asarray(texts, dtype=object), errors="coerce"), dtype=np.float64)
        plain = [not isinstance(t, str) or "x" not in t.lower() for t in texts]  # 0x10 is no number
        values[~np.array(plain, dtype=bool)] = np.nan
    for i in np.flatnonzero(~np.isfinite(values)):
        values[i] = parse_number(str(texts[i]).strip(), decimal)
    values[~np.isfinite(values)] = np.nan
    return values


def _as_number(name: str, texts: Array, counts: Array, rows: int) -> Column | None:
    if any(map(_CODE.fullmatch, texts)):
        return None  # codes such as 007
    point = parse_numbers(texts)
    decimal: Literal[".", ","] = "."
    values = point
    if np.isnan(point).any():
        comma = parse_numbers(texts, ",")
        if counts[~np.isnan(comma)].sum() > counts[~np.isnan(point)].sum():
            values, decimal = comma, ","
    stray = np.isnan(values)
    present = counts.sum()
    if counts[stray].sum() > STRAY * present:
        return None
    notes = []
    if decimal == ",":
        notes.append("decimal comma")
    elif any("," in t for t in texts):
        example = next(t for t in texts if "," in t)
        notes.append(f"{_short(example)} is {parse_number(example):g}")
    if any("%" in t for t in texts):
        notes.append("percent")
    if stray.any():
        some_text = texts[stray][0]
        notes.append(f"{int(counts[stray].sum())} cells are no numbers, such as {_short(some_text)}: taken as missing")
    missing = rows - int(present)
    column = Column(name, "number", "; ".join(notes), decimal)
    return _described_number(column, np.repeat(values[~stray], counts[~stray]), rows, missing)


def _described_number(column: Column, values: Array, rows: int, missing: int | None = None) -> Column:
    """Return the column with what its values say: an id, a code, a constant, or a number."""
    distinct = np.unique(values)
    missing = rows - len(values) if missing is None else missing
    named = is_id_name(column.name)
    levels = len(distinct)
    if not len(values):
        return Column(column.name, "empty", "every cell is missing")
    if levels == 1 and len(values) == rows:
        return Column(column.name, "constant", f"every cell is {distinct[0]:g}", levels=1)
    whole = bool((distinct == np.floor(distinct)).all())
    if whole and levels == len(values) and (named or (rows >= 20 and distinct[-1] - distinct[0] == levels - 1)):
        return Column(column.name, "id", "every row has its own number", levels=levels)
    if whole and named and levels > FEW_VALUES:
        note = _joined("a code, by its name", _level_note(levels), _missing_note(missing))
        return Column(column.name, "category", note, levels=levels)
    few = whole and 2 < levels <= FEW_VALUES
    note = _joined(column.note, f"{levels} values, also as a category" if few else "", _missing_note(missing))
    return Column(column.name, "number", note, column.decimal, levels=levels, as_category=few)


# Dates


def parse_dates(texts: Array, date_format: str) -> Any:
    """Return dates without a time zone, NaT where a text is none."""
    import pandas as pd

    values = pd.to_datetime(pd.Series(texts, dtype=object), format=date_format, errors="coerce", utc=True)
    return values.dt.tz_localize(None)


def _as_date(name: str, texts: Array, counts: Array, rows: int) -> Column | None:
    dated = np.array([_DATE.match(t) is not None for t in texts])
    present = counts.sum()
    if counts[~dated].sum() > STRAY * present:
        return None
    sample = np.random.default_rng(0).permutation(np.flatnonzero(dated))[:200]
    fits = [f for f in DATE_FORMATS if parse_dates(texts[sample], f).notna().mean() > 1 - STRAY]
    # The sample narrows the formats, all cells decide.
    fitting = {f: float(counts[parse_dates(texts, f).notna().to_numpy()].sum() / present) for f in fits}
    if not fitting or max(fitting.values()) < 1 - STRAY:
        return None
    best = max(fitting, key=lambda f: fitting[f])
    notes = [f"written as {_pattern(best)}"]
    rivals = [f for f in fitting if f != best and fitting[f] == fitting[best] and {f[:2], best[:2]} == {"%d", "%m"}]
    if rivals:
        notes.append(f"{_pattern(rivals[0])} would fit too")
    stray = round((1 - fitting[best]) * present)
    if stray:
        notes.append(f"{stray} cells are no dates: taken as missing")
    notes.append(_missing_note(rows - int(present)))
    return Column(name, "date", _joined(*notes), date_format=best, levels=len(texts))


def _pattern(date_format: str) -> str:
    words = {"%d": "day", "%m": "month", "%b": "month", "%B": "month", "%Y": "year", "%y": "year", "%H": "hour"}
    text = date_format.replace(ISO, "year-month-day")
    for code, word in {**words, "%M": "minute", "%S": "second"}.items():
        text = text.replace(code, word)
    return text


# Words


def _as_words(name: str, texts: Array, counts: Array, rows: int) -> Column:
    present = int(counts.sum())
    step = max(1, len(texts) // 2000)
    words = float(np.mean([len(t.split()) for t in texts[::step]]))
    length = float(np.mean([len(t) for t in texts[::step]]))
    missing = _missing_note(rows - present)
    distinct = len(texts) / present
    unspaced = words < 2 and length >= 8 and np.mean([is_unspaced(t) for t in texts[::step]]) > 0.5
    sentences = (len(texts) > 2 and (distinct >= 0.2 and words >= 3)) or (len(texts) > MAX_LEVELS and words >= 6)
    if sentences or (distinct >= 0.2 and len(texts) > 2 and unspaced):
        return Column(
            name, "text", _joined(f"{words:.0f} words on average" if not unspaced else "", missing), levels=len(texts)
        )
    # Names and codes of which each row has its own say nothing of other rows.
    if present >= 20 and distinct >= _MANY:
        return Column(name, "id", "nearly every row has its own value", levels=len(texts))
    if is_id_name(name) and distinct == 1 and present == rows:
        return Column(name, "id", "every row has its own value", levels=len(texts))
    return Column(name, "category", _joined(_level_note(len(texts)), missing), levels=len(texts))


def is_id_name(name: str) -> bool:
    """Return whether a column is named as ids are."""
    return _ID_NAME.search(name.strip()) is not None or name.strip().lower() == "unnamed: 0"


def is_missing_label(cell: str) -> bool:
    """Return whether a cell of labels is empty, or what programs write for a missing value."""
    return cell.strip() in MISSING_LABELS


def is_unspaced(text: str) -> bool:
    """Return whether a text is in a script without blanks between words, such as Chinese, Japanese or Thai."""
    letters = [c for c in text[:200] if c.isalpha()]
    inside = sum("\u0e00" <= c <= "\u0eff" or "\u1780" <= c <= "\u17ff" or "\u3040" <= c <= "\u9fff" for c in letters)
    return inside > len(letters) / 2


def _level_note(levels: int) -> str:
    more = f", the {MAX_LEVELS} most frequent as such" if levels > MAX_LEVELS else ""
    return f"{levels} level{'s' if levels != 1 else ''}{more}"


def _missing_note(count: int) -> str:
    return f"{count} missing" if count else ""


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _short(text: Any) -> str:
    shown = str(text)
    return repr(shown if len(shown) <= 40 else shown[:37] + "...")


# Roles


def expand_patterns(patterns: Sequence[str] | None, names: Sequence[str]) -> list[str]:
    """Return the columns that names or patterns such as `rule_*` mean; a name that is not there stays."""
    known = set(names)
    columns: dict[str, None] = {}
    for pattern in patterns or ():
        matches = [] if pattern in known else [name for name in names if fnmatchcase(name, pattern)]
        columns |= dict.fromkeys(matches or [pattern])
    return list(columns)


def check_roles(roles: Mapping[str, Sequence[str]], names: Collection[str], source: str) -> dict[str, str]:
    """Return the role of each column that the user named.

    Raises:
        ValueError: if a column is not there, or has two roles.
    """
    assigned: dict[str, str] = {}
    known = set(names)
    for role, columns in roles.items():
        for column in columns:
            if column not in known:
                raise ValueError(_unknown(column, role, names, source))
            if column in assigned:
                raise ValueError(
                    f"The column {column!r} is both {_article(assigned[column])} and {_article(role)}. "
                    "Name a different column for one of them."
                )
            assigned[column] = role
    return assigned


def _article(role: str) -> str:
    return f"{'an' if role[0] in 'aeio' else 'the'} {role} column"


def _unknown(column: str, role: str, names: Collection[str], source: str) -> str:
    near = get_close_matches(column, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if all(re.fullmatch(r"[\d.,eE+-]+", name) for name in names):
        hint = " Its first line seems to be a row: add a header that names the columns."
    return f"{source} has no column {column!r} (the {role} column). It has {some(list(names))}.{hint}"


def is_split(texts: Array) -> bool:
    """Return whether a column says which part of a benchmark a row belongs to."""
    return len(texts) > 1 and all(text.lower() in SPLITS for text in texts)


class Target(NamedTuple):
    """Labels in the form in which features are compared with them."""

    rows: Array
    """Rows that have a label."""
    codes: Array
    names: Array
    """Distinct labels in lower case without blanks around them."""
    numbers: Array | None
    """The same as numbers, if all are."""


def make_target(labels: Array) -> Target | None:
    """Return labels for `is_copy`, or None if there are too few.

    Args:
        labels: texts, None where the label is missing.
    """
    import pandas as pd

    rows = np.flatnonzero([label is not None for label in labels])
    if len(rows) < 10:
        return None
    codes, names = pd.factorize(np.array([label.strip().casefold() for label in labels[rows]], dtype=object))
    numbers = parse_numbers(names)
    return Target(rows, codes, names, None if np.isnan(numbers).any() else numbers) if len(names) > 1 else None


def is_copy(column: Column, cells: Any, target: Target | None) -> str:
    """Return why a column repeats the label, or an empty text."""
    if target is None or column.kind in ("text", "image") or column.levels < len(target.names):
        return ""
    in_units = column.kind == "number" and target.numbers is not None and len(target.names) > FEW_VALUES
    if column.kind == "number" and not in_units and column.levels > len(target.names):
        return ""
    codes, texts = factorize(np.asarray(cells, dtype=object)[target.rows])
    both = codes >= 0
    if both.mean() < 0.8:
        return ""
    pairs = np.unique(np.c_[codes[both], target.codes[both]], axis=0)
    levels = len(np.unique(pairs[:, 0]))
    repeated = both.sum() >= 3 * len(target.names)  # else every column of distinct numbers would do
    if repeated and len(pairs) == levels == len(np.unique(pairs[:, 1])) == len(target.names):
        same = {text.casefold() for text in texts} == set(target.names)
        return "a copy of the label" if same else "each value belongs to one label"
    if in_units and target.numbers is not None and levels > FEW_VALUES:
        x, y = parse_numbers(texts, column.decimal)[codes[both]], target.numbers[target.codes[both]]
        x, y = x[~np.isnan(x)], y[~np.isnan(x)]
        if len(x) and np.ptp(x) > 0 and np.ptp(y) > 0 and abs(np.corrcoef(x, y)[0, 1]) > 1 - 1e-9:
            return "the label in other units"
    return ""
