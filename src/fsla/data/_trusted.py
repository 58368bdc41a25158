"""Checked labels from files of their own, matched to the rows of the table."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fsla._storage._files import some
from fsla.data._columns import (
    is_missing_label,
    parse_numbers,
)
from fsla.data._dataset import Array
from fsla.data._readers import FILE, RawTable
from fsla.data._table import CHECKED_LABEL, Table, array_keys, read_truths, table_keys

IS_RANDOM = "is_random"
"""Column of a reviewed file: whether the row was drawn at random."""
ROW = "row"
"""Column of a reviewed file: the row's position in the data."""
GIVEN_LABEL = "given_label"
"""Column of a reviewed file: the label that the row had."""


class TrustedFile:
    """Rows with checked labels from a file of their own, matched to the table as far as they are in it."""

    def __init__(self, table: Table, raw: RawTable) -> None:
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
        self.is_random = read_truths(frame[IS_RANDOM], IS_RANDOM, self.name)[self.rows] if IS_RANDOM in frame else None
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
        """Return one value a row, as `Table.keys` does."""
        if self.raw.x is not None:
            return array_keys(self.raw.x[self.rows])
        return table_keys(self.typed, self.table, self.pictures)

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
