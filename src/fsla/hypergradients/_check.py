"""Hypergradients at a point: every estimator of the paper behind one function, and each against the exact one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fsla._checks import pick, positive, whole_number
from fsla._tree import Tree, axpy, dense, dot, flatten, is_finite, norm, size, sub, unflatten
from fsla.hypergradients import _linsolve as linsolve
from fsla.hypergradients._estimators import (
    ConjugateGradient,
    Exact,
    Implicit,
    Neumann,
    Tangent,
    Tracked,
    Unrolled,
    readout,
)
from fsla.hypergradients._exact import solve_directly, solve_inner
from fsla.hypergradients._inner import Descent
from fsla.problems._batches import Batch, Sample
from fsla.problems._differences import Differencing, StepCheck
from fsla.problems._problem import Oracles, Point, checked
from fsla.problems._wrappers import Seeded, Shared


class DivergenceWarning(UserWarning):
    """A hypergradient was computed by an iteration that diverges, and means nothing."""


@dataclass(frozen=True)
class Hypergradient:
    """An approximate ∇f(λ) and how far to trust it."""

    value: Tree
    v: Tree | None
    """v ≈ H⁻¹ ∂_ω F, where the method has one."""
    omega: Tree
    """Where it was evaluated: the given ω, or the one that the method's inner steps ended in."""
    residual: float | None = None
    """‖∂_ω F - H v‖ / ‖∂_ω F‖ at `omega`."""
    converged: bool | None = None
    """Whether the residual is within the tolerance; None where the method solves no system."""
    note: str = ""


class _Options(NamedTuple):
    steps: int
    beta: float | None
    tol: float | None
    truncate: int | None


def hypergradient(
    problem: Oracles,
    at: Point,
    inner_batch: Batch,
    outer_batch: Batch,
    method: str = "cg",
    *,
    steps: int = 20,
    beta: float | None = None,
    tol: float | None = None,
    truncate: int | None = None,
    seed: int | None = None,
) -> Hypergradient:
    """Returns the hypergradient at (λ, ω) by one method, with its residual.

    Args:
        problem: the two losses, as `fsla.Problem`.
        at: the point. "exact" solves the inner problem from at.omega; "unrolled", "tangent" and "tracked" take
            `steps` inner steps from it; the others evaluate at at.omega itself, whose distance to ω_λ no number of
            steps removes.
        inner_batch, outer_batch: what the losses are given.
        method: "exact" (ω_λ by Newton, v by a direct solve), "implicit" (Proposition 1 at at.omega, v by a direct
            solve), "cg", "neumann", "unrolled" (BP), "tangent" (BP in forward mode: p products a step), "tracked"
            (FSLA at a fixed λ).
        steps: K, the number of terms, of conjugate-gradient steps or of inner steps.
        beta: the step of "neumann" and the inner step of the last three; by default 1/L, with L estimated.
        tol: the relative residual at which "cg" stops and which counts as converged; by default the rounding unit for
            the first and its square root for the second.
        truncate: for "unrolled", differentiate through the last `truncate` inner steps only.
        seed: fixes what random layers draw.
    """
    compute = pick(method, METHODS, "method")
    whole_number(steps, "steps", "hypergradient")
    for name, value in (("beta", beta), ("tol", tol)):
        positive(value, name, "hypergradient", optional=True)
    if truncate is not None and method != "unrolled":
        raise ValueError(f"truncate is for method='unrolled' alone. Got truncate={truncate} with method={method!r}.")
    xi = Sample.full(inner_batch, outer_batch, seed=seed)
    at = checked(problem, at, xi)
    shared = Shared(problem if seed is None else Seeded(problem, xi), linearised=True)
    result = compute(shared, at, xi, _Options(steps, beta, tol, truncate))
    if not is_finite(result.value):
        note = f"The hypergradient by {method!r} is not finite: its steps diverge. Leave beta out, or make it smaller."
        result = replace(result, note=result.note or note)
    if result.note:
        warnings.warn(result.note, DivergenceWarning, stacklevel=2)
    return result


def _exact(problem: Oracles, at: Point, xi: Sample, opt: _Options) -> Hypergradient:
    return _implicit(problem, Exact().solved(problem, at, xi), xi, opt)


def _implicit(problem: Oracles, at: Point, xi: Sample, opt: _Options) -> Hypergradient:
    return _solved(problem, at, xi, Implicit(solve_directly).adjoint(problem, at, xi), opt)


def _cg(problem: Oracles, at: Point, xi: Sample, opt: _Options) -> Hypergradient:
    products = 0

    def solve(matvec: linsolve.Matvec, b: Tree) -> Tree:
        def counted(v: Tree) -> Tree:
            nonlocal products
            products += 1
            return matvec(v)

        stop = None if opt.tol is None else opt.tol / 2  # the residual that CG carries drifts from the true one
        return ConjugateGradient(opt.steps, stop_early=True, tol=stop)(counted, b)

    result = _solved(problem, at, xi, Implicit(solve).adjoint(problem, at, xi), opt)
    if products == opt.steps or result.converged:
        return result
    return replace(
        result,
        note=f"CG stopped after {products} products at a relative residual of {result.residual:.1e}: to rounding, the "
        "curvature of G is not positive in every direction. The Hessian in omega is not positive definite, or too "
        "ill-conditioned for this dtype. Add a ridge to G, or use float64.",
    )


def _neumann(problem: Oracles, at: Point, xi: Sample, opt: _Options) -> Hypergradient:
    top = linsolve.largest_eigenvalue(problem.inner_at(at, xi.hvp).hvp, at.omega)
    beta = opt.beta or _safe_step(top)
    result = _solved(problem, at, xi, Implicit(Neumann(opt.steps, beta)).adjoint(problem, at, xi), opt)
    if beta * top <= 2:
        return result
    return replace(
        result,
        note=f"The Neumann series diverges: its step must be under 2/L, which is at most {2 / top:.3g} here. "
        f"Got beta={beta:.3g}. Leave beta out to have about 1/L.",
    )


def _unrolled(problem: Oracles, at: Point, xi: Sample, opt: _Options) -> Hypergradient:
    there = _descend(problem, at, xi, opt)
    return Hypergradient(dense(Unrolled(opt.truncate).gradient(problem, there, None, xi)), None, there.omega)


def _tangent(problem: Oracles, at: Point, xi: Sample, opt: _Options) -> Hypergradient:
    there = _descend(problem, at, xi, opt)
    return Hypergradient(dense(Tangent().gradient(problem, there, None, xi)), None, there.omega)


def _tracked(problem: Oracles, at: Point, xi: Sample, opt: _Options) -> Hypergradient:
    beta = _inner_step(problem, at, xi, opt)
    tracked = Tracked()
    v = tracked.init(at)
    for _ in range(opt.steps):  # the single-loop equation of section 4 with α = 0
        at, _ = Descent().run(problem, at, None, xi, beta)
        v = tracked.advance(problem, at, v, xi, beta)
    return _solved(problem, at, xi, v, opt)


METHODS: dict[str, Callable[[Oracles, Point, Sample, _Options], Hypergradient]] = {
    "exact": _exact,
    "implicit": _implicit,
    "cg": _cg,
    "neumann": _neumann,
    "unrolled": _unrolled,
    "tangent": _tangent,
    "tracked": _tracked,
}


def _descend(problem: Oracles, at: Point, xi: Sample, opt: _Options) -> Point:
    return Descent(opt.steps, trail=True).run(problem, at, None, xi, _inner_step(problem, at, xi, opt))[0]


def _inner_step(problem: Oracles, at: Point, xi: Sample, opt: _Options) -> float:
    return opt.beta or _safe_step(linsolve.largest_eigenvalue(problem.inner_at(at, xi.inner).hvp, at.omega))


def _safe_step(top: float) -> float:
    """A little under 1/L, since `top` bounds L from below."""
    if not top > 0:
        raise ValueError(
            f"The inner loss G must curve upwards in omega for a step to be chosen, but its largest curvature here is "
            f"{top:.2g}. Give beta, or start at another omega."
        )
    return 0.95 / top


def _solved(problem: Oracles, at: Point, xi: Sample, v: Tree, opt: _Options) -> Hypergradient:
    """Proposition 1 with the v that was found, and its residual, at the price of one more HVP."""
    p = problem.outer_at(at, xi.outer_omega).d_omega
    residual = float(linsolve.relative_residual(problem.inner_at(at, xi.hvp).hvp, p, v))
    tol = torch.finfo(flatten(v).dtype).eps ** 0.5 if opt.tol is None else opt.tol
    return Hypergradient(dense(readout(problem, at, v, xi)), v, at.omega, residual, residual <= tol)


class Line(NamedTuple):
    """One method at one K: its relative errors, from the given ω and from ω_λ, and its residual in the first case."""

    method: str
    steps: int | None
    error: float
    error_at_minimum: float
    residual: float | None


@dataclass(frozen=True)
class HypergradientCheck:
    """Every estimator against the exact hypergradient, as a table (print it)."""

    lines: list[Line]
    difference: float
    """Relative error of the exact one against a central difference of f along a random direction."""
    inner_distance: float
    """‖ω - ω_λ‖, which bounds what an estimator at ω can reach."""
    step: StepCheck | None = None
    """Where products are taken by differences: how much they depend on their step."""

    def __str__(self) -> str:
        text = [
            f"exact hypergradient against a central difference of f: relative error {self.difference:.1e}",
            f"distance of omega from the inner minimum: {self.inner_distance:.1e}",
            *([] if self.step is None else [str(self.step)]),
            "",
            f"{'method':10} {'K':>4}   {'error, from omega':>17}   {'from the minimum':>16}   {'residual':>8}",
        ]
        for line in self.lines:
            k = "-" if line.steps is None else line.steps
            residual = "-" if line.residual is None else f"{line.residual:.1e}"
            errors = f"{line.error:>17.1e}   {line.error_at_minimum:>16.1e}"
            text.append(f"{line.method:10} {k:>4}   {errors}   {residual:>8}")
        return "\n".join(text)


def check_hypergradient(
    problem: Oracles,
    at: Point,
    inner_batch: Batch,
    outer_batch: Batch,
    *,
    steps: Sequence[int] | int = (5, 20, 80),
    beta: float | None = None,
) -> HypergradientCheck:
    """Compares every estimator with the exact hypergradient, and that one with a central difference of f.

    Each is run from the given ω and from ω_λ: the first error holds the distance of ω from ω_λ, the second does not.
    G must be strongly convex in ω, and small enough for many exact solves. "tangent" is left out above 64 coordinates
    of λ.
    """
    every = [steps] if isinstance(steps, int) else list(steps)
    for k in every:
        whole_number(k, "steps", "check_hypergradient")
    exact = hypergradient(problem, at, inner_batch, outer_batch, "exact")
    scale = float(norm(exact.value)) or 1.0
    lines = []
    for method in METHODS:
        if method == "exact" or (method == "tangent" and size(at.lam) > 64):
            continue
        for K in [None] if method == "implicit" else every:
            found = exact
            errors = []
            for start in (exact.omega, at.omega):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DivergenceWarning)  # the table shows it
                    here = Point(at.lam, start)
                    found = hypergradient(problem, here, inner_batch, outer_batch, method, steps=K or 1, beta=beta)
                errors.append(float(norm(sub(found.value, exact.value))) / scale)
            lines.append(Line(method, K, errors[1], errors[0], found.residual))
    v = at.omega if exact.v is None else exact.v
    return HypergradientCheck(
        lines,
        _difference(problem, at, exact, inner_batch, outer_batch),
        float(norm(sub(at.omega, exact.omega))),
        problem.check_step(at, inner_batch, v) if isinstance(problem, Differencing) else None,
    )


def _difference(problem: Oracles, at: Point, exact: Hypergradient, inner_batch: Batch, outer_batch: Batch) -> float:
    """The relative error of ∇f along a random unit direction u, against (f(λ+εu) - f(λ-εu)) / 2ε."""
    flat = flatten(at.lam)
    u = torch.randn(flat.shape, dtype=flat.dtype, generator=torch.Generator().manual_seed(0)).to(flat.device)
    direction = unflatten(u / u.norm(), at.lam)
    step: float = torch.finfo(flat.dtype).eps ** (1 / 3) * max(1.0, float(norm(at.lam)))
    ends = []
    for sign in (1.0, -1.0):
        lam = axpy(sign * step, direction, at.lam)
        omega = solve_inner(problem, Point(lam, exact.omega), inner_batch)
        ends.append(float(problem.outer_at(Point(lam, omega), outer_batch).value))
    slope = float(dot(exact.value, direction))
    found = (ends[0] - ends[1]) / (2 * step)
    return abs(found - slope) / max(abs(slope), 1e-30)
