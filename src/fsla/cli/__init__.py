"""The command `fsla`: parses and calls. `python -m fsla` is the same program."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Annotated

import typer

from fsla import __version__
from fsla.cli.bench import bench
from fsla.cli.compare import compare
from fsla.cli.data import data
from fsla.cli.options import EXIT_CODES
from fsla.cli.reproduce import reproduce
from fsla.cli.trust import clean, weigh
from fsla.experiments.folder import RunError
from fsla.ranks import RankError, speaks
from fsla.screen import complain, say

app = typer.Typer(
    name="fsla", no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.command(epilog=EXIT_CODES)(clean)
app.command(epilog=EXIT_CODES)(weigh)
app.add_typer(reproduce, name="reproduce")
app.add_typer(data, name="data")
app.command(epilog=EXIT_CODES)(compare)
app.command(epilog=EXIT_CODES)(bench)


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
    except (RunError, RankError, ValueError, OSError) as error:
        if os.environ.get("FSLA_TRACEBACK"):
            raise
        text = _message(error)
        if speaks(text):
            complain(text, always=True)
        sys.exit(2)
