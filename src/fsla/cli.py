"""The command `fsla`: parses and calls. `python -m fsla` is the same program."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fsla import __version__
from fsla.experiments.folder import Folder, RunError, write_text

app = typer.Typer(
    name="fsla", no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
reproduce = typer.Typer(no_args_is_help=True, help="Reproduce an experiment of the paper: records, summary, figures.")
data = typer.Typer(no_args_is_help=True, help="The data sets: what there is, downloads, checks.")
app.add_typer(reproduce, name="reproduce")
app.add_typer(data, name="data")
console = Console()

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
Engine = Annotated[str, typer.Option(help="'auto', 'eager', 'graph' (captured steps) or 'compile'.")]


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"fsla {__version__}", highlight=False)
        raise typer.Exit


@app.callback(help="Bilevel optimisation with a fully single loop: no inner solve, no Hessian inverse.")
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@reproduce.command()
def synthetic(out: Out, seeds: Seeds = 20) -> None:
    """Section 6.1, Figure 1: the error of FSLA, NS, BP and CG on the quadratic, against K, products and time."""
    from fsla.experiments import synthetic as experiment
    from fsla.experiments.synthetic_summary import markdown, summarise
    from fsla.plots.synthetic import draw

    spec = experiment.SyntheticSpec(seeds=seeds)
    folder = Folder(out, "synthetic", spec)
    with _bar() as progress:
        task = progress.add_task("synthetic", total=None)
        records = experiment.run(
            spec, folder, lambda name, done, total: progress.update(task, description=name, completed=done, total=total)
        )
    summary = summarise(spec, records)
    write_text(out / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    text = markdown(spec, summary)
    write_text(out / "summary.md", text)
    _show(out, text.split("## Hessian-vector products")[0], draw(out, records))


@reproduce.command()
def sources(
    out: Out,
    scale: Annotated[
        str, typer.Option(help="'smoke': a minute on a laptop. 'full': GPT-2's small size, for a GPU.")
    ] = "smoke",
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs with other text and another start.")] = 1,
    device: Device = "auto",
) -> None:
    """Not in the paper: the weights of ten sources of text, learnt while a transformer trains on them.

    Where the folder has its records, only summary and figure are made again.
    """
    from fsla.experiments.reproduce import device_of
    from fsla.experiments.sources import reproduce

    with _bar() as progress:
        task = progress.add_task("sources", total=None)
        records, summary, text = reproduce(
            out,
            scale,
            seeds,
            device_of(device),
            lambda name, k, steps: progress.update(task, description=name, completed=k, total=steps),
        )
    figures: list[Path] = []
    if find_spec("matplotlib"):  # where it is missing, the same command draws the figure elsewhere
        from fsla.plots.sources import draw

        figures = draw(out, records)
    _show(out, text, figures)
    print(json.dumps(summary))


def _cleaning(group: str, out: Path, scale: str, seeds: int, more: dict[str, Any]) -> None:
    import torch

    from fsla.experiments.cleaning import RunSpec
    from fsla.experiments.figures import GROUPS, CleaningSpec
    from fsla.experiments.reproduce import device_of
    from fsla.experiments.reproduce import reproduce as run
    from fsla.plots.cleaning import draw

    asked = CleaningSpec(scale, more["model"], more["budget"])
    if scale == "smoke":
        torch.set_num_threads(1)  # its tensors are small: more threads only wait for each other
    with _bar() as progress:
        runs = progress.add_task("runs", total=None)
        steps = progress.add_task("steps", total=None)

        def report(spec: RunSpec, step: int, done: int, total: int) -> None:
            progress.update(runs, completed=done, total=total)
            progress.update(steps, description=f"{spec.task.dataset} {spec.method}", completed=step, total=spec.steps)

        where = {"data_dir": more["data_dir"], "device": device_of(more["device"]), "engine": more["engine"]}
        results, text = run(out, asked, GROUPS[group], seeds, **where, report=report)
        progress.update(runs, completed=progress.tasks[0].total)
    head, claims, *_ = text.split("\n## ")
    if scale == "smoke":
        claims += "\nSmall data and another model: what does not hold here may hold at the paper's size.\n"
    _show(out, f"{head}\n## {claims}", draw(out, asked, GROUPS[group], results))


def _group(name: str, text: str) -> None:
    """Adds the command of a group of figures; all take the same options."""

    def command(
        out: Out,
        scale: Scale = "smoke",
        seeds: Seeds = 1,
        data_dir: DataDir = None,
        device: Device = "auto",
        model: Model = None,
        budget: Budget = None,
        engine: Engine = "auto",
    ) -> None:
        more = {"data_dir": data_dir, "device": device, "model": model, "budget": budget, "engine": engine}
        if name == "all":
            synthetic(out / "synthetic", seeds=20 if scale == "paper" else min(seeds, 3))
            out = out / "cleaning"
        _cleaning(name, out, scale, seeds, more)

    reproduce.command(name, help=text)(command)


_group("overview", "A first look: FSLA, CG with 1 and 10 steps, NS with 10, and no cleaning.")
_group("fig2", "FSLA and BP: validation loss against hyper-iterations and time; oracle calls; weights.")
_group("fig3", "FSLA against NS and CG, warm and restarted: eight panels.")
_group("fig4", "FSLA against the best CG on Fashion-MNIST and QMNIST (at smoke scale: two other kinds of noise).")
_group("ablations", "Figures 5 and 6: batch size, δ, c_τ, c_η, c_β; and what the momentum gains.")
_group("momentum", "Not in the paper: STORM, a moving average, no momentum, and STORM on shared batches.")
_group("all", "Everything, the synthetic experiment too (20 seeds of it at paper scale, at most 3 at smoke scale).")


@app.command()
def bench(
    problems: Annotated[
        str, typer.Option(help="Of 'cnn', 'softmax', 'quadratic', 'transformer', with commas.")
    ] = "cnn,softmax,quadratic",
    rounds: Annotated[int, typer.Option(min=1, help="How often each step is timed.")] = 9,
    device: Device = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    engines: Annotated[
        str, typer.Option(help="Of 'eager', 'graph', 'compile', with commas; compiling takes minutes.")
    ] = "eager,graph",
    scaling: Annotated[
        str, typer.Option(help="Also vary, on the network: of 'samples', 'parameters', 'K', with commas.")
    ] = "",
    peers: Annotated[
        bool, typer.Option("--peers", help="Also time Betty, higher, TorchOpt, hypertorch and JAX, where installed.")
    ] = False,
    tf32: Annotated[
        bool, typer.Option("--tf32", help="On a GPU, TF32 for matrix products too, as JAX has it.")
    ] = False,
    autocast: Annotated[bool, typer.Option("--autocast", help="The transformer under bfloat16 autocast too.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
) -> None:
    """What a hyper-iteration costs on this machine, interleaved in one run with the step that is its unit.

    The unit is an SGD step of the same model, and for the transformer an AdamW step.
    """
    import torch

    from fsla.experiments import bench as benchmark
    from fsla.experiments.reproduce import device_of

    names, chosen, varied = (tuple(x for x in text.split(",") if x) for text in (problems, engines, scaling))
    asked = benchmark.Asked(names, chosen, varied, rounds, peers, autocast)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)  # now, rather than after minutes of measuring
    torch.set_num_threads(threads)
    if tf32:
        torch.set_float32_matmul_precision("high")
    on = device_of(device)
    with console.status("") as status:
        rows, notes = asked.measured(on, status.update)
    for line in (*benchmark.lines(rows), *notes):
        console.print(line, highlight=False, soft_wrap=True)
    if json_file is not None:
        benchmark.save(json_file, rows, str(on), notes)
        console.print(str(json_file), highlight=False, soft_wrap=True)


@data.command("list")
def data_list(data_dir: DataDir = None) -> None:
    """The data sets, and whether their files are at hand."""
    from fsla.data.sets import SOURCES, cache, folder_of

    folder = folder_of(data_dir) or cache()
    console.print(f"folder: {folder}", highlight=False, soft_wrap=True)
    console.print("digits           at hand (part of scikit-learn)", highlight=False)
    for name, source in SOURCES.items():
        found = sum((folder / name / f.name).exists() for f in source.files)
        console.print(f"{name:16} {found} of {len(source.files)} files", highlight=False)


@data.command("fetch")
def data_fetch(name: str, data_dir: DataDir = None) -> None:
    """Download what is missing of a data set, with checksums."""
    from fsla.data.sets import cache, fetch, folder_of

    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console) as progress:
        paths = fetch(name, folder_of(data_dir) or cache(), progress=_Download(progress))
    for path in paths:
        console.print(str(path), highlight=False, soft_wrap=True)


@data.command("check")
def data_check(
    name: Annotated[str, typer.Argument(help="A data set; all if left out.")] = "", data_dir: DataDir = None
) -> None:
    """Read every file and say what it holds; exit code 1 if one cannot be used."""
    from fsla.checks import pick
    from fsla.data.sets import NAMES, cache, check, folder_of

    if name:
        pick(name, dict.fromkeys(NAMES), "data set to check")
    bad = False
    for one in [name] if name else NAMES:
        for found in check(one, folder_of(data_dir) or cache()):
            bad |= not found.good
            console.print(
                f"{'ok ' if found.good else 'BAD'} {found.path}: {found.text}", highlight=False, soft_wrap=True
            )
    if bad:
        raise typer.Exit(1)


class _Download:
    """pooch's idea of a progress bar, drawn by rich."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._task, self._total = progress, progress.add_task("download", total=None), 0

    @property
    def total(self) -> int:
        return self._total

    @total.setter
    def total(self, value: int) -> None:
        self._total = value
        self._progress.update(self._task, total=value)

    def update(self, n: int) -> None:
        self._progress.advance(self._task, n)

    def reset(self) -> None:
        self._progress.reset(self._task)

    def close(self) -> None:
        pass


def _bar() -> Progress:
    columns = TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console)


def _show(out: Path, text: str, figures: list[Path]) -> None:
    console.print(Markdown(text))
    console.print("\nFigures (PNG, and SVG beside each), summary and records:", highlight=False)
    for path in [*figures, out / "summary.md", out / "summary.json", out / "records.jsonl"]:
        console.print(f"  {path}", highlight=False, soft_wrap=True)


def main() -> None:
    """Runs the command. What the user can mend gets one message and the exit code 2, without a traceback."""
    try:
        app()
    except (RunError, ValueError, OSError) as error:
        if os.environ.get("FSLA_TRACEBACK"):
            raise
        print(f"fsla: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("fsla: interrupted; the same command resumes.", file=sys.stderr)
        sys.exit(130)
