"""`fsla bench`: what a step costs, automatic steps, which data to trust."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from fsla._storage._files import ensure_writable, write_text
from fsla.cli.options import EXIT_CODES, Device
from fsla.cli.screen import console, interruptible, print_line, watched
from fsla_reproduction.cli import show_results
from fsla_reproduction.options import RESUMES, DataDir, Jobs, Out

bench = typer.Typer(no_args_is_help=True, help="Benchmarks, each beside what it is compared with.", epilog=EXIT_CODES)

JSONFile = Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")]
Commit = Annotated[str | None, typer.Option(help="The commit to record, where the code lies outside of its checkout.")]


@bench.command()
@interruptible("nothing was written.")
def steps(
    problems: Annotated[
        str, typer.Option(help="Of 'cnn', 'softmax', 'quadratic', 'transformer', with commas.")
    ] = "cnn,softmax,quadratic",
    repeats: Annotated[int, typer.Option(min=1, help="How often each step is timed.")] = 9,
    device: Device = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    engines: Annotated[
        str, typer.Option(help="Of 'eager', 'graph', with commas; for the transformer, of 'eager', 'compile'.")
    ] = "eager,graph",
    scaling: Annotated[
        str, typer.Option(help="Also vary, on the network: of 'samples', 'parameters', 'K', with commas.")
    ] = "",
    baselines: Annotated[
        bool,
        typer.Option("--baselines", help="Also time Betty, higher, TorchOpt, hypertorch and JAX, if installed."),
    ] = False,
    tf32: Annotated[
        bool, typer.Option("--tf32", help="On a GPU, TF32 for matrix products too, as JAX has it.")
    ] = False,
    autocast: Annotated[bool, typer.Option("--autocast", help="The transformer under bfloat16 autocast too.")] = False,
    json_file: JSONFile = None,
    commit: Commit = None,
) -> None:
    """What a hyper-iteration costs on this machine, interleaved in one run with the step that is its unit.

    The unit is an SGD step of the same model, and for the transformer an AdamW step.
    """
    import torch

    from fsla._checks import pick_device
    from fsla_benchmarks import steps as benchmark

    names, chosen, varied = (tuple(x for x in text.split(",") if x) for text in (problems, engines, scaling))
    request = benchmark.BenchRequest(names, chosen, varied, repeats, baselines, autocast)
    if json_file is not None:
        ensure_writable(json_file)  # now, rather than after minutes of measuring
    torch.set_num_threads(threads)
    if tf32:
        torch.set_float32_matmul_precision("high")
    on = pick_device(device)
    with console.status("") as status:
        rows, notes = request.measured(on, lambda text: status.update(Text(text)))
    for line in (*benchmark.lines(rows), *notes):
        print_line(line)
    if json_file is not None:
        benchmark.save(json_file, rows, {"benchmark": "steps", **benchmark.describe_run(on, commit)}, notes)
        print_line(str(json_file))


@bench.command()
@interruptible("the rows so far are in the file, if one was named.")
def training(
    problems: Annotated[str, typer.Option(help="Of 'transformer', 'cnn', with commas.")] = "transformer,cnn",
    device: Device = "auto",
    engines: Annotated[
        str,
        typer.Option(
            help="Of 'eager', 'graph' (captured on a GPU) and 'compile' (a compiled transformer), with commas."
        ),
    ] = "eager,graph",
    json_file: JSONFile = None,
    commit: Commit = None,
) -> None:
    """What weights of data sources cost a training run that learns them as it goes, in plain steps."""
    from fsla._checks import pick, pick_device
    from fsla_benchmarks import steps as benchmark

    names, modes = (tuple(x for x in text.split(",") if x) for text in (problems, engines))
    for name in names:
        pick(name, {"transformer": 0, "cnn": 0}, "problem")
    for mode in modes:
        pick(mode, {"eager": 0, "graph": 0, "compile": 0}, "engine")
    if json_file is not None:
        ensure_writable(json_file)
    on = pick_device(device)
    run = benchmark.describe_run(on, commit)

    def keep(costs: list[benchmark.Cost], notes: list[str]) -> None:
        if json_file is not None:
            benchmark.save(json_file, costs, run, notes)

    with console.status("") as status:
        costs, notes = benchmark.measure_training(
            on, lambda text: status.update(Text(text)), engines=modes, only=names, keep=keep
        )
    for line in (*benchmark.list_costs(costs), *notes):
        print_line(line)


@bench.command()
@interruptible("the page is as it was.")
def tables(
    page: Annotated[Path, typer.Argument(help="A Markdown page with comments that name files of results.")],
) -> None:
    """Make the tables of a page anew from the files in benchmarks/results."""
    from fsla_benchmarks import steps as benchmark
    from fsla_benchmarks.automatic import spacing
    from fsla_benchmarks.data import images, report

    writers = {
        "data": report.write_result,
        "images": images.write_table,
        "outer-every": spacing.write_result,
        "steps": benchmark.write_rows,
    }

    def write(result: Mapping[str, Any]) -> list[str]:
        return writers.get(result.get("benchmark", ""), benchmark.write_costs)(result)

    write_text(page, benchmark.fill_tables(page.read_text(encoding="utf-8"), write))
    print_line(str(page))


@bench.command()
@interruptible(RESUMES)
def automatic(
    out: Out,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 600,
    jobs: Jobs = None,
) -> None:
    """Steps that need no tuning against the best of a grid, on seventeen tasks (half an hour)."""
    from fsla_benchmarks.automatic.experiment import AutomaticSpec, reproduce
    from fsla_reproduction.runs import workers

    pool = workers(jobs)
    with watched("automatic", pool.first) as report:
        summary = reproduce(out, AutomaticSpec(steps), report, pool)
    show_results(pool, out, summary, list)


@bench.command()
@interruptible("nothing was written.")
def outer_every(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 600,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each task and each outer_every.")] = 3,
    json_file: JSONFile = None,
    commit: Commit = None,
) -> None:
    """How good λ is after the same training steps if it moves at one of m, on five tasks (some minutes)."""
    import torch

    from fsla_benchmarks import steps as benchmark
    from fsla_benchmarks.automatic import spacing

    if json_file is not None:
        ensure_writable(json_file)
    torch.set_num_threads(1)
    run = {"benchmark": "outer-every"} | benchmark.describe_run(torch.device("cpu"), commit)
    with console.status("") as status:
        rows = spacing.measure(steps, seeds, lambda text: status.update(Text(text)))
    result = {"rows": [vars(row) for row in rows]}
    for line in spacing.write_result(result):
        print_line(line)
    if json_file is not None:
        benchmark.save(json_file, rows, run, [])
        print_line(str(json_file))


@bench.command()
@interruptible(RESUMES)
def data(
    out: Out,
    data_dir: DataDir = None,
    sets: Annotated[
        str, typer.Option(help="Of 'youtube', 'trec', 'bc', …, with commas. Default: all whose files are there.")
    ] = "",
    checked: Annotated[str, typer.Option(help="Numbers of checked rows, of 50, 100 and 300, with commas.")] = "100",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas or as 3-7. Settings were tuned on 0 to 2.")] = "0-2",
    parts: Annotated[str, typer.Option(help="Of 'alternatives', 'fsla', with commas.")] = "alternatives,fsla",
    json_file: JSONFile = None,
    commit: Commit = None,
    jobs: Jobs = None,
) -> None:
    """Which data to trust: fsla against what a careful user does without it, on real and on synthetic sets.

    Every cell (set, number of checked rows, seed) is a file; the same command resumes, another one adds cells.
    """
    from fsla_benchmarks import steps as benchmark
    from fsla_benchmarks.data import report as tables_of_data
    from fsla_benchmarks.data.experiment import TUNING_SEEDS, DataSpec, FolderSettings, run
    from fsla_benchmarks.data.plot import draw
    from fsla_benchmarks.data.sets import available_sets, parse_numbers
    from fsla_reproduction.datasets.sets import folder_of
    from fsla_reproduction.runs import workers

    if json_file is not None:
        ensure_writable(json_file)
    folder_of_data = folder_of(data_dir)
    names = tuple(name.strip() for name in sets.split(",") if name.strip())
    spec = DataSpec(
        names or available_sets(folder_of_data),
        parse_numbers(checked),
        parse_numbers(seeds),
        tuple(part.strip() for part in parts.split(",") if part.strip()),
    )
    pool = workers(jobs)
    folder = pool.open(out, "data", FolderSettings())
    machine = benchmark.describe_run(pool.device("cpu"), commit)
    with watched("data", pool.first) as report:
        records = run(spec, folder, folder_of_data, report, pool, str(machine["commit"]))
    if not pool.first:
        return
    shown = tuple(seed for seed in spec.seeds if seed not in TUNING_SEEDS) or spec.seeds
    text = tables_of_data.write_report(records, shown)
    write_text(out / "summary.md", text)
    if json_file is not None:
        write_text(json_file, tables_of_data.to_json(records, machine))
    for line in text.splitlines():
        print_line(line)
    for path in (
        *draw(out / "data", tables_of_data.compare(records, seeds=shown)),
        out / "summary.md",
        out / "records.jsonl",
    ):
        print_line(str(path))
