"""Images with wrong labels: the share of the gap between given and true labels that the product closes.

    python -m fsla_benchmarks.data.images --set cifar10n --rows 10000 --checked 1000 --seeds 3,4 --data-dir FOLDER

All parties have the same network and the same augmentation. One JSON line a seed goes to the terminal.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from fsla.data._dataset import Array, Features, TrainingData, Votes
from fsla.data._network_learners import ImageNetwork
from fsla.data._selection import fit_data
from fsla_benchmarks.data.problem import Problem, add_constant
from fsla_reproduction.datasets.idx import read_idx

SETS = ("cifar10n", "fashion-mnist", "mnist")
CIFAR_LABELS = "random1"
NUM_CLASSES = 10
THUMBNAIL = 7


def draw(
    name: str, folder: Path, rows: int, checked: int, noise: float, seed: int, test_rows: int
) -> tuple[Problem, Array]:
    """Return a random part of a set, and the given labels of all rows.

    In CIFAR-10N people gave the labels; elsewhere a share of the true ones is replaced.

    Args:
        name: One of `SETS`.
        folder: Holds a folder of that name.
        rows: Of the pool, checked ones among them.
        checked: Rows whose true label is known; they have no given label.
        noise: Share of labels that another class replaces, outside of CIFAR-10N.
        seed: Of the rows and the labels.
        test_rows: Of the test part.
    """
    rng = np.random.default_rng(seed)
    if name == "cifar10n":
        labels = np.load(folder / name / "labels.npz")
        pick = rng.permutation(len(labels["clean"]))[:rows]
        images, test = (_decode(folder / name / "images.npz", *part) for part in (("train", pick), ("test", None)))
        true, vote = labels["clean"][pick].astype(int), labels[CIFAR_LABELS][pick].astype(int)
        test_labels = labels["test"].astype(int)
    else:
        images, true = _read_idx(folder / name, "train")
        test, test_labels = _read_idx(folder / name, "t10k")
        pick = rng.permutation(len(true))[:rows]
        images, true = images[pick], true[pick]
        wrong = rng.random(rows) < noise
        vote = np.where(wrong, (true + rng.integers(1, NUM_CLASSES, rows)) % NUM_CLASSES, true)
    test, test_labels = test[:test_rows], test_labels[:test_rows]
    pool = np.arange(checked, rows)
    data = TrainingData(
        "classification",
        _features(images),
        Votes(pool, np.zeros(len(pool), int), vote[pool]),
        np.array(["all"]),
        np.arange(checked),
        true[:checked],
        classes=np.arange(NUM_CLASSES),
    )
    return Problem(name, data, _features(test), test_labels, true), vote


def measure(problem: Problem, labels: Array, seed: int) -> dict[str, Any]:
    """Return accuracies on test rows with given labels, with true labels and by the product, and their seconds."""
    features, outcome = problem.data.features, dict[str, Any]()
    for name, target in (("given", labels), ("true", problem.gold)):
        mass = np.eye(NUM_CLASSES)[target]
        start = time.perf_counter(), time.process_time()
        (network,) = ImageNetwork().path(features, mass, np.zeros_like(mass), "classification", seed)
        outcome[name] = _score(network, problem, start)
    start = time.perf_counter(), time.process_time()
    fit = fit_data(problem.data, seed=seed)
    outcome["product"] = _score(fit.predictor, problem, start)
    gap = outcome["true"]["accuracy"] - outcome["given"]["accuracy"]
    gain = outcome["product"]["accuracy"] - outcome["given"]["accuracy"]
    outcome["gap_closed"] = round(gain / gap, 3)
    outcome["wrong_labels"] = round(float((labels != problem.gold).mean()), 3)
    if fit.noise_rate is not None:
        outcome["noise_rate"] = [round(float(value), 3) for value in fit.noise_rate]
    outcome["candidates"] = [[c.strategy, c.learner, round(c.share, 3)] for c in fit.candidates[:5]]
    return outcome


def _score(predictor: Any, problem: Problem, start: tuple[float, float]) -> dict[str, float]:
    seconds = time.perf_counter() - start[0], time.process_time() - start[1]
    right = predictor.predict(problem.test).argmax(1) == problem.test_labels
    return {
        "accuracy": round(float(right.mean()), 4),
        "seconds": round(seconds[0], 1),
        "cpu_seconds": round(seconds[1], 1),
    }


def _features(images: Array) -> Features:
    """Return images with thumbnails as dense features, which a trunk replaces."""
    grey = images.mean(3)
    height, width = (side // THUMBNAIL for side in grey.shape[1:])
    cut = grey[:, : THUMBNAIL * height, : THUMBNAIL * width]
    small = cut.reshape(len(cut), THUMBNAIL, height, THUMBNAIL, width).mean((2, 4)).reshape(len(cut), -1)
    centred = small - small.mean(0)
    return Features(add_constant(centred / np.sqrt((centred**2).sum(1).mean())), images=images)


def _read_idx(folder: Path, part: str) -> tuple[Array, Array]:
    images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")
    return images[..., None], read_idx(folder / f"{part}-labels-idx1-ubyte.gz").astype(int)


def _decode(path: Path, part: str, pick: Array | None) -> Array:
    from PIL import Image

    with np.load(path) as file:
        raw, offsets = file[part], file[f"{part}_offsets"]
    rows = np.arange(len(offsets) - 1) if pick is None else pick
    return np.stack(
        [np.asarray(Image.open(io.BytesIO(raw[offsets[i] : offsets[i + 1]].tobytes())).convert("RGB")) for i in rows]
    )


def main() -> None:
    """Print one JSON line a seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, default="cifar10n")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--checked", type=int, default=1000)
    parser.add_argument("--noise", type=float, default=0.4)
    parser.add_argument("--test-rows", type=int, default=10_000)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--data-dir", type=Path, required=True)
    options = parser.parse_args()
    for seed in map(int, options.seeds.split(",")):
        problem, labels = draw(
            options.set, options.data_dir, options.rows, options.checked, options.noise, seed, options.test_rows
        )
        outcome = {"set": options.set, "rows": options.rows, "checked": options.checked, "seed": seed}
        print(json.dumps(outcome | measure(problem, labels, seed)), flush=True)


if __name__ == "__main__":
    main()
