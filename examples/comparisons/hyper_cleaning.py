"""Learnt weights of images beside no cleaning, the clean images alone, dropping large losses, and an oracle."""

from functools import cache, partial

import torch
from hyper_cleaning import clean, draw_batch, load, make_model
from sklearn.metrics import roc_auc_score
from torch.nn.functional import cross_entropy

from comparisons import accuracy

METRIC, BETTER, DIGITS = "test accuracy, %", "higher", 1
STEPS, SMALL, SIZE = 1000, 15, (7, 3.2)
SUMMARY = [
    (
        "Hyper-cleaning",
        "test accuracy, %; higher is better",
        "labels that the clean images confirm, and the clean images",
        "without an adjoint (one_step)",
        "fsla (SOBA)",
    ),
]
"""Lines of the gallery's table: title, score, and the methods that it shows."""


def train_plainly(data, steps):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-3)
    for _ in range(steps):
        x, y, *_ = draw_batch(data)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def plain(part, steps, seed):
    data, wrong, valid, test = load(seed)
    joined = [torch.cat(pair) for pair in zip(data, valid, strict=False)]
    chosen = {"all": data, "clean": valid, "together": joined, "right": [t[~wrong] for t in data]}[part]
    return accuracy(train_plainly(chosen, steps), test)


def small_losses(steps, seed):
    """Train on the clean images, keep training images whose label that network believes, train on both."""
    data, _, valid, test = load(seed)
    belief = train_plainly(valid, steps)(data[0]).softmax(1).gather(1, data[1][:, None])[:, 0]
    chosen = [torch.cat([t[belief > 0.5], v]) for t, v in zip(data, valid, strict=False)]
    return accuracy(train_plainly(chosen, steps), test)


@cache
def cleaned(algorithm, steps, seed):
    """The network and the weights; several rows judge one run."""
    data, _, valid, _ = load(seed)
    return clean(data, valid, steps, algorithm)


def learned(algorithm, steps, seed):
    return accuracy(cleaned(algorithm, steps, seed)[0], load(seed)[3])


def retrained(steps, seed):
    """Train anew on the images with a weight above 1/2 and the clean ones."""
    data, _, valid, test = load(seed)
    _, weights = cleaned("soba", steps, seed)
    chosen = [torch.cat([t[weights > 0.5], v]) for t, v in zip(data, valid, strict=False)]
    return accuracy(train_plainly(chosen, steps), test)


def area(steps, seed):
    return 100 * roc_auc_score(~load(seed)[1], cleaned("soba", steps, seed)[1])


def methods(steps):
    return {
        "no cleaning": partial(plain, "all", steps),
        "no cleaning, clean images added": partial(plain, "together", steps),
        "300 clean images alone": partial(plain, "clean", steps),
        "labels that the clean images confirm, and the clean images": partial(small_losses, steps),
        "without an adjoint (one_step)": partial(learned, "one_step", steps),
        "fsla: FSLA with STORM momentum, the paper's": partial(learned, "fsla", steps),
        "fsla (SOBA)": partial(learned, "soba", steps),
        "fsla (SOBA), then trained anew on weights above 1/2 and the clean images": partial(retrained, steps),
        "all right labels (oracle)": partial(plain, "right", steps),
        "area under the ROC curve of SOBA's weights, %": partial(area, steps),
    }


def draw(figure, steps):
    _, wrong, _, _ = load(0)
    _, weights = cleaned("soba", steps, 0)
    ax = figure.subplots()
    ax.hist([weights[~wrong], weights[wrong]], bins=25, range=(0, 1), label=["right labels", "wrong labels"])
    ax.set(xlabel="weight after training", ylabel="training images")
    ax.legend()
