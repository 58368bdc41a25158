"""Networks trained by Adam on weighted samples, and cross-fitted: what is said of a sample is said by networks that did
not see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fsla.data._material import Losses, Material, answers, given
from fsla.data._networks import stacked
from fsla.distributed import get_group, parts

BATCH = 128
TRUSTED_BATCH = 64
LEAST_STEPS = 300
MOST_STEPS = 8000
USUAL_STEPS = 800
EPOCHS = 40
LEAST_EPOCHS = 1
WARM_UP = 3
PARTS = 2
ALONE = 3
"""Networks that learn from the trusted samples alone."""


@dataclass(frozen=True)
class Lessons:
    """What each network learns from, a row each."""

    numbers: Sequence[int]
    """From which the networks are drawn."""
    views: Tensor
    """(networks, 1)"""
    shown: Sequence[Tensor]
    """The rows of the trusted samples that each network may see."""
    seen: Tensor | None = None
    """(networks, mixed): which of the samples of mixed quality it may see. None for none."""
    weight: Tensor | None = None
    """(networks, mixed): how much each counts. None where all count alike."""

    def __getitem__(self, part: slice) -> Lessons:
        return Lessons(
            self.numbers[part],
            self.views[part],
            self.shown[part],
            None if self.seen is None else self.seen[part],
            None if self.weight is None else self.weight[part],
        )


def train(material: Material, lessons: Lessons, losses: Losses | None = None) -> list[nn.Module]:
    """Networks trained on samples that are drawn in proportion to their weights, and on trusted ones.

    Small dense networks are trained all at once, others one by one. Several ranks share the networks out, and tell each
    other what theirs have learnt.
    """
    losses = given(material) if losses is None else losses
    networks = [material.network(number) for number in lessons.numbers]
    here = get_group()
    own = here.local_slice(len(networks))
    together = stacked(networks[own]) if networks[own] else None
    if together is not None:
        _train(material, together, list(together.parameters()), lessons, losses, own)
        together.unstack()
    else:
        for number in range(own.start, own.stop):
            network = networks[number]
            network.train()
            _train(material, _one(network), list(network.parameters()), lessons[number : number + 1], losses)
    for rank, theirs in enumerate(parts(len(networks), here.world_size)):
        here.copy_from(rank, [t for network in networks[theirs] for t in network.state_dict().values()])
    for _ in networks:
        material.progress()
    return networks


def _one(network: nn.Module) -> Callable[[Tensor], Tensor]:
    """A network in the form of several."""
    return lambda x: network(x[0])[None]


def _train(
    material: Material,
    network: Callable[[Tensor], Tensor],
    parameters: list[nn.Parameter],
    lessons: Lessons,
    losses: Losses,
    own: slice = slice(None),
) -> None:
    """Trains those networks of the lessons that are one's own; what is drawn is drawn for all of them."""
    device = material.device
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.Adam(parameters, lr=material.pace.rate, fused=True, capturable=on_gpu)
    generator = torch.Generator(device).manual_seed(material.seed_of(lessons.numbers[0]))
    count = len(lessons.numbers)
    shown = pad_sequence(list(lessons.shown), batch_first=True)
    known = torch.tensor([[len(rows)] for rows in lessons.shown], device=device)
    trusted_batch = min(TRUSTED_BATCH, int(known.min()))
    batch = 0
    if lessons.seen is not None:
        chances = lessons.seen.float() if lessons.weight is None else lessons.seen * lessons.weight
        share = chances.sum(1) / lessons.seen.sum(1)
        bounds = chances.cumsum(1, dtype=torch.float64)
        batch = BATCH if float(share.max()) > 0 else 0
        share = share[own]
        bounds = bounds[own]
    shown = shown[own]
    known = known[own]
    views = lessons.views[own]

    def uniform(size: int) -> Tensor:
        return torch.rand(count, size, generator=generator, device=device, dtype=torch.float64)[own]

    def step() -> None:
        optimizer.zero_grad()
        rows = shown.gather(1, (uniform(trusted_batch) * known).long())
        if batch:
            drawn = torch.searchsorted(bounds, uniform(batch) * bounds[:, -1:], right=True)
            rows = torch.cat([drawn.clamp(max=material.mixed - 1), rows], 1)
        outputs = network(material.samples(rows))
        loss = material.losses(outputs[:, batch:], rows[:, batch:]).mean(1).sum()
        if batch:
            loss = loss + (share * losses(outputs[:, :batch], views, rows[:, :batch]).mean(1)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    steps = _steps(material, lessons.seen)
    if on_gpu and material.small:
        _replay(step, steps, generator)
    else:
        for _ in range(steps):
            step()


def _replay(step: Callable[[], None], steps: int, generator: torch.Generator) -> None:
    """Takes steps as one CUDA graph, after a few that warm up: small networks cost their launches."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        step()
    for _ in range(steps - WARM_UP):
        graph.replay()
    torch.cuda.current_stream().synchronize()  # what the graph holds is freed with it


def _steps(material: Material, seen: Tensor | None) -> int:
    if material.steps is not None:
        return material.steps
    if seen is None:
        return USUAL_STEPS // 2
    samples = int(seen.sum(1).max())
    few = max(LEAST_STEPS, EPOCHS * samples // BATCH)
    return min(few, MOST_STEPS, max(USUAL_STEPS, LEAST_EPOCHS * samples // BATCH))


@dataclass(frozen=True)
class CrossFit:
    """For each view networks, each trained without one part of the samples, and what they say of that part."""

    networks: list[list[nn.Module]]
    classes: int
    unseen: Tensor
    """(views, mixed) or, for classes, (views, mixed, classes)"""

    def answers(self, view: int, x: Tensor) -> Tensor:
        """The mean answer of a view's networks to new samples."""
        return mean_answer(self.networks[view], x, self.classes)


def mean_answer(networks: Iterable[nn.Module], x: Tensor, classes: int) -> Tensor:
    return torch.stack([answers(network, x, classes) for network in networks]).mean(0)


def cross_fit(
    material: Material,
    views: Sequence[Tensor],
    *,
    losses: Losses | None = None,
    weight: Tensor | None = None,
    repeats: int = 1,
) -> CrossFit:
    """For each view trains on all parts but one, for each part, `repeats` times with other parts."""
    left_out = torch.cat([_parts(material, repeat) for repeat in range(repeats)])
    of = torch.arange(len(views), device=material.device).repeat_interleave(len(left_out))
    left_out = left_out.repeat(len(views), 1)
    lessons = Lessons(
        range(len(of)),
        of[:, None],
        [views[view] for view in of.tolist()],
        ~left_out,
        None if weight is None else weight[of],
    )
    networks = train(material, lessons, losses)
    shape = (len(views), material.mixed, *([material.classes] if material.classes else []))
    unseen = torch.zeros(shape, device=material.device)
    made: list[list[nn.Module]] = [[] for _ in views]
    for network, view, part in zip(networks, of.tolist(), left_out, strict=True):
        made[view].append(network)
        rows = torch.nonzero(part)[:, 0]
        unseen[view, rows] += answers(network, material.x, material.classes, rows) / repeats
    return CrossFit(made, material.classes, unseen)


def _parts(material: Material, repeat: int) -> Tensor:
    """(parts, mixed): which samples each part holds."""
    draw = torch.Generator().manual_seed(material.seed_of(repeat))
    part = torch.randperm(material.mixed, generator=draw) % PARTS
    return (part == torch.arange(PARTS)[:, None]).to(material.device)


def trusted_alone(material: Material, views: Sequence[Tensor]) -> CrossFit:
    """Networks trained on the trusted samples alone, so that all others are unseen."""
    of = torch.arange(len(views), device=material.device).repeat_interleave(ALONE)
    lessons = Lessons(range(len(of)), of[:, None], [views[view] for view in of.tolist()])
    networks = train(material, lessons)
    made = [networks[start : start + ALONE] for start in range(0, len(networks), ALONE)]
    x = material.x[: material.mixed]
    unseen = torch.stack([mean_answer(own, x, material.classes) for own in made])
    return CrossFit(made, material.classes, unseen)
