"""Started by torchrun: the cleaner and the weigher on several ranks against the same on one; rank 0 writes the gaps."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import fsla
from fsla import distributed as distributed


class Network(nn.Module):
    """A network that cannot be trained side by side with others."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x)


def fitted(model):
    images, digits = load_digits(return_X_y=True)
    labels = digits.copy()
    labels[:300:3] = (labels[:300:3] + 1) % 10
    groups = np.where(np.arange(300) < 150, "left", "right")
    cleaner = fsla.HyperCleaner(model=model, steps=15, bilevel_steps=15, random_state=0)
    cleaner.fit(images[:300], labels[:300], images[300:400], digits[300:400], groups=groups)
    return np.concatenate(
        [cleaner.label_quality_, cleaner.weights_["weight"], cleaner.predict_proba(images[400:]).flat]
    )


def main(out):
    group = distributed.get_group()
    gaps = {}
    for name, model in (("dense", "dense"), ("own", Network())):
        with distributed.single_process():
            single = fitted(model)
        before = group.messages
        all_ranks = fitted(model)
        gaps[name] = [float(np.abs(single - all_ranks).max()), group.messages - before]
    results = group.gather(gaps)
    if group.is_first:
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
