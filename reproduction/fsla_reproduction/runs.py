"""Independent runs: done by this process, by others of this machine or by a cluster, or shared out among ranks.

joblib hands the runs to processes, or to the back end that its caller has chosen with `joblib.parallel_config`, such as
a Dask or Ray cluster. Workers send records back, and this process alone writes them, as each run ends. Under torchrun
each rank does and writes its own share, the folder is where they meet, and the first rank alone shows progress and
writes what is of all runs.

Who does a run decides nothing about its records: on a CPU it has one thread.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fsla._checks import pick_device, whole_number
from fsla_reproduction.folder import Folder, RunError
from fsla_reproduction.job import Job, Outcome, outcome, records_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ROUND = 4
"""Runs for each worker in a round, where a backend gives results back by rounds only."""
LOOK_EVERY = 0.2
"""Seconds between two looks at what the other ranks have finished."""

Report = Callable[[str, float, int], None]
"""Called with a run, how many are done (the share of the run under way counts), and of how many."""


def unseen(text: str, done: float, total: int) -> None:
    """A `Report` that shows nothing."""


class RankGroup(Protocol):
    """What is asked of `fsla.distributed.get_group()`."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def wait(self) -> None: ...
    def broadcast(self, plain: list[str]) -> list[str]: ...


@dataclass(frozen=True)
class Workers:
    """Who does the runs: so many processes (None: this one alone, or all of a cluster's workers) of each rank."""

    jobs: int | None = None
    cluster: bool = False
    """Whether joblib's active back end does them, in the place of processes of this machine."""
    group: RankGroup | None = None

    def __post_init__(self) -> None:
        if self.jobs is not None:
            whole_number(self.jobs, "jobs", "Workers")

    @property
    def world(self) -> int:
        return 1 if self.group is None else self.group.world_size

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank

    @property
    def first(self) -> bool:
        """Whether this process shows progress and writes what is of all runs."""
        return self.rank == 0

    @property
    def number(self) -> int:
        """How many runs are done at a time."""
        if not self.cluster:
            return self.world * (self.jobs or 1)
        import joblib

        return int(joblib.effective_n_jobs(self.jobs or -1))

    def device(self, name: str) -> torch.device:
        """The device of a name. Ranks that ask for a GPU have one each, as long as there are enough."""
        if self.world == 1 or name not in ("auto", "cuda") or not torch.cuda.is_available():
            return pick_device(name)
        number = int(os.environ.get("LOCAL_RANK", self.rank)) % torch.cuda.device_count()
        torch.cuda.set_device(number)
        return pick_device(f"cuda:{number}")

    def open(
        self, path: Path, experiment: str, spec: DataclassInstance, data: Mapping[str, str] | None = None
    ) -> Folder:
        """The folder of an experiment: the first rank makes it, the others find it."""
        if self.first:
            folder = Folder(path, experiment, spec, data)
        self._wait()
        return folder if self.first else Folder(path, experiment, spec, data, first=False)

    def do(
        self, folder: Folder, jobs: Sequence[Job], report: Report = unseen, before: int = 0, total: int | None = None
    ) -> None:
        """Do the runs that the folder lacks. `before` runs of `total` were done by an earlier call."""
        left = [job.name for job in jobs if not folder.finished(job.name)] if self.first else []
        left = left if self.group is None else self.group.broadcast(left)
        count = _Count(folder, set(left), before + len(jobs), self.world > 1)
        parallel = [job for job in jobs if job.name in count.left and not job.exclusive]
        exclusive = [job for job in jobs if job.name in count.left and job.exclusive]

        def show(text: str, fraction: float = 0.0) -> None:
            if self.first:
                report(text, count.done + fraction, before + len(jobs) if total is None else total)

        queue = parallel[self.rank :: self.world]
        try:
            self._save(folder, self._spread(queue) if self._elsewhere else _in_process(queue, show), count, show)
            while count.poll(job.name for job in parallel):
                show("the other ranks")
                time.sleep(LOOK_EVERY)
            self._wait()
            if self.first:
                self._save(folder, _in_process(exclusive, show), count, show)
            if exclusive:
                self._wait()
        except BaseException:
            if self.world == 1:
                folder.tidy()  # a worker may have been killed in the middle of a checkpoint
            raise

    def _save(
        self,
        folder: Folder,
        results: Iterator[tuple[Job, Outcome]],
        count: _Count,
        show: Callable[[str], None],
    ) -> None:
        with closing(results):  # type: ignore[type-var]
            for job, result in results:
                if isinstance(result, Exception):
                    raise result
                folder.save(job.name, result)
                if job.part is not None:
                    shutil.rmtree(job.part, ignore_errors=True)
                count.left.discard(job.name)
                count.poll(tuple(count.left))
                show(job.text)

    def _wait(self) -> None:
        if self.group is not None:
            self.group.wait()

    @property
    def _elsewhere(self) -> bool:
        return self.cluster or (self.jobs or 1) > 1

    def _spread(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Outcome]]:
        """The runs as they end, each with its records, or with what went wrong in it."""
        import joblib

        parent = None if self.cluster else os.getpid()
        calls = (joblib.delayed(outcome)(number, job, parent) for number, job in enumerate(jobs))
        with (
            warnings.catch_warnings(),
            nullcontext() if self.cluster else joblib.parallel_config(backend="loky", inner_max_num_threads=1),
            closing(self._outputs(calls)) as outputs,  # type: ignore[type-var]
        ):
            warnings.filterwarnings("ignore", module="joblib")  # what it cancels when we stop, and how, is our business
            while jobs:
                try:
                    number, result = next(outputs)
                except StopIteration:
                    return
                except Exception as error:
                    raise self._lost(error) from error
                yield jobs[number], result

    def _outputs(self, calls: Iterator[Any]) -> Iterator[tuple[int, Outcome]]:
        import joblib

        jobs = self.jobs or -1
        try:
            parallel = joblib.Parallel(n_jobs=jobs, batch_size=1, return_as="generator_unordered")
        except ValueError:  # Ray's backend has lists only
            with joblib.Parallel(n_jobs=jobs, batch_size=1) as parallel:
                while some := list(islice(calls, ROUND * self.number)):
                    yield from parallel(some)
            return
        with _deaf():
            outputs = parallel(calls)
        with closing(outputs):
            yield from outputs

    def _lost(self, error: Exception) -> RunError:
        from joblib.externals.loky.process_executor import TerminatedWorkerError

        remedy = "The runs that ended are kept; give the same command again"
        if isinstance(error, TerminatedWorkerError):
            return RunError(
                "Every worker process must live until its runs have ended. One ended before, killed or out of memory. "
                f"{remedy}, with fewer --jobs if memory was short."
            )
        return RunError(f"A worker of joblib's back end failed: {type(error).__name__}: {error} {remedy}.")


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that are started meanwhile never hear Ctrl-C: this one ends them, and they have nothing to say."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


LOCAL = Workers()
"""This process, one run after the other."""


@dataclass
class _Count:
    """What is still to be done of the runs, by this process or another."""

    folder: Folder
    left: set[str]
    last: int
    others: bool

    @property
    def done(self) -> int:
        return self.last - len(self.left)

    def poll(self, names: Iterator[str] | Sequence[str]) -> bool:
        """See what other ranks have finished; return whether any of these runs is left."""
        waiting = [name for name in names if name in self.left]
        if self.others:
            self.left -= {name for name in waiting if self.folder.finished(name)}
        return any(name in self.left for name in waiting)


def _in_process(jobs: Sequence[Job], show: Callable[[str, float], None]) -> Iterator[tuple[Job, Outcome]]:
    """The runs one after the other, in this process."""
    for job in jobs:
        show(job.text, 0.0)
        yield job, records_of(job, lambda fraction, job=job: show(job.text, fraction))  # type: ignore[misc]


def workers(jobs: int | None = None) -> Workers:
    """Return who does the runs here: the ranks of torchrun, or joblib's active back end where one was chosen.

    Raises:
        RunError: if several ranks would each ask the same cluster.
    """
    from joblib.parallel import BACKENDS, get_active_backend

    from fsla import distributed as distributed

    group = distributed.get_group()
    if isinstance(get_active_backend()[0], BACKENDS["loky"]):
        return Workers(jobs, group=group)
    if group.world_size > 1:
        raise RunError(
            f"A joblib back end is active in {group.world_size} ranks of torchrun, and each would hand it the same "
            "runs. Use one of the two."
        )
    return Workers(jobs, cluster=True)
