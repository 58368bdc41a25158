"""The searched network beside random choices, three 3x3 convolutions, and first-order DARTS."""

from functools import partial

import torch
from architecture import LAYERS, OPERATIONS, Network, draw_batch, inner_loss, load, outer_loss, search
from torch.nn.functional import cross_entropy

METRIC, BETTER, DIGITS = "test accuracy of the network trained anew, %", "higher", 1
STEPS, SMALL, SIZE = 200, 15, (7.5, 3)
SINGLE = torch.zeros(LAYERS, 1)
SUMMARY = [
    (
        "Architecture search",
        "test accuracy, %; higher is better",
        "three 3x3 convolutions",
        "without an adjoint (one_step)",
        "fsla (SOBA)",
    ),
]
"""Lines of the gallery's table: title, score, and the methods that it shows."""


def train_anew(operations, data, steps):
    model = Network([[name] for name in operations])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        x, y = draw_batch(data)
        optimizer.zero_grad()
        cross_entropy(model(x, SINGLE), y).backward()
        optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def accuracy(model, data):
    return 100 * (model(data[0], SINGLE).argmax(1) == data[1]).float().mean().item()


def judge(operations, seed, steps):
    """Train on all images but the test images, from the same start for all methods."""
    train, valid, test = load(seed)
    torch.manual_seed(seed)
    both = tuple(torch.cat(parts) for parts in zip(train, valid, strict=True))
    return accuracy(train_anew(operations, both, steps), test)


def strongest(logits):
    return [list(OPERATIONS)[i] for i in logits.argmax(1).tolist()]


def random_choices(count, seed):
    random = torch.Generator().manual_seed(100 + seed)
    rows = torch.randint(len(OPERATIONS), (count, LAYERS), generator=random).tolist()
    return [[list(OPERATIONS)[i] for i in row] for row in rows]


def best_random(count, steps, seed):
    train, valid, _ = load(seed)
    choices = random_choices(count, seed)
    return judge(max(choices, key=lambda c: accuracy(train_anew(c, train, steps // 2), valid)), seed, steps)


def darts(steps, seed):
    """Move the logits by the validation gradient at the present weights."""
    train, valid, _ = load(seed)
    model, logits = Network([OPERATIONS] * LAYERS), torch.nn.Parameter(torch.zeros(LAYERS, len(OPERATIONS)))
    optimizers = torch.optim.Adam(model.parameters(), lr=1e-2), torch.optim.Adam([logits], lr=1e-2)
    for _ in range(2 * steps):
        for optimizer, loss, data in zip(optimizers, (inner_loss, outer_loss), (train, valid), strict=True):
            model.zero_grad()
            logits.grad = None
            loss(model, logits, draw_batch(data)).backward()
            optimizer.step()
    return judge(strongest(logits), seed, steps)


def searched(algorithm, steps, seed):
    train, valid, _ = load(seed)
    return judge(strongest(search(train, valid, steps, algorithm)), seed, steps)


def methods(steps):
    return {
        "random choice": lambda seed: judge(random_choices(1, seed)[0], seed, steps),
        "best of 8 random choices": partial(best_random, 8, steps),
        "three 3x3 convolutions": lambda seed: judge(["conv3"] * 3, seed, steps),
        "first-order DARTS": partial(darts, steps),
        "without an adjoint (one_step)": partial(searched, "one_step", steps),
        "fsla (SOBA)": partial(searched, "soba", steps),
    }


def draw(figure, steps):
    train, valid, _ = load(0)
    logits = search(train, valid, steps)
    ax = figure.subplots()
    for layer, row in enumerate(logits):
        places = torch.arange(len(OPERATIONS)) + 0.27 * (layer - 1)
        ax.bar(places, row.softmax(0), width=0.25, label=f"layer {layer + 1}")
    ax.axhline(1 / len(OPERATIONS), color="0.5", linewidth=0.8)
    ax.set(xticks=range(len(OPERATIONS)), xticklabels=list(OPERATIONS), ylabel="share of the operation", ylim=(0, 0.8))
    ax.legend(ncols=3)
