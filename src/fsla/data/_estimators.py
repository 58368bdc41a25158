"""`LabelCleaner` and `GroupWeigher`: which data to trust, by scikit-learn's conventions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_array, check_random_state, column_or_1d
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from fsla._checks import function, instance, pick, pick_device, whole_number
from fsla.data._bilevel_strategies import bilevel_strategies
from fsla.data._data_fit import DataFit
from fsla.data._dataset import Array, Task, TrainingData, Votes
from fsla.data._decisions import decide
from fsla.data._diagnostics import consensus
from fsla.data._features import FeatureBuilder
from fsla.data._learners import EstimatorLearner, Learner, PredictedProbabilities, default_learners
from fsla.data._model_file import DataModel
from fsla.data._network_learners import MLP, ImageNetwork, ModuleLearner
from fsla.data._selection import fit_data
from fsla.data._strategies import Strategy, default_strategies
from fsla.data._tables import candidate_table, group_table

if TYPE_CHECKING:
    import pandas as pd

MANY_VALUES = 20
"""With more different whole numbers than that, the task is a regression unless it is named."""
NO_CHECKED_LABELS = (
    "y_checked has no checked label, so the given labels are learned as they are. Pass the true label of some "
    "hundred rows as y_checked."
)


class CodedLabels(NamedTuple):
    """Labels as `TrainingData` takes them."""

    task: Task
    classes: Array | None
    votes: Votes
    group_names: Array
    checked_rows: Array
    checked_labels: Array


class _TrustedEstimator(BaseEstimator):  # type: ignore[misc]
    """What both estimators share."""

    def __init__(
        self,
        *,
        strategies: Sequence[str | Strategy] | None = None,
        learners: Sequence[str | Learner | Any] | None = None,
        cv: int = 5,
        device: str = "auto",
        random_state: Any = None,
        progress_callback: Callable[[str, int, int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self.strategies = strategies
        self.learners = learners
        self.cv = cv
        self.device = device
        self.random_state = random_state
        self.progress_callback = progress_callback
        self.should_stop = should_stop

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's tags: missing features are allowed, labels are required."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.target_tags.required = True
        return tags

    def _fit(self, X: Any, y: Any, y_checked: Any, groups: Any, pred_probs: Any, task: str) -> DataFit:
        """Check what is passed, fit, and set the attributes."""
        owner = type(self).__name__
        whole_number(self.cv, "cv", owner, least=2)
        check_options(self.strategies, self.learners, owner)
        pick_device(self.device)
        function(self.progress_callback, "progress_callback", owner, optional=True)
        function(self.should_stop, "should_stop", owner, optional=True)
        if y is None:
            raise ValueError(f"{owner} requires y to be passed, but the target y is None.")
        rows = self._check_rows(X, reset=True)
        labels = code_labels(y, y_checked, groups, len(rows), task)
        builder = FeatureBuilder()
        data = TrainingData(
            labels.task,
            builder.fit_transform(rows),
            labels.votes,
            labels.group_names,
            labels.checked_rows,
            labels.checked_labels,
            labels.classes,
        )
        if len(data.checked_rows) == 0:
            warnings.warn(NO_CHECKED_LABELS, UserWarning, stacklevel=3)
        fit = fit_data(
            data,
            strategies=choose_strategies(self.strategies, data),
            learners=self._choose_learners(data, pred_probs),
            folds=self.cv,
            seed=_seed_of(self.random_state, owner),
            device=self.device,
            progress=self.progress_callback,
            should_stop=self.should_stop,
        )
        self._set_results(fit, builder)
        return fit

    def _choose_learners(self, data: TrainingData, pred_probs: Any) -> list[Learner]:
        """Return learners by their names, estimators wrapped, and predictions from elsewhere."""
        learners = choose_learners(self.learners, data, self.device)
        if pred_probs is not None:
            predictions = np.asarray(pred_probs, dtype=np.float64)
            n = len(data.features)
            expected = (n, data.num_classes) if data.num_classes else (n,)
            if predictions.shape != expected:
                raise ValueError(
                    f"pred_probs has the shape {predictions.shape}, expected {expected}. "
                    "Pass out-of-fold predictions of every row, columns in the order of the sorted classes."
                )
            learners.append(PredictedProbabilities(predictions))
        return learners

    def _set_results(self, fit: DataFit, builder: FeatureBuilder) -> None:
        """Set what is learned."""
        self._builder, self._predictor, self.task_ = builder, fit.predictor, fit.data.task
        if fit.data.classes is not None:
            self.classes_ = fit.data.classes
        elif hasattr(self, "classes_"):
            del self.classes_
        self.sample_weight_ = row_weights(fit)
        self.strategy_results_ = candidate_table(fit)
        self.group_weights_ = group_table(fit, decide(fit, "never"))
        self.comparison_ = fit.comparison

    def save(self, path: str | Path) -> None:
        """Write the model to a file that `fsla.data.load_model` reads. Nothing is pickled.

        Args:
            path: The file.

        Raises:
            ValueError: A part of the model cannot be saved, such as an estimator of your own.
        """
        check_is_fitted(self)
        classes = getattr(self, "classes_", None)
        DataModel(self.task_, self._builder, self._predictor, classes).save(path)

    def _check_rows(self, X: Any, *, reset: bool) -> Any:
        """Return rows as `FeatureBuilder` takes them: a data frame, or an array of numbers."""
        if not hasattr(X, "columns") and _are_texts(X):
            import pandas as pd

            X = pd.DataFrame({"text": list(X)})
        if hasattr(X, "columns"):
            validate_data(self, X, skip_check_array=True, reset=reset)
            if len(X) == 0:
                raise ValueError("Found array with 0 sample(s) while a minimum of 1 is required.")
            return X
        allow_nd = getattr(X, "ndim", 2) > 2
        array = check_array(X, dtype="numeric", ensure_all_finite="allow-nan", allow_nd=allow_nd, estimator=self)
        shape = tuple(int(n) for n in array.shape[1:])
        if reset:
            self._shape = shape
        elif array.ndim > 2 and shape != self._shape:
            raise ValueError(f"X has rows of shape {shape}, expected {self._shape} as in fit.")
        validate_data(self, array.reshape(len(array), -1), skip_check_array=True, reset=reset)
        if reset and hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        return array

    def _predict_raw(self, X: Any) -> Array:
        check_is_fitted(self)
        return self._predictor.predict(self._builder.transform(self._check_rows(X, reset=False)))

    def __sklearn_is_fitted__(self) -> bool:
        """Return whether `fit` has been called."""
        return hasattr(self, "_predictor")


class LabelCleaner(ClassifierMixin, _TrustedEstimator):  # type: ignore[misc]
    """Finds wrong labels and trains a classifier that they do not hurt, from a few labels that somebody checked.

    Args:
        strategies: What to try, by name or as `Strategy` objects. Default: all that suit the data.
        learners: Names, `Learner` objects, an `nn.Module`, or scikit-learn estimators that take `sample_weight`.
            Default: by data.
        cv: Number of folds.
        device: "auto", "cpu" or "cuda", for networks.
        random_state: Seed.
        progress_callback: Called with a text, the number of strategies that are done, and their number.
        should_stop: Asked between strategies; those that remain are skipped.

    Attributes:
        classes_: The classes.
        label_quality_: P(given label is right) of each row; NaN without a label. Checked rows have 0 or 1.
        suggested_labels_: The most probable label of each row; the checked one where somebody checked.
        suggested_proba_: Its probability.
        noise_matrix_: P(given label | true label), true labels as rows.
        noise_rate_: Share of wrong labels, None if no checked row has a given label.
        noise_rate_interval_: Its 95 % interval.
        sample_weight_: How much each row counts with its given label, for other estimators' `fit`.
        group_weights_: Table of groups, or of annotators; empty without.
        strategy_results_: Table of strategies and learners with their shares.
        comparison_: Accuracy on checked rows for doing nothing and for this model, cross-fitted.

    Examples:
        >>> import numpy as np
        >>> from fsla.data import LabelCleaner
        >>> rng = np.random.default_rng(0)
        >>> X = rng.standard_normal((300, 2))
        >>> true = np.where(X[:, 0] > 0, "up", "down")
        >>> given = np.where(rng.random(300) < 0.3, "up", true)
        >>> checked = np.array([label if i < 60 else None for i, label in enumerate(true)])
        >>> cleaner = LabelCleaner(random_state=0).fit(X, given, y_checked=checked)
        >>> bool(cleaner.score(X, true) > 0.9)
        True
    """

    def fit(self, X: Any, y: Any, *, y_checked: Any = None, groups: Any = None, pred_probs: Any = None) -> Self:
        """Learn which labels to trust.

        Args:
            X: Rows: an array, a data frame, a list of texts, or images.
            y: Given labels, one a row. Several columns: one for each annotator, missing where there is none.
            y_checked: True labels, as long as y, missing (None or NaN) where nobody checked.
            groups: Where each label comes from: a source, supplier or annotator. As y.
            pred_probs: Out-of-fold predictions of a model of your own, rows x sorted classes.

        Returns:
            self

        Raises:
            ValueError: The labels cannot be learned from; the message says why.
        """
        self._fit(X, y, y_checked, groups, pred_probs, "classification")
        return self

    def _set_results(self, fit: DataFit, builder: FeatureBuilder) -> None:
        """Set what is learned."""
        super()._set_results(fit, builder)
        data = fit.data
        posterior = fit.posterior.copy()
        posterior[data.checked_rows] = np.eye(data.num_classes)[data.checked_labels.astype(np.intp)]
        rows, labels = consensus(data)
        self._given_labels = np.full(len(posterior), -1)
        self._given_labels[rows] = labels
        self.label_quality_ = np.full(len(posterior), np.nan)
        self.label_quality_[rows] = posterior[rows, labels]
        suggested = posterior.argmax(1)
        self.suggested_labels_ = self.classes_[suggested]
        self.suggested_proba_ = posterior[np.arange(len(posterior)), suggested]
        self.noise_matrix_ = fit.confusion
        self.noise_rate_ = None if fit.noise_rate is None else fit.noise_rate.value
        self.noise_rate_interval_ = None if fit.noise_rate is None else (fit.noise_rate.low, fit.noise_rate.high)

    def find_label_issues(self) -> pd.DataFrame:
        """Return a row for each labelled sample, the worst first.

        Returns:
            Columns index, given_label, suggested_label, suggested_probability, is_label_issue, label_quality and
            sample_weight.
        """
        import pandas as pd

        check_is_fitted(self)
        rows = np.nonzero(self._given_labels >= 0)[0]
        labels, suggested = self.classes_[self._given_labels[rows]], self.suggested_labels_[rows]
        table = pd.DataFrame(
            {
                "index": rows,
                "given_label": labels,
                "suggested_label": suggested,
                "suggested_probability": self.suggested_proba_[rows],
                "is_label_issue": suggested != labels,
                "label_quality": self.label_quality_[rows],
                "sample_weight": self.sample_weight_[rows],
            }
        )
        return table.sort_values("label_quality", kind="stable", ignore_index=True)

    def predict_proba(self, X: Any) -> Array:
        """Return rows x classes probabilities."""
        return self._predict_raw(X)

    def predict(self, X: Any) -> Array:
        """Return the most probable class of each row."""
        probabilities = self._predict_raw(X)
        return np.asarray(self.classes_[probabilities.argmax(1)])


class GroupWeigher(_TrustedEstimator):
    """Finds which groups of rows (sources, annotators, suppliers) to use, for classes and for numbers.

    Args:
        task: "classification", "regression" or "auto": fractions, or more than 20 different numbers, are a regression.
        strategies: What to try, by name or as `Strategy` objects. Default: all that suit the data.
        learners: Names, `Learner` objects, an `nn.Module`, or scikit-learn estimators that take `sample_weight`.
            Default: by data.
        cv: Number of folds.
        device: "auto", "cpu" or "cuda", for networks.
        random_state: Seed.
        progress_callback: Called with a text, the number of strategies that are done, and their number.
        should_stop: Asked between strategies; those that remain are skipped.

    Attributes:
        task_: "classification" or "regression".
        classes_: The classes; absent in regression.
        group_weights_: Table: group, n_samples, noise_rate with its 95 % interval, label_quality, weight with its
            interval, and the decision to keep, drop or review the group with its reason. Empty without groups.
        sample_weight_: How much each row counts with its given label, for other estimators' `fit`.
        strategy_results_: Table of strategies and learners with their shares.
        comparison_: Accuracy or error on checked rows for doing nothing and for this model, cross-fitted.

    Examples:
        >>> import numpy as np
        >>> from fsla.data import GroupWeigher
        >>> rng = np.random.default_rng(0)
        >>> X = rng.standard_normal((400, 3))
        >>> true = X @ [3.0, -2.0, 1.0]
        >>> supplier = np.array(["north", "south", "west", "east"] * 100)
        >>> given = np.where(supplier == "west", -true, true)
        >>> checked = np.where(np.arange(400) < 60, true, np.nan)
        >>> weigher = GroupWeigher(random_state=0).fit(X, given, y_checked=checked, groups=supplier)
        >>> weigher.group_weights_.set_index("group")["weight"].idxmin()
        'west'
    """

    def __init__(
        self,
        *,
        task: str = "auto",
        strategies: Sequence[str | Strategy] | None = None,
        learners: Sequence[str | Learner | Any] | None = None,
        cv: int = 5,
        device: str = "auto",
        random_state: Any = None,
        progress_callback: Callable[[str, int, int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(
            strategies=strategies,
            learners=learners,
            cv=cv,
            device=device,
            random_state=random_state,
            progress_callback=progress_callback,
            should_stop=should_stop,
        )
        self.task = task

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's tags; a named task makes it a classifier or a regressor."""
        from sklearn.utils import ClassifierTags, RegressorTags

        tags = super().__sklearn_tags__()
        if self.task == "classification":
            tags.estimator_type, tags.classifier_tags = "classifier", ClassifierTags()
        elif self.task == "regression":
            tags.estimator_type, tags.regressor_tags = "regressor", RegressorTags()
        return tags

    def fit(self, X: Any, y: Any, *, y_checked: Any = None, groups: Any = None, pred_probs: Any = None) -> Self:
        """Learn a weight for each group.

        Args:
            X: Rows: an array, a data frame, a list of texts, or images.
            y: Given labels, one a row. Several columns: one for each annotator, missing where there is none.
            y_checked: True labels, as long as y, missing (None or NaN) where nobody checked.
            groups: Where each label comes from: a source, supplier or annotator. As y.
            pred_probs: Out-of-fold predictions of a model of your own.

        Returns:
            self

        Raises:
            ValueError: The labels cannot be learned from; the message says why.
        """
        pick(self.task, {"auto": 0, "classification": 0, "regression": 0}, "task")
        self._fit(X, y, y_checked, groups, pred_probs, self.task)
        return self

    def predict(self, X: Any) -> Array:
        """Return labels, or numbers in regression."""
        prediction = self._predict_raw(X)
        return prediction if self.task_ == "regression" else np.asarray(self.classes_[prediction.argmax(1)])

    @available_if(lambda self: getattr(self, "task_", self.task) != "regression")  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Array:
        """Return rows x classes probabilities. Absent in regression."""
        return self._predict_raw(X)

    def score(self, X: Any, y: Any) -> float:
        """Return accuracy, or R² in regression."""
        prediction = self.predict(X)
        return float(r2_score(y, prediction) if self.task_ == "regression" else accuracy_score(y, prediction))


def _seed_of(random_state: Any, owner: str) -> int:
    """Draw a seed as scikit-learn does."""
    try:
        return int(check_random_state(random_state).randint(2**20))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"The 'random_state' of {owner} must be a number from 0 to 2^32 - 1, a numpy.random.RandomState or None. "
            f"Got {random_state!r} instead."
        ) from error


def check_options(strategies: object, learners: object, owner: str) -> None:
    """Raise unless strategies and learners are lists, or None."""
    for name, value in (("strategies", strategies), ("learners", learners)):
        if value is not None:
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise TypeError(f"The {name!r} of {owner} must be a list. Got {value!r} instead.")
            if not value:
                raise ValueError(f"The {name!r} of {owner} must not be empty. Leave it out for what suits the data.")


def choose_learners(
    chosen: Sequence[str | Learner | Any] | None, data: TrainingData, device: str = "auto"
) -> list[Learner]:
    """Return learners by their names; wrap estimators of scikit-learn and modules of torch. Default: by data."""
    defaults = default_learners(data, device)
    networks = [network for network in (MLP(), ImageNetwork(device=device)) if network.supports(data)]
    known: dict[str, Learner] = {learner.name: learner for learner in [*defaults, *networks]}
    learners: list[Learner] = []
    for item in defaults if chosen is None else chosen:
        if isinstance(item, str):
            learners.append(pick(item, known, "learner"))
        elif isinstance(item, nn.Module):
            learners.append(ModuleLearner(item, device=device))
        elif isinstance(item, Learner):
            learners.append(item)
        elif hasattr(item, "fit") and not isinstance(item, type):
            learners.append(EstimatorLearner(item))
        else:
            raise TypeError(
                "A learner must be a name, a fsla.data.Learner, an estimator of scikit-learn or a torch.nn.Module. "
                f"Got {item!r} instead."
            )
    return learners


def choose_strategies(chosen: Sequence[str | Strategy] | None, data: TrainingData) -> list[Strategy]:
    """Return strategies by their names. Default: all that suit the data but the bilevel ones, which take seconds."""
    known = {strategy.name: strategy for strategy in [*default_strategies(data), *bilevel_strategies(data)]}
    items: Any = default_strategies(data) if chosen is None else chosen
    for item in items:
        instance(item, (str, Strategy), "strategies", "the call", "names or objects of fsla.data.Strategy")
    return [pick(item, known, "strategy") if isinstance(item, str) else item for item in items]


# --- Labels ----------------------------------------------------------------------------------------------------------


def _are_texts(X: Any) -> bool:
    """Return whether rows are texts, one each."""
    if hasattr(X, "ndim") and X.ndim != 1:
        return False
    return hasattr(X, "__len__") and len(X) > 0 and all(isinstance(x, str) for x in X)


def _missing(values: Array) -> Array:
    """Return a mask of None, NaN and pandas.NA."""
    if values.dtype == object:
        import pandas as pd

        return np.asarray(pd.isna(values))
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(values.shape, dtype=bool)


def _column(values: Any, name: str, rows: int, *, wide: bool = False) -> Array:
    """Return one value a row; `wide` allows several columns."""
    if isinstance(values, str) or not (hasattr(values, "__len__") or hasattr(values, "__array__")):
        raise ValueError(f"{name} must have one value for each of the {rows} rows. Got {values!r}.")
    array = values if isinstance(values, np.ndarray) else _to_array(values)
    if not (wide and array.ndim == 2 and array.shape[1] > 1):
        array = column_or_1d(array, warn=True)
    if len(array) != rows:
        raise ValueError(f"{name} has {len(array)} values, but X has {rows} rows. Pass one value for each row.")
    if array.dtype.kind == "c":
        raise ValueError(f"Complex data not supported: {name} has complex numbers.")
    if array.dtype.kind == "f" and np.isinf(array).any():
        raise ValueError(f"Input {name} contains infinity or a value too large for {array.dtype}. Remove it.")
    return array


def _to_array(values: Any) -> Array:
    """Return lists, series and frames as arrays; pandas' nullable numbers and texts as objects."""
    if hasattr(values, "to_numpy"):
        array = values.to_numpy()
    elif hasattr(values, "__array__"):
        array = np.asarray(values)
    else:
        has_gaps = any(v is None for v in values) or len({type(v) for v in values}) > 1
        array = np.asarray(values, dtype=object if has_gaps else None)
    return np.asarray(array)


def code_labels(y: Any, y_checked: Any, groups: Any, rows: int, task: str) -> CodedLabels:
    """Return labels, groups and checked labels as numbers.

    Args:
        y: One label a row, or one column for each annotator.
        y_checked: True labels, missing where nobody checked.
        groups: As y, or None.
        rows: Number of rows of X.
        task: "classification", "regression" or "auto".
    """
    labels_of_rows = _column(y, "y", rows, wide=True)
    checked = np.full(rows, np.nan) if y_checked is None else _column(y_checked, "y_checked", rows)
    has_label, has_truth = ~_missing(labels_of_rows), ~_missing(checked)
    labels, true_labels = labels_of_rows[has_label], checked[has_truth]
    if len(labels) == 0 and len(true_labels) == 0:
        raise ValueError("No row has a label. Pass labels as y, or checked labels as y_checked, or both.")
    if task == "auto":
        task = "regression" if are_numbers(labels, true_labels) else "classification"
    classes = None
    if task == "regression":
        label_values, truth_values = _numbers(labels, "y"), _numbers(true_labels, "y_checked")
    else:
        classes, codes = code_classes(labels, true_labels)
        label_values, truth_values = codes[: len(labels)], codes[len(labels) :]
    row, column = np.nonzero(has_label if has_label.ndim == 2 else has_label[:, None])
    group_names, group = _code_groups(groups, y, labels_of_rows, row, column)
    return CodedLabels(
        "regression" if task == "regression" else "classification",
        classes,
        Votes(row, group, label_values),
        group_names,
        np.nonzero(has_truth)[0],
        truth_values,
    )


def _code_groups(groups: Any, y: Any, labels_of_rows: Array, row: Array, column: Array) -> tuple[Array, Array]:
    """Return the names of groups, and the group of each label."""
    if groups is None:
        if labels_of_rows.ndim == 1:
            return np.array(["all"]), np.zeros(len(row), dtype=np.intp)
        names = getattr(y, "columns", None)
        return np.asarray(range(labels_of_rows.shape[1]) if names is None else list(names)), column
    import pandas as pd

    values = _column(groups, "groups", len(labels_of_rows), wide=True)
    if values.ndim == 1 and labels_of_rows.ndim == 2:
        raise ValueError("groups has one value a row, but y has several labels a row. Pass groups of the shape of y.")
    if values.ndim == 2 and values.shape != labels_of_rows.shape:
        raise ValueError(
            f"groups has the shape {values.shape}, but y has the shape {labels_of_rows.shape}. Pass one a label."
        )
    flat = values[row] if values.ndim == 1 else values[row, column]
    missing = _missing(flat)
    if missing.any():
        flat = flat.astype(object)
        flat[missing] = "missing"
    if flat.dtype == object and len({isinstance(v, str) for v in flat}) > 1:
        flat = flat.astype(str)
    group, names = pd.factorize(flat, sort=True)
    return np.asarray(names), group.astype(np.intp)


def are_numbers(labels: Array, true_labels: Array) -> bool:
    """Return whether labels are numbers rather than classes."""
    try:
        values = np.concatenate([np.asarray(labels, dtype=np.float64), np.asarray(true_labels, dtype=np.float64)])
    except (TypeError, ValueError):
        return False
    if labels.dtype.kind in "bUS":
        return False
    unique = np.unique(values)
    return bool((unique != np.round(unique)).any() or len(unique) > MANY_VALUES)


def _numbers(values: Array, name: str) -> Array:
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be numbers for a regression. Got {values[0]!r}.") from None
    if not np.isfinite(numbers).all():
        raise ValueError(f"Input {name} contains infinity. The targets of a regression must be finite numbers.")
    return numbers


def code_classes(labels: Array, true_labels: Array) -> tuple[Array, Array]:
    """Return the sorted classes, and the code of every given and then every checked label."""
    for name, values in (("y", labels), ("y_checked", true_labels)):
        if len(values):
            plain = values if values.dtype != object else np.array(values.tolist())
            if type_of_target(plain).startswith("continuous"):
                raise ValueError(
                    f"Unknown label type: continuous. {name} has fractions, but labels must be classes. "
                    "Use GroupWeigher(task='regression') for numbers."
                )
            check_classification_targets(plain)
    texts = [{isinstance(v, str) for v in values.tolist()} for values in (labels, true_labels)]
    if len(texts[0] | texts[1]) > 1:
        raise ValueError(
            "Labels are text and numbers at once. Write the labels of y and y_checked in one way, for example as text."
        )
    both = np.array([*labels.tolist(), *true_labels.tolist()])
    kind = labels.dtype if len(labels) else true_labels.dtype
    if kind.kind in "iub" and both.dtype != kind and (both == np.round(both)).all():
        both = both.astype(kind)
    classes, codes = np.unique(both, return_inverse=True)
    if len(labels):
        known = set(np.unique(both[: len(labels)]).tolist())
        extra = [v for v in np.unique(both[len(labels) :]).tolist() if v not in known and v in (-1, "", "nan")]
        if extra:
            raise ValueError(
                f"y_checked has the label {extra[0]!r}, which y never has. Where nobody checked, y_checked must be "
                "missing: None or NaN."
            )
    if len(classes) < 2:
        raise ValueError(f"There must be at least two classes. Got 1 class: {classes.tolist()[0]!r}.")
    if kind.kind == "O":
        classes = classes.astype(object)
    return classes, codes.ravel()


# --- Weights ---------------------------------------------------------------------------------------------------------


def row_weights(fit: DataFit) -> Array:
    """Return how much each row counts with its given label; checked rows count fully if it is right, else not."""
    data = fit.data
    n = len(data.features)
    count = np.maximum(np.bincount(data.votes.row, minlength=n), 1)
    weight = np.bincount(data.votes.row, fit.vote_weight, minlength=n) / count
    if data.task == "classification":
        rows, labels = consensus(data)
        label = np.full(n, -1)
        label[rows] = labels
        weight[data.checked_rows] = label[data.checked_rows] == data.checked_labels
    return np.asarray(weight)
