"""The checkpoints of a run of the front end: what is in one, as the run of what, and which is taken up."""

from __future__ import annotations

import base64
import re
import shutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from fsla import _container as container
from fsla._json_values import Plain, among, differences, either, number, plain, record, text
from fsla._tree import is_sharded
from fsla.train._bilevel import OPTIMIZERS, BilevelOptimizer
from fsla.train._checkpoint import CheckpointError, in_words, load_nest, pack, save_nest, unpack, unreadable
from fsla.train._encoding import decode, encode
from fsla.train._loader_state import Feed, RandomState
from fsla.train._module import named_tensors

Resume = bool | Literal["previous"]

_NAME = re.compile(r"checkpoint-([0-9]{8,18})(\.safetensors)?")
"""Of a file where one process wrote it, of a folder where several did."""
_KIND = "a checkpoint of fit"
_KIND_OF_RANK = "the loaders and random states of a rank"
_COUNT = number(int, 0)
_PROGRESS = record(
    step=_COUNT,
    records=_COUNT,
    digest=text,
    best=either(among(None), number(float)),
    best_step=either(among(None), _COUNT),
    since=_COUNT,
)
_ASIDE = ".aside"
_BY_RANK = "drawn by each rank"
_RATES = ("lr", "betas", "momentum", "weight_decay")
"""What is compared of the options that an optimiser was made with; other names come and go with torch's versions."""


class _OtherRunError(CheckpointError):
    """A checkpoint that is of another run, and so are those before it."""


class Saves:
    """The checkpoints in a folder, of one run: the last `keep` of them. Every rank calls the same methods.

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
        opt: BilevelOptimizer,
        schedulers: Sequence[Any],
        feeds: Sequence[Feed],
        given: Mapping[str, object] | None,
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._opt = opt
        self._schedulers = schedulers
        self._feeds = feeds
        self._ranks = opt.problem.together.ranks
        self._identity = identity(opt, schedulers, feeds, given)
        self._ranks.first(self._remove_parts)
        shared = self._ranks.world > 1 or opt.problem.together.sharded
        self._writer = folders().FolderWriter(self._ranks) if shared else None
        self._ranks.agree(cast(dict[str, Any], self._identity), "run")
        self._run_id: str = self._ranks.from_first(container.new_run_id())

    def save(self, progress: Mapping[str, Plain]) -> Path:
        """Writes a checkpoint, and removes those that are older than the last `keep`.

        Several ranks write while the run goes on: `look` tells when the checkpoint is there, and `close` waits for it.
        """
        path = self._folder / f"checkpoint-{progress['step']:08}"
        if self._writer is not None:
            self._writer.begin(path, self._parts(progress), self._run_id)
            return path
        path = path.with_suffix(".safetensors")
        save_nest(path, _KIND, self._parts(progress), self._run_id)
        self._prune()
        return path

    def look(self) -> None:
        """Names the checkpoint that is being written, if that is done by now."""
        if self._writer is not None and self._writer.look() is not None:
            self._prune()

    def close(self) -> None:
        """Waits for what is being written."""
        if self._writer is not None:
            if self._writer.finish() is not None:
                self._prune()
            self._ranks.wait()
            self._writer.close()

    def _prune(self) -> None:
        for old in self.found()[: -self._keep]:
            _remove(old)

    def _remove_parts(self) -> None:
        """What a run left that was killed while it wrote."""
        for path in self._folder.glob("checkpoint-*.part"):
            _remove(path)

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
        name = self._ranks.first(lambda: self._chosen(which))
        if name is None:
            return None
        path = self._folder / name
        try:
            progress = self._set(path, steps)
        except _OtherRunError:
            raise
        except CheckpointError as error:
            found = self.found()
            if which != "previous" and len(found) > 1:
                error.add_note(f"(resume='previous' goes on from {found[-2].name} instead)")
            raise
        if which == "previous":
            self._ranks.first(self._put_newest_aside)
        return progress

    def _chosen(self, which: Resume) -> str | None:
        found = self.found()
        if not found:
            return None
        link = next((path for path in found if path.is_symlink()), None)
        if link is not None:
            raise CheckpointError(
                f"Cannot use {link}: it is a symbolic link. Put the checkpoint itself there, or remove the link."
            )
        if which is False:
            raise CheckpointError(
                f"{self._folder} must hold no checkpoint where resume=False. It holds {found[-1].name}. Leave "
                "resume=True to go on from it, remove it to begin anew, or name another folder."
            )
        if which != "previous":
            return found[-1].name
        if len(found) < 2:
            raise CheckpointError(
                f"{self._folder} must hold two checkpoints where resume='previous'. It holds {found[-1].name} alone. "
                "Use resume=True, or remove it to begin anew."
            )
        return found[-2].name

    def _put_newest_aside(self) -> None:
        """Or it would stay the newest."""
        newest = self.found()[-1]
        newest.replace(newest.with_name(newest.name + _ASIDE))

    def _parts(self, progress: Mapping[str, Plain]) -> dict[str, Any]:
        opt = self._opt
        parts: dict[str, Any] = {
            "identity": self._identity,
            "progress": dict(progress),
            "model": tensors_of(opt.problem.model),
            "outer": tensors_of(opt.problem.outer),
            "opt": opt.state_dict(),
            "good": opt._good,
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
        }
        drawn = {"loaders": [feed.position() for feed in self._feeds], "random": RandomState.now().packed()}
        if opt.problem.together.batches == "shares":  # each rank draws for itself
            parts[_BY_RANK] = self._ranks.gather(_told(drawn))
        else:
            parts |= drawn
        return {name: encode(part) for name, part in parts.items()}

    def _set(self, path: Path, steps: int) -> dict[str, Any]:
        ranks = self._ranks
        failed: Exception | None = None
        saved: object = None
        run_id: str | None = None
        if path.is_dir():
            mesh = next((p.device_mesh for p in self._opt.problem.omega.values() if is_sharded(p)), None)
            saved, run_id = folders().load_folder(path, ranks, mesh)
        progress: dict[str, Any] = {}
        try:
            if not path.is_dir():
                saved, content = load_nest(path, _KIND)
                run_id = content.run_id
            progress = self._filled(path, saved, steps)
        except CheckpointError as error:
            failed = error
        ranks.all_well(failed)
        self._run_id = run_id or self._run_id
        return progress

    def _filled(self, path: Path, saved: object, steps: int) -> dict[str, Any]:
        if not isinstance(saved, dict) or "identity" not in saved or not _PROGRESS(saved.get("progress")):
            raise unreadable(path, "it is malformed")
        differ = differences(saved["identity"], self._identity)
        if differ:
            more = f"; and {len(differ) - 8} more" if len(differ) > 8 else ""
            raise _OtherRunError(
                f"{path} must be the checkpoint of this run. It is of another ({'; '.join(differ[:8])}{more}). "
                "Name another folder, or remove it to begin anew."
            )
        progress: dict[str, Any] = saved["progress"]
        if progress["step"] > steps:
            raise _OtherRunError(
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
            drawn = _heard(path, parts[_BY_RANK][self._ranks.rank]) if _BY_RANK in parts else parts
            for feed, position in zip(self._feeds, drawn["loaders"], strict=True):
                feed.seek(position)
            for feed, position in zip(self._feeds, drawn["loaders"], strict=True):
                feed.settle(position)
            RandomState.unpacked(drawn["random"]).set()
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{path} must be of this run, written with this version. It cannot be set ({error}). Name another "
                "folder, or remove it to begin anew."
            ) from error
        return progress


def _told(value: object) -> str:
    """A nest of states as a message."""
    nest, tensors = pack(encode(value))
    return base64.b64encode(container.to_bytes(_KIND_OF_RANK, tensors, nest)).decode("ascii")


def _heard(path: Path, told: str) -> Any:
    with in_words():
        content = container.from_bytes(path, _KIND_OF_RANK, base64.b64decode(told))
    return decode(unpack(path, content.json, content.tensors))


def identity(
    opt: BilevelOptimizer, schedulers: Sequence[Any], feeds: Sequence[Feed], given: Mapping[str, object] | None
) -> Plain:
    """What a checkpoint is of: the form of the variables, the algorithm, its options, and what the user says."""
    optimizers = {name: getattr(opt, name) for name in OPTIMIZERS}
    together = opt.problem.together
    options = {
        name: getattr(opt, f"_{name}", None)
        for name in ("momentum", "eta", "v_at", "max_grad_norm", "max_adjoint_norm")
    }
    return plain(
        {
            "algorithm": type(opt).__name__,
            "omega": {name: _form(p) for name, p in opt.problem.omega.items()},
            "lam": {name: _form(p) for name, p in opt.problem.lam.items()},
            "options": options | {"products": opt.problem.mode, "autocast": str(opt.problem.autocast_dtype)},
            "optimisers": {
                name: {"kind": type(optimizer).__name__}
                | {key: optimizer.defaults[key] for key in _RATES if key in optimizer.defaults}
                for name, optimizer in optimizers.items()
            },
            "schedulers": [type(scheduler).__name__ for scheduler in schedulers],
            "batches": [feed.count for feed in feeds],
            "fingerprint": {} if given is None else given,
            **({"parameters in shards": True} if together.sharded else {}),
            **({"ranks that bring their own shares": together.ranks.world} if together.batches == "shares" else {}),
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


def folders() -> Any:
    """What writes and reads the checkpoints of several ranks; it takes long to import."""
    return import_module("fsla.train._checkpoint_folder")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _said(tensors: Mapping[str, Tensor], name: str) -> str:
    return _form(tensors[name]) if name in tensors else ""
