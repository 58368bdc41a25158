"""Bilevel training in the loops that people already have: transformers' Trainer, Lightning.

    from fsla.integrations.transformers import BilevelConfig, bilevel       pip install 'fsla[transformers]'
    from fsla.integrations.lightning import BilevelConfig, BilevelMixin     pip install 'fsla[lightning]'

Accelerate needs no module of its own: its loops call `fsla.BilevelOptimizer.backward`.

    >>> import torch
    >>> import fsla
    >>> from fsla.integrations import BilevelConfig
    >>> weights = fsla.GroupWeights(["web", "forum"])
    >>> trusted = torch.utils.data.TensorDataset(torch.arange(8))
    >>> BilevelConfig(weights=weights, trusted_dataset=trusted, outer_every=8).outer_every
    8
"""

from fsla.integrations._config import BilevelConfig

__all__ = ["BilevelConfig"]
