"""Step sizes that need no tuning: what is measured during a run, and the sizes that follow from it.

    L    the largest curvature of G, by power iteration on products; ω and v move by 1/L
    γ    where v is seen to grow along negative curvature, v solves (H + γ) v = ∂_ω F instead
    ψ    in [0, 1], how far λ may move: little until v solves its equation and ω is trained
    unit of λ: the way along its direction that changes ∂_ω G by the size of the forces on ω, at most BEND / STEP times
         the length over which this effect changes by a factor e

λ moves by `ScaleFree`, by STEP units. Nothing here reads a clock, and nothing outside `measure` asks the host.
All that is measured is one value, `Measured`, which is part of the algorithm's state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fsla._checks import number, positive, whole_number
from fsla._state_tree import evolve, saved
from fsla._torch import foreach_div_
from fsla._tree import Tree, axpy, dot, is_sharded, norm, scalar, scale, spread, sub, where, zeros_like
from fsla.problems._views import View
from fsla.steps._schedules import Push, Rates, StepSizes
from fsla.steps._updates import ScaleFree, Update, after_steps

FIRST = 20
"""Products of the first estimate of L."""
OFTEN = 5
RARELY = 10
SELDOM = 40
"""Steps between two later products: OFTEN at first, twice as many after each that agrees with L and half as many after
others. They are RARELY at most where ω moves by L, and SELDOM or some √m times that where an optimiser moves it.

ω is stable while L grows less than twofold, and λ may multiply it by exp(BEND) in each step.
"""
AGREES = 0.05
"""By how much of itself L may change at a product that agrees with it."""
DECAY = 0.9
"""Share of the old L that stays where a new estimate is smaller; a power of it, where one step stands for several."""
OLD = 0.7
"""Share of the old value in averages over blocks and over looks."""
STEP = 0.03
"""Share of ω's force by which one step of λ changes it at most."""
AHEAD = 10
"""Steps of λ over whose way its force is measured."""
BEND = 0.05
"""Share of the length over which λ's effect changes by a factor e that one step goes at most."""
SMALLEST = 1e-4
TRIES = 12
"""First length that is tried for those steps, and how many lengths may be."""
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
    gradient: Tree
    """Sum of ∂_ω G over the present block of steps."""
    last_gradient: Tree
    """Mean of ∂_ω G over the block before."""
    blocks: Tensor
    """Blocks that are complete."""
    residual_overlap: Tensor
    """Moving average of the scalar products of the residuals of two successive blocks."""
    target_overlap: Tensor
    gradient_overlap: Tensor
    first_gradient: Tensor
    """Squared length of ∂_ω G at the first step."""
    unsolved: Tensor
    """Share in [0, 1] of v's equation that is not solved, in squared length."""
    untrained: Tensor
    """Share in [0, 1] of the first ∂_ω G that is left, in squared length."""
    force: Tensor
    """Size of the forces on ω: the largest of ‖H ω‖ and of ‖∂_ω G‖ over the last block and at the first step."""
    outer_unit: Tensor
    """Way of λ that changes ∂_ω G by `force`; 0 before it is measured."""
    largest_unit: Tensor
    """Bound of `outer_unit`: its last value before λ moves."""
    step_scale: Tensor
    """Factor on all steps; halved when a run is rolled back after it diverged."""


@dataclass(frozen=True)
class Automatic(StepSizes[Measured]):
    """Step sizes from the curvature of G, which need no tuning.

    ω and v move by 1/L, with L measured by power iteration. λ moves by `ScaleFree`, in a unit that follows from the
    force that it exerts on ω. No rescaling of λ, ω or the losses changes a run, but for rounding.

    Args:
        new_grad_weight: η, the weight of the new gradient if λ's direction has a momentum.
        inner: whether ω moves by these sizes; if not, it has its own optimiser.
        adjoint: the same for v.
        outer: the same for λ. With an optimiser, too, λ moves by ψ times its step.
        wait: whether λ waits until v solves its equation and ω is trained; if not, ψ is 1.
        width: ψ is one half where this share of v's equation, in length, is not solved, or this share of ∂_ω G is left.
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
    width: float = 0.2
    block: int = 10
    outer_every: int = 1

    def __post_init__(self) -> None:
        positive(self.width, "width", "Automatic")
        whole_number(self.block, "block", "Automatic")
        whole_number(self.outer_every, "outer_every", "Automatic")
        number(self.new_grad_weight, "new_grad_weight", "Automatic")
        if not 0 < self.new_grad_weight <= 1:
            raise ValueError(f"The 'new_grad_weight' must lie in (0, 1]. Got {self.new_grad_weight} instead.")

    def spaced(self, outer_every: int) -> Automatic:
        return replace(self, outer_every=outer_every)

    def outer_update(self) -> Update:
        return ScaleFree(scale=STEP).spaced(self.outer_every)

    def init(self, omega: Tree) -> Measured:
        zero = scalar(0.0, omega)
        some = zeros_like(_some(omega)) if self.wait else {}
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
            gradient=some,
            last_gradient=some,
            blocks=zero,
            residual_overlap=zero,
            target_overlap=zero,
            gradient_overlap=zero,
            first_gradient=zero,
            unsolved=scalar(1.0, omega),
            untrained=scalar(1.0, omega),
            force=zero,
            outer_unit=zero,
            largest_unit=zero,
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

    @property
    def _soon(self) -> int:
        """Steps on which λ moves before the second look: OFTEN training steps, but it needs a direction."""
        return max(2, -(-OFTEN // self.outer_every))

    def rates(self, k: int, state: Measured) -> Rates:
        lr = state.step_scale / state.curvature if self.measures else 1.0
        weight = after_steps(self.new_grad_weight, self.outer_every)
        outer_lr = self.outer_scale(state)
        if self.outer:  # Else its optimiser has its learning rate, which rollbacks halve.
            outer_lr = outer_lr * state.step_scale * state.outer_unit
        return Rates(outer_lr, lr, lr, weight)

    def outer_scale(self, state: Measured) -> Tensor:
        """Return ψ."""
        if not self.wait:
            return torch.ones_like(state.unsolved)
        solved = 1 / (1 + state.unsolved / self.width**2)
        return solved / (1 + state.untrained / self.width**2)

    def residual(self, v: Tree, hv: Tree, b: Tree, state: Measured, view: View) -> tuple[Tree, Measured]:
        if self.adjoint:
            length = norm(v)
            along = torch.where(length > 0, dot(v, hv) / length**2, 0)
            damping = torch.maximum(0.99**self.outer_every * state.damping, -1.5 * along)
            hv = axpy(damping, v, hv)
            state = evolve(state, damping=damping)
        residual = sub(hv, b)
        if self.wait:
            state = self._observe(residual, b, view.grad_omega, state)
        if self.adjoint:
            along = torch.where(length > 0, norm(hv) / length, 0)
            residual = scale((state.curvature / along).clamp(max=1.0), residual)
            state = evolve(state, along_v=torch.maximum(along, state.along_v))
        return residual, state

    def _observe(self, residual: Tree, b: Tree, g: Tree, state: Measured) -> Measured:
        """Sum residuals, targets and gradients over blocks, and compare two successive ones."""
        g = _some(g)
        first = torch.where(state.first_gradient > 0, state.first_gradient, dot(g, g))
        residual = sub(state.residual, _some(residual))
        target = axpy(1.0, _some(b), state.target)
        gradient = axpy(1.0, g, state.gradient)
        count = state.count + 1
        full = count * self.outer_every >= self.block
        pair = full & (state.blocks > 0)
        share = torch.where(state.blocks > 1, 1 - OLD, 1.0)
        mean = scale(1 / count, gradient)

        def average(old: Tensor, new: Tensor) -> Tensor:
            return torch.where(pair, old + share * (new - old), old)

        overlap = average(state.residual_overlap, dot(residual, state.last_residual))
        target_overlap = average(state.target_overlap, dot(target, state.last_target))
        gradient_overlap = average(state.gradient_overlap, dot(mean, state.last_gradient))
        tiny = torch.finfo(torch.float32).tiny
        unsolved = (overlap / target_overlap.clamp(min=tiny)).clamp(0.0, 1.0)
        untrained = (gradient_overlap / torch.maximum(first, state.force.square()).clamp(min=tiny)).clamp(0.0, 1.0)
        return evolve(
            state,
            count=torch.where(full, 0, count),
            blocks=torch.where(full, state.blocks + 1, state.blocks),
            residual_overlap=overlap,
            target_overlap=target_overlap,
            gradient_overlap=gradient_overlap,
            first_gradient=first,
            unsolved=torch.where(pair, unsolved, state.unsolved),
            untrained=torch.where(pair, untrained, state.untrained),
            last_residual=where(full, residual, state.last_residual),
            last_target=where(full, target, state.last_target),
            last_gradient=where(full, mean, state.last_gradient),
            residual=where(full, zeros_like(residual), residual),
            target=where(full, zeros_like(target), target),
            gradient=where(full, zeros_like(gradient), gradient),
        )

    @property
    def _longest(self) -> int:
        """The most steps between two products."""
        root = math.sqrt(self.outer_every)
        return int(RARELY / root) if self.inner else SELDOM * round(root)

    def products_due(self, k: int, state: Measured) -> int:
        if not (self.measures or self.outer) or k < state.next_look:
            return 0
        return FIRST if self.measures and state.next_look == 0 else 1

    def measure(self, view: View, products: int, state: Measured, push: Push | None = None) -> Measured:
        if self.outer and push is not None:
            state = self._measure_unit(view, push, state)
        if self.measures:
            return self._measure_curvature(view, products, state)
        interval = min(2 * state.interval, self._longest) if state.interval else self._soon
        return evolve(state, next_look=state.next_look + interval, interval=interval)

    def _measure_unit(self, view: View, push: Push, state: Measured) -> Measured:
        """Measure how far λ may go until its force on ω is as large as those that act on ω.

        The unit does not grow once λ moves, after two blocks: where ω runs away with λ, the forces grow with it. Where
        no force acts on ω, one step is BEND in λ's own units.
        """
        g = _some(view.grad_omega)
        forces = [norm(_some(view.hvp(push.omega))), norm(state.last_gradient or g), state.first_gradient.sqrt()]
        force, known = float(torch.stack(forces).max()), float(state.outer_unit)
        moves = float(state.blocks) > 1 or not self.wait
        if not 0 < force < math.inf:
            unit = known or (BEND / STEP if force == 0 and moves else 0.0)
            return evolve(state, outer_unit=torch.full_like(state.force, unit))
        rounding = 10 * view.eps * max(float(norm(g)), force)
        unit, length = 0.0, AHEAD * STEP * known or SMALLEST
        for _ in range(1 if known else TRIES):
            half, full = (sub(_some(push.gradient(share * length)), g) for share in (0.5, 1.0))
            moved, bent = float(norm(full)), float(norm(axpy(-2.0, half, full)))
            if moved <= rounding or not math.isfinite(moved):
                length *= 100 if moved <= rounding else 0.01
                continue
            bend = length * moved / (4 * max(bent - rounding, 1e-4 * moved))
            unit = min(force * length / moved, BEND / STEP * bend)
            reach = AHEAD * STEP * unit
            if length / 2 < reach < 2 * length:
                break
            length = min(max(reach, length / 100), 1000 * length)
        if not unit > 0:
            return state
        largest = unit
        if known and moves:
            largest = float(state.largest_unit) or known
            unit = min(known**OLD * unit ** (1 - OLD), largest)
            force = (float(state.force) or force) ** OLD * force ** (1 - OLD)
        numbers = {"force": force, "outer_unit": unit, "largest_unit": largest}
        return evolve(state, **{name: torch.full_like(state.force, number) for name, number in numbers.items()})

    def _measure_curvature(self, view: View, products: int, state: Measured) -> Measured:
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
        near = AGREES * (1 - decay) / (1 - DECAY)  # One estimate counts for more where it stands for several steps.
        agrees = products == 1 and abs(curvature - before) <= near * before
        longer = 2 * state.interval if agrees else OFTEN if curvature > 2 * before else state.interval // 2
        interval = max(longer, OFTEN) if state.next_look else self._soon
        interval = max(1, min(interval, self._longest))
        if interval % RARELY == 0:  # The guard of a run asks the device at the same steps.
            interval -= state.next_look % RARELY
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
