"""What `fsla clean` and `fsla weigh` do: data in, a folder with tables, the model and the report out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fsla.cleaning.estimators import DataWeigher, HyperCleaner
from fsla.cleaning.inputs import Array
from fsla.cleaning.reading import Columns, Given, read
from fsla.cleaning.report import render
from fsla.cleaning.tables import NOT_COMPARED, dropped
from fsla.cleaning.ways import EVERYTHING
from fsla.files import (
    ensure_folder,
    foreign,
    mend_folder,
    open_regular,
    publish_folder,
    some,
    temporary_folder,
    write_text,
)
from fsla.locks import locked

if TYPE_CHECKING:
    import pandas as pd

SUMMARY = "summary.json"
FILES = frozenset({"weights.csv", "issues.csv", "cleaned.csv", "model.safetensors", "report.html", SUMMARY})
"""Every name that a run may write."""
MAKER = "fsla"
VERBS = {"keep": "use", "drop": "leave out", "unsure": "look at", NOT_COMPARED: "not compared:"}


@dataclass(frozen=True)
class Job:
    """Samples of mixed quality, trusted samples, and where they came from."""

    mixed: Given
    trusted: Given
    origin: str
    label: str = "label"


def load(data: Path, trusted: Path | None, columns: Columns) -> Job:
    """Reads both sets; the trusted samples come from a file of their own, or are marked in a column."""
    given = read(data, columns)
    if trusted is not None:
        clean = read(trusted, columns, given)
    elif given.trusted is not None:
        clean = given.rows(given.trusted)
        given = given.rows(~given.trusted)
    else:
        raise ValueError(
            "Some samples must be trusted. Give them with --trusted FILE, or name a column of true and false with "
            "--trusted-column."
        )
    for name, part in (("The trusted set", clean), ("The data besides the trusted set", given)):
        if not len(part):
            raise ValueError(f"{name} must have at least one sample. It is empty.")
    if clean.x.shape[1:] != given.x.shape[1:]:
        raise ValueError(
            f"Trusted samples must have the form of the others. Got {clean.x.shape[1:]} and {given.x.shape[1:]}."
        )
    origin = f"{data}: {len(given)} samples; {trusted or columns.trusted}: {len(clean)} trusted ones."
    return Job(given, clean, origin, columns.label)


def overlap(job: Job) -> int:
    """How many samples of mixed quality are, number for number, among the trusted ones."""
    known = {row.tobytes() for row in job.trusted.x}
    return sum(row.tobytes() in known for row in job.mixed.x)


@contextmanager
def claim_out(out: Path) -> Iterator[None]:
    """Keep other processes from writing --out inside the block.

    Raises:
        ValueError: if `out` is no folder, holds a file that no earlier run wrote, or another process has it.
        OSError: if no folder can be made there.
    """
    place = _place(out)
    if os.path.lexists(place) and not place.is_dir():
        raise ValueError(f"--out must be a folder. {out} is a file.")
    ensure_folder(place.parent)
    with locked(place.with_name(f".{place.name}.lock"), out):
        mend_folder(place, FILES)
        others = foreign(place, _listed(place)) if place.is_dir() else []
        if others:
            raise ValueError(
                f"Cannot use --out {out}: no summary.json of fsla lists {some(others)}. Move what you want to keep "
                "elsewhere, or choose another --out."
            )
        yield


def finding(found: Any, job: Job) -> str:
    """What was found, in a sentence or two."""
    parts = []
    if hasattr(found, "weights_") and len(found.weights_) > 1:
        table = found.weights_
        for verdict, verb in VERBS.items():
            names = [str(name) for name in table[table["verdict"] == verdict]["group"]]
            if names:
                shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
                parts.append(f"{verb} {shown}")
        text = "; ".join(parts)
        parts = [text[:1].upper() + text[1:] + "."]
        if not found._weighing_helps:
            parts.append(
                "Weighing groups does no better on the trusted samples than doing nothing, so none is dropped."
            )
    if found._skipped:
        parts.append(f"Time was up before these ways were tried: {', '.join(found._skipped)}.")
    if hasattr(found, "noise_rate_"):
        flagged = int((found.suggested_ != found.classes_[found._given]).sum())
        low, high = found.noise_rate_interval_
        parts.append(
            f"About {100 * found.noise_rate_:.0f} % of {len(job.mixed)} labels look wrong ({100 * low:.0f} to "
            f"{100 * high:.0f} %); {flagged} are flagged."
        )
    candidates = found.candidates_.set_index("way")
    if EVERYTHING in candidates.index and candidates.loc[EVERYTHING, "share"] < 1:
        taken = candidates["error"].iloc[0]
        nothing = candidates.loc[EVERYTHING, "error"]
        if hasattr(found, "classes_"):
            errors = f"is wrong on {100 * taken:.0f} %, and doing nothing on {100 * nothing:.0f} %"
        else:
            errors = f"misses by {taken:.3g} (root mean square), and doing nothing by {nothing:.3g}"
        parts.append(f"Of trusted samples that it was not shown, the model {errors}.")
    elif EVERYTHING in candidates.index:
        parts.append("No way of weighing or mending does better on the trusted samples than using everything as it is.")
    if getattr(found, "task_", "") == "regression":
        parts.append("The targets were taken for numbers.")
    return " ".join(parts)


def write(out: Path, found: DataWeigher | HyperCleaner, job: Job, title: str, more: Mapping[str, object]) -> str:
    """Write the folder as a whole: it is there with all its files, or as it was. Return the finding."""
    text = finding(found, job)
    place = _place(out)
    with temporary_folder(place, FILES) as made:
        if hasattr(found, "weights_"):
            found.weights_.to_csv(made / "weights.csv", index=False)
        issues = _issues(found, job)
        if issues is not None:
            issues.to_csv(made / "issues.csv", index=False)
        cleaned = _cleaned(found, job)
        cleaned.to_csv(made / "cleaned.csv", index=False)
        text += f" cleaned.csv has {len(cleaned)} of {len(job.mixed)} rows{_changed(found, job, cleaned)}."
        found.save(made / "model.safetensors")
        page = render(found, job.mixed, len(job.trusted), title, job.origin, text)
        write_text(made / "report.html", page)
        files = sorted([*(path.name for path in made.iterdir()), SUMMARY])
        summary = _summary(found, job, text, {**more, "files": files})
        write_text(made / SUMMARY, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
        publish_folder(made, place, _listed)
    return text


def _issues(found: Any, job: Job) -> pd.DataFrame | None:
    if not isinstance(found, HyperCleaner):
        return None
    table = found.find_label_issues()
    rows = table["index"].to_numpy()
    table.insert(0, "id", job.mixed.ids[rows])
    if job.mixed.groups is not None:
        table["group"] = job.mixed.groups[rows]
    return table.drop(columns="index")


def _cleaned(found: Any, job: Job) -> pd.DataFrame:
    """The samples that are kept, with suggested labels in the place of wrong ones, and a weight each."""
    import pandas as pd

    mixed = job.mixed
    table = pd.DataFrame({"id": mixed.ids, job.label: mixed.y}) if mixed.table is None else mixed.table.copy()
    weight = found.sample_weight_
    if isinstance(found, HyperCleaner):
        table[f"given_{job.label}"] = table[job.label]
        table[job.label] = found.suggested_
        mended = found.suggested_ != found.classes_[found._given]
        weight = np.where(mended, found.suggested_probability_, weight)
    table["weight"] = weight
    return table[_kept(found, mixed)]


def _changed(found: Any, job: Job, cleaned: pd.DataFrame) -> str:
    if not isinstance(found, HyperCleaner):
        return ""
    count = int((cleaned[job.label].astype(str) != cleaned[f"given_{job.label}"].astype(str)).sum())
    return f", {count} of them with another label"


def _kept(found: Any, mixed: Given) -> Array:
    if mixed.groups is None or not hasattr(found, "weights_"):
        return np.ones(len(mixed), dtype=bool)
    return ~dropped(found.weights_, mixed.groups)


def _summary(found: Any, job: Job, text: str, more: Mapping[str, object]) -> dict[str, object]:
    summary: dict[str, object] = {
        "made_by": MAKER,
        "finding": text,
        "origin": job.origin,
        "samples": len(job.mixed),
        "trusted": len(job.trusted),
        "features": job.mixed.names,
        "task": getattr(found, "task_", "classification"),
        "skipped": list(found._skipped),
        "candidates": json.loads(found.candidates_.to_json(orient="records")),
    }
    if hasattr(found, "weights_"):
        summary["weights"] = json.loads(found.weights_.to_json(orient="records"))
    if isinstance(found, HyperCleaner):
        summary["noise_rate"] = found.noise_rate_
        summary["noise_rate_interval"] = list(found.noise_rate_interval_)
        summary["classes"] = [str(name) for name in found.classes_]
        summary["transition"] = found.transition_.round(4).tolist()
    return summary | dict(more)


def _place(out: Path) -> Path:
    """Where --out is: a link that the user names is followed."""
    return Path(os.path.realpath(out))


def _listed(folder: Path) -> frozenset[str]:
    """The files that a run wrote into a folder, by its summary; none where no run did."""
    try:
        with open(open_regular(folder / SUMMARY, os.O_RDONLY), encoding="utf-8") as file:
            summary = json.load(file)
        return FILES.intersection(summary["files"]) if summary["made_by"] == MAKER else frozenset()
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return frozenset()
