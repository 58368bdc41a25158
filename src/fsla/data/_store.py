"""What an estimator learnt in one file: tensors in the safetensors format, all else as JSON in its header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import nn

from fsla._files import write_bytes
from fsla.data._inputs import Scaling
from fsla.data._mixture import Member, Mixture
from fsla.data._networks import Maker, maker, named

FORMAT = "fsla.data 2"
PLAIN = (
    "n_features_in_",
    "noise_rate_",
    "noise_rate_interval_",
    "task_",
    "_offset",
    "_unit",
    "_shape",
)
TABLES = ("weights_", "candidates_")
ARRAYS = ("label_quality_", "suggested_probability_", "_suggested", "transition_", "sample_weight_", "_given")


def save(estimator: Any, path: Path) -> None:
    tensors = {"mean": estimator._scaling.mean, "spread": estimator._scaling.spread}
    members = estimator._model.members
    for number, network in enumerate(network for member in members for network in member.networks):
        tensors |= {f"{number}.{name}": t.detach().cpu() for name, t in network.state_dict().items()}
    tensors |= {name: torch.as_tensor(getattr(estimator, name)) for name in ARRAYS if hasattr(estimator, name)}
    kind = named(estimator.model, estimator._shape)
    header = {
        "format": FORMAT,
        "estimator": type(estimator).__name__,
        "model": kind if isinstance(kind, str) else None,
        "members": [(member.share, member.temperature, len(member.networks)) for member in members],
        "plain": {name: getattr(estimator, name) for name in PLAIN if hasattr(estimator, name)},
        "tables": {
            name: json.loads(getattr(estimator, name).to_json(orient="split"))
            for name in TABLES
            if hasattr(estimator, name)
        },
        "classes": _classes(estimator),
        "features": [str(name) for name in getattr(estimator, "feature_names_in_", ())],
    }
    contiguous = {name: t.contiguous().clone() for name, t in tensors.items()}
    write_bytes(path, to_bytes(contiguous, {"fsla": json.dumps(header)}))


def load(estimator: Any, path: Path, model: Any) -> None:
    import pandas as pd

    header, tensors = _read(path)
    own = type(estimator).__name__
    if header.get("format") != FORMAT or header.get("estimator") != own:
        raise ValueError(f"{path} must be written by {own}.save. It holds {header.get('estimator', 'something else')}.")
    model = header["model"] if model is None else model
    if model is None:
        raise ValueError(f"The model in {path} was the user's own. Give it again: {own}.load(path, model=...).")
    estimator.model = model
    for name, value in header["plain"].items():
        setattr(estimator, name, tuple(value) if isinstance(value, list) else value)
    if header.get("features"):
        estimator.feature_names_in_ = np.asarray(header["features"], dtype=object)
    for name, table in header["tables"].items():
        setattr(estimator, name, pd.DataFrame(**table))
    for name in ARRAYS:
        if name in tensors:
            setattr(estimator, name, tensors[name].numpy())
    if header["classes"] is not None:
        estimator.classes_ = np.array(header["classes"]["names"], dtype=header["classes"]["dtype"])
    if "suggested_probability_" in tensors:
        estimator.suggested_ = estimator.classes_[tensors["_suggested"].numpy()]
    estimator._scaling = Scaling(tensors["mean"], tensors["spread"])
    outputs = 1 if header["classes"] is None else len(estimator.classes_)
    make = maker(model, estimator._shape, outputs)
    number = iter(range(len(tensors)))
    members = []
    for share, temperature, count in header["members"]:
        networks = tuple(_network(make, f"{next(number)}.", tensors, path) for _ in range(count))
        members.append(Member(share, temperature, networks))
    estimator._model = Mixture(tuple(members), 0 if header["classes"] is None else outputs)


def _network(make: Maker, start: str, tensors: dict[str, torch.Tensor], path: Path) -> nn.Module:
    network = make()
    try:
        network.load_state_dict({name[len(start) :]: t for name, t in tensors.items() if name.startswith(start)})
    except RuntimeError as error:
        raise ValueError(f"The model must be the one whose weights {path} holds, and is another one.") from error
    return network


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("fsla", "{}"))
            return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} must be a file that save wrote. It cannot be read: {error}") from error


def _classes(estimator: Any) -> dict[str, Any] | None:
    if not hasattr(estimator, "classes_"):
        return None
    return {"names": estimator.classes_.tolist(), "dtype": estimator.classes_.dtype.str}
