"""Group weights of data larger than memory: one pass over the rows, then the closed form.

The closed form needs sums over the rows of each group alone. Sums of parts of the data add up, so a folder of Parquet
files is read once, block by block, and a `dask.dataframe` is reduced as a tree on its cluster.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fsla._extras import install_hint, require
from fsla._storage._files import FileError, open_regular
from fsla.data._dataset import Array, Task
from fsla.data._group_weights import (
    MAX_ENTRIES,
    GroupStatistics,
    bootstrap_group_weights,
    encode_targets,
    fit_group_weights,
)

if TYPE_CHECKING:
    import pandas as pd

BLOCK_ROWS = 2**17
"""Rows that are summed at a time: 64 columns of them are 64 MB."""
SPLIT_EVERY = 8
"""Sums of a `dask.dataframe` that one task adds up."""
MAX_CLASSES = 20
"""Whole numbers with more values than this are a quantity, not classes."""
INTERVAL = (2.5, 97.5)


@dataclass(frozen=True, eq=False)
class Columns:
    """What the pass reads, and how it shifts and scales the features so that sums of squares stay exact.

    Attributes:
        features: Names of the feature columns.
        label: Name of the label column.
        group: Name of the group column.
        task: "classification" or "regression".
        shift: One value a feature, subtracted. Missing cells take it.
        scale: One value a feature, divided by.
        label_shift: The same for the target in regression.
        label_scale: The same for the target in regression.
    """

    features: tuple[str, ...]
    label: str
    group: str
    task: Task
    shift: Array
    scale: Array
    label_shift: float = 0.0
    label_scale: float = 1.0

    @property
    def names(self) -> list[str]:
        """Return all columns that are read."""
        return [*self.features, self.label, self.group]


@dataclass(frozen=True, eq=False)
class Block:
    """Some rows, as columns.

    Attributes:
        values: One array a feature, of any numeric type.
        label: Codes of `label_names`, or numbers in regression. -1 or NaN where it is missing.
        label_names: Empty in regression.
        group: Codes of `group_names`, -1 where it is missing.
        group_names: Groups as text.
    """

    values: Sequence[Array]
    label: Array
    label_names: Sequence[str]
    group: Array
    group_names: Sequence[str]


class GroupSums:
    """Sums over the rows of each group: z z', z for each label, and in regression z y.

    A row is z = (features, 1), and (features, 1, target) in regression.
    """

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        size = len(columns.features) + (1 if columns.task == "classification" else 2)
        self.groups: dict[str, int] = {}
        self.labels: dict[str, int] = {}
        self.gram = np.zeros((0, size, size))
        self.by_label = np.zeros((0, 0, size))
        self.skipped = 0
        """Rows without a label or a group."""
        self.missing = np.zeros(len(columns.features), dtype=np.int64)
        """Empty or infinite cells of each feature."""

    def add(self, block: Block) -> Self:
        """Add the rows of a block."""
        columns = self.columns
        size, rows = self.gram.shape[1], len(block.group)
        classes = columns.task == "classification"
        known = block.group >= 0
        known &= block.label >= 0 if classes else np.isfinite(block.label)
        self.skipped += rows - int(known.sum())
        if not known.any():
            return self
        group_of = self._codes(self.groups, block.group_names)
        label_of = self._codes(self.labels, block.label_names)
        self._grow()
        local = block.group[known]
        if classes:
            local = local * max(1, len(block.label_names)) + block.label[known]
        order = np.argsort(_narrow(local), kind="stable")
        rows_in_order = np.flatnonzero(known)[order]
        z = np.empty((size, len(order)))
        for j, values in enumerate(block.values):
            column = z[j]
            column[:] = values[rows_in_order]
            column -= columns.shift[j]
            column *= 1 / columns.scale[j]
            if not np.isfinite(column.sum()):  # One pass, where a mask of each column takes three.
                empty = ~np.isfinite(column)
                self.missing[j] += int(empty.sum())
                column[empty] = 0
        z[len(columns.features)] = 1
        if not classes:
            z[-1] = (block.label[rows_in_order] - columns.label_shift) / columns.label_scale
        group = block.group[rows_in_order]
        bounds = _starts(group)
        for start, stop in zip(bounds, [*bounds[1:], len(group)], strict=True):
            part = z[:, start:stop]
            self.gram[group_of[group[start]]] += part @ part.T
        if classes:
            starts = _starts(local[order])
            sums = np.add.reduceat(z, starts, axis=1).T
            first = rows_in_order[starts]
            self.by_label[group_of[block.group[first]], label_of[block.label[first]]] += sums
        return self

    def merge(self, other: GroupSums) -> Self:
        """Add the sums of another part of the data."""
        groups = self._codes(self.groups, list(other.groups))
        labels = self._codes(self.labels, list(other.labels))
        self._grow()
        self.gram[groups] += other.gram
        self.by_label[np.ix_(groups, labels)] += other.by_label
        self.skipped += other.skipped
        self.missing += other.missing
        return self

    def _codes(self, known: dict[str, int], names: Sequence[str]) -> Array:
        return np.array([known.setdefault(name, len(known)) for name in names], dtype=np.intp)

    def _grow(self) -> None:
        """Make room for all groups and labels seen so far."""
        groups, size, labels = len(self.groups), self.gram.shape[1], len(self.labels)
        if groups * size * size > MAX_ENTRIES:
            raise ValueError(
                f"{groups} groups with {size} columns need {groups * size * size * 8 / 2**30:.1f} GB of sums. Name "
                "fewer features= or merge small groups."
            )
        if groups > len(self.gram):
            self.gram = np.concatenate([self.gram, np.zeros((groups - len(self.gram), size, size))])
        if self.by_label.shape[:2] != (groups, labels):
            grown = np.zeros((groups, labels, size))
            grown[: self.by_label.shape[0], : self.by_label.shape[1]] = self.by_label
            self.by_label = grown

    def standardised(self, classes: Sequence[str]) -> tuple[GroupStatistics, Array]:
        """Return statistics of standardised features and a constant, and the matrix that makes them of z.

        Groups are in the order of their names. A feature that is the same in all rows becomes 0.

        Args:
            classes: Names of all classes, empty in regression.
        """
        num = len(self.columns.features)
        order = [self.groups[name] for name in sorted(self.groups)]
        gram = self.gram[order]
        total = gram.sum(0)
        count = total[num, num]
        mean = total[num, :num] / count
        spread = np.sqrt(np.maximum(np.diag(total)[:num] / count - mean**2, 0))
        used = spread > 1e-9
        matrix = np.zeros((num + 1, num + 1))
        factor = np.where(used, 1 / np.where(used, spread, 1) / np.sqrt(max(1, used.sum())), 0.0)
        matrix[range(num), range(num)] = factor
        matrix[num, :num] = -mean * factor
        matrix[num, num] = 0.5
        inner = gram[:, : num + 1, : num + 1]
        counts = inner[:, num, num]
        if classes:
            target = np.zeros((len(order), num + 1, len(classes)))
            for name, code in self.labels.items():
                target[:, :, classes.index(name)] = self.by_label[order, code]
            target -= inner[:, :, num, None] / len(classes)
        else:
            target = gram[:, : num + 1, num + 1 :]
        return GroupStatistics(matrix.T @ inner @ matrix, matrix.T @ target, counts), matrix


def _narrow(codes: Array) -> Array:
    """Return codes of the smallest type, as those of 16 bits are sorted in linear time."""
    return codes.astype(np.uint16) if codes.max(initial=0) < 2**16 else codes


def _starts(ordered: Array) -> Array:
    """Return where each run of equal codes begins, in at least one row."""
    return np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])


# --- Blocks of tables ------------------------------------------------------------------------------------------------


def block_of_frame(frame: pd.DataFrame, columns: Columns) -> Block:
    """Return the rows of a pandas DataFrame."""
    import pandas as pd

    values = [frame[name].to_numpy(dtype=np.float64, na_value=np.nan) for name in columns.features]
    group, group_names = pd.factorize(frame[columns.group])
    names = [str(name) for name in group_names]
    if columns.task == "regression":
        label = frame[columns.label].to_numpy(dtype=np.float64, na_value=np.nan)
        return Block(values, label, (), group, names)
    label, label_names = pd.factorize(frame[columns.label])
    return Block(values, label, [str(name) for name in label_names], group, names)


def block_of_table(table: Any, columns: Columns) -> Block:
    """Return the rows of a `pyarrow.Table`."""
    values = [table.column(name).to_numpy() for name in columns.features]
    group, names = _encode(table.column(columns.group))
    if columns.task == "regression":
        label = table.column(columns.label).to_numpy().astype(np.float64)
        return Block(values, label, (), group, names)
    label, label_names = _encode(table.column(columns.label))
    return Block(values, label, label_names, group, names)


def _encode(column: Any) -> tuple[Array, list[str]]:
    """Return codes, -1 where a cell is missing, and the text of each."""
    encoded = column.combine_chunks()
    if not hasattr(encoded, "indices"):
        encoded = encoded.dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return codes, [str(value) for value in encoded.dictionary.to_pylist()]


def read_blocks(dataset: Any, columns: Columns) -> Iterator[Block]:
    """Yield the rows of a `pyarrow.dataset.Dataset`, in blocks; small row groups are joined."""
    import pyarrow as pa

    batches: list[Any] = []
    rows = 0
    scanner = dataset.scanner(columns=columns.names, batch_size=BLOCK_ROWS, batch_readahead=2, fragment_readahead=1)
    for batch in scanner.to_batches():
        batches.append(batch)
        rows += batch.num_rows
        if rows >= BLOCK_ROWS:
            yield block_of_table(pa.Table.from_batches(batches), columns)
            batches, rows = [], 0
    if rows:
        yield block_of_table(pa.Table.from_batches(batches), columns)


def open_dataset(path: Path) -> Any:
    """Return a Parquet file, or a folder of them with partitions in names such as `group=A`, as a dataset."""
    if not path.exists():
        raise FileNotFoundError(f"Cannot read {path}: no such file or folder.")
    _need("parquet")
    import pyarrow.dataset as parquet

    return parquet.dataset(path, format="parquet", partitioning="hive")


def _need(extra: str) -> None:
    """Raise ImportError with the command that installs an extra, if it is missing."""
    try:
        require(extra)
    except ModuleNotFoundError as error:
        raise ImportError(f"Cannot weigh these groups. {install_hint(error)}") from error


# --- One pass --------------------------------------------------------------------------------------------------------


def sum_frame(frame: pd.DataFrame, columns: Columns) -> GroupSums:
    """Return the sums of a pandas DataFrame."""
    sums = GroupSums(columns)
    for start in range(0, len(frame), BLOCK_ROWS):
        sums.add(block_of_frame(frame.iloc[start : start + BLOCK_ROWS], columns))
    return sums


def sum_dataset(dataset: Any, columns: Columns) -> GroupSums:
    """Return the sums of a `pyarrow.dataset.Dataset`."""
    sums = GroupSums(columns)
    for block in read_blocks(dataset, columns):
        sums.add(block)
    return sums


def merge_sums(parts: Sequence[GroupSums]) -> GroupSums:
    """Return the sums of several parts of the data. The parts stay as they are."""
    total = GroupSums(parts[0].columns)
    for part in parts:
        total.merge(part)
    return total


def sum_dask(frame: Any, columns: Columns) -> GroupSums:
    """Return the sums of a `dask.dataframe`, as a tree reduction on its cluster."""
    _need("dask")
    from dask.base import compute
    from dask.delayed import delayed

    one, several = delayed(sum_frame), delayed(merge_sums)
    parts = [one(partition, columns) for partition in frame[columns.names].to_delayed()]
    while len(parts) > 1:
        parts = [several(parts[start : start + SPLIT_EVERY]) for start in range(0, len(parts), SPLIT_EVERY)]
    result: GroupSums = compute(parts[0])[0]  # type: ignore[no-untyped-call]
    return result


def is_dask(source: object) -> bool:
    """Return whether something is a `dask.dataframe`, without importing dask."""
    return type(source).__module__.split(".")[0] in ("dask", "dask_expr") and hasattr(source, "to_delayed")


# --- Trusted rows ----------------------------------------------------------------------------------------------------


def read_trusted(trusted: str | Path | pd.DataFrame) -> pd.DataFrame:
    """Return the trusted rows: a DataFrame, or a Parquet or CSV file."""
    import pandas as pd

    if isinstance(trusted, pd.DataFrame):
        return trusted
    path = Path(trusted)
    if path.suffix.lower() in (".parquet", ".pq"):
        _need("parquet")
        import pyarrow.parquet as parquet

        read: Any = lambda file: parquet.read_table(file).to_pandas()  # noqa: E731 (one of two readers)
    else:
        read = pd.read_csv
    try:
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            table: pd.DataFrame = read(file)
    except FileError:
        raise
    except (ValueError, OSError) as error:
        raise ValueError(f"Cannot read {path}: {error}.") from error
    return table


def choose_columns(
    trusted: pd.DataFrame, source: Sequence[str], label: str, group: str, features: Sequence[str] | None, task: str
) -> Columns:
    """Return what to read, with the shift and scale of the trusted rows.

    Raises:
        ValueError: A column is missing, is named twice or is not numeric.
    """
    import pandas as pd
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    if label == group:
        raise ValueError(f"label= and group= are both {label!r}. Name two columns.")
    if features is None:
        numeric = [name for name in trusted if is_numeric_dtype(trusted[name]) or is_bool_dtype(trusted[name])]
        features = [name for name in numeric if name in source and name not in (label, group)]
        if not features:
            raise ValueError("No numeric column is in both the data and trusted=. Name features=.")
    for name in dict.fromkeys((*features, label)):
        if name not in trusted:
            raise ValueError(f"trusted= has no column {name!r}. It has {_listed(trusted.columns)}.")
    for name in dict.fromkeys((*features, label, group)):
        if name not in source:
            raise ValueError(f"The data has no column {name!r}. It has {_listed(source)}.")
    both = [name for name in features if name in (label, group)]
    if both:
        raise ValueError(f"features= contains the label or group column {both[0]!r}. Leave it out.")
    values = np.empty((len(trusted), len(features)))
    for j, name in enumerate(features):
        column = trusted[name]
        if not (is_numeric_dtype(column) or is_bool_dtype(column)):
            raise ValueError(f"The feature {name!r} of trusted= is not numeric. Encode it, or leave it out.")
        values[:, j] = column.to_numpy(dtype=np.float64, na_value=np.nan)
    known = ~np.isnan(values)
    count = np.maximum(known.sum(0), 1)
    shift = np.where(known, values, 0).sum(0) / count
    spread = np.sqrt(np.where(known, (values - shift) ** 2, 0).sum(0) / count)
    chosen: Task
    if task == "auto":
        labels = trusted[label].dropna()
        quantity = is_numeric_dtype(labels) and not is_bool_dtype(labels)
        if quantity and pd.api.types.is_integer_dtype(labels):
            quantity = labels.nunique() > MAX_CLASSES
        chosen = "regression" if quantity else "classification"
    elif task in ("classification", "regression"):
        chosen = "classification" if task == "classification" else "regression"
    else:
        raise ValueError(f"task must be 'auto', 'classification' or 'regression'. Got {task!r}.")
    label_shift, label_scale = 0.0, 1.0
    if chosen == "regression":
        if not is_numeric_dtype(trusted[label]):
            raise ValueError(f"The label {label!r} of trusted= is not numeric. Use task='classification'.")
        target = trusted[label].to_numpy(dtype=np.float64, na_value=np.nan)
        target = target[np.isfinite(target)]
        if len(target):
            label_shift, label_scale = float(target.mean()), float(target.std()) or 1.0
    scale = np.where(spread > 0, spread, 1.0)
    return Columns(tuple(features), label, group, chosen, shift, scale, label_shift, label_scale)


def _listed(names: Any) -> str:
    names = [str(name) for name in names]
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


# --- The public function ---------------------------------------------------------------------------------------------


def weigh_groups(
    source: Any,
    *,
    label: str,
    group: str,
    trusted: str | Path | pd.DataFrame,
    features: Sequence[str] | None = None,
    task: str = "auto",
    draws: int = 40,
    seed: int = 0,
) -> pd.DataFrame:
    """Return how much a row of each group should count, for data of any size, in one pass.

    Weights minimise the squared error of a ridge regression on trusted rows. The data is read once, and memory holds
    one square matrix for each group. Missing or infinite cells of a feature take its
    mean over the trusted rows.

    Args:
        source: A folder of Parquet files (partitions such as `group=A` are read), a Parquet file, a
            `dask.dataframe.DataFrame`, which is reduced on its cluster, or a pandas DataFrame.
        label: Column of labels, in the data and in the trusted rows.
        group: Column of groups, in the data.
        trusted: Rows whose label was checked, as a DataFrame or as a Parquet or CSV file. They must not be in the data.
        features: Numeric columns. Default: all numeric columns of the trusted rows that the data has too.
        task: "classification", "regression" or "auto": real numbers are a quantity, all other labels are classes.
        draws: Bootstrap draws of the trusted rows, for the intervals.
        seed: Random seed.

    Returns:
        group, n_samples, weight, weight_low, weight_high (95 % interval), in the order of the names. `attrs` has
        skipped_rows (without a label or group) and missing_cells (for each feature that has any).

    Raises:
        ValueError: A column is missing, not numeric, or too few rows are trusted.
        ImportError: pyarrow or dask is not installed.

    Examples:
        >>> import numpy as np, pandas as pd
        >>> rng = np.random.default_rng(0)
        >>> rows = pd.DataFrame({"a": rng.normal(size=400), "b": rng.normal(size=400)})
        >>> right = rows.assign(y=rows.a - rows.b)
        >>> data = right[100:].assign(source=["good", "bad", "good"] * 100)
        >>> data.loc[data.source == "bad", "y"] = rng.normal(size=100)
        >>> weights = fsla.data.weigh_groups(data, label="y", group="source", trusted=right[:100])
        >>> weights.set_index("group").weight.round(1).to_dict()
        {'bad': 0.1, 'good': 0.5}
    """
    import pandas as pd

    checked = read_trusted(trusted)
    sum_all: Callable[[Columns], GroupSums]
    if isinstance(source, pd.DataFrame):
        names, sum_all = list(source.columns), partial(sum_frame, source)
    elif is_dask(source):
        names, sum_all = list(source.columns), partial(sum_dask, source)
    else:
        dataset = open_dataset(Path(source))
        names, sum_all = list(dataset.schema.names), partial(sum_dataset, dataset)
    columns = choose_columns(checked, names, label, group, features, task)
    rows = block_of_frame(checked.assign(**{group: "trusted"}), columns)
    known = rows.label >= 0 if columns.task == "classification" else np.isfinite(rows.label)
    if known.sum() < 10:
        raise ValueError(f"Only {known.sum()} trusted rows have a label. Check at least 10; a hundred are better.")
    sums = sum_all(columns)
    if not sums.groups:
        raise ValueError("No row of the data has both a label and a group.")
    classes = sorted({*sums.labels, *rows.label_names}) if columns.task == "classification" else []
    if classes and not set(sums.labels) & set(rows.label_names):
        raise ValueError(
            f"No label of the data is among the trusted ones. The data has {_listed(sums.labels)}; trusted= has "
            f"{_listed(rows.label_names)}."
        )
    statistics, matrix = sums.standardised(classes)
    z = np.column_stack([(np.stack(rows.values, 1) - columns.shift) / columns.scale, np.ones(len(checked))])[known]
    z[~np.isfinite(z)] = 0
    labels = (rows.label[known] - columns.label_shift) / columns.label_scale
    if classes:
        labels = np.array([classes.index(name) for name in rows.label_names])[rows.label[known]]
    target = encode_targets(labels, len(classes))
    fit = fit_group_weights(statistics, z @ matrix, target, seed=seed)
    bootstrap = bootstrap_group_weights(statistics, z @ matrix, target, fit, draws=draws, seed=seed)
    low, high = np.percentile(bootstrap, INTERVAL, axis=0)
    result = pd.DataFrame(
        {
            "group": sorted(sums.groups),
            "n_samples": statistics.count.round().astype(np.int64),
            "weight": fit.weight,
            "weight_low": np.minimum(low, fit.weight),
            "weight_high": np.maximum(high, fit.weight),
        }
    )
    result.attrs["skipped_rows"] = sums.skipped
    result.attrs["missing_cells"] = {
        name: int(number) for name, number in zip(columns.features, sums.missing, strict=True) if number
    }
    return result
