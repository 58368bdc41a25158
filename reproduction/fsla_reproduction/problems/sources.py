"""A weight for each source of text, learnt on a little text that is trusted.

    G(λ, ω) = mean_j sigmoid(λ_{s(j)}) l(ω; x_j)        F(ω) = mean l(ω; trusted text)

where s(j) is the source of sequence j and l the mean cross entropy of its tokens. λ starts at 0, weights at ½. The text
is synthetic: a grammar allows each token a few successors, drawn at random once, and a source follows one grammar, or
none. Which sources follow the trusted text's grammar is what the weights must find out. Batches are indices into the
training or the trusted sequences. F does not read λ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsla._checks import whole_number
from fsla._tree import Tree
from fsla.problems import Point, WeightedLossProblem
from fsla.problems._autograd import HvpMethod
from fsla.problems._functional import Network
from fsla_reproduction.problems.transformer import sequence_losses

GRAMMARS = ("A", "A", "A", "B", "B", "B", "C", "C", "noise", "noise")
"""What each source follows; the trusted text follows A."""
TRUSTED = "A"


@dataclass(frozen=True)
class TextSpec:
    """How much text there is: `sequences` over all sources together, of `length` tokens to predict.

    `symbols` tokens are in use, each with `successors` that a grammar allows.
    """

    symbols: int = 512
    successors: int = 4
    length: int = 512
    sequences: int = 4000
    trusted: int = 64
    held_out: int = 64

    def __post_init__(self) -> None:
        for name in ("symbols", "successors", "length", "sequences", "trusted", "held_out"):
            whole_number(getattr(self, name), name, "TextSpec")


@dataclass(frozen=True, eq=False)
class Text:
    """Training sequences with the source of each, trusted ones, and fresh ones of the trusted grammar to judge by."""

    tokens: Tensor
    source: Tensor
    trusted: Tensor
    held_out: Tensor

    @classmethod
    def draw(cls, spec: TextSpec, seed: int, device: torch.device | str = "cpu") -> Text:
        """Text from the seed, drawn on the device: a few tensor operations for each place of a sequence."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (spec.symbols, spec.successors)
        tables = {
            grammar: torch.randint(spec.symbols, shape, generator=generator, device=device)
            for grammar in dict.fromkeys(GRAMMARS)
            if grammar != "noise"
        }

        def write(grammar: str, count: int) -> Tensor:
            return _walk(tables.get(grammar), spec, count, generator)

        each = [len(range(s, spec.sequences, len(GRAMMARS))) for s in range(len(GRAMMARS))]
        tokens = torch.cat([write(grammar, count) for grammar, count in zip(GRAMMARS, each, strict=True)])
        source = torch.cat([torch.full((count,), s, device=device) for s, count in enumerate(each)])
        return cls(tokens, source, write(TRUSTED, spec.trusted), write(TRUSTED, spec.held_out))


def _walk(table: Tensor | None, spec: TextSpec, count: int, generator: torch.Generator) -> Tensor:
    """Sequences of length + 1 tokens, each a successor of the one before it, or any where there is no table."""
    places = spec.length + 1
    device = generator.device
    if table is None:
        return torch.randint(spec.symbols, (count, places), generator=generator, device=device)
    token = torch.randint(spec.symbols, (count,), generator=generator, device=device)
    choice = torch.randint(spec.successors, (places - 1, count), generator=generator, device=device)
    walk = [token]
    for chosen in choice:
        walk.append(table[walk[-1], chosen])
    return torch.stack(walk, 1)


@dataclass(frozen=True, eq=False)
class SourceWeighting:
    """The two losses over text, for a network that maps tokens to scores."""

    net: Network
    text: Text

    def start(self, omega: Tree) -> Point:
        return Point({"source_logits": torch.zeros(len(GRAMMARS), device=self.text.tokens.device)}, omega)

    def problem(
        self, *, hvp_method: HvpMethod = "finite_difference", autocast_dtype: torch.dtype | None = None
    ) -> WeightedLossProblem:
        def each(omega: Tree, index: Tensor) -> Tensor:
            return self.sequence_losses(omega, self.text.tokens[index])

        def weight(lam: Tree, index: Tensor) -> Tensor:
            return weights(lam)[self.text.source[index]]

        def outer(lam: Tree, omega: Tree, index: Tensor) -> Tensor:
            return self.sequence_losses(omega, self.text.trusted[index]).mean()

        return WeightedLossProblem(
            each, weight, outer, outer_uses_lam=False, hvp_method=hvp_method, autocast_dtype=autocast_dtype
        )

    def sequence_losses(self, omega: Tree, tokens: Tensor) -> Tensor:
        """The mean loss of a token, for each sequence."""
        return sequence_losses(self.net(omega, tokens[:, :-1]), tokens)


def weights(lam: Tree) -> Tensor:
    """The weights of the sources."""
    return lam["source_logits"].sigmoid()
