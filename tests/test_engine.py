"""Engines give the same numbers; what is unavailable is an error or a warning."""

from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import fsla
from fsla import Batch, CountedProblem, OracleCounts, Point, Problem, StepBatches, WeightedLossProblem
from fsla import _tree as tree
from fsla.steps import GradientDescent
from fsla.steps._updates import InPlace
from fsla.train import CaptureError, EngineWarning, make_engine
from fsla.train import _captured as captures
from fsla.train._captured import CudaGraph
from fsla.train._engine import Eager
from fsla_reproduction import algorithm_run
from fsla_reproduction.cleaning import RunSpec, execute
from fsla_reproduction.datasets import TaskSpec
from fsla_reproduction.methods import Bp, Cg, Fsla, NoCleaning, Ns
from recorder import captured
from support import F64, classifier, normal

TINY = RunSpec(
    TaskSpec("digits", n_train=60, n_valid=40), model="cnn-small", steps=24, every=12, batch=16,
    delta=10.0, c_tau=0.1, c_beta=0.01, c_eta=0.09,
)  # fmt: skip


def cleaning(dtype=F64, convolution=True, hvp_method="auto"):
    """A small cleaning problem in double precision: problem, point, source of batches, and what that draws from."""
    omega, scores, each = classifier(40, dtype, convolution=convolution)
    problem = WeightedLossProblem(
        each,
        lambda lam, index: lam["w"].sigmoid(),
        lambda lam, omega, index: each(scores(omega, index), index).mean(),
        row_index=lambda index: index,
        model_outputs=scores,
        outer_uses_lam=False,
        hvp_method=hvp_method,
    )
    generator = torch.Generator().manual_seed(3)

    def draw():
        return torch.randint(40, (8,), generator=generator)

    return problem, Point({"w": normal(40, seed=1).to(dtype)}, omega), draw, generator


def run(name, algorithm, problem, at, draw, generator, steps):
    """The state after some steps of an engine, its counts, and the engine; a recorder plays the device's part."""
    generator.manual_seed(3)
    counted = CountedProblem(problem, size=len)
    state = algorithm.init(counted, at, draw())
    if name == "eager":
        engine = Eager(algorithm, counted, draw)
    else:
        engine, _ = captured(algorithm, counted, draw, generator)
    state = engine.advance(state, 2)
    state = engine.advance(state, steps - state.step_count)
    return state, (counted.calls, counted.samples), engine


ALGORITHMS = {
    "fsla": fsla.algorithms.fsla,
    "gauss-newton": fsla.algorithms.fsla,
    "none": partial(fsla.algorithms.fsla, momentum="none"),
    "bp": partial(fsla.algorithms.bp, inner_steps=3),
    "ns": partial(fsla.algorithms.ns, inner_steps=2, num_terms=3),
    "cg": partial(fsla.algorithms.cg, hvp_steps=3),
    "soba": fsla.algorithms.soba,
}


def curved(name, problem):
    return fsla.DampedProblem(fsla.GaussNewtonProblem(problem), 0.1) if name == "gauss-newton" else problem


def sampler(name, draw, mode="grouped"):
    def sample():
        batches = StepBatches.draw(mode, draw, draw)
        steps = {"bp": 3, "ns": 2}.get(name, 1)
        if steps > 1:
            more = tuple(Batch(draw()) for _ in range(steps - 1))
            batches = batches._replace(inner_grad=batches.inner_grad + more)
        return batches._replace(hvp=batches.inner_grad) if name == "bp" else batches

    return sample


def parts(state):
    return state.lam.value, state.omega.value, state.direction


@pytest.mark.filterwarnings("ignore::fsla.algorithms.SharedBatchWarning")
@pytest.mark.parametrize(
    ("name", "samples", "hvp_method"),
    list(product(ALGORITHMS, ("independent", "grouped", "shared"), ("forward_over_reverse", "reverse_over_reverse"))),
)
def test_replayed_run_equals_eager(name, samples, hvp_method):
    problem, at, draw, generator = cleaning(hvp_method=hvp_method)
    problem = curved(name, problem)
    algorithm = ALGORITHMS[name](fsla.steps.inverse_sqrt(delta=10.0, c_tau=0.02, c_beta=0.02, c_eta=0.05))
    source = sampler(name, draw, samples)
    (a, counts_a, _), (b, counts_b, engine) = (
        run(e, algorithm, problem, at, source, generator, 6) for e in ("eager", "graph")
    )
    assert engine.name == "graph"
    assert a.step_count == b.step_count == 6
    assert counts_a == counts_b
    for x, y in zip(parts(a), parts(b), strict=True):
        assert float(tree.norm(tree.sub(x, y))) < 1e-12 * max(1.0, float(tree.norm(x)))
    assert float((a.lam.value["w"] - at.lam["w"]).norm()) > 1e-6  # something moved


def test_replay_sees_changed_data():
    """What a loss holds, a captured step reads where it lies: written to in place, it counts."""
    scale = torch.tensor(1.0, dtype=F64)
    problem = Problem(
        lambda lam, omega, batch: ((omega["w"] - lam["l"]) * scale).square().sum(),
        lambda lam, omega, batch: omega["w"].square().sum(),
    )
    at, generator = Point({"l": normal(3)}, {"w": normal(3, seed=1)}), torch.Generator()
    algorithm, counted = fsla.algorithms.fsla(fsla.steps.constant(0.1, 0.1, 0.1)), CountedProblem(problem)
    state = algorithm.init(counted, at, StepBatches.shared(None, None))
    engine, _ = captured(algorithm, counted, lambda: StepBatches.shared(None, None), generator)
    state = engine.advance(state, 5)
    scale.fill_(2.0)
    after = engine.advance(state, 1)
    expected = algorithm.step(problem, state, StepBatches.shared(None, None))
    assert torch.allclose(after.omega.value["w"], expected.omega.value["w"], rtol=1e-14)
    assert engine.name == "graph"


def test_capture_repeats_for_state_of_other_shape():
    problem, at, draw, generator = cleaning(convolution=False)
    algorithm, source = fsla.algorithms.fsla(fsla.steps.constant(0.1, 0.1, 0.1)), sampler("fsla", draw)
    turned = Point(at.lam, dict(reversed(at.omega.items())))
    counted, states = CountedProblem(problem), []
    for name in ("eager", "graph"):
        generator.manual_seed(3)
        engine, recorder = Eager(algorithm, counted, source), None
        if name == "graph":
            engine, recorder = captured(algorithm, counted, source, generator)
        for start in (at, turned, at):
            states.append(engine.advance(algorithm.init(problem, start, source()), 5))
    for a, b in zip(states[:3], states[3:], strict=True):
        assert list(a.omega.value) == list(b.omega.value)
        assert float(tree.norm(tree.sub(a.omega.value, b.omega.value))) < 1e-13
    assert recorder.records == 3
    assert recorder.replays == 3 * 4


@pytest.mark.parametrize(
    ("dtype", "change", "good"),
    [
        (torch.float32, 5e-3, True),
        (torch.float32, 1e-1, False),
        (F64, 1e-6, True),
        (F64, 5e-3, False),
        (F64, float("nan"), False),
    ],
)
@pytest.mark.parametrize("part", ["lam", "omega", "adjoint", "direction"])
def test_agreement_accepts_rounding_only(part, dtype, change, good):
    problem, at, draw, _ = cleaning(dtype, convolution=False)
    algorithm = fsla.algorithms.fsla(fsla.steps.constant(50.0, 0.1, 0.1, 0.5))
    batches = sampler("fsla", draw)()
    state = algorithm.step(problem, algorithm.init(problem, at, batches), batches)
    after = algorithm.step(problem, state, batches)

    def more(x, y):
        return tree.axpy(change, tree.sub(x, y), x)

    x, y = getattr(after, part), getattr(state, part)
    changed = more(x, y) if part == "direction" else x._replace(value=more(x.value, y.value))
    otherwise = replace(after, **{part: changed})
    difference = captures.difference(state, after, otherwise, lambda s: algorithm.step(problem, s, batches))
    assert difference == (None if good else part)


@pytest.mark.parametrize(
    ("steps", "budget_s", "chosen"),
    [
        (10, None, "eager"),
        (1000, None, "graph"),
        (None, None, "graph"),
        (10**6, 5.0, "eager"),
        (10**6, 100.0, "graph"),
    ],
)
def test_auto_engine_depends_on_run_length(steps, budget_s, chosen):
    problem, at, draw, _ = cleaning()
    algorithm = fsla.algorithms.fsla(fsla.steps.constant(0.5, 0.1, 0.1))
    source, counted = sampler("fsla", draw), CountedProblem(problem)
    start = algorithm.init(counted, at, source())
    generator = SimpleNamespace(device=torch.device("cuda"))  # nothing is asked of a device before the first step
    engine = make_engine("auto", algorithm, counted, source, generator, start, steps, budget_s)
    assert engine.name == chosen
    assert isinstance(engine, Eager if chosen == "eager" else CudaGraph)
    assert make_engine("auto", algorithm, counted, source, torch.Generator(), start, steps).name == "eager"


def test_captured_engine_on_cpu_raises():
    problem, at, draw, generator = cleaning()
    algorithm, source = fsla.algorithms.soba(fsla.steps.constant(0.5, 0.1, 0.1)), sampler("soba", draw)
    state = algorithm.init(problem, at, source())
    with pytest.raises(CaptureError, match=r"'graph' is unavailable: .*CUDA graph.*is on cpu\. Use engine='auto'"):
        make_engine("graph", algorithm, problem, source, generator, state)


def test_capture_skips_in_place_updates():
    """A captured step is compared with the step itself from a copy of its start."""
    problem, _, draw, _ = cleaning()
    update, sizes = InPlace(GradientDescent()), fsla.steps.constant(0.5, 0.1, 0.1)
    algorithm = replace(fsla.algorithms.soba(sizes), inner_update=update, adjoint_update=update, outer_update=update)
    source, generator = sampler("soba", draw), SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(CaptureError, match=r"write into their variables\. Use engine='eager' or 'auto'"):
        make_engine("graph", algorithm, problem, source, generator, None)
    assert make_engine("auto", algorithm, problem, source, generator, None).name == "eager"


def test_captured_write_into_aliased_places_is_exact():
    """A step may return its input, at another place of the state."""
    a, b = torch.arange(3.0), torch.arange(3.0) + 10
    captures.write_tensors([a, b], [b, a])
    assert a.tolist() == [10, 11, 12]
    assert b.tolist() == [0, 1, 2]
    captures.write_tensors([a, b], [a, a.flip(0)])
    assert b.tolist() == [12, 11, 10]


def test_unknown_engine_raises():
    with pytest.raises(ValueError, match=r"engine must be one of.*Got 'grph'.*Did you mean 'graph'"):
        make_engine("grph", None, None, None, torch.Generator(), None)


@pytest.mark.parametrize("method", [Fsla(), Bp(3), Ns(1, 3), Cg(2, 3), NoCleaning()], ids=str)
def test_captured_records_equal_eager(method, monkeypatch):
    spec = replace(TINY, method=method)
    eager = execute(spec)
    monkeypatch.setattr(algorithm_run, "make_engine", lambda *args: captured(*args[1:5])[0])
    graph = execute(spec)
    assert [r["engine"] for r in (eager[0], eager[-1], graph[-1])] == [None, "eager", "graph"]
    for a, b in zip(eager, graph, strict=True):
        assert a["step"] == b["step"]
        assert a["oracles"] == b["oracles"]
        for key in ("valid_loss", "omega_norm", "weight_clean", "d_norm"):
            assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("method", [Fsla(), Bp(3), Ns(1, 3), Cg(1, 3), Cg(2, 3), NoCleaning()], ids=str)
def test_captured_run_equals_eager(method):
    spec = replace(TINY, method=method)
    torch.backends.cudnn.allow_tf32 = False
    eager, graph = (execute(spec, device="cuda", engine=e) for e in ("eager", "graph"))
    assert graph[-1]["engine"] == "graph"
    for a, b in zip(eager, graph, strict=True):
        assert a["step"] == b["step"]
        assert a["oracles"] == b["oracles"]
        for key in ("valid_loss", "omega_norm", "weight_clean", "d_norm"):
            assert b[key] == pytest.approx(a[key], rel=2e-3, abs=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fsla", "soba"])
def test_captured_run_with_automatic_steps_equals_eager(name):
    """What step sizes measure lies partly on the CPU, and is written between two replays."""
    generator = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(50, 3, device="cuda", dtype=F64, generator=generator)

    def inner(lam, omega, index):
        return (a[index] @ omega["x"] - lam["y"].sum()).square().mean() + 0.1 * omega["x"].square().sum()

    def draw():
        return StepBatches.shared(torch.randint(50, (8,), device="cuda", generator=generator), None)

    problem = Problem(inner, lambda lam, omega, index: (omega["x"] - 1).square().sum())
    at = Point({"y": torch.zeros(2, device="cuda", dtype=F64)}, {"x": torch.zeros(3, device="cuda", dtype=F64)})
    algorithm, states = fsla.algorithms.get_algorithm(name)(**({"momentum": "average"} if name == "fsla" else {})), []
    for choice in ("eager", "graph"):
        generator.manual_seed(1)
        counted = CountedProblem(problem)
        state = algorithm.init(counted, at, draw())
        captured_engine = make_engine(choice, algorithm, counted, draw, generator, state)
        states.append((captured_engine.advance(state, 80), counted.calls))
        assert captured_engine.name == choice
    (one, calls), (two, same) = states
    assert calls == same
    for x, y in zip(parts(one), parts(two), strict=True):
        assert float(tree.norm(x)) > 0
        assert float(tree.norm(tree.sub(x, y))) < 1e-6 * float(tree.norm(x))
    assert float(two.measured.curvature) == pytest.approx(float(one.measured.curvature), rel=1e-6)


def test_replay_counts_oracle_calls():
    total = OracleCounts(grad=3, hvp=1).plus(10, OracleCounts(grad=1, hvp=2, mixed_hvp=2))
    assert total == OracleCounts(grad=13, hvp=21, mixed_hvp=20)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", ["item", "loader"])
def test_uncapturable_step_falls_back_to_eager(bad):
    generator = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(50, 3, device="cuda", generator=generator)

    def inner(lam, omega, index):
        scale = omega["x"].sum().item() if bad == "item" else 1.0
        return (a[index] @ omega["x"] - lam["y"].sum()).square().mean() * (1.0 + 0.0 * scale)

    def draw():
        return StepBatches.shared(torch.randint(50, (8,), device="cuda", generator=generator), None)

    problem = Problem(inner, lambda lam, omega, index: (omega["x"] - 1).square().sum())
    at = Point({"y": torch.zeros(2, device="cuda")}, {"x": torch.zeros(3, device="cuda")})
    stored = iter([draw() for _ in range(20)])
    algorithm = fsla.algorithms.fsla(fsla.steps.constant(0.01, 0.01, 0.01))
    source = draw if bad == "item" else lambda: next(stored)
    state = algorithm.init(problem, at, draw())
    fallback = make_engine("auto", algorithm, problem, source, generator, state)
    with pytest.warns(EngineWarning, match="is unavailable"):
        state = fallback.advance(state, 5)
    assert fallback.name == "eager"
    assert fallback.advance(state, 5).is_finite()
    torch.randn(2, device="cuda")  # and the generators still serve
