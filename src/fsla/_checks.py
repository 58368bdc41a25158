"""Checks of arguments: one message with what must hold and the value."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def pick(name: str, table: Mapping[str, T], what: str) -> T:
    """Return table[name]; an unknown name is an error that names the nearest one."""
    if name in table:
        return table[name]
    near = get_close_matches(str(name).lower(), table, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"The {what} must be one of {', '.join(map(repr, table))}. Got {name!r} instead.{hint}")


def whole_number(value: object, name: str, owner: str, *, least: int = 1) -> None:
    """Raise unless value is a whole number that is large enough."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"The {name!r} of {owner} must be a whole number. Got {value!r} instead.")
    if value < least:
        raise ValueError(f"The {name!r} of {owner} must be at least {least}. Got {value} instead.")


def positive(value: object, name: str, owner: str, *, optional: bool = False) -> None:
    """Raise unless value is a positive number, or None where it is optional."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"The {name!r} of {owner} must be a number. Got {value!r} instead.")
    if not 0 < value < float("inf"):
        raise ValueError(f"The {name!r} of {owner} must be positive. Got {value} instead.")


def pick_device(name: str) -> torch.device:
    """The device of a name; "auto" is a GPU where there is one."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"{device.type} is neither")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"The device must be 'auto', 'cpu' or a working 'cuda'. Got {name!r} ({first}).") from None
    return device
