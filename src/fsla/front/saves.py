"""The checkpoints of a run of the front end: what is in one, as the run of what, and which is taken up."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from fsla.checkpoint import CheckpointError, load_checkpoint, pack, save_checkpoint
from fsla.front.base import OPTIMIZERS, Bilevel
from fsla.front.feed import Feed, RandomState
from fsla.front.model import named_tensors
from fsla.plain import Plain, differences, plain

Resume = bool | Literal["previous"]

_NAME = re.compile(r"checkpoint-([0-9]{8,18})\.safetensors")
_ASIDE = ".aside"
_PAIRS = "fsla.pairs"
_ARRAY = "fsla.array"
_RATES = ("lr", "betas", "momentum", "weight_decay")
"""What is compared of the options that an optimiser was made with; other names come and go with torch's versions."""


class Saves:
    """The checkpoints in a folder, of one run: the last `keep` of them.

    Args:
        folder: where they are.
        keep: how many.
        opt, schedulers, feeds: what is saved and set.
        given: what the user says that this is a run of.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        opt: Bilevel,
        schedulers: Sequence[Any],
        feeds: Sequence[Feed],
        given: Mapping[str, object] | None,
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._opt = opt
        self._schedulers = schedulers
        self._feeds = feeds
        self._identity = identity(opt, schedulers, feeds, given)

    def save(self, progress: Mapping[str, Plain]) -> Path:
        """Writes a checkpoint, and removes those that are older than the last `keep`."""
        path = self._folder / f"checkpoint-{progress['step']:08}.safetensors"
        save_checkpoint(path, self._parts(progress))
        for old in self.found()[: -self._keep]:
            old.unlink(missing_ok=True)
        return path

    def check(self) -> None:
        """Raises if something has a state that a checkpoint cannot hold: said at the first step, not hours later."""
        for name, part in self._parts({}).items():
            try:
                pack(part)
            except TypeError as error:
                error.add_note(f"(in {name!r} of a checkpoint of fit)")
                raise

    def found(self) -> list[Path]:
        """The checkpoints in the folder, the oldest first."""
        named = [(int(match[1]), p) for p in self._folder.iterdir() if (match := _NAME.fullmatch(p.name))]
        return [path for _, path in sorted(named)]

    def resume(self, which: Resume, steps: int) -> dict[str, Any] | None:
        """Sets everything as a checkpoint has it, and returns the progress that was saved; None where there is none."""
        found = self.found()
        if not found:
            return None
        if which is False:
            raise CheckpointError(
                f"{self._folder} must hold no checkpoint where resume=False. It holds {found[-1].name}. Leave "
                "resume=True to go on from it, remove it to begin anew, or name another folder."
            )
        if which != "previous":
            try:
                return self._set(found[-1], steps)
            except CheckpointError as error:
                if len(found) > 1:
                    error.add_note(f"(resume='previous' goes on from {found[-2].name} instead)")
                raise
        if len(found) < 2:
            raise CheckpointError(
                f"{self._folder} must hold two checkpoints where resume='previous'. It holds {found[-1].name} alone. "
                "Use resume=True, or remove it to begin anew."
            )
        progress = self._set(found[-2], steps)
        found[-1].replace(found[-1].with_name(found[-1].name + _ASIDE))  # or it would stay the newest
        return progress

    def _parts(self, progress: Mapping[str, Plain]) -> dict[str, Any]:
        opt = self._opt
        parts = {
            "identity": self._identity,
            "progress": dict(progress),
            "model": tensors_of(opt.problem.model),
            "outer": tensors_of(opt.problem.outer),
            "opt": opt.state_dict(),
            "good": opt._good,
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "loaders": [feed.position() for feed in self._feeds],
            "random": RandomState.now().packed(),
        }
        return {name: encode(part) for name, part in parts.items()}

    def _set(self, path: Path, steps: int) -> dict[str, Any]:
        saved = load_checkpoint(path)
        if not isinstance(saved, dict) or "identity" not in saved or "progress" not in saved:
            raise CheckpointError(
                f"{path} must be a checkpoint of fit. It is of something else. Remove it, or name another folder."
            )
        differ = differences(saved["identity"], self._identity)
        if differ:
            more = f"; and {len(differ) - 8} more" if len(differ) > 8 else ""
            raise CheckpointError(
                f"{path} must be the checkpoint of this run. It is of another ({'; '.join(differ[:8])}{more}). "
                "Name another folder, or remove it to begin anew."
            )
        progress: dict[str, Any] = saved["progress"]
        if progress["step"] > steps:
            raise CheckpointError(
                f"{path} must be of a run that has not gone beyond the {steps} steps that are asked for. It is at step "
                f"{progress['step']}. Ask for more steps, or name another folder."
            )
        try:
            parts = {name: decode(part) for name, part in saved.items()}
            set_tensors(parts["model"], self._opt.problem.model)
            set_tensors(parts["outer"], self._opt.problem.outer)
            self._opt.load_state_dict(parts["opt"])
            self._opt._good = parts["good"]
            for scheduler, state in zip(self._schedulers, parts["schedulers"], strict=True):
                scheduler.load_state_dict(state)
            for feed, position in zip(self._feeds, parts["loaders"], strict=True):
                feed.seek(position)
            for feed, position in zip(self._feeds, parts["loaders"], strict=True):
                feed.settle(position)
            RandomState.unpacked(parts["random"]).set()
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{path} must be of this run, written with this version. It cannot be set ({error}). Name another "
                "folder, or remove it to begin anew."
            ) from error
        return progress


def identity(
    opt: Bilevel, schedulers: Sequence[Any], feeds: Sequence[Feed], given: Mapping[str, object] | None
) -> Plain:
    """What a checkpoint is of: the form of the variables, the algorithm, its options, and what the user says."""
    optimizers = {name: getattr(opt, name) for name in OPTIMIZERS}
    options = {name: getattr(opt, f"_{name}", None) for name in ("momentum", "eta", "max_norm", "radius")}
    return plain(
        {
            "algorithm": type(opt).__name__,
            "omega": {name: _form(p) for name, p in opt.problem.omega.items()},
            "lam": {name: _form(p) for name, p in opt.problem.lam.items()},
            "options": options | {"products": opt.problem.mode, "autocast": str(opt.problem.autocast)},
            "optimisers": {
                name: {"kind": type(optimizer).__name__}
                | {key: optimizer.defaults[key] for key in _RATES if key in optimizer.defaults}
                for name, optimizer in optimizers.items()
            },
            "schedulers": [type(scheduler).__name__ for scheduler in schedulers],
            "batches": [feed.count for feed in feeds],
            "fingerprint": {} if given is None else given,
        },
        "fingerprint",
    )


def _form(p: Tensor) -> str:
    return f"{str(p.dtype).removeprefix('torch.')}{list(p.shape)}"


def tensors_of(part: Any) -> dict[str, Tensor]:
    """The parameters and buffers, trainable or not, of a module, a parameter, or a list or mapping of these."""
    return {name: t.detach() for name, t in named_tensors(part)}


def set_tensors(saved: Mapping[str, Tensor], part: Any) -> None:
    own = dict(named_tensors(part))
    if {name: _form(t) for name, t in own.items()} != {name: _form(t) for name, t in saved.items()}:
        wrong = sorted(name for name in own.keys() | saved.keys() if _said(own, name) != _said(saved, name))
        raise ValueError(f"other parameters and buffers are in it: {', '.join(wrong[:8])}")
    with torch.no_grad():
        for name, t in own.items():
            t.copy_(saved[name])


def _said(tensors: Mapping[str, Tensor], name: str) -> str:
    return _form(tensors[name]) if name in tensors else ""


def encode(x: Any) -> Any:
    """A nest of states with what a checkpoint holds: optimisers have mappings from numbers, NumPy has arrays."""
    if isinstance(x, numpy.ndarray):
        return (_ARRAY, str(x.dtype), torch.from_numpy(x.astype(numpy.int64)))
    if isinstance(x, numpy.generic):
        return x.item()
    if isinstance(x, Counter) or (isinstance(x, Mapping) and not all(isinstance(key, str) for key in x)):
        kind = "counter" if isinstance(x, Counter) else "dict"
        return (_PAIRS, kind, [(key, encode(value)) for key, value in x.items()])
    if isinstance(x, Mapping):
        return {key: encode(value) for key, value in x.items()}
    if isinstance(x, tuple):
        return tuple(encode(value) for value in x)
    if isinstance(x, list):
        return [encode(value) for value in x]
    return x


def decode(x: Any) -> Any:
    if isinstance(x, tuple) and len(x) == 3 and x[0] == _ARRAY:
        return x[2].numpy().astype(x[1])
    if isinstance(x, tuple) and len(x) == 3 and x[0] == _PAIRS:
        pairs = {key: decode(value) for key, value in x[2]}
        return Counter(pairs) if x[1] == "counter" else pairs
    if isinstance(x, dict):
        return {key: decode(value) for key, value in x.items()}
    if isinstance(x, tuple):
        return tuple(decode(value) for value in x)
    if isinstance(x, list):
        return [decode(value) for value in x]
    return x
