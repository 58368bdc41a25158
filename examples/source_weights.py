"""Which of twelve sources of training data help? A weight for each, learnt in a plain training loop.

The sources are parts of scikit-learn's digits: two are clean, ten have errors of four kinds. A network (inner variable)
trains on all of them with weights (outer variable) that 100 trusted images decide.

python examples/source_weights.py
"""

import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import fsla

KINDS = ["clean"] * 2 + ["30 % wrong labels"] * 2 + ["turned by 90°"] * 2 + ["random labels"] * 3 + ["labels + 1"] * 3


def load(seed):
    """Return images, labels and source of 1080 rows; 100 trusted images; 617 test images."""
    x, y = load_digits(return_X_y=True)
    random = np.random.default_rng(seed)
    order = random.permutation(len(y))
    x, y, source = x[order].astype("float32") / 16, y[order], np.arange(len(KINDS)).repeat(90)
    kind = np.array(KINDS)[source]
    wrong = random.random(1080) < 0.3 * (kind == "30 % wrong labels") + (kind == "random labels")
    y[:1080] = np.where(wrong, random.integers(10, size=1080), (y[:1080] + (kind == "labels + 1")) % 10)
    turned = np.flatnonzero(kind == "turned by 90°")
    x[turned] = np.rot90(x[turned].reshape(-1, 8, 8), axes=(1, 2)).reshape(-1, 64)
    x, y, source = map(torch.tensor, (x, y, source))
    return (x[:1080], y[:1080], source), (x[1080:1180], y[1080:1180]), (x[1180:], y[1180:])


# --8<-- [start:core]
def inner_loss(model, weights, batch):
    x, y, source = batch
    ridge = sum(p.square().sum() for p in model.parameters())  # v needs curvature
    return (weights(source) * cross_entropy(model(x), y, reduction="none")).mean() + 1e-3 * ridge


def outer_loss(model, weights, batch):
    return cross_entropy(model(batch[0]), batch[1])


def make_model():
    return nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 10))


def train(data, trusted, steps=500, algorithm="soba"):
    """Return the network and the weights of the sources."""
    model, weights = make_model(), fsla.GroupWeights(len(KINDS))
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
        rows = torch.randint(len(data[0]), (128,))
        bilevel.step([t[rows] for t in data], trusted)  # moves the network and the weights
    return model, weights


# --8<-- [end:core]
if __name__ == "__main__":
    torch.manual_seed(0)
    data, trusted, (x, y) = load(seed=0)
    model, weights = train(data, trusted, 60 if "--small" in sys.argv else 500)
    for kind, weight in zip(KINDS, weights.weights.tolist(), strict=True):
        print(f"{kind:<20}{weight:.2f}")
    print(f"test accuracy: {(model(x).argmax(1) == y).float().mean():.3f}")
