"""Tables of a result: groups, annotators, confusions, labels, and the cleaned data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fsla.data._data_fit import DataFit
from fsla.data._dataset import Array, TrainingData
from fsla.data._decisions import DECISIONS, Decisions
from fsla.data._review import ReviewRows

if TYPE_CHECKING:
    import pandas as pd

GROUP_COLUMNS = (
    "group", "n_samples", "noise_rate", "noise_rate_low", "noise_rate_high", "label_quality", "weight", "weight_low",
    "weight_high", "decision", "reason",
)  # fmt: skip


def group_table(fit: DataFit, decisions: Decisions) -> pd.DataFrame:
    """Return a row a group: dropped ones first, then those to review; low weights first."""
    import pandas as pd

    groups = fit.groups
    if groups is None:
        return pd.DataFrame(columns=list(GROUP_COLUMNS))
    rates = [(np.nan,) * 3 if rate is None else rate for rate in groups.noise_rate]
    names = fit.data.group_names
    table = pd.DataFrame(
        {
            "group": [str(name) for name in names],
            "n_samples": np.bincount(fit.data.votes.group, minlength=len(names)),
            **{name: [rate[i] for rate in rates] for i, name in enumerate(GROUP_COLUMNS[2:5])},
            "label_quality": groups.quality,
            "weight": groups.weight,
            "weight_low": groups.weight_low,
            "weight_high": groups.weight_high,
            "decision": [group.decision for group in decisions.groups],
            "reason": [group.reason for group in decisions.groups],
        }
    )
    order = np.lexsort((groups.weight, table["decision"].map(DECISIONS.index)))
    return table.iloc[order].reset_index(drop=True)


def annotator_table(fit: DataFit) -> pd.DataFrame:
    """Return how well each group does on checked rows; empty where rows have one label."""
    import pandas as pd

    data = fit.data
    classifies = data.task == "classification"
    measures = ("accuracy", "accuracy_low", "accuracy_high") if classifies else ("bias", "rmse")
    columns = ["annotator", "n_labels", "n_checked", *measures]
    if not data.has_several_votes:
        return pd.DataFrame(columns=columns)
    true = np.zeros(len(data.features))
    true[data.checked_rows] = data.checked_labels
    checked = data.is_checked[data.votes.row]
    labels = np.bincount(data.votes.group, minlength=data.num_groups)
    rows = []
    for g, name in enumerate(data.group_names):
        of_group = checked & (data.votes.group == g)
        error = data.votes.label[of_group] - true[data.votes.row[of_group]]
        rows.append(
            [str(name), int(labels[g]), int(of_group.sum()), *(_accuracy(error) if classifies else _bias(error))]
        )
    return pd.DataFrame(rows, columns=columns)


def _accuracy(error: Array) -> tuple[float, float, float]:
    """Return the share of right labels with Wilson's interval."""
    if not len(error):
        return np.nan, np.nan, np.nan
    n, p, z2 = len(error), float((error == 0).mean()), 1.96**2
    center, half = p + z2 / (2 * n), 1.96 * np.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return p, float((center - half) / (1 + z2 / n)), float((center + half) / (1 + z2 / n))


def _bias(error: Array) -> tuple[float, float]:
    if not len(error):
        return np.nan, np.nan
    return float(error.mean()), float(np.sqrt((error**2).mean()))


def confusion_table(fit: DataFit) -> pd.DataFrame:
    """Return P(given label | true label), true labels as rows; empty in regression."""
    import pandas as pd

    if fit.confusion is None:
        return pd.DataFrame()
    return _confusion_frame(fit.confusion, fit.data)


def _confusion_frame(confusion: Array, data: TrainingData) -> pd.DataFrame:
    import pandas as pd

    names = [] if data.classes is None else [str(name) for name in data.classes]
    return pd.DataFrame(confusion, index=pd.Index(names, name="true_label"), columns=names)


def group_confusions(fit: DataFit) -> dict[str, pd.DataFrame]:
    """Return the confusion matrix of each group, where there is enough to estimate one."""
    if fit.group_confusion is None:
        return {}
    return {
        str(name): _confusion_frame(confusion, fit.data)
        for name, confusion in zip(fit.data.group_names, fit.group_confusion, strict=True)
    }


def candidate_table(fit: DataFit) -> pd.DataFrame:
    """Return the candidates, the largest share first."""
    import pandas as pd

    classifies = fit.data.task == "classification"
    rows = [
        {
            "strategy": c.strategy,
            "learner": c.learner,
            "share": c.share,
            **({"log_likelihood": -c.loss, "accuracy": c.accuracy} if classifies else {"squared_error": c.loss}),
            "seconds": c.seconds,
        }
        for c in fit.candidates
    ]
    measures = ["log_likelihood", "accuracy"] if classifies else ["squared_error"]
    return pd.DataFrame(rows, columns=["strategy", "learner", "share", *measures, "seconds"])


def label_names(data: TrainingData, labels: Array) -> list[Any]:
    """Return class names (missing for -1), or numbers."""
    if data.classes is None:
        return [None if label != label else float(label) for label in labels]
    return [None if label < 0 else data.classes[int(label)] for label in labels]


def sample_weights(fit: DataFit, decisions: Decisions) -> Array:
    """Return how much each row counts with the label that it has after cleaning.

    A checked row counts 1, a corrected label its probability, and any other the mean weight of the votes for it.
    """
    data = fit.data
    votes = data.votes
    agrees = np.ones(len(votes), dtype=bool)
    if data.task == "classification":
        agrees = votes.label == decisions.given_label[votes.row]
    rows = votes.row[agrees]
    total = np.bincount(rows, weights=fit.vote_weight[agrees], minlength=len(data.features))
    weight = total / np.maximum(np.bincount(rows, minlength=len(data.features)), 1)
    weight = np.where(decisions.corrected & np.isfinite(decisions.probability), decisions.probability, weight)
    clipped: Array = np.where(data.is_checked, 1.0, np.clip(weight, 0.0, None))
    return clipped


def final_labels(data: TrainingData, decisions: Decisions) -> Array:
    """Return the coded label of each row after cleaning: checked, corrected or as it was."""
    labels = np.where(decisions.corrected, decisions.suggested, decisions.given_label)
    labels[data.checked_rows] = data.checked_labels
    return labels


def row_groups(data: TrainingData) -> list[str]:
    """Return the groups of each row's votes."""
    names = [""] * len(data.features)
    for row, group in zip(data.votes.row.tolist(), data.votes.group.tolist(), strict=True):
        names[row] = f"{names[row]}, {data.group_names[group]}" if names[row] else str(data.group_names[group])
    return names


def issue_table(fit: DataFit, decisions: Decisions, ids: Array, rows: int, weight: Array) -> pd.DataFrame:
    """Return a row a labelled sample, worst first."""
    import pandas as pd

    data = fit.data
    labeled = np.nonzero(np.isfinite(decisions.quality[:rows]) & ~data.is_checked[:rows])[0]
    table = pd.DataFrame(
        {
            "row": labeled,
            "id": np.asarray(ids, dtype=object)[labeled],
            "given_label": label_names(data, decisions.given_label[labeled]),
            "suggested_label": label_names(data, decisions.suggested[labeled]),
            "suggested_probability": decisions.probability[labeled],
            "is_label_issue": decisions.is_issue[labeled],
            "label_quality": decisions.quality[labeled],
            "sample_weight": weight[labeled],
        }
    )
    if data.num_groups > 1:
        groups = row_groups(data)
        table["group"] = [groups[row] for row in labeled]
    return table.sort_values("label_quality", kind="stable", ignore_index=True)


def review_table(loaded: Any, fit: DataFit, decisions: Decisions, chosen: ReviewRows) -> pd.DataFrame:
    """Return the rows to review with what a person needs to judge them."""
    import pandas as pd

    data, rows = fit.data, chosen.rows
    groups = row_groups(data)
    shown = [loaded.display(int(row)) for row in rows]
    table = pd.DataFrame(
        {
            "row": rows,
            "id": np.asarray(loaded.ids, dtype=object)[rows],
            "given_label": label_names(data, decisions.given_label[rows]),
            "suggested_label": label_names(data, decisions.suggested[rows]),
            "probability": decisions.probability[rows],
            "reason": [
                _review_reason(data, fit, decisions, int(row), bool(random), groups)
                for row, random in zip(rows, chosen.is_random, strict=True)
            ],
            "is_random": chosen.is_random,
        }
    )
    if data.num_groups > 1:
        table["group"] = [groups[row] for row in rows]
    for name, missing in (("text", None), ("cells", {}), ("image", None)):
        values = [part.get(name, missing) for part in shown]
        if any(values):
            table[name] = pd.Series(values, dtype=object)
    return table


def _review_reason(
    data: TrainingData, fit: DataFit, decisions: Decisions, row: int, random: bool, groups: list[str]
) -> str:
    if random:
        return "drawn at random: these rows give the share of wrong labels"
    if data.task == "regression":
        gap = decisions.given_label[row] - decisions.suggested[row]
        return f"{abs(gap):.3g} {'above' if gap > 0 else 'below'} the predicted {decisions.suggested[row]:.3g}"
    quality, probability = decisions.quality[row], decisions.probability[row]
    given_name, suggested = label_names(data, np.array([decisions.given_label[row], decisions.suggested[row]]))
    if given_name == suggested:
        return f"probability of {given_name} is {100 * quality:.0f} %, unlike the rows checked so far"
    return f"probability of {given_name} is {100 * quality:.0f} %, of {suggested} {100 * probability:.0f} %"


def cleaned_table(table: pd.DataFrame, label: str, labels: list[Any], weight: Array, keep: Array) -> pd.DataFrame:
    """Return the rows that stay, with their labels after cleaning; the cells of other columns are as they were.

    Args:
        table: the table as read.
        label: its column of labels.
        labels: the label of each row after cleaning, as it is to be written; None leaves the cell empty.
        weight: one number a row.
        keep: mask of the rows that stay.
    """
    cleaned = table.copy()
    position = cleaned.columns.get_loc(label) if label in cleaned.columns else len(cleaned.columns)
    if label in cleaned.columns:
        cleaned[_free_name(cleaned, f"original_{label}")] = cleaned.pop(label)
    cleaned.insert(position, label, labels)
    cleaned[_free_name(cleaned, "sample_weight")] = weight
    return cleaned[keep].reset_index(drop=True)


def _free_name(table: pd.DataFrame, name: str) -> str:
    """Return the name, with underscores before it while the table has such a column."""
    while name in table.columns:
        name = f"_{name}"
    return name
