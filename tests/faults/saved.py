"""What fsla saves: one of each kind of file, how it is read again, and what reading it gives where it is whole."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fsla
from faults.trials import new_folder
from fsla._state_tree import flatten
from fsla.contrib import LazyRowOptimizer, load_shards, save_shards
from fsla.distributed import IndexRange
from fsla.train import load_checkpoint, save_checkpoint
from lazy_rows_program import weighted

STEPS = 8
BATCHES = [torch.arange(2), torch.arange(2, 4)]
ROWS = np.random.default_rng(5).standard_normal((6, 3))


def inner_loss(model: Any, weights: Any, i: Any) -> torch.Tensor:
    return (weights(i) * (model(torch.ones(len(i), 2))[:, 0] - i).square()).mean() + 0.1 * model.weight.square().sum()


def outer_loss(model: Any, weights: Any, i: Any) -> torch.Tensor:
    return (model(torch.ones(len(i), 2))[:, 0] - 1).square().mean()


def new_optimizer(seed: int = 0, **options: Any) -> fsla.SOBA:
    """Return an optimiser of a small regression."""
    torch.manual_seed(seed)
    return fsla.SOBA(
        torch.nn.Linear(2, 1), fsla.SampleWeights(4), inner_loss=inner_loss, outer_loss=outer_loss, **options
    )


def run_fit(folder: Path | None, max_steps: int = STEPS, seed: int = 0, **options: Any) -> list[torch.Tensor]:
    """Run `fit` in a folder and return the weights at its end."""
    optimizer = new_optimizer(seed)
    settings = {"eval_every": 2, "save_every": 4, "save_every_minutes": None, "progress_bar": False} | options
    fsla.fit(optimizer, BATCHES, BATCHES, max_steps=max_steps, output_dir=folder, **settings)
    return weights_of(optimizer)


def weights_of(optimizer: fsla.BilevelOptimizer) -> list[torch.Tensor]:
    """Return copies of what an optimiser has trained."""
    outer: Any = optimizer.outer
    return [p.detach().clone() for p in (*optimizer.model.parameters(), *outer.parameters())]


@dataclass(frozen=True)
class Saved:
    """Something that was saved.

    Args:
        folder: all of it.
        file: the file that trials damage, inside the folder.
        read: reads it from a copy of the folder, and returns what came of it.
        expected: what an undisturbed read returns.
        other: the same file of another run.
    """

    folder: Path
    file: str
    read: Callable[[Path], Any]
    expected: Any
    other: bytes

    def copy_to(self, place: Path) -> Path:
        """Copy the folder and return the copy of the file."""
        shutil.copytree(self.folder, place)
        return place / self.file


def same(a: Any, b: Any) -> bool:
    """Return whether two nests are equal bit by bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.equal(b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and bool((a == b).all())
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def _fitted_model(seed: int, learner: str) -> fsla.data.DataModel:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((60, 3))
    y = np.where(x[:, 0] + 0.3 * rng.standard_normal(60) > 0, "a", "b").astype(object)
    checked = np.where(np.arange(60) < 30, y, None)
    cleaner = fsla.data.LabelCleaner(strategies=["trusted_only"], learners=[learner], random_state=0, cv=2)
    cleaner.fit(x, y, y_checked=checked)
    return fsla.data.DataModel("classification", cleaner._builder, cleaner._predictor, cleaner.classes_)


def _predict(path: Path) -> Any:
    import pandas as pd

    return fsla.data.load_model(path).predict_proba(pd.DataFrame(ROWS, columns=["x0", "x1", "x2"]))


def _lazy_run(seed: int, index_range: IndexRange | None = None) -> LazyRowOptimizer[Any]:
    problem, at = weighted()
    algorithm = fsla.algorithms.soba(fsla.steps.constant(3.0, 0.2, 0.2))
    torch.manual_seed(seed)
    batches = fsla.StepBatches.shared(torch.arange(101), torch.randint(40, (10,)))
    run = LazyRowOptimizer(algorithm, problem, at, batches, index_range=index_range)
    run.step(batches)
    return run


def _read_shards(path: Path) -> Any:
    run = _lazy_run(3)
    run.load_state_dict(
        load_shards(path.parents[1] if path.suffix == ".safetensors" else path.parent, IndexRange(101)).state
    )
    return flatten(run.state_dict())


@cache
def saved_things() -> dict[str, Saved]:
    """Return one of each kind."""
    place = new_folder()

    def nest(seed: int) -> Any:
        return {
            "step": 3,
            "w": torch.randn(40, generator=torch.Generator().manual_seed(seed)),
            "l": [1, 2.5, "a", None],
        }

    things = {}
    for name in ("core", "core other"):
        (place / name).mkdir()
        save_checkpoint(place / name / "x.safetensors", nest(len(name)))
    things["core checkpoint"] = _thing(place / "core", place / "core other", "x.safetensors", load_checkpoint)

    for seed, name in enumerate(("fit", "fit other")):
        run_fit(place / name, 4, seed=seed)
    things["checkpoint of fit"] = _thing(
        place / "fit", place / "fit other", "checkpoint-00000004.safetensors", lambda path: run_fit(path.parent)
    )
    things["records of fit"] = _thing(
        place / "fit", place / "fit other", "records.jsonl", lambda path: run_fit(path.parent)
    )
    for learner in ("linear", "forest"):
        for seed, name in enumerate((learner, f"{learner} other")):
            (place / name).mkdir()
            _fitted_model(seed, learner).save(place / name / "model.safetensors")
        things[f"saved model ({learner})"] = _thing(
            place / learner, place / f"{learner} other", "model.safetensors", _predict
        )
    for seed, name in enumerate(("shards", "shards other")):
        save_shards(place / name, _lazy_run(seed))
    for file in ("manifest.fsla", "rank-0-of-1/step-1.safetensors"):
        label = "manifest of shards" if file.startswith("manifest") else "shard"
        things[label] = _thing(place / "shards", place / "shards other", file, _read_shards)
    return things


def _thing(folder: Path, other: Path, file: str, read: Callable[[Path], Any]) -> Saved:
    scratch = new_folder() / "copy"
    shutil.copytree(folder, scratch)
    return Saved(folder, file, read, read(scratch / file), (other / file).read_bytes())


if sys.platform != "linux":
    raise ImportError("The harness needs Linux: forks, signals and file kinds that other systems lack.")
