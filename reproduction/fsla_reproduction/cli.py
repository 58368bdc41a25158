"""`fsla reproduce`: the experiments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markdown import Markdown

from fsla.cli.options import EXIT_CODES, Device
from fsla.cli.screen import console, interruptible, print_line, watched
from fsla_reproduction.folder import check_parent
from fsla_reproduction.options import RESUMES, DataDir, Engine, Jobs, Model, Out, Preset, Seeds, TimeLimit
from fsla_reproduction.report import Summary, claims

if TYPE_CHECKING:
    from fsla_reproduction.reproduce import Plan
    from fsla_reproduction.runs import Workers

reproduce = typer.Typer(
    no_args_is_help=True, help="Reproduce an experiment of the paper: records, summary, figures.", epilog=EXIT_CODES
)


@reproduce.command()
@interruptible(RESUMES)
def synthetic(out: Out, seeds: Seeds = 20, jobs: Jobs = None) -> None:
    """Section 6.1, Figure 1: the error of FSLA, NS, BP and CG on the quadratic, against K, products and time."""
    from fsla_reproduction.runs import workers

    pool = workers(jobs)
    _synthetic(out, seeds, pool)


def _synthetic(out: Path, seeds: int, pool: Workers) -> None:
    from fsla_reproduction import synthetic as experiment
    from fsla_reproduction.plots.synthetic import draw
    from fsla_reproduction.synthetic_summary import summary_of

    spec = experiment.SyntheticSpec(seeds=seeds)
    folder = pool.open(out, "synthetic", spec)
    with watched("synthetic", pool.first) as report:
        records = experiment.run(spec, folder, report, pool)
    summary = summary_of(spec, records)
    folder.conclude(summary)
    show_results(pool, out, summary, lambda: draw(out, records))


@reproduce.command()
@interruptible(RESUMES)
def sources(
    out: Out,
    preset: Annotated[
        str, typer.Option(help="'smoke': a minute on a laptop. 'full': GPT-2's small size, for a GPU.")
    ] = "smoke",
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs with other text and another start.")] = 1,
    device: Device = "auto",
    jobs: Jobs = None,
) -> None:
    """Not in the paper: the weights of ten sources of text, learnt while a transformer trains on them.

    Where the folder has its records, only summary and figure are written again.
    """
    from fsla_reproduction.plots.sources import draw
    from fsla_reproduction.runs import workers
    from fsla_reproduction.sources import reproduce

    pool = workers(jobs)
    with watched("sources", pool.first) as report:
        records, summary = reproduce(out, preset, seeds, pool.device(device), report, pool)
    show_results(pool, out, summary, lambda: draw(out, records))


def _cleaning(plan: Plan, pool: Workers) -> None:
    from fsla_reproduction.plots.cleaning import draw
    from fsla_reproduction.reproduce import carry_out

    with watched("runs", pool.first) as report:
        results, summary = carry_out(plan, report, pool)
    note = ""
    if plan.panels.cleaning_spec.preset == "smoke":
        note = "Small data and another model: what does not hold here may hold at the paper's size."
    show_results(pool, plan.out, summary, lambda: draw(plan.out, plan.figures, results), note)


def _group(name: str, text: str) -> None:
    """Add the command of a group of figures; all take the same options."""

    @interruptible(RESUMES)
    def command(
        out: Out,
        preset: Preset = "smoke",
        seeds: Seeds = 1,
        data_dir: DataDir = None,
        device: Device = "auto",
        model: Model = None,
        time_limit: TimeLimit = None,
        engine: Engine = "auto",
        jobs: Jobs = None,
    ) -> None:
        from fsla_reproduction.figures import GROUPS, CleaningSpec
        from fsla_reproduction.reproduce import prepare
        from fsla_reproduction.runs import workers

        cleaning_spec = CleaningSpec(preset, model, time_limit)
        if name == "all":
            check_parent(out, ("synthetic", "cleaning"))
        pool = workers(jobs)
        plan = prepare(
            out / "cleaning" if name == "all" else out,
            cleaning_spec,
            GROUPS[name],
            seeds,
            data_dir=data_dir,
            device=pool.device(device),
            engine=engine,
        )
        if name == "all":  # by now everything that was asked for is known to be good
            _synthetic(out / "synthetic", 20 if preset == "paper" else min(seeds, 3), pool)
        _cleaning(plan, pool)

    reproduce.command(name, help=text)(command)


_group("overview", "A first look: FSLA, CG with 1 and 10 steps and no cleaning, the same oracle calls for each.")
_group("fig2", "FSLA and BP: validation loss against hyper-iterations and time; oracle calls; weights.")
_group("fig3", "FSLA against NS and CG, warm and restarted: eight panels.")
_group("fig4", "FSLA against the best CG on Fashion-MNIST and QMNIST (preset smoke: two other kinds of noise).")
_group("ablations", "Figures 5 and 6: batch size, δ, c_τ, c_η, c_β; and what the momentum gains.")
_group("momentum", "Not in the paper: STORM, a moving average, no momentum, and STORM on shared batches.")
_group("all", "Everything, the synthetic experiment too (20 seeds of it with preset paper, at most 3 with smoke).")


def show_results(pool: Workers, out: Path, summary: Summary, draw: Callable[[], list[Path]], note: str = "") -> None:
    """Draw the figures and print the claims and the files, on the first rank."""
    if not pool.first:
        return
    figures = draw()
    console.print(Markdown(claims(summary.claims)))
    if note:
        print_line(note)
    print_line("")
    print_line("Figures (PNG, and SVG beside each), summary and records:")
    for path in [*figures, out / "summary.md", out / "summary.json", out / "records.jsonl"]:
        print_line(f"  {path}")
