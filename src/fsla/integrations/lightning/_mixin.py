"""The mix-in for a LightningModule: the closure of Lightning's optimiser step is the inner closure of `backward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import default_collate

from fsla.integrations._config import BilevelConfig, trusted_rows
from fsla.train import BilevelOptimizer, GroupWeights

KEY = "fsla"
LOGGED_WEIGHTS = 64
"""The most weights that are logged by name."""
_Base: Any = object


class BilevelMixin(_Base):  # type: ignore[misc]
    """Base class of modules whose training weights are learnt, to put before `LightningModule`.

    Set `bilevel_config` in `__init__`, and define `trusted_step`. Automatic optimisation stays, and with it clipping,
    precision, schedulers and accumulation. Where gradients are accumulated, the weights move by the last micro-batch.
    Metrics are logged in the first call of `training_step` on a batch. Checkpoints hold the bilevel state and torch's
    random states; the position in the data is the loader's.

    Attributes:
        bilevel_config: the settings.
        bilevel: the `fsla.BilevelOptimizer`; None before the first step.

    Example:
        >>> class Network(BilevelMixin, lightning.LightningModule):
        ...     def __init__(self, config):
        ...         super().__init__()
        ...         self.model = torch.nn.Linear(2, 1)
        ...         self.bilevel_config = config
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         x, y, source = batch
        ...         weights = self.bilevel_config.weights(source)
        ...         return (weights * (self.model(x)[:, 0] - y).square()).mean()
        ...
        ...     def trusted_step(self, batch):
        ...         x, y = batch
        ...         return (self.model(x)[:, 0] - y).square().mean()
        ...
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
    """

    bilevel_config: BilevelConfig
    bilevel: BilevelOptimizer | None = None
    _loaded: dict[str, Any] | None = None
    """State of a checkpoint that the bilevel optimizer has still to load."""
    _random: dict[str, Tensor] | None = None
    _muted = False
    """Whether a pass repeats an earlier one, so that it logs nothing."""
    _outer_loss: Tensor | None = None

    def trusted_step(self, batch: Any) -> Tensor:
        """Return the loss on a batch of trusted samples."""
        raise NotImplementedError("Define trusted_step(self, batch), the loss on a batch of trusted samples.")

    def collate_trusted(self, rows: list[Any]) -> Any:
        """Return a batch of trusted samples; by default as `torch.utils.data.default_collate` does."""
        return default_collate(rows)

    # ------------------------------------------------------------------------------------------------------------ hooks

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._check_settings()

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        assert optimizer_closure is not None
        closure = optimizer_closure
        bilevel = self._bilevel_of(optimizer)
        parts = self.trainer.accumulate_grad_batches
        calls = {"inner": 0, "outer": 0}

        def inner() -> Any:
            calls["inner"] += 1
            self._muted = calls["inner"] > 1
            try:
                loss = closure()
            finally:
                self._muted = False
            if loss is None:
                raise ValueError("training_step returned None. A bilevel run cannot skip a step; return a loss.")
            return loss

        def outer() -> Any:
            batch = self._trusted_batch(bilevel.step_count // self.bilevel_config.outer_every)
            calls["outer"] += 1
            self._muted = True
            try:
                with self.trainer.precision_plugin.train_step_context():
                    loss = self.trusted_step(batch) / parts  # The inner closure's loss is divided as well.
                self.trainer.strategy.backward(loss, None)
            finally:
                self._muted = False
            self._outer_loss = loss.detach() * parts
            return loss.detach()

        def backward() -> Any:
            if batch_idx % parts == 0:  # Lightning drops the last step's gradients in the closure, which is too late.
                for p in self.parameters():
                    p.grad = None
            return bilevel.backward(inner, outer)

        super().optimizer_step(epoch, batch_idx, optimizer, backward)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        if self._random is not None:
            set_random_state(self._random, self.global_rank)
            self._random = None
        result: int | None = super().on_train_batch_start(batch, batch_idx)
        return result

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self._outer_loss is None:
            return
        self.log("outer_loss", self._outer_loss)
        weights = self.bilevel_config.weights
        if isinstance(weights, GroupWeights) and len(weights.names) <= LOGGED_WEIGHTS:
            self.log_dict({f"weight/{name}": value for name, value in weights.as_dict().items()})

    def log(self, *args: Any, **kwargs: Any) -> None:
        if not self._muted:
            super().log(*args, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        state = None if self.bilevel is None else self.bilevel_config.state_dict(self.bilevel)
        checkpoint[KEY] = {"state": state, "random": random_state(self)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint.get(KEY)
        if saved is not None:
            self._loaded = saved["state"]
            self._random = saved["random"]
            if self._loaded is not None:
                self.bilevel_config.weights.load_state_dict(self._loaded["weights"])
        elif self._trainer is not None and self.trainer.training:
            raise ValueError(
                "The checkpoint has no bilevel state: it is not of a bilevel run. Resume from another one, or begin "
                "anew with ckpt_path=None."
            )

    # ---------------------------------------------------------------------------------------------------------- details

    def _check_settings(self) -> None:
        """Raise, before the first step, where the steps would not be those of plain training."""
        trainer = self.trainer
        if not isinstance(getattr(self, "bilevel_config", None), BilevelConfig):
            raise TypeError("Set self.bilevel_config = BilevelConfig(...) in __init__ of the module.")
        if not self.automatic_optimization:
            raise ValueError(
                "BilevelMixin serves automatic optimisation. With manual optimisation call "
                "fsla.BilevelOptimizer.backward in the place of manual_backward."
            )
        if str(trainer.precision) == "16-mixed":
            raise ValueError(
                "precision='16-mixed' is not supported: its gradient scaler skips steps that the adjoint does not know "
                "of. Use 'bf16-mixed'."
            )
        if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            raise ValueError(
                f"{type(trainer.strategy).__name__} is not supported. Use strategy='auto' on one device, or 'ddp'."
            )
        self.bilevel_config.check_trusted(self._trusted_batch_size, trainer.world_size)
        self.bilevel_config.check_outside(self)

    @property
    def _trusted_batch_size(self) -> int:
        size = self.bilevel_config.trusted_batch_size or getattr(self.trainer.train_dataloader, "batch_size", None)
        if not isinstance(size, int):
            raise ValueError("Set trusted_batch_size in BilevelConfig: the training loader has no batch_size.")
        return size

    def _trusted_batch(self, number: int) -> Any:
        trusted, trainer = self.bilevel_config.trusted_dataset, self.trainer
        rows = trusted_rows(
            len(trusted),
            number,
            self._trusted_batch_size,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            seed=0,
        )
        batch = self.collate_trusted([trusted[row] for row in rows])
        return trainer.strategy.batch_to_device(batch, self.device)

    def _bilevel_of(self, optimizer: Any) -> BilevelOptimizer:
        """The bilevel optimizer, made at the first step of each `fit`, when the model is wrapped."""
        model: nn.Module = self.trainer.strategy.model
        raw = optimizer.optimizer
        if self.bilevel is None or self.bilevel.model is not model or self.bilevel.inner_optimizer is not raw:
            dtype = torch.bfloat16 if str(self.trainer.precision).startswith("bf16") else None
            self.bilevel = self.bilevel_config.build(model, raw, dtype)
        if self._loaded is not None:
            self.bilevel_config.load_state_dict(self.bilevel, self._loaded)
            self._loaded = None
        return self.bilevel


def random_state(module: Any) -> dict[str, Tensor]:
    """Return the states of torch's generators, a row for each rank."""
    states = {"cpu": torch.get_rng_state()}
    if module.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(module.device)
    if module.trainer.world_size == 1:
        return {name: state[None] for name, state in states.items()}
    gathered = {name: module.trainer.strategy.all_gather(state.to(module.device)) for name, state in states.items()}
    return {name: state.cpu() for name, state in gathered.items()}


def set_random_state(states: dict[str, Tensor], rank: int) -> None:
    """Set what `random_state` returned; a rank without a row keeps its states."""
    if rank >= len(states["cpu"]):
        return
    # A view that does not begin its storage crashes torch 2.13 here.
    torch.set_rng_state(states["cpu"][rank].clone())
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"][rank].clone())
