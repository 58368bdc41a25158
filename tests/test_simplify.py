"""Simplified programs compute what they did, with fewer operations."""

import pytest
import torch

from fsla.train._simplify import simplify
from fsla.train._torch_private import mutates, trace, without_mutation
from support import normal

aten = torch.ops.aten


def both(f, *args):
    """The program of f before and after, and how often each calls an operation."""
    plain, simple = trace(f, args), without_mutation(trace(f, args), args)
    simplify(simple.graph)
    simple.graph.lint()
    simple.recompile()
    for a, b in zip(plain(*args), simple(*args), strict=True):
        assert a.dtype == b.dtype
        assert torch.allclose(a.double(), b.double(), rtol=1e-13, atol=1e-13)
    return simple.graph


def count(graph, *targets):
    return sum(node.target in targets for node in graph.nodes)


def test_what_is_computed_twice_is_computed_once():
    def f(x, i):
        return [x[i].exp() + 1, x[i].exp() * 2]

    graph = both(f, normal(5, 3), torch.tensor([0, 2]))
    assert count(graph, aten.index.Tensor) == count(graph, aten.exp.default) == 1


def test_numbers_of_another_type_are_other_arguments():
    def f(x):
        return [torch.full((3,), 1), torch.full((3,), 1.0), torch.full((3,), True), x + 1]

    both(f, normal(3))


def test_products_are_merged_where_their_results_are_read_late():
    def f(x, a, bias):
        first = torch.addmm(bias, x, a)
        second = x @ (a.exp() + 1)
        third = x @ second
        return [first + 1, second, third, x @ (second + 1)]

    graph = both(f, normal(4, 4), normal(4, 3, seed=1), normal(3, seed=2))
    assert count(graph, aten.mm.default, aten.addmm.default) == 2


def test_thin_products_with_one_operand_are_one_product():
    def f(x, a, b, c, bias):
        left = torch.addmm(bias, x, a), x @ b, x @ c.t()
        return [*left, a.t() @ x.t(), (left[1] + 1).t() @ x]

    graph = both(f, normal(7, 5), normal(5, 2, seed=1), normal(5, 3, seed=2), normal(4, 5, seed=3), normal(2, seed=4))
    assert count(graph, aten.mm.default, aten.addmm.default) == 3


@pytest.mark.parametrize("look", [torch.exp, torch.t, lambda y: y])
def test_a_product_that_needs_another_is_not_merged_with_it(look):
    def f(x, a):
        first = x @ a
        return [first, x @ look(first)]

    graph = both(f, normal(4, 4), normal(4, 4, seed=1))
    assert count(graph, aten.mm.default) == 2


def test_large_products_are_left_alone():
    graph = both(lambda x, a, b: [x @ a, x @ b], normal(3, 4), normal(4, 70, seed=1), normal(4, 70, seed=2))
    assert count(graph, aten.mm.default) == 2


def test_writing_in_place_becomes_plain():
    def f(x):
        y = x * 2
        z = y + 1
        y.add_(5)
        return [y * z, y, z]

    graph = both(f, normal(4))
    assert not any(map(mutates, graph.nodes))


def test_zeros_that_are_written_to_are_not_zeros():
    def f(x, i):
        out = torch.zeros(5, dtype=x.dtype)
        return [out + x.sum(), out.index_add_(0, i, x) + torch.zeros(5, dtype=x.dtype)]

    both(f, normal(3), torch.tensor([1, 1, 4]))


@pytest.mark.parametrize("look", [lambda y: y[:2], lambda y: y.view(2, 2), lambda y: y.split(2)[1], lambda y: y[None]])
def test_what_is_seen_through_a_view_is_left_alone(look):
    def f(x):
        y = x * 2
        part = look(y)
        y.mul_(3)
        return [part + 1, y + 1, x * 2]

    both(f, normal(4))


def test_factors_of_a_sum_of_products_count():
    def f(x, a, b, bias):
        return [torch.addmm(bias, x, a, alpha=0.5, beta=2.0), x @ b]

    both(f, normal(7, 5), normal(5, 2, seed=1), normal(5, 3, seed=2), normal(2, seed=4))
