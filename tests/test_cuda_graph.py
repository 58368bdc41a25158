"""The guards of the CUDA graph engine, with a recorder that plays the device's part on a CPU."""

import warnings

import pytest
import torch

import fsla
from fsla import Counted, Point, Problem, Sample
from fsla.steps import Rates
from fsla.train import EngineWarning
from fsla.train import _cuda_graph as cuda_graph
from fsla.train._cuda_graph import CudaGraph
from fsla.train._engine import Eager
from fsla.train._program import CaptureError
from support import F64, normal

X = normal(40, 3)
START = Point({"l": normal(1)}, {"w": normal(3, seed=1)})


class Recorder:
    """Work is recorded without being done: its Python runs once, on tensors and a generator that are then set back.

    `freeze` returns what to call before a replay, to have things as they were when recorded; that returns its undoing.
    """

    def __init__(self, generator, problem, held, freeze):
        self._generator, self._problem, self._held, self._freeze = generator, problem, held, freeze
        self.replays = 0
        self.fails_at = None

    def warm_up(self, work):
        work()

    def record(self, work):
        random, parts = self._generator.get_state(), [t.clone() for t in self._held()]
        work()
        self._generator.set_state(random)
        for t, before in zip(self._held(), parts, strict=True):
            t.copy_(before)
        as_recorded = self._freeze()

        def replay():
            self.replays += 1
            if self.replays == self.fails_at:
                raise RuntimeError("the device has gone")
            undo = as_recorded()
            self._problem.counting(work)
            if undo is not None:
                undo()

        return replay


def make(
    *, lenient=True, inner=None, draw=None, rates=None, freeze=lambda: lambda: None, algorithm=fsla.algorithms.fsla
):
    generator = torch.Generator().manual_seed(3)

    def loss(lam, omega, rows):
        return (X[rows] @ omega["w"] - lam["l"]).square().mean() + 0.1 * omega["w"].square().sum()

    def sample():
        rows = torch.randint(40, (8,), generator=generator)
        return Sample.full(rows, None)

    problem = Counted(Problem(inner or loss, lambda lam, omega, batch: (omega["w"] - 1).square().sum()))
    algorithm = algorithm(rates or fsla.steps.Schedule(0.05, 0.1, 0.1, 0.5, power=0.5))
    draw = draw or sample
    engines = []
    recorder = Recorder(generator, problem, lambda: cuda_graph.tensors(engines[0]._held[1:]), freeze)
    engines.append(CudaGraph("graph", algorithm, problem, draw, generator, lenient=lenient, recorder=recorder))
    eager = Eager(algorithm, problem, draw)
    start = algorithm.init(problem, START, Sample.full(torch.arange(8), None))
    return engines[0], eager, start, generator, problem, recorder


def run(engine, start, generator, problem, calls, change=lambda i: None):
    generator.manual_seed(3)
    problem.calls = fsla.Counts()
    state = start
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i, n in enumerate(calls):
            change(i)
            state = engine.advance(state, n)
    return state, problem.calls, generator.get_state(), [str(w.message) for w in said if w.category is EngineWarning]


def agree(a, b):
    return all(
        torch.allclose(x[k], y[k], rtol=1e-12)
        for x, y in ((a.at.lam, b.at.lam), (a.at.omega, b.at.omega), (a.memory, b.memory), (a.d, b.d))
        for k in x
    )


@pytest.mark.parametrize("calls", [(1, 1, 10, 30), (300, 10), (2,)])
@pytest.mark.parametrize("rates", [None, lambda k: Rates(0.05, 0.1 if k in {1, 5, 6} else 0.03, 0.1, 0.5)])
def test_replays_are_the_steps(calls, rates):
    engine, eager, *rest, recorder = make(rates=rates)
    a, counts, random, _ = run(eager, *rest, calls)
    b, again, after, said = run(engine, *rest, calls)
    assert said == []
    assert engine.name == "graph"
    assert (a.k, counts) == (b.k, again)
    assert agree(a, b)
    assert torch.equal(random, after)
    assert recorder.replays == sum(calls) - 1  # the first step gives the state its lasting form
    assert engine.preparation_s > 0


def test_a_state_may_hold_what_was_there_before():
    """Unrolling keeps the ω before the step, which the step's own result is written over."""
    engine, eager, *rest, _ = make(algorithm=lambda rates: fsla.algorithms.bp(rates, T=1))
    a, *_ = run(eager, *rest, (30,))
    b, _, _, said = run(engine, *rest, (30,))
    assert said == []
    for (x, tau), (y, same) in zip(a.at.trail, b.at.trail, strict=True):
        assert torch.allclose(x["w"], y["w"], rtol=1e-12)
        assert float(tau) == pytest.approx(float(same))


@pytest.mark.parametrize("calls", [(20, 20), (20, 5, 5), (20, 3, 10, 20)])
def test_numbers_that_a_graph_has_frozen_are_found(calls, monkeypatch):
    monkeypatch.setattr(cuda_graph, "LONG", 16)
    held = {"scale": 1.0}

    def inner(lam, omega, rows):
        return held["scale"] * (X[rows] @ omega["w"] - lam["l"]).square().mean()

    def freeze():
        recorded = held["scale"]

        def before():
            now, held["scale"] = held["scale"], recorded
            return lambda: held.update(scale=now)

        return before

    def change(i):
        held["scale"] = 1.0 if i == 0 else 2.0

    engine, eager, *rest, _ = make(inner=inner, freeze=freeze)
    a, counts, random, _ = run(eager, *rest, calls, change)
    b, again, after, said = run(engine, *rest, calls, change)
    if max(calls[1:]) < cuda_graph.LONG:
        assert said == []  # not yet: it will be at the next comparison
        return
    assert engine.name == "eager"
    assert len(said) == 1
    assert "no longer gives the numbers" in said[0]
    assert counts == again
    if len(calls) == 2:
        assert "from step 20 on. The numbers since step 3 are in doubt" in said[0]
        assert agree(a, b)
        assert torch.equal(random, after)
    else:
        assert "since step" in said[0]


def test_a_batch_from_elsewhere_is_not_captured_and_not_lost():
    def draws():
        stored = iter(torch.arange(40).reshape(10, 4))
        return lambda: Sample.full(next(stored), None)

    draw = draws()
    engine, eager, *rest, _ = make(draw=lambda: draw())
    a, counts, *_ = run(eager, *rest, (8,))
    draw = draws()
    b, again, _, said = run(engine, *rest, (8,))
    assert agree(a, b)
    assert counts == again
    assert len(said) == 1
    assert "must come from the generator alone" in said[0]
    assert said[0].endswith("Using 'eager'.")
    draw = draws()
    engine, _, start, *_ = make(draw=lambda: draw(), lenient=False)
    with pytest.raises(CaptureError, match="from the generator alone"):
        engine.advance(start, 1)


def test_a_single_batch_from_elsewhere_is_not_lost():
    stored = iter([torch.arange(4)])
    engine, _, start, *_ = make(draw=lambda: Sample.full(next(stored), None))
    with pytest.warns(EngineWarning, match="unavailable: StopIteration"):
        assert engine.advance(start, 1).k == 1


def test_a_closure_that_a_loader_fills_is_found():
    held, loader = {"rows": torch.arange(4)}, iter(torch.arange(4000).reshape(1000, 4) % 40)
    recorded = []

    def draw():
        held["rows"] = recorded[0] if recorded else next(loader)
        return Sample.full(None, None)

    def inner(lam, omega, batch):
        return (X[held["rows"]] @ omega["w"] - lam["l"]).square().mean()

    def freeze():
        rows = held["rows"]

        def before():
            recorded.append(rows)
            return recorded.clear

        return before

    engine, _, *rest, _ = make(inner=inner, draw=draw, freeze=freeze)
    *_, said = run(engine, *rest, (20,))
    assert engine.name == "eager"
    assert "no longer gives the numbers" in said[0]


def test_a_replay_that_fails_is_taken_again(monkeypatch):
    monkeypatch.setattr(cuda_graph, "LONG", 16)
    engine, eager, *rest, recorder = make()
    recorder.fails_at = 15
    a, counts, random, _ = run(eager, *rest, (10, 20))
    b, again, after, said = run(engine, *rest, (10, 20))
    assert engine.name == "eager"
    assert said == [
        "The captured step failed (the device has gone.) Steps are taken eagerly from step 10 on. "
        "The numbers of all steps before are those of the step itself."
    ]
    assert agree(a, b)
    assert counts == again
    assert torch.equal(random, after)


def test_a_sample_with_a_seed_is_not_captured():
    rows = torch.arange(8)
    engine, _, start, *_ = make(draw=lambda: Sample(rows, None, rows, None, rows, seed=3))
    with pytest.warns(EngineWarning, match="A sample with a seed"):
        engine.advance(start, 2)
    assert engine.name == "eager"


def test_a_sample_with_a_seed_is_not_used_twice():
    class Seeded(Sample):
        seed = 3

    held = []

    def draw():
        rows = torch.randint(40, (8,), generator=held[0])
        return Seeded(rows, None, rows, None, rows)

    engine, eager, start, generator, problem, _ = make(draw=draw)
    held.append(generator)
    a, *_ = run(eager, start, generator, problem, (5,))
    b, *_ = run(engine, start, generator, problem, (5,))
    assert agree(a, b)


def test_an_algorithm_that_reads_k_is_not_captured():
    engine, _, start, *_ = make()
    algorithm = engine._algorithm

    class Odd:
        rates, init, step = algorithm.rates, algorithm.init, algorithm.step

        def move(self, problem, state, xi, rate):
            return algorithm.move(problem, state, xi, rate._replace(tau=0.1 / (state.k + 2)))

    engine._algorithm = Odd()
    with pytest.warns(EngineWarning, match=r"must not read state\.k"):
        engine.advance(start, 2)


def test_what_is_not_finite_stays_with_the_replays_and_is_compared_at_every_step():
    engine, _, *rest, _ = make(rates=fsla.steps.constant(1e200, 1e200, 1e200))
    state, _, _, said = run(engine, *rest, (30,))
    assert not state.is_finite()
    assert said == []
    assert engine._agreed == 0


def test_rates_are_sent_in_the_precision_of_the_state():
    engine, _, start, *_ = make()
    engine.advance(start, 2)
    assert engine._rates.dtype == F64
    assert engine._rates.shape == (4,)
