"""A step captured once as a CUDA graph, and replayed by the device.

The draw is captured with the step, so all that it draws must come from the generator, on the device. The rates of the
steps to come are sent there beforehand. A step now and then is compared with the step itself, taken from the same state
of the run and of the generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fsla.algorithms._alternating import Algorithm, State
from fsla.problems._batches import Sample
from fsla.problems._counted import Counted
from fsla.problems._nest import copy_into, map_tensors, take_apart, tensors
from fsla.steps._schedules import Rates
from fsla.train._agreement import OTHER_KERNELS, is_finite
from fsla.train._captured import Captured, differs, rate_dtype, reason
from fsla.train._program import UNREAD, CaptureError
from fsla.train._torch_private import waiting_is_an_error

FIRST = 2
"""How many replays are compared at first."""
OFTEN = 512
"""One in so many is compared from then on: the step itself takes as long as some ten replays, so that this costs two or
three percent."""
LONG = 512
"""The first of a call for so many is compared too."""


class Recorder:
    """Captures work for the device."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def warm_up(self, work: Callable[[], None]) -> None:
        """On a side stream: the first call chooses kernels and fills the caches of libraries."""
        device = self._generator.device
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            work()
            with never_waiting():  # a capture that fails half-way leaves the generator unusable
                work()
        torch.cuda.current_stream(device).wait_stream(side)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Returns what does the work again; the work itself is not done."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        with torch.cuda.graph(graph):
            work()
        return graph.replay


class CudaGraph(Captured):
    stride = 10

    def __init__(
        self,
        name: str,
        algorithm: Algorithm,
        problem: Counted,
        draw: Callable[[], Sample],
        generator: torch.Generator,
        *,
        lenient: bool,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(name, algorithm, problem, draw, lenient=lenient)
        self._generator = generator
        self._recorder = recorder or Recorder(generator)
        self._drawn: list[Sample] = []
        """Samples that were drawn to see whether they repeat, and did not."""
        self._replay: Callable[[], None] | None = None
        self._agreed = 0
        self._replayed = 0
        self._since = 0

    def advance(self, state: State, n: int) -> State:
        goal = state.k + n
        due = n >= LONG
        if n and self.name != "eager" and (self._replay is None or form(state) != form(self._held)):
            state = self._begun(state)
        if state.k < goal and self.name != "eager":
            state = self._replays(state, goal - state.k, due=due)
        while state.k < goal:
            state = self._step(state, self._drawn.pop(0) if self._drawn else self._draw())
        return state

    def _replays(self, state: State, n: int, *, due: bool) -> State:
        """The state after n replays; or, where they are given up, the one from which to step."""
        assert self._replay is not None
        begin = self._generator.get_state()
        copy_into(self._held[1:], state[1:])
        rates = self._sent(range(state.k, state.k + n))
        for i in range(n):
            compare = due or self._agreed < FIRST or self._replayed >= OFTEN - 1
            due = False
            before = (self._copy(state.k + i), self._generator.get_state()) if compare else None
            self._rates.copy_(rates[i])
            try:
                self._replay()
                wrong = self._wrong(*before) if before else None
            except Exception as error:
                wrong = f"The captured step failed ({reason(error)})"
            if wrong is not None:
                self._generator.set_state(begin)  # the steps of this call are all taken anew
                since = self._since if self._replayed else state.k
                self._give_up(wrong, state.k, min(since, state.k))
                return state
            self._since = self._since if self._replayed else state.k + i
            self._replayed = 0 if compare else self._replayed + 1
        self._problem.add(n, *self._counts)
        return self._copy(state.k + n)

    def _wrong(self, before: State, random: Tensor) -> str | None:
        """What is wrong with the last replay, beside the step itself from the same state and generator's state."""
        with self._preparing():
            after = self._generator.get_state()
            self._generator.set_state(random)
            rates = Rates(*self._rates.unbind())
            xi = self._draw()
            expected, *_ = self._problem.counting(lambda: self._move(before, xi, rates))
            self._generator.set_state(after)
            found = self._copy(expected.k)
            if not is_finite(expected) and not is_finite(found):  # nothing to compare: again at the next step
                self._agreed = 0
                return None
            self._agreed += 1
            part = self._difference(before, xi, rates, expected, found, OTHER_KERNELS)
            return None if part is None else differs(part)

    def _begun(self, state: State) -> State:
        """The state one step later, when it has its lasting form; from there on the step is captured."""
        again = self._replay is not None
        self._dtype = rate_dtype(tensors(state[1:]))
        with self._preparing():
            try:
                self._check_repeats()
            except Exception as error:
                self._unavailable(error, must_raise=not self._lenient)
                self.name = "eager"
                return state
        state = self._move(state, self._draw(), Rates(*self._sent(range(state.k, state.k + 1))[0].unbind()))
        while self.name != "eager":
            random = self._generator.get_state()
            try:
                with self._preparing():
                    self._capture(state)
                break
            except Exception as error:
                self._unavailable(error, must_raise=not self._lenient and not again)
            finally:
                self._generator.set_state(random)
        return state

    def _capture(self, state: State) -> None:
        self._held: State = map_tensors(torch.clone, state)
        self._rates = self._sent(range(state.k, state.k + 1))[0].clone()
        given = State(UNREAD, *self._held[1:])
        rates = self._rates.unbind()
        made = None
        if self.name == "compile":
            xi = self._draw()
            made = self._program(state, xi, rates)
            self._compile(made[0], state, xi, rates)

        def work() -> None:
            xi = self._draw()
            if made is not None:
                copy_into(self._held[1:], made[0].run(tensors(given[1:]), rates, tensors(xi)))
                return
            after = self._move(given, xi, Rates(*rates))
            if form(after) != form(given):
                raise CaptureError("A step that is captured must leave the state in the form that it found.")
            copy_into(self._held[1:], after[1:])

        self._problem.counting(lambda: self._recorder.warm_up(work))
        self._replay, *counts = self._problem.counting(lambda: self._recorder.record(work))
        self._counts = counts if made is None else made[1:]
        self._agreed = 0
        self._replayed = 0

    def _check_repeats(self) -> None:
        """Raises unless the draw is the generator's alone: from one state of it, the same sample twice."""
        random = self._generator.get_state()
        for _ in range(2):
            self._generator.set_state(random)
            self._drawn.append(map_tensors(torch.clone, self._draw()))  # not lost, if it does not repeat
        (one, first), (two, again) = map(take_apart, self._drawn)
        if one != two or not all(map(torch.equal, first, again)):
            raise CaptureError(
                "What is drawn must come from the generator alone, on its device: the draw is captured with the step, "
                "and a batch from elsewhere, such as a DataLoader, would be replayed for ever."
            )
        seed = getattr(self._drawn[0], "seed", None)
        self._drawn.clear()
        self._generator.set_state(random)
        if seed is not None:
            raise CaptureError("A sample with a seed cannot be captured: it has another one at every step.")

    def _sent(self, steps: range) -> Tensor:
        """The rates of some steps, a row for each, on the device."""
        rows = torch.tensor([self._numbers(k) for k in steps], dtype=self._dtype)
        on_gpu = self._generator.device.type == "cuda"
        return (rows.pin_memory() if on_gpu else rows).to(self._generator.device, non_blocking=True)

    def _copy(self, k: int) -> State:
        """The state that the device holds."""
        return State(k, *map_tensors(torch.clone, self._held[1:]))


def form(state: State) -> object:
    return take_apart(state[1:], layout=False)[0]


@contextmanager
def never_waiting() -> Iterator[None]:
    """Makes an operation for which the host waits for the device, such as .item(), an error."""
    try:
        with waiting_is_an_error():
            yield
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        if "synchroniz" not in first:
            raise
        raise CaptureError(
            "The step cannot be captured: the host waits for the device in it. The losses must be functions of tensors "
            f"on the device, without .item(), float() or an if on a tensor. ({first})"
        ) from error
