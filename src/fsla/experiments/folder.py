"""The output folder of an experiment: what was asked for, one file of records for each finished run, and summaries.

spec.json        the experiment and its settings, seeds aside; a folder holds one experiment only
runs/NAME.jsonl  the records of a finished run: written whole or not at all, so an interrupted experiment resumes
records.jsonl    all of them together
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class RunError(Exception):
    """Something that the person at the command line can mend; its text is the whole message."""


def write_text(path: Path, text: str) -> None:
    """Writes to a temporary name and renames, so that a file is never half-written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class Folder:
    """The folder of one experiment. Opening one that holds another experiment is an error."""

    def __init__(self, path: Path, experiment: str, spec: Any) -> None:
        self.path, self.runs = path, path / "runs"
        wanted = json.loads(json.dumps({"experiment": experiment, **asdict(spec)}))
        wanted.pop("seeds", None)  # more seeds may be added later
        try:
            self.runs.mkdir(parents=True, exist_ok=True)
            if not (path / "spec.json").exists():
                write_text(path / "spec.json", json.dumps(wanted, indent=2) + "\n")
        except OSError as error:
            raise RunError(
                f"The output folder must be writable. {path} is not: {error.strerror}. Choose another --out."
            ) from None
        held = self._held(path / "spec.json")
        if held != wanted:
            differ = sorted(k for k in held.keys() | wanted.keys() if held.get(k) != wanted.get(k))
            raise RunError(
                f"The output folder must be new or of the same run. {path} holds a run with other settings "
                f"({', '.join(f'{k}: {held.get(k)} there, {wanted.get(k)} now' for k in differ)}). "
                "Choose another --out, or remove that folder."
            )

    @staticmethod
    def _held(path: Path) -> dict[str, Any]:
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            held = None
        if not isinstance(held, dict):
            raise RunError(f"{path} must be the settings of a run, as JSON. It cannot be read. Choose another --out.")
        return held

    def finished(self, name: str) -> bool:
        return (self.runs / f"{name}.jsonl").exists()

    def save(self, name: str, records: Iterable[Record]) -> None:
        write_text(self.runs / f"{name}.jsonl", "".join(json.dumps(r) + "\n" for r in records))

    def gather(self, names: Sequence[str]) -> list[Record]:
        """Returns the records of these runs, and writes them together as records.jsonl."""
        lines: list[str] = []
        for name in names:
            lines += (self.runs / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        write_text(self.path / "records.jsonl", "\n".join(lines) + "\n")
        return [json.loads(line) for line in lines]
