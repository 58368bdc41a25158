"""An equilibrium model: a layer of endless depth, trained without going through its iterations.

The inner variable is the fixed point z = tanh(W z + U x) of each of 300 samples. The outer variables are W, U and the
read-out. The target is such a network.

python examples/equilibrium.py
"""

import sys
from functools import partial

import torch
from torch import nn

import fsla

WIDTH, INPUTS, SAMPLES = 16, 8, 300


# --8<-- [start:core]
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.U = nn.Parameter(torch.randn(WIDTH, INPUTS) / INPUTS**0.5)
        self.read_out = nn.Linear(WIDTH, 1)

    def forward(self, z, x):
        return (z @ self.W.T + x @ self.U.T).tanh()

    def iterate(self, x, depth):
        z = torch.zeros(len(x), WIDTH)
        for _ in range(depth):
            z = self(z, x)
        return self.read_out(z)


def inner_loss(points, layer, batch):  # at its minimum, 0, each z is a fixed point
    return (points["z"] - layer(points["z"], batch[0])).square().sum() / 2


def outer_loss(points, layer, batch):
    return (layer.read_out(points["z"]) - batch[1]).square().mean()


def load(seed):
    """Return 300 training and 1000 test samples of a teacher whose W has norm 0.9, from its fixed points."""
    torch.manual_seed(seed)
    teacher = Layer().requires_grad_(False)
    W = torch.randn(WIDTH, WIDTH)
    teacher.W.copy_(0.9 * W / torch.linalg.matrix_norm(W, 2))
    nn.init.normal_(teacher.read_out.weight, std=WIDTH**-0.5)
    x = torch.randn(SAMPLES + 1000, INPUTS)
    y = teacher.iterate(x, 300)
    y = (y - y.mean()) / y.std()
    return (x[:SAMPLES], y[:SAMPLES]), (x[SAMPLES:], y[SAMPLES:])


def learn_layer(train, steps=1500, algorithm="soba"):
    layer, points = Layer(), nn.ParameterDict({"z": torch.zeros(SAMPLES, WIDTH)})
    adam = partial(torch.optim.Adam, lr=1e-3)  # the automatic step is too long for a network
    bilevel = fsla.BilevelOptimizer(
        points,
        layer,
        inner_loss=inner_loss,
        outer_loss=outer_loss,
        algorithm=algorithm,
        outer_optimizer=adam,
    )
    for _ in range(steps):
        bilevel.step(train, train)  # full batches: each sample has a row of z
    return layer


# --8<-- [end:core]
@torch.no_grad()
def error_on(layer, test, depth=100):
    return (layer.iterate(test[0], depth) - test[1]).square().mean().item()


if __name__ == "__main__":
    train, test = load(seed=0)
    for steps in (0, 100 if "--small" in sys.argv else 1500):
        layer = learn_layer(train, steps)
        print(f"test error / variance after {steps} steps: {error_on(layer, test):.3f}")
