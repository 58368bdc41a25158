r"""Closed-form weights of groups: a ridge head inside, the squared error of checked rows outside.

Group g contributes its Gram matrix $S_g$, its target mass $R_g$ and its count $n_g$. For weights
$w_g = \sigma(\lambda_g)$, a weight $t$ of checked rows and a penalty $\mu$, fold f has the ridge solution

$$W_f = \Big(\sum_g w_g S_g + t S_f + \mu N I\Big)^{-1} \Big(\sum_g w_g R_g + t R_f\Big), \qquad
N = \sum_g w_g n_g + t n_f,$$

where $S_f, R_f, n_f$ come from the checked rows of the other folds. The checked rows of fold f judge $W_f$. The MAP
estimate of $\lambda, \log t, \log \mu$ is a nonlinear least-squares problem, which Levenberg-Marquardt solves: the
derivative $\partial W_f / \partial w_g = H_f^{-1}(R_g - S_g W_f - \mu n_g W_f)$ costs one product a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from fsla.data._dataset import Array, TrainingData

PRIOR_SCALE = 1.5
"""Standard deviation of a group's logit weight: 1.5 is best or level on all tuning sets."""
CHECKED_WEIGHT = (float(np.log(3.0)), 1.5)
"""Prior of log t: a checked row counts about as much as three others."""
PENALTY = (float(np.log(1e-2)), 2.0)
"""Prior of log mu: wide."""
MAX_ENTRIES = 2**23
"""Most entries of all Gram matrices together (64 MB); beyond that, features are projected to fewer directions."""
_START_DAMPING = 1e-3
_MAX_DAMPING = 1e8
_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class GroupStatistics:
    """What the closed form needs to know of the rows of each group. Statistics of parts of the data add up.

    Attributes:
        gram: groups x columns x columns, sums of z z'.
        target: groups x columns x outputs, sums of z y'.
        count: Rows of each group.
    """

    gram: Array
    target: Array
    count: Array

    def __add__(self, other: GroupStatistics) -> GroupStatistics:
        """Return the statistics of both parts of the data."""
        return GroupStatistics(self.gram + other.gram, self.target + other.target, self.count + other.count)

    @property
    def num_groups(self) -> int:
        """Return the number of groups."""
        return len(self.count)

    def pooled(self, weight: Array | None = None) -> GroupStatistics:
        """Return the statistics of all groups as of one, each group times its weight."""
        w = np.ones(self.num_groups) if weight is None else weight
        return GroupStatistics(
            np.tensordot(w, self.gram, 1)[None], np.tensordot(w, self.target, 1)[None], np.array([w @ self.count])
        )

    @classmethod
    def from_rows(
        cls, features: Array, target: Array, group: Array, num_groups: int, weight: Array | None = None
    ) -> GroupStatistics:
        """Sum over rows: `features` rows x columns, `target` rows x outputs, `group` and `weight` one a row."""
        d, c = features.shape[1], target.shape[1]
        gram, mass, count = np.zeros((num_groups, d, d)), np.zeros((num_groups, d, c)), np.zeros(num_groups)
        order = np.argsort(group, kind="stable")
        bounds = np.searchsorted(group[order], np.arange(num_groups + 1))
        for g in range(num_groups):
            rows = order[bounds[g] : bounds[g + 1]]
            if len(rows):
                z = features[rows]
                weighted = z if weight is None else z * weight[rows, None]
                gram[g], mass[g] = weighted.T @ z, weighted.T @ target[rows]
                count[g] = len(rows) if weight is None else weight[rows].sum()
        return cls(gram, mass, count)


def encode_targets(labels: Array, num_classes: int) -> Array:
    """Return one-hot rows minus 1/C, or a column of numbers if `num_classes` is 0."""
    if num_classes == 0:
        return np.asarray(labels, dtype=np.float64)[:, None]
    return np.eye(num_classes)[np.asarray(labels, dtype=np.intp)] - 1 / num_classes


def compress(features: Array, num_groups: int) -> Array:
    """Return features whose Gram matrices fit into memory: themselves, or their leading principal directions."""
    limit = int(np.sqrt(MAX_ENTRIES / num_groups))
    if features.shape[1] <= limit:
        return features
    _, vectors = np.linalg.eigh(features.T @ features)
    return np.asarray(features @ vectors[:, -max(limit, 8) :])


def statistics_of_votes(data: TrainingData, features: Array) -> GroupStatistics:
    """Sum over the votes on rows that are not checked: each vote counts as one row of its group."""
    use = ~data.is_checked[data.votes.row]
    target = encode_targets(data.votes.label[use], data.num_classes)
    return GroupStatistics.from_rows(features[data.votes.row[use]], target, data.votes.group[use], data.num_groups)


@dataclass(frozen=True, eq=False)
class GroupWeightFit:
    """Solution of the closed form.

    Attributes:
        weight: Weight of a row of each group, in (0, 1).
        logit: The same as logits.
        checked_weight: Weight of a checked row on that scale.
        penalty: Ridge penalty a unit of weight.
        loss: Mean squared error of checked rows, held out, summed over outputs.
    """

    weight: Array
    logit: Array
    checked_weight: float
    penalty: float
    loss: float
    residual_scale: float


class GroupWeightProblem:
    """Group weights as a nonlinear least-squares problem in (logits, log of the checked weight, log penalty).

    Args:
        statistics: Of the groups.
        features: Checked rows x columns.
        target: Checked rows x outputs, as `encode_targets` returns.
        prior_mean: Prior means of the logits. Default: 0.
        folds: Parts of the checked rows, each of which judges what the others train.
        row_weight: How often each checked row counts, for the bootstrap.
        fixed: Keep the logits at `prior_mean` and find only the checked weight and the penalty.
    """

    def __init__(
        self,
        statistics: GroupStatistics,
        features: Array,
        target: Array,
        *,
        prior_mean: Array | None = None,
        folds: int = 5,
        seed: int = 0,
        row_weight: Array | None = None,
        fixed: bool = False,
    ) -> None:
        self.statistics = statistics
        self.fixed = fixed
        self.num_outputs = target.shape[1]
        self.num_free = 0 if fixed else statistics.num_groups
        self.prior_mean = np.zeros(statistics.num_groups) if prior_mean is None else prior_mean
        weight = np.ones(len(features)) if row_weight is None else np.asarray(row_weight, dtype=np.float64)
        part = np.random.default_rng(seed).permutation(len(features)) % max(2, min(folds, len(features)))
        self._folds = []
        for fold in range(part.max(initial=-1) + 1):
            inside, outside = part != fold, (part == fold) & (weight > 0)
            weighted = features[inside] * weight[inside, None]
            self._folds.append(
                (
                    weighted.T @ features[inside],
                    weighted.T @ target[inside],
                    weight[inside].sum(),
                    features[outside],
                    target[outside],
                    np.sqrt(weight[outside]),
                )
            )
        self.total_weight = float(weight.sum())
        centred = target - weight @ target / max(self.total_weight, 1e-12)
        self.baseline = float(weight @ (centred**2).sum(1)) / max(self.total_weight, 1e-12)

    @cached_property
    def _prior(self) -> tuple[Array, Array]:
        mean = np.r_[self.prior_mean[: self.num_free], CHECKED_WEIGHT[0], PENALTY[0]]
        return mean, np.r_[np.full(self.num_free, PRIOR_SCALE), CHECKED_WEIGHT[1], PENALTY[1]]

    @property
    def start(self) -> Array:
        """Return the prior mean of all parameters."""
        return self._prior[0].copy()

    def scale(self, loss: float) -> float:
        """Return the factor that turns the squared error into a log-likelihood.

        A row of C classes has C - 1 free residuals, so the variance of one is the summed error over C - 1.
        """
        return float(max(1, self.num_outputs - 1) / (2 * max(loss, 1e-3)))

    def residuals(self, x: Array, *, jacobian: bool = True) -> tuple[Array, Array | None]:
        """Return held-out residuals times the square root of the row weight, and their derivatives in x."""
        s, free = self.statistics, self.num_free
        logit = x[:free] if free else self.prior_mean
        w, t, mu = 1 / (1 + np.exp(-logit)), np.exp(x[-2]), np.exp(x[-1])
        gram, mass, count = np.tensordot(w, s.gram, 1), np.tensordot(w, s.target, 1), w @ s.count
        d, c = mass.shape
        values, slopes = [], []
        for gram_f, mass_f, count_f, features, target, root in self._folds:
            total = count + t * count_f
            h = gram + t * gram_f
            h.flat[:: d + 1] += mu * total
            factor = cho_factor(h, lower=True, check_finite=False)
            coef = cho_solve(factor, mass + t * mass_f, check_finite=False)
            values.append(((features @ coef - target) * root[:, None]).ravel())
            if not jacobian:
                continue
            probe = cho_solve(factor, (features * root[:, None]).T, check_finite=False).T
            columns = []
            if free:
                change = s.target - (s.gram.reshape(-1, d) @ coef).reshape(-1, d, c)
                change -= mu * s.count[:, None, None] * coef
                by_group = probe @ change.transpose(1, 0, 2).reshape(d, -1)
                columns.append(by_group.reshape(len(features), -1, c) * (w * (1 - w))[:, None])
            by_checked = t * (probe @ (mass_f - gram_f @ coef - mu * count_f * coef))
            by_penalty = -mu * total * (probe @ coef)
            columns += [by_checked[:, None], by_penalty[:, None]]
            slopes.append(np.concatenate(columns, 1).transpose(0, 2, 1).reshape(-1, free + 2))
        return np.concatenate(values), np.concatenate(slopes) if jacobian else None

    def objective(self, x: Array, scale: float) -> float:
        """Return the negative log-posterior up to a constant."""
        mean, spread = self._prior
        r, _ = self.residuals(x, jacobian=False)
        return float(scale * (r @ r) + (((x - mean) / spread) ** 2).sum() / 2)

    def gradient(self, x: Array, scale: float) -> Array:
        """Return the gradient of `objective`."""
        mean, spread = self._prior
        r, slope = self.residuals(x)
        assert slope is not None
        return np.asarray(2 * scale * (slope.T @ r) + (x - mean) / spread**2)

    def minimize(self, x: Array, scale: float, max_iter: int) -> Array:
        """Return a minimiser of `objective` by Levenberg-Marquardt."""
        mean, spread = self._prior
        damping, value = _START_DAMPING, None
        for _ in range(max_iter):
            r, slope = self.residuals(x)
            assert slope is not None
            if value is None:
                value = scale * (r @ r) + (((x - mean) / spread) ** 2).sum() / 2
            gradient = 2 * scale * (slope.T @ r) + (x - mean) / spread**2
            curvature = 1 / spread**2 + 2 * scale * (slope * slope).sum(0)
            while True:
                step = np.clip(solve_damped(slope, gradient, 1 / spread**2 + damping * curvature, scale), -3.0, 3.0)
                new_value = self.objective(x - step, scale)
                if new_value <= value or damping > _MAX_DAMPING:
                    break
                damping *= 10
            if new_value > value:
                break
            x, decrease, value = x - step, value - new_value, new_value
            damping = max(damping / 10, 1e-9)
            if decrease < _TOLERANCE * (1 + abs(value)):
                break
        return x

    def solve(self, start: Array | None = None, *, scale: float | None = None, max_iter: int = 20) -> GroupWeightFit:
        """Return the MAP estimate. The noise level of checked rows is estimated once more on the way."""
        x = self.start if start is None else start
        if scale is not None:
            x = self.minimize(x, scale, max_iter)
        else:
            scale = self.scale(self.baseline / 2)
            for _ in range(2):
                x = self.minimize(x, scale, max_iter)
                scale = self.scale(self._mean_loss(x))
        logit = x[: self.num_free] if self.num_free else self.prior_mean
        return GroupWeightFit(
            1 / (1 + np.exp(-logit)), logit, float(np.exp(x[-2])), float(np.exp(x[-1])), self._mean_loss(x), scale
        )

    def _mean_loss(self, x: Array) -> float:
        r, _ = self.residuals(x, jacobian=False)
        return float(r @ r) / max(self.total_weight, 1e-12)


def solve_damped(slope: Array, gradient: Array, diagonal: Array, scale: float) -> Array:
    """Return (2 scale J'J + diag)^-1 g: in the space of parameters, or of residuals where these are fewer."""
    if slope.shape[0] >= slope.shape[1]:
        matrix = 2 * scale * (slope.T @ slope)
        matrix.flat[:: len(matrix) + 1] += diagonal
        return np.asarray(np.linalg.solve(matrix, gradient))
    narrow = slope / diagonal
    inner = narrow @ slope.T
    inner.flat[:: len(inner) + 1] += 1 / (2 * scale)
    start = gradient / diagonal
    return np.asarray(start - narrow.T @ np.linalg.solve(inner, slope @ start))


def fit_group_weights(
    statistics: GroupStatistics, features: Array, target: Array, *, prior_mean: Array | None = None, seed: int = 0
) -> GroupWeightFit:
    """Return the MAP weights of groups, given checked rows."""
    return GroupWeightProblem(statistics, features, target, prior_mean=prior_mean, seed=seed).solve()


def fit_checked_weight(statistics: GroupStatistics, features: Array, target: Array, *, seed: int = 0) -> float:
    """Return how much a checked row counts beside rows that count as in `statistics` (of one group)."""
    everything = np.full(statistics.num_groups, 40.0)  # a logit of 40: weight 1
    problem = GroupWeightProblem(statistics, features, target, prior_mean=everything, seed=seed, fixed=True)
    return problem.solve().checked_weight


def bootstrap_group_weights(
    statistics: GroupStatistics,
    features: Array,
    target: Array,
    fit: GroupWeightFit,
    *,
    prior_mean: Array | None = None,
    draws: int = 40,
    seed: int = 0,
    max_iter: int = 3,
) -> Array:
    """Return draws x groups weights, each from a Dirichlet reweighting of the checked rows.

    A few steps from the estimate are enough, because the reweighted solutions are near it.
    """
    rng = np.random.default_rng(seed)
    start = np.r_[fit.logit, np.log(fit.checked_weight), np.log(fit.penalty)]
    weights = []
    for _ in range(draws):
        row_weight = rng.dirichlet(np.ones(len(features))) * len(features)
        problem = GroupWeightProblem(
            statistics, features, target, prior_mean=prior_mean, seed=seed, row_weight=row_weight
        )
        weights.append(problem.solve(start, scale=fit.residual_scale, max_iter=max_iter).weight)
    return np.stack(weights)
