"""The attack beside no poison, poison by wrong labels alone and the attack without an adjoint; then its defence."""

from functools import partial

import torch
from poison import Poison, attack, inner_loss, load
from torch import nn
from torch.nn.functional import cross_entropy

import fsla

METRIC, BETTER, DIGITS = "test error of the classifier, % (the attacker wants it high)", "higher", 1
STEPS, SMALL, SIZE = 600, 60, (8, 3.6)
SUMMARY = [
    (
        "Poisoned data: attack",
        "test error, %; higher is better",
        "20 images with wrong labels",
        "attack without an adjoint (one_step)",
        "fsla: attack (SOBA)",
    ),
    (
        "Poisoned data: defence",
        "test error, %; lower is better",
        "after the attack: 100 trusted images alone",
        "",
        "after the attack: fsla's weights (lower is better)",
    ),
]
"""Lines of the gallery's table: title, score, and the methods that it shows."""


def error(model, data):
    return 100 * (model(data[0]).argmax(1) != data[1]).float().mean().item()


def solved(data, outer, loss):
    """A classifier trained to convergence."""
    model = nn.Linear(64, 2)
    fsla.SOBA(model, outer, inner_loss=loss, outer_loss=lambda m, _, b: cross_entropy(m(b[0]), b[1])).solve(data)
    return model


def no_poison(seed):
    honest, start, _, test = load(seed)
    empty = Poison(start[0][:0], start[1][:0])
    return error(solved(honest, empty, inner_loss), test)


def wrong_labels(seed):
    honest, start, _, test = load(seed)
    return error(solved(honest, Poison(*start), inner_loss), test)


def attacked(algorithm, steps, seed):
    honest, start, valid, test = load(seed)
    return error(attack(honest, start, valid, steps, algorithm)[1], test)


def weighted_loss(model, weights, batch):
    losses = cross_entropy(model(batch[0]), batch[1], reduction="none")
    return 2 * (weights(torch.arange(len(losses))) * losses).mean() + 0.01 * model.weight.square().sum()


def defence(steps, seed):
    """A weight for each of the 420 images, learnt on 100 trusted images after the attack; the weights, the model."""
    honest, start, valid, _ = load(seed)
    poison, _ = attack(honest, start, valid, steps)
    training = torch.cat([honest[0], poison().detach()]), torch.cat([honest[1], poison.y])
    weights, model, trusted = fsla.SampleWeights(420), nn.Linear(64, 2), (valid[0][:100], valid[1][:100])
    outer_loss = lambda model, weights, batch: cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    bilevel = fsla.SOBA(model, weights, inner_loss=weighted_loss, outer_loss=outer_loss)
    for _ in range(steps):
        bilevel.step(training, trusted)
    bilevel.solve(training)
    return weights.weights, model


def trusted_alone(seed):
    *_, valid, test = load(seed)
    weights = fsla.SampleWeights(100)
    return error(solved((valid[0][:100], valid[1][:100]), weights, weighted_loss), test)


def methods(steps):
    return {
        "no poison": no_poison,
        "20 images with wrong labels": wrong_labels,
        "attack without an adjoint (one_step)": partial(attacked, "one_step", steps),
        "fsla: attack (SOBA)": partial(attacked, "soba", steps),
        "after the attack: 100 trusted images alone": trusted_alone,
        "after the attack: fsla's weights (lower is better)": lambda seed: error(
            defence(steps, seed)[1], load(seed)[3]
        ),
    }


def draw(figure, steps):
    honest, start, valid, _ = load(0)
    poison, _ = attack(honest, start, valid, steps)
    weights, _ = defence(steps, 0)
    left, right = figure.subfigures(1, 2)
    for i, ax in enumerate(left.subplots(4, 5).flat):
        ax.imshow(poison().detach()[i].reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
        ax.set_title("odd" if poison.y[i] else "even", fontsize=7, pad=2)
        ax.axis("off")
    left.suptitle("The poison and its labels", fontsize=10)
    ax = right.subplots()
    ax.hist([weights[:400], weights[400:]], bins=20, range=(0, 1), density=True, label=["honest", "poison"])
    ax.set(xlabel="weight that the defender learns", yticks=[], title="The defence on 100 trusted images")
    ax.legend()
