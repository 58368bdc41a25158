"""Twenty images that ruin a classifier.

An attacker adds 20 images (outer variable) to 400 honest ones. A classifier (inner variable) is trained on all of
them. The attacker wants it to be wrong on validation data.

python examples/poison.py
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import fsla


def load(seed):
    """Even and odd digits: 400 honest images, 20 to start the poison from, 400 for validation, and test images."""
    x, y = (torch.tensor(t) for t in load_digits(return_X_y=True))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    return [((x[rows] / 16).float(), y[rows] % 2) for rows in order.split([400, 20, 400, len(y) - 820])]


# --8<-- [start:core]
class Poison(nn.Module):
    """Images with wrong labels."""

    def __init__(self, x, y):
        super().__init__()
        self.logit = nn.Parameter(x.clamp(0.02, 0.98).logit())
        self.register_buffer("y", 1 - y)

    def forward(self):
        return self.logit.sigmoid()  # stays between black and white


def inner_loss(model, poison, batch):
    x, y = torch.cat([batch[0], poison()]), torch.cat([batch[1], poison.y])
    return cross_entropy(model(x), y) + 0.01 * model.weight.square().sum()


def outer_loss(model, poison, batch):  # the probability of the right class, which the attacker makes small
    return model(batch[0]).softmax(1).gather(1, batch[1][:, None]).mean()


def attack(honest, start, valid, steps=600, algorithm="soba"):
    """Return the poison and a classifier trained to convergence with it."""
    poison, model = Poison(*start), nn.Linear(64, 2)
    bilevel = fsla.BilevelOptimizer(
        model,
        poison,
        inner_loss=inner_loss,
        outer_loss=outer_loss,
        algorithm=algorithm,
    )
    bilevel.solve(honest)  # start from a trained classifier
    for _ in range(steps):
        bilevel.step(honest, valid)
    bilevel.solve(honest)
    return poison, model


# --8<-- [end:core]
if __name__ == "__main__":
    honest, start, valid, (x, y) = load(seed=0)
    for steps in (0, 100 if "--small" in sys.argv else 600):
        poison, model = attack(honest, start, valid, steps)
        wrong = 100 * (model(x).argmax(1) != y).float().mean()
        print(f"{wrong:.1f} % of test images are wrong after {steps} steps of the attack")
