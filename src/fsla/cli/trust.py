"""`fsla clean` and `fsla weigh`: which data to trust."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsla.cli.options import Device
from fsla.cli.screen import complain, console, interruptible, say, watched
from fsla.distributed import get_group

if TYPE_CHECKING:
    from fsla.data._choice import Report
    from fsla.data._job import Job

Data = Annotated[
    Path | None,
    typer.Argument(help="A table (.csv, .tsv, .parquet, .npy), an .npz of X and y, or a folder of class folders."),
]
Trusted = Annotated[Path | None, typer.Option(help="The samples that are trusted, in the same form.")]
Out = Annotated[Path, typer.Option(help="Folder for the tables, the model and report.html.")]
Label = Annotated[str, typer.Option(help="The column of the labels, or of the targets.")]
Group = Annotated[str | None, typer.Option(help="The column that says where a sample came from.")]
Id = Annotated[str | None, typer.Option("--id", help="The column of the samples' names.")]
TrustedColumn = Annotated[str | None, typer.Option(help="A column of true and false: which rows are trusted.")]
Image = Annotated[str | None, typer.Option(help="The column of paths of images, from the table's folder.")]
Features = Annotated[str, typer.Option(help="The columns to learn from, with commas. Default: all others.")]
Size = Annotated[int | None, typer.Option(min=8, help="Pixels a side that images are brought to.")]
Model = Annotated[str, typer.Option(help="'auto', 'linear', 'dense' or 'cnn'.")]
Budget = Annotated[float | None, typer.Option(min=0.0, help="Minutes after which no further comparison is begun.")]
Seed = Annotated[int, typer.Option(help="Fixes every number.")]
Demo = Annotated[bool, typer.Option("--demo", help="Try it on digits with errors made on purpose.")]
WITHOUT = "nothing was written."
NO_GROUPS = "Samples must come in groups to be weighed. Name their column with --group."


def _claims_out(command: Callable[..., None]) -> Callable[..., None]:
    """Check --out before a command, and keep other processes from it until the command ends."""

    @wraps(command)
    def claiming(*, out: Path, **given: Any) -> None:
        from fsla.data import _job as jobs

        with ExitStack() as stack:
            get_group().run_on_first(lambda: stack.enter_context(jobs.claim_out(out)))
            command(out=out, **given)

    return claiming


@interruptible(WITHOUT)
@_claims_out
def clean(
    data: Data = None,
    trusted: Trusted = None,
    out: Out = Path("out/clean"),
    label: Label = "label",
    group: Group = None,
    id_column: Id = None,
    trusted_column: TrustedColumn = None,
    image: Image = None,
    features: Features = "",
    size: Size = None,
    model: Model = "auto",
    budget: Budget = None,
    seed: Seed = 0,
    device: Device = "auto",
    demo: Demo = False,
) -> None:
    """Finds wrong labels and what they should be, and which groups to leave out, from a few samples that are trusted.

    Writes issues.csv, cleaned.csv, weights.csv (with --group), model.safetensors, summary.json and report.html.
    """
    from fsla.data._legacy import HyperCleaner
    from fsla.data._reading import Columns

    options = _options("dense" if demo and model == "auto" else model, budget, seed, device)
    if demo:
        _demo(out, options)
        return
    columns = Columns(label, id_column, group, trusted_column, image, _names(features), size)
    job = _job(data, trusted, columns)

    def fit(report: Report) -> HyperCleaner:
        cleaner = HyperCleaner(progress=report, **options)
        mixed, trusted = job.mixed, job.trusted
        return cleaner.fit(mixed.features, mixed.y, trusted.features, trusted.y, groups=mixed.groups)

    found = _fitted(fit)
    _end(out, found, job, "Which labels to trust", {})


@interruptible(WITHOUT)
@_claims_out
def weigh(
    data: Data = None,
    trusted: Trusted = None,
    out: Out = Path("out/weigh"),
    label: Label = "label",
    group: Group = None,
    id_column: Id = None,
    trusted_column: TrustedColumn = None,
    image: Image = None,
    features: Features = "",
    size: Size = None,
    task: Annotated[str, typer.Option(help="'auto', 'classification' or 'regression'.")] = "auto",
    model: Model = "auto",
    budget: Budget = None,
    seed: Seed = 0,
    device: Device = "auto",
    demo: Demo = False,
) -> None:
    """Finds which groups of samples (sources, annotators, suppliers) to use, for labels or numbers.

    Writes weights.csv, cleaned.csv, model.safetensors, summary.json and report.html.
    """
    from fsla.data import _demo as digits
    from fsla.data._legacy import DataWeigher
    from fsla.data._reading import Columns

    options = _options("dense" if demo and model == "auto" else model, budget, seed, device)
    columns = Columns(label, id_column, group, trusted_column, image, _names(features), size)
    if not demo and group is None and data is not None and data.suffix.lower() != ".npz":
        raise ValueError(NO_GROUPS)
    job = digits.make().job if demo else _job(data, trusted, columns)
    if job.mixed.groups is None:
        raise ValueError(NO_GROUPS)

    def fit(report: Report) -> DataWeigher:
        return DataWeigher(task=task, progress=report, **options).fit(
            job.mixed.features, job.mixed.y, job.mixed.groups, job.trusted.features, job.trusted.y
        )

    _end(out, _fitted(fit), job, "Which data to trust", {})


def _demo(out: Path, options: dict[str, Any]) -> None:
    """Cleans digits with errors made on purpose, and says how well that went."""
    from fsla.data import _demo as digits
    from fsla.data._legacy import HyperCleaner

    demo = digits.make()
    job = demo.job

    def fit(report: Report, **more: Any) -> HyperCleaner:
        cleaner = HyperCleaner(progress=report, **options, **more)
        return cleaner.fit(job.mixed.x, job.mixed.y, job.trusted.x, job.trusted.y, groups=job.mixed.groups)

    found = _fitted(fit)
    before = _fitted(partial(fit, ways=["everything"])).score(demo.test_x, demo.test_y)
    after = found.score(demo.test_x, demo.test_y)
    flagged = found.suggested_ != found.classes_[found._given]
    precision = float(demo.wrong[flagged].mean()) if flagged.any() else 0.0
    recall = float(flagged[demo.wrong].mean())
    known = {"precision": precision, "recall": recall, "accuracy_before": before, "accuracy_after": after}
    _end(out, found, job, "Which labels to trust: a demonstration", {"demo": known})
    say(
        f"Of the flagged labels {100 * precision:.0f} % are wrong indeed, and of the wrong ones {100 * recall:.0f} % "
        f"are flagged. Accuracy on {len(demo.test_y)} test images: {100 * before:.1f} % before, {100 * after:.1f} % "
        "after."
    )


def _job(data: Path | None, trusted: Path | None, columns: Any) -> Job:
    from fsla.data import _job as jobs
    from fsla.data._inputs import listed

    if data is None:
        raise ValueError("There must be data to look at: a file or a folder. Or give --demo.")
    with console.status("reading"):
        job = jobs.load(data, trusted, columns)
        both = jobs.overlap(job)
    if job.mixed.columns:
        left = job.mixed.left_out
        without = f" Left out: {listed(left)}." if left else ""
        say(f"Learns from {len(job.mixed.columns)} columns: {listed(job.mixed.columns)}.{without}")
    if both:
        complain(f"{both} samples are among the trusted ones too: what is said of them is no check of them.")
    return job


def _options(model: str, budget: float | None, seed: int, device: str) -> dict[str, Any]:
    from fsla._checks import pick, pick_device

    pick(model, {"auto": 0, "linear": 0, "dense": 0, "cnn": 0}, "model")
    options: dict[str, Any] = {"model": model, "random_state": seed, "device": str(pick_device(device))}
    if budget is not None:
        end = time.monotonic() + 60 * budget
        options["enough"] = lambda: time.monotonic() >= end
    return options


def _fitted(fit: Callable[[Report], Any]) -> Any:
    """Fits under a bar; warnings become lines."""
    with warnings.catch_warnings(record=True) as caught, watched("training", get_group().is_first) as report:
        warnings.simplefilter("always")
        found = fit(report)
    for text in dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning)):
        complain(text)
    return found


def _end(out: Path, found: Any, job: Job, title: str, more: dict[str, object]) -> None:
    from fsla.data import _job as jobs

    if not get_group().is_first:
        return
    for line in jobs.write(out, found, job, title, more):
        say(line)
    if hasattr(found, "weights_"):
        width = max(5, *(len(str(name)) for name in found.weights_["group"]))
        labels = "wrong_labels" in found.weights_
        say(f"{'group':<{width}}  samples  {'look wrong  ' if labels else ''}weight  between      decision")
        for row in found.weights_.head(20).to_dict("records"):
            wrong = f"{100 * row['wrong_labels']:>8.0f} %  " if labels else ""
            say(
                f"{row['group']!s:<{width}}  {row['samples']:>7}  {wrong}{row['weight']:>6.2f}  "
                f"{row['low']:.2f} - {row['high']:.2f}  {row['decision']}"
            )
    say(f"The report: {out / 'report.html'}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
