"""A mixture of text sources, learnt for a target of which little text is at hand.

A byte-level network (inner variable) trains on seven sources. The shares of the sources (outer variable) start at
their sizes, decide what is drawn next, and follow the loss on 20 kB of the target. The texts come with Python, torch
and scikit-learn.

python examples/text_mixture.py
"""

import pydoc_data
import sys
import sysconfig
from functools import partial
from pathlib import Path

import sklearn
import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad, silu

import fsla

LIBRARY, TORCH, SKLEARN = (
    Path(sysconfig.get_paths()["stdlib"]),
    Path(torch.__file__).parent,
    Path(sklearn.__file__).parent,
)
SOURCES = {
    "manual": [Path(pydoc_data.__file__).parent / "topics.py"],
    "standard library": [LIBRARY / "asyncio", LIBRARY / "email", LIBRARY / "logging"],
    "code tables": [LIBRARY / "encodings"],
    "networks": [TORCH / "nn" / "modules"],
    "clustering": [SKLEARN / "cluster"],
    "C++": [TORCH / "include" / "ATen"],
}
TARGETS = {"descriptions": SKLEARN / "datasets" / "descr", "distributions": TORCH / "distributions"}
LENGTH = 64


def read(*places):
    """Return the bytes of files, and of the source files of folders, as a tensor; 1.5 MB at most."""
    suffixes = (".py", ".h", ".rst")
    folders = [sorted(f for f in p.iterdir() if f.suffix in suffixes) if p.is_dir() else [p] for p in places]
    text = b"".join(path.read_bytes() for files in folders for path in files)[:1_500_000]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def load(target):
    """Return the sources, 20 kB of the target that guide the mixture, and other 60 kB at most for testing."""
    sources = {name: read(*places) for name, places in SOURCES.items()}
    random = torch.Generator().manual_seed(0)
    sources["shuffled"] = sources["manual"][torch.randperm(len(sources["manual"]), generator=random)]
    text = read(TARGETS[target])
    return sources, text[:20_000], text[20_000:80_000]


def draw(text, count):
    starts = torch.randint(len(text) - LENGTH, (count, 1))
    return text[starts + torch.arange(LENGTH + 1)]


class Network(nn.Module):
    """Four causal convolutions over bytes."""

    def __init__(self, width=64):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.layers = nn.ModuleList([nn.Conv1d(width, width, 3, dilation=2**i) for i in range(4)])

    def forward(self, text):
        h = self.embed(text).mT
        for layer in self.layers:
            h = h + silu(layer(pad(h, (2 * layer.dilation[0], 0))))
        return self.head(h.mT)


# --8<-- [start:core]
def row_losses(model, rows):
    return cross_entropy(model(rows[:, :-1]).mT, rows[:, 1:], reduction="none").mean(1)


def inner_loss(model, weights, batch):  # a source's share beside the share that it was drawn with: about 1
    rows, source, drawn = batch
    shares = weights(source) / len(drawn)
    return (shares / drawn[source] * row_losses(model, rows)).mean()


def outer_loss(model, weights, batch):
    return row_losses(model, batch).mean()


def sizes_of(sources):
    total = sum(map(len, sources.values()))
    return {name: len(text) / total for name, text in sources.items()}


def draw_mixture(sources, shares, count=32):
    source = torch.multinomial(shares, count, replacement=True)
    texts = list(sources.values())
    return torch.cat([draw(texts[i], 1) for i in source.tolist()]), source


def learn_mixture(sources, trusted, steps=300, algorithm="soba"):
    """Return the weights of the sources, and how often each was read through."""
    model, weights = Network(), fsla.GroupWeights(sources, init=sizes_of(sources))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    bilevel = fsla.BilevelOptimizer(
        model, weights, inner_loss=inner_loss, outer_loss=outer_loss, algorithm=algorithm, inner_optimizer=optimizer,
        outer_optimizer=partial(torch.optim.Adam, lr=0.1), outer_every=2,
    )  # fmt: skip
    lengths, rows_drawn = torch.tensor([len(text) for text in sources.values()]), torch.zeros(len(sources))
    for _ in range(steps):
        shares = 0.98 * weights.weights / len(lengths) + 0.02 * lengths / lengths.sum()  # no source dies out
        rows, source = draw_mixture(sources, shares)
        rows_drawn += source.bincount(minlength=len(sources))
        bilevel.step((rows, source, shares), draw(trusted, 32))
    return weights, rows_drawn * LENGTH / lengths


# --8<-- [end:core]
if __name__ == "__main__":
    torch.manual_seed(0)
    sources, trusted, _ = load("descriptions")
    weights, passes = learn_mixture(sources, trusted, 40 if "--small" in sys.argv else 300)
    for (name, weight), size, read_through in zip(
        weights.as_dict().items(), sizes_of(sources).values(), passes.tolist(), strict=True
    ):
        share = weight / len(sources)
        print(f"{name:<18}size {size:.2f}, share {share:.2f}, read through {read_through:.2f} times")
