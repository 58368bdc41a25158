"""The numerical engine of the data room, against brute force, finite differences and simulated truth."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fsla.data._crowd import checked_accuracy, fit_crowd, fit_scores, one_coin
from fsla.data._dataset import Features, TrainingData, Votes
from fsla.data._diagnostics import MIN_CHECKED_VOTES, consensus, gains_without, label_posterior, label_quality
from fsla.data._group_weights import (
    GroupStatistics,
    GroupWeightProblem,
    bootstrap_group_weights,
    compress,
    encode_targets,
    fit_checked_weight,
    fit_group_weights,
    solve_damped,
    statistics_of_votes,
)
from fsla.data._intervals import bootstrap, paired_difference, wilson
from fsla.data._learners import (
    EstimatorLearner,
    FineTunedLinearLearner,
    Learner,
    LinearLearner,
    PredictedProbabilities,
    expand_mass,
    fit_logistic,
    fit_ridge,
    logistic_loss,
)
from fsla.data._noise_rate import prediction_powered_share
from fsla.data._predictors import EnsemblePredictor, LinearPredictor, predictor_from_state
from fsla.data._selection import (
    CrossFit,
    assign_folds,
    choose_shares,
    find_temperature,
    fit_data,
    pseudo_bma,
)
from fsla.data._strategies import (
    AllData,
    CorrectedGroupWeighting,
    DropGroups,
    GroupWeighting,
    LabelCorrection,
    Nothing,
    ScoreCorrection,
    TrustedOnly,
    checked_mass,
    default_strategies,
    sum_votes,
    vote_mass,
)
from fsla.data._trees import Bins, BoostingLearner, ForestLearner, bin_features
from trusted_data import annotators, blobs, features_of, scores, sources

ALL_CHECKED = np.arange(60)


def numerical_gradient(f, x, step=1e-5):
    return np.array([(f(x + step * e) - f(x - step * e)) / (2 * step) for e in np.eye(len(x))])


# --- Closed-form group weights ----------------------------------------------------------------------------------------


def weight_problem(data, **options):
    z = data.features.dense
    target = encode_targets(data.checked_labels, data.num_classes)
    return GroupWeightProblem(statistics_of_votes(data, z), z[data.checked_rows], target, **options)


def brute_force_residuals(data, problem, x):
    """Fit a ridge on weighted rows for each fold, one by one."""
    z, n = data.features.dense, len(data.checked_rows)
    weight, t, mu = 1 / (1 + np.exp(-x[:-2])), np.exp(x[-2]), np.exp(x[-1])
    part = np.random.default_rng(0).permutation(n) % 5
    use = ~data.is_checked[data.votes.row]
    rows, w = data.votes.row[use], weight[data.votes.group[use]]
    y = encode_targets(data.votes.label[use], data.num_classes)
    truth = encode_targets(data.checked_labels, data.num_classes)
    result = []
    for fold in range(5):
        inside = data.checked_rows[part != fold]
        rows_f = np.concatenate([rows, inside])
        w_f = np.concatenate([w, np.full(len(inside), t)])
        y_f = np.concatenate([y, truth[part != fold]])
        h = sum(wi * np.outer(z[r], z[r]) for r, wi in zip(rows_f, w_f, strict=True))
        b = sum(wi * np.outer(z[r], yi) for r, wi, yi in zip(rows_f, w_f, y_f, strict=True))
        coef = np.linalg.solve(h + mu * w_f.sum() * np.eye(z.shape[1]), b)
        result.append((z[data.checked_rows[part == fold]] @ coef - truth[part == fold]).ravel())
    return np.concatenate(result)


@pytest.mark.parametrize("make", [sources, annotators, scores])
def test_group_weight_residuals_equal_brute_force(make):
    """Gram matrices must say exactly what a ridge on all rows says, for one label, several and numbers."""
    data, _ = make(n=150)
    problem = weight_problem(data)
    x = problem.start + np.random.default_rng(0).standard_normal(data.num_groups + 2)
    r, _ = problem.residuals(x)
    np.testing.assert_allclose(r, brute_force_residuals(data, problem, x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("make", [sources, scores])
def test_group_weight_gradient_equals_finite_differences(make):
    data, _ = make()
    row_weight = np.random.default_rng(1).dirichlet(np.ones(60)) * 60
    problem = weight_problem(data, prior_mean=np.linspace(-1, 1, data.num_groups), row_weight=row_weight)
    x = problem.start + 0.3 * np.random.default_rng(0).standard_normal(data.num_groups + 2)
    expected = numerical_gradient(lambda v: problem.objective(v, 7.0), x)
    np.testing.assert_allclose(problem.gradient(x, 7.0), expected, rtol=1e-5, atol=1e-6)


def test_group_weight_solution_is_stationary():
    """Levenberg-Marquardt may stop early; a point that is no minimum would not be the MAP estimate."""
    problem = weight_problem(sources()[0])
    x = problem.minimize(problem.start, 10.0, 100)
    assert np.abs(problem.gradient(x, 10.0)).max() < 0.02 * np.abs(problem.gradient(problem.start, 10.0)).max()


@pytest.mark.parametrize("rows", [3, 30])
def test_solve_damped_equals_the_full_matrix(rows):
    """With more groups than residuals, the small system must give the same step."""
    rng = np.random.default_rng(0)
    slope, gradient, diagonal = rng.standard_normal((rows, 10)), rng.standard_normal(10), rng.random(10) + 0.1
    expected = np.linalg.solve(6 * slope.T @ slope + np.diag(diagonal), gradient)
    np.testing.assert_allclose(solve_damped(slope, gradient, diagonal, 3.0), expected, rtol=1e-8)


def test_group_statistics_of_parts_add_up():
    """Streams and clusters add the statistics of parts."""
    data, _ = sources()
    z = data.features.dense
    y = encode_targets(data.votes.label, 3)
    whole = GroupStatistics.from_rows(z, y, data.votes.group, 4)
    parts = [GroupStatistics.from_rows(z[p], y[p], data.votes.group[p], 4) for p in (slice(0, 130), slice(130, None))]
    for name in ("gram", "target", "count"):
        np.testing.assert_allclose(getattr(parts[0] + parts[1], name), getattr(whole, name))
    weighted = GroupStatistics.from_rows(z, y, data.votes.group, 4, weight=np.full(len(z), 2.0))
    np.testing.assert_allclose(weighted.gram, 2 * whole.gram)
    np.testing.assert_allclose(whole.pooled().gram[0], z.T @ z, atol=1e-10)


def test_group_weights_order_sources_by_their_noise():
    data, _ = sources(n=800, rates=(0.0, 0.1, 0.5, 1.0))
    result = GroupWeighting().belief(data, ALL_CHECKED)
    w = result.group_weight
    assert w[0] > w[2] > w[3]
    assert w[0] > 0.5
    assert w[3] < 0.1
    np.testing.assert_allclose(result.mass.sum(), w[data.votes.group][~data.is_checked[data.votes.row]].sum())


def test_bootstrap_of_group_weights_surrounds_the_estimate():
    data, _ = sources(n=800)
    z, target = data.features.dense, encode_targets(data.checked_labels, 3)
    s = statistics_of_votes(data, z)
    fit = fit_group_weights(s, z[:60], target)
    draws = bootstrap_group_weights(s, z[:60], target, fit, draws=30)
    low, high = np.quantile(draws, [0.025, 0.975], axis=0)
    assert (low <= fit.weight + 0.05).all()
    assert (high >= fit.weight - 0.05).all()
    assert high[3] < low[0]


def test_checked_weight_is_large_if_the_rest_is_wrong():
    data, _ = sources(rates=(1.0,))
    right, _ = sources(rates=(0.0,))
    z, target = data.features.dense, encode_targets(data.checked_labels, 3)
    large = fit_checked_weight(statistics_of_votes(data, z).pooled(), z[:60], target)
    small = fit_checked_weight(statistics_of_votes(right, z).pooled(), z[:60], target)
    assert large > 3 * small


def test_compress_keeps_few_columns_and_cuts_many(monkeypatch):
    monkeypatch.setattr("fsla.data._group_weights.MAX_ENTRIES", 2000)
    z = np.random.default_rng(0).standard_normal((50, 30)) * np.r_[np.full(10, 10.0), np.full(20, 0.01)]
    assert compress(z, 2) is z
    cut = compress(z, 20)
    assert cut.shape == (50, 10)
    assert (cut**2).sum() > 0.999 * (z**2).sum()


# --- EM ---------------------------------------------------------------------------------------------------------------


def test_em_recovers_accuracies_of_annotators():
    truth = (0.95, 0.85, 0.7, 0.55, 0.34)
    data, y = annotators(n=1500, accuracies=truth)
    fit = fit_crowd(data, ALL_CHECKED)
    accuracy = np.einsum("gcc->gc", fit.confusion).mean(1)
    np.testing.assert_allclose(accuracy, truth, atol=0.06)
    rows, labels = consensus(data)
    better = (fit.posterior.argmax(1) == y).mean()
    assert better > (labels == y[rows]).mean() + 0.05


def test_em_confusions_follow_class_dependent_errors():
    """A source that calls class 0 class 1, and never errs elsewhere."""
    data, y = sources(n=900, rates=(0.0, 0.0))
    label = np.where((data.votes.group == 1) & (y == 0), 1, y)
    data = replace(data, votes=replace(data.votes, label=label))
    confusion = fit_crowd(data, ALL_CHECKED).confusion
    assert confusion[1, 0, 1] > 0.8
    assert confusion[0, 0, 0] > 0.85
    assert confusion[1, 2, 2] > 0.85


def test_em_for_scores_recovers_bias_and_noise():
    data, y = scores(n=1500, checked=100, biases=(0.0, -0.4, 1.5), noises=(0.1, 0.3, 0.8))
    fit = fit_scores(data, np.arange(100))
    np.testing.assert_allclose(fit.bias, (0.0, -0.4, 1.5), atol=0.12)
    assert np.argsort(fit.variance).tolist() == [0, 1, 2]
    before = np.bincount(data.votes.row, data.votes.label) / 2
    assert np.mean((fit.vote_mean - y) ** 2) < 0.3 * np.mean((before - y) ** 2)


def test_em_for_scores_with_one_vote_a_row_keeps_its_variance():
    """Without the floor the variance of a group collapses to 0 where nothing contradicts it."""
    data, _ = scores(votes_a_row=1, noises=(0.0, 0.0, 0.0), biases=(0.0, 0.0, 0.0))
    assert (fit_scores(data, ALL_CHECKED).variance > 1e-3).all()


def test_em_ignores_checked_rows_that_are_held_out():
    """A held-out row's true label must not reach the belief that is judged by it."""
    data, _ = sources()
    half = np.arange(30)
    changed = replace(data, checked_labels=np.r_[data.checked_labels[:30], (data.checked_labels[30:] + 1) % 3])
    for strategy in default_strategies(data):
        one, other = strategy.belief(data, half), strategy.belief(changed, half)
        np.testing.assert_array_equal(one.mass, other.mass, err_msg=strategy.name)


def test_checked_accuracy_counts_votes_on_chosen_rows():
    data, _ = annotators(checked=200, n=400, accuracies=(1.0, 0.5, 0.9))
    accuracy = checked_accuracy(data, np.arange(200), shrinkage=0.0)
    assert accuracy[0] == 1.0
    assert abs(accuracy[1] - 0.5) < 0.1


def test_one_coin_rows_sum_to_one():
    table = one_coin(np.array([0.9, 0.2]), 4)
    np.testing.assert_allclose(table.sum(2), 1)
    np.testing.assert_allclose(np.diagonal(table, axis1=1, axis2=2), [[0.9] * 4, [0.2] * 4])


# --- Beliefs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sources, annotators, scores])
def test_beliefs_are_finite_and_leave_checked_rows_out(make):
    """Checked rows enter with their true label, apart: their votes judge groups and train nothing."""
    data, _ = make()
    for strategy in default_strategies(data):
        result = strategy.belief(data, ALL_CHECKED)
        assert np.isfinite(result.mass).all(), strategy.name
        assert not result.mass[data.is_checked].any(), strategy.name
        weight = result.mass if data.num_classes else result.mass[:, 0]
        assert (weight >= 0).all(), strategy.name


def test_vote_mass_equals_sum_over_votes():
    data, _ = annotators(n=50, checked=20)
    weight = np.random.default_rng(0).random(len(data.votes))
    expected = np.zeros((50, 3))
    for r, y, w in zip(data.votes.row, data.votes.label, weight, strict=True):
        expected[r, y] += w
    np.testing.assert_allclose(sum_votes(data, weight), expected)
    np.testing.assert_allclose(vote_mass(data).sum(1), np.where(data.is_checked, 0, 3))
    data, _ = scores(n=100)
    np.testing.assert_allclose(
        sum_votes(data, 2.0)[:, 1], 2 * np.bincount(data.votes.row, data.votes.label, minlength=100)
    )


def test_nothing_averages_votes_of_all_rows():
    data, _ = annotators()
    np.testing.assert_allclose(Nothing().belief(data, ALL_CHECKED).mass.sum(1), 1)


@pytest.mark.parametrize("make", [sources, annotators])
def test_drop_groups_drops_the_worst(make):
    data, _ = make()
    weight = DropGroups().belief(data, ALL_CHECKED).group_weight
    assert weight[0] == 1
    assert weight[-1] == 0


def test_label_correction_mends_a_source_of_swapped_labels():
    """Labels that are all shifted by one carry the same information as right ones."""
    data, y = sources(n=800)
    posterior = LabelCorrection().belief(data, ALL_CHECKED).posterior
    swapped = (data.votes.group == 3) & ~data.is_checked
    assert (posterior[swapped].argmax(1) == y[swapped]).mean() > 0.9


def test_score_correction_removes_bias():
    data, y = scores(n=800)
    mass = ScoreCorrection().belief(data, ALL_CHECKED).mass
    use = mass[:, 0] > 0
    mean = mass[use, 1] / mass[use, 0]
    assert np.mean((mean - y[use]) ** 2) < 0.1


def test_corrected_group_weights_lower_groups_of_noise():
    data, _ = sources(n=800, pairs=False)
    rng = np.random.default_rng(3)
    label = np.where(data.votes.group == 2, rng.integers(3, size=len(data.votes)), data.votes.label)
    data = replace(data, votes=replace(data.votes, label=label))
    mass = CorrectedGroupWeighting().belief(data, ALL_CHECKED).mass.sum(1)
    by_group = [mass[data.votes.row[data.votes.group == g]].mean() for g in range(4)]
    assert by_group[2] < by_group[0]


# --- Learners ---------------------------------------------------------------------------------------------------------


def test_logistic_gradient_equals_finite_differences():
    rng = np.random.default_rng(0)
    z, mass, toward = rng.standard_normal((30, 3)), rng.random((4, 30)), rng.standard_normal((3, 4))
    x = rng.standard_normal(12)

    def loss(v):
        return logistic_loss(v.reshape(3, 4), z, mass, 0.3, toward)[0]

    gradient = logistic_loss(x.reshape(3, 4), z, mass, 0.3, toward)[1]
    np.testing.assert_allclose(gradient.ravel(), numerical_gradient(loss, x), rtol=1e-6, atol=1e-6)


def test_fit_logistic_equals_scikit_learn():
    """A mass of one label a row is plain logistic regression, whose C is 1 over the penalty times the rows."""
    x, y = blobs(300, spread=3.0)
    coef = fit_logistic(x, np.eye(3)[y], 0.01, max_iter=500)
    reference = LogisticRegression(C=1 / (0.01 * 300), fit_intercept=False, tol=1e-8, max_iter=2000).fit(x, y)
    centred = coef - coef.mean(1, keepdims=True)
    np.testing.assert_allclose(centred.T, reference.coef_, atol=5e-3)


def test_fit_ridge_equals_normal_equations():
    rng = np.random.default_rng(0)
    x, y, w, start = rng.standard_normal((50, 4)), rng.standard_normal(50), rng.random(50), rng.standard_normal((4, 1))
    coef = fit_ridge(x, np.stack([w, w * y], 1), 0.2, toward=start)
    h = x.T @ (w[:, None] * x) + 0.2 * w.sum() * np.eye(4)
    np.testing.assert_allclose(coef[:, 0], np.linalg.solve(h, x.T @ (w * y) + 0.2 * w.sum() * start[:, 0]))


def test_rows_without_mass_do_not_change_a_model():
    """Held-out rows stay among the features and must not leak."""
    data, _ = sources(table=True)
    mass = vote_mass(data)
    mass[200:] = 0
    known = checked_mass(data, ALL_CHECKED)
    other = data.features.dense.copy()
    other[200:] += 5
    changed = Features(other, data.features.numeric)
    for learner in (LinearLearner(), FineTunedLinearLearner()):
        one = learner.path(data.features, mass, known, "classification", 0)
        two = learner.path(changed, mass, known, "classification", 0)
        for a, b in zip(one, two, strict=True):
            np.testing.assert_array_equal(a.coef, b.coef)


@pytest.mark.parametrize(
    "learner", [ForestLearner(num_trees=8), BoostingLearner(num_iterations=12)], ids=lambda x: x.name
)
@pytest.mark.parametrize("classes", [2, 3, 0])
def test_trees_as_arrays_equal_scikit_learn(learner, classes, monkeypatch):
    """The arrays that are saved must predict what the fitted estimator predicts."""
    x, y = blobs(200, classes=max(classes, 2), spread=2.0)
    x[::7, 1] = np.nan
    features = features_of(np.where(np.isnan(x), 0, x), table=True)
    features = Features(features.dense, x)
    task = "classification" if classes else "regression"
    target = y if classes else y + x[:, 0]
    mass = np.eye(classes)[y] if classes else np.stack([np.ones(200), target], 1)
    fitted = []
    import sklearn.ensemble as ensemble

    for name in ("ExtraTrees", "HistGradientBoosting"):
        for kind in ("Classifier", "Regressor"):
            base = getattr(ensemble, name + kind)

            def fit(self, *args, _base=base, **options):
                fitted.append(self)
                return _base.fit(self, *args, **options)

            monkeypatch.setattr(ensemble, name + kind, type(name + kind, (base,), {"fit": fit}))
    predictor = learner.path(features, mass, 0 * mass, task, 0)[0]
    binned = bin_features(features)[1]
    if classes:
        expected = fitted[0].predict_proba(binned) + predictor.floor
        expected /= expected.sum(1, keepdims=True)
    else:
        expected = fitted[0].predict(binned)
    np.testing.assert_allclose(predictor.predict(features), expected, rtol=1e-9, atol=1e-12)


def test_bins_put_missing_cells_and_missing_columns_apart():
    """A column without any value must not stop a fit."""
    x = np.array([[1.0, np.nan], [2.0, np.nan], [np.nan, np.nan]])
    assert Bins.fit(x).transform(x).tolist()[2] == [0, 0]
    data, _ = sources(table=True)
    numeric = data.features.numeric.copy()
    numeric[:, 2] = np.nan
    data = replace(data, features=Features(data.features.dense, numeric))
    mass = vote_mass(data)
    for learner in (ForestLearner(num_trees=3), BoostingLearner(num_iterations=3)):
        assert np.isfinite(
            learner.path(data.features, mass, 0 * mass, "classification", 0)[0].predict(data.features)
        ).all()


def test_expand_mass_repeats_rows_of_several_labels():
    rows, labels, weight = expand_mass(np.array([[0.5, 0.5], [1.0, 0.0], [0.0, 0.01]]), "classification")
    assert rows.tolist() == [0, 0, 1]
    assert labels.tolist() == [0, 1, 0]
    np.testing.assert_allclose(weight, [0.75, 0.75, 1.5])
    rows, target, _ = expand_mass(np.array([[0.0, 0.0], [2.0, 6.0]]), "regression")
    assert (rows.tolist(), target.tolist()) == ([1], [3.0])


@pytest.mark.parametrize(
    "estimator",
    [LogisticRegression(), make_pipeline(StandardScaler(), LogisticRegression())],
    ids=["plain", "pipeline"],
)
def test_estimator_learner_passes_sample_weight(estimator):
    """The last step of a pipeline takes the weights under its own name."""
    data, y = sources()
    mass = np.eye(3)[(y + 1) % 3]
    mass[:200] = 5 * np.eye(3)[y[:200]]
    predictor = EstimatorLearner(estimator).path(data.features, mass, 0 * mass, "classification", 0)[0]
    assert (predictor.predict(data.features).argmax(1) == y).mean() > 0.85
    with pytest.raises(ValueError, match="estimator of your own, and nothing is pickled"):
        predictor.to_state()


def test_predicted_probabilities_serve_training_rows_only():
    p = np.random.default_rng(0).random((5, 2))
    features = Features(np.zeros((5, 1)), index=np.arange(5))
    predictor = PredictedProbabilities(p).path(features, p, p, "classification", 0)[0]
    np.testing.assert_array_equal(predictor.predict(features.take(np.array([3, 1]))), p[[3, 1]])
    with pytest.raises(ValueError, match="no predictions for new rows"):
        predictor.predict(Features(np.zeros((2, 1))))


# --- Selection --------------------------------------------------------------------------------------------------------


def test_pseudo_bma_sums_to_one_and_ignores_order():
    losses = np.random.default_rng(0).random((6, 40))
    weight = pseudo_bma(losses)
    order = np.random.default_rng(1).permutation(6)
    assert weight.sum() == pytest.approx(1)
    np.testing.assert_allclose(pseudo_bma(losses[order]), weight[order], rtol=1e-12)
    assert pseudo_bma(losses - np.r_[9.0, np.zeros(5)][:, None])[0] > 0.999


def test_choose_shares_ignores_the_order_of_candidates():
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=50)
    paths = [[rng.dirichlet(np.ones(3) + 4 * np.eye(3)[y]) for y in labels] for _ in range(6)]
    paths = [[np.array(paths[2 * i]), np.array(paths[2 * i + 1])] for i in range(3)]
    one, other = choose_shares(paths, labels), choose_shares(paths[::-1], labels)
    np.testing.assert_allclose(one.share, other.share[::-1])
    np.testing.assert_allclose(np.concatenate(one.weights), np.concatenate(other.weights[::-1]))
    assert one.share.sum() == pytest.approx(1)


def test_find_temperature_softens_overconfident_predictions():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(3), 3000)
    labels = (p.cumsum(1) < rng.random((3000, 1))).sum(1)
    assert find_temperature(p, labels) == pytest.approx(1, abs=0.11)
    sharp = p**3 / (p**3).sum(1, keepdims=True)
    assert find_temperature(sharp, labels) == pytest.approx(3, rel=0.15)


def test_folds_spread_checked_classes_evenly():
    data, _ = sources(checked=100)
    fold = assign_folds(data, 5, seed=3)[data.checked_rows]
    for label in range(3):
        counts = np.bincount(fold[data.checked_labels == label], minlength=5)
        assert counts.max() - counts.min() <= 1


class Recorder(Learner):
    """Remember the mass of every fit."""

    name = "recorder"

    def __init__(self):
        self.fits = []

    def path(self, features, mass, checked_mass, task, seed):
        self.fits.append(mass + checked_mass)
        return LinearLearner().path(features, mass, checked_mass, task, seed)


@pytest.mark.parametrize("make", [sources, annotators, scores])
def test_cross_fit_trains_no_fold_on_its_own_rows(make):
    """Every row must be predicted by models that have seen neither its votes nor its checked label."""
    data, _ = make()
    recorder = Recorder()
    fit = CrossFit(data, [*default_strategies(data), Nothing()], [recorder], folds=5, seed=0)
    for i, mass in enumerate(recorder.fits):
        assert not mass[fit.fold == i % 5].any()
        assert mass.any()


def test_comparison_is_not_optimistic_on_random_labels():
    """Many useless candidates: the one that is best on the judging rows by chance must not look good on them."""
    rng = np.random.default_rng(0)
    values = []
    for seed in range(6):
        x = rng.standard_normal((100, 5))
        y = rng.integers(2, size=100)
        votes = Votes(np.arange(60, 100), np.zeros(40, dtype=int), y[60:])
        data = TrainingData(
            "classification", features_of(x), votes, np.array(["all"]), np.arange(60), y[:60], np.arange(2)
        )
        elsewhere = [PredictedProbabilities(rng.dirichlet([1, 1], 100)) for _ in range(30)]
        fit = fit_data(data, strategies=[TrustedOnly()], learners=[LinearLearner(), *elsewhere], seed=seed)
        values.append(fit.comparison.recommended.value)
    # 360 fair coins: three standard errors are .08.
    assert np.mean(values) < 0.58


class Slow(TrustedOnly):
    """One more strategy."""

    name = "slow"


def test_should_stop_skips_strategies_and_says_which():
    data, _ = sources()
    strategies = [TrustedOnly(), AllData(), GroupWeighting(), LabelCorrection()]
    calls = []
    fit = fit_data(
        data,
        strategies=strategies,
        learners=[LinearLearner()],
        should_stop=lambda: True,
        progress=lambda *a: calls.append(a),
    )
    assert {c.strategy for c in fit.candidates} == {"trusted_only", "all_data"}
    assert fit.skipped == ("Time was up before these strategies: group_weights, label_correction.",)
    assert [c[0] for c in calls] == ["nothing", "trusted_only", "all_data"]


def test_strategies_of_the_user_take_part():
    """One small class is enough for an idea of one's own."""
    data, _ = sources()
    fit = fit_data(data, strategies=[Slow(), AllData()], learners=[LinearLearner()])
    assert {c.strategy for c in fit.candidates} == {"slow", "all_data"}
    assert sum(c.share for c in fit.candidates) == pytest.approx(1)


# --- Intervals and noise rates ----------------------------------------------------------------------------------------


def test_wilson_interval_known_value():
    """Newcombe 1998, method 3: 81 of 263."""
    low, high = wilson(81 / 263, 263)[1:]
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


def test_paired_difference_covers():
    """95 % intervals of paired differences, with few discordant rows."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        u = rng.random(80)
        before, after = u < 0.8, (u < 0.75) | (u > 0.92)
        low, high = paired_difference(before, after)[1:]
        hits += low <= 0.03 <= high
    assert hits >= 930
    assert paired_difference(np.ones(20, bool), np.ones(20, bool)).low < 0


def test_bootstrap_interval_of_a_mean_covers():
    rng = np.random.default_rng(0)
    hits = sum(
        low <= 1 <= high
        for low, high in (bootstrap(rng.exponential(size=(200, 1)), lambda m: m[:, 0], seed=i)[1:] for i in range(200))
    )
    assert 178 <= hits <= 198


def test_prediction_powered_share_covers():
    """The interval must hold for useless, fair and sharp predictions, also where errors are rare.

    Wilson's own coverage dips at some small shares, so single cells are compared with it.
    """
    coverage, ratio = {}, {}
    for rate in (0.02, 0.1, 0.4):
        for skill in (0.0, 1.0, 4.0):
            for n in (50, 300):
                rng = np.random.default_rng(0)
                hits, plain_hits, width, plain_width = 0, 0, 0.0, 0.0
                for _ in range(300):
                    wrong = rng.random(n + 2000) < rate
                    f = 1 / (1 + np.exp(-skill * (wrong - rate) - rng.standard_normal(n + 2000) + 1))  # not calibrated
                    estimate = prediction_powered_share(wrong[:n], f[:n], f[n:])
                    plain = wilson(wrong[:n].mean(), n)
                    hits += estimate.low <= rate <= estimate.high
                    plain_hits += plain.low <= rate <= plain.high
                    width += estimate.high - estimate.low
                    plain_width += plain.high - plain.low
                coverage[rate, skill, n], ratio[rate, skill, n] = hits / 300, width / plain_width
                assert hits >= min(plain_hits, 279) - 6, (rate, skill, n)
    assert np.mean(list(coverage.values())) >= 0.94
    assert max(ratio.values()) < 1.02
    assert ratio[0.4, 4.0, 300] < 0.6


def test_prediction_powered_share_without_errors_stays_wide():
    """Fifty right labels do not show that all are right."""
    estimate = prediction_powered_share(np.zeros(50), np.zeros(50), np.zeros(5000))
    assert estimate.value == 0
    assert estimate.high > 0.05


# --- The whole fit ----------------------------------------------------------------------------------------------------

QUICK = [LinearLearner(), FineTunedLinearLearner()]


@pytest.fixture(scope="module")
def source_fit():
    data, y = sources(n=800, checked=100)
    return fit_data(data, learners=QUICK), y


@pytest.fixture(scope="module")
def annotator_fit():
    data, y = annotators(checked=100)
    return fit_data(data, learners=QUICK), y


@pytest.fixture(scope="module")
def score_fit():
    data, y = scores(checked=100)
    return fit_data(replace(data, votes=replace(data.votes, label=10 * data.votes.label + 50),
                            checked_labels=10 * data.checked_labels + 50), learners=QUICK), 10 * y + 50  # fmt: skip


def test_fit_beats_doing_nothing_and_knows_it(source_fit):
    fit, y = source_fit
    x, new_y = blobs(1000, seed=7)
    new = FeatureBuilderOf(fit.data).transform(x)
    assert (fit.predictor.predict(new).argmax(1) == new_y).mean() > 0.85
    assert (fit.out_of_fold.argmax(1) == y).mean() > 0.85
    assert fit.comparison.rows == 100
    assert fit.comparison.gain.low <= fit.comparison.gain.value <= fit.comparison.gain.high
    assert fit.comparison.recommended.value >= fit.comparison.nothing.value


class FeatureBuilderOf:
    """The feature builder of a data set whose raw rows are at hand."""

    def __init__(self, data):
        from fsla.data._features import FeatureBuilder

        self.builder = FeatureBuilder().fit(data.features.raw)

    def transform(self, x):
        return self.builder.transform(x)


def test_fit_says_what_groups_are_worth(source_fit):
    fit, y = source_fit
    groups, votes = fit.groups, fit.data.votes
    assert np.argmax(groups.weight) in (0, 1)
    assert groups.weight.max() == pytest.approx(1)
    assert groups.weight[3] < 0.2
    assert (groups.weight_low <= groups.weight).all()
    assert (groups.weight <= groups.weight_high).all()
    assert np.argsort(groups.quality)[:2].tolist() == [3, 2]
    for g, rate in enumerate(groups.noise_rate):
        truth = (votes.label != y[votes.row])[votes.group == g].mean()
        assert rate.low - 1e-3 <= truth <= rate.high + 1e-3
    assert groups.gain_without[3].value > 0
    np.testing.assert_array_equal(groups.num_checked_votes, [25] * 4)
    assert fit.vote_weight[votes.group == 0].mean() > fit.vote_weight[votes.group == 3].mean()


def test_fit_estimates_noise_and_confusion(source_fit):
    fit, y = source_fit
    votes = fit.data.votes
    truth = (votes.label != y[votes.row]).mean()
    assert fit.noise_rate.low <= truth <= fit.noise_rate.high
    np.testing.assert_allclose(fit.confusion.sum(1), 1)
    expected = np.array([[np.mean(votes.label[y[votes.row] == c] == k) for k in range(3)] for c in range(3)])
    np.testing.assert_allclose(fit.confusion, expected, atol=0.08)
    assert fit.group_confusion.shape == (4, 3, 3)
    assert MIN_CHECKED_VOTES <= 25


def test_fit_of_annotators_mends_labels(annotator_fit):
    fit, y = annotator_fit
    rows, majority = consensus(fit.data)
    open_rows = ~fit.data.is_checked
    corrected = (fit.posterior.argmax(1) == y)[open_rows].mean()
    assert corrected > (majority == y[rows])[open_rows[rows]].mean() + 0.03
    assert np.argsort(fit.groups.quality)[-1] == 0
    assert fit.noise_rate.low <= (majority != y[rows]).mean() <= fit.noise_rate.high


def test_fit_of_scores_is_in_the_users_units(score_fit):
    fit, y = score_fit
    prediction = fit.predictor.predict(fit.data.features)
    error = np.sqrt(np.mean((prediction - y) ** 2))
    assert error < 0.45 * y.std()
    assert np.sqrt(np.mean((fit.posterior - y) ** 2)) < error
    assert fit.comparison.metric == "root mean squared error"
    assert fit.comparison.recommended.low < error < 1.5 * fit.comparison.recommended.high
    assert fit.comparison.gain.value == pytest.approx(
        fit.comparison.nothing.value - fit.comparison.recommended.value, abs=1e-9
    )
    assert fit.noise_rate is None
    assert fit.confusion is None
    assert np.argmin(fit.groups.quality) == 2
    assert fit.candidates[0].loss == pytest.approx(error**2, rel=0.6)


@pytest.mark.parametrize("name", ["source_fit", "annotator_fit", "score_fit"])
def test_predictor_survives_its_state(name, request):
    """The model file holds arrays and JSON only."""
    fit, _ = request.getfixturevalue(name)
    arrays, state = fit.predictor.to_state()
    assert all(isinstance(a, np.ndarray) and a.dtype != object for a in arrays.values())
    import json

    again = predictor_from_state(arrays, json.loads(json.dumps(state)))
    np.testing.assert_array_equal(again.predict(fit.data.features), fit.predictor.predict(fit.data.features))


def test_tree_predictor_survives_its_state():
    data, _ = sources(table=True)
    mass = vote_mass(data)
    for learner in (ForestLearner(num_trees=3), BoostingLearner(num_iterations=3)):
        predictor = learner.path(data.features, mass, 0 * mass, "classification", 0)[0]
        ensemble = EnsemblePredictor((predictor,), np.ones(1), np.ones(1), "classification")
        again = predictor_from_state(*ensemble.to_state())
        np.testing.assert_array_equal(again.predict(data.features), ensemble.predict(data.features))


def test_predictor_from_state_rejects_unknown_kinds():
    with pytest.raises(ValueError, match=r"kind 'pickle'. Known kinds: constant, ensemble, "):
        predictor_from_state({}, {"kind": "pickle"})


def test_fit_is_reproducible():
    data, _ = sources(n=200)
    one, other = (fit_data(data, learners=[LinearLearner()], folds=2, seed=4) for _ in range(2))
    np.testing.assert_array_equal(one.out_of_fold, other.out_of_fold)
    np.testing.assert_array_equal(one.groups.weight_low, other.groups.weight_low)


def test_posterior_does_not_see_the_rows_own_checked_label():
    """Otherwise the noise rate would be judged by what it was told."""
    data, _ = annotators()
    out_of_fold = np.full((500, 3), 1 / 3)
    fold = assign_folds(data, 5, 0)
    one, _ = label_posterior(data, out_of_fold, fold)
    labels = data.checked_labels.copy()
    labels[7] = (labels[7] + 1) % 3
    other, _ = label_posterior(replace(data, checked_labels=labels), out_of_fold, fold)
    np.testing.assert_array_equal(one[fold == fold[7]], other[fold == fold[7]])


def test_review_rows_do_not_select_or_estimate():
    """Rows that a person picked are no random sample: they train, and judge nothing."""
    data, y = sources(checked=100)
    picked = np.arange(100) >= 60
    options = {"strategies": [AllData()], "learners": [LinearLearner()]}
    fit = fit_data(replace(data, random_rows=~picked), **options)
    assert fit.comparison.rows == 60
    label = data.votes.label.copy()
    all_wrong = replace(data.votes, label=np.where((data.votes.row >= 60) & (data.votes.row < 100), (y + 1) % 3, label))
    biased = fit_data(replace(data, votes=all_wrong, random_rows=~picked), **options)
    assert abs(biased.noise_rate.value - fit.noise_rate.value) < 0.06


def test_gains_without_a_group_equal_brute_force():
    """A ridge on the rows themselves, with and without the group."""
    data, _ = sources(n=300, rates=(0.0, 0.0, 0.9), pairs=False)
    z, n = data.features.dense, 60
    gains = gains_without(data, z, statistics_of_votes(data, z), np.array([2]))
    assert gains[:2] == (None, None)
    part = np.random.default_rng(0).permutation(n) % 5
    right = []
    for dropped in (9, 2):
        hits = np.zeros(n, dtype=bool)
        use = data.votes.group != dropped
        for fold in range(5):
            rows = np.r_[data.votes.row[use], np.nonzero(part != fold)[0]]
            labels = np.r_[data.votes.label[use], data.checked_labels[part != fold]]
            w = np.ones(len(rows))
            h = z[rows].T @ (w[:, None] * z[rows]) + 1e-3 * w.sum() * np.eye(z.shape[1])
            coef = np.linalg.solve(h, z[rows].T @ (w[:, None] * encode_targets(labels, 3)))
            inside = np.nonzero(part == fold)[0]
            hits[inside] = (z[inside] @ coef).argmax(1) == data.checked_labels[inside]
        right.append(hits)
    assert gains[2] == paired_difference(*right)


def test_quality_counts_checked_votes_more():
    data, _ = annotators()
    flat = np.full((500, 3), 1 / 3)
    quality = label_quality(data, flat)
    assert np.argmax(quality) == 0
    assert (quality >= 0).all()
    assert (quality <= 1).all()


def test_fit_without_checked_rows_learns_given_labels():
    data, y = sources(rates=(0.0, 0.1), checked=0)
    fit = fit_data(data, learners=QUICK)
    assert fit.comparison is None
    assert fit.noise_rate is None
    assert {c.strategy for c in fit.candidates} == {"nothing"}
    assert (fit.out_of_fold.argmax(1) == y).mean() > 0.85


def test_fit_with_checked_rows_alone():
    """A user may have no other labels yet."""
    data, _ = sources(checked=100)
    none = Votes(np.zeros(0, int), np.zeros(0, int), np.zeros(0, int))
    fit = fit_data(replace(data, votes=none), strategies=[TrustedOnly()], learners=QUICK)
    assert fit.comparison is None
    assert fit.noise_rate is None
    assert fit_data(replace(data, votes=none, group_names=np.array(["all"])), learners=QUICK).groups is None


def test_fit_with_pred_probs_alone_says_what_is_missing():
    data, _ = sources()
    with pytest.raises(ValueError, match="No learner can predict new rows"):
        fit_data(data, learners=[PredictedProbabilities(np.full((400, 3), 1 / 3))])


@pytest.mark.parametrize("checked", [1, 9])
def test_fit_with_too_few_checked_rows_says_how_many(checked):
    data, _ = sources(checked=checked)
    with pytest.raises(ValueError, match=rf"Only {checked} rows have a checked label. Check at least 10 rows"):
        fit_data(data)


def test_fit_survives_hard_cases():
    """A class that no checked row has, a class of one row, a group of one row, a group whose rows are all checked."""
    data, _ = sources(n=300, checked=60)
    use = data.checked_labels != 2
    fit = fit_data(
        replace(data, checked_rows=data.checked_rows[use], checked_labels=data.checked_labels[use]), learners=QUICK
    )
    assert np.isfinite(fit.out_of_fold).all()
    label = data.votes.label.copy()
    label[-1] = 3
    group = data.votes.group.copy()
    group[-1] = 4
    group[:60], group[60:-1] = 5, group[60:-1]
    names = np.array(["a", "b", "c", "d", "single", "all checked"])
    hard = replace(data, votes=replace(data.votes, label=label, group=group), group_names=names, classes=np.arange(4))
    fit = fit_data(hard, learners=[LinearLearner()])
    assert np.isfinite(fit.out_of_fold).all()
    assert np.isfinite(fit.groups.weight).all()
    assert fit.groups.noise_rate[4] is None
    assert fit.groups.gain_without[5] is None


def test_linear_predictor_of_a_table_with_one_column():
    features = features_of(np.linspace(-1, 1, 40)[:, None])
    mass = np.eye(2)[(np.arange(40) >= 20).astype(int)]
    predictor = LinearLearner().path(features, mass, 0 * mass, "classification", 0)[-1]
    assert isinstance(predictor, LinearPredictor)
    assert (predictor.predict(features).argmax(1) == (np.arange(40) >= 20)).all()


def test_boosting_reads_private_arrays_that_exist():
    """scikit-learn has no public access to a boosted tree's nodes: a renamed field must fail here first."""
    x, y = blobs(60)
    model = HistGradientBoostingClassifier(max_iter=1).fit(x, y)
    fields = set(model._predictors[0][0].nodes.dtype.names)
    assert {"is_leaf", "value", "feature_idx", "num_threshold", "left", "right"} <= fields
