"""`fsla.data.clean`: from a table of mixed quality to decisions, a cleaned table, a model and a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fsla._checks import file_path, function, instance, pick, pick_device, whole_number
from fsla.data import _tables as tables
from fsla.data._data_fit import DataFit
from fsla.data._decisions import Decisions, Relabel, decide, uncovered_groups
from fsla.data._model_file import DataModel
from fsla.data._result import CleaningResult
from fsla.data._review import select_review
from fsla.data._sentences import Figures, write_decision, write_facts

if TYPE_CHECKING:
    import pandas as pd

    from fsla.data._learners import Learner
    from fsla.data._loading import LoadedData
    from fsla.data._strategies import Strategy

Progress = Callable[[str, int, int], None]


def clean(
    source: Any,
    *,
    label: str = "label",
    trusted: Any = None,
    checked: str | None = None,
    trusted_column: str | None = None,
    group: str | None = None,
    id: str | None = None,
    label_columns: Sequence[str] | None = None,
    annotator: str | None = None,
    image: str | None = None,
    text: str | Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    encoder: str | None = None,
    task: Literal["auto", "classification", "regression"] = "auto",
    missing: Literal["impute", "drop", "error"] = "impute",
    image_size: int | None = None,
    relabel: Relabel = "sure",
    review: int = 50,
    strategies: Sequence[str | Strategy] | None = None,
    learners: Sequence[str | Learner | Any] | None = None,
    random_state: int = 0,
    device: str = "auto",
    progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> CleaningResult:
    """Find wrong labels and bad sources in data of mixed quality, from some rows that were checked.

    Args:
        source: a table (path or DataFrame), a Hugging Face dataset, or a folder with a folder of images a class.
        label: the column of labels, or of numbers to predict.
        trusted: a table of checked rows in the same form, or several. `reviewed.csv` of the report is one.
        checked: a column of the same table with checked labels, empty where nobody checked.
        trusted_column: a column of true and false: whether the label of a row is checked.
        group: the column that says where a row comes from.
        id: the column with a unique name a row.
        label_columns: columns with one label each, where a row has several.
        annotator: the column of annotators, where each line is one label of one annotator.
        image: the column of image paths.
        text: the column of free text, or several. Default: recognised.
        features: columns to learn from. Default: all that are not anything else.
        ignore: columns to leave out.
        encoder: a local sentence-transformers model for text.
        task: "auto" takes numbers of many values for regression.
        missing: "impute" fills missing cells of features, "drop" leaves their rows out, "error" refuses them.
        image_size: height and width to which images are scaled.
        relabel: "sure" corrects labels from a probability of .9, "all" every label that looks wrong.
        review: number of rows to review.
        strategies: what to try, by name or as objects. Default: what suits the data.
        learners: what to train: names, estimators of scikit-learn, modules of PyTorch. Default: what suits the data.
        random_state: seed of everything random.
        device: where networks on images are trained: "auto", "cpu" or "cuda".
        progress: called with a text, the number of steps done, and their number.
        should_stop: asked between strategies; the remaining ones are skipped.

    Returns:
        Decisions, tables and a model; `save` writes them into a folder.

    Raises:
        ValueError: if the data cannot be used; the message says what to change.

    Examples:
        >>> result = fsla.data.clean(table, checked="checked", group="source", strategies=["trusted_only", "all_data"])
        >>> sorted(result.candidates["strategy"].unique())
        ['all_data', 'trusted_only']
    """
    from fsla.data._estimators import check_options, choose_learners, choose_strategies
    from fsla.data._loading import load_data
    from fsla.data._selection import fit_data

    _check_columns(
        label=label,
        checked=checked,
        trusted_column=trusted_column,
        group=group,
        id=id,
        annotator=annotator,
        image=image,
    )
    for name, several in (("label_columns", label_columns), ("text", text), ("features", features), ("ignore", ignore)):
        if several is not None and not (name == "text" and isinstance(several, str)):
            instance(several, (list, tuple, Set), name, "clean", "a list of columns")
            for column in several:
                _check_columns(**{name: column})
    check_options(strategies, learners, "clean")
    pick_device(device)
    function(progress, "progress", "clean", optional=True)
    function(should_stop, "should_stop", "clean", optional=True)
    whole_number(random_state, "random_state", "clean", least=0)
    if image_size is not None:
        whole_number(image_size, "image_size", "clean")
    if encoder is not None:
        folder = file_path(encoder, "encoder", "clean")
        if not folder.is_dir():
            raise ValueError(f"Cannot read the encoder {folder}: it is not a folder.")
    pick(relabel, dict.fromkeys(("never", "sure", "all")), "relabel")
    whole_number(review, "review", "clean", least=0)
    loaded = load_data(
        source,
        label=label,
        trusted=trusted,
        checked=checked,
        trusted_column=trusted_column,
        group=group,
        id=id,
        label_columns=label_columns,
        annotator=annotator,
        image=image,
        text=text,
        features=features,
        ignore=ignore,
        encoder=encoder,
        task=task,
        missing=missing,
        image_size=image_size,
    )
    fit = fit_data(
        loaded.data,
        strategies=choose_strategies(strategies, loaded.data),
        learners=choose_learners(learners, loaded.data, device),
        seed=random_state,
        device=device,
        progress=progress,
        should_stop=should_stop,
    )
    inputs = {
        "data": _name(source),
        "trusted": _name(trusted),
        "label": label,
        "group": group,
        "id": id,
        "checked": checked,
        "trusted_column": trusted_column,
        "label_columns": None if label_columns is None else list(label_columns),
        "annotator": annotator,
        "relabel": relabel,
        "random_state": random_state,
    }
    return build_result(loaded, fit, relabel=relabel, review=review, seed=random_state, inputs=inputs)


def _check_columns(**columns: object) -> None:
    """Raise unless names of columns are text, or None where there is none."""
    for name, column in columns.items():
        if column is not None or name == "label":
            instance(column, str, name, "clean", "the name of a column")


def build_result(
    loaded: LoadedData, fit: DataFit, *, relabel: Relabel, review: int, seed: int, inputs: dict[str, Any]
) -> CleaningResult:
    """Make all decisions, tables and sentences from one fit."""
    data, rows = fit.data, loaded.num_rows
    decisions = decide(fit, relabel)
    keep = ~decisions.dropped[:rows]
    weight = np.where(decisions.dropped, 0.0, tables.sample_weights(fit, decisions))[:rows]
    groups = tables.group_table(fit, decisions)
    figures = _figures(loaded, fit, decisions, relabel, groups)
    model = DataModel(data.task, loaded.builder, fit.predictor, data.classes)
    return CleaningResult(
        task=data.task,
        decision=write_decision(figures),
        facts=write_facts(figures, model.unsaved_part()),
        comparison=fit.comparison,
        correction=decisions.correction,
        groups=groups,
        annotators=tables.annotator_table(fit),
        confusion=tables.confusion_table(fit),
        group_confusions=tables.group_confusions(fit),
        label_issues=tables.issue_table(fit, decisions, loaded.ids, rows, weight),
        cleaned=tables.cleaned_table(_items(loaded), loaded.label, _final_labels(loaded, decisions), weight, keep),
        review=tables.review_table(loaded, fit, decisions, select_review(data, decisions, rows, review, seed)),
        candidates=tables.candidate_table(fit),
        columns=loaded.columns,
        noise_rate=figures.noise_rate,
        duplicates=loaded.duplicates,
        notes=loaded.notes,
        model=model,
        sample_weight=weight,
        table=loaded.table,
        classes=() if data.classes is None else tuple(str(name) for name in data.classes),
        num_checked=len(data.checked_rows),
        skipped=fit.skipped,
        inputs=inputs | {"label": loaded.label},
    )


def _items(loaded: LoadedData) -> pd.DataFrame:
    """Return a row a sample: of several rows with one id the first, with the label that stands for all of them."""
    if len(loaded.row_of) == loaded.num_rows:
        return loaded.table
    _, first = np.unique(loaded.row_of, return_index=True)
    items = loaded.table.iloc[first].reset_index(drop=True)
    items[loaded.label] = [_as_text(label) for label in loaded.given_labels[: loaded.num_rows]]
    return items


def _final_labels(loaded: LoadedData, decisions: Decisions) -> list[Any]:
    """Return each row's label as it is to be written: the cell itself where the label stays."""
    final = tables.final_labels(loaded.data, decisions)[: loaded.num_rows]
    names = tables.label_names(loaded.data, final)
    stays = final == decisions.given_label[: loaded.num_rows]
    cells = loaded.given_labels[: loaded.num_rows]
    return [_as_text(cell if same else name) for cell, same, name in zip(cells, stays, names, strict=True)]


def _as_text(label: Any) -> str:
    return "" if label is None else f"{label:.6g}" if isinstance(label, float) else str(label)


def _figures(loaded: LoadedData, fit: DataFit, decisions: Decisions, relabel: Relabel, groups: Any) -> Figures:
    rows = loaded.num_rows
    labeled = np.isfinite(decisions.quality[:rows])
    keep = ~decisions.dropped[:rows]
    changed = decisions.corrected[:rows] & keep
    uncovered = uncovered_groups(fit)
    best = fit.candidates[0] if fit.candidates else None
    counted = sum(candidate.share > 0 for candidate in fit.candidates)
    return Figures(
        task=fit.data.task,
        relabel=relabel,
        effect=decisions.effect,
        comparison=fit.comparison,
        groups=list(
            zip(groups["group"], groups["n_samples"].tolist(), groups["decision"], groups["reason"], strict=True)
        ),
        num_rows=rows,
        num_labeled=int(labeled.sum()),
        num_issues=int(decisions.is_issue[:rows].sum()),
        num_corrected=int((changed & labeled).sum()),
        num_filled=int((changed & ~labeled).sum()),
        num_cleaned=int(keep.sum()),
        num_rescued=int(decisions.rescued[:rows].sum()),
        num_checked=len(fit.data.checked_rows),
        correction=decisions.correction,
        noise_rate=None if uncovered else fit.noise_rate,
        uncovered=uncovered,
        largest=None if best is None else (best.strategy, best.learner, best.share, counted),
        skipped=fit.skipped,
    )


def _name(source: Any) -> Any:
    """Return the name of an input for the summary."""
    if source is None or isinstance(source, str | Path):
        return None if source is None else str(source)
    if isinstance(source, list | tuple):
        return [_name(part) for part in source]
    return type(source).__name__
