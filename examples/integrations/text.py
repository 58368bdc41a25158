"""Tokens of five sources for the examples of this folder: three count upwards, with errors, and two are noise."""

import torch

SOURCES = ["manual", "forum", "mirror", "noise", "shuffled"]
LENGTH, VOCABULARY = 32, 64


def make_rows(source, count, seed):
    """Rows of one source."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    if source in ("noise", "shuffled"):
        return noise
    counting = (noise[:, :1] + torch.arange(LENGTH)) % VOCABULARY
    return torch.where(torch.rand(count, LENGTH, generator=generator) < 0.1, noise, counting)


def make_sources(count=256):
    """Rows of all sources in a random order, and the name of the source of each."""
    ids = torch.cat([make_rows(source, count, seed) for seed, source in enumerate(SOURCES)])
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    return ids[order], [SOURCES[i // count] for i in order.tolist()]


def make_model():
    """A small GPT-2 from its configuration: nothing is fetched."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2))


def row_losses(model, ids):
    """The loss of each row."""
    logits = model(input_ids=ids).logits[:, :-1].transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:], reduction="none").mean(1)
