"""A learnt regulariser beside total variation and unrolled descent."""

from functools import partial

import torch
from denoise import Regularizer, denoise, inner_loss, learn_regularizer, load, psnr
from torch.nn.functional import mse_loss

METRIC, BETTER, DIGITS = "PSNR of 100 new images, dB", "higher", 2
STEPS, SMALL, SIZE = 300, 30, (9, 4.6)
SUMMARY = [
    (
        "A learnt regulariser",
        "PSNR, dB; higher is better",
        "10 steps of descent unrolled",
        "without an adjoint (one_step)",
        "fsla (SOBA)",
    ),
]
"""Lines of the gallery's table: title, score, and the methods that it shows."""


def total_variation(log_strength):
    filters = torch.zeros(2, 1, 3, 3)
    filters[0, 0, 1, 1:] = filters[1, 0, 1:, 1] = torch.tensor([-1.0, 1.0])
    return Regularizer(filters, torch.full((2,), float(log_strength)))


def best_total_variation(data):
    """Of ten strengths the best on the training images."""
    grid = [total_variation(s) for s in torch.linspace(-5, -0.5, 10)]
    return max(grid, key=lambda regularizer: psnr(denoise(regularizer, data[0]), data[1]))


def noisy(seed):
    return psnr(*load(seed)[1])


def grid(seed):
    data, new = load(seed)
    return psnr(denoise(best_total_variation(data), new[0]), new[1])


def descend(regularizer, images, depth=10, rate=0.2, create_graph=True):
    solution = images.clone().requires_grad_()
    for _ in range(depth):
        loss = inner_loss({"images": solution}, regularizer, (images, None))
        (gradient,) = torch.autograd.grad(loss, solution, create_graph=create_graph)
        solution = solution - rate * gradient
        if not create_graph:
            solution = solution.detach().requires_grad_()
    return solution


def unrolled(steps, seed):
    """Differentiate through ten steps of descent; new images get ten steps, too."""
    data, new = load(seed)
    regularizer = Regularizer(0.1 * torch.randn(8, 1, 5, 5), torch.full((8,), -5.0))
    optimizer = torch.optim.Adam(regularizer.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        mse_loss(descend(regularizer, data[0]), data[1]).backward()
        optimizer.step()
    return psnr(descend(regularizer, new[0], create_graph=False).detach(), new[1])


def learned(algorithm, steps, seed):
    data, new = load(seed)
    return psnr(denoise(learn_regularizer(data, steps, algorithm), new[0]), new[1])


def methods(steps):
    return {
        "noisy images": noisy,
        "total variation, grid of 10": grid,
        "10 steps of descent unrolled": partial(unrolled, steps),
        "without an adjoint (one_step)": partial(learned, "one_step", steps),
        "fsla (SOBA)": partial(learned, "soba", steps),
    }


def draw(figure, steps):
    data, (images, clean) = load(0)
    regularizer = learn_regularizer(data, steps)
    rows = {
        "noisy": images,
        "total variation": denoise(best_total_variation(data), images),
        "learnt": denoise(regularizer, images),
        "clean": clean,
    }
    chosen = clean.flatten(1).std(1).argsort(descending=True)[:8]  # pieces with much in them
    top, bottom = figure.subfigures(2, 1, height_ratios=(4, 1.2))
    for axes, (name, shown) in zip(top.subplots(4, 8), rows.items(), strict=True):
        for ax, i in zip(axes, chosen, strict=True):
            ax.imshow(shown[i, 0], cmap="gray", vmin=0, vmax=1)
            ax.set(xticks=[], yticks=[])
        axes[0].set_ylabel(name, rotation=0, ha="right", va="center")
    strengths = regularizer.log_strength.exp().tolist()
    for ax, kernel, strength in zip(bottom.subplots(1, 8), regularizer.kernels().detach(), strengths, strict=True):
        ax.imshow(kernel[0], cmap="RdBu_r", vmin=-0.7, vmax=0.7)
        ax.set_title(f"{strength:.3f}", fontsize=8)
        ax.axis("off")
    bottom.suptitle("Learnt filters and their strengths", fontsize=9)
