"""`fsla data`: what there is, downloads, checks."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from fsla.cli.options import EXIT_CODES
from fsla.cli.screen import console, interruptible, print_line
from fsla_reproduction.options import DataDir

data = typer.Typer(no_args_is_help=True, help="The data sets: what there is, downloads, checks.", epilog=EXIT_CODES)


@data.command("list")
def data_list(data_dir: DataDir = None) -> None:
    """The data sets, and whether their files are at hand."""
    from fsla_reproduction.datasets.sets import SOURCES, cache, folder_of

    folder = folder_of(data_dir) or cache()
    print_line(f"folder: {folder}")
    print_line("digits           at hand (part of scikit-learn)")
    for name, source in SOURCES.items():
        present = sum((folder / name / f.name).exists() for f in source.files)
        print_line(f"{name:16} {present} of {len(source.files)} files")


@data.command("fetch")
@interruptible("the same command goes on with what is missing.")
def data_fetch(name: str, data_dir: DataDir = None) -> None:
    """Download what is missing of a data set, with checksums."""
    from fsla_reproduction.datasets.sets import cache, fetch, folder_of

    with download_bar() as progress:
        paths = fetch(name, folder_of(data_dir) or cache(), progress=Download(progress))
    for path in paths:
        print_line(str(path))


@data.command("check")
@interruptible("nothing was changed.")
def data_check(
    name: Annotated[str, typer.Argument(help="A data set; all if left out.")] = "", data_dir: DataDir = None
) -> None:
    """Read every file and say what it holds; exit code 1 if one cannot be used."""
    from fsla._checks import pick
    from fsla_reproduction.datasets.sets import NAMES, cache, check, folder_of

    if name:
        pick(name, dict.fromkeys(NAMES), "data set to check")
    bad = False
    for one in [name] if name else NAMES:
        for result in check(one, folder_of(data_dir) or cache()):
            bad |= not result.good
            print_line(f"{'ok ' if result.good else 'BAD'} {result.path}: {result.text}")
    if bad:
        raise typer.Exit(1)


def download_bar() -> Progress:
    """A progress bar for bytes."""
    return Progress(TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), console=console)


class Download:
    """pooch's idea of a progress bar, drawn by rich."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("download", total=None)
        self._total = 0

    @property
    def total(self) -> int:
        return self._total

    @total.setter
    def total(self, value: int) -> None:
        self._total = value
        self._progress.update(self._task, total=value or None)

    def update(self, n: int) -> None:
        self._progress.advance(self._task, n)

    def reset(self) -> None:
        self._progress.reset(self._task)

    def close(self) -> None:
        pass
