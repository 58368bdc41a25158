"""A loss of a model at one point on one batch: its first derivatives by `backward`, and exact products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from fsla._tree import Leaves, Tree
from fsla.problems import _passes as passes
from fsla.problems._batches import Batch
from fsla.problems._passes import Setting
from fsla.problems._problem import Point
from fsla.train._data_parallel import Found, Together

ModelLoss = Callable[[Any, Any, Any], Tensor]


class MicroBatches(tuple[Any, ...]):
    """A batch in parts of equal size: gradients are means over the parts, and memory is that of one."""

    def __new__(cls, parts: Sequence[Any]) -> Self:
        if not parts:
            raise ValueError("MicroBatches must hold at least one batch. Got none.")
        return super().__new__(cls, parts)


class Place(Protocol):
    """What a view knows of its problem."""

    omega: dict[str, nn.Parameter]
    lam: dict[str, nn.Parameter]
    model: Any
    outer: Any
    autocast_dtype: torch.dtype | None
    together: Together

    def standing(self, at: Point) -> AbstractContextManager[None]: ...
    def passing(self, how: Setting, *, tracks: bool) -> AbstractContextManager[None]: ...
    def tracks(self, name: str) -> bool: ...


class ModelView:
    """A loss at one point on one batch, in first derivatives."""

    def __init__(self, problem: Place, loss: ModelLoss, name: str, at: Point, batch: Batch, seed: int | None) -> None:
        self._problem = problem
        self._loss = loss
        self._name = name
        self._at = at
        self._batch = batch
        self._how = Setting(problem.together.seed(seed), problem.autocast_dtype)
        self._value: Tensor | None = None
        self._by_omega: Tree | None = None
        self._by_lam: Tree | None = None
        self.reads_lam: bool | None = None
        """Whether the loss was seen to read λ; None before a pass that looked."""

    @property
    def unit(self) -> float:
        return passes.rounding_unit(self._at.omega, self._how.autocast_dtype)

    @property
    def value(self) -> Tensor:
        if self._value is None:
            self._run(omega=False, lam=False)
        assert self._value is not None
        return self._value

    @property
    def grad(self) -> Tree:
        if self._by_omega is None:
            self._run(omega=True, lam=False)
        assert self._by_omega is not None
        return self._by_omega

    @property
    def d_omega(self) -> Tree:
        """∂_ω F, with ∂_λ F from the same pass."""
        return self.gradients()[0] if self._by_omega is None else self._by_omega

    @property
    def d_lam(self) -> Tree:
        if self._by_lam is None:
            self._run(omega=False, lam=True)
        assert self._by_lam is not None
        return self._by_lam

    def gradients(self) -> tuple[Tree, Tree]:
        self._run(omega=True, lam=True)
        assert self._by_omega is not None
        assert self._by_lam is not None
        return self._by_omega, self._by_lam

    def _run(self, *, omega: bool, lam: bool) -> None:
        """One pass forward and back; the derivatives of the parts add up in `.grad`, as in plain training."""
        problem = self._problem
        together = problem.together
        wanted = {**(problem.omega if omega else {}), **_apart(problem.lam if lam else {})}
        others = {**({} if omega else problem.omega), **_apart({} if lam else problem.lam)}
        every = [*wanted.values(), *others.values()]
        with problem.standing(self._at), _without_gradient([] if together.sharded else others.values()):
            for p in every:
                p.grad = None
            values = []
            parts = _parts(self._batch)
            tracks = problem.tracks(self._name)
            for number, part in enumerate(parts):
                own, share = together.share(part)
                last = number == len(parts) - 1
                with (
                    problem.passing(self._how.for_part(number), tracks=tracks),
                    together.quietly(problem.model, omega=omega and last),
                ):
                    value = self._evaluate(problem.model, own) * (share / len(parts))
                    if value.requires_grad:
                        value.backward()  # type: ignore[no-untyped-call]
                values.append(value.detach())
            found = {name: p.grad for name, p in wanted.items()}
            for p in every:
                p.grad = None
        like = {name: p.detach() for name, p in wanted.items()}
        value = sum(values[1:], values[0])
        found, self._value = together.mean_by_hooks(found, like, value, self._batch, frozenset(problem.omega))
        if omega:
            self._by_omega = self._gradient({name: found[name] for name in self._problem.omega})
        if lam:
            by_lam = [found[_OUTER + name] for name in self._problem.lam]
            self.reads_lam = any(g is not None for g in by_lam)
            self._by_lam = passes.filled(by_lam, self._at.lam)

    def _gradient(self, grads: Found) -> Tree:
        """Derivatives by ω: of those on the whole batch one must exist."""
        found = list(grads.values()) if self._problem.together.looks_at_a_share else _reached(grads, self._name)
        return passes.filled(found, self._at.omega)

    def _evaluate(self, model: Any, part: Batch) -> Tensor:
        try:
            value = self._loss(model, self._problem.outer, part)
        except Exception as error:
            error.add_note(f"(raised while the {self._name} was called with the model, the outer modules and a batch)")
            if part is None:
                error.add_note("The batch is None: give step an outer_batch, or fit a trusted_loader.")
            if "not differentiable with respect to argument 'weight'" in str(error):
                error.add_note("PyTorch has no derivative of it by weight=. Take reduction='none' and multiply.")
            raise
        return passes.scalar(value, self._name)


class ExactModelView(ModelView):
    """G at one point on one batch, with exact products."""

    def probe(self, v: Tree) -> Tree:
        return self._products(v, omega=True, lam=False, look=True)[0]

    def linearised(self) -> Self:
        return self

    def hvp(self, v: Tree) -> Tree:
        return self._products(v, omega=True, lam=False)[0]

    def cross(self, v: Tree) -> Leaves:
        return self._products(v, omega=False, lam=True)[1]

    def hvp_cross(self, v: Tree) -> tuple[Tree, Leaves]:
        return self._products(v, omega=True, lam=True)

    def cross_t(self, u: Tree) -> Tree:
        problem = self._problem
        lam = list(problem.lam.values())
        parts = _parts(self._batch)
        found: Found = {}
        with problem.standing(self._at):
            for number, part in enumerate(parts):
                own, share = problem.together.share(part)
                with problem.passing(self._how.for_part(number), tracks=False):
                    value = self._shared(own, share)
                    by_lam: Sequence[Tensor | None] = [None] * len(lam)
                    if value.requires_grad:
                        by_lam = torch.autograd.grad(value, lam, create_graph=True, allow_unused=True)
                    pulled = passes.vjp(by_lam, [u[name] for name in problem.lam], list(problem.omega.values()))
                    _add(found, dict(zip(problem.omega, pulled, strict=True)), len(parts))
        found, _ = problem.together.mean(found, self._at.omega, value.detach(), self._batch)
        return passes.filled(self._checked(list(found.values())), self._at.omega)

    def _shared(self, part: Batch, share: float) -> Tensor:
        """G on this rank's share, without hooks that know of one derivative alone."""
        value = self._evaluate(self._problem.together.bare(self._problem.model), part)
        return value if share == 1.0 else value * share

    def _checked(self, by_lam: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Second derivatives by λ: of those on the whole batch one must exist."""
        return by_lam if self._problem.together.looks_at_a_share else passes.reached(by_lam)

    def _products(self, v: Tree, *, omega: bool, lam: bool, look: bool = False) -> tuple[Tree, Tree]:
        """H v and J v; the gradient is left on the way."""
        problem = self._problem
        together = problem.together
        own = list(problem.omega.values())
        wrt: list[Tensor] = [*(own if omega else []), *(problem.lam.values() if lam else [])]
        direction = [v[name] for name in problem.omega]
        parts = _parts(self._batch)
        left = omega or together.alone  # the gradient; for J v alone nobody would ask for it
        trees = [self._at.omega if left else {}, self._at.omega if omega else {}, self._at.lam if lam else {}]
        like = {f"{i}.{name}": t for i, tree in enumerate(trees) for name, t in tree.items()}
        values = []
        found: Found = {}
        with problem.standing(self._at):
            tracks = problem.tracks(self._name)
            for number, part in enumerate(parts):
                samples, share = together.share(part)
                with problem.passing(self._how.for_part(number), tracks=tracks):
                    value = self._shared(samples, share)
                    grads: Sequence[Tensor | None] = [None] * len(own)
                    if value.requires_grad:
                        grads = torch.autograd.grad(value, own, create_graph=True, allow_unused=True)
                    if look:
                        passes.check_twice_differentiable(grads)
                    second = passes.vjp(grads, direction, wrt, retain_graph=False)
                    values.append(value.detach())
                    gradient = [None if g is None else g.detach() for g in grads] if left else []
                    _add(found, dict(zip(like, [*gradient, *second], strict=True)), len(parts))
        value = sum(values[1:], values[0]) / len(parts)
        found, self._value = together.mean(found, like, value, self._batch)
        answers = iter(found.values())
        gradients, by_omega, by_lam = ([next(answers) for _ in tree] for tree in trees)
        if left:
            self._by_omega = self._gradient(dict(zip(problem.omega, gradients, strict=True)))
        return passes.filled(by_omega, trees[1]), passes.filled(self._checked(by_lam) if lam else [], trees[2])


_OUTER = "outer."


def _apart(lam: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """λ under names that ω cannot have."""
    return {_OUTER + name: p for name, p in lam.items()}


def _parts(batch: Batch) -> tuple[Batch, ...]:
    return tuple(batch) if isinstance(batch, MicroBatches) else (batch,)


def _add(total: Found, found: Found, parts: int) -> None:
    """Adds the mean over the parts of a batch up; None is what was not reached."""
    for name, t in found.items():
        before = total.get(name)
        share = t if t is None or parts == 1 else t / parts
        total[name] = share if before is None else before if share is None else before + share


def _reached(grads: Mapping[str, Tensor | None], name: str) -> list[Tensor | None]:
    """Derivatives by ω, of which at least one must exist."""
    if all(g is None for g in grads.values()):
        raise ValueError(
            f"The {name} must depend on the model's parameters, but none of them reaches it. It must use the model "
            "that it is given, without .detach(), .item() or torch.no_grad()."
        )
    return list(grads.values())


@contextmanager
def _without_gradient(parameters: Any) -> Iterator[None]:
    """Has parameters require no gradient, so that a pass does not work for them."""
    changed = list(parameters)
    for p in changed:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in changed:
            p.requires_grad_(True)
