"""One step as a program: a straight list of tensor operations.

A step is run once and every operation that reaches a tensor is noted, those of automatic differentiation among them.
Replaying the list does the same arithmetic without building a graph and without any Python of the step itself. The list
can also be compiled; PyTorch keeps what it compiled on disk, so that a later run of the same form starts in seconds.
Tensors that the losses hold, such as the data, become arguments of the program: what is compiled serves any data.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fsla.problem import Sample
from fsla.solver import State
from fsla.training.nest import form, rebuild, tensors

aten = torch.ops.aten
Step = Callable[[State, Sample], State]


class Program:
    """The step for states and samples of one form."""

    def __init__(self, step: Step, state: State, xi: Sample, *, compiled: bool = False) -> None:
        own, drawn = tensors(state), tensors(xi)

        def flat(*values: Tensor) -> list[Tensor]:
            after = step(rebuild(state, values[: len(own)]), rebuild(xi, values[len(own) :]))
            if form(after) != form(state):
                raise ValueError("A step that is captured must leave the state in the form that it found.")
            return tensors(after)

        module = make_fx(flat)(*own, *drawn)
        self._held = _tidied(module)
        self._like, self._run = state, module.forward
        if compiled:
            self._run = _compiled(module, [*own, *drawn, *self._held])

    def run(self, state: list[Tensor], xi: list[Tensor]) -> list[Tensor]:
        """The tensors of the next state."""
        with torch.no_grad():
            return list(self._run(*state, *xi, *self._held))

    def __call__(self, state: State, xi: Sample) -> State:
        after: State = rebuild(self._like, self.run(tensors(state), tensors(xi)))
        return after


def _tidied(module: fx.GraphModule) -> list[Tensor]:
    """Drops what nothing reads, makes the tensors that the module holds its last arguments, and returns them."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default):  # where no graph is built, these do nothing
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    _drop_zeros(graph)
    graph.eliminate_dead_code()
    last = next(node for node in reversed(graph.nodes) if node.op == "placeholder")
    held: dict[int, tuple[Tensor, fx.Node]] = {}
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        tensor = getattr(module, str(node.target))
        if id(tensor) not in held:
            with graph.inserting_after(last):
                last = graph.placeholder(f"held_{len(held)}")
            held[id(tensor)] = tensor, last
        node.replace_all_uses_with(held[id(tensor)][1])
        graph.erase_node(node)
    module.recompile()
    return [tensor for tensor, _ in held.values()]


def _drop_zeros(graph: fx.Graph) -> None:
    """Replaces x + 0 by x, where the 0 follows from a tangent that is not there.

    Forward mode takes the tangent of what does not move, such as the images, for zeros, and convolves them.
    """
    zero: set[fx.Node] = set()
    for node in list(graph.nodes):
        first, second = (*node.args, None, None)[:2]
        if node.target in (aten.zeros.default, aten.zeros_like.default, aten._efficientzerotensor.default):
            known = not any(_mutates(user) for user in node.users)
        elif node.target in (aten.expand.default, aten.view.default):
            known = first in zero
        elif node.target is aten.convolution.default:
            known = (first in zero or second in zero) and node.args[2] is None
        elif node.target is operator.getitem and first.target is aten.convolution_backward.default:
            images_or_kernel = {1: first.args[1], 0: first.args[2]}  # which one the gradient by the other is linear in
            known = images_or_kernel.get(second) in zero
        elif node.target is aten.add.Tensor and isinstance(second, fx.Node) and not node.kwargs:
            known = first in zero and second in zero
            rest = second if first in zero else first
            if (first in zero or second in zero) and not known and _alike(rest, node):
                node.replace_all_uses_with(rest)
        else:
            known = False
        if known:
            zero.add(node)


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _alike(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return bool(x.shape == y.shape and x.dtype == y.dtype)


def _compiled(module: fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
    from torch._inductor import compile as compile_program  # seconds to import

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the compiler's advice on settings that are the user's
        run: Callable[..., Any] = compile_program(module, example)
    return run
