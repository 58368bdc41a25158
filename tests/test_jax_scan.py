"""The step in JAX is the solver's own: the same numbers in, the same numbers out."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from fsla import algorithms
from fsla.problems import CountedProblem, Point, StepBatches
from fsla.steps import constant
from fsla_benchmarks.steps import jax_scan
from fsla_benchmarks.steps.jax_scan import Batches, State, seconds_a_step
from fsla_reproduction.problems import Reweighting, Synthetic
from fsla_reproduction.problems.networks import RIDGE, build

jax = pytest.importorskip("jax", reason="JAX is not installed; pip install jax==0.10.2 installs it")

RATES = {"cnn": constant(50.0, 0.1, 0.2, 0.3), "softmax": constant(50.0, 0.1, 0.2, 0.3)}
RATES["quadratic"] = constant(1e-6, 2e-5, 2e-5, 0.3)


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request):
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", request.param == torch.float64)
    yield request.param
    jax.config.update("jax_enable_x64", before)


def setting(name, dtype):
    """The problem and the point in PyTorch, the data for JAX, the name of λ, and batches of each level."""
    g = torch.Generator().manual_seed(1)
    if name == "quadratic":
        drawn = Synthetic.draw(0, rows=200)
        drawn = Synthetic(*(getattr(drawn, f).to(dtype) for f in Synthetic.__dataclass_fields__))
        consts = {f: getattr(drawn, f).numpy().T for f in ("A_o", "b_o", "A_lam", "A_omega", "b_i")}
        return drawn.losses(), drawn.at, consts, [None] * 3, [None]
    count, size = 30, 8
    x, y = torch.randn(count, 1, 28, 28, generator=g, dtype=dtype), torch.randint(10, (count,), generator=g)
    twice = torch.cat([x, x]), torch.cat([y, y])  # two weights an image, as the benchmark has many
    data = Reweighting(build(name, 28, 10, seed=0).to(dtype), *twice, x, y, ridge=RIDGE.get(name, 0.0))
    at = Point({"weight_logits": torch.randn(2 * count, generator=g, dtype=dtype)}, data.start().omega)
    consts = {"x": x.permute(0, 2, 3, 1).contiguous().numpy(), "y": y.int().numpy()}
    inner = [torch.randint(2 * count, (size,), generator=g) for _ in range(3)]
    inner[1][1] = inner[1][0]  # a sample that comes twice in one batch
    return data.losses(), at, consts, inner, [torch.randint(count, (size,), generator=g)]


def to_jax(name, tree):
    return tuple(np.asarray(a) for a in jax_scan.from_torch(name, tree))


def both(name, dtype, momentum, samples, steps=4):
    """The state after some steps by the solver and by JAX, each as (λ, ω, v, d)."""
    problem, at, consts, inner, outer = setting(name, dtype)
    first, second, third, out = *inner, outer[0]
    hvp, mixed = {"grouped": (first, second), "independent": (third, second), "shared": (first, first)}[samples]
    batches = StepBatches.of(*((x,) for x in (first, out, hvp, out, mixed)))
    algorithm, rates = algorithms.fsla(RATES[name], momentum=momentum), RATES[name].rates(0)
    state = algorithm.init(problem, at, batches)

    arrays = {id(t): None if t is None else t.int().numpy() for t in (first, second, third, out)}
    indices = [arrays[id(t)] for t in (first, out, hvp, mixed)]
    (lam,) = at.lam.values()
    omega = to_jax(name, at.omega)
    numpy_state = State(lam.numpy(), omega, tuple(map(np.zeros_like, omega)), np.zeros_like(lam.numpy()))
    same_batch = samples != "independent"

    @jax.jit
    def advance(consts, numpy_state, indices):
        b1, b2, b3, b4 = indices
        return jax_scan.step(name, consts, numpy_state, Batches(b1, b2, b1 if same_batch else b3, b4), rates, momentum)

    for _ in range(steps):
        state = algorithm.step(CountedProblem(problem), state, batches)
        numpy_state = advance(consts, numpy_state, indices)
    (lam,), (d,) = state.lam.value.values(), state.direction.values()
    expected = State(lam.numpy(), to_jax(name, state.omega.value), to_jax(name, state.v), d.numpy())
    return expected, numpy_state


def gap(expected, actual):
    """The largest difference, for each part in units of its largest number."""
    worst = 0.0
    for a, b in zip(expected, actual, strict=True):
        a, b = (np.concatenate([np.ravel(t) for t in (x if isinstance(x, tuple) else (x,))]) for x in (a, b))
        assert a.dtype == b.dtype
        assert np.abs(a).max() > 0
        worst = max(worst, float(np.abs(a - b).max() / np.abs(a).max()))
    return worst


@pytest.mark.parametrize("name", ["softmax", "quadratic", "cnn"])
def test_jax_scan_steps_match_algorithm(name, dtype):
    assert gap(*both(name, dtype, "storm", "grouped")) < (1e-12 if dtype == torch.float64 else 2e-4)


@pytest.mark.parametrize("dtype", [torch.float64], indirect=True)
@pytest.mark.parametrize(
    ("momentum", "samples"),
    [("storm", "independent"), ("storm", "shared"), ("average", "shared"), ("none", "shared")],
)
def test_jax_scan_momentum_and_sampling_match(dtype, momentum, samples):
    assert gap(*both("softmax", dtype, momentum, samples)) < 1e-12


@pytest.mark.parametrize(("name", "samples"), [("quadratic", "grouped"), ("softmax", "shared"), ("softmax", "grouped")])
def test_jax_scan_step_has_positive_time(name, samples):
    assert all(0 < s < 10 for s in seconds_a_step(name, steps=3, samples=samples, n=5000, repeats=1))


def test_jax_scan_start_equals_benchmark():
    consts, state = jax_scan.start("cnn", 3000)
    assert state.lam.shape == state.d.shape == (3000,)
    assert consts["x"].shape == (2000, 28, 28, 1)
    assert [w.shape for w in state.omega[::2]] == [(3, 3, 1, 32), (3, 3, 32, 64), (128, 3136), (10, 128)]


def test_jax_scan_unknown_name_raises():
    with pytest.raises(ValueError, match="Did you mean 'softmax'"):
        seconds_a_step("softmx", steps=1)


def test_jax_scan_reports_jax():
    assert jax_scan.available() is None
    assert jax_scan.backend().startswith("jax ")


def test_jax_scan_without_jax_gives_reason():
    code = "import sys; sys.modules['jax'] = None; from fsla_benchmarks.steps.jax_scan import *; print(available())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("JAX cannot be used:")
    assert len(done.stdout.splitlines()) == 1
