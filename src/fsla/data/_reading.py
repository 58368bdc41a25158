"""Data from files: tables (CSV, Parquet, .npy), arrays (.npz), or a folder of class folders of images."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fsla.data._inputs import Array, check_spelling, listed

if TYPE_CHECKING:
    import pandas as pd

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
TABLES = (".csv", ".tsv", ".parquet", ".npy")
FEW = 20
"""Up to so many different texts a column is a category, and becomes a feature for each."""
PIXELS = 64 * 1024 * 1024
"""The largest image that is read."""


@dataclass(frozen=True)
class Columns:
    """Which columns mean what; the rest are features."""

    label: str = "label"
    id: str | None = None
    group: str | None = None
    trusted: str | None = None
    image: str | None = None
    features: tuple[str, ...] = ()
    size: int | None = None
    """Pixels a side that images are brought to."""


@dataclass
class Given:
    """Samples as they were read."""

    x: Array
    y: Array
    ids: Array
    groups: Array | None = None
    trusted: Array | None = None
    """Which samples are trusted, where a column says so."""
    table: pd.DataFrame | None = None
    """The rows as they were, of a table."""
    names: list[str] = field(default_factory=list)
    """Of the features."""
    columns: list[str] = field(default_factory=list)
    """Those of the table that the features were made of."""
    left_out: list[str] = field(default_factory=list)
    """Those that are neither features nor named for another role."""

    def __len__(self) -> int:
        return len(self.x)

    @property
    def features(self) -> Any:
        """x, with the names of its columns where it has any."""
        import pandas as pd

        return pd.DataFrame(self.x, columns=self.names) if self.names and self.x.ndim == 2 else self.x

    def rows(self, which: Array) -> Given:
        """Some of the samples."""
        return Given(
            self.x[which],
            self.y[which],
            self.ids[which],
            None if self.groups is None else self.groups[which],
            None,
            None if self.table is None else self.table[which].reset_index(drop=True),
            self.names,
            self.columns,
            self.left_out,
        )


def read(path: Path, columns: Columns, like: Given | None = None) -> Given:
    """Reads a file or folder; `like` has been read before, and has the features that are wanted."""
    if path.is_dir():
        return _checked(_folder(path, columns), path)
    if not path.exists():
        raise ValueError(f"{path} must be a file or a folder. There is none.")
    if path.suffix.lower() in TABLES:
        return _checked(_from_table(path, columns, like), path)
    if path.suffix.lower() == ".npz":
        return _checked(_arrays(path), path)
    raise ValueError(
        f"{path} must be a table ({', '.join(TABLES)}), an .npz file, or a folder with a folder of images for each "
        "class. Save a spreadsheet as CSV."
    )


def _from_table(path: Path, columns: Columns, like: Given | None) -> Given:
    table = _table(path, columns.label)
    if not len(table):
        raise ValueError(f"{path} must have at least one row. It has none.")
    roles = {"--label": columns.label, "--id": columns.id, "--group": columns.group}
    roles |= {"--trusted-column": columns.trusted, "--image": columns.image}
    optional = () if like is None else ("--group", "--id", "--trusted-column")
    for option, name in roles.items():
        if name is not None and name not in table.columns and option not in optional:
            near = get_close_matches(name, map(str, table.columns), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            if len(table.columns) == 1 and ";" in str(table.columns[0]):
                hint = " Its columns seem to be separated by semicolons: separate them by commas."
            raise ValueError(
                f"{path} must have the column {name!r}, which {option} names. It has {listed(table.columns, 40)}.{hint}"
            )
    present = {option: name for option, name in roles.items() if name is not None and name in table.columns}
    if columns.image is not None:
        x = _images([path.parent / str(name) for name in table[columns.image]], columns.size)
        names: list[str] = []
        used: list[str] = []
    else:
        wanted = columns.features if like is None else like.columns
        x, names, used = _features(table, path, set(present.values()), wanted, like)
    ids = table[columns.id].to_numpy() if "--id" in present else np.arange(len(table))
    groups = _complete(table[columns.group], path, "group").astype(str).to_numpy() if "--group" in present else None
    trusted = _truths(table[columns.trusted], path) if "--trusted-column" in present else None
    left = [str(name) for name in table.columns if name not in used and name not in present.values()]
    return Given(x, _labels(table[columns.label], path), ids, groups, trusted, table, names, used, left)


def _table(path: Path, label: str) -> pd.DataFrame:
    import pandas as pd

    try:
        if path.suffix.lower() == ".parquet":
            return pd.read_parquet(path)
        if path.suffix.lower() == ".npy":
            return _rows_of(np.load(path, allow_pickle=False), label)
        return pd.read_csv(path, sep="\t" if path.suffix.lower() == ".tsv" else ",")
    except ImportError as error:
        raise ValueError(f"{path} needs pyarrow to be read. Install it: pip install 'fsla[parquet]'.") from error
    except (ValueError, OSError, EOFError) as error:  # pandas' parser errors are ValueErrors, pyarrow's too
        if isinstance(error, OSError) and error.strerror is not None:
            raise
        raise ValueError(f"{path} must be a table that can be read. It cannot: {str(error).splitlines()[0]}") from error


def _rows_of(array: Array, label: str) -> pd.DataFrame:
    """A structured array by its names; a plain one as features x0, x1 … with the label in the last column."""
    import pandas as pd

    if array.dtype.names is not None:
        return pd.DataFrame(array)
    if array.ndim != 2 or array.shape[1] < 2:
        raise ValueError(
            f"an array must have a row for each sample, the label in its last column. It has the shape {array.shape}."
        )
    table = pd.DataFrame(array, columns=[*(f"x{i}" for i in range(array.shape[1] - 1)), label])
    if array.dtype.kind == "f" and (np.mod(array[:, -1], 1) == 0).all():
        table[label] = table[label].astype(np.int64)
    return table


def _features(
    table: pd.DataFrame, path: Path, roles: set[str], wanted: Sequence[str], like: Given | None
) -> tuple[Array, list[str], list[str]]:
    """Numbers as they are, a few different texts as a feature each; and the columns that they came from."""
    import pandas as pd

    missing = [name for name in wanted if name not in table.columns]
    if missing:
        what = "the columns that --features names" if like is None else "the features of the data"
        hint = (
            ""
            if like is None
            else " What only the data has can be named with --group or --id; --features leaves it out."
        )
        raise ValueError(f"{path} must have {what}. It lacks {listed(missing)}.{hint}")
    chosen = list(wanted) or [name for name in table.columns if name not in roles]
    parts = []
    used = []
    for name in chosen:
        column = table[name]
        if pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column):
            parts.append(column.astype(np.float32).rename(name))
        elif like is not None or column.nunique() <= FEW:
            parts.append(pd.get_dummies(column.astype(str), prefix=name, dtype=np.float32))
        elif not wanted:
            continue
        else:
            raise ValueError(
                f"The column {name!r} of {path} must hold numbers, or at most {FEW} different texts. It has "
                f"{column.nunique()}: turn text into embeddings first."
            )
        used.append(name)
    if not parts:
        raise ValueError(f"{path} must have at least one column of numbers besides {listed(sorted(roles))}.")
    frame = pd.concat(parts, axis=1)
    if like is not None:
        check_spelling(list(frame.columns), like.names, "features")
        frame = frame.reindex(columns=like.names, fill_value=0.0)
    values = frame.to_numpy(dtype=np.float32)
    bad = ~np.isfinite(values)
    if bad.any():
        worst = frame.columns[bad.any(axis=0)]
        rows = int(bad.any(axis=1).sum())
        raise ValueError(
            f"The features of {path} must be finite numbers. {rows} rows have missing or infinite ones, in "
            f"{listed(worst)}: fill them, drop the rows, or name the columns to use with --features."
        )
    return values, list(frame.columns), used


def _labels(column: pd.Series, path: Path) -> Array:
    values: Array = _complete(column, path, "label").to_numpy()
    return values.astype(str) if values.dtype.kind not in "iufb" else values


def _complete(column: pd.Series, path: Path, what: str) -> pd.Series:
    missing = np.flatnonzero(column.isna())
    if len(missing):
        raise ValueError(
            f"Every row of {path} must have a {what}. {len(missing)} of {len(column)} have none in {column.name!r}, "
            f"the first of them row {missing[0] + 1}: fill them, or drop these rows."
        )
    return column


def _truths(column: pd.Series, path: Path) -> Array:
    truths = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "": False, "nan": False}
    found = column.astype(str).str.strip().str.lower().str.removesuffix(".0").map(truths)
    if found.isna().any():
        example = column[found.isna()].iloc[0]
        raise ValueError(f"The column {column.name!r} of {path} must hold true or false. It holds {example!r}.")
    truth: Array = found.to_numpy(dtype=bool)
    return truth


def _arrays(path: Path) -> Given:
    try:
        with np.load(path, allow_pickle=False) as held:
            found = {name: held[name] for name in held.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} must be an .npz file of plain arrays. It cannot be read: {error}") from error
    lacking = [name for name in ("X", "y") if name not in found]
    if lacking:
        raise ValueError(f"{path} must hold the arrays X and y. It holds: {listed(found)}.")
    x, y = found["X"], found["y"]
    for name in ("y", "groups", "ids", "trusted"):
        if name in found and len(found[name]) != len(x):
            count = len(found[name])
            raise ValueError(f"{name} in {path} must have a value for each of the {len(x)} samples. Got {count}.")
    if not np.issubdtype(x.dtype, np.number) or not np.isfinite(x).all():
        raise ValueError(f"X in {path} must hold finite numbers. It holds others.")
    groups = found["groups"].astype(str) if "groups" in found else None
    trusted = found["trusted"].astype(bool) if "trusted" in found else None
    return Given(x.astype(np.float32), y, found.get("ids", np.arange(len(x))), groups, trusted)


def _folder(path: Path, columns: Columns) -> Given:
    classes = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    files = [
        (file, folder.name) for folder in classes for file in sorted(folder.iterdir()) if file.suffix.lower() in IMAGES
    ]
    if not files:
        raise ValueError(
            f"{path} must have a folder of images for each class. It has {len(classes)} folders, no images."
        )
    x = _images([file for file, _ in files], columns.size)
    ids = np.array([str(file.relative_to(path)) for file, _ in files])
    return Given(x, np.array([name for _, name in files]), ids)


def _images(paths: Sequence[Path], size: int | None) -> Array:
    from PIL import Image, UnidentifiedImageError

    found = []
    for path in paths:
        try:
            with Image.open(path) as image:
                if image.width * image.height > PIXELS:
                    raise ValueError(
                        f"{path} must have at most {PIXELS} pixels. It has {image.width} x {image.height}."
                    )
                grey = image.mode in ("1", "L", "I;16", "I", "F", "LA")
                plain = image.convert("L" if grey else "RGB")
                if size is not None:
                    plain = plain.resize((size, size))
                found.append(np.asarray(plain, dtype=np.uint8))
        except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(f"{path} must be an image that can be read. It cannot: {error}") from error
    if any(array.ndim == 3 for array in found):
        found = [array if array.ndim == 3 else np.repeat(array[:, :, None], 3, axis=2) for array in found]
    shapes = {array.shape[:2] for array in found}
    if len(shapes) > 1:
        (h, w), (i, j) = sorted(shapes)[:2]
        raise ValueError(
            f"All images must have one size. Got {w} x {h} and {j} x {i}, for example: bring them to one with --size."
        )
    stacked = np.stack(found).astype(np.float32) / 255
    return stacked[:, None] if stacked.ndim == 3 else stacked.transpose(0, 3, 1, 2)


def _checked(given: Given, path: Path) -> Given:
    names, counts = np.unique(given.ids.astype(str), return_counts=True)
    if counts.max() > 1:
        raise ValueError(
            f"Every row of {path} must have an id of its own. '{names[counts.argmax()]}' occurs {counts.max()} times."
        )
    return given
