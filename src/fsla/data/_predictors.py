"""Trained models as plain arrays: they predict for new rows, and are written to files without pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Self

import numpy as np

from fsla._storage._json_values import among, items, mapping, number, record
from fsla.data._arrays import check_names, stored_array
from fsla.data._data_fit import Predictor
from fsla.data._dataset import Array, Features, Task

MIN_PROBABILITY = 1e-4
"""Probabilities are clipped here before their logarithm is taken."""
_TEMPERATURES = np.exp(np.linspace(-1.2, 1.4, 27))
_TEMPERATURE_SPREAD = 0.5
"""Standard deviation of the prior of log T."""

_TASK = among("classification", "regression")
_PLAIN = record(kind=among("linear", "constant"), task=_TASK)
_ENSEMBLE = record(
    kind=among("ensemble"), task=_TASK, offset=number(float), scale=number(float), members=items(mapping)
)
"""What the JSON of a predictor must be."""


def softmax(scores: Array) -> Array:
    """Return probabilities of rows of scores."""
    e = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


def apply_temperature(probabilities: Array, temperature: float) -> Array:
    """Return probabilities proportional to p^(1/T), of clipped probabilities."""
    return softmax(np.log(np.clip(probabilities, MIN_PROBABILITY, 1)) / temperature)


def find_temperature(predictions: Array, labels: Array) -> float:
    """Return the temperature of the best log-posterior, with log T ~ N(0, 0.5^2)."""
    scores = np.log(np.clip(predictions, MIN_PROBABILITY, 1))
    rows, labels = np.arange(len(labels)), labels.astype(np.intp)
    values = []
    for temperature in _TEMPERATURES:
        z = scores / temperature
        z = z - z.max(1, keepdims=True)
        loss = np.log(np.exp(z).sum(1)) - z[rows, labels]
        values.append(loss.sum() + np.log(temperature) ** 2 / (2 * _TEMPERATURE_SPREAD**2))
    return float(_TEMPERATURES[int(np.argmin(values))])


@dataclass(frozen=True, eq=False)
class LinearPredictor:
    """Scores that are linear in the dense features."""

    coef: Array
    task: Task

    def predict(self, features: Features) -> Array:
        """Return probabilities, or numbers in regression."""
        scores = features.dense @ self.coef
        return softmax(scores) if self.task == "classification" else np.asarray(scores[:, 0])

    def to_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the coefficients."""
        return {"coef": self.coef}, {"kind": "linear", "task": self.task}

    @classmethod
    def from_state(cls, arrays: Mapping[str, Array], state: Mapping[str, Any]) -> Self:
        """Return the predictor of a state."""
        check_names(arrays, {"coef"})
        return cls(stored_array(arrays, "coef", 2), state["task"])


@dataclass(frozen=True, eq=False)
class ConstantPredictor:
    """The same probabilities, or the same number, for every row."""

    value: Array
    task: Task

    def predict(self, features: Features) -> Array:
        """Return the value once a row."""
        value = self.value if self.task == "classification" else self.value[0]
        return np.repeat(value[None], len(features), 0)

    def to_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the value."""
        return {"value": self.value}, {"kind": "constant", "task": self.task}

    @classmethod
    def from_state(cls, arrays: Mapping[str, Array], state: Mapping[str, Any]) -> Self:
        """Return the predictor of a state."""
        check_names(arrays, {"value"})
        return cls(stored_array(arrays, "value", 1), state["task"])


@dataclass(frozen=True, eq=False)
class EnsemblePredictor:
    """Average of calibrated predictors.

    Attributes:
        members: The predictors.
        weights: Their shares, which sum to 1.
        temperatures: One a predictor; 1 in regression.
        offset: Added to numbers in regression.
        scale: Numbers in regression are multiplied by it.
    """

    members: tuple[Predictor, ...]
    weights: Array
    temperatures: Array
    task: Task
    offset: float = 0.0
    scale: float = 1.0

    def predict(self, features: Features) -> Array:
        """Return the average prediction."""
        total: Any = 0.0
        for member, weight, temperature in zip(self.members, self.weights, self.temperatures, strict=True):
            prediction = member.predict(features)
            if self.task == "classification":
                prediction = apply_temperature(prediction, temperature)
            total = total + weight * prediction
        return np.asarray(self.offset + self.scale * total if self.task == "regression" else total)

    def to_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the states of all members. Raise ValueError if one cannot be saved."""
        arrays = {"weights": self.weights, "temperatures": self.temperatures}
        states = []
        for index, member in enumerate(self.members):
            member_arrays, state = member.to_state()
            arrays.update({f"{index}.{name}": array for name, array in member_arrays.items()})
            states.append(state)
        json = {
            "kind": "ensemble",
            "task": self.task,
            "offset": self.offset,
            "scale": self.scale,
            "members": states,
        }
        return arrays, json

    @classmethod
    def from_state(cls, arrays: Mapping[str, Array], state: Mapping[str, Any]) -> Self:
        """Return the predictor of a state."""
        members, used = [], {"weights", "temperatures"}
        for index, member in enumerate(state["members"]):
            start = f"{index}."
            inner = {name.removeprefix(start): a for name, a in arrays.items() if name.startswith(start)}
            used.update(start + name for name in inner)
            members.append(predictor_from_state(inner, member, state["task"]))
        check_names(arrays, used)
        weights, temperatures = (stored_array(arrays, name, 1) for name in ("weights", "temperatures"))
        if not members or not len(members) == len(weights) == len(temperatures):
            raise ValueError("its members do not fit their weights")
        if (weights < 0).any() or (temperatures <= 0).any():
            raise ValueError("the weights or temperatures of its members are out of range")
        return cls(tuple(members), weights, temperatures, state["task"], state["offset"], state["scale"])


_KINDS = {
    "linear": "fsla.data._predictors:LinearPredictor",
    "constant": "fsla.data._predictors:ConstantPredictor",
    "trees": "fsla.data._trees:TreePredictor",
    "ensemble": "fsla.data._predictors:EnsemblePredictor",
    "trunk": "fsla.data._network_learners:TrunkPredictor",
    "mlp": "fsla.data._network_learners:MLPPredictor",
    "image_network": "fsla.data._network_learners:NetworkPredictor",
    "module": "fsla.data._network_learners:ModulePredictor",
}
"""Where the class of each kind of state is. Networks are imported only where one is read."""
_RULES = {"linear": _PLAIN, "constant": _PLAIN, "ensemble": _ENSEMBLE}


def predictor_from_state(arrays: Mapping[str, Array], state: Mapping[str, Any], task: str | None = None) -> Predictor:
    """Return the predictor that `to_state` described.

    Args:
        arrays: By name.
        state: JSON values; "kind" says which class reads the rest.
        task: what the predictor must be for; None accepts both.

    Raises:
        ValueError: The kind is not known, or the state does not fit.
    """
    kind = state.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"Cannot read a model of kind {kind!r}. Known kinds: {', '.join(sorted(_KINDS))}.")
    if kind in _RULES and not _RULES[kind](state):
        raise ValueError(f"the JSON of its {kind} predictor is malformed")
    if task is not None and state.get("task", task) != task:
        raise ValueError(f"its {kind} predictor is for {state['task']}, not for {task}")
    module, name = _KINDS[kind].split(":")
    predictor: Predictor = getattr(import_module(module), name).from_state(arrays, state)
    return predictor
