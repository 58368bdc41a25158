"""From a file or table to training data: roles, labels, votes, checked labels and features."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fsla._storage._files import some
from fsla.data._dataset import Array, Features, TrainingData, Votes
from fsla.data._features import FeatureBuilder
from fsla.data._images import thumbnail
from fsla.data._labels import Labels, understand_labels
from fsla.data._readers import read_table
from fsla.data._table import NamedColumns, Table, missing_rows
from fsla.data._trusted import TrustedFile

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = 8
"""Numbers of an array that are shown of a row."""
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
    given_labels: Array
    """The label of each row as written; of several labels the most frequent (in regression the mean, in the scale
    of the checked labels); None without."""
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
    missing: Literal["impute", "drop", "error"] = "impute",
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
        missing: what to do with missing cells of features: "impute", "drop" (rows with one train no model), "error".
        image_size: pixels a side that images are resized to.

    Returns:
        The data, with a table of what each column was taken for.

    Raises:
        ValueError: if the data cannot be used; the message says what to change.
    """
    for argument, value, allowed in (
        ("task", task, ("auto", "classification", "regression")),
        ("missing", missing, ("impute", "drop", "error")),
    ):
        if value not in allowed:
            raise ValueError(f"{argument} is {value!r}. Choose one of {some(list(map(repr, allowed)))}.")
    raw = read_table(source, label)
    texts = [text] if isinstance(text, str) else list(text or ())
    named = NamedColumns(label, checked, trusted_column, group, id, label_columns, annotator, image, texts, ignore)
    table = Table(raw, named)
    table.choose_features(features, texts, encoder)
    if missing == "error":
        table.refuse_missing()
    files = [] if trusted is None else [trusted] if not isinstance(trusted, list | tuple) else list(trusted)
    reviews = [TrustedFile(table, read_table(file, label)) for file in files]
    return _assemble(table, reviews, task, encoder, image_size, missing == "drop")


def _assemble(
    table: Table, reviews: list[TrustedFile], task: str, encoder: Any, image_size: int | None, drop_missing: bool
) -> LoadedData:
    notes = [*table.notes, *(note for review in reviews for note in review.notes)]
    label_counts = Counter(text for _, _, labels in table.label_parts for text in labels)
    checked = Counter(text for text in table.checked_texts if text)
    for review in reviews:
        checked.update(review.labels)
    labels = understand_labels(label_counts, checked, table, task)
    notes += labels.notes
    checked_value, is_random = _checked_values(table, reviews, labels, notes)
    votes, group_names = _votes(table, labels, notes)
    if drop_missing:
        votes = _without_missing(table, reviews, votes, checked_value, notes)
    checked_rows = np.flatnonzero(~np.isnan(checked_value))
    written_votes = votes
    if labels.task == "regression":
        votes = _on_one_scale(votes, checked_value, notes)
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
        given_labels=_given_texts(table, data, as_written=votes is written_votes),
        label=table.label,
        label_names=labels.names,
        _cells=_all_cells(table, reviews),
        _pictures=_all_pictures(table, reviews),
    )


def _checked_values(
    table: Table, reviews: list[TrustedFile], labels: Labels, notes: list[str]
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
    is_known = any(review.is_random is not None for review in reviews)
    return np.concatenate(parts), np.concatenate(random) if is_known else None


def _votes(table: Table, labels: Labels, notes: list[str]) -> tuple[Votes, Array]:
    rows = np.concatenate([items for items, _, _ in table.label_parts])
    groups = np.concatenate([groups for _, groups, _ in table.label_parts])
    values = labels.of(np.concatenate([texts for _, _, texts in table.label_parts]))
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


def _without_missing(table: Table, reviews: list[TrustedFile], votes: Votes, checked: Array, notes: list[str]) -> Votes:
    """Return the votes of rows without a missing cell; remove the checked labels of the others."""
    added = [missing_rows(r.typed, None if r.raw.x is None else r.raw.x[r.rows])[r.new] for r in reviews if len(r.new)]
    missing = np.concatenate([table.has_missing, *added])
    checked[missing] = np.nan
    if missing.any():
        notes.append(f"{int(missing.sum())} rows have missing cells: their labels are not used.")
    stays = ~missing[votes.row]
    return Votes(votes.row[stays], votes.group[stays], votes.label[stays])


def _on_one_scale(votes: Votes, checked: Array, notes: list[str]) -> Votes:
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
    table: Table, reviews: list[TrustedFile], encoder: Any, image_size: int | None
) -> tuple[Features, FeatureBuilder]:
    folder = None if encoder is None or not any(c.kind == "text" for c in table.columns) else str(encoder)
    if table.raw.x is not None:
        builder = FeatureBuilder(image_size=image_size)
        return builder.fit_transform(np.concatenate(_all_x(table, reviews))), builder
    import pandas as pd

    builder = FeatureBuilder(table.columns, encoder=folder, image_size=image_size)
    added = [review.typed.iloc[review.new] for review in reviews if len(review.new)]
    typed = pd.concat([table.typed, *added], ignore_index=True) if added else table.typed
    return builder.fit_typed(typed), builder


def _all_x(table: Table, reviews: list[TrustedFile]) -> list[Array]:
    """Return the arrays of features of the table and of rows that are added to it."""
    added = [review.raw.x[review.rows[review.new]] for review in reviews if review.raw.x is not None]
    return [*([] if table.raw.x is None else [table.raw.x]), *added]


def _say_coverage(data: TrainingData, table: Table, notes: list[str]) -> None:
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


def _given_texts(table: Table, data: TrainingData, as_written: bool) -> Array:
    texts = np.full(len(data.features), None, dtype=object)
    if as_written and not (table.annotator or table.vote_columns):
        texts[: len(table)] = table.first_given
        return texts
    for row, start, end in _runs(data.votes.row):
        values = data.votes.label[start:end]
        if data.classes is None:
            texts[row] = f"{values.mean():.6g}"
        else:
            texts[row] = data.classes[np.bincount(values).argmax()]
    return texts


def _runs(rows: Array) -> list[tuple[int, int, int]]:
    distinct, starts = np.unique(rows, return_index=True)
    return list(zip(distinct.tolist(), starts.tolist(), [*starts[1:].tolist(), len(rows)], strict=True))


def _duplicates(table: Table, reviews: list[TrustedFile], notes: list[str]) -> pd.DataFrame:
    """List rows with the features of an earlier row."""
    import pandas as pd

    first: dict[Any, int] = {}
    rows = []
    one_label = not (table.annotator or table.vote_columns)
    for row, key in enumerate(table.keys):
        same = first.setdefault(key, row)
        if same != row:
            a, b = (table.first_given[i] if one_label else None for i in (same, row))
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


def _all_cells(table: Table, reviews: list[TrustedFile]) -> pd.DataFrame:
    import pandas as pd

    if table.raw.x is not None:
        flat = [x.reshape(len(x), -1)[:, :_SHOWN] for x in _all_x(table, reviews)] if table.raw.x.ndim == 2 else []
        rows = len(table) + sum(len(review.new) for review in reviews)
        return pd.DataFrame(np.concatenate(flat)).add_prefix("x") if flat else pd.DataFrame(index=range(rows))
    names = [column.name for column in table.columns]
    added = [review.cells[names].iloc[review.new] for review in reviews if len(review.new)]
    return pd.concat([table.items[names], *added], ignore_index=True)


def _all_pictures(table: Table, reviews: list[TrustedFile]) -> list[Any] | None:
    if table.pictures is None:
        return None
    return [*table.pictures, *(review.pictures[i] for review in reviews if review.pictures for i in review.new)]
