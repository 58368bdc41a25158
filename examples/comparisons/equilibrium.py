"""The equilibrium model beside the same network unrolled to three and to thirty layers."""

from functools import partial

import torch
from equilibrium import Layer, error_on, learn_layer, load

METRIC, BETTER, DIGITS = "squared error / variance on test samples", "lower", 3
STEPS, SMALL, SIZE = 1500, 60, (7, 3.6)
DEPTHS = (1, 2, 3, 5, 10, 20, 30, 50, 100)
SUMMARY = [
    (
        "An equilibrium model",
        "error / variance; lower is better",
        "3 layers",
        "without an adjoint (one_step)",
        "fsla (SOBA)",
    ),
]
"""Lines of the gallery's table: title, score, and the methods that it shows."""


def unroll(train, depth, steps):
    layer = Layer()
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        (layer.iterate(train[0], depth) - train[1]).square().mean().backward()
        optimizer.step()
    return layer


def unrolled(depth, test_depth, steps, seed):
    train, test = load(seed)
    return error_on(unroll(train, depth, steps), test, test_depth)


def learned(algorithm, steps, seed):
    train, test = load(seed)
    return error_on(learn_layer(train, steps, algorithm), test)


def methods(steps):
    return {
        "3 layers": partial(unrolled, 3, 3, steps),
        "3 layers, iterated 100 times when tested": partial(unrolled, 3, 100, steps),
        "30 layers": partial(unrolled, 30, 30, steps),
        "without an adjoint (one_step)": partial(learned, "one_step", steps),
        "fsla (SOBA)": partial(learned, "soba", steps),
    }


def draw(figure, steps):
    train, test = load(0)
    layers = {f"{depth} layers unrolled": unroll(train, depth, steps) for depth in (3, 30)}
    layers["fsla, equilibrium"] = learn_layer(train, steps)
    ax = figure.subplots()
    for label, layer in layers.items():
        ax.loglog(DEPTHS, [error_on(layer, test, depth) for depth in DEPTHS], "o-", label=label)
    ax.set(xlabel="iterations when tested", ylabel="error / variance", ylim=(0.01, 0.5))
    ax.set_xticks(DEPTHS, DEPTHS)
    ax.set_yticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.5], ["0.01", "0.02", "0.05", "0.1", "0.2", "0.5"])
    ax.minorticks_off()
    ax.legend()
