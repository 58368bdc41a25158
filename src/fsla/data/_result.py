"""The outcome of a cleaning run, from which the terminal, the files and the report are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fsla.data._dataset import Array, Task

if TYPE_CHECKING:
    import pandas as pd


class Estimate(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Doing nothing and the recommended choice, on checked rows that neither was trained on."""

    metric: str
    """"accuracy" or "root mean squared error"."""
    rows: int
    nothing: Estimate
    """Train on everything as it is."""
    recommended: Estimate
    gain: Estimate
    """Paired difference, positive where the recommended choice is better."""
    best_single: str = ""
    """Name of the candidate with the largest share."""
    trusted_only: Estimate | None = None


@dataclass(frozen=True, eq=False)
class CleaningResult:
    """What `fsla.data.clean` found: decisions, tables and a model."""

    task: Task
    decision: str
    """One line: what to do and the figure that supports it."""
    facts: tuple[str, ...]
    """Further lines, one fact each, of which none contradicts another."""
    comparison: Comparison | None
    """None where no row is checked."""
    groups: pd.DataFrame
    """group, n_samples, noise_rate, noise_rate_low, noise_rate_high, label_quality, weight, weight_low, weight_high,
    decision (keep, drop, review or not_evaluated), reason; empty without groups."""
    annotators: pd.DataFrame
    """annotator, n_labels, n_checked, accuracy, accuracy_low, accuracy_high [regression: bias, rmse]; empty where a
    row has one label."""
    confusion: pd.DataFrame
    """P(given label | true label), true labels as rows; empty in regression."""
    label_issues: pd.DataFrame
    """One row per labelled sample, worst first: row (position in the table), id, given_label, suggested_label,
    suggested_probability, is_label_issue, label_quality, sample_weight, group."""
    cleaned: pd.DataFrame
    """The table with corrected labels (original_<label> keeps the given one) and sample_weight, without dropped
    groups."""
    review: pd.DataFrame
    """Rows worth a person's look: row, id, given_label, suggested_label, probability, reason, is_random, and either
    text or picture."""
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
    model: Any
    """The fitted estimator; `predict` takes the raw columns."""
    sample_weight: Array
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """Names of files and columns, for the summary."""

    def summary(self) -> dict[str, Any]:
        """Return the result as plain values, as summary.json has it."""
        raise NotImplementedError

    def save(self, folder: str | Path) -> None:
        """Write the report, the tables and the model into a folder, all of them or none."""
        raise NotImplementedError
