"""A fitted model that takes the raw columns, and its file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fsla._checks import file_path
from fsla._storage import _container as container
from fsla._storage._files import FileError
from fsla._storage._json_values import among, each, either, items, mapping, record
from fsla.data._data_fit import Predictor
from fsla.data._dataset import Array, Task
from fsla.data._features import FeatureBuilder

KIND = "fsla.data model"
_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
"""Types of class names."""
_SCHEMA = record(
    task=among("classification", "regression"),
    classes=either(among(None), record(type=among(*_TYPES), names=items(lambda name: True))),
    builder=mapping,
    predictor=mapping,
    text=each(items(lambda cell: isinstance(cell, str))),
)
"""What the JSON of a file must be. Builder and predictor check their own parts."""


@dataclass(frozen=True, eq=False)
class DataModel:
    """A fitted model: raw rows in, labels or numbers out.

    Args:
        task: "classification" or "regression".
        builder: turns raw rows into features.
        predictor: turns features into probabilities or numbers.
        classes_: names of the classes; None in regression.

    Examples:
        >>> float((result.model.predict(table) == true).mean()) > 0.9
        True
    """

    task: Task
    builder: FeatureBuilder
    predictor: Predictor
    classes_: Array | None

    def predict(self, rows: Any) -> Array:
        """Return a label or a number a row.

        Args:
            rows: a DataFrame with the columns of the training table, or what the reader took instead.
        """
        scores = np.asarray(self.predictor.predict(self.builder.transform(rows)))
        if self.classes_ is None:
            return scores
        labels: Array = self.classes_[scores.argmax(1)]
        return labels

    def predict_proba(self, rows: Any) -> Array:
        """Return rows x classes probabilities."""
        if self.classes_ is None:
            raise AttributeError("A regression model has no predict_proba. Use predict.")
        return np.asarray(self.predictor.predict(self.builder.transform(rows)))

    def unsaved_part(self) -> str | None:
        """Return why the model cannot be saved, or None."""
        try:
            for part in (self.builder, self.predictor):
                part.to_state()
        except ValueError as error:
            return str(error)
        return None

    def save(self, path: str | Path) -> None:
        """Write the model to a file that `load_model` reads; nothing is pickled.

        Raises:
            ValueError: if a part of the model cannot be saved.
        """
        tensors: dict[str, torch.Tensor] = {}
        text: dict[str, list[str]] = {}
        content: dict[str, Any] = {"task": self.task, "classes": _encode_classes(self.classes_), "text": text}
        for name, part in (("builder", self.builder), ("predictor", self.predictor)):
            arrays, content[name] = part.to_state()
            for key, array in arrays.items():
                values = np.asarray(array)
                if values.dtype.kind in "OU":
                    text[f"{name}.{key}"] = [str(value) for value in values]
                else:
                    tensors[f"{name}.{key}"] = torch.as_tensor(np.ascontiguousarray(values))
        container.write(file_path(path, "path", "DataModel.save"), KIND, tensors, content)


def load_model(path: str | Path, *, encoder: str | None = None) -> DataModel:
    """Return a model that `CleaningResult.save` or `DataModel.save` wrote.

    Args:
        path: the file.
        encoder: folder of the sentence encoder, if it has moved.

    Raises:
        ValueError: if the file is damaged or is none of these.

    Examples:
        >>> result.model.save("model.safetensors")
        >>> model = fsla.data.load_model("model.safetensors")
        >>> bool((model.predict(table) == result.model.predict(table)).all())
        True
    """
    from fsla.data._predictors import predictor_from_state

    path = file_path(path, "path", "load_model")
    file = container.read(path, KIND)
    try:
        content: Any = file.json
        if not _SCHEMA(content):
            raise ValueError("a part of its JSON is malformed")
        arrays: dict[str, Array] = {name: tensor.numpy() for name, tensor in file.tensors.items()}
        arrays |= {name: np.array(cells, dtype=object) for name, cells in content["text"].items()}
        builder = FeatureBuilder.from_state(_part(arrays, "builder."), content["builder"], encoder=encoder)
        predictor = predictor_from_state(_part(arrays, "predictor."), content["predictor"], content["task"])
        model = DataModel(content["task"], builder, predictor, _decode_classes(content["classes"], content["task"]))
        _check_parts_fit(model)
        return model
    except FileError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise container.unreadable(path, f"it is no model that fsla saved ({error})") from None


def _check_parts_fit(model: DataModel) -> None:
    """Predict one row of missing cells: parts of different models would fail, or return another number of classes."""
    import pandas as pd

    columns = model.builder.columns
    if any(column.kind == "image" for column in columns):
        return  # the networks' own states are checked as they are read
    row = pd.DataFrame({column.name: [np.nan if column.kind == "number" else ""] for column in columns})
    with np.errstate(all="ignore"):
        scores = np.asarray(model.predictor.predict(model.builder.transform(row)))
    expected = (1,) if model.classes_ is None else (1, len(model.classes_))
    if scores.shape != expected or not np.isfinite(scores).all():
        raise ValueError("its parts do not fit together")


def _part(arrays: dict[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _encode_classes(classes: Array | None) -> Any:
    if classes is None:
        return None
    names = classes.tolist()
    kinds = {type(name).__name__ for name in names}
    (kind,) = kinds if len(kinds) == 1 and kinds <= _TYPES.keys() else ("str",)
    return {"type": kind, "names": [str(name) for name in names] if kind == "str" else names}


def _decode_classes(content: Any, task: str) -> Array | None:
    if (content is None) != (task == "regression"):
        raise ValueError("its classes do not fit its task")
    if content is None:
        return None
    names = content["names"]
    if not all(type(name) is _TYPES[content["type"]] for name in names) or len(set(names)) != len(names):
        raise ValueError("its classes are malformed")
    return np.array(names, dtype=object if content["type"] == "str" else None)
