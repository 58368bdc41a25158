"""The output folder of an experiment: what was asked for, one file of records for each finished run, and summaries.

spec.json        the experiment, its settings, seeds aside, and the fingerprints of its data; a folder holds one
                 experiment only, on one version of each data set
runs/NAME.jsonl  the records of a finished run, and a last line with their checksum: a file without it, or with another,
                 counts as missing, so that an interrupted experiment resumes and a damaged run is done again
records.jsonl    all of them together
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsla._storage._files import is_temporary, publish_file, remove_orphans

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from fsla_reproduction.report import Summary

Record = dict[str, Any]
Settings = dict[str, Any]

_SETTINGS = "spec.json"


class RunError(ValueError):
    """Something that the person at the command line can mend; its text is the whole message."""


def settings_for(
    path: Path, experiment: str, spec: DataclassInstance, data: Mapping[str, str] | None = None
) -> Settings:
    """Return the settings that the folder is to hold; raises unless it may be used for them. Writes nothing.

    `data` has the fingerprint of each data set that will be used, and is None for an experiment that uses none. Seeds
    and further data sets may be added to a folder later.
    """
    expected: Settings = json.loads(json.dumps({"experiment": experiment, **asdict(spec)}))
    expected.pop("seeds", None)
    stored = _stored_settings(path)
    if stored is None:
        return expected if data is None else expected | {"data": dict(data)}
    known = stored.pop("data", None)
    differ = sorted(k for k in stored.keys() | expected.keys() if stored.get(k) != expected.get(k))
    if differ:
        raise RunError(
            f"The output folder must be new or of the same run. {path} holds a run with other settings "
            f"({', '.join(f'{k}: {stored.get(k)} there, {expected.get(k)} now' for k in differ)}). "
            "Choose another --out, or remove that folder."
        )
    if data is None:
        return expected
    if not isinstance(known, dict):
        raise RunError(
            f"The output folder must say which data its runs used. {path / _SETTINGS} does not, so that it may have "
            "been other data than now. Choose another --out, or remove that folder."
        )
    other = [name for name, fingerprint in data.items() if known.get(name, fingerprint) != fingerprint]
    if other:
        raise RunError(
            f"The output folder must be used with the data that its runs used. {path} holds runs on other images or "
            f"labels of {', '.join(other)} than were read now. Choose another --out, or give the same data with "
            "--data-dir or FSLA_DATA."
        )
    return expected | {"data": known | dict(data)}


def check_parent(path: Path, parts: Sequence[str]) -> None:
    """Raise if a folder for several experiments, one in each part, is someone else's. Writes nothing."""
    try:
        others = [p.name for p in path.iterdir() if p.name not in parts] if path.exists() else []
    except OSError as error:
        raise _unwritable(path, error) from None
    if others and not any((path / part / _SETTINGS).exists() for part in parts):
        raise _foreign(path, others)


def _stored_settings(path: Path) -> Settings | None:
    """The settings in a folder; None if it is new or empty. A folder of someone else's files is an error."""
    file = path / _SETTINGS
    try:
        others = [p.name for p in path.iterdir() if not is_temporary(p)] if path.exists() else []
        content = file.read_bytes() if _SETTINGS in others else None
    except OSError as error:
        raise _unwritable(path, error) from None
    if content is None and others:
        raise _foreign(path, others)
    if content is None:
        return None
    try:
        stored = json.loads(content)
    except ValueError:
        stored = None
    if not isinstance(stored, dict) or "experiment" not in stored:
        raise RunError(f"{file} must be the settings of a run, as JSON. It is something else. Choose another --out.")
    return stored


def _unwritable(path: Path, error: OSError) -> RunError:
    return RunError(f"The output folder must be writable. {path} is not: {error.strerror}. Choose another --out.")


def _foreign(path: Path, others: Sequence[str]) -> RunError:
    return RunError(
        f"The output folder must be new, empty or of an earlier run. {path} holds other files ({min(others)} for one), "
        "and some might be overwritten. Choose another --out."
    )


class Folder:
    """The folder of one experiment. Opening one that holds another experiment, or other files, is an error.

    Where several processes do the runs, each saves its own, and only the `first` writes what is of all.
    """

    def __init__(
        self,
        path: Path,
        experiment: str,
        spec: DataclassInstance,
        data: Mapping[str, str] | None = None,
        *,
        first: bool = True,
    ) -> None:
        self.path = path
        self.runs = path / "runs"
        self.first = first
        settings = json.dumps(settings_for(path, experiment, spec, data), indent=2) + "\n"
        if not first:
            return
        file = path / _SETTINGS
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not file.exists() or file.read_text(encoding="utf-8") != settings:
                publish_file(file, settings.encode())
            self.runs.mkdir(exist_ok=True)
        except OSError as error:
            raise _unwritable(path, error) from None

    def tidy(self) -> None:
        """Remove what killed processes left half-written."""
        remove_orphans(self.path)
        remove_orphans(self.runs)

    def finished(self, name: str) -> bool:
        """Whether the file of a run is there and whole."""
        return self._lines(name) is not None

    def save(self, name: str, records: Iterable[Record]) -> None:
        """Write the records of a finished run; what was in their place is replaced."""
        lines = "".join(json.dumps(r) + "\n" for r in records).encode()
        publish_file(self._file(name), lines + _seal(lines))

    def gather(self, names: Sequence[str]) -> list[Record]:
        """Return the records of these runs, and write them together as records.jsonl."""
        gathered = b""
        for name in names:
            lines = self._lines(name)
            if lines is None:
                raise RunError(
                    f"{self._file(name)} must hold all records of a run. It is missing or damaged. Remove it, and the "
                    "same command does that run again."
                )
            gathered += lines
        if self.first:
            self.tidy()
            publish_file(self.path / "records.jsonl", gathered)
        return [json.loads(line) for line in gathered.splitlines()]

    def conclude(self, summary: Summary) -> None:
        """Write the summary of all runs."""
        if self.first:
            summary.save(self.path)

    def _file(self, name: str) -> Path:
        return self.runs / f"{name}.jsonl"

    def _lines(self, name: str) -> bytes | None:
        """The records of a run as its file has them; None if it is missing or not whole."""
        try:
            content = self._file(name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RunError(
                f"{self._file(name)} must be a readable file. It is not: {error.strerror}. Remove it, and the same "
                "command does that run again."
            ) from None
        lines = content[: content.rfind(b"\n", 0, -1) + 1]
        return lines if content == lines + _seal(lines) else None


def _seal(lines: bytes) -> bytes:
    """The last line of a run's file, which proves that the lines before it are whole."""
    return json.dumps({"checksum": hashlib.blake2b(lines, digest_size=16).hexdigest()}).encode() + b"\n"
