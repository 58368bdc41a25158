"""Networks as learners, the trunk of images, and strategies by bilevel optimisation."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from fsla.data import LabelCleaner, _network_learners, _selection
from fsla.data._bilevel_strategies import BilevelGroupWeights, BilevelSampleWeights, bilevel_strategies
from fsla.data._dataset import Features, TrainingData, Votes
from fsla.data._estimators import choose_learners
from fsla.data._learners import Fold, LinearLearner, default_learners
from fsla.data._network_learners import (
    ADAMW,
    MAX_SIDE,
    MLP,
    ImageNetwork,
    ModuleLearner,
    Recipe,
    TrunkPredictor,
    attach_module,
    augment_images,
    fit_trunks,
    has_enough_images,
    image_tensor,
    is_image_like,
)
from fsla.data._predictors import EnsemblePredictor, predictor_from_state
from fsla.data._selection import CrossFit, fit_data, suited_learners
from fsla.data._strategies import AllData, LabelCorrection, ScoreCorrection, checked_mass, vote_mass

SHORT = Recipe(steps=1, min_epochs=2, max_epochs=2, batch_size=64)
CHECKED = 100


def unit_rows(x):
    """Return centred rows of mean square norm 1, and a constant column."""
    z = x - x.mean(0)
    return np.c_[z / np.sqrt((z**2).sum(1).mean()), np.full(len(z), 0.5)]


@pytest.fixture(scope="module")
def digits():
    """Return pixels and labels of digits, shuffled."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return data.data[order], data.target[order]


@pytest.fixture(scope="module")
def sources(digits):
    """Return digits from four sources, of which the last calls each digit by the name of the next one."""
    x, y = digits[0][:1000], digits[1][:1000]
    rows = np.arange(CHECKED, 900)
    group = rows % 4
    label = np.where(group == 3, (y[rows] + 1) % 10, y[rows])
    return TrainingData(
        "classification",
        Features(unit_rows(x), numeric=x, images=(x.reshape(-1, 8, 8, 1) * 15).astype(np.uint8)),
        Votes(rows, group, label),
        np.array(["a", "b", "c", "flipped"]),
        np.arange(CHECKED),
        y[:CHECKED],
        classes=np.arange(10),
    ), y


@pytest.fixture(scope="module")
def table(sources):
    """Return the same data as a table of pixels."""
    data, y = sources
    return replace(data, features=replace(data.features, images=None)), y


def without_flipped(data):
    """Return the data without the votes of the bad source."""
    use = data.votes.group != 3
    return replace(data, votes=Votes(data.votes.row[use], data.votes.group[use], data.votes.label[use]))


def masses(data):
    checked = np.arange(len(data.checked_rows))
    return vote_mass(data), checked_mass(data, checked, 3.0)


def through_json(predictor):
    """Return the predictor after its state went through JSON."""
    arrays, state = predictor.to_state()
    assert all(isinstance(array, np.ndarray) for array in arrays.values())
    return predictor_from_state(arrays, json.loads(json.dumps(state)))


def embed(data, trunk):
    """Return the data with the features of a trunk."""
    return replace(data, features=trunk.transform(data.features))


def accuracy(predictor, data, y, rows):
    return (predictor.predict(data.features.take(rows)).argmax(1) == y[rows]).mean()


# --- MLP -------------------------------------------------------------------------------------------------------------


def test_mlp_on_pixels_beats_chance_and_returns_probabilities(table):
    """A network that does not learn has a tenth of digits right."""
    data, y = without_flipped(table[0]), table[1]
    (model,) = MLP().path(data.features, *masses(data), "classification", 0)
    p = model.predict(data.features)
    assert p.shape == (1000, 10)
    np.testing.assert_allclose(p.sum(1), 1)
    assert accuracy(model, data, y, np.arange(900, 1000)) > 0.9


def test_mlp_same_seed_returns_same_model_on_any_number_of_threads(table):
    """Results must not depend on the machine's cores."""
    data, _ = table
    predictions = []
    before = torch.get_num_threads()
    for threads, seed in ((1, 3), (2, 3), (1, 4)):
        torch.set_num_threads(threads)
        try:
            (model,) = MLP(steps=20).path(data.features, *masses(data), "classification", seed)
        finally:
            torch.set_num_threads(before)
        predictions.append(model.predict(data.features))
    assert np.array_equal(predictions[0], predictions[1])
    assert not np.array_equal(predictions[0], predictions[2])


def test_mlp_rows_without_mass_have_no_influence(table):
    """Held-out rows have no mass: their features must not enter either."""
    data, _ = table
    mass, extra = masses(data)
    changed = data.features.dense.copy()
    changed[900:] = 100.0
    models = [
        MLP(steps=5).path(features, mass, extra, "classification", 0)[0]
        for features in (data.features, replace(data.features, dense=changed))
    ]
    assert np.array_equal(*(model.predict(data.features) for model in models))


def test_mlp_soft_targets_are_learned_as_probabilities():
    """A mass of .7 and .3 in every row is a belief, whose best prediction is .7 and .3."""
    dense = np.c_[np.random.default_rng(0).standard_normal((400, 4)) / 2, np.full(400, 0.5)]
    mass = np.tile([0.7, 0.3], (400, 1))
    (model,) = MLP(hidden=8).path(Features(dense), mass, np.zeros_like(mass), "classification", 0)
    assert abs(model.predict(Features(dense))[:, 0].mean() - 0.7) < 0.03


def test_mlp_weights_of_rows_decide_between_contradictions():
    """Each row is there twice, with both labels: the heavier one must win."""
    half = np.c_[np.random.default_rng(0).standard_normal((200, 4)) / 2, np.full(200, 0.5)]
    y = (half[:, 0] > 0).astype(int)
    mass = np.concatenate([np.eye(2)[y] * 5, np.eye(2)[1 - y]])
    dense = np.concatenate([half, half])
    (model,) = MLP().path(Features(dense), mass, np.zeros_like(mass), "classification", 0)
    assert (model.predict(Features(half)).argmax(1) == y).mean() > 0.9


def test_mlp_in_regression_returns_numbers_of_target_scale():
    """Targets far from zero are standardised inside and put back."""
    rng = np.random.default_rng(0)
    dense = np.c_[rng.standard_normal((400, 4)) / 2, np.full(400, 0.5)]
    y = 1000 + 50 * dense[:, 0]
    mass = np.stack([np.full(400, 2.0), 2 * y], 1)
    (model,) = MLP().path(Features(dense), mass, np.zeros_like(mass), "regression", 0)
    prediction = model.predict(Features(dense))
    assert prediction.shape == (400,)
    assert np.square(prediction - y).mean() < 0.1 * y.var()
    assert np.array_equal(through_json(model).predict(Features(dense)), prediction)


def test_mlp_class_missing_in_fold_keeps_its_column(table):
    """A fold may hold no row of a class; probabilities still have its column."""
    data, _ = table
    mass, extra = masses(data)
    mass, extra = mass.copy(), extra.copy()
    mass[:, 7] = extra[:, 7] = 0
    (model,) = MLP(steps=30).path(data.features, mass, extra, "classification", 0)
    p = model.predict(data.features)
    assert p.shape == (1000, 10)
    assert p[:, 7].mean() < 0.05


@pytest.mark.parametrize("learner", [MLP(), ImageNetwork(recipe=SHORT), ModuleLearner(nn.Linear(65, 10))])
def test_learner_with_one_class_returns_constant(sources, learner):
    """A fold with one class only cannot train a network, and must not fail."""
    data, _ = sources
    mass = np.zeros((1000, 10))
    mass[:50, 4] = 1
    (model,) = learner.path(data.features, mass, np.zeros_like(mass), "classification", 0)
    p = model.predict(data.features)
    assert (p.argmax(1) == 4).all()
    assert (p > 0).all()


def test_mlp_state_restores_predictions_exactly(table):
    """A saved model must say what the trained one said."""
    data, _ = table
    (model,) = MLP(steps=5).path(data.features, *masses(data), "classification", 0)
    assert np.array_equal(through_json(model).predict(data.features), model.predict(data.features))


def test_is_image_like_tells_pixels_from_tables(digits):
    """On tables and text the network loses, so it is not tried there."""
    x = digits[0][:200]
    rng = np.random.default_rng(0)
    table = rng.standard_normal((200, 64)) * rng.uniform(1, 100, 64)
    one_hot = (rng.random((200, 64)) < 0.2).astype(float)
    missing = x.copy()
    missing[0, 0] = np.nan
    dense = unit_rows(x)
    assert is_image_like(Features(dense, numeric=x))
    assert not is_image_like(Features(dense, numeric=table))
    assert not is_image_like(Features(dense, numeric=one_hot))
    assert not is_image_like(Features(dense, numeric=missing))
    assert not is_image_like(Features(dense, numeric=x[:, :20]))
    assert not is_image_like(Features(dense))


# --- Images ----------------------------------------------------------------------------------------------------------


def test_trunk_features_carry_heads_and_restore(sources):
    """Heads on the trunk's features must classify images, and a saved model must predict the same."""
    data, y = without_flipped(sources[0]), sources[1]
    ((trunk, dense, scores),) = fit_trunks([data], recipe=Recipe(min_epochs=8, steps=1))
    embedded = embed(data, trunk)
    np.testing.assert_allclose(embedded.features.dense, dense, atol=1e-9)
    assert (scores[900:].argmax(1) == y[900:]).mean() > 0.9
    assert len(embedded.features.dense) == 1000
    assert (embedded.features.dense[:, -1] == 0.5).all()
    assert 0.5 < np.square(embedded.features.dense).sum(1).mean() < 1.5
    paths = LinearLearner().path(embedded.features, *masses(embedded), "classification", 0)
    new = np.arange(900, 1000)
    assert accuracy(paths[1], embedded, y, new) > 0.9
    model = TrunkPredictor(trunk, paths[1])
    expected = paths[1].predict(embedded.features.take(new))
    np.testing.assert_allclose(model.predict(data.features.take(new)), expected, atol=1e-6)
    torch.manual_seed(0)
    restored, drawn = through_json(model), torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(1)), "loading a model drew from PyTorch's own stream"
    assert np.array_equal(restored.predict(data.features.take(new)), model.predict(data.features.take(new)))


def test_trunk_ignores_checked_rows(sources):
    """Checked rows judge what is trained on the features: neither their labels nor their votes may shape them."""
    data, _ = sources
    votes = Votes(
        np.r_[data.votes.row, np.arange(CHECKED)],
        np.r_[data.votes.group, np.zeros(CHECKED, int)],
        np.r_[data.votes.label, np.zeros(CHECKED, int)],
    )
    other = replace(data, votes=votes, checked_labels=(data.checked_labels + 1) % 10)
    first, second = (fit.scores for d in (data, other) for fit in fit_trunks([d], recipe=SHORT))
    assert np.array_equal(first, second)


def test_trunk_same_seed_returns_same_features_on_any_number_of_threads(sources):
    """Results must not depend on the machine's cores, nor on PyTorch's random state."""
    data, _ = sources
    before = torch.get_num_threads()
    features = []
    for threads, seed in ((1, 0), (2, 0), (1, 1)):
        torch.set_num_threads(threads)
        torch.manual_seed(threads)
        try:
            features.append(fit_trunks([data], seed=seed, recipe=SHORT)[0].dense)
        finally:
            torch.set_num_threads(before)
    assert np.array_equal(features[0], features[1])
    assert not np.array_equal(features[0], features[2])


def test_fit_data_on_images_gives_each_fold_its_trunk(sources):
    """Out-of-fold predictions come from networks that did not see the row's vote, and the result can be saved."""
    data, y = sources
    use = data.votes.row < 500
    data = replace(data, votes=Votes(data.votes.row[use], data.votes.group[use], data.votes.label[use]))
    fit = fit_data(data, strategies=[AllData()], learners=[LinearLearner()], folds=2, device="cpu")
    new = data.features.take(np.arange(900, 1000))
    prediction = fit.predictor.predict(new)
    assert (prediction.argmax(1) == y[900:]).mean() > 0.85
    assert np.array_equal(through_json(fit.predictor).predict(new), prediction)
    flipped = data.votes.group == 3
    of_vote = fit.out_of_fold[data.votes.row, data.votes.label]
    assert of_vote[flipped].mean() < 0.5 * of_vote[~flipped].mean()
    with pytest.raises(ValueError, match="images"):
        fit.predictor.predict(replace(new, images=None))


@pytest.fixture
def quick(monkeypatch):
    """Let networks of images train for two epochs, on two folds of even and odd rows."""
    monkeypatch.setattr(_network_learners, "_image_recipe", lambda recipe, *rest: recipe or SHORT)
    monkeypatch.setattr(_selection, "assign_folds", lambda data, folds, seed: np.arange(len(data.features)) % folds)


def cross_fit(data, strategies=(), learners=()):
    """Return candidates of two folds."""
    return CrossFit(data, strategies, [LinearLearner(), *learners], folds=2, seed=0, device="cpu")


def test_scores_of_a_fold_do_not_depend_on_its_votes(sources, quick):
    """A network that has learned a wrong label by heart would confirm it: label correction must start elsewhere."""
    data, _ = sources
    even = data.votes.row % 2 == 0
    other = replace(data.votes, label=np.where(even, (data.votes.label + 1) % 10, data.votes.label))
    one, two = (cross_fit(d).data.features.scores for d in (data, replace(data, votes=other)))
    assert one.shape == (1000, 11)
    assert np.isfinite(one).all()
    assert np.array_equal(one[::2], two[::2])
    assert not np.allclose(one[1::2], two[1::2])


def test_label_correction_on_images_starts_from_scores_of_unseen_rows(sources, quick):
    """The features of a trunk that saw the wrong labels must not reach EM, or what it corrects would be the same."""
    data, _ = sources
    part = cross_fit(data).visible[0]
    checked = np.arange(0, CHECKED, 2)
    shuffled = np.random.default_rng(0).permutation(part.features.dense)
    beliefs = [
        LabelCorrection().belief(replace(part, features=features), checked).mass
        for features in (part.features, replace(part.features, dense=shuffled), replace(part.features, scores=shuffled))
    ]
    assert np.array_equal(beliefs[0], beliefs[1])
    assert not np.allclose(beliefs[0], beliefs[2])


def test_label_correction_by_scores_beats_scores_and_votes():
    """One vote a row that is taken for true at the start is never corrected; scores of unseen rows must come first."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, 3000)
    rows = np.arange(CHECKED, 3000)
    wrong = rng.random(len(rows)) < 0.45
    label = np.where(wrong, (y[rows] + rng.integers(1, 10, len(rows))) % 10, y[rows])
    # The log-likelihoods of ten Gaussians, but a third of what they should be: networks trained on noise are unsure.
    scores = np.c_[2 * (2 * np.eye(10)[y] + rng.standard_normal((3000, 10))) / 3, np.full(3000, 0.5)]
    data = TrainingData(
        "classification",
        Features(np.zeros((3000, 1)), scores=scores),
        Votes(rows, np.zeros(len(rows), int), label),
        np.array(["all"]),
        np.arange(CHECKED),
        y[:CHECKED],
        classes=np.arange(10),
    )
    posterior = LabelCorrection().belief(data, np.arange(CHECKED)).posterior
    right = (posterior[rows].argmax(1) == y[rows]).mean()
    assert right > (scores[rows, :10].argmax(1) == y[rows]).mean() + 0.04
    assert right > (~wrong).mean() + 0.15


def test_second_networks_do_not_see_checked_labels_of_their_fold(sources, quick):
    """The checked rows of a fold judge its network: neither the belief nor the training may use their labels."""
    data, _ = sources
    even = data.checked_rows % 2 == 0
    changed = np.where(even, (data.checked_labels + 1) % 10, data.checked_labels)
    learner = ImageNetwork(device="cpu", corrected_only=True)
    folds = []
    for labels in (data.checked_labels, changed):
        fit = cross_fit(replace(data, checked_labels=labels), [LabelCorrection()], [learner])
        (second,) = (c for c in fit.candidates if c.learner is learner)
        folds.append([path[0].predict(data.features) for path in second.models])
    assert np.array_equal(folds[0][0], folds[1][0])
    assert not np.allclose(folds[0][1], folds[1][1])


def test_networks_are_trained_again_on_corrected_labels_alone(sources, quick):
    """Every further belief costs minutes, and the user who names the network gets it on all of them."""
    data, _ = sources
    defaults = default_learners(data, "cpu")
    fit = cross_fit(data, [AllData(), LabelCorrection()], [defaults[-1]])
    second = [c.strategy.name for c in fit.candidates if c.learner.name == "image_network"]
    assert second == ["label_correction"]
    assert suited_learners(data, AllData(), choose_learners(["image_network"], data, "cpu"))
    assert "image_network" not in {learner.name for learner in default_learners(sources[0])[:-1]}
    few = replace(data, votes=Votes(data.votes.row[:50], data.votes.group[:50], data.votes.label[:50]))
    assert "image_network" not in {learner.name for learner in default_learners(few)}


def test_fit_data_on_images_averages_the_networks_of_folds(sources, quick):
    """Nothing is trained again on all data, and a saved average predicts the same, with and without heads."""
    data, _ = sources
    new = data.features.take(np.arange(900, 1000))
    for learners in ([LinearLearner()], [ImageNetwork(device="cpu")]):
        fit = fit_data(data, strategies=[LabelCorrection()], learners=learners, folds=2, device="cpu")
        assert len(fit.predictor.members) == 2
        assert {isinstance(m, TrunkPredictor) for m in fit.predictor.members} == {learners[0].is_linear}
        prediction = fit.predictor.predict(new)
        mean = np.mean([member.predict(new) for member in fit.predictor.members], 0)
        np.testing.assert_allclose(prediction, mean, atol=1e-3)
        assert np.array_equal(through_json(fit.predictor).predict(new), prediction)


def test_image_network_trains_folds_at_a_time_as_one_after_the_other(sources):
    """Threads share the random state of PyTorch, so no network may draw its weights in one of them."""
    data, _ = sources
    mass, extra = masses(data)
    folds = [Fold(data.features, mass * (np.arange(1000) % 3 != part)[:, None], extra) for part in range(3)]
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            paths = ImageNetwork(recipe=SHORT, device="cpu").paths(folds, "classification", 0)
        finally:
            torch.set_num_threads(before)
        results.append([path[0].predict(data.features) for path in paths])
    single = ImageNetwork(recipe=SHORT, device="cpu").path(*folds[1], "classification", 1)[0].predict(data.features)
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0][1], single)
    assert not np.allclose(results[0][0], results[0][1])


def test_trunk_training_ends_with_an_exception_of_progress(sources):
    """A user who interrupts must not wait for all networks."""
    data, _ = sources

    def progress(text, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_trunks([data] * 4, recipe=Recipe(min_epochs=1000, max_epochs=1000), progress=progress)


def test_trunks_without_enough_labels_are_none(sources):
    """Few labelled images teach a network nothing; the features stay as they are."""
    data, _ = sources
    few = replace(data, votes=Votes(data.votes.row[:50], data.votes.group[:50], data.votes.label[:50]))
    assert fit_trunks([few]) == []
    assert fit_trunks([replace(data, features=replace(data.features, images=None))]) == []
    assert has_enough_images(data)
    assert not has_enough_images(few)


def brightness(data):
    """Return the data with the brightness of images as target."""
    target = 500 + data.features.images.mean((1, 2, 3), dtype=float)
    return replace(
        data,
        task="regression",
        classes=None,
        votes=Votes(data.votes.row, np.zeros(len(data.votes.row), int), target[data.votes.row]),
        checked_labels=target[:CHECKED],
        group_names=np.array(["all"]),
    ), target


def test_fit_data_on_images_with_numbers_trains_networks_twice(sources, quick):
    """Score correction is to numbers what label correction is to classes, and its scores have one column."""
    regression, target = brightness(sources[0])
    learners = [LinearLearner(), ImageNetwork(device="cpu", corrected_only=True, recipe=replace(ADAMW, min_epochs=8))]
    strategies = [AllData(), ScoreCorrection()]
    fit = fit_data(regression, strategies=strategies, learners=learners, folds=2, device="cpu")
    assert {(c.strategy, c.learner) for c in fit.candidates} == {
        ("all_data", "linear"), ("score_correction", "linear"), ("score_correction", "image_network"),
    }  # fmt: skip
    error = np.square(fit.predictor.predict(regression.features)[900:] - target[900:]).mean()
    assert error < 0.5 * target.var()


def test_trunk_of_regression_predicts_numbers(sources):
    """Images may have a number as target, here their brightness."""
    regression, target = brightness(sources[0])
    ((trunk, _, _),) = fit_trunks([regression], recipe=replace(ADAMW, min_epochs=8, steps=1))
    embedded = embed(regression, trunk)
    model = LinearLearner().path(embedded.features, *masses(embedded), "regression", 0)[1]
    new = np.arange(900, 1000)
    error = np.square(model.predict(embedded.features.take(new)) - target[new]).mean()
    assert error < 0.5 * target.var()


@pytest.mark.parametrize("channels", [1, 3])
def test_image_network_learns_and_restores(digits, channels):
    """The whole network trains on a belief, in grey and in colour, and a saved one predicts the same."""
    x, y = digits[0][:500], digits[1][:500]
    images = np.repeat((x.reshape(-1, 8, 8, 1) * 15).astype(np.uint8), channels, 3)
    use = y < 2
    images, y = images[use], y[use]
    if channels == 3:
        images[..., 1] = 255 - images[..., 1]
    features, mass = Features(np.zeros((len(y), 1)), images=images), np.eye(2)[y]
    learner = ImageNetwork(recipe=Recipe(steps=1, min_epochs=6, batch_size=16), width=4)
    (model,) = learner.path(features, mass, np.zeros_like(mass), "classification", 0)
    p = model.predict(features)
    assert (p.argmax(1) == y).mean() > 0.9
    assert np.array_equal(through_json(model).predict(features), p)


@pytest.mark.parametrize("shape", [(5, 7, 1), (8, 8, 3), (33, 60, 3), (96, 130, 1)])
def test_image_network_takes_images_of_any_size(shape):
    """Photographs and icons both come as they are."""
    rng = np.random.default_rng(0)
    features = Features(np.zeros((24, 1)), images=rng.integers(0, 256, (24, *shape), dtype=np.uint8))
    mass = np.eye(3)[np.arange(24) % 3]
    learner = ImageNetwork(recipe=replace(SHORT, batch_size=8), width=4)
    (model,) = learner.path(features, mass, np.zeros_like(mass), "classification", 0)
    assert model.predict(features).shape == (24, 3)


def test_resnet_of_default_width_learns_within_few_steps():
    """At full width and learning rate the loss of gratings in ten forms must fall far below that of chance."""
    rng = np.random.default_rng(0)
    y = np.arange(200) % 10
    frequency, phase = (1 + y % 5)[:, None, None], rng.uniform(0, 2 * np.pi, (200, 1, 1))
    place = np.arange(32) * 2 * np.pi / 32
    place = np.where(y[:, None, None] < 5, place[None, None, :], place[None, :, None])
    grey = 128 + 60 * np.cos(frequency * place + phase)[..., None]
    images = np.clip(grey + rng.normal(0, 60, (200, 32, 32, 3)), 0, 255).astype(np.uint8)
    features, mass = Features(np.zeros((200, 1)), images=images), np.eye(10)[y]
    learner = ImageNetwork(recipe=Recipe(lr=0.2, steps=1, min_epochs=10, max_epochs=10, batch_size=50), device="cpu")
    (model,) = learner.path(features, mass, np.zeros_like(mass), "classification", 0)
    loss = -np.log(np.clip(model.predict(features)[np.arange(200), y], 1e-9, 1)).mean()
    assert loss < 0.25 * np.log(10)


def test_image_tensor_shrinks_large_images_by_averaging():
    """A network of three poolings sees nothing in a photograph of full size, and takes minutes a pass."""
    images = np.zeros((2, 100, 200, 3), np.uint8)
    images[:, ::2] = 200
    tensor = image_tensor(images)
    assert tensor.shape == (2, 3, 33, 66)
    assert min(tensor.shape[2:]) <= MAX_SIDE
    assert abs(float(tensor.float().mean()) - 100) < 5


def test_augmentation_shifts_and_flips_colour_only():
    """Writing has no mirror image; photographs have."""
    image = torch.zeros(1, 1, 16, 16, dtype=torch.uint8)
    image[0, 0, 8, 2:14] = torch.arange(1, 13, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    grey = augment_images(image.repeat(64, 1, 1, 1), generator)
    assert grey.shape == (64, 1, 16, 16)
    assert len({tuple(g.flatten().tolist()) for g in grey}) > 10
    steps = grey[:, 0].amax(1).int().diff(dim=1)
    assert (steps[:, 4:10] == 1).all()
    colour = augment_images(image.repeat(64, 3, 1, 1), generator)
    direction = colour[:, 0].amax(1).int().diff(dim=1)[:, 7].sign()
    assert 10 < int((direction == 1).sum()) < 54
    assert set(direction.tolist()) == {-1, 1}


# --- Modules of the user ---------------------------------------------------------------------------------------------


class _Net(nn.Module):
    """A user's module, with a layer that draws random numbers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))

    def forward(self, x):
        return self.layers(x / 16)


def test_module_learner_trains_copies_of_the_users_module(digits, table):
    """The user's own module must stay as it was, and its dropout must follow the seed."""
    data, y = without_flipped(table[0]), table[1]
    data = replace(data, features=replace(data.features, raw=digits[0][:1000]))
    module = _Net()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    learner = ModuleLearner(module, name="my net")
    assert learner.name == "my net"
    models = [learner.path(data.features, *masses(data), "classification", seed)[0] for seed in (0, 0, 1)]
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    first, second, third = (model.predict(data.features) for model in models)
    assert np.array_equal(first, second)
    assert not np.array_equal(first, third)
    assert accuracy(models[0], data, y, np.arange(900, 1000)) > 0.9


def test_module_predictor_restores_with_the_module_again(digits, table):
    """Nothing is pickled: a saved ensemble has weights, and the user brings the class."""
    data, _ = table
    data = replace(data, features=replace(data.features, raw=digits[0][:1000]))
    (model,) = ModuleLearner(_Net(), recipe=SHORT).path(data.features, *masses(data), "classification", 0)
    ensemble = EnsemblePredictor((model,), np.ones(1), np.ones(1), "classification")
    restored = through_json(ensemble)
    with pytest.raises(ValueError, match="attach_module"):
        restored.predict(data.features)
    assert attach_module(restored, _Net()) == 1
    assert np.array_equal(restored.predict(data.features), ensemble.predict(data.features))


def test_module_of_wrong_outputs_is_refused(table):
    """A module of two scores cannot tell ten classes."""
    data, _ = table
    with pytest.raises(ValueError, match=r"\(2, 2\).*10 scores"):
        ModuleLearner(nn.Linear(65, 2)).path(data.features, *masses(data), "classification", 0)


def test_module_learner_refuses_missing_values(table):
    """A network would return NaN for every row after one step."""
    data, _ = table
    raw = data.features.dense.copy()
    raw[CHECKED, 0] = np.nan
    features = replace(data.features, raw=raw)
    with pytest.raises(ValueError, match="missing values"):
        ModuleLearner(nn.Linear(65, 10)).path(features, *masses(data), "classification", 0)


def test_label_cleaner_takes_modules_and_bilevel_strategies_by_name(digits):
    """Users pass a module as they pass an estimator, and strategies by their names."""
    x, y = digits[0][:500], digits[1][:500]
    labels = y.astype(float)
    labels[CHECKED::3] = (labels[CHECKED::3] + 1) % 10
    checked = np.where(np.arange(500) < CHECKED, y, np.nan)
    cleaner = LabelCleaner(
        learners=["mlp", nn.Linear(64, 10)], strategies=["bilevel_group_weights"], cv=2, random_state=0
    )
    cleaner.fit(x, labels, y_checked=checked, groups=np.where(np.arange(500) % 3 == CHECKED % 3, "bad", "good"))
    assert set(cleaner.strategy_results_["learner"]) == {"mlp", "module"}
    assert cleaner.predict(x).shape == (500,)


# --- Bilevel strategies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["soba", "fsla"])
def test_bilevel_group_weights_separate_flipped_source(table, algorithm):
    """The source whose labels are all wrong must count little, and the others must count."""
    data, _ = table
    result = BilevelGroupWeights(algorithm=algorithm, steps=400).belief(data, np.arange(CHECKED))
    weight = result.group_weight
    assert weight.max() == 1
    assert weight[3] < 0.2 * weight[:3].min()
    assert np.array_equal(result.vote_weight, weight[data.votes.group])
    assert np.allclose(result.mass.sum(0), vote_mass(data, result.vote_weight).sum(0))


def test_bilevel_sample_weights_separate_flipped_source(table):
    """Votes are weighed one by one, without knowing their source; those of the flipped source must come out low."""
    data, _ = table
    result = BilevelSampleWeights().belief(data, np.arange(CHECKED))
    bad = data.votes.group == 3
    assert result.group_weight is None
    assert result.vote_weight[bad].mean() < 0.6 * result.vote_weight[~bad].mean()


def test_bilevel_weights_in_regression_separate_shifted_source():
    """The same holds for numbers."""
    rng = np.random.default_rng(0)
    dense = np.c_[rng.standard_normal((600, 5)) / 2.2, np.full(600, 0.5)]
    y = 2 * dense[:, 0] + 0.1 * rng.standard_normal(600)
    rows = np.arange(100, 600)
    group = rows % 3
    data = TrainingData(
        "regression", Features(dense), Votes(rows, group, y[rows] + 3.0 * (group == 2)), np.array(["a", "b", "c"]),
        np.arange(100), y[:100],
    )  # fmt: skip
    weight = BilevelGroupWeights(steps=400).belief(data, np.arange(100)).group_weight
    assert weight[2] < 0.3 * weight[:2].min()


def test_bilevel_strategy_uses_permitted_checked_rows_only(table):
    """A held-out row must not steer the weights."""
    data, _ = table
    changed = data.checked_labels.copy()
    changed[50:] = (changed[50:] + 1) % 10
    strategy = BilevelGroupWeights(steps=40)
    first, second = (
        strategy.belief(d, np.arange(50)).group_weight for d in (data, replace(data, checked_labels=changed))
    )
    assert np.array_equal(first, second)
    assert not np.array_equal(first, strategy.belief(data, np.arange(60)).group_weight)


def test_bilevel_strategies_support_groups_and_checked_rows(table):
    """Weights of one group, or without checked rows, have nothing to learn from."""
    data, _ = table
    one = replace(
        data,
        group_names=np.array(["all"]),
        votes=Votes(data.votes.row, np.zeros_like(data.votes.group), data.votes.label),
    )
    unchecked = replace(data, checked_rows=data.checked_rows[:0], checked_labels=data.checked_labels[:0])
    assert [s.name for s in bilevel_strategies(data)] == ["bilevel_group_weights", "bilevel_sample_weights"]
    assert [s.name for s in bilevel_strategies(one)] == ["bilevel_sample_weights"]
    assert bilevel_strategies(unchecked) == ()
