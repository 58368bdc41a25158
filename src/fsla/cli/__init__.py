"""The command `fsla`: parses and calls. `python -m fsla` is the same program.

Packages add commands by entry points of the group `fsla.commands`: a Typer application or a function each.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from functools import cache
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fsla import __version__
from fsla.cli.data import clean, weigh
from fsla.cli.errors import report
from fsla.cli.options import EXIT_CODES
from fsla.cli.screen import print_error, print_line

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


def main() -> None:
    """Run the command, and word every error: 2 for what the user can mend, 70 for a defect of fsla."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # Greek letters, where the terminal has none
    warnings.showwarning = _show_warning
    try:
        add_commands()
        app()
    except BaseException as error:
        if isinstance(error, SystemExit) or os.environ.get("FSLA_TRACEBACK"):
            raise
        sys.exit(report(error))


def _show_warning(message: Warning | str, *place: Any, **more: Any) -> None:
    """Print a warning as one line, with what a terminal would act on as an escape."""
    print_error(f"warning: {message}")
