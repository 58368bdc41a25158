"""The private names of PyTorch that fsla uses. No other module uses one.

A version of torch may drop a private name, and `import fsla` works without any of them. Where one is missing, a slower
public form takes its place, or the call that needs it raises a RuntimeError that names it:

| name | without it |
|---|---|
| `torch._foreach_*` | one operation for each tensor |
| `Tensor._version` | writes in place go unnoticed |
| `torch._decomp.decompositions_for_jvp` | loaded by torch at first use |
| `Module._parameters`, `Module._modules` | `make_functional` raises |
| `Module._buffers` | `Module.buffers`, which is slower |
| `torch.utils.checkpoint._checkpoint_without_reentrant_generator` | `make_functional` raises |
| `torch.ops._c10d_functional` | averaging over ranks raises |
| `Optimizer._warned_capturable_if_run_uncaptured` | optimisers may warn of steps outside of a capture |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

_GENERATOR = "_checkpoint_without_reentrant_generator"


def _add(x: Sequence[Tensor], y: Sequence[Tensor], *, alpha: float = 1.0) -> list[Tensor]:
    return [torch.add(a, b, alpha=alpha) for a, b in zip(x, y, strict=True)]


def _add_(x: Sequence[Tensor], y: Sequence[Tensor]) -> None:
    for a, b in zip(x, y, strict=True):
        a.add_(b)


def _mul(x: Sequence[Tensor], y: Any) -> list[Tensor]:
    factors = y if isinstance(y, list | tuple) else [y] * len(x)
    return [a * b for a, b in zip(x, factors, strict=True)]


def _div_(x: Sequence[Tensor], number: float) -> None:
    for a in x:
        a.div_(number)


def _norm(x: Sequence[Tensor], ord: float = 2.0, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(a, ord, dtype=dtype) for a in x]


def _copy_(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for a, b in zip(to, source, strict=True):
        a.copy_(b)


foreach_add: Callable[..., list[Tensor]] = getattr(torch, "_foreach_add", _add)
foreach_add_: Callable[..., None] = getattr(torch, "_foreach_add_", _add_)
foreach_mul: Callable[..., list[Tensor]] = getattr(torch, "_foreach_mul", _mul)
foreach_div_: Callable[..., None] = getattr(torch, "_foreach_div_", _div_)
foreach_norm: Callable[..., list[Tensor]] = getattr(torch, "_foreach_norm", _norm)
foreach_copy_: Callable[..., None] = getattr(torch, "_foreach_copy_", _copy_)


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return how often each tensor was written to in place, or zeros if torch does not count."""
    tensors = list(tensors)
    try:
        return [t._version for t in tensors]
    except AttributeError:
        return [0] * len(tensors)


def load_forward_mode() -> None:
    """Load what forward mode compiles at its first use."""
    with suppress(ImportError):
        import_module("torch._decomp.decompositions_for_jvp")


def allow_uncaptured_steps(optimizer: torch.optim.Optimizer) -> None:
    """Keep a capturable optimiser from warning of steps outside of a capture."""
    optimizer._warned_capturable_if_run_uncaptured = True


def module_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dictionary in which a module has its own parameters."""
    parameters: dict[str, nn.Parameter | None] = _require(module, "_parameters", "make_functional")
    return parameters


def module_buffers(module: nn.Module) -> list[Tensor]:
    """Return the buffers that a module has itself."""
    try:
        return [b for b in module._buffers.values() if b is not None]
    except AttributeError:
        return list(module.buffers(recurse=False))


def module_parts(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dictionary in which a module has its direct parts."""
    parts: dict[str, nn.Module | None] = _require(module, "_modules", "make_functional")
    return parts


def check_recomputation() -> None:
    """Raise unless activation checkpoints can recompute with other parameters."""
    _require(checkpoint, _GENERATOR, "make_functional")


@contextmanager
def recomputing_with(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Have activation checkpoints of the block recompute through `wrap(function)`."""
    original = _require(checkpoint, _GENERATOR, "make_functional")

    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(wrap(function), *args, **kwargs)

    setattr(checkpoint, _GENERATOR, generator)
    try:
        yield
    finally:
        setattr(checkpoint, _GENERATOR, original)


def all_reduce_sum(flat: Tensor, group_name: str | None) -> Tensor:
    """Return the sum over the ranks of a group, by an operation that a captured step repeats."""
    collectives = _require(torch.ops, "_c10d_functional", "Averaging over ranks")
    pending = _require(collectives, "all_reduce", "Averaging over ranks")(flat, "sum", group_name)
    total: Tensor = _require(collectives, "wait_tensor", "Averaging over ranks")(pending)
    return total


def _require(owner: Any, name: str, user: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        place = getattr(owner, "__name__", type(owner).__name__)
        raise RuntimeError(
            f"{user} needs {place}.{name}, which torch {torch.__version__} lacks. Use torch 2.11 to 2.13."
        ) from None
