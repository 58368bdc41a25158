"""Trees on tables: a forest and histogram boosting of scikit-learn, trained on columns that are binned once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakKeyDictionary

import numpy as np

from fsla._storage._json_values import among, number, record
from fsla.data._arrays import check_names, stored_array
from fsla.data._data_fit import Predictor
from fsla.data._dataset import Array, Features, Task, TrainingData
from fsla.data._learners import Learner, constant_prediction, expand_mass
from fsla.data._predictors import softmax

NUM_BINS = 48
"""Quantiles of a column. With so few values scikit-learn's boosting skips its slow weighted percentiles."""
_CHUNK = 2**22
"""Most entries of rows x trees at a time when predicting."""
_SCHEMA = record(kind=among("trees"), task=among("classification", "regression"), floor=number(float, 0.0, 1.0))
_FORMS: dict[str, tuple[int, Any]] = {
    "roots": (1, np.int64),
    "feature": (1, np.int32),
    "threshold": (1, np.float32),
    "left": (1, np.int32),
    "right": (1, np.int32),
    "value": (2, np.float64),
    "base": (1, np.float64),
    "edges": (1, np.float64),
    "bounds": (1, np.int64),
}
"""Dimensions and dtypes of the arrays of a saved predictor."""


@dataclass(frozen=True, eq=False)
class Bins:
    """Edges of each column's bins, one after the other; bin 0 is for missing cells."""

    edges: Array
    bounds: Array

    @classmethod
    def fit(cls, numeric: Array) -> Self:
        """Return quantiles of each column."""
        columns = []
        for column in numeric.T:
            present = column[np.isfinite(column)]
            levels = np.linspace(0, 1, NUM_BINS + 1)[1:-1]
            columns.append(np.unique(np.quantile(present, levels)) if len(present) else np.zeros(0))
        return cls(np.concatenate([*columns, np.zeros(0)]), np.cumsum([0, *map(len, columns)]))

    def transform(self, numeric: Array) -> Array:
        """Return bins as float32, as scikit-learn's trees take them."""
        result = np.zeros(numeric.shape, dtype=np.float32)
        for j, (start, stop) in enumerate(zip(self.bounds[:-1], self.bounds[1:], strict=True)):
            column = numeric[:, j]
            present = ~np.isnan(column)
            result[present, j] = 1 + np.searchsorted(self.edges[start:stop], column[present], side="right")
        return result


_binned: WeakKeyDictionary[Features, tuple[Bins, Array]] = WeakKeyDictionary()


def bin_features(features: Features) -> tuple[Bins, Array]:
    """Return the bins of a table and its binned columns, computed once."""
    if features not in _binned:
        assert features.numeric is not None
        bins = Bins.fit(features.numeric)
        _binned[features] = (bins, bins.transform(features.numeric))
    return _binned[features]


@dataclass(frozen=True, eq=False)
class TreePredictor:
    """Trees as arrays of nodes; their values are averaged, or summed up to scores.

    Attributes:
        bins: Of the columns.
        roots: Index of the first node of each tree.
        feature: Column that a node looks at; -1 at a leaf.
        threshold: Rows with a bin of at most this go left.
        left: Index of the left child.
        right: Index of the right child.
        value: Nodes x outputs.
        base: Scores to which the trees add; empty for an average of probabilities.
    """

    bins: Bins
    roots: Array
    feature: Array
    threshold: Array
    left: Array
    right: Array
    value: Array
    base: Array
    task: Task
    floor: float = 0.0

    def predict(self, features: Features) -> Array:
        """Return probabilities, or numbers in regression."""
        assert features.numeric is not None
        binned = self.bins.transform(features.numeric)
        step = max(1, _CHUNK // max(1, len(self.roots)))
        parts = [self._sum_values(binned[i : i + step]) for i in range(0, len(binned), step)]
        total = np.concatenate(parts) if parts else np.zeros((0, self.value.shape[1]))
        if len(self.base) == 0:
            total = total / len(self.roots)
        elif self.task == "regression":
            total = total + self.base
        else:
            total = softmax(total + self.base)
        if self.task == "regression":
            return np.asarray(total[:, 0])
        total = total + self.floor
        return np.asarray(total / total.sum(1, keepdims=True))

    def _sum_values(self, binned: Array) -> Array:
        rows = np.arange(len(binned))[:, None]
        node = np.repeat(self.roots[None], len(binned), 0)
        while True:
            feature = self.feature[node]
            if (feature < 0).all():
                break
            left = binned[rows, np.maximum(feature, 0)] <= self.threshold[node]
            node = np.where(feature < 0, node, np.where(left, self.left[node], self.right[node]))
        total = np.zeros((len(binned), self.value.shape[1]))
        for column in node.T:
            total += self.value[column]
        return total

    def to_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the arrays of all nodes."""
        names = ("roots", "feature", "threshold", "left", "right", "value", "base")
        arrays = {name: getattr(self, name) for name in names}
        arrays |= {"edges": self.bins.edges, "bounds": self.bins.bounds}
        return arrays, {"kind": "trees", "task": self.task, "floor": self.floor}

    @classmethod
    def from_state(cls, arrays: Mapping[str, Array], state: Mapping[str, Any]) -> Self:
        """Return the predictor of a state. Raise a ValueError unless its nodes are trees."""
        if not _SCHEMA(state):
            raise ValueError("the JSON of its trees is malformed")
        check_names(arrays, _FORMS.keys())
        of = {name: stored_array(arrays, name, ndim, dtype) for name, (ndim, dtype) in _FORMS.items()}
        bounds, feature, size = of["bounds"], of["feature"], len(of["feature"])
        inside = feature >= 0
        after = np.arange(size)
        fits = all(len(of[name]) == size for name in ("threshold", "left", "right", "value"))
        fits = fits and len(of["base"]) in (0, of["value"].shape[1])
        fits = fits and len(bounds) > 0 and bounds[0] == 0 and bounds[-1] == len(of["edges"])
        fits = fits and bool((np.diff(bounds) >= 0).all() and (feature < len(bounds) - 1).all())
        fits = fits and bool(len(of["roots"]) and ((of["roots"] >= 0) & (of["roots"] < size)).all())
        fits = fits and 2 * int(inside.sum()) + len(of["roots"]) == size  # All nodes are roots or children.
        for side in ("left", "right") if fits else ():  # A child after its parent, or a row would go round for ever.
            fits = fits and bool(((of[side] > after) & (of[side] < size))[inside].all())
        if not fits:
            raise ValueError("the arrays of its trees do not fit each other")
        rest = {name: array for name, array in of.items() if name not in ("edges", "bounds")}
        return cls(Bins(of["edges"], bounds), **rest, task=state["task"], floor=state["floor"])


@dataclass(frozen=True, eq=False)
class _Nodes:
    """The nodes of one tree."""

    feature: Array
    threshold: Array
    left: Array
    right: Array
    value: Array


def _join(bins: Bins, trees: Sequence[_Nodes], base: Array, task: Task, floor: float = 0.0) -> TreePredictor:
    roots = np.cumsum([0, *(len(t.feature) for t in trees)])
    return TreePredictor(
        bins,
        roots[:-1],
        np.concatenate([t.feature for t in trees]).astype(np.int32),
        np.concatenate([t.threshold for t in trees]).astype(np.float32),
        np.concatenate([t.left + root for t, root in zip(trees, roots, strict=False)]).astype(np.int32),
        np.concatenate([t.right + root for t, root in zip(trees, roots, strict=False)]).astype(np.int32),
        np.concatenate([t.value for t in trees]).astype(np.float64),
        base,
        task,
        floor,
    )


class TreeLearner(Learner):
    """Base class of learners on binned columns."""

    def supports(self, data: TrainingData) -> bool:
        """Return whether the data is a table."""
        return data.features.numeric is not None and data.features.images is None

    def path(self, features: Features, mass: Array, checked_mass: Array, task: Task, seed: int) -> list[Predictor]:
        """Return one model."""
        both = mass + checked_mass
        bins, binned = bin_features(features)
        rows, labels, weight = expand_mass(both, task)
        if len(rows) == 0 or len(np.unique(labels)) < 2:
            return [constant_prediction(both, task)]
        outputs = both.shape[1] if task == "classification" else 1
        return [self.train(bins, binned[rows], labels, weight, outputs, task, seed)]

    @abstractmethod
    def train(
        self, bins: Bins, binned: Array, labels: Array, weight: Array, outputs: int, task: Task, seed: int
    ) -> Predictor:
        """Return one model of rows with weights."""


class ForestLearner(TreeLearner):
    """Extremely randomised trees.

    Args:
        num_trees: Number of trees.
        min_leaf: Least rows of a leaf. Default: 2 for classes, 5 for numbers.
    """

    name = "forest"

    def __init__(self, num_trees: int = 40, min_leaf: int | None = None) -> None:
        self.num_trees, self.min_leaf = num_trees, min_leaf

    def train(
        self, bins: Bins, binned: Array, labels: Array, weight: Array, outputs: int, task: Task, seed: int
    ) -> Predictor:
        """Return a forest."""
        from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor

        kind = ExtraTreesRegressor if task == "regression" else ExtraTreesClassifier
        least = self.min_leaf or (5 if task == "regression" else 2)
        forest = kind(n_estimators=self.num_trees, min_samples_leaf=least, random_state=seed)
        forest.fit(binned, labels, sample_weight=weight)
        columns = forest.classes_ if task == "classification" else np.zeros(1, dtype=np.intp)
        trees = []
        for estimator in forest.estimators_:
            tree = estimator.tree_
            value = np.zeros((tree.node_count, outputs))
            value[:, columns] = tree.value[:, 0, :]
            if task == "classification":
                value /= value.sum(1, keepdims=True)
            leaf = tree.children_left < 0
            trees.append(
                _Nodes(
                    np.where(leaf, -1, tree.feature),
                    tree.threshold,
                    np.where(leaf, 0, tree.children_left),
                    np.where(leaf, 0, tree.children_right),
                    value,
                )
            )
        # Forests of few trees give probabilities of 0: a small floor for each class keeps the likelihood finite.
        return _join(bins, trees, np.zeros(0), task, floor=1e-2 if task == "classification" else 0.0)


class BoostingLearner(TreeLearner):
    """Histogram gradient boosting with small trees.

    Args:
        num_iterations: Number of boosting steps.
        num_leaves: Most leaves of a tree.
    """

    name = "boosting"

    def __init__(self, num_iterations: int = 60, num_leaves: int = 8) -> None:
        self.num_iterations, self.num_leaves = num_iterations, num_leaves

    def train(
        self, bins: Bins, binned: Array, labels: Array, weight: Array, outputs: int, task: Task, seed: int
    ) -> Predictor:
        """Return a boosted sum of trees."""
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

        kind = HistGradientBoostingRegressor if task == "regression" else HistGradientBoostingClassifier
        model = kind(
            max_iter=self.num_iterations,
            max_leaf_nodes=self.num_leaves,
            min_samples_leaf=10,
            l2_regularization=1.0,
            early_stopping=False,
            random_state=seed,
        )
        model.fit(binned, labels, sample_weight=weight)
        columns = np.zeros(1, dtype=np.intp) if task == "regression" else model.classes_
        base = np.zeros(outputs) if task == "regression" else np.full(outputs, -30.0)
        base[columns] = 0.0
        start = np.ravel(model._baseline_prediction)
        # With two classes scikit-learn has one score, that of the second.
        targets = columns[-1:] if len(start) == 1 else columns
        base[targets] = start
        trees = []
        for iteration in model._predictors:
            for column, tree in zip(targets, iteration, strict=True):
                nodes = tree.nodes
                leaf = nodes["is_leaf"].astype(bool)
                value = np.zeros((len(nodes), outputs))
                value[leaf, column] = nodes["value"][leaf]
                trees.append(
                    _Nodes(
                        np.where(leaf, -1, nodes["feature_idx"]),
                        nodes["num_threshold"],
                        np.where(leaf, 0, nodes["left"]).astype(np.int64),
                        np.where(leaf, 0, nodes["right"]).astype(np.int64),
                        value,
                    )
                )
        return _join(bins, trees, base, task, floor=1e-3 if task == "classification" else 0.0)
