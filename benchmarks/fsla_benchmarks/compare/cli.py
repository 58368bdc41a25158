"""`fsla compare`: the algorithms against each other."""

from __future__ import annotations

from typing import Annotated

import typer

from fsla.cli.screen import interruptible, print_line, watched
from fsla_reproduction.options import RESUMES, DataDir, Jobs, Out

SHOWN = 12
"""Algorithms of the ranking that are printed; summary.md has all."""


@interruptible(RESUMES)
def compare(
    out: Out,
    algorithms: Annotated[str, typer.Option(help="Only these, with commas. Default: all.")] = "",
    problems: Annotated[
        str, typer.Option(help="Only these, with commas: quadratic, ridge_cancer, cleaning_digits … Default: all.")
    ] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each tuned algorithm on each problem.")] = 3,
    preset: Annotated[
        str, typer.Option(help="'smoke': a few hundred calls a run, offline. 'paper': 8000, and 16 trials for tuning.")
    ] = "smoke",
    max_oracle_calls: Annotated[
        int | None, typer.Option(min=1, help="Oracle calls of a run. Default: the preset's.")
    ] = None,
    num_trials: Annotated[
        int | None, typer.Option(min=1, help="Settings that each may try. Default: the preset's.")
    ] = None,
    data_dir: DataDir = None,
    jobs: Jobs = None,
) -> None:
    """The algorithms on small problems at equal oracle calls, each tuned by the same random search.

    Writes records, a ranked table, performance profiles and curves.
    """
    from fsla_benchmarks.compare.experiment import CompareSpec, carry_out, prepare
    from fsla_benchmarks.compare.methods import label
    from fsla_benchmarks.compare.plot import draw
    from fsla_reproduction.runs import workers

    spec = CompareSpec(preset, seeds, _names(algorithms), _names(problems), max_oracle_calls, num_trials)
    pool = workers(jobs)
    plan = prepare(out, spec, data_dir, pool)
    if pool.first:
        for text in (*plan.skipped, plan.estimate(pool.number)):
            print_line(text)
    with watched("compare", pool.first) as report:
        results, _ = carry_out(plan, report, pool)
    if not pool.first:
        return
    print_line("place  algorithm            mean rank  problems")
    for place, row in enumerate(results.overall[:SHOWN], 1):
        print_line(f"{place:>5}  {label(row['algorithm']):<19}  {row['mean_rank']:>9.1f}  {row['problems']:>8}")
    print_line("")
    print_line("Figures (PNG, and SVG beside each), summary and records:")
    for path in [*draw(out, results), out / "summary.md", out / "summary.json", out / "records.jsonl"]:
        print_line(f"  {path}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
