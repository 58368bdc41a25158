"""The problems of the comparison: small, strongly convex inside, so that f(λ) = F(λ, ω_λ) can be measured exactly.

The data of a problem is fixed; seeds change the batches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, binary_cross_entropy_with_logits, cross_entropy

from fsla._tree import Tree
from fsla.problems import Point
from fsla_benchmarks.compare.exact import Data
from fsla_benchmarks.compare.task import Task
from fsla_reproduction.datasets import load
from fsla_reproduction.problems import LeastSquares

F64 = torch.float64
RIDGE = 1e-2
NOISE_FEATURES = 20


def quadratic(data_dir: Path | None = None) -> Task:
    """Least squares at both levels, a finite sum; the condition number of H is about 30."""
    n = 20
    p = 10
    rows = 1024
    g = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=F64)

    axes = torch.linalg.qr(normal(n, n))[0]
    a = normal(rows, n) * torch.logspace(0, -0.75, n, dtype=F64) @ axes.T
    x = a @ normal(n, p) / 2 + normal(rows, p) / 2
    b = a @ normal(n) + normal(rows) / 2
    c = normal(rows, n) / n**0.5
    e = c @ normal(n) + normal(rows) / 2
    return least_squares(LeastSquares(a, x, b, c, e, rho_omega=1e-3, rho_lam=1e-3))


def least_squares(sums: LeastSquares) -> Task:
    def inner(lam: Tree, omega: Tree, batch: Data) -> Tensor:
        a, x, b = batch
        gap = a @ omega["omega"] - x @ lam["lam"] - b
        return gap.square().mean() / 2 + sums.rho_omega / 2 * omega["omega"].square().sum()

    def outer(lam: Tree, omega: Tree, batch: Data) -> Tensor:
        c, e = batch
        return (c @ omega["omega"] - e).square().mean() / 2 + sums.rho_lam / 2 * lam["lam"].square().sum()

    start = Point({"lam": sums.a.new_zeros(sums.x.shape[1])}, {"omega": sums.a.new_zeros(sums.a.shape[1])})
    every = (sums.a, sums.x, sums.b)
    return Task("quadratic", "quadratic", inner, outer, start, every, (sums.c, sums.e), batch=64, outer_uses_lam=True)


def ridge_cancer(data_dir: Path | None = None) -> Task:
    """Logistic regression on breast cancer, a penalty for each feature; 20 are noise, a tenth of the labels wrong."""
    from sklearn.datasets import load_breast_cancer

    data: Any = load_breast_cancer()
    g = torch.Generator().manual_seed(2)
    x = torch.tensor(data.data, dtype=F64)
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=g)
    train = order[:200]
    valid = order[200:400]
    test = order[400:]
    x = (x - x[train].mean(0)) / x[train].std(0)
    x = torch.cat([x, torch.randn(len(x), NOISE_FEATURES, generator=g, dtype=F64)], 1)
    noisy_y = torch.where(torch.rand(len(y), generator=g) < 0.1, 1 - y, y)

    def loss(omega: Tree, batch: Data) -> Tensor:
        return binary_cross_entropy_with_logits(batch[0] @ omega["weight"] + omega["bias"], batch[1])

    def inner(lam: Tree, omega: Tree, batch: Data) -> Tensor:
        return loss(omega, batch) + _penalty(lam, omega, omega["weight"].square())

    def outer(lam: Tree, omega: Tree, batch: Data) -> Tensor:
        return loss(omega, batch)

    def scores(lam: Tree, omega: Tree, batch: Data) -> Tensor:
        logit = batch[0] @ omega["weight"] + omega["bias"]
        return torch.stack([torch.zeros_like(logit), logit], 1)

    start = Point(
        {"log_penalty": torch.zeros(x.shape[1], dtype=F64)},
        {"weight": x.new_zeros(x.shape[1]), "bias": x.new_zeros(())},
    )
    inside = (x[train], noisy_y[train].double())
    outside = (x[valid], noisy_y[valid].double())
    title = "ridge a feature, breast cancer"
    return Task("ridge_cancer", title, inner, outer, start, inside, outside, 32, test=(x[test], y[test]), scores=scores)


def ridge_digits(data_dir: Path | None = None) -> Task:
    """Softmax regression on digits, a penalty for each pixel and for 20 features of noise."""
    x, y = _digits()
    g = torch.Generator().manual_seed(3)
    x = torch.cat([x, torch.randn(len(x), NOISE_FEATURES, generator=g, dtype=F64) / 2], 1)
    train, valid, test = _split(x, y, 320, 640)

    def inner(lam: Tree, omega: Tree, batch: Data) -> Tensor:
        return _plain(lam, omega, batch) + _penalty(lam, omega, omega["weight"].square().sum(1))

    start = Point({"log_penalty": torch.zeros(x.shape[1], dtype=F64)}, _head(x.shape[1]))
    title = "ridge a feature, digits"
    return Task("ridge_digits", title, inner, _plain, start, train, valid, 64, test=test, scores=_scores)


def cleaning_digits(data_dir: Path | None = None) -> Task:
    """A weight for each of 800 digits, 40 % of which have a wrong label."""
    x, y = _digits()
    return _cleaning("cleaning_digits", "hyper-cleaning, digits", _split(x, y, 800, 300))


def cleaning_mnist(data_dir: Path | None = None) -> Task:
    """The same with 2000 images of MNIST, halved to 14 x 14, and 1000 to judge by."""
    images = load("mnist", data_dir)
    order = torch.randperm(len(images.train_y), generator=torch.Generator().manual_seed(4))[:3000]
    x = _centred(avg_pool2d(torch.cat([images.train_x[order], images.test_x[:2000]]), 2).flatten(1).double())
    y = torch.cat([images.train_y[order], images.test_y[:2000]])
    return _cleaning("cleaning_mnist", "hyper-cleaning, MNIST", _split(x, y, 2000, 1000), 128)


def _cleaning(name: str, title: str, parts: tuple[Data, Data, Data], batch: int = 64) -> Task:
    (x, y), valid, test = parts
    g = torch.Generator().manual_seed(5)
    wrong = torch.rand(len(y), generator=g) < 0.4
    noisy_y = torch.where(wrong, (y + torch.randint(1, 10, y.shape, generator=g)) % 10, y)
    return _weighted(name, title, (x, noisy_y), torch.arange(len(y)), len(y), valid, test, batch)


def sources(data_dir: Path | None = None) -> Task:
    """A weight for each of ten sources of digits, whose labels are wrong in parts from none to nine tenths."""
    x, y = _digits()
    (x, y), valid, test = _split(x, y, 1000, 200)
    g = torch.Generator().manual_seed(6)
    source = torch.randint(10, y.shape, generator=g)
    wrong = torch.rand(len(y), generator=g) < source / 10
    noisy_y = torch.where(wrong, torch.randint(10, y.shape, generator=g), y)
    return _weighted("sources", "weights of sources, digits", (x, noisy_y), source, 10, valid, test, 64)


def _weighted(
    name: str, title: str, train: Data, group: Tensor, groups: int, valid: Data, test: Data, batch: int
) -> Task:
    """Softmax regression with a ridge, and a weight sigmoid(λ_g) for each sample of group g."""

    def inner(lam: Tree, omega: Tree, batch: Data) -> Tensor:
        x, y, group = batch
        each = cross_entropy(_scores(lam, omega, (x,)), y, reduction="none")
        return (lam["logit"][group].sigmoid() * each).mean() + RIDGE / 2 * _square(omega)

    start = Point({"logit": torch.zeros(groups, dtype=F64)}, _head(train[0].shape[1]))
    return Task(name, title, inner, _plain, start, (*train, group), valid, batch, test=test, scores=_scores)


def representation(data_dir: Path | None = None) -> Task:
    """Hyper-representation: λ is a layer 64 -> 16 with tanh, ω the softmax head upon it; F is on held-out digits."""
    x, y = _digits()
    train, valid, test = _split(x, y, 400, 800)
    g = torch.Generator().manual_seed(7)
    width = 16

    def scores(lam: Tree, omega: Tree, batch: Data) -> Tensor:
        return _scores(lam, omega, (torch.addmm(lam["shift"], batch[0], lam["map"]).tanh(),))

    def inner(lam: Tree, omega: Tree, batch: Data) -> Tensor:
        return cross_entropy(scores(lam, omega, batch), batch[1]) + RIDGE / 2 * _square(omega)

    def outer(lam: Tree, omega: Tree, batch: Data) -> Tensor:
        return cross_entropy(scores(lam, omega, batch), batch[1])

    first = torch.randn(x.shape[1], width, generator=g, dtype=F64) / x.shape[1] ** 0.5
    start = Point({"map": first, "shift": x.new_zeros(width)}, _head(width))
    title = "hyper-representation, digits"
    return Task(
        "representation", title, inner, outer, start, train, valid, 64, outer_uses_lam=True, test=test, scores=scores
    )


PROBLEMS: dict[str, Callable[[Path | None], Task]] = {
    "quadratic": quadratic,
    "ridge_cancer": ridge_cancer,
    "ridge_digits": ridge_digits,
    "cleaning_digits": cleaning_digits,
    "cleaning_mnist": cleaning_mnist,
    "sources": sources,
    "representation": representation,
}
DATA = {"quadratic": "", "ridge_cancer": "", "cleaning_mnist": "mnist"}
"""The data set of each problem, where it is not digits."""


def _scores(lam: Tree, omega: Tree, batch: Data) -> Tensor:
    return torch.addmm(omega["bias"], batch[0], omega["weight"])


def _plain(lam: Tree, omega: Tree, batch: Data) -> Tensor:
    return cross_entropy(_scores(lam, omega, batch), batch[1])


def _penalty(lam: Tree, omega: Tree, squares: Tensor) -> Tensor:
    """½ Σ 0.05 exp(4 tanh(λ_j / 4)) ‖ω_j‖²: a log-penalty for each feature, between 10⁻³ and 3 so that G stays
    strongly convex, and smooth, wherever λ goes."""
    penalty = 0.05 * (4 * (lam["log_penalty"] / 4).tanh()).exp()
    return (penalty * squares).sum() / 2 + RIDGE / 2 * omega["bias"].square().sum()


def _square(omega: Tree) -> Tensor:
    return omega["weight"].square().sum() + omega["bias"].square().sum()


def _head(width: int) -> Tree:
    return {"weight": torch.zeros(width, 10, dtype=F64), "bias": torch.zeros(10, dtype=F64)}


def _digits() -> tuple[Tensor, Tensor]:
    images = load("digits")
    order = torch.randperm(len(images.train_y) + len(images.test_y), generator=torch.Generator().manual_seed(0))
    x = torch.cat([images.train_x, images.test_x])[order].flatten(1).double()
    return _centred(x), torch.cat([images.train_y, images.test_y])[order]


def _centred(x: Tensor) -> Tensor:
    """Images less their mean, at a scale at which a sample has a squared norm of 16 on average."""
    x = x - x.mean(0)
    return x * (4 / x.square().sum(1).mean().sqrt())


def _split(x: Tensor, y: Tensor, train: int, valid: int) -> tuple[Data, Data, Data]:
    """The first samples, the next ones, and the rest."""
    parts = slice(0, train), slice(train, train + valid), slice(train + valid, None)
    first, second, rest = ((x[part], y[part]) for part in parts)
    return first, second, rest
