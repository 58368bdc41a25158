"""Cross-fitting, calibration and averaging of candidates: pairs of a strategy and a learner.

Rows are cut into folds. For each fold, every candidate is trained without the fold's votes and checked labels and
predicts the fold, so that each row has a prediction by models that have not seen its labels. Checked rows then choose
penalties and temperatures, and weigh the candidates by Bayesian-bootstrap pseudo-BMA. For rows of a fold, these
choices are made by the checked rows of the other folds: nothing is judged by a row that chose it.

On images each fold first has a network of its own, the trunk, whose last layer is what linear models see. Networks are
then trained a second time, on the labels that the trunks have helped to correct.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import threadpool_limits

from fsla._checks import pick_device
from fsla.data._data_fit import CandidateScore, DataFit, Predictor
from fsla.data._dataset import Array, Task, TrainingData, Votes
from fsla.data._diagnostics import consensus, diagnose
from fsla.data._intervals import bootstrap, paired_difference, wilson
from fsla.data._learners import Fold, Learner, Progress, default_learners
from fsla.data._predictors import MIN_PROBABILITY, EnsemblePredictor, apply_temperature, find_temperature, softmax
from fsla.data._result import Comparison
from fsla.data._strategies import (
    Belief,
    Nothing,
    Strategy,
    TrustedOnly,
    checked_mass,
    checked_weight,
    default_strategies,
    empty_mass,
)

if TYPE_CHECKING:
    import torch

    from fsla.data._network_learners import ImageTrunk, TrunkFit

_DRAWS = 200
LEARNING_RATE = 0.5
"""Power of the likelihood: cross-fitted losses of some hundred rows are less certain than they look."""
MIN_CHECKED_ROWS = 10
"""Fewer checked rows cannot choose among candidates."""
MIN_SHARE = 0.01
"""Candidates with a smaller share are left out of the average."""


# --- Shares ----------------------------------------------------------------------------------------------------------


def row_losses(predictions: Array, labels: Array) -> Array:
    """Return the negative log-likelihood of each row, or the squared error for numbers."""
    if predictions.ndim == 1:
        return np.asarray((predictions - labels) ** 2)
    rows = np.arange(len(labels))
    return np.asarray(-np.log(np.clip(predictions[rows, labels.astype(np.intp)], MIN_PROBABILITY, 1)))


def pseudo_bma(losses: Array, *, draws: int = _DRAWS, seed: int = 0) -> Array:
    """Return weights of models by Bayesian-bootstrap pseudo-BMA.

    Args:
        losses: Models x rows, negative log-likelihoods.
        draws: Of the weights of rows.
        seed: Of the draws.
    """
    n = losses.shape[1]
    weight = np.random.default_rng(seed).dirichlet(np.ones(n), draws) * n
    scores = -LEARNING_RATE * weight @ losses.T
    scores -= scores.max(1, keepdims=True)
    e = np.exp(scores)
    return np.asarray((e / e.sum(1, keepdims=True)).mean(0))


@dataclass(frozen=True, eq=False)
class Shares:
    """What some checked rows choose.

    Attributes:
        weights: For each candidate, the weight of each penalty in the average; all together they sum to 1.
        temperatures: Of the same models.
        loss: Mean loss of each candidate, averaged over its penalties.
        penalty_weights: The weights of penalties within each candidate, which sum to 1.
    """

    weights: list[Array]
    temperatures: list[Array]
    loss: Array
    penalty_weights: list[Array]

    @property
    def share(self) -> Array:
        """Return the weight of each candidate."""
        return np.array([weight.sum() for weight in self.weights])

    def only(self, candidate: int) -> Shares:
        """Return the choice among the penalties of one candidate."""
        weight = self.penalty_weights[candidate]
        return Shares([weight], [self.temperatures[candidate]], self.loss[[candidate]], [weight])


def choose_shares(predictions: Sequence[Sequence[Array]], labels: Array) -> Shares:
    """Return the choice of some checked rows: first among a candidate's penalties, then among candidates.

    Args:
        predictions: For each candidate and penalty, predictions of these rows.
        labels: Their true labels.
    """
    classification = predictions[0][0].ndim == 2
    temperatures = [
        np.array([find_temperature(p, labels) if classification else 1.0 for p in path]) for path in predictions
    ]
    if classification:
        predictions = [
            [apply_temperature(p, t) for p, t in zip(path, temperature, strict=True)]
            for path, temperature in zip(predictions, temperatures, strict=True)
        ]
    # Squared errors become log-likelihoods at the noise level of a middling model.
    losses = [np.stack([row_losses(p, labels) for p in path]) for path in predictions]
    scale = 1.0 if classification else 2 * max(float(np.median([table.mean(1).min() for table in losses])), 1e-12)
    penalty_weights = [pseudo_bma(table / scale) for table in losses]
    averages = [np.tensordot(w, np.stack(path), 1) for w, path in zip(penalty_weights, predictions, strict=True)]
    table = np.stack([row_losses(average, labels) for average in averages])
    share = pseudo_bma(table / scale)
    weights = [s * w for s, w in zip(share, penalty_weights, strict=True)]
    least = min(MIN_SHARE, max(w.max() for w in weights))
    weights = [np.where(w >= least, w, 0.0) for w in weights]
    total = sum(w.sum() for w in weights)
    return Shares([w / total for w in weights], temperatures, table.mean(1), penalty_weights)


# --- Cross-fitting ---------------------------------------------------------------------------------------------------


def assign_folds(data: TrainingData, folds: int, seed: int) -> Array:
    """Return the fold of each row: checked rows are spread evenly, class by class."""
    rng = np.random.default_rng(seed)
    fold = rng.integers(folds, size=len(data.features))
    order = rng.permutation(len(data.checked_rows))
    order = order[np.argsort(data.checked_labels[order], kind="stable")]
    fold[data.checked_rows[order]] = (np.arange(len(order)) + rng.integers(folds)) % folds
    return fold


def hide_votes(data: TrainingData, rows: Array) -> TrainingData:
    """Return the data without the votes on some rows (a mask)."""
    use = ~rows[data.votes.row]
    return replace(data, votes=Votes(data.votes.row[use], data.votes.group[use], data.votes.label[use]))


@dataclass(eq=False)
class Candidate:
    """A strategy with a learner, and its models: one path of penalties for each fold."""

    strategy: Strategy
    learner: Learner
    models: list[list[Predictor]] = field(default_factory=list)
    seconds: float = 0.0


def _prepare(data: TrainingData, strategy: Strategy, checked: Array) -> tuple[Belief, Fold]:
    """Return a belief, and what learners are trained on with some of the checked rows."""
    belief = strategy.belief(data, checked)
    extra = empty_mass(data)
    if strategy.uses_checked_labels:
        extra = checked_mass(data, checked, checked_weight(data, belief.mass, checked))
    return belief, Fold(data.features, belief.mass, extra)


def one_thread() -> threadpool_limits:
    """Run BLAS and OpenMP on one thread inside the block.

    Products and histograms are small. On a busy machine their threads wait for each other thirty times as long.
    """
    return threadpool_limits(1)


class CrossFit:
    """Candidates trained without each fold in turn, and what checked rows choose among them.

    Args:
        data: Standardised in regression.
        strategies: To try, the cheapest first.
        learners: To try with each.
        folds: Number of folds.
        seed: Of everything random.
        progress: Called with a text, the number of strategies that are done, and their number.
        device: Where networks on images are trained: "auto", "cpu" or "cuda".
        should_stop: Asked before each strategy from the fourth on; those that remain are skipped.
    """

    def __init__(
        self,
        data: TrainingData,
        strategies: Sequence[Strategy],
        learners: Sequence[Learner],
        *,
        folds: int,
        seed: int,
        device: str = "auto",
        progress: Progress | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self.data, self.seed, self.folds = data, seed, folds
        self.fold = assign_folds(data, folds, seed)
        self.visible = [hide_votes(data, self.fold == fold) for fold in range(folds)]
        self.trunks: list[ImageTrunk] = []
        if data.features.images is not None and any(learner.is_linear for learner in learners):
            self._embed_images(pick_device(device), progress)
        self.candidates: list[Candidate] = []
        self.skipped: list[str] = []
        for index, strategy in enumerate(strategies):
            if index >= 3 and should_stop is not None and should_stop():
                names = ", ".join(s.name for s in strategies[index:])
                self.skipped.append(f"Time was up before these strategies: {names}.")
                break
            if progress is not None:
                progress(strategy.name, index, len(strategies))
            with one_thread():
                self.candidates += self._train(strategy, learners, progress)
        self.judge_rows, self.judge_labels = _judges(data)

    def _embed_images(self, device: torch.device, progress: Progress | None) -> None:
        """Let networks turn images into dense features; each fold has one that did not see its votes.

        What they say of the folds that they did not see are the scores of label correction, and the dense features
        of all data.
        """
        from fsla.data._network_learners import fit_trunks

        fits = fit_trunks(self.visible, seed=self.seed, device=str(device), progress=progress)
        if not fits:
            return
        scores = unseen_scores(fits, self.fold, self.data.task)
        size = np.sqrt((scores**2).sum(1).mean())
        constant = np.full((len(scores), 1), 0.5)
        features = replace(
            self.data.features,
            dense=np.concatenate([scores / max(float(size), 1e-12), constant], 1),
            scores=np.concatenate([scores, constant], 1),
        )
        self.data = replace(self.data, features=features)
        self.visible = [
            replace(part, features=replace(features, dense=fit.dense))
            for part, fit in zip(self.visible, fits, strict=True)
        ]
        self.trunks = [fit.trunk for fit in fits]

    def _train(self, strategy: Strategy, learners: Sequence[Learner], progress: Progress | None) -> list[Candidate]:
        """Return the strategy with each learner that suits it, trained without each fold in turn."""
        suited = suited_learners(self.data, strategy, learners)
        if not suited:
            return []
        start = perf_counter()
        folds = []
        for fold, data in enumerate(self.visible):
            checked = np.nonzero(self.fold[data.checked_rows] != fold)[0]
            folds.append(_prepare(data, strategy, checked)[1])
        belief_time = (perf_counter() - start) / len(suited)
        candidates = []
        for learner in suited:
            start = perf_counter()
            models = learner.paths(folds, self.data.task, self.seed, progress)
            candidates.append(Candidate(strategy, learner, models, perf_counter() - start + belief_time))
        return candidates

    def judge(self, candidates: Sequence[Candidate]) -> tuple[Shares, list[Shares]]:
        """Return the choice of all judging rows, and for each fold that of the rows outside it."""
        rows, part = self.judge_rows, self.fold[self.judge_rows]
        predictions = []
        for candidate in candidates:
            path = [empty_prediction(self.data, len(rows)) for _ in candidate.models[0]]
            for fold, models in enumerate(candidate.models):
                inside = np.nonzero(part == fold)[0]
                if len(inside):
                    features = self.visible[fold].features.take(rows[inside])
                    for array, model in zip(path, models, strict=True):
                        array[inside] = model.predict(features)
            predictions.append(path)
        by_fold = []
        for fold in range(self.folds):
            use = part != fold
            by_fold.append(choose_shares([[p[use] for p in path] for path in predictions], self.judge_labels[use]))
        return choose_shares(predictions, self.judge_labels), by_fold

    def predict(self, candidates: Sequence[Candidate], by_fold: Sequence[Shares], rows: Array | None = None) -> Array:
        """Return out-of-fold predictions of the average for some rows. Default: all."""
        rows = np.arange(len(self.data.features)) if rows is None else rows
        result = empty_prediction(self.data, len(rows))
        for fold, shares in enumerate(by_fold):
            inside = np.nonzero(self.fold[rows] == fold)[0]
            if len(inside):
                ensemble = build_ensemble(self.data, [c.models[fold] for c in candidates], shares)
                result[inside] = ensemble.predict(self.visible[fold].features.take(rows[inside]))
        return result

    def finish(self, candidates: Sequence[Candidate], shares: Shares) -> tuple[EnsemblePredictor, Array]:
        """Return the average of the candidates that have a share, and the weight of each vote.

        They are trained once more on all data. On images the models of all folds are averaged instead: training a
        network again takes as long as a fold, and the average of several is better than one.
        """
        averages_folds = self.data.features.images is not None
        paths: list[list[Predictor]] = [[] for _ in candidates]
        checked = np.arange(len(self.data.checked_rows))
        vote_weight = np.zeros(len(self.data.votes))
        for strategy in dict.fromkeys(c.strategy for c in candidates):
            members = [i for i, c in enumerate(candidates) if c.strategy is strategy and shares.share[i] > 0]
            if members:
                belief, fold = _prepare(self.data, strategy, checked)
                vote_weight += shares.share[members].sum() * weigh_votes(self.data, belief)
                for i in [] if averages_folds else members:
                    start = perf_counter()
                    (paths[i],) = candidates[i].learner.paths([fold], self.data.task, self.seed)
                    candidates[i].seconds += perf_counter() - start
        if averages_folds:
            return self._average_folds(candidates, shares), vote_weight
        return build_ensemble(self.data, paths, shares), vote_weight

    def _average_folds(self, candidates: Sequence[Candidate], shares: Shares) -> EnsemblePredictor:
        """Return the average over folds, each with the trunk that turns images into its features."""
        members: list[Predictor] = []
        needs_trunk = any(s > 0 and not c.learner.reads_images for c, s in zip(candidates, shares.share, strict=True))
        for fold in range(self.folds):
            member: Predictor = build_ensemble(self.data, [c.models[fold] for c in candidates], shares)
            if self.trunks and needs_trunk:
                from fsla.data._network_learners import TrunkPredictor

                member = TrunkPredictor(self.trunks[fold], member)
            members.append(member)
        equal = np.full(self.folds, 1 / self.folds)
        return EnsemblePredictor(tuple(members), equal, np.ones(self.folds), self.data.task)


def unseen_scores(fits: Sequence[TrunkFit], fold: Array, task: Task) -> Array:
    """Return what trunks say of the fold that each did not see: log-probabilities but for a constant, or numbers."""
    scores = np.zeros_like(fits[0].scores)
    for number, fit in enumerate(fits):
        inside = fold == number
        outputs = fit.scores[inside]
        if task == "classification":
            outputs = np.log(np.clip(softmax(outputs), MIN_PROBABILITY, 1))
            outputs = outputs - outputs.mean(1, keepdims=True)
        scores[inside] = outputs
    return scores


def weigh_votes(data: TrainingData, belief: Belief) -> Array:
    """Return how much each vote counts in a belief, at most 1."""
    if belief.vote_weight is not None:
        return belief.vote_weight
    row = data.votes.row
    if data.task == "regression":
        weight = belief.mass[row, 0]
        return np.asarray(weight / max(weight.max(initial=0.0), 1e-12))
    label = data.votes.label.astype(np.intp)
    if belief.posterior is None:
        return np.minimum(belief.mass[row, label], 1.0)
    return np.asarray(belief.posterior[row, label] * belief.posterior[row].max(1) ** 2)


def suited_learners(data: TrainingData, strategy: Strategy, learners: Sequence[Learner]) -> list[Learner]:
    """Return the learners that are worth trying with a strategy."""
    only_checked = isinstance(strategy, TrustedOnly) or not strategy.uses_checked_labels
    return [
        learner
        for learner in learners
        if learner.supports(data) and strategy.suits(learner) and not (learner.fine_tunes and only_checked)
    ]


def build_ensemble(data: TrainingData, paths: Sequence[Sequence[Predictor]], shares: Shares) -> EnsemblePredictor:
    """Return the average of the models that have a weight."""
    members, weights, temperatures = [], [], []
    for path, weight, temperature in zip(paths, shares.weights, shares.temperatures, strict=True):
        for j in np.nonzero(weight)[0]:
            members.append(path[int(j)])
            weights.append(weight[j])
            temperatures.append(temperature[j])
    return EnsemblePredictor(tuple(members), np.array(weights), np.array(temperatures), data.task)


def empty_prediction(data: TrainingData, rows: int) -> Array:
    """Return zeros of the shape of predictions."""
    return np.zeros((rows, data.num_classes) if data.task == "classification" else rows)


def _judges(data: TrainingData) -> tuple[Array, Array]:
    """Return rows that choose among candidates, with their labels.

    They are the checked rows that are a random sample. Without any checked row, given labels choose.
    """
    if len(data.checked_rows) == 0:
        return consensus(data)
    use = np.ones(len(data.checked_rows), dtype=bool) if data.random_rows is None else data.random_rows
    if use.sum() < MIN_CHECKED_ROWS:
        use = np.ones(len(data.checked_rows), dtype=bool)
    return data.checked_rows[use], data.checked_labels[use]


# --- The whole fit ---------------------------------------------------------------------------------------------------


def standardize(data: TrainingData) -> tuple[TrainingData, float, float]:
    """Return the data with targets of mean 0 and deviation 1 (of checked rows), and both numbers."""
    if data.task == "classification":
        return data, 0.0, 1.0
    labels = data.checked_labels if len(data.checked_labels) > 1 else data.votes.label
    offset, scale = float(np.mean(labels)), float(np.std(labels)) or 1.0
    votes = replace(data.votes, label=(data.votes.label - offset) / scale)
    return replace(data, votes=votes, checked_labels=(data.checked_labels - offset) / scale), offset, scale


def compare(
    fit: CrossFit,
    candidates: Sequence[Candidate],
    baseline: Sequence[Candidate],
    out_of_fold: Array,
    scale: float,
    best: str,
) -> Comparison:
    """Return how doing nothing and the recommended choice do on checked rows that chose neither."""
    rows, labels = fit.judge_rows, fit.judge_labels
    trusted = [c for c in candidates if isinstance(c.strategy, TrustedOnly)]

    def held_out(group: Sequence[Candidate]) -> Array:
        return fit.predict(group, fit.judge(group)[1], rows)

    predictions = [held_out(baseline), out_of_fold[rows], *([held_out(trusted)] if trusted else [])]
    if fit.data.task == "classification":
        right = [p.argmax(1) == labels for p in predictions]
        accuracy = [wilson(float(hits.mean()), len(hits)) for hits in right]
        gain = paired_difference(right[0], right[1])
        name, values = "accuracy", accuracy
    else:
        squared = np.stack([(p - labels) ** 2 for p in predictions], 1) * scale**2
        values = [bootstrap(squared[:, [i]], lambda mean: np.sqrt(mean[:, 0])) for i in range(len(predictions))]
        gain = bootstrap(squared, lambda mean: np.sqrt(mean[:, 0]) - np.sqrt(mean[:, 1]))
        name = "root mean squared error"
    return Comparison(name, len(rows), values[0], values[1], gain, best, values[2] if trusted else None)


def fit_data(
    data: TrainingData,
    *,
    strategies: Sequence[Strategy] | None = None,
    learners: Sequence[Learner] | None = None,
    folds: int = 5,
    seed: int = 0,
    device: str = "auto",
    progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> DataFit:
    """Train, calibrate and average candidates, and judge rows and groups by the average.

    Args:
        data: Rows with votes and checked labels.
        strategies: To try. Default: `default_strategies`.
        learners: To try. Default: `default_learners`.
        folds: Number of folds.
        seed: Of everything random.
        device: Where networks on images are trained: "auto", "cpu" or "cuda".
        progress: Called with a text, the number of steps that are done, and their number.
        should_stop: Asked between strategies; those that remain are skipped.

    Raises:
        ValueError: There is nothing to learn from.
    """
    check_data(data)
    original = data
    data, offset, scale = standardize(data)
    data = replace(data, features=replace(data.features, index=np.arange(len(data.features))))
    learners = default_learners(data, device) if learners is None else learners
    strategies = default_strategies(data) if strategies is None else strategies
    if len(data.checked_rows) == 0:
        strategies = ()
    baseline_strategy = [Nothing()] if len(data.votes) else []
    fit = CrossFit(
        data,
        [*baseline_strategy, *strategies],
        learners,
        folds=folds,
        seed=seed,
        device=device,
        progress=progress,
        should_stop=should_stop,
    )
    with one_thread():
        return _summarize(original, fit, offset, scale)


def _summarize(original: TrainingData, fit: CrossFit, offset: float, scale: float) -> DataFit:
    """Choose among the trained candidates, train the chosen ones on all data, and judge rows and groups."""
    data = fit.data
    baseline = [c for c in fit.candidates if not c.strategy.uses_checked_labels]
    candidates = [c for c in fit.candidates if c.strategy.uses_checked_labels] or baseline
    shares, by_fold = fit.judge(candidates)
    out_of_fold = fit.predict(candidates, by_fold)
    scores = _scores(fit, candidates, shares, scale)
    lasting = [c for c in candidates if c.learner.predicts_new_rows]
    if not lasting:
        raise ValueError("No learner can predict new rows. Pass one in learners= beside pred_probs.")
    predictor, vote_weight = fit.finish(lasting, shares if lasting == candidates else fit.judge(lasting)[0])
    comparison = None
    if len(data.checked_rows) and baseline:
        best = f"{scores[0].strategy}, {scores[0].learner}"
        comparison = compare(fit, candidates, baseline, out_of_fold, scale, best)
    diagnosis = diagnose(fit.data, out_of_fold, fit.fold, fit.seed, scale)
    return DataFit(
        data=original,
        predictor=replace(predictor, offset=offset, scale=scale),
        candidates=scores,
        out_of_fold=out_of_fold * scale + offset,
        posterior=diagnosis.posterior * scale + offset,
        vote_weight=vote_weight,
        groups=diagnosis.groups,
        confusion=diagnosis.confusion,
        group_confusion=diagnosis.group_confusion,
        noise_rate=diagnosis.noise_rate,
        comparison=comparison,
        skipped=tuple(fit.skipped),
    )


def check_data(data: TrainingData) -> None:
    """Raise ValueError if the data cannot be learned from."""
    if len(data.votes) == 0 and len(data.checked_rows) == 0:
        raise ValueError("No row has a label. Give labels, or checked labels, or both.")
    if 0 < len(data.checked_rows) < MIN_CHECKED_ROWS:
        raise ValueError(
            f"Only {len(data.checked_rows)} rows have a checked label. Check at least {MIN_CHECKED_ROWS} rows; "
            "a hundred are better."
        )


def _scores(fit: CrossFit, candidates: Sequence[Candidate], shares: Shares, scale: float) -> tuple[CandidateScore, ...]:
    """Return what to report of each candidate, the largest share first."""
    scores = []
    for i, candidate in enumerate(candidates):
        accuracy, loss = None, float(shares.loss[i])
        if fit.data.task == "classification":
            prediction = fit.predict([candidate], [shares.only(i)] * fit.folds, fit.judge_rows)
            accuracy = float((prediction.argmax(1) == fit.judge_labels).mean())
        else:
            loss *= scale**2
        share, seconds = float(shares.share[i]), candidate.seconds
        scores.append(CandidateScore(candidate.strategy.name, candidate.learner.name, share, loss, accuracy, seconds))
    return tuple(sorted(scores, key=lambda s: (-s.share, s.loss)))
