"""The networks that the cleaner trains, by the form of the data; or the user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from fsla._checks import pick

Maker = Callable[[], nn.Module]
EMBEDDED = 256
"""From so many features on they are taken for embeddings, for which a linear head is enough."""
HIDDEN = 128
ROW = 16


class Plain(nn.Sequential):
    """Layers of the kinds that `Stack` knows."""

    @property
    def learnt(self) -> list[nn.Linear | nn.Conv2d]:
        return [layer for layer in self if isinstance(layer, nn.Linear | nn.Conv2d)]


def linear(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return Plain(nn.Flatten(), nn.Linear(_size(shape), outputs))


def dense(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return Plain(nn.Flatten(), nn.Linear(_size(shape), HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs))


def cnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Two convolutions and two dense layers, for images of any size from 8 x 8 on."""
    channels, height, width = shape
    side = 7 if min(height, width) >= 28 else 2
    flat = nn.Identity() if (height, width) == (28, 28) else nn.AdaptiveAvgPool2d(side)
    return Plain(
        nn.Conv2d(channels, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        flat, nn.Flatten(), nn.Linear(64 * side * side, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs),
    )  # fmt: skip


KINDS = {"linear": linear, "dense": dense, "cnn": cnn}


class Pace(NamedTuple):
    """How a kind of network is trained: Adam's rate, and the steps and the batches in which FSLA learns weights."""

    rate: float = 1e-3
    bilevel_steps: int = 1000
    bilevel_batch: int = 256


USUAL_PACE = Pace()
PACES = {"linear": Pace(1e-2, 500, 512), "dense": Pace(3e-3)}
"""Of all others the usual one."""


def named(model: Any, shape: tuple[int, ...]) -> Any:
    """What "auto" means for samples of a shape; any other model as it is."""
    if not isinstance(model, str) or model != "auto":
        return model
    return "cnn" if len(shape) == 3 else "linear" if _size(shape) >= EMBEDDED else "dense"


def maker(model: Any, shape: tuple[int, ...], outputs: int) -> Maker:
    """A function that makes a new network: of a named kind, or a copy of the user's with its weights drawn anew."""
    if isinstance(model, nn.Module):
        return lambda: _drawn_anew(model)
    if callable(model):
        return model  # type: ignore[no-any-return]
    kind = pick(named(model, shape), KINDS, "model")
    if kind is cnn and (len(shape) != 3 or min(shape[1:]) < 8):
        raise ValueError(f"A cnn needs images of at least 8 x 8 pixels. Got samples of shape {shape}.")
    return lambda: kind(shape, outputs)


def pace(model: Any, shape: tuple[int, ...]) -> Pace:
    kind = named(model, shape)
    return PACES.get(kind, USUAL_PACE) if isinstance(kind, str) else USUAL_PACE


class Stack(nn.Module):
    """Networks of one form, side by side: (networks, batch, ...) in, (networks, batch, outputs) out.

    What a network learns does not depend on its neighbours, bit by bit on one thread: its numbers begin at multiples of
    ROW, since optimisers round the last few of a tensor in another way than the rest.
    """

    def __init__(self, networks: Sequence[Plain]) -> None:
        super().__init__()
        self._originals = tuple(networks)
        layers = list(zip(*(network.learnt for network in networks), strict=True))
        self._weights = nn.ParameterList(_side_by_side([one.weight for one in own]) for own in layers)
        self._biases = nn.ParameterList(_side_by_side([_bias(one) for one in own]) for own in layers)

    @property
    def _learnt(self) -> list[tuple[Tensor, Tensor]]:
        """The weights and biases of each layer."""
        layers = zip(self._originals[0].learnt, self._weights, self._biases, strict=True)
        return [(_like(one.weight, weight), _like(_bias(one), bias)) for one, weight, bias in layers]

    def forward(self, x: Tensor) -> Tensor:
        count = len(self._originals)
        learnt = iter(self._learnt)
        images = x.ndim == 5
        if images:  # (batch, networks x channels, height, width)
            x = x.transpose(0, 1).flatten(1, 2)
        for layer in self._originals[0]:
            if isinstance(layer, nn.Conv2d):
                weight, bias = next(learnt)
                x = conv2d(x, weight.flatten(0, 1), bias.flatten(), padding=layer.padding, groups=count)
            elif isinstance(layer, nn.Flatten):
                x = x.reshape(len(x), count, -1).transpose(0, 1) if images else x.flatten(2)
            elif isinstance(layer, nn.Linear):
                weight, bias = next(learnt)
                x = torch.baddbmm(bias[:, :, None], weight, x.mT).mT  # in this order a third of the time on a CPU
            else:
                x = layer(x)
        return x

    @torch.no_grad()
    def unstack(self) -> None:
        """Writes what was learnt into the networks."""
        for number, network in enumerate(self._originals):
            for layer, (weight, bias) in zip(network.learnt, self._learnt, strict=True):
                layer.weight.copy_(weight[number])
                _bias(layer).copy_(bias[number])


def stacked(networks: Sequence[nn.Module]) -> Stack | None:
    """The networks as one, where that is faster: dense ones anywhere, convolutions on a GPU."""
    plain = [network for network in networks if isinstance(network, Plain)]
    if len(plain) < len(networks):
        return None
    on_gpu = next(networks[0].parameters()).is_cuda
    dense = all(isinstance(layer, nn.Linear) for layer in plain[0].learnt)
    return Stack(plain) if dense or on_gpu else None


def _side_by_side(tensors: Sequence[Tensor]) -> nn.Parameter:
    """A row for each tensor, filled with zeros to a multiple of ROW."""
    rows = torch.stack([t.detach().reshape(-1) for t in tensors])
    return nn.Parameter(nn.functional.pad(rows, (0, -rows.shape[1] % ROW)))


def _like(one: Tensor, rows: Tensor) -> Tensor:
    return rows[:, : one.numel()].view(len(rows), *one.shape)


def _bias(layer: nn.Linear | nn.Conv2d) -> Tensor:
    assert layer.bias is not None
    return layer.bias


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _drawn_anew(model: nn.Module) -> nn.Module:
    """A copy with new weights, wherever its layers know how to draw them."""
    made = copy.deepcopy(model)
    for layer in made.modules():
        reset = getattr(layer, "reset_parameters", None)
        if callable(reset):
            reset()
    return made
