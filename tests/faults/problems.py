"""Hard problems: a run must end with a better outer value than at its start, raise, or warn.

All have an inner loss G with an ω*(λ) that can be computed, so that f(λ) = F(λ, ω*(λ)) judges λ alone. Users' numbers
have any units: losses and variables are rescaled by up to a million.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fsla
from faults.trials import SilentlyWrong, Trial

CATEGORY = "hard problems"
STEPS = 600
LOST = 0.01
"""Share of what there is to gain by which f may end above its start: the noise of the last steps."""
STALLED = 0.05
"""Share of what there is to gain that a run must reach at least, or it does not move."""
CONVERGED = 0.9
"""Share that a run must reach to count as converged."""
EASY = "easy"
SIZE = 6
ALGORITHMS = {"SOBA": fsla.SOBA, "MASOBA": fsla.MASOBA, "FSLA": fsla.FSLA}

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class HardProblem:
    """A bilevel problem on vectors.

    Args:
        inner: G(λ, ω, noise).
        outer: F(λ, ω, noise).
        solution: ω*(λ), the minimum of G that is nearest to an ω.
        lam: λ at the start.
        omega: ω at the start.
        noise: size of the noise of the gradients.
        easy: whether a run with its defaults must converge on it.
    """

    inner: Loss
    outer: Loss
    solution: Callable[[Tensor, Tensor], Tensor]
    lam: Tensor
    omega: Tensor
    noise: float = 0.0
    easy: bool = False

    def value(self, lam: Tensor, omega: Tensor) -> float:
        """Return f(λ) in the valley of G that ω lies in."""
        zero = torch.zeros(SIZE, dtype=lam.dtype)
        return float(self.outer(lam, self.solution(lam, omega), zero))

    def best(self) -> float:
        """Return the least f that L-BFGS reaches from the start, in units of the gradient there."""
        lam = self.lam.clone().requires_grad_()
        zero = torch.zeros(SIZE, dtype=lam.dtype)
        (slope,) = torch.autograd.grad(self.outer(lam, self.solution(lam, self.omega), zero), lam)
        size, start = float(slope.norm()), self.value(self.lam, self.omega)
        if not size:
            return start
        unit = nn.Parameter(torch.zeros_like(lam))
        length = max(abs(start), 1e-30) / size
        solver = torch.optim.LBFGS([unit], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-12)

        def closure() -> Tensor:
            solver.zero_grad()
            point = self.lam + length * unit
            value = self.outer(point, self.solution(point, self.omega), zero) / max(abs(start), 1e-30)
            value.backward()
            return value

        solver.step(closure)
        return min(start, self.value(self.lam + length * unit.detach(), self.omega))


def quadratic(
    seed: int,
    condition: float,
    *,
    unit_of_lam: float = 1.0,
    unit_of_omega: float = 1.0,
    unit_of_inner: float = 1.0,
    unit_of_outer: float = 1.0,
    noise: float = 0.0,
    start: float = 0.0,
    easy: bool = False,
) -> HardProblem:
    """Return a problem with G = ½ (ω - Aλ)ᵀ H (ω - Aλ) and F = ½ ‖ω - t‖² + .05 ‖λ‖², each in units of its own."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64))[0]
    eigenvalues = torch.logspace(0, math.log10(condition), SIZE, dtype=torch.float64)
    hessian = basis @ torch.diag(eigenvalues) @ basis.T
    a = torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64) / SIZE**0.5
    target = torch.randn(SIZE, generator=generator, dtype=torch.float64)

    def solution(lam: Tensor, omega: Tensor) -> Tensor:
        return unit_of_omega * (a @ (lam / unit_of_lam))

    def inner(lam: Tensor, omega: Tensor, noise: Tensor) -> Tensor:
        error = omega / unit_of_omega - a.to(lam) @ (lam / unit_of_lam)
        return unit_of_inner * (0.5 * error @ (hessian.to(lam) @ error) + noise @ error)

    def outer(lam: Tensor, omega: Tensor, noise: Tensor) -> Tensor:
        plain_lam, error = lam / unit_of_lam, omega / unit_of_omega - target.to(lam)
        return unit_of_outer * (0.5 * error @ error + 0.05 * plain_lam @ plain_lam + noise @ error)

    lam = torch.full((SIZE,), start * unit_of_lam, dtype=torch.float64)
    omega = torch.full((SIZE,), start * unit_of_omega, dtype=torch.float64)
    return HardProblem(inner, outer, solution, lam, omega, noise, easy)


def singular(seed: int, *, seen: bool) -> HardProblem:
    """Return a problem whose G is flat in one direction of ω, which F reads (`seen`) or not."""
    base = quadratic(seed, 10.0)
    mask = torch.ones(SIZE, dtype=torch.float64)
    mask[0] = 0.0
    read = torch.ones_like(mask) if seen else mask

    def inner(lam: Tensor, omega: Tensor, noise: Tensor) -> Tensor:
        error = mask.to(lam) * (omega - lam)
        return 0.5 * error @ error + noise @ error

    def outer(lam: Tensor, omega: Tensor, noise: Tensor) -> Tensor:
        error = read.to(lam) * (omega - 1.0)
        return 0.5 * error @ error + noise @ error

    return HardProblem(inner, outer, lambda lam, omega: mask * lam, base.lam, base.omega)


def double_well(seed: int) -> HardProblem:
    """Return a problem whose G has two valleys in each coordinate; λ shifts the one that ω is in."""
    generator = torch.Generator().manual_seed(seed)
    target = 1.0 + 0.3 * torch.rand(SIZE, generator=generator, dtype=torch.float64)

    def inner(lam: Tensor, omega: Tensor, noise: Tensor) -> Tensor:
        shifted = omega - lam
        return (0.25 * (shifted.square() - 1).square()).sum() + noise @ omega

    def outer(lam: Tensor, omega: Tensor, noise: Tensor) -> Tensor:
        error = omega - target.to(lam)
        return 0.5 * error @ error + noise @ error

    start = torch.full((SIZE,), 0.5, dtype=torch.float64)
    return HardProblem(
        inner, outer, lambda lam, omega: lam + torch.sign(omega - lam), torch.zeros(SIZE, dtype=torch.float64), start
    )


def waves(seed: int) -> HardProblem:
    """Return a problem whose F has many valleys in λ."""
    base = quadratic(seed, 3.0)

    def outer(lam: Tensor, omega: Tensor, noise: Tensor) -> Tensor:
        return base.outer(lam, omega, noise) + 0.3 * (1 - torch.cos(3 * omega)).sum()

    return HardProblem(base.inner, outer, base.solution, base.lam, base.omega)


def log_ridge(seed: int) -> HardProblem:
    """Return ridge regression with e^λ as the penalties, which is what most users learn first."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, SIZE, generator=generator, dtype=torch.float64)
    true = torch.tensor([1.0, -1.0, 0.5, 0.0, 0.0, 0.0], dtype=torch.float64)
    y = x @ true + 2.0 * torch.randn(40, generator=generator, dtype=torch.float64)
    held_x = torch.randn(40, SIZE, generator=generator, dtype=torch.float64)
    held_y = held_x @ true

    def inner(lam: Tensor, omega: Tensor, noise: Tensor) -> Tensor:
        residual = x.to(lam) @ omega - y.to(lam)
        return 0.5 * residual.square().mean() + 0.5 * (lam.exp() * omega.square()).sum() + noise @ omega

    def outer(lam: Tensor, omega: Tensor, noise: Tensor) -> Tensor:
        return 0.5 * (held_x.to(lam) @ omega - held_y.to(lam)).square().mean() + noise @ omega

    def solution(lam: Tensor, omega: Tensor) -> Tensor:
        gram, right = x.T @ x / 40, x.T @ y / 40
        return torch.linalg.solve(gram + torch.diag(lam.exp()), right)

    start = torch.full((SIZE,), -4.0, dtype=torch.float64)
    return HardProblem(inner, outer, solution, start, torch.zeros(SIZE, dtype=torch.float64), easy=True)


def catalogue(seed: int) -> dict[str, HardProblem]:
    """Return 22 problems by name."""
    problems = {
        f"condition {condition:g}": quadratic(seed, condition, easy=condition <= 10)
        for condition in (1.0, 10.0, 100.0, 1000.0)
    }
    for unit in (1e-6, 1e-3, 1e3, 1e6):
        problems[f"outer variable in units of {unit:g}"] = quadratic(seed, 10.0, unit_of_lam=unit)
    for unit in (1e-6, 1e6):
        problems[f"outer loss in units of {unit:g}"] = quadratic(seed, 10.0, unit_of_outer=unit, easy=True)
        problems[f"inner loss in units of {unit:g}"] = quadratic(seed, 10.0, unit_of_inner=unit, easy=True)
    return problems | {
        "inner variable in units of 0.001": quadratic(seed, 10.0, unit_of_omega=1e-3),
        "far start": quadratic(seed, 10.0, start=30.0),
        "start away from 0": quadratic(seed, 3.0, start=1.0, easy=True),
        "little noise": quadratic(seed, 10.0, noise=0.1, easy=True),
        "much noise": quadratic(seed, 10.0, noise=3.0),
        "stiff": quadratic(seed, 1e6),
        "singular, not seen": singular(seed, seen=False),
        "singular, seen": singular(seed, seen=True),
        "double well": double_well(seed),
        "waves": waves(seed),
        "logarithmic ridge": log_ridge(seed),
        "ridge of regression, rescaled": quadratic(seed, 30.0, unit_of_inner=100.0, unit_of_outer=0.01, easy=True),
    }


@dataclass(frozen=True)
class Ended:
    """What a run came to.

    Args:
        start: f at the start.
        end: f at the end.
        best: the least f.
    """

    start: float
    end: float
    best: float

    @property
    def gain(self) -> float:
        """The share of what there is to gain: 1 at the optimum, 0 at the start, negative above it."""
        return (self.start - self.end) / max(self.start - self.best, 1e-12 * abs(self.start) + 1e-300)


class _Vector(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value.clone())


def solve(problem: HardProblem, algorithm: type[fsla.BilevelOptimizer], seed: int, steps: int = STEPS) -> Ended:
    """Run an algorithm with its defaults."""
    torch.manual_seed(seed)
    model, lam = _Vector(problem.omega.float()), nn.Parameter(problem.lam.float())
    bilevel = algorithm(
        model,
        lam,
        inner_loss=lambda model, lam, noise: problem.inner(lam, model.value, noise),
        outer_loss=lambda model, lam, noise: problem.outer(lam, model.value, noise),
    )
    noise = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        bilevel.step(*(problem.noise * torch.randn(SIZE, generator=noise) for _ in range(2)))
    end = problem.value(lam.detach().double(), model.value.detach().double())
    return Ended(problem.value(problem.lam, problem.omega), end, problem.best())


def trials(seed: int) -> Iterator[Trial]:
    """Yield each problem under each algorithm."""
    for name, problem in catalogue(seed).items():
        for label, algorithm in ALGORITHMS.items():
            tag = EASY if problem.easy else ""
            yield Trial(CATEGORY, f"{name}, {label}", _judge(problem, algorithm, seed), limit_s=120.0, tag=tag)


def _judge(problem: HardProblem, algorithm: type[fsla.BilevelOptimizer], seed: int) -> Callable[[], str | None]:
    def run() -> str | None:
        ended = solve(problem, algorithm, seed)
        if not math.isfinite(ended.end) or ended.gain < -LOST:
            raise SilentlyWrong(f"f went from {ended.start:.6g} to {ended.end:.6g}; its least is {ended.best:.6g}")
        if ended.gain < STALLED:
            return "stalled"
        return "converged" if ended.gain > CONVERGED else None

    return run
