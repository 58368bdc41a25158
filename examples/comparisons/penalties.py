"""Learnt penalties beside a single one, with and without what helps against overfitting the validation rows."""

from functools import partial

import numpy as np
import torch
from penalties import inner_loss, learn_penalties, load, validation_loss
from torch import nn

import fsla

METRIC, BETTER, DIGITS = "test loss (cross-entropy)", "lower", 3
STEPS, SMALL, SIZE = 400, 40, (9, 3.4)
SUMMARY = [
    (
        "495 penalties",
        "test loss; lower is better",
        "one penalty, grid of 30",
        "without an adjoint (one_step), with shrinkage",
        "fsla (SOBA), with shrinkage",
    ),
]
"""Lines of the gallery's table: title, score, and the methods that it shows."""


def solved(log_penalties, train):
    model = nn.Linear(train[0].shape[1], 2)
    nn.init.zeros_(model.weight)
    fsla.SOBA(model, nn.Parameter(log_penalties), inner_loss=inner_loss, outer_loss=validation_loss).solve(train)
    return model


def loss_after(log_penalties, data, part=2):
    model = solved(log_penalties, data[0])
    return validation_loss(model, data[part]).item()


def best_of(candidates, data):
    """The test loss of the penalties with the least validation loss."""
    return loss_after(min(candidates, key=lambda c: loss_after(c, data, part=1)), data)


def grid(seed):
    data = load(seed)
    return best_of([torch.full((495,), float(a)) for a in torch.linspace(-9, 0, 30)], data)


def random_search(seed):
    data, random = load(seed), torch.Generator().manual_seed(seed)
    return best_of([-9 + 9 * torch.rand(495, generator=random) for _ in range(30)], data)


def learned(steps, seed, **settings):
    data = load(seed)
    return loss_after(learn_penalties(*data[:2], steps, **settings)[0], data)


def stopped_early(steps, seed):
    """No shrinkage; a third of the validation rows says where to stop, the others move the penalties."""
    data = load(seed)
    valid, judge = (tuple(t[rows] for t in data[1]) for rows in (slice(0, 100), slice(100, 150)))
    path = {0: torch.full((495,), -4.0)}

    def record(step, log_penalties):
        if (step + 1) % 20 == 0:
            path[step + 1] = log_penalties.clone()

    learn_penalties(data[0], valid, steps, shrinkage=0.0, callback=record)
    best = min(path.values(), key=lambda p: validation_loss(solved(p, data[0]), judge).item())
    return loss_after(best, data)


def methods(steps):
    return {
        "one penalty, grid of 30": grid,
        "495 penalties, best of 30 random draws": random_search,
        "without an adjoint (one_step), with shrinkage": partial(learned, steps, algorithm="one_step"),
        "fsla (SOBA), no shrinkage": partial(learned, steps, shrinkage=0.0),
        "fsla (SOBA), no shrinkage, stopped early": partial(stopped_early, steps),
        "fsla (SOBA), with shrinkage": partial(learned, steps),
    }


def draw(figure, steps):
    data = load(0)
    for ax, shrinkage in zip(figure.subplots(1, 2, sharey=True), (0.0, 0.1), strict=True):
        curve = []

        def record(step, log_penalties, curve=curve):
            if step % 20 == 0:
                curve.append([step, *(loss_after(log_penalties, data, part) for part in (1, 2))])

        learn_penalties(*data[:2], steps, shrinkage, callback=record)
        step, valid, test = np.array(curve).T
        ax.plot(step, valid, label="validation rows, which the penalties see")
        ax.plot(step, test, label="test rows")
        ax.set(title=f"shrinkage {shrinkage:g}", xlabel="step", ylim=(0, None))
    figure.axes[0].set_ylabel("cross-entropy, model solved")
    figure.axes[1].legend(loc="lower right")
