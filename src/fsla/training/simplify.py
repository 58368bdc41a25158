"""Simplifications of a program, each of which leaves its numbers as they are, to rounding.

without_mutation   x.add_(y) becomes x + y, with later readers of x reading the sum
drop_zeros         x + 0 becomes x, where the 0 follows from a tangent that is not there
once               what is computed twice from the same operands is computed once
merge_products     x @ A and x @ B become x @ [A B]: products with one operand in common are one product
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
THIN = 64
"""Products with so few columns (or rows) are bound by reading x; for larger ones the copy into [A B] costs more."""
_VIEWS = (aten.t.default, aten.view.default, aten.expand.default, aten.transpose.int, aten.permute.default)


def simplify(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default):  # where no graph is built, these do nothing
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    if not without_mutation(graph):
        return
    drop_zeros(graph)
    once(graph)
    merge_products(graph)
    graph.eliminate_dead_code()


def mutates(node: fx.Node) -> bool:
    """Whether an operation writes into one of its operands."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def without_mutation(graph: fx.Graph) -> bool:
    """Replaces operations that write in place; False if one cannot be, or not safely."""
    found = [node for node in graph.nodes if mutates(node)]
    replaced = []
    for node in found:
        packet, overload = node.target._schema.name.split("::")[1], node.target._overloadname
        plain = getattr(getattr(aten, packet.removesuffix("_"), None), overload, None)
        target = node.args[0]
        fresh = isinstance(target, fx.Node) and target.op == "call_function" and not _is_view(target)
        seen_through = fresh and any(_is_view(user) for user in target.users)
        if plain is None or not packet.endswith("_") or not fresh or seen_through or mutates(target):
            return False
        replaced.append((node, plain))
    for node, plain in replaced:
        before, later = node.args[0], False
        for user in list(graph.nodes):  # in order
            later |= user is node
            if later and user is not node and before in user.all_input_nodes:
                user.replace_input_with(before, node)
        node.target = plain
    return True


def drop_zeros(graph: fx.Graph) -> None:
    """Forward mode takes the tangent of what does not move, such as the images, for zeros, and convolves them."""
    zero: set[fx.Node] = set()
    for node in list(graph.nodes):
        first, second = (*node.args, None, None)[:2]
        known = False
        if node.target in (aten.zeros.default, aten.zeros_like.default, aten._efficientzerotensor.default):
            known = True
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
        if known:
            zero.add(node)


def once(graph: fx.Graph) -> None:
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is not operator.getitem and not _repeatable(node.target):
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        if key in first:
            node.replace_all_uses_with(first[key])
            graph.erase_node(node)
        else:
            first[key] = node


def merge_products(graph: fx.Graph) -> None:
    """Merges matrix products x @ A_i, and A_i @ x, with one x, where all A_i are there before any result is read."""
    for side in (0, 1):
        groups: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.target in (aten.mm.default, aten.addmm.default) and not node.kwargs:  # alpha, beta
                groups.setdefault(_factors(node)[side], []).append(node)
        for common, nodes in groups.items():
            thin = [n for n in nodes if _factors(n)[1 - side].meta["val"].shape[1 - side] <= THIN]
            if len(thin) > 1:
                _merge(graph, common, thin, side)


def _repeatable(target: Any) -> bool:
    """Whether an operation gives the same numbers whenever it is called with the same operands."""
    if not isinstance(target, torch._ops.OpOverload) or "empty" in str(target):
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


def _merge(graph: fx.Graph, common: fx.Node, nodes: list[fx.Node], side: int) -> None:
    order = {node: i for i, node in enumerate(graph.nodes)}
    others = [_factors(node)[1 - side] for node in nodes]
    start = max((_source(x) for x in [common, *others]), key=order.__getitem__)
    if start.op in ("placeholder", "get_attr"):
        start = next(node for node in reversed(graph.nodes) if node.op in ("placeholder", "get_attr"))
    if any(order[user] <= order[start] for node in nodes for user in node.users):
        return
    axis, sizes = 1 - side, [x.meta["val"].shape[1 - side] for x in others]
    at = _Chain(graph, start)
    left, *rights = [at.again(x, order, order[start]) for x in [common, *others]]
    joined = at.call(aten.cat.default, (rights, axis))
    product = at.call(aten.mm.default, (left, joined) if side == 0 else (joined, left))
    begin = 0
    for node, size in zip(nodes, sizes, strict=True):
        part = at.call(aten.slice.Tensor, (product, axis, begin, begin + size))
        part.meta["val"] = node.meta["val"]
        begin += size
        if node.target is aten.addmm.default:
            with graph.inserting_before(node):
                part = graph.call_function(aten.add.Tensor, (part, node.args[0]))
                part.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(part)
        graph.erase_node(node)


class _Chain:
    """Inserts nodes one after another."""

    def __init__(self, graph: fx.Graph, last: fx.Node) -> None:
        self._graph, self._last = graph, last

    def call(self, target: Any, args: tuple[Any, ...]) -> fx.Node:
        with self._graph.inserting_after(self._last):
            self._last = self._graph.call_function(target, args)
        return self._last

    def again(self, x: fx.Node, order: dict[fx.Node, int], limit: int) -> fx.Node:
        """The node itself, or if it comes later, its views made anew."""
        if order[x] <= limit:
            return x
        source = self.again(x.args[0], order, limit)  # type: ignore[arg-type]
        made = self.call(x.target, (source, *x.args[1:]))
        made.meta["val"] = x.meta["val"]
        return made


def _factors(node: fx.Node) -> tuple[Any, Any]:
    """The two factors of a product; an addmm has its summand before them."""
    return node.args[-2], node.args[-1]


def _source(x: fx.Node) -> fx.Node:
    """What a chain of views looks at."""
    while x.target in _VIEWS:
        x = x.args[0]  # type: ignore[assignment]
    return x


def _is_view(node: fx.Node) -> bool:
    """Whether a node may look into another's memory."""
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return any(r.alias_info is not None for r in node.target._schema.returns) and not mutates(node)


def _alike(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return bool(x.shape == y.shape and x.dtype == y.dtype)


def _frozen(x: Any) -> Any:
    if isinstance(x, dict):
        return tuple((k, _frozen(v)) for k, v in sorted(x.items()))
    if isinstance(x, Iterable) and not isinstance(x, str | fx.Node):
        return tuple(map(_frozen, x))
    return (type(x).__name__, x)  # 1, 1.0 and True are equal, and not the same argument
