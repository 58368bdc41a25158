"""The structured problem gives the numbers of the general one."""

import pytest
import torch
from torch import nn

import fsla
from fsla import Point, Problem, Sample, WeightedProblem, functional, tree
from support import F64, normal


def make(dtype=F64, ridge=True):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 4)
    ).to(dtype)  # fmt: skip
    omega, net = functional(model)
    x, y = normal(30, 1, 4, 4).to(dtype), torch.arange(30) % 4

    def each(omega, index):
        return nn.functional.cross_entropy(net(omega, x[index]), y[index], reduction="none")

    problem = WeightedProblem(
        each,
        lambda lam, index: lam["w"][index].sigmoid() * lam["scale"],
        lambda lam, omega, index: each(omega, index).mean(),
        regulariser=(lambda omega: 0.1 * sum(t.square().sum() for t in omega.values())) if ridge else None,
    )
    at = Point({"w": normal(30, seed=1).to(dtype), "scale": torch.tensor(0.7, dtype=dtype)}, omega)
    return problem, Problem(problem.inner_loss, problem.outer_loss), at


@pytest.mark.parametrize("ridge", [True, False])
@pytest.mark.parametrize("index", [torch.arange(30), torch.tensor([3, 3, 7, 0])])  # a sample may be drawn twice
def test_every_oracle_is_that_of_the_general_problem(ridge, index):
    problem, general, at = make(ridge=ridge)
    v = tree.unflatten(normal(tree.size(at.omega), seed=2), at.omega)
    u = tree.unflatten(normal(tree.size(at.lam), seed=3), at.lam)
    G, H = problem.inner_at(at, index), general.inner_at(at, index)
    pairs = [(G.cross(v), H.cross(v)), (G.grad, H.grad), (G.hvp(v), H.hvp(v)), (G.cross(v), H.cross(v))]
    pairs += [*zip(G.hvp_cross(v), H.hvp_cross(v), strict=True), (G.cross_t(u), H.cross_t(u))]
    for found, expected in pairs:
        assert float(tree.norm(tree.sub(found, expected))) < 1e-14
        assert not any(t.requires_grad for t in found.values())


@pytest.mark.parametrize("name", ["fsla", "cg", "bp", "soba"])
def test_algorithms_take_the_same_steps(name):
    problem, general, at = make()
    solver = fsla.algorithms.ALL[name](fsla.rates.constant(0.5, 0.1, 0.1, 0.5))
    g = torch.Generator().manual_seed(0)
    draw = lambda: torch.randint(30, (8,), generator=g)  # noqa: E731
    samples = [Sample.draw("grouped", draw, draw) for _ in range(6)]
    a, b = solver.init(problem, at, samples[0]), solver.init(general, at, samples[0])
    for xi in samples:
        a, b = solver.step(problem, a, xi), solver.step(general, b, xi)
    assert float(tree.norm(tree.sub(a.at.lam, b.at.lam))) < 1e-13
    assert float(tree.norm(tree.sub(a.at.omega, b.at.omega))) < 1e-13


def test_losses_and_weights_must_be_vectors_of_one_length():
    problem, _, at = make()
    scalar = WeightedProblem(
        lambda omega, i: problem.sample_losses(omega, i).mean(), problem.sample_weights, problem.outer_loss
    )
    with pytest.raises(ValueError, match=r"one number for each sample.*\(\) and \(2,\).*reduction='none'"):
        _ = scalar.inner_at(at, torch.arange(2)).grad


def test_weights_must_depend_on_lam():
    problem, _, at = make()
    free = WeightedProblem(problem.sample_losses, lambda lam, i: torch.ones(len(i), dtype=F64), problem.outer_loss)
    with pytest.raises(ValueError, match="must depend on lam"):
        free.inner_at(at, torch.arange(2)).cross(at.omega)
