"""What several ranks cost: messages and bytes, seconds, memory; and what is to be expected of many GPUs.

    torchrun --nproc-per-node 2 -m fsla_benchmarks.steps.distributed traffic
    torchrun --nproc-per-node 2 -m fsla_benchmarks.steps.distributed time
    torchrun --nproc-per-node 2 -m fsla_benchmarks.steps.distributed memory     # without torchrun: a plain module
    python -m fsla_benchmarks.steps.distributed predicted

Each rank has one thread. Steps of one process are taken by the first rank, in turn with those of all, while the others
wait; a ratio is to the same round's. With MALLOC_MMAP_THRESHOLD_=65536 in the environment, what is freed leaves the
resident memory at once.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from fsla import algorithms
from fsla._state_tree import tensors_of
from fsla._tree import Tree, is_sharded, local_part
from fsla.distributed import DataParallelReducer, ProcessGroup, get_group, single_process
from fsla.problems import Point, Problem, StepBatches
from fsla.problems._autograd import HvpMethod
from fsla.steps import constant
from fsla.train import FSLA, SOBA, SampleWeights
from fsla.train._optimizers import optimizer_state
from fsla_benchmarks.steps.traffic import Sent, Sizes, core, module_step, predictions

KINDS: dict[str, type[FSLA] | type[SOBA]] = {"fsla": FSLA, "soba": SOBA}
SAMPLES = 1000
GLOBAL_BATCH = 64
RANK_BATCH = 32
WIDTH = 2048
LAYERS = 8
Step = Callable[[], object]


class Traffic(NamedTuple):
    """What a step sent, as counted and by the formula."""

    what: str
    measured: Sent
    expected: Sent


class Times(NamedTuple):
    """The median milliseconds of one process and of all, the median ratio with its quartiles, and the median ratio of
    the processors' seconds, those of all ranks together, which other programs hardly change."""

    what: str
    alone_ms: float
    together_ms: float
    low: float
    ratio: float
    high: float
    work: float


def _sgd() -> dict[str, Any]:
    names = ("inner_optimizer", "adjoint_optimizer", "outer_optimizer")
    return {name: partial(torch.optim.SGD, lr=1e-3) for name in names}


def _inner(model: Any, weights: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, y, index = batch
    each: Tensor = weights(index) * cross_entropy(model(x), y, reduction="none")
    return each.mean()


def _outer(model: Any, weights: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def _outer_with_lam(model: Any, weights: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    logit: Tensor = weights.logit
    return _outer(model, weights, batch) + 1e-3 * logit.square().mean()


def _batch(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    y = torch.randint(10, shape[:1], generator=generator)
    return x, y, torch.randint(SAMPLES, shape[:1], generator=generator)


# -------------------------------------------------------------------------------------------------------------- traffic


def traffic(group: ProcessGroup) -> list[Traffic]:
    """Counts the messages and numbers of steps on a module and on functions."""
    rows = []
    for (kind, momentum), hvp_method, outer_uses_lam in product(
        _MOMENTA, ("finite_difference", "autograd"), (False, True)
    ):
        model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 10))
        options = {"hvp_method": hvp_method, **({"momentum": momentum} if kind == "fsla" else {}), **_sgd()}
        opt = KINDS[kind](
            model,
            SampleWeights(SAMPLES),
            inner_loss=_inner,
            outer_loss=_outer_with_lam if outer_uses_lam else _outer,
            **options,
        )
        batch = _batch(16, 20)
        independent = (batch, batch) if momentum == "storm" else None
        opt.step(batch, batch, independent_batches=independent, seed=0)
        before = Sent(group.messages, group.bytes)
        opt.step(batch, batch, independent_batches=independent, seed=0)
        measured = Sent(group.messages - before.messages, (group.bytes - before.numbers) // 4)
        parameters = list(model.parameters())
        sizes = Sizes(sum(p.numel() for p in parameters), SAMPLES, group.world_size, len(parameters))
        expected = module_step(sizes, kind, momentum, hvp_method, outer_uses_lam=outer_uses_lam)
        rows.append(Traffic(_named("module", kind, momentum, hvp_method, outer_uses_lam), measured, expected))
    return rows + [_core_traffic(*case, uses_lam) for case, uses_lam in product(_MOMENTA, (False, True))]


_HVP_METHODS: tuple[HvpMethod, ...] = ("finite_difference", "autograd")
_MOMENTA = (("fsla", "none"), ("fsla", "average"), ("fsla", "storm"), ("soba", ""))


def _core_traffic(kind: str, momentum: Any, outer_uses_lam: bool) -> Traffic:
    x, y, index = _batch(16, 20)

    def each(omega: Tree, batch: Any) -> Tensor:
        return cross_entropy(batch[0] @ omega["w"], batch[1], reduction="none")

    def inner(lam: Tree, omega: Tree, batch: Any) -> Tensor:
        return (lam["w"][batch[2]].sigmoid() * each(omega, batch)).mean()

    def outer(lam: Tree, omega: Tree, batch: Any) -> Tensor:
        return each(omega, batch).mean() + (lam["w"].square().mean() if outer_uses_lam else 0)

    reducer = DataParallelReducer()
    problem = Problem(inner, outer, outer_uses_lam=outer_uses_lam, hvp_method="reverse_over_reverse", reducer=reducer)
    sizes = constant(1e-3, 1e-3, 1e-3, 0.5)
    algorithm: Any = algorithms.soba(sizes) if kind == "soba" else algorithms.fsla(sizes, momentum=momentum)
    batches = StepBatches.shared((x, y, index), (x, y, index))
    at = Point({"w": torch.zeros(SAMPLES)}, {"w": torch.zeros(20, 10)})
    state = algorithm.init(problem, at, batches)
    group = reducer.process_group
    before = Sent(group.messages, group.bytes)
    algorithm.step(problem, state, batches)
    measured = Sent(group.messages - before.messages, (group.bytes - before.numbers) // 4)
    expected = core(Sizes(200, SAMPLES, group.world_size), kind, momentum, outer_uses_lam=outer_uses_lam)
    return Traffic(_named("functions", kind, momentum, "", outer_uses_lam), measured, expected)


def _named(*parts: str | bool) -> str:
    *texts, direct = parts
    return ", ".join([*(str(text) for text in texts if text), *(["F reads λ"] if direct else [])])


# ----------------------------------------------------------------------------------------------------------------- time


def times(group: ProcessGroup, rounds: int = 12) -> list[Times]:
    """Steps of one process and of all, in turn: on one batch, and on one that grows with the ranks."""
    cases = {
        "one batch of 64": (GLOBAL_BATCH, GLOBAL_BATCH),
        "32 samples a rank": (RANK_BATCH, RANK_BATCH * group.world_size),
    }
    rows = []
    for (name, (own_batch, all_batch)), kind in product(cases.items(), KINDS):
        with single_process():
            step_alone = _stepper(kind, own_batch)
        step_all = _stepper(kind, all_batch)
        if group.is_first:
            step_alone()
        step_all()
        rounds_of = []
        for _ in range(rounds):
            group.wait()
            unit = _timed(step_alone) if group.is_first else (0.0, 0.0)
            group.wait()
            seconds, worked = _timed(step_all)
            rounds_of.append((*unit, seconds, sum(group.gather(worked))))
        if group.is_first:
            alone_ms, _, together_ms, _ = (1e3 * statistics.median(column) for column in zip(*rounds_of, strict=True))
            ratios = sorted(all_s / own_s for own_s, _, all_s, _ in rounds_of)
            low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            work = statistics.median(all_w / own_w for _, own_w, _, all_w in rounds_of)
            rows.append(Times(f"{kind}, {name}", alone_ms, together_ms, low, statistics.median(ratios), high, work))
    return rows


def _stepper(kind: str, size: int) -> Step:
    """A step of a small convolutional network, whose work is large beside its 57 thousand parameters."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 64, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2)]
    layers += [nn.Conv2d(64, 64, 3, padding=1), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    model = nn.Sequential(*layers)
    options = {"inner_loss": _inner, "outer_loss": _outer, "hvp_method": "finite_difference", **_sgd()}
    opt = KINDS[kind](model, SampleWeights(SAMPLES), **options)
    batch = _batch(size, 3, 32, 32)
    return lambda: opt.step(batch, batch, seed=0)


def _timed(step: Step) -> tuple[float, float]:
    """Seconds of the clock and of this process's work."""
    started, worked = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - started, time.process_time() - worked


# --------------------------------------------------------------------------------------------------------------- memory


def memory(group: ProcessGroup, steps: int = 2) -> dict[str, float]:
    """MB (10^6 bytes) that this rank holds of each part of a run, and the peak of its resident memory above that before
    the model."""
    base = _resident("VmRSS")
    model = _large(in_shards=group.world_size > 1)
    opt = FSLA(
        model,
        SampleWeights(SAMPLES),
        inner_loss=_inner,
        outer_loss=_outer,
        hvp_method="finite_difference",
        inner_optimizer=partial(torch.optim.AdamW, lr=1e-5, weight_decay=0.0),
    )
    batch = _batch(8, WIDTH)
    for k in range(steps):
        opt.step(batch, batch, seed=k)
    opt._keep(owned=True)  # as every hundred steps, with the states of AdamW
    state = opt.state
    assert state is not None
    assert opt.inner_optimizer is not None
    parts: Mapping[str, object] = {
        "ω": state.omega.value,
        "v": state.v,
        "states of AdamW": optimizer_state(opt.inner_optimizer),
        "automatic step sizes": state.measured,
        "λ, d and λ's states": [state.lam, state.direction],
        "kept for a rollback": opt._good,
    }
    megabytes = {name: sum(_bytes(t) for t in tensors_of(part)) / 1e6 for name, part in parts.items()}
    return megabytes | {"peak": (_resident("VmHWM") - base) / 1e6}


def _large(*, in_shards: bool) -> nn.Module:
    """134 MB of parameters; in shards it is never whole on any rank."""
    with torch.device("meta"):
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    if in_shards:
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            local_part(p).normal_(std=WIDTH**-0.5)
    return model


def _bytes(t: Tensor) -> int:
    local = local_part(t.detach()) if is_sharded(t) else t
    return local.numel() * local.element_size()


def _resident(name: str) -> float:
    """Bytes, as Linux has them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(name))


# --------------------------------------------------------------------------------------------------------------- tables


def _tables(what: str, group: ProcessGroup) -> Iterator[str]:
    if what == "traffic":
        rows = traffic(group)
        for row in rows:
            yield f"{row.what:55} {row.measured.messages:3} messages {row.measured.numbers:7} numbers"
        wrong = [row for row in rows if row.measured != row.expected]
        if wrong:
            raise SystemExit(f"What is sent must be what the formulas say, and is not: {wrong}.")
        yield "All is as the formulas say."
    elif what == "time":
        for t in times(group):
            ratio = f"{t.ratio:.2f} ({t.low:.2f} - {t.high:.2f}), work {t.work:.2f}"
            yield f"{t.what:25} {t.alone_ms:7.0f} ms alone {t.together_ms:7.0f} ms on {group.world_size} ranks  {ratio}"
    elif what == "memory":
        local = memory(group)
        for name in local:
            yield f"{name:25} {', '.join(f'{megabytes[name]:.1f}' for megabytes in group.gather(local))} MB by rank"
    elif what == "predicted":
        yield from predictions()
    else:
        raise SystemExit(f"The first argument must be traffic, time, memory or predicted. Got {what!r}.")


def main(what: str) -> None:
    torch.set_num_threads(1)
    group = get_group()
    for line in _tables(what, group):
        if group.is_first:
            print(line, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
