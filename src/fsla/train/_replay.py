"""Programs replayed on a CPU, one for each form of sample, and compared with the step itself as they go.

The sample of a step is drawn when that step is taken. The first steps of a form are taken by the step itself and by the
program, and so is one now and then later on. Where the two agree it is always the program's result that is used, so
that a run which is resumed, and makes its programs anew, goes on with the same arithmetic; where they do not, it is the
step's, and no program is used any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from fsla.algorithms._alternating import Algorithm, State
from fsla.problems._batches import Sample
from fsla.problems._counted import Counted, Counts
from fsla.problems._nest import rebuild, take_apart, tensors
from fsla.steps._schedules import Rates
from fsla.train._agreement import OTHER_KERNELS, SAME_KERNELS, is_finite
from fsla.train._captured import LONG, Captured, differs, rate_dtype, reason, warn
from fsla.train._program import Program

FORMS = 4
"""So many forms of sample get a program: one for each of many forms would cost more than it saves."""
FIRST = 3
"""How many steps of a form are compared before its program is replayed without the step itself."""
OFTEN = 64
"""One step in so many is compared from then on."""
BATCHES = 5
"""The fields of a sample that hold batches: what follows them is no part of its form."""


@dataclass
class _Form:
    """What is known of one form of state and sample."""

    program: Program
    calls: Counts
    samples: Counts
    agreed: int = 0
    call: int = 0
    """The call of `advance` in which the program was last compared."""
    replayed: int = 0
    """How often it was replayed since."""
    since: int = 0
    """The first step of those."""
    uncounted: int = 0

    def is_due(self, call: int) -> bool:
        return self.agreed < FIRST or self.replayed >= OFTEN - 1 or self.call != call


class Replay(Captured):
    stride = 1

    def __init__(
        self, name: str, algorithm: Algorithm, problem: Counted, draw: Callable[[], Sample], *, lenient: bool
    ) -> None:
        super().__init__(name, algorithm, problem, draw, lenient=lenient)
        self._forms: dict[Hashable, _Form | None] = {}
        """None for a form that is stepped eagerly."""
        self._shapes: dict[Hashable, int] = {}
        self._call = 0
        self._changes = 0
        self._warned = False
        self._rates: tuple[object, list[Tensor]] = (None, [])

    @property
    def programs(self) -> list[Program]:
        return [form.program for form in self._forms.values() if form is not None]

    def advance(self, state: State, n: int) -> State:
        self._call += n >= LONG
        k, like, (shape, parts) = state.k, state[1:], self._taken_apart(state)
        try:
            for _ in range(n):
                xi = self._draw()
                key, drawn = self._key(shape, xi)
                form = self._forms.get(key)
                after = None if form is None or form.is_due(self._call) else self._replayed(form, k, parts, drawn)
                if after is None:
                    state = self._careful(State(k, *rebuild(like, parts)), xi, key)
                    like, (shape, parts) = state[1:], self._taken_apart(state)
                else:
                    parts = after
                k += 1
        finally:
            self._count()
        return State(k, *rebuild(like, parts))

    def _taken_apart(self, state: State) -> tuple[int, list[Tensor]]:
        """A short name for the state's form, and its tensors, laid out as those of programs are."""
        form, parts = take_apart(state[1:], layout=False)
        return self._shapes.setdefault(form, len(self._shapes)), [t.contiguous() for t in parts]

    def _key(self, shape: int, xi: Sample) -> tuple[Hashable, list[Tensor]]:
        try:
            form, drawn = take_apart(xi[:BATCHES])
        except TypeError:  # a batch of something else
            return None, []
        return (shape, form), drawn

    def _rate(self, k: int, parts: list[Tensor]) -> list[Tensor]:
        numbers = self._numbers(k)
        dtype = rate_dtype(parts)
        if (numbers, dtype) != self._rates[0]:
            self._rates = (numbers, dtype), list(torch.tensor(numbers, dtype=dtype).unbind())
        return self._rates[1]

    def _replayed(self, form: _Form, k: int, parts: list[Tensor], drawn: list[Tensor]) -> list[Tensor] | None:
        """The tensors of the next state, or None where the replay fails."""
        rates = self._rate(k, parts)
        try:
            after = form.program.run(parts, rates, drawn)
        except Exception as error:
            self._drop(f"The captured step failed ({reason(error)})", k)
            return None
        form.since = form.since if form.replayed else k
        form.replayed += 1
        form.uncounted += 1
        return after

    def _careful(self, state: State, xi: Sample, key: Hashable) -> State:
        """The step itself; and its program, which is made where there is none, to compare with it."""
        if self.name == "eager":
            return self._step(state, xi)
        begun = time.perf_counter()
        parts = tensors(state[1:])
        rates = self._rate(state.k, parts)
        expected = self._move(state, xi, Rates(*rates))
        taken = time.perf_counter() - begun
        try:
            if key not in self._forms:
                self._make(state, xi, key, expected)
            form = self._forms.get(key)
            if form is None or not is_finite(expected):
                return expected
            return self._agreed(form, state, xi, rates, expected)
        finally:
            self.preparation_s += time.perf_counter() - begun - taken

    def _agreed(self, form: _Form, state: State, xi: Sample, rates: list[Tensor], expected: State) -> State:
        """The program's result if it agrees with the step itself, which is `expected`; else that."""
        parts = tensors(state[1:])
        drawn = tensors(xi)
        runs = [(form.program.run_uncompiled, SAME_KERNELS)]
        if form.program.compiled is not None:
            runs.append((form.program.run, OTHER_KERNELS))
        found = expected
        for run, tolerance in runs:
            try:
                found = State(expected.k, *rebuild(state[1:], run(parts, rates, drawn)))
            except Exception as error:
                self._drop(f"The captured step failed ({reason(error)})", state.k)
                return expected
            if part := self._difference(state, xi, Rates(*rates), expected, found, tolerance):
                self._drop(differs(part), state.k)
                return expected
        form.agreed += 1
        form.call = self._call
        form.replayed = 0
        return found

    def _make(self, state: State, xi: Sample, key: Hashable, expected: State) -> None:
        """Makes the program for a form of state and sample, unless the step changes the state's form."""
        if len(self._forms) >= FORMS:
            if not self._warned:
                warn(f"More than {FORMS} forms of batch were drawn. Further ones are stepped eagerly.")
            self._warned = True
            return
        if self._taken_apart(expected)[0] != self._taken_apart(state)[0] and self._changes < 2:
            self._changes += 1  # as the first step from a start does
            return
        try:
            take_apart(xi[:BATCHES])  # raises for a batch of something else
            rates = self._rate(state.k, tensors(state[1:]))
            program, calls, samples = self._program(state, xi, rates)
        except Exception as error:
            if self.programs:
                warn(f"A form of batch cannot be captured and is stepped eagerly: {reason(error)}")
                self._forms[key] = None
            else:
                self._unavailable(error, must_raise=not self._lenient)
                self.name = "eager"
            return
        if self.name == "compile":
            try:
                self._compile(program, state, xi, rates)
            except Exception as error:
                self._unavailable(error, must_raise=not self._lenient and not self.programs)
                program.compiled = None
        self._changes = 0
        self._forms[key] = _Form(program, calls, samples)

    def _drop(self, why: str, k: int) -> None:
        """Gives up all programs."""
        self._count()
        since = [form.since for form in self._forms.values() if form is not None and form.replayed]
        self._forms.clear()
        self._give_up(why, k, min(since, default=None))

    def _count(self) -> None:
        """Adds up what the replayed steps would have asked the problem for."""
        for form in self._forms.values():
            if form is not None:
                self._problem.add(form.uncounted, form.calls, form.samples)
                form.uncounted = 0
