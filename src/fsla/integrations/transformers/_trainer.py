"""The mix-in that makes a bilevel Trainer of any Trainer class.

`training_step` collects the micro-batches of an optimiser step. At the last one `BilevelOptimizer.backward` calls the
class's own `training_step` on each of them, once on most steps and at two points on those where the weights move. So
what the class does in a step (autocast, scaling, offloading, accumulation, clipping) stays the class's.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from fsla._storage._files import open_regular
from fsla.integrations._config import trusted_rows
from fsla.integrations.transformers._config import BilevelConfig
from fsla.integrations.transformers._loss import WeightedLossFunction, install_loss_function
from fsla.integrations.transformers._sampler import GroupSampler
from fsla.train import BilevelOptimizer, GroupWeights, SampleWeights

STATE_FILE = "bilevel.pt"
TRUSTED = "fsla_trusted"
LOGGED_WEIGHTS = 64
"""The most weights that are logged by name."""
_Base: Any = object


def bilevel(trainer_class: type[Any]) -> type[Any]:
    """Return a subclass of a Trainer class that learns weights of its training data.

    It takes one more argument, ``bilevel=BilevelConfig(...)``.

    Args:
        trainer_class: `transformers.Trainer` or a subclass, such as `trl.SFTTrainer` or `trl.DPOTrainer`.

    Returns:
        The class.

    Raises:
        TypeError: if it is no Trainer class, or one that generates its own training data.

    Example:
        >>> from transformers import Trainer
        >>> bilevel(Trainer).__name__
        'BilevelTrainer'
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise TypeError(f"bilevel takes transformers.Trainer or a subclass. Got {trainer_class!r}.")
    if trainer_class._prepare_inputs is not Trainer._prepare_inputs:
        raise TypeError(
            f"{trainer_class.__name__} generates its training data during training, so a batch is not the same at two "
            "points of a step. Use a Trainer that reads a data set, such as SFTTrainer or DPOTrainer."
        )
    return type("Bilevel" + trainer_class.__name__, (BilevelTrainerMixin, trainer_class), {})


class BilevelTrainerMixin(_Base):  # type: ignore[misc]
    """Base class of bilevel Trainers, to put before a Trainer class. `bilevel` does it.

    Attributes:
        bilevel: the `fsla.BilevelOptimizer`; None before the first step.
        bilevel_config: the settings.

    Example:
        >>> issubclass(bilevel(Trainer), BilevelTrainerMixin)
        True
    """

    current_gradient_accumulation_steps: Any
    data_collator: Any
    optimizer: Any
    _signature_columns: Any

    def __init__(self, *args: Any, bilevel: BilevelConfig, **kwargs: Any) -> None:
        if not isinstance(bilevel, BilevelConfig):
            raise TypeError(
                f"bilevel must be a fsla.integrations.transformers.BilevelConfig. Got {type(bilevel).__name__} instead."
            )
        self.bilevel_config = bilevel
        self.bilevel: BilevelOptimizer | None = None
        self._sampler: GroupSampler | None = None
        self._parts: list[dict[str, Any]] = []
        self._logged = _Logged()
        # What the class does to its data in `__init__`, such as tokenising, is done to the trusted data too.
        bound = inspect.signature(super().__init__).bind_partial(*args, **kwargs)
        by_name = bound.arguments if "eval_dataset" in bound.signature.parameters else kwargs
        evaluated = by_name.get("eval_dataset")
        several = evaluated if isinstance(evaluated, dict) else {} if evaluated is None else {"eval": evaluated}
        by_name["eval_dataset"] = {**several, TRUSTED: bilevel.trusted_dataset}
        if by_name is bound.arguments:
            args, kwargs = bound.args, bound.kwargs
        super().__init__(*args, **kwargs)
        prepared = dict(self.eval_dataset)
        self._trusted = prepared.pop(TRUSTED)
        self.eval_dataset: Any = prepared if isinstance(evaluated, dict) else prepared.get("eval")
        self._check_settings()
        self._loss_function = self._choose_weighting()
        bilevel.weights.to(self.args.device)
        self.data_collator = GroupCollator(self.data_collator, bilevel)
        self.add_callback(_Begin(self._parts, self._logged))

    # --------------------------------------------------------------------------------------------------------- refusals

    def _check_settings(self) -> None:
        """Raise, before the first step, where the steps would not be those of plain training."""
        args, config = self.args, self.bilevel_config
        if args.fp16:
            raise ValueError(
                "fp16=True is not supported: its gradient scaler skips steps that the adjoint does not know of. Use "
                "bf16=True."
            )
        if self.is_deepspeed_enabled:
            raise ValueError("DeepSpeed is not supported: its gradients are not in .grad. Use DDP or FSDP2.")
        if args.n_gpu > 1:
            raise ValueError(
                f"DataParallel on {args.n_gpu} GPUs is not supported. Start one process for each with torchrun or "
                "accelerate launch."
            )
        optim = str(getattr(args.optim, "value", args.optim))
        if "lomo" in optim or "layerwise" in optim:
            raise ValueError(
                f"optim={optim!r} is not supported: it steps during the backward pass and leaves no gradients. Use "
                "another one, such as 'adamw_torch'."
            )
        for name in ("packing", "padding_free"):
            if getattr(args, name, False):
                raise ValueError(
                    f"{name}=True is not supported: a row would hold samples of several groups. Set {name}=False."
                )
        config.check_trusted(self._trusted_batch_size, args.world_size)
        if isinstance(self.model, nn.Module):
            config.check_outside(self.model)
        groups = _column(self.train_dataset, config.group_column)
        if groups is not None:
            GroupCollator(None, config).indices(sorted(set(groups), key=repr))

    def _choose_weighting(self) -> WeightedLossFunction | None:
        """The weighted loss function of the model where weights enter through it; None where they do not."""
        weighting = self.bilevel_config.weighting
        classes = [c for c in type(self).__mro__ if "compute_loss" in vars(c) and c is not BilevelTrainerMixin]
        bypasses = {
            "label_smoothing_factor": self.args.label_smoothing_factor,
            "compute_loss_func": self.compute_loss_func,
            "use_liger_kernel": getattr(self.args, "use_liger_kernel", False),
        }
        bypassing = [name for name, value in bypasses.items() if value]
        if callable(weighting):
            self.loss_is_scaled_for_ga = False  # The mean over the rows of a micro-batch.
            return None
        if weighting == "groups" or (weighting == "auto" and (bypassing or classes[0] is not Trainer)):
            return None
        if bypassing:
            raise ValueError(
                f"weighting='loss_function' does not reach the loss with {' and '.join(bypassing)}, which bypasses the "
                "model's loss function. Use weighting='groups'."
            )
        loss_function = install_loss_function(self.model)
        if loss_function is None and weighting == "loss_function":
            raise ValueError(
                f"weighting='loss_function' needs a model whose loss_function is a cross entropy. "
                f"{type(self.model).__name__} has another one. Use weighting='groups'."
            )
        return loss_function

    # ------------------------------------------------------------------------------------------------------------- data

    @property
    def _trusted_batch_size(self) -> int:
        return self.bilevel_config.trusted_batch_size or int(self.args.per_device_train_batch_size)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if self.bilevel_config.group_column not in self._signature_columns:
            self._signature_columns = [*self._signature_columns, self.bilevel_config.group_column]

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        if not self.bilevel_config.sample_by_weights:
            return super()._get_train_sampler(*args, **kwargs)
        column = self.bilevel_config.group_column
        groups = _column(self.train_dataset, column)
        if groups is None:
            groups = [row[column] for row in self.train_dataset]
        index = GroupCollator(None, self.bilevel_config).indices(groups)
        assert isinstance(self.bilevel_config.weights, GroupWeights)
        self._sampler = GroupSampler(self.bilevel_config.weights, index.tolist(), seed=self.args.seed)
        return self._sampler

    def _trusted_batch(self, number: int) -> dict[str, Any]:
        rows = trusted_rows(
            len(self._trusted),
            number,
            self._trusted_batch_size,
            rank=self.args.process_index,
            world_size=self.args.world_size,
            seed=self.args.seed,
        )
        collate = self._get_collator_with_removed_columns(self.data_collator, "trusted")
        batch = dict(collate([self._trusted[row] for row in rows]))
        batch.pop(self.bilevel_config.group_column, None)
        return batch

    # ------------------------------------------------------------------------------------------------------------ steps

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        column = self.bilevel_config.group_column
        if column not in inputs:
            raise ValueError(
                f"The batch has no column {column!r}, which group_column names: a row of it had none. Add it to every "
                "row of the training data."
            )
        self._parts.append(inputs)
        if not self.accelerator.gradient_state.sync_gradients:
            return torch.zeros((), device=self.args.device)
        parts = list(self._parts)
        self._parts.clear()
        optimizer = self._bilevel_of(model)
        step, metrics = super().training_step, self._metrics_now()

        def inner() -> Any:
            self._set_metrics(metrics)
            self._logged.begin_pass()
            total: Any = 0.0
            for number, part in enumerate(parts):
                last = number == len(parts) - 1
                with nullcontext() if last else self.accelerator.no_sync(model):
                    total = total + step(model, dict(part), num_items_in_batch)
            return total

        def outer() -> Any:
            before, steps = self._metrics_now(), self.current_gradient_accumulation_steps
            trusted = self._trusted_batch(optimizer.step_count // self.bilevel_config.outer_every)
            self.current_gradient_accumulation_steps = 1
            try:
                loss = step(model, trusted, self._get_num_items_in_batch([trusted], self.args.device))
            finally:
                self.current_gradient_accumulation_steps = steps
                self._set_metrics(before)
            self._logged.outer = loss
            return loss

        begins = optimizer.state is None
        try:
            loss = optimizer.backward(inner, outer)
        except ValueError as error:
            if begins:
                error.add_note(
                    f"(raised at the first step on which weights move, with weighting={self._weighting_name!r})"
                )
            raise
        self._logged.add()
        if self._sampler is not None:
            self._sampler.use(sum(len(part[column]) for part in parts) * self.args.world_size)
        return loss

    @property
    def _weighting_name(self) -> str:
        weighting = self.bilevel_config.weighting
        if callable(weighting):
            return getattr(weighting, "__name__", type(weighting).__name__)
        return "loss_function" if self._loss_function is not None else "groups"

    def _bilevel_of(self, model: nn.Module) -> BilevelOptimizer:
        """The bilevel optimizer; a new one, with the state of the last, where the loop has made a new model of it."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        last = self.bilevel
        if last is not None and last.model is model and last.inner_optimizer is optimizer:
            return last
        self.bilevel = self.bilevel_config.build(model, optimizer, torch.bfloat16 if self.args.bf16 else None)
        if last is not None and last.model is not model and self.bilevel.identity == last.identity:
            self.bilevel.load_state_dict(last.state_dict())
        return self.bilevel

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = dict(inputs)  # A batch is passed more than once, and classes add and remove keys.
        groups = inputs.pop(self.bilevel_config.group_column, None)
        compute = super().compute_loss
        if groups is None or not model.training:
            return compute(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        groups = groups.to(self.args.device)
        weighting, loss_function = self.bilevel_config.weighting, self._loss_function
        if callable(weighting):
            losses = weighting(model, inputs)
            self._logged.note(losses.detach().mean() / self.current_gradient_accumulation_steps)
            return _with_outputs((self._row_weights(groups) * losses).mean(), return_outputs)
        if loss_function is None:
            loss = self._loss_by_groups(model, inputs, groups, num_items_in_batch)
            return _with_outputs(loss, return_outputs)
        loss_function.unweighted = None
        with loss_function.weighted(self._row_weights(groups)):
            result = compute(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        if loss_function.unweighted is not None:
            self._logged.note(loss_function.unweighted * self._scale(num_items_in_batch))
        return result

    def _row_weights(self, groups: Tensor) -> Tensor:
        weights: Tensor = (
            self.bilevel_config.weights(groups) if self._sampler is None else self._sampler.row_weights(groups)
        )
        return weights

    def _loss_by_groups(self, model: nn.Module, inputs: dict[str, Any], groups: Tensor, num_items: Any) -> Tensor:
        """The sum of the groups' losses, each times its weight, from one call for each group."""
        counts = {group: (groups == group).nonzero()[:, 0] for group in sorted(set(groups.tolist()))}
        parts = [(group, rows, 1.0) for group, rows in counts.items()]
        assert self.bilevel is not None
        (calls,) = self.bilevel.reducer.process_group.all_reduce_max([len(parts)])
        parts += [(parts[0][0], parts[0][1][:1], 0.0)] * (calls - len(parts))  # Ranks must call equally often.
        total: Any = 0.0
        unweighted: Any = 0.0
        for group, rows, counted in parts:
            part = {name: _take(name, value, rows, len(groups)) for name, value in inputs.items()}
            portion = counted * (1.0 if num_items is not None else len(rows) / len(groups))
            loss = super().compute_loss(model, part, return_outputs=False, num_items_in_batch=num_items)
            total = total + portion * self._row_weights(groups.new_tensor([group]))[0] * loss
            unweighted = unweighted + portion * loss.detach()
        steps = 1 if num_items is not None else self.current_gradient_accumulation_steps
        self._logged.note(unweighted / steps)
        loss_of_batch: Tensor = total
        return loss_of_batch

    def _scale(self, num_items: Any) -> float:
        """What the class multiplies the model's loss by before it is logged."""
        if num_items is None:
            return 1.0 / float(self.current_gradient_accumulation_steps)
        return float(self.args.world_size) if self.args.average_tokens_across_devices else 1.0

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = {name: value for name, value in inputs.items() if name != self.bilevel_config.group_column}
        return super().prediction_step(model, inputs, *args, **kwargs)

    # ------------------------------------------------------------------------------------------------------------- logs

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.bilevel is not None:
            gather = self.accelerator.gather
            logs |= {name: float(gather(value).mean()) for name, value in self._logged.take(self.args.device).items()}
            weights = self.bilevel_config.weights
            if isinstance(weights, GroupWeights) and len(weights.names) <= LOGGED_WEIGHTS:
                logs |= {f"weight/{name}": round(value, 6) for name, value in weights.as_dict().items()}
                if self._sampler is not None:
                    passes = zip(weights.names, self._sampler.passes, strict=True)
                    logs |= {f"passes/{name}": round(value, 3) for name, value in passes}
        super().log(logs, start_time)

    def _metrics_now(self) -> dict[str, Any]:
        """What TRL's classes count in `compute_loss`."""
        names = ("_metrics", "_total_train_tokens")
        return {name: copy.deepcopy(getattr(self, name)) for name in names if hasattr(self, name)}

    def _set_metrics(self, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            setattr(self, name, copy.deepcopy(value))

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save and self.bilevel is not None:
            sampler = None if self._sampler is None else self._sampler.state_dict()
            state = self.bilevel_config.state_dict(self.bilevel) | {"sampler": sampler}
            torch.save(state, os.path.join(output_dir, STATE_FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        saved = self._saved(checkpoint)
        self.bilevel_config.load_state_dict(self._bilevel_of(self.model_wrapped), saved)
        if (saved["sampler"] is None) != (self._sampler is None):
            raise ValueError(
                f"{checkpoint} was written with sample_by_weights={self._sampler is None}. Resume with the same "
                "setting."
            )
        if self._sampler is not None:
            self._sampler.load_state_dict(saved["sampler"])

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.bilevel_config.weights.load_state_dict(self._saved(self.state.best_model_checkpoint)["weights"])

    @staticmethod
    def _saved(checkpoint: str) -> dict[str, Any]:
        path = os.path.join(checkpoint, STATE_FILE)
        if not os.path.isfile(path):
            raise ValueError(
                f"{checkpoint} has no {STATE_FILE}: it is not a checkpoint of a bilevel run. Resume from another one, "
                "or begin anew with resume_from_checkpoint=None."
            )
        try:
            with open(open_regular(Path(path), os.O_RDONLY), "rb") as file:
                saved: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises whatever a damaged file makes of it
            raise ValueError(f"Cannot read {path}: it is damaged ({error}). Resume from another checkpoint.") from error
        return saved


class GroupCollator:
    """A collator that passes the groups of its rows on as numbers: others drop columns that they do not know.

    Args:
        collator: collator of all other columns.
        config: the settings.
    """

    def __init__(self, collator: Any, config: BilevelConfig) -> None:
        weights = config.weights
        self.collator = collator
        self._column = config.group_column
        self._index = {name: i for i, name in enumerate(weights.names)} if isinstance(weights, GroupWeights) else None
        self._count = len(weights.logit) if isinstance(weights, SampleWeights) else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "collator":
            raise AttributeError(name)
        return getattr(self.collator, name)

    def __call__(self, rows: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        groups = [row.get(self._column) for row in rows]
        others = [{name: value for name, value in row.items() if name != self._column} for row in rows]
        batch = self.collator(others, *args, **kwargs)
        if all(group is not None for group in groups):
            batch[self._column] = self.indices(groups)
        return batch

    def indices(self, groups: Sequence[Any]) -> Tensor:
        """Return the numbers of groups; raise where the weights do not know one."""
        groups = [group.item() if isinstance(group, Tensor) else group for group in groups]
        if self._index is not None:
            unknown = [group for group in groups if group not in self._index]
            if unknown:
                raise ValueError(
                    f"Unknown group {unknown[0]!r} in the column {self._column!r}. The weights have "
                    f"{', '.join(map(repr, list(self._index)[:8]))}."
                )
            return torch.tensor([self._index[group] for group in groups])
        index = torch.as_tensor(groups)
        if self._count is not None and len(index) and not 0 <= int(index.min()) <= int(index.max()) < self._count:
            raise ValueError(
                f"The column {self._column!r} must hold sample numbers from 0 to {self._count - 1}. "
                f"Got {int(index.min())} to {int(index.max())}."
            )
        return index


class _Logged:
    """What is logged beside the loss, between two logs."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._passes: list[Tensor | None] = []
        """The unweighted losses of the passes of the present step."""
        self.outer: Tensor | None = None
        self._sum: Tensor | None = None
        self._steps = 0

    def begin_pass(self) -> None:
        self._passes.append(None)

    def note(self, loss: Tensor) -> None:
        """Add the unweighted loss of a micro-batch."""
        last = self._passes[-1]
        self._passes[-1] = loss if last is None else last + loss

    def add(self) -> None:
        """End a step, whose loss is the mean at both ends of a difference where it passed at two points."""
        losses = [loss for loss in self._passes[-2:] if loss is not None]
        self._passes.clear()
        if losses:
            loss = sum(losses[1:], losses[0]) / len(losses)
            self._sum = loss if self._sum is None else self._sum + loss
            self._steps += 1

    def take(self, device: torch.device) -> dict[str, Tensor]:
        """Return the means since the last call."""
        values = {}
        if self._sum is not None:
            values["unweighted_loss"] = self._sum.to(device) / self._steps
        if self.outer is not None:
            values["outer_loss"] = self.outer.to(device)
        self._sum, self._steps = None, 0
        return values


class _Begin(TrainerCallback):  # type: ignore[misc]
    """Drop what an interrupted `train` has left."""

    def __init__(self, parts: list[Any], logged: _Logged) -> None:
        self._parts = parts
        self._logged = logged

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._parts.clear()
        self._logged.clear()


def _take(name: str, value: Any, rows: Tensor, count: int) -> Any:
    """Some rows of one input of a batch; preference collators put the rejected rows below the chosen ones."""
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    rows = rows.to(value.device)
    if len(value) == count:
        return value[rows]
    if len(value) == 2 * count:
        return value[torch.cat([rows, rows + count])]
    raise ValueError(
        f"The batch has {count} groups, and {name!r} has {len(value)} rows, so the group of a row is unknown. Give "
        "weighting= a function that returns the loss of each row."
    )


def _with_outputs(loss: Tensor, return_outputs: bool) -> Any:
    return (loss, None) if return_outputs else loss


def _column(dataset: Any, column: str) -> list[Any] | None:
    """The values of a column of a data set with columns; None where it has none that can be read at once."""
    if column in (getattr(dataset, "column_names", None) or ()) and hasattr(dataset, "__getitem__"):
        return list(dataset[column])
    return None
