"""Steps of a module as CUDA graphs: one for each kind of step and each form of its batches.

A graph reads a step's batches, rates and learning rates from tensors that are written before a replay, and moves the
parameters, the optimisers' states and the rest of the run's state in place. The first step of a kind is taken as it is,
the second one is captured. Replays are compared with the step itself as in `_captured`. What a graph cannot know is
part of its key: the forms of the batches, the modules' modes, the places of parameters, the optimisers' settings.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fsla._state_tree import evolve, map_tensors, tensors_of
from fsla._torch import allow_uncaptured_steps
from fsla._tree import copy_
from fsla.algorithms._base import Algorithm, State
from fsla.problems._batches import Batch, StepBatches
from fsla.problems._module import ModuleProblem, random_states, set_random_states
from fsla.problems._views import Oracles
from fsla.steps._schedules import Rates, Scheduled
from fsla.train._captured import (
    FORBIDDEN_STEP,
    CaptureError,
    EngineWarning,
    Recorder,
    comparison_due,
    difference,
    form,
    leaves_of,
    reason_of,
    write_tensors,
)
from fsla.train._guard import StepInfo

MOST = 4
"""Graphs of one run, each of which holds its own inputs; what comes beyond is taken eagerly."""
Losses = tuple[Tensor | None, Tensor | None]


@dataclass
class StepGraph:
    """A captured step.

    Args:
        replay: takes it.
        batches: what it reads.
        observed: what it leaves: the numbers of its `StepInfo` that are there, in one tensor.
        present: which of these numbers are there.
        agreed: how many replays agreed with the step itself.
        unseen: how many were taken since one was compared.
    """

    replay: Callable[[], None]
    batches: StepBatches
    observed: Tensor
    present: Sequence[bool]
    agreed: int = 0
    unseen: int = 0

    def seen(self, step: int) -> StepInfo:
        """Return what the last replay left, safe from the next one."""
        values = iter(self.observed.clone().unbind())
        return StepInfo(step, *(next(values) if there else None for there in self.present))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Kind:
    """A kind of step: all that it depends on but its state and its batches.

    Args:
        algorithm: what steps.
        problem: the problem that it asks.
        due: whether λ moves.
    """

    algorithm: Algorithm[Any]
    problem: Oracles
    due: bool

    def take(self, state: State, batches: StepBatches, rates: Rates | None = None) -> tuple[State, Losses]:
        """Return the state after the moves of the step, but for its step count, and the losses."""
        algorithm = self.algorithm
        step = algorithm.context(self.problem, state.step_count, state.measured, batches, rates=rates)
        after = algorithm.move(state, step) if self.due else algorithm.train(state, step)
        return after, step.losses()


@dataclass
class StepGraphs:
    """Takes the steps of a run on a module, captured where that is possible.

    Args:
        problem: the module's problem.
        optimizers: those that move its variables.
        observe: what a step saw, from its state and its losses.
        lenient: whether steps that cannot be captured are taken eagerly, with a warning.
        recorder: what captures.
    """

    problem: ModuleProblem
    optimizers: Sequence[torch.optim.Optimizer]
    observe: Callable[[State, Losses], StepInfo]
    lenient: bool
    recorder: Recorder
    active: bool = True
    """Whether steps are still captured."""
    _graphs: dict[Hashable, StepGraph | None] = field(default_factory=dict)
    """The graph of each key; None after its first step."""
    _static: State | None = None
    """The state that graphs read and write."""
    _places: tuple[int, ...] = ()
    """Where the parameters and buffers lie that graphs read and write."""
    _rates: Tensor | None = None
    """The sizes of the step, where they are a function of its number."""
    _lrs: dict[Tensor, Tensor] = field(default_factory=dict)
    """What stands for the learning rate of a group of parameters, by the first of these."""
    _written: dict[int, float] = field(default_factory=dict)
    """The number that was last written into a tensor that stands for one, by its place."""

    def advance(
        self,
        algorithm: Algorithm[Any],
        problem: Oracles,
        state: State,
        batches: StepBatches,
        at_parameters: Callable[[State], State],
    ) -> tuple[State, StepInfo]:
        """Return the state after a step, and what it saw.

        Args:
            algorithm, problem, state, batches: of the step.
            at_parameters: puts λ and ω of a state into the parameters.
        """
        places = tuple(t.data_ptr() for t in self.problem.moving())
        if places != self._places:
            self._graphs.clear()
            self._static, self._places = None, places
        if self._static is None:
            state = at_parameters(state)
        state = algorithm.prepare(problem, state, batches)
        kind = Kind(algorithm, problem, algorithm.due(state.step_count))
        try:
            with self._prepared_optimizers():
                after = self._replayed(kind, state, batches)
                if after is not None:
                    return after
                return self._eager(kind, state, batches)
        except CaptureError as error:
            message = f"Engine 'graph' is unavailable: {reason_of(error)}"
            self._stop()
            if not self.lenient:
                raise CaptureError(message) from error
            warnings.warn(f"{message} Using 'eager'.", EngineWarning, stacklevel=6)
        return self._eager(kind, state, batches)

    def _eager(self, kind: Kind, state: State, batches: StepBatches) -> tuple[State, StepInfo]:
        after, losses = kind.take(state, batches)
        values = (None if value is None else value.clone() for value in self.observe(after, losses)[1:])
        info = StepInfo(state.step_count, *values)  # type: ignore[arg-type]
        return evolve(after, step_count=state.step_count + 1), info

    def _replayed(self, kind: Kind, state: State, batches: StepBatches) -> tuple[State, StepInfo] | None:
        """The state after a replay and what it saw; None where the step is to be taken as it is."""
        key = self._key(kind, batches)
        if key not in self._graphs:
            if len(self._graphs) < MOST:
                self._graphs[key] = None
            elif not any(self._graphs.values()):
                raise CaptureError("the forms of batches, or the settings of optimisers, change at every step.")
            return None
        k = state.step_count
        self._hold(state)
        self._send(kind.algorithm, k)
        graph = self._graphs[key]
        if graph is None:
            graph = self._graphs[key] = self._captured(kind, batches)
        write_tensors(_tensors(graph.batches), _tensors(batches))
        if comparison_due(graph.agreed, graph.unseen):
            self._compare(kind, graph, k)
        else:
            graph.unseen += 1
        graph.replay()
        return evolve(self._state, step_count=k + 1), graph.seen(k)

    def _compare(self, kind: Kind, graph: StepGraph, k: int) -> None:
        """Raise unless a replay does what the step does from here. Nothing has moved afterwards."""
        before = self._snapshot()
        start = self._copy(k)
        graph.replay()
        result = self._copy(k)
        copy_(self._live(), before)

        def step(begin: State) -> State:
            write_tensors(tensors_of(self._static), tensors_of(begin))
            with self.problem.leaving_random():
                after = kind.take(replace(self._state, step_count=k), graph.batches)[0]
            after = replace(map_tensors(torch.clone, after), step_count=k)
            copy_(self._live(), before)
            return after

        expected = step(start)
        graph.unseen = 0
        if not expected.is_finite() and not result.is_finite():  # Nothing to compare: again at the next step.
            graph.agreed = 0
            return
        graph.agreed += 1
        part = difference(start, expected, result, step)
        if part is not None:
            raise CaptureError(
                f"the captured step does not give the numbers of the step itself (in {part}). The losses must be "
                "functions of their arguments and of tensors that stay the same objects."
            )

    # -------------------------------------------------------------------------------------------------------- capture

    def _captured(self, kind: Kind, batches: StepBatches) -> StepGraph:
        """Record the step from the held state to itself."""
        state = replace(self._state, step_count=FORBIDDEN_STEP)
        rates = None if self._rates is None else Rates(*self._rates.unbind())
        static = _static(batches)
        seen: list[tuple[Tensor | None, ...]] = []
        values: list[Tensor] = []

        def work() -> None:
            after, losses = kind.take(state, static, rates)
            if form(after) != form(state):
                raise CaptureError("a step that is captured must leave the state in the form that it has.")
            write_tensors(tensors_of(state), tensors_of(after))
            seen[:] = [self.observe(state, losses)[1:]]
            there = [value.detach().to(self._dtype) for value in seen[0] if value is not None]
            if not values:
                values.append(torch.empty(len(there), dtype=self._dtype, device=there[0].device))
            values[0].copy_(torch.stack([value.to(values[0].device) for value in there]))

        before = self._snapshot()
        random = random_states(self._device)
        try:
            with self.problem.leaving_random(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Optimisers say that they are not captured yet.
                self.recorder.warm_up(work)
                if not all(map(torch.equal, random, random_states(self._device))):
                    raise CaptureError(
                        "random layers, such as dropout, draw in the step, and the passes of a replay would not draw "
                        "the same numbers."
                    )
                replay = self.recorder.record(work)
        except CaptureError:
            raise
        except Exception as error:  # Whatever a model or an optimiser raises where it is captured.
            raise CaptureError(reason_of(error)) from error
        finally:
            set_random_states(self._device, random)
            copy_(self._live(), before)
        return StepGraph(replay, static, values[0], [value is not None for value in seen[0]])

    def _hold(self, state: State) -> None:
        """Have the numbers of a state in the tensors that graphs read."""
        if self._static is not None and _same_parts(state, self._static):  # The last replay left it.
            return
        if self._static is not None and form(self._static) != form(state):
            self._graphs = dict.fromkeys(self._graphs)
            self._static = None
        if self._static is not None:
            places = tensors_of(self._static)
            write_tensors(places, tensors_of(state))
            left = iter(places)
            self._static = map_tensors(lambda t: next(left), state)
            return
        in_place = {t.untyped_storage().data_ptr() for t in self.problem.moving()}
        in_place |= {p.untyped_storage().data_ptr() for one in self.optimizers for p in _parameters(one)}
        self._static = map_tensors(lambda t: t if t.untyped_storage().data_ptr() in in_place else t.clone(), state)

    def _key(self, kind: Kind, batches: StepBatches) -> Hashable:
        """All that a graph depends on besides the numbers in its tensors, and the places of parameters."""
        try:
            leaves = [leaves_of(batch.data) for batch in _unique(batches)]
        except TypeError as error:
            raise CaptureError(str(error)) from error
        settings = [
            str({name: group[name] for name in group if name not in _NO_SETTINGS})
            for one in self.optimizers
            for group in one.param_groups
        ]
        rates = [
            float(group["lr"])
            for one in self.optimizers
            for group in one.param_groups
            if not isinstance(group["lr"], Tensor)
        ]
        return (
            kind.due,
            tuple(tuple(map(_form_of, batch)) for batch in leaves),
            tuple(module.training for module in self.problem.modules),
            (*settings, *rates),
            torch.is_autocast_enabled(self._device.type),
        )

    @property
    def _device(self) -> torch.device:
        return next(iter(self.problem.omega.values())).device

    @property
    def _dtype(self) -> torch.dtype:
        """Of numbers that are handed to a graph, or read from it."""
        return torch.promote_types(next(iter(self.problem.omega.values())).dtype, torch.float32)

    def _live(self) -> list[Tensor]:
        """All tensors that a step moves: variables, buffers, optimisers' states and the rest of the run's state."""
        tensors = [*self.problem.moving(), *tensors_of(self._static)]
        for one in self.optimizers:
            tensors += [t for entry in one.state.values() for t in entry.values() if isinstance(t, Tensor)]
        return list({t.data_ptr(): t for t in tensors if t.numel()}.values())

    def _snapshot(self) -> list[Tensor]:
        return [t.detach().clone() for t in self._live()]

    @property
    def _state(self) -> State:
        """The held state."""
        assert self._static is not None
        return self._static

    def _copy(self, k: int) -> State:
        """A copy of the held state."""
        return replace(map_tensors(torch.clone, self._state), step_count=k)

    def _stop(self) -> None:
        """Take all further steps eagerly."""
        self.active = False
        self._graphs.clear()
        self._static = None
        for one in self.optimizers:  # Counters go back to the host, where eager optimisers read them.
            groups = [group for group in one.param_groups if not (group.get("capturable", True) or group.get("fused"))]
            for entry in [one.state.get(p, {}) for group in groups for p in group["params"]]:
                if isinstance(entry.get("step"), Tensor):
                    entry["step"] = entry["step"].cpu()

    # ------------------------------------------------------------------------------------------ numbers from the host

    def _send(self, algorithm: Algorithm[Any], k: int) -> None:
        """Write the sizes of the step where graphs read them."""
        if not isinstance(algorithm.step_sizes, Scheduled):
            return
        rates = algorithm.step_sizes.rates(k, None)
        if self._rates is None:
            self._rates = torch.zeros(len(rates), dtype=self._dtype, device=self._device)
        for place, rate in zip(self._rates.unbind(), rates, strict=True):
            self._set(place, float(rate))

    def _set(self, place: Tensor, value: float) -> None:
        """Write a number into a tensor, unless it is there."""
        if self._written.get(place.data_ptr()) != value:
            place.fill_(value)
            self._written[place.data_ptr()] = value

    @contextmanager
    def _prepared_optimizers(self) -> Iterator[None]:
        """Have optimisers step without the host: their learning rates and counters are tensors on the device."""
        with ExitStack() as stack:
            for one in self.optimizers:
                allow_uncaptured_steps(one)
                for group in one.param_groups:
                    flags = _flags(one, group)
                    if flags is None:
                        continue
                    first = group["params"][0]
                    # Fused kernels take a learning rate in single precision alone.
                    dtype = torch.float32 if flags.get("fused") or group.get("fused") else self._dtype
                    place = self._lrs.setdefault(first, torch.zeros((), dtype=dtype, device=first.device))
                    self._set(place, float(group["lr"]))
                    stack.callback(group.update, {name: group[name] for name in (*flags, "lr")})
                    group.update(flags, lr=place)
                    for p in group["params"]:
                        entry = one.state.get(p, {})
                        count = entry.get("step")
                        if isinstance(count, Tensor) and count.device != p.device:
                            entry["step"] = count.to(p.device)
            yield


_NO_SETTINGS = {"params", "lr", "initial_lr"}


def _same_parts(a: State, b: State) -> bool:
    """Whether two states are the same objects, but for the step count."""
    return all(getattr(a, name) is part for name, part in vars(b).items() if name != "step_count")


def _flags(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, bool] | None:
    """The settings with which an optimiser reads its learning rate from the device; None where it cannot."""
    if not group["params"][0].is_cuda or isinstance(group["lr"], Tensor):
        return None
    if "capturable" in group:
        return {"capturable": True}
    return {"fused": True, "foreach": False} if type(optimizer) is torch.optim.SGD else None


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _static(batches: StepBatches) -> StepBatches:
    """A copy of batches, without seeds; what is one batch stays one."""
    copies = {batch: Batch(deepcopy(batch.data), None, batch.number) for slot in batches.slots for batch in slot}
    inner, outer, hvp, outer_lam, mixed = (tuple(copies[batch] for batch in slot) for slot in batches.slots)
    return StepBatches(inner, outer, hvp, outer_lam, mixed, None, batches.mode)


def _unique(batches: StepBatches) -> list[Batch]:
    return list(dict.fromkeys(batch for slot in batches.slots for batch in slot))


def _tensors(batches: StepBatches) -> list[Tensor]:
    leaves = [leaf for batch in _unique(batches) for leaf in leaves_of(batch.data)]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _form_of(leaf: object) -> object:
    return (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf
