"""Training a model: two loaders, records, early stopping, and checkpoints that resume exactly.

result = fsla.fit(bilevel, train_loader, trusted_loader, max_steps=10_000, output_dir="runs/first")
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from fsla._storage._json_values import Plain, among, either, finite, mapping, named, plain, record
from fsla._tree import is_sharded
from fsla.distributed._partition import count_samples
from fsla.problems._module import named_tensors
from fsla.train._bilevel import BilevelOptimizer
from fsla.train._guard import StepInfo
from fsla.train._loader_state import Feed, RandomState, begin_together
from fsla.train._loop import Callback, EvalFn, FitResult, Progress, Settings, Stepper, StopReason, run_loop
from fsla.train._manager import Resume
from fsla.train._optimizers import NAMES
from fsla.train._records import Record
from fsla.train._schema import check_like

_RESERVED = StepInfo._fields
_UNNAMED = "metric"
"""What a number is called that `eval_fn` returns without a name."""
_BY_RANK = "drawn by each rank"
_GOOD = record(owned=lambda value: isinstance(value, bool), tensors=lambda value: True, state=mapping)
_RUN = record(state=mapping, good=either(among(None), _GOOD))


def fit(
    optimizer: BilevelOptimizer,
    inner_loader: Iterable[Any],
    outer_loader: Iterable[Any] | None = None,
    *,
    max_steps: int,
    output_dir: str | Path | None = None,
    eval_fn: EvalFn | None = None,
    eval_every: int = 100,
    patience: int | None = None,
    lr_schedulers: Any = (),
    callbacks: Sequence[Callback] = (),
    save_every: int | None = None,
    save_every_minutes: float | None = 10.0,
    save_total_limit: int = 2,
    resume: Resume = True,
    run_config: Mapping[str, object] | None = None,
    max_seconds: float | None = None,
    progress_bar: bool = True,
    tensorboard: bool = False,
) -> FitResult:
    """Train a model and its outer modules for `max_steps` steps, and return the result.

    With `output_dir` the run can be interrupted at any time: the same call resumes from the last checkpoint. On a CPU
    it ends with the weights, bit by bit, of a run that was not interrupted. SIGTERM and SIGINT (Ctrl-C) save the run
    at the end of the step and raise SystemExit with the code 143 or 130. A second signal takes effect at once.

    A resume restores neither random states of a data set nor those of persistent workers.

    Args:
        optimizer: a `fsla.BilevelOptimizer`, such as `fsla.SOBA`.
        inner_loader: batches of the inner loss; it starts anew when it ends. Under STORM a step takes two batches.
        outer_loader: batches of the outer loss; without it the outer loss receives None.
        max_steps: steps in all, also those before a resume.
        output_dir: folder for records.jsonl, checkpoints and a lock; with None nothing is written. A link in the place
            of one of these files is refused.
        eval_fn: called with the model in evaluation mode, without gradients; returns numbers by name, or a number.
            Random states and modes are restored after it.
        eval_every: steps between two records.
        patience: ends the run after this many evaluations in a row whose first number is not below the lowest before.
            At its end the model and the outer modules go back to the best evaluation, of which a copy is kept.
        lr_schedulers: schedulers of the torch optimisers that were passed to `optimizer`. They are stepped after each
            step, ReduceLROnPlateau with the first number of each evaluation.
        callbacks: called as ``callback(optimizer, record)`` after each record; one that returns True ends the run.
            Random states are restored after them.
        save_every: steps between two checkpoints; the last step has one too.
        save_every_minutes: minutes between two checkpoints.
        save_total_limit: how many checkpoints stay in the folder.
        resume: "previous" resumes from the last checkpoint but one; False refuses to resume from any.
        run_config: data, seed and settings that `optimizer` does not know, as plain values. A checkpoint with another
            one is refused.
        max_seconds: ends the run when its steps have taken longer.
        progress_bar: whether to draw a bar, if stderr is a terminal.
        tensorboard: whether to write records for TensorBoard into the folder as well.

    Returns:
        The records, and how the run ended.

    Raises:
        CheckpointError: if the folder holds another run, or cannot be written.
        DivergenceError: if the run diverges and rollbacks do not help.
        TypeError, ValueError: if an argument is of the wrong kind or out of range.

    Examples:
        >>> result = fsla.fit(bilevel, [train], [trusted], max_steps=100, eval_every=50)
        >>> [record["step"] for record in result.records]
        [50, 100]
        >>> weights.as_dict()["a"] > weights.as_dict()["b"]
        True
    """
    if not isinstance(optimizer, BilevelOptimizer):
        raise TypeError(f"optimizer must be a fsla.BilevelOptimizer. Got {type(optimizer).__name__} instead.")
    settings = Settings(
        owner="fit",
        max_steps=max_steps,
        output_dir=output_dir,
        eval_fn=eval_fn,
        eval_every=eval_every,
        patience=patience,
        callbacks=callbacks,
        save_every=save_every,
        save_every_minutes=save_every_minutes,
        save_total_limit=save_total_limit,
        resume=resume,
        run_config=run_config,
        max_seconds=max_seconds,
        progress_bar=progress_bar,
        tensorboard=tensorboard,
        signals=True,
    )
    schedulers = list(lr_schedulers) if isinstance(lr_schedulers, Iterable) else [lr_schedulers]
    _check_schedulers(optimizer, schedulers, eval_fn)
    feeds = [Feed(inner_loader, "inner_loader")]
    if outer_loader is not None:
        feeds.append(Feed(outer_loader, "outer_loader"))
    begin_together(optimizer.reducer, feeds)
    if patience is None:
        _warn_of_overfitting(optimizer, outer_loader)
    return run_loop(OptimizerStepper(optimizer, feeds, schedulers), settings)


class OptimizerStepper(Stepper):
    """Steps of a `BilevelOptimizer`, on the batches of its loaders, with its schedulers.

    Args:
        optimizer: what takes the steps.
        feeds: the batches of the inner loss, and of the outer one where it has any.
        schedulers: of the optimizer's torch optimisers.
    """

    longest = 1  # a signal ends a run after the step in which it comes

    def __init__(self, optimizer: BilevelOptimizer, feeds: Sequence[Feed], schedulers: Sequence[Any]) -> None:
        self.subject = optimizer
        self.group = optimizer.reducer.process_group
        meshes: Iterator[DeviceMesh] = (p.device_mesh for p in optimizer.model.parameters() if is_sharded(p))
        self.mesh = next(meshes, None)
        self._optimizer = optimizer
        self._feeds = feeds
        self._schedulers = schedulers
        self._resumed = False
        self._checked = False
        self._info: StepInfo | None = None
        self._best: dict[str, dict[str, Tensor]] | None = None
        """Model and outer at the best evaluation."""

    @property
    def identity(self) -> Mapping[str, object]:
        reducer = self._optimizer.reducer
        local = {"ranks that bring their own batches": self.group.world_size}
        return {
            **self._optimizer.identity,
            "schedulers": [type(scheduler).__name__ for scheduler in self._schedulers],
            "batches": [feed.count for feed in self._feeds],
            **({"parameters in shards": True} if reducer.sharded else {}),
            **({} if reducer.split_batches else local),
        }

    def advance(self, n: int) -> None:
        optimizer = self._optimizer
        for _ in range(n):
            batches = self._batches()
            independent = self._batches() if optimizer.reads_independent_batches else None
            if not self._checked:
                optimizer.reducer.check_batches(dict(zip(("inner batch", "outer batch"), batches, strict=True)))
                self._checked = True
            if self._resumed:  # As at the start of a run, before the first pass that moves buffers.
                optimizer.select_hvp_method(batches[0])
                self._resumed = False
            self._info = optimizer.step(*batches, independent_batches=independent)
            for scheduler in self._schedulers:
                if not isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step()

    def _batches(self) -> tuple[Any, Any]:
        inner = self._feeds[0].draw()
        outer = self._feeds[1].draw() if len(self._feeds) > 1 else None
        return inner, outer

    def measure(
        self, progress: Progress, reason: StopReason | None, eval_fn: EvalFn | None
    ) -> tuple[Record, float | None]:
        entry: dict[str, Plain] = {"step": progress.step}
        bad: list[str] = []
        for name in _RESERVED[1:]:
            entry[name] = finite(plain(getattr(self._info, name), name), name, bad)
        if bad and reason is not None and self.group.is_first:
            warnings.warn(
                f"The run ends at step {progress.step} with {', '.join(bad)} not finite. Use an earlier checkpoint, or "
                "smaller steps.",
                UserWarning,
                stacklevel=6,
            )
        if eval_fn is None:
            return entry, None
        metrics = _evaluated(self._optimizer.model, eval_fn)
        return entry | metrics, next(iter(metrics.values()))

    def evaluated(self, value: float | None) -> None:
        for scheduler in self._schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(math.inf if value is None else value)

    def remember_best(self) -> None:
        self._best = {name: _copy(_tensors_of(part)) for name, part in self._parts.items()}

    def restore_best(self) -> None:
        if self._best is not None:
            for name, part in self._parts.items():
                _set_tensors(self._best[name], part)

    @property
    def _parts(self) -> dict[str, Any]:
        return {"model": self._optimizer.model, "outer": self._optimizer.outer}

    def shown(self) -> str:
        info = self._info
        assert info is not None
        names = {"inner": info.inner_loss, "outer": info.outer_loss, "|d|": info.hypergradient_norm}
        named = names | {"L": info.hessian_norm}
        return "  ".join(f"{name} {float(value):.4g}" for name, value in named.items() if value is not None)

    def state_dict(self) -> dict[str, object]:
        optimizer = self._optimizer
        drawn = {"loaders": [feed.position() for feed in self._feeds], "random": RandomState.now()}
        if not optimizer.reducer.split_batches:  # Each rank draws for itself.
            drawn = {_BY_RANK: self.group.gather(drawn)}
        return {
            **{name: _tensors_of(part) for name, part in self._parts.items()},
            "best": self._best,
            "run": optimizer.run_state(),
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            **drawn,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        optimizer = self._optimizer
        drawn = saved[_BY_RANK][self.group.rank] if _BY_RANK in saved else saved
        best = saved["best"]
        for name, part in self._parts.items():
            check_like(f"its {name}", saved[name], _tensors_of(part))
            _check_finite(name, saved[name], _tensors_of(part))
            if best is not None:
                check_like(f"its best {name}", best[name], _tensors_of(part))
        check_like("a scheduler", saved["schedulers"], [scheduler.state_dict() for scheduler in self._schedulers])
        if not _RUN(saved["run"]):
            raise ValueError("what it holds of the optimizer is malformed")
        with RandomState.preserved():
            RandomState.set(drawn["random"])
            for feed, position in zip(self._feeds, drawn["loaders"], strict=True):
                feed.seek(position)
            for feed, position in zip(self._feeds, drawn["loaders"], strict=True):
                feed.restore_generators(position)
        optimizer.set_run_state(saved["run"])
        for name, part in self._parts.items():
            _set_tensors(saved[name], part)
        self._best = None if best is None else {name: _copy(best[name]) for name in self._parts}
        for scheduler, state in zip(self._schedulers, saved["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        RandomState.set(drawn["random"])
        self._resumed = True


def _evaluated(model: nn.Module, eval_fn: EvalFn) -> dict[str, Any]:
    with _evaluating(model):
        values = eval_fn(model)
    metrics = dict(named(values, "eval_fn")) if isinstance(values, Mapping) else {_UNNAMED: values}
    taken = [name for name in _RESERVED if name in metrics]
    if taken or not metrics:
        raise ValueError(
            f"eval_fn must return numbers by names of its own. Got {', '.join(map(repr, taken)) or 'none'}; the names "
            f"{', '.join(_RESERVED)} are taken."
        )
    numbers: dict[str, Any] = {}
    for name, value in metrics.items():
        number = plain(value, name)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(
                f"eval_fn must return a number, or numbers by name. Got {type(value).__name__} for {name!r} instead."
            )
        numbers[name] = finite(float(number), name, [])
    return numbers


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; modes are put back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


class OverfittingWarning(UserWarning):
    """Warning that there are more outer parameters than samples that they are judged by.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("ignore", fsla.OverfittingWarning)  # or: eval_fn= and patience=
    """


def _warn_of_overfitting(optimizer: BilevelOptimizer, outer_loader: Iterable[Any] | None) -> None:
    """Warn where the outer variable can fit the noise of the outer samples."""
    count = sum(t.numel() for t in optimizer.problem_at_point()[1].lam.values())
    samples = _count_samples(outer_loader)
    if samples and count > samples:
        warnings.warn(
            f"{count} outer parameters are learnt from {samples} outer samples, and may fit their noise: the outer "
            "loss falls while the loss on new data rises. Hold samples back and pass eval_fn= and patience=, or use "
            "more outer samples, fewer parameters, or a penalty on them in the outer loss.",
            OverfittingWarning,
            stacklevel=3,
        )


def _count_samples(loader: Iterable[Any] | None) -> int | None:
    """The number of samples of a loader; None where it is unknown."""
    if isinstance(loader, DataLoader):
        dataset = loader.dataset
        return len(dataset) if isinstance(dataset, Sized) else None
    if not isinstance(loader, list | tuple):
        return None
    try:
        return sum(count_samples(batch) for batch in loader)
    except TypeError:
        return None


def _check_schedulers(optimizer: BilevelOptimizer, schedulers: Sequence[Any], eval_fn: EvalFn | None) -> None:
    if eval_fn is None and any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in schedulers):
        raise ValueError("ReduceLROnPlateau requires eval_fn=, a function of the model that returns a number.")
    optimizers = [getattr(optimizer, name) for name in NAMES if getattr(optimizer, name) is not None]
    for scheduler in schedulers:
        if not any(getattr(scheduler, "optimizer", None) is one for one in optimizers):
            raise ValueError(
                f"A scheduler must be of an optimiser that was given to {type(optimizer).__name__}: one of "
                f"{', '.join(NAMES)}. Got a {type(scheduler).__name__} of another one. Variables without an optimiser "
                "of yours move by steps that are measured during the run."
            )


def _tensors_of(part: Any) -> dict[str, Tensor]:
    """The parameters and buffers, trainable or not, of a module, a parameter, or a list or mapping of these."""
    return {name: t.detach() for name, t in named_tensors(part)}


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in tensors.items()}


def _check_finite(what: str, saved: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Raise a ValueError where saved numbers are not finite and the present ones are, as those of a mask are not."""
    for name, t in like.items():
        if t.is_floating_point() and not saved[name].isfinite().all() and t.isfinite().all():
            raise ValueError(f"its {what} has numbers in {name!r} that are not finite")


def _set_tensors(saved: Mapping[str, Tensor], part: Any) -> None:
    """Write saved tensors into those of a part."""
    with torch.no_grad():
        for name, t in named_tensors(part):
            t.copy_(saved[name])
