"""One step as a program: a straight list of tensor operations.

A step is run once and every operation that reaches a tensor is noted, those of automatic differentiation among them.
Replaying the list does the same arithmetic without building a graph and without any Python of the step itself. The list
can also be compiled; PyTorch keeps what it compiled on disk, so that a later run of the same form starts in seconds.
Tensors that the losses hold, such as the data, become arguments of the program: what is compiled serves any data.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fsla.sample import Sample
from fsla.solver import State
from fsla.training.nest import form, map_tensors, rebuild, tensors
from fsla.training.parts import SideBySide, split
from fsla.training.simplify import simplify

Step = Callable[[State, Sample], State]


class CaptureError(RuntimeError):
    """A step that cannot be captured, or that would not give the numbers of the step itself."""


class Program:
    """The step for states and samples of one form."""

    def __init__(self, step: Step, state: State, xi: Sample, *, compiled: bool = False) -> None:
        own, drawn = tensors(state), tensors(xi)

        def flat(*values: Tensor) -> list[Tensor]:
            after = step(rebuild(state, values[: len(own)]), rebuild(xi, values[len(own) :]))
            if form(after) != form(state):
                raise ValueError("A step that is captured must leave the state in the form that it found.")
            return tensors(after)

        try:
            module = make_fx(flat)(*own, *drawn)
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CaptureError(
                "The step cannot be captured. The losses and the rates must be functions of tensors, without .item(), "
                f"float() or an if on a tensor; rates are given k as a tensor. ({type(error).__name__}: {first})"
            ) from error
        self._held = _tidied(module)
        self._like, self._run = state, module.forward
        if compiled:
            example = [*own, *drawn, *self._held]
            parts = split(module, _places(xi, len(own))) if drawn and drawn[0].device.type == "cuda" else None
            self._run = _compiled(module, example) if parts is None else SideBySide(parts, _compiled, drawn[0].device)

    def run(self, state: list[Tensor], xi: list[Tensor]) -> list[Tensor]:
        """The tensors of the next state."""
        with torch.no_grad():
            return list(self._run(*state, *xi, *self._held))

    def check(self, step: Step, state: State, xi: Sample) -> None:
        """Raises unless the program takes the step that the step itself takes, from states that it has not seen.

        What was turned into a number while the step was traced, by NumPy say, is a constant of the program.
        """
        probe = map_tensors(lambda t: 1.1 * t if t.dtype.is_floating_point else t, state)
        for k in (2 * state.k + 7, 1000 * state.k + 10**6):  # near, for the losses; and far, for slowly falling rates
            try:
                expected = step(probe._replace(k=k), xi)
            except Exception:  # rates may end: nothing to compare with
                continue
            self._compare(probe, expected, self(with_tensor_k(probe._replace(k=k)), xi))

    def _compare(self, before: State, expected: State, found: State) -> None:
        every = [{"lam": x.at.lam, "omega": x.at.omega, "v": x.memory, "d": x.d} for x in (before, expected, found)]
        for name in every[0]:
            for start, a, b in zip(*(tensors(x[name]) for x in every), strict=True):
                near = 1e-3 if a.dtype == torch.float64 else 5e-2  # rounding puts a ReLU on its other side
                tolerance = near * (a - start).norm() + 1e3 * torch.finfo(a.dtype).eps * a.norm()
                if bool(a.isfinite().all()) and not bool((a - b).norm() <= tolerance):
                    raise CaptureError(
                        f"The captured step does not give the numbers of the step itself (in {name}). The losses and "
                        "the rates must be functions of tensors; what NumPy, .tolist() or the type of k decides while "
                        "a step is captured stays so for ever. Use engine='eager', or PyTorch's functions."
                    )

    def __call__(self, state: State, xi: Sample) -> State:
        after: State = rebuild(self._like, self.run(tensors(state), tensors(xi)))
        return after


def with_tensor_k(state: State) -> State:
    """The state with its step number as a tensor, so that rates are computed where the state is."""
    lam = next(iter(state.at.lam.values()))
    double = any(t.dtype == torch.float64 for x in (state.at.lam, state.at.omega) for t in x.values())
    k: Any = torch.tensor(float(state.k), dtype=torch.float64 if double else torch.float32, device=lam.device)
    return state._replace(k=k)


def _places(xi: Sample, first: int) -> list[list[int]]:
    """Which arguments of a program make up each batch of the sample."""
    at = {id(t): first + i for i, t in enumerate(tensors(xi))}
    return [[at[id(t)] for t in tensors(batch)] for batch in {id(b): b for b in xi}.values()]


def _tidied(module: fx.GraphModule) -> list[Tensor]:
    """Simplifies the program, makes the tensors that the module holds its last arguments, and returns them."""
    graph = module.graph
    simplify(graph)
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
    module.recompile()
    return [tensor for tensor, _ in held.values()]


def _compiled(module: fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
    from torch._inductor import compile as compile_program  # seconds to import

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the compiler's advice on settings that are the user's
        run: Callable[..., Any] = compile_program(module, example)
    return run
