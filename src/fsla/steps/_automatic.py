"""Steps that need no tuning: what is measured during a run, and the rates that follow from it.

    Curvature   L, the largest curvature of G, by power iteration on products; ω and v move by 1/L
    Damping     γ, where v is seen to grow along negative curvature: v then solves (H + γ) v = ∂_ω F
    Gate        ψ, how far λ may move: little until v solves its equation
    ScaleFree   λ's step: a moving average of d over its root mean square, in units of λ; a torch optimiser

None of them reads a clock, and all of their state is in `state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fsla._tree import Tree, axpy, dot, is_sharded, norm, scale, spread, zeros_like

KEEP = 0.9
FIRST = 20
EVERY = 10
"""Products of the first estimate of L, and steps between two later ones."""
FALL = 300.0
"""Steps after which those of λ are shorter by √2."""


class Curvature:
    """‖H‖ from below, as a maximum that decays: power iteration, warm-started, with a little noise to look around.

    What H does to v is seen at every step, and counts as well: a batch with a rare sample may bend far more than those
    that power iteration met.
    """

    def __init__(self, omega: Tree) -> None:
        self._generator = torch.Generator(next(iter(omega.values())).device).manual_seed(0)
        self.size = 0.0
        self._along_v: Tensor | float = 0.0
        self._u = self._unit(self._noise(omega))

    def look(self, hvp: Callable[[Tree], Tree], times: int = 1) -> None:
        for i in range(times):
            h = hvp(self._u)
            found = max(float(norm(h)), float(self._along_v))
            self._along_v = 0.0
            settled = self.size > 0 and (times == 1 or i >= times - 3)
            self.size = max(found, KEEP * self.size + (1 - KEEP) * found) if settled else found
            if found > 0:
                self._u = self._unit(axpy(0.1, self._noise(h), self._unit(h)))

    def share(self, v: Tree, hv: Tree) -> Tensor:
        """How much of the step 1/L is safe along v on this batch, whose curvature there is remembered."""
        length = norm(v)
        along = torch.where(length > 0, norm(hv) / length, 0)
        self._along_v = torch.maximum(along, torch.as_tensor(self._along_v, device=along.device, dtype=along.dtype))
        return (self.size / along).clamp(max=1.0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "along_v": self._along_v,
            "u": self._u,
            "random": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.size = float(state["size"])
        self._along_v = state["along_v"]
        self._u = {name: t.clone() for name, t in state["u"].items()}
        random = state["random"].cpu()
        if len(random) == len(self._generator.get_state()):
            self._generator.set_state(random)
        else:  # The run was saved on another kind of device, whose generator has another form.
            self._generator.manual_seed(0)

    def _noise(self, like: Tree) -> Tree:
        """Draw a direction of length about 1 on the device of ω."""
        generator = self._generator
        drawn = [spread(torch.randn(t.shape, generator=generator, device=generator.device), t) for t in like.values()]
        count = sum(t.numel() for t in drawn)
        torch._foreach_div_(drawn, count**0.5)
        return dict(zip(like, drawn, strict=True))

    def _unit(self, x: Tree) -> Tree:
        return scale(1 / norm(x), x)


class Damping:
    """γ: one and a half times the most negative curvature that was seen along v, slowly forgotten."""

    def __init__(self) -> None:
        self.size: Tensor | float = 0.0

    def look(self, v: Tree, hv: Tree) -> Tensor | float:
        length = dot(v, v)
        along = torch.where(length > 0, dot(v, hv) / length, 0)
        self.size = torch.maximum(0.99 * torch.as_tensor(self.size, device=along.device), -1.5 * along)
        return self.size


class Gate:
    """ψ = 1 / (1 + ρ² / width²), where ρ² is the part of v's equation that is not solved.

    ρ² = <r, r'> / <b, b'> with r = ∂_ω F - H v and b = ∂_ω F, each summed over one of two successive blocks of steps:
    noise of the one is independent of noise of the other, and does not count as residual. Of large models a fixed
    choice of coordinates is looked at; of models in shards, of whole tensors.
    """

    BLOCK = 25
    COORDINATES = 1_000_000

    def __init__(self, omega: Tree, width: float = 0.1) -> None:
        total = sum(t.numel() for t in omega.values())
        self._sharded = any(is_sharded(t) for t in omega.values())
        self._stride = -(-total // self.COORDINATES)
        self._names = _spaced(omega, self.COORDINATES) if self._sharded else list(omega)
        self._width = width
        self._count = 0
        self._sums: tuple[Tree, Tree] | None = None
        self._before: tuple[Tree, Tree] | None = None
        self._unsolved: Tensor | float = 1.0

    @property
    def size(self) -> Tensor | float:
        return 1 / (1 + self._unsolved / self._width**2)

    def look(self, residual: Tree, b: Tree) -> None:
        now = self._some(residual), self._some(b)
        self._sums = now if self._sums is None else (axpy(1.0, now[0], self._sums[0]), axpy(1.0, now[1], self._sums[1]))
        self._count += 1
        if self._count < self.BLOCK:
            return
        if self._before is not None:
            (r, size), (r_before, size_before) = self._sums, self._before
            tiny = torch.finfo(torch.float32).tiny
            self._unsolved = (dot(r, r_before) / dot(size, size_before).clamp(min=tiny)).clamp(0.0, 1.0)
        self._before = self._sums
        self._sums = None
        self._count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count, "sums": self._sums, "before": self._before, "unsolved": self._unsolved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count = state["count"]
        self._sums = state["sums"]
        self._before = state["before"]
        self._unsolved = state["unsolved"]

    def _some(self, x: Tree) -> Tree:
        if self._sharded:
            return {name: x[name] for name in self._names}
        return {"coordinates": torch.cat([x[name].flatten()[:: self._stride] for name in self._names])}


def _spaced(x: Tree, count: int) -> list[str]:
    """The names of tensors from all over the tree that have together at least so many coordinates."""
    names = list(x)
    order = sorted(range(len(names)), key=lambda i: (i * 0.6180339887) % 1.0)
    taken: list[int] = []
    for i in order:
        if sum(x[names[j]].numel() for j in taken) >= count:
            break
        taken.append(i)
    return [names[i] for i in sorted(taken)]


class ScaleFree(torch.optim.Optimizer):
    """x ← x - lr gate / √(1 + k/fall) m / (√s + floor), m and s moving averages of the gradient and its square.

    The size of the gradient does not matter, only its direction: lr is in units of x. `gate` in [0, 1] is set from
    outside.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.05,
        fall: float = FALL,
        average: float = 0.1,
        second: float = 0.01,
        floor: float = 1e-3,
    ) -> None:
        defaults = {"lr": lr, "fall": fall, "average": average, "second": second, "floor": floor}
        super().__init__(params, defaults)
        self.gate: Tensor | float = 1.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, group)

    def _move(self, p: Tensor, group: dict[str, Any]) -> None:
        memory = self.state[p]
        if not memory:
            memory["k"] = 0
            memory["mean"] = p.grad.clone()  # type: ignore[union-attr]
            memory["square"] = torch.zeros_like(p)
        g = p.grad
        assert g is not None
        memory["k"] += 1
        memory["mean"].lerp_(g, group["average"] if memory["k"] > 1 else 1.0)
        memory["square"].lerp_(g.square(), group["second"])
        size = (memory["square"] / (1 - (1 - group["second"]) ** memory["k"])).sqrt_()
        floor = group["floor"] * size.square().mean().sqrt() + torch.finfo(p.dtype).tiny
        rate = group["lr"] / (1 + (memory["k"] - 1) / group["fall"]) ** 0.5
        p.sub_(memory["mean"] / (size + floor) * (rate * self.gate))


def zeros(parameters: Tree) -> dict[str, torch.nn.Parameter]:
    """v: parameters of its own, so that a torch optimiser can move it."""
    return {name: torch.nn.Parameter(t) for name, t in zeros_like(parameters).items()}
