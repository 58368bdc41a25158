"""`BilevelMixin`: automatic optimisation stays, and a resumed run has the numbers of the whole one."""

from functools import partial

import pytest
import torch

import fsla
from tiny_text import make_trusted, numbers, row_losses, tiny_gpt2

MISSING = "lightning or transformers is not installed; pip install -e '.[dev]' installs them"
lightning = pytest.importorskip("lightning", reason=MISSING)
pytest.importorskip("transformers", reason=MISSING)

from fsla.integrations.lightning import BilevelConfig, BilevelMixin  # noqa: E402
from lightning_module import TextModule, make_loader  # noqa: E402

SGD = torch.optim.SGD
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*litlogger"),
    pytest.mark.filterwarnings("ignore:The `srun` command"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
]


def run(steps, module=None, *, resumes=None, saves=None, loader=None, **settings):
    """Train a module; return it."""
    lightning.seed_everything(3, verbose=False)
    module = TextModule() if module is None else module
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(max_steps=steps, accelerator="cpu", **dict.fromkeys(quiet, False) | settings)
    trainer.fit(module, make_loader(8) if loader is None else loader, ckpt_path=resumes)
    if saves is not None:
        trainer.save_checkpoint(saves)
    return module


def values(module):
    return numbers(module, module.bilevel_config.weights)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_clip_val": 0.3, "precision": "bf16-mixed"},
        {"accumulate_grad_batches": 2},
    ],
    ids=["plain", "clip bf16", "accumulation"],
)
def test_resumed_run_equals_whole_run(settings, tmp_path):
    """With dropout, from the middle of an epoch: the module keeps random states, and the loader its position."""
    whole = run(14, **settings)
    run(7, saves=tmp_path / "middle.ckpt", **settings)
    resumed = run(14, resumes=tmp_path / "middle.ckpt", **settings)
    assert whole.bilevel.step_count == resumed.bilevel.step_count == 14
    assert float(whole.bilevel_config.weights.logit.detach().abs().max()) > 1e-5
    assert torch.equal(values(resumed), values(whole))


def test_lightning_equals_loop_by_hand():
    """Bit for bit: Lightning's closure is the inner closure, and its optimiser steps after it."""
    module = run(20, TextModule(dropout=0.0, outer_every=2))
    model, weights = tiny_gpt2(0.0), fsla.GroupWeights(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    hand = fsla.SOBA(model, weights, inner_optimizer=optimizer, outer_every=2)
    for batch in list(make_loader(8))[:20]:

        def inner(batch=batch):
            loss = (weights(batch["source"]) * row_losses(model, batch["input_ids"])).mean()
            loss.backward()
            return loss.detach()

        def outer():
            loss = row_losses(model, module._trusted_batch(hand.step_count // 2)).mean()
            loss.backward()
            return loss.detach()

        hand.backward(inner, outer)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(values(module), numbers(model, weights))


def test_steps_not_due_equal_plain_module():
    """Until the first due step, with dropout and clipping, the module is one of plain training."""

    class Plain(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = tiny_gpt2()

        def training_step(self, batch, batch_idx):
            return (torch.ones(8) * row_losses(self.net, batch["input_ids"])).mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.net.parameters(), lr=1e-3, weight_decay=0.0)

    due = run(1, TextModule(outer_every=8)).bilevel.algorithm.due
    first = next(k for k in range(8) if due(k))
    assert first > 1
    for parts in (1, 2):
        settings = {"gradient_clip_val": 0.3, "accumulate_grad_batches": parts}
        learns = run(first, TextModule(outer_every=8), **settings)
        plain = run(first, Plain(), **settings)
        assert learns.bilevel.state is None
        for one, other in zip(learns.net.parameters(), plain.net.parameters(), strict=True):
            assert torch.equal(one, other)


def test_accumulation_takes_whole_gradient():
    """The gradient of the first micro-batches is added once; products come from the last one."""
    module = run(1, TextModule(dropout=0.0, outer_every=1, lr=0.0), accumulate_grad_batches=4)
    gradient = torch.cat([p.grad.flatten() for p in module.net.parameters()])
    model = tiny_gpt2(0.0)
    for batch in list(make_loader(8))[:4]:
        (row_losses(model, batch["input_ids"]).mean() / 4).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)


def test_passes_are_counted_and_logged_once():
    """Three passes on due steps, one on others; `training_step` logs its first pass alone.

    Five or nine more measure the unit of λ's steps now and then.
    """
    module = TextModule(outer_every=2, adjoint_optimizer=partial(SGD, lr=0.05))
    passes, counts = [], []
    module.net.register_forward_hook(lambda *_: passes.append(1))

    class Count(lightning.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            counts.append(len(passes))
            passes.clear()

    means = []

    class Means(lightning.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            means.append(float(trainer.callback_metrics["loss_epoch"]))

    run(20, module, callbacks=[Count(), Means()])
    due = [module.bilevel.algorithm.due(k) for k in range(20)]
    begins = due.index(True)
    longer = [k for k, n in enumerate(counts) if n in (8, 12)]
    assert 1 <= len(longer) <= 3
    assert all(due[k] for k in longer)
    others = [k for k in range(20) if k not in (begins, *longer)]
    assert [counts[k] for k in others] == [3 if due[k] else 1 for k in others]
    assert counts[begins] == 6
    logged = run(20, TextModule(outer_every=2), max_epochs=1)
    assert {"outer_loss", "weight/0", "weight/4", "loss"} <= logged.trainer.callback_metrics.keys()
    assert 3 < means[0] < 4.5


def test_small_loss_of_outer_batch_scales_with_accumulation():
    """The logged trusted loss is that of a batch, whatever the accumulation."""
    losses = []
    for parts in (1, 4):
        module = run(1, TextModule(dropout=0.0, outer_every=1, lr=0.0), accumulate_grad_batches=parts)
        losses.append(float(module.trainer.callback_metrics["outer_loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# ------------------------------------------------------------------------------------------------------------- refusals


def configured(**options):
    settings = {"weights": fsla.GroupWeights(5), "trusted_dataset": make_trusted(), "trusted_batch_size": 8}
    return BilevelConfig(**settings | options)


def skip_step(batch, batch_idx):
    return None


def changed(change, **options):
    module = TextModule(**options)
    change(module)
    return module


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (lambda: changed(lambda m: setattr(m, "automatic_optimization", False)), "serves automatic optimisation"),
        (lambda: TextModule(batch_size=65), "at least 65 samples"),
        (lambda: changed(lambda m: setattr(m, "weights", m.bilevel_config.weights)), "must not be a part of the model"),
        (
            lambda: changed(lambda m: setattr(m, "training_step", lambda batch, batch_idx: None)),
            "training_step returned None",
        ),
        (lambda: changed(lambda m: setattr(m.bilevel_config, "trusted_batch_size", None)), "has no batch_size"),
    ],
    ids=["manual", "few", "inside", "none", "size"],
)
def test_module_is_refused(module, match):
    """Before its first optimiser step."""
    module = module()
    before = [p.detach().clone() for p in module.net.parameters()]
    with pytest.raises(ValueError, match=match):
        run(3, module)
    assert all(torch.equal(p, q) for p, q in zip(module.net.parameters(), before, strict=True))


def test_module_without_config_or_trusted_step_is_refused():
    with pytest.raises(TypeError, match=r"self\.bilevel_config = BilevelConfig"):
        run(1, changed(lambda m: setattr(m, "bilevel_config", None)))
    with pytest.raises(NotImplementedError, match=r"Define trusted_step\(self, batch\)"):
        BilevelMixin().trusted_step(None)


class Sharded:
    """A strategy that shards the model."""

    precision_plugin = lightning.pytorch.plugins.Precision()


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("precision", "16-mixed", "16-mixed' is not supported"),
        ("strategy", Sharded(), "Sharded is not supported.*'ddp'"),
    ],
)
def test_trainer_is_refused(name, value, match, monkeypatch):
    """What cannot be had on a CPU is put in the trainer's place."""
    module = TextModule()
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    module.trainer = trainer
    monkeypatch.setattr(type(trainer), name, property(lambda self: value))
    with pytest.raises(ValueError, match=match):
        module._check_settings()


def test_lbfgs_is_refused():
    module = TextModule()
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.net.parameters())
    with pytest.raises(TypeError, match="cannot serve LBFGS"):
        run(1, module)


def test_loss_that_ignores_weights_is_refused():
    """At the first due step."""
    module = TextModule(outer_every=1)
    module.training_step = lambda batch, batch_idx: row_losses(module.net, batch["input_ids"]).mean()
    with pytest.raises(ValueError, match="must depend on outer"):
        run(1, module)


def test_checkpoint_of_plain_run_is_refused(tmp_path):
    """One of plain training has neither adjoint nor weights."""
    run(2, saves=tmp_path / "run.ckpt")
    state = torch.load(tmp_path / "run.ckpt", weights_only=False)
    del state["fsla"]
    torch.save(state, tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match="has no bilevel state"):
        run(4, resumes=tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match="outer_every"):
        run(4, TextModule(outer_every=5), resumes=tmp_path / "run.ckpt")


@pytest.mark.slow
def test_weights_part_good_from_bad_sources():
    """Within 400 training steps at outer_every=8, with an optimiser of the weights."""
    options = {"outer_every": 8, "lr": 3e-3, "outer_optimizer": partial(torch.optim.Adam, lr=0.15)}
    module = run(400, TextModule(**options), max_epochs=-1)
    weights = module.bilevel_config.weights.weights
    assert float(weights[3:].max()) < 0.3 * float(weights[:3].mean())
