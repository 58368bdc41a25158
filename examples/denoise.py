"""A regulariser that is learnt from thirty pieces of a photograph.

Each noisy image has a convex problem: stay close to the noisy image, and let eight filters respond little. Its
solutions are the inner variable. The filters and their strengths are the outer variable: solutions should be the
clean images.

python examples/denoise.py
"""

import sys
from functools import partial

import torch
from sklearn.datasets import load_sample_image
from torch import nn
from torch.nn.functional import conv2d, mse_loss

import fsla

NOISE, SMOOTH = 0.1, 0.02


def load(seed, count=30, size=16):
    """Return noisy and clean patches of a photograph to learn from, and 100 of another photograph."""
    random = torch.Generator().manual_seed(seed)

    def patches(name, count):
        photo = torch.tensor(load_sample_image(name) / 255).float().mean(2)
        windows = photo.unfold(0, size, size).unfold(1, size, size).reshape(-1, 1, size, size)
        clean = windows[torch.randperm(len(windows), generator=random)[:count]]
        return clean + NOISE * torch.randn(clean.shape, generator=random), clean

    return patches("china.jpg", count), patches("flower.jpg", 100)


# --8<-- [start:core]
class Regularizer(nn.Module):
    """Sum over filters of strength times a smooth absolute value of the response."""

    def __init__(self, filters, log_strength):
        super().__init__()
        self.filters, self.log_strength = nn.Parameter(filters), nn.Parameter(log_strength)

    def kernels(self):
        centred = self.filters - self.filters.mean((1, 2, 3), keepdim=True)  # a constant image costs nothing
        return centred / centred.flatten(1).norm(dim=1)[:, None, None, None]

    def forward(self, images):
        response = conv2d(images, self.kernels(), padding="same")
        size = (response.square() + SMOOTH**2).sqrt() - SMOOTH
        return (self.log_strength.exp()[:, None, None] * size).sum()


def inner_loss(solution, regularizer, batch):  # a sum over images: each is a problem
    return (solution["images"] - batch[0]).square().sum() / 2 + regularizer(solution["images"])


def outer_loss(solution, regularizer, batch):
    return mse_loss(solution["images"], batch[1])


def learn_regularizer(data, steps=300, algorithm="soba"):
    """Return filters and strengths."""
    solution = nn.ParameterDict({"images": data[0].clone()})
    regularizer = Regularizer(0.1 * torch.randn(8, 1, 5, 5), torch.full((8,), -5.0))
    adam = partial(torch.optim.Adam, lr=0.01)  # the automatic step is too long for filters
    bilevel = fsla.BilevelOptimizer(
        solution,
        regularizer,
        inner_loss=inner_loss,
        outer_loss=outer_loss,
        algorithm=algorithm,
        outer_optimizer=adam,
    )
    for _ in range(steps):
        bilevel.step(data, data)
    return regularizer


def denoise(regularizer, noisy):
    """Solve the problems of new images."""
    solution = nn.ParameterDict({"images": noisy.clone()})
    fsla.SOBA(solution, regularizer, inner_loss=inner_loss, outer_loss=outer_loss).solve((noisy, None), tol=1e-3)
    return solution["images"].detach()


# --8<-- [end:core]
def psnr(images, clean):
    return -10 * mse_loss(images, clean).log10().item()


if __name__ == "__main__":
    data, (noisy, clean) = load(seed=0)
    torch.manual_seed(0)
    regularizer = learn_regularizer(data, 60 if "--small" in sys.argv else 300)
    print(f"noisy: {psnr(noisy, clean):.2f} dB, denoised: {psnr(denoise(regularizer, noisy), clean):.2f} dB")
