"""A program in parts computes what the whole does, and its parts need nothing of one another."""

import gc
import weakref

import pytest
import torch
from torch import fx

from fsla.train._parts import SideBySide, split
from fsla.train._torch_private import trace
from support import normal

CPU = torch.device("cpu")


def step(w, x, y):
    """Two batches, each with a product of its own, then one of both; w alone is squared first."""
    w = w * w
    a, b = (x @ w).exp().sum(0), (y @ w).sin().sum(0)
    return [w + a - b, a, w * 2]


def as_is(module, example):
    return module


def parts(f, args, batches):
    module = trace(f, args)
    return module, split(module, batches)


def test_parts_compute_what_the_whole_does():
    args = normal(3, 3), normal(5, 3, seed=1), normal(4, 3, seed=2)
    module, made = parts(step, args, [[1], [2]])
    names = [name for name, _ in made.named_children()]
    assert sorted(name.removeprefix("submod_") for name in names) == ["after", "alone_0", "alone_1", "before"]
    for again in args, tuple(t + 1 for t in args):
        for a, b in zip(module(*again), SideBySide(made, as_is, CPU)(*again), strict=True):
            assert torch.equal(a, b)


def test_a_part_reads_its_own_batch_alone():
    args = normal(3, 3), normal(5, 3, seed=1), normal(4, 3, seed=2)
    _, made = parts(step, args, [[1], [2]])
    of_batch = {node: node.name for node in made.graph.nodes if node.op == "placeholder"}
    x, y = list(of_batch)[1:]
    for node in made.graph.nodes:
        if "alone" in str(node.target):
            assert len({x, y} & set(node.all_input_nodes)) == 1
            assert not any("alone" in str(of.target) for of in node.all_input_nodes)


@pytest.mark.parametrize("batches", [[[1, 2]], [[1]], []])
def test_there_is_nothing_to_split_where_one_batch_has_all_the_work(batches):
    assert parts(step, (normal(3, 3), normal(5, 3, seed=1), normal(4, 3, seed=2)), batches)[1] is None


def test_nothing_is_held_between_calls():
    args = [normal(3, 3), normal(5, 3, seed=1), normal(4, 3, seed=2)]
    run = SideBySide(parts(step, args, [[1], [2]])[1], as_is, CPU)
    alive = [weakref.ref(t) for t in (*args, *run(*args))]
    del args
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_every_part_is_compiled_once():
    made = []

    def compiler(module, example):
        assert isinstance(module, fx.GraphModule)
        made.append(len(example))
        return module

    args = normal(3, 3), normal(5, 3, seed=1), normal(4, 3, seed=2)
    run = SideBySide(parts(step, args, [[1], [2]])[1], compiler, CPU)
    run(*args), run(*args)
    assert len(made) == 4
