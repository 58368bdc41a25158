"""Engines give the same numbers; what cannot be had is said."""

import shutil
import warnings
from dataclasses import replace
from itertools import product

import pytest
import torch

import fsla
from fsla import Batches, Counted, Point, Problem, Sample, WeightedProblem
from fsla import _tree as tree
from fsla.problems._nest import copy_into, map_tensors, rebuild, take_apart, tensors
from fsla.train import EngineWarning, make_engine
from fsla.train import _engine as engines
from fsla.train._agreement import OTHER_KERNELS, SAME_KERNELS, difference
from fsla.train._engine import Eager, Replay
from fsla.train._program import Program
from fsla_reproduction.cleaning import RunSpec, execute
from fsla_reproduction.datasets import TaskSpec
from fsla_reproduction.methods import Bp, Cg, Fsla, NoCleaning, Ns
from support import F64, classifier, normal

TINY = RunSpec(
    TaskSpec("digits", n_train=60, n_valid=40), model="cnn-small", steps=24, every=12, batch=16,
    delta=10.0, c_tau=0.1, c_beta=0.01, c_eta=0.09,
)  # fmt: skip
HAS_COMPILER = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(
    not HAS_COMPILER, reason="there is no C++ compiler; apt-get install g++ installs one"
)


def cleaning(dtype=F64, convolution=True, mode="auto"):
    """A small cleaning problem in double precision: its problem, a point, and sources of batches."""
    omega, scores, each = classifier(40, dtype, convolution=convolution)
    problem = WeightedProblem(
        each,
        lambda lam, index: lam["w"].sigmoid(),
        lambda lam, omega, index: each(scores(omega, index), index).mean(),
        rows=lambda index: index,
        outputs=scores,
        direct=False,
        mode=mode,
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
    engine = make_engine(name, algorithm, counted, draw, generator, state)
    state = engine.advance(state, 2)
    state = engine.advance(state, steps - state.k)
    return state, (counted.calls, counted.samples), engine


ALGORITHMS = {
    "fsla": fsla.algorithms.fsla,
    "gauss-newton": fsla.algorithms.fsla,
    "none": lambda rates: fsla.algorithms.fsla(rates, momentum="none"),
    "bp": lambda rates: fsla.algorithms.bp(rates, T=3),
    "ns": lambda rates: fsla.algorithms.ns(rates, T=2, K=3),
    "cg": lambda rates: fsla.algorithms.cg(rates, K=3),
    "soba": fsla.algorithms.soba,
}


def curved(name, problem):
    return fsla.Damped(fsla.GaussNewton(problem), 0.1) if name == "gauss-newton" else problem


def sampler(name, draw, mode="grouped"):
    def sample():
        xi = Sample.draw(mode, draw, draw)
        steps = {"bp": 3, "ns": 2}.get(name, 1)
        if steps > 1:
            xi = xi._replace(inner=Batches([xi.inner, *(draw() for _ in range(steps - 1))]))
        return xi._replace(hvp=xi.inner) if name == "bp" else xi

    return sample


def replayed():
    """All combinations; of methods with inner loops, whose traces are long, some are slow tests."""
    for name, samples, mode in product(ALGORITHMS, ("independent", "grouped", "shared"), ("forward", "reverse")):
        long = name in ("bp", "ns", "cg") and (samples == "grouped") != (mode == "reverse")
        yield pytest.param(name, samples, mode, marks=pytest.mark.slow if long else ())


@pytest.mark.filterwarnings("ignore::fsla.algorithms.SharedBatchWarning")
@pytest.mark.parametrize(("name", "samples", "mode"), list(replayed()))
def test_a_replayed_run_is_the_eager_run(name, samples, mode):
    problem, at, draw, generator = cleaning(mode=mode)
    problem = curved(name, problem)
    algorithm = ALGORITHMS[name](fsla.steps.paper(delta=10.0, c_tau=0.02, c_beta=0.02, c_eta=0.05))
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
@pytest.mark.parametrize("name", ["fsla", "gauss-newton", pytest.param("cg", marks=pytest.mark.slow)])
def test_a_compiled_run_is_the_eager_run(name):
    problem, at, draw, generator = cleaning()
    problem = curved(name, problem)
    algorithm = ALGORITHMS[name](fsla.steps.paper(delta=10.0, c_tau=0.02, c_beta=0.02, c_eta=0.05))
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
        fsla.algorithms.fsla(fsla.steps.constant(0.1, 0.1, 0.1)),
        problem,
        at,
        sampler("fsla", draw),
        generator,
        3,
    )
    (program,) = engine.programs
    convolutions = [n for n in program.graph.nodes if n.target is torch.ops.aten.convolution.default]
    # one layer: the gradient's pass and the HVP's in reverse, the outer pass, and two passes with a tangent each
    images = [n.args[0] for n in convolutions]
    assert all("zeros" not in str(n.target) and "expand" not in str(n.target) for n in images)


def test_a_batch_of_another_shape_gets_its_own_program():
    problem, at, _, generator = cleaning()
    sizes = iter([8, 8, 8, 8, 5, 8, 5, 8, 8] * 8)

    def draw():
        return torch.randint(40, (next(sizes),), generator=generator)

    algorithm = fsla.algorithms.fsla(fsla.steps.constant(0.5, 0.1, 0.1, 0.5), momentum="none")
    results = []
    for name in ("eager", "graph"):
        sizes = iter([8, *[8, 8, 8, 8, 5, 8, 5, 8, 8] * 8])
        results.append(run(name, algorithm, problem, at, lambda: Sample.full(b := draw(), b), generator, 6))
    (a, *_), (b, _, engine) = results
    assert len(engine.programs) == 2
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
    algorithm = fsla.algorithms.fsla(fsla.steps.constant(0.1, 0.1, 0.1, 0.5))
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
    assert [str(w.message).startswith("A form of batch cannot be captured") for w in said] == [True]
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
    algorithm, counted = fsla.algorithms.fsla(fsla.steps.constant(0.1, 0.1, 0.1)), Counted(problem)
    state = algorithm.init(counted, at, Sample.full(None, None))
    engine = make_engine("graph", algorithm, counted, lambda: Sample.full(None, None), generator, state)
    state = engine.advance(state, 5)
    scale.fill_(2.0)
    after, expected = engine.advance(state, 1), algorithm.step(problem, state, Sample.full(None, None))
    assert torch.allclose(after.at.omega["w"], expected.at.omega["w"], rtol=1e-14)


def test_a_state_of_another_form_gets_its_own_program():
    problem, at, draw, generator = cleaning(convolution=False)
    algorithm, source = fsla.algorithms.fsla(fsla.steps.constant(0.1, 0.1, 0.1)), sampler("fsla", draw)
    turned = Point(at.lam, dict(reversed(at.omega.items())))
    found = []
    for name in ("eager", "graph"):
        generator.manual_seed(3)
        engine = make_engine(name, algorithm, problem, source, generator, algorithm.init(problem, at, source()))
        for start in (at, turned, at):
            found.append(engine.advance(algorithm.init(problem, start, source()), 5))
    for a, b in zip(found[:3], found[3:], strict=True):
        assert list(a.at.omega) == list(b.at.omega)
        assert float(tree.norm(tree.sub(a.at.omega, b.at.omega))) < 1e-13
    assert len(engine.programs) == 2


@pytest.mark.parametrize(
    ("dtype", "tolerance", "change", "good"),
    [
        (torch.float32, SAME_KERNELS, 1e-5, True),
        (torch.float32, SAME_KERNELS, 5e-3, False),
        (torch.float32, OTHER_KERNELS, 5e-3, True),
        (torch.float32, OTHER_KERNELS, 1e-1, False),
        (F64, SAME_KERNELS, 1e-10, True),
        (F64, SAME_KERNELS, 1e-6, False),
        (F64, OTHER_KERNELS, 1e-6, True),
        (F64, OTHER_KERNELS, 5e-3, False),
        (F64, OTHER_KERNELS, float("nan"), False),
    ],
)
@pytest.mark.parametrize("part", ["lam", "omega", "v", "d"])
def test_rounding_agrees_and_more_does_not(part, dtype, tolerance, change, good):
    problem, at, draw, _ = cleaning(dtype, convolution=False)
    algorithm = fsla.algorithms.fsla(fsla.steps.constant(50.0, 0.1, 0.1, 0.5))
    xi = sampler("fsla", draw)()
    state = algorithm.step(problem, algorithm.init(problem, at, xi), xi)
    after = algorithm.step(problem, state, xi)

    def more(x, y):
        return tree.axpy(change, tree.sub(x, y), x)

    otherwise = {
        "lam": lambda: after._replace(at=after.at._replace(lam=more(after.at.lam, state.at.lam))),
        "omega": lambda: after._replace(at=after.at._replace(omega=more(after.at.omega, state.at.omega))),
        "v": lambda: after._replace(memory=more(after.memory, state.memory)),
        "d": lambda: after._replace(d=more(after.d, state.d)),
    }[part]()
    found = difference(state, after, otherwise, tolerance, lambda s: algorithm.step(problem, s, xi))
    assert found == (None if good else part)


@needs_compiler
@pytest.mark.parametrize("bad", ["fails", "wrong"])
def test_a_compiler_that_fails_is_said_once_and_the_run_goes_on(monkeypatch, bad):
    def compile_badly(self, state, rates, xi):
        if bad == "fails":
            raise RuntimeError("no compiler here\nand a long story")
        self.compiled = lambda *args: [1.1 * t for t in self.run_uncompiled(state, rates, xi)]

    monkeypatch.setattr(Program, "compile", compile_badly)
    problem, at, draw, generator = cleaning(convolution=False)
    algorithm = fsla.algorithms.fsla(fsla.steps.constant(0.5, 0.1, 0.1))
    source = sampler("fsla", draw)
    counted = Counted(problem)
    state = algorithm.init(counted, at, source())
    engine = make_engine("auto", algorithm, counted, source, generator, state, 10**6)
    assert engine.name == "compile"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        state = engine.advance(state, 6)
    why = {
        "fails": "no compiler here.",
        "wrong": "The compiled step does not give the numbers of the program (in lam).",
    }
    assert [str(w.message) for w in said] == [f"Engine 'compile' is unavailable: {why[bad]} Using 'graph'."]
    assert engine.name == "graph"
    assert len(engine.programs) == 1
    engine = make_engine("compile", algorithm, counted, source, generator, state)
    with pytest.raises(RuntimeError, match=r"no compiler here|does not give the numbers"):
        engine.advance(state, 1)


def test_auto_chooses_by_the_length_of_the_run_and_never_by_time():
    problem, at, draw, generator = cleaning()
    algorithm = fsla.algorithms.fsla(fsla.steps.constant(0.5, 0.1, 0.1))
    source, counted = sampler("fsla", draw), Counted(problem)
    start = algorithm.init(counted, at, source())
    for steps, kind in ((10, Eager), (1000, Replay), (10**6, Replay)):
        engine = make_engine("auto", algorithm, counted, source, generator, start, steps)
        assert type(engine) is kind
    assert engine.name == "graph"  # convolutions gain nothing from a compiler on a CPU


def test_rates_of_a_tensor_are_those_of_the_number():
    for schedule in (fsla.steps.paper(), fsla.steps.constant(0.1, 0.2, 0.3), fsla.steps.Schedule(1, 1, 1, 9.0, 0.4)):
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
    assert take_apart(twin)[0] == take_apart(state)[0]
    copy_into(twin, state)
    assert all(torch.equal(a, b) for a, b in zip(tensors(twin), tensors(state), strict=True))
    assert len(tensors(state)) == 4
    assert take_apart(state._replace(inner={"w": torch.ones(3)}))[0] != take_apart(state)[0]
    again = rebuild(state, tensors(state))
    assert again.d["a"] is state.d["a"]
    assert type(rebuild(Batches([at.lam["a"]]), [torch.zeros(2)])) is Batches
    with pytest.raises(TypeError, match=r"batches of tensors, numbers and strings\. Got object"):
        take_apart(Sample.full(object(), None))


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
        for key in ("valid_loss", "omega_norm", "weight_clean"):
            assert b[key] == pytest.approx(a[key], rel=2e-3, abs=1e-6)
        # d is a difference of hypergradients, and a compiler's rounding puts a ReLU on its other side now and then
        assert b["d_norm"] == pytest.approx(a["d_norm"], rel=2e-3 if engine == "graph" else 5e-2, abs=1e-6)


def test_counts_of_replays_are_added_up():
    total = fsla.Counts(grad=3, hvp=1).plus(10, fsla.Counts(grad=1, hvp=2, cross=2))
    assert total == fsla.Counts(grad=13, hvp=21, cross=20)


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
    algorithm = fsla.algorithms.fsla(fsla.steps.constant(0.01, 0.01, 0.01))
    source = draw if bad == "item" else lambda: next(stored)
    state = algorithm.init(problem, at, draw())
    made = make_engine("auto", algorithm, problem, source, generator, state)
    with pytest.warns(EngineWarning, match="is unavailable"):
        state = made.advance(state, 5)
    assert made.name == "eager"
    assert made.advance(state, 5).is_finite()
    torch.randn(2, device="cuda")  # and the generators still serve
