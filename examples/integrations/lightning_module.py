"""Weights of sources, learnt inside Lightning's Trainer with automatic optimisation.

python examples/integrations/lightning_module.py --output_dir out/lightning --max_steps 400
"""

import argparse
from functools import partial
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from text import SOURCES, make_model, make_rows, make_sources, row_losses
from torch.utils.data import DataLoader

import fsla
from fsla.integrations.lightning import BilevelConfig, BilevelMixin


class LanguageModel(BilevelMixin, lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()
        self.bilevel_config = BilevelConfig(  # the weights are no part of the module
            weights=fsla.GroupWeights(SOURCES),
            trusted_dataset=make_rows("manual", 64, 100),
            trusted_batch_size=16,
            outer_every=8,
            outer_optimizer=partial(torch.optim.Adam, lr=0.15),
        )

    def training_step(self, batch, batch_idx):
        ids, source = batch
        loss = (self.bilevel_config.weights(source) * row_losses(self.model, ids)).mean()
        self.log("train_loss", loss)
        return loss

    def trusted_step(self, batch):
        return row_losses(self.model, batch).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.0)


def main(output_dir, max_steps):
    lightning.seed_everything(0)
    module = LanguageModel()
    loader = DataLoader(list(zip(*make_sources(), strict=True)), batch_size=16)
    keep = ModelCheckpoint(output_dir, save_last=True, save_top_k=0, every_n_epochs=1)  # resumes at an epoch's start
    trainer = lightning.Trainer(max_steps=max_steps, callbacks=[keep], default_root_dir=output_dir, accelerator="cpu")
    last = Path(output_dir) / "last.ckpt"
    trainer.fit(module, loader, ckpt_path=last if last.exists() else None)
    print("weights:", module.bilevel_config.weights.as_dict())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", default="out/lightning")
    parser.add_argument("--max_steps", type=int, default=400)
    main(**vars(parser.parse_args()))
