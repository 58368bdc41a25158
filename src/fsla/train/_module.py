"""A model and its outer modules as a problem, in place: the model's own parameters are ω, the outer modules' are λ.

A pass sets the parameters to the point that is asked about, calls the user's loss, goes back through it with
`backward`, and puts the parameters back from copies. Nothing is called functionally, so hooks, compiled modules,
activation checkpoints and tied weights behave as in plain training.

Every pass of a step sees the same function: random layers draw from the sample's seed, and buffers (the running
statistics of batch normalisation, say) are put back after each pass but one: the first inner pass of a step.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fsla._tree import copy_, is_sharded, own
from fsla.distributed import join, raise_once
from fsla.problems import _passes as passes
from fsla.problems._autograd import DifferenceWarning, Mode, Problem
from fsla.problems._batches import Batch
from fsla.problems._passes import Setting
from fsla.problems._problem import Point
from fsla.problems._views import INNER, OUTER, Ways
from fsla.train._data_parallel import Batches, Together
from fsla.train._module_views import ExactModelView, ModelLoss, ModelView

EXACT_UP_TO = 10_000_000
"""Parameters of a model up to which products="auto" tries exact ones."""
OuterModules = nn.Module | nn.Parameter | Sequence[Any] | Mapping[str, Any]


class ModelProblem(Problem):
    """The problem of a model, at the point where its parameters stand.

    Args:
        model: the network; its trainable parameters are ω.
        outer: the modules that hold λ: one, or a list or mapping of modules and parameters.
        inner_loss, outer_loss: called as ``loss(model, outer, batch)``; they return 0-d tensors.
        mode, autocast: as in `fsla.Problem`.
        batches: on several ranks, whether each is given the whole batch or its own share of it.
    """

    def __init__(
        self,
        model: nn.Module,
        outer: OuterModules,
        inner_loss: ModelLoss,
        outer_loss: ModelLoss,
        *,
        mode: Mode = "auto",
        autocast_dtype: torch.dtype | None = None,
        batches: Batches = "whole",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module. Got {type(model).__name__} instead.")
        super().__init__(inner_loss, outer_loss, mode=mode, autocast_dtype=autocast_dtype)
        self.model = model
        self.outer = outer
        self.omega = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.lam = dict(_trainable(outer))
        self._tracks = False
        _check_parameters(self.omega, self.lam)
        self.together = Together(join(), model, batches)

    @property
    def here(self) -> Point:
        """The point where the parameters stand: the tensors are the parameters' own and move with them."""
        return Point(_values(self.lam), _values(self.omega))

    def meet(self, settings: Mapping[str, object]) -> None:
        """Has all ranks begin with the parameters and buffers of rank 0; raises unless they have the same form."""
        ranks = self.together.ranks
        if ranks.world == 1:
            return
        device = passes.device_of(self.omega)
        forms = {
            name: {key: f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for key, t in named_tensors(part)}
            for name, part in (("model", self.model), ("outer", self.outer))
        }
        ranks.agree({**settings, **forms, "device": device.type}, "model and settings")
        places = ranks.gather([platform.node(), str(device)])
        if device.type == "cuda" and len({tuple(place) for place in places}) < len(places):
            ranks.refuse(
                f"Each rank must have a GPU of its own. Got {', '.join(place[1] for place in places)} by rank. Make "
                "the model on the device that fsla.distributed.device() returns."
            )
        ranks.copy_from(0, [t for t in self.tensors() if not is_sharded(t)])

    def track(self) -> None:
        """Lets the next inner pass move the buffers for good."""
        self._tracks = True

    def tracks(self, name: str) -> bool:
        """Whether a pass is the one that moves the buffers; it is told so once."""
        tracks = self._tracks and name == INNER
        self._tracks = self._tracks and not tracks
        return tracks

    def outer_at(self, at: Point, batch: Batch, seed: int | None = None) -> ModelView:
        return ModelView(self, self.outer_loss, OUTER, at, batch, seed)

    def _first_order(self, at: Point, batch: Batch, seed: int | None) -> ModelView:  # type: ignore[override]
        return ModelView(self, self.inner_loss, INNER, at, batch, seed)

    def _exact(self, at: Point, batch: Batch, seed: int | None, ways: Ways) -> ExactModelView:  # type: ignore[override]
        return ExactModelView(self, self.inner_loss, INNER, at, batch, seed)

    def check_reading(self, batch: Batch, seed: int | None) -> None:
        """Raises unless the inner loss reads λ."""
        view = self._first_order(self.here, batch, seed)
        view.gradients()
        if not view.reads_lam:
            raise ValueError(
                "The inner loss G must depend on outer, or the outer problem cannot act through the model. It must use "
                "the outer modules that it is given, in a term that also holds the model."
            )

    @contextmanager
    def standing(self, at: Point) -> Iterator[None]:
        """Has the parameters stand at a point, and puts them back bit by bit."""
        pairs = [(self.omega[name], t) for name, t in at.omega.items()] + [(self.lam[n], t) for n, t in at.lam.items()]
        moves = [(p, t) for p, t in pairs if own(p).data_ptr() != own(t).data_ptr()]
        moved: list[Tensor] = [p for p, _ in moves]
        home = [torch.empty_like(p, requires_grad=False) for p in moved]
        copy_(home, moved)
        try:
            copy_(moved, [t for _, t in moves])
            yield
        finally:
            copy_(moved, home)

    @contextmanager
    def passing(self, how: Setting, *, tracks: bool) -> Iterator[None]:
        """What a pass runs in: its random state, autocast, and buffers that stay as they are unless it tracks."""
        buffers = [] if tracks and self.together.alone else list(self._buffers())
        kept = [b.detach().clone() for b in buffers]  # batch normalisation does not count its writes
        try:
            with passes.surroundings(how, self.omega), torch.enable_grad():
                yield
        finally:
            if not tracks:
                with torch.no_grad():
                    for b, old in zip(buffers, kept, strict=True):
                        b.copy_(old)
        if tracks:
            self.together.same_buffers(buffers, kept)

    def tensors(self) -> list[Tensor]:
        """Every parameter and buffer of the model and of outer, as it stands."""
        return [t.detach() for part in (self.model, self.outer) for _, t in named_tensors(part)]

    def moving(self) -> list[Tensor]:
        """Return what a step may move in place: trainable parameters and all buffers."""
        return [t.detach() for t in (*self.omega.values(), *self.lam.values(), *self._buffers())]

    def _buffers(self) -> Iterator[Tensor]:
        for _, member in (*members(self.model), *members(self.outer)):
            if isinstance(member, nn.Module):
                yield from member.buffers()

    def _probed(self, at: Point, batch: Batch, seed: int | None) -> Ways | Literal["difference"]:
        """Each rank finds out by itself, on its own share; where one of them must take differences, all do."""
        ranks = self.together.ranks
        if ranks.world == 1:
            return super()._probed(at, batch, seed)
        found: Ways | Literal["difference"] = "difference"
        failed: Exception | None = None
        share, _ = self.together.share(batch)
        try:
            with self.together.apart():
                found = super()._probed(at, share, seed)
        except Exception as error:
            failed = error
        ranks.all_well(failed)
        return "difference" if "difference" in ranks.gather(found) else found

    def _candidates(self, device: torch.device) -> tuple[Ways, ...]:
        return (Ways(hvp_forward=False, slopes_forward=False),)


def products_of(model: nn.Module, products: Mode) -> Mode:
    """How the products of a model are taken, as far as its form says."""
    if isinstance(model, nn.Module) and any(is_sharded(p) for p in model.parameters()):
        if products == "exact":
            raise_once(
                ValueError(
                    "A model in shards, as fully_shard makes it, must have products='difference' or 'auto'. Got "
                    "'exact': its hooks serve one derivative, and a second one taken through them is silently wrong."
                )
            )
        return "difference"
    count = sum(p.numel() for p in model.parameters() if p.requires_grad) if isinstance(model, nn.Module) else 0
    if products != "auto" or count <= EXACT_UP_TO:
        return products
    warnings.warn(
        f"The model has {count:,} parameters: products are taken by differences of first-order gradients, at the "
        "memory of training. Say products='difference' to choose this, or products='exact'.",
        DifferenceWarning,
        stacklevel=4,
    )
    return "difference"


def _values(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in parameters.items()}


def members(part: OuterModules, prefix: str = "") -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    """The modules and parameters of outer, or of a model, by name."""
    if isinstance(part, nn.Module | nn.Parameter):
        yield prefix, part
    elif isinstance(part, Mapping | list | tuple):
        for key, inside in part.items() if isinstance(part, Mapping) else enumerate(part):
            yield from members(inside, f"{prefix}.{key}" if prefix else str(key))
    else:
        raise TypeError(
            "outer must be a torch.nn.Module, a torch.nn.Parameter, or a list or mapping of these. "
            f"Got {type(part).__name__} instead."
        )


def _trainable(outer: OuterModules) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, part in members(outer):
        if isinstance(part, nn.Parameter):
            if part.requires_grad:
                yield prefix or "lam", part
        else:
            yield from ((name, p) for name, p in part.named_parameters(prefix=prefix) if p.requires_grad)


def named_tensors(part: OuterModules) -> Iterator[tuple[str, Tensor]]:
    """All parameters, trainable or not, and buffers, by name."""
    for prefix, member in members(part):
        if isinstance(member, nn.Parameter):
            yield prefix, member
        else:
            yield from member.named_parameters(prefix=prefix)
            yield from member.named_buffers(prefix=prefix)


def _check_parameters(omega: Mapping[str, nn.Parameter], lam: Mapping[str, nn.Parameter]) -> None:
    for name, parameters in (("model", omega), ("outer", lam)):
        if not parameters:
            raise ValueError(f"{name} must have at least one parameter that requires a gradient. Got none.")
    both = {id(p) for p in omega.values()} & {id(p) for p in lam.values()}
    if both:
        shared = sorted(name for name, p in lam.items() if id(p) in both)
        raise ValueError(
            f"A parameter must belong to the model or to outer, but both have {shared}. Keep outer modules out of the "
            "model, and hand them to the losses as `outer`."
        )
    devices = sorted({str(p.device) for p in chain(omega.values(), lam.values())})
    if len(devices) > 1:
        raise ValueError(
            f"The parameters of the model and of outer must be on one device. Got {', '.join(devices)}. Move them with "
            ".to(device) first."
        )
    for p in chain(omega.values(), lam.values()):
        if not p.dtype.is_floating_point:
            raise TypeError(f"Parameters must be real floating-point tensors. Got {p.dtype} instead.")
