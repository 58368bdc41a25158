"""Hundreds of penalties, learnt at once on validation data.

A logistic regression (inner variable) classifies tumours by 30 measurements and their 465 products. Each of the 495
weights has a penalty; their logs are the outer variable. 150 rows train, 150 rows validate: without a term that holds
the penalties close to each other they overfit the validation rows.

python examples/penalties.py
"""

import sys

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from torch import nn
from torch.nn.functional import cross_entropy

import fsla


def load(seed):
    """Return 150 rows for training, 150 for validation and 269 for testing."""
    x, y = load_breast_cancer(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    x = PolynomialFeatures(2, include_bias=False).fit_transform(StandardScaler().fit_transform(x))
    x = torch.tensor(StandardScaler().fit_transform(x)).float()
    y = torch.tensor(y)
    return [(x[rows], y[rows]) for rows in order.split([150, 150, len(y) - 300])]


# --8<-- [start:core]
def inner_loss(model, log_penalties, batch):
    penalty = (log_penalties.exp() * model.weight.square().sum(0)).sum()
    return cross_entropy(model(batch[0]), batch[1]) + penalty


def validation_loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def learn_penalties(train, valid, steps=400, shrinkage=0.1, algorithm="soba", callback=None):
    """Return the log of each penalty, and a model trained to convergence with them."""
    model = nn.Linear(train[0].shape[1], 2)
    log_penalties = nn.Parameter(torch.full((model.in_features,), -4.0))

    def outer_loss(model, log_penalties, batch):
        spread = (log_penalties - log_penalties.mean()).square().mean()
        return validation_loss(model, batch) + shrinkage * spread

    bilevel = fsla.BilevelOptimizer(
        model,
        log_penalties,
        inner_loss=inner_loss,
        outer_loss=outer_loss,
        algorithm=algorithm,
    )
    for step in range(steps):
        bilevel.step(train, valid)
        if callback is not None:
            callback(step, log_penalties.detach())
    bilevel.solve(train)
    return log_penalties.detach(), model


# --8<-- [end:core]
if __name__ == "__main__":
    train, valid, test = load(seed=0)
    for shrinkage in (0.0, 0.1):
        _, model = learn_penalties(train, valid, 200 if "--small" in sys.argv else 400, shrinkage)
        losses = [validation_loss(model, part).item() for part in (valid, test)]
        print("shrinkage {}: validation loss {:.3f}, test loss {:.3f}".format(shrinkage, *losses))
