"""A step captured once as a CUDA graph, and replayed by the device.

The draw is captured with the step, so all that it draws must come from the generator, on the device. The sizes of steps
that are a function of k are sent there beforehand; those with a state follow from it within the captured step, and
measure between two replays. A step now and then is compared with the step itself, taken from the same state of the run
and of the generator:

    ‖a - b‖ ≤ near ‖a - start‖ + few eps ‖a‖      for each part of the state
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from fsla._state_tree import describe, map_tensors, tensors_of
from fsla._torch import foreach_copy_, foreach_norm
from fsla.algorithms._base import Algorithm, State
from fsla.problems._batches import Batch, StepBatches
from fsla.problems._wrappers import CountedProblem
from fsla.steps._schedules import Rates, Scheduled

OFTEN = 512
"""One in so many replays is compared in the long run: the step itself takes as long as some ten replays, so that this
costs two or three percent. Before that the distances grow by four: an error may need some steps to show.
"""
LONG = 512
"""The first of a call for so many is compared too."""
NEAR_SINGLE = 5e-2
NEAR_DOUBLE = 1e-3
FEW = 1000.0
"""What two ways to take a step may differ by: a GPU adds in no fixed order, so that rounding may put a ReLU on its
other side."""
AS_ROUNDING = 100.0
"""Where terms cancel, as those of d do near a minimum, a part that fails the formula may differ by so many times what
the step itself makes of a change of its start by rounding."""


class CaptureError(RuntimeError):
    """Error of a step that cannot be captured, or that would not give the numbers of the step itself.

    Examples:
        >>> generator = torch.Generator()  # on the CPU, which has no graphs
        >>> algorithm = fsla.algorithms.soba(fsla.steps.constant(0.1, 0.1, 0.1))
        >>> problem = fsla.Problem(lambda lam, omega, batch: omega["w"], lambda lam, omega, batch: omega["w"])
        >>> try:
        ...     fsla.train.make_engine("graph", algorithm, problem, None, generator, None)
        ... except fsla.train.CaptureError as error:
        ...     print(str(error).split(":")[0])
        Engine 'graph' is unavailable
    """


class EngineWarning(UserWarning):
    """Warning that a faster engine is unavailable, or failed, and why.

    Examples:
        >>> import warnings
        >>> warnings.simplefilter("error", fsla.train.EngineWarning)  # to stop rather than step eagerly
    """


class Recorder:
    """Captures work for a GPU.

    Args:
        device: the GPU.
        generator: what the work draws from, if it draws.
        pool: memory that its graphs share; by default each has its own.
    """

    def __init__(self, device: torch.device, generator: torch.Generator | None = None, pool: Any = None) -> None:
        self._device = device
        self._generator = generator
        self._pool = pool

    def warm_up(self, work: Callable[[], None]) -> None:
        """Do the work twice on a side stream: the first time chooses kernels and fills the caches of libraries."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(side):
                work()
                with never_waiting():  # A capture that fails half-way leaves the generator unusable.
                    work()
        finally:  # Work that failed half-way may still write.
            torch.cuda.current_stream(self._device).wait_stream(side)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return what does the work again; the work itself is not done."""
        graph = torch.cuda.CUDAGraph()
        if self._generator is not None:
            graph.register_generator_state(self._generator)
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph.replay


class CudaGraph:
    """An engine that replays steps, and takes them one by one once its name is "eager".

    Args:
        algorithm, problem, draw: what takes a step.
        generator: what the draw draws from.
        lenient: whether to go on with eager steps where a step cannot be captured.
        recorder: what captures.
    """

    stride = 10

    def __init__(
        self,
        algorithm: Algorithm[Any],
        problem: CountedProblem,
        draw: Callable[[], StepBatches],
        generator: torch.Generator,
        *,
        lenient: bool,
        recorder: Recorder | None = None,
    ) -> None:
        self.name = "graph"
        self.preparation_s = 0.0
        self._algorithm = algorithm
        self._problem = problem
        self._draw = draw
        self._generator = generator
        self._lenient = lenient
        self._recorder = recorder or Recorder(generator.device, generator)
        self._drawn: list[StepBatches] = []
        """Batches that were drawn to see whether they repeat, and did not."""
        self._replay: Callable[[], None] | None = None
        self._static: State
        self._agreed = 0
        """How many replays agreed with the step itself."""
        self._unseen = 0
        """How many replays were taken since one was compared."""
        self._since = 0
        """The step of the first of these."""

    def advance(self, state: State, n: int) -> State:
        goal = state.step_count + n
        due = n >= LONG
        if n and self.name != "eager" and (self._replay is None or form(state) != form(self._static)):
            state = self._first_step(state)
        if state.step_count < goal and self.name != "eager":
            state = self._replays(state, goal - state.step_count, due=due)
        while state.step_count < goal:
            batches = self._drawn.pop(0) if self._drawn else self._draw()
            state = self._algorithm.step(self._problem, state, batches)
        return state

    # -------------------------------------------------------------------------------------------------------- replays

    def _replays(self, state: State, n: int, *, due: bool) -> State:
        """Return the state after n replays; where replays are abandoned, return the one from which to step."""
        random = self._generator.get_state()
        wrong, *counts = self._problem.counting(lambda: self._replay_steps(state, n, due=due))
        if wrong is None:
            self._problem.add(1, *counts)
            return self._copy(state.step_count + n)
        self._generator.set_state(random)  # The steps of this call are all taken anew.
        self.name = "eager"
        k = state.step_count
        before = "The numbers of all steps before are those of the step itself."
        if self._unseen and self._since < k:
            before = f"The numbers since step {self._since} are in doubt."
        _warn(f"{wrong} Steps are taken eagerly from step {k} on. {before}")
        return state

    def _replay_steps(self, state: State, n: int, *, due: bool) -> str | None:
        """Take n replays; return what is wrong with one of them, if anything is."""
        assert self._replay is not None
        begin = state.step_count
        write_tensors(tensors_of(self._static), tensors_of(state))
        rates = self._sent(range(begin, begin + n))
        algorithm = self._algorithm
        ahead = algorithm.at_one_point
        for k in range(begin, begin + n):
            compare = due or comparison_due(self._agreed, self._unseen)
            due = False
            measures = algorithm.step_sizes.products_due(k if ahead else k + 1, self._static.measured) > 0
            random = self._generator.get_state()
            wrong = None
            try:
                if measures and ahead:
                    self._measure(algorithm.prepare, k, random)
                before = self._copy(k) if compare else None
                if self._rates is not None:
                    self._rates.copy_(rates[k - begin])
                self._replay()
                if before is not None:
                    wrong = self._wrong(before, random)
                if measures and not ahead:
                    self._measure(algorithm.measure, k + 1, random)
            except Exception as error:
                wrong = f"The captured step failed ({reason_of(error)})"
            if wrong is not None:
                return wrong
            self._since = self._since if self._unseen else k
            self._unseen = 0 if compare else self._unseen + 1
        self._problem.add(n, *self._counts)
        return None

    def _wrong(self, before: State, random: Tensor) -> str | None:
        """Return what is wrong with the last replay, beside the step itself from the same state and generator."""
        with self._preparing():
            batches = self._batches(random)
            rates = self._given_rates()

            def step(state: State) -> State:
                return self._move(state, batches, rates)

            def compare() -> str | None:
                expected, result = step(before), self._copy(before.step_count)
                if not expected.is_finite() and not result.is_finite():  # Nothing to compare: again at the next step.
                    self._agreed = 0
                    return None
                self._agreed += 1
                return difference(before, expected, result, step)

            part = self._problem.counting(compare)[0]
        if part is None:
            return None
        return (
            f"The captured step no longer gives the numbers of the step itself (in {part}): the losses must be "
            "functions of their arguments and of tensors that stay the same objects."
        )

    def _measure(self, measure: Callable[[CountedProblem, State, StepBatches], State], k: int, random: Tensor) -> None:
        """Have the step sizes measure in the held state, after k steps, on the batches of a step."""
        measured = measure(self._problem, replace(self._static, step_count=k), self._batches(random)).measured
        places = tensors_of(self._static.measured)
        write_tensors(places, tensors_of(measured))
        left = iter(places)
        self._static = replace(self._static, measured=map_tensors(lambda t: next(left), measured))

    def _batches(self, random: Tensor) -> StepBatches:
        """Return what was drawn from a state of the generator, and leave the generator as it is."""
        now = self._generator.get_state()
        self._generator.set_state(random)
        batches = self._draw()
        self._generator.set_state(now)
        return batches

    # -------------------------------------------------------------------------------------------------------- capture

    def _first_step(self, state: State) -> State:
        """Return the state one step later, when it has its lasting form; from there on the step is captured."""
        again = self._replay is not None
        with self._preparing():
            try:
                self._check_repeats()
            except Exception as error:
                self._unavailable(error, must_raise=not self._lenient)
                return state
        k = state.step_count
        doubles = any(t.dtype == torch.float64 for t in tensors_of(state))
        self._dtype = torch.float64 if doubles else torch.float32
        self._rates = self._sent(range(k, k + 1))[0].clone() if self._scheduled else None
        batches = self._draw()
        state = self._algorithm.prepare(self._problem, state, batches)
        state = replace(self._move(state, batches, self._given_rates()), step_count=k + 1)
        state = self._algorithm.measure(self._problem, state, batches)
        random = self._generator.get_state()
        try:
            with self._preparing():
                self._capture(state)
        except Exception as error:
            self._unavailable(error, must_raise=not self._lenient and not again)
        finally:
            self._generator.set_state(random)
        return state

    def _check_repeats(self) -> None:
        """Raise unless the draw is the generator's alone: from one state of it, the same batches twice."""
        random = self._generator.get_state()
        for _ in range(2):
            self._generator.set_state(random)
            self._drawn.append(self._draw())  # Kept, so that no batch is lost where the draw is refused.
            leaves_of(self._drawn[-1])
            self._drawn[-1] = deepcopy(self._drawn[-1])  # A draw may write into one place.
        first, second = map(leaves_of, self._drawn)
        if len(first) != len(second) or not all(map(_same, first, second)):
            raise CaptureError(
                "What is drawn must come from the generator alone, on its device: the draw is captured with the step, "
                "and a batch from elsewhere, such as a DataLoader, would be replayed for ever."
            )
        one = self._drawn[0]
        self._drawn.clear()
        self._generator.set_state(random)
        if one.seed is not None or any(batch.seed is not None for slot in one.slots for batch in slot):
            raise CaptureError("Batches with a seed cannot be captured: they have another one at every step.")

    def _capture(self, state: State) -> None:
        """Hold a copy of the state, and record the step from it to itself."""
        self._static = replace(map_tensors(torch.clone, state), step_count=FORBIDDEN_STEP)
        rates = self._given_rates()

        def work() -> None:
            after = self._move(self._static, self._draw(), rates)
            if form(after) != form(self._static):
                raise CaptureError("A step that is captured must leave the state in the form that it has.")
            write_tensors(tensors_of(self._static), tensors_of(after))

        self._problem.counting(lambda: self._recorder.warm_up(work))
        self._replay, *self._counts = self._problem.counting(lambda: self._recorder.record(work))
        self._agreed = 0
        self._unseen = 0

    def _move(self, state: State, batches: StepBatches, rates: Rates | None) -> State:
        """Return the state after the moves of a step, but for its step count."""
        algorithm = self._algorithm
        step = algorithm.context(self._problem, state.step_count, state.measured, batches, rates=rates)
        moved: State = algorithm.move(state, step)
        return moved

    # ---------------------------------------------------------------------------------------------- what the two share

    @property
    def _scheduled(self) -> bool:
        """Whether the sizes of a step are a function of k, which the host sends."""
        return isinstance(self._algorithm.step_sizes, Scheduled)

    def _sent(self, steps: range) -> Tensor:
        """Return the rates of some steps on the device, a row for each; empty rows where the state has them."""
        sizes = self._algorithm.step_sizes
        numbers = [[float(x) for x in sizes.rates(k, None)] if self._scheduled else [] for k in steps]
        rows = torch.tensor(numbers, dtype=self._dtype)
        on_gpu = self._generator.device.type == "cuda"
        return (rows.pin_memory() if on_gpu else rows).to(self._generator.device, non_blocking=True)

    def _given_rates(self) -> Rates | None:
        """Return the rates where they are held; None where they follow from the state."""
        return None if self._rates is None else Rates(*self._rates.unbind())

    def _copy(self, k: int) -> State:
        """Return the state that the device holds."""
        return replace(map_tensors(torch.clone, self._static), step_count=k)

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.preparation_s += time.perf_counter() - start

    def _unavailable(self, error: Exception, *, must_raise: bool) -> None:
        """Go on with eager steps, or raise."""
        message = f"Engine 'graph' is unavailable: {reason_of(error)}"
        if must_raise:
            raise CaptureError(message) from error
        _warn(f"{message} Using 'eager'.")
        self.name = "eager"


class _ForbiddenStep:
    """Stands for k while a step is captured: nothing may be asked of it."""

    def _refuse(self, *args: object) -> NoReturn:
        raise CaptureError("Algorithm.move must not read the step count: what depends on it belongs in the step sizes.")

    __bool__ = __str__ = __int__ = __index__ = __float__ = __hash__ = __format__ = __getattr__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __divmod__ = _refuse


FORBIDDEN_STEP: Any = _ForbiddenStep()


def form(state: State) -> object:
    """Return what two states have in common where one captured step serves both: all but the numbers in tensors."""
    tensors = [(t.shape, t.dtype, t.device) for t in tensors_of(state)]
    return str(describe(replace(state, step_count=0))), tensors


def comparison_due(agreed: int, unseen: int) -> bool:
    """Whether the next replay is compared with the step itself.

    Args:
        agreed: how many comparisons agreed so far.
        unseen: replays since the last one.
    """
    exponent = min(agreed - 1, 9)  # A power of thousands would take as long as a replay.
    return agreed == 0 or unseen + 1 >= min(OFTEN, int(4**exponent))


def difference(start: State, a: State, b: State, step: Callable[[State], State]) -> str | None:
    """Return the part in which b does not agree with a = step(start); None where it agrees."""
    before, one, two = map(_parts, (start, a, b))
    nudged: Mapping[str, list[Tensor]] | None = None
    for name, expected in one.items():
        gap = _norm(expected, two[name])
        size = _norm(expected)
        single = any(t.dtype != torch.float64 for t in expected)
        eps = torch.finfo(torch.float32 if single else torch.float64).eps
        moved = _norm(expected, before[name])
        if gap <= (NEAR_SINGLE if single else NEAR_DOUBLE) * moved + FEW * eps * size:
            continue
        nudged = nudged or _parts(step(map_tensors(_nudge, start)))
        if not gap <= AS_ROUNDING * _norm(expected, nudged[name]):
            return name
    return None


def _parts(state: State) -> Mapping[str, list[Tensor]]:
    """The tensors of a state by its fields, and of what was measured by the fields of that."""
    parts = {field.name: getattr(state, field.name) for field in fields(state)}
    measured = parts.pop("measured")
    if is_dataclass(measured):
        parts |= {field.name: getattr(measured, field.name) for field in fields(measured)}
    elif measured is not None:
        parts["measured"] = measured
    return {
        name: [t if t.is_floating_point() else t.double() for t in tensors_of(part)] for name, part in parts.items()
    }


def _norm(a: Sequence[Tensor], b: Sequence[Tensor] | None = None) -> float:
    """‖a‖ or ‖a - b‖, NaN where anything is."""
    gaps = a if b is None else [x - y for x, y in zip(a, b, strict=True)]
    return float(torch.stack(foreach_norm(list(gaps), 2, dtype=torch.float64)).norm()) if gaps else 0.0


def _nudge(t: Tensor) -> Tensor:
    """The tensor, every second number of which is larger by one rounding unit, the others smaller."""
    if not t.is_floating_point():
        return t
    signs = 1 - 2 * (torch.arange(t.numel(), device=t.device) % 2)
    return t * (1 + torch.finfo(t.dtype).eps * signs.to(t.dtype)).reshape(t.shape)


def write_tensors(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write values into tensors; a value may be a view of one of them."""
    pairs = [(place, value) for place, value in zip(places, values, strict=True) if value is not place]
    if not pairs:
        return
    written = {place.untyped_storage().data_ptr() for place, _ in pairs}
    with torch.no_grad():
        safe = [value.clone() if value.untyped_storage().data_ptr() in written else value for _, value in pairs]
        foreach_copy_([place for place, _ in pairs], safe)


def leaves_of(x: object) -> list[object]:
    """Return the tensors, numbers and names in batches, in a fixed order."""
    if x is None or isinstance(x, Tensor | bool | int | float | str):
        return [x]
    if isinstance(x, Batch):
        return [*leaves_of(x.data), x.seed, *leaves_of(x.number)]
    if isinstance(x, Mapping):
        return [leaf for item in x.items() for leaf in leaves_of(item)]
    if isinstance(x, tuple | list):
        return [leaf for part in x for leaf in leaves_of(part)]
    raise TypeError(
        f"A step that is captured takes batches of tensors, numbers and strings. Got {type(x).__name__} instead."
    )


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


@contextmanager
def never_waiting() -> Iterator[None]:
    """Make an operation for which the host waits for the device, such as .item(), an error."""
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "a prototype feature"
            torch.cuda.set_sync_debug_mode("error")
        yield
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        if "synchroniz" not in first:
            raise
        raise CaptureError(
            "The step cannot be captured: the host waits for the device in it. The losses must be functions of tensors "
            f"on the device, without .item(), float() or an if on a tensor. ({first})"
        ) from error
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def reason_of(error: Exception) -> str:
    """Return the first line of the text of an error."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first if first.endswith((".", "!", "?", ")")) else f"{first}."


def _warn(message: str) -> None:
    warnings.warn(message, EngineWarning, stacklevel=5)
