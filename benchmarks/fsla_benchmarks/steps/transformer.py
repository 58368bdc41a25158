"""What a step costs on a transformer, in AdamW steps of the same network: time, and the peak memory of a whole process.

On a GPU the network has GPT-2's small size and a batch is 8 sequences of 512 tokens; on a CPU it is a tiny one.

    exact        attention forced to its plain formula, which alone has a second derivative
    difference   PyTorch's default attention; the network as it is, or compiled

Every contender begins alone: its peak is taken while the states of the others are on the host. For the race all are on
the device at once.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsla import algorithms
from fsla._checks import whole_number
from fsla._state_tree import tensors_of
from fsla._tree import Tree
from fsla.algorithms import Algorithm, Simultaneous
from fsla.problems import StepBatches, make_functional
from fsla.problems._autograd import HvpMethod
from fsla.problems._functional import Network
from fsla.steps import Adam, constant
from fsla_benchmarks.steps.memory import peak_mb
from fsla_benchmarks.steps.race import Key, Report, Row, race, reason, wait
from fsla_reproduction.problems.sources import SourceWeighting, Text, TextSpec
from fsla_reproduction.problems.transformer import (
    GPT2_SMALL,
    TINY,
    Transformer,
    TransformerSize,
    build_transformer,
    sequence_losses,
)

BATCH = 8
_RATES = constant(1.0, 1e-3, 1e-3)
_ALGORITHMS: dict[str, Algorithm[Any]] = {
    "soba": algorithms.soba(_RATES),
    "soba with adam": Simultaneous(step_sizes=constant(1.0, 1e-4, 1e-3), inner_update=Adam()),
    "fsla": algorithms.fsla(_RATES, momentum="none"),
}


@dataclass(frozen=True)
class Setting:
    """A network, its text, and the arithmetic of its passes."""

    size: TransformerSize
    text: Text
    generator: torch.Generator
    autocast: torch.dtype | None

    @classmethod
    def on(cls, device: torch.device, autocast: torch.dtype | None) -> Setting:
        size = GPT2_SMALL if device.type == "cuda" else TINY
        spec = TextSpec(symbols=min(size.vocabulary, 512), length=size.context, sequences=200)
        return cls(size, Text.draw(spec, 0, device), torch.Generator(device).manual_seed(0), autocast)

    @property
    def device(self) -> torch.device:
        return self.generator.device

    def batch(self, tokens: Tensor) -> Tensor:
        return torch.randint(len(tokens), (BATCH,), generator=self.generator, device=self.device)

    def network(self, *, compiled: bool) -> Network:
        """A network without weights, so that those of the run are the only ones in memory."""
        with torch.device("meta"):
            model = Transformer(self.size)
        if compiled:
            model.compile()
        return make_functional(model)[1]

    def weights(self) -> Tree:
        """ω at the start."""
        model = build_transformer(self.size, seed=0, device=self.device)
        return {name: p.detach() for name, p in model.named_parameters()}


class Contender(Protocol):
    """A training run."""

    def advance(self, n: int) -> None:
        """Take the next n steps."""
        ...

    def move(self, device: torch.device) -> None:
        """Take everything that is held between steps to a device."""
        ...

    def state_tensors(self) -> list[Tensor]:
        """Everything that is held between steps."""
        ...


class AdamWRun:
    """Plain training as a PyTorch user writes it: AdamW, fused, on the network's own parameters."""

    def __init__(self, setting: Setting, *, compiled: bool) -> None:
        self._setting = setting
        self._model = build_transformer(setting.size, seed=0, device=setting.device)
        if compiled:
            self._model.compile()
        self._optimiser = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)

    def advance(self, n: int) -> None:
        setting = self._setting
        for _ in range(n):
            tokens = setting.text.tokens[setting.batch(setting.text.tokens)]
            with torch.autocast(setting.device.type, setting.autocast) if setting.autocast else nullcontext():
                loss = sequence_losses(self._model(tokens[:, :-1]), tokens).mean()
            self._optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimiser.step()
        self._optimiser.zero_grad()

    def move(self, device: torch.device) -> None:
        self._model.to(device)
        for memory in self._optimiser.state.values():
            memory.update({name: t.to(device) for name, t in memory.items()})

    def state_tensors(self) -> list[Tensor]:
        memories = [t for memory in self._optimiser.state.values() for t in memory.values()]
        return [*self._model.parameters(), *memories]


class BilevelRun:
    """The weights of ten sources, learnt while the network trains."""

    def __init__(self, setting: Setting, net: Network, algorithm: Algorithm[Any], hvp_method: HvpMethod) -> None:
        self._setting = setting
        self._algorithm = algorithm
        self._exact = hvp_method == "autograd"
        weighting = SourceWeighting(net, setting.text)
        self._problem = weighting.problem(hvp_method=hvp_method, autocast_dtype=setting.autocast)
        with self._attention():
            at = weighting.start(setting.weights())
            self._state = algorithm.init(self._problem, at, self._draw())

    def _attention(self) -> AbstractContextManager[None]:
        return sdpa_kernel(SDPBackend.MATH) if self._exact else nullcontext()

    def _draw(self) -> StepBatches:
        text = self._setting.text
        batch = self._setting.batch
        return StepBatches.draw("shared", lambda: batch(text.tokens), lambda: batch(text.trusted))

    def advance(self, n: int) -> None:
        with self._attention():
            for _ in range(n):
                self._state = self._algorithm.step(self._problem, self._state, self._draw())

    def move(self, device: torch.device) -> None:
        self._state = self._state.to(device)

    def state_tensors(self) -> list[Tensor]:
        return tensors_of(self._state)


def measure_transformer(
    rounds: int,
    device: torch.device,
    report: Report,
    *,
    engines: tuple[str, ...] = ("eager",),
    autocast: bool = False,
) -> tuple[list[Row], list[str]]:
    """The rows, and a line for whatever could not be measured, with the reason. Of the engines it knows two.

    With `autocast`, everything but exact products is also measured under bfloat16.
    """
    whole_number(rounds, "rounds", "bench")
    plain = "float32"
    if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        plain = "tf32"
    rows: list[Row] = []
    notes: list[str] = []
    for precision, dtype in ((plain, None), *([("bfloat16", torch.bfloat16)] if autocast else [])):
        setting = Setting.on(device, dtype)
        keys = list(_keys(precision, engines, exact=dtype is None))
        new_rows, new_notes = _raced(setting, keys, rounds, report)
        rows += new_rows
        notes += new_notes
    return rows, notes


def _keys(precision: str, engines: tuple[str, ...], *, exact: bool) -> Iterator[Key]:
    for engine in ("eager", *(["compile"] if "compile" in engines else [])):
        yield Key("adamw", engine=engine, precision=precision)
        for kind in ("exact", "difference") if exact and engine == "eager" else ("difference",):
            yield Key(f"soba, {kind}", None, "shared", engine, precision=precision)
            yield Key(f"fsla, {kind}", "none", "shared", engine, precision=precision)
        yield Key("soba with adam, difference", None, "shared", engine, precision=precision)


def _raced(setting: Setting, keys: list[Key], rounds: int, report: Report) -> tuple[list[Row], list[str]]:
    device = setting.device
    running: dict[Key, Contender] = {}
    memory: dict[Key, tuple[float, float]] = {}
    notes: list[str] = []
    networks: dict[bool, Network] = {}
    for key in keys:
        report(f"transformer: {key.label}")
        compiled = key.engine == "compile"
        try:
            if compiled not in networks:
                networks[compiled] = setting.network(compiled=compiled)
            run = _start(setting, key, networks[compiled])
            run.advance(2)
            memory[key] = _memory(run, device)
            if device.type == "cuda":
                run.move(torch.device("cpu"))
            running[key] = run
        except Exception as error:  # no memory, no second derivative, or a compiler that fails in its own way
            notes.append(f"transformer: {key.label}: {reason(error)}")
        _give_back(device)
    for key, run in running.items():
        run.move(device)
        report(f"transformer: {key.label}, again")
        run.advance(1)
    first = keys[0]
    if first not in running:
        return [], notes

    def units(key: Key) -> tuple[Key, Key]:
        key_of_engine = first._replace(engine=key.engine)
        return key_of_engine if key_of_engine in running else first, first

    turn = 3 if device.type == "cuda" else 5
    rows = race("transformer", {k: r.advance for k, r in running.items()}, units, rounds, turn, device, report)
    out = []
    for key, row in zip(running, rows, strict=True):
        beyond, peak = memory[key]
        out.append(replace(row, memory_mb=beyond, peak_mb=peak, peak_ratio=peak / memory[units(key)[0]][1]))
    return out, notes


def _start(setting: Setting, key: Key, net: Network) -> Contender:
    if key.method == "adamw":
        return AdamWRun(setting, compiled=key.engine == "compile")
    method, kind = key.method.split(", ")
    hvp_method: HvpMethod = "autograd" if kind == "exact" else "finite_difference"
    return BilevelRun(setting, net, _ALGORITHMS[method], hvp_method)


def _memory(run: Contender, device: torch.device) -> tuple[float, float]:
    """(the most that a step takes beyond what is held, the most that is held at once), in MB, for a run that is alone.

    On a CPU, where the data and what libraries take are not seen, the second is the first and what the run holds.
    """
    wait(device)
    beyond = peak_mb(lambda: run.advance(1), device)
    if device.type == "cuda":
        return beyond, torch.cuda.max_memory_allocated(device) / 1e6
    return beyond, beyond + sum(t.numel() * t.element_size() for t in run.state_tensors()) / 1e6


def _give_back(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
