"""What an estimator learnt, in one file: its schema is declared here, and checked before anything is made of a file.

`fsla._container` is the format of the file. The tensors are the networks' states, the scaling and one array a sample;
the JSON is all else.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fsla import _container as container
from fsla._files import FileError
from fsla._json_values import among, either, items, number, record, row, text
from fsla.data._decisions import DECISIONS
from fsla.data._inputs import Array, Scaling
from fsla.data._mixture import Member, Mixture
from fsla.data._networks import KINDS, Maker, maker, named


class _Rule(NamedTuple):
    """What an array must be."""

    dtype: str
    shape: str
    """A letter for each dimension: n samples, c classes."""
    low: float = 0.0
    high: float = math.inf


_SHARED = {"sample_weight_": _Rule("float32", "n")}
_CLEANER = _SHARED | {
    "label_quality_": _Rule("float64", "n", high=1.0),
    "suggested_probability_": _Rule("float64", "n", high=1.0),
    "transition_": _Rule("float64", "cc", high=1.0),
    "_suggested": _Rule("int64", "n"),
    "_given": _Rule("int64", "n"),
}
_ROUNDING = 1e-4
"""How far a probability may be beyond its bounds, and shares from the sum 1."""
_NAMES: dict[str, type] = {
    "bool": bool,
    "str": str,
    **{f"{sign}int{bits}": int for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": float for bits in (16, 32, 64)},
}
"""The dtypes of classes and groups, and what JSON has of them."""
_NONE = among(None)
_SHARE = number(float, 0.0, 1.0 + _ROUNDING)
_COUNT = number(int, 0)
_POSITIVE = number(float, sys.float_info.min)
_NAMED = record(dtype=among(*_NAMES), names=items(lambda name: True))
_CANDIDATES = record(
    way=items(text),
    log_likelihood=items(number(float)),
    error=items(number(float, 0.0)),
    share=items(_SHARE),
    folds=items(_COUNT),
)
_GROUPS = {
    "samples": items(_COUNT),
    "weight": items(number(float, 0.0)),
    "low": items(number(float, 0.0)),
    "high": items(number(float, 0.0)),
    "decision": items(among(*DECISIONS)),
}
_SCHEMA = record(
    model=among(None, *KINDS),
    members=items(row(_SHARE, _POSITIVE, number(int, 1))),
    shape=either(row(number(int, 1)), row(*[number(int, 1)] * 3)),
    features=either(_NONE, items(text)),
    classes=either(_NONE, _NAMED),
    scale=either(_NONE, row(number(float), _POSITIVE)),
    noise=either(_NONE, row(_SHARE, _SHARE, _SHARE)),
    groups=either(_NONE, _NAMED),
    weights_=either(_NONE, record(**_GROUPS), record(**_GROUPS, wrong_labels=items(_SHARE))),
    candidates_=_CANDIDATES,
)
"""What the JSON of a file must be, part by part. `_checked` holds the parts to each other."""


class _SchemaError(ValueError):
    """What is wrong with the content of a file."""


class _ModelError(_SchemaError):
    """A model that is not the one whose weights a file holds."""


def save(estimator: Any, path: Path) -> None:
    """Write a fitted estimator to a file."""
    tensors = {"mean": estimator._scaling.mean, "spread": estimator._scaling.spread}
    members = estimator._model.members
    for place, network in enumerate(network for member in members for network in member.networks):
        tensors |= {f"{place}.{name}": t for name, t in network.state_dict().items()}
    rules = _SHARED if _is_weigher(estimator) else _CLEANER
    tensors |= {name: torch.as_tensor(getattr(estimator, name)) for name in rules}
    kind = named(estimator.model, estimator._shape)
    classes = getattr(estimator, "classes_", None)
    features = getattr(estimator, "feature_names_in_", None)
    groups = getattr(estimator, "weights_", None)
    cleaner = not _is_weigher(estimator)
    content: Any = {
        "model": kind if isinstance(kind, str) else None,
        "members": [[member.share, member.temperature, len(member.networks)] for member in members],
        "shape": list(estimator._shape),
        "features": None if features is None else [str(name) for name in features],
        "classes": None if classes is None else _listed(classes),
        "scale": [estimator._offset, estimator._unit] if classes is None else None,
        "noise": [estimator.noise_rate_, *estimator.noise_rate_interval_] if cleaner else None,
        "groups": None if groups is None else _listed(groups["group"].to_numpy()),
        "weights_": None if groups is None else groups.drop(columns="group").to_dict("list"),
        "candidates_": estimator.candidates_.to_dict("list"),
    }
    container.write(path, type(estimator).__name__, tensors, content)


def load(estimator: Any, path: Path, model: Any) -> None:
    """Set what `save` wrote on an estimator that is not fitted.

    Raises:
        ValueError: if the file is damaged, does not fit the schema, or is of another class or model.
    """
    kind = type(estimator).__name__
    found = container.read(path, kind)
    try:
        content: Any = found.json
        _require(_SCHEMA(content), "a part of its JSON is malformed")
        learnt = _checked(content, found.tensors, cleaner=not _is_weigher(estimator))
        own = content["model"]
        if own is None and model is None:
            raise FileError(f"The model in {path} was the user's own. Give it again: {kind}.load(path, model=...).")
        learnt["model"] = own if model is None else model
        learnt["_model"] = _mixture(content, found.tensors, learnt["model"], len(learnt.get("classes_", ())))
    except FileError:
        raise
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, _ModelError) and model is not None:
            raise ValueError(f"The model must be the one whose weights {path} holds, and is another one.") from None
        raise container.unreadable(path, f"it is no {kind} that save wrote ({error})") from None
    vars(estimator).update(learnt)


def _is_weigher(estimator: Any) -> bool:
    return hasattr(estimator, "task")


def _checked(content: Mapping[str, Any], tensors: Mapping[str, Tensor], *, cleaner: bool) -> dict[str, Any]:
    """Return the attributes that a file sets, all but the model. Raise unless its parts fit each other."""
    _require(all(t.isfinite().all() for t in tensors.values()), "a number is not finite")
    shape, mean, spread = content["shape"], tensors["mean"], tensors["spread"]
    wanted = shape if len(shape) == 1 else []
    _require(mean.dtype is spread.dtype is torch.float32, "its scaling has another dtype")
    _require(list(mean.shape) == list(spread.shape) == wanted, "its scaling has another shape")
    _require(bool((spread > 0).all()), "a spread is not positive")
    learnt: dict[str, Any] = {
        "_shape": tuple(shape),
        "_scaling": Scaling(mean, spread),
        "n_features_in_": math.prod(shape),
        "candidates_": _table(content["candidates_"]),
    }
    if content["features"] is not None:
        _require([len(content["features"])] == shape, "'features' has another length")
        learnt["feature_names_in_"] = np.asarray(content["features"], dtype=object)
    regression = content["classes"] is None
    _require(regression != (content["scale"] is None), "it has classes and a scale, or neither")
    _require(cleaner == (content["noise"] is not None) and not (cleaner and regression), "it is of another estimator")
    if regression:
        learnt["_offset"], learnt["_unit"] = content["scale"]
    else:
        learnt["classes_"] = _names(content["classes"])
        _require(len(learnt["classes_"]) >= 2, "it has fewer than two classes")
    if not cleaner:
        learnt["task_"] = "regression" if regression else "classification"
    sizes = {"n": len(tensors["sample_weight_"]), "c": len(learnt.get("classes_", ()))}
    for name, rule in (_CLEANER if cleaner else _SHARED).items():
        learnt[name] = _array(tensors[name], name, rule, sizes)
    if cleaner:
        rate, low, high = content["noise"]
        _require(low <= high, "its noise has no interval")
        learnt |= {"noise_rate_": rate, "noise_rate_interval_": (low, high)}
        learnt["suggested_"] = learnt["classes_"][learnt["_suggested"]]
    _require((content["groups"] is None) == (content["weights_"] is None), "'groups' and 'weights_' differ")
    if content["groups"] is not None:
        _require(regression != ("wrong_labels" in content["weights_"]), "'weights_' has other columns")
        learnt["weights_"] = _table({"group": _names(content["groups"]), **content["weights_"]})
    return learnt


def _array(t: Tensor, name: str, rule: _Rule, sizes: Mapping[str, int]) -> Array:
    _require(str(t.dtype) == f"torch.{rule.dtype}", f"{name!r} has the dtype {t.dtype}")
    _require(t.shape == tuple(sizes[letter] for letter in rule.shape), f"{name!r} has the shape {list(t.shape)}")
    whole = not t.is_floating_point()
    high = sizes["c"] - 1 if whole else rule.high + _ROUNDING
    _require(bool(((t >= rule.low) & (t <= high)).all()), f"a number of {name!r} is out of range")
    array: Array = t.numpy()
    return array


def _table(columns: Mapping[str, Any]) -> Any:
    import pandas as pd

    _require(len({len(column) for column in columns.values()}) == 1, "a table has columns of different lengths")
    return pd.DataFrame(columns)


def _listed(names: Array) -> dict[str, Any]:
    """Return classes or groups as JSON."""
    texts = names.dtype.name not in _NAMES
    return {
        "dtype": "str" if texts else names.dtype.name,
        "names": [str(x) for x in names] if texts else names.tolist(),
    }


def _names(found: Mapping[str, Any]) -> Array:
    """Return what `_listed` made JSON of."""
    values = found["names"]
    _require(all(type(value) is _NAMES[found["dtype"]] for value in values), "classes or groups have another dtype")
    made = np.array(values, dtype=found["dtype"])
    _require(made.tolist() == values and len(set(values)) == len(values), "classes or groups are not distinct")
    return made


def _mixture(content: Mapping[str, Any], tensors: dict[str, Tensor], model: Any, classes: int) -> Mixture:
    shape, members = tuple(content["shape"]), content["members"]
    _require(abs(sum(member[0] for member in members) - 1) < _ROUNDING, "the members' shares have another sum than 1")
    states: dict[int, dict[str, Tensor]] = {}
    for name in tensors.keys() - {"mean", "spread", *(_SHARED if content["noise"] is None else _CLEANER)}:
        number, _, rest = name.partition(".")
        states.setdefault(int(number), {})[rest] = tensors[name]
    count = sum(member[2] for member in members)
    _require(
        count == len(states) and sorted(states) == list(range(len(states))), "it has other networks than 'members'"
    )
    make = maker(model, shape, max(1, classes))
    networks = iter([_network(make, states[number], isinstance(model, str)) for number in range(count)])
    return Mixture(tuple(Member(m[0], m[1], tuple(islice(networks, m[2]))) for m in members), classes)


def _network(make: Maker, state: Mapping[str, Tensor], sized: bool) -> nn.Module:
    """Return a network with a state. One whose size is in the file is made when its tensors are known to have it."""
    if sized:
        with torch.device("meta"):
            _check_state(make(), state)
    network = make()
    _check_state(network, state)
    network.load_state_dict(state)
    return network


def _check_state(network: nn.Module, state: Mapping[str, Tensor]) -> None:
    wanted = {name: (t.dtype, t.shape) for name, t in network.state_dict().items()}
    if wanted != {name: (t.dtype, t.shape) for name, t in state.items()}:
        raise _ModelError("its networks are not those of its model")


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise _SchemaError(why)
