"""Architecture search in one run: which operation in each of three layers?

The network (inner variable) has all operations in each layer, mixed by a softmax of logits (outer variable) that follow
validation images. Then each layer keeps its strongest operation, and that network is trained anew.

python examples/architecture.py
"""

import sys
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy

import fsla

WIDTH, LAYERS = 8, 3


def conv(size):
    layers = nn.Conv2d(WIDTH, WIDTH, size, padding=size // 2), nn.GroupNorm(2, WIDTH), nn.SiLU()
    return nn.Sequential(*layers)


OPERATIONS = {
    "skip": nn.Identity,
    "average": lambda: nn.AvgPool2d(3, 1, 1),
    "max": lambda: nn.MaxPool2d(3, 1, 1),
    "conv1": lambda: conv(1),
    "conv3": lambda: conv(3),
}


# --8<-- [start:core]
class Network(nn.Module):
    """A layer with several operations mixes them by the softmax of its row of logits."""

    def __init__(self, layers):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, WIDTH, 3, padding=1), nn.GroupNorm(2, WIDTH), nn.SiLU())
        self.layers = nn.ModuleList([nn.ModuleList([OPERATIONS[name]() for name in names]) for names in layers])
        self.head = nn.Linear(4 * WIDTH, 10)

    def forward(self, x, logits):
        x = self.stem(x)
        for operations, row in zip(self.layers, logits, strict=True):
            x = sum(share * operation(x) for share, operation in zip(row.softmax(0), operations, strict=True))
        return self.head(adaptive_avg_pool2d(x, 2).flatten(1))


def load(seed):
    """Return 400 images for training, 400 for validation and 997 for testing."""
    x, y = (torch.tensor(t) for t in load_digits(return_X_y=True))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    return [((x[rows] / 16).float().view(-1, 1, 8, 8), y[rows]) for rows in order.split([400, 400, len(y) - 800])]


def draw_batch(data, size=64):
    rows = torch.randint(len(data[1]), (size,))
    return data[0][rows], data[1][rows]


def inner_loss(model, logits, batch):
    return cross_entropy(model(batch[0], logits), batch[1]) + 1e-4 * sum(p.square().sum() for p in model.parameters())


def outer_loss(model, logits, batch):
    return cross_entropy(model(batch[0], logits), batch[1])


def search(train, valid, steps=200, algorithm="soba"):
    """Return the logits: a row for each layer, a column for each operation."""
    model, logits = Network([OPERATIONS] * LAYERS), nn.Parameter(torch.zeros(LAYERS, len(OPERATIONS)))
    adam = partial(torch.optim.Adam, lr=0.01)
    bilevel = fsla.BilevelOptimizer(
        model,
        logits,
        inner_loss=inner_loss,
        outer_loss=outer_loss,
        algorithm=algorithm,
        inner_optimizer=adam,
    )
    for _ in range(steps):
        bilevel.step(draw_batch(train), draw_batch(valid))
    return logits.detach()


# --8<-- [end:core]
if __name__ == "__main__":
    torch.manual_seed(0)
    train, valid, _ = load(seed=0)
    logits = search(train, valid, 100 if "--small" in sys.argv else 200)
    for row in logits:
        print({name: round(share, 3) for name, share in zip(OPERATIONS, row.softmax(0).tolist(), strict=True)})
