"""What is given: data of mixed quality, trusted data, and how a network is trained on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fsla.cleaning.networks import Maker

BILEVEL_STEPS = 1000
"""In which FSLA learns the weights of groups or samples."""
THREADED = 4096
"""Numbers of a sample from which a pass on a CPU is worth more than one thread."""
BATCH = 128
TRUSTED_BATCH = 64
LEAST_STEPS = 300
MOST_STEPS = 8000
USUAL_STEPS = 800
EPOCHS = 40
LEAST_EPOCHS = 1
WARM_UP = 3
PREDICT = 8192
"""Samples of one forward pass outside of training."""


@dataclass(frozen=True)
class Material:
    """Tensors on one device. Labels are numbers from 0 to classes - 1, or targets of a regression (classes = 0)."""

    x: Tensor
    y: Tensor
    trusted_x: Tensor
    trusted_y: Tensor
    classes: int
    make: Maker
    groups: Tensor | None = None
    group_count: int = 0
    seed: int = 0
    rate: float = 1e-3
    """Adam's."""
    steps: int | None = None
    bilevel_steps: int = BILEVEL_STEPS
    small: bool = False
    """Whether the network is one of our own, which may be captured in a CUDA graph and need one thread on a CPU."""
    progress: Callable[[], None] = lambda: None
    """Called after each training."""

    def __len__(self) -> int:
        return len(self.x)

    @property
    def device(self) -> torch.device:
        return self.x.device

    def with_trusted(self, rows: Tensor, seed: int) -> Self:
        """The same with a part of the trusted samples, and another seed."""
        return replace(self, trusted_x=self.trusted_x[rows], trusted_y=self.trusted_y[rows], seed=seed)

    def network(self, seed: int) -> nn.Module:
        """A new network, drawn from the seed and this material's."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1_000_003 * self.seed + seed)
            return self.make().to(self.device)

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """One a sample, for labels or targets as they are given."""
        if self.classes:
            return cross_entropy(outputs, y, reduction="none")
        return 0.5 * (outputs[:, 0] - y).square()


def answers(network: nn.Module, x: Tensor, classes: int) -> Tensor:
    """Probabilities of the classes, or the predicted numbers."""
    network.eval()
    with torch.no_grad():
        outputs = torch.cat([network(part) for part in torch.split(x, PREDICT)])
    return outputs.softmax(1) if classes else outputs[:, 0]


@contextmanager
def threads(material: Material) -> Iterator[None]:
    """One thread for small samples on a CPU: with more, a step waits for them longer than it computes."""
    before = torch.get_num_threads()
    if material.device.type == "cpu" and material.x[0].numel() < THREADED and material.small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Losses = Callable[[Tensor, Tensor], Tensor]
"""Of a network's outputs for some samples, and their rows: one a sample."""


def given(material: Material) -> Losses:
    """Takes the labels or targets as they are."""
    return lambda outputs, rows: material.losses(outputs, material.y[rows])


def soft(probabilities: Tensor) -> Losses:
    """Takes the probability of each label."""
    return lambda outputs, rows: cross_entropy(outputs, probabilities[rows], reduction="none")


def evident(chances: Tensor) -> Losses:
    """Takes e[i, c], the chance of sample i's given label were c the true one: -log Σ_c p(c | x) e[i, c]."""
    logs = chances.clamp(min=1e-12).log()
    return lambda outputs, rows: -(outputs.log_softmax(1) + logs[rows]).logsumexp(1)


def train(
    material: Material,
    seed: int,
    rows: Tensor | None = None,
    *,
    losses: Losses | None = None,
    weight: Tensor | None = None,
) -> nn.Module:
    """A network trained by Adam on some samples, drawn in proportion to their weights, and on the trusted ones.

    Without rows it is trained on the trusted samples alone.
    """
    network = material.network(seed)
    device = material.device
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.Adam(network.parameters(), lr=material.rate, fused=not on_gpu, capturable=on_gpu)
    draw = torch.Generator(device).manual_seed(seed)
    losses = given(material) if losses is None else losses
    trusted = len(material.trusted_x)
    share = 0.0
    if rows is not None:
        chances = torch.ones(len(rows), device=device) if weight is None else weight[rows]
        share = float(chances.mean())
        bounds = chances.cumsum(0, dtype=torch.float64)

    def step() -> None:
        optimizer.zero_grad()
        j = torch.randint(trusted, (min(TRUSTED_BATCH, trusted),), generator=draw, device=device)
        x = material.trusted_x[j]
        if share > 0:
            assert rows is not None
            u = torch.rand(BATCH, generator=draw, device=device, dtype=torch.float64) * bounds[-1]
            i = rows[torch.searchsorted(bounds, u).clamp(max=len(rows) - 1)]
            x = torch.cat([material.x[i], x])
        outputs = network(x)
        loss = material.losses(outputs[len(x) - len(j) :], material.trusted_y[j]).mean()
        if share > 0:
            loss = loss + share * losses(outputs[: len(x) - len(j)], i).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    network.train()
    steps = _steps(material, rows)
    if on_gpu and material.small:
        _replay(step, steps, draw)
    else:
        for _ in range(steps):
            step()
    material.progress()
    return network


def _replay(step: Callable[[], None], steps: int, draw: torch.Generator) -> None:
    """Takes steps as one CUDA graph, after a few that warm up: small networks cost their launches."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(draw)
    with torch.cuda.graph(graph):
        step()
    for _ in range(steps - WARM_UP):
        graph.replay()


def _steps(material: Material, rows: Tensor | None) -> int:
    if material.steps is not None:
        return material.steps
    if rows is None:
        return USUAL_STEPS // 2
    few = max(LEAST_STEPS, EPOCHS * len(rows) // BATCH)
    return min(few, MOST_STEPS, max(USUAL_STEPS, LEAST_EPOCHS * len(rows) // BATCH))


@dataclass(frozen=True)
class CrossFit:
    """Networks, each trained without one part of the samples, and what they say of the parts they did not see."""

    networks: tuple[nn.Module, ...]
    classes: int
    unseen: Tensor

    def answers(self, x: Tensor) -> Tensor:
        """The mean answer of all networks to new samples."""
        return mean_answer(self.networks, x, self.classes)


def mean_answer(networks: Iterable[nn.Module], x: Tensor, classes: int) -> Tensor:
    return torch.stack([answers(network, x, classes) for network in networks]).mean(0)


def cross_fit(
    material: Material,
    *,
    losses: Losses | None = None,
    weight: Tensor | None = None,
    repeats: int = 1,
    folds: int = 2,
) -> CrossFit:
    """Trains on all parts but one, for each part, `repeats` times with other parts."""
    networks = []
    unseen: Tensor | None = None
    for repeat in range(repeats):
        draw = torch.Generator().manual_seed(1_000_003 * material.seed + repeat)
        part = (torch.randperm(len(material), generator=draw) % folds).to(material.device)
        for fold in range(folds):
            rows = torch.nonzero(part != fold)[:, 0]
            network = train(material, folds * repeat + fold, rows, losses=losses, weight=weight)
            networks.append(network)
            left = part == fold
            said = answers(network, material.x[left], material.classes) / repeats
            if unseen is None:
                unseen = said.new_zeros(len(material), *said.shape[1:])
            unseen[left] += said
    assert unseen is not None
    return CrossFit(tuple(networks), material.classes, unseen)


def trusted_alone(material: Material, networks: int = 3) -> CrossFit:
    """Networks trained on the trusted samples alone, so that all others are unseen."""
    made = tuple(train(material, seed) for seed in range(networks))
    return CrossFit(made, material.classes, mean_answer(made, material.x, material.classes))
