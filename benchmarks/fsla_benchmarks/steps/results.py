"""Measurements as JSON files, and the tables of a page from them.

A file has the rows and what they were measured on: commit, machine, versions and date. In a page a comment names the
file, `<!-- table training-h200.json -->`, and the table follows, up to `<!-- end -->`.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fsla import __version__
from fsla._storage._files import write_text

FOLDER = Path(__file__).parents[2] / "results"
_TABLE = re.compile(r"(<!-- table ([\w.-]+\.json) -->\n).*?(<!-- end -->)", re.DOTALL)


def describe_run(device: torch.device, commit: str | None = None) -> dict[str, object]:
    """Return what a measurement depends on beside the code that it names."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "commit": commit or _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": gpu or f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "device": str(device),
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fsla": __version__,
    }


def _commit() -> str:
    """Return the commit of the checkout that this file lies in, and whether files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return f"{commit} with changes" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def save(path: Path, rows: Sequence[Any], run: Mapping[str, object], notes: Sequence[str]) -> None:
    """Write rows, what they were measured on, and why other rows are missing."""
    plain = [asdict(row) if is_dataclass(row) and not isinstance(row, type) else row for row in rows]
    write_text(path, json.dumps({**run, "notes": list(notes), "rows": plain}, indent=1) + "\n")


def fill_tables(page: str, write: Callable[[Mapping[str, Any]], list[str]], folder: Path = FOLDER) -> str:
    """Return a page with each of its tables from the file that it names.

    Args:
        page: Markdown with comments that name files.
        write: returns the lines of a table from the content of a file.
        folder: where the files are.
    """

    def table(match: re.Match[str]) -> str:
        result = json.loads((folder / match[2]).read_text(encoding="utf-8"))
        origin = f"{result['machine']}, torch {result['torch']}, {result['date']}, commit {result['commit']}."
        return "\n".join([match[1].rstrip(), "", *write(result), "", origin, "", match[3]])

    return _TABLE.sub(table, page)
