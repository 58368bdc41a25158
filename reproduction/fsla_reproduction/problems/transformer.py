"""A decoder-only transformer, written as people write one: fused attention, LayerNorm, GELU, learnt positions.

Attention is PyTorch's default, whose fused kernels have a first derivative and no second. So products with this network
are taken by differences (`hvp_method="finite_difference"`), or exactly under
`torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsla._checks import whole_number


@dataclass(frozen=True)
class TransformerSize:
    """The sizes of a transformer, and what it does besides; the defaults are those of GPT-2's small one.

    `tied`: the head reads the tokens' embedding. `checkpointed`: a block keeps its input alone, and is computed again
    in the backward pass. `dropout`: the share of numbers dropped after each half of a block.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 8192
    context: int = 512
    tied: bool = False
    checkpointed: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocabulary", "context"):
            whole_number(getattr(self, name), name, "TransformerSize")
        if self.width % self.heads:
            raise ValueError(f"The width must be a multiple of the heads. Got {self.width} and {self.heads} instead.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"The dropout must lie between 0 and 1 (1 excluded). Got {self.dropout!r} instead.")


GPT2_SMALL = TransformerSize()
"""98 million parameters."""
TINY = TransformerSize(layers=2, width=32, heads=2, vocabulary=64, context=32)
"""For CPUs and tests."""


class Block(nn.Module):
    """Attention to what came before, then two dense layers; each is added to what it read."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.queries_keys_values = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.dense_norm = nn.LayerNorm(size.width)
        self.widen = nn.Linear(size.width, 4 * size.width)
        self.narrow = nn.Linear(4 * size.width, size.width)
        self.drop = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention_out(self._attend(self.attention_norm(x))))
        wide = nn.functional.gelu(self.widen(self.dense_norm(x)))
        out: Tensor = x + self.drop(self.narrow(wide))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.queries_keys_values(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, width)


class Transformer(nn.Module):
    """Maps tokens (batch, length) to scores (batch, length, vocabulary) of the token that follows each."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.drop = nn.Dropout(size.dropout)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = None if size.tied else nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.size.checkpointed else block(x)
        read_out = self.tokens.weight if self.head is None else self.head.weight
        return nn.functional.linear(self.norm(x), read_out)


def build_transformer(size: TransformerSize, *, seed: int, device: torch.device | str = "cpu") -> Transformer:
    """A transformer with GPT-2's initialisation, drawn on the device from the seed."""
    with torch.device("meta"):
        model = Transformer(size)
    model = model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    into_the_sum = 0.02 / (2 * size.layers) ** 0.5
    for name, p in model.named_parameters():
        if "norm" in name:
            nn.init.constant_(p, 1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias"):
            nn.init.zeros_(p)
        else:
            deep = "attention_out" in name or "narrow" in name
            nn.init.normal_(p, std=into_the_sum if deep else 0.02, generator=generator)
    return model


def sequence_losses(scores: Tensor, tokens: Tensor) -> Tensor:
    """The mean cross entropy of each sequence of tokens, from the scores of all but its last."""
    each = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return each.view(len(tokens), -1).mean(1)
