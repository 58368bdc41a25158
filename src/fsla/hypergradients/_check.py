"""Hypergradients at a point: every estimator of the paper behind one function, and each against the exact one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, overload

import torch

from fsla._checks import instance, pick, positive, whole_number
from fsla._tree import Tree, axpy, dense, dot, flatten, is_finite, norm, size, sub, unflatten, zeros_like
from fsla.hypergradients._estimators import (
    Exact,
    ForwardUnroll,
    HypergradientEstimator,
    ReverseUnroll,
    Solved,
    Tracked,
    readout,
)
from fsla.hypergradients._exact import solve_directly, solve_inner
from fsla.hypergradients._linear_solvers import (
    ConjugateGradient,
    Matvec,
    Neumann,
    largest_eigenvalue,
    relative_residual,
)
from fsla.problems._batches import StepBatches
from fsla.problems._views import FiniteDifferenceCheck, Oracles, Point, ProblemAtPoint, validate_start
from fsla.steps._context import StepContext, descend
from fsla.steps._momentum import Position
from fsla.steps._schedules import constant
from fsla.steps._updates import GradientDescent, Updates, Variable


class ConvergenceWarning(UserWarning):
    """Warning that an iteration did not converge, so that its result means nothing.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     result = fsla.hypergradient(problem, at, None, None, "neumann", step_size=1.0)
        >>> caught[0].category.__name__
        'ConvergenceWarning'
    """


@dataclass(frozen=True)
class HypergradientResult:
    """Result of `hypergradient`: an approximate ∇f(λ), and how far to trust it.

    Args:
        value: ∇f(λ), of the form of λ.
        adjoint: v ≈ H⁻¹ ∂_ω F; None if the method has none.
        omega: where it was evaluated: ω of the point, or the one where the method's inner steps ended.
        residual: ‖∂_ω F - H v‖ / ‖∂_ω F‖ at `omega`.
        converged: whether the residual is within the tolerance; None if the method solves no system.
        message: what went wrong; empty if nothing did.

    Examples:
        >>> result = fsla.hypergradient(problem, at, None, None, "cg")
        >>> result.converged, result.message
        (True, '')
    """

    value: Tree
    adjoint: Tree | None
    omega: Tree
    residual: float | None = None
    converged: bool | None = None
    message: str = ""


class _Request(NamedTuple):
    """What a method is asked for, and how.

    Args:
        step: what answers questions about the problem.
        at: the point.
        num_steps, step_size, tol, unroll_length: as in `hypergradient`.
    """

    step: StepContext
    at: Point
    num_steps: int
    step_size: float | None
    tol: float | None
    unroll_length: int | None

    def hvp_at(self, at: Point) -> Matvec:
        return self.step.inner_at(at, self.step.batches.hvp[0]).linearized().hvp

    def moving(self) -> StepContext:
        """Return the step with a size for ω and v: `step_size`, or one that is safe."""
        lr = self.step_size or _safe_step(largest_eigenvalue(self.hvp_at(self.at), self.at.omega))
        return _context(self.step._problem, self.step.batches, lr)


def hypergradient(
    problem: Oracles,
    at: Point,
    inner_batch: Any,
    outer_batch: Any,
    method: str = "cg",
    *,
    num_steps: int = 20,
    step_size: float | None = None,
    tol: float | None = None,
    unroll_length: int | None = None,
    seed: int | None = None,
) -> HypergradientResult:
    """Return the hypergradient at (λ, ω) by one method, with its residual.

    "exact" solves the inner problem from ``at.omega``. "unrolled", "forward_unrolled" and "single_loop" take
    `num_steps` inner steps from there. The others evaluate at ``at.omega`` itself, and no number of steps removes its
    distance to ω_λ.

    Args:
        problem: the two losses, such as a `fsla.Problem`.
        at: the point.
        inner_batch: batch of the inner loss.
        outer_batch: batch of the outer loss.
        method: "exact" (ω_λ by Newton, v by a direct solve), "implicit" (Proposition 1 at ``at.omega``, v by a direct
            solve), "cg", "neumann", "unrolled" (BP), "forward_unrolled" (BP in forward mode: p products a step) or
            "single_loop" (FSLA at a fixed λ).
        num_steps: K, the number of terms, of conjugate-gradient steps or of inner steps.
        step_size: step of "neumann", and inner step of the last three; by default 1/L, with L estimated.
        tol: relative residual at which "cg" stops and which counts as converged. By default the rounding unit for the
            first and its square root for the second.
        unroll_length: for "unrolled", how many of the last inner steps are differentiated.
        seed: seed of what random layers draw.

    Returns:
        The estimate, its residual and a message.

    Raises:
        ValueError: if an argument is out of range, or the losses are not finite at the point.

    Examples:
        >>> fsla.hypergradient(problem, at, None, None, "exact").value
        {'x': tensor([-2., -2.])}
        >>> fsla.hypergradient(problem, at, None, None, "single_loop", num_steps=100).value["x"].round(decimals=3)
        tensor([-2., -2.])
    """
    instance(problem, Oracles, "problem", "hypergradient", "a problem, such as a fsla.Problem")
    instance(at, Point, "at", "hypergradient", "a fsla.Point")
    if seed is not None:
        whole_number(seed, "seed", "hypergradient", least=-(2**63))
    compute = pick(method, METHODS, "method")
    whole_number(num_steps, "num_steps", "hypergradient")
    for name, value in (("step_size", step_size), ("tol", tol)):
        positive(value, name, "hypergradient", optional=True)
    if unroll_length is not None and method != "unrolled":
        raise ValueError(
            f"unroll_length is for method='unrolled' alone. Got unroll_length={unroll_length} with method={method!r}."
        )
    batches = StepBatches.shared(inner_batch, outer_batch, seed=seed)
    at = validate_start(problem, at, batches.inner_grad[0], batches.outer_grad_omega[0])
    step = _context(problem, batches, step_size or 0.0)
    result = compute(_Request(step, at, num_steps, step_size, tol, unroll_length))
    if not is_finite(result.value):
        message = f"The hypergradient by {method!r} is not finite: its steps diverge. Leave step_size out, or lower it."
        result = replace(result, message=result.message or message)
    if result.message:
        warnings.warn(result.message, ConvergenceWarning, stacklevel=2)
    return result


def _context(problem: Oracles, batches: StepBatches, lr: float) -> StepContext:
    sizes, update = constant(0.0, lr, lr), GradientDescent()
    updates = Updates(update, update, update)
    return StepContext(problem, batches, sizes.rates(0), updates, sizes, update_buffers=False)


def _exact(ask: _Request) -> HypergradientResult:
    return _implicit(ask._replace(at=Exact().solved(ask.step, ask.at)))


def _implicit(ask: _Request) -> HypergradientResult:
    return _solved(ask, Solved(solve_directly).adjoint(ask.step, ask.at))


def _cg(ask: _Request) -> HypergradientResult:
    products = 0

    def solve(matvec: Matvec, b: Tree) -> Tree:
        def counted(v: Tree) -> Tree:
            nonlocal products
            products += 1
            return matvec(v)

        stop = None if ask.tol is None else ask.tol / 2  # The residual that CG carries drifts from the true one.
        return ConjugateGradient(ask.num_steps, stop_early=True, tol=stop)(counted, b)

    result = _solved(ask, Solved(solve).adjoint(ask.step, ask.at))
    if products == ask.num_steps or result.converged:
        return result
    return replace(
        result,
        message=f"CG stopped after {products} products at a relative residual of {result.residual:.1e}: to rounding, "
        "the curvature of G is not positive in every direction. The Hessian in omega is not positive definite, or too "
        "ill-conditioned for this dtype. Add a ridge to G, or use float64.",
    )


def _neumann(ask: _Request) -> HypergradientResult:
    top = largest_eigenvalue(ask.hvp_at(ask.at), ask.at.omega)
    lr = ask.step_size or _safe_step(top)
    result = _solved(ask, Solved(Neumann(ask.num_steps, lr)).adjoint(ask.step, ask.at))
    if lr * top <= 2:
        return result
    return replace(
        result,
        message=f"The Neumann series diverges: its step must be under 2/L, which is at most {2 / top:.3g} here. "
        f"Got step_size={lr:.3g}. Leave step_size out to have about 1/L.",
    )


def _through_steps(ask: _Request, estimator: HypergradientEstimator) -> HypergradientResult:
    step = ask.moving()
    there, _ = descend(step, ask.at, Variable(ask.at.omega), ask.num_steps, keep=dict)
    return HypergradientResult(dense(estimator.gradient(step, Position(there, {}))), None, there.omega)


def _single_loop(ask: _Request) -> HypergradientResult:
    step = ask.moving()
    at, omega, v = ask.at, Variable(ask.at.omega), Variable(zeros_like(ask.at.omega))
    for _ in range(ask.num_steps):  # The single-loop equation of section 4 with α = 0.
        at, omega = descend(step, at, omega, 1)
        v, _ = Tracked().advance(step, at, v, None)
    return _solved(ask._replace(at=at), v.value)


METHODS: dict[str, Callable[[_Request], HypergradientResult]] = {
    "exact": _exact,
    "implicit": _implicit,
    "cg": _cg,
    "neumann": _neumann,
    "unrolled": lambda ask: _through_steps(ask, ReverseUnroll(ask.unroll_length)),
    "forward_unrolled": lambda ask: _through_steps(ask, ForwardUnroll()),
    "single_loop": _single_loop,
}


def _safe_step(top: float) -> float:
    """A little under 1/L, since `top` bounds L from below."""
    if not top > 0:
        raise ValueError(
            f"The inner loss G must curve upwards in omega for a step to be chosen, but its largest curvature here is "
            f"{top:.2g}. Give step_size, or start at another omega."
        )
    return 0.95 / top


def _solved(ask: _Request, v: Tree) -> HypergradientResult:
    """Proposition 1 with the v that was computed, and its residual, at the price of one more HVP."""
    p = ask.step.outer_at(ask.at, ask.step.batches.outer_grad_omega[0]).grad_omega
    residual = float(relative_residual(ask.hvp_at(ask.at), p, v))
    tol = torch.finfo(flatten(v).dtype).eps ** 0.5 if ask.tol is None else ask.tol
    value = dense(readout(ask.step, ask.at, v))
    return HypergradientResult(value, v, ask.at.omega, residual, residual <= tol)


class Row(NamedTuple):
    """One method at one K: its relative errors, from ω and from ω_λ, and its residual in the first case."""

    method: str
    num_steps: int | None
    error: float
    error_at_minimum: float
    residual: float | None


@dataclass(frozen=True)
class HypergradientCheck:
    """Result of `check_hypergradient`, which prints as a table.

    Args:
        rows: a row for each method and K.
        exact_vs_finite_difference: relative error of the exact hypergradient against a central difference of f along a
            random direction.
        distance_to_inner_minimum: ‖ω - ω_λ‖, which bounds what an estimator at ω can reach.
        fd_step_check: how much products depend on their step, if they are taken by differences.

    Examples:
        >>> check = fsla.check_hypergradient(problem, at, None, None, num_steps=20)
        >>> check.exact_vs_finite_difference < 1e-2
        True
        >>> [row.method for row in check.rows]
        ['implicit', 'cg', 'neumann', 'unrolled', 'forward_unrolled', 'single_loop']
    """

    rows: list[Row]
    exact_vs_finite_difference: float
    distance_to_inner_minimum: float
    fd_step_check: FiniteDifferenceCheck | None = None

    def __str__(self) -> str:
        error = self.exact_vs_finite_difference
        text = [
            f"exact hypergradient against a central difference of f: relative error {error:.1e}",
            f"distance of omega from the inner minimum: {self.distance_to_inner_minimum:.1e}",
            *([] if self.fd_step_check is None else [str(self.fd_step_check)]),
            "",
            f"{'method':16} {'K':>4}   {'error, from omega':>17}   {'from the minimum':>16}   {'residual':>8}",
        ]
        for row in self.rows:
            k = "-" if row.num_steps is None else row.num_steps
            residual = "-" if row.residual is None else f"{row.residual:.1e}"
            errors = f"{row.error:>17.1e}   {row.error_at_minimum:>16.1e}"
            text.append(f"{row.method:16} {k:>4}   {errors}   {residual:>8}")
        return "\n".join(text)


@overload
def check_hypergradient(
    problem: Oracles,
    at: Point,
    inner_batch: Any,
    outer_batch: Any,
    /,
    *,
    num_steps: Sequence[int] | int = ...,
    step_size: float | None = ...,
) -> HypergradientCheck: ...
@overload
def check_hypergradient(
    problem: ProblemAtPoint,
    inner_batch: Any,
    outer_batch: Any,
    /,
    *,
    num_steps: Sequence[int] | int = ...,
    step_size: float | None = ...,
) -> HypergradientCheck: ...
def check_hypergradient(
    problem: Oracles | ProblemAtPoint,
    *where: Any,
    num_steps: Sequence[int] | int = (5, 20, 80),
    step_size: float | None = None,
) -> HypergradientCheck:
    """Compare every estimator with the exact hypergradient, and that one with a central difference of f.

    Call it as ``check_hypergradient(problem, at, inner_batch, outer_batch)``. With a `fsla.BilevelOptimizer`, call it
    as ``check_hypergradient(bilevel, inner_batch, outer_batch)``; it then takes the point of the model.

    Each estimator runs from ω and from ω_λ. The first error includes the distance of ω from ω_λ, the second
    does not. G must be strongly convex in ω, and small enough for many exact solves. "forward_unrolled" is left out
    above 64 coordinates of λ.

    Args:
        problem: the two losses, or a `fsla.BilevelOptimizer`.
        where: the point, unless `problem` knows it, and an inner and an outer batch.
        num_steps: one number of steps, or several: the table has a row for each.
        step_size: as in `hypergradient`.

    Returns:
        The table.

    Examples:
        >>> check = fsla.check_hypergradient(problem, at, None, None, num_steps=20)
        >>> implicit = check.rows[0]
        >>> implicit.method, round(implicit.error, 2), round(implicit.error_at_minimum, 2)
        ('implicit', 0.5, 0.0)
    """
    if isinstance(problem, ProblemAtPoint):
        oracles, at = problem.problem_at_point()
        if len(where) != 2:
            raise TypeError(
                "check_hypergradient needs two batches after the optimizer: check_hypergradient(bilevel, inner_batch, "
                f"outer_batch). Got {len(where)} arguments after it."
            )
        inner_batch, outer_batch = where
    else:
        oracles = problem
        if len(where) != 3:
            raise TypeError(
                "check_hypergradient needs a point and two batches after the problem: check_hypergradient(problem, at, "
                f"inner_batch, outer_batch). Got {len(where)} arguments after it."
            )
        at, inner_batch, outer_batch = where
    several = isinstance(num_steps, Sequence) and not isinstance(num_steps, str)
    every: list[Any] = list(num_steps) if several else [num_steps]  # type: ignore[arg-type]
    for k in every:
        whole_number(k, "num_steps", "check_hypergradient")
    exact = hypergradient(oracles, at, inner_batch, outer_batch, "exact")
    scale = float(norm(exact.value)) or 1.0
    rows = []
    for method in METHODS:
        if method == "exact" or (method == "forward_unrolled" and size(at.lam) > 64):
            continue
        for K in [None] if method == "implicit" else every:
            result = exact
            errors = []
            for start in (exact.omega, at.omega):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ConvergenceWarning)  # The table shows it.
                    point = Point(at.lam, start)
                    result = hypergradient(
                        oracles, point, inner_batch, outer_batch, method, num_steps=K or 1, step_size=step_size
                    )
                errors.append(float(norm(sub(result.value, exact.value))) / scale)
            rows.append(Row(method, K, errors[1], errors[0], result.residual))
    batches = StepBatches.shared(inner_batch, outer_batch)
    return HypergradientCheck(
        rows,
        _difference(oracles, at, exact, batches),
        float(norm(sub(at.omega, exact.omega))),
        oracles.check_step(at, batches.inner_grad[0], at.omega if exact.adjoint is None else exact.adjoint),
    )


def _difference(problem: Oracles, at: Point, exact: HypergradientResult, batches: StepBatches) -> float:
    """The relative error of ∇f along a random unit direction u, against (f(λ+εu) - f(λ-εu)) / 2ε."""
    flat = flatten(at.lam)
    u = torch.randn(flat.shape, dtype=flat.dtype, generator=torch.Generator().manual_seed(0)).to(flat.device)
    direction = unflatten(u / u.norm(), at.lam)
    step: float = torch.finfo(flat.dtype).eps ** (1 / 3) * max(1.0, float(norm(at.lam)))
    ends = []
    for sign in (1.0, -1.0):
        lam = axpy(sign * step, direction, at.lam)
        omega = solve_inner(lambda point: problem.inner_at(point, batches.inner_grad[0]), Point(lam, exact.omega))
        ends.append(float(problem.outer_at(Point(lam, omega), batches.outer_grad_omega[0]).value))
    slope = float(dot(exact.value, direction))
    difference = (ends[0] - ends[1]) / (2 * step)
    return abs(difference - slope) / max(abs(slope), 1e-30)
