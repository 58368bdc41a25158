"""Learnt tolls beside none, the tolls of theory and random search with as many gradients."""

import math
from functools import partial

import torch
from tolls import GRID, ROADS, City, inner_loss, learn_tolls, no_split, outer_loss
from torch import nn

import fsla

METRIC, BETTER, DIGITS = "total travel time above the planner's optimum, %", "lower", 2
STEPS, SMALL, SIZE = 1000, 60, (9, 3.2)
STEP_COST = 4  # gradients of a step: one of each loss, and two products
SUMMARY = [
    (
        "Tolls",
        "travel time above the optimum, %; lower is better",
        "marginal-cost tolls (theory)",
        "without an adjoint (one_step)",
        "fsla (SOBA)",
    ),
]
"""Lines of the gallery's table: title, score, and the methods that it shows."""


def solved(city, loss, outer):
    split = no_split(city)
    fsla.SOBA(split, outer, inner_loss=loss, outer_loss=outer_loss).solve(city)
    return split


def planned(city):
    """Return the split of a planner: the total travel time at its minimum."""
    unused = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    return solved(city, lambda split, _, city: city.travel_time(split), unused)


def raw(tolls):
    """Return the parameter whose softplus are the tolls."""
    return nn.Parameter(tolls.clamp(min=1e-9).expm1().log())


def excess(city, split):
    best = city.travel_time(planned(city)).item()
    return 100 * (city.travel_time(split).item() / best - 1)


def fixed(tolls_of, seed):
    city = City(seed)
    return excess(city, solved(city, inner_loss, raw(tolls_of(city))))


def none(city):
    return torch.zeros(len(ROADS), dtype=torch.float64)


def theory(city):
    """What a driver costs all others: flow times the derivative of the travel time."""
    return city.free_time * 0.6 * (city.flow(planned(city)).detach() / city.capacity) ** 4


def random_search(steps, seed):
    city, random = City(seed), torch.Generator().manual_seed(seed)
    best, calls = math.inf, 0

    def counted_loss(*arguments):
        nonlocal calls
        calls += 1
        return inner_loss(*arguments)

    while calls < steps * STEP_COST:
        tolls = raw(3 * torch.rand(len(ROADS), generator=random, dtype=torch.float64))
        best = min(best, excess(city, solved(city, counted_loss, tolls)))
    return best


def learned(algorithm, steps, seed):
    city = City(seed)
    return excess(city, learn_tolls(city, steps, algorithm)[1])


def methods(steps):
    return {
        "no tolls": partial(fixed, none),
        "marginal-cost tolls (theory)": partial(fixed, theory),
        "random search, as many gradients": partial(random_search, steps),
        "without an adjoint (one_step)": partial(learned, "one_step", steps),
        "fsla (SOBA)": partial(learned, "soba", steps),
    }


def draw(figure, steps):
    city = City(2)
    before = city.flow(solved(city, inner_loss, raw(none(city)))).detach()
    tolls, split = learn_tolls(city, steps)
    change = city.flow(split).detach() - before
    panels = {"Cars without tolls": before, "Learnt tolls": tolls, "Change: red more cars, blue fewer": change}
    for ax, (title, values) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for (start, end), value in zip(ROADS, values.tolist(), strict=True):
            color = {"C": "0.3", "L": "C1"}[title[0]] if values is not change else "C3" if value > 0 else "C0"
            ax.plot(*zip(start, end, strict=True), color=color, linewidth=0.3 + 7 * abs(value / values.abs().max()))
        ax.plot(*zip(*[(i, j) for i in range(GRID) for j in range(GRID)], strict=True), "o", color="0.3", markersize=4)
        ax.set_title(f"{title}\n(widest: {values.abs().max():.1f})", fontsize=10)
        ax.set_aspect("equal")
        ax.axis("off")
