"""The loop of every run: records, evaluation, early stopping, budgets, and checkpoints that resume exactly.

A `Stepper` takes the steps. The loop decides how many, and what happens between them. Its clock runs only while steps
are taken: preparing, measuring and saving are outside of it.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh

from fsla._checks import file_path, function, instance, positive, whole_number
from fsla._storage._files import check_regular, ensure_folder, remove_orphans
from fsla._storage._json_values import among, either, number, plain, record, text
from fsla._storage._locks import locked
from fsla.distributed import ProcessGroup
from fsla.train._checkpoint import CheckpointError, disk_errors, file_errors
from fsla.train._loader_state import RandomState
from fsla.train._manager import CheckpointManager, OtherRunError, Resume
from fsla.train._process import Signals, leave
from fsla.train._records import NAME, Bar, Journal, Record, summary_writer

LOCK = "lock"
Callback = Callable[[Any, Record], Any]
EvalFn = Callable[[Any], Mapping[str, Any] | float]
StopReason = Literal["steps", "patience", "callback", "budget", "diverged"]
_COUNT = number(int, 0)
_PROGRESS = record(
    step=_COUNT,
    records=_COUNT,
    digest=text,
    best=either(among(None), number(float)),
    best_step=either(among(None), _COUNT),
    since=_COUNT,
    seconds=number(float, 0.0),
    preparation_seconds=number(float, 0.0),
)


@dataclass
class FitResult:
    """Result of a run.

    Args:
        records: one for every `eval_every` steps and one for the last step, also those before a resume.
        num_steps: steps that were taken in all.
        stop_reason: why the run ended: "steps", "patience", "callback", "budget" or "diverged".
        best_metric: lowest value of the first quantity that `eval_fn` returned; None without `eval_fn`.
        best_step: step of the best metric. With `patience` the model and the outer modules are those of this step.
        resumed_from: step of the checkpoint that the run resumed from.

    Examples:
        >>> result = fsla.fit(bilevel, [train], [trusted], max_steps=20)
        >>> result.num_steps, result.stop_reason
        (20, 'steps')
    """

    records: list[Record]
    num_steps: int
    stop_reason: StopReason
    best_metric: float | None
    best_step: int | None
    resumed_from: int | None


@dataclass
class Progress:
    """How far a run is, and its best evaluation so far."""

    step: int = 0
    records: int = 0
    digest: str = ""
    """Of the records in the file."""
    best: float | None = None
    best_step: int | None = None
    since: int = 0
    """Evaluations since the best one."""
    seconds: float = 0.0
    """What the steps took."""
    preparation_seconds: float = 0.0
    """What capturing and checking took."""

    def observe(self, value: float | None) -> bool:
        """Compare an evaluation with the best one; return whether it is better."""
        if value is not None and (self.best is None or value < self.best):
            self.best = value
            self.best_step = self.step
            self.since = 0
            return True
        self.since += 1
        return False


class Stepper(ABC):
    """Base class of what takes the steps of a run, and what of it is saved between two steps."""

    group: ProcessGroup
    """The processes that take the steps together: the first decides what depends on a clock."""
    subject: object
    """First argument of callbacks."""
    mesh: DeviceMesh | None = None
    """Mesh that parameters in shards are spread over."""
    longest: int | None = None
    """The most steps to ask for at a time."""
    records_start = False
    """Whether there is a record of the start."""

    @property
    def stride(self) -> int:
        """How many steps to ask for at a time, or a multiple of it."""
        return 1

    @property
    def preparation_s(self) -> float:
        """The seconds of `advance` so far that were no steps."""
        return 0.0

    @property
    def oracle_calls(self) -> int:
        """What the run has asked for, in passes over a batch."""
        return 0

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, object]:
        """What the run is a run of, as plain values: a checkpoint of another one is refused."""

    def begin(self, max_steps: int, max_seconds: float | None) -> None:  # noqa: B027 (most need no preparation)
        """Get ready to take steps."""

    @abstractmethod
    def advance(self, n: int) -> None:
        """Take n steps."""

    @abstractmethod
    def measure(
        self, progress: Progress, reason: StopReason | None, eval_fn: EvalFn | None
    ) -> tuple[Record, float | None]:
        """Return a record, and the number that the run is judged by; None where that is not finite.

        A record with the name "diverged" ends the run.
        """

    def evaluated(self, value: float | None) -> None:  # noqa: B027 (of interest to schedulers alone)
        """Take note of the number that the run is judged by."""

    def remember_best(self) -> None:  # noqa: B027 (most runs end where they end)
        """Copy what `restore_best` is to set."""

    def restore_best(self) -> None:  # noqa: B027
        """Set what the last `remember_best` copied."""

    def shown(self) -> str:
        """Return what the last step saw, for the bar."""
        return ""

    @abstractmethod
    def state_dict(self) -> dict[str, object]:
        """Return what a checkpoint holds, by name."""

    @abstractmethod
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called. Raise, and set nothing, where it does not fit."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a loop is asked for; `fit` documents it. `owner` is the function that messages name."""

    owner: str
    max_steps: int
    output_dir: str | Path | None
    eval_fn: EvalFn | None
    eval_every: int
    patience: int | None
    callbacks: Sequence[Callback]
    save_every: int | None
    save_every_minutes: float | None
    save_total_limit: int
    resume: Resume
    run_config: Mapping[str, object] | None
    max_seconds: float | None
    max_oracle_calls: int | None = None
    progress_bar: bool = False
    tensorboard: bool = False
    signals: bool = False
    """Whether SIGTERM and SIGINT save the run."""

    def __post_init__(self) -> None:
        owner = self.owner
        for name in ("max_steps", "eval_every", "save_total_limit"):
            whole_number(getattr(self, name), name, owner)
        for name in ("patience", "save_every", "max_oracle_calls"):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), name, owner)
        for name in ("save_every_minutes", "max_seconds"):
            positive(getattr(self, name), name, owner, optional=True)
        function(self.eval_fn, "eval_fn", owner, optional=True)
        if isinstance(self.callbacks, str) or not isinstance(self.callbacks, Iterable):
            raise TypeError(f"The 'callbacks' of {owner} must be a list of functions. Got {self.callbacks!r} instead.")
        for callback in self.callbacks:
            function(callback, "callbacks", owner)
        if self.output_dir is not None:
            file_path(self.output_dir, "output_dir", owner)
        if self.run_config is not None:
            instance(self.run_config, Mapping, "run_config", owner, "a mapping of plain values")
            plain(self.run_config, "run_config")
        if self.resume not in (True, False, "previous"):
            raise ValueError(f"The 'resume' of {owner} must be True, False or 'previous'. Got {self.resume!r} instead.")
        if self.patience is not None and self.eval_fn is None:
            raise ValueError("patience requires eval_fn=, a function of the model that returns a number.")
        if self.tensorboard and self.output_dir is None:
            raise ValueError("tensorboard=True needs a folder to write into. Give output_dir=.")
        if self.tensorboard:
            summary_writer()


def run_loop(stepper: Stepper, settings: Settings) -> FitResult:
    """Take the steps of a run, and return its result."""
    with ExitStack() as stack:
        loop = _Loop(stepper, settings, stack)
        reason = loop.run()
        if loop.manager is not None:
            loop.manager.close()
        progress, journal = loop.progress, loop.journal
        if loop.received:
            leave(signal.Signals(loop.received), progress.step, loop.saved_at, stack, says=stepper.group.is_first)
    if settings.patience is not None:  # After the last checkpoint, from which a longer run goes on.
        stepper.restore_best()
    return FitResult(journal.records, progress.step, reason, progress.best, progress.best_step, loop.resumed_from)


class _Loop:
    """A loop that has begun: its folder is locked, and all is as its checkpoint has it."""

    def __init__(self, stepper: Stepper, settings: Settings, stack: ExitStack) -> None:
        group = stepper.group
        self._stepper = stepper
        self._settings = settings
        self._signals = Signals(patient=group.world_size > 1)
        self.manager: CheckpointManager | None = None
        self.progress = Progress()
        self.journal = Journal()
        self.resumed_from: int | None = None
        if settings.output_dir is not None:
            self._open_folder(Path(settings.output_dir), stack)
        self.journal.records = group.broadcast(self.journal.records)
        self._bar = Bar(settings.progress_bar and group.is_first, settings.max_steps, self.progress.step)
        stack.callback(lambda: self._bar.close(self.progress.step))
        self._checked = False
        self._pace = 1
        """How many steps take a tenth of the time between two checkpoints."""
        self._clock = monotonic()
        self._saved_step = self.progress.step
        self.saved_at: Path | None = None
        self.received = 0
        """The signal that ends the run."""

    def _open_folder(self, folder: Path, stack: ExitStack) -> None:
        """Lock the folder, resume from its last checkpoint, and open its records on rank 0."""
        stepper, settings = self._stepper, self._settings
        group = stepper.group
        group.run_on_first(partial(_take, folder, stack))
        if settings.signals:
            stack.enter_context(self._signals)
        identity = {**stepper.identity, "run_config": settings.run_config or {}}
        self.manager = CheckpointManager(folder, settings.save_total_limit, identity, group, stepper.mesh)
        saved = self.manager.resume(settings.resume, partial(_set, stepper, settings.max_steps))
        if saved is not None:
            self.progress = Progress(**saved)
            self.resumed_from = self.progress.step
        group.run_on_first(partial(self._open_journal, folder))
        stack.callback(self.journal.close)

    def _open_journal(self, folder: Path) -> None:
        step, count, digest = self.progress.step, self.progress.records, self.progress.digest
        with disk_errors(folder):
            self.journal = Journal(folder, count=count, digest=digest, step=step, board=self._settings.tensorboard)

    def run(self) -> StopReason:
        settings, progress, group = self._settings, self.progress, self._stepper.group
        reason = self._ended()
        if self._stepper.records_start and not self.journal.records:
            reason = self._record(reason)
        if reason is None:
            start = perf_counter()
            self._stepper.begin(settings.max_steps, settings.max_seconds)
            progress.preparation_seconds += perf_counter() - start
            if self._spent():
                reason = "budget"
        while reason is None:
            self._advance(self._chunk())
            if progress.step >= settings.max_steps:
                reason = "steps"
            elif self._spent():
                reason = "budget"
            if reason is not None or progress.step % settings.eval_every == 0:
                reason = self._record(reason)
            if self.manager is None:
                continue
            minutes = settings.save_every_minutes
            waited = minutes is not None and monotonic() - self._clock >= 60 * minutes and group.is_first
            late, self.received = group.all_reduce_max([waited, self._signals.received or 0])
            if late or self.received or (settings.save_every is not None and progress.step % settings.save_every == 0):
                self._save()
            if self.received:
                break
            self.manager.poll()
        self._save()
        return reason or "steps"

    def _ended(self) -> StopReason | None:
        """Why a run that is resumed had ended."""
        settings, progress = self._settings, self.progress
        if progress.step >= settings.max_steps:
            return "steps"
        if settings.patience is not None and progress.since >= settings.patience:
            return "patience"
        return "diverged" if self.journal.records and "diverged" in self.journal.records[-1] else None

    def _spent(self) -> bool:
        """Whether a budget is exceeded; asked at the same steps wherever a run is saved."""
        settings, progress = self._settings, self.progress
        if progress.step % self._stepper.stride and progress.step % settings.eval_every:
            return False
        limit, calls = settings.max_seconds, settings.max_oracle_calls
        by_clock = limit is not None and self._stepper.group.broadcast(progress.seconds > limit)
        return by_clock or (calls is not None and self._stepper.oracle_calls > calls)

    def _chunk(self) -> int:
        """How many steps to take now."""
        settings, step, stride = self._settings, self.progress.step, self._stepper.stride
        ends = [settings.max_steps, _multiple_after(step, settings.eval_every)]
        if step == 0:
            ends.append(1)
        if settings.max_seconds is not None or settings.max_oracle_calls is not None:
            ends.append(_multiple_after(step, stride))
        if settings.save_every is not None:
            ends.append(_multiple_after(step, settings.save_every))
        elif self.manager is not None and settings.save_every_minutes is not None:
            ends.append(step + max(self._pace, stride))
        if self._stepper.longest is not None:
            ends.append(step + self._stepper.longest)
        return min(ends) - step

    def _advance(self, n: int) -> None:
        """Take n steps on the clock."""
        stepper, progress = self._stepper, self.progress
        prepared = stepper.preparation_s
        start = perf_counter()
        stepper.advance(n)
        elapsed = perf_counter() - start
        preparation = stepper.preparation_s - prepared
        taken = max(0.0, elapsed - preparation)
        progress.step += n
        progress.seconds += taken
        progress.preparation_seconds += preparation
        if self._settings.save_every_minutes is not None:
            pace = int(n * 6 * self._settings.save_every_minutes / max(taken, 1e-6))
            self._pace = pace if stepper.longest == 1 else stepper.group.broadcast(pace)
        if self.manager is not None and not self._checked:  # the states have their lasting form
            self.manager.check(stepper.state_dict())
        self._checked = True
        self._bar.show(progress.step, stepper.shown)

    def _record(self, reason: StopReason | None) -> StopReason | None:
        """Make a record; return why the run ends."""
        settings, progress, group = self._settings, self.progress, self._stepper.group
        with RandomState.preserved():
            record, value = group.broadcast(self._stepper.measure(progress, reason, settings.eval_fn))
        if settings.eval_fn is not None:
            if progress.observe(value) and settings.patience is not None:
                self._stepper.remember_best()
            self._stepper.evaluated(value)
        self.journal.add(record)
        progress.records = len(self.journal.records)
        if "diverged" in record:
            reason = "diverged"
        if settings.patience is not None and progress.since >= settings.patience:
            reason = "patience"
        with RandomState.preserved():  # What callbacks draw, perhaps on one rank alone, moves no random state.
            stops = [callback(self._stepper.subject, record) is True for callback in settings.callbacks]
        return "callback" if group.broadcast(any(stops)) else reason

    def _save(self) -> None:
        """Save the run, unless that was done at this step."""
        if self.manager is None or self._saved_step == self.progress.step:
            return
        folder = Path(self._settings.output_dir or ".")
        with disk_errors(folder):
            self.journal.flush()
        self.progress.digest = self.journal.digest
        parts = {"progress": dict(vars(self.progress)), **self._stepper.state_dict()}
        with disk_errors(folder):
            self.saved_at = self.manager.save(self.progress.step, parts)
        self._saved_step = self.progress.step
        self._clock = monotonic()


def _set(stepper: Stepper, max_steps: int, path: Path, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Set everything as a checkpoint has it, and return the progress that was saved."""
    progress: dict[str, Any] | None = parts.get("progress")
    if progress is None or not _PROGRESS(progress):
        raise CheckpointError(f"Cannot read {path}: its progress is malformed. Remove it, or name another file.")
    if progress["step"] > max_steps:
        raise OtherRunError(
            f"{path} is at step {progress['step']}, beyond max_steps={max_steps}. Ask for more steps, or name another "
            "folder."
        )
    try:
        stepper.load_state_dict(parts)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(
            f"Cannot resume from {path}: it is of another run or version ({type(error).__name__}: {error}). Name "
            "another folder, or remove it to begin anew."
        ) from error
    return progress


def _take(folder: Path, stack: ExitStack) -> None:
    """Make the folder and keep other runs out of it; raise, before the first step, unless it can be written into."""
    try:
        ensure_folder(folder)
        with file_errors():
            stack.enter_context(locked(folder / LOCK, folder))
            check_regular(folder / NAME)
        remove_orphans(folder)
    except OSError as error:
        raise CheckpointError(f"Cannot write to {folder}: {error.strerror}. Name another folder.") from error


def _multiple_after(k: int, n: int) -> int:
    return (k // n + 1) * n
