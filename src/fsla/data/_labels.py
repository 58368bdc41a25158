"""Labels as written become classes or numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from fsla._storage._files import some
from fsla.data._columns import (
    is_missing_label,
    parse_number,
    parse_numbers,
)
from fsla.data._dataset import Array, Task
from fsla.data._table import MAX_CLASSES, Table

MANY_CLASSES = 20
"""Whole numbers with more different values than that are the target of a regression."""


@dataclass(frozen=True)
class Labels:
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


def understand_labels(label_counts: Counter[str], checked: Counter[str], table: Table, task: str) -> Labels:
    """Decide between classification and regression, and give each label its value."""
    notes = []
    counts = label_counts + checked
    missing = {text for text in counts if is_missing_label(text)}
    marked = sum(counts[text] for text in missing if text.strip())
    if marked:
        shown = some(sorted({text.strip() for text in missing if text.strip()}))
        notes.append(f"{marked} labels are written {shown}, which is taken as missing. Rename the class if it is one.")
    abstained = _abstained(label_counts, checked, table, missing)
    if abstained:
        number = sum(counts[text] for text in abstained)
        notes.append(f"{number} labels are {some(sorted({t.strip() for t in abstained}))}, which means no label.")
    written = [text for text in counts if text not in missing and text not in abstained]
    if not any(text in label_counts for text in written):
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
        numbers_given = np.unique([n for text, n in zip(written, numbers, strict=True) if text in label_counts])
        span = f"{len(numbers_given)} different values from {numbers_given[0]:g} to {numbers_given[-1]:g}"
        notes.append(
            f"The label is a number ({span}): regression. Set task='classification' if the numbers are classes."
        )
        values |= dict(zip(written, numbers.tolist(), strict=True))
        return Labels("regression", values, None, tuple(notes))
    names, codes, joined = _classes(stripped, weights, not stray.any())
    notes += joined
    values |= dict(zip(written, map(float, codes), strict=True))
    _check_classes(names, values, label_counts, checked, table, notes)
    return Labels("classification", values, names, tuple(notes))


def _abstained(label_counts: Counter[str], checked: Counter[str], table: Table, missing: set[str]) -> set[str]:
    """Return how rules write that they have no label for a row: "abstain", or -1 beside classes from 0."""
    if not table.vote_columns:
        return set()
    others = {t.strip() for t in label_counts if t not in missing} - {"-1"}
    counted = all(t.isdigit() for t in others) and "0" in others and "-1" not in {t.strip() for t in checked}
    return {t for t in label_counts if t.strip().lower() == "abstain" or (t.strip() == "-1" and counted)}


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
    names: Array, values: Mapping[str, float | None], label_counts: Counter[str], checked: Counter[str], table: Table,
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

    in_given, in_checked = classes_of(label_counts), classes_of(checked)
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
            notes.append(f"The label {name!r} occurs {times} and counts as a class. Correct it if it is {near[0]!r}.")
