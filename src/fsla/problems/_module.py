"""A model and its outer modules as a problem, in place: the model's own parameters are ω, the outer modules' are λ.

A pass sets the parameters to the point that is asked about, calls the user's loss on the module itself, runs
`backward`, and restores the parameters exactly. Nothing is called functionally, so that hooks, DDP, compiled modules,
activation checkpointing and tied weights behave as in plain training.

Every pass of a step sees the same function. Buffers (the running statistics of batch normalisation, say) move in one
pass of a step, the first inner one, as a training pass moves them. A batch with a seed draws from it. A batch without
one draws from torch's own stream: all passes over it begin where the first one began, and the stream goes on as after
the pass that moves the buffers, so that it is the stream of plain training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fsla._torch import foreach_add_, foreach_mul, module_buffers
from fsla._tree import Shifted, Tree, copy_, is_sharded, local_part
from fsla.distributed import raise_on_first
from fsla.distributed._reducer import ClosureReducer, GraphLeaves, Part, Reducer
from fsla.problems import _passes as passes
from fsla.problems._autograd import (
    LOSS_NAMES,
    REVERSE,
    ExactMode,
    FiniteDifferenceWarning,
    HvpMethod,
    Level,
    LossProblem,
    LossView,
)
from fsla.problems._batches import Batch
from fsla.problems._views import Point

ModuleLoss = Callable[[Any, Any, Any], Tensor]
OuterModules = nn.Module | nn.Parameter | Sequence[Any] | Mapping[str, Any]
EXACT_UP_TO = 10_000_000
"""Parameters of a model up to which hvp_method="auto" tries exact products."""


class ModuleProblem(LossProblem):
    """Problem of a model, at the point of its parameters.

    Args:
        model: the network; its trainable parameters are ω, except those that `outer` names.
        outer: the modules that hold λ: one, or a list or mapping of modules and parameters.
        inner_loss: called as ``inner_loss(model, outer, batch)``; returns a 0-d tensor.
        outer_loss: of the same form.
        hvp_method: as in `fsla.Problem`.
        outer_uses_lam: as in `fsla.Problem`.
        autocast_dtype: as in `fsla.Problem`.
        reducer: how processes share a batch.

    Raises:
        TypeError: if `model` is no module, or a loss is not callable.

    Examples:
        >>> model, scale = torch.nn.Linear(2, 1), torch.nn.Parameter(torch.ones(()))
        >>> problem = fsla.problems.ModuleProblem(
        ...     model,
        ...     scale,
        ...     inner_loss=lambda model, scale, batch: scale * model(batch).square().mean(),
        ...     outer_loss=lambda model, scale, batch: model(batch).square().mean(),
        ... )
        >>> sorted(problem.inner_at(problem.point(), fsla.Batch(torch.ones(3, 2))).grad_omega)
        ['bias', 'weight']
    """

    def __init__(
        self,
        model: nn.Module,
        outer: OuterModules,
        inner_loss: ModuleLoss,
        outer_loss: ModuleLoss,
        *,
        hvp_method: HvpMethod = "auto",
        outer_uses_lam: bool | None = None,
        autocast_dtype: torch.dtype | None = None,
        reducer: Reducer | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module. Got {type(model).__name__} instead.")
        for name, loss in (("inner_loss", inner_loss), ("outer_loss", outer_loss)):
            if not callable(loss):
                raise TypeError(f"{name} must be callable as (model, outer, batch). Got {type(loss).__name__} instead.")
        super().__init__(
            hvp_method=choose_hvp_method(model, hvp_method),
            outer_uses_lam=outer_uses_lam,
            autocast_dtype=autocast_dtype,
            reducer=reducer,
        )
        self.model = model
        self.outer = outer
        self._losses: dict[Level, ModuleLoss] = {"inner": inner_loss, "outer": outer_loss}
        self.lam = dict(_trainable(outer))
        taken = dict.fromkeys(self.lam.values())
        self.omega = {name: p for name, p in model.named_parameters() if p.requires_grad and p not in taken}
        _check_parameters(model, self.omega, self.lam)
        parts = [member for _, member in (*members(model), *members(outer)) if isinstance(member, nn.Module)]
        self.modules = list(dict.fromkeys(module for part in parts for module in part.modules()))
        self._random: WeakKeyDictionary[Batch, list[list[Tensor]]] = WeakKeyDictionary()
        """The random states in which the micro-batches of batches without a seed were first seen."""
        self._sets_random = True
        self._undo: list[Callable[[], None]] | None = None
        """What puts back what the passes of a step have moved, the first move first; None outside of a step."""

    def point(self) -> Point:
        """Return the point of the parameters. Its tensors are theirs, and move with them."""
        return Point(detached(self.lam), detached(self.omega))

    @contextmanager
    def leaves(self, level: Level, at: Point, data: Sequence[Any], *, omega: bool, lam: bool) -> Iterator[GraphLeaves]:
        every = [*self.omega.values(), *self.lam.values()]
        frozen = [p for wants, x in ((omega, self.omega), (lam, self.lam)) if not wants for p in x.values()]
        before = [p.grad for p in every]
        with parameters_at(self.omega, at.omega), parameters_at(self.lam, at.lam), _without_gradient(frozen):
            for p in every:
                p.grad = None
            try:
                yield GraphLeaves(self.omega, self.lam)
            finally:
                for p, grad in zip(every, before, strict=True):
                    p.grad = grad

    @contextmanager
    def forward(
        self, level: Level, leaves: GraphLeaves, part: Part, batch: Batch, *, update_buffers: bool, unwrapped: bool
    ) -> Iterator[Tensor]:
        reducer = self.reducer
        model = reducer.unwrap(self.model) if unwrapped else self.model
        buffers = self.buffers()
        before = [b.detach().clone() for b in buffers]
        device = passes.device_of(self.omega)
        seed = part.seed if self._sets_random else None
        streams = self._sets_random and seed is None
        stream = self._stream(batch, part.number, device, advance=update_buffers) if streams else nullcontext()
        moved = False
        try:
            with stream, passes.forward_context(seed, None, device):
                with self._casting(device):  # and not what goes backward, as in plain training
                    value = self._evaluate(level, model, part.data)
                yield value
            moved = update_buffers
        finally:
            if not moved:
                copy_([b.data for b in buffers], before)
        if moved:
            self._on_failure(lambda: copy_([b.data for b in buffers], before))
            reducer.buffers_moved(part, buffers, before)

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """Put buffers and random states back if a pass of the block fails, also those that earlier passes moved."""
        self._undo = []
        try:
            yield
        except BaseException:
            for undo in reversed(self._undo):
                undo()
            raise
        finally:
            self._undo = None

    def _on_failure(self, undo: Callable[[], None]) -> None:
        if self._undo is not None:
            self._undo.append(undo)

    @contextmanager
    def leaving_random(self) -> Iterator[None]:
        """Have passes leave torch's generators alone, as where nothing is drawn."""
        before, self._sets_random = self._sets_random, False
        try:
            yield
        finally:
            self._sets_random = before

    @contextmanager
    def _stream(self, batch: Batch, number: int, device: torch.device, *, advance: bool) -> Iterator[None]:
        """Begin a pass where the first one over the micro-batch began; the stream goes on only where it is to advance.

        A micro-batch begins where the first pass over the one before ended.
        """
        now = random_states(device)
        begins = self._random.setdefault(batch, [now])
        while len(begins) <= number:
            begins.append(now)
        done = False
        try:
            set_random_states(device, begins[number])
            yield
            done = True
        finally:
            if done and len(begins) == number + 1:
                begins.append(random_states(device))
            if advance and done:
                self._on_failure(lambda: set_random_states(device, now))
            else:
                set_random_states(device, now)

    def _casting(self, device: torch.device) -> AbstractContextManager[object]:
        return passes.casting(self.autocast_dtype, device)

    def _evaluate(self, level: Level, model: Any, data: Any) -> Tensor:
        name = LOSS_NAMES[level]
        try:
            value = self._losses[level](model, self.outer, data)
        except Exception as error:
            error.add_note(f"(raised while the {name} was called with the model, the outer modules and a batch)")
            if data is None:
                error.add_note("The batch is None: give step an outer_batch, or fit an outer_loader.")
            if "not differentiable with respect to argument 'weight'" in str(error):
                error.add_note("PyTorch has no derivative of it by weight=. Take reduction='none' and multiply.")
            raise
        return passes.scalar(value, name)

    def backward(self, value: Tensor, leaves: GraphLeaves, *, omega: bool, last: bool) -> None:
        with self.reducer.backward_context(self.model, omega=omega, last=last):
            value.backward()  # type: ignore[no-untyped-call]

    def keeps_graph(self, at: Point) -> bool:
        """At the parameters themselves, until they move; elsewhere they are restored after a pass."""
        pairs = [(self.omega[name], t) for name, t in at.omega.items()] + [(self.lam[n], t) for n, t in at.lam.items()]
        return all(_same_storage(p, t) for p, t in pairs)

    def check_reads_lam(self, batch: Batch) -> None:
        """Raise unless the inner loss reads λ on the batch."""
        view = LossView(self, "inner", self.point(), batch)
        view.gradients()
        if view.reads_lam is not False:
            return
        raise ValueError(
            "The inner loss G must depend on outer, or the outer problem cannot act through the model. It must use the "
            "outer modules that it is given, in a term that also holds the model."
        )

    def tensors(self) -> list[Tensor]:
        """Return every parameter and buffer of the model and of outer."""
        return [t.detach() for part in (self.model, self.outer) for _, t in named_tensors(part)]

    def moving(self) -> list[Tensor]:
        """Return what a step may move in place: trainable parameters and all buffers."""
        return [t.detach() for t in (*self.omega.values(), *self.lam.values(), *self.buffers())]

    def buffers(self) -> list[Tensor]:
        """Return the buffers as they are now: a module may have replaced one."""
        return list(dict.fromkeys(b for module in self.modules for b in module_buffers(module)))

    def _candidates(self, device: torch.device) -> tuple[ExactMode, ...]:
        return (REVERSE,)


class ClosureProblem(ModuleProblem):
    """The problem of a loop that belongs to somebody else: a batch's data is a closure.

    A closure goes forward and backward as its loop does (micro-batches, autocast, no_sync), and returns
    the loss. Products are differences of gradients.

    Args:
        model, outer: as in `ModuleProblem`.
        autocast_dtype: dtype that the closures compute in. It sets the step of the differences; autocast itself is the
            loop's.
        reducer: how processes share a batch.
    """

    def __init__(
        self,
        model: nn.Module,
        outer: OuterModules,
        *,
        autocast_dtype: torch.dtype | None = None,
        reducer: Reducer | None = None,
    ) -> None:
        super().__init__(
            model,
            outer,
            _call_closure,
            _call_closure,
            hvp_method="finite_difference",
            autocast_dtype=autocast_dtype,
            reducer=reducer,
        )

    @contextmanager
    def leaves(self, level: Level, at: Point, data: Sequence[Any], *, omega: bool, lam: bool) -> Iterator[GraphLeaves]:
        """The hooks of the loop's wrappers wait for every gradient of the model."""
        with super().leaves(level, at, data, omega=True, lam=lam) as leaves:
            yield leaves

    def _casting(self, device: torch.device) -> AbstractContextManager[object]:
        return nullcontext()

    def _evaluate(self, level: Level, model: Any, data: Any) -> Tensor:
        value = super()._evaluate(level, model, data)
        if level == "outer" and isinstance(self.reducer, ClosureReducer):
            self.reducer.average_gradients(list(self.omega.values()))
        return value

    def backward(self, value: Tensor, leaves: GraphLeaves, *, omega: bool, last: bool) -> None:
        """The closure has been there."""


def _call_closure(model: Any, outer: Any, closure: Any) -> Tensor:
    if not callable(closure):
        raise TypeError(
            "backward takes closures where the optimiser has no losses: functions without arguments that go forward "
            f"and backward, and return the loss. Got {type(closure).__name__} instead."
        )
    value: Tensor = torch.as_tensor(closure())
    return value


@contextmanager
def parameters_at(parameters: Mapping[str, nn.Parameter], x: Tree) -> Iterator[None]:
    """Set parameters to other values for a while; restore them exactly. Those that are there already are left.

    Writes through `.data`, so that the version of a parameter counts the moves of its optimiser alone.
    """
    moves_here = isinstance(x, Shifted) and all(
        _same_storage(p, x.y[name]) and not is_sharded(p) for name, p in parameters.items()
    )
    moved = [name for name, p in parameters.items() if moves_here or not _same_storage(p, x[name])]
    if not moved:
        yield
        return
    targets = [parameters[name].data for name in moved]
    before = [torch.empty_like(t) for t in targets]
    copy_(before, targets)
    try:
        if isinstance(x, Shifted) and moves_here:  # without a copy of the point
            foreach_add_(targets, foreach_mul([x.x[name] for name in moved], x.a))
        else:
            copy_(targets, [x[name] for name in moved])
        yield
    finally:
        copy_(targets, before)


def detached(parameters: Mapping[str, nn.Parameter]) -> Tree:
    """Return tensors that share the parameters' storage."""
    return {name: p.detach() for name, p in parameters.items()}


def _same_storage(p: Tensor, t: Tensor) -> bool:
    return local_part(p).data_ptr() == local_part(t).data_ptr() and p.numel() > 0


@contextmanager
def _without_gradient(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Save a pass the work for parameters whose gradient nobody asks for; hooks of sharded ones want it always."""
    frozen = [p for p in parameters if not is_sharded(p)]
    for p in frozen:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(True)


def random_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's own generators, on the host and on the device."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_random_states(device: torch.device, states: list[Tensor]) -> None:
    """Set what `random_states` returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def choose_hvp_method(model: nn.Module, hvp_method: HvpMethod) -> HvpMethod:
    """Return how the products of a model are computed, as far as its form decides."""
    if any(is_sharded(p) for p in model.parameters()):
        if hvp_method not in ("auto", "finite_difference"):
            raise_on_first(
                ValueError(
                    "A model in shards, as fully_shard makes it, must have hvp_method='finite_difference' or 'auto'. "
                    f"Got {hvp_method!r}: its hooks serve one derivative, and a second one taken through them is "
                    "silently wrong."
                )
            )
        return "finite_difference"
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if hvp_method != "auto" or count <= EXACT_UP_TO:
        return hvp_method
    warnings.warn(
        f"The model has {count:,} parameters: products are taken by differences of first-order gradients, at the "
        "memory of training. Say hvp_method='finite_difference' to choose this, or 'autograd' to have exact products.",
        FiniteDifferenceWarning,
        stacklevel=5,
    )
    return "finite_difference"


def members(part: OuterModules, prefix: str = "") -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    """Yield the modules and parameters of outer, or of a model, by name."""
    if isinstance(part, nn.Module | nn.Parameter):
        yield prefix, part
    elif isinstance(part, Mapping | list | tuple):
        for key, inside in part.items() if isinstance(part, Mapping) else enumerate(part):
            yield from members(inside, f"{prefix}.{key}" if prefix else str(key))
    else:
        raise TypeError(
            "outer must be a torch.nn.Module, a torch.nn.Parameter, or a list or mapping of these. "
            f"Got {type(part).__name__} instead."
        )


def _trainable(outer: OuterModules) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, part in members(outer):
        if isinstance(part, nn.Parameter):
            if part.requires_grad:
                yield prefix or "outer", part
        else:
            yield from ((name, p) for name, p in part.named_parameters(prefix=prefix) if p.requires_grad)


def named_tensors(part: OuterModules) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters, trainable or not, and buffers, by name."""
    for prefix, member in members(part):
        if isinstance(member, nn.Parameter):
            yield prefix, member
        else:
            yield from member.named_parameters(prefix=prefix)
            yield from member.named_buffers(prefix=prefix)


_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel"}
"""Modules whose hooks reduce the gradients of all parameters inside, by name: not every build of PyTorch has them."""


def _check_parameters(model: nn.Module, omega: Mapping[str, nn.Parameter], lam: Mapping[str, nn.Parameter]) -> None:
    for name, parameters in (("model", omega), ("outer", lam)):
        if not parameters:
            raise ValueError(f"{name} must have at least one parameter that requires a gradient. Got none.")
    inside = set(model.parameters()) & set(lam.values())
    wrappers = {kind.__name__ for kind in type(model).__mro__} & _WRAPPERS
    if inside and (wrappers or any(map(is_sharded, model.parameters()))):
        names = sorted(name for name, p in lam.items() if p in inside)
        raise ValueError(
            f"Under {' and '.join(wrappers) or 'fully_shard'} the outer parameters must not lie inside the model, "
            f"whose hooks reduce them. Got {names}. Keep them in a module of their own, and hand it to the losses as "
            "`outer`."
        )
    devices = sorted({str(p.device) for p in chain(omega.values(), lam.values())})
    if len(devices) > 1:
        raise ValueError(
            f"The parameters of the model and of outer must be on one device. Got {', '.join(devices)}. Move them with "
            ".to(device) first."
        )
    for p in chain(omega.values(), lam.values()):
        if not p.dtype.is_floating_point:
            raise TypeError(f"Parameters must be real floating-point tensors. Got {p.dtype} instead.")
