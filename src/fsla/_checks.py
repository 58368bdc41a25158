"""Checks of arguments: one message with what must hold and the value."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def pick(name: str, table: Mapping[str, T], what: str) -> T:
    """Return table[name]; an unknown name is an error that names the nearest one."""
    if isinstance(name, str) and name in table:
        return table[name]
    near = get_close_matches(str(name).lower(), table, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"The {what} must be one of {', '.join(map(repr, table))}. Got {name!r} instead.{hint}")


def _shown(value: object) -> str:
    """A value as a message shows it: by its type where it is long."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else type(value).__name__


def whole_number(value: object, name: str, owner: str, *, least: int = 1) -> None:
    """Raise unless value is a whole number that is large enough."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"The {name!r} of {owner} must be a whole number. Got {_shown(value)} instead.")
    if value < least:
        raise ValueError(f"The {name!r} of {owner} must be at least {least}. Got {value} instead.")


def function(value: object, name: str, owner: str, *, optional: bool = False) -> None:
    """Raise unless value can be called, or is None where it is optional."""
    if not callable(value) and not (optional and value is None):
        raise TypeError(f"The {name!r} of {owner} must be a function. Got {_shown(value)} instead.")


def file_path(value: object, name: str, owner: str) -> Path:
    """Return the path of a file or folder; raise unless value can be one."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"The {name!r} of {owner} must be a path. Got {_shown(value)} instead.")
    path = Path(value)
    if "\0" in str(path):
        raise ValueError(f"The {name!r} of {owner} holds a null character, which no path has. Got {str(path)!r}.")
    return path


def number(value: object, name: str, owner: str, *, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise unless value is a finite number in a closed range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"The {name!r} of {owner} must be a number. Got {_shown(value)} instead.")
    if not math.isfinite(value) or not low <= value <= high:
        bounds = (
            "" if low == -math.inf else f" between {low:g} and {high:g}" if high < math.inf else f" of {low:g} or more"
        )
        raise ValueError(f"The {name!r} of {owner} must be a finite number{bounds}. Got {value} instead.")


def instance(value: object, kind: type | tuple[type, ...], name: str, owner: str, what: str) -> None:
    """Raise unless value is of a class; `what` describes it for the message."""
    if not isinstance(value, kind):
        raise TypeError(f"The {name!r} of {owner} must be {what}. Got {_shown(value)} instead.")


def target_device(value: Any, name: str, owner: str) -> torch.device:
    """Return the device of a torch.device, a name or a number; raise unless torch knows it."""
    import torch

    if isinstance(value, torch.device):
        return value
    if not isinstance(value, str):
        raise TypeError(f"The {name!r} of {owner} must be a torch.device or its name. Got {_shown(value)} instead.")
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"The {name!r} of {owner} is {value!r}, which torch refuses ({error}).") from None


def positive(value: object, name: str, owner: str, *, optional: bool = False) -> None:
    """Raise unless value is a positive number, or None where it is optional."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"The {name!r} of {owner} must be a number. Got {_shown(value)} instead.")
    if not 0 < value < float("inf"):
        raise ValueError(f"The {name!r} of {owner} must be positive. Got {value} instead.")


def pick_device(name: str) -> torch.device:
    """The device of a name; "auto" is a GPU where there is one."""
    import torch

    if not isinstance(name, str):
        raise TypeError(f"The device must be 'auto', 'cpu' or 'cuda'. Got {name!r} instead.")
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
