"""Hyper-cleaning, as the paper has it: a weight for each training image, where six labels in ten are wrong.

The inner loss weights the loss of image i by the sigmoid of λ_i (outer variable). The outer loss is that of clean
validation images.

python examples/hyper_cleaning.py
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import fsla


def load(seed):
    """Return 900 images, 60 % of whose labels are random, and which; 300 clean images; 597 test images."""
    random = torch.Generator().manual_seed(seed)
    x, y = (torch.tensor(t) for t in load_digits(return_X_y=True))
    order = torch.randperm(len(y), generator=random)
    x, y = (x[order] / 16).float().view(-1, 1, 8, 8), y[order]
    wrong = torch.rand(900, generator=random) < 0.6
    labels = torch.where(wrong, torch.randint(10, (900,), generator=random), y[:900])
    return (x[:900], labels, torch.arange(900)), labels != y[:900], (x[900:1200], y[900:1200]), (x[1200:], y[1200:])


def make_model():
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.SiLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.SiLU(), nn.Flatten(), nn.Linear(512, 10)),
    )


# --8<-- [start:core]
def inner_loss(model, weights, batch):
    x, y, row = batch
    ridge = sum(p.square().sum() for p in model.parameters())
    return (weights(row) * cross_entropy(model(x), y, reduction="none")).mean() + 1e-3 * ridge


def outer_loss(model, weights, batch):
    return cross_entropy(model(batch[0]), batch[1])


def draw_batch(data, size=128):
    rows = torch.randint(len(data[0]), (size,))
    return [t[rows] for t in data]


def clean(data, valid, steps=1000, algorithm="soba"):
    """Return the network and a weight in (0, 1) for each training image."""
    model, weights = make_model(), fsla.SampleWeights(len(data[0]))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    bilevel = fsla.BilevelOptimizer(
        model,
        weights,
        inner_loss=inner_loss,
        outer_loss=outer_loss,
        algorithm=algorithm,
        inner_optimizer=optimizer,
    )
    for _ in range(steps):
        again = draw_batch(data), draw_batch(valid)  # FSLA's momentum needs independent batches
        bilevel.step(draw_batch(data), draw_batch(valid), independent_batches=again)
    return model, weights.weights


# --8<-- [end:core]
if __name__ == "__main__":
    torch.manual_seed(0)
    data, wrong, valid, (x, y) = load(seed=0)
    model, weights = clean(data, valid, 100 if "--small" in sys.argv else 1000)
    print(f"mean weight of wrong labels {weights[wrong].mean():.2f}, of right ones {weights[~wrong].mean():.2f}")
    print(f"test accuracy: {(model(x).argmax(1) == y).float().mean():.3f}")
