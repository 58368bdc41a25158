"""What the estimators share: data and trusted data in, a choice of ways out, predictions; save and load."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from fsla._checks import pick_device, whole_number
from fsla.data import _networks as networks
from fsla.data import _store as store
from fsla.data import _tables as tables
from fsla.data._choice import FOLDS, Choice, Report, choose
from fsla.data._inputs import (
    Array,
    check_column_names,
    classes,
    coded,
    column,
    column_names,
    digest,
    features,
    scaling,
    spread,
)
from fsla.data._material import Material
from fsla.distributed import get_group


class Trusting(BaseEstimator):  # type: ignore[misc]
    """What both estimators share: data and trusted data in, a choice of ways out, predictions."""

    def __init__(
        self,
        *,
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
        self.model = model
        self.folds = folds
        self.steps = steps
        self.bilevel_steps = bilevel_steps
        self.device = device
        self.random_state = random_state
        self.ways = ways
        self.enough = enough
        self.progress = progress

    def _fit(
        self, X: Any, y: Any, groups: Any, trusted: tuple[Any, Any], names: tuple[str, str], regression: bool
    ) -> Choice:
        """Checks what is given, tries the ways and keeps the model; `names` are of the trusted data."""
        for name in [name for name in vars(self) if name.endswith("_")]:
            delattr(self, name)
        here = get_group()
        x, given, clean, true = self._checked(X, y, trusted, names)
        check_column_names(trusted[0], names[0], column_names(X))
        if column_names(X) is not None:
            self.feature_names_in_ = np.asarray(X.columns, dtype=object)
        device = pick_device(self.device)
        self.n_features_in_ = int(np.prod(x.shape[1:]))
        self._shape = tuple(int(n) for n in x.shape[1:])
        both = np.concatenate([x, clean])
        self._scaling = scaling(both)
        if here.world_size > 1:
            here.check_equal(
                {"samples": digest(both), "labels": digest(np.asarray([*given, *true], dtype=str))}, "data"
            )
        targets = self._numbers(given, true) if regression else self._labels(given, true)
        count = 0 if regression else len(self.classes_)
        self._groups = None if groups is None else coded(column(groups, "groups", len(x)))
        self._targets = targets[: len(x)]
        pace = networks.pace(self.model, self._shape)
        material = Material(
            self._scaling(both, device),
            targets.to(device),
            len(x),
            count,
            networks.maker(self.model, self._shape, max(1, count)),
            groups=None if self._groups is None else self._groups.numbers.to(device),
            group_count=0 if self._groups is None else len(self._groups.names),
            seed=here.broadcast(int(check_random_state(self.random_state).randint(2**20))),
            pace=pace if self.bilevel_steps is None else pace._replace(bilevel_steps=self.bilevel_steps),
            steps=self.steps,
            small=isinstance(self.model, str),
        )
        choice = choose(
            material,
            names=self.ways,
            folds=self.folds,
            enough=self.enough or (lambda: False),
            report=self.progress or (lambda name, done, total: None),
        )
        self.sample_weight_ = choice.weight.cpu().numpy()
        self.candidates_ = tables.candidates(choice)
        if regression:
            self.candidates_["error"] *= self._unit
        self._skipped = choice.skipped
        unit = self._unit if regression else 1.0
        self._changes = {name: change.in_units(unit) for name, change in choice.changes.items()}
        self._removals = [replace(r, change=r.change and r.change.in_units(unit)) for r in choice.removals]
        self._model = choice.model
        self._curve = choice.curve
        if self._groups is not None:
            self.weights_ = tables.weights(self._groups.names, self._groups.numbers, choice)
        return choice

    def _checked(
        self, X: Any, y: Any, trusted: tuple[Any, Any], names: tuple[str, str]
    ) -> tuple[Array, Array, Array, Array]:
        owner = type(self).__name__
        whole_number(self.folds, "folds", owner, least=2)
        if y is None:
            raise ValueError(f"{owner} requires y to be passed, but the target y is None.")
        if any(part is None for part in trusted):
            raise ValueError(
                f"{owner} learns what to trust from trusted samples: give {' and '.join(names)}, some hundred samples."
            )
        x = features(X, "X")
        clean = features(trusted[0], names[0], x.shape[1:])
        given = column(y, "y", len(x))
        true = column(trusted[1], names[1], len(clean))
        if len(clean) < 2 * self.folds:
            raise ValueError(
                f"There must be at least {2 * self.folds} trusted samples, {self.folds} folds of two; some hundred are "
                f"better. Got {len(clean)} samples."
            )
        return x, given, clean, true

    def _numbers(self, given: Array, true: Array) -> torch.Tensor:
        """The targets of a regression, in units of the trusted ones' spread."""
        self._offset, self._unit = spread(true)
        both = (np.concatenate([given, true]).astype(np.float64) - self._offset) / self._unit
        return torch.as_tensor(both, dtype=torch.float32)

    def _labels(self, given: Array, true: Array) -> torch.Tensor:
        """Labels as numbers of their classes."""
        both = classes(given, true)
        self.classes_ = both.names
        self._say_what_is_missing(both.numbers[len(given) :], len(both.names))
        return both.numbers

    def _say_what_is_missing(self, trusted: torch.Tensor, classes: int) -> None:
        seen = torch.bincount(trusted, minlength=classes) > 0
        self._untrusted = self.classes_[~seen.numpy()]
        if len(self._untrusted):
            names = ", ".join(map(str, self._untrusted[:10]))
            warnings.warn(
                f"No trusted sample has the label {names}. Samples on whose label the networks agree stand in for "
                "them, and labels that nothing stands in for are taken as they are: some trusted samples of every "
                "class are better.",
                UserWarning,
                stacklevel=5,
            )

    def _answers(self, X: Any) -> Array:
        check_is_fitted(self)
        check_column_names(X, "X", [str(name) for name in getattr(self, "feature_names_in_", ())] or None)
        x = features(X, "X")
        if x.shape[1:] != self._shape:
            raise ValueError(
                f"X has {int(np.prod(x.shape[1:]))} features, but {type(self).__name__} is expecting "
                f"{self.n_features_in_} features as input."
            )
        found: Array = self._model.answers(self._scaling(x, pick_device(self.device))).double().cpu().numpy()
        return found

    def save(self, path: str | Path) -> None:
        """Write what was learnt to one file in the safetensors format, with a digest and without pickle."""
        check_is_fitted(self)
        store.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path, model: Any = None) -> Self:
        """Read what `save` wrote. A model that was the user's own must be given again."""
        made = cls()
        store.load(made, Path(path), model)
        return made

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_model")
