"""A loss for rare classes: a weight and a margin for each class, learnt on 100 balanced images.

A network (inner variable) trains on digits of which class 0 has 80 images and class 9 has 4. The weights and margins of
its loss (outer variable) make it right on images in which all classes count alike.

python examples/class_weights.py
"""

import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import fsla


def load(seed):
    """Return imbalanced training images, ten balanced images of each class, and balanced test images."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(y))
    rows = [order[y[order] == label] for label in range(10)]
    sizes = np.geomspace(80, 4, 10).round().astype(int)
    parts = [r[:n] for r, n in zip(rows, sizes, strict=True)], [r[80:90] for r in rows], [r[90:] for r in rows]
    x, y = torch.tensor(x / 16).float().view(-1, 1, 8, 8), torch.tensor(y)
    return [(x[p], y[p]) for p in map(np.concatenate, parts)]


# --8<-- [start:core]
class ClassLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_weight, self.margin = nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(10))

    def forward(self, logits, y):
        weight = self.log_weight.exp()[y]
        losses = cross_entropy(logits + self.margin, y, reduction="none")
        return (weight * losses).sum() / weight.sum()


def inner_loss(model, loss, batch):
    return loss(model(batch[0]), batch[1])


def outer_loss(model, loss, batch):
    return cross_entropy(model(batch[0]), batch[1])


def make_model():
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(512, 10)),
    )


def train(data, balanced, steps=300, algorithm="soba"):
    """Return the network and the loss that it learnt with."""
    model, loss = make_model(), ClassLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-2)
    bilevel = fsla.BilevelOptimizer(
        model,
        loss,
        inner_loss=inner_loss,
        outer_loss=outer_loss,
        algorithm=algorithm,
        inner_optimizer=optimizer,
    )
    for _ in range(steps):
        rows = torch.randint(len(data[1]), (64,))
        bilevel.step((data[0][rows], data[1][rows]), balanced)
    return model.eval(), loss


# --8<-- [end:core]
if __name__ == "__main__":
    torch.manual_seed(0)
    data, balanced, (x, y) = load(seed=0)
    model, loss = train(data, balanced, 150 if "--small" in sys.argv else 300)
    print("weights:", [round(w, 2) for w in loss.log_weight.exp().tolist()])
    print("margins:", [round(m, 2) for m in loss.margin.tolist()])
