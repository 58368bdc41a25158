"""What `fsla clean` and `fsla weigh` do: data in, a folder with tables, the model and the report out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fsla.cleaning.decisions import DROPPED, suspect
from fsla.cleaning.estimators import DataWeigher, HyperCleaner
from fsla.cleaning.finding import Facts, Group, LeftOut, lines
from fsla.cleaning.inputs import Array
from fsla.cleaning.reading import Columns, Given, read
from fsla.cleaning.report import render
from fsla.cleaning.tables import dropped
from fsla.cleaning.ways import BOTH, EVERYTHING, MENDED
from fsla.files import ensure_writable, write_text

if TYPE_CHECKING:
    import pandas as pd

SUMMARY = "summary.json"
MAKER = "fsla"


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


def check_out(out: Path) -> None:
    """Raises unless the folder can be written, and is new, empty or of an earlier run."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out must be a folder. {out} is a file.")
    if out.is_dir() and any(out.iterdir()) and not _ours(out):
        raise ValueError(f"--out must be a new or empty folder, or one of an earlier run. {out} has other files in it.")
    ensure_writable(out.with_name(f".{out.name}.tmp") / SUMMARY)
    _remove(out.with_name(f".{out.name}.tmp"))


def finding(found: Any, job: Job) -> list[str]:
    """What was found, one fact a line, decisions first."""
    return lines(_facts(found, job))


def _facts(found: Any, job: Job) -> Facts:
    candidates = found.candidates_.set_index("way")
    corrects = isinstance(found, HyperCleaner)
    flagged = found.suggested_ != found.classes_[found._given] if corrects else np.zeros(len(job.mixed), dtype=bool)
    kept = _kept(found, job.mixed)
    groups = _groups(found)
    names = [] if not groups else [str(name) for name in found._groups.names]
    weighed = any(group.decision == DROPPED for group in groups) and BOTH in found._changes
    return Facts(
        rows=len(job.mixed),
        cleaned=int(kept.sum()),
        groups=groups,
        left_out=tuple(LeftOut(tuple(names[g] for g in r.groups), r.change, r.reason) for r in found._removals),
        flagged=int(flagged.sum()) if corrects else None,
        relabelled=int((flagged & kept).sum()),
        noise=found.noise_rate_interval_ if corrects else (0.0, 1.0),
        corrected=found._changes.get(BOTH if weighed else MENDED),
        corrected_and_weighed=weighed,
        model=found._changes.get("together"),
        model_is_everything=EVERYTHING in candidates.index and bool(candidates.loc[EVERYTHING, "share"] == 1),
        skipped=tuple(found._skipped),
        regression=getattr(found, "task_", "") == "regression",
    )


def _groups(found: Any) -> tuple[Group, ...]:
    if not hasattr(found, "weights_"):
        return ()
    made = []
    for row in found.weights_.to_dict("records"):
        flagged = round(row["wrong_labels"] * row["samples"]) if "wrong_labels" in row else None
        clearly = flagged is not None and suspect(flagged, row["samples"])
        facts = (row["weight"], row["low"], row["high"], flagged, clearly)
        made.append(Group(str(row["group"]), row["samples"], row["decision"], *facts))
    return tuple(made)


def write(out: Path, found: DataWeigher | HyperCleaner, job: Job, title: str, more: Mapping[str, object]) -> list[str]:
    """Writes the folder as a whole: it is there with all its files, or as it was. Returns the finding."""
    text = finding(found, job)
    made = out.with_name(f".{out.name}.tmp")
    _remove(made)
    made.mkdir(parents=True)
    try:
        if hasattr(found, "weights_"):
            found.weights_.to_csv(made / "weights.csv", index=False)
        issues = _issues(found, job)
        if issues is not None:
            issues.to_csv(made / "issues.csv", index=False)
        _cleaned(found, job).to_csv(made / "cleaned.csv", index=False)
        found.save(made / "model.safetensors")
        page = render(found, job.mixed, len(job.trusted), title, job.origin, text)
        write_text(made / "report.html", page)
        write_text(made / SUMMARY, json.dumps(_summary(found, job, text, more), indent=1, ensure_ascii=False) + "\n")
        if out.exists():
            old = out.with_name(f".{out.name}.old")
            _remove(old)
            os.replace(out, old)
            os.replace(made, out)
            _remove(old)
        else:
            os.replace(made, out)
    finally:
        _remove(made)
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


def _kept(found: Any, mixed: Given) -> Array:
    if mixed.groups is None or not hasattr(found, "weights_"):
        return np.ones(len(mixed), dtype=bool)
    return ~dropped(found.weights_, mixed.groups)


def _summary(found: Any, job: Job, text: list[str], more: Mapping[str, object]) -> dict[str, object]:
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


def _ours(out: Path) -> bool:
    try:
        return bool(json.loads((out / SUMMARY).read_text(encoding="utf-8")).get("made_by") == MAKER)
    except (OSError, ValueError, AttributeError):
        return False


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
