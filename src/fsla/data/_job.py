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

from fsla._files import (
    ensure_folder,
    foreign,
    mend_folder,
    open_regular,
    publish_folder,
    some,
    temporary_folder,
    write_text,
)
from fsla._locks import locked
from fsla.data._decisions import DROPPED, suspect
from fsla.data._finding import Facts, Group, LeftOut, lines
from fsla.data._inputs import Array
from fsla.data._legacy import DataWeigher, HyperCleaner
from fsla.data._reading import Columns, Given, read
from fsla.data._report import render
from fsla.data._tables import dropped
from fsla.data._ways import BOTH, EVERYTHING, MENDED

if TYPE_CHECKING:
    import pandas as pd

SUMMARY = "summary.json"
FILES = frozenset({"weights.csv", "issues.csv", "cleaned.csv", "model.safetensors", "report.html", SUMMARY})
"""Every name that a run may write."""
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
    """Write the folder as a whole: it is there with all its files, or as it was. Return the finding."""
    text = finding(found, job)
    place = _place(out)
    with temporary_folder(place, FILES) as made:
        if hasattr(found, "weights_"):
            found.weights_.to_csv(made / "weights.csv", index=False)
        issues = _issues(found, job)
        if issues is not None:
            issues.to_csv(made / "issues.csv", index=False)
        _cleaned(found, job).to_csv(made / "cleaned.csv", index=False)
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
