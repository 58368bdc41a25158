"""A LightningModule on the tiny GPT-2, and a loader that resumes where it was."""

import lightning
import torch

import fsla
from fsla.integrations.lightning import BilevelConfig, BilevelMixin
from tiny_text import make_ids, make_trusted, row_losses, tiny_gpt2


class TextModule(BilevelMixin, lightning.LightningModule):
    def __init__(self, *, batch_size=8, dropout=0.1, lr=1e-3, **options):
        super().__init__()
        self.net = tiny_gpt2(dropout)
        self.lr = lr
        settings = {"weights": fsla.GroupWeights(5), "trusted_dataset": make_trusted(), "outer_every": 3}
        self.bilevel_config = BilevelConfig(**settings | {"trusted_batch_size": batch_size} | options)

    def training_step(self, batch, batch_idx):
        loss = (self.bilevel_config.weights(batch["source"]) * row_losses(self.net, batch["input_ids"])).mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def trusted_step(self, batch):
        return row_losses(self.net, batch).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=self.lr, weight_decay=0.0)


class StatefulLoader:
    """Batches in a fixed order. Lightning saves and loads the state of such a loader."""

    def __init__(self, batches):
        self.batches = batches
        self.next = 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        while self.next < len(self.batches):
            self.next += 1
            yield self.batches[self.next - 1]
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def make_loader(size, rank=0, world_size=1):
    ids, source = make_ids()
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    rows = [order[start + rank * size :][:size] for start in range(0, len(order), size * world_size)]
    return StatefulLoader([{"input_ids": ids[row], "source": source[row]} for row in rows])
