"""What a saved state must be, checked before any of it is set: names, forms and kinds of values."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from fsla._state_tree import tensors_of
from fsla._storage._json_values import among, each, either, mapping, number, record
from fsla.algorithms._base import State
from fsla.steps._schedules import StepSizes
from fsla.steps._updates import TorchUpdate, Update, Updates, Variable, WrappedUpdate

COUNT = number(int, 0)
_REMEMBERED = {
    "SGD": {"momentum_buffer"},
    "Adam": {"step", "exp_avg", "exp_avg_sq"},
    "AdamW": {"step", "exp_avg", "exp_avg_sq"},
    "RMSprop": {"step", "square_avg"},
    "Adagrad": {"step", "sum"},
}
"""What optimisers of torch remember of each parameter, at least."""


def _flag(value: object) -> bool:
    return isinstance(value, bool)


_GUARD = record(
    max_rollbacks=either(among(None), COUNT),
    step_scale=number(float, 0.0, 1.0),
    outer_step_scale=number(float, 0.0, 1.0),
    rise=record(
        start=either(among(None), number(float)),
        share=number(float, 0.0, 1.0),
        last=COUNT,
        reported=_flag,
    ),
    scales=each(record(largest=number(float, 0.0), quiet=COUNT, growths=COUNT, learns=_flag)),
    last=each(lambda value: type(value) is float),
)
_SAVED = record(
    format=number(int),
    run=mapping,
    tensors=each(lambda value: isinstance(value, Tensor)),
    json=mapping,
)
_NEST = record(
    step_count=COUNT,
    seed=either(among(None), number(int)),
    guard=_GUARD,
    state=lambda value: value is None or isinstance(value, State),
    optimizers=each(record(state=each(each(lambda value: True)), param_groups=lambda value: isinstance(value, list))),
)


def check_saved(state: object, version: int) -> None:
    """Raise a ValueError unless a value is a plain dict of this version, as `state_dict` returns it."""
    if not isinstance(state, Mapping):
        raise ValueError(f"Cannot load state: it is a {type(state).__name__}, not the dict that state_dict returns.")
    if state.get("format") != version:
        raise ValueError(f"Cannot load state: its format is {state.get('format')!r}, not {version}.")
    if not _SAVED(state):
        raise ValueError("Cannot load state: a part of it is missing or malformed.")


def check_nest(
    nest: Any,
    sizes: StepSizes[Any],
    lam: Mapping[str, Tensor],
    omega: Mapping[str, Tensor],
    optimizers: Mapping[str, torch.optim.Optimizer],
    updates: Updates,
) -> None:
    """Raise a ValueError unless a nest is that of a run with these step sizes, variables, optimisers and updates."""
    if not _NEST(nest):
        raise ValueError("Cannot load state: a part of it is malformed.")
    state: State | None = nest["state"]
    if state is not None:
        if state.step_count != nest["step_count"]:
            raise ValueError("Cannot load state: its parts are of different steps.")
        check_numbers("state", state)
        check_numbers("measured", state.measured, scalars=True)
        check_forms("direction", state.direction, lam)
        measured = sizes.init(dict(omega))
        if type(state.measured) is not type(measured):
            raise ValueError("Cannot load state: what its step sizes measured is missing.")
        check_like("measured", state.measured, measured)
        if any(type(value) is int and value < 0 for value in (vars(state.measured) if state.measured else {}).values()):
            raise ValueError("Cannot load state: a count of what its step sizes measured is negative.")
        update_of = {"lam": updates.outer, "omega": updates.inner, "adjoint": updates.adjoint}
        for f in fields(state):
            part = getattr(state, f.name)
            if isinstance(part, Variable):
                like = lam if f.name == "lam" else omega
                if f.name in update_of:
                    _check_memory(f.name, part, _memory_of(update_of[f.name], like))
                if part.value:  # λ and ω are saved with outer and the model
                    check_forms(f.name, part.value, like, rows=sum(t.numel() for t in lam.values()))
                for name, tree in part.memory.items():
                    if not all(t.is_floating_point() for t in tree.values()):
                        raise ValueError(f"Cannot load state: a number of {f.name}.{name} is none.")
                    check_forms(f"{f.name}.{name}", {key: t for key, t in tree.items() if t.ndim or key in like}, like)
    for name, saved in nest["optimizers"].items():
        check_numbers(name, list(saved["state"].values()))
        if name in optimizers:
            _check_optimizer(name, saved, optimizers[name])
            moved = name == "outer_optimizer" and state is not None and any(map(torch.any, state.direction.values()))
            if moved and remembers(optimizers[name]) and len(saved["state"]) < len(lam):
                raise ValueError(f"Cannot load state: {name} lacks what it remembers of a parameter that has moved.")


def _memory_of(update: Update, like: Mapping[str, Tensor]) -> Mapping[str, Mapping[str, Tensor]]:
    """Return what an update remembers of variables of one coordinate, for its names."""
    while isinstance(update, WrappedUpdate):
        update = update.update
    if isinstance(update, TorchUpdate):  # The torch optimiser remembers.
        return {}
    return update.init({name: torch.ones((), dtype=t.dtype) for name, t in like.items()}).memory  # 1 is feasible.


def _check_memory(what: str, saved: Variable, expected: Mapping[str, Mapping[str, Tensor]]) -> None:
    names = {name: tree.keys() for name, tree in saved.memory.items()}
    if names != {name: tree.keys() for name, tree in expected.items()}:
        raise ValueError(f"Cannot load state: what the update of {what} remembers has other names.")


def check_numbers(what: str, nest: Any, *, scalars: bool = False) -> None:
    """Raise a ValueError if a tensor in a nest holds a NaN, or an infinite number that is not a scalar by itself."""
    for t in tensors_of(nest):
        if t.is_floating_point() and not t.isfinite().all() and (scalars or t.ndim or t.isnan()):
            raise ValueError(f"Cannot load state: its {what} has numbers that are not finite.")


def check_forms(what: str, saved: Mapping[str, Tensor], like: Mapping[str, Tensor], *, rows: int = 0) -> None:
    """Raise a ValueError unless saved tensors have the names, dtypes and shapes of others; scalars fit all shapes.

    Tensors may also be of so many `rows`, as the sensitivity to each number of λ is.
    """
    for name in dict.fromkeys((*saved, *like)) if saved else ():
        if name not in saved or name not in like:
            raise ValueError(f"Cannot load state: its {what} and this model differ in the parameter {name!r}.")
        tensor, expected = saved[name], like[name]
        shapes = [(), tuple(expected.shape)] + ([(rows, *expected.shape)] if rows else [])
        if tensor.dtype != expected.dtype or tuple(tensor.shape) not in shapes:
            raise ValueError(
                f"Cannot load state: {what} of parameter {name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                f"expected {expected.dtype} of shape {tuple(expected.shape)}."
            )


def check_like(what: str, saved: Any, expected: Any) -> None:
    """Raise a ValueError unless a nest has the names and kinds of values of another; None fits all but tensors."""
    if expected is None or (saved is None and not isinstance(expected, Tensor)):
        return
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (saved, expected))
    if not numbers and type(saved) is not type(expected):
        raise ValueError(
            f"Cannot load state: {what} is a {type(saved).__name__}, expected a {type(expected).__name__}."
        )
    if numbers and abs(saved) > 2**63 and saved != expected:
        raise ValueError(f"Cannot load state: {what} is {saved}.")
    if isinstance(expected, Tensor) and (saved.dtype, saved.shape) != (expected.dtype, expected.shape):
        raise ValueError(
            f"Cannot load state: {what} is {saved.dtype} of shape {tuple(saved.shape)}, expected {expected.dtype} of "
            f"shape {tuple(expected.shape)}."
        )
    if is_dataclass(expected):
        saved, expected = vars(saved), vars(expected)
    if isinstance(expected, Mapping):
        if saved.keys() != expected.keys():
            raise ValueError(f"Cannot load state: {what} has other names.")
        for name in expected:
            check_like(f"{what}.{name}", saved[name], expected[name])
    elif isinstance(expected, list | tuple):
        if len(saved) != len(expected):
            raise ValueError(f"Cannot load state: {what} has {len(saved)} entries, expected {len(expected)}.")
        for place, (part, expected_part) in enumerate(zip(saved, expected, strict=True)):
            check_like(f"{what}[{place}]", part, expected_part)


def remembers(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimiser is known to remember something of every parameter that it has moved."""
    name = type(optimizer).__name__
    return name in _REMEMBERED and (name != "SGD" or all(group["momentum"] for group in optimizer.param_groups))


def _check_optimizer(name: str, saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    expected = optimizer.state_dict()
    if len(saved["param_groups"]) != len(expected["param_groups"]):
        raise ValueError(f"Cannot load state: {name} has other groups of parameters.")
    for saved_group, expected_group in zip(saved["param_groups"], expected["param_groups"], strict=True):
        missing = optimizer.defaults.keys() - saved_group.keys()
        if missing:
            raise ValueError(f"Cannot load state: {name} has a group without {', '.join(sorted(missing))}.")
        common = saved_group.keys() & expected_group.keys()  # Schedulers add numbers of their own.
        check_like(name, {key: saved_group[key] for key in common}, {key: expected_group[key] for key in common})
        if saved_group.get("params") != expected_group["params"]:
            raise ValueError(f"Cannot load state: {name} has other parameters in a group.")
        _check_group(name, saved_group, optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for place, entry in saved["state"].items():
        if not place.isdecimal() or int(place) >= len(parameters):
            raise ValueError(f"Cannot load state: {name} has other parameters.")
        p = parameters[int(place)]
        known = optimizer.state.get(p, {})
        if known:
            check_like(f"{name}.{place}", entry, known)
        elif type(optimizer).__module__.startswith("torch.optim."):
            if not entry.keys() >= _REMEMBERED.get(type(optimizer).__name__, set()):
                raise ValueError(f"Cannot load state: {name} lacks what it remembers of parameter {place}.")
            for key, t in entry.items():
                if isinstance(t, Tensor) and not (t.is_floating_point() and _fits(t, p)):
                    raise ValueError(f"Cannot load state: {name} has another {key!r} of parameter {place}.")


def _check_group(name: str, group: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raise a ValueError unless torch's own optimiser accepts the settings of a group."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    accepted = inspect.signature(type(optimizer)).parameters
    settings = {key: group[key] for key in optimizer.defaults if key in accepted}
    try:
        type(optimizer)([torch.nn.Parameter(torch.zeros(1))], **settings)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"Cannot load state: {name} has a setting that torch refuses ({error}).") from None


def _fits(t: Tensor, p: Tensor) -> bool:
    """Whether a tensor of an optimiser's state is a number, of the parameter's shape, or a factor of it."""
    return not t.ndim or (t.ndim == p.ndim and all(n in (1, m) for n, m in zip(t.shape, p.shape, strict=True)))
