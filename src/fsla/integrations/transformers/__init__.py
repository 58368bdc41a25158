"""Weights of training data in transformers' Trainer, and in the classes that are made from it.

from fsla.integrations.transformers import BilevelConfig, bilevel

config = BilevelConfig(weights=weights, trusted_dataset=trusted, group_column="source", outer_every=8)
trainer = bilevel(Trainer)(model=model, args=args, train_dataset=dataset, bilevel=config)
trainer.train(resume_from_checkpoint=True)
"""

from fsla._extras import require_for

require_for("transformers", "fsla.integrations.transformers")

from fsla.integrations.transformers._config import BilevelConfig  # noqa: E402
from fsla.integrations.transformers._sampler import GroupSampler  # noqa: E402
from fsla.integrations.transformers._trainer import BilevelTrainerMixin, bilevel  # noqa: E402

__all__ = ["BilevelConfig", "BilevelTrainerMixin", "GroupSampler", "bilevel"]
