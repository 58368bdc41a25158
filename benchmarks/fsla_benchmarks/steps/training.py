"""What learned weights cost a training run: time, kernel launches and memory, in plain steps.

transformer    98 M parameters, batches of 16 x 512 tokens, bfloat16 autocast, fused AdamW; on a CPU a tiny one
cnn            the benchmark's network on 28 x 28 images, batch 256

Each of ten sources of the data has a weight. A run has its own model, and is timed between two stretches of plain
training on a model that stays, so that a ratio is one of neighbours. Its first steps, in which the curvature is
measured for the first time, are timed apart.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from fsla import algorithms
from fsla.algorithms import Algorithm
from fsla.problems._autograd import HvpMethod
from fsla.steps import constant
from fsla.train import BilevelOptimizer
from fsla_benchmarks.steps.race import Report, reason, wait
from fsla_reproduction.problems.networks import build
from fsla_reproduction.problems.transformer import (
    TINY,
    TransformerSize,
    build_transformer,
    sequence_losses,
)

SOURCES = 10
WARM_UP = 8
STEPS = {"transformer": {"eager": 100, "graph": 100, "compile": 100}, "cnn": {"eager": 200, "graph": 2000}}
"""Steps that are timed. Captured ones are compared with the step itself at first, which many short ones outweigh."""
IMAGES = 5_000
Batch = tuple[Tensor, Tensor, Tensor]
"""Inputs, targets and the source of each sample."""
Step = Callable[[], None]
_LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)


@dataclass(frozen=True)
class Cost:
    """What a run costs.

    Args:
        problem, run, engine: which run it is.
        outer_every: λ moves at one step in so many; None for plain training.
        first_s: seconds of the first step.
        ms: milliseconds of a step, the mean of STEPS of the engine after WARM_UP.
        ratio: the same in plain steps of the same engine, timed before and after.
        peak_ratio: the most memory that the run takes, in that of plain training; None on a CPU.
        launches: kernel launches of a step on which λ moves, beyond those of its three passes; None on a CPU.
    """

    problem: str
    run: str
    engine: str
    outer_every: int | None
    first_s: float
    ms: float
    ratio: float
    peak_ratio: float | None = None
    launches: int | None = None


class Task:
    """A network with data on a device, plain training of it, and the losses of the bilevel problem."""

    precision: torch.dtype | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def model(self) -> nn.Module:
        raise NotImplementedError

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        raise NotImplementedError

    def draw(self) -> Batch:
        raise NotImplementedError

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of each sample."""
        raise NotImplementedError

    def inner(self, model: nn.Module, logits: Tensor, batch: Batch) -> Tensor:
        return (logits.sigmoid()[batch[2]] * self.losses(model, batch)).mean()

    def outer(self, model: nn.Module, logits: Tensor, batch: Batch) -> Tensor:
        return self.losses(model, batch).mean()

    def logits(self) -> nn.Parameter:
        return nn.Parameter(torch.zeros(SOURCES, device=self.device))

    def cast(self) -> Any:
        return torch.autocast(self.device.type, self.precision) if self.precision else nullcontext()

    def gradient(self, model: nn.Module, loss: Callable[[], Tensor]) -> None:
        with self.cast():
            value = loss()
        value.backward()  # type: ignore[no-untyped-call]

    def plain(self, model: nn.Module) -> Step:
        """A step of plain training."""
        optimizer = self.optimizer(model)

        def step() -> None:
            self._train(model, optimizer, self.draw())

        return step

    def plain_captured(self, model: nn.Module) -> Step:
        """A step of plain training as a CUDA graph."""
        optimizer = self.optimizer(model)
        for group in optimizer.param_groups:
            group["capturable"] = True
        static = self.draw()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._train(model, optimizer, static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._train(model, optimizer, static)

        def step(references: tuple[object, ...] = (model, optimizer)) -> None:  # The graph writes into them.
            torch._foreach_copy_(static, self.draw())
            graph.replay()

        return step

    def _train(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        optimizer.zero_grad()
        self.gradient(model, lambda: self.losses(model, batch).mean())
        optimizer.step()


class TransformerTask(Task):
    """The weights of sources of text."""

    precision = torch.bfloat16

    def __init__(self, device: torch.device, size: TransformerSize, sequences: int) -> None:
        super().__init__(device)
        self.size = size
        self.sequences = sequences

    def model(self) -> nn.Module:
        return build_transformer(self.size, seed=0, device=self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def draw(self) -> Batch:
        shape = (self.sequences, self.size.context + 1)
        tokens = torch.randint(self.size.vocabulary, shape, generator=self.generator, device=self.device)
        source = torch.randint(SOURCES, shape[:1], generator=self.generator, device=self.device)
        return tokens, tokens, source

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        tokens = batch[0]
        return sequence_losses(model(tokens[:, :-1]).float(), tokens)


class CNNTask(Task):
    """The weights of sources of images."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.images = torch.randn(IMAGES, 1, 28, 28, device=device, generator=self.generator)
        self.labels = torch.randint(10, (IMAGES,), device=device, generator=self.generator)

    def model(self) -> nn.Module:
        return build("cnn", 28, 10, seed=0, device=self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-3)

    def draw(self) -> Batch:
        index = torch.randint(IMAGES, (256,), generator=self.generator, device=self.device)
        return self.images[index], self.labels[index], index % SOURCES

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1], reduction="none")


def compiled(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    model.compile()
    return model


@dataclass(frozen=True)
class Run:
    """How the weights are learnt: what takes a step, and how."""

    name: str
    outer_every: int = 1
    algorithm: str | Algorithm[Any] = "soba"
    closures: bool = False
    with_optimizer: bool = True
    engine: Literal["eager", "graph"] = "eager"
    hvp_method: HvpMethod = "finite_difference"
    max_rollbacks: int = 3

    def begin(self, task: Task, model: nn.Module) -> tuple[Step, BilevelOptimizer]:
        optimizer, logits = task.optimizer(model), task.logits()
        losses: dict[str, Any] = {} if self.closures else {
            "inner_loss": task.inner,
            "outer_loss": task.outer,
            "autocast_dtype": task.precision,
            "hvp_method": self.hvp_method,
        }  # fmt: skip
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "AdamW's decoupled weight decay")
            bilevel = BilevelOptimizer(
                model,
                logits,
                algorithm=self.algorithm,
                inner_optimizer=optimizer if self.with_optimizer else None,
                outer_every=self.outer_every,
                engine=self.engine,
                max_rollbacks=self.max_rollbacks,
                **losses,
            )

        def step() -> None:
            batches = task.draw(), task.draw()
            independent = (task.draw(), task.draw()) if bilevel.reads_independent_batches else None
            bilevel.step(*batches, independent_batches=independent)

        def owned() -> None:
            inner_batch, trusted = task.draw(), task.draw()

            def closure(loss: Callable[[nn.Module, Tensor, Batch], Tensor], batch: Batch) -> Tensor:
                with task.cast():
                    value = loss(model, logits, batch)
                value.backward()  # type: ignore[no-untyped-call]
                return value

            optimizer.zero_grad()
            bilevel.backward(partial(closure, task.inner, inner_batch), partial(closure, task.outer, trusted))
            optimizer.step()

        return (owned if self.closures else step), bilevel


TRANSFORMER_RUNS = [
    Run(name, outer_every, closures=name == "backward", max_rollbacks=0 if name == "step, no rollback" else 3)
    for outer_every in (1, 8)
    for name in ("step", "step, no rollback", "backward")
]
CAPTURED_TRANSFORMER_RUNS = [Run("step", outer_every, engine="graph") for outer_every in (1, 8)]
_RATES = constant(0.05, 0.01, 0.01)
_METHODS: dict[str, Algorithm[Any]] = {
    "soba": algorithms.soba(_RATES),
    "fsla": algorithms.fsla(_RATES, momentum="none"),
    "fsla with STORM": algorithms.fsla(_RATES, momentum="storm"),
}
_PRODUCTS: dict[str, HvpMethod] = {"difference": "finite_difference", "exact": "autograd"}
ENGINES: tuple[Literal["eager", "graph"], ...] = ("eager", "graph")
CNN_RUNS = [
    *(
        Run(f"{name}, {kind}", algorithm=algorithm, hvp_method=method, with_optimizer=False, engine=engine)
        for engine in ENGINES
        for name, algorithm in _METHODS.items()
        for kind, method in _PRODUCTS.items()
    ),
    *(
        Run("soba, automatic steps and Adam", outer_every, engine=engine)
        for engine in ENGINES
        for outer_every in (1, 8)
    ),
]


def measure_training(
    device: torch.device,
    report: Report,
    *,
    engines: Sequence[str] = ("eager", "graph"),
    only: Sequence[str] = ("transformer", "cnn"),
    keep: Callable[[list[Cost], list[str]], None] = lambda costs, notes: None,
) -> tuple[list[Cost], list[str]]:
    """Return the costs, and a line for whatever could not be measured, with the reason.

    Args:
        device: where to train.
        report: is called with what runs now.
        engines: of "eager", "graph" (on a GPU alone) and "compile" (the transformer as a compiled module), each against
            plain training in the same way.
        only: the problems.
        keep: is called with all rows and lines so far after each run.
    """
    on_gpu = device.type == "cuda"
    costs: list[Cost] = []
    notes: list[str] = []

    def measure(problem: str, task: Task, make: Callable[[], nn.Module], run: Run, mode: str, reference: Step) -> None:
        report(f"{problem}, {mode}: {run.name}, outer_every={run.outer_every}")
        try:
            costs.append(_measured(problem, task, make, run, mode, reference, peaks.get(mode)))
        except Exception as error:  # no memory, or a compiler or a capture that fails in its own way
            notes.append(f"{problem}, {mode}, {run.name}: {reason(error)}")
        keep(costs, notes)
        _collect(device)

    peaks: dict[str, float | None] = {}
    modes = [engine for engine in engines if on_gpu or engine != "graph"]
    for mode in modes if "transformer" in only else ():
        size, sequences = (TransformerSize(vocabulary=16384, tied=True), 16) if on_gpu else (TINY, 4)
        text = TransformerTask(device, size, sequences)
        make = partial(compiled, text.model) if mode == "compile" else text.model
        plain_step = text.plain_captured if mode == "graph" else text.plain
        reference = plain_step(make())
        _repeat(reference, WARM_UP)
        peaks[mode] = _peak(device, lambda: _repeat(plain_step(make()), WARM_UP))  # noqa: B023
        for run in CAPTURED_TRANSFORMER_RUNS if mode == "graph" else TRANSFORMER_RUNS:
            measure("transformer", text, make, run, mode, reference)
    peaks.clear()
    if "cnn" in only:
        images = CNNTask(device)
        for mode in [mode for mode in modes if mode != "compile"]:
            reference = (images.plain_captured if mode == "graph" else images.plain)(images.model())
            for run in [run for run in CNN_RUNS if run.engine == mode]:
                measure("cnn", images, images.model, run, mode, reference)
    return costs, notes


def _measured(
    problem: str,
    task: Task,
    make: Callable[[], nn.Module],
    run: Run,
    engine: str,
    reference: Step,
    plain_peak: float | None,
) -> Cost:
    device = task.device
    steps = STEPS[problem][engine]
    current: dict[str, Any] = {}

    def begin() -> None:
        current["step"], current["bilevel"] = run.begin(task, make())

    def first() -> None:
        current["step"]()

    taken: list[float] = []
    beside: list[float] = []

    def warm_up() -> None:
        begin()
        current["first_s"] = _seconds(device, first)
        _repeat(current["step"], WARM_UP - 1)

    peak = _peak(device, warm_up)
    beside.append(_seconds(device, lambda: _repeat(reference, steps // 2)))
    taken.append(_seconds(device, lambda: _repeat(current["step"], steps)))
    beside.append(_seconds(device, lambda: _repeat(reference, steps // 2)))
    launches = None
    if device.type == "cuda" and problem == "transformer" and engine != "graph":
        while not _is_bare(current["bilevel"]):
            current["step"]()
        passes = _three_passes(task, current["bilevel"])
        passes()
        launches = _launches(current["step"]) - _launches(passes)
    ms = 1e3 * taken[0] / steps
    ratio = taken[0] / sum(beside)
    peak_ratio = None if peak is None or plain_peak is None else peak / plain_peak
    return Cost(problem, run.name, engine, run.outer_every, current["first_s"], ms, ratio, peak_ratio, launches)


def _is_bare(bilevel: BilevelOptimizer) -> bool:
    """Whether the next step moves λ, and neither measures nor copies anything."""
    k = bilevel.step_count
    algorithm = bilevel.algorithm
    state = bilevel.state
    if state is None or not bilevel.due or (k + 1) % 10 == 0:
        return False
    return not any(algorithm.products_due(j, state) for j in (k - 1, k, k + 1))


def _three_passes(task: Task, bilevel: BilevelOptimizer) -> Step:
    """The passes of a step by differences, alone."""
    model, logits = bilevel.model, bilevel.outer
    inner_batch, trusted = task.draw(), task.draw()

    def passes() -> None:
        for loss, batch in ((task.inner, inner_batch), (task.inner, inner_batch), (task.outer, trusted)):
            for p in model.parameters():
                p.grad = None
            task.gradient(model, lambda loss=loss, batch=batch: loss(model, logits, batch))  # type: ignore[misc]

    return passes


def _launches(step: Step) -> int:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        step()
        torch.cuda.synchronize()
    return sum(event.name in _LAUNCHES for event in seen.events())


def _repeat(step: Step, n: int) -> None:
    for _ in range(n):
        step()


def _seconds(device: torch.device, work: Callable[[], None]) -> float:
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - start


def _peak(device: torch.device, work: Callable[[], None]) -> float | None:
    """The most bytes that tensors of the work take at once; None on a CPU."""
    if device.type != "cuda":
        work()
        return None
    _collect(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    wait(device)
    return float(torch.cuda.max_memory_allocated(device) - before)


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


_COLUMNS = ("training", "how", "run", "outer_every", "plain steps", "ms", "first step, s", "peak memory", "launches")


def list_costs(costs: Sequence[Cost]) -> list[str]:
    """Return the lines of a table for a terminal."""
    table = [_COLUMNS, *(_cells(cost) for cost in costs)]
    widths = [max(len(row[column]) for row in table) for column in range(len(_COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def write_costs(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table in Markdown, from what a file of results holds."""
    rows = [_cells(Cost(**row)) for row in result["rows"]]
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cells(cost: Cost) -> tuple[str, ...]:
    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    return (
        cost.problem,
        cost.engine,
        cost.run,
        number(cost.outer_every, 0),
        number(cost.ratio, 2),
        number(cost.ms, 2),
        number(cost.first_s, 2),
        number(cost.peak_ratio, 2),
        number(cost.launches, 0),
    )
