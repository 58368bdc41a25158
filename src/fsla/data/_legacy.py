"""`DataWeigher` and `HyperCleaner`: which data to trust, by scikit-learn's conventions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils.validation import check_is_fitted

from fsla._checks import pick
from fsla.data import _tables as tables
from fsla.data._base import Trusting
from fsla.data._choice import FOLDS, Report
from fsla.data._inputs import Array, are_numbers

if TYPE_CHECKING:
    import pandas as pd


class HyperCleaner(ClassifierMixin, Trusting):  # type: ignore[misc]
    """Finds wrong labels, what they should be, and a classifier that is not hurt by them, from a few that are trusted.

    Args:
        model: "auto" (a small network for tables, a linear head for embeddings, a CNN for images), "linear", "dense",
            "cnn", an nn.Module whose outputs are class scores, or a function that makes one.
        folds: parts of the trusted samples, by which the ways to train are compared.
        steps: of each training; by default from the number of samples.
        bilevel_steps: of each run of FSLA.
        device: "auto" takes a GPU where there is one.
        random_state: fixes every number.
        ways: those to try, by their names in `candidates_`; None tries all.
        enough: a function that says when time is up; ways that are left are then skipped.
        progress: a function of what is under way, how many ways are done, and of how many.

    Attributes:
        label_quality_: one number in [0, 1] a sample: how far its label is believed, times the weight of its group;
            the lower, the worse.
        suggested_: the most probable label of each sample, and its probability in suggested_probability_.
        transition_: T[c, y], the chance that a sample of class c is given the label y.
        noise_rate_: the share of wrong labels as far as flips between classes explain them, and noise_rate_interval_,
            from there to all that the networks doubt.
        sample_weight_: for any other estimator's `fit`: how much each sample counts with the label that it was given.
        weights_: of the groups, where given: a table of group, samples, wrong_labels (the share that looks wrong),
            weight, low, high and decision (keep, drop, review or not compared).
        candidates_: the ways that were tried, with the trusted log-likelihood that each reached and its share in the
            model; and the model, "together".
    """

    def fit(self, X: Any, y: Any, X_clean: Any = None, y_clean: Any = None, groups: Any = None) -> Self:
        """Learns from samples of mixed quality and from trusted ones; `groups` says where each sample came from."""
        choice = self._fit(X, y, groups, (X_clean, y_clean), ("X_clean", "y_clean"), regression=False)
        labels = choice.labels
        assert labels is not None
        self._given = self._targets.numpy()
        self.label_quality_ = labels.quality.double().cpu().numpy()
        probability, number = labels.belief.max(1)
        self._suggested = number.cpu().numpy()
        self.suggested_ = self.classes_[self._suggested]
        self.suggested_probability_ = probability.double().cpu().numpy()
        self.transition_ = labels.transition.double().cpu().numpy()
        self.noise_rate_ = labels.noise_rate
        self.noise_rate_interval_ = tables.interval(labels.noise_rates, len(self._given))
        return self

    def find_label_issues(self) -> pd.DataFrame:
        """A row for each sample, the worst first: index, given and suggested label, whether it is an issue."""
        import pandas as pd

        check_is_fitted(self)
        given = self.classes_[self._given]
        table = pd.DataFrame(
            {
                "index": np.arange(len(given)),
                "given_label": given,
                "suggested_label": self.suggested_,
                "suggested_probability": self.suggested_probability_,
                "is_label_issue": self.suggested_ != given,
                "label_quality": self.label_quality_,
                "weight": self.sample_weight_,
            }
        )
        return table.sort_values("label_quality", kind="stable", ignore_index=True)

    def predict_proba(self, X: Any) -> Array:
        return self._answers(X)

    def predict(self, X: Any) -> Array:
        answers = self.predict_proba(X)
        found: Array = self.classes_[answers.argmax(1)]
        return found


class DataWeigher(Trusting):
    """Finds which groups of samples (sources, annotators, suppliers) to use, from a few samples that are trusted.

    Args:
        task: "classification", "regression", or "auto": numbers with fractions, or with more than 20 different
            values, are taken for a regression.
        model, folds, steps, bilevel_steps, device, random_state, ways, enough, progress: as of `HyperCleaner`.

    Attributes:
        weights_: a table of group, samples, weight, low and high (over runs on other trusted samples), and decision.
        sample_weight_: for any other estimator's `fit`.
        candidates_: the ways that were tried, with the trusted log-likelihood that each reached and its share in the
            model; and the model, "together".
    """

    def __init__(
        self,
        *,
        task: str = "auto",
        model: Any = "auto",
        folds: int = FOLDS,
        steps: int | None = None,
        bilevel_steps: int | None = None,
        device: str = "auto",
        random_state: Any = None,
        ways: Sequence[str] | None = None,
        enough: Callable[[], bool] | None = None,
        progress: Report | None = None,
    ) -> None:
        super().__init__(
            model=model,
            folds=folds,
            steps=steps,
            bilevel_steps=bilevel_steps,
            device=device,
            random_state=random_state,
            ways=ways,
            enough=enough,
            progress=progress,
        )
        self.task = task

    def fit(self, X: Any, y: Any, groups: Any = None, X_trusted: Any = None, y_trusted: Any = None) -> Self:
        """Learns a weight for each group; without groups, one for each sample."""
        pick(self.task, {"auto": 0, "classification": 0, "regression": 0}, "task")
        task = self.task
        if task == "auto" and y_trusted is not None:
            task = "regression" if are_numbers(y_trusted) else "classification"
        regression = task == "regression"
        self._fit(X, y, groups, (X_trusted, y_trusted), ("X_trusted", "y_trusted"), regression)
        self.task_ = task
        return self

    def predict(self, X: Any) -> Array:
        """Labels, or numbers for a regression."""
        answers = self._answers(X)
        if self.task_ == "regression":
            return answers * self._unit + self._offset
        found: Array = self.classes_[answers.argmax(1)]
        return found

    def predict_proba(self, X: Any) -> Array:
        if self.task_ == "regression":
            raise AttributeError("A regression has no probabilities. Call predict.")
        return self._answers(X)

    def score(self, X: Any, y: Any) -> float:
        """Accuracy, or R² for a regression."""
        answers = self.predict(X)
        return float(r2_score(y, answers) if self.task_ == "regression" else accuracy_score(y, answers))
