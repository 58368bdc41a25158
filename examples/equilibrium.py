"""An equilibrium model: a layer z = tanh(W z + U x) of endless depth, trained without going through its iterations.

The inner variable is the fixed point z of each of 300 samples (inner loss ½‖z - tanh(W z + U x)‖²); the outer variables
are W, U and the read-out. Against it: the same network unrolled, 3 and 30 layers deep; the target is such a network.
Measured, error / variance on test data: FSLA does not win. Three layers have 0.029 at a quarter of its cost; FSLA has
0.048, and 30 layers 0.043 at its cost with the memory of 30. What FSLA learns is a fixed point: more iterations change
nothing; the three layers worsen to 0.078. FSLA's default step for λ ends in a DivergenceError here, so Adam moves λ."""

import argparse
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

import fsla

WIDTH, INPUTS, SAMPLES = 16, 8, 300
DEPTHS = (1, 2, 3, 5, 10, 20, 30, 50, 100)
Adam = partial(torch.optim.Adam, lr=1e-3)  # of 1e-3, 3e-3 and 1e-2 the best for FSLA


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


def inner_loss(points, layer, batch):
    return (points["z"] - layer(points["z"], batch[0])).square().sum() / 2


def outer_loss(points, layer, batch):
    return (layer.read_out(points["z"]) - batch[1]).square().mean()


def load():
    """Training and test data of a teacher whose W has norm 0.9, from its fixed points."""
    teacher = Layer().requires_grad_(False)
    W = torch.randn(WIDTH, WIDTH)
    teacher.W.copy_(0.9 * W / torch.linalg.matrix_norm(W, 2))
    nn.init.normal_(teacher.read_out.weight, std=WIDTH**-0.5)
    x = torch.randn(SAMPLES + 1000, INPUTS)
    y = teacher.iterate(x, 300)
    y = (y - y.mean()) / y.std()
    return (x[:SAMPLES], y[:SAMPLES]), (x[SAMPLES:], y[SAMPLES:])


def fsla_steps(layer, train):
    points = nn.ParameterDict({"z": torch.zeros(SAMPLES, WIDTH)})
    opt = fsla.FSLA(points, layer, inner_loss=inner_loss, outer_loss=outer_loss, outer_optimizer=Adam)
    while True:
        yield opt.step(train, train)  # full batches: z has a row for each sample


def unrolled_steps(depth, layer, train):
    optimizer = Adam(layer.parameters())
    while True:
        optimizer.zero_grad()
        (layer.iterate(train[0], depth) - train[1]).square().mean().backward()
        optimizer.step()
        yield


@torch.no_grad()
def errors(layer, test):
    return [float((layer.iterate(test[0], depth) - test[1]).square().mean()) for depth in DEPTHS]


def main(steps, seeds, path):
    ax = (figure := Figure((7, 4.5), layout="constrained")).subplots()
    print(f"error / variance on test data, {seeds} seed(s)   start    3 layers   30 layers  100 layers   CPU seconds")
    methods = {"FSLA, equilibrium": fsla_steps}
    methods |= {f"{depth} layers unrolled": partial(unrolled_steps, depth) for depth in (3, 30)}
    for name, method in methods.items():
        all_errors, begin = [], time.process_time()
        for seed in range(seeds):
            torch.manual_seed(seed)
            train, test = load()
            layer = Layer()
            start = errors(layer, test)[-1]
            for _ in zip(range(steps), method(layer, train), strict=False):
                pass
            all_errors.append(errors(layer, test))
        mean = np.mean(all_errors, axis=0)
        cells = "".join(f"{mean[DEPTHS.index(depth)]:>12.4f}" for depth in (3, 30, 100))
        print(f"{name:<40}{start:>10.4f}{cells}{time.process_time() - begin:>13.1f}")
        ax.loglog(DEPTHS, mean, "o-", label=name)
    ax.set(xlabel="layers (iterations) at test time", ylabel="error / variance on test data")
    ax.legend()
    figure.savefig(path, dpi=120)
    print(f"At full size three layers win at their own depth, but are no fixed point. Picture: {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="one seed and fewer steps")
    parser.add_argument("--out", type=Path, default=Path("out/examples"), help="folder of the picture")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    main(120 if args.small else 1500, 1 if args.small else 3, args.out / "equilibrium.png")
