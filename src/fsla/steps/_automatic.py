"""Step sizes that need no tuning: what is measured during a run, and the sizes that follow from it.

    L    the largest curvature of G, by power iteration on products; ω and v move by 1/L
    γ    where v is seen to grow along negative curvature, v solves (H + γ) v = ∂_ω F instead
    ψ    in [0, 1], how far λ may move: little until v solves its equation

λ moves by `ScaleFree`, whose unit is λ's own. Nothing here reads a clock, and nothing outside `measure` asks the host.
All that is measured is one value, `Measured`, which is part of the algorithm's state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fsla._checks import positive
from fsla._state_tree import evolve, saved
from fsla._torch import foreach_div_
from fsla._tree import Tree, axpy, dot, is_sharded, norm, scalar, scale, spread, sub, where, zeros_like
from fsla.problems._views import View
from fsla.steps._schedules import Rates, StepSizes
from fsla.steps._updates import ScaleFree, Update, after_steps

FIRST = 20
"""Products of the first estimate of L."""
OFTEN = 5
RARELY = 20
"""Steps between two later products: OFTEN at first, twice as many after each one that agrees with L, RARELY at most."""
AGREES = 0.05
"""By how much of itself L may change at a product that agrees with it."""
DECAY = 0.9
"""Share of the old L that stays where a new estimate is smaller; a power of it, where one step stands for several."""
COORDINATES = 1_000_000
"""Coordinates of v's equation that ψ looks at."""


@saved
@dataclass(frozen=True)
class Measured:
    """State of `Automatic`."""

    curvature: Tensor
    """L: decaying maximum of a warm-started power iteration on H."""
    along_v: Tensor
    """Largest ‖H v‖ / ‖v‖ since the last measurement."""
    probe: Tree
    """Unit vector of the power iteration."""
    generator: Tensor
    """State of the random generator that perturbs it."""
    next_look: int = field(repr=False)
    """The step before which L is measured again."""
    interval: int = field(repr=False)
    """Steps between the last two measurements."""
    damping: Tensor
    """γ: 1.5 times the most negative curvature seen along v, forgotten by 1 % a step."""
    count: Tensor
    """Steps in the present block."""
    residual: Tree
    """Sum of ∂_ω F - H v over the present block of steps."""
    target: Tree
    """Sum of ∂_ω F over the present block of steps."""
    last_residual: Tree
    last_target: Tree
    """The sums over the block before."""
    blocks: Tensor
    """Blocks that are complete."""
    unsolved: Tensor
    """Share in [0, 1] of v's equation that is not solved."""
    step_scale: Tensor
    """Factor on all steps; halved when a run is rolled back after it diverged."""


@dataclass(frozen=True)
class Automatic(StepSizes[Measured]):
    """Step sizes from the curvature of G, which need no tuning.

    ω and v move by 1/L, with L measured by power iteration. λ moves by `ScaleFree`.

    Args:
        new_grad_weight: η, the weight of the new gradient if λ's direction has a momentum.
        inner: whether ω moves by these sizes; if not, it has its own optimiser.
        adjoint: the same for v.
        outer: the same for λ.
        wait: whether λ waits until v solves its equation; if not, ψ is 1.
        width: ψ is one half where this share of v's equation, in length, is not solved.
        block: training steps over which residuals are summed, so that the noise of one block is independent of the next
            one's.
        outer_every: training steps for which one move of λ and v stands. The algorithm sets it to its own.

    Raises:
        ValueError: if a number is out of range.

    Examples:
        >>> problem = fsla.Problem(
        ...     inner_loss=lambda lam, omega, batch: ((omega["w"] - lam["x"]) ** 2).sum(),
        ...     outer_loss=lambda lam, omega, batch: ((omega["w"] - 1) ** 2).sum(),
        ... )
        >>> algorithm = fsla.algorithms.soba(fsla.steps.Automatic())
        >>> state = algorithm.init(problem, fsla.Point({"x": x["w"]}, x), fsla.StepBatches.shared(None, None))
        >>> round(state.measured.curvature.item(), 2)
        2.0
    """

    new_grad_weight: float = 0.1
    inner: bool = True
    adjoint: bool = True
    outer: bool = True
    wait: bool = True
    width: float = 0.1
    block: int = 25
    outer_every: int = 1

    def __post_init__(self) -> None:
        positive(self.width, "width", "Automatic")
        if not 0 < self.new_grad_weight <= 1:
            raise ValueError(f"The 'new_grad_weight' must lie in (0, 1]. Got {self.new_grad_weight} instead.")

    def spaced(self, outer_every: int) -> Automatic:
        return replace(self, outer_every=outer_every)

    def outer_update(self) -> Update:
        return ScaleFree().spaced(self.outer_every)

    def init(self, omega: Tree) -> Measured:
        zero = scalar(0.0, omega)
        some = zeros_like(_some(omega)) if self.outer else {}
        device = next(iter(omega.values())).device
        state = Measured(
            curvature=zero,
            along_v=zero,
            probe={},
            generator=torch.Generator(device).manual_seed(0).get_state(),
            next_look=0,
            interval=0,
            damping=zero,
            count=zero,
            residual=some,
            target=some,
            last_residual=some,
            last_target=some,
            blocks=zero,
            unsolved=scalar(1.0, omega),
            step_scale=scalar(1.0, omega),
        )
        if not self.measures:
            return state
        noise, generator = _noise(omega, state.generator)
        return evolve(state, probe=_unit(noise), generator=generator)

    @property
    def measures(self) -> bool:
        """Whether L is measured, for a variable that moves by it."""
        return self.inner or self.adjoint

    def rates(self, k: int, state: Measured) -> Rates:
        lr = state.step_scale / state.curvature if self.measures else 1.0
        weight = after_steps(self.new_grad_weight, self.outer_every)
        return Rates(self.outer_scale(state) * state.step_scale, lr, lr, weight)

    def outer_scale(self, state: Measured) -> Tensor:
        """Return ψ."""
        if not self.wait:
            return torch.ones_like(state.unsolved)
        return 1 / (1 + state.unsolved / self.width**2)

    def residual(self, v: Tree, hv: Tree, b: Tree, state: Measured) -> tuple[Tree, Measured]:
        if self.adjoint:
            length = norm(v)
            along = torch.where(length > 0, dot(v, hv) / length**2, 0)
            damping = torch.maximum(0.99**self.outer_every * state.damping, -1.5 * along)
            hv = axpy(damping, v, hv)
            state = evolve(state, damping=damping)
        residual = sub(hv, b)
        if self.outer:
            state = self._observe(residual, b, state)
        if self.adjoint:
            along = torch.where(length > 0, norm(hv) / length, 0)
            residual = scale((state.curvature / along).clamp(max=1.0), residual)
            state = evolve(state, along_v=torch.maximum(along, state.along_v))
        return residual, state

    def _observe(self, residual: Tree, b: Tree, state: Measured) -> Measured:
        """Sum residuals and targets over blocks, and compare two successive ones."""
        residual = sub(state.residual, _some(residual))
        target = axpy(1.0, _some(b), state.target)
        count = state.count + 1
        full = count * self.outer_every >= self.block
        tiny = torch.finfo(torch.float32).tiny
        ratio = dot(residual, state.last_residual) / dot(target, state.last_target).clamp(min=tiny)
        return evolve(
            state,
            count=torch.where(full, 0, count),
            blocks=torch.where(full, state.blocks + 1, state.blocks),
            unsolved=torch.where(full & (state.blocks > 0), ratio.clamp(0.0, 1.0), state.unsolved),
            last_residual=where(full, residual, state.last_residual),
            last_target=where(full, target, state.last_target),
            residual=where(full, zeros_like(residual), residual),
            target=where(full, zeros_like(target), target),
        )

    def products_due(self, k: int, state: Measured) -> int:
        if not self.measures or k < state.next_look:
            return 0
        return FIRST if state.next_look == 0 else 1

    def measure(self, view: View, products: int, state: Measured) -> Measured:
        """Power iteration on H, perturbed a little to look around; what H does to v counts as well.

        A product that is not finite is skipped: a batch may be bad.
        """
        before = float(state.curvature)
        decay = DECAY**self.outer_every
        for i in range(products):
            h = view.hvp(state.probe)
            size = torch.maximum(norm(h), state.along_v)
            smooth = torch.maximum(size, decay * state.curvature + (1 - decay) * size)
            settles = products == 1 or i >= products - 3
            noise, generator = _noise(h, state.generator)
            probe = _unit(axpy(0.1, noise, _unit(h)))
            seen = torch.where(state.curvature > 0, smooth, size) if settles else size
            finite = size.isfinite()
            state = evolve(
                state,
                curvature=torch.where(finite, seen, state.curvature),
                along_v=torch.zeros_like(size),
                probe=where(finite & (norm(h) > 0), probe, state.probe),
                generator=generator,
            )
        curvature = float(state.curvature)
        if not 0 < curvature < math.inf:
            raise ValueError(
                f"The inner loss must have curvature, from which the steps follow. Its Hessian times a direction is "
                f"{curvature}. Give optimisers with step sizes of your own, or add a penalty on the parameters to the "
                "inner loss."
            )
        agrees = products == 1 and abs(curvature - before) <= AGREES * before
        interval = min(2 * state.interval, RARELY) if agrees else OFTEN
        return evolve(state, next_look=state.next_look + interval, interval=interval)


def _some(x: Tree) -> Tree:
    """A fixed choice of coordinates of a large tree; of a sharded one, of whole tensors."""
    if any(is_sharded(t) for t in x.values()):
        return {name: x[name] for name in _spaced(x)}
    stride = -(-sum(t.numel() for t in x.values()) // COORDINATES)
    return {"coordinates": torch.cat([t.flatten()[::stride] for t in x.values()])}


def _spaced(x: Tree) -> list[str]:
    """The names of tensors from all over the tree that have together at least COORDINATES coordinates."""
    names = list(x)
    order = sorted(range(len(names)), key=lambda i: (i * 0.6180339887) % 1.0)
    taken: list[int] = []
    for i in order:
        if sum(x[names[j]].numel() for j in taken) >= COORDINATES:
            break
        taken.append(i)
    return [names[i] for i in sorted(taken)]


def _noise(like: Tree, generator_state: Tensor) -> tuple[Tree, Tensor]:
    """A random direction of length about 1, drawn on the device of ω."""
    generator = torch.Generator(next(iter(like.values())).device)
    if len(generator_state) == len(generator.get_state()):
        generator.set_state(generator_state.cpu())
    else:  # The run was saved on another kind of device, whose generator has another form.
        generator.manual_seed(0)
    drawn = [spread(torch.randn(t.shape, generator=generator, device=generator.device), t) for t in like.values()]
    foreach_div_(drawn, sum(t.numel() for t in drawn) ** 0.5)
    return dict(zip(like, drawn, strict=True)), generator.get_state()


def _unit(x: Tree) -> Tree:
    return scale(1 / norm(x), x)
