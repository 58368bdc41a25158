"""How a variable moves along a direction: one contract for ω, v and λ.

    GradientDescent      x ← x - lr g
    Momentum             m ← decay m + g,  x ← x - lr m
    Adam                 moments of g and g², corrected for their start;  x ← x - lr m / (√s + eps)
    Adaptive             s ← decay s + (1 - decay) g²,  x ← x - lr g / (√s + eps); or one s for all of x, from ‖g‖
    Normalized           x ← x - lr g / ‖g‖
    ExponentiatedGradient  x ← x exp(-lr g), the step of the entropy's Bregman distance: x stays positive
    ScaleFree            a moving average of g over its root mean square, in units of x
    Proximal, Projected, Clipped    around another update
    InPlace              another update, written into the variable's own tensors
    TorchUpdate          a torch optimiser, which moves its parameters in place

An update is a frozen dataclass; what it remembers is part of the variable. The first ones are functions of tensors:
the old value stays valid, and the host is never asked.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

from fsla._checks import function, instance, number, positive
from fsla._state_tree import saved
from fsla._tree import Leaves, Scalar, Tree, axpy, clone, copy_, dense, each, norm, scalar, scale, sub, zeros_like

Projection = Callable[[Tree], Tree]
_AN_UPDATE = "an update, such as fsla.steps.Momentum()"
Memory = Mapping[str, Tree]
"""What an update remembers, as named trees."""


@saved
class Variable(NamedTuple):
    """A variable and what its update remembers of it.

    Args:
        value: the variable.
        memory: what the update remembers, as named trees.

    Examples:
        >>> variable = fsla.steps.Momentum(0.9).init(x)
        >>> variable.memory["mean"]["w"]
        tensor([0., 0.])
    """

    value: Tree
    memory: Memory = MappingProxyType({})


class Update(ABC):
    """Base class of rules that move a variable along a direction.

    Call it with the variable, the direction and the step size; it returns the moved variable.

    Examples:
        >>> class SignDescent(fsla.steps.Update):
        ...     def __call__(self, x, g, lr):
        ...         return fsla.steps.Variable({name: t - lr * g[name].sign() for name, t in x.value.items()})
        >>> move(SignDescent())
        tensor([0.9000, 2.1000])
    """

    @property
    def in_place(self) -> bool:
        """Whether it writes into the variable's tensors, so that who looks back must keep a copy."""
        return False

    def init(self, x: Tree) -> Variable:
        """Return the variable at its start, brought into its set where there is one."""
        return Variable(x)

    @abstractmethod
    def __call__(self, x: Variable, g: Leaves, lr: Scalar) -> Variable: ...

    def set(self, x: Variable, value: Tree) -> Variable:
        """Return the variable at another value, as at a restart; its memory begins anew."""
        return self.init(value)

    def step_size(self, lr: Scalar) -> Scalar:
        """Return s where a step is x - s g: for methods that use the step itself (unrolling, F2SA, BOME)."""
        raise TypeError(
            f"This algorithm needs plain gradient steps of the variable. Got {type(self).__name__}; use SGD without "
            "momentum."
        )

    def moments(self, x: Variable) -> Memory:
        """Return what it remembers now, safe from later moves."""
        return x.memory

    def direction(self, x: Variable) -> Tree:
        """Return the last move as a direction of root mean square 1, where the size of moves is free; else {}.

        Asks the device.
        """
        return {}

    def derivative(self, before: Memory, after: Memory, g: Tree, lr: Scalar) -> Tree:
        """Return the diagonal of the derivative of (x_before - x_after) by g, which SAMA reads."""
        return each(lambda t: torch.ones_like(t) * self.step_size(lr), g)

    @property
    def weight_decay(self) -> Mapping[str, float]:
        """The ridge that the update adds to the loss, by tensor: v must know its curvature."""
        return {}


@dataclass(frozen=True)
class GradientDescent(Update):
    """Update by plain steps: x ← x - lr g.

    Examples:
        >>> move(fsla.steps.GradientDescent(), times=2)
        tensor([0.8000, 2.8000])
    """

    def __call__(self, x: Variable, g: Leaves, lr: Scalar) -> Variable:
        return Variable(axpy(-lr, g, x.value))

    def step_size(self, lr: Scalar) -> Scalar:
        return lr


@dataclass(frozen=True)
class Momentum(Update):
    """Update by heavy-ball momentum: m ← decay m + g, x ← x - lr m.

    Args:
        decay: what remains of m, in [0, 1).

    Examples:
        >>> move(fsla.steps.Momentum(0.9), times=2)
        tensor([0.7100, 3.1600])
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        _check_fraction(self.decay, "decay", "Momentum")

    def init(self, x: Tree) -> Variable:
        return Variable(x, {"mean": zeros_like(x)})

    def __call__(self, x: Variable, g: Leaves, lr: Scalar) -> Variable:
        mean = axpy(1.0, g, scale(self.decay, x.memory["mean"]))
        return Variable(axpy(-lr, mean, x.value), {"mean": mean})


@dataclass(frozen=True)
class Adam(Update):
    """Update by Adam: moments of g and g², corrected for their start; x ← x - lr m / (√s + eps).

    Args:
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.

    Examples:
        >>> move(fsla.steps.Adam())
        tensor([0.9000, 2.1000])
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check_fraction(self.b1, "b1", "Adam")
        _check_fraction(self.b2, "b2", "Adam")
        positive(self.eps, "eps", "Adam")

    def init(self, x: Tree) -> Variable:
        one = next(iter(x.values()))
        dtype = torch.promote_types(one.dtype, torch.float32)
        powers = {name: torch.ones((), dtype=dtype, device=one.device) for name in ("b1", "b2")}
        return Variable(x, {"mean": zeros_like(x), "square": zeros_like(x), "powers": powers})

    def __call__(self, x: Variable, g: Leaves, lr: Scalar) -> Variable:
        whole = dense(g)
        mean = axpy(1 - self.b1, whole, scale(self.b1, x.memory["mean"]))
        square = axpy(1 - self.b2, each(lambda t: t * t, whole), scale(self.b2, x.memory["square"]))
        powers = {"b1": self.b1 * x.memory["powers"]["b1"], "b2": self.b2 * x.memory["powers"]["b2"]}
        step = {
            name: (m / (1 - powers["b1"])) / ((square[name] / (1 - powers["b2"])).sqrt() + self.eps)
            for name, m in mean.items()
        }
        return Variable(axpy(-lr, step, x.value), {"mean": mean, "square": square, "powers": powers})

    def derivative(self, before: Memory, after: Memory, g: Tree, lr: Scalar) -> Tree:
        return adam_derivative(before, after, g, lr, self.b1, self.b2, self.eps)


def adam_derivative(before: Memory, after: Memory, g: Tree, lr: Scalar, b1: float, b2: float, eps: float) -> Tree:
    """Return the derivative of Adam's step by its gradient, but for the correction of the moments' start."""
    slopes = {}
    for name, t in g.items():
        slope = (1 - b1) * b2 * before["square"][name] - b1 * (1 - b2) * t * before["mean"][name]
        slopes[name] = lr * slope / (after["square"][name].sqrt() + eps) ** 3
    return slopes


@dataclass(frozen=True)
class Adaptive(Update):
    """Update with a scale for each coordinate: s ← decay s + (1 - decay) g², x ← x - lr g / (√s + eps).

    Args:
        decay: what remains of s, in [0, 1).
        eps: added to the root.
        whole: whether one scale serves all coordinates, by a moving mean of ‖g‖.

    Examples:
        >>> move(fsla.steps.Adaptive(), lr=0.01)
        tensor([0.9680, 2.0320])
    """

    decay: float = 0.9
    eps: float = 1e-3
    whole: bool = False

    def __post_init__(self) -> None:
        _check_fraction(self.decay, "decay", "Adaptive")
        positive(self.eps, "eps", "Adaptive")

    def init(self, x: Tree) -> Variable:
        return Variable(x, {"scale": {"norm": scalar(0.0, x)} if self.whole else zeros_like(x)})

    def __call__(self, x: Variable, g: Leaves, lr: Scalar) -> Variable:
        full = dense(g)
        seen = {"norm": norm(full)} if self.whole else each(lambda t: t * t, full)
        s = axpy(1 - self.decay, seen, scale(self.decay, x.memory["scale"]))
        if self.whole:
            return Variable(axpy(-lr / (s["norm"] + self.eps), full, x.value), {"scale": s})
        step = {name: t / (s[name].sqrt() + self.eps) for name, t in full.items()}
        return Variable(axpy(-lr, step, x.value), {"scale": s})


@dataclass(frozen=True)
class Normalized(Update):
    """Update by steps of length `lr`: x ← x - lr g / ‖g‖, and none where g = 0.

    Examples:
        >>> move(fsla.steps.Normalized(), lr=1.0)
        tensor([0.7570, 2.9700])
    """

    def __call__(self, x: Variable, g: Leaves, lr: Scalar) -> Variable:
        length = norm(g)
        return Variable(axpy(-lr / torch.where(length > 0, length, 1), g, x.value))


@dataclass(frozen=True)
class ExponentiatedGradient(Update):
    """Update of positive variables: x ← x exp(-lr g), the step of the entropy's Bregman distance.

    Examples:
        >>> move(fsla.steps.ExponentiatedGradient())
        tensor([0.9050, 2.9840])
    """

    def init(self, x: Tree) -> Variable:
        if not all(bool((t > 0).all()) for t in x.values()):
            raise ValueError(
                "The start of a variable that moves by ExponentiatedGradient() must be positive in every coordinate."
            )
        return Variable(x)

    def __call__(self, x: Variable, g: Leaves, lr: Scalar) -> Variable:
        return Variable({name: x.value[name] * torch.exp(-lr * t) for name, t in dense(g).items()})


@dataclass(frozen=True)
class ScaleFree(Update):
    """Update in which only the direction of the gradient matters, not its size.

    It is x ← x - lr scale / √(1 + k / fall) m / (max(a, sparse √s) + floor), with moving averages m, a and s of g, |g|
    and g². A coordinate whose gradient is 0 at most steps, such as a sample's weight, has a < √s and goes further.

    Args:
        scale: length of a step, in units of x.
        fall: number of steps after which the length falls by √2.
        average: weight of the new gradient in m.
        second: weight of the new square in s.
        floor: smallest scale of a coordinate, relative to the others.
        sparse: smallest scale of a coordinate, relative to the root mean square of its gradient.

    Examples:
        >>> move(fsla.steps.ScaleFree(scale=0.05), lr=1.0)
        tensor([0.9500, 2.0500])
    """

    scale: float = 0.05
    fall: float = 300.0
    average: float = 0.1
    second: float = 0.01
    floor: float = 1e-3
    sparse: float = 0.2

    def spaced(self, every: int) -> ScaleFree:
        """Return the update whose single step stands for `every` steps of this one.

        It forgets as much as they do. It is √every times as long: it sees one batch, and they would average over more.
        """
        return replace(
            self,
            scale=math.sqrt(every) * self.scale,
            fall=self.fall / every,
            average=after_steps(self.average, every),
            second=after_steps(self.second, every),
        )

    def __post_init__(self) -> None:
        positive(self.scale, "scale", "ScaleFree")
        positive(self.fall, "fall", "ScaleFree")
        for name in ("average", "second", "floor"):
            number(getattr(self, name), name, "ScaleFree", low=0.0, high=1.0)

    def init(self, x: Tree) -> Variable:
        averages = {name: zeros_like(x) for name in ("mean", "size", "square")}
        return Variable(x, averages | {"count": {"moves": scalar(0.0, x)}})

    def __call__(self, x: Variable, g: Leaves, lr: Scalar) -> Variable:
        full = dense(g)
        k = x.memory["count"]["moves"]
        weight = torch.where(k == 0, torch.ones_like(k), self.average)
        mean = {name: m + weight * (full[name] - m) for name, m in x.memory["mean"].items()}
        size = {name: a + self.second * (full[name].abs() - a) for name, a in x.memory["size"].items()}
        square = {name: s + self.second * (full[name].square() - s) for name, s in x.memory["square"].items()}
        lr = self.scale / (1 + k / self.fall).sqrt() * lr
        memory = {"mean": mean, "size": size, "square": square, "count": {"moves": k + 1}}
        return Variable(axpy(-lr, self._step(memory), x.value), memory)

    def _step(self, memory: Memory) -> Tree:
        """m / (max(a, sparse √s) + floor)."""
        correction = 1 - (1 - self.second) ** memory["count"]["moves"]
        step = {}
        for name, m in memory["mean"].items():
            root = (memory["square"][name] / correction).sqrt()
            floor = self.floor * root.square().mean().sqrt() + torch.finfo(m.dtype).tiny
            step[name] = m / (torch.maximum(memory["size"][name] / correction, self.sparse * root) + floor)
        return step

    def direction(self, x: Variable) -> Tree:
        if float(x.memory["count"]["moves"]) == 0:
            return {}
        step = self._step(x.memory)
        size = norm(step) / math.sqrt(sum(t.numel() for t in step.values()))
        return scale(torch.where(size > 0, -1 / size, 0), step)


@dataclass(frozen=True)
class SoftThreshold:
    """Proximal step of weight · Σ |x_i|, for `Proximal`.

    Args:
        weight: weight of the penalty.

    Examples:
        >>> fsla.steps.SoftThreshold(1.0)({"w": torch.tensor([0.5, -2.0])}, 1.0)
        {'w': tensor([ 0., -1.])}
    """

    weight: float

    def __post_init__(self) -> None:
        positive(self.weight, "weight", "SoftThreshold")

    def __call__(self, x: Tree, lr: Scalar) -> Tree:
        return {name: t.sign() * (t.abs() - lr * self.weight).clamp(min=0) for name, t in x.items()}


class WrappedUpdate(Update):
    """Base class of updates around another update, which is asked for all but the move.

    Attributes:
        update: the other update.

    Examples:
        >>> issubclass(fsla.steps.Projected, fsla.steps.WrappedUpdate)
        True
    """

    update: Update

    @property
    def in_place(self) -> bool:
        return self.update.in_place

    def init(self, x: Tree) -> Variable:
        return self.update.init(x)

    def set(self, x: Variable, value: Tree) -> Variable:
        return self.update.set(x, value)

    def step_size(self, lr: Scalar) -> Scalar:
        return self.update.step_size(lr)

    def moments(self, x: Variable) -> Memory:
        return self.update.moments(x)

    def direction(self, x: Variable) -> Tree:
        return self.update.direction(x)

    def derivative(self, before: Memory, after: Memory, g: Tree, lr: Scalar) -> Tree:
        return self.update.derivative(before, after, g, lr)

    @property
    def weight_decay(self) -> Mapping[str, float]:
        return self.update.weight_decay

    def _at(self, x: Variable, value: Tree) -> Variable:
        """The moved variable at another value, in its own tensors where it moves in place."""
        if not self.in_place:
            return Variable(value, x.memory)
        copy_(list(x.value.values()), list(value.values()))
        return x


@dataclass(frozen=True)
class ScaledUpdate(WrappedUpdate):
    """Another update with its step size times a factor."""

    factor: float
    update: Update

    def __call__(self, x: Variable, g: Leaves, lr: Scalar) -> Variable:
        return self.update(x, g, self.factor * lr)

    def step_size(self, lr: Scalar) -> Scalar:
        return self.update.step_size(self.factor * lr)

    def derivative(self, before: Memory, after: Memory, g: Tree, lr: Scalar) -> Tree:
        return self.update.derivative(before, after, g, self.factor * lr)


@dataclass(frozen=True)
class Proximal(WrappedUpdate):
    """Another update, then the proximal step of a penalty h: argmin_y lr h(y) + ½ ‖y - x‖².

    Args:
        prox: proximal step, called as ``prox(x, lr)``.
        update: the other update.

    Examples:
        >>> move(fsla.steps.Proximal(fsla.steps.SoftThreshold(1.0)))
        tensor([0.8000, 2.3000])
    """

    prox: Callable[[Tree, Scalar], Tree]
    update: Update = field(default_factory=GradientDescent)

    def __post_init__(self) -> None:
        function(self.prox, "prox", "Proximal")
        instance(self.update, Update, "update", "Proximal", _AN_UPDATE)

    def __call__(self, x: Variable, g: Leaves, lr: Scalar) -> Variable:
        x = self.update(x, g, lr)
        return self._at(x, self.prox(x.value, lr))


@dataclass(frozen=True)
class Projected(WrappedUpdate):
    """Another update, then a projection.

    Args:
        onto: projection, such as `Box`.
        update: the other update.

    Examples:
        >>> move(fsla.steps.Projected(fsla.steps.Box(0, 2)))
        tensor([0.9000, 2.0000])
    """

    onto: Projection
    update: Update = field(default_factory=GradientDescent)

    def __post_init__(self) -> None:
        function(self.onto, "onto", "Projected")
        instance(self.update, Update, "update", "Projected", _AN_UPDATE)

    def init(self, x: Tree) -> Variable:
        return self._project(self.update.init(x))

    def set(self, x: Variable, value: Tree) -> Variable:
        return self._project(self.update.set(x, value))

    def __call__(self, x: Variable, g: Leaves, lr: Scalar) -> Variable:
        return self._project(self.update(x, g, lr))

    def _project(self, x: Variable) -> Variable:
        return self._at(x, self.onto(x.value))


@dataclass(frozen=True)
class Clipped(WrappedUpdate):
    """Another update, along the gradient clipped to a norm.

    Args:
        max_norm: largest norm.
        update: the other update.

    Examples:
        >>> move(fsla.steps.Clipped(1.0))
        tensor([0.9760, 2.0970])
    """

    max_norm: float
    update: Update = field(default_factory=GradientDescent)

    def __post_init__(self) -> None:
        positive(self.max_norm, "max_norm", "Clipped")
        instance(self.update, Update, "update", "Clipped", _AN_UPDATE)

    def __call__(self, x: Variable, g: Leaves, lr: Scalar) -> Variable:
        return self.update(x, scale(self.max_norm / norm(g).clamp(min=self.max_norm), g), lr)

    def step_size(self, lr: Scalar) -> Scalar:
        return Update.step_size(self, lr)


@dataclass(frozen=True)
class InPlace(WrappedUpdate):
    """Another update, whose result is written into the variable's own tensors: parameters of a module."""

    update: Update

    @property
    def in_place(self) -> bool:
        return True

    def init(self, x: Tree) -> Variable:
        return self._write(x, self.update.init(x))

    def __call__(self, x: Variable, g: Leaves, lr: Scalar) -> Variable:
        return self._write(x.value, self.update(x, g, lr))

    def set(self, x: Variable, value: Tree) -> Variable:
        return self._write(x.value, self.update.init(value))

    def _write(self, target: Tree, moved: Variable) -> Variable:
        copy_(list(target.values()), [moved.value[name] for name in target])
        return Variable(target, moved.memory)


@dataclass(frozen=True)
class TorchUpdate(Update):
    """Update by a torch optimiser, in place. The optimiser's own learning rate holds.

    Args:
        optimizer: the optimiser.
        parameters: its parameters, by name.

    Examples:
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> update = fsla.steps.TorchUpdate(torch.optim.SGD([w], lr=0.5), {"w": w})
        >>> update(update.init({"w": w.detach()}), g, 0.0).value["w"]
        tensor([0.5000, 4.0000])
    """

    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, nn.Parameter] = field(repr=False)

    @property
    def in_place(self) -> bool:
        return True

    def init(self, x: Tree) -> Variable:
        value = {name: p.detach() for name, p in self.parameters.items()}
        for name, t in value.items():
            if t.data_ptr() != x[name].data_ptr():
                t.copy_(x[name])
        return Variable(value)

    def __call__(self, x: Variable, g: Leaves, lr: Scalar) -> Variable:
        gradient = dense(g)
        before = {name: p.grad for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            p.grad = gradient[name]
        try:
            self.optimizer.step()
        finally:
            for name, p in self.parameters.items():
                p.grad = before[name]
        return x

    def set(self, x: Variable, value: Tree) -> Variable:
        self.optimizer.state.clear()
        copy_(list(x.value.values()), [value[name] for name in x.value])
        return x

    def step_size(self, lr: Scalar) -> Scalar:
        groups = self.optimizer.param_groups
        plain = isinstance(self.optimizer, torch.optim.SGD) and not any(
            group["momentum"] or group["weight_decay"] for group in groups
        )
        if not plain or len({float(group["lr"]) for group in groups}) > 1:
            raise TypeError(
                f"This algorithm needs plain gradient steps of the variable. Got {type(self.optimizer).__name__}; use "
                "torch.optim.SGD without momentum, with one lr."
            )
        size: Scalar = groups[0]["lr"]
        return size

    def moments(self, x: Variable) -> Memory:
        if not isinstance(self.optimizer, torch.optim.Adam):
            return {}
        return {"mean": self._state("exp_avg"), "square": self._state("exp_avg_sq")}

    def derivative(self, before: Memory, after: Memory, g: Tree, lr: Scalar) -> Tree:
        if not isinstance(self.optimizer, torch.optim.Adam):
            return super().derivative(before, after, g, lr)
        (group,) = self.optimizer.param_groups
        b1, b2 = group["betas"]
        return adam_derivative(before, after, g, group["lr"], b1, b2, group["eps"])

    @property
    def weight_decay(self) -> Mapping[str, float]:
        names = {p: name for name, p in self.parameters.items()}
        groups = self.optimizer.param_groups
        decays = {names[p]: group.get("weight_decay", 0.0) for group in groups for p in group["params"]}
        return {name: float(decay) for name, decay in decays.items() if decay}

    def _state(self, key: str) -> Tree:
        state = self.optimizer.state
        return {n: state[p][key].clone() if p in state else torch.zeros_like(p) for n, p in self.parameters.items()}


@dataclass(frozen=True)
class Shortened(WrappedUpdate):
    """Another update in place, of whose step `lr` is the share that is taken."""

    update: Update

    def __call__(self, x: Variable, g: Leaves, lr: Scalar) -> Variable:
        before = clone(x.value)
        x = self.update(x, g, lr)
        return self._at(x, axpy(lr, sub(x.value, before), before))


@dataclass(frozen=True)
class LeaveInGrad(Update):
    """Adds the direction to `.grad` of parameters, for an optimiser that somebody else steps."""

    parameters: Mapping[str, nn.Parameter] = field(repr=False)

    @property
    def in_place(self) -> bool:
        return True

    def __call__(self, x: Variable, g: Leaves, lr: Scalar) -> Variable:
        gradient = dense(g)
        for name, p in self.parameters.items():
            if p.grad is None:
                p.grad = gradient[name]
            else:
                p.grad.add_(gradient[name])
        return x


class Updates(NamedTuple):
    """How ω, v (or another variable of ω's form) and λ move."""

    inner: Update
    adjoint: Update
    outer: Update

    @property
    def in_place(self) -> bool:
        return any(update.in_place for update in self)


def after_steps(weight: float, steps: int) -> float:
    """Return the weight of one new value that stands for several in a moving average."""
    return weight if steps == 1 else 1 - (1 - weight) ** steps


def projected(update: Update, projection: Projection | None) -> Update:
    """Return an update, projected onto a set if there is one."""
    return update if projection is None else Projected(projection, update)


def with_innermost(update: Update, inside: Callable[[Update], Update]) -> Update:
    """Return an update with another one in the place of the innermost that it wraps."""
    if isinstance(update, WrappedUpdate):
        return replace(update, update=with_innermost(update.update, inside))  # type: ignore[type-var]
    return inside(update)


def _check_fraction(value: float, name: str, owner: str) -> None:
    if not (isinstance(value, int | float) and 0 <= value < 1) or math.isnan(value):
        raise ValueError(f"The {name!r} of {owner} must lie between 0 and 1 (1 excluded). Got {value!r} instead.")
