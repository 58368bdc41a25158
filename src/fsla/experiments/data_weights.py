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
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsla.checks import pick, whole_number
from fsla.cleaning.choice import Trial
from fsla.cleaning.inputs import scaling
from fsla.cleaning.material import BILEVEL_STEPS, Material, threads
from fsla.cleaning.networks import maker, rate
from fsla.cleaning.training import CrossFit, cross_fit
from fsla.cleaning.ways import ways
from fsla.data import Images, fingerprint, load
from fsla.experiments.folder import Folder, Record
from fsla.experiments.report import Claim, Summary, table
from fsla.experiments.weights_tasks import KINDS, RIGHT, Mixed, make

CHOSEN = "fsla"
ORACLE = "right sources alone (known)"
FIRST_SEED = 3
Report = Callable[[str, int, int], None]


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


def run(
    spec: WeightsSpec, folder: Folder, images: Mapping[str, Images], device: torch.device, report: Report
) -> list[Record]:
    """Does the cells that the folder lacks; `report(name, done, total)` is called before each method."""
    names = []
    for cell in spec.cells:
        for seed in range(FIRST_SEED, FIRST_SEED + spec.seeds):
            names.append(f"{cell.kind}-{cell.rate:g}-{cell.trusted}-{seed}".replace(".", "_"))
            if not folder.finished(names[-1]):
                folder.save(names[-1], _measured(spec, cell, seed, images, device, report))
    return folder.gather(names)


def _measured(
    spec: WeightsSpec, cell: Cell, seed: int, images: Mapping[str, Images], device: torch.device, report: Report
) -> list[Record]:
    data = make(cell.kind, images[spec.dataset], seed, cell.rate, cell.trusted, spec.count, images.get("mnist"))
    material, test_x = _material(spec, data, seed, device)
    known = ways(material)
    records: list[Record] = []

    def judged(name: str, done: int, act: Callable[[], Answer]) -> None:
        report(f"{cell.name}, seed {seed}", done, len(known) + 2)
        start = time.perf_counter()
        answer = act()
        seconds = time.perf_counter() - start
        head = {"cell": cell.name, "kind": cell.kind, "seed": seed, "method": name, "s_taken": seconds}
        records.append(head | _figures(answer, data) | answer.more)

    def one(trial: Trial, name: str) -> Answer:
        outcome = trial.final.go(name)
        quality = trial.final.quality(trial.final.believed(outcome.fit.unseen)[0])[0] if material.classes else None
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
        if data.groups is not None:
            judged(ORACLE, len(known), lambda: Answer(_oracle(material).answers(0, test_x), None, {}))
        judged(CHOSEN, len(known) + 1, partial(together, trial))
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
        rate=rate(model, shape),
        steps=None if spec.scale == "paper" else 150,
        bilevel_steps=BILEVEL_STEPS if spec.scale == "paper" else BILEVEL_STEPS // 2,
        small=True,
    )
    return material, scale(data.test_x.numpy(), device)


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


# --------------------------------------------------------------------------------------------------------- summary


def summarise(records: list[Record]) -> list[Record]:
    """For each cell and method the mean and the spread over the seeds."""
    rows: list[Record] = []
    for cell, method in dict.fromkeys((r["cell"], r["method"]) for r in records):
        own = [r for r in records if r["cell"] == cell and r["method"] == method]
        row: Record = {"cell": cell, "kind": own[0]["kind"], "method": method, "seeds": len(own)}
        for name in ("accuracy", "error", "auroc", "s_taken"):
            values = [r[name] for r in own if r.get(name) is not None]
            if values:
                row[name] = fmean(values)
                row[f"{name}_spread"] = stdev(values) if len(values) > 1 else 0.0
        weights = [r["weights"] for r in own if r.get("weights")]
        if weights:
            row["weights"] = [fmean(column) for column in zip(*weights, strict=True)]
        if method == CHOSEN:
            row["shares"] = _mean_shares(own)
        rows.append(row)
    return rows


def _mean_shares(records: list[Record]) -> dict[str, float]:
    names = dict.fromkeys(name for record in records for name in record["shares"])
    return {name: fmean(record["shares"].get(name, 0.0) for record in records) for name in names}


def claims(rows: list[Record]) -> tuple[Claim, ...]:
    """The targets, held or not."""
    found = []
    for cell in dict.fromkeys(r["cell"] for r in rows):
        own = {r["method"]: r for r in rows if r["cell"] == cell}
        chosen = own[CHOSEN]
        others = [r for name, r in own.items() if name not in (CHOSEN, ORACLE)]
        if "error" in chosen:
            bound = 1.1 * own[ORACLE]["error"]
            text = f"{cell}: within 10 % of training on the right sources alone"
            found.append(Claim(text, chosen["error"] <= bound, f"{chosen['error']:.3f}, at most {bound:.3f}"))
            continue
        best = max(others, key=lambda r: r["accuracy"])
        spread = max(best["accuracy_spread"], chosen["accuracy_spread"], 0.005)
        figures = f"{chosen['accuracy']:.3f}; {best['method']} {best['accuracy']:.3f} ± {best['accuracy_spread']:.3f}"
        held = chosen["accuracy"] >= best["accuracy"] - spread
        found.append(Claim(f"{cell}: as accurate as the best way", held, figures))
        if chosen.get("weights") and chosen["kind"] == "sources":
            right = min(chosen["weights"][g] for g in RIGHT)
            wrong = max(w for g, w in enumerate(chosen["weights"]) if g not in RIGHT)
            text = f"{cell}: right sources weigh more than .8, wrong ones less than .2"
            found.append(Claim(text, right > 0.8 and wrong < 0.2, f"at least {right:.2f}, at most {wrong:.2f}"))
    return tuple(found)


def markdown(spec: WeightsSpec, rows: list[Record]) -> str:
    """summary.md: a table for each cell, the best in bold."""
    parts = [
        "# Which data to trust, measured\n",
        f"{spec.dataset}, {spec.count} samples, network {spec.model!r}, seeds {FIRST_SEED} to "
        f"{FIRST_SEED + spec.seeds - 1}. Mean and spread of the test accuracy (or root mean squared error), of the "
        "AUROC of ranking wrong labels, and seconds.\n",
    ]
    for cell in dict.fromkeys(r["cell"] for r in rows):
        own = [r for r in rows if r["cell"] == cell]
        key = "error" if "error" in own[0] else "accuracy"
        ranked = [r[key] for r in own if r["method"] != ORACLE]
        best = min(ranked) if key == "error" else max(ranked)
        lines = [
            (
                f"**{r['method']}**" if r[key] == best else r["method"],
                f"{r[key]:.3f} ± {r[f'{key}_spread']:.3f}",
                f"{r['auroc']:.3f} ± {r['auroc_spread']:.3f}" if "auroc" in r else "",
                f"{r['s_taken']:.0f}",
                ", ".join(f"{name} {share:.2f}" for name, share in r.get("shares", {}).items()),
            )
            for r in own
        ]
        parts += [f"## {cell}\n", table(["method", key, "AUROC", "seconds", "shares"], lines)]
    parts += [f"- {c.text}: {'yes' if c.held else '**no**'} ({c.figures})" for c in claims(rows)]
    return "\n".join([*parts, ""])


def reproduce(
    out: Path,
    spec: WeightsSpec,
    *,
    data_dir: Path | None = None,
    device: torch.device | str = "cpu",
    report: Report = lambda name, done, total: None,
) -> Summary:
    """Does the cells that the folder lacks, and writes the summary."""
    names = [
        spec.dataset,
        *(["mnist"] if spec.scale == "paper" and any(c.kind == "sources" for c in spec.cells) else []),
    ]
    images = {name: load(name, data_dir) for name in names}
    prints = {name: fingerprint(data) for name, data in images.items()}
    folder = Folder(out, "weights", replace(spec, kinds=()), prints)
    rows = summarise(run(spec, folder, images, torch.device(device), report))
    summary = Summary(claims(rows), {"rows": rows}, markdown(spec, rows))
    summary.save(out)
    return summary
