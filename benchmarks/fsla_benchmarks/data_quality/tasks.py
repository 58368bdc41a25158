"""Data of mixed quality, made on purpose from images: sources, and wrong labels of several kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fsla._checks import pick
from fsla_reproduction.datasets import Images

CLASSES = 10
SOURCES = 10
RIGHT = (0, 1, 9)
"""The sources that are as they should be."""
LOOK_ALIKES = {6: 0, 4: 2, 7: 9, 1: 3, 0: 6}
SWAPPED = (6, 1, 4, 3, 2, 7, 0, 9, 8, 5)


class Mixed(NamedTuple):
    """Training data of mixed quality, trusted data, test data; and what no method may see: which labels are wrong."""

    x: Tensor
    y: Tensor
    wrong: Tensor
    trusted_x: Tensor
    trusted_y: Tensor
    test_x: Tensor
    test_y: Tensor
    groups: Tensor | None


class _Draw:
    """A shuffled data set and a stream of random numbers, both from the seed."""

    def __init__(self, images: Images, seed: int) -> None:
        self.images = images
        self.generator = torch.Generator().manual_seed(seed)
        self.order = torch.randperm(len(images.train_y), generator=self.generator)

    def uniform(self, count: int) -> Tensor:
        return torch.rand(count, generator=self.generator)

    def whole(self, low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=self.generator)

    def mixed(self, rows: Tensor, y: Tensor, trusted: Tensor, x: Tensor | None = None, **more: Tensor) -> Mixed:
        images = self.images
        own = images.train_x[rows] if x is None else x
        wrong = more.get("wrong", y != images.train_y[rows])
        return Mixed(
            own, y, wrong, images.train_x[trusted], images.train_y[trusted], images.test_x, images.test_y,
            more.get("groups"),
        )  # fmt: skip


def uniform(images: Images, seed: int, rate: float, trusted: int, count: int) -> Mixed:
    """A share of the labels, each replaced by another one."""
    draw = _Draw(images, seed)
    return _flipped(draw, draw.order, rate, trusted, count)


def pair(images: Images, seed: int, rate: float, trusted: int, count: int) -> Mixed:
    """Five classes, of which a share goes by the name of a class that looks alike."""
    draw = _Draw(images, seed)
    rows = draw.order[:count]
    y = images.train_y[rows]
    to = torch.arange(CLASSES)
    for one, other in LOOK_ALIKES.items():
        to[one] = other
    given = torch.where(draw.uniform(len(rows)) < rate, to[y], y)
    return draw.mixed(rows, given, draw.order[count : count + trusted])


def tail(images: Images, seed: int, rate: float, trusted: int, count: int) -> Mixed:
    """Uniform noise on classes whose sizes fall to a twentieth, the trusted ones too."""
    draw = _Draw(images, seed)
    return _flipped(draw, _long_tail(draw), rate, trusted, count)


def imbalanced(images: Images, seed: int, rate: float, trusted: int, count: int) -> Mixed:
    """Uniform noise on classes whose sizes fall to a twentieth; the trusted ones are balanced."""
    draw = _Draw(images, seed)
    kept = _long_tail(draw)
    left = draw.order[~torch.isin(draw.order, kept[:count])][-trusted:]
    data = _flipped(draw, kept, rate, 0, count)
    return data._replace(trusted_x=images.train_x[left], trusted_y=images.train_y[left])


def instance(images: Images, seed: int, rate: float, trusted: int, count: int) -> Mixed:
    """Flips to the second choice of a weak linear model, more often where it is unsure."""
    draw = _Draw(images, seed)
    rows = draw.order[:count]
    y = images.train_y[rows]
    weak = _weak_model(images, draw.order[-300:], seed)
    p = weak(images.train_x[rows].flatten(1)).softmax(1).detach()
    p[torch.arange(len(rows)), y] = 0
    unsure = p.sum(1)
    chance = (unsure / unsure.mean() * rate).clamp(max=0.95)
    given = torch.where(draw.uniform(len(rows)) < chance, p.argmax(1), y)
    return draw.mixed(rows, given, draw.order[count : count + trusted])


def sources(images: Images, seed: int, rate: float, trusted: int, count: int, other: Images | None = None) -> Mixed:
    """Ten sources: three right ones; two careless (`rate` of the labels random); one off by one; one that swaps
    look-alikes; two of another domain with labels of their own; one upside down with right labels."""
    draw = _Draw(images, seed)
    rows = draw.order[:count]
    x = images.train_x[rows].clone()
    y = images.train_y[rows].clone()
    true = y.clone()
    source = torch.arange(count) % SOURCES
    careless = ((source == 2) | (source == 3)) & (draw.uniform(count) < rate)
    y[careless] = ((y + draw.whole(1, CLASSES, count)) % CLASSES)[careless]
    y[source == 4] = (y[source == 4] + 1) % CLASSES
    y[source == 5] = torch.tensor(SWAPPED)[y[source == 5]]
    wrong = y != true
    foreign = (source == 6) | (source == 7)
    if other is None:
        x[foreign] = 1 - x[foreign].flip(3)
        y[foreign] = draw.whole(0, CLASSES, int(foreign.sum()))
    else:
        picked = draw.whole(0, len(other.train_y), int(foreign.sum()))
        x[foreign] = other.train_x[picked]
        y[foreign] = other.train_y[picked]
    wrong |= foreign
    x[source == 8] = torch.rot90(x[source == 8], 2, (2, 3))
    return draw.mixed(rows, y, draw.order[count : count + trusted], x=x, wrong=wrong, groups=source)


def regression(images: Images, seed: int, rate: float, trusted: int, count: int) -> Mixed:
    """Numbers from a smooth function of ten features, of ten sources as in `sources`: careless ones report another
    sample's number, one is shifted, one swaps two features, two follow another function, one has reversed features."""
    generator = torch.Generator().manual_seed(seed)
    total = count + trusted + 2000
    x = torch.rand(total, 10, generator=generator)
    y = _smooth(x) + 0.1 * torch.randn(total, generator=generator)
    given = y[:count].clone()
    own = x[:count].clone()
    source = torch.arange(count) % SOURCES
    careless = ((source == 2) | (source == 3)) & (torch.rand(count, generator=generator) < rate)
    given[careless] = given[torch.randint(count, (int(careless.sum()),), generator=generator)]
    given[source == 4] += 1.0
    given[source == 5] = _smooth(x[:count][source == 5][:, [3, 4, 2, 0, 1, 5, 6, 7, 8, 9]])
    foreign = (source == 6) | (source == 7)
    given[foreign] = (x[:count][foreign] @ torch.linspace(-1, 1, 10)) / 2
    own[source == 8] = 1 - own[source == 8]
    held = slice(count, count + trusted)
    wrong = ~torch.isin(source, torch.tensor(RIGHT))
    return Mixed(own, given, wrong, x[held], y[held], x[count + trusted :], y[count + trusted :], source)


KINDS: dict[str, Callable[..., Mixed]] = {
    "uniform": uniform,
    "pair": pair,
    "tail": tail,
    "imbalanced": imbalanced,
    "instance": instance,
    "sources": sources,
    "regression": regression,
}


def make(kind: str, images: Images, seed: int, rate: float, trusted: int, count: int, other: Images | None) -> Mixed:
    draw = pick(kind, KINDS, "kind of mixed data")
    data = draw(images, seed, rate, trusted, count, **({"other": other} if kind == "sources" else {}))
    if len(data.y) < count or len(data.trusted_y) < trusted:
        raise ValueError(
            f"The data set must have {count} samples and {trusted} trusted ones of the kind {kind!r}. It has "
            f"{len(data.y)} and {len(data.trusted_y)}."
        )
    return data


def _smooth(x: Tensor) -> Tensor:
    """Friedman's first function, brought to mean 0 and spread 1 or so; five of the ten features do not matter."""
    waves = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5).square()
    return (waves + 10 * x[:, 3] + 5 * x[:, 4] - 14.4) / 4.9


def _flipped(draw: _Draw, order: Tensor, rate: float, trusted: int, count: int) -> Mixed:
    rows = order[:count]
    y = draw.images.train_y[rows]
    other = (y + draw.whole(1, CLASSES, len(rows))) % CLASSES
    given = torch.where(draw.uniform(len(rows)) < rate, other, y)
    return draw.mixed(rows, given, order[count : count + trusted])


def _long_tail(draw: _Draw) -> Tensor:
    chance = 20.0 ** (-torch.arange(CLASSES) / (CLASSES - 1))
    return draw.order[chance[draw.images.train_y[draw.order]] > draw.uniform(len(draw.order))]


def _weak_model(images: Images, rows: Tensor, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Linear(images.train_x[0].numel(), CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        cross_entropy(model(images.train_x[rows].flatten(1)), images.train_y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model
