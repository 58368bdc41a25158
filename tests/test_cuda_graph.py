"""The guards of the CUDA graph engine, with a recorder that plays the device's part on a CPU."""

import warnings
from dataclasses import dataclass, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fsla
from fsla import CountedProblem, OracleCounts, Point, Problem, StepBatches
from fsla.algorithms import Alternating, Simultaneous, get_algorithm, list_algorithms
from fsla.steps import STORM, Automatic, Rates, Schedule, Scheduled
from fsla.train import _captured as cuda_graph
from fsla.train._captured import CaptureError, EngineWarning
from fsla.train._engine import Eager
from recorder import captured
from support import F64, normal

X = normal(40, 3)
START = Point({"l": normal(1)}, {"w": normal(3, seed=1)})
FALLING = Schedule(0.05, 0.1, 0.1, 0.5, power=0.5)


def algorithm_of(name):
    return get_algorithm(name)(FALLING, **({"max_adjoint_norm": 1e3} if name in ("fdehbo", "hjfbio") else {}))


@dataclass(frozen=True)
class Jumping(Scheduled):
    """Sizes that are no formula of k."""

    def rates(self, k, state=None):
        return Rates(0.05, 0.1 if k in {1, 5, 6} else 0.03, 0.1, 0.5)


def make(
    *,
    lenient=True,
    inner=None,
    draw=None,
    rates=FALLING,
    freeze=lambda: lambda: None,
    algorithm=fsla.algorithms.fsla,
):
    generator = torch.Generator().manual_seed(3)

    def loss(lam, omega, rows):
        return (X[rows] @ omega["w"] - lam["l"]).square().mean() + 0.1 * omega["w"].square().sum()

    def sample():
        rows = torch.randint(40, (8,), generator=generator)
        return StepBatches.shared(rows, None)

    problem = CountedProblem(Problem(inner or loss, lambda lam, omega, batch: (omega["w"] - 1).square().sum()))
    algorithm = algorithm(rates)
    draw = draw or sample
    engine, recorder = captured(algorithm, problem, draw, generator, lenient=lenient, freeze=freeze)
    eager = Eager(algorithm, problem, draw)
    start = algorithm.init(problem, START, StepBatches.shared(torch.arange(8), None))
    return engine, eager, start, generator, problem, recorder


def run(engine, start, generator, problem, calls, change=lambda i: None):
    generator.manual_seed(3)
    problem.calls = OracleCounts()
    state = start
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i, n in enumerate(calls):
            change(i)
            state = engine.advance(state, n)
    return state, problem.calls, generator.get_state(), [str(w.message) for w in caught if w.category is EngineWarning]


def agree(a, b, rtol=1e-12):
    return all(
        torch.allclose(x[k], y[k], rtol=rtol)
        for x, y in (
            (a.lam.value, b.lam.value),
            (a.omega.value, b.omega.value),
            (a.v, b.v),
            (a.direction, b.direction),
        )
        for k in x
    )


@pytest.mark.parametrize("calls", [(1, 1, 10, 30), (300, 10), (2,)])
@pytest.mark.parametrize("rates", [FALLING, Jumping()], ids=["falling", "jumping"])
def test_replay_equals_step(calls, rates):
    engine, eager, *rest, recorder = make(rates=rates)
    a, counts, random, _ = run(eager, *rest, calls)
    b, again, after, messages = run(engine, *rest, calls)
    assert messages == []
    assert engine.name == "graph"
    assert (a.step_count, counts) == (b.step_count, again)
    assert agree(a, b)
    assert torch.equal(random, after)
    assert recorder.replays == sum(calls) - 1  # the first step gives the state its lasting form
    assert engine.preparation_s > 0


@pytest.mark.parametrize("calls", [(60,), (7, 1, 1, 40)])
@pytest.mark.parametrize("algorithm", [fsla.algorithms.fsla, fsla.algorithms.soba], ids=["fsla", "soba"])
def test_replay_with_automatic_steps_equals_step(algorithm, calls):
    """The sizes follow from the state inside the captured step; they are measured between two replays, on its batch."""
    engine, eager, *rest, recorder = make(rates=Automatic(block=5), algorithm=algorithm)
    a, counts, random, _ = run(eager, *rest, calls)
    b, again, after, messages = run(engine, *rest, calls)
    assert messages == []
    assert counts == again
    assert counts.hvp > sum(calls)  # products were measured beside those of the steps
    assert agree(a, b)
    assert torch.equal(random, after)
    assert recorder.replays == sum(calls) - 1
    assert float(b.measured.unsolved) < 1  # several blocks are complete
    for name, value in vars(a.measured).items():
        for x, y in zip(*map(cuda_graph.tensors_of, (value, getattr(b.measured, name))), strict=True):
            assert torch.allclose(x, y, rtol=1e-10), name


def test_replay_check_compares_measured_step_sizes():
    engine, _, *rest, _ = make(rates=Automatic())
    state, *_ = run(engine, *rest, (8,))
    wrong = replace(state, measured=replace(state.measured, damping=state.measured.damping + 1))
    assert cuda_graph.difference(state, state, wrong, lambda state: state) == "damping"
    assert cuda_graph.difference(state, state, state, lambda state: state) is None


@pytest.mark.parametrize("name", [name for name in list_algorithms() if algorithm_of(name).capturable])
def test_captured_move_has_no_host_sync(name):
    """What a move reads from a tensor would stay as it is for ever, and a GPU would have to wait for it."""

    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert torch.Tag.data_dependent_output not in func.tags, func
            assert torch.Tag.nondeterministic_seeded not in func.tags, func
            return func(*args, **(kwargs or {}))

    algorithm = algorithm_of(name)
    positive = Point({"l": START.lam["l"].abs()}, START.omega)
    problem = make()[-2].problem
    batches = StepBatches.shared(torch.arange(8), None)
    state = algorithm.step(problem, algorithm.init(problem, positive, batches), batches)
    rates = Rates(*torch.tensor([0.05, 0.1, 0.1, 0.5], dtype=F64).unbind())
    step = algorithm.context(problem, cuda_graph.FORBIDDEN_STEP, None, batches, rates=rates)
    with Refusing():
        after = algorithm.move(replace(state, step_count=cuda_graph.FORBIDDEN_STEP), step)
    assert replace(after, step_count=2).is_finite()


def test_capture_state_may_hold_previous_state():
    """Unrolling keeps the ω before the step, which the step's own result is written over."""
    engine, eager, *rest, _ = make(algorithm=lambda rates: fsla.algorithms.bp(rates, inner_steps=1))
    a, *_ = run(eager, *rest, (30,))
    b, _, _, messages = run(engine, *rest, (30,))
    assert messages == []
    for (x, lr), (y, same) in zip(a.trajectory, b.trajectory, strict=True):
        assert torch.allclose(x["w"], y["w"], rtol=1e-12)
        assert float(lr) == pytest.approx(float(same))


def test_capture_state_may_hold_previous_point():
    """STORM on all three variables asks at the point that the step began from."""
    storm = STORM()
    engine, eager, *rest, _ = make(
        algorithm=lambda rates: Simultaneous(
            step_sizes=rates, inner_momentum=storm, adjoint_momentum=storm, outer_momentum=storm
        )
    )
    a, counts, *_ = run(eager, *rest, (30,))
    b, again, _, messages = run(engine, *rest, (30,))
    assert messages == []
    assert counts == again
    assert agree(a, b)
    assert torch.allclose(a.before.at.omega["w"], b.before.at.omega["w"], rtol=1e-12)


@pytest.mark.parametrize("calls", [(20, 20), (25, 5, 5), (25, 3, 10, 20)])
def test_replay_check_detects_frozen_numbers(calls, monkeypatch):
    monkeypatch.setattr(cuda_graph, "LONG", 16)
    frozen = {"scale": 1.0}

    def inner(lam, omega, rows):
        return frozen["scale"] * (X[rows] @ omega["w"] - lam["l"]).square().mean()

    def freeze():
        recorded = frozen["scale"]

        def before():
            now, frozen["scale"] = frozen["scale"], recorded
            return lambda: frozen.update(scale=now)

        return before

    def change(i):
        frozen["scale"] = 1.0 if i == 0 else 2.0

    engine, eager, *rest, _ = make(inner=inner, freeze=freeze)
    a, counts, random, _ = run(eager, *rest, calls, change)
    b, again, after, messages = run(engine, *rest, calls, change)
    if max(calls[1:]) < cuda_graph.LONG:
        assert messages == []  # not yet: the 86th replay will be compared
        return
    assert engine.name == "eager"
    assert len(messages) == 1
    assert "no longer gives the numbers" in messages[0]
    assert counts == again
    if len(calls) == 2:
        assert "from step 20 on. The numbers since step 7 are in doubt" in messages[0]
        assert agree(a, b)
        assert torch.equal(random, after)
    else:
        assert "since step" in messages[0]


def test_capture_skips_batch_from_other_memory():
    def draws():
        stored = iter(torch.arange(40).reshape(10, 4))
        return lambda: StepBatches.shared(next(stored), None)

    draw = draws()
    engine, eager, *rest, _ = make(draw=lambda: draw())
    a, counts, *_ = run(eager, *rest, (8,))
    draw = draws()
    b, again, _, messages = run(engine, *rest, (8,))
    assert agree(a, b)
    assert counts == again
    assert len(messages) == 1
    assert "must come from the generator alone" in messages[0]
    assert messages[0].endswith("Using 'eager'.")
    draw = draws()
    engine, _, start, *_ = make(draw=lambda: draw(), lenient=False)
    with pytest.raises(CaptureError, match="from the generator alone"):
        engine.advance(start, 1)


def test_replay_reads_refilled_buffer():
    """Two batches are drawn to see whether they repeat, and may lie in one place."""

    def draws():
        buffer, stored = torch.zeros(4, dtype=torch.long), iter(torch.arange(40).reshape(10, 4))

        def draw():
            buffer.copy_(next(stored))
            return StepBatches.shared(buffer, None)

        return draw

    draw = draws()
    engine, eager, *rest, _ = make(draw=lambda: draw())
    a, *_ = run(eager, *rest, (8,))
    draw = draws()
    b, *_ = run(engine, *rest, (8,))
    assert agree(a, b)


def test_replay_reads_single_batch_from_other_memory():
    stored = iter([torch.arange(4)])
    engine, _, start, *_ = make(draw=lambda: StepBatches.shared(next(stored), None))
    with pytest.warns(EngineWarning, match="unavailable: StopIteration"):
        assert engine.advance(start, 1).step_count == 1


def test_replay_check_detects_refilled_closure():
    closure, loader = {"rows": torch.arange(4)}, iter(torch.arange(4000).reshape(1000, 4) % 40)
    recorded = []

    def draw():
        closure["rows"] = recorded[0] if recorded else next(loader)
        return StepBatches.shared(None, None)

    def inner(lam, omega, batch):
        return (X[closure["rows"]] @ omega["w"] - lam["l"]).square().mean()

    def freeze():
        rows = closure["rows"]

        def before():
            recorded.append(rows)
            return recorded.clear

        return before

    engine, _, *rest, _ = make(inner=inner, draw=draw, freeze=freeze)
    *_, messages = run(engine, *rest, (20,))
    assert engine.name == "eager"
    assert "no longer gives the numbers" in messages[0]


@pytest.mark.parametrize("rates", [FALLING, Automatic()], ids=["scheduled", "automatic"])
def test_replay_failure_repeats_step(monkeypatch, rates):
    """Its steps are counted once, and so are the products that step sizes measured between the replays."""
    monkeypatch.setattr(cuda_graph, "LONG", 16)
    engine, eager, *rest, recorder = make(rates=rates)
    recorder.fails_at = 25
    a, counts, random, _ = run(eager, *rest, (10, 20))
    b, again, after, messages = run(engine, *rest, (10, 20))
    assert engine.name == "eager"
    assert messages == [
        "The captured step failed (the device has gone.) Steps are taken eagerly from step 10 on. "
        "The numbers of all steps before are those of the step itself."
    ]
    assert agree(a, b)
    assert counts == again
    assert torch.equal(random, after)


def test_capture_skips_seeded_batches():
    rows = torch.arange(8)
    engine, _, start, *_ = make(draw=lambda: StepBatches.shared(rows, None, seed=3))
    with pytest.warns(EngineWarning, match="Batches with a seed"):
        engine.advance(start, 2)
    assert engine.name == "eager"


def test_seeded_batches_are_used_once():
    batches_drawn = []

    def draw():
        rows = torch.randint(40, (8,), generator=batches_drawn[0])
        return StepBatches.shared(rows, None, seed=3)

    engine, eager, start, generator, problem, _ = make(draw=draw)
    batches_drawn.append(generator)
    a, *_ = run(eager, start, generator, problem, (5,))
    b, *_ = run(engine, start, generator, problem, (5,))
    assert agree(a, b)


@pytest.mark.parametrize("part", ["state", "step"])
def test_capture_skips_algorithm_that_reads_step_count(part):
    class Odd(Alternating):
        def move(self, state, step):
            k = state.step_count if part == "state" else step.step_count
            step.rates = step.rates._replace(inner_lr=0.1 / (k + 2))
            return super().move(state, step)

    engine, _, start, *_ = make(algorithm=lambda rates: Odd(step_sizes=rates))
    with pytest.warns(EngineWarning, match=r"must not read the step count"):
        engine.advance(start, 2)


def test_replay_of_nonfinite_state_is_compared_every_step():
    engine, _, *rest, _ = make(rates=fsla.steps.constant(1e200, 1e200, 1e200))
    state, _, _, messages = run(engine, *rest, (30,))
    assert not state.is_finite()
    assert messages == []
    assert engine._agreed == 0


def test_replay_sends_rates_in_state_dtype():
    engine, _, start, *_ = make()
    engine.advance(start, 2)
    assert engine._rates.dtype == F64
    assert engine._rates.shape == (4,)


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
@pytest.mark.parametrize("rates", [FALLING, Automatic()], ids=["scheduled", "automatic"])
def test_captured_run_stopped_at_once_resumes_exactly(stop, rates):
    """An engine reads batches before it uses them; none may be lost."""
    engine, eager, *rest, _ = make(rates=rates)
    whole, _, random, _ = run(engine, *rest, (6,))
    expected, *_ = run(eager, *rest, (6,))
    stopped, _, start, generator, *_ = make(rates=rates)
    state = stopped.advance(start, stop)
    resumed, _, _, other, *_ = make(rates=rates)
    other.set_state(generator.get_state())
    actual = resumed.advance(state, 6 - stop)
    assert agree(actual, whole)
    assert agree(actual, expected)
    assert torch.equal(other.get_state(), random)
