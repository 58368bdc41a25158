"""One step as a program: a straight list of tensor operations.

A step is run once and every operation that reaches a tensor is noted, those of automatic differentiation among them.
Replaying the list does the same arithmetic without building a graph and without any Python of the step itself. The list
can also be compiled; PyTorch keeps what it compiled on disk, so that a later run of the same form starts in seconds.
Tensors that the losses hold, such as the data, become arguments of the program: what is compiled serves any data.

A program serves every k and every sample of one form, so while it is made nothing may read a number: not k, not a
tensor, and nothing whose shape depends on numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from fsla.algorithms._alternating import State
from fsla.problems._batches import Sample
from fsla.problems._nest import rebuild, take_apart, tensors
from fsla.steps._schedules import Rates
from fsla.train._parts import Run, SideBySide, split
from fsla.train._simplify import simplify
from fsla.train._torch_private import compile_program, mutates, trace, watching, without_mutation

Move = Callable[[State, Sample, Rates], State]


class CaptureError(RuntimeError):
    """A step that cannot be captured, or that would not give the numbers of the step itself."""


class Program:
    """The step for states and samples of one form."""

    def __init__(self, move: Move, state: State, xi: Sample, rates: Sequence[Tensor]) -> None:
        shape, own = take_apart(state[1:])
        n = len(own)
        example = [*own, *rates, *tensors(xi)]
        self._batches = _places(xi, n + len(rates))
        self._device = own[0].device

        def flat(*values: Tensor) -> list[Tensor]:
            given = State(UNREAD, *rebuild(state[1:], values[:n]))
            sample = rebuild(xi, values[n + len(rates) :])
            with _NoReading(), watching(_refuse):
                after = move(given, sample, Rates(*values[n : n + len(rates)]))
            out = tensors(after[1:])
            if len(out) == n:
                out = [_laid_out_as(a, b) for a, b in zip(out, own, strict=True)]
            if take_apart(rebuild(after[1:], out))[0] != shape:
                raise ValueError("A step that is captured must leave the state in the form that it found.")
            return out

        try:
            module = without_mutation(trace(flat, example), example)
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CaptureError(
                "The step cannot be captured. The losses must be functions of tensors, without .item(), .numpy(), "
                f"float() or an if on a tensor. ({type(error).__name__}: {first})"
            ) from error
        if any(map(mutates, module.graph.nodes)):
            raise CaptureError("The step cannot be captured: it writes into a tensor that it holds.")
        self._held = _held_as_arguments(module)
        simplify(module.graph)
        module.recompile()
        self._module = module
        self.compiled: Run | None = None

    @property
    def graph(self) -> fx.Graph:
        return self._module.graph

    def compile(self, state: Sequence[Tensor], rates: Sequence[Tensor], xi: Sequence[Tensor]) -> None:
        """From here on `run` runs the program compiled, on a GPU in parts that run side by side. Takes an example."""
        example = [*state, *rates, *xi, *self._held]
        parts = split(self._module, self._batches) if self._device.type == "cuda" else None
        if parts is None:
            self.compiled = compile_program(self._module, example)
        else:
            self.compiled = SideBySide(parts, compile_program, self._device)

    def run(self, state: Sequence[Tensor], rates: Sequence[Tensor], xi: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of the next state, by the compiled program where there is one."""
        with torch.no_grad():
            return list((self.compiled or self._module.forward)(*state, *rates, *xi, *self._held))

    def run_uncompiled(self, state: Sequence[Tensor], rates: Sequence[Tensor], xi: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(self._module.forward(*state, *rates, *xi, *self._held))


class _Unread:
    """Stands for k while a step is traced: nothing but k + 1 may be asked of it, which is k again."""

    def __add__(self, other: object) -> _Unread:
        return self if type(other) is int and other == 1 else self._refuse()

    def _refuse(self, *args: object) -> NoReturn:
        raise CaptureError("Algorithm.move must not read state.k: what depends on k belongs in rates(k).")

    __bool__ = __int__ = __index__ = __float__ = __hash__ = __str__ = __format__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __mod__ = __pow__ = __rpow__ = __neg__ = __getattr__ = _refuse


UNREAD: Any = _Unread()
_READERS = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.__repr__}


class _NoReading(TorchFunctionMode):
    """Refuses what takes numbers out of a tensor by its memory; `_refuse` sees what asks an operation for them."""

    def __torch_function__(
        self, func: Any, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if func in _READERS:
            raise CaptureError(f"Tensor.{func.__name__} reads numbers, which would stay as they are for ever.")
        return func(*args, **(kwargs or {}))


def _refuse(target: Any, args: Sequence[object]) -> None:
    """Raises for an operation whose result a program would not give anew at each replay."""
    if torch.Tag.data_dependent_output in target.tags:
        raise CaptureError("A number is read from a tensor, which would stay as it is for ever.")
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise CaptureError(f"{target} draws random numbers inside the step.")
    if torch.Tag.dynamic_output_shape in target.tags:
        by_mask = [t for t in tensors(args[1:]) if t.dtype in (torch.bool, torch.uint8)]
        if target is not torch.ops.aten.index.Tensor or by_mask:
            raise CaptureError(f"The shape of what {target} returns depends on numbers.")


def _laid_out_as(x: Tensor, like: Tensor) -> Tensor:
    """The tensor with the strides of another of its shape, so that a state has them at every step."""
    if x.shape != like.shape or x.dtype != like.dtype or x.stride() == like.stride():
        return x
    return torch.empty_like(like).copy_(x)


def _places(xi: Sample, first: int) -> list[list[int]]:
    """Which arguments of a program make up each batch of the sample."""
    at = {id(t): first + i for i, t in enumerate(tensors(xi))}
    return [[at[id(t)] for t in tensors(batch)] for batch in {id(b): b for b in xi}.values()]


def _held_as_arguments(module: fx.GraphModule) -> list[Tensor]:
    """Makes the tensors that the module holds its last arguments, and returns them."""
    graph = module.graph
    last = next(node for node in reversed(graph.nodes) if node.op == "placeholder")
    held: dict[int, tuple[Tensor, fx.Node]] = {}
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        tensor = getattr(module, str(node.target))
        if id(tensor) not in held:
            with graph.inserting_after(last):
                last = graph.placeholder(f"held_{len(held)}")
            held[id(tensor)] = tensor, last
        node.replace_all_uses_with(held[id(tensor)][1])
        graph.erase_node(node)
    return [tensor for tensor, _ in held.values()]
