"""The learnt mixture beside equal shares, shares by size and the target's text alone."""

import math
from functools import partial

import text_mixture
import torch
from text_mixture import SOURCES, TARGETS, Network, draw_mixture, learn_mixture, load, row_losses, sizes_of

METRIC, BETTER, DIGITS = "bits a byte of held-out target text", "lower", 3
STEPS, SMALL, SIZE = 300, 10, (8, 3.4)
SUMMARY = [
    (
        "Text mixture: descriptions",
        "bits a byte; lower is better",
        "descriptions: equal shares",
        "descriptions: one_step",
        "descriptions: fsla (SOBA)",
    ),
    (
        "Text mixture: distributions",
        "bits a byte; lower is better",
        "distributions: equal shares",
        "distributions: one_step",
        "distributions: fsla (SOBA)",
    ),
]
"""Lines of the gallery's table: title, score, and the methods that it shows."""


def train_anew(batches, seed, steps):
    torch.manual_seed(100 + seed)
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        row_losses(model, batches()).mean().backward()
        optimizer.step()
    return model


@torch.no_grad()
def bits(model, test):
    rows = test[: len(test) // 65 * 65].view(-1, 65)
    return row_losses(model, rows).mean().item() / math.log(2)


def mixed(shares_of, target, steps, seed):
    sources, trusted, test = load(target)
    shares = shares_of(sources, trusted, steps)
    return bits(train_anew(lambda: draw_mixture(sources, shares)[0], seed, steps), test)


def equal(sources, trusted, steps):
    return torch.ones(len(sources))


def by_size(sources, trusted, steps):
    return torch.tensor(list(sizes_of(sources).values()))


def learned(algorithm, sources, trusted, steps):
    return learn_mixture(sources, trusted, steps, algorithm)[0].weights


def target_alone(target, steps, seed):
    _, trusted, test = load(target)
    return bits(train_anew(lambda: text_mixture.draw(trusted, 32), seed, steps), test)


def methods(steps):
    rows = {}
    for target in TARGETS:
        mixtures = {"equal shares": equal, "shares by size": by_size}
        mixtures |= {"one_step": partial(learned, "one_step"), "fsla (SOBA)": partial(learned, "soba")}
        rows |= {f"{target}: {name}": partial(mixed, f, target, steps) for name, f in mixtures.items()}
        rows[f"{target}: its 20 kB alone"] = partial(target_alone, target, steps)
    return rows


def show_shares(ax, target, steps):
    sources, trusted, _ = load(target)
    weights, _ = learn_mixture(sources, trusted, steps)
    places = torch.arange(len(sources))
    ax.barh(places - 0.2, list(sizes_of(sources).values()), 0.4, color="0.6", label="size")
    ax.barh(places + 0.2, weights.weights / len(sources), 0.4, label="learnt share")
    ax.set(title=f"target: {target}", xlabel="share", yticks=places, yticklabels=[*SOURCES, "shuffled"])
    ax.invert_yaxis()


def draw(figure, steps):
    for ax, target in zip(figure.subplots(1, 2, sharey=True), TARGETS, strict=True):
        show_shares(ax, target, steps)
    figure.axes[0].legend()
