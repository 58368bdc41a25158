"""What the selected candidates say of a data set: the numbers from which results and reports are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from fsla.data._dataset import Array, Features, TrainingData
from fsla.data._result import Comparison, Estimate


class Predictor(Protocol):
    """What a `Learner` returns: it predicts for new rows, and can be saved without pickle.

    Examples:
        >>> features = result.model.builder.transform(table[:5])
        >>> result.model.predictor.predict(features).shape
        (5, 2)
    """

    def predict(self, features: Features) -> Array:
        """Return rows x classes probabilities, or numbers in regression."""
        ...

    def to_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return arrays by name and JSON values. Raise ValueError if a part of it cannot be saved."""
        ...


class CandidateScore(NamedTuple):
    """How one strategy with one learner did on checked rows that it was not trained on."""

    strategy: str
    learner: str
    share: float
    """Weight in the ensemble."""
    loss: float
    """Mean negative log-likelihood after calibration, or mean squared error."""
    accuracy: float | None
    seconds: float


@dataclass(frozen=True, eq=False)
class GroupFit:
    """One entry a group, in the order of `TrainingData.group_names`."""

    weight: Array
    """How much a row of the group counts; the group that counts most has about 1."""
    weight_low: Array
    weight_high: Array
    """95 % interval over bootstrap draws of the checked rows."""
    quality: Array
    """Mean probability of the group's labels under models that did not see them, in [0, 1]; in regression the share of
    the target's variance that remains after the group's error, at least 0."""
    noise_rate: tuple[Estimate | None, ...]
    """Share of wrong labels; None in regression and where it cannot be estimated."""
    gain_without: tuple[Estimate | None, ...]
    """Accuracy (or minus squared error) on held-out checked rows without the group, minus that with it; None where the
    group is not in question."""
    num_checked_votes: Array
    """Labels of the group on checked rows."""


@dataclass(frozen=True, eq=False)
class DataFit:
    """A fitted ensemble, and what it says of each row and group."""

    data: TrainingData
    predictor: Predictor
    candidates: tuple[CandidateScore, ...]
    """Largest share first."""
    out_of_fold: Array
    """Rows x classes (numbers in regression): the ensemble's prediction for every row of the data, by models that were
    not trained on that row's labels."""
    posterior: Array
    """The same, with the row's votes and the accuracy of their groups taken into account."""
    vote_weight: Array
    """How much each vote counts in training, as long as `data.votes`."""
    groups: GroupFit | None
    """None where there is one group."""
    confusion: Array | None
    """classes x classes: P(given label | true label), true labels as rows; None in regression."""
    group_confusion: Array | None
    """groups x classes x classes where rows have several votes or groups have enough checked votes; else None."""
    noise_rate: Estimate | None
    """Prediction-powered share of wrong given labels; None without a random sample of checked rows with votes."""
    comparison: Comparison | None
    skipped: tuple[str, ...] = ()
    """What was not tried, with the reason, one sentence each."""
