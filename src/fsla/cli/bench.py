"""`fsla bench`: what a step costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fsla.cli.options import Device
from fsla.files import ensure_writable
from fsla.screen import console, interruptible, say


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

    from fsla.checks import pick_device
    from fsla.experiments import bench as benchmark

    names, chosen, varied = (tuple(x for x in text.split(",") if x) for text in (problems, engines, scaling))
    asked = benchmark.Asked(names, chosen, varied, rounds, peers, autocast)
    if json_file is not None:
        ensure_writable(json_file)  # now, rather than after minutes of measuring
    torch.set_num_threads(threads)
    if tf32:
        torch.set_float32_matmul_precision("high")
    on = pick_device(device)
    with console.status("") as status:
        rows, notes = asked.measured(on, lambda text: status.update(Text(text)))
    for line in (*benchmark.lines(rows), *notes):
        say(line)
    if json_file is not None:
        benchmark.save(json_file, rows, str(on), notes)
        say(str(json_file))
