"""A yardstick: the same hyper-iteration written directly in JAX, and what it costs where JAX is installed.

One step of FSLA as a pure function of arrays, compiled whole, with many steps in one `jax.lax.scan`; the batches of all
steps are drawn on the device, inside the compiled function. The problems are those of `fsla_benchmarks.steps`. Nothing
here is used by the solver, and JAX is imported only when a function is called.

On a CPU the network's steps are called one by one, since there XLA takes some twenty times as long over the gradients
of convolutions within a loop; next to such a step the call itself costs nothing.

Networks are float32. The quadratic has JAX's default precision, which is float32 too, where PyTorch's has float64; set
JAX_ENABLE_X64=1 for float64 in both.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch

from fsla._checks import pick, whole_number
from fsla._tree import Tree
from fsla.steps import Rates
from fsla.steps._momentum import MOMENTA
from fsla_benchmarks.steps.cases import BATCH, IMAGES, PROBLEMS, RATES
from fsla_reproduction.problems import Synthetic
from fsla_reproduction.problems.networks import RIDGE, build

Array = Any
"""A JAX array, or a tree of them. JAX may be missing, so its types are not named."""


class State(NamedTuple):
    """State of a run: λ and d as vectors, ω and v as one tuple of arrays each."""

    lam: Array
    omega: Array
    v: Array
    d: Array


class Batches(NamedTuple):
    """The indices that a step reads. Where `hvp` is `inner` itself, gradient and product come from one pass."""

    inner: Array = None
    outer: Array = None
    hvp: Array = None
    mixed_hvp: Array = None


def available() -> str | None:
    """None if JAX can be used here, else the reason why not, in one line."""
    try:
        _jax().default_backend()
    except (ImportError, RuntimeError) as error:
        return f"JAX cannot be used: {next(iter(str(error).splitlines()), type(error).__name__)}"
    return None


def backend() -> str:
    """Which JAX runs, and on what."""
    jax = _jax()
    return f"jax {jax.__version__}, {jax.default_backend()}, {jax.devices()[0].device_kind}"


def seconds_a_step(
    name: str, *, steps: int, samples: str = "grouped", momentum: str = "storm", n: int = 10_000, repeats: int = 3
) -> tuple[float, float]:
    """Seconds a step of FSLA, and of plain SGD.

    Each is the median over `repeats` scans of `steps` steps, after a first scan that compiles.
    """
    pick(name, dict.fromkeys(PROBLEMS), "problem")
    pick(samples, dict.fromkeys(("independent", "grouped", "shared")), "sampling mode")
    pick(momentum, MOMENTA, "momentum")
    for value, what in ((steps, "steps"), (n, "n"), (repeats, "repeats")):
        whole_number(value, what, "seconds_a_step")
    jax = _jax()
    rates = RATES[name].rates(0)
    consts, first = start(name, n)
    steppers = partial(step, name, rates=rates, momentum=momentum), partial(sgd, name, rates=rates)
    scans = [_scan(name, f, steps, samples, n) for f in steppers]
    states = [first, first]
    seconds: tuple[list[float], list[float]] = ([], [])
    for r in range(repeats + 1):
        key = jax.block_until_ready(jax.random.key(r))
        for i, scan in enumerate(scans):
            started = time.perf_counter()
            states[i] = jax.block_until_ready(scan(consts, states[i], key))
            if r:  # the first compiles
                seconds[i].append((time.perf_counter() - started) / steps)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def start(name: str, n: int = 10_000) -> tuple[dict[str, Array], State]:
    """The data of a benchmark problem, and the state before its first step."""
    jnp = _jax().numpy
    if name == "quadratic":
        drawn = Synthetic.draw(0)
        consts = {key: jnp.asarray(getattr(drawn, key).numpy().T) for key in ("A_o", "b_o", "A_lam", "A_omega", "b_i")}
        lam = jnp.asarray(drawn.lam.numpy())
        omega = (jnp.asarray(drawn.start.numpy()),)
    else:
        g = torch.Generator().manual_seed(0)
        images = torch.randn(IMAGES, 28, 28, 1, generator=g)
        labels = torch.randint(10, (IMAGES,), generator=g)
        consts = {"x": jnp.asarray(images.numpy()), "y": jnp.asarray(labels.int().numpy())}
        model = build(name, 28, 10, seed=0)
        lam = jnp.zeros(n, jnp.float32)
        omega = from_torch(name, {k: p.detach() for k, p in model.named_parameters()})
    return consts, State(lam, omega, tuple(map(jnp.zeros_like, omega)), jnp.zeros_like(lam))


def from_torch(name: str, omega: Tree) -> tuple[Array, ...]:
    """PyTorch's parameters in their order, with channels last."""
    jnp = _jax().numpy
    out = []
    for t in omega.values():
        if t.ndim == 4:
            t = t.permute(2, 3, 1, 0)
        elif name == "cnn" and t.shape[-1] == 64 * 7 * 7:  # the layer that reads the flattened maps
            t = t.view(-1, 64, 7, 7).permute(0, 2, 3, 1).flatten(1)
        out.append(jnp.asarray(t.contiguous().numpy()))
    return tuple(out)


def step(
    name: str, consts: dict[str, Array], state: State, batches: Batches, rates: Rates, momentum: str = "storm"
) -> State:
    """One step of Algorithm 1, as `fsla.algorithms.fsla(rates, momentum=momentum)` takes it."""
    jax, (alpha, tau, beta, eta) = _jax(), rates
    lam = state.lam - alpha * state.d
    slope = jax.grad(partial(inner_loss, name, consts, lam))
    grad, product = jax.jvp(lambda w: slope(w, batches.hvp), (state.omega,), (state.v,))
    if batches.hvp is not batches.inner:
        grad = slope(state.omega, batches.inner)
    p = jax.grad(partial(outer_loss, name, consts))(state.omega, batches.outer)
    omega = jax.tree.map(lambda w, g: w - tau * g, state.omega, grad)
    v = jax.tree.map(lambda u, a, b: u + beta * (a - b), state.v, p, product)

    new = mixed_product(name, consts, lam, omega, v, batches.mixed_hvp)
    keep = 1 - eta
    if momentum == "storm":
        old = mixed_product(name, consts, state.lam, state.omega, state.v, batches.mixed_hvp)
        d = keep * state.d
        change = new - keep * old
    elif momentum == "average":
        d = keep * state.d
        change = eta * new
    else:
        d = jax.numpy.zeros_like(state.d)
        change = new
    d = d - change if name == "quadratic" else d.at[batches.mixed_hvp].add(-change)
    return State(lam, omega, v, d)


def sgd(name: str, consts: dict[str, Array], state: State, batches: Batches, rates: Rates) -> State:
    """One step of plain SGD on the inner loss at a fixed λ."""
    jax = _jax()
    grad = jax.grad(partial(inner_loss, name, consts, state.lam))(state.omega, batches.inner)
    return state._replace(omega=jax.tree.map(lambda w, g: w - rates.inner_lr * g, state.omega, grad))


def inner_loss(name: str, consts: dict[str, Array], lam: Array, omega: Array, index: Array) -> Array:
    """G(λ, ω) on a batch."""
    jax = _jax()
    if name == "quadratic":
        return jax.numpy.square(lam @ consts["A_lam"] + omega[0] @ consts["A_omega"] - consts["b_i"]).sum()
    loss = (jax.nn.sigmoid(lam[index]) * sample_losses(name, consts, omega, index)).mean()
    ridge = RIDGE.get(name, 0.0)
    return loss + ridge / 2 * sum((w * w).sum() for w in omega) if ridge else loss


def outer_loss(name: str, consts: dict[str, Array], omega: Array, index: Array) -> Array:
    """F(ω) on a batch."""
    if name == "quadratic":
        return _jax().numpy.square(omega[0] @ consts["A_o"] - consts["b_o"]).sum()
    return sample_losses(name, consts, omega, index).mean()


def mixed_product(name: str, consts: dict[str, Array], lam: Array, omega: Array, v: Array, index: Array) -> Array:
    """J v: for the quadratic the whole vector, for a network one number for each sample of the batch."""
    jax = _jax()
    if name == "quadratic":
        return jax.grad(lambda u: jax.jvp(lambda w: inner_loss(name, consts, u, w, index), (omega,), (v,))[1])(lam)
    slopes = jax.jvp(lambda w: sample_losses(name, consts, w, index), (omega,), (v,))[1]
    weight = jax.nn.sigmoid(lam[index])
    return weight * (1 - weight) * slopes / index.shape[0]


def sample_losses(name: str, consts: dict[str, Array], omega: Array, index: Array) -> Array:
    """The cross entropy of each sample of a batch. Indices beyond the images start again at the first."""
    jax = _jax()
    rows = index % consts["y"].shape[0]
    x = consts["x"][rows]
    y = consts["y"][rows]
    if name == "cnn":
        for kernel, bias in (omega[:2], omega[2:4]):
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu(_pooled(x + bias))  # the same as pooling last, on a quarter of the numbers
        x = jax.nn.relu(x.reshape(x.shape[0], -1) @ omega[4].T + omega[5])
    scores = x.reshape(x.shape[0], -1) @ omega[-2].T + omega[-1]
    chosen = (scores * jax.nn.one_hot(y, scores.shape[1], dtype=scores.dtype)).sum(-1)
    return jax.nn.logsumexp(scores, axis=-1) - chosen


def _pooled(x: Array) -> Array:
    """The largest of each 2 x 2 square. Its derivatives fuse with their neighbours, which a window's do not."""
    jnp = _jax().numpy
    x = jnp.maximum(x[:, ::2], x[:, 1::2])
    return jnp.maximum(x[:, :, ::2], x[:, :, 1::2])


def _scan(name: str, f: Callable[..., State], steps: int, samples: str, n: int) -> Callable[..., State]:
    """`steps` steps of f as one function of the data, the state and a key."""
    jax = _jax()

    def draw(key: Array, *shape: int) -> Array:
        """Inner batches and an outer one, for each step of the shape."""
        if name == "quadratic":
            return None
        keys = jax.random.split(key)
        count = {"independent": 3, "grouped": 2, "shared": 1}[samples]
        inner = jax.random.randint(keys[0], (count, *shape, BATCH), 0, n)
        return tuple(inner), jax.random.randint(keys[1], (*shape, BATCH), 0, IMAGES)

    def advance(consts: dict[str, Array], state: State, drawn: Array) -> State:
        if drawn is None:
            return f(consts, state, Batches())
        inner, outer = drawn
        hvp = inner[1] if samples == "independent" else inner[0]  # the same object is the same batch
        return f(consts, state, Batches(inner[0], outer, hvp, inner[-1]))

    def scan(consts: dict[str, Array], state: State, key: Array) -> Array:
        return jax.lax.scan(lambda s, b: (advance(consts, s, b), None), state, draw(key, steps), length=steps)[0]

    one = jax.jit(lambda consts, state, key: advance(consts, state, draw(key)))

    def loop(consts: dict[str, Array], state: State, key: Array) -> State:
        for step_key in jax.random.split(key, steps):
            state = one(consts, state, step_key)
        return state

    compiled: Callable[..., State] = jax.jit(scan)
    return loop if name == "cnn" and jax.default_backend() == "cpu" else compiled


def _jax() -> Any:
    """JAX, set not to take most of a GPU's memory at once, since PyTorch works in the same process."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return import_module("jax")
