"""Runs, records and summary of the cleaning experiments, in one folder; what is finished there is not repeated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fsla.checks import pick
from fsla.data import load
from fsla.experiments.cleaning import RunSpec, execute
from fsla.experiments.cleaning_claims import all_claims
from fsla.experiments.cleaning_summary import markdown
from fsla.experiments.figures import FIGURES, CleaningSpec, panels
from fsla.experiments.folder import Folder, RunError, write_text
from fsla.experiments.results import Results
from fsla.training.engine import ENGINES

Report = Callable[[RunSpec, int, int, int], None]
"""Called with the run, its step, and how many runs are done of how many."""


def device_of(name: str) -> torch.device:
    """The device of a name; "auto" is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"{device.type} is neither")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise RunError(f"The device must be 'auto', 'cpu' or a working 'cuda'. Got {name!r} ({first}).") from None
    return device


def reproduce(
    out: Path,
    asked: CleaningSpec,
    figures: tuple[str, ...],
    seeds: int,
    *,
    data_dir: Path | None = None,
    device: torch.device | str = "cpu",
    engine: str = "auto",
    report: Report = lambda spec, step, done, total: None,
) -> tuple[Results, str]:
    """Does the runs that the folder lacks; returns the results and the text of summary.md.

    The records and the summary are of every figure whose runs the folder has by then, asked for now or before.
    """
    pick(engine, dict.fromkeys(ENGINES), "engine")
    every = panels(asked)
    wanted = every.runs(figures, seeds)
    names = dict.fromkeys(spec.task.dataset for spec in wanted)
    images = {name: load(name, data_dir) for name in names}  # what is missing is said before anything is written
    folder = Folder(out, "cleaning", asked)
    for done, spec in enumerate(wanted):
        report(spec, 0, done, len(wanted))
        if folder.finished(spec.name):
            continue
        part = folder.runs / f"{spec.name}.part.safetensors"

        def tell(record: dict[str, Any], spec: RunSpec = spec, done: int = done) -> None:
            report(spec, record["step"], done, len(wanted))

        data = images[spec.task.dataset]
        records = execute(spec, checkpoint=part, images=data, device=device, engine=engine, on_measure=tell)
        folder.save(spec.name, records)
        part.unlink(missing_ok=True)
    figures = tuple(f for f in FIGURES if all(folder.finished(spec.name) for spec in every.runs((f,), seeds)))
    gathered = folder.gather([spec.name for spec in every.runs(figures, seeds)])
    by_run: dict[str, list[dict[str, Any]]] = {}
    for record in gathered:
        by_run.setdefault(record["run"], []).append(record)
    results = Results(every, by_run, seeds)
    text = markdown(figures, results)
    summary = {
        "claims": [{"claim": c, "held": h, "figures": f} for c, h, f in all_claims(figures, results)],
        "runs": {name: records[-1] for name, records in by_run.items()},
    }
    write_text(out / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    write_text(out / "summary.md", text)
    return results, text
