"""Ten images that teach all digits.

A classifier (inner variable) sees ten images alone. Their pixels (outer variable) are learnt so that the classifier is
right on real images.

python examples/distill.py
"""

import sys
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import fsla

LABELS = torch.arange(10)


def load(seed):
    """Return 1000 real images to learn from and 797 for testing."""
    x, y = (torch.tensor(t) for t in load_digits(return_X_y=True))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    return [((x[rows] / 16).float(), y[rows]) for rows in (order[:1000], order[1000:])]


# --8<-- [start:core]
def inner_loss(model, images, _):
    ridge = sum(p.square().sum() for p in model.parameters())
    return cross_entropy(model(images), LABELS) + 0.05 * ridge


def outer_loss(model, images, batch):
    return cross_entropy(model(batch[0]), batch[1])


def first_of_each(train):
    """Return one real image of each digit."""
    return torch.stack([train[0][train[1] == digit][0] for digit in range(10)])


def distill(train, steps=1000, algorithm="soba"):
    """Return ten images and a classifier trained to convergence on them."""
    images, model = nn.Parameter(first_of_each(train)), nn.Linear(64, 10)
    adam = partial(torch.optim.Adam, lr=0.003)  # the automatic step is too long for pixels
    bilevel = fsla.BilevelOptimizer(
        model,
        images,
        inner_loss=inner_loss,
        outer_loss=outer_loss,
        algorithm=algorithm,
        outer_optimizer=adam,
    )
    for _ in range(steps):
        rows = torch.randint(len(train[1]), (256,))
        bilevel.step(None, (train[0][rows], train[1][rows]))
    bilevel.solve(None)
    return images.detach(), model


# --8<-- [end:core]
if __name__ == "__main__":
    train, (x, y) = load(seed=0)
    for steps in (0, 100 if "--small" in sys.argv else 1000):
        _, model = distill(train, steps)
        print(f"test accuracy after {steps} steps of the images: {(model(x).argmax(1) == y).float().mean():.3f}")
