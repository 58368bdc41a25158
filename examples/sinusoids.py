"""Features for many tasks: meta-learning with a linear head for each task.

A task is a sinusoid with ten points to fit and ten to be judged by. A network makes features of x (outer variable). A
linear head for each of 200 tasks (inner variable) fits the first ten points. Each step draws 100 of the tasks.

python examples/sinusoids.py
"""

import sys
from functools import partial

import torch
from torch import nn

import fsla

RIDGE = 0.03


def make_tasks(count, seed):
    """Return x and y of shape (count, 20, 1)."""
    random = torch.Generator().manual_seed(seed)
    height, phase = 0.1 + 4.9 * torch.rand(count, 1, 1, generator=random), torch.rand(count, 1, 1, generator=random)
    x = 10 * torch.rand(count, 20, 1, generator=random) - 5
    return x, height * (x - torch.pi * phase).sin()


# --8<-- [start:core]
class Features(nn.Sequential):
    def __init__(self, width=40):
        super().__init__(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.size = width + 1

    def forward(self, x):
        return torch.cat([super().forward(x), torch.ones_like(x)], -1)


def errors(heads, features, batch):
    """Return the squared error of each task."""
    x, y, task = batch
    return (features(x) @ heads["w"][task] - y).square().mean((1, 2))


def inner_loss(heads, features, batch):  # a sum over tasks: each is a problem of its heads alone
    return errors(heads, features, batch).sum() + RIDGE * heads["w"][batch[2]].square().sum()


def outer_loss(heads, features, batch):
    return errors(heads, features, batch).mean()


def learn_features(tasks, steps=1000, algorithm="soba", drawn=100):
    x, y = tasks
    features = Features()
    heads = nn.ParameterDict({"w": torch.zeros(len(x), features.size, 1)})
    adam = partial(torch.optim.Adam, lr=0.003)  # the automatic step is too long for a network
    bilevel = fsla.BilevelOptimizer(
        heads,
        features,
        inner_loss=inner_loss,
        outer_loss=outer_loss,
        algorithm=algorithm,
        outer_optimizer=adam,
    )
    for _ in range(steps):
        task = torch.randperm(len(x))[:drawn]
        bilevel.step((x[task, :10], y[task, :10], task), (x[task, 10:], y[task, 10:], task))
    return features


# --8<-- [end:core]
@torch.no_grad()
def new_task_error(features, tasks):
    """Fit heads to ten points of each new task; return the mean error on the other ten."""
    x, y = tasks
    h = features(x[:, :10])
    w = torch.linalg.solve(h.mT @ h / 10 + RIDGE * torch.eye(features.size), h.mT @ y[:, :10] / 10)
    return (features(x[:, 10:]) @ w - y[:, 10:]).square().mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    for steps in (0, 100 if "--small" in sys.argv else 1000):
        features = learn_features(make_tasks(200, seed=0), steps)
        print(f"error on new tasks after {steps} steps: {new_task_error(features, make_tasks(100, seed=10_000)):.3f}")
