"""Images with wrong labels: the share of the gap between given and true labels that the product closes.

    python -m fsla_benchmarks.data.images --set cifar10n --rows 10000 --checked 1000 --seeds 3,4 --data-dir FOLDER

All parties have the same network and the same augmentation. One JSON line a seed goes to the terminal, and each party
to the error output as soon as it is done. With `--pack SMALL` the rows that these seeds draw are written to a folder
that is small enough to carry to another machine, which needs no other data: pass it there as `--data-dir`.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fsla.data._data_fit import DataFit, Predictor
from fsla.data._dataset import Array, Features, TrainingData, Votes
from fsla.data._network_learners import (
    ImageNetwork,
    NetworkPredictor,
    Recipe,
    augment_images,
    image_tensor,
    train_network,
)
from fsla.data._predictors import EnsemblePredictor
from fsla.data._selection import fit_data
from fsla_benchmarks.data.alternatives import checked_mass, confident_learning, one_hot, vote_mass
from fsla_benchmarks.data.problem import Problem, add_constant
from fsla_reproduction.datasets.idx import read_idx

SETS = ("cifar10n", "fashion-mnist", "mnist")
CIFAR_LABELS = "random1"
NUM_CLASSES = 10
THUMBNAIL = 7
PARTIES = (
    "given", "true", "everything", "fine-tuned", "product", "five networks", "confident learning", "trusted alone",
)  # fmt: skip
NAMES = {
    "given": "all labels as they came",
    "true": "true labels",
    "everything": "all labels, checked ones put right",
    "fine-tuned": "the same, fine-tuned on checked rows",
    "product": "`fsla`",
    "five networks": "average of five on all labels, checked ones put right",
    "confident learning": "what confident learning leaves",
    "trusted alone": "checked rows alone",
}
"""As the page shows them."""
NUM_AVERAGED = 5
"""As many networks as the product averages."""
FINE_TUNING = Recipe(lr=0.02, steps=1, min_epochs=10, max_epochs=10)


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


class Party(NamedTuple):
    """A trained predictor, and the seconds on the clock and of the CPU that it took."""

    predictor: Predictor
    seconds: float
    cpu_seconds: float
    details: dict[str, Any]


def measure(
    problem: Problem,
    labels: Array,
    seed: int,
    *,
    parties: Sequence[str] = (),
    device: str = "auto",
    report: Callable[[str, dict[str, Any]], None] = lambda name, outcome: None,
) -> dict[str, Any]:
    """Return the accuracy on test rows of each party, its seconds, and the share of the gap that it closes.

    Args:
        problem: Rows, checked labels and test rows.
        labels: The given labels of all rows.
        seed: Of everything random.
        parties: Names of `PARTIES`. Default: all.
        device: "auto", "cpu" or "cuda".
        report: Called with the name and the outcome of each party when it is done.
    """
    outcome = dict[str, Any]()
    for name, party in train_parties(problem, labels, seed, parties or PARTIES, device):
        accuracy = float((party.predictor.predict(problem.test).argmax(1) == problem.test_labels).mean())
        seconds = {"seconds": round(party.seconds, 1), "cpu_seconds": round(party.cpu_seconds, 1)}
        outcome[name] = {"accuracy": round(accuracy, 4)} | seconds | party.details
        report(name, outcome[name])
    if "given" in outcome and "true" in outcome:
        low, high = (outcome[name]["accuracy"] for name in ("given", "true"))
        for each in outcome.values():
            each["gap_closed"] = round((each["accuracy"] - low) / (high - low), 3) if high > low else None
    return outcome | {"wrong_labels": round(float((labels != problem.gold).mean()), 3)}


def train_parties(
    problem: Problem, labels: Array, seed: int, parties: Sequence[str], device: str
) -> Iterator[tuple[str, Party]]:
    """Yield the name of each party, trained.

    All have the same network, augmentation and number of passes over the rows; the first networks of the product have
    fewer on grey images. Beside the product they are what a user would do: train on everything, also with the checked
    labels put right, then fine-tune on checked rows, or average five such networks; train on checked rows alone; leave
    out what confident learning takes for wrong.
    """
    data, learner = problem.data, ImageNetwork(device=device)
    checked = np.arange(len(data.checked_rows))
    sure = checked_mass(data, checked, 1.0)

    def network(mass: Array, extra: Array, number: int = 0) -> Predictor:
        return learner.path(data.features, mass, extra, "classification", seed + 1000 * number)[0]

    def everything(number: int = 0) -> Predictor:
        return network(vote_mass(data), sure, number)

    def filtered() -> Predictor:
        return network(confident_learning(data, checked, learner).mass, sure)

    @cache
    def first() -> Party:
        return _timed(everything)

    def five() -> Predictor:
        members = (first().predictor, *map(everything, range(1, NUM_AVERAGED)))
        equal = np.ones(NUM_AVERAGED)
        return EnsemblePredictor(members, equal / NUM_AVERAGED, equal, "classification")

    trained: dict[str, Callable[[], Party]] = {
        "given": lambda: _timed(lambda: network(one_hot(labels, NUM_CLASSES), np.zeros_like(sure))),
        "true": lambda: _timed(lambda: network(one_hot(problem.gold, NUM_CLASSES), np.zeros_like(sure))),
        "everything": first,
        "fine-tuned": lambda: _timed(lambda: fine_tune(first().predictor, data, sure, seed), first()),
        "five networks": lambda: _timed(five, first()),
        "trusted alone": lambda: _timed(lambda: network(np.zeros_like(sure), sure)),
        "confident learning": lambda: _timed(filtered),
        "product": lambda: _product(data, seed, device),
    }
    for name in parties:
        yield name, trained[name]()


def fine_tune(predictor: Predictor, data: TrainingData, mass: Array, seed: int) -> Predictor:
    """Return a copy of a network that is trained on, with a tenth of the learning rate, on checked rows."""
    assert isinstance(predictor, NetworkPredictor)
    assert data.features.images is not None
    network = copy.deepcopy(predictor.network)
    images = image_tensor(data.features.images).to(network.mean.device)
    train_network(network, images, mass, "classification", FINE_TUNING, seed=seed, augment=augment_images)
    return NetworkPredictor(network, "classification")


def _timed(train: Callable[[], Predictor], before: Party | None = None) -> Party:
    """Return what a function trains, with its seconds and those of what it starts from."""
    start = time.perf_counter(), time.process_time()
    earlier = (0.0, 0.0) if before is None else (before.seconds, before.cpu_seconds)
    predictor = train()
    seconds, cpu_seconds = time.perf_counter() - start[0], time.process_time() - start[1]
    return Party(predictor, earlier[0] + seconds, earlier[1] + cpu_seconds, {})


def _product(data: TrainingData, seed: int, device: str) -> Party:
    fits: list[DataFit] = []

    def train() -> Predictor:
        fits.append(fit_data(data, seed=seed, device=device))
        return fits[0].predictor

    party, fit = _timed(train), fits[0]
    details: dict[str, Any] = {
        "candidates": [[c.strategy, c.learner, round(c.share, 3), c.accuracy] for c in fit.candidates[:5]]
    }
    if fit.noise_rate is not None:
        details["noise_rate"] = [round(float(value), 3) for value in fit.noise_rate]
    return party._replace(details=details)


def write_table(result: Mapping[str, Any]) -> list[str]:
    """Return the table of a page as lines of Markdown: a row for each party, a column for each seed."""
    runs = result["runs"]
    seeds = [f"seed {run['seed']}" for run in runs]
    lines = [
        f"| trained on | {' | '.join(seeds)} | gap closed | seconds | CPU seconds |",
        "| --- " * (len(seeds) + 4) + "|",
    ]
    for name in PARTIES:
        if all(name in run for run in runs):
            accuracy = " | ".join(f"{run[name]['accuracy']:.3f}" for run in runs)
            closed = " / ".join(f"{run[name]['gap_closed']:.2f}" for run in runs)
            seconds, cpu = (" / ".join(f"{run[name][key]:.0f}" for run in runs) for key in ("seconds", "cpu_seconds"))
            lines.append(f"| {NAMES[name]} | {accuracy} | {closed} | {seconds} | {cpu} |")
    return lines


def pack(source: Path, target: Path, rows: int, seeds: Sequence[int]) -> Path:
    """Write the part of CIFAR-10N that some seeds draw, in the form of the whole: other rows are empty.

    Args:
        source: Folder that holds the folder of CIFAR-10N.
        target: Folder for the smaller one.
        rows: That each seed draws.
        seeds: Of the draws.
    """
    name = "cifar10n"
    labels = dict(np.load(source / name / "labels.npz"))
    with np.load(source / name / "images.npz") as file:
        arrays = {key: file[key] for key in file.files}
    sizes = np.diff(arrays["train_offsets"])
    used = np.zeros(len(sizes), dtype=bool)
    for seed in seeds:
        used[np.random.default_rng(seed).permutation(len(sizes))[:rows]] = True
    arrays["train"] = arrays["train"][np.repeat(used, sizes)]
    arrays["train_offsets"] = np.concatenate([[0], np.cumsum(sizes * used)])
    folder = target / name
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "images.npz", **arrays)
    np.savez(folder / "labels.npz", **labels)
    return folder


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
    """Print one JSON line a seed, or pack the rows that the seeds draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, default="cifar10n")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--checked", type=int, default=1000)
    parser.add_argument("--noise", type=float, default=0.4)
    parser.add_argument("--test-rows", type=int, default=10_000)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--parties", default=",".join(PARTIES), help="names with commas")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--pack", type=Path, help="write the rows of CIFAR-10N that are needed to this folder, and end")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if options.pack is not None:
        print(pack(options.data_dir, options.pack, options.rows, seeds))
        return
    for seed in seeds:
        problem, labels = draw(
            options.set, options.data_dir, options.rows, options.checked, options.noise, seed, options.test_rows
        )
        start = {"set": options.set, "rows": options.rows, "checked": options.checked, "seed": seed}

        def report(name: str, outcome: dict[str, Any], seed: int = seed) -> None:
            print(f"seed {seed}, {name}: {outcome}", file=sys.stderr, flush=True)

        parties = options.parties.split(",")
        outcome = measure(problem, labels, seed, parties=parties, device=options.device, report=report)
        print(json.dumps(start | outcome), flush=True)


if __name__ == "__main__":
    main()
