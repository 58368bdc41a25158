"""Networks as functions of ω: an nn.Module becomes a tree of parameters and a pure function of it.

Every oracle calls the network anew, at several points, and must see the same function. So what changes from pass to
pass needs a word:

    dropout and other random layers   allowed where the batch has a seed, which fixes the mask at all points of a step
    batch normalisation               `batch_norm="batch"`: batch statistics in every pass, running ones untouched by
                                      the passes and moved once a step by `net.update_running_stats(omega, x)`;
                                      `batch_norm="frozen"`: running statistics in every pass, as in eval mode
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fsla._checks import pick
from fsla._torch import check_recomputation, module_parameters, module_parts, recomputing_with, versions
from fsla._tree import Tree
from fsla.problems._passes import draws_from_seed

BatchNorm = Literal["batch", "frozen"]
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def make_functional(model: nn.Module, *, batch_norm: BatchNorm | None = None) -> tuple[Tree, Network]:
    """Split a network into its parameters and a function of them.

    A missing or misspelt name is an error, never a silent use of the model's own weight. Frozen parameters and buffers
    are read from the model. Networks that draw random numbers in a pass need batches with a seed. Networks that write
    their buffers are refused. The first call finds what the modules do not declare.

    Args:
        model: the network.
        batch_norm: what layers with running statistics do in training mode. "batch": batch statistics in every pass,
            and ``net.update_running_stats(omega, x)`` once a step. "frozen": running statistics in every pass. Without
            it they are refused.

    Returns:
        ``(omega, net)``: the trainable parameters by name, detached from the model, and a function whose
        ``net(omega, *inputs)`` is the network's output with those parameters.

    Raises:
        TypeError: if `model` is no `torch.nn.Module`.
        ValueError: if it has no trainable parameter.

    Examples:
        >>> omega, net = fsla.make_functional(torch.nn.Linear(2, 1))
        >>> sorted(omega)
        ['bias', 'weight']
        >>> net(omega, torch.zeros(3, 2)).shape
        torch.Size([3, 1])
    """
    check_recomputation()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module. Got {type(model).__name__} instead.")
    if batch_norm is not None:
        pick(batch_norm, {"batch": 0, "frozen": 0}, "batch_norm policy")
    omega = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    if not omega:
        raise ValueError("model must have at least one parameter that requires a gradient. Got none.")
    return omega, Network(model, omega, batch_norm)


class Network:
    """A network as a function of its trainable parameters: ``net(omega, *inputs)``."""

    def __init__(self, model: nn.Module, omega: Tree, batch_norm: BatchNorm | None) -> None:
        self._model = model
        self._shapes = {name: t.shape for name, t in omega.items()}
        self._batch_norm = batch_norm
        self._places = _places(model)
        self._members = _members(model)
        named = [(name or "the model", m) for name, m in model.named_modules()]
        self._normalising = [(name, m) for name, m in named if _has_statistics(m)]
        self._dropping = [(name, m) for name, m in named if isinstance(m, DROPOUT)]
        self._tried: set[tuple[bool, bool]] = set()
        self._refuse_statistics()

    def __call__(self, omega: Tree, *inputs: Any, **named: Any) -> Any:
        self._refuse_statistics()
        self._refuse_draws()
        self._check(omega)
        with self._policy(), self._swapped(omega):
            key = (self._model.training, draws_from_seed.get())
            if key in self._tried:
                return self._model(*inputs, **named)
            self._tried.add(key)
            return self._first_call(inputs, named)

    @torch.no_grad()
    def update_running_stats(self, omega: Tree, *inputs: Any, **named: Any) -> None:
        """Move the running statistics once, as a training pass at ω would: call it once a step, on the inner batch."""
        self._check(omega)
        with self._swapped(omega):
            self._model(*inputs, **named)

    def _check(self, omega: Tree) -> None:
        if omega.keys() != self._shapes.keys():
            missing = sorted(self._shapes.keys() - omega.keys())
            unknown = sorted(omega.keys() - self._shapes.keys())
            raise ValueError(
                f"omega must have the network's trainable parameters. It lacks {missing}, and {unknown} are unknown."
            )
        for name, t in omega.items():
            if t.shape != self._shapes[name]:  # it might broadcast
                raise ValueError(
                    f"omega[{name!r}] must have shape {tuple(self._shapes[name])}. Got {tuple(t.shape)} instead."
                )
        if _members(self._model) != self._members:
            raise ValueError("The network must not be given new parameters or parts after fsla.make_functional(model).")

    @contextmanager
    def _swapped(self, omega: Tree) -> Iterator[None]:
        """Has the model compute with ω, tied weights too, and its activation checkpoints recompute with ω.

        A checkpoint runs its part of the network again during the backward pass, when the model has its own parameters
        back: without this the gradients would be those of another point, and nothing would say so.
        """

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def again(*inputs: Any, **named: Any) -> Any:
                with self._policy(), self._swapped(omega):
                    return function(*inputs, **named)

            return again

        originals = [parameters[key] for parameters, key, _ in self._places]
        try:
            with recomputing_with(wrap):
                for parameters, key, name in self._places:
                    parameters[key] = omega[name]
                yield
        finally:
            for (parameters, key, _), parameter in zip(self._places, originals, strict=True):
                parameters[key] = parameter

    def _first_call(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The first call in a mode: does it draw or write anything?"""
        buffers = dict(self._model.named_buffers())
        before = versions(buffers.values())
        random = _random_state()
        out = self._model(*inputs, **named)
        drew = not all(torch.equal(a, b) for a, b in zip(random, _random_state(), strict=True))
        if drew and not draws_from_seed.get():
            raise ValueError(f"{_PURE}, but it draws random numbers on each pass. {_SEED}")
        written = [name for name, a, b in zip(buffers, before, versions(buffers.values()), strict=True) if a != b]
        if written:
            raise ValueError(f"{_PURE}, but it writes its buffers {written} on each pass. {_EVAL}")
        return out

    @contextmanager
    def _policy(self) -> Iterator[None]:
        """Switch the layers with running statistics as the policy has it, for one call."""
        moving = [] if self._batch_norm is None else [m for _, m in self._normalising if m.training]
        flag = "track_running_stats" if self._batch_norm == "batch" else "training"
        for m in moving:
            setattr(m, flag, False)
        try:
            yield
        finally:
            for m in moving:
                setattr(m, flag, True)

    def _refuse_statistics(self) -> None:
        if self._batch_norm is not None:
            return
        for name, m in self._normalising:
            if m.training:
                raise ValueError(
                    f"{_PURE}, but {name!r} ({type(m).__name__}) in training mode moves its running statistics on "
                    'each pass. Say fsla.make_functional(model, batch_norm="batch") for batch statistics in every pass '
                    'or "frozen" for the running ones, make the layer with track_running_stats=False, or call '
                    "model.eval()."
                )

    def _refuse_draws(self) -> None:
        if draws_from_seed.get():
            return
        for name, m in self._dropping:
            if m.training and m.p > 0:
                raise ValueError(
                    f"{_PURE}, but {name!r} ({type(m).__name__}) in training mode draws a new mask on each pass. "
                    f"{_SEED}"
                )


_PURE = "The network must be a function of omega and the batch alone"
_SEED = (
    "Give the step's batches a seed, as in StepBatches.draw(..., seed=k), which fixes the mask, or call model.eval()."
)
_EVAL = "Call model.eval(), or keep what changes out of the network."


def _places(model: nn.Module) -> list[tuple[dict[str, Any], str, str]]:
    """Places of the trainable parameters: the dictionary of a module, the key in it, and the name in ω.

    This is what torch.func.functional_call finds out at each call, which takes a third of a pass on a deep network.
    """
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    return [
        (module_parameters(m), key, names[p])
        for m in model.modules()
        for key, p in module_parameters(m).items()
        if p is not None and p in names
    ]


def _members(model: nn.Module) -> int:
    """How many parameters and parts the model has, counted cheaply."""
    parts = [model]
    total = 0
    for m in parts:
        children = module_parts(m)
        total += len(module_parameters(m)) + len(children)
        parts += [child for child in children.values() if child is not None]
    return total


def _random_state() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += torch.cuda.get_rng_state_all()
    return states


def _has_statistics(m: nn.Module) -> bool:
    return getattr(m, "running_mean", None) is not None and bool(getattr(m, "track_running_stats", True))
