"""The training loop of the front end: two loaders, records, early stopping, and checkpoints that resume exactly.

history = fsla.fit(opt, train_loader, trusted_loader, steps=10_000, folder="runs/first")
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from torch.optim.lr_scheduler import ReduceLROnPlateau

from fsla._checks import positive, whole_number
from fsla._files import check_regular, ensure_folder, remove_orphans
from fsla._locks import locked
from fsla.train._bilevel import OPTIMIZERS, BilevelOptimizer
from fsla.train._checkpoint import CheckpointError, in_words
from fsla.train._guard import StepInfo
from fsla.train._loader_state import Feed, RandomState, begin_together
from fsla.train._manager import Resume, Saves
from fsla.train._process import Signals, leave
from fsla.train._records import NAME, Bar, Evaluate, Journal, Record, make_record, summary_writer

LOCK = "lock"
Callback = Callable[[Any, Record], Any]


@dataclass
class History:
    """What a run of `fit` was."""

    records: list[Record]
    """One for every `evaluate_every` steps and for the last, those before a resume too."""
    step: int
    """How many steps were taken in all."""
    stopped: Literal["steps", "patience", "callback"]
    """Why it ended."""
    best: float | None
    """The lowest value of the first quantity that `evaluate` returned; None without one."""
    best_step: int | None
    """Where that was; the model is left where the run ended."""
    resumed_from: int | None
    """The step of the checkpoint that it went on from."""


@dataclass
class _Watch:
    """How far a run is, and its best evaluation so far."""

    step: int = 0
    records: int = 0
    digest: str = ""
    """Of the records in the file."""
    best: float | None = None
    best_step: int | None = None
    since: int = 0
    """Evaluations since the best one."""

    def look(self, value: float | None) -> None:
        if value is not None and (self.best is None or value < self.best):
            self.best = value
            self.best_step = self.step
            self.since = 0
        else:
            self.since += 1


def fit(
    opt: BilevelOptimizer,
    train_loader: Iterable[Any],
    trusted_loader: Iterable[Any] | None = None,
    *,
    steps: int,
    folder: str | Path | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 100,
    patience: int | None = None,
    schedulers: Any = (),
    callbacks: Sequence[Callback] = (),
    save_every: int | None = None,
    save_minutes: float | None = 10.0,
    keep: int = 2,
    resume: Resume = True,
    fingerprint: Mapping[str, object] | None = None,
    progress: bool = True,
    tensorboard: bool = False,
) -> History:
    """Takes `steps` steps of an algorithm, and returns their history. With a folder it can be interrupted at any time.

    Called again with the same folder it goes on from the last checkpoint; on a CPU it ends with the weights, bit by
    bit, of a run that was not interrupted. SIGTERM and SIGINT (Ctrl-C) save the run at the end of the step and raise
    SystemExit with the code 143 or 130; a second one takes effect at once.

    Args:
        opt: `fsla.FSLA`, `fsla.SOBA` or `fsla.MASOBA`.
        train_loader, trusted_loader: the batches of the inner and of the outer loss; each loader starts anew when it
            ends. Without the latter the outer loss is given None. Under STORM a step takes two batches of each.
        steps: in all, those before a resume too.
        folder: for records.jsonl, checkpoints and a lock; None keeps nothing. A link in the place of one of these
            files is refused.
        evaluate: called with the model in evaluation mode, without gradients; returns numbers by name, or a number.
            Random states and modes are put back after it.
        evaluate_every: steps between two records.
        patience: ends the run after so many evaluations in a row whose first number is not below the lowest before.
        schedulers: of the optimisers that were given to opt; stepped after each step, ReduceLROnPlateau with the first
            number of each evaluation.
        callbacks: called as ``callback(opt, record)`` after each record; one that returns True ends the run. Random
            states are put back after them.
        save_every, save_minutes: steps and minutes between two checkpoints; there is one at the end, too.
        keep: how many checkpoints are kept.
        resume: "previous" goes on from the last checkpoint but one, False refuses to go on from any.
        fingerprint: what this is a run of, besides what opt knows: data, seed, settings, as plain values. A checkpoint
            with another one is refused.
        progress: a bar, where stderr is a terminal.
        tensorboard: writes records for TensorBoard into the folder as well.

    What a resume cannot know: random states of a data set's own, and those of persistent workers.
    """
    schedulers = list(schedulers) if isinstance(schedulers, Iterable) else [schedulers]
    _check(opt, steps, evaluate, evaluate_every, patience, schedulers, save_every, save_minutes, keep, resume)
    if tensorboard and folder is None:
        raise ValueError("tensorboard=True needs a folder to write into. Give folder=.")
    if tensorboard:
        summary_writer()
    feeds = [Feed(train_loader, "train_loader")]
    if trusted_loader is not None:
        feeds.append(Feed(trusted_loader, "trusted_loader"))
    ranks = opt.problem.together.ranks
    begin_together(opt.problem.together, feeds)
    with ExitStack() as stack:
        watch = _Watch()
        saves = None
        resumed_from = None
        signals = Signals(patient=ranks.world > 1)
        if folder is not None:
            folder = Path(folder)
            ranks.first(partial(_take, folder, stack))
            stack.enter_context(signals)
            saves = Saves(folder, keep, opt, schedulers, feeds, fingerprint)
            saved = saves.resume(resume, steps)
            if saved is not None:
                watch = _Watch(**saved)
                resumed_from = watch.step
        journals = [Journal()]
        if folder is not None:
            opened = partial(Journal, folder, count=watch.records, digest=watch.digest, step=watch.step)
            ranks.first(lambda: journals.append(opened(board=tensorboard)))
        journal = journals[-1]
        stack.callback(journal.close)
        journal.records = ranks.from_first(journal.records)
        bar = Bar(progress and ranks.is_first, steps, watch.step)
        stack.callback(lambda: bar.close(watch.step))
        run = _Run(opt, feeds, watch, journal, saves, resumed_from is not None)
        stopped: Literal["steps", "patience", "callback"] = "steps"
        received = 0
        while watch.step < steps and stopped == "steps":
            if patience is not None and watch.since >= patience:  # as a run was saved that has ended
                stopped = "patience"
                break
            info = run.step()
            for scheduler in schedulers:
                if not isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step()
            bar.show(watch.step, info)
            if watch.step % evaluate_every == 0 or watch.step == steps:
                record, value = ranks.from_first(make_record(opt, watch.step, info, evaluate))
                if evaluate is not None:
                    watch.look(value)
                for scheduler in schedulers:
                    if isinstance(scheduler, ReduceLROnPlateau):
                        scheduler.step(math.inf if value is None else value)
                journal.add(record)
                watch.records = len(journal.records)
                if patience is not None and watch.since >= patience:
                    stopped = "patience"
                if ranks.from_first(_called(callbacks, opt, record)):
                    stopped = "callback"
            by_step = save_every is not None and watch.step % save_every == 0
            waited = int(run.waited(save_minutes) and ranks.is_first)
            if saves is not None:
                waited, received = ranks.most([waited, signals.received or 0])
            if by_step or waited or received:
                run.save()
            if received:
                break
            run.look()
        run.save()
        if saves is not None:
            saves.close()
        if received:
            leave(signal.Signals(received), watch.step, run.saved_at, stack, says=ranks.is_first)
    return History(journal.records, watch.step, stopped, watch.best, watch.best_step, resumed_from)


class _Run:
    """What a step of the loop works on."""

    def __init__(
        self,
        opt: BilevelOptimizer,
        feeds: Sequence[Feed],
        watch: _Watch,
        journal: Journal,
        saves: Saves | None,
        resumed: bool,
    ) -> None:
        self._opt = opt
        self._feeds = feeds
        self._watch = watch
        self._journal = journal
        self._saves = saves
        self._settled = not resumed
        self._fresh = getattr(opt, "_momentum", None) == "storm"
        self._checked = False
        self._clock = monotonic()
        self._saved_step = watch.step
        self.saved_at: Path | None = None

    def step(self) -> StepInfo:
        opt = self._opt
        batches = self._batches()
        fresh = self._batches() if self._fresh else None
        if not self._checked:
            opt.problem.together.check_batches(batches)
        if not self._settled:  # as at the start of a run, before the first pass that moves buffers
            opt.problem.settle(opt.problem.here, batches[0], 0)
            self._settled = True
        info = opt.step(*batches, fresh=fresh)
        self._watch.step += 1
        if not self._checked:  # the states have their lasting form
            if self._saves is not None:
                self._saves.check()
            self._checked = True
        return info

    def waited(self, minutes: float | None) -> bool:
        return self._saves is not None and minutes is not None and monotonic() - self._clock >= 60 * minutes

    def look(self) -> None:
        if self._saves is not None:
            self._saves.look()

    def save(self) -> None:
        """Saves the run, unless that was done at this step."""
        if self._saves is None or self._saved_step == self._watch.step:
            return
        self._journal.flush()
        self._watch.digest = self._journal.digest
        self.saved_at = self._saves.save(vars(self._watch))
        self._saved_step = self._watch.step
        self._clock = monotonic()

    def _batches(self) -> tuple[Any, Any]:
        inner = self._feeds[0].draw()
        outer = self._feeds[1].draw() if len(self._feeds) > 1 else None
        return inner, outer


def _called(callbacks: Sequence[Callback], opt: BilevelOptimizer, record: Record) -> bool:
    """Whether a callback ends the run. What they draw, perhaps on one rank alone, moves no random state of the run."""
    with RandomState.kept():
        return True in [callback(opt, record) is True for callback in callbacks]


def _take(folder: Path, stack: ExitStack) -> None:
    """Make the folder and keep other runs out of it; raise, before the first step, unless it can be written into."""
    try:
        ensure_folder(folder)
        with in_words():
            stack.enter_context(locked(folder / LOCK, folder))
            check_regular(folder / NAME)
        remove_orphans(folder)
    except OSError as error:
        raise CheckpointError(
            f"The folder of fit must be writable. {folder} is not: {error.strerror}. Name another folder."
        ) from error


def _check(
    opt: object,
    steps: int,
    evaluate: Evaluate | None,
    evaluate_every: int,
    patience: int | None,
    schedulers: Sequence[Any],
    save_every: int | None,
    save_minutes: float | None,
    keep: int,
    resume: Resume,
) -> None:
    if not isinstance(opt, BilevelOptimizer):
        raise TypeError(f"opt must be a fsla.FSLA, SOBA or MASOBA. Got {type(opt).__name__} instead.")
    whole_number(steps, "steps", "fit")
    whole_number(evaluate_every, "evaluate_every", "fit")
    whole_number(keep, "keep", "fit")
    for value, name in ((patience, "patience"), (save_every, "save_every")):
        if value is not None:
            whole_number(value, name, "fit")
    positive(save_minutes, "save_minutes", "fit", optional=True)
    if resume not in (True, False, "previous"):
        raise ValueError(f"The 'resume' of fit must be True, False or 'previous'. Got {resume!r} instead.")
    plateau = any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in schedulers)
    for wanted, name in ((patience is not None, "patience"), (plateau, "ReduceLROnPlateau")):
        if wanted and evaluate is None:
            raise ValueError(f"{name} needs a number to judge by. Give evaluate=, a function of the model.")
    mine = {id(getattr(opt, name)): name for name in OPTIMIZERS}
    for scheduler in schedulers:
        name = mine.get(id(getattr(scheduler, "optimizer", None)), "")
        if not name:
            raise ValueError(
                f"A scheduler must be of one of the optimisers of opt: {', '.join(f'opt.{n}' for n in OPTIMIZERS)}. "
                f"Got a {type(scheduler).__name__} of another."
            )
        if name != "outer_optimizer" and opt._own[name]:
            raise ValueError(
                f"A scheduler needs an optimiser with a rate of yours. That of opt.{name} is measured during the run, "
                f"and would replace the scheduler's. Give {name}= to {type(opt).__name__}."
            )
