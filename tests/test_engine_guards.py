"""Captured engines give the numbers of the eager one, or say since when they may not have."""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import fsla
from fsla import CountedProblem, Point, Problem, StepBatches
from fsla.algorithms import State
from fsla.steps import Rates, Schedule, Scheduled, Variable
from fsla.train import CaptureError, EngineWarning, make_engine
from fsla.train import _captured as captures
from fsla.train._engine import Eager
from recorder import captured
from support import F64, normal

X = normal(40, 3)
START = Point({"l": normal(1)}, {"w": normal(3, seed=1)})
RATES = Schedule(0.05, 0.1, 0.1, 0.5, power=0.3)
FULL = StepBatches.shared(None, None)


@dataclass(frozen=True)
class RatesFrom(Scheduled):
    """Sizes of which τ is any function of k."""

    inner_lr: Any

    def rates(self, k, state=None):
        return Rates(0.05, self.inner_lr(k), 0.1, 0.5)


def plain(lam, omega, rows):
    return (rows @ omega["w"] - lam["l"]).square().mean() + 0.1 * omega["w"].square().sum()


def outer(lam, omega, batch):
    return (omega["w"] - 1).square().sum()


def drawing(generator):
    return lambda: X[torch.randint(40, (8,), generator=generator)]


def samples(generator):
    draw = drawing(generator)
    return lambda: StepBatches.shared(draw(), None)


def run(
    name, make, calls=(40,), rates=RATES, change=lambda i, state: None, freeze=lambda: lambda: None, start=START, **more
):
    """The state, the warnings, the counts and the engine after some calls of `advance`; `make` gives loss and draw."""
    generator = torch.Generator().manual_seed(5)
    inner, draw = make(generator)
    problem = CountedProblem(Problem(inner, outer))
    algorithm = fsla.algorithms.fsla(rates)
    state = algorithm.init(problem, start, draw())
    engine = Eager(algorithm, problem, draw)
    if name != "eager":
        engine, recorder = captured(algorithm, problem, draw, generator, lenient=True, freeze=freeze)
        recorder.fails_at = more.get("fails_at")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i, n in enumerate(calls):
            change(i, state)
            state = engine.advance(state, n)
    return state, [str(w.message) for w in caught if w.category is EngineWarning], problem.calls, engine


def same(a, b, tolerance=1e-12):
    parts = [(a.lam.value, b.lam.value), (a.omega.value, b.omega.value), (a.v, b.v), (a.direction, b.direction)]
    return all(torch.allclose(x[k], y[k], rtol=tolerance, atol=tolerance) for x, y in parts for k in x)


def compare(make, **more):
    """Runs of an eager engine and of a captured one must end alike; returns the warnings and the engine."""
    expected, _, calls, _ = run("eager", make, **more)
    state, messages, counted, engine = run("graph", make, **more)
    assert state.step_count == expected.step_count
    assert same(state, expected)
    assert counted == calls
    return messages, engine


def holding(storage, name):
    """A `freeze` for the recorder: what a dict holds stays, in replays, as it was when they were recorded."""

    def freeze():
        recorded = storage[name]

        def before():
            now, storage[name] = storage[name], recorded
            return lambda: storage.update({name: now})

        return before

    return freeze


def test_replay_with_refilled_buffer_equals_eager():
    def make(generator):
        buffer, draw = torch.zeros(8, 3, dtype=F64), drawing(generator)

        def sample():
            buffer.copy_(draw())
            return StepBatches.shared(buffer, None)

        return plain, sample

    messages, engine = compare(make)
    assert messages == []
    assert engine.name == "graph"


def test_replay_with_refilled_buffer_in_loss_equals_eager():
    def make(generator):
        buffer, draw = torch.zeros(8, 3, dtype=F64), drawing(generator)

        def sample():
            buffer.copy_(draw())
            return FULL

        return lambda lam, omega, batch: plain(lam, omega, buffer), sample

    assert compare(make)[0] == []


@pytest.mark.parametrize(
    "inner_lr",
    [
        lambda k: 0.1 if k in {0, 1, 2, 7} else 0.02,
        lambda k: {0: 0.1, 9: 0.2}.get(k, 0.05),
        lambda k: 0.1 / float(np.interp(k, [0, 100], [1, 9])),
        lambda k: torch.linspace(0.1, 0.01, 60)[k],
        lambda k: 0.1 if isinstance(k, int) and k > 5 else 0.2,
    ],
)
def test_replay_accepts_any_rate_function(inner_lr):
    messages, engine = compare(lambda generator: (plain, samples(generator)), rates=RatesFrom(inner_lr))
    assert messages == []
    assert engine.name == "graph"


@pytest.mark.parametrize("what", ["rows", "scale"])
@pytest.mark.parametrize("calls", [(20, 20), (20, 16)])
def test_replay_sees_data_replaced_between_calls(what, calls, monkeypatch):
    """A graph holds the tensors and the numbers that it was recorded with."""
    monkeypatch.setattr(captures, "LONG", 16)
    storage = {}

    def make(generator):
        storage.update(scale=1.0, rows=X)

        def inner(lam, omega, batch):
            return storage["scale"] * plain(lam, omega, storage["rows"])

        return inner, lambda: FULL

    def change(i, state):
        if i:
            storage[what] = X * 2 if what == "rows" else 3.0

    messages, _ = compare(make, calls=calls, change=change, freeze=holding(storage, what))
    assert len(messages) == 1
    assert "from step 20 on" in messages[0]


def test_replay_sees_data_written_between_calls():
    def make(generator):
        rows.copy_(X)
        return lambda lam, omega, batch: plain(lam, omega, rows), lambda: FULL

    rows = X.clone()
    messages, engine = compare(make, calls=(20, 3, 20), change=lambda i, state: rows.mul_(1.5) if i else None)
    assert messages == []
    assert engine.name == "graph"


@pytest.mark.parametrize("n", [3, 20])
def test_replay_sees_state_changed_between_calls(n):
    def change(i, state):
        if i == 1:
            state.omega.value["w"] = torch.ones(3, dtype=F64)
        elif i == 2:
            state.omega.value["w"].mul_(2.0)

    assert compare(lambda generator: (plain, samples(generator)), calls=(20, n, n), change=change)[0] == []


READERS = {
    "numpy": lambda w: w.detach().cpu().numpy().sum() > -0.7,
    "tolist": lambda w: sum(w.tolist()) > -0.7,
    "asarray": lambda w: np.asarray(w.detach().cpu()).sum() > -0.7,
    "dlpack": lambda w: np.from_dlpack(w.detach().cpu()).sum() > -0.7,
    "repr": lambda w: "True" in repr(w.detach().sum() > -0.7),
    "item": lambda w: w.sum().item() > -0.7,
    "float": lambda w: float(w.detach().sum()) > -0.7,
    "if": lambda w: bool(w.sum() > -0.7),
    "index": lambda w: [False, True][(w.sum() > -0.7).long()],
    "nonzero": lambda w: len(torch.nonzero(w > -0.3)) > 1,
    "unique": lambda w: len(torch.unique(w > -0.3)) > 1,
    "mask": lambda w: len(w[w > -0.3]) > 1,
    "equal": lambda w: torch.equal(w > -0.3, torch.ones_like(w, dtype=torch.bool)),
}


def on_gpu(name, inner, start=START):
    """A run of 60 steps on a GPU: its engine, and its last state."""
    algorithm = fsla.algorithms.fsla(Schedule(0.01, 0.05, 0.1))
    rows = X.cuda()
    generator = torch.Generator("cuda").manual_seed(5)

    def sample():
        return StepBatches.shared(rows[torch.randint(40, (8,), generator=generator, device="cuda")], None)

    problem = CountedProblem(Problem(inner, outer))
    state = algorithm.init(problem, start.to("cuda"), sample())
    engine = make_engine(name, algorithm, problem, sample, generator, state, 1000)
    return engine, engine.advance(state, 60)


@pytest.mark.gpu
@pytest.mark.parametrize("reader", READERS)
def test_capture_skips_loss_that_reads_host_numbers(reader):
    read, crossed = READERS[reader], set()

    def inner(lam, omega, batch):
        crossed.add(bool(read(omega["w"])))
        return plain(lam, omega, batch) * (2.0 if read(omega["w"]) else 1.0)

    start = Point(START.lam, {"w": torch.full((3,), -0.5, dtype=F64)})
    _, expected = on_gpu("eager", inner, start)
    assert crossed == {False, True}  # the numbers that are read do change
    with pytest.warns(EngineWarning, match=r"Engine 'graph' is unavailable: .*Using 'eager'\."):
        engine, messages = on_gpu("auto", inner, start)
    assert same(messages, expected)
    assert engine.name == "eager"
    with pytest.raises(CaptureError, match=r"cannot be captured"):
        on_gpu("graph", inner, start)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "read", [lambda t, i: t[int(i)], lambda t, i: t[0].item() * t[i.item()], lambda t, i: t.tolist()[int(i)]]
)
def test_capture_skips_loss_that_reads_data_numbers(read):
    """A graph holds what was read from a tensor for ever."""
    table, place = torch.tensor([1.0, 3.0], dtype=F64, device="cuda"), torch.tensor(0, device="cuda")

    def inner(lam, omega, batch):
        return read(table, place) * plain(lam, omega, batch)

    with pytest.warns(EngineWarning, match="is unavailable"):
        engine, _ = on_gpu("auto", inner)
    assert engine.name == "eager"


@pytest.mark.gpu
def test_capture_skips_random_step():
    """A graph goes on in the stream of the generator, where the step itself begins anew from its seed."""

    def inner(lam, omega, batch):
        torch.manual_seed(1)
        return plain(lam, omega, torch.nn.functional.dropout(batch, 0.5))

    _, expected = on_gpu("eager", inner)
    with pytest.warns(EngineWarning):
        engine, messages = on_gpu("auto", inner)
    assert engine.name == "eager"
    assert same(messages, expected)


@pytest.mark.parametrize("change_at", [5, 40, 100])
def test_replay_check_detects_counter_and_names_steps(change_at, monkeypatch):
    """The draw's Python runs once, when it is recorded: what it counts stays as it was."""
    monkeypatch.setattr(captures, "OFTEN", 64)
    frozen = {"scale": 1.0, "n": 0}

    def make(generator):
        frozen.update(scale=1.0, n=0)
        return lambda lam, omega, batch: plain(lam, omega, batch) * frozen["scale"], samples(generator)

    def freeze():
        def before():
            frozen["n"] += 1
            now = 1.0 if frozen["n"] <= change_at else 2.0
            frozen["scale"] = 1.0
            return lambda: frozen.update(scale=now)

        return before

    _, messages, _, engine = run("graph", make, calls=(1, 199), freeze=freeze)
    assert engine.name == "eager"
    assert len(messages) == 1
    assert "from step 1 on. The numbers of all steps before are those of the step itself" in messages[0]
    _, messages, _, engine = run("graph", make, calls=(1,) * 200, freeze=freeze)
    assert engine.name == "eager"
    since = int(messages[0].split("since step ")[1].split()[0])
    assert since <= change_at <= since + captures.OFTEN
    expected = run("eager", make, calls=(since,))[0]
    actual = run("graph", make, calls=(since,))[0]
    assert same(actual, expected)  # before that, nothing is in doubt


def test_comparison_distances_grow_to_often():
    """The step itself takes as long as ten replays, so that every comparison must be worth its time."""
    compared, agreed, unseen = [], 0, 0
    for replay in range(1, 2400):
        if captures.comparison_due(agreed, unseen):
            compared.append(replay)
            agreed, unseen = agreed + 1, 0
        else:
            unseen += 1
    assert compared == [1, 2, 6, 22, 86, 342, 854, 1366, 1878, 2390]


@pytest.mark.parametrize("change_at", [2, 21, 22, 30, 100])
def test_replay_check_covers_single_steps(change_at, monkeypatch):
    """The step that the message names lies between the last comparison that agreed and the change."""
    monkeypatch.setattr(captures, "OFTEN", 64)
    storage, agreed = {}, []

    def spy(before, *others):
        part = difference(before, *others)
        if part is None:
            agreed.append(before.step_count)
        return part

    difference = captures.difference
    monkeypatch.setattr(captures, "difference", spy)

    def make(generator):
        storage["scale"] = 1.0
        return lambda lam, omega, batch: plain(lam, omega, batch) * storage["scale"], samples(generator)

    def change(i, state):
        if i == change_at:
            storage["scale"] = 2.0

    _, messages, _, engine = run("graph", make, calls=(1,) * 200, change=change, freeze=holding(storage, "scale"))
    assert engine.name == "eager"
    assert len(messages) == 1
    last = agreed[-1]
    assert last < change_at <= last + captures.OFTEN
    if "since step" in messages[0]:
        assert last < int(messages[0].split("since step ")[1].split()[0]) <= change_at
    else:  # the first step after the change was compared
        assert f"from step {change_at} on. The numbers of all steps before are those" in messages[0]


def test_replay_check_detects_slow_float32_drift(monkeypatch):
    monkeypatch.setattr(captures, "OFTEN", 64)
    storage = {}

    def make(generator):
        storage["scale"], draw = 1.0, drawing(generator)

        def sample():
            return StepBatches.shared(draw().float(), None)

        return lambda lam, omega, batch: plain(lam, omega, batch) * storage["scale"], sample

    def freeze():
        def before():
            now, storage["scale"] = 1.003 * storage["scale"], 1.0
            return lambda: storage.update(scale=now)

        return before

    start = START.to(torch.float32)
    state, messages, _, engine = run("graph", make, calls=(1, 100), freeze=freeze, start=start)
    assert engine.name == "eager"
    assert len(messages) == 1
    assert "no longer gives the numbers" in messages[0]
    assert state.step_count == 101


@pytest.mark.parametrize("what", ["number", "size"])
def test_batch_shape_changing_every_step_is_eager(what):
    """A graph is recorded for batches of one shape, and for the numbers that they held."""

    def make(generator):
        draw, counter = drawing(generator), iter(range(3, 10**6))

        def sample():
            n = next(counter)
            return StepBatches.shared((draw(), n) if what == "number" else (draw().repeat(20, 1)[:n], 1), None)

        return lambda lam, omega, batch: plain(lam, omega, batch[0]) / batch[1], sample

    state, messages, _, engine = run("graph", make)
    assert state.step_count == 40
    assert state.is_finite()
    assert engine.name == "eager"
    assert len(messages) == 1
    assert "must come from the generator alone" in messages[0]


def test_batch_of_unsupported_type_is_eager():
    def make(generator):
        draw = drawing(generator)
        return lambda lam, omega, batch: plain(lam, omega, next(iter(batch))), lambda: StepBatches.shared(
            {0: draw()}.values(), None
        )

    messages, engine = compare(make)
    assert engine.name == "eager"
    assert "tensors, numbers and strings" in messages[0]


def test_replay_failure_falls_back_to_eager():
    messages, engine = compare(lambda generator: (plain, samples(generator)), fails_at=10)
    assert engine.name == "eager"
    assert messages[0].startswith("The captured step failed (the device has gone.)")


def test_replay_check_waits_for_finite_values():
    generator = torch.Generator().manual_seed(5)
    problem, draw = CountedProblem(Problem(plain, outer)), samples(generator)
    algorithm = fsla.algorithms.soba(RATES)
    good = algorithm.init(problem, START, draw())
    bad = replace(good, lam=Variable({"l": normal(1)}), omega=Variable({"w": normal(3) * float("inf")}))
    engine, _ = captured(algorithm, problem, draw, generator)
    broken = engine.advance(bad, 30)
    assert not broken.is_finite()
    actual = engine.advance(good, 4)
    assert actual.is_finite()
    assert engine.name == "graph"
    assert engine._agreed == 2  # after the 1st and the 2nd replay


def test_replay_check_accepts_converged_run():
    """Near the minimum d is what is left of terms that cancel: rounding, which a graph need not share."""
    problem = CountedProblem(
        Problem(
            lambda lam, omega, batch: plain(lam, omega, X),
            lambda lam, omega, batch: (X @ omega["w"] - 1).square().mean(),
        )
    )
    algorithm = fsla.algorithms.fsla(fsla.steps.constant(0.2, 0.3, 0.3, 0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = algorithm.init(problem, START, FULL)
        engine, _ = captured(algorithm, problem, lambda: FULL, torch.Generator())
        for _ in range(60):
            state = engine.advance(state, 50)
    assert float(state.direction["l"].norm()) < 1e-13
    assert engine.name == "graph"


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_replay_check_accepts_rounding_of_cancelling_terms(dtype, monkeypatch):
    """Of many such numbers: the rounding of a single one may be zero by chance, which depends on the processor."""
    a = normal(50, 3, 64, seed=4).to(dtype)
    start = State(0, Variable({"l": a[0]}), Variable({"w": a[1]}), {"l": torch.zeros(64, dtype=dtype)}, None)

    def step(state, left=lambda w: (a * w).sum((0, 1)), extra=0.0):
        w = state.omega.value["w"]
        return replace(state, direction={"l": left(w) - (a.sum(0) * w).sum(0) + extra})

    def otherwise(w):
        return (a.flip(0) * w).flip(1).sum(1).sum(0)

    expected, actual = step(start), step(start, otherwise)
    assert 0 < float((expected.direction["l"] - actual.direction["l"]).norm()) < 1e3 * torch.finfo(dtype).eps
    assert captures.difference(start, expected, actual, step) is None
    wrong = step(start, extra=1e-3 if dtype == torch.float32 else 1e-10)
    assert captures.difference(start, expected, wrong, step) == "direction"
    monkeypatch.setattr(captures, "AS_ROUNDING", 0.0)
    assert captures.difference(start, expected, actual, step) == "direction"


def test_capture_takes_batches_of_inner_steps():
    generator = torch.Generator().manual_seed(5)
    draw = drawing(generator)
    problem, algorithm = CountedProblem(Problem(plain, outer)), fsla.algorithms.bp(RATES, inner_steps=2)

    def sample():
        inner = (draw(), draw())
        return StepBatches.of(inner, (None,), inner, None, inner[:1])

    state = algorithm.init(problem, START, sample())
    engine, recorder = captured(algorithm, problem, sample, generator)
    state = engine.advance(state, 20)
    assert state.step_count == 20
    assert recorder.replays == 19
    assert engine.preparation_s > 0
