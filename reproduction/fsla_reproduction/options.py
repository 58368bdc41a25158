"""Options and texts that several experiments and benchmarks have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RESUMES = "the same command resumes."
Out = Annotated[
    Path,
    typer.Option("--out", "-o", help="Folder for records, summary and figures; an interrupted run resumes in it."),
]
Seeds = Annotated[int, typer.Option(min=1, help="Number of random problems.")]
Preset = Annotated[str, typer.Option(help="'smoke': minutes on a laptop, offline. 'paper': the paper's size.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder with the data sets, as FOLDER/NAME/FILE. Default: FSLA_DATA.")
]
Model = Annotated[
    str | None, typer.Option(help="'cnn', 'cnn-small', 'cnn4' or 'softmax', in the place of the preset's.")
]
TimeLimit = Annotated[float | None, typer.Option(help="Minutes after which a run is stopped.")]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Runs at a time; the records are the same. Default: 1.")
]
Engine = Annotated[str, typer.Option(help="'auto', 'eager' or 'graph' (captured steps).")]
