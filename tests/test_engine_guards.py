"""Captured engines give the numbers of the eager one, or say since when they may not have."""

import warnings

import numpy as np
import pytest
import torch

import fsla
from fsla import Batches, Counted, Point, Problem, Sample
from fsla.steps import Rates
from fsla.train import EngineWarning, make_engine
from fsla.train import _agreement as agreement
from fsla.train import _replay as replay
from fsla.train._program import CaptureError
from support import F64, normal

X = normal(40, 3)
START = Point({"l": normal(1)}, {"w": normal(3, seed=1)})
RATES = fsla.steps.Schedule(0.05, 0.1, 0.1, 0.5, power=0.3)
FULL = Sample.full(None, None)


def plain(lam, omega, rows):
    return (rows @ omega["w"] - lam["l"]).square().mean() + 0.1 * omega["w"].square().sum()


def outer(lam, omega, batch):
    return (omega["w"] - 1).square().sum()


def drawing(seed=5):
    generator = torch.Generator().manual_seed(seed)
    return lambda: X[torch.randint(40, (8,), generator=generator)]


def run(name, make, calls=(40,), rates=RATES, change=lambda i, state: None):
    """The state, the warnings, the counts and the engine after some calls of `advance`; `make` gives loss and draw."""
    inner, draw = make()
    problem = Counted(Problem(inner, outer))
    algorithm = fsla.algorithms.fsla(rates)
    state = algorithm.init(problem, START, draw())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = make_engine(name, algorithm, problem, draw, torch.Generator(), state, 1000)
        for i, n in enumerate(calls):
            change(i, state)
            state = engine.advance(state, n)
    return state, [str(w.message) for w in said if w.category is EngineWarning], problem.calls, engine


def same(a, b, tolerance=1e-12):
    parts = [(a.at.lam, b.at.lam), (a.at.omega, b.at.omega), (a.memory, b.memory), (a.d, b.d)]
    return all(torch.allclose(x[k], y[k], rtol=tolerance, atol=tolerance) for x, y in parts for k in x)


def compare(make, engines=("auto", "graph"), **more):
    """Runs of an eager engine and others must end alike; returns the last warnings and engine."""
    expected, _, calls, _ = run("eager", make, **more)
    for name in engines:
        state, said, counted, engine = run(name, make, **more)
        assert state.k == expected.k
        assert same(state, expected), name
        assert counted == calls
    return said, engine


def test_a_batch_that_is_left_in_a_closure_counts():
    def make():
        held, draw = {}, drawing()

        def sample():
            held["rows"] = draw()
            return FULL

        return lambda lam, omega, batch: plain(lam, omega, held["rows"]), sample

    said, engine = compare(make)
    assert len(said) == 1
    assert "no longer gives the numbers" in said[0]
    assert "eagerly from step 1 on" in said[0]
    assert "are those of the step itself" in said[0]
    assert engine.name == "eager"


def test_a_buffer_that_is_refilled_in_place_is_no_trap():
    def make():
        buffer, draw = torch.zeros(8, 3, dtype=F64), drawing()

        def sample():
            buffer.copy_(draw())
            return Sample.full(buffer, None)

        return plain, sample

    said, engine = compare(make)
    assert said == []
    assert engine.name == "graph"


def test_a_buffer_that_is_refilled_in_place_and_held_by_the_loss_is_no_trap():
    def make():
        buffer, draw = torch.zeros(8, 3, dtype=F64), drawing()

        def sample():
            buffer.copy_(draw())
            return FULL

        return lambda lam, omega, batch: plain(lam, omega, buffer), sample

    assert compare(make)[0] == []


@pytest.mark.parametrize(
    "tau",
    [
        lambda k: 0.1 if k in {0, 1, 2, 7} else 0.02,
        lambda k: {0: 0.1, 9: 0.2}.get(k, 0.05),
        lambda k: 0.1 / float(np.interp(k, [0, 100], [1, 9])),
        lambda k: torch.linspace(0.1, 0.01, 60)[k],
        lambda k: 0.1 if isinstance(k, int) and k > 5 else 0.2,
    ],
)
def test_rates_may_be_any_function_of_a_whole_number(tau):
    said, engine = compare(lambda: (plain, _samples()), rates=lambda k: Rates(0.05, tau(k), 0.1, 0.5))
    assert said == []
    assert engine.name == "graph"


def _samples():
    draw = drawing()
    return lambda: Sample.full(draw(), None)


@pytest.mark.parametrize("what", ["replaced", "number"])
@pytest.mark.parametrize("calls", [(20, 20), (20, 16)])
def test_data_that_is_replaced_between_two_calls_counts(what, calls):
    def make():
        held.update(scale=1.0, rows=X)

        def inner(lam, omega, batch):
            return held["scale"] * plain(lam, omega, held["rows"])

        return inner, lambda: FULL

    def change(i, state):
        if i and what == "replaced":
            held["rows"] = X * 2
        elif i:
            held["scale"] = 3.0

    held = {}
    said, _ = compare(make, calls=calls, change=change)
    assert len(said) == 1
    assert "from step 20 on" in said[0]


def test_data_that_is_written_to_between_two_calls_counts():
    def make():
        rows.copy_(X)
        return lambda lam, omega, batch: plain(lam, omega, rows), lambda: FULL

    rows = X.clone()
    said, engine = compare(make, calls=(20, 3, 20), change=lambda i, state: rows.mul_(1.5) if i else None)
    assert said == []
    assert engine.name == "graph"


@pytest.mark.parametrize("n", [3, 20])
def test_a_state_that_is_changed_between_two_calls_counts(n):
    def change(i, state):
        if i == 1:
            state.at.omega["w"] = torch.ones(3, dtype=F64)
        elif i == 2:
            state.at.omega["w"].mul_(2.0)

    assert compare(lambda: (plain, _samples()), calls=(20, n, n), change=change)[0] == []


READERS = {
    "numpy": lambda w: w.detach().numpy().sum() > -0.7,
    "tolist": lambda w: sum(w.tolist()) > -0.7,
    "asarray": lambda w: np.asarray(w.detach()).sum() > -0.7,
    "dlpack": lambda w: np.from_dlpack(w.detach()).sum() > -0.7,
    "repr": lambda w: repr(w.detach().sum() > -0.7) == "tensor(True)",
    "item": lambda w: w.sum().item() > -0.7,
    "float": lambda w: float(w.detach().sum()) > -0.7,
    "if": lambda w: bool(w.sum() > -0.7),
    "index": lambda w: [False, True][(w.sum() > -0.7).long()],
    "nonzero": lambda w: len(torch.nonzero(w > -0.3)) > 1,
    "unique": lambda w: len(torch.unique(w > -0.3)) > 1,
    "mask": lambda w: len(w[w > -0.3]) > 1,
    "equal": lambda w: torch.equal(w > -0.3, torch.ones(3, dtype=torch.bool)),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_loss_that_reads_numbers_is_not_captured(reader):
    read, crossed = READERS[reader], set()

    def inner(lam, omega, batch):
        crossed.add(bool(read(omega["w"])))
        return plain(lam, omega, batch) * (2.0 if read(omega["w"]) else 1.0)

    start, samples = Point(START.lam, {"w": torch.full((3,), -0.5, dtype=F64)}), _samples()
    problem, algorithm = Problem(inner, outer), fsla.algorithms.fsla(fsla.steps.constant(0.01, 0.05, 0.1))
    state = expected = algorithm.init(problem, start, samples())
    draw = _samples()
    for _ in range(60):
        expected = algorithm.step(problem, expected, draw())
    assert crossed == {False, True}  # the numbers that are read do change
    engine = make_engine("auto", algorithm, problem, _samples(), torch.Generator(), state, 1000)
    with pytest.warns(EngineWarning, match=r"Engine 'graph' is unavailable: .*Using 'eager'\."):
        assert same(engine.advance(state, 60), expected)
    assert engine.name == "eager"
    engine = make_engine("graph", algorithm, problem, _samples(), torch.Generator(), state)
    with pytest.raises(CaptureError, match=r"cannot be captured"):
        engine.advance(state, 60)


@pytest.mark.parametrize(
    "read", [lambda t, i: t[i], lambda t, i: t[0].item() * t[i.item()], lambda t, i: t.tolist()[int(i)]]
)
def test_numbers_are_not_read_from_data_either(read):
    """A tensor that no argument reaches is a constant of the trace: what is read from it would be frozen."""
    table, place = torch.tensor([1.0, 3.0], dtype=F64), torch.tensor(0)

    def make():
        place.zero_()
        return lambda lam, omega, batch: read(table, place) * plain(lam, omega, batch), _samples()

    said, engine = compare(make, ("auto",), calls=(5, 5), change=lambda i, state: place.fill_(i))
    assert engine.name == "eager"
    assert "is unavailable" in said[0]


def test_a_step_that_draws_random_numbers_is_not_captured():
    def inner(lam, omega, batch):
        torch.manual_seed(1)
        return plain(lam, omega, torch.nn.functional.dropout(batch, 0.5))

    said, engine = compare(lambda: (inner, _samples()), ("auto",))
    assert engine.name == "eager"
    assert "draws random numbers" in said[0]


def test_an_algorithm_that_reads_k_in_its_move_is_not_captured():
    algorithm = fsla.algorithms.fsla(RATES)

    class Odd:
        rates, init, step = algorithm.rates, algorithm.init, algorithm.step

        def move(self, problem, state, xi, rate):
            return algorithm.move(problem, state, xi, rate._replace(tau=0.1 / (state.k + 2)))

    draw = _samples()
    problem = Problem(plain, outer)
    state = algorithm.init(problem, START, draw())
    engine = make_engine("graph", Odd(), problem, draw, torch.Generator(), state)
    with pytest.raises(CaptureError, match=r"must not read state\.k"):
        engine.advance(state, 2)


@pytest.mark.parametrize("change_at", [5, 40, 100])
def test_a_counter_in_the_draw_is_found_and_the_steps_in_doubt_are_named(change_at):
    def make():
        held = {"n": 0}
        draw = _samples()

        def sample():
            held["n"] += 1
            return draw()

        return lambda lam, omega, batch: plain(lam, omega, batch) * (1.0 if held["n"] <= change_at else 2.0), sample

    _, said, _, engine = run("graph", make, calls=(150,))
    assert engine.name == "eager"
    assert len(said) == 1
    since = int(said[0].split("since step ")[1].split()[0])
    assert since < change_at <= since + replay.OFTEN
    expected = run("eager", make, calls=(since,))[0]
    found = run("graph", make, calls=(since,))[0]
    assert same(found, expected)  # before that, nothing is in doubt


def test_steps_that_are_asked_for_one_by_one_are_compared_too():
    held = {}

    def make():
        held["scale"] = 1.0
        return lambda lam, omega, batch: plain(lam, omega, batch) * held["scale"], _samples()

    def change(i, state):
        if i == 30:
            held["scale"] = 2.0

    _, said, _, engine = run("graph", make, calls=(1,) * 80, change=change)
    assert engine.name == "eager"
    assert "since step 3 are in doubt" in said[0]


def test_a_slow_drift_in_single_precision_is_found():
    held = {}

    def make():
        held["scale"] = 1.0
        draw = drawing()

        def sample():
            held["scale"] *= 1.001
            return Sample.full(draw().float(), None)

        return lambda lam, omega, batch: plain(lam, omega, batch) * held["scale"], sample

    global START
    before, START = START, Point({"l": normal(1).float()}, {"w": normal(3, seed=1).float()})
    try:
        expected, *_ = run("eager", make)
        state, said, _, engine = run("graph", make)
    finally:
        START = before
    assert engine.name == "eager"
    assert len(said) == 1
    assert same(state, expected, 1e-5)


def test_ragged_batches_get_few_programs():
    def make():
        sizes, draw = iter(range(3, 80)), drawing()
        return plain, lambda: Sample.full(draw().repeat(3, 1)[: next(sizes)], None)

    said, engine = compare(make, ("graph",))
    assert len(engine.programs) == replay.FORMS
    assert said == ["More than 4 forms of batch were drawn. Further ones are stepped eagerly."]
    assert engine.name == "graph"


def test_numbers_in_a_batch_are_a_form_each():
    def make():
        draw, counter = drawing(), iter(range(1, 10**6))
        return lambda lam, omega, batch: plain(lam, omega, batch[0]) / batch[1], lambda: Sample.full(
            (draw(), next(counter)), None
        )

    said, engine = compare(make, ("graph",))
    assert len(engine.programs) == replay.FORMS
    assert len(said) == 1


def test_a_batch_of_something_else_is_stepped():
    def make():
        draw = drawing()
        return lambda lam, omega, batch: plain(lam, omega, next(iter(batch))), lambda: Sample.full(
            {0: draw()}.values(), None
        )

    said, engine = compare(make, ("auto",))
    assert engine.name == "eager"
    assert "tensors, numbers and strings" in said[0]


def test_a_replay_that_fails_is_stepped(monkeypatch):
    program_run = replay.Program.run

    def run_or_fail(self, state, rates, xi):
        calls.append(1)
        if len(calls) == 10:
            raise RuntimeError("no memory\nand a long story")
        return program_run(self, state, rates, xi)

    calls = []
    monkeypatch.setattr(replay.Program, "run", run_or_fail)
    said, engine = compare(lambda: (plain, _samples()), ("graph",))
    assert engine.name == "eager"
    assert engine.programs == []
    assert said[0].startswith("The captured step failed (no memory.)")


def test_what_is_not_finite_is_stepped_and_captured_once_it_is():
    def make():
        held, draw = {"n": 0}, drawing()

        def sample():
            held["n"] += 1
            return Sample.full((draw(), torch.tensor(float("nan") if 1 < held["n"] < 4 else 0.0, dtype=F64)), None)

        def inner(lam, omega, batch):
            return plain(lam, omega, batch[0]) + torch.nan_to_num(batch[1] * omega["w"].sum())

        return inner, sample

    inner, draw = make()
    problem, algorithm = Problem(inner, outer), fsla.algorithms.soba(RATES)
    bad = Point({"l": normal(1)}, {"w": normal(3) * 1e200})
    state = algorithm.init(problem, START, draw())._replace(at=bad)
    engine = make_engine("graph", algorithm, problem, draw, torch.Generator(), state)
    broken = engine.advance(state, 30)
    assert not broken.is_finite()
    found = engine.advance(algorithm.init(problem, START, draw()), 4)
    assert found.is_finite()
    assert engine.name == "graph"


def test_a_converged_run_is_not_taken_for_a_wrong_one():
    """Near the minimum d is what is left of terms that cancel: rounding, which a program need not share."""
    problem = Problem(
        lambda lam, omega, batch: plain(lam, omega, X), lambda lam, omega, batch: (X @ omega["w"] - 1).square().mean()
    )
    algorithm = fsla.algorithms.fsla(fsla.steps.constant(0.2, 0.3, 0.3, 0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = algorithm.init(problem, START, FULL)
        engine = make_engine("graph", algorithm, problem, lambda: FULL, torch.Generator(), state)
        for _ in range(60):
            state = engine.advance(state, 50)
    assert float(state.d["l"].norm()) < 1e-13
    assert engine.name == "graph"


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_what_is_left_of_terms_that_cancel_is_compared_with_rounding(dtype, monkeypatch):
    """Of many such numbers: the rounding of a single one may be zero by chance, which depends on the processor."""
    a = normal(50, 3, 64, seed=4).to(dtype)
    start = fsla.State(0, Point({"l": a[0]}, {"w": a[1]}), None, None, {"l": torch.zeros(64, dtype=dtype)})

    def step(state, left=lambda w: (a * w).sum((0, 1)), extra=0.0):
        w = state.at.omega["w"]
        return state._replace(d={"l": left(w) - (a.sum(0) * w).sum(0) + extra})

    def otherwise(w):
        return (a.flip(0) * w).flip(1).sum(1).sum(0)

    expected, found = step(start), step(start, otherwise)
    assert 0 < float((expected.d["l"] - found.d["l"]).norm()) < 1e3 * torch.finfo(dtype).eps
    assert agreement.difference(start, expected, found, agreement.SAME_KERNELS, step) is None
    wrong = step(start, extra=1e-3 if dtype == torch.float32 else 1e-10)
    assert agreement.difference(start, expected, wrong, agreement.SAME_KERNELS, step) == "d"
    monkeypatch.setattr(agreement, "AS_ROUNDING", 0.0)
    assert agreement.difference(start, expected, found, agreement.SAME_KERNELS, step) == "d"


@pytest.mark.parametrize("seed", [None, 3])
def test_what_a_sample_holds_beside_its_batches_is_no_form(seed):
    def make():
        draw, counter = drawing(), iter(range(10**6))

        def sample():
            rows = draw()
            return Sample(rows, None, rows, None, rows, None if seed is None else next(counter), "grouped")

        return plain, sample

    said, engine = compare(make, ("graph",))
    assert said == []
    assert len(engine.programs) == 1


def test_batches_of_several_inner_steps_are_one_form():
    draw = drawing()
    problem, algorithm = Counted(Problem(plain, outer)), fsla.algorithms.bp(RATES, T=2)

    def sample():
        inner = Batches([draw(), draw()])
        return Sample(inner, None, inner, None, inner[0])

    state = algorithm.init(problem, START, sample())
    engine = make_engine("graph", algorithm, problem, sample, torch.Generator(), state)
    state = engine.advance(state, 20)
    assert state.k == 20
    assert len(engine.programs) == 1
    assert engine.preparation_s > 0
