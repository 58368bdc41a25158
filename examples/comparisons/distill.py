"""Learnt images beside real ones, class means and unrolled training."""

from functools import partial

import torch
from distill import LABELS, distill, first_of_each, inner_loss, load, outer_loss
from torch import nn
from torch.nn.functional import cross_entropy

import fsla
from comparisons import accuracy

METRIC, BETTER, DIGITS = "test accuracy of a classifier trained on ten images, %", "higher", 1
STEPS, SMALL, SIZE = 1000, 60, (9, 2.4)
SUMMARY = [
    (
        "Ten images that teach all digits",
        "test accuracy, %; higher is better",
        "20 steps of training unrolled",
        "without an adjoint (one_step)",
        "fsla (SOBA)",
    ),
]
"""Lines of the gallery's table: title, score, and the methods that it shows."""


def solved(images):
    model = nn.Linear(64, 10)
    fsla.SOBA(model, nn.Parameter(images), inner_loss=inner_loss, outer_loss=outer_loss).solve(None)
    return model


def means(train):
    return torch.stack([train[0][train[1] == digit].mean(0) for digit in range(10)])


def fixed(images_of, seed):
    train, test = load(seed)
    return accuracy(solved(images_of(train)), test)


def unrolled(steps, seed, depth=20, rate=0.5):
    """Differentiate through 20 steps of training from zero, as the first paper on distillation does."""
    train, test = load(seed)
    images = nn.Parameter(first_of_each(train))
    optimizer = torch.optim.Adam([images], lr=0.01)
    for _ in range(steps):
        w = torch.zeros(10, 64, requires_grad=True), torch.zeros(10, requires_grad=True)
        for _ in range(depth):
            loss = cross_entropy(images @ w[0].T + w[1], LABELS) + 0.05 * sum(p.square().sum() for p in w)
            w = [p - rate * g for p, g in zip(w, torch.autograd.grad(loss, w, create_graph=True), strict=True)]
        rows = torch.randint(len(train[1]), (256,))
        optimizer.zero_grad()
        cross_entropy(train[0][rows] @ w[0].T + w[1], train[1][rows]).backward()
        optimizer.step()
    return accuracy(solved(images.detach()), test)


def all_images(seed):
    from sklearn.linear_model import LogisticRegression

    train, test = load(seed)
    model = LogisticRegression(max_iter=2000).fit(*(t.numpy() for t in train))
    return 100 * model.score(*(t.numpy() for t in test))


def learned(algorithm, steps, seed):
    train, test = load(seed)
    return accuracy(distill(train, steps, algorithm)[1], test)


def methods(steps):
    return {
        "ten real images": partial(fixed, first_of_each),
        "ten class means": partial(fixed, means),
        "20 steps of training unrolled": partial(unrolled, steps),
        "without an adjoint (one_step)": partial(learned, "one_step", steps),
        "fsla (SOBA)": partial(learned, "soba", steps),
        "all 1000 images (upper bound)": all_images,
    }


def draw(figure, steps):
    train, _ = load(0)
    rows = {"start": first_of_each(train), "learnt": distill(train, steps)[0]}
    for axes, (name, images) in zip(figure.subplots(2, 10), rows.items(), strict=True):
        for digit, ax in enumerate(axes):
            limit = float(images.abs().max())
            ax.imshow(images[digit].reshape(8, 8), cmap="gray_r" if name == "start" else "RdBu_r",
                      vmin=0 if name == "start" else -limit, vmax=limit)  # fmt: skip
            ax.set(xticks=[], yticks=[], title=digit if name == "start" else "")
        axes[0].set_ylabel(name)
