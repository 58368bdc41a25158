"""The command `fsla`: parses and calls. `python -m fsla` is the same program.

Packages add commands by entry points of the group `fsla.commands`: a Typer application or a function each.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from functools import cache
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fsla import __version__
from fsla._extras import install_hint
from fsla.cli.data import clean, weigh
from fsla.cli.options import EXIT_CODES
from fsla.cli.screen import print_error, print_line
from fsla.distributed import DistributedError, should_report

ELSEWHERE = ("reproduce", "compare", "bench", "data")
"""Commands of the repository's other packages."""


class Commands(TyperGroup):
    """The commands; one that the repository has and this installation has not is told from a misspelt one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command, or say where it is."""
        if args and args[0] in ELSEWHERE and args[0] not in self.commands:
            ctx.fail(
                f"'fsla {args[0]}' is not part of the installed package. It comes with the repository: in a clone, "
                "run pip install ./reproduction ./benchmarks."
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="fsla",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(epilog=EXIT_CODES)(clean)
app.command(epilog=EXIT_CODES)(weigh)


def _version(show: bool) -> None:
    if show:
        print_line(f"fsla {__version__}")
        raise typer.Exit


@app.callback(
    help="Bilevel optimisation with a fully single loop: no inner solve, no Hessian inverse.",
    epilog=f"The repository adds {', '.join(ELSEWHERE[:-1])} and {ELSEWHERE[-1]}. {EXIT_CODES}",
)
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@cache
def add_commands() -> None:
    """Add the commands of other installed packages."""
    for point in sorted(entry_points(group="fsla.commands"), key=lambda point: point.name):
        command = point.load()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=point.name)
        else:
            app.command(point.name, epilog=EXIT_CODES)(command)


def _message(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return install_hint(error)
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = " Free some room and give the same command again; experiments resume." if full else ""
    return f"{error.filename or 'Every file'} must be usable. It is not: {error.strerror}.{hint}"


def main() -> None:
    """Run the command. What the user can mend gets one message and the exit code 2, without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # Greek letters, where the terminal has none
    try:
        add_commands()
        app()
    except (ModuleNotFoundError, DistributedError, ValueError, OSError) as error:
        if os.environ.get("FSLA_TRACEBACK"):
            raise
        text = _message(error)
        if should_report(text):
            print_error(text, always=True)
        sys.exit(2)
