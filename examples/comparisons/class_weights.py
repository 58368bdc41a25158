"""The learnt loss beside no weights and inverse frequencies, with and without the balanced images for training."""

from functools import partial

import torch
from class_weights import load, make_model, train
from sklearn.metrics import balanced_accuracy_score
from torch.nn.functional import cross_entropy

METRIC, BETTER, DIGITS = "balanced test accuracy, %", "higher", 1
STEPS, SMALL, SIZE = 300, 15, (8.5, 3.2)
SUMMARY = [
    (
        "A loss for rare classes",
        "balanced accuracy, %; higher is better",
        "inverse frequencies, balanced images added",
        "without an adjoint (one_step)",
        "fsla (SOBA)",
    ),
]
"""Lines of the gallery's table: title, score, and the methods that it shows."""


def score(model, data):
    return 100 * balanced_accuracy_score(data[1], model(data[0]).argmax(1))


def fixed(inverse, add_balanced, steps, seed):
    data, balanced, test = load(seed)
    if add_balanced:
        data = [torch.cat(pair) for pair in zip(data, balanced, strict=True)]
    weight = 1 / data[1].bincount() if inverse else None
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-2)
    for _ in range(steps):
        rows = torch.randint(len(data[1]), (64,))
        optimizer.zero_grad()
        cross_entropy(model(data[0][rows]), data[1][rows], weight).backward()
        optimizer.step()
    return score(model.eval(), test)


def learned(algorithm, steps, seed):
    data, balanced, test = load(seed)
    return score(train(data, balanced, steps, algorithm)[0], test)


def methods(steps):
    return {
        "no weights": partial(fixed, False, False, steps),
        "inverse frequencies": partial(fixed, True, False, steps),
        "without an adjoint (one_step)": partial(learned, "one_step", steps),
        "fsla (SOBA)": partial(learned, "soba", steps),
        "no weights, balanced images added": partial(fixed, False, True, steps),
        "inverse frequencies, balanced images added": partial(fixed, True, True, steps),
    }


def draw(figure, steps):
    data, balanced, _ = load(0)
    _, loss = train(data, balanced, steps)
    counts = data[1].bincount()
    for ax, name, values in zip(
        figure.subplots(1, 2), ("weight", "margin"), (loss.log_weight.exp(), loss.margin), strict=True
    ):
        ax.semilogx(counts, values.detach(), "o-")
        ax.set_xticks(counts[::2].tolist(), counts[::2].tolist())
        ax.minorticks_off()
        ax.set(xlabel="training images of the class", ylabel=f"learnt {name}")
