"""The table that is cleaned: roles, labels as written, and features of each row."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fsla._storage._files import some
from fsla.data._columns import (
    FEATURE_KINDS,
    TOKENS,
    Column,
    Target,
    as_number_or_category,
    check_roles,
    describe_column,
    expand_patterns,
    factorize,
    is_copy,
    is_id_name,
    is_missing_label,
    is_split,
    make_target,
    parse_numbers,
)
from fsla.data._dataset import Array
from fsla.data._features import typed_frame
from fsla.data._images import inside
from fsla.data._readers import FILE, RawTable

if TYPE_CHECKING:
    import pandas as pd

CHECKED_LABEL = "checked_label"
"""Column of a reviewed file with the label that a person chose."""
NO_GROUP = "(none)"
ALL_ROWS = "all rows"
"""Name of the only group of data without groups."""
MAX_CLASSES = 1000


@dataclass(frozen=True)
class NamedColumns:
    """The columns that the user named for a role, as in `load_data`."""

    label: str = "label"
    checked: str | None = None
    trusted_column: str | None = None
    group: str | None = None
    id: str | None = None
    label_columns: Sequence[str] | None = None
    annotator: str | None = None
    image: str | None = None
    text: Sequence[str] = ()
    ignore: Sequence[str] | None = None


class Table:
    """The table that is cleaned: its rows, roles and columns.

    In long format a row of `frame` is one label, and an item has several; everywhere else the two are the same.
    """

    def __init__(self, raw: RawTable, named: NamedColumns) -> None:
        self.raw, self.frame, self.name, self.label = raw, raw.frame, raw.name, named.label
        self.notes = list(raw.notes)
        self.reasons: dict[str, tuple[str, str, str]] = {}
        names = list(self.frame.columns)
        named = self._completed(named)
        label, checked, trusted_column = named.label, named.checked, named.trusted_column
        group, id, annotator, image = named.group, named.id, named.annotator, named.image
        label_columns = named.label_columns
        self.vote_columns = expand_patterns(label_columns, names)
        if label_columns is not None and annotator is not None:
            raise ValueError(
                "label_columns= and annotator= are both named. Several labels are in one form or the other."
            )
        if label_columns is not None and not self.vote_columns:
            raise ValueError("label_columns= names no column. Name the columns with the labels of each annotator.")
        if checked is not None and trusted_column is not None:
            raise ValueError("checked= and trusted_column= are both named. Checked labels come from one of them.")
        if trusted_column is not None and label_columns is not None:
            raise ValueError(
                "trusted_column= and label_columns= are both named. Name the checked labels with checked=."
            )
        if annotator is not None and id is None:
            raise ValueError("annotator= needs id=, the column that says which rows are labels of one sample.")
        self.checked, self.trusted_column, self.group, self.annotator = checked, trusted_column, group, annotator
        self.image = image
        ignored = expand_patterns(named.ignore, names)
        if self.vote_columns and label in names and label not in (checked, *self.vote_columns, *ignored):
            reason = "the labels come from label_columns=; name it with checked= if its labels are checked"
            self.reasons[label] = ("ignored", "", reason)
        roles: dict[str, list[str]] = {
            "label": self.vote_columns or [label],
            "checked label": [checked] if checked else [],
            "trusted": [trusted_column] if trusted_column else [],
            "group": [group] if group else [],
            "id": [id] if id and id != image else [],
            "annotator": [annotator] if annotator else [],
            "image": [image] if image else [],
            "text": list(named.text),
            "ignored": ignored,
        }
        self.roles = check_roles(roles, names, self.name)
        self.id = id
        self._group_rows()
        self.label_parts = self._label_parts()
        self.checked_texts = self._checked()

    def __len__(self) -> int:
        return len(self.first)

    def _completed(self, named: NamedColumns) -> NamedColumns:
        """Fill in the roles that the source itself tells."""
        raw, names = self.raw, self.frame.columns
        if raw.x is not None:
            defaults = {"group": "groups", "id": "ids", "trusted_column": "trusted"}
            defaults = {role: name for role, name in defaults.items() if name in names and getattr(named, role) is None}
            if named.checked is not None:
                defaults.pop("trusted_column", None)
            named = replace(named, **defaults)
        if named.image is None and (raw.is_folder or len(raw.pictures) == 1):
            named = replace(named, image=FILE if raw.is_folder else next(iter(raw.pictures)))
        is_reviewed = CHECKED_LABEL in names and named.label != CHECKED_LABEL
        if named.checked is None and named.trusted_column is None and is_reviewed:
            self.notes.append(f"The column {CHECKED_LABEL!r} holds checked labels.")
            named = replace(named, checked=CHECKED_LABEL)
        return named

    def _group_rows(self) -> None:
        """Find the rows of one item."""
        rows = len(self.frame)
        self.item_of = np.arange(rows)
        self.first = self.item_of
        if self.id is None:
            return
        ids = np.array([text.strip() for text in self.frame[self.id]], dtype=object)
        empty = np.flatnonzero(ids == "")
        if len(empty):
            raise ValueError(
                f"{len(empty)} rows of {self.name} have no id in {self.id!r}, row {empty[0] + 1} the first. Fill them."
            )
        import pandas as pd

        self.item_of, distinct = pd.factorize(pd.Series(ids, dtype=object))
        self.first = np.unique(self.item_of, return_index=True)[1]
        if self.annotator is None and len(distinct) < rows:
            counts = np.bincount(self.item_of)
            worst = int(counts.argmax())
            raise ValueError(
                f"Duplicate id {distinct[worst]!r} in {self.name} ({counts[worst]} rows). Name another id column, or "
                "name annotator= if these rows are labels of one sample."
            )

    def _label_parts(self) -> list[tuple[Array, Array, Array]]:
        """Return (item, group, label as written) of the labels, in parts."""
        if self.vote_columns:
            items = np.arange(len(self.frame))
            return [(items, np.full(len(items), c, dtype=object), self._column(c)) for c in self.vote_columns]
        source = self.annotator or self.group
        groups = np.full(len(self.frame), ALL_ROWS, dtype=object)
        if source is not None:
            groups = np.array([text.strip() or NO_GROUP for text in self.frame[source]], dtype=object)
            lacking = int((groups == NO_GROUP).sum())
            if lacking:
                self.notes.append(f"{lacking} rows have no {source}: they form the group {NO_GROUP!r}.")
        labels = self._column(self.label)
        if self.trusted_column is not None:
            self.is_trusted = read_truths(self.frame[self.trusted_column], self.trusted_column, self.name)
            labels = np.where(self.is_trusted, "", labels)
        return [(self.item_of, groups, labels)]

    def _checked(self) -> Array:
        """Return the checked label of each item as written, empty without."""
        if self.trusted_column is not None:
            cells = np.where(self.is_trusted, self._column(self.label), "")
        elif self.checked is not None:
            cells = self._column(self.checked)
        else:
            return np.full(len(self), "", dtype=object)
        checked = np.full(len(self), "", dtype=object)
        rows = np.flatnonzero([not is_missing_label(cell) for cell in cells])
        items = self.item_of[rows]
        checked[items[::-1]] = cells[rows[::-1]]  # the first one counts
        differing = np.unique(items[[a.strip() != b.strip() for a, b in zip(checked[items], cells[rows], strict=True)]])
        if len(differing):
            self.notes.append(f"{len(differing)} samples have several different checked labels; the first one counts.")
        return checked

    def _column(self, name: str) -> Array:
        cells: Array = self.frame[name].to_numpy(dtype=object)
        return cells

    @cached_property
    def items(self) -> pd.DataFrame:
        """Return the first row of each item."""
        whole = len(self.first) == len(self.frame)
        return self.frame if whole else self.frame.iloc[self.first].reset_index(drop=True)

    @cached_property
    def keys(self) -> list[Any]:
        """Return one value a row, equal for rows with equal features."""
        return array_keys(self.raw.x) if self.raw.x is not None else table_keys(self.typed, self, self.pictures)

    @cached_property
    def ids(self) -> Array:
        """Return the id of each item: without a column for it, its position."""
        if self.id is None:
            name = self.image if self.image == FILE else None
            texts = self.items[name] if name else map(str, range(len(self)))
        else:
            texts = (text.strip() for text in self.items[self.id])
        return np.array([*texts], dtype=object)

    # Columns

    def choose_features(self, features: Sequence[str] | None, texts: list[str], encoder: Any) -> None:
        """Decide for each column without a role whether it is a feature."""
        items, names = self.items, list(self.frame.columns)
        chosen = dict.fromkeys(expand_patterns(features, names))
        clash = [name for name in chosen if self.roles.get(name) not in (None, "text", "image")]
        if clash:
            raise ValueError(f"The column {clash[0]!r} is both a feature and the {self.roles[clash[0]]} column.")
        check_roles({"feature": [n for n in chosen if n not in self.roles]}, names, self.name)
        forced: dict[str, Any] = {**dict.fromkeys(texts, "text"), **({self.image: "image"} if self.image else {})}
        free = [n for n in names if n in forced or (n not in self.roles and n not in self.reasons)]
        columns = {name: describe_column(name, items[name], forced.get(name)) for name in free}
        self._take_id(columns, chosen)
        if self.raw.x is not None:
            self.reasons |= dict.fromkeys(columns, ("ignored", "", "the features are in X"))
            columns = {}
        only = features is not None
        decided = [self._as_feature(c, items[c.name], chosen, only, forced) for c in columns.values()]
        self.columns = [column for column in decided if column is not None]
        if not self.columns and self.raw.x is None:
            self._take_names_as_text(columns)
        several = self.annotator or self.vote_columns
        for column in self.columns:
            if column.kind == "text" and column.levels < 0.5 * len(items) and not several:
                self.notes.append(
                    f"{column.name!r} has {column.levels} different texts in {len(items)} rows. If each row is one "
                    "label of several, name id= and annotator=."
                )
        if encoder is not None and not any(c.kind == "text" for c in self.columns):
            self.notes.append("The encoder is not used: no column is free text.")
        self.pictures = self.pictures_of(self.raw, self.first) if self.image else None
        self.typed = self._typed(items, self.pictures)
        if len(items) < len(self.frame):
            self._say_differing(items)

    def _take_id(self, columns: dict[str, Column], chosen: Mapping[str, None]) -> None:
        """Use a column as the id if its name and its values say so."""
        if self.id is not None:
            return
        for name, column in columns.items():
            if column.kind == "id" and is_id_name(name) and column.levels == len(self.frame) and name not in chosen:
                self.id = name
                self.roles[name] = "id"
                del columns[name]
                self.reasons[name] = ("id", "", "recognised: every row has its own")
                return

    def _as_feature(
        self, column: Column, cells: Any, chosen: Mapping[str, None], only: bool, forced: Mapping[str, str]
    ) -> Column | None:
        """Return a column as a feature, or None with the reason why it is left out."""
        name = column.name
        if name in forced:
            return column
        copies = [reason for target in self._targets if (reason := is_copy(column, cells, target))]
        if name in chosen:
            if copies:
                raise ValueError(f"The feature {name!r} gives the answer away: {copies[0]}. Leave it out of features=.")
            return column if column.kind in FEATURE_KINDS else as_number_or_category(column, cells)
        reason = next(iter(copies), "") or self._other_labels(column, cells)
        if column.kind == "category" and is_split(factorize(cells)[1]):
            reason = "the parts of a benchmark; all rows are used"
        if not reason and column.kind not in FEATURE_KINDS:
            reason = ("an id: " if column.kind == "id" else "") + column.note
        if not reason and only:
            reason = "not among features="
        if not reason:
            return column
        self.reasons[name] = ("ignored", column.kind, reason)
        return None

    @cached_property
    def _targets(self) -> list[Target | None]:
        checked = np.array([text or None for text in self.checked_texts], dtype=object)
        return [make_target(self.first_given), make_target(checked)]

    def _other_labels(self, column: Column, cells: Any) -> str:
        """Return whether a column holds the names of the classes: labels of somebody else."""
        if column.kind != "category" or not self._class_names:
            return ""
        if all(text.casefold() in self._class_names for text in factorize(cells)[1]):
            return "holds labels: name it with checked= or label_columns=, or with features= to use it all the same"
        return ""

    @cached_property
    def _class_names(self) -> set[str]:
        """Return labels that are names: not yes and no, and no numbers, which may mean anything in another column."""
        names = {text.strip().casefold() for text in self.label_texts if not is_missing_label(text)} - set(TOKENS)
        are_names = len(names) <= MAX_CLASSES and np.isnan(parse_numbers(np.array([*names], dtype=object))).all()
        return names if are_names else set()

    @cached_property
    def first_given(self) -> Array:
        """Return one label as written for each item, None without."""
        first = np.full(len(self), None, dtype=object)
        for items, _, labels in self.label_parts[::-1]:
            there = np.array([not is_missing_label(text) for text in labels], dtype=bool)
            first[items[there][::-1]] = labels[there][::-1]
        return first

    @cached_property
    def label_texts(self) -> set[str]:
        """Return all labels as written."""
        return {text for _, _, labels in self.label_parts for text in set(labels)} | set(self.checked_texts)

    def _take_names_as_text(self, columns: Mapping[str, Column]) -> None:
        """Use words of which each row has its own: they are all that there is."""
        for name, column in columns.items():
            if column.kind == "id" and np.isnan(parse_numbers(factorize(self.frame[name])[1][:50])).all():
                self.reasons.pop(name, None)
                self.columns = [replace(column, kind="text", note="the only column that tells rows apart")]
                return
        why = "; ".join(f"{name}: {reason[2]}" for name, reason in self.reasons.items())
        raise ValueError(
            f"No column of {self.name} is left as a feature ({why or 'every column has another role'}). Name columns "
            "with features=."
        )

    def pictures_of(self, raw: RawTable, rows: Array) -> list[Any]:
        """Return images that are part of a source, or their paths."""
        if self.image in raw.pictures:
            return [raw.pictures[str(self.image)][int(row)] for row in rows]
        cells = [raw.frame[self.image].iloc[row] for row in rows]
        if raw.folder is None:
            return [Path(cell) for cell in cells]
        return [inside(raw.folder, cell, int(row)) for row, cell in zip(rows, cells, strict=True)]

    def _typed(self, rows: pd.DataFrame, pictures: Sequence[Any] | None) -> pd.DataFrame:
        typed = typed_frame(rows, self.columns)
        if pictures is not None and self.image:
            typed[self.image] = object_series(pictures)
        return typed

    def _say_differing(self, items: pd.DataFrame) -> None:
        for column in self.columns:
            cells = self.frame[column.name].to_numpy(dtype=object)
            differing = np.unique(self.item_of[cells != items[column.name].to_numpy(dtype=object)[self.item_of]])
            if len(differing):
                self.notes.append(
                    f"{column.name!r} differs between the rows of {len(differing)} ids; their first rows count."
                )

    def refuse_missing(self) -> None:
        """Raise if a cell of a feature is missing."""
        counts = self.typed[[c for c in self.typed if c in {column.name for column in self.columns}]].isna().sum()
        lacking = [f"{name} ({count})" for name, count in counts.items() if count]
        if lacking:
            raise ValueError(f"Cells are missing in {some(lacking)}. Fill them, or set missing='impute'.")

    @cached_property
    def has_missing(self) -> Array:
        """Return which items have a missing cell among the features."""
        return missing_rows(self.typed, self.raw.x)

    def _role_note(self, name: str, role: str) -> str:
        codes, texts = factorize(self.frame[name])
        if role in ("group", "annotator"):
            return f"{len(texts)} {role}s"
        if role in ("label", "checked label"):
            missing = int((codes < 0).sum())
            values = f"{len(texts)} different value{'' if len(texts) == 1 else 's'}"
            return f"{values}; {missing} missing" if missing else values
        return "as named" if role == "ignored" else ""

    def described(self) -> pd.DataFrame:
        """Return what each column was taken for."""
        import pandas as pd

        features = {column.name: column for column in self.columns}
        rows: list[tuple[str, str, str, str]] = []
        for name in self.frame.columns:
            if name in features:
                column = features[name]
                role = column.kind if column.kind in ("text", "image") else "feature"
                rows.append((name, role, column.kind, column.note))
            elif name in self.reasons:
                rows.append((name, *self.reasons[name]))
            else:
                rows.append((name, self.roles[name], "", self._role_note(name, self.roles[name])))
        if self.raw.x is not None:
            shape = " x ".join(map(str, self.raw.x.shape[1:]))
            rows.append(("X", "feature", "number" if self.raw.x.ndim == 2 else "image", shape))
        return pd.DataFrame(rows, columns=["column", "role", "kind", "note"])


def missing_rows(typed: pd.DataFrame, x: Array | None) -> Array:
    """Return which rows have a missing cell."""
    if x is not None:
        return np.asarray(np.isnan(x.reshape(len(x), -1).astype(np.float64)).any(axis=1))
    return np.asarray(typed.isna().any(axis=1))


def read_truths(cells: Any, name: str, source: str) -> Array:
    """Return a column of true and false as booleans; a missing cell is false."""
    codes, texts = factorize(cells)
    known = {**TOKENS, "1": True, "0": False, "1.0": True, "0.0": False}
    unknown = [text for text in texts if text.lower() not in known]
    if unknown:
        raise ValueError(f"The column {name!r} of {source} holds {unknown[0]!r}. Write true or false.")
    return np.array([*(known[text.lower()] for text in texts), False])[codes]


def object_series(values: Sequence[Any]) -> Any:
    """Return objects as a column; arrays among them stay whole."""
    import pandas as pd

    series = pd.Series([None] * len(values), dtype=object)
    for i, value in enumerate(values):
        series.iat[i] = value
    return series


def table_keys(typed: pd.DataFrame, table: Table, pictures: Sequence[Any] | None) -> list[Any]:
    """Return one number a row, equal for rows with equal features."""
    import pandas as pd

    plain = typed.copy(deep=False)
    for column in table.columns:
        if column.kind == "text":
            plain[column.name] = _series_of_text(text.strip() for text in typed[column.name])
        elif column.kind == "image" and pictures is not None:
            plain[column.name] = _series_of_text(map(picture_digest, pictures))
    hashes: list[Any] = pd.util.hash_pandas_object(plain, index=False).tolist()
    return hashes


def _series_of_text(texts: Any) -> Any:
    import pandas as pd

    return pd.Series(list(texts), dtype=object)


def array_keys(x: Array) -> list[Any]:
    """Return the bytes of each row."""
    return [row.tobytes() for row in np.ascontiguousarray(x)]


def picture_digest(item: Any) -> str:
    """Return a digest of the bytes of an image, or of its file."""
    if isinstance(item, str | Path):
        from fsla._storage._files import open_regular

        try:
            with open(open_regular(Path(item), os.O_RDONLY), "rb") as file:
                item = file.read()
        except FileNotFoundError as error:
            raise ValueError(f"Cannot read the image {item}: no such file.") from error
    elif not isinstance(item, bytes):
        item = np.asarray(item).tobytes()
    return hashlib.blake2b(item, digest_size=16).hexdigest()
