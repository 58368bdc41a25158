"""The command `fsla`: parses and calls. `python -m fsla` is the same program."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fsla import __version__
from fsla.experiments.folder import Folder, RunError, write_text

app = typer.Typer(
    name="fsla", no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
reproduce = typer.Typer(
    no_args_is_help=True, help="Reproduce an experiment of the paper: records, summary and figures."
)
app.add_typer(reproduce, name="reproduce")
console = Console()


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"fsla {__version__}", highlight=False)
        raise typer.Exit


@app.callback(
    help="Bilevel optimisation with a fully single loop: no inner solve, no Hessian inverse, one product a step."
)
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@reproduce.command()
def synthetic(
    out: Annotated[
        Path, typer.Option(help="Folder for records, summary and figures; an interrupted run resumes in it.")
    ],
    seeds: Annotated[int, typer.Option(min=1, help="Number of random problems.")] = 20,
) -> None:
    """Section 6.1, Figure 1: the error of FSLA, NS, BP and CG on the quadratic, against K, products and time."""
    from fsla.experiments import synthetic as experiment
    from fsla.experiments.synthetic_summary import markdown, summarise
    from fsla.plots.synthetic import draw

    spec = experiment.SyntheticSpec(seeds=seeds)
    folder = Folder(out, "synthetic", spec)
    with Progress(
        TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        task = progress.add_task("synthetic", total=None)
        records = experiment.run(
            spec, folder, lambda name, done, total: progress.update(task, description=name, completed=done, total=total)
        )
    summary = summarise(spec, records)
    write_text(out / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    text = markdown(spec, summary)
    write_text(out / "summary.md", text)
    figures = draw(out, records)
    console.print(Markdown(text.split("## Hessian-vector products")[0]))
    console.print("\nFigures (PNG, and SVG beside each):", highlight=False)
    for path in [*figures, out / "summary.md", out / "summary.json", out / "records.jsonl"]:
        console.print(f"  {path}", highlight=False, soft_wrap=True)


def main() -> None:
    """Runs the command. What the user can mend gets one message and the exit code 2, without a traceback."""
    try:
        app()
    except (RunError, ValueError) as error:
        print(f"fsla: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("fsla: interrupted; the same command resumes.", file=sys.stderr)
        sys.exit(130)
