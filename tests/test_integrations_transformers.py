"""`bilevel(Trainer)`: the numbers of a loop by hand, of plain training between, and of a run without a break."""

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

import fsla
from fsla import SOBA
from tiny_text import (
    BAD,
    GOOD,
    LENGTH,
    NAMES,
    VOCABULARY,
    lora_gpt2,
    make_datasets,
    make_trainer,
    make_trusted,
    numbers,
    row_losses,
    tiny_gpt2,
)  # fmt: skip

MISSING = "transformers or datasets is not installed; pip install -e '.[dev]' installs them"
transformers = pytest.importorskip("transformers", reason=MISSING)
datasets = pytest.importorskip("datasets", reason=MISSING)

from fsla.integrations.transformers import BilevelConfig, GroupSampler, bilevel  # noqa: E402
from fsla.integrations.transformers._loss import install_loss_function  # noqa: E402
from fsla.integrations.transformers._trainer import STATE_FILE  # noqa: E402

SGD = torch.optim.SGD
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:AdamW's decoupled weight decay"),
]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """Nothing is fetched, and nobody reads progress bars."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def values(trainer):
    return numbers(trainer.model, trainer.bilevel_config.weights)


def weighted_loss(model, weights, batch, num_items=None):
    """The loss of Trainer's causal models with a weight for each row."""
    ids, index = batch
    logits = model(input_ids=ids, labels=None).logits.float()
    labels = nn.functional.pad(ids, (0, 1), value=-100)[..., 1:]
    losses = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), reduction="none")
    total = (labels != -100).sum() if num_items is None else num_items
    return (weights(index)[:, None] * losses.view(len(ids), -1)).sum() / total


def trusted_loss(model, weights, ids):
    return model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(ids[:, 1:].numel())).loss


class Recording:
    """The batches of a Trainer's run, by optimiser steps: training batches, and trusted ones where they were drawn."""

    def __init__(self, trainer):
        self.steps, self.trusted = [], []
        step, draw = trainer.training_step, trainer._trusted_batch
        self._ends = True

        def training_step(model, inputs, num_items=None):
            if self._ends:
                self.steps.append([])
            self.steps[-1].append((inputs["input_ids"].clone(), inputs["source"].clone()))
            self._ends = trainer.accelerator.gradient_state.sync_gradients
            return step(model, inputs, num_items)

        def trusted_batch(number):
            batch = draw(number)
            self.trusted.append(batch["input_ids"].clone())
            return batch

        trainer.training_step, trainer._trusted_batch = training_step, trusted_batch


CASES = {
    "sgd": (partial(SGD, lr=0.1), 1, False),
    "adamw": (partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0), 1, False),
    "bf16": (partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0), 1, True),
    "accumulation": (partial(SGD, lr=0.1), 3, False),
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.slow if name in ("adamw", "bf16") else ()) for name in CASES]
)
def test_trainer_equals_loop_by_hand(case, tmp_path):
    """Bit for bit over 60 steps, with L measured: the Trainer's steps are those of `SOBA.step` on its batches."""
    optimizer, parts, bf16 = CASES[case]
    model = tiny_gpt2(0.0)
    inner = optimizer(model.parameters())
    constant = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0)
    trainer = make_trainer(
        tmp_path,
        model=model,
        outer_every=1,
        max_steps=60 if parts == 1 else 24,
        save_strategy="no",
        optimizers=(inner, constant),
        gradient_accumulation_steps=parts,
        max_grad_norm=0.0,
        bf16=bf16,
    )
    recording = Recording(trainer)
    trainer.train()
    model, weights = tiny_gpt2(0.0), fsla.GroupWeights(NAMES)
    inner = optimizer(model.parameters())
    options = {"hvp_method": "finite_difference", "autocast_dtype": torch.bfloat16 if bf16 else None}
    losses = {"inner_loss": weighted_loss, "outer_loss": trusted_loss} | options if parts == 1 else {}
    hand = SOBA(model, weights, inner_optimizer=inner, **losses)
    drawn = iter(recording.trusted[parts == 1 :])  # Closures draw the first batch twice, before the run begins.
    for micro in recording.steps:
        if parts == 1:
            hand.step(micro[0], next(drawn))
            continue
        num_items = torch.tensor(sum(ids[:, 1:].numel() for ids, _ in micro))

        def accumulate(micro=micro, num_items=num_items):
            total = 0.0
            for batch in micro:
                loss = weighted_loss(model, weights, batch, num_items)
                loss.backward()
                total = total + loss.detach()
            return total

        def outer(drawn=drawn):
            loss = trusted_loss(model, weights, next(drawn))
            loss.backward()
            return loss

        hand.backward(accumulate, outer)
        inner.step()
        inner.zero_grad()
    assert trainer.bilevel.step_count == hand.step_count == len(recording.steps)
    assert float(weights.logit.detach().abs().max()) > 0
    assert torch.equal(values(trainer), numbers(model, weights))
    for name, v in hand.adjoint.items():
        assert torch.equal(trainer.bilevel.adjoint[name], v), name


def checkpoint(folder, step):
    """What a checkpoint of Trainer holds, as far as plain training has it."""
    from safetensors.torch import load_file

    path = folder / f"checkpoint-{step}"
    load = partial(torch.load, weights_only=False)
    files = ("optimizer.pt", "scheduler.pt", "rng_state.pth")
    return {"model": load_file(path / "model.safetensors")} | {name: load(path / name) for name in files}


def assert_same(actual, expected):
    """Compare nests bit by bit."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name in expected:
            assert_same(actual[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    else:
        assert bool((actual == expected).all() if hasattr(actual, "all") else actual == expected)


class FixedWeights(transformers.Trainer):
    """Plain training with fixed weights."""

    def __init__(self, *args, row_weights, **kwargs):
        super().__init__(*args, **kwargs)
        self.row_weights = row_weights
        self.loss_of_rows = install_loss_function(self.model)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)
        with self.loss_of_rows.weighted(self.row_weights[inputs.pop("index")]):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_steps_not_due_equal_plain_trainer(parts, tmp_path):
    """Model, optimiser, scheduler and random states, with dropout: turning it on changes nothing between due steps."""
    train, trusted = make_datasets()
    common = {
        "max_steps": 24, "save_steps": 1, "gradient_accumulation_steps": parts, "lr_scheduler_type": "cosine",
    }  # fmt: skip
    trainer = make_trainer(tmp_path / "bilevel", outer_every=8, data=(train, trusted), **common)
    trainer.train()
    due = [k for k in range(24) if trainer.bilevel.algorithm.due(k)]
    assert [k // 8 for k in due] == [0, 1, 2]
    for first, last in pairwise(due):
        saved = torch.load(tmp_path / "bilevel" / f"checkpoint-{first + 1}" / STATE_FILE, weights_only=True)
        weights = fsla.GroupWeights(NAMES)
        weights.load_state_dict(saved["weights"])
        index = [NAMES.index(name) for name in train["source"]]
        plain = FixedWeights(
            model=tiny_gpt2(),
            args=copy.deepcopy(trainer.args),
            train_dataset=train.remove_columns("source").add_column("index", index),
            row_weights=weights.weights,
        )
        plain.args.output_dir = str(tmp_path / f"plain-{first}")
        plain.args.remove_unused_columns = False
        plain.add_callback(StopAt(last))
        plain.train(resume_from_checkpoint=str(tmp_path / "bilevel" / f"checkpoint-{first + 1}"))
        assert last - first > 1
        assert_same(checkpoint(tmp_path / f"plain-{first}", last), checkpoint(tmp_path / "bilevel", last))


class StopAt(transformers.TrainerCallback):
    """Ends a run after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


# --------------------------------------------------------------------------------------------------------------- resume

RESUMES = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "bf16": {"bf16": True},
    "sampler": {"config": {"sample_by_weights": True}, "gradient_accumulation_steps": 2},
    "groups": {"config": {"weighting": "groups"}},
    "one_step": {"config": {"algorithm": "one_step"}},
}
SLOW_RESUMES = {
    "clip": {"max_grad_norm": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 4, "weight_decay": 0.1},
    "checkpointing": {"gradient_checkpointing": True},
    "every": {"outer_every": 1, "max_steps": 70, "save_steps": 40},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "lora": {"lora": True},
    "lora all": {"lora": True, "gradient_checkpointing": True, "gradient_accumulation_steps": 2, "bf16": True},
    "remainder": {
        "gradient_accumulation_steps": 5, "per_device_train_batch_size": 50, "max_steps": 20, "save_steps": 10,
    },
    "compile": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "adafactor": {"optim": "adafactor"},
    "workers": {"dataloader_num_workers": 2},
    "sampler workers": {
        "config": {"sample_by_weights": True}, "dataloader_num_workers": 2, "max_steps": 60, "save_steps": 30,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", [*RESUMES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_RESUMES)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_resumed_run_equals_whole_run(case, tmp_path):
    """From the checkpoint in the middle, between due steps: every number of the model and the weights."""
    settings = dict((RESUMES | SLOW_RESUMES)[case])
    if settings.pop("lora", False):
        pytest.importorskip("peft", reason="peft is not installed; pip install peft installs it")
        build = lora_gpt2
    else:
        build = tiny_gpt2
    if "eval_strategy" in settings:
        settings["eval_dataset"] = make_datasets()[1]
    whole = make_trainer(tmp_path, model=build(), **settings)
    whole.train()
    at = settings.get("save_steps", 6)
    resumed = make_trainer(tmp_path, model=build(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
    assert resumed.bilevel.step_count == whole.bilevel.step_count == settings.get("max_steps", 12)
    assert float(whole.bilevel_config.weights.logit.detach().abs().max()) > 1e-5
    assert torch.equal(values(resumed), values(whole))
    logged = [[e["weight/plain"] for e in run.state.log_history if "weight/plain" in e] for run in (whole, resumed)]
    assert logged[0][-1] == logged[1][-1]


def test_resumed_run_has_state_of_given_outer_optimizer(tmp_path):
    """No Trainer saves the optimiser of the weights; without its moments they would go another way."""

    adam = partial(torch.optim.Adam, lr=0.1)

    def run(*, makes=False, **more):
        weights = fsla.GroupWeights(NAMES)
        config = {"weights": weights, "outer_optimizer": adam if makes else adam(weights.parameters())}
        trainer = make_trainer(tmp_path, outer_every=2, config=config)
        trainer.train(**more)
        return trainer

    whole, resumed = run(), run(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert torch.equal(values(resumed), values(whole))
    with pytest.raises(ValueError, match="does not hold outer_optimizer"):
        run(makes=True, resume_from_checkpoint=True)
    run(makes=True)
    with pytest.raises(ValueError, match="Cannot load the state of outer_optimizer"):
        run(resume_from_checkpoint=True)


def test_resume_true_takes_last_checkpoint(tmp_path):
    """As in the Trainer's own scripts."""
    whole = make_trainer(tmp_path / "whole")
    whole.train()
    make_trainer(tmp_path / "parts", max_steps=6, lr_scheduler_type="linear").train()
    parts = make_trainer(tmp_path / "parts")
    parts.train(resume_from_checkpoint=True)
    assert parts.bilevel.step_count == 12


def test_second_train_goes_on(tmp_path):
    """The Trainer keeps its optimiser from one `train` to the next, and the adjoint and the weights stay as well."""
    trainer = make_trainer(tmp_path, max_steps=4, save_strategy="no")
    trainer.train()
    before = values(trainer)
    trainer.train()
    assert trainer.bilevel.step_count == 8
    assert not torch.equal(values(trainer), before)


# --------------------------------------------------------------------------------------------------------- cost, memory


def test_due_step_passes_three_times_and_others_once(tmp_path):
    """Counted at the model's forward: (m + 2) / m plain steps, and looks at the unit of λ's steps beside them."""
    calls = []
    model = tiny_gpt2()
    model.register_forward_hook(lambda *_: calls.append(model.training))
    adjoint = {"adjoint_optimizer": partial(SGD, lr=0.05)}
    trainer = make_trainer(tmp_path, model=model, outer_every=4, max_steps=16, save_strategy="no", config=adjoint)
    counts, due, last = [], [], 0
    step = trainer.training_step

    def counted(*args, **kwargs):
        nonlocal last
        begin, loss = len(calls), step(*args, **kwargs)
        counts.append(len(calls) - begin)
        due.append(trainer.bilevel.algorithm.due(len(counts) - 1))
        return loss

    trainer.training_step = counted
    trainer.train()
    begins = due.index(True)
    assert all(count == 1 for count, is_due in zip(counts, due, strict=True) if not is_due)
    assert [count for k, count in enumerate(counts) if due[k] and k != begins] == [3, 12, 3]  # One look.
    assert counts[begins] == 6  # Three more look at the losses before the run begins.
    assert sum(due) == 4


# ----------------------------------------------------------------------------------------------------------- interrupts


@pytest.mark.parametrize("number", [1, 4, 5, 6])
def test_interrupted_pass_leaves_everything(number, tmp_path):
    """Ctrl-C in any pass of a step: the model, the step count and what requires a gradient are as before."""
    trainer = make_trainer(tmp_path, outer_every=1, max_steps=3, save_strategy="no", gradient_accumulation_steps=2)
    trainer.train()
    before, count = values(trainer), trainer.bilevel.step_count
    adjoint = {name: t.clone() for name, t in trainer.bilevel.adjoint.items()}
    left = [number]
    forward = trainer.model.forward

    def interrupting(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    trainer.model.forward = interrupting
    if number <= 5:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert torch.equal(values(trainer), before)
        assert trainer.bilevel.step_count == count
        assert_same(trainer.bilevel.adjoint, adjoint)
    trainer.model.forward = forward
    assert all(p.requires_grad for p in (*trainer.model.parameters(), *trainer.bilevel_config.weights.parameters()))
    trainer.train()
    assert trainer.bilevel.step_count == count + 3


# --------------------------------------------------------------------------------------------------------------- random


class WatchedDropout(nn.Dropout):
    """Records the mask of every pass."""

    masks: list[bytes]

    def forward(self, x):
        y = super().forward(x)
        self.masks.append((y != 0).numpy().tobytes())
        return y


def test_dropout_masks_differ_between_micro_batches_and_agree_at_both_ends(tmp_path):
    """Equal masks would couple micro-batches; unequal ones at the two ends would be the noise of a difference."""
    model = tiny_gpt2()
    model.transformer.drop = WatchedDropout(0.3)
    masks = model.transformer.drop.masks = []
    config = {"adjoint_optimizer": partial(SGD, lr=0.05)}
    trainer = make_trainer(
        tmp_path, model=model, outer_every=1, max_steps=3, save_strategy="no", gradient_accumulation_steps=2,
        config=config,
    )  # fmt: skip
    step, steps = trainer.training_step, []

    def split(*args, **kwargs):
        masks.clear()
        loss = step(*args, **kwargs)
        steps.append(list(masks))
        return loss

    trainer.training_step = split
    trainer.train()
    for one in (steps[3], steps[5]):  # Second micro-batch of the second and the third step; the first is collected.
        first, second, again_first, again_second, trusted = one
        assert (first, second) == (again_first, again_second)
        assert len({first, second, trusted}) == 3


# ----------------------------------------------------------------------------------------------------- logs and weights


def test_logs_have_weights_and_losses(tmp_path):
    """What users watch: each weight by name, the trusted loss, and the loss that plain training would log."""
    trainer = make_trainer(tmp_path, model=tiny_gpt2(0.0), save_strategy="no", outer_every=2)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 4
    for entry in logs:
        assert {f"weight/{name}" for name in NAMES} <= entry.keys()
        assert sum(entry[f"weight/{name}"] for name in NAMES) == pytest.approx(5, abs=1e-4)
        assert 0 < entry["outer_loss"] < 5
        assert entry["unweighted_loss"] == pytest.approx(entry["loss"], rel=1e-2)


@pytest.mark.parametrize("weighting", ["loss_function", "groups"])
@pytest.mark.parametrize("parts", [1, 3])
def test_loss_with_equal_weights_equals_plain_trainer(weighting, parts, tmp_path):
    """Rows of unequal lengths and groups of unequal sizes in a batch: Σ w L must be the class's own loss at w = 1."""
    train, trusted = make_datasets()
    lengths = torch.randint(4, LENGTH, (len(train),), generator=torch.Generator().manual_seed(0)).tolist()
    labels = [row[:n] + [-100] * (LENGTH - n) for row, n in zip(train["labels"], lengths, strict=True)]
    train = train.remove_columns("labels").add_column("labels", labels)
    settings = {"max_steps": 3, "logging_steps": 1, "save_strategy": "no", "gradient_accumulation_steps": parts}
    config = {"weighting": weighting, "outer_every": 1000}
    learns = make_trainer(tmp_path, model=tiny_gpt2(0.0), data=(train, trusted), config=config, **settings)
    learns.train()
    plain = transformers.Trainer(
        model=tiny_gpt2(0.0), args=copy.deepcopy(learns.args), train_dataset=train.remove_columns("source")
    )
    plain.train()
    for one, other in zip(learns.state.log_history[:3], plain.state.log_history[:3], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["unweighted_loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_evaluation_uses_plain_loss(tmp_path):
    """Weights are of training; rows of the evaluation set may have no group."""
    train, trusted = make_datasets()
    trainer = make_trainer(tmp_path, save_strategy="no", max_steps=2, eval_dataset=trusted, data=(train, trusted))
    trainer.train()
    trainer.model.eval()
    expected = row_losses(trainer.model, make_trusted()).mean()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert trainer.evaluate(train)["eval_loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("sample_by_weights", [False, True])
@pytest.mark.parametrize("outer_optimizer", [None, partial(torch.optim.Adam, lr=0.15)], ids=["automatic", "adam"])
def test_weights_part_good_from_bad_sources(seed, sample_by_weights, outer_optimizer, tmp_path):
    """Within 400 training steps at outer_every=8: bad under .3 of good."""
    config = {"sample_by_weights": sample_by_weights, "outer_optimizer": outer_optimizer}
    trainer = make_trainer(
        tmp_path, model=tiny_gpt2(seed=seed), outer_every=8, config=config, max_steps=400, save_strategy="no",
        learning_rate=3e-3, logging_steps=100, seed=seed,
    )  # fmt: skip
    trainer.train()
    weights = trainer.bilevel_config.weights.as_dict()
    good = sum(weights[name] for name in GOOD) / len(GOOD)
    assert max(weights[name] for name in BAD) < 0.3 * good


def test_callable_weighting_returns_row_losses(tmp_path):
    """For losses that fsla knows nothing of."""

    def losses(model, inputs):
        return row_losses(model, inputs["input_ids"])

    results = {}
    for weighting in ("loss_function", losses):
        trainer = make_trainer(
            tmp_path, model=tiny_gpt2(0.0), save_strategy="no", config={"weighting": weighting},
            gradient_accumulation_steps=2,
        )  # fmt: skip
        trainer.train()
        results[weighting] = values(trainer)
    torch.testing.assert_close(results[losses], results["loss_function"], atol=2e-5, rtol=1e-3)


def test_load_best_model_takes_its_weights_too(tmp_path):
    """The weights at the end may have fitted the noise of the trusted rows."""
    train, trusted = make_datasets()
    trainer = make_trainer(
        tmp_path, data=(train, trusted), eval_dataset=trusted, eval_strategy="steps", eval_steps=2, save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="judged", greater_is_better=False, outer_every=1,
    )  # fmt: skip
    judged = iter([3.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    evaluate = trainer.evaluate

    def judge(*args, **kwargs):
        return evaluate(*args, **kwargs) | {"eval_judged": next(judged)}

    trainer.evaluate = judge
    trainer.train()
    saved = torch.load(tmp_path / "checkpoint-4" / STATE_FILE, weights_only=True)
    assert torch.equal(trainer.bilevel_config.weights.logit, saved["weights"]["logit"])


# -------------------------------------------------------------------------------------------------------------- sampler


def test_sampler_follows_weights_and_counts_passes():
    """Rows of a group come once each before any comes again, as often as weight times size says."""
    weights = fsla.GroupWeights(["a", "b"], init={"a": 3.0, "b": 1.0})
    groups = [0] * 300 + [1] * 700
    sampler = GroupSampler(weights, groups, seed=0)
    drawn = [row for _ in range(4) for row in sampler]
    fraction = sum(groups[row] == 0 for row in drawn) / len(drawn)
    assert len(drawn) == 4000
    expected = 0.98 * 900 / 1600 + 0.02 * 0.3
    assert fraction == pytest.approx(expected, abs=0.03)
    of_a = [row for row in drawn if groups[row] == 0]
    assert len(set(of_a[:300])) == 300
    assert sampler.passes == pytest.approx([len(of_a) / 300, (4000 - len(of_a)) / 700])


def test_sampler_row_weights_have_gradient_of_expected_loss():
    """Drawn by p and multiplied by p / p, the loss of a row has the gradient of the mixture's loss."""
    weights = fsla.GroupWeights(["a", "b", "c"], init={"a": 1.0, "b": 2.0, "c": 4.0}).double()
    groups, losses = [0] * 2 + [1] * 3 + [2] * 5, torch.tensor([3.0, 1.0, 2.0]).double()
    sampler = GroupSampler(weights, groups, seed=0)
    sizes = torch.tensor([2.0, 3.0, 5.0]).double()
    fractions = weights(torch.arange(3)) * sizes
    fractions = fractions / fractions.sum()
    (expected,) = torch.autograd.grad((fractions * losses).sum(), weights.logit)
    drawn_by = 0.98 * fractions.detach() + 0.02 * sizes / sizes.sum()
    (actual,) = torch.autograd.grad((drawn_by * sampler.row_weights(torch.arange(3)) * losses).sum(), weights.logit)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("ahead", [0, 5])
def test_sampler_resumes_where_rows_were_used(ahead):
    """A loader draws ahead; what it drew and nobody trained on comes again, after as many dummies as were used."""
    weights = fsla.GroupWeights(["a", "b"])
    groups = [0] * 30 + [1] * 20
    whole = list(GroupSampler(weights, groups, seed=0))
    first = GroupSampler(weights, groups, seed=0)
    draws = iter(first)
    first_rows = [next(draws) for _ in range(12 + ahead)]
    first.use(12)
    state = copy.deepcopy(first.state_dict())
    again = GroupSampler(weights, groups, seed=0)
    again.load_state_dict(state)
    resumed = list(again)
    assert first_rows[:12] + resumed[12:] == whole
    assert len(resumed) == 50


# ------------------------------------------------------------------------------------------------------------- refusals


def refused(tmp_path, match, error=ValueError, **settings):
    """Assert that a Trainer is refused before its first optimiser step."""
    steps = []

    class Steps(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            steps.append(state.global_step)

    def train():
        trainer = make_trainer(tmp_path, save_strategy="no", **settings)
        trainer.add_callback(Steps())
        trainer.train()

    with pytest.raises(error, match=match):
        train()
    assert not steps


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"optim": "lomo"}, "optim='lomo' is not supported.*leaves no gradients"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["attn"]}, "layerwise' is not supported"),
        ({"label_smoothing_factor": 0.1, "config": {"weighting": "loss_function"}}, "label_smoothing_factor.*groups"),
        ({"config": {"outer_every": 0}}, "'outer_every' of BilevelConfig must be at least 1"),
        ({"config": {"trusted_batch_size": 65}}, "at least 65 samples, 65 for each of 1 process.*Got 64"),
        ({"config": {"trusted_dataset": []}}, "at least 8 samples.*Got 0"),
        ({"config": {"group_column": "origin"}}, "no column 'origin', which group_column names"),
        ({"config": {"weights": fsla.GroupWeights(["a", "b"])}}, "Unknown group 'hiss' in the column 'source'"),
        ({"config": {"weighting": "rows"}}, "must be 'auto', 'loss_function', 'groups' or a function"),
        ({"config": {"algorithm": "sobaa"}}, "Did you mean 'soba'"),
    ],
)  # fmt: skip
def test_setting_is_refused(settings, match, tmp_path):
    """Each with what to do instead, and before anything was trained."""
    refused(tmp_path, match, **settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"config": {"algorithm": "fsla"}}, "at one point, such as SOBA"),
        ({"config": {"weights": torch.zeros(2)}}, "must be a torch.nn.Module"),
        ({"config": {"trusted_dataset": iter([])}}, "must have a length and an index"),
        ({"config": {"weights": fsla.SampleWeights(9), "sample_by_weights": True}}, "needs weights of groups"),
    ],
)
def test_argument_of_wrong_kind_is_refused(settings, match, tmp_path):
    refused(tmp_path, match, TypeError, **settings)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("fp16", True, "fp16=True is not supported.*bf16=True"),
        ("_n_gpu", 2, "DataParallel on 2 GPUs is not supported.*torchrun"),
        ("packing", True, "packing=True is not supported"),
        ("padding_free", True, "padding_free=True is not supported"),
    ],
)
def test_argument_of_training_is_refused(name, value, match, tmp_path, monkeypatch):
    """Set after the arguments were results: some of them are refused on CPUs by transformers itself."""
    init = transformers.Trainer.__init__

    def changed(self, *args, **kwargs):
        init(self, *args, **kwargs)
        setattr(self.args, name, value)

    monkeypatch.setattr(transformers.Trainer, "__init__", changed)
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", property(lambda self: self._n_gpu))
    refused(tmp_path, match)


def test_deepspeed_is_refused(tmp_path, monkeypatch):
    """Its gradients are not in `.grad`."""
    init = transformers.Trainer.__init__

    def changed(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.is_deepspeed_enabled = True

    monkeypatch.setattr(transformers.Trainer, "__init__", changed)
    refused(tmp_path, "DeepSpeed is not supported.*FSDP2")


def test_loss_function_with_compute_loss_func_is_refused(tmp_path):
    """It bypasses the model's loss function, and the weights would stay as they are without a word."""

    def compute(outputs, labels, num_items_in_batch=None):
        return outputs.logits.square().mean()

    refused(tmp_path, "compute_loss_func", compute_loss_func=compute, config={"weighting": "loss_function"})


def test_lbfgs_is_refused(tmp_path):
    """It calls its closure itself."""
    model = tiny_gpt2()
    optimizer = torch.optim.LBFGS(model.parameters())
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    refused(tmp_path, "cannot serve LBFGS", TypeError, model=model, optimizers=(optimizer, constant))


def test_weights_inside_model_are_refused(tmp_path):
    """The Trainer's optimiser would train them on the training loss."""
    model = tiny_gpt2()
    model.weights = fsla.GroupWeights(NAMES)
    refused(tmp_path, "must not be a part of the model", model=model, config={"weights": model.weights})


def test_loss_that_ignores_weights_is_refused(tmp_path):
    """At the first step on which the weights move, and with how they enter the loss."""

    class Other(transformers.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return model(**{k: v for k, v in inputs.items() if k != "source"}).loss

    def ignores(model, inputs):
        return row_losses(model, inputs["input_ids"])

    def frozen(index):
        return torch.ones(len(index))

    weights = fsla.GroupWeights(NAMES)
    weights.forward = frozen
    with pytest.raises(ValueError, match="must depend on outer") as caught:
        make_trainer(tmp_path, outer_every=1, trainer_class=Other, config={"weights": weights}).train()
    assert "with weighting='groups'" in caught.value.__notes__[-1]


def test_checkpoint_of_other_run_is_refused(tmp_path):
    """One of plain training, and one with other blocks of steps."""
    train, _ = make_datasets()
    learns = make_trainer(tmp_path / "learns")
    learns.train()
    args = copy.deepcopy(learns.args)
    args.output_dir = str(tmp_path / "plain")
    transformers.Trainer(model=tiny_gpt2(), args=args, train_dataset=train.remove_columns("source")).train()
    with pytest.raises(ValueError, match=f"has no {STATE_FILE}: it is not a checkpoint of a bilevel run"):
        make_trainer(tmp_path / "plain").train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="outer_every"):
        make_trainer(tmp_path / "learns", outer_every=4).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"sample_by_weights=False\. Resume with the same setting"):
        make_trainer(tmp_path / "learns", config={"sample_by_weights": True}).train(resume_from_checkpoint=True)


def test_sample_number_out_of_range_is_refused(tmp_path):
    """An IndexError from the middle of a pass does not say which column is wrong."""
    train, trusted = make_datasets()
    with_numbers = train.add_column("number", list(range(len(train))))
    config = {"weights": fsla.SampleWeights(100), "group_column": "number"}
    refused(tmp_path, "sample numbers from 0 to 99. Got 0 to 159", data=(with_numbers, trusted), config=config)


@pytest.mark.parametrize("other", ["no class", int, "generates"])
def test_other_class_is_refused(other):
    """A Trainer that generates its batches has not the same batch at two points of a step."""
    if other == "generates":
        other = type("OnlineTrainer", (transformers.Trainer,), {"_prepare_inputs": lambda self, inputs: inputs})
        match = "OnlineTrainer generates its training data"
    else:
        match = "takes transformers.Trainer or a subclass"
    with pytest.raises(TypeError, match=match):
        bilevel(other)


def test_trl_online_trainers_are_refused():
    """GRPO and RLOO generate."""
    trl = pytest.importorskip("trl", reason="trl is not installed; pip install trl installs it")
    for name in ("GRPOTrainer", "RLOOTrainer"):
        with pytest.raises(TypeError, match="generates its training data"):
            bilevel(getattr(trl, name))


def test_config_is_needed():
    with pytest.raises(TypeError, match=r"must be a fsla\.integrations\.transformers\.BilevelConfig"):
        bilevel(transformers.Trainer)(model=tiny_gpt2(), bilevel={"outer_every": 8})


def test_config_names_column():
    with pytest.raises(TypeError, match="group_column"):
        BilevelConfig(weights=fsla.GroupWeights(2), trusted_dataset=[1])
