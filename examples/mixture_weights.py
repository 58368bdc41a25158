"""Which of twelve sources of training data help? A weight for each, learnt on 100 trusted images in one run.

The sources are parts of scikit-learn's digits: two are clean, ten have errors of four kinds. Against it: uniform
weights, one run for each source (of which the trusted images choose the best), and the trusted images alone. Measured,
accuracy on test images: FSLA 93.0 %, best single source 91.3 %, trusted images alone 89.5 %, uniform 46.7 %. The two
clean sources get 78 % of the weight, in one run instead of twelve; 120 steps (--small) are too few for that.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.utils import shuffle
from torch import nn
from torch.nn.functional import cross_entropy

import fsla

KINDS = ["clean"] * 2 + ["30 % wrong labels"] * 2 + ["turned by 90°"] * 2 + ["random labels"] * 3 + ["labels + 1"] * 3


def load(seed):
    """The sources' images, labels and source numbers (90 images each); 100 trusted images; the test images."""
    x, y = load_digits(return_X_y=True)
    x, y = shuffle(x.astype("float32") / 16, y, random_state=seed)
    random = np.random.default_rng(seed)
    kind = np.repeat(KINDS, 90)
    n = len(kind)
    wrong = random.random(n) < 0.3 * (kind == "30 % wrong labels") + (kind == "random labels")
    y[:n] = np.where(wrong, random.integers(10, size=n), (y[:n] + (kind == "labels + 1")) % 10)
    turned = np.flatnonzero(kind == "turned by 90°")
    x[turned] = np.rot90(x[turned].reshape(-1, 8, 8), axes=(1, 2)).reshape(-1, 64)
    x, y, source = torch.tensor(x), torch.tensor(y), torch.arange(len(KINDS)).repeat_interleave(90)
    return (x[:n], y[:n], source), (x[n : n + 100], y[n : n + 100]), (x[n + 100 :], y[n + 100 :])


def inner_loss(model, logits, batch):
    x, y, source = batch
    weight = len(KINDS) * logits.softmax(0)[source]
    ridge = sum(p.square().sum() for p in model.parameters())
    return (weight * cross_entropy(model(x), y, reduction="none")).mean() + 1e-3 * ridge


def outer_loss(model, logits, batch):
    return cross_entropy(model(batch[0]), batch[1])


def train(data, trusted, steps, seed):
    """A network and the weights by step: learnt, with automatic steps, if there are trusted images, else equal."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    logits = nn.Parameter(torch.zeros(len(KINDS)))
    opt = fsla.FSLA(model, logits, inner_loss=inner_loss, outer_loss=outer_loss)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    weights = []
    for _ in range(steps):
        rows = torch.randint(len(data[0]), (128,))
        batch = tuple(t[rows] for t in data)
        if trusted is not None:
            opt.step(batch, trusted)
            weights.append(logits.detach().softmax(0))
        else:
            adam.zero_grad()
            inner_loss(model, logits.detach(), batch).backward()
            adam.step()
    return model, weights


@torch.no_grad()
def accuracy(model, batch):
    return 100 * float((model(batch[0]).argmax(1) == batch[1]).float().mean())


def main(steps, seeds, path):
    rows, all_weights, single = [], [], []
    for seed in range(seeds):
        data, trusted, test = load(seed)
        sources = [tuple(t[data[2] == j] for t in data) for j in range(len(KINDS))]
        singles = [train(source, None, steps, seed)[0] for source in sources]
        best = min(singles, key=lambda model: outer_loss(model, None, trusted).item())
        uniform, _ = train(data, None, steps, seed)
        trusted_accuracy, _ = train((*trusted, sources[0][2].new_zeros(100)), None, steps, seed)
        learned_accuracy, weights = train(data, trusted, steps, seed)
        rows.append([accuracy(model, test) for model in (uniform, trusted_accuracy, best, learned_accuracy)])
        single.append([accuracy(model, test) for model in singles])
        all_weights.append(torch.stack(weights))
    names = ("uniform weights", "trusted images alone", "best of 12 single runs", "FSLA")
    mean = np.mean(rows, axis=0)
    print(f"{'':<24}accuracy on test images, %, mean of {seeds} seed(s)    runs")
    for name, value, runs in zip(names, mean, (1, 1, 12, 1), strict=True):
        print(f"{name:<24}{value:>44.1f} {runs:>7}")
    mean_weights = torch.stack(all_weights).mean(0)
    left, right = (figure := Figure((11, 4.2), layout="constrained")).subplots(1, 2)
    for i, kind in enumerate(dict.fromkeys(KINDS)):
        chosen = [j for j, other in enumerate(KINDS) if other == kind]
        print(f"  share of {len(chosen)} sources, {kind}: {100 * float(mean_weights[-1, chosen].sum()):.0f} %")
        left.plot(mean_weights[:, chosen], color=f"C{i}", label=[kind] + [None] * (len(chosen) - 1))
        right.plot(np.mean(single, axis=0)[chosen], mean_weights[-1, chosen], "o", color=f"C{i}", label=kind)
    left.set(xlabel="step", ylabel="weight of a source (of 1)")
    right.set(xlabel="test accuracy of a network trained on that source alone, %", ylabel="weight of a source (of 1)")
    left.legend(loc="upper left")
    figure.savefig(path, dpi=120)
    print(f"One run finds what twelve runs would, and uses the good sources together. Picture: {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="one seed and fewer steps")
    parser.add_argument("--out", type=Path, default=Path("out/examples"), help="folder of the picture")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    main(120 if args.small else 500, 1 if args.small else 3, args.out / "mixture_weights.png")
