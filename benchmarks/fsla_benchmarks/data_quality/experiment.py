"""Which data to trust, measured: the product's choice and every way that it knows, on data made bad on purpose.

Every method has the same network, optimiser and steps. Methods are judged by the accuracy of the final model on test
samples (for regressions by its root mean squared error) and by the AUROC with which they rank wrong labels. Settings
were chosen on seeds 0 to 2; tables are of other seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsla._checks import pick, whole_number
from fsla.data._choice import Trial
from fsla.data._inputs import scaling
from fsla.data._material import Material, threads
from fsla.data._networks import maker, pace
from fsla.data._training import CrossFit, cross_fit
from fsla.data._ways import EVERYTHING, WITH_GROUPS, ways
from fsla_benchmarks.data_quality.report import CHOSEN, CLEANLAB, ORACLE, claims, markdown, summarise
from fsla_benchmarks.data_quality.tasks import KINDS, RIGHT, Mixed, make
from fsla_reproduction.datasets import load
from fsla_reproduction.folder import Folder, Record
from fsla_reproduction.images import hold, load_once
from fsla_reproduction.job import Job, ReportShare
from fsla_reproduction.report import Summary
from fsla_reproduction.runs import LOCAL, Report, Workers, unseen

FIRST_SEED = 6


@dataclass(frozen=True)
class Cell:
    """One kind of bad data: how bad, and how many samples are trusted."""

    kind: str
    rate: float
    trusted: int

    def __post_init__(self) -> None:
        pick(self.kind, KINDS, "kind of mixed data")

    @property
    def name(self) -> str:
        return f"{self.kind} {self.rate:g}, {self.trusted} trusted"


PAPER = (
    Cell("sources", 0.6, 100), Cell("sources", 0.6, 500), Cell("regression", 0.6, 100),
    *(Cell("uniform", share, 500) for share in (0.1, 0.2, 0.4, 0.8)), Cell("uniform", 0.8, 100),
    *(Cell("uniform", 0.4, trusted) for trusted in (50, 100, 5000)),
    Cell("pair", 0.4, 100), Cell("pair", 0.4, 500), Cell("tail", 0.4, 100), Cell("tail", 0.4, 500),
    Cell("imbalanced", 0.4, 100), Cell("imbalanced", 0.4, 500), Cell("instance", 0.4, 100), Cell("instance", 0.4, 500),
)  # fmt: skip
SMOKE = (Cell("sources", 0.6, 100), Cell("regression", 0.6, 100), Cell("uniform", 0.4, 100))


@dataclass(frozen=True)
class WeightsSpec:
    """The settings of an evaluation."""

    scale: str = "smoke"
    seeds: int = 1
    kinds: tuple[str, ...] = ()
    """Only cells of these; empty for all."""
    folds: int = 3

    def __post_init__(self) -> None:
        pick(self.scale, {"smoke": 0, "paper": 0}, "scale")
        whole_number(self.seeds, "seeds", "WeightsSpec")
        for kind in self.kinds:
            pick(kind, KINDS, "kind of mixed data")

    @property
    def cells(self) -> tuple[Cell, ...]:
        cells = PAPER if self.scale == "paper" else SMOKE
        return tuple(cell for cell in cells if not self.kinds or cell.kind in self.kinds)

    @property
    def dataset(self) -> str:
        return "fashion-mnist" if self.scale == "paper" else "digits"

    @property
    def count(self) -> int:
        return 5000 if self.scale == "paper" else 600

    @property
    def model(self) -> str:
        return "cnn" if self.scale == "paper" else "dense"


class Answer(NamedTuple):
    """What a method says of the test samples, and how good it finds the given labels."""

    test: Tensor
    quality: Tensor | None
    more: dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a run is done, and on which data: the folder of the data sets, and their fingerprints."""

    device: torch.device
    data_dir: Path | None
    prints: Mapping[str, str]


def run(
    spec: WeightsSpec, folder: Folder, place: Place, report: Report = unseen, workers: Workers = LOCAL
) -> list[Record]:
    """Does the cells that the folder lacks; returns the records of all."""
    jobs = [
        Job(
            f"{cell.kind}-{cell.rate:g}-{cell.trusted}-{seed}".replace(".", "_"),
            f"{cell.name}, seed {seed}",
            partial(_measured, spec, cell, seed, place),
            gpu=place.device.type != "cpu",
        )
        for cell in spec.cells
        for seed in range(FIRST_SEED, FIRST_SEED + spec.seeds)
    ]
    workers.do(folder, jobs, report)
    return folder.gather([job.name for job in jobs])


def _measured(spec: WeightsSpec, cell: Cell, seed: int, place: Place, report: ReportShare) -> list[Record]:
    images = {name: load_once(name, known, place.data_dir) for name, known in place.prints.items()}
    data = make(cell.kind, images[spec.dataset], seed, cell.rate, cell.trusted, spec.count, images.get("mnist"))
    material, test_x = _material(spec, data, seed, place.device)
    known = ways(material)
    records: list[Record] = []

    def judged(name: str, done: int, act: Callable[[], Answer]) -> None:
        report(done / (len(known) + 3))
        start = time.perf_counter()
        answer = act()
        seconds = time.perf_counter() - start
        head = {"cell": cell.name, "kind": cell.kind, "seed": seed, "method": name, "s_taken": seconds}
        records.append(head | _figures(answer, data) | answer.more)

    def one(trial: Trial, name: str) -> Answer:
        outcome = trial.final.go(name)
        quality = None
        if material.classes:
            p = outcome.fit.unseen
            belief, _ = trial.final.believed(p)
            quality = (trial.final.quality(p, belief) if name in WITH_GROUPS else material.chance_of_given(belief))[0]
        return Answer(outcome.fit.answers(0, test_x), quality, {})

    def together(trial: Trial) -> Answer:
        choice = trial.choice()
        weights = None if choice.group_weights is None else choice.group_weights.mean(0).tolist()
        shares = {candidate.name: round(candidate.share, 3) for candidate in choice.candidates if candidate.share}
        quality = None if choice.labels is None else choice.labels.quality
        return Answer(choice.model.answers(test_x), quality, {"weights": weights, "shares": shares})

    with threads(material):
        start = time.perf_counter()
        trial = Trial(material, folds=spec.folds)
        trying = time.perf_counter() - start
        for number, name in enumerate(known):
            judged(name, number, partial(one, trial, name))
        if material.classes and find_spec("cleanlab") is not None:
            judged(CLEANLAB, len(known), lambda: _cleanlab(trial, test_x))
        if data.groups is not None:
            judged(ORACLE, len(known) + 1, lambda: Answer(_oracle(material).answers(0, test_x), None, {}))
        judged(CHOSEN, len(known) + 2, partial(together, trial))
    taken = [candidate.name for candidate in trial.candidates if candidate.share]
    records[-1]["s_taken"] += trying + sum(r["s_taken"] for r in records if r["method"] in taken)
    return records


def _material(spec: WeightsSpec, data: Mixed, seed: int, device: torch.device) -> tuple[Material, Tensor]:
    """What the ways are tried on, and the test samples."""
    regression = data.y.is_floating_point()
    model = "dense" if data.x.ndim == 2 else spec.model
    shape = tuple(data.x.shape[1:])
    classes = 0 if regression else int(data.test_y.max()) + 1
    both = torch.cat([data.x, data.trusted_x]).numpy()
    scale = scaling(both)
    material = Material(
        scale(both, device),
        torch.cat([data.y, data.trusted_y]).to(device),
        len(data.y),
        classes,
        maker(model, shape, max(1, classes)),
        groups=None if data.groups is None else data.groups.to(device),
        group_count=0 if data.groups is None else int(data.groups.max()) + 1,
        seed=seed,
        pace=pace(model, shape),
        steps=None if spec.scale == "paper" else 150,
        small=True,
    )
    return material, scale(data.test_x.numpy(), device)


def _cleanlab(trial: Trial, test_x: Tensor) -> Answer:
    """Confident learning: labels that the networks trained on everything find unlikely are left out."""
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    material = trial.final.material
    p = trial.final.go(EVERYTHING).fit.unseen[0].double().cpu().numpy()
    y = material.given.cpu().numpy()
    quality = torch.from_numpy(get_label_quality_scores(y, p))
    kept = torch.from_numpy(~find_label_issues(y, p, n_jobs=1)).float()[None].to(material.device)
    fit = cross_fit(material, [material.trusted], weight=kept, repeats=2)
    return Answer(fit.answers(0, test_x), quality, {})


def _oracle(material: Material) -> CrossFit:
    assert material.groups is not None
    right = torch.isin(material.groups, torch.tensor(RIGHT, device=material.device)).float()[None]
    return cross_fit(material, [material.trusted], weight=right, repeats=2)


def _figures(answer: Answer, data: Mixed) -> dict[str, Any]:
    answers = answer.test.cpu()
    if answers.ndim == 1:
        return {"error": float((answers - data.test_y).square().mean().sqrt())}
    found: dict[str, Any] = {"accuracy": float((answers.argmax(1) == data.test_y).float().mean())}
    if answer.quality is not None and data.wrong.any():
        found["auroc"] = auroc(answer.quality.cpu(), data.wrong)
    return found


def auroc(quality: Tensor, wrong: Tensor) -> float:
    """The chance that a wrong label has a lower quality than a right one; ties count half."""
    low = quality[wrong].double().sort().values
    high = quality[~wrong].double()
    below = torch.searchsorted(low, high, right=False) + torch.searchsorted(low, high, right=True)
    return float(below.double().mean() / (2 * len(low)))


def _head(spec: WeightsSpec) -> str:
    return (
        f"{spec.dataset}, {spec.count} samples, network {spec.model!r}, seeds {FIRST_SEED} to "
        f"{FIRST_SEED + spec.seeds - 1}. Mean and spread of the test accuracy (or root mean squared error), of the "
        "AUROC of ranking wrong labels, and seconds.\n"
    )


def reproduce(
    out: Path,
    spec: WeightsSpec,
    *,
    data_dir: Path | None = None,
    device: torch.device | str = "cpu",
    report: Report = unseen,
    workers: Workers = LOCAL,
) -> tuple[list[Record], Summary]:
    """Does the cells that the folder lacks, and writes the summary; returns its rows too."""
    names = [
        spec.dataset,
        *(["mnist"] if spec.scale == "paper" and any(c.kind == "sources" for c in spec.cells) else []),
    ]
    prints = {name: hold(load(name, data_dir)) for name in names}
    folder = workers.open(out, "weights", replace(spec, kinds=()), prints)
    rows = summarise(run(spec, folder, Place(torch.device(device), data_dir, prints), report, workers))
    summary = Summary(claims(rows), {"rows": rows}, markdown(_head(spec), rows))
    folder.conclude(summary)
    return rows, summary
