"""What the commands show: every text as it stands, progress, and the one line about an interruption."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

FIRST = os.environ.get("RANK", "0") in ("", "0")
"""Whether this process speaks: of several that torchrun started, the first does."""
console = Console(quiet=not FIRST)


def literal(text: str) -> str:
    """The text with everything that a terminal would act on instead of showing it, such as \\x1b, as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def print_line(text: str) -> None:
    """Prints one line as it stands: no markup, no colours, no wrapping."""
    console.print(Text(literal(text)), soft_wrap=True)


def print_error(text: str, *, always: bool = False) -> None:
    """Prints one line on stderr as it stands; of several ranks the first does, unless it is to be said in any case."""
    if FIRST or always:
        print(f"fsla: {literal(text)}", file=sys.stderr)


@contextmanager
def interruptible(then: str) -> Iterator[None]:
    """For commands: Ctrl-C ends them with one line and the exit code 130. Typer alone would say nothing."""
    try:
        yield
    except KeyboardInterrupt:
        print_error(f"interrupted; {then}")
        raise typer.Exit(130) from None


def run_bar(*, transient: bool = False) -> Progress:
    """A progress bar for runs and steps; a transient one leaves no line behind."""
    name = TextColumn("{task.description:24}", markup=False)
    return Progress(name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=transient)


@contextmanager
def watched(name: str, shown: bool = True, *, transient: bool = False) -> Iterator[Callable[[str, float, int], None]]:
    """A bar, and the function that moves it: what is under way, how much is done, of how much."""
    if not shown:
        yield lambda text, done, total: None
        return
    with run_bar(transient=transient) as progress:
        task = progress.add_task(name, total=None)
        yield lambda text, done, total: progress.update(task, description=text, completed=done, total=total)
