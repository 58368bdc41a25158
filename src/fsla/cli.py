"""The command `fsla`: parses and calls. `python -m fsla` is the same program."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markdown import Markdown
from rich.text import Text

from fsla import __version__
from fsla.experiments.folder import Folder, RunError, check_parent
from fsla.experiments.report import Summary, claims
from fsla.files import ensure_writable
from fsla.screen import Download, complain, console, download_bar, interruptible, run_bar, say

if TYPE_CHECKING:
    from fsla.experiments.cleaning import RunSpec
    from fsla.experiments.reproduce import Plan

RESUMES = "the same command resumes."
EXIT_CODES = "Exit codes: 0 done, 1 a check failed, 2 bad input, 130 interrupted."
app = typer.Typer(
    name="fsla", no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
reproduce = typer.Typer(
    no_args_is_help=True, help="Reproduce an experiment of the paper: records, summary, figures.", epilog=EXIT_CODES
)
data = typer.Typer(no_args_is_help=True, help="The data sets: what there is, downloads, checks.", epilog=EXIT_CODES)
app.add_typer(reproduce, name="reproduce")
app.add_typer(data, name="data")

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
        say(f"fsla {__version__}")
        raise typer.Exit


@app.callback(
    help="Bilevel optimisation with a fully single loop: no inner solve, no Hessian inverse.", epilog=EXIT_CODES
)
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@reproduce.command()
@interruptible(RESUMES)
def synthetic(out: Out, seeds: Seeds = 20) -> None:
    """Section 6.1, Figure 1: the error of FSLA, NS, BP and CG on the quadratic, against K, products and time."""
    _synthetic(out, seeds)


def _synthetic(out: Path, seeds: int) -> None:
    from fsla.experiments import synthetic as experiment
    from fsla.experiments.synthetic_summary import summary_of
    from fsla.plots.synthetic import draw

    spec = experiment.SyntheticSpec(seeds=seeds)
    folder = Folder(out, "synthetic", spec)
    with run_bar() as progress:
        task = progress.add_task("synthetic", total=None)
        records = experiment.run(
            spec, folder, lambda name, done, total: progress.update(task, description=name, completed=done, total=total)
        )
    summary = summary_of(spec, records)
    summary.save(out)
    _show(out, summary, draw(out, records))


@reproduce.command()
@interruptible(RESUMES)
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
    from fsla.plots.sources import draw

    with run_bar() as progress:
        task = progress.add_task("sources", total=None)
        records, summary = reproduce(
            out,
            scale,
            seeds,
            device_of(device),
            lambda name, k, steps: progress.update(task, description=name, completed=k, total=steps),
        )
    _show(out, summary, draw(out, records))


def _cleaning(plan: Plan) -> None:
    import torch

    from fsla.experiments.reproduce import carry_out
    from fsla.plots.cleaning import draw

    if plan.panels.asked.scale == "smoke":
        torch.set_num_threads(1)  # its tensors are small: more threads only wait for each other
    with run_bar() as progress:
        runs = progress.add_task("runs", total=None)
        steps = progress.add_task("steps", total=None)

        def report(spec: RunSpec, step: int, done: int, total: int) -> None:
            progress.update(runs, completed=done, total=total)
            progress.update(steps, description=f"{spec.task.dataset} {spec.method}", completed=step, total=spec.steps)

        results, summary = carry_out(plan, report)
        progress.update(runs, completed=progress.tasks[0].total)
    note = ""
    if plan.panels.asked.scale == "smoke":
        note = "Small data and another model: what does not hold here may hold at the paper's size."
    _show(plan.out, summary, draw(plan.out, plan.figures, results), note)


def _group(name: str, text: str) -> None:
    """Adds the command of a group of figures; all take the same options."""

    @interruptible(RESUMES)
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
        from fsla.experiments.figures import GROUPS, CleaningSpec
        from fsla.experiments.reproduce import device_of, prepare

        asked = CleaningSpec(scale, model, budget)
        if name == "all":
            check_parent(out, ("synthetic", "cleaning"))
        plan = prepare(
            out / "cleaning" if name == "all" else out,
            asked,
            GROUPS[name],
            seeds,
            data_dir=data_dir,
            device=device_of(device),
            engine=engine,
        )
        if name == "all":  # by now everything that was asked for is known to be good
            _synthetic(out / "synthetic", 20 if scale == "paper" else min(seeds, 3))
        _cleaning(plan)

    reproduce.command(name, help=text)(command)


_group("overview", "A first look: FSLA, CG with 1 and 10 steps and no cleaning, the same oracle calls for each.")
_group("fig2", "FSLA and BP: validation loss against hyper-iterations and time; oracle calls; weights.")
_group("fig3", "FSLA against NS and CG, warm and restarted: eight panels.")
_group("fig4", "FSLA against the best CG on Fashion-MNIST and QMNIST (at smoke scale: two other kinds of noise).")
_group("ablations", "Figures 5 and 6: batch size, δ, c_τ, c_η, c_β; and what the momentum gains.")
_group("momentum", "Not in the paper: STORM, a moving average, no momentum, and STORM on shared batches.")
_group("all", "Everything, the synthetic experiment too (20 seeds of it at paper scale, at most 3 at smoke scale).")


@app.command(epilog=EXIT_CODES)
@interruptible("nothing was written.")
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
        ensure_writable(json_file)  # now, rather than after minutes of measuring
    torch.set_num_threads(threads)
    if tf32:
        torch.set_float32_matmul_precision("high")
    on = device_of(device)
    with console.status("") as status:
        rows, notes = asked.measured(on, lambda text: status.update(Text(text)))
    for line in (*benchmark.lines(rows), *notes):
        say(line)
    if json_file is not None:
        benchmark.save(json_file, rows, str(on), notes)
        say(str(json_file))


@data.command("list")
def data_list(data_dir: DataDir = None) -> None:
    """The data sets, and whether their files are at hand."""
    from fsla.data.sets import SOURCES, cache, folder_of

    folder = folder_of(data_dir) or cache()
    say(f"folder: {folder}")
    say("digits           at hand (part of scikit-learn)")
    for name, source in SOURCES.items():
        found = sum((folder / name / f.name).exists() for f in source.files)
        say(f"{name:16} {found} of {len(source.files)} files")


@data.command("fetch")
@interruptible("the same command goes on with what is missing.")
def data_fetch(name: str, data_dir: DataDir = None) -> None:
    """Download what is missing of a data set, with checksums."""
    from fsla.data.sets import cache, fetch, folder_of

    with download_bar() as progress:
        paths = fetch(name, folder_of(data_dir) or cache(), progress=Download(progress))
    for path in paths:
        say(str(path))


@data.command("check")
@interruptible("nothing was changed.")
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
            say(f"{'ok ' if found.good else 'BAD'} {found.path}: {found.text}")
    if bad:
        raise typer.Exit(1)


def _show(out: Path, summary: Summary, figures: list[Path], note: str = "") -> None:
    console.print(Markdown(claims(summary.claims)))
    if note:
        say(note)
    say("")
    say("Figures (PNG, and SVG beside each), summary and records:")
    for path in [*figures, out / "summary.md", out / "summary.json", out / "records.jsonl"]:
        say(f"  {path}")


def _message(error: Exception) -> str:
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = " Free some room and give the same command again; experiments resume." if full else ""
    return f"{error.filename or 'Every file'} must be usable. It is not: {error.strerror}.{hint}"


def main() -> None:
    """Runs the command. What the user can mend gets one message and the exit code 2, without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # Greek letters, where the terminal has none
    try:
        app()
    except (RunError, ValueError, OSError) as error:
        if os.environ.get("FSLA_TRACEBACK"):
            raise
        complain(_message(error))
        sys.exit(2)
