"""`bilevel(SFTTrainer)` and `bilevel(DPOTrainer)` from raw text: the class prepares the trusted data as its own."""

from functools import partial

import pytest
import torch

import fsla
from tiny_text import BAD, NAMES, VOCABULARY, make_rows, numbers, tiny_gpt2

trl = pytest.importorskip("trl", reason="trl is not installed; pip install trl installs it")
datasets = pytest.importorskip("datasets", reason="datasets is not installed; pip install -e '.[dev]' installs it")
tokenizers = pytest.importorskip(
    "tokenizers", reason="tokenizers is not installed; pip install -e '.[dev]' installs it"
)

from fsla.integrations.transformers import BilevelConfig, bilevel  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def make_tokenizer():
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCABULARY - 2)} | {"<eos>": VOCABULARY - 2, "<pad>": VOCABULARY - 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "w0"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def make_texts(name, count, seed):
    """Texts of unequal lengths."""
    rows = make_rows(name, count, seed).tolist()
    return [" ".join(f"w{i % (VOCABULARY - 2)}" for i in row[: 6 + n % 8]) for n, row in enumerate(rows)]


def make_pairs(name, seed):
    good, bad = make_texts("plain", 32, seed), make_texts("noise", 32, 50 + seed)
    if name in BAD:
        good, bad = bad, good
    return [{"prompt": "w1 w2", "chosen": f" {g}", "rejected": f" {b}"} for g, b in zip(good, bad, strict=True)]


def make_data(kind):
    if kind == "SFT":
        texts = [{"text": text, "source": name} for i, name in enumerate(NAMES) for text in make_texts(name, 32, i)]
        return datasets.Dataset.from_list(texts), datasets.Dataset.from_dict({"text": make_texts("plain", 64, 99)})
    pairs = [{**pair, "source": name} for i, name in enumerate(NAMES) for pair in make_pairs(name, i)]
    return datasets.Dataset.from_list(pairs), datasets.Dataset.from_list(make_pairs("plain", 77))


def make_trainer(kind, folder, *, learns=True, dropout=0.1, outer_every=3, **arguments):
    train, trusted = make_data(kind)
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "max_steps": 8,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_steps": 4,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "seed": 3,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
        "max_length": 16,
    }
    args = getattr(trl, f"{kind}Config")(**settings | arguments)
    trainer_class = getattr(trl, f"{kind}Trainer")
    models = {"model": tiny_gpt2(dropout)} | ({"ref_model": tiny_gpt2(0.0)} if kind == "DPO" else {})
    data = {"train_dataset": train, "processing_class": make_tokenizer()}
    if not learns:
        return trainer_class(**models, args=args, **data)
    config = BilevelConfig(
        weights=fsla.GroupWeights(train["source"]),
        trusted_dataset=trusted,
        group_column="source",
        outer_every=outer_every,
        adjoint_optimizer=partial(torch.optim.SGD, lr=0.05),
    )
    return bilevel(trainer_class)(**models, args=args, **data, bilevel=config)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_trl_trainer_resumes_to_same_numbers(kind, tmp_path):
    """With dropout and two micro-batches, from between due steps."""
    whole, parts = make_trainer(kind, tmp_path), make_trainer(kind, tmp_path)
    whole.train()
    parts.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    values = [numbers(run.model, run.bilevel_config.weights) for run in (whole, parts)]
    assert float(values[0][-5:].abs().max()) > 0
    assert torch.equal(*values)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_loss_with_equal_weights_is_that_of_the_class(kind, tmp_path):
    """Parts of a batch by source, of unequal sizes, add up; tokens are counted once, on due steps too."""
    learns = make_trainer(
        kind, tmp_path, dropout=0.0, outer_every=1, save_strategy="no", max_steps=3, learning_rate=0.0
    )
    learns.train()
    plain = make_trainer(kind, tmp_path, dropout=0.0, learns=False, save_strategy="no", max_steps=3, learning_rate=0.0)
    plain.train()
    for one, other in zip(learns.state.log_history[:3], plain.state.log_history[:3], strict=True):
        assert one["unweighted_loss"] == pytest.approx(other["loss"], rel=2e-5)
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-2)
        assert one["num_tokens"] == other["num_tokens"]
        assert one["outer_loss"] > 0
