"""The models of section 6.2. Every one maps (batch, 1, height, width) images to class scores."""

from __future__ import annotations

import torch
from torch import nn

from fsla._checks import pick


def cnn(size: int, classes: int, *, width: int = 32) -> nn.Module:
    """The paper's four-layer network, read as two convolutions and two dense layers.

    Pooling comes before the ReLU: the same function, on a quarter of the numbers.
    """
    side = size // 4
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(2 * width * side * side, 4 * width), nn.ReLU(),
        nn.Linear(4 * width, classes),
    )  # fmt: skip


def small_cnn(size: int, classes: int) -> nn.Module:
    """The same with a quarter of the width, for a quick look."""
    return cnn(size, classes, width=8)


def cnn4(size: int, classes: int, *, width: int = 32) -> nn.Module:
    """The other reading of four layers: four convolutions, then a linear read-out."""
    side = size // 4
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * width * side * side, classes),
    )  # fmt: skip


def softmax(size: int, classes: int) -> nn.Module:
    """Softmax regression: with a ridge, the strongly convex companion to which the theory applies."""
    return nn.Sequential(nn.Flatten(), nn.Linear(size * size, classes))


MODELS = {"cnn": cnn, "cnn-small": small_cnn, "cnn4": cnn4, "softmax": softmax}
RIDGE = {"softmax": 1e-3}


def build(name: str, size: int, classes: int, *, seed: int, device: torch.device | str = "cpu") -> nn.Module:
    """Return a model with PyTorch's default initialisation, drawn on the CPU from the seed.

    On a GPU kernels of several channels are laid out with their channels last, as cuDNN wants them.
    """
    make = pick(name, MODELS, "model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make(size, classes).to(device)
    for p in model.parameters():
        if p.ndim == 4 and p.device.type == "cuda":  # not Module.to, which does it to single channels too
            p.data = p.data.contiguous(memory_format=torch.channels_last)
    return model
