"""Weights of training data in Lightning's Trainer, with automatic optimisation.

from fsla.integrations.lightning import BilevelConfig, BilevelMixin

class Network(BilevelMixin, lightning.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.model = make_model()
        self.bilevel_config = config

    def training_step(self, batch, batch_idx):
        weights = self.bilevel_config.weights(batch["source"])
        return (weights * losses(self.model, batch)).mean()

    def trusted_step(self, batch):
        return losses(self.model, batch).mean()
"""

from fsla._extras import require_for

require_for("lightning", "fsla.integrations.lightning")

from fsla.integrations._config import BilevelConfig  # noqa: E402
from fsla.integrations.lightning._mixin import BilevelMixin  # noqa: E402

__all__ = ["BilevelConfig", "BilevelMixin"]
