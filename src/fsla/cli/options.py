"""Options and texts that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RESUMES = "the same command resumes."
EXIT_CODES = "Exit codes: 0 done, 1 a check failed, 2 bad input, 130 interrupted."
Out = Annotated[Path, typer.Option(help="Folder for records, summary and figures; an interrupted run resumes in it.")]
Seeds = Annotated[int, typer.Option(min=1, help="Number of random problems.")]
Scale = Annotated[str, typer.Option(help="'smoke': minutes on a laptop, offline. 'paper': the paper's size.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder with the data sets, as FOLDER/NAME/FILE. Default: FSLA_DATA.")
]
Device = Annotated[str, typer.Option(help="'auto', 'cpu' or 'cuda'.")]
Model = Annotated[
    str | None, typer.Option(help="'cnn', 'cnn-small', 'cnn4' or 'softmax', in the place of the scale's.")
]
Budget = Annotated[float | None, typer.Option(help="Wall-clock seconds after which a run is stopped.")]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Runs at a time; the records are the same. Default: 1; a cluster uses all its workers."),
]
Backend = Annotated[
    str, typer.Option(help="Who does the runs: 'loky' (processes of this machine), or a cluster: 'dask' or 'ray'.")
]
Address = Annotated[str | None, typer.Option(help="Of the cluster: tcp://HOST:8786 for dask, HOST:6379 for ray.")]
Engine = Annotated[str, typer.Option(help="'auto', 'eager', 'graph' (captured steps) or 'compile'.")]
