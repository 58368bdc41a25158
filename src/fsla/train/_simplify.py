"""Simplifications of a program without mutation, each of which leaves its numbers as they are, to rounding.

drop_zeros         x + 0 becomes x, where the 0 follows from a tangent that is not there
merge_repeats      what is computed twice from the same operands, such as a batch's rows of the data, is computed once
merge_products     x @ A and x @ B become x @ [A B]: products with one operand in common are one product
"""

from __future__ import annotations

import operator

import torch
from torch import fx

aten = torch.ops.aten
THIN = 64
"""Products with so few columns (or rows) are bound by reading x; for larger ones the copy into [A B] costs more."""
_VIEWS = (aten.t.default, aten.view.default, aten.expand.default, aten.transpose.int, aten.permute.default)
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten._efficientzerotensor.default)


def simplify(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default):  # where no graph is built, these do nothing
            node.replace_all_uses_with(_operand(node))
            graph.erase_node(node)
    graph.eliminate_dead_code()
    drop_zeros(graph)
    merge_repeats(graph)
    merge_products(graph)
    graph.eliminate_dead_code()


def drop_zeros(graph: fx.Graph) -> None:
    """Forward mode takes the tangent of what does not move, such as the images, for zeros, and convolves them."""
    zero: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_zero(node, zero):
            zero.add(node)
        elif node.target is aten.add.Tensor and not node.kwargs:
            for summand, rest in (node.args, node.args[::-1]):
                if summand in zero and isinstance(rest, fx.Node) and _alike(rest, node):
                    node.replace_all_uses_with(rest)


def _is_zero(node: fx.Node, zero: set[fx.Node]) -> bool:
    """Whether a node is known to be zero, from those before it that are."""
    first, second = (*node.args, None, None)[:2]
    if node.target in _ZEROS:
        return True
    if node.target in (aten.expand.default, aten.view.default):
        return first in zero
    if node.target is aten.add.Tensor:
        return first in zero and second in zero
    if node.target is aten.convolution.default:
        return (first in zero or second in zero) and node.args[2] is None
    if node.target is operator.getitem and isinstance(first, fx.Node):
        if first.target is not aten.convolution_backward.default:
            return False
        linear_in = {0: _operand(first, 2), 1: _operand(first, 1)}  # the gradient by images or kernel, in the other one
        return isinstance(second, int) and linear_in.get(second) in zero
    return False


def merge_repeats(graph: fx.Graph) -> None:
    first: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and "empty" not in str(node.target):
            same = first.setdefault(f"{node.target} {node.args} {node.kwargs}", node)  # 1 and 1.0 are not the same
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def merge_products(graph: fx.Graph) -> None:
    """Merges matrix products x @ A_i, and A_i @ x, with one x, where all A_i are there before any result is read."""
    for side in (0, 1):
        of_one: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.target in (aten.mm.default, aten.addmm.default) and not node.kwargs and _size(node, side) <= THIN:
                of_one.setdefault(_factor(node, side), []).append(node)
        for products in of_one.values():
            _merge_some(graph, products, side)


def _merge_some(graph: fx.Graph, products: list[fx.Node], side: int) -> None:
    """Merges the products with the earliest factors, as many as can be, and then those that are left."""
    at = {node: i for i, node in enumerate(graph.nodes)}
    arguments = max(at[node] for node in graph.nodes if node.op == "placeholder")

    def ready(product: fx.Node) -> int:
        return max(arguments, *(at[_looked_at(_factor(product, i))] for i in (0, 1)))

    def is_read_too_early(product: fx.Node) -> bool:
        """Whether another factor is made of this product, or anything else is before all factors are ready."""
        factors = [_looked_at(_factor(p, 1 - side)) for p in some]
        return product in factors or any(at[user] <= ready(some[-1]) for user in product.users)

    some = sorted(products, key=ready)
    while len(some) > 1 and any(map(is_read_too_early, some)):
        some.pop()
    if len(some) > 1:
        _merge(graph, some, side, at, ready(some[-1]))
    left = [product for product in products if product not in some]
    if len(left) > 1:
        _merge_some(graph, left, side)


def _merge(graph: fx.Graph, products: list[fx.Node], side: int, at: dict[fx.Node, int], ready: int) -> None:
    axis = 1 - side

    def there(x: fx.Node) -> fx.Node:
        """The node itself, or if it comes later, its views made anew."""
        return x if at[x] <= ready else graph.node_copy(x, there)

    following = list(graph.nodes)[ready + 1]
    with graph.inserting_before(following):
        joined = graph.call_function(aten.cat.default, ([there(_factor(p, axis)) for p in products], axis))
        common = there(_factor(products[0], side))
        merged = graph.call_function(aten.mm.default, (common, joined) if side == 0 else (joined, common))
    begin = 0
    for product in products:
        end = begin + _size(product, side)
        with graph.inserting_before(product if at[product] > ready else following):
            part = graph.call_function(aten.slice.Tensor, (merged, axis, begin, end))
            if product.target is aten.addmm.default:
                part = graph.call_function(aten.add.Tensor, (part, _operand(product)))
        part.meta["val"] = product.meta["val"]
        product.replace_all_uses_with(part)
        begin = end
    for product in products:
        graph.erase_node(product)


def _operand(node: fx.Node, i: int = 0) -> fx.Node:
    x = node.args[i]
    assert isinstance(x, fx.Node)
    return x


def _factor(product: fx.Node, side: int) -> fx.Node:
    """The left or the right factor; an addmm has its summand before them."""
    return _operand(product, side - 2)


def _size(product: fx.Node, side: int) -> int:
    """How many columns (or rows) the factor has that is not the common one."""
    return int(_factor(product, 1 - side).meta["val"].shape[1 - side])


def _looked_at(x: fx.Node) -> fx.Node:
    """What a chain of views looks at."""
    while x.target in _VIEWS:
        x = _operand(x)
    return x


def _alike(a: fx.Node, b: fx.Node) -> bool:
    x = a.meta["val"]
    y = b.meta["val"]
    return bool(x.shape == y.shape and x.dtype == y.dtype)
