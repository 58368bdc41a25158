"""The tasks on which automatic steps are compared with searched ones: small, offline, of the kinds that users bring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fsla.problems._module import ModuleLoss

Batch = tuple[Tensor, ...]
F64 = torch.float64


@dataclass(frozen=True)
class Task:
    """A fresh start by `build`, the two losses, and all samples of both levels; `batch` rows are drawn a step."""

    name: str
    build: Callable[[], tuple[nn.Module, Any]]
    inner_loss: ModuleLoss
    outer_loss: ModuleLoss
    inner: Batch
    outer: Batch
    batch: int | None = None
    scale: float = 1.0
    """Both losses are multiplied by it."""

    def draw(self, generator: torch.Generator) -> tuple[Batch, Batch]:
        return self._some(self.inner, generator), self._some(self.outer, generator)

    def _some(self, data: Batch, generator: torch.Generator) -> Batch:
        if self.batch is None:
            return data
        rows = torch.randint(len(data[0]), (self.batch,), generator=generator)
        return tuple(t[rows] for t in data)

    def losses(self) -> tuple[ModuleLoss, ModuleLoss]:
        def inner(model: Any, outer: Any, batch: Batch) -> Tensor:
            return self.scale * self.inner_loss(model, outer, batch)

        def outer(model: Any, outer: Any, batch: Batch) -> Tensor:
            return self.scale * self.outer_loss(model, outer, batch)

        return inner, outer


class Vector(nn.Module):
    """A vector of hyper-parameters."""

    def __init__(self, n: int, start: float = 0.0, dtype: torch.dtype = F64) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((n,), start, dtype=dtype))


@cache
def tasks() -> tuple[Task, ...]:
    """All tasks, the names of each once."""
    return (
        _least_squares(10.0, None),
        _least_squares(1e3, None),
        _least_squares(1e5, None),
        _least_squares(1e3, 64),
        _ridge("cancer", None),
        _ridge("cancer", 64),
        _ridge("wine", None),
        _ridge("digits", None),
        _ridge("cancer", None, scale=100.0),
        _ridge("cancer", None, features=10.0),
        _cleaning("softmax"),
        _cleaning("dense"),
        _class_weights("dense"),
        _class_weights("cnn"),
        _sources("softmax"),
        _sources("dense"),
        _representation(),
    )


def _least_squares(condition: float, batch: int | None) -> Task:
    """G = mean ½(aᵀω - xᵀλ - b)², F = mean ½(cᵀω - e)² + ½10⁻³‖λ‖², with H of this condition number."""
    g = torch.Generator().manual_seed(1000)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=F64)

    n = 20
    p = 10
    rows = 2000
    basis = torch.linalg.qr(normal(n, n))[0]
    spread = torch.logspace(0, -torch.tensor(condition).log10().item(), n, dtype=F64).sqrt()
    root = (basis * spread) @ basis.T
    a = normal(rows, n) @ root
    c = normal(rows, n) @ root
    x = a @ normal(n, p) / n**0.5 + 0.3 * normal(rows, p)
    b = a @ normal(n) + 0.3 * normal(rows)
    e = c @ normal(n) + 0.3 * normal(rows)

    def inner(model: Vector, lam: Vector, batch: Batch) -> Tensor:
        a, x, b = batch
        return (a @ model.x - x @ lam.x - b).square().mean() / 2

    def outer(model: Vector, lam: Vector, batch: Batch) -> Tensor:
        c, e = batch
        return (c @ model.x - e).square().mean() / 2 + 0.5e-3 * lam.x.square().sum()

    name = f"least squares, condition {condition:g}" + ("" if batch is None else f", batch {batch}")
    return Task(name, lambda: (Vector(n), Vector(p)), inner, outer, (a, x, b), (c, e), batch)


def _ridge(data: str, batch: int | None, *, scale: float = 1.0, features: float = 1.0) -> Task:
    """Softmax regression with a ridge penalty for each feature, some of which are noise."""
    x, y, x_valid, y_valid = _table(data)
    x = features * x
    x_valid = features * x_valid
    width = x.shape[1]
    classes = int(y.max()) + 1

    def inner(model: nn.Linear, lam: Vector, batch: Batch) -> Tensor:
        penalty = (lam.x.exp() * model.weight.square().sum(0)).sum() + 1e-6 * model.bias.square().sum()
        return cross_entropy(model(batch[0]), batch[1]) + penalty / 2

    def outer(model: Any, lam: Vector, batch: Batch) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    extra = [f"batch {batch}"] if batch else []
    extra += [f"losses x {scale:g}"] if scale != 1 else []
    extra += [f"features x {features:g}"] if features != 1 else []
    name = ", ".join([f"ridge a feature, {data}", *extra])
    build = lambda: (_zero(nn.Linear(width, classes, dtype=F64)), Vector(width))  # noqa: E731
    return Task(name, build, inner, outer, (x, y), (x_valid, y_valid), batch, scale)


def _cleaning(model: str) -> Task:
    """A weight for each training sample, 40 % of whose labels are random."""
    x, y, x_valid, y_valid = _digits(1000, 300)
    g = torch.Generator().manual_seed(1)
    wrong = torch.rand(len(y), generator=g) < 0.4
    y = torch.where(wrong, torch.randint(10, y.shape, generator=g), y)
    index = torch.arange(len(y))

    def inner(model: Any, lam: Vector, batch: Batch) -> Tensor:
        x, y, i = batch
        each = cross_entropy(model(x), y, reduction="none")
        return (lam.x[i].sigmoid() * each).mean() + 0.5e-3 * _square(model)

    build = lambda: (_network(model), Vector(len(y), dtype=torch.float32))  # noqa: E731
    name = f"weights of samples, {model}"
    return Task(name, build, inner, _plain, (x, y, index), (x_valid, y_valid), 64)


def _class_weights(model: str) -> Task:
    """A weight for each class: some classes are rare in training."""
    x, y, x_valid, y_valid = _digits(1200, 300)
    g = torch.Generator().manual_seed(2)
    keep = (y < 5) | (torch.rand(len(y), generator=g) < 0.1)
    x = x[keep]
    y = y[keep]

    def inner(model: Any, lam: Vector, batch: Batch) -> Tensor:
        each = cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (lam.x.exp()[batch[1]] * each).mean() + 0.5e-2 * _square(model)

    build = lambda: (_network(model), Vector(10, dtype=torch.float32))  # noqa: E731
    return Task(f"weights of classes, {model}", build, inner, _plain, (x, y), (x_valid, y_valid), 64)


def _sources(model: str) -> Task:
    """A weight for each of ten sources, whose labels are wrong in parts from none to nine tenths."""
    x, y, x_valid, y_valid = _digits(1400, 100)
    g = torch.Generator().manual_seed(3)
    source = torch.randint(10, y.shape, generator=g)
    wrong = torch.rand(len(y), generator=g) < source / 10
    y = torch.where(wrong, torch.randint(10, y.shape, generator=g), y)

    def inner(model: Any, lam: Vector, batch: Batch) -> Tensor:
        x, y, s = batch
        each = cross_entropy(model(x), y, reduction="none")
        return (lam.x[s].sigmoid() * each).mean() + 0.5e-3 * _square(model)

    build = lambda: (_network(model), Vector(10, dtype=torch.float32))  # noqa: E731
    name = f"weights of sources, {model}"
    return Task(name, build, inner, _plain, (x, y, source), (x_valid, y_valid), 64)


def _representation() -> Task:
    """A feature map outside, a linear head inside."""
    x, y, x_valid, y_valid = _digits(200, 500)

    def build() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        features = nn.Sequential(nn.Linear(64, 16), nn.Tanh())
        return _zero(nn.Linear(16, 10)), features

    def inner(head: Any, features: Any, batch: Batch) -> Tensor:
        return cross_entropy(head(features(batch[0])), batch[1]) + 0.5e-2 * _square(head)

    def outer(head: Any, features: Any, batch: Batch) -> Tensor:
        return cross_entropy(head(features(batch[0])), batch[1])

    return Task("a feature map, with a linear head inside", build, inner, outer, (x, y), (x_valid, y_valid), 64)


def _plain(model: Any, lam: Any, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def _square(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


def _zero(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _network(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "softmax":
        return _zero(nn.Linear(64, 10))
    if name == "dense":
        return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    image = nn.Unflatten(1, (1, 8, 8))
    convolutions = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()
    return nn.Sequential(image, *convolutions, nn.Flatten(), nn.Linear(256, 10))


def _table(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Half of a data set for training and half for validation, with noise among the features and the labels."""
    from sklearn import datasets

    g = torch.Generator().manual_seed(0)
    if name == "digits":
        x, y, x_valid, y_valid = _digits(300, 500)
        return x.to(F64), y, x_valid.to(F64), y_valid
    data = {"cancer": datasets.load_breast_cancer, "wine": datasets.load_wine}[name]()
    x = torch.tensor(data.data, dtype=F64)
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=g)
    half = len(x) // 2
    x = (x - x[order[:half]].mean(0)) / x[order[:half]].std(0)
    x = torch.cat([x, torch.randn(len(x), 20, generator=g, dtype=F64)], 1)
    flip = torch.rand(len(y), generator=g) < 0.1
    y = torch.where(flip, (y + 1) % (int(y.max()) + 1), y)
    return x[order[:half]], y[order[:half]], x[order[half:]], y[order[half:]]


def _digits(n: int, n_valid: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train = order[:n]
    valid = order[n : n + n_valid]
    return x[train], y[train], x[valid], y[valid]
