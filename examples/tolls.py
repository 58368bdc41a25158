"""Tolls that make selfish drivers share the roads as a planner would.

Drivers of four trips split over routes so that each takes the cheapest one (inner variable). A city sets a toll for
each road (outer variable) and wants the total travel time to be small. Theory knows the answer: marginal-cost tolls.

python examples/tolls.py
"""

import sys
from itertools import permutations

import torch
from torch import nn
from torch.nn.functional import softplus

import fsla

GRID = 4  # crossings on a side; roads lead to the right and upwards
TRIPS = [((0, 0), (3, 3)), ((0, 1), (3, 3)), ((1, 0), (3, 2)), ((0, 0), (2, 3))]
ROADS = [((i, j), end) for i in range(GRID) for j in range(GRID) for end in ((i + 1, j), (i, j + 1)) if max(end) < GRID]


def routes(start, end):
    """Return a row for each shortest route from start to end, with 1 at the roads that it takes."""
    rights, ups = end[0] - start[0], end[1] - start[1]
    rows = []
    for moves in sorted(set(permutations("r" * rights + "u" * ups))):
        row, place = torch.zeros(len(ROADS), dtype=torch.float64), start
        for move in moves:
            after = (place[0] + 1, place[1]) if move == "r" else (place[0], place[1] + 1)
            row[ROADS.index((place, after))] = 1
            place = after
        rows.append(row)
    return torch.stack(rows)


class City:
    def __init__(self, seed):
        random = torch.Generator().manual_seed(seed)
        draw = lambda count: torch.rand(count, generator=random, dtype=torch.float64)  # noqa: E731
        self.routes = [routes(*trip) for trip in TRIPS]
        self.free_time, self.capacity = 0.3 + 1.7 * draw(len(ROADS)), 0.5 + draw(len(ROADS))
        self.drivers = 1 + draw(len(TRIPS))

    def flow(self, split):
        """Return the cars on each road."""
        trips = zip(split, self.routes, self.drivers, strict=True)
        return sum(drivers * (logits.softmax(0) @ rows) for logits, rows, drivers in trips)

    def travel_time(self, split):
        """Return the total time: that of a road grows with the fourth power of its load."""
        flow = self.flow(split)
        return (self.free_time * (1 + 0.15 * (flow / self.capacity) ** 4) * flow).sum()


# --8<-- [start:core]
def inner_loss(split, tolls, city):  # Beckmann's potential: at its minimum no driver can do better
    flow = city.flow(split)
    potential = city.free_time * (flow + 0.03 * city.capacity * (flow / city.capacity) ** 5)
    return (potential + softplus(tolls) * flow).sum() + 0.01 * sum(logits.square().sum() for logits in split)


def outer_loss(split, tolls, city):
    return city.travel_time(split)


def no_split(city):
    return nn.ParameterList([torch.zeros(len(rows), dtype=torch.float64) for rows in city.routes])


def learn_tolls(city, steps=1000, algorithm="soba"):
    """Return the tolls, and how the drivers split over the routes with them."""
    split, tolls = no_split(city), nn.Parameter(torch.full((len(ROADS),), -3.0, dtype=torch.float64))
    bilevel = fsla.BilevelOptimizer(
        split,
        tolls,
        inner_loss=inner_loss,
        outer_loss=outer_loss,
        algorithm=algorithm,
    )
    for _ in range(steps):
        bilevel.step(city, city)
    bilevel.solve(city)
    return softplus(tolls.detach()), split


# --8<-- [end:core]
if __name__ == "__main__":
    city = City(seed=0)
    for steps in (0, 500 if "--small" in sys.argv else 1000):
        _, split = learn_tolls(city, steps)
        print(f"total travel time after {steps} steps of the tolls: {city.travel_time(split):.4f}")
