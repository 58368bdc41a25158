"""From a file or table to training data: roles, labels, votes, checked labels and features."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fsla._files import some
from fsla.data._columns import (
    FEATURE_KINDS,
    TOKENS,
    Column,
    Target,
    check_roles,
    describe_column,
    expand_patterns,
    factorize,
    is_copy,
    is_id_name,
    is_missing_label,
    is_split,
    make_target,
    parse_number,
    parse_numbers,
)
from fsla.data._dataset import Array, Features, Task, TrainingData, Votes
from fsla.data._features import FeatureBuilder, typed_frame
from fsla.data._images import inside, thumbnail
from fsla.data._readers import FILE, RawTable, read_table

if TYPE_CHECKING:
    import pandas as pd

CHECKED_LABEL = "checked_label"
"""Column of a reviewed file with the label that a person chose."""
IS_RANDOM = "is_random"
"""Column of a reviewed file: whether the row was drawn at random."""
ROW = "row"
"""Column of a reviewed file: the row's position in the data."""
GIVEN_LABEL = "given_label"
"""Column of a reviewed file: the label that the row had."""
NO_GROUP = "(none)"
ALL_ROWS = "all rows"
"""Name of the only group of data without groups."""
MANY_CLASSES = 20
"""Whole numbers with more different values than that are the target of a regression."""
MAX_CLASSES = 1000
_ABSTAIN = ("abstain", "-1")
_SCALE_ROWS = 10
"""Rows with both labels from which the scales of given and checked labels are compared."""


@dataclass(frozen=True, eq=False)
class LoadedData:
    """Data that is ready to be cleaned, and what was done to it on reading."""

    data: TrainingData
    """Rows of the table first, then the rows of trusted files that are not in the table."""
    builder: FeatureBuilder
    table: pd.DataFrame
    """All cells as text, as written, in the order of the file."""
    num_rows: int
    """Rows of `data` that are in the table."""
    row_of: Array
    """The row of `data` for each row of `table`: several where rows repeat an id for each annotator."""
    ids: Array
    """One text a row of `data`."""
    columns: pd.DataFrame
    """What each column was taken for: column, role, kind, note."""
    notes: tuple[str, ...]
    """What was done on reading, one fact each."""
    duplicates: pd.DataFrame
    """Rows whose features equal those of an earlier row: row, same_as, why."""
    given: Array
    """The label of each row as written; of several labels the most frequent (in regression the mean); None without."""
    label: str
    """Name of the label column."""
    label_names: Array | None
    """Names of the classes in the order of their codes; None in regression."""
    _cells: pd.DataFrame = field(repr=False)
    _pictures: Sequence[Any] | None = field(repr=False, default=None)

    def display(self, row: int) -> dict[str, Any]:
        """Return what a person sees of a row of `data`.

        Args:
            row: position in `data`.

        Returns:
            "text" if there is free text, "image" (PNG bytes) if there are images, and "cells" by column.
        """
        kinds = {column.name: column.kind for column in self.builder.columns}
        cells = {str(name): str(cell) for name, cell in self._cells.iloc[row].items()}
        shown: dict[str, Any] = {"cells": {n: cell for n, cell in cells.items() if kinds[n] not in ("text", "image")}}
        texts = [cell for name, cell in cells.items() if kinds[name] == "text"]
        if texts:
            shown["text"] = "\n".join(texts)
        if self._pictures is not None:
            shown["image"] = thumbnail(self._pictures[row])
        elif self.data.features.images is not None:
            pixels = self.data.features.images[row]
            shown["image"] = thumbnail(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        return shown


def load_data(
    source: Any,
    *,
    label: str = "label",
    trusted: Any = None,
    checked: str | None = None,
    trusted_column: str | None = None,
    group: str | None = None,
    id: str | None = None,
    label_columns: Sequence[str] | None = None,
    annotator: str | None = None,
    image: str | None = None,
    text: str | Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    encoder: str | Path | None = None,
    task: Literal["auto", "classification", "regression"] = "auto",
    missing: Literal["impute", "error"] = "impute",
    image_size: int | None = None,
) -> LoadedData:
    """Read a data set and find out what its columns are.

    Args:
        source: a file (CSV, TSV, JSON lines, Excel, Parquet, NumPy), a folder of class folders of images, a pandas
            DataFrame or a `datasets.Dataset`.
        label: column of the given labels.
        trusted: file or DataFrame with checked labels, or several of them. Its rows are matched to the table by id, or
            by identical features; rows that are not in the table are added.
        checked: column of the same table with checked labels, empty where nobody checked.
        trusted_column: column of true and false; where it is true, the label itself is checked.
        group: column with the origin of a row.
        id: column with an id for each row.
        label_columns: columns with one label of each annotator or rule; patterns such as `rule_*` are allowed.
        annotator: column that names who gave the label, where several rows share an id.
        image: column with paths of images, relative to the folder of the table.
        text: columns of free text. By default they are recognised.
        features: columns to use, and no others.
        ignore: columns to leave out.
        encoder: local folder of a sentence-transformers model for the text.
        task: "auto" decides by the labels.
        missing: "impute", or "error" to refuse missing cells in features.
        image_size: pixels a side that images are resized to.

    Returns:
        The data, with a table of what each column was taken for.

    Raises:
        ValueError: if the data cannot be used; the message says what to change.
    """
    for argument, value, allowed in (
        ("task", task, ("auto", "classification", "regression")),
        ("missing", missing, ("impute", "error")),
    ):
        if value not in allowed:
            raise ValueError(f"{argument} is {value!r}. Choose one of {some(list(map(repr, allowed)))}.")
    raw = read_table(source, label)
    texts = [text] if isinstance(text, str) else list(text or ())
    table = _Table(raw, label, checked, trusted_column, group, id, label_columns, annotator, image, texts, ignore)
    table.choose_features(features, texts, encoder)
    if missing == "error":
        table.refuse_missing()
    files = [] if trusted is None else [trusted] if not isinstance(trusted, list | tuple) else list(trusted)
    reviews = [_TrustedFile(table, read_table(file, label), number) for number, file in enumerate(files)]
    return _assemble(table, reviews, task, encoder, image_size)


class _Table:
    """The table that is cleaned: its rows, roles and columns.

    In long format a row of `frame` is one label, and an item has several; everywhere else the two are the same.
    """

    def __init__(
        self,
        raw: RawTable,
        label: str,
        checked: str | None,
        trusted_column: str | None,
        group: str | None,
        id: str | None,
        label_columns: Sequence[str] | None,
        annotator: str | None,
        image: str | None,
        texts: list[str],
        ignore: Sequence[str] | None,
    ) -> None:
        self.raw, self.frame, self.name, self.label = raw, raw.frame, raw.name, label
        self.notes = list(raw.notes)
        self.reasons: dict[str, tuple[str, str, str]] = {}
        names = list(self.frame.columns)
        if (
            image is None
            and FILE in raw.frame
            and raw.folder is not None
            and raw.x is None
            and raw.name == str(raw.folder)
        ):
            image = FILE  # a folder of images
        elif image is None and len(raw.pictures) == 1:
            image = next(iter(raw.pictures))
        if checked is None and trusted_column is None and CHECKED_LABEL in names and label != CHECKED_LABEL:
            checked = CHECKED_LABEL
            self.notes.append(f"The column {CHECKED_LABEL!r} holds checked labels.")
        self.vote_columns = expand_patterns(label_columns, names)
        if label_columns is not None and annotator is not None:
            raise ValueError("Both label_columns and annotator are named. Several labels are in one form or the other.")
        if label_columns is not None and not self.vote_columns:
            raise ValueError("label_columns names no column. Name the columns with the labels of each annotator.")
        if checked is not None and trusted_column is not None:
            raise ValueError("Both checked and trusted_column are named. Checked labels come from one of them.")
        if annotator is not None and id is None:
            raise ValueError("annotator needs id, the column that says which rows are labels of one sample.")
        self.checked, self.trusted_column, self.group, self.annotator = checked, trusted_column, group, annotator
        self.image = image
        ignored = expand_patterns(ignore, names)
        if self.vote_columns and label in names and label not in (checked, *self.vote_columns, *ignored):
            reason = f"the labels come from label_columns; set checked={label!r} if these are checked"
            self.reasons[label] = ("ignored", "", reason)
        roles: dict[str, list[str]] = {
            "label": self.vote_columns or [label],
            "checked label": [checked] if checked else [],
            "trusted": [trusted_column] if trusted_column else [],
            "group": [group] if group else [],
            "id": [id] if id and id != image else [],
            "annotator": [annotator] if annotator else [],
            "image": [image] if image else [],
            "text": texts,
            "ignored": ignored,
        }
        self.roles = check_roles(roles, names, self.name)
        self.id = id
        self._group_rows()
        self.given = self._given()
        self.checked_texts = self._checked()

    def __len__(self) -> int:
        return len(self.first)

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
                "name the annotator column if these rows are labels of one sample."
            )

    def _given(self) -> list[tuple[Array, Array, Array]]:
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
            self.is_trusted = _truths(self.frame[self.trusted_column], self.trusted_column, self.name)
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
        return _array_keys(self.raw.x) if self.raw.x is not None else _keys(self.typed, self, self.pictures)

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
        chosen = expand_patterns(features, names)
        clash = [name for name in chosen if self.roles.get(name) not in (None, "text", "image")]
        if clash:
            raise ValueError(f"The column {clash[0]!r} is both a feature and the {self.roles[clash[0]]} column.")
        check_roles({"feature": [n for n in chosen if n not in self.roles]}, names, self.name)
        forced: dict[str, Any] = {**dict.fromkeys(texts, "text"), **({self.image: "image"} if self.image else {})}
        columns = {n: describe_column(n, items[n], forced.get(n)) for n in names if n not in self.roles or n in forced}
        self._take_id(columns, chosen)
        self.columns = [
            c for c in columns.values() if self._is_feature(c, items[c.name], chosen, features is not None, forced)
        ]
        if not self.columns and self.raw.x is None:
            self._take_names_as_text(columns)
        if encoder is not None and not any(c.kind == "text" for c in self.columns):
            self.notes.append("The encoder is not used: no column is free text.")
        self.pictures = self.pictures_of(self.raw, self.first) if self.image else None
        self.typed = self._typed(items, self.pictures)
        if len(items) < len(self.frame):
            self._say_differing(items)

    def _take_id(self, columns: dict[str, Column], chosen: Sequence[str]) -> None:
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

    def _is_feature(
        self, column: Column, cells: Any, chosen: Sequence[str], only: bool, forced: Mapping[str, str]
    ) -> bool:
        name = column.name
        if name in self.reasons and self.reasons[name][0] == "ignored":
            return False
        reason = "" if name in forced else self._leak(column, cells)
        if name in chosen and "label" in reason and not reason.startswith("holds"):
            raise ValueError(f"The feature {name!r} is {reason}: it gives the answer away. Leave it out of features.")
        if name in chosen or name in forced:
            return True
        if only:
            reason = reason or "features names others"
        elif column.kind not in FEATURE_KINDS:
            reason = reason or {"id": "an id: "}.get(column.kind, "") + column.note
        if reason:
            self.reasons[name] = ("ignored", column.kind, reason)
        return not reason

    def _leak(self, column: Column, cells: Any) -> str:
        """Return why a column must not be a feature, or an empty text."""
        if column.kind == "category" and is_split(factorize(cells)[1]):
            return "the parts of a benchmark; all rows are used"
        for target in self._targets:
            reason = is_copy(column, cells, target)
            if reason:
                return reason
        return self._other_labels(column, cells)

    @cached_property
    def _targets(self) -> list[Target | None]:
        checked = np.array([text or None for text in self.checked_texts], dtype=object)
        return [make_target(self.first_given), make_target(checked)]

    def _other_labels(self, column: Column, cells: Any) -> str:
        """Return whether a column holds the names of the classes: labels of somebody else."""
        names = {text.strip().casefold() for text in self.label_texts if not is_missing_label(text)}
        names -= {*TOKENS, ""}
        if (
            column.kind != "category"
            or not names
            or len(names) > MAX_CLASSES
            or not np.isnan(parse_numbers(np.array(list(names), dtype=object))).all()
        ):
            return ""
        texts = {text.casefold() for text in factorize(cells)[1]}
        if texts <= names:
            return "holds labels: name it as checked or in label_columns, or in features to use it all the same"
        return ""

    @cached_property
    def first_given(self) -> Array:
        """Return one label as written for each item, None without."""
        given = np.full(len(self), None, dtype=object)
        for items, _, labels in self.given[::-1]:
            there = np.array([not is_missing_label(text) for text in labels], dtype=bool)
            given[items[there][::-1]] = labels[there][::-1]
        return given

    @cached_property
    def label_texts(self) -> set[str]:
        """Return all labels as written."""
        return {text for _, _, labels in self.given for text in set(labels)} | set(self.checked_texts)

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
            typed[self.image] = _series(pictures)
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
        lacking = []
        for column in self.columns:
            if column.kind not in ("text", "image"):
                count = int((factorize(self.items[column.name])[0] < 0).sum())
                lacking += [f"{column.name} ({count})"] if count else []
        if lacking:
            raise ValueError(f"Cells are missing in {some(lacking)}. Fill them, or set missing='impute'.")

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
                note = "as named" if self.roles[name] == "ignored" else ""
                rows.append((name, self.roles[name], "", note))
        if self.raw.x is not None:
            shape = " x ".join(map(str, self.raw.x.shape[1:]))
            rows.append(("X", "feature", "number" if self.raw.x.ndim == 2 else "image", shape))
        return pd.DataFrame(rows, columns=["column", "role", "kind", "note"])


class _TrustedFile:
    """Rows with checked labels from a file of their own, matched to the table as far as they are in it."""

    def __init__(self, table: _Table, raw: RawTable, number: int) -> None:
        self.table, self.raw, self.name = table, raw, raw.name
        self.notes = list(raw.notes)
        frame = raw.frame
        names = [name for name in (CHECKED_LABEL, table.checked, table.label) if name in frame]
        if not names:
            near = get_close_matches(table.label, frame.columns, n=1)
            raise ValueError(
                f"{self.name} has no column {table.label!r} with the checked labels. It has {some(list(frame))}."
                + (f" Did you mean {near[0]!r}?" if near else "")
            )
        labels = frame[str(names[0])].to_numpy(dtype=object)
        self.rows = np.flatnonzero([not is_missing_label(label) for label in labels])
        if not len(self.rows):
            raise ValueError(f"{self.name} has no label in the column {names[0]!r}. Fill in the checked labels.")
        if len(self.rows) < len(frame):
            self.notes.append(
                f"{len(frame) - len(self.rows)} rows of {self.name} have no checked label and are skipped."
            )
        self.labels = labels[self.rows]
        self.is_review = names[0] == CHECKED_LABEL
        self.is_random = _truths(frame[IS_RANDOM], IS_RANDOM, self.name)[self.rows] if IS_RANDOM in frame else None
        self.lacking = [column.name for column in table.columns if column.name not in frame]
        if (raw.x is None) != (table.raw.x is None):
            raise ValueError(f"{self.name} and {table.name} must both be tables, or both arrays.")
        if raw.x is not None and table.raw.x is not None and raw.x.shape[1:] != table.raw.x.shape[1:]:
            raise ValueError(
                f"X in {self.name} has shape {raw.x.shape}, but in {table.name} it has {table.raw.x.shape}."
            )
        self._read_features()
        self.item = np.full(len(self.rows), -1)
        self.ids = np.array([f"{Path(self.name).name} {row + 1}" for row in self.rows], dtype=object)
        self._match()
        self.new = np.flatnonzero(self.item < 0)
        if len(self.new) and self.lacking:
            raise ValueError(
                f"{self.name} lacks the columns {some(self.lacking)}, and {len(self.new)} of its rows are not in "
                f"{table.name}. Add the columns, or leave them out with ignore=."
            )
        matched = len(self.rows) - len(self.new)
        where = f"{matched} are rows of the table" if matched else "none is a row of the table"
        added = f", {len(self.new)} are added to it" if len(self.new) else ""
        self.notes.append(f"Of {len(self.rows)} checked labels in {Path(self.name).name}, {where}{added}.")

    def _read_features(self) -> None:
        """Convert the features as those of the table, if all are there."""
        frame = self.raw.frame.iloc[self.rows].reset_index(drop=True)
        self.cells = frame
        self.pictures: list[Any] | None = None
        if self.lacking or self.raw.x is not None:
            return
        image = self.table.image
        if image is not None and self.table.pictures is not None:
            self.pictures = self.table.pictures_of(self.raw, self.rows)
        self.typed = self.table._typed(frame, self.pictures)

    @cached_property
    def keys(self) -> list[Any]:
        if self.raw.x is not None:
            return _array_keys(self.raw.x[self.rows])
        return _keys(self.typed, self.table, self.pictures)

    def _match(self) -> None:
        """Find the item of each row by id, by the row's number in a review, or by identical features."""
        table, frame = self.table, self.raw.frame
        candidates = [table.id, "id" if self.is_review else None]
        id_column = next((name for name in candidates if name is not None and name in frame), None)
        if id_column is not None and table.id is not None and table.image != FILE:
            ids = np.array([text.strip() for text in frame[id_column].iloc[self.rows]], dtype=object)
            place = {text: i for i, text in enumerate(table.ids)}
            item = np.array([place.get(text, -1) for text in ids])
            if self._same_features(item):
                self.item, self.ids = item, ids
                return
        elif self.is_review and ROW in frame and table.id is None:
            numbers = parse_numbers(frame[ROW].iloc[self.rows].to_numpy(dtype=object))
            if np.isnan(numbers).any() or (numbers < 0).any() or (numbers >= len(table)).any():
                raise ValueError(
                    f"{self.name} names rows that {table.name} does not have. It is a review of other data."
                )
            self.item = numbers.astype(np.int64)
            self._check_review()
            return
        if self.lacking:
            return
        if len(set(table.keys)) < 0.5 * len(table):
            self.notes.append(f"Features do not tell the rows of the table apart: all rows of {self.name} are added.")
            return
        places: dict[Any, list[int]] = {}
        for i, key in enumerate(table.keys):
            places.setdefault(key, []).append(i)
        for place_list in places.values():
            place_list.reverse()  # the first row is taken first
        self.item = np.array([places[key].pop() if places.get(key) else -1 for key in self.keys])

    def _same_features(self, item: Array) -> bool:
        """Return whether rows with the same id are the same rows, as far as the features are there."""
        there = np.flatnonzero(item >= 0)
        if self.lacking or not len(there):
            return True
        differing = sum(self.keys[i] != self.table.keys[item[i]] for i in there)
        if 2 * differing > len(there):
            self.notes.append(
                f"{differing} of {len(there)} ids in {self.name} belong to rows with other features: rows are matched "
                "by their features."
            )
            return False
        if differing:
            self.notes.append(
                f"{differing} rows of {self.name} have other features than the row with their id; the table's count."
            )
        return True

    def _check_review(self) -> None:
        if GIVEN_LABEL not in self.raw.frame or self.table.annotator or self.table.vote_columns:
            return
        before = [text.strip() for text in self.raw.frame[GIVEN_LABEL].iloc[self.rows]]
        now = [(text or "").strip() for text in self.table.first_given[self.item]]
        differing = sum(a != b for a, b in zip(before, now, strict=True))
        if 2 * differing > len(before):
            raise ValueError(
                f"{differing} of {len(before)} rows in {self.name} have another label than in {self.table.name}. It "
                "is a review of other data."
            )


def _truths(cells: Any, name: str, source: str) -> Array:
    codes, texts = factorize(cells)
    known = {**TOKENS, "1": True, "0": False, "1.0": True, "0.0": False}
    unknown = [text for text in texts if text.lower() not in known]
    if unknown:
        raise ValueError(f"The column {name!r} of {source} holds {unknown[0]!r}. Write true or false.")
    return np.array([*(known[text.lower()] for text in texts), False])[codes]


def _series(values: Sequence[Any]) -> Any:
    import pandas as pd

    series = pd.Series([None] * len(values), dtype=object)
    for i, value in enumerate(values):
        series.iat[i] = value
    return series


def _keys(typed: pd.DataFrame, table: _Table, pictures: Sequence[Any] | None) -> list[Any]:
    """Return one number a row, equal for rows with equal features."""
    import pandas as pd

    plain = typed.copy(deep=False)
    for column in table.columns:
        if column.kind == "text":
            plain[column.name] = _series_of_text(text.strip() for text in typed[column.name])
        elif column.kind == "image" and pictures is not None:
            plain[column.name] = _series_of_text(map(_picture_digest, pictures))
    hashes: list[Any] = pd.util.hash_pandas_object(plain, index=False).tolist()
    return hashes


def _series_of_text(texts: Any) -> Any:
    import pandas as pd

    return pd.Series(list(texts), dtype=object)


def _array_keys(x: Array) -> list[Any]:
    return [row.tobytes() for row in np.ascontiguousarray(x)]


def _picture_digest(item: Any) -> str:
    if isinstance(item, str | Path):
        from fsla._files import open_regular

        try:
            with open(open_regular(Path(item), os.O_RDONLY), "rb") as file:
                item = file.read()
        except FileNotFoundError as error:
            raise ValueError(f"Cannot read the image {item}: no such file.") from error
    elif not isinstance(item, bytes):
        item = np.asarray(item).tobytes()
    return hashlib.blake2b(item, digest_size=16).hexdigest()


# Labels


@dataclass(frozen=True)
class _Labels:
    """How labels as written become codes or numbers."""

    task: Task
    values: Mapping[str, float | None]
    """A code of a class or a number for each text, None where the label is missing."""
    names: Array | None
    notes: tuple[str, ...]

    def of(self, texts: Array) -> Array:
        """Return the value of each text, NaN where it is missing."""
        values = [self.values.get(text) for text in texts]
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _understand_labels(given: Counter[str], checked: Counter[str], table: _Table, task: str) -> _Labels:
    """Decide between classification and regression, and give each label its value."""
    notes = []
    counts = given + checked
    missing = {text for text in counts if is_missing_label(text)}
    marked = sum(counts[text] for text in missing if text.strip())
    if marked:
        shown = some(sorted({text.strip() for text in missing if text.strip()}))
        notes.append(f"{marked} labels are written {shown}, which is taken as missing. Rename the class if it is one.")
    abstained = _abstained(given, checked, table, missing)
    if abstained:
        number = sum(counts[text] for text in abstained)
        notes.append(
            f"{number} labels are {some(sorted({t.strip() for t in abstained}))}: these are taken as no label."
        )
    written = [text for text in counts if text not in missing and text not in abstained]
    if not any(text in given for text in written):
        raise ValueError(
            f"No row of {table.name} has a label in {some(table.vote_columns or [table.label])}. Fill in labels."
        )
    stripped = np.array([text.strip() for text in written], dtype=object)
    weights = np.array([counts[text] for text in written])
    numbers = parse_numbers(stripped)
    if np.isnan(numbers).any() and np.isnan(parse_numbers(stripped, ",")).sum() < np.isnan(numbers).sum():
        numbers = parse_numbers(stripped, ",")
    stray = np.isnan(numbers)
    distinct = np.unique(numbers[~stray])
    many = len(distinct) > MANY_CLASSES or bool((distinct != np.floor(distinct)).any())
    is_code = any(len(t) > 1 and t.lstrip("+-")[:1] == "0" and t.lstrip("+-").isdigit() for t in stripped)
    mostly = many and not is_code and weights[~stray].sum() >= 0.9 * weights.sum()
    values: dict[str, float | None] = dict.fromkeys([*missing, *abstained], None)
    if task == "regression" or (task == "auto" and mostly):
        if stray.any():
            number = int(weights[stray].sum())
            raise ValueError(
                f"The label {table.label!r} of {table.name} holds numbers, but {number} are none, such as "
                f"{stripped[stray][0]!r}. Correct them, or set task='classification'."
            )
        notes.append(
            f"The label is a number from {distinct[0]:g} to {distinct[-1]:g} with {len(distinct)} different values: "
            "regression. Set task='classification' if the numbers are classes."
        )
        values |= dict(zip(written, numbers.tolist(), strict=True))
        return _Labels("regression", values, None, tuple(notes))
    names, codes, joined = _classes(stripped, weights, not stray.any())
    notes += joined
    values |= dict(zip(written, map(float, codes), strict=True))
    _check_classes(names, values, given, checked, table, notes)
    return _Labels("classification", values, names, tuple(notes))


def _abstained(given: Counter[str], checked: Counter[str], table: _Table, missing: set[str]) -> set[str]:
    """Return how rules write that they have no label for a row: "abstain", or -1 beside classes from 0."""
    if not table.vote_columns:
        return set()
    others = {t.strip() for t in given if t not in missing} - {"-1"}
    counted = all(t.isdigit() for t in others) and "0" in others and "-1" not in {t.strip() for t in checked}
    return {t for t in given if t.strip().lower() == "abstain" or (t.strip() == "-1" and counted)}


def _classes(texts: Array, weights: Array, numeric: bool) -> tuple[Array, list[int], list[str]]:
    """Return names of classes, the code of each text, and what was joined."""
    spellings: dict[str, Counter[str]] = {}
    folded = []
    for text, weight in zip(texts, weights, strict=True):
        key = text.casefold()
        if numeric and key.endswith(".0") and key[:-2].lstrip("+-").isdigit():
            key = key[:-2]  # pandas writes whole numbers so where a cell is missing
        folded.append(key)
        spellings.setdefault(key, Counter())[text] += int(weight)
    name_of = {key: c.most_common(1)[0][0] for key, c in spellings.items()}
    order = sorted(name_of, key=lambda key: (parse_number(key) if numeric else 0.0, name_of[key]))
    code_of = {key: i for i, key in enumerate(order)}
    joined = [
        f"The labels {some([repr(t) for t in c])} are joined as {name_of[key]!r}."
        for key, c in spellings.items()
        if len(c) > 1
    ]
    return np.array([name_of[key] for key in order], dtype=object), [code_of[key] for key in folded], joined


def _check_classes(
    names: Array, values: Mapping[str, float | None], given: Counter[str], checked: Counter[str], table: _Table,
    notes: list[str],
) -> None:  # fmt: skip
    def classes_of(counts: Counter[str]) -> dict[str, int]:
        classes: dict[str, int] = {}
        for text, count in counts.items():
            value = values[text]
            if value is not None:
                name = str(names[int(value)])
                classes[name] = classes.get(name, 0) + count
        return classes

    in_given, in_checked = classes_of(given), classes_of(checked)
    total = sum(in_given.values())
    where = f"The label {table.label!r} of {table.name}"
    if len(names) < 2:
        raise ValueError(f"{where} has one class only: {names[0]!r}. Labels of at least two classes are needed.")
    if len(names) > MAX_CLASSES or (len(names) > MANY_CLASSES and len(names) > 0.5 * total):
        raise ValueError(
            f"{where} has {len(names)} different values in {total} labels, such as {names[0]!r}. Name the column of "
            f"classes (at most {MAX_CLASSES}), or set task='regression' for numbers."
        )
    if not in_checked:
        return
    if not set(in_given) & set(in_checked):
        raise ValueError(
            f"No checked label is among the given ones. Given are {some(sorted(in_given))}; checked are "
            f"{some(sorted(in_checked))}. Write them alike."
        )
    unchecked = [name for name in names if name not in in_checked]
    if unchecked:
        notes.append(f"No checked row has the label {some(unchecked)}: for it, models rest on given labels.")
    new = [name for name in names if name not in in_given]
    if new:
        notes.append(f"The checked label {some(new)} is not among the given ones.")
    for name in unchecked:
        near = get_close_matches(
            name, [other for other in names if in_given.get(other, 0) > 10 * in_given[name]], 1, 0.7
        )
        if near:
            times = "once" if in_given[name] == 1 else f"{in_given[name]} times"
            notes.append(
                f"The label {name!r} occurs {times} and counts as a class. Correct it if it means {near[0]!r}."
            )


# Assembly


def _assemble(
    table: _Table, reviews: list[_TrustedFile], task: str, encoder: Any, image_size: int | None
) -> LoadedData:
    notes = [*table.notes, *(note for review in reviews for note in review.notes)]
    given = Counter(text for _, _, labels in table.given for text in labels)
    checked = Counter(text for text in table.checked_texts if text)
    for review in reviews:
        checked.update(review.labels)
    labels = _understand_labels(given, checked, table, task)
    notes += labels.notes
    checked_value, is_random = _checked_values(table, reviews, labels, notes)
    votes, group_names = _votes(table, labels, notes)
    checked_rows = np.flatnonzero(~np.isnan(checked_value))
    if labels.task == "regression":
        votes = _on_one_scale(votes, checked_value, table, notes)
    features, builder = _build_features(table, reviews, encoder, image_size)
    dtype = np.int64 if labels.task == "classification" else np.float64
    data = TrainingData(
        labels.task,
        features,
        Votes(votes.row, votes.group, votes.label.astype(dtype)),
        group_names,
        checked_rows,
        checked_value[checked_rows].astype(dtype),
        labels.names,
        None if is_random is None else is_random[checked_rows],
    )
    _say_coverage(data, table, notes)
    duplicates = _duplicates(table, reviews, notes)
    added = [review.new for review in reviews]
    ids = np.concatenate([table.ids, *(review.ids[new] for review, new in zip(reviews, added, strict=True))])
    return LoadedData(
        data=data,
        builder=builder,
        table=table.frame,
        num_rows=len(table),
        row_of=table.item_of,
        ids=ids,
        columns=table.described(),
        notes=tuple(notes),
        duplicates=duplicates,
        given=_given_texts(table, data, labels),
        label=table.label,
        label_names=labels.names,
        _cells=_all_cells(table, reviews),
        _pictures=_all_pictures(table, reviews),
    )


def _checked_values(
    table: _Table, reviews: list[_TrustedFile], labels: _Labels, notes: list[str]
) -> tuple[Array, Array | None]:
    """Return the checked label of every row, NaN without one, and which of them are a random sample."""
    parts = [labels.of(table.checked_texts)]
    random = [np.ones(len(table), dtype=bool)]
    replaced = 0
    for review in reviews:
        values, matched = labels.of(review.labels), review.item >= 0
        items = review.item[matched]
        before = parts[0].copy()
        parts[0][items] = values[matched]
        differs = ~np.isnan(before[items]) & (before[items] != parts[0][items])
        replaced += int(differs.sum()) + int((parts[0][items] != values[matched]).sum())
        drawn = np.ones(len(values), dtype=bool) if review.is_random is None else review.is_random
        first = np.isnan(before[items])  # a row that was drawn at random before stays so
        random[0][items[first]] = drawn[matched][first]
        parts.append(values[review.new])
        random.append(drawn[review.new])
    if replaced:
        notes.append(f"{replaced} rows have several checked labels that differ; the last one counts.")
    said = any(review.is_random is not None for review in reviews)
    return np.concatenate(parts), np.concatenate(random) if said else None


def _votes(table: _Table, labels: _Labels, notes: list[str]) -> tuple[Votes, Array]:
    rows = np.concatenate([items for items, _, _ in table.given])
    groups = np.concatenate([groups for _, groups, _ in table.given])
    values = labels.of(np.concatenate([texts for _, _, texts in table.given]))
    there = ~np.isnan(values)
    names = np.array(list(dict.fromkeys(table.vote_columns)) or sorted(set(groups)), dtype=object)
    used = set(groups[there])
    empty = [name for name in names if name not in used]
    if empty:
        what = "labels that are not checked" if table.trusted_column else "labels"
        notes.append(f"No {what} from {some(empty)}: left out of the groups.")
    names = np.array([name for name in names if name in used], dtype=object)
    labelled = len(np.unique(rows[there]))
    if table.group and not table.annotator and not table.vote_columns and len(names) > max(10, 0.5 * labelled):
        raise ValueError(
            f"The group column {table.group!r} of {table.name} has {len(names)} different values in {labelled} rows. "
            "Name a column with few groups of many rows each."
        )
    if table.group and (table.annotator or table.vote_columns):
        notes.append(f"Each annotator is a group of its own; the column {table.group!r} is not used.")
    if (table.annotator or table.vote_columns) and len(names) == 1:
        notes.append(f"All labels are from one annotator, {names[0]!r}: there is nobody to compare it with.")
    code = {name: i for i, name in enumerate(names)}
    number = np.array([code[name] for name in groups[there]], dtype=np.int64)
    order = np.argsort(rows[there], kind="stable")
    return Votes(rows[there][order], number[order], values[there][order]), names


def _on_one_scale(votes: Votes, checked: Array, table: _Table, notes: list[str]) -> Votes:
    """Bring given numbers to the scale of checked ones where the two clearly differ, as stars and percent do."""
    means = np.full(len(checked), np.nan)
    counts = np.bincount(votes.row, minlength=len(checked))
    there = counts > 0
    means[there] = np.bincount(votes.row, votes.label, minlength=len(checked))[there] / counts[there]
    both = there & ~np.isnan(checked)
    if both.sum() < _SCALE_ROWS:
        return votes
    quartiles = (25, 50, 75)
    (low, middle, high), (a, b, c) = np.percentile(means[both], quartiles), np.percentile(checked[both], quartiles)
    if high == low or c == a or (0.4 < (c - a) / (high - low) < 2.5 and abs(b - middle) < 2 * (c - a)):
        return votes
    factor = (c - a) / (high - low) * (1 if np.corrcoef(means[both], checked[both])[0, 1] >= 0 else -1)
    notes.append(
        f"Given and checked numbers have different scales (quartiles {low:.3g} to {high:.3g} and {a:.3g} to {c:.3g}). "
        f"Given ones are converted: {b:.4g} + {factor:.4g} x (value - {middle:.4g})."
    )
    return Votes(votes.row, votes.group, b + factor * (votes.label - middle))


def _build_features(
    table: _Table, reviews: list[_TrustedFile], encoder: Any, image_size: int | None
) -> tuple[Features, FeatureBuilder]:
    folder = None if encoder is None or not any(c.kind == "text" for c in table.columns) else str(encoder)
    if table.raw.x is not None:
        builder = FeatureBuilder(image_size=image_size)
        added = [r.raw.x[r.rows[r.new]] for r in reviews if r.raw.x is not None]
        return builder.fit_transform(np.concatenate([table.raw.x, *added])), builder
    import pandas as pd

    builder = FeatureBuilder(table.columns, encoder=folder, image_size=image_size)
    added = [review.typed.iloc[review.new] for review in reviews if len(review.new)]
    typed = pd.concat([table.typed, *added], ignore_index=True) if added else table.typed
    return builder.fit_typed(typed), builder


def _say_coverage(data: TrainingData, table: _Table, notes: list[str]) -> None:
    labelled = len(np.unique(data.votes.row))
    rows = len(table)
    unlabelled = rows - int((np.bincount(data.votes.row, minlength=rows)[:rows] > 0).sum())
    checked = len(data.checked_rows)
    if unlabelled and table.trusted_column is None:
        notes.append(f"{unlabelled} of {rows} rows have no given label: they train no model, and get predictions.")
    if not checked:
        notes.append("No row has a checked label.")
    elif checked == rows and labelled:
        notes.append("Every row has a checked label.")


def _given_texts(table: _Table, data: TrainingData, labels: _Labels) -> Array:
    given = np.full(len(data.features), None, dtype=object)
    if not (table.annotator or table.vote_columns):
        given[: len(table)] = table.first_given
        return given
    for row, start, end in _runs(data.votes.row):
        values = data.votes.label[start:end]
        if labels.names is None:
            given[row] = f"{values.mean():.6g}"
        else:
            given[row] = labels.names[np.bincount(values).argmax()]
    return given


def _runs(rows: Array) -> list[tuple[int, int, int]]:
    distinct, starts = np.unique(rows, return_index=True)
    return list(zip(distinct.tolist(), starts.tolist(), [*starts[1:].tolist(), len(rows)], strict=True))


def _duplicates(table: _Table, reviews: list[_TrustedFile], notes: list[str]) -> pd.DataFrame:
    """List rows with the features of an earlier row."""
    import pandas as pd

    first: dict[Any, int] = {}
    rows = []
    for row, key in enumerate(table.keys):
        same = first.setdefault(key, row)
        if same != row:
            a, b = table.first_given[same], table.first_given[row]
            differ = a is not None and b is not None and a.strip().casefold() != b.strip().casefold()
            rows.append((row, same, "identical features, different labels" if differ else "identical features"))
    inside_table = len(rows)
    number = len(table)
    for review in reviews:
        for i in review.new:
            same = first.setdefault(review.keys[i], number)
            if same != number:
                rows.append(
                    (number, same, f"row {review.rows[i] + 1} of {Path(review.name).name} has identical features")
                )
            number += 1
    if inside_table:
        conflicts = sum("different" in why for _, _, why in rows)
        but = f", {conflicts} of them with different labels" if conflicts else ""
        notes.append(f"{inside_table} rows repeat the features of an earlier row{but}.")
    if len(rows) > inside_table:
        notes.append(f"{len(rows) - inside_table} added checked rows have the features of an earlier row.")
    return pd.DataFrame(rows, columns=["row", "same_as", "why"])


def _all_cells(table: _Table, reviews: list[_TrustedFile]) -> pd.DataFrame:
    import pandas as pd

    names = [column.name for column in table.columns]
    if not names:
        return pd.DataFrame(index=range(len(table) + sum(len(r.new) for r in reviews)))
    added = [review.cells[names].iloc[review.new] for review in reviews if len(review.new)]
    return pd.concat([table.items[names], *added], ignore_index=True)


def _all_pictures(table: _Table, reviews: list[_TrustedFile]) -> list[Any] | None:
    if table.pictures is None:
        return None
    return [*table.pictures, *(review.pictures[i] for review in reviews if review.pictures for i in review.new)]
