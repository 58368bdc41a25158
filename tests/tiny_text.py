"""A tiny GPT-2 and rows of numbers for the tests of integrations: three good sources and two of noise."""

import torch
from torch.nn.functional import cross_entropy

import fsla

NAMES = ["plain", "odd", "late", "noise", "hiss"]
GOOD, BAD = NAMES[:3], NAMES[3:]
VOCABULARY, LENGTH = 48, 16


def tiny_gpt2(dropout=0.1, *, seed=0, width=32, layers=2):
    """A GPT-2 from its configuration: nothing is fetched."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=width,
        n_layer=layers,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # As models have it whose class name says so; Trainer then counts shifted labels.
    return model


def lora_gpt2(dropout=0.1, *, rank=4, width=32):
    from peft import LoraConfig, get_peft_model

    base = tiny_gpt2(0.0, width=width)
    torch.manual_seed(0)
    config = LoraConfig(
        r=rank,
        lora_alpha=8,
        target_modules=["c_attn"],
        lora_dropout=dropout,
        fan_in_fan_out=True,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config)


def make_rows(name, count, seed):
    """Rows of a source: counting with a tenth of errors, or noise."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    if name in BAD:
        return noise
    start = torch.randint(VOCABULARY, (count, 1), generator=generator)
    counting = (start + torch.arange(LENGTH)) % VOCABULARY
    return torch.where(torch.rand(count, LENGTH, generator=generator) < 0.1, noise, counting)


def make_ids(rows_per_source=32):
    """All training rows, and the index of the source of each."""
    ids = torch.cat([make_rows(name, rows_per_source, seed) for seed, name in enumerate(NAMES)])
    return ids, torch.arange(len(NAMES)).repeat_interleave(rows_per_source)


def make_trusted(count=64):
    return make_rows("plain", count, 99)


def row_losses(model, ids):
    """The loss of each row."""
    logits = model(input_ids=ids).logits[:, :-1]
    losses = cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1), reduction="none")
    return losses.view(len(ids), -1).mean(1)


def make_datasets(rows_per_source=32):
    """The same as data sets: training rows with the names of their sources, and trusted rows."""
    from datasets import Dataset

    ids, source = make_ids(rows_per_source)
    names = [NAMES[i] for i in source]
    trusted = make_trusted().tolist()
    train = Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist(), "source": names})
    return train, Dataset.from_dict({"input_ids": trusted, "labels": trusted})


def make_trainer(output_dir, *, model=None, outer_every=3, config=None, trainer_class=None, data=None, **arguments):
    """A bilevel Trainer on the tiny GPT-2."""
    from transformers import Trainer, TrainingArguments

    from fsla.integrations.transformers import BilevelConfig, bilevel

    train, trusted = data or make_datasets()
    settings = {
        "per_device_train_batch_size": 8,
        "max_steps": 12,
        "learning_rate": 1e-3,
        "logging_steps": 3,
        "save_steps": 6,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    names = {"compute_loss_func", "optimizers", "eval_dataset"} & arguments.keys()
    extra = {name: arguments.pop(name) for name in names}
    options = {"weights": fsla.GroupWeights(train["source"]), "trusted_dataset": trusted, "group_column": "source"}
    options |= {"outer_every": outer_every} | (config or {})
    return bilevel(trainer_class or Trainer)(
        model=tiny_gpt2() if model is None else model,
        args=TrainingArguments(str(output_dir), **settings | arguments),
        train_dataset=train,
        bilevel=BilevelConfig(**options),
        **extra,
    )


def numbers(model, weights):
    """All trainable parameters of a run in one vector, those of the weights last."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in (*parameters, *weights.parameters())]
    return torch.cat([p.detach().reshape(-1) for p in full])
