"""Learnt weights beside equal ones, the trusted images alone and together, and the best of twelve runs."""

from functools import partial

import torch
from source_weights import KINDS, load, make_model, outer_loss, train
from torch.nn.functional import cross_entropy

from comparisons import accuracy

METRIC, BETTER, DIGITS = "test accuracy, %", "higher", 1
STEPS, SMALL, SIZE = 500, 40, (8, 3.6)
SUMMARY = [
    (
        "Weights of sources",
        "test accuracy, %; higher is better",
        "best of 12 runs, one for each source",
        "without an adjoint (one_step)",
        "fsla (SOBA)",
    ),
]
"""Lines of the gallery's table: title, score, and the methods that it shows."""


def train_plainly(data, steps):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        rows = torch.randint(len(data[0]), (128,))
        optimizer.zero_grad()
        cross_entropy(model(data[0][rows]), data[1][rows]).backward()
        optimizer.step()
    return model


def plain(part, steps, seed):
    data, trusted, test = load(seed)
    joined = [torch.cat(pair) for pair in zip(data, trusted, strict=False)]
    chosen = {"all": data, "trusted": trusted, "all and trusted": joined}[part]
    return accuracy(train_plainly(chosen, steps), test)


def best_single(steps, seed):
    """Train on each source by itself; the trusted images choose."""
    data, trusted, test = load(seed)
    models = [train_plainly([t[data[2] == source] for t in data], steps) for source in range(len(KINDS))]
    return accuracy(min(models, key=lambda model: outer_loss(model, None, trusted).item()), test)


def learned(algorithm, steps, seed):
    data, trusted, test = load(seed)
    return accuracy(train(data, trusted, steps, algorithm)[0], test)


def methods(steps):
    return {
        "equal weights": partial(plain, "all", steps),
        "equal weights, trusted images added": partial(plain, "all and trusted", steps),
        "100 trusted images alone": partial(plain, "trusted", steps),
        "best of 12 runs, one for each source": partial(best_single, steps),
        "without an adjoint (one_step)": partial(learned, "one_step", steps),
        "fsla (SOBA)": partial(learned, "soba", steps),
    }


def draw(figure, steps):
    data, trusted, _ = load(0)
    _, weights = train(data, trusted, steps)
    ax = figure.subplots()
    for i, kind in enumerate(dict.fromkeys(KINDS)):
        places = [j for j, other in enumerate(KINDS) if other == kind]
        ax.barh(places, weights.weights[places], color=f"C{i}")
    ax.axvline(1, color="0.5", linewidth=0.8)
    ax.set(yticks=range(len(KINDS)), yticklabels=KINDS, xlabel="weight of the source (mean 1)")
    ax.invert_yaxis()
