"""Features from what users have: arrays, tables, texts and images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin

from fsla._storage._files import some
from fsla._storage._json_values import among, each, items, number, record, row, text
from fsla.data import _text
from fsla.data._arrays import stored_array
from fsla.data._columns import (
    DATE_FORMATS,
    FEATURE_KINDS,
    FEW_VALUES,
    MAX_LEVELS,
    TOKENS,
    Column,
    describe_column,
    factorize,
    parse_dates,
    parse_numbers,
)
from fsla.data._dataset import Array, Features
from fsla.data._images import ImageForm, image_form, load_images, pixel_features
from fsla.data._text import TextVectors

if TYPE_CHECKING:
    import pandas as pd

    from fsla.data._encoder import SentenceEncoder

CLIP = 6.0
"""Standard deviations at which dense features are cut off."""
WIDE = 1024
"""More dense columns of a table than that are reduced to `REDUCED` of them."""
REDUCED = 256
CATEGORY_WEIGHT = 8
"""A category with many levels counts as much as so many numbers."""
CONSTANT = 0.5
"""The last dense column."""
_LARGE = 1e100
"""Numbers beyond this overflow when they are squared."""
_SCHEMA = record(
    form=among("table", "array", "images"),
    columns=items(
        record(
            name=text,
            kind=among(*FEATURE_KINDS),
            note=text,
            decimal=among(".", ","),
            date_format=among("", *DATE_FORMATS),
            levels=number(int, 0),
            as_category=among(True, False),
        )
    ),
    few=items(items(number(float))),
    levels=items(items(text)),
    texts=each(_text.SCHEMA),
    embedded=each(row(text, text)),
    image=items(number(int, 1)),
    image_size=items(number(int, 1)),
    pixel_range=row(number(float), number(float)),
)


class FeatureBuilder:
    """Turn rows into features; what is learned from the training rows serves new rows too.

    Args:
        columns: what the columns of a table are. By default the builder finds that out from the rows.
        encoder: local folder of a sentence-transformers model for text; by default TF-IDF with SVD.
        image_size: pixels a side that images are resized to.

    Examples:
        >>> import pandas as pd
        >>> from fsla.data._features import FeatureBuilder
        >>> rows = pd.DataFrame({"age": ["31", "", "58"], "city": ["Rome", "Oslo", "Rome"]})
        >>> builder = FeatureBuilder().fit(rows)
        >>> builder.transform(rows).numeric.tolist()
        [[31.0, 0.0], [nan, 1.0], [58.0, 0.0]]
    """

    def __init__(
        self, columns: Sequence[Column] | None = None, *, encoder: str | None = None, image_size: int | None = None
    ) -> None:
        self._chosen = columns
        self.columns: tuple[Column, ...] = ()
        self.encoder = encoder
        self.image_size = image_size
        self._form = "table"
        self._image: ImageForm | None = None
        self._pixel_range = (0.0, 1.0)

    # Learn

    def fit(self, rows: Any) -> Self:
        """Learn scales, categories, terms and sizes from the training rows; labels are not looked at."""
        self.fit_transform(rows)
        return self

    def fit_transform(self, rows: Any) -> Features:
        """Learn from the training rows and return their features."""
        rows = _plain(rows)
        self._form = "table"
        if isinstance(rows, np.ndarray) and rows.ndim == 4:
            self._form = "images"
            self._pixel_range = _pixel_range(rows)
            self.columns = (Column("image", "image"),)
            size = self.image_size
            height, width, channels = _channels_last(rows).shape[1:]
            self._image = ImageForm(size or height, size or width, channels)
        elif isinstance(rows, np.ndarray) and rows.ndim == 2 and rows.dtype.kind in "biuf":
            self._form = "array"
            self.columns = tuple(Column(f"x{i}", "number") for i in range(rows.shape[1]))
        else:
            frame = self._framed(rows)
            self.columns = tuple(self._described(frame) if self._chosen is None else self._chosen)
            return self.fit_typed(typed_frame(frame, self.columns))
        return self._fit(rows)

    def fit_typed(self, typed: pd.DataFrame) -> Features:
        """Learn from rows that `typed_frame` has converted for the columns passed to the builder."""
        self.columns = tuple(self._chosen or self.columns)
        images = self._names("image")
        self._image = image_form(list(typed[images[0]]), self.image_size) if images else None
        return self._fit(typed)

    def _fit(self, rows: Any) -> Features:
        if not self.columns:
            raise ValueError("No column is left as a feature. Name the columns to use with features=.")
        self._numbers = _Numbers(tuple(column.name for column in self.columns if column.as_category))
        self._categories = _Categories()
        self._texts = {name: self._text_block() for name in self._names("text")}
        if self._form == "table":
            return self._typed_features(rows, fit=True)
        return self._array_features(rows, fit=True)

    def _described(self, rows: pd.DataFrame) -> list[Column]:
        columns = []
        for name in rows.columns:
            column = describe_column(name, rows[name])
            numeric = getattr(rows[name].dtype, "kind", "O") in "iufb"
            if numeric:  # whoever passes numbers means them as features
                column = Column(name, "number", levels=column.levels)
            if column.kind in FEATURE_KINDS:
                columns.append(column)
        return columns

    def _names(self, *kinds: str) -> list[str]:
        return [column.name for column in self.columns if column.kind in kinds]

    def _text_block(self) -> _Texts:
        if self.encoder is None:
            return _Texts(TextVectors())
        return _Texts(_load_encoder(self.encoder))

    # Apply

    def transform(self, rows: Any) -> Features:
        """Return the features of rows.

        Args:
            rows: a DataFrame with the raw columns (others are ignored), or an array as in `fit`.

        Raises:
            ValueError: if a column is missing, or the array has another shape.
        """
        rows = _plain(rows)
        if self._form != "table":
            return self._array_features(rows)
        frame = self._framed(rows)
        lacking = [column.name for column in self.columns if column.name not in frame]
        if lacking:
            raise ValueError(f"The rows lack the columns {some(lacking)}, which the features are made of.")
        return self._typed_features(typed_frame(frame, self.columns))

    def _array_features(self, rows: Any, fit: bool = False) -> Features:
        if self._form == "images":
            return self._finish([], None, self._array_images(rows), rows, fit)
        values = rows.to_numpy() if hasattr(rows, "to_numpy") else rows
        if np.ndim(values) != 2 or np.shape(values)[1] != len(self.columns):
            raise ValueError(f"The rows have shape {np.shape(values)}, expected {len(self.columns)} columns.")
        values = np.asarray(values, dtype=np.float64)
        table, numeric = self._tables(_named(values, [c.name for c in self.columns]), fit)
        return self._finish([table], numeric, None, rows, fit)

    def _typed_features(self, typed: pd.DataFrame, fit: bool = False) -> Features:
        table, numeric = self._tables(typed, fit)
        parts = [table] if table.shape[1] else []
        for name, block in self._texts.items():
            vectors = block.fit_transform(typed[name]) if fit else block.transform(typed[name])
            parts.append(vectors)
            if numeric.shape[1]:  # a table with text: trees see the leading directions
                numeric = np.c_[numeric, vectors[:, : _text.FOR_TREES]]
        images = None
        if self._image is not None:
            images = load_images(list(typed[self._names("image")[0]]), self._image)
        return self._finish(parts, numeric if numeric.shape[1] else None, images, typed, fit)

    def _tables(self, typed: pd.DataFrame, fit: bool) -> tuple[Array, Array]:
        """Return dense and numeric features of numbers and categories."""
        categories = self._names("category")
        other_kinds = {*categories, *self._names("text", "image")}
        others = [name for name in typed.columns if name not in other_kinds]
        if not categories and not others:
            return np.zeros((len(typed), 0)), np.zeros((len(typed), 0))
        matrix = self._preprocess(typed, others, categories, fit)
        blocks = [self._numbers] * bool(others) + [self._categories] * bool(categories)
        ends = np.cumsum([width for block in blocks for width in block.widths])
        parts = np.split(matrix, ends[:-1], axis=1)
        return np.hstack(parts[0::2]), np.hstack(parts[1::2])

    def _preprocess(self, typed: pd.DataFrame, numbers: list[str], categories: list[str], fit: bool) -> Array:
        from sklearn import config_context
        from sklearn.compose import ColumnTransformer

        blocks = [("numbers", self._numbers, numbers), ("categories", self._categories, categories)]
        if fit or not hasattr(self, "_transformer"):
            self._transformer = ColumnTransformer([b for b in blocks if b[2]], sparse_threshold=0)
        with config_context(transform_output="default"):
            if fit:
                matrix: Array = self._transformer.fit_transform(typed)
            else:
                if not hasattr(self._transformer, "transformers_"):  # restored: the blocks know all but their columns
                    self._transformer.fit(typed.iloc[:1])
                matrix = self._transformer.transform(typed)
        return matrix

    def _finish(self, parts: list[Array], numeric: Array | None, images: Array | None, raw: Any, fit: bool) -> Features:
        """Bring all parts to one scale, and put the constant last."""
        if fit:
            self._components, self._pixel_mean = np.zeros((0, 0)), np.zeros(0)
        if parts and parts[0].shape[1] > WIDE and not (self._texts and len(parts) == len(self._texts)):
            if fit:
                self._components = _leading(parts[0])
            parts[0] = parts[0] @ self._components.T
        if images is not None:
            pixels = pixel_features(images)
            if fit:
                self._pixel_mean = pixels.mean(axis=0)
            parts.append(pixels - self._pixel_mean)
        if fit:
            squares = [float(np.square(part).sum(axis=1).mean()) for part in parts]
            self._scales = np.array([1 / np.sqrt(s * len(parts)) if s > 0 else 1.0 for s in squares])
        scaled = [part * scale for part, scale in zip(parts, self._scales, strict=True)]
        rows = len(parts[0]) if parts else len(raw)
        dense = np.hstack([*scaled, np.full((rows, 1), CONSTANT)])
        return Features(dense, numeric, images, raw)

    def _framed(self, rows: Any) -> pd.DataFrame:
        """Return rows as a DataFrame with names that are text."""
        import pandas as pd

        if isinstance(rows, pd.DataFrame):
            return rows if all(isinstance(c, str) for c in rows.columns) else rows.rename(columns=str)
        array = rows if isinstance(rows, np.ndarray) else np.array(rows, dtype=object)
        names = [column.name for column in self.columns]
        if array.ndim == 1:
            if len(names) > 1:
                raise ValueError(f"The rows have one value each, expected {len(names)} columns: {some(names)}.")
            return pd.DataFrame({(names or ["text"])[0]: pd.Series(array, dtype=object)})
        if array.ndim != 2 or (names and array.shape[1] != len(names)):
            raise ValueError(f"The rows have shape {array.shape}, expected {len(names)} columns: {some(names)}.")
        return pd.DataFrame(array, columns=names or [f"x{i}" for i in range(array.shape[1])])

    def _array_images(self, rows: Any) -> Array:
        values = _channels_last(np.asarray(rows))
        if self._image is None or values.shape[3] != self._image.channels:
            raise ValueError(f"The images have shape {np.shape(rows)[1:]}, expected {self._image} as in fit.")
        low, high = self._pixel_range
        images: Array = np.clip((np.nan_to_num(values.astype(np.float64)) - low) * (255 / (high - low)), 0, 255)
        images = np.rint(images).astype(np.uint8)
        if images.shape[1:3] != self._image[:2]:
            images = load_images([i[:, :, 0] if i.shape[2] == 1 else i for i in images], self._image)
        return images

    # Save and restore

    def to_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return what was learned as arrays and JSON values; nothing is pickled."""
        arrays = {
            "scales": self._scales,
            "components": self._components,
            "pixel_mean": self._pixel_mean,
            **{f"numbers.{name}": value for name, value in self._numbers.arrays.items()},
            **{f"categories.{name}": value for name, value in self._categories.arrays.items()},
        }
        texts, embedded = {}, {}
        for i, (name, block) in enumerate(self._texts.items()):
            if isinstance(block.vectors, TextVectors):
                learned, texts[name] = block.vectors.to_state()
                arrays.update({f"text{i}.{key}": value for key, value in learned.items()})
            else:
                embedded[name] = [str(self.encoder), block.vectors.digest]
        values = {
            "form": self._form,
            "columns": [asdict(column) for column in self.columns],
            "few": [levels.tolist() for levels in self._numbers.levels],
            "levels": [list(levels) for levels in self._categories.levels],
            "texts": texts,
            "embedded": embedded,
            "image": list(self._image or ()),
            "image_size": [self.image_size] if self.image_size else [],
            "pixel_range": list(self._pixel_range),
        }
        return arrays, values

    @classmethod
    def from_state(cls, arrays: Mapping[str, Array], values: Any, *, encoder: str | None = None) -> Self:
        """Restore what `to_state` returned.

        Args:
            arrays: the arrays.
            values: the JSON values.
            encoder: folder of the sentence encoder, if it has moved.

        Raises:
            ValueError: if the state does not fit the schema, or the encoder is another one.
        """
        if not _SCHEMA(values):
            raise ValueError("The features of this model do not fit the schema of this version of fsla.")
        builder = cls(
            [Column(**column) for column in values["columns"]], image_size=next(iter(values["image_size"]), None)
        )
        builder.columns = tuple(builder._chosen or ())
        builder._form = values["form"]
        builder._image = ImageForm(*values["image"]) if values["image"] else None
        builder._pixel_range = (values["pixel_range"][0], values["pixel_range"][1])
        try:
            builder._scales, builder._components = (
                stored_array(arrays, "scales", 1),
                stored_array(arrays, "components", 2),
            )
            builder._pixel_mean = stored_array(arrays, "pixel_mean", 1)
            builder._numbers = _Numbers()
            builder._numbers.restore(arrays, [np.array(levels) for levels in values["few"]])
            builder._categories = _Categories()
            builder._categories.restore(arrays, values["levels"])
            builder._texts = {}
            for i, name in enumerate(builder._names("text")):
                if name in values["embedded"]:
                    folder, digest = values["embedded"][name]
                    builder.encoder = encoder or folder
                    vectors: Any = _load_encoder(builder.encoder)
                    if vectors.digest != digest:
                        raise ValueError(
                            f"The encoder {builder.encoder} is not the one that this model was trained with."
                        )
                else:
                    part = {key: arrays[f"text{i}.{key}"] for key in ("idf", "components")}
                    vectors = TextVectors.from_state(part, values["texts"][name])
                builder._texts[name] = _Texts(vectors)
            builder._check_arrays()
        except KeyError as error:
            raise ValueError(f"The features of this model lack {error}.") from error
        return builder

    def _check_arrays(self) -> None:
        """Raise unless the arrays of a restored builder fit what the columns need."""
        width = sum(block.widths[0] for block in (self._numbers, self._categories) if block.arrays)
        pixels = pixel_features(np.zeros((1, *self._image), dtype=np.uint8)).shape[1] if self._image else 0
        parts = bool(width) + len(self._texts) + bool(self._image)
        fits = self._scales.shape == (parts,) and self._pixel_mean.shape == (pixels,)
        fits &= bool(self._numbers.arrays) == bool(self._names("number", "boolean", "date"))
        fits &= bool(self._categories.arrays) == bool(self._names("category"))
        if not fits or self._components.ndim != 2 or self._components.shape[1] not in (0, width):
            raise ValueError("The arrays of the features do not fit the columns.")


def typed_frame(frame: pd.DataFrame, columns: Sequence[Column]) -> pd.DataFrame:
    """Return numbers as floats, dates as several numbers, categories and texts as they are."""
    import pandas as pd

    typed: dict[str, Any] = {}
    for column in columns:
        cells = frame[column.name]
        match column.kind:
            case "number":
                typed[column.name] = _as_floats(cells, column)
            case "boolean":
                typed[column.name] = _as_truth(cells)
            case "date":
                typed.update(_as_calendar(cells, column))
            case "category":
                codes, texts = factorize(cells)
                typed[column.name] = pd.Series(np.array([*texts, None], dtype=object)[codes], dtype=object)
            case "text":
                cells = cells.astype(object)
                typed[column.name] = pd.Series(cells.where(cells.notna(), "").to_numpy(), dtype=object)
            case _:
                typed[column.name] = pd.Series(cells.to_numpy(), dtype=object)
    return pd.DataFrame(typed)


class _Block(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A part of the ColumnTransformer. Its output is dense columns, then columns for trees."""

    widths: tuple[int, int]

    def __sklearn_clone__(self) -> Self:
        return self  # ColumnTransformer fits clones, and the builder stores what this one learned

    def __sklearn_is_fitted__(self) -> bool:
        return bool(self.arrays)


class _Numbers(_Block):
    """Standardized numbers, indicators of missing cells, and indicators of the values where these are few."""

    def __init__(self, few: Sequence[str] = ()) -> None:
        self.few = few
        self.restored = False
        self.arrays: dict[str, Array] = {}
        self.levels: list[Array] = []

    def fit(self, frame: Any, y: Any = None) -> Self:
        if self.restored:
            return self
        values = _finite(frame)
        there = ~np.isnan(values)
        count = np.maximum(there.sum(axis=0), 1)
        mean = np.where(there, values, 0).sum(axis=0) / count
        scale = np.sqrt(np.square(np.where(there, values - mean, 0)).sum(axis=0) / count)
        scale = np.where(scale > 1e-9 * np.abs(mean), scale, np.inf)  # a constant column is 0
        few = set(self.few)
        self.levels = [_levels(values[:, i]) if name in few else np.zeros(0) for i, name in enumerate(frame.columns)]
        missing = np.flatnonzero(~there.all(axis=0) & there.any(axis=0))
        self.arrays = {"mean": mean, "scale": scale, "missing": missing}
        indicators = self._indicators(values)
        rate = indicators.mean(axis=0)
        self.arrays |= {"rate": rate}
        self.widths = (len(mean) + len(rate), len(mean))
        return self

    def restore(self, arrays: Mapping[str, Array], levels: list[Array]) -> None:
        if "numbers.mean" not in arrays:
            return
        self.arrays = {name: stored_array(arrays, f"numbers.{name}", 1) for name in ("mean", "rate")}
        self.arrays["scale"] = stored_array(arrays, "numbers.scale", 1, infinite=True)  # that of a constant column
        self.arrays["missing"] = stored_array(arrays, "numbers.missing", 1, np.int64)
        self.levels, self.restored = levels, True
        width, missing = len(self.arrays["mean"]), self.arrays["missing"]
        extra = len(missing) + sum(map(len, levels))
        fits = len(levels) == width == len(self.arrays["scale"]) and len(self.arrays["rate"]) == extra
        if not fits or ((missing < 0) | (missing >= width)).any():
            raise ValueError("The arrays of the numeric columns do not fit each other.")
        self.widths = (width + extra, width)

    def _indicators(self, values: Array) -> Array:
        parts = [np.isnan(values[:, self.arrays["missing"]])]
        parts += [values[:, [i]] == levels for i, levels in enumerate(self.levels) if len(levels)]
        return np.hstack(parts).astype(np.float64)

    def transform(self, frame: Any) -> Array:
        values = _finite(frame)
        scaled = (values - self.arrays["mean"]) / self.arrays["scale"]
        dense = np.clip(np.where(np.isnan(scaled), 0, scaled), -CLIP, CLIP)
        return np.hstack([dense, _standardized(self._indicators(values), self.arrays["rate"]), values])


class _Categories(_Block):
    """Indicators of the most frequent levels, of all others together and of missing cells; a code for trees."""

    def __init__(self) -> None:
        self.restored = False
        self.arrays: dict[str, Array] = {}
        self.levels: list[list[str]] = []

    def fit(self, frame: Any, y: Any = None) -> Self:
        if self.restored:
            return self
        self.levels = []
        for name in frame.columns:
            codes, texts = factorize(frame[name])
            counts = np.bincount(codes[codes >= 0], minlength=len(texts))
            order = np.lexsort((texts.astype(str), -counts))
            self.levels.append([str(text) for text in texts[order[:MAX_LEVELS]]])
        self.arrays = {"rate": np.concatenate([part.mean(axis=0) for part in self._indicators(frame)[0]])}
        self.widths = (len(self.arrays["rate"]), len(self.levels))
        return self

    def restore(self, arrays: Mapping[str, Array], levels: list[list[str]]) -> None:
        if "categories.rate" not in arrays:
            return
        self.arrays = {"rate": stored_array(arrays, "categories.rate", 1)}
        self.levels, self.restored = levels, True
        if len(self.arrays["rate"]) != sum(len(texts) + 2 for texts in levels):
            raise ValueError("The arrays of the categories do not fit their levels.")
        self.widths = (len(self.arrays["rate"]), len(levels))

    def _indicators(self, frame: Any) -> tuple[list[Array], Array]:
        """Return for each column the indicators of its levels, of others and of missing cells; and the codes."""
        parts, codes = [], []
        for name, levels in zip(frame.columns, self.levels, strict=True):
            number_of = {level: i for i, level in enumerate(levels)}
            present, texts = factorize(frame[name])
            place = np.array([number_of.get(text, len(levels)) for text in texts] + [len(levels) + 1])[present]
            parts.append((place[:, None] == np.arange(len(levels) + 2)).astype(np.float64))
            codes.append(np.where(present < 0, np.nan, place))
        return parts, np.stack(codes, axis=1)

    def transform(self, frame: Any) -> Array:
        parts, codes = self._indicators(frame)
        rates = np.split(self.arrays["rate"], np.cumsum([part.shape[1] for part in parts])[:-1])
        weights = [np.sqrt(min(1.0, CATEGORY_WEIGHT / max(len(levels), 1))) for levels in self.levels]
        dense = [_standardized(p, rate) * w for p, rate, w in zip(parts, rates, weights, strict=True)]
        return np.hstack([*dense, codes])


class _Texts:
    """Vectors of one text column."""

    def __init__(self, vectors: TextVectors | SentenceEncoder) -> None:
        self.vectors: Any = vectors

    def fit_transform(self, texts: Any) -> Array:
        if isinstance(self.vectors, TextVectors):
            self.vectors.fit(texts)
        return self.transform(texts)

    def transform(self, texts: Any) -> Array:
        vectors: Array = (
            self.vectors.transform(texts) if isinstance(self.vectors, TextVectors) else self.vectors.embed(texts)
        )
        return vectors


def _load_encoder(folder: str) -> SentenceEncoder:
    from fsla.data._encoder import SentenceEncoder

    return SentenceEncoder(folder)


def _finite(frame: Any) -> Array:
    values = np.clip(np.asarray(frame, dtype=np.float64), -_LARGE, _LARGE)
    return np.where(np.abs(values) >= _LARGE, np.nan, values)


def _levels(values: Array) -> Array:
    """Return the distinct values of a column; rows from elsewhere may have more than `FEW_VALUES`."""
    levels = np.unique(values[~np.isnan(values)])
    return levels[:FEW_VALUES]


def _standardized(indicators: Array, rate: Array) -> Array:
    """Return indicators with mean 0 and variance 1 over the training rows; those that never occur there are 0."""
    deviation = np.sqrt(rate * (1 - rate))
    return np.clip((indicators - rate) / np.where(deviation > 0, deviation, np.inf), -CLIP, CLIP)


def _leading(matrix: Array) -> Array:
    from sklearn.decomposition import TruncatedSVD

    components: Array = TruncatedSVD(min(REDUCED, *matrix.shape), random_state=0).fit(matrix).components_
    return components


def _plain(rows: Any) -> Any:
    """Return sparse rows as an array, and images of one channel with a dimension for it."""
    rows = rows.toarray() if hasattr(rows, "toarray") else rows
    return rows[:, None] if isinstance(rows, np.ndarray) and rows.ndim == 3 else rows


def _named(values: Array, names: list[str]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(values, columns=names)


def _as_floats(cells: pd.Series, column: Column) -> Array:
    if getattr(cells.dtype, "kind", "O") in "iufb":
        return np.asarray(cells, dtype=np.float64)
    codes, texts = factorize(cells)
    return np.append(parse_numbers(texts, column.decimal), np.nan)[codes]


def _as_truth(cells: pd.Series) -> Array:
    codes, texts = factorize(cells)
    values = [float(TOKENS[text.lower()]) if text.lower() in TOKENS else np.nan for text in texts]
    return np.array([*values, np.nan])[codes]


def _as_calendar(cells: pd.Series, column: Column) -> dict[str, Array]:
    """Return days since 1970, year, month and weekday, and the hour where it differs."""
    codes, texts = factorize(cells)
    dates = parse_dates(texts, column.date_format)
    days = (dates - np.datetime64("1970-01-01")).dt.total_seconds() / 86400
    parts = {"": days, " year": dates.dt.year, " month": dates.dt.month, " weekday": dates.dt.day_of_week}
    if column.date_format.endswith(("%H:%M", "%H:%M:%S", "ISO8601")):
        parts[" hour"] = dates.dt.hour
    return {
        column.name + ending: np.append(np.asarray(part, dtype=float), np.nan)[codes] for ending, part in parts.items()
    }


def _channels_last(images: Array) -> Array:
    last = images.shape[3] in (1, 3, 4) and images.shape[1] not in (1, 3, 4)
    return images if last else images.transpose(0, 2, 3, 1)


def _pixel_range(images: Array) -> tuple[float, float]:
    """Return the values of black and white."""
    low, high = float(np.nanmin(images)), float(np.nanmax(images))
    if low >= 0 and high <= 1 and images.dtype.kind == "f":
        return 0.0, 1.0
    if low >= 0 and high <= 255 and (images.dtype == np.uint8 or high > 16):
        return 0.0, 255.0
    return (low, high) if high > low else (low, low + 1.0)
