"""Packages that only some users need: what brings them when one is missing."""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {
    "data": ("PIL", "jinja2", "markupsafe", "pandas", "rich", "scipy", "sklearn", "threadpoolctl", "typer"),
    "encoder": ("tokenizers",),
    "excel": ("openpyxl",),
    "dask": ("dask",),
    "parquet": ("pyarrow",),
    "tensorboard": ("tensorboard",),
    "accelerate": ("accelerate",),
    "transformers": ("transformers", "accelerate"),
    "lightning": ("lightning",),
}
"""The modules of each extra."""


def require(extra: str) -> None:
    """Raise ModuleNotFoundError unless every module of an extra is installed."""
    for module in EXTRAS[extra]:
        if find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def install_hint(error: ModuleNotFoundError) -> str:
    """Return one line: which module is missing and how to install it, as far as fsla declares it."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if module in modules:
            return f"The module {module} is not installed. Install it with: pip install 'fsla[{extra}]'"
    return str(error)


def require_for(extra: str, name: str) -> None:
    """Raise ImportError, with how to install it, unless every module of an extra that `name` needs is installed."""
    try:
        require(extra)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"Cannot load {name}. The module {error.name} is not installed. "
            f"Install it with: pip install 'fsla[{extra}]'"
        ) from error
