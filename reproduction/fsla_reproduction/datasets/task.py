"""The cleaning task of section 6.2: a training set with wrong labels, a clean validation set, a test set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fsla._checks import pick, whole_number
from fsla_reproduction.datasets.noise import corrupt, long_tail
from fsla_reproduction.datasets.sets import CLASSES, Images, load


@dataclass(frozen=True)
class TaskSpec:
    """The settings of a task; the defaults are the paper's."""

    dataset: str = "mnist"
    n_train: int = 5000
    n_valid: int = 5000
    noise: str = "uniform"
    rate: float = 0.8
    tail_ratio: float = 1.0
    inputs: str = "standard"
    """"standard": mean 0 and variance 1 over the training images; "unit": as they are, in [0, 1]."""
    seed: int = 0

    def __post_init__(self) -> None:
        whole_number(self.n_train, "n_train", "TaskSpec")
        whole_number(self.n_valid, "n_valid", "TaskSpec")
        pick(self.inputs, {"standard": 0, "unit": 0}, "scaling of the inputs")


class CleaningTask(NamedTuple):
    """Tensors on one device. `changed` marks the training labels that are wrong; no method may see it."""

    train_x: Tensor
    train_y: Tensor
    true_y: Tensor
    changed: Tensor
    valid_x: Tensor
    valid_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    origin: str


def make_task(
    spec: TaskSpec, *, data_dir: Path | None = None, device: torch.device | str = "cpu", images: Images | None = None
) -> CleaningTask:
    """Draw the task from the spec's seed; the same on every device."""
    data = load(spec.dataset, data_dir) if images is None else images
    generator = torch.Generator().manual_seed(spec.seed)
    order = torch.randperm(len(data.train_y), generator=generator)
    if spec.tail_ratio != 1:
        order = order[long_tail(data.train_y[order], CLASSES, spec.tail_ratio, generator)]
    if spec.n_train + spec.n_valid > len(order):
        raise ValueError(
            f"The training and validation sets must fit into {spec.dataset}'s {len(order)} training images. Got "
            f"{spec.n_train} + {spec.n_valid} instead."
        )
    train = order[: spec.n_train]
    valid = order[spec.n_train : spec.n_train + spec.n_valid]
    noise = corrupt(data.train_y[train], CLASSES, spec.noise, spec.rate, generator)
    mean = 0.0
    std = 1.0
    if spec.inputs == "standard":
        mean = float(data.train_x[train].mean())
        std = float(data.train_x[train].std())

    def scaled(x: Tensor) -> Tensor:
        return ((x - mean) / std).to(device)

    return CleaningTask(
        scaled(data.train_x[train]),
        noise.labels.to(device),
        data.train_y[train].to(device),
        noise.changed.to(device),
        scaled(data.train_x[valid]),
        data.train_y[valid].to(device),
        scaled(data.test_x),
        data.test_y.to(device),
        CLASSES,
        data.origin,
    )
