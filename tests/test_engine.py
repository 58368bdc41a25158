"""Engines give the same numbers; what cannot be had is said."""

import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import fsla
from fsla import Batches, Counted, Point, Problem, Sample, WeightedProblem, tree
from fsla.data import TaskSpec
from fsla.experiments.cleaning import RunSpec, execute
from fsla.experiments.methods import Bp, Cg, Fsla, NoCleaning, Ns
from fsla.nest import copy_into, form, map_tensors, rebuild, tensors
from fsla.training import engine as engines
from fsla.training.engine import Eager, EngineWarning, Replay, make_engine
from fsla.training.program import CaptureError, Program, with_tensor_k
from support import F64, classifier, normal

TINY = RunSpec(
    TaskSpec("digits", n_train=60, n_valid=40), model="cnn-small", steps=24, every=12, batch=16,
    delta=10.0, c_tau=0.1, c_beta=0.01, c_eta=0.09,
)  # fmt: skip
HAS_COMPILER = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")


def cleaning(dtype=F64, convolution=True):
    """A small cleaning problem in double precision: its problem, a point, and sources of batches."""
    omega, scores, each = classifier(40, dtype, convolution=convolution)
    problem = WeightedProblem(
        each,
        lambda lam, index: lam["w"].sigmoid(),
        lambda lam, omega, index: each(scores(omega, index), index).mean(),
        rows=lambda index: index,
        outputs=scores,
        direct=False,
    )
    generator = torch.Generator().manual_seed(3)

    def draw():
        return torch.randint(40, (8,), generator=generator)

    return problem, Point({"w": normal(40, seed=1).to(dtype)}, omega), draw, generator


def run(name, algorithm, problem, at, draw, generator, steps):
    """The state after some steps of an engine, its counts, and the engine."""
    generator.manual_seed(3)
    counted = Counted(problem, size=lambda batch: sum(map(len, batch)) if isinstance(batch, Batches) else len(batch))
    state = algorithm.init(counted, at, draw())
    engine, state = make_engine(name, algorithm, counted, draw, generator, state)
    state = engine.advance(state, 2)
    state = engine.advance(state, steps - state.k)
    return state, (counted.calls, counted.samples), engine


ALGORITHMS = {
    "fsla": fsla.algorithms.fsla,
    "gauss-newton": lambda rates: fsla.algorithms.fsla(rates, curvature="gauss-newton", damping=0.1),
    "none": lambda rates: fsla.algorithms.fsla(rates, momentum="none"),
    "bp": lambda rates: fsla.algorithms.bp(rates, T=3),
    "ns": lambda rates: fsla.algorithms.ns(rates, T=2, K=3),
    "cg": lambda rates: fsla.algorithms.cg(rates, K=3),
    "soba": fsla.algorithms.soba,
}


def sampler(name, draw, mode="grouped"):
    def sample():
        xi = Sample.draw(mode, draw, draw)
        steps = {"bp": 3, "ns": 2}.get(name, 1)
        if steps > 1:
            xi = xi._replace(inner=Batches([xi.inner, *(draw() for _ in range(steps - 1))]))
        return xi._replace(hvp=xi.inner) if name == "bp" else xi

    return sample


@pytest.mark.parametrize("mode", ["forward", "reverse"])
@pytest.mark.parametrize("samples", ["independent", "grouped", "shared"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_replayed_run_is_the_eager_run(name, samples, mode):
    problem, at, draw, generator = cleaning()
    problem.mode = mode
    algorithm = ALGORITHMS[name](fsla.rates.paper(delta=10.0, c_tau=0.02, c_beta=0.02, c_eta=0.05))
    source = sampler(name, draw, samples)
    (a, counts_a, _), (b, counts_b, engine) = (
        run(e, algorithm, problem, at, source, generator, 6) for e in ("eager", "graph")
    )
    assert isinstance(engine, Replay)
    assert a.k == b.k == 6
    assert counts_a == counts_b
    for x, y in ((a.at.lam, b.at.lam), (a.at.omega, b.at.omega), (a.d, b.d)):
        assert float(tree.norm(tree.sub(x, y))) < 1e-12 * max(1.0, float(tree.norm(x)))
    assert float((a.at.lam["w"] - at.lam["w"]).norm()) > 1e-6  # something moved


@needs_compiler
@pytest.mark.parametrize("name", ["fsla", "gauss-newton", "cg"])
def test_a_compiled_run_is_the_eager_run(name):
    problem, at, draw, generator = cleaning()
    algorithm = ALGORITHMS[name](fsla.rates.paper(delta=10.0, c_tau=0.02, c_beta=0.02, c_eta=0.05))
    source = sampler(name, draw)
    (a, counts_a, _), (b, counts_b, _) = (
        run(e, algorithm, problem, at, source, generator, 6) for e in ("eager", "compile")
    )
    assert counts_a == counts_b
    for x, y in ((a.at.lam, b.at.lam), (a.at.omega, b.at.omega), (a.d, b.d)):
        assert float(tree.norm(tree.sub(x, y))) < 1e-11 * max(1.0, float(tree.norm(x)))


def test_zeros_that_forward_mode_convolves_are_left_out():
    problem, at, draw, generator = cleaning()
    _, _, engine = run(
        "graph",
        fsla.algorithms.fsla(fsla.rates.constant(0.1, 0.1, 0.1)),
        problem,
        at,
        sampler("fsla", draw),
        generator,
        3,
    )
    ((program, *_),) = engine._programs.values()
    convolutions = [n for n in program._run.__self__.graph.nodes if n.target is torch.ops.aten.convolution.default]
    # one layer: the gradient's pass and the HVP's in reverse, the outer pass, and two passes with a tangent each
    images = [n.args[0] for n in convolutions]
    assert all("zeros" not in str(n.target) and "expand" not in str(n.target) for n in images)


def test_a_batch_of_another_shape_gets_its_own_program():
    problem, at, _, generator = cleaning()
    sizes = iter([8, 8, 8, 8, 5, 8, 5, 8, 8] * 8)

    def draw():
        return torch.randint(40, (next(sizes),), generator=generator)

    algorithm = fsla.algorithms.fsla(fsla.rates.constant(0.5, 0.1, 0.1, 0.5), momentum="none")
    results = []
    for name in ("eager", "graph"):
        sizes = iter([8, *[8, 8, 8, 8, 5, 8, 5, 8, 8] * 8])
        results.append(run(name, algorithm, problem, at, lambda: Sample.full(b := draw(), b), generator, 6))
    (a, *_), (b, _, engine) = results
    assert len(engine._programs) == 2
    assert float(tree.norm(tree.sub(a.at.omega, b.at.omega))) < 1e-13


def test_a_form_of_batch_that_cannot_be_captured_is_stepped(monkeypatch):
    monkeypatch.setitem(engines.PAYS, "cpu", {"graph": (0, 0.0)})
    generator, data = torch.Generator(), normal(40, 3)
    results = []

    def inner(lam, omega, index):
        gap = data[index] @ omega["w"] - lam["l"]
        return gap.square().mean() * (1.0 if len(index) == 8 else 2.0 + 0.0 * gap[0].item())

    problem = Problem(inner, lambda lam, omega, index: omega["w"].square().sum())
    at = Point({"l": normal(1)}, {"w": normal(3, seed=1)})
    algorithm = fsla.algorithms.fsla(fsla.rates.constant(0.1, 0.1, 0.1, 0.5))
    for name in ("eager", "auto"):
        sizes = iter([8] * 6 + [5, 8, 5, 5, 8])

        def draw(sizes=sizes):
            index = torch.randint(40, (next(sizes),), generator=generator)
            return Sample.full(index, index)

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            results.append(run(name, algorithm, problem, at, draw, generator, 10))
    (a, counts, _), (b, again, engine) = results
    assert isinstance(engine, Replay)
    assert [str(w.message).startswith("The engine 'graph' cannot be had for a batch") for w in said] == [True]
    assert counts == again
    assert float(tree.norm(tree.sub(a.at.omega, b.at.omega))) < 1e-13


def test_programs_see_changed_data_but_hold_no_copy():
    """What a loss holds is an argument of the program: written to in place, it counts."""
    scale = torch.tensor(1.0, dtype=F64)
    problem = Problem(
        lambda lam, omega, batch: ((omega["w"] - lam["l"]) * scale).square().sum(),
        lambda lam, omega, batch: omega["w"].square().sum(),
    )
    at, generator = Point({"l": normal(3)}, {"w": normal(3, seed=1)}), torch.Generator()
    algorithm, counted = fsla.algorithms.fsla(fsla.rates.constant(0.1, 0.1, 0.1)), Counted(problem)
    engine, state = make_engine(
        "graph", algorithm, counted, lambda: Sample.full(None, None), generator,
        algorithm.init(counted, at, Sample.full(None, None)),
    )  # fmt: skip
    scale.fill_(2.0)
    after, expected = engine.advance(state, 1), algorithm.step(problem, state, Sample.full(None, None))
    assert torch.allclose(after.at.omega["w"], expected.at.omega["w"], rtol=1e-14)


def test_a_loss_that_asks_for_numbers_falls_back_and_says_why():
    def inner(lam, omega, batch):
        factor = 2.0 if bool(omega["w"].sum() > 0) else 1.0
        return factor * (omega["w"] - lam["l"]).square().sum()

    problem = Problem(inner, lambda lam, omega, batch: omega["w"].square().sum())
    at, generator = Point({"l": normal(3)}, {"w": normal(3, seed=1)}), torch.Generator()
    algorithm, full = fsla.algorithms.fsla(fsla.rates.constant(0.1, 0.1, 0.1)), Sample.full(None, None)
    counted = Counted(problem)
    start = algorithm.init(counted, at, full)
    with pytest.warns(EngineWarning, match="engine 'graph' cannot be had: .+"):
        engine, state = make_engine("auto", algorithm, counted, lambda: full, generator, start, 1000)
    assert isinstance(engine, Eager)
    assert engine.advance(state, 4).k == 5
    with pytest.raises(RuntimeError, match=r"cannot be captured.*without \.item\(\)"):
        make_engine("graph", algorithm, counted, lambda: full, generator, start)


def by_numpy(k):
    number = k.tolist() if isinstance(k, torch.Tensor) else k
    return fsla.rates.Rates(0.1, 0.1 / float(np.interp(number, [0, 100], [1, 9])), 0.1, 0.5)


@pytest.mark.parametrize(
    "rates",
    [by_numpy, lambda k: fsla.rates.Rates(0.1, 0.1 if isinstance(k, int) and k > 5 else 0.2, 0.1, 0.5)],
)
def test_rates_that_a_program_would_freeze_are_found(rates):
    problem, at, draw, generator = cleaning(convolution=False)
    algorithm, source = fsla.algorithms.fsla(rates), sampler("fsla", draw)
    with pytest.raises(RuntimeError, match="captured"):
        make_engine("graph", algorithm, problem, source, generator, algorithm.init(problem, at, source()))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_slowly_falling_rates_that_a_program_would_freeze_are_found(dtype):
    problem, at, draw, generator = cleaning(dtype, convolution=False)

    def rates(k):
        tau = 0.1 / np.interp(np.asarray(k.tolist() if isinstance(k, torch.Tensor) else k), [0, 2000], [1, 9])
        return fsla.rates.Rates(0.1, float(tau), 0.1, 0.5)

    algorithm, source = fsla.algorithms.fsla(rates), sampler("fsla", draw)
    with pytest.raises(CaptureError, match="does not give the numbers"):
        make_engine("graph", algorithm, problem, source, generator, algorithm.init(problem, at, source()))


def test_rates_that_end_are_checked_as_far_as_they_go():
    problem, at, draw, generator = cleaning(convolution=False)
    table = torch.linspace(0.1, 0.01, 40, dtype=F64)

    def rates(k):
        return fsla.rates.Rates(0.1, table.index_select(0, torch.as_tensor(k).long().reshape(1))[0], 0.1, 0.5)

    algorithm, source = fsla.algorithms.fsla(rates), sampler("fsla", draw)
    start = algorithm.init(problem, at, source())
    engine, state = make_engine("graph", algorithm, problem, source, generator, start)
    assert engine.advance(state, 10).is_finite()


def test_a_later_form_of_batch_is_checked_too():
    x, sizes = normal(40, 3), iter([8] * 8 + [5] * 4)
    generator = torch.Generator().manual_seed(0)

    def inner(lam, omega, index):
        rows = x[torch.tensor(index.tolist())] if len(index) == 5 else x[index]
        return (rows @ omega["w"] - lam["l"]).square().mean()

    def draw():
        index = torch.randint(40, (next(sizes),), generator=generator)
        return Sample.full(index, index)

    problem = Problem(inner, lambda lam, omega, index: (x[index] @ omega["w"]).square().mean())
    at, algorithm = (
        Point({"l": normal(1)}, {"w": normal(3, seed=1)}),
        fsla.algorithms.soba(fsla.rates.constant(0.1, 0.1, 0.1)),
    )
    engine, state = make_engine("graph", algorithm, problem, draw, generator, algorithm.init(problem, at, draw()))
    with pytest.raises(CaptureError, match="does not give the numbers"):
        engine.advance(state, 10)


def test_a_program_that_gives_nan_is_refused():
    problem, at, draw, _ = cleaning(convolution=False)
    algorithm, xi = fsla.algorithms.fsla(fsla.rates.constant(0.1, 0.1, 0.1)), sampler("fsla", draw)()
    state = algorithm.step(problem, algorithm.init(problem, at, xi), xi)

    def broken(state, xi):
        after = algorithm.step(problem, state, xi)
        return after._replace(d=tree.scale(float("nan"), after.d))

    with pytest.raises(CaptureError, match="in d"):
        Program(broken, with_tensor_k(state), xi).check(lambda s, x: algorithm.step(problem, s, x), state, xi)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("where", ["omega", "batch"])
def test_numbers_that_a_program_would_freeze_are_found(where, dtype):
    x = normal(40, 3).to(dtype)

    def inner(lam, omega, index):
        rows = x[torch.tensor(index.tolist())] if where == "batch" else x[index]
        size = max(omega["w"].detach().tolist()) if where == "omega" else 1.0
        return ((rows @ omega["w"]) * size - lam["l"]).square().mean()

    problem = Problem(inner, lambda lam, omega, index: (x[index] @ omega["w"]).square().mean())
    at = Point({"l": normal(1).to(dtype)}, {"w": normal(3, seed=1).to(dtype)})
    generator = torch.Generator().manual_seed(0)
    source = sampler("fsla", lambda: torch.randint(40, (8,), generator=generator))
    algorithm = fsla.algorithms.fsla(fsla.rates.constant(0.1, 0.1, 0.1, 0.5))
    with pytest.raises(RuntimeError, match="does not give the numbers of the step itself"):
        make_engine("graph", algorithm, problem, source, generator, algorithm.init(problem, at, source()))


@pytest.mark.parametrize(
    ("dtype", "change", "good"), [(torch.float32, 5e-3, True), (F64, 1e-9, True), (F64, 5e-3, False)]
)
def test_rounding_passes_the_check(dtype, change, good):
    """In single precision rounding may put a ReLU on its other side, which shows in H v at a few thousandths."""
    problem, at, draw, _ = cleaning(dtype, convolution=False)
    algorithm = fsla.algorithms.fsla(fsla.rates.constant(0.1, 0.1, 0.1))
    xi = sampler("fsla", draw)()
    state = algorithm.step(problem, algorithm.init(problem, at, xi), xi)

    def step(state, xi):
        return algorithm.step(problem, state, xi)

    def otherwise(state, xi):
        after = step(state, xi)
        return after._replace(memory=tree.axpy(change, tree.sub(after.memory, state.memory), after.memory))

    program = Program(otherwise, with_tensor_k(state), xi)
    if good:
        program.check(step, state, xi)
    else:
        with pytest.raises(CaptureError, match=r"in v"):
            program.check(step, state, xi)


def test_a_state_of_another_form_is_refused():
    problem, at, draw, generator = cleaning(convolution=False)
    algorithm, source = fsla.algorithms.fsla(fsla.rates.constant(0.1, 0.1, 0.1)), sampler("fsla", draw)
    state = algorithm.init(problem, at, source())
    engine, _ = make_engine("graph", algorithm, problem, source, generator, state)
    turned = Point(at.lam, dict(reversed(at.omega.items())))
    with pytest.raises(ValueError, match="the form of the one that the engine was made with"):
        engine.advance(algorithm.init(problem, turned, source()), 1)


@needs_compiler
def test_a_compiler_that_fails_is_said_once_and_the_run_goes_on(monkeypatch):
    monkeypatch.setattr(engines.Program, "__init__", _refuse_to_compile(engines.Program.__init__))
    problem, at, draw, generator = cleaning(convolution=False)
    algorithm = fsla.algorithms.fsla(fsla.rates.constant(0.5, 0.1, 0.1))
    source = sampler("fsla", draw)
    counted = Counted(problem)
    start = algorithm.init(counted, at, source())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine, state = make_engine("auto", algorithm, counted, source, generator, start, 10**6)
    assert [str(w.message) for w in said] == ["The engine 'compile' cannot be had: no compiler here"]
    assert isinstance(engine, Replay)
    assert engine.advance(state, 2).k == state.k + 2


def _refuse_to_compile(make):
    def init(self, *args, compiled=False):
        if compiled:
            raise RuntimeError("no compiler here\nand a long story")
        make(self, *args, compiled=compiled)

    return init


def test_auto_chooses_by_the_length_of_the_run_and_never_by_time():
    problem, at, draw, generator = cleaning()
    algorithm = fsla.algorithms.fsla(fsla.rates.constant(0.5, 0.1, 0.1))
    source, counted = sampler("fsla", draw), Counted(problem)
    start = algorithm.init(counted, at, source())
    for steps, kind in ((10, Eager), (1000, Replay), (10**6, Replay)):
        engine, _ = make_engine("auto", algorithm, counted, source, generator, start, steps)
        assert type(engine) is kind
    assert engine.name == "graph"  # convolutions gain nothing from a compiler on a CPU


def test_rates_of_a_tensor_are_those_of_the_number():
    for schedule in (fsla.rates.paper(), fsla.rates.constant(0.1, 0.2, 0.3), fsla.rates.Schedule(1, 1, 1, 9.0, 0.4)):
        for k in (0, 1, 7, 1999):
            for number, tensor in zip(schedule(k), schedule(torch.tensor(float(k), dtype=F64)), strict=True):
                assert float(tensor) == pytest.approx(number, rel=1e-14)


def test_a_nest_is_taken_apart_and_put_together():
    at = fsla.Point({"a": torch.ones(2)}, {"w": torch.ones(3)}, (({"w": torch.ones(3)}, 0.1),))
    state = fsla.State(3, at, at.omega, None, {"a": torch.zeros(2)})
    twin = map_tensors(lambda t: torch.full_like(t, 7.0), state)
    assert type(twin) is fsla.State
    assert type(twin.at) is fsla.Point
    assert twin.at.trail[0][1] == 0.1
    assert twin.inner is twin.at.omega  # one object in two places stays one
    assert form(twin) == form(state)
    copy_into(twin, state)
    assert all(torch.equal(a, b) for a, b in zip(tensors(twin), tensors(state), strict=True))
    assert len(tensors(state)) == 4
    assert form(state._replace(inner={"w": torch.ones(3)})) != form(state)
    again = rebuild(state, tensors(state))
    assert again.d["a"] is state.d["a"]
    assert type(rebuild(Batches([at.lam["a"]]), [torch.zeros(2)])) is Batches
    with pytest.raises(TypeError, match=r"batches of tensors, numbers and strings\. Got object"):
        form(Sample.full(object(), None))


def test_an_unknown_engine_gets_one_message():
    with pytest.raises(ValueError, match=r"engine must be one of.*Got 'grph'.*Did you mean 'graph'"):
        make_engine("grph", None, None, None, torch.Generator(), None)


@pytest.mark.parametrize("method", [Fsla(), Bp(3), Ns(1, 3), Cg(2, 3), NoCleaning()], ids=str)
def test_records_are_those_of_the_eager_run(method):
    spec = replace(TINY, method=method)
    eager, graph = (execute(spec, engine=e) for e in ("eager", "graph"))
    assert [r["engine"] for r in (eager[0], eager[-1], graph[-1])] == [None, "eager", "graph"]
    for a, b in zip(eager, graph, strict=True):
        assert a["step"] == b["step"]
        assert a["oracles"] == b["oracles"]
        for key in ("valid_loss", "omega_norm", "weight_clean", "d_norm"):
            assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["graph", "compile"])
@pytest.mark.parametrize("method", [Fsla(), Bp(3), Ns(1, 3), Cg(1, 3), Cg(2, 3), NoCleaning()], ids=str)
def test_a_captured_run_is_the_eager_run(method, engine):
    spec = replace(TINY, method=method)
    torch.backends.cudnn.allow_tf32 = False
    eager, graph = (execute(spec, device="cuda", engine=e) for e in ("eager", engine))
    for a, b in zip(eager, graph, strict=True):
        assert a["step"] == b["step"]
        assert a["oracles"] == b["oracles"]
        for key in ("valid_loss", "omega_norm", "weight_clean", "d_norm"):
            assert b[key] == pytest.approx(a[key], rel=2e-3, abs=1e-6)


def test_counts_of_replays_are_added_up():
    total = fsla.Counts(grad=3, hvp=1).plus(10, fsla.Counts(grad=1, hvp=2, cross=2))
    assert total == fsla.Counts(grad=13, hvp=21, cross=20)


def test_what_is_drawn_from_elsewhere_is_found_and_not_lost():
    generator = torch.Generator().manual_seed(0)
    stored = iter(range(5))
    good = engines._Source(lambda: Sample.full(torch.randint(9, (4,), generator=generator), None))
    bad = engines._Source(lambda: Sample.full(torch.tensor(next(stored)), None))
    before = generator.get_state()
    good.check_repeats(generator)
    assert torch.equal(generator.get_state(), before)
    with pytest.raises(CaptureError, match="from the generator alone"):
        bad.check_repeats(generator)
    assert [int(bad().inner) for _ in range(5)] == [0, 1, 2, 3, 4]
    single = iter([7])
    short = engines._Source(lambda: Sample.full(torch.tensor(next(single)), None))
    with pytest.raises(StopIteration):
        short.check_repeats(generator)
    assert int(short().inner) == 7


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["graph", "compile"])
@pytest.mark.parametrize("bad", ["item", "loader"])
def test_what_a_gpu_cannot_capture_falls_back_to_steps(bad, engine, monkeypatch):
    monkeypatch.setitem(engines.PAYS, "cuda", {engine: (0, 0.0)})
    generator = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(50, 3, device="cuda", generator=generator)

    def inner(lam, omega, index):
        scale = omega["x"].sum().item() if bad == "item" else 1.0
        return (a[index] @ omega["x"] - lam["y"].sum()).square().mean() * (1.0 + 0.0 * scale)

    def draw():
        return Sample.full(torch.randint(50, (8,), device="cuda", generator=generator), None)

    problem = Problem(inner, lambda lam, omega, index: (omega["x"] - 1).square().sum())
    at = Point({"y": torch.zeros(2, device="cuda")}, {"x": torch.zeros(3, device="cuda")})
    stored = iter([draw() for _ in range(20)])
    algorithm = fsla.algorithms.fsla(fsla.rates.constant(0.01, 0.01, 0.01))
    source = draw if bad == "item" else lambda: next(stored)
    with pytest.warns(EngineWarning, match="cannot be had"):
        made, state = make_engine("auto", algorithm, problem, source, generator, algorithm.init(problem, at, draw()))
    assert isinstance(made, Eager)
    assert made.advance(state, 5).is_finite()
    torch.randn(2, device="cuda")  # and the generators still serve
