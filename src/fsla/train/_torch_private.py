"""What engines use of PyTorch without its promise to keep it: all in this file.

A release without one of these costs speed alone: the error says so, and "auto" then takes its steps eagerly.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, fx

Target = Callable[..., object] | str
"""What a node of a program calls."""


@contextmanager
def _needing(what: str) -> Iterator[None]:
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"Captured steps need {what}, which PyTorch {torch.__version__} does not have ({error}). "
            "Use engine='eager', or a version that fsla was tested with."
        ) from error


def trace(f: Callable[..., object], example: Sequence[Tensor]) -> fx.GraphModule:
    """The tensor operations of f, those of automatic differentiation among them, as a program."""
    with _needing("torch.fx.experimental.proxy_tensor.make_fx"):
        from torch._guards import TracingContext, tracing
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
    with tracing(TracingContext(FakeTensorMode())):  # one for all nodes: each would make its own, half of the time
        return make_fx(f)(*example)


def without_mutation(module: fx.GraphModule, example: Sequence[Tensor]) -> fx.GraphModule:
    """The same program, with x + y in the place of x.add_(y)."""
    if not any(map(mutates, module.graph.nodes)):
        return module
    return trace(torch.func.functionalize(module, remove="mutations"), example)


def compile_program(module: fx.GraphModule, example: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    with _needing("torch._inductor.compile"):
        from torch._inductor import compile as compile_with_inductor  # seconds to import
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the compiler's advice on settings that are the user's
        run: Callable[..., Sequence[Tensor]] = compile_with_inductor(module, [*example])
    return run


def mutates(node: fx.Node) -> bool:
    """Whether an operation writes into one of its operands."""
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def watching(look: Callable[[Any, Sequence[object]], None]) -> AbstractContextManager[object]:
    """Within it, `look` is called with every tensor operation and its operands before it is done."""
    with _needing("torch.utils._python_dispatch.TorchDispatchMode"):
        from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
        ) -> object:
            look(func, args)
            return func(*args, **(kwargs or {}))

    return Watch()  # type: ignore[no-untyped-call]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Makes an operation for which the host waits for the GPU, such as .item(), a RuntimeError."""
    with _needing("torch.cuda.set_sync_debug_mode"):
        mode = torch.cuda.get_sync_debug_mode()
        set_mode = torch.cuda.set_sync_debug_mode
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        set_mode("error")
    try:
        yield
    finally:
        set_mode(mode)
