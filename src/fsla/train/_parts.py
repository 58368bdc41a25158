"""A program in parts that need not wait for one another.

What depends on one batch alone stands in no relation to what depends on another alone: the inner gradient and H v, the
outer gradient, the cross product at the old point. A single batch leaves much of a GPU idle, so each such part has a
stream of its own.

    before    what depends on no batch, such as the new λ
    alone     for each batch, what depends on it and on no other
    after     what depends on several
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.split_module import split_module

aten = torch.ops.aten
BEFORE = "before"
AFTER = "after"
_LONG = (
    aten.convolution.default, aten.convolution_backward.default, aten.mm.default, aten.addmm.default, aten.bmm.default,
)  # fmt: skip
Run = Callable[..., Sequence[Tensor]]


def split(module: fx.GraphModule, batches: Sequence[Sequence[int]]) -> fx.GraphModule | None:
    """The program in parts, or None where no two can run side by side. `batches`: the arguments that make up each.

    The program must be without mutation: the order of writing and reading is not in its graph.
    """
    arguments = [node for node in module.graph.nodes if node.op == "placeholder"]
    reads: dict[fx.Node, frozenset[int]] = dict.fromkeys(arguments, frozenset())
    reads |= {arguments[i]: frozenset({b}) for b, own in enumerate(batches) for i in own}
    for node in module.graph.nodes:
        if node.op == "call_function":
            reads[node] = frozenset[int]().union(*(reads[x] for x in node.all_input_nodes))
    if len({reads[node] for node in module.graph.nodes if node.target in _LONG and len(reads[node]) == 1}) < 2:
        return None

    def part(node: fx.Node) -> str:
        own = reads[node]
        return f"alone_{min(own)}" if len(own) == 1 else AFTER if own else BEFORE

    return split_module(module, None, part)  # type: ignore[arg-type]  # its callback may return a name, as documented


class SideBySide(fx.Interpreter):
    """Runs the parts of a program, each one compiled when it is first met; on a GPU each on its own stream."""

    def __init__(
        self, parts: fx.GraphModule, compiler: Callable[[fx.GraphModule, list[Tensor]], Run], device: torch.device
    ) -> None:
        super().__init__(parts)
        self._compiler = compiler
        self._device = device
        self._made: dict[str, Run] = {}
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._at_work: list[torch.cuda.Stream] = []

    def call_module(self, target: object, args: tuple[Any, ...], kwargs: object) -> Sequence[Tensor]:
        name = str(target)
        if name not in self._made:
            part = self.module.get_submodule(name)
            assert isinstance(part, fx.GraphModule)
            self._made[name] = self._compiler(part, list(args))
        if AFTER in name:
            self._wait()
        if self._device.type != "cuda" or AFTER in name or BEFORE in name:
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
            self.env = {}
            self.args_iter = iter(())
