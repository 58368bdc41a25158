"""The outcome of a cleaning run, from which the terminal, the files and the report are made."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fsla.data._dataset import Array, Task

if TYPE_CHECKING:
    import pandas as pd

    from fsla.data._model_file import DataModel


Effect = Literal["better", "same", "worse", "unknown"]


class Estimate(NamedTuple):
    """A value with its 95 % interval.

    Args:
        value: the value.
        low: lower end of the interval.
        high: upper end of the interval.

    Examples:
        >>> rate = result.noise_rate
        >>> rate.low < rate.value < rate.high
        True
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Doing nothing and the recommended choice, on checked rows that neither was trained on.

    Args:
        metric: "accuracy" or "root mean squared error".
        rows: number of checked rows.
        nothing: result of training on everything as it is.
        recommended: result of the recommended choice.
        gain: paired difference, positive where the recommended choice is better.
        best_single: name of the candidate with the largest share.
        trusted_only: result of training on checked rows alone.

    Examples:
        >>> result.comparison.recommended.value > result.comparison.nothing.value
        True
    """

    metric: str
    rows: int
    nothing: Estimate
    recommended: Estimate
    gain: Estimate
    best_single: str = ""
    trusted_only: Estimate | None = None


@dataclass(frozen=True)
class Correction:
    """Randomly checked rows with a given label: how many labels are right before and after correction.

    Args:
        rows: number of these rows.
        right_before: how many given labels are right.
        fixed: how many are wrong before and right after.
        broken: how many are right before and wrong after.

    Examples:
        >>> result.correction.right_after - result.correction.right_before > 10
        True
    """

    rows: int
    right_before: int
    fixed: int
    broken: int

    @property
    def right_after(self) -> int:
        """Return the number of right labels after correction."""
        return self.right_before + self.fixed - self.broken

    @property
    def effect(self) -> Effect:
        """Return whether correction improves labels measurably: a sign test at 5 %."""
        from scipy.stats import binomtest

        changed = self.fixed + self.broken
        if not changed or binomtest(self.fixed, changed).pvalue > 0.05:
            return "same"
        return "better" if self.fixed > self.broken else "worse"


@dataclass(frozen=True, eq=False)
class CleaningResult:
    """Result of `fsla.data.clean`: decisions, tables and a model.

    `fsla.data.clean` makes it. All tables come from one fit, so that no two contradict each other.

    Examples:
        >>> bool(result.label_issues["is_label_issue"].sum() > 40)
        True
        >>> result.save("out")
        >>> sorted(path.name for path in pathlib.Path("out").glob("*.csv"))
        ['cleaned.csv', 'group_weights.csv', 'label_issues.csv', 'review.csv']
    """

    task: Task
    decision: str
    """One line: what to do and the figure that supports it."""
    facts: tuple[str, ...]
    """Further lines, one fact each, of which none contradicts another."""
    comparison: Comparison | None
    """None where no row is checked."""
    correction: Correction | None
    """None in regression, and where no checked row has a given label."""
    groups: pd.DataFrame
    """group, n_samples, noise_rate, noise_rate_low, noise_rate_high, label_quality, weight, weight_low, weight_high,
    decision (keep, drop, review or not_evaluated), reason; empty without groups."""
    annotators: pd.DataFrame
    """annotator, n_labels, n_checked, accuracy, accuracy_low, accuracy_high [regression: bias, rmse]; empty where a
    row has one label."""
    confusion: pd.DataFrame
    """P(given label | true label), true labels as rows; empty in regression."""
    group_confusions: Mapping[str, pd.DataFrame]
    """The same for each group; empty where checked labels are too few."""
    label_issues: pd.DataFrame
    """One row per labelled sample, worst first: row (position in the table), id, given_label, suggested_label,
    suggested_probability, is_label_issue, label_quality, sample_weight, group."""
    cleaned: pd.DataFrame
    """The table with corrected labels (original_<label> keeps the given one) and sample_weight, without rows of dropped
    groups that cannot be corrected."""
    review: pd.DataFrame
    """Rows worth a person's look: row, id, given_label, suggested_label, probability, reason, is_random, and what
    there is of group, text, cells and image (PNG)."""
    candidates: pd.DataFrame
    """strategy, learner, share (of the ensemble), log_likelihood or squared error, accuracy, seconds."""
    columns: pd.DataFrame
    """What each column was taken for: column, role, kind, note."""
    noise_rate: Estimate | None
    """Share of wrong labels; None where no random checked row carries a given label."""
    duplicates: pd.DataFrame
    """Exact duplicates and rows that are both trusted and training: row, same_as, why."""
    notes: tuple[str, ...]
    """What was done to the data on reading, one fact each."""
    model: DataModel
    """The fitted model; `predict` takes the raw columns."""
    sample_weight: Array
    """How much each row of the table counts; 0 for rows that are left out."""
    table: pd.DataFrame
    """The table as it was read."""
    classes: tuple[str, ...] = ()
    """Names of the classes; empty in regression."""
    num_checked: int = 0
    skipped: tuple[str, ...] = ()
    """What was not tried, with the reason."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """Names of files and columns."""

    def summary(self) -> dict[str, Any]:
        """Return the result as plain values, as summary.json has it."""
        comparison = self.comparison
        return {
            "summary": [self.decision, *self.facts],
            "inputs": dict(self.inputs),
            "task": self.task,
            "n_samples": len(self.table),
            "n_trusted": self.num_checked,
            "comparison": None
            if comparison is None
            else {
                name: value._asdict() if isinstance(value, Estimate) else value
                for name, value in vars(comparison).items()
            },
            "correction": None if self.correction is None else asdict(self.correction),
            "noise_rate": None if self.noise_rate is None else self.noise_rate._asdict(),
            "groups": _records(self.groups),
            "annotators": _records(self.annotators),
            "classes": list(self.classes),
            "confusion": [] if self.confusion.empty else self.confusion.to_numpy().round(4).tolist(),
            "group_confusions": {
                name: table.to_numpy().round(4).tolist() for name, table in self.group_confusions.items()
            },
            "strategies": _records(self.candidates),
            "skipped_strategies": list(self.skipped),
            "columns": _records(self.columns),
            "duplicates": _records(self.duplicates),
            "notes": list(self.notes),
        }

    def save(self, folder: str | Path) -> None:
        """Write the report, the tables and the model into a folder, all of them or none.

        Args:
            folder: a new or empty folder, or one that an earlier run wrote.

        Raises:
            ValueError: if the folder holds other files, or another process writes it.
        """
        from fsla.data import _output as output

        with output.claim_folder(Path(folder)):
            self.publish(Path(folder))

    def publish(self, folder: Path, extra: Mapping[str, object] | None = None) -> None:
        """Write the files into a folder that the caller has claimed; `extra` joins the summary."""
        from fsla.data import _output as output

        output.publish(folder, self._writers(), self.summary() | dict(extra or {}))

    def _writers(self) -> dict[str, Callable[[Path], None]]:
        """Return what writes each file, by its name."""
        from fsla._storage._files import write_text
        from fsla.data._output import table_for_people, table_for_programs
        from fsla.data._report import render

        def text(content: str) -> Callable[[Path], None]:
            return lambda path: write_text(path, content)

        review = self.review.drop(columns=["image", "cells"], errors="ignore")
        writers = {
            "label_issues.csv": text(table_for_people(self.label_issues)),
            "cleaned.csv": text(table_for_programs(self.cleaned)),
            "review.csv": text(table_for_people(review)),
        }
        if len(self.groups):
            writers["group_weights.csv"] = text(table_for_people(self.groups))
        if len(self.annotators):
            writers["annotators.csv"] = text(table_for_people(self.annotators))
        if self.model.unsaved_part() is None:
            writers["model.safetensors"] = self.model.save
        writers["report.html"] = text(render(self))
        return writers


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table as JSON values."""
    records: list[dict[str, Any]] = json.loads(table.to_json(orient="records", double_precision=6))
    return records
