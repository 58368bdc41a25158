"""`fsla clean` and `fsla weigh`: which data to trust."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsla._checks import pick_device
from fsla.cli.errors import message_of
from fsla.cli.options import Device
from fsla.cli.screen import console, interruptible, print_error, print_line, watched
from fsla.distributed import get_group

if TYPE_CHECKING:
    from fsla.data import CleaningResult

FLAGS = {
    "label": "--label-column",
    "checked": "--checked-column",
    "trusted_column": "--trusted-column",
    "group": "--group-column",
    "id": "--id-column",
    "label_columns": "--label-columns",
    "annotator": "--annotator-column",
    "features": "--feature-columns",
    "ignore": "--ignore-columns",
    "missing": "--missing",
    "task": "--task",
}
"""Arguments of `fsla.data.clean` as messages name them, and the flags for them."""
Data = Annotated[
    Path | None,
    typer.Argument(
        help="A table (.csv, .tsv, .xlsx, .jsonl, .parquet), an .npz of X and y, or a folder of class folders.",
        show_default=False,
    ),
]
Trusted = Annotated[
    list[Path] | None,
    typer.Option(help="Checked rows in the same form, or the report's reviewed.csv. May be repeated."),
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for the report, the tables and the model.")]
Label = Annotated[str, typer.Option("--label-column", help="Column of labels, or of numbers to predict.")]
Group = Annotated[str | None, typer.Option("--group-column", help="Column that says where a row comes from.")]
Id = Annotated[str | None, typer.Option("--id-column", help="Column with a unique id per row.")]
Checked = Annotated[
    str | None, typer.Option("--checked-column", help="Column of checked labels, empty where nobody checked.")
]
TrustedColumn = Annotated[
    str | None, typer.Option("--trusted-column", help="Column of true and false: is the label of the row checked?")
]
LabelColumns = Annotated[
    str | None, typer.Option("--label-columns", help="Columns with a label each, one for an annotator: a,b,c.")
]
Annotator = Annotated[
    str | None, typer.Option("--annotator-column", help="Column of annotators, where a line is one label of one.")
]
Image = Annotated[str | None, typer.Option("--image-column", help="Column of image paths, from the table's folder.")]
Text = Annotated[str | None, typer.Option("--text-column", help="Columns of free text: a,b. Default: recognised.")]
Features = Annotated[
    str | None, typer.Option("--feature-columns", help="Columns to learn from: a,b. Default: all others.")
]
Ignore = Annotated[str | None, typer.Option("--ignore-columns", help="Columns to leave out: a,b.")]
Encoder = Annotated[str | None, typer.Option(help="Folder of a sentence-transformers model for text.")]
RelabelOption = Annotated[str, typer.Option("--relabel", help="Correct labels: 'never', 'sure' (from 90 %) or 'all'.")]
Review = Annotated[int, typer.Option(min=0, help="Rows to review.")]
Missing = Annotated[str, typer.Option(help="Missing cells of features: 'impute', 'drop' or 'error'.")]
Task = Annotated[str, typer.Option(help="'auto', 'classification' or 'regression'.")]
ImageSize = Annotated[int | None, typer.Option(min=8, help="Resize images to SIZE x SIZE pixels.")]
TimeLimit = Annotated[
    float | None, typer.Option(min=0.0, metavar="MINUTES", help="Start no new strategy after this time.")
]
Seed = Annotated[int, typer.Option("--seed", help="Random seed.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print the decision alone.")]
Demo = Annotated[bool, typer.Option("--demo", help="Try it on digits with errors made on purpose.")]
NOTHING_WRITTEN = "nothing was written."
LISTS = ("label_columns", "text", "features", "ignore")
"""Options with names between commas."""


def _claims_out(command: Callable[..., None]) -> Callable[..., None]:
    """Check --out before a command, and keep other processes from it until the command ends."""

    @wraps(command)
    def claiming(*, out: Path, **options: Any) -> None:
        from fsla.data import _output as output

        def run() -> None:
            with ExitStack() as stack:
                stack.enter_context(output.claim_folder(out))
                command(out=out, **options)

        get_group().run_on_first(run)  # more processes would compute the same

    return claiming


@interruptible(NOTHING_WRITTEN)
@_claims_out
def clean(
    data: Data = None,
    trusted: Trusted = None,
    out: Out = Path("out/clean"),
    label: Label = "label",
    group: Group = None,
    id: Id = None,
    checked: Checked = None,
    trusted_column: TrustedColumn = None,
    label_columns: LabelColumns = None,
    annotator: Annotator = None,
    image: Image = None,
    text: Text = None,
    features: Features = None,
    ignore: Ignore = None,
    encoder: Encoder = None,
    relabel: RelabelOption = "sure",
    review: Review = 50,
    missing: Missing = "impute",
    task: Task = "auto",
    image_size: ImageSize = None,
    time_limit: TimeLimit = None,
    random_state: Seed = 0,
    device: Device = "auto",
    quiet: Quiet = False,
    demo: Demo = False,
) -> None:
    """Find wrong labels and bad sources, from some rows that were checked.

    Writes report.html, label_issues.csv, cleaned.csv, review.csv, model.safetensors, summary.json and, with groups,
    group_weights.csv.
    """
    _run(**locals())


@interruptible(NOTHING_WRITTEN)
@_claims_out
def weigh(
    data: Data = None,
    trusted: Trusted = None,
    out: Out = Path("out/weigh"),
    label: Label = "label",
    group: Group = None,
    id: Id = None,
    checked: Checked = None,
    trusted_column: TrustedColumn = None,
    label_columns: LabelColumns = None,
    annotator: Annotator = None,
    image: Image = None,
    text: Text = None,
    features: Features = None,
    ignore: Ignore = None,
    encoder: Encoder = None,
    review: Review = 50,
    missing: Missing = "impute",
    task: Task = "auto",
    image_size: ImageSize = None,
    time_limit: TimeLimit = None,
    random_state: Seed = 0,
    device: Device = "auto",
    quiet: Quiet = False,
    demo: Demo = False,
) -> None:
    """Find which groups (sources, annotators, suppliers) to use, for labels or numbers. No label is changed.

    Writes what `fsla clean` writes.
    """
    if not demo and data is not None and data.suffix != ".npz" and not (group or label_columns or annotator):
        raise ValueError("No groups to weigh. Name their column with --group-column (or --annotator-column).")
    _run(relabel="never", **locals())


def _run(
    *,
    data: Path | None,
    out: Path,
    device: str,
    quiet: bool,
    demo: bool,
    time_limit: float | None,
    relabel: str,
    review: int,
    random_state: int,
    **columns: Any,
) -> None:
    """Do what both commands do; `columns` goes to `fsla.data.clean` as it is, lists taken apart."""
    pick_device(device)
    options = {
        "relabel": relabel,
        "review": review,
        "random_state": random_state,
        "device": device,
        "should_stop": _deadline(time_limit),
    }
    if demo:
        _run_demo(out, options, quiet)
        return
    if data is None:
        raise ValueError("No data. Name a file or a folder, or use --demo.")
    columns["trusted"] = columns["trusted"] or None
    for name in LISTS:
        columns[name] = _names(columns[name])
    result = _clean(data, quiet, **columns, **options)
    result.publish(out)
    _print(result, out, quiet)


def _clean(data: Any, quiet: bool, **options: Any) -> CleaningResult:
    """Run `fsla.data.clean` under a progress bar; warnings become lines."""
    from fsla.data import clean as run

    with (
        warnings.catch_warnings(record=True) as caught,
        watched("reading", not quiet and console.is_terminal, transient=True) as progress,
    ):
        warnings.simplefilter("always")
        try:
            result = run(data, progress=progress, **options)
        except ValueError as error:
            text = message_of(error)
            if text is None:
                raise
            raise ValueError(as_flags(text)) from error
    for text in dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning)):
        print_error(text)
    return result


def as_flags(text: str) -> str:
    """Return a message for users of Python with the flags that users of the command type."""

    def flag(match: re.Match[str]) -> str:
        return FLAGS[match[1]] + (f" {match[2][1:-1]}" if match[2] else "")

    return re.sub(rf"\b({'|'.join(FLAGS)})=('[^']*')?", flag, text)


def _print(result: CleaningResult, out: Path, quiet: bool) -> None:
    """Print the decision, then one fact a line, as the report has them."""
    print_line(result.decision)
    if quiet:
        return
    for line in (*result.facts, *result.notes):
        print_line(as_flags(line))
    print_line(f"Report: {out / 'report.html'}")


def _run_demo(out: Path, options: dict[str, Any], quiet: bool) -> None:
    """Clean digits with errors made on purpose, and print how well that went."""
    from fsla.data import _demo as digits

    demo = digits.make_demo()
    options = options | {"learners": digits.LEARNERS}
    result = _clean(demo.table, quiet, **digits.COLUMNS, **options)
    as_it_is = _clean(
        demo.table, True, **digits.COLUMNS | {"checked": None}, ignore=["checked"], **options | {"review": 0}
    )
    digits.show_pictures(demo, result)
    score = digits.score_demo(demo, result, as_it_is)
    result.publish(out, {"demo": score._asdict()})
    _print(result, out, quiet)
    print_line(score.sentence())


def _deadline(minutes: float | None) -> Callable[[], bool] | None:
    if minutes is None:
        return None
    end = time.monotonic() + 60 * minutes
    return lambda: time.monotonic() >= end


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
