"""The checkpoints of a run in its folder: what is in one, of which run it is, and which one a run goes on from."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from torch.distributed.device_mesh import DeviceMesh

from fsla._state_tree import flatten
from fsla._storage import _container as container
from fsla._storage._json_values import differences, plain
from fsla.distributed import ProcessGroup
from fsla.train import _stores as stores
from fsla.train._checkpoint import CheckpointError, unreadable

T = TypeVar("T")
Resume = bool | Literal["previous"]
_NAME = re.compile(r"checkpoint-([0-9]{8,18})(\.safetensors)?")
"""Of a file where one process wrote it, of a folder where several did."""
_QUARANTINED = ".aside"


class OtherRunError(CheckpointError):
    """A checkpoint that is of another run, and so are those before it."""


class CheckpointManager:
    """The checkpoints in a folder, of one run: the last `keep` of them. Every rank calls the same methods.

    Args:
        folder: where they are.
        keep: how many.
        identity: what this is a run of, as plain values: a checkpoint with another one is refused.
        group: the processes of the run.
        mesh: over which parameters in shards are spread.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        identity: Mapping[str, object],
        group: ProcessGroup,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._identity = plain(identity, "run_config")
        self._group = group
        self._mesh = mesh
        group.run_on_first(self._remove_parts)
        several = group.world_size > 1 or mesh is not None
        self._store: stores.Store = stores.FolderStore(group) if several else stores.FileStore()
        group.check_equal(cast(dict[str, Any], self._identity), "run")
        self._run_id: str = group.broadcast(container.new_run_id())

    def save(self, step: int, parts: Mapping[str, object]) -> Path:
        """Write a checkpoint, and remove those that are older than the last `keep`.

        Several ranks write while the run goes on: `poll` names the checkpoint when it is there, `close` waits for it.
        """
        self._prune(self._store.finish())
        path = self._folder / f"checkpoint-{step:08}"
        path = self._store.begin(path, {"identity": self._identity, **parts}, self._run_id)
        self.poll()
        return path

    def poll(self) -> None:
        """Name the checkpoint that is being written, if that is done by now."""
        self._prune(self._store.poll())

    def close(self) -> None:
        """Wait for what is being written."""
        self._prune(self._store.finish())
        self._group.wait()
        self._store.close()

    @staticmethod
    def check(parts: Mapping[str, object]) -> None:
        """Raise if something has a state that a checkpoint cannot hold: at the first step, not hours later."""
        for name, part in parts.items():
            try:
                flatten(part)
            except TypeError as error:
                error.add_note(f"(in {name!r} of a checkpoint of fit)")
                raise

    def list_checkpoints(self) -> list[Path]:
        """Return the checkpoints in the folder, the oldest first."""
        named = [(int(match[1]), p) for p in self._folder.iterdir() if (match := _NAME.fullmatch(p.name))]
        return [path for _, path in sorted(named)]

    def resume(self, which: Resume, fill: Callable[[Path, Mapping[str, Any]], T]) -> T | None:
        """Set everything as a checkpoint has it; None where there is none.

        Args:
            which: as in `fit`.
            fill: called with the checkpoint and its parts, once they are known to be of this run.
        """
        name = self._group.run_on_first(lambda: self._chosen(which))
        if name is None:
            return None
        path = self._folder / name
        try:
            saved, run_id = stores.load(path, self._group, self._mesh)
            failed: CheckpointError | None = None
            result: T | None = None
            try:
                result = fill(path, self._checked(path, saved))
            except CheckpointError as error:
                failed = error
            self._group.raise_if_any_failed(failed)
        except OtherRunError:
            raise
        except CheckpointError as error:
            checkpoints = self.list_checkpoints()
            if which != "previous" and len(checkpoints) > 1:
                error.add_note(f"(resume='previous' goes on from {checkpoints[-2].name} instead)")
            raise
        self._run_id = run_id or self._run_id
        if which == "previous":
            self._group.run_on_first(self._quarantine_newest)
        return result

    def _checked(self, path: Path, saved: object) -> Mapping[str, Any]:
        if not isinstance(saved, dict) or "identity" not in saved:
            raise unreadable(path, "it is malformed")
        differ = differences(saved["identity"], self._identity)
        if differ:
            more = f"; and {len(differ) - 8} more" if len(differ) > 8 else ""
            raise OtherRunError(
                f"{path} is the checkpoint of another run ({'; '.join(differ[:8])}{more}). Name another folder, or "
                "remove it to begin anew."
            )
        return saved

    def _chosen(self, which: Resume) -> str | None:
        checkpoints = self.list_checkpoints()
        if not checkpoints:
            return None
        link = next((path for path in checkpoints if path.is_symlink()), None)
        if link is not None:
            raise CheckpointError(
                f"Cannot use {link}: it is a symbolic link. Put the checkpoint itself there, or remove the link."
            )
        if which is False:
            raise CheckpointError(
                f"{self._folder} holds {checkpoints[-1].name}, and resume=False resumes from none. Leave resume=True, "
                "remove it to begin anew, or name another folder."
            )
        if which == "previous" and len(checkpoints) < 2:
            raise CheckpointError(
                f"{self._folder} holds {checkpoints[-1].name} alone, and resume='previous' needs two checkpoints. Use "
                "resume=True, or remove it to begin anew."
            )
        chosen = checkpoints[-2 if which == "previous" else -1]
        run_id = stores.run_id_of(chosen)
        for other in checkpoints:
            if run_id is not None and stores.run_id_of(other) not in (run_id, None):
                raise OtherRunError(
                    f"{chosen} and {other.name} are of two runs. Remove the one that does not belong there, or name "
                    "another folder."
                )
        return chosen.name

    def _quarantine_newest(self) -> None:
        """Or it would stay the newest."""
        newest = self.list_checkpoints()[-1]
        newest.replace(newest.with_name(newest.name + _QUARANTINED))

    def _prune(self, written: bool) -> None:
        """Remove old checkpoints where a new one was written."""
        for old in self.list_checkpoints()[: -self._keep] if written else ():
            _remove(old)

    def _remove_parts(self) -> None:
        """What a run left that was killed while it wrote."""
        for path in self._folder.glob(f"checkpoint-*{stores.PART}"):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
