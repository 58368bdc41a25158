"""Every algorithm once more, in plain NumPy, written from the papers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Array = np.ndarray
Batch = int | Sequence[int]
Rates = Callable[[int], tuple[float, float, float, float]]
Path = list[tuple[Array, Array]]


# ---------------------------------------------------------------------------------------------------------------------
# The problem
# ---------------------------------------------------------------------------------------------------------------------


class Plain:
    """A small bilevel problem, smooth and not quadratic, with all its derivatives written out.

    G_b = 1/2 w'H_b w + lam'J_b(w + 0.1 w^2) - c_b'w + 0.05 sum w^4,
    F_b = 1/2 w'Q_b w - q_b'w + lam'R_b w + 1/2 lam'S_b lam - s_b'lam + 0.02 sum w^4.
    """

    names = ("H", "J", "c", "Q", "q", "R", "S", "s")

    def __init__(self, arrays: dict[str, Array]) -> None:
        self.H = np.asarray(arrays["H"], dtype=np.float64)
        self.J = np.asarray(arrays["J"], dtype=np.float64)
        self.c = np.asarray(arrays["c"], dtype=np.float64)
        self.Q = np.asarray(arrays["Q"], dtype=np.float64)
        self.q = np.asarray(arrays["q"], dtype=np.float64)
        self.R = np.asarray(arrays["R"], dtype=np.float64)
        self.S = np.asarray(arrays["S"], dtype=np.float64)
        self.s = np.asarray(arrays["s"], dtype=np.float64)

    @classmethod
    def random(cls, p: int = 2, n: int = 3, batches: int = 4, seed: int = 0) -> Plain:
        generator = np.random.default_rng(seed)

        def definite(size: int, low: float, high: float) -> Array:
            basis, _ = np.linalg.qr(generator.normal(size=(batches, size, size)))
            values = generator.uniform(low, high, size=(batches, 1, size))
            matrix = (basis * values) @ basis.transpose(0, 2, 1)
            return (matrix + matrix.transpose(0, 2, 1)) / 2

        def signed(low: float, high: float, *shape: int) -> Array:
            sign = generator.choice([-1.0, 1.0], size=(batches, *shape))
            return sign * generator.uniform(low, high, size=(batches, *shape))

        return cls(
            {
                "H": definite(n, 1.1, 2.4),
                "J": signed(0.3, 0.8, p, n),
                "c": signed(0.3, 1.0, n),
                "Q": definite(n, 0.5, 1.5),
                "q": signed(0.3, 1.0, n),
                "R": signed(0.2, 0.4, p, n),
                "S": definite(p, 1.0, 2.0),
                "s": signed(0.3, 1.0, p),
            }
        )

    @property
    def arrays(self) -> dict[str, Array]:
        return {name: getattr(self, name) for name in self.names}

    def inner_value(self, lam: Array, omega: Array, b: int) -> float:
        quadratic = 0.5 * omega @ self.H[b] @ omega
        coupling = lam @ self.J[b] @ (omega + 0.1 * omega**2)
        return float(quadratic + coupling - self.c[b] @ omega + 0.05 * np.sum(omega**4))

    def inner_grad(self, lam: Array, omega: Array, b: int) -> Array:
        return self.H[b] @ omega + (self.J[b].T @ lam) * (1 + 0.2 * omega) - self.c[b] + 0.2 * omega**3

    def inner_lam(self, lam: Array, omega: Array, b: int) -> Array:
        return self.J[b] @ (omega + 0.1 * omega**2)

    def hessian(self, lam: Array, omega: Array, b: int) -> Array:
        return self.H[b] + np.diag(0.2 * self.J[b].T @ lam + 0.6 * omega**2)

    def mixed(self, lam: Array, omega: Array, b: int) -> Array:
        return self.J[b] * (1 + 0.2 * omega)

    def outer_value(self, lam: Array, omega: Array, b: int) -> float:
        in_omega = 0.5 * omega @ self.Q[b] @ omega - self.q[b] @ omega + 0.02 * np.sum(omega**4)
        in_lam = 0.5 * lam @ self.S[b] @ lam - self.s[b] @ lam
        return float(in_omega + in_lam + lam @ self.R[b] @ omega)

    def outer_omega(self, lam: Array, omega: Array, b: int) -> Array:
        return self.Q[b] @ omega - self.q[b] + self.R[b].T @ lam + 0.08 * omega**3

    def outer_lam(self, lam: Array, omega: Array, b: int) -> Array:
        return self.R[b] @ omega + self.S[b] @ lam - self.s[b]

    def outer_hessian(self, lam: Array, omega: Array, b: int) -> Array:
        return self.Q[b] + np.diag(0.24 * omega**2)

    def outer_mixed_block(self, lam: Array, omega: Array, b: int) -> Array:
        return self.R[b].copy()


class Draw(NamedTuple):
    """The batches of one step, each a number or a list with one number a step, and the length of the random series."""

    inner: Batch
    outer_omega: Batch
    hvp: Batch
    outer_lam: Batch
    mixed_hvp: Batch
    length: int = 0


def of_step(batch: Batch, k: int) -> int:
    return batch if isinstance(batch, int | np.integer) else batch[k]


def draw_of_step(draw: Draw, k: int) -> Draw:
    return Draw(*(of_step(batch, k) for batch in draw[:5]), draw.length)


# ---------------------------------------------------------------------------------------------------------------------
# Shared parts
# ---------------------------------------------------------------------------------------------------------------------


def descend(problem: Plain, lam: Array, omega: Array, batch: Batch, tau: float, count: int) -> list[Array]:
    """The states of gradient descent on G, the start included."""
    states = [omega]
    for t in range(count):
        omega = omega - tau * problem.inner_grad(lam, omega, of_step(batch, t))
        states.append(omega)
    return states


def readout(problem: Plain, lam: Array, omega: Array, v: Array, draw: Draw) -> Array:
    return problem.outer_lam(lam, omega, draw.outer_lam) - problem.mixed(lam, omega, draw.mixed_hvp) @ v


def random_neumann(
    problem: Plain, lam: Array, omega: Array, right: Array, batch: Batch, length: int, num_terms: int, adjoint_lr: float
) -> Array:
    u = right
    for i in range(length):
        u = u - adjoint_lr * problem.hessian(lam, omega, of_step(batch, i)) @ u
    return adjoint_lr * num_terms * u


def neumann(
    problem: Plain, lam: Array, omega: Array, right: Array, batch: Batch, products: int, adjoint_lr: float
) -> Array:
    u = right
    total = right
    for j in range(products):
        u = u - adjoint_lr * problem.hessian(lam, omega, of_step(batch, j)) @ u
        total = total + u
    return adjoint_lr * total


def conjugate_gradient(
    problem: Plain,
    lam: Array,
    omega: Array,
    right: Array,
    batch: Batch,
    steps: int,
    start: Array | None = None,
    tolerance: float = 0.0,
) -> Array:
    """At most so many steps on H v = right; a start other than 0 costs one product more, for its residual."""
    v = np.zeros_like(right)
    residual = right
    products = 0
    if start is not None:
        v = start
        residual = right - problem.hessian(lam, omega, of_step(batch, 0)) @ start
        products = 1
    direction = residual
    for _ in range(steps):
        if np.linalg.norm(residual) <= tolerance:
            break
        product = problem.hessian(lam, omega, of_step(batch, products)) @ direction
        products += 1
        square = residual @ residual
        length = square / (direction @ product)
        v = v + length * direction
        residual = residual - length * product
        direction = residual + (residual @ residual / square) * direction
    return v


def with_random_neumann(
    problem: Plain, lam: Array, omega: Array, draw: Draw, num_terms: int, adjoint_lr: float
) -> Array:
    right = problem.outer_omega(lam, omega, draw.outer_omega)
    v = random_neumann(problem, lam, omega, right, draw.hvp, draw.length, num_terms, adjoint_lr)
    return readout(problem, lam, omega, v, draw)


def with_neumann(problem: Plain, lam: Array, omega: Array, draw: Draw, products: int, adjoint_lr: float) -> Array:
    right = problem.outer_omega(lam, omega, draw.outer_omega)
    v = neumann(problem, lam, omega, right, draw.hvp, products, adjoint_lr)
    return readout(problem, lam, omega, v, draw)


def unrolled(problem: Plain, lam: Array, states: list[Array], tau: float, draw: Draw, last: int | None = None) -> Array:
    """Reverse differentiation of F through the last steps of a trail of gradient descent (all of them by default)."""
    count = len(states) - 1
    first = 0 if last is None else max(0, count - last)
    adjoint = problem.outer_omega(lam, states[-1], draw.outer_omega)
    gradient = problem.outer_lam(lam, states[-1], draw.outer_lam)
    for t in range(count - 1, first - 1, -1):
        batch = of_step(draw.hvp, t)
        gradient = gradient - tau * problem.mixed(lam, states[t], batch) @ adjoint
        adjoint = adjoint - tau * problem.hessian(lam, states[t], batch) @ adjoint
    return gradient


def storm(direction: Array, new: Array, old: Array, eta: float) -> Array:
    return new + (1 - eta) * (direction - old)


def average(direction: Array, new: Array, eta: float) -> Array:
    return (1 - eta) * direction + eta * new


def unit(vector: Array) -> Array:
    norm = np.linalg.norm(vector)
    return vector / norm if norm > 0 else np.zeros_like(vector)


def in_ball(vector: Array, radius: float) -> Array:
    norm = np.linalg.norm(vector)
    return vector * (radius / norm) if norm > radius else vector


def soft(vector: Array, threshold: float) -> Array:
    return np.sign(vector) * np.maximum(np.abs(vector) - threshold, 0)


def at_least(matrix: Array, mu: float) -> Array:
    """The symmetric matrix with its eigenvalues clipped from below."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return (vectors * np.maximum(values, mu)) @ vectors.T


class Three(NamedTuple):
    """A point (lam, omega, v), or one direction for each of the three."""

    lam: Array
    omega: Array
    v: Array


def directions(problem: Plain, point: Three, draw: Draw) -> Three:
    """The three directions of the single loop at one point, all of G on one batch and all of F on another."""
    lam, omega, v = point
    in_lam = problem.outer_lam(lam, omega, draw.outer_omega) - problem.mixed(lam, omega, draw.inner) @ v
    in_omega = problem.inner_grad(lam, omega, draw.inner)
    in_v = problem.hessian(lam, omega, draw.inner) @ v - problem.outer_omega(lam, omega, draw.outer_omega)
    return Three(in_lam, in_omega, in_v)


# ---------------------------------------------------------------------------------------------------------------------
# Double loops: omega, then v, then lam
# ---------------------------------------------------------------------------------------------------------------------


def bsa(
    problem: Plain,
    lam: Array,
    omega: Array,
    draws: list[Draw],
    rates: Rates,
    *,
    inner_steps: int,
    growth: float,
    num_terms: int,
    adjoint_lr: float,
) -> Path:
    path = [(lam, omega)]
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, _ = rates(k)
        count = math.ceil(inner_steps * (k + 1) ** growth)
        omega = descend(problem, lam, omega, draw.inner, tau, count)[-1]
        lam = lam - alpha * with_random_neumann(problem, lam, omega, draw, num_terms, adjoint_lr)
        path.append((lam, omega))
    return path


def ttsa(
    problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, num_terms: int, adjoint_lr: float
) -> Path:
    path = [(lam, omega)]
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, _ = rates(k)
        omega = omega - tau * problem.inner_grad(lam, omega, of_step(draw.inner, 0))
        lam = lam - alpha * with_random_neumann(problem, lam, omega, draw, num_terms, adjoint_lr)
        path.append((lam, omega))
    return path


def aid_bio(
    problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, inner_steps: int, hvp_steps: int
) -> Path:
    path = [(lam, omega)]
    v = np.zeros_like(omega)
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, _ = rates(k)
        omega = descend(problem, lam, omega, draw.inner, tau, inner_steps)[-1]
        right = problem.outer_omega(lam, omega, draw.outer_omega)
        v = conjugate_gradient(problem, lam, omega, right, draw.hvp, hvp_steps - 1, start=v)
        lam = lam - alpha * readout(problem, lam, omega, v, draw)
        path.append((lam, omega))
    return path


def itd_bio(problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, inner_steps: int) -> Path:
    path = [(lam, omega)]
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, _ = rates(k)
        states = descend(problem, lam, omega, draw.inner, tau, inner_steps)
        omega = states[-1]
        lam = lam - alpha * unrolled(problem, lam, states, tau, draw)
        path.append((lam, omega))
    return path


def stocbio(
    problem: Plain,
    lam: Array,
    omega: Array,
    draws: list[Draw],
    rates: Rates,
    *,
    inner_steps: int,
    hvp_steps: int,
    adjoint_lr: float,
) -> Path:
    path = [(lam, omega)]
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, _ = rates(k)
        omega = descend(problem, lam, omega, draw.inner, tau, inner_steps)[-1]
        lam = lam - alpha * with_neumann(problem, lam, omega, draw, hvp_steps, adjoint_lr)
        path.append((lam, omega))
    return path


def bio_bred(
    problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, inner_steps: int, weight: float
) -> Path:
    path = [(lam, omega)]
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, _ = rates(k)
        states = descend(problem, lam, omega, draw.inner, tau, inner_steps)
        omega = states[-1]
        gradient = unrolled(problem, lam, states, tau, draw)
        lam = soft(lam - alpha * gradient, alpha * weight)
        path.append((lam, omega))
    return path


def sbio_bred(
    problem: Plain,
    lam: Array,
    omega: Array,
    draws: list[Draw],
    rates: Rates,
    *,
    inner_steps: int,
    hvp_steps: int,
    adjoint_lr: float,
) -> Path:
    path = [(lam, omega)]
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, _ = rates(k)
        omega = descend(problem, lam, omega, draw.inner, tau, inner_steps)[-1]
        gradient = with_neumann(problem, lam, omega, draw, hvp_steps, adjoint_lr)
        lam = lam * np.exp(-alpha * gradient)
        path.append((lam, omega))
    return path


def truncated_bp(
    problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, inner_steps: int, unroll_length: int
) -> Path:
    path = [(lam, omega)]
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, _ = rates(k)
        states = descend(problem, lam, omega, draw.inner, tau, inner_steps)
        omega = states[-1]
        lam = lam - alpha * unrolled(problem, lam, states, tau, draw, last=unroll_length)
        path.append((lam, omega))
    return path


def forward(problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, inner_steps: int) -> Path:
    path = [(lam, omega)]
    identity = np.eye(omega.size)
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, _ = rates(k)
        tangent = np.zeros((lam.size, omega.size))
        for t in range(inner_steps):
            batch = of_step(draw.hvp, t)
            contraction = identity - tau * problem.hessian(lam, omega, batch)
            tangent = tangent @ contraction - tau * problem.mixed(lam, omega, batch)
            omega = omega - tau * problem.inner_grad(lam, omega, of_step(draw.inner, t))
        through_omega = tangent @ problem.outer_omega(lam, omega, draw.outer_omega)
        lam = lam - alpha * (problem.outer_lam(lam, omega, draw.outer_lam) + through_omega)
        path.append((lam, omega))
    return path


def rtho(problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates) -> Path:
    path = [(lam, omega)]
    identity = np.eye(omega.size)
    tangent = np.zeros((lam.size, omega.size))
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, _ = rates(k)
        contraction = identity - tau * problem.hessian(lam, omega, draw.hvp)
        tangent = tangent @ contraction - tau * problem.mixed(lam, omega, draw.hvp)
        omega = omega - tau * problem.inner_grad(lam, omega, draw.inner)
        through_omega = tangent @ problem.outer_omega(lam, omega, draw.outer_omega)
        lam = lam - alpha * (problem.outer_lam(lam, omega, draw.outer_lam) + through_omega)
        path.append((lam, omega))
    return path


def reversible(
    problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, inner_steps: int, decay: float
) -> Path:
    path = [(lam, omega)]
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, _ = rates(k)
        velocity = np.zeros_like(omega)
        states = [omega]
        for t in range(inner_steps):
            velocity = decay * velocity - (1 - decay) * problem.inner_grad(lam, omega, of_step(draw.inner, t))
            omega = omega + tau * velocity
            states.append(omega)
        of_omega = problem.outer_omega(lam, omega, draw.outer_omega)
        of_velocity = np.zeros_like(omega)
        gradient = problem.outer_lam(lam, omega, draw.outer_lam)
        for t in reversed(range(inner_steps)):
            batch = of_step(draw.inner, t)
            of_velocity = of_velocity + tau * of_omega
            gradient = gradient - (1 - decay) * problem.mixed(lam, states[t], batch) @ of_velocity
            of_omega = of_omega - (1 - decay) * problem.hessian(lam, states[t], batch) @ of_velocity
            of_velocity = decay * of_velocity
        lam = lam - alpha * gradient
        path.append((lam, omega))
    return path


def hoag(
    problem: Plain,
    lam: Array,
    omega: Array,
    draws: list[Draw],
    rates: Rates,
    *,
    tolerance: float,
    decay: float,
    max_iter: int,
    up: float = 2.0,
    down: float = 0.9,
) -> Path:
    path = [(lam, omega)]
    v = np.zeros_like(omega)
    size = rates(0)[0]
    value = math.inf
    for k, draw in enumerate(draws[1:]):
        _, tau, _, _ = rates(k)
        enough = tolerance * decay**k
        for t in range(max_iter):
            slope = problem.inner_grad(lam, omega, of_step(draw.inner, t))
            if np.linalg.norm(slope) <= enough:
                break
            omega = omega - tau * slope
        right = problem.outer_omega(lam, omega, draw.outer_omega)
        v = conjugate_gradient(problem, lam, omega, right, draw.hvp, max_iter, start=v, tolerance=enough)
        before = value
        value = problem.outer_value(lam, omega, draw.outer_omega)
        if k > 0:
            size = size / down if value <= before + enough else size / up
        lam = lam - size * readout(problem, lam, omega, v, draw)
        path.append((lam, omega))
    return path


def implicit_neumann(
    problem: Plain,
    lam: Array,
    omega: Array,
    draws: list[Draw],
    rates: Rates,
    *,
    inner_steps: int,
    hvp_steps: int,
    adjoint_lr: float,
) -> Path:
    path = [(lam, omega)]
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, _ = rates(k)
        omega = descend(problem, lam, omega, draw.inner, tau, inner_steps)[-1]
        lam = lam - alpha * with_neumann(problem, lam, omega, draw, hvp_steps, adjoint_lr)
        path.append((lam, omega))
    return path


def t1_t2(
    problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, inner_steps: int, adjoint_lr: float
) -> Path:
    path = [(lam, omega)]
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, _ = rates(k)
        omega = descend(problem, lam, omega, draw.inner, tau, inner_steps)[-1]
        v = adjoint_lr * problem.outer_omega(lam, omega, draw.outer_omega)
        lam = lam - alpha * readout(problem, lam, omega, v, draw)
        path.append((lam, omega))
    return path


def aid_fp(
    problem: Plain,
    lam: Array,
    omega: Array,
    draws: list[Draw],
    rates: Rates,
    *,
    inner_steps: int,
    num_terms: int,
    adjoint_lr: float,
) -> Path:
    path = [(lam, omega)]
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, _ = rates(k)
        omega = descend(problem, lam, omega, draw.inner, tau, inner_steps)[-1]
        right = problem.outer_omega(lam, omega, draw.outer_omega)
        v = np.zeros_like(omega)
        for j in range(num_terms):
            v = v + adjoint_lr * (right - problem.hessian(lam, omega, of_step(draw.hvp, j)) @ v)
        lam = lam - alpha * readout(problem, lam, omega, v, draw)
        path.append((lam, omega))
    return path


def aid_cg(
    problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, inner_steps: int, hvp_steps: int
) -> Path:
    path = [(lam, omega)]
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, _ = rates(k)
        omega = descend(problem, lam, omega, draw.inner, tau, inner_steps)[-1]
        right = problem.outer_omega(lam, omega, draw.outer_omega)
        v = conjugate_gradient(problem, lam, omega, right, draw.hvp, hvp_steps)
        lam = lam - alpha * readout(problem, lam, omega, v, draw)
        path.append((lam, omega))
    return path


def amigo(
    problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, inner_steps: int, hvp_steps: int
) -> Path:
    path = [(lam, omega)]
    v = np.zeros_like(omega)
    for k, draw in enumerate(draws[1:]):
        alpha, tau, beta, _ = rates(k)
        omega = descend(problem, lam, omega, draw.inner, tau, inner_steps)[-1]
        right = problem.outer_omega(lam, omega, draw.outer_omega)
        for j in range(hvp_steps):
            v = v + beta * (right - problem.hessian(lam, omega, of_step(draw.hvp, j)) @ v)
        lam = lam - alpha * readout(problem, lam, omega, v, draw)
        path.append((lam, omega))
    return path


def slip(problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, warm_up_steps: int) -> Path:
    omega = descend(problem, lam, omega, draws[0].inner, rates(0)[1], warm_up_steps)[-1]
    path = [(lam, omega)]
    v = np.zeros_like(omega)
    momentum = np.zeros_like(lam)
    for k, draw in enumerate(draws[1:]):
        alpha, tau, beta, eta = rates(k)
        omega = omega - tau * problem.inner_grad(lam, omega, of_step(draw.inner, 0))
        right = problem.outer_omega(lam, omega, draw.outer_omega)
        v = v - beta * (problem.hessian(lam, omega, of_step(draw.hvp, 0)) @ v - right)
        momentum = average(momentum, readout(problem, lam, omega, v, draw), eta)
        lam = lam - alpha * unit(momentum)
        path.append((lam, omega))
    return path


def sama(
    problem: Plain,
    lam: Array,
    omega: Array,
    draws: list[Draw],
    rates: Rates,
    *,
    inner_steps: int,
    b1: float,
    b2: float,
    eps: float,
) -> Path:
    path = [(lam, omega)]
    mean = np.zeros_like(omega)
    square = np.zeros_like(omega)
    count = 0
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, _ = rates(k)
        for t in range(inner_steps):
            slope = problem.inner_grad(lam, omega, of_step(draw.inner, t))
            old_mean = mean
            old_square = square
            mean = b1 * old_mean + (1 - b1) * slope
            square = b2 * old_square + (1 - b2) * slope**2
            count += 1
            corrected_mean = mean / (1 - b1**count)
            corrected_square = square / (1 - b2**count)
            omega = omega - tau * corrected_mean / (np.sqrt(corrected_square) + eps)
        numerator = (1 - b1) * b2 * old_square - b1 * (1 - b2) * slope * old_mean
        adaptation = tau * numerator / (np.sqrt(square) + eps) ** 3
        u = adaptation * problem.outer_omega(lam, omega, draw.outer_omega)
        lam = lam - alpha * readout(problem, lam, omega, u, draw)
        path.append((lam, omega))
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Inner problems that contain F
# ---------------------------------------------------------------------------------------------------------------------


def penalty(
    problem: Plain,
    lam: Array,
    omega: Array,
    draws: list[Draw],
    rates: Rates,
    *,
    inner_steps: int,
    rho: float,
    grow: float,
    bound: float,
    shrink: float,
) -> Path:
    path = [(lam, omega)]
    nu = np.zeros_like(omega)
    epsilon = bound
    first_rho = rho
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, _ = rates(k)
        tau = tau * first_rho / rho
        for t in range(inner_steps):
            multiplier = nu + rho * problem.inner_grad(lam, omega, of_step(draw.inner, t))
            curvature = problem.hessian(lam, omega, of_step(draw.hvp, t))
            omega = omega - tau * (problem.outer_omega(lam, omega, draw.outer_omega) + curvature @ multiplier)
        slope = problem.inner_grad(lam, omega, of_step(draw.inner, inner_steps - 1))
        multiplier = nu + rho * slope
        curvature = problem.hessian(lam, omega, of_step(draw.hvp, inner_steps - 1))
        in_omega = problem.outer_omega(lam, omega, draw.outer_omega) + curvature @ multiplier
        in_lam = problem.outer_lam(lam, omega, draw.outer_lam) + problem.mixed(lam, omega, draw.mixed_hvp) @ multiplier
        lam = lam - alpha * in_lam
        if np.linalg.norm(np.concatenate([in_lam, in_omega])) < epsilon:
            nu = nu + rho * slope
            rho = rho * grow
            epsilon = epsilon * shrink
        path.append((lam, omega))
    return path


def bda(
    problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, inner_steps: int, aggregation: float
) -> Path:
    path = [(lam, omega)]
    for k, draw in enumerate(draws[1:]):
        alpha, tau, beta, _ = rates(k)
        states = [omega]
        for t in range(inner_steps):
            of_outer = aggregation / (t + 1) * beta
            of_inner = (1 - aggregation / (t + 1)) * tau
            slope = problem.inner_grad(lam, omega, of_step(draw.inner, t))
            omega = omega - of_outer * problem.outer_omega(lam, omega, draw.outer_omega) - of_inner * slope
            states.append(omega)
        adjoint = problem.outer_omega(lam, omega, draw.outer_omega)
        gradient = problem.outer_lam(lam, omega, draw.outer_lam)
        for t in reversed(range(inner_steps)):
            of_outer = aggregation / (t + 1) * beta
            of_inner = (1 - aggregation / (t + 1)) * tau
            batch = of_step(draw.inner, t)
            outer_mixed = problem.outer_mixed_block(lam, states[t], draw.outer_omega)
            outer_curvature = problem.outer_hessian(lam, states[t], draw.outer_omega)
            mixed = of_outer * outer_mixed + of_inner * problem.mixed(lam, states[t], batch)
            curvature = of_outer * outer_curvature + of_inner * problem.hessian(lam, states[t], batch)
            gradient = gradient - mixed @ adjoint
            adjoint = adjoint - curvature @ adjoint
        lam = lam - alpha * gradient
        path.append((lam, omega))
    return path


def f2sa(problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, inner_steps: int) -> Path:
    path = [(lam, omega)]
    y = omega
    z = omega
    for k, draw in enumerate(draws[1:]):
        alpha, tau, beta, _ = rates(k)
        rho = tau / (2 * beta)
        for t in range(inner_steps):
            z = z - tau * problem.inner_grad(lam, z, of_step(draw.inner, t))
            penalised = rho * problem.inner_grad(lam, y, of_step(draw.hvp, t))
            y = y - beta * (problem.outer_omega(lam, y, draw.outer_omega) + penalised)
        gap = problem.inner_lam(lam, y, draw.mixed_hvp) - problem.inner_lam(lam, z, draw.mixed_hvp)
        lam = lam - alpha * (problem.outer_lam(lam, y, draw.outer_lam) + rho * gap)
        path.append((lam, z))
    return path


def bome(problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, inner_steps: int) -> Path:
    path = [(lam, omega)]
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, eta = rates(k)
        lowest = descend(problem, lam, omega, draw.inner, tau, inner_steps)[-1]
        gap_lam = problem.inner_lam(lam, omega, draw.inner) - problem.inner_lam(lam, lowest, draw.inner)
        gap_omega = problem.inner_grad(lam, omega, draw.inner)
        outer_lam = problem.outer_lam(lam, omega, draw.outer_omega)
        outer_omega = problem.outer_omega(lam, omega, draw.outer_omega)
        square = gap_lam @ gap_lam + gap_omega @ gap_omega
        product = outer_lam @ gap_lam + outer_omega @ gap_omega
        phi = eta * square
        multiplier = max(0.0, (phi - product) / square) if square > 0 else 0.0
        lam = lam - alpha * (outer_lam + multiplier * gap_lam)
        omega = omega - tau * (outer_omega + multiplier * gap_omega)
        path.append((lam, omega))
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Filtered directions of omega and lam, all at one point
# ---------------------------------------------------------------------------------------------------------------------


def sustain(
    problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, num_terms: int, adjoint_lr: float
) -> Path:
    path = [(lam, omega)]
    old_lam = lam
    old_omega = omega
    in_omega = problem.inner_grad(lam, omega, of_step(draws[0].inner, 0))
    in_lam = with_random_neumann(problem, lam, omega, draws[0], num_terms, adjoint_lr)
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, eta = rates(k)
        batch = of_step(draw.inner, 0)
        new = problem.inner_grad(lam, omega, batch)
        old = problem.inner_grad(old_lam, old_omega, batch)
        in_omega = storm(in_omega, new, old, eta)
        new = with_random_neumann(problem, lam, omega, draw, num_terms, adjoint_lr)
        old = with_random_neumann(problem, old_lam, old_omega, draw, num_terms, adjoint_lr)
        in_lam = storm(in_lam, new, old, eta)
        old_lam = lam
        old_omega = omega
        omega = omega - tau * in_omega
        lam = lam - alpha * in_lam
        path.append((lam, omega))
    return path


def mrbo(
    problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, hvp_steps: int, adjoint_lr: float
) -> Path:
    path = [(lam, omega)]
    old_lam = lam
    old_omega = omega
    in_omega = problem.inner_grad(lam, omega, of_step(draws[0].inner, 0))
    in_lam = with_neumann(problem, lam, omega, draws[0], hvp_steps, adjoint_lr)
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, eta = rates(k)
        batch = of_step(draw.inner, 0)
        new = problem.inner_grad(lam, omega, batch)
        old = problem.inner_grad(old_lam, old_omega, batch)
        in_omega = storm(in_omega, new, old, eta)
        new = with_neumann(problem, lam, omega, draw, hvp_steps, adjoint_lr)
        old = with_neumann(problem, old_lam, old_omega, draw, hvp_steps, adjoint_lr)
        in_lam = storm(in_lam, new, old, eta)
        old_lam = lam
        old_omega = omega
        omega = omega - tau * in_omega
        lam = lam - alpha * in_lam
        path.append((lam, omega))
    return path


def vrbo(
    problem: Plain,
    lam: Array,
    omega: Array,
    draws: list[Draw],
    rates: Rates,
    *,
    inner_steps: int,
    hvp_steps: int,
    adjoint_lr: float,
    refresh_period: int,
) -> Path:
    path = [(lam, omega)]
    start = draw_of_step(draws[0], 0)
    in_omega = problem.inner_grad(lam, omega, start.inner)
    in_lam = with_neumann(problem, lam, omega, start, hvp_steps, adjoint_lr)
    old_lam = lam
    old_omega = omega
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, _ = rates(k)
        if k % refresh_period == 0:
            refresh = draw_of_step(draw, 0)
            in_omega = problem.inner_grad(lam, omega, refresh.inner)
            in_lam = with_neumann(problem, lam, omega, refresh, hvp_steps, adjoint_lr)
            old_lam = lam
            old_omega = omega
        lam = lam - alpha * in_lam
        for t in range(inner_steps + 1):
            small = draw_of_step(draw, t + 1)
            new = problem.inner_grad(lam, omega, small.inner)
            old = problem.inner_grad(old_lam, old_omega, small.inner)
            in_omega = in_omega + new - old
            new = with_neumann(problem, lam, omega, small, hvp_steps, adjoint_lr)
            old = with_neumann(problem, old_lam, old_omega, small, hvp_steps, adjoint_lr)
            in_lam = in_lam + new - old
            old_lam = lam
            old_omega = omega
            omega = omega - tau * in_omega
        path.append((lam, omega))
    return path


def biadam(
    problem: Plain,
    lam: Array,
    omega: Array,
    draws: list[Draw],
    rates: Rates,
    *,
    num_terms: int,
    adjoint_lr: float,
    decay: float,
    eps: float,
) -> Path:
    path = [(lam, omega)]
    a = np.zeros_like(lam)
    b = 0.0
    in_omega = problem.inner_grad(lam, omega, of_step(draws[0].inner, 0))
    in_lam = with_random_neumann(problem, lam, omega, draws[0], num_terms, adjoint_lr)
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, eta = rates(k)
        in_omega = average(in_omega, problem.inner_grad(lam, omega, of_step(draw.inner, 0)), eta)
        in_lam = average(in_lam, with_random_neumann(problem, lam, omega, draw, num_terms, adjoint_lr), eta)
        a = decay * a + (1 - decay) * in_lam**2
        b = decay * b + (1 - decay) * np.linalg.norm(in_omega)
        lam = lam - alpha * in_lam / (np.sqrt(a) + eps)
        omega = omega - tau * in_omega / (b + eps)
        path.append((lam, omega))
    return path


def vr_biadam(
    problem: Plain,
    lam: Array,
    omega: Array,
    draws: list[Draw],
    rates: Rates,
    *,
    num_terms: int,
    adjoint_lr: float,
    decay: float,
    eps: float,
) -> Path:
    path = [(lam, omega)]
    a = np.zeros_like(lam)
    b = 0.0
    old_lam = lam
    old_omega = omega
    in_omega = problem.inner_grad(lam, omega, of_step(draws[0].inner, 0))
    in_lam = with_random_neumann(problem, lam, omega, draws[0], num_terms, adjoint_lr)
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, eta = rates(k)
        batch = of_step(draw.inner, 0)
        new = problem.inner_grad(lam, omega, batch)
        old = problem.inner_grad(old_lam, old_omega, batch)
        in_omega = storm(in_omega, new, old, eta)
        new = with_random_neumann(problem, lam, omega, draw, num_terms, adjoint_lr)
        old = with_random_neumann(problem, old_lam, old_omega, draw, num_terms, adjoint_lr)
        in_lam = storm(in_lam, new, old, eta)
        a = decay * a + (1 - decay) * in_lam**2
        b = decay * b + (1 - decay) * np.linalg.norm(in_omega)
        old_lam = lam
        old_omega = omega
        lam = lam - alpha * in_lam / (np.sqrt(a) + eps)
        omega = omega - tau * in_omega / (b + eps)
        path.append((lam, omega))
    return path


def svrb(problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, mu: float) -> Path:
    def oracles(lam: Array, omega: Array, draw: Draw) -> tuple[Array, ...]:
        return (
            problem.inner_grad(lam, omega, draw.inner),
            problem.outer_lam(lam, omega, draw.outer_lam),
            problem.outer_omega(lam, omega, draw.outer_omega),
            problem.hessian(lam, omega, draw.hvp),
            problem.mixed(lam, omega, draw.hvp),
        )

    path = [(lam, omega)]
    old_lam = lam
    old_omega = omega
    tracked = oracles(lam, omega, draws[0])
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, eta = rates(k)
        news = oracles(lam, omega, draw)
        olds = oracles(old_lam, old_omega, draw)
        tracked = [storm(*three, eta) for three in zip(tracked, news, olds, strict=True)]
        tracked[3] = at_least(tracked[3], mu)
        in_omega, outer_lam, outer_omega, hessian, mixed = tracked
        old_lam = lam
        old_omega = omega
        lam = lam - alpha * (outer_lam - mixed @ np.linalg.solve(hessian, outer_omega))
        omega = omega - tau * in_omega
        path.append((lam, omega))
    return path


def stable(problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, mu: float) -> Path:
    path = [(lam, omega)]
    old_lam = lam
    old_omega = omega
    hessian = problem.hessian(lam, omega, draws[0].hvp)
    mixed = problem.mixed(lam, omega, draws[0].hvp)
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, eta = rates(k)
        new = problem.hessian(lam, omega, draw.hvp)
        old = problem.hessian(old_lam, old_omega, draw.hvp)
        hessian = at_least(storm(hessian, new, old, eta), mu)
        new = problem.mixed(lam, omega, draw.hvp)
        old = problem.mixed(old_lam, old_omega, draw.hvp)
        mixed = storm(mixed, new, old, eta)
        old_lam = lam
        old_omega = omega
        v = np.linalg.solve(hessian, problem.outer_omega(old_lam, old_omega, draw.outer_omega))
        lam = old_lam - alpha * (problem.outer_lam(old_lam, old_omega, draw.outer_lam) - mixed @ v)
        drift = np.linalg.solve(hessian, mixed.T @ (lam - old_lam))
        omega = old_omega - tau * problem.inner_grad(old_lam, old_omega, draw.inner) - drift
        path.append((lam, omega))
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Single loops: lam, omega and v from one point
# ---------------------------------------------------------------------------------------------------------------------


def soba(problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates) -> Path:
    path = [(lam, omega)]
    v = np.zeros_like(omega)
    for k, draw in enumerate(draws[1:]):
        alpha, tau, beta, _ = rates(k)
        direction = directions(problem, Three(lam, omega, v), draw)
        lam = lam - alpha * direction.lam
        omega = omega - tau * direction.omega
        v = v - beta * direction.v
        path.append((lam, omega))
    return path


def one_step(problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates) -> Path:
    path = [(lam, omega)]
    for k, draw in enumerate(draws[1:]):
        alpha, tau, beta, _ = rates(k)
        v = beta * problem.outer_omega(lam, omega, draw.outer_omega)
        in_lam = readout(problem, lam, omega, v, draw)
        omega = omega - tau * problem.inner_grad(lam, omega, draw.inner)
        lam = lam - alpha * in_lam
        path.append((lam, omega))
    return path


def ma_soba(problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates) -> Path:
    path = [(lam, omega)]
    v = np.zeros_like(omega)
    momentum = np.zeros_like(lam)
    for k, draw in enumerate(draws[1:]):
        alpha, tau, beta, eta = rates(k)
        direction = directions(problem, Three(lam, omega, v), draw)
        lam = lam - alpha * momentum
        omega = omega - tau * direction.omega
        v = v - beta * direction.v
        momentum = average(momentum, direction.lam, eta)
        path.append((lam, omega))
    return path


class Table:
    """The table of SAGA for one oracle."""

    def __init__(self, entries: int, size: int) -> None:
        self.values = np.zeros((entries, size))

    def __call__(self, index: int, new: Array) -> Array:
        direction = new - self.values[index] + self.values.mean(axis=0)
        self.values[index] = new
        return direction


def saba(
    problem: Plain,
    lam: Array,
    omega: Array,
    draws: list[Draw],
    rates: Rates,
    *,
    inner_batches: int,
    outer_batches: int,
) -> Path:
    path = [(lam, omega)]
    v = np.zeros_like(omega)
    inner_grad = Table(inner_batches, omega.size)
    hessian_v = Table(inner_batches, omega.size)
    cross_v = Table(inner_batches, lam.size)
    outer_omega = Table(outer_batches, omega.size)
    outer_lam = Table(outer_batches, lam.size)
    for k, draw in enumerate(draws[1:]):
        alpha, tau, beta, _ = rates(k)
        i = draw.inner
        j = draw.outer_omega
        in_omega = inner_grad(i, problem.inner_grad(lam, omega, i))
        product = hessian_v(i, problem.hessian(lam, omega, i) @ v)
        in_v = product - outer_omega(j, problem.outer_omega(lam, omega, j))
        product = cross_v(i, problem.mixed(lam, omega, i) @ v)
        in_lam = outer_lam(j, problem.outer_lam(lam, omega, j)) - product
        lam = lam - alpha * in_lam
        omega = omega - tau * in_omega
        v = v - beta * in_v
        path.append((lam, omega))
    return path


def srba(problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, refresh_period: int) -> Path:
    path = [(lam, omega)]
    point = Three(lam, omega, np.zeros_like(omega))
    before = point
    tracked = Three(np.zeros_like(lam), np.zeros_like(omega), np.zeros_like(omega))
    for k, draw in enumerate(draws[1:]):
        alpha, tau, beta, _ = rates(k)
        new = directions(problem, point, draw)
        old = directions(problem, before, draw)
        if k % refresh_period == 0:
            tracked = new
        else:
            tracked = Three(
                tracked.lam + new.lam - old.lam,
                tracked.omega + new.omega - old.omega,
                tracked.v + new.v - old.v,
            )
        before = point
        point = Three(
            before.lam - alpha * tracked.lam,
            before.omega - tau * tracked.omega,
            before.v - beta * tracked.v,
        )
        path.append((point.lam, point.omega))
    return path


def fdehbo(
    problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, max_adjoint_norm: float
) -> Path:
    path = [(lam, omega)]
    point = Three(lam, omega, np.zeros_like(omega))
    before = point
    tracked = directions(problem, point, draws[0])
    for k, draw in enumerate(draws[1:]):
        alpha, tau, beta, eta = rates(k)
        new = directions(problem, point, draw)
        old = directions(problem, before, draw)
        tracked = Three(
            storm(tracked.lam, new.lam, old.lam, eta),
            storm(tracked.omega, new.omega, old.omega, eta),
            storm(tracked.v, new.v, old.v, eta),
        )
        before = point
        point = Three(
            before.lam - alpha * tracked.lam,
            before.omega - tau * tracked.omega,
            in_ball(before.v - beta * tracked.v, max_adjoint_norm),
        )
        path.append((point.lam, point.omega))
    return path


def hjfbio(
    problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, max_adjoint_norm: float
) -> Path:
    path = [(lam, omega)]
    v = np.zeros_like(omega)
    for k, draw in enumerate(draws[1:]):
        alpha, tau, beta, _ = rates(k)
        direction = directions(problem, Three(lam, omega, v), draw)
        lam = lam - alpha * direction.lam
        omega = omega - tau * direction.omega
        v = in_ball(v - beta * direction.v, max_adjoint_norm)
        path.append((lam, omega))
    return path


def s_tfbo(problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates) -> Path:
    path = [(lam, omega)]
    v = np.zeros_like(omega)
    squares_lam = 0.0
    squares_omega = 0.0
    squares_v = 0.0
    for k, draw in enumerate(draws[1:]):
        alpha, tau, beta, _ = rates(k)
        direction = directions(problem, Three(lam, omega, v), draw)
        squares_lam += direction.lam @ direction.lam
        squares_omega += direction.omega @ direction.omega
        squares_v += direction.v @ direction.v
        a = math.sqrt(1 / alpha**2 + squares_lam)
        b = math.sqrt(1 / tau**2 + squares_omega)
        c = math.sqrt(1 / beta**2 + squares_v)
        f = max(b, c)
        omega = omega - direction.omega / b
        v = v - direction.v / f
        lam = lam - direction.lam / (a * f)
        path.append((lam, omega))
    return path


# ---------------------------------------------------------------------------------------------------------------------
# lam first
# ---------------------------------------------------------------------------------------------------------------------


def accbo(
    problem: Plain,
    lam: Array,
    omega: Array,
    draws: list[Draw],
    rates: Rates,
    *,
    gamma: float,
    average: float,
    num_terms: int,
    adjoint_lr: float,
) -> Path:
    path = [(lam, omega)]
    w = omega
    old_w = omega
    direction = with_random_neumann(problem, lam, omega, draws[0], num_terms, adjoint_lr)
    for k, draw in enumerate(draws[1:]):
        alpha, tau, _, eta = rates(k)
        old_lam = lam
        old_omega = omega
        lam = lam - alpha * unit(direction)
        z = w + gamma * (w - old_w)
        old_w = w
        w = z - tau * problem.inner_grad(lam, z, of_step(draw.inner, 0))
        omega = (1 - average) * omega + average * w
        new = with_random_neumann(problem, lam, omega, draw, num_terms, adjoint_lr)
        old = with_random_neumann(problem, old_lam, old_omega, draw, num_terms, adjoint_lr)
        direction = storm(direction, new, old, eta)
        path.append((lam, omega))
    return path


def fsla(
    problem: Plain,
    lam: Array,
    omega: Array,
    draws: list[Draw],
    rates: Rates,
    *,
    adjoint_at: str = "old_params",
    momentum: str = "storm",
) -> Path:
    path = [(lam, omega)]
    v = np.zeros_like(omega)
    direction = readout(problem, lam, omega, v, draws[0])
    for k, draw in enumerate(draws[1:]):
        alpha, tau, beta, eta = rates(k)
        old_lam = lam
        old_omega = omega
        old_v = v
        lam = lam - alpha * direction
        omega = omega - tau * problem.inner_grad(lam, omega, of_step(draw.inner, 0))
        at = {"old_params": old_omega, "new_params": omega}[adjoint_at]
        product = problem.hessian(lam, at, of_step(draw.hvp, 0)) @ v
        v = v + beta * (problem.outer_omega(lam, at, draw.outer_omega) - product)
        new = readout(problem, lam, omega, v, draw)
        if momentum == "storm":
            direction = storm(direction, new, readout(problem, old_lam, old_omega, old_v, draw), eta)
        elif momentum == "average":
            direction = average(direction, new, eta)
        elif momentum == "none":
            direction = new
        else:
            raise ValueError(momentum)
        path.append((lam, omega))
    return path


def single_loop(problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates) -> Path:
    return fsla(problem, lam, omega, draws, rates, adjoint_at="new_params", momentum="none")


def lam_first(
    problem: Plain,
    lam: Array,
    omega: Array,
    draws: list[Draw],
    rates: Rates,
    inner_steps: int,
    estimate: Callable[[Array, list[Array], float, Draw], Array],
) -> Path:
    """lam, then inner steps (several from the first omega of the run), then STORM on an estimate.

    The estimate gets lam, the states of the inner steps that led to the point, their rate, and the sample.
    """
    path = [(lam, omega)]
    start = omega
    states = [omega]
    tau = 0.0
    direction = estimate(lam, states, tau, draws[0])
    for k, draw in enumerate(draws[1:]):
        old_lam = lam
        old_states = states
        old_tau = tau
        alpha, tau, _, eta = rates(k)
        lam = lam - alpha * direction
        states = descend(problem, lam, start if inner_steps > 1 else states[-1], draw.inner, tau, inner_steps)
        new = estimate(lam, states, tau, draw)
        old = estimate(old_lam, old_states, old_tau, draw)
        direction = storm(direction, new, old, eta)
        path.append((lam, states[-1]))
    return path


def bp(problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, inner_steps: int) -> Path:
    def estimate(lam: Array, states: list[Array], tau: float, draw: Draw) -> Array:
        return unrolled(problem, lam, states, tau, draw)

    return lam_first(problem, lam, omega, draws, rates, inner_steps, estimate)


def ns(
    problem: Plain,
    lam: Array,
    omega: Array,
    draws: list[Draw],
    rates: Rates,
    *,
    inner_steps: int,
    num_terms: int,
    adjoint_lr: float,
) -> Path:
    def estimate(lam: Array, states: list[Array], tau: float, draw: Draw) -> Array:
        return with_neumann(problem, lam, states[-1], draw, num_terms - 1, adjoint_lr)

    return lam_first(problem, lam, omega, draws, rates, inner_steps, estimate)


def cg(
    problem: Plain, lam: Array, omega: Array, draws: list[Draw], rates: Rates, *, inner_steps: int, hvp_steps: int
) -> Path:
    def estimate(lam: Array, states: list[Array], tau: float, draw: Draw) -> Array:
        right = problem.outer_omega(lam, states[-1], draw.outer_omega)
        v = conjugate_gradient(problem, lam, states[-1], right, draw.hvp, hvp_steps)
        return readout(problem, lam, states[-1], v, draw)

    return lam_first(problem, lam, omega, draws, rates, inner_steps, estimate)
