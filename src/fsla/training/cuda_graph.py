"""A step captured once as a CUDA graph, and replayed by the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fsla.counted import Counted
from fsla.sample import Sample
from fsla.solver import State
from fsla.training.nest import copy_into, map_tensors
from fsla.training.program import CaptureError, Step, with_tensor_k


class CudaGraph:
    """A step captured once and replayed by the device. The state lives in tensors that the graph writes to.

    All that `draw` draws must come from the generator, on the device: it is captured with the rest.
    """

    stride, settled = 10, True

    def __init__(
        self,
        name: str,
        step: Step,
        problem: Counted,
        draw: Callable[[], Sample],
        generator: torch.Generator,
        state: State,
    ) -> None:
        device, self.name, self._problem = generator.device, name, problem
        self._held: State = map_tensors(torch.clone, with_tensor_k(state))
        random = generator.get_state()

        def warm_up() -> None:  # the first call on a side stream chooses kernels and fills the caches of libraries
            side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                step(self._held, draw())
                with never_waiting():  # a capture that fails half-way leaves the generator unusable
                    step(self._held, draw())
            torch.cuda.current_stream(device).wait_stream(side)

        def capture() -> None:
            with torch.cuda.graph(self._graph):
                copy_into(self._held, step(self._held, draw()))

        try:
            problem.counting(warm_up)
        finally:
            generator.set_state(random)
        self._graph = torch.cuda.CUDAGraph()
        self._graph.register_generator_state(generator)
        _, calls, samples = problem.counting(capture)
        self.counts = calls, samples
        """What one step asks for."""

    def advance(self, state: State, n: int) -> State:
        copy_into(self._held, with_tensor_k(state))
        for _ in range(n):
            self._graph.replay()
        self._problem.add(n, *self.counts)
        out: State = map_tensors(torch.clone, self._held)
        return out._replace(k=state.k + n)


@contextmanager
def never_waiting() -> Iterator[None]:
    """Makes an operation for which the host waits for the device, such as .item(), an error."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        if "synchroniz" not in first:
            raise
        raise CaptureError(
            "The step cannot be captured: the host waits for the device in it. The losses and the rates must be "
            f"functions of tensors on the device, without .item(), float() or an if on a tensor. ({first})"
        ) from error
    finally:
        torch.cuda.set_sync_debug_mode(mode)
