"""A program in parts that need not wait for one another.

What depends on one batch alone stands in no relation to what depends on another alone: the inner gradient and H v, the
outer gradient, the cross product at the old point. A single batch leaves much of a GPU idle, so each such part has a
stream of its own.

    before    what depends on no batch, such as the rates and the new λ
    alone     for each batch, what depends on it and on no other
    after     what depends on several
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.passes.split_module import split_module

from fsla.training.simplify import mutates

aten = torch.ops.aten
BEFORE, AFTER = "before", "after"
_LONG = (
    aten.convolution.default, aten.convolution_backward.default, aten.mm.default, aten.addmm.default, aten.bmm.default,
)  # fmt: skip
Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def split(module: fx.GraphModule, batches: Sequence[Sequence[int]]) -> fx.GraphModule | None:
    """The program in parts, or None where no two can run side by side. `batches`: the arguments that make up each."""
    if any(map(mutates, module.graph.nodes)):  # the order of writing and reading is not in the graph
        return None
    arguments = [node for node in module.graph.nodes if node.op == "placeholder"]
    reads: dict[fx.Node, frozenset[int]] = dict.fromkeys(arguments, frozenset())
    reads |= {arguments[i]: frozenset({b}) for b, own in enumerate(batches) for i in own}
    for node in module.graph.nodes:
        if node.op == "call_function":
            reads[node] = frozenset[int]().union(*(reads[x] for x in node.all_input_nodes))
    long = {reads[node] for node in module.graph.nodes if node.target in _LONG and len(reads[node]) == 1}
    if len(long) < 2:
        return None

    def part(node: fx.Node) -> Any:
        own = reads[node]
        return f"alone_{min(own)}" if len(own) == 1 else AFTER if own else BEFORE

    return split_module(module, None, part)  # type: ignore[arg-type]


class SideBySide(fx.Interpreter):
    """Runs the parts of a program, each one compiled when it is first met; on a GPU each on its own stream."""

    def __init__(self, parts: fx.GraphModule, compiler: Compiler, device: torch.device) -> None:
        super().__init__(parts)
        self._compiler, self._device = compiler, device
        self._made: dict[str, Callable[..., Any]] = {}
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._at_work: list[torch.cuda.Stream] = []

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = str(target)
        if name not in self._made:
            self._made[name] = self._compiler(cast(fx.GraphModule, self.module.get_submodule(name)), list(args))
        if self._device.type != "cuda" or BEFORE in name:
            return self._made[name](*args)
        if AFTER in name:
            self._wait()
            return self._made[name](*args)
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream = self._streams[name]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        self._at_work.append(stream)
        with torch.cuda.stream(stream):
            return self._made[name](*args)

    def _wait(self) -> None:
        for stream in self._at_work:
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self._at_work.clear()

    def __call__(self, *args: Tensor) -> list[Tensor]:
        try:
            out = list(self.run(*args))
            self._wait()
            return out
        finally:  # an interpreter would hold the arguments and the results until the next call
            self._at_work.clear()
            self.env, self.args_iter = {}, iter(())
