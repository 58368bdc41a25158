"""Which data to trust: weights as modules, the estimators, and what they are made of."""

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import issparse
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.utils.estimator_checks import parametrize_with_checks
from threadpoolctl import threadpool_limits
from torch import nn

import fsla
from fsla.data import _tables as tables
from fsla.data import _transition as transition
from fsla.data._candidate import Candidate
from fsla.data._choice import choose, shares, split, stand_ins_by_fold
from fsla.data._inputs import check_spelling
from fsla.data._material import Material, evident, given, soft
from fsla.data._networks import Pace, Stack, maker, stacked
from fsla.data._training import Lessons, cross_fit, train
from fsla.data._ways import EVERYTHING, Bench, usual, ways

QUICK = {"steps": 40, "bilevel_steps": 20, "folds": 2, "random_state": 0, "device": "cpu"}
CENTRES = 3 * np.random.default_rng(0).standard_normal((3, 6))


def blobs(n, seed):
    random = np.random.default_rng(seed)
    y = random.integers(3, size=n)
    return (CENTRES[y] + random.standard_normal((n, 6))).astype(np.float32), y


def mixed(n=400, rate=0.3, seed=1):
    """Samples in four groups; in two of them labels are wrong: a share, and all."""
    x, true = blobs(n, seed)
    random = np.random.default_rng(seed + 1)
    group = np.arange(n) % 4
    chance = np.array([0.0, 0.0, rate, 1.0])[group]
    wrong = random.random(n) < chance
    return x, np.where(wrong, (true + 1) % 3, true), np.array(["a", "b", "careless", "liar"])[group], wrong, true


# ------------------------------------------------------------------------------------------------ weights as modules


def test_weights_are_called_with_numbers():
    weights = fsla.SampleWeights(5, init=0.25)
    torch.testing.assert_close(weights(torch.tensor([0, 4, 4])), torch.full((3,), 0.25))
    assert weights.weights.shape == (5,)
    groups = fsla.GroupWeights(["web", "book", "web", "book", "book"])
    assert groups.names == ["web", "book"]
    assert groups.group_index.tolist() == [0, 1, 0, 1, 1]
    assert groups.as_dict() == {"web": 1.0, "book": 1.0}
    assert fsla.GroupWeights(3).names == [0, 1, 2]
    product = fsla.ProductWeights(groups, weights)
    torch.testing.assert_close(product(torch.tensor([0, 1]), torch.tensor([2, 2])), torch.full((2,), 0.25))
    assert len(list(product.parameters())) == 2


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: fsla.SampleWeights(0), "'num_samples' of SampleWeights must be at least 1"),
        (lambda: fsla.SampleWeights(3, init=1.0), r"'init' of SampleWeights must lie in \(0, 1\)"),
        (lambda: fsla.GroupWeights([]), "at least two groups"),
        (lambda: fsla.ProductWeights(fsla.SampleWeights(2)), "at least two factors"),
        (
            lambda: fsla.ProductWeights(fsla.SampleWeights(2), fsla.SampleWeights(2))(torch.zeros(1)),
            "as many arguments",
        ),
    ],
)
def test_bad_weights_get_one_message(build, text):
    with pytest.raises(ValueError, match=text):
        build()


@pytest.mark.parametrize("task", ["classification", "regression", "sequences"])
def test_group_weights_serve_any_loss(task):
    """The source with wrong targets loses its weight, whatever the model and the loss."""
    torch.manual_seed(0)
    n = 200
    groups = fsla.GroupWeights(["good", "bad"] * (n // 2))
    bad = groups.group_index == 1
    if task == "sequences":
        x = torch.randint(5, (n, 6))
        y = (x + 1) % 5  # the next symbol
        y[bad] = torch.randint(5, (int(bad.sum()), 6))
        model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))

        def losses(model, i):
            return nn.functional.cross_entropy(model(x[i]).transpose(1, 2), y[i], reduction="none").mean(1)
    else:
        x = torch.randn(n, 3)
        y = x[:, 0] - x[:, 1] if task == "regression" else (x[:, 0] > 0).long()
        y[bad] = torch.randn(int(bad.sum())) if task == "regression" else 1 - y[bad]
        model = nn.Linear(3, 1 if task == "regression" else 2)

        def losses(model, i):
            if task == "regression":
                return (model(x[i])[:, 0] - y[i]).square()
            return nn.functional.cross_entropy(model(x[i]), y[i], reduction="none")

    trusted = torch.nonzero(~bad)[:20, 0]
    opt = fsla.FSLA(
        model,
        groups,
        inner_loss=lambda model, weights, i: (
            (weights(weights.group_index[i]) * losses(model, i)).mean()
            + 1e-3 * sum(p.square().sum() for p in model.parameters())
        ),
        outer_loss=lambda model, weights, i: losses(model, i).mean(),
    )
    for _ in range(150):
        opt.step(torch.randint(n, (64,)), trusted)
    found = groups.as_dict()
    assert found["good"] > found["bad"] + 0.3, found


# --------------------------------------------------------------------------------------------------- what it is made of


def material(**more):
    x, y, group, _, _ = mixed()
    clean_x, clean_y = blobs(60, 9)
    names, numbers = np.unique(group, return_inverse=True)
    data = {
        "x": torch.from_numpy(np.concatenate([x, clean_x])),
        "y": torch.from_numpy(np.concatenate([y, clean_y])),
        "mixed": len(x),
        "classes": 3,
        "make": maker("linear", (6,), 3),
        "groups": torch.from_numpy(numbers),
        "group_count": len(names),
        "steps": 60,
    }
    return Material(**(data | more))


def test_em_finds_the_transition_matrix():
    random = np.random.default_rng(0)
    true = random.integers(3, size=6000)
    T = np.array([[0.7, 0.3, 0.0], [0.0, 0.9, 0.1], [0.2, 0.2, 0.6]])
    y = np.array([random.choice(3, p=T[c]) for c in true])
    seen = np.where(random.random(6000) < 0.9, true, (true + random.integers(1, 3, size=6000)) % 3)
    p = np.full((6000, 3), 0.05)
    p[np.arange(6000), seen] = 0.9
    checked = torch.ones(3, dtype=torch.bool)
    found = transition.estimate(torch.from_numpy(p), torch.from_numpy(y), checked)
    np.testing.assert_allclose(found.sum(1), 1.0)
    np.testing.assert_allclose(found, T, atol=0.03)
    q = transition.posterior(torch.from_numpy(p), transition.chances(found, torch.from_numpy(y)))
    assert roc_auc_score(y != true, 1 - q[np.arange(6000), y]) > 0.9


def test_a_label_that_cannot_be_checked_is_taken_as_it_is():
    p = torch.tensor([[0.9, 0.1, 1e-9], [0.1, 0.9, 1e-9], [0.5, 0.5, 1e-9]], dtype=torch.float64)
    y = torch.tensor([2, 0, 2])
    found = transition.estimate(p, y, torch.tensor([True, True, False]))
    q = transition.posterior(p, transition.chances(found, y))
    assert q[0].argmax() == q[2].argmax() == 2
    assert q[1, 2] == 0


def test_the_t_of_a_small_group_is_drawn_to_the_common_one():
    p = torch.full((303, 3), 0.05, dtype=torch.float64)
    true = torch.arange(303) % 3
    p[torch.arange(303), true] = 0.9
    y = true.clone()
    y[300:] = (true[300:] + 1) % 3
    groups = (torch.arange(303) >= 300).long()
    checked = torch.ones(3, dtype=torch.bool)
    found = transition.estimate_by_group(p, y, checked, groups, 2)
    assert found[0].diagonal().min() > 0.95
    assert found[1].diagonal().min() > 0.5  # three wrong labels alone would say 0
    apart = transition.estimate_by_group(p, (true + groups) % 3, checked, torch.arange(303) % 2, 2)
    assert apart.shape == (2, 3, 3)


def test_the_three_losses_agree_where_labels_are_certain():
    m = material()
    outputs = torch.randn(2, 10, 3)
    rows = torch.arange(20).view(2, 10)
    onehot = nn.functional.one_hot(m.given, 3).float()
    views = torch.stack([onehot, torch.full_like(onehot, 1 / 3), onehot])
    expected = nn.functional.cross_entropy(outputs.flatten(0, 1), m.y[:20], reduction="none").view(2, 10)
    for losses in (given(m), soft(views), evident(views)):
        torch.testing.assert_close(losses(outputs, torch.tensor([[0], [2]]), rows), expected)


def test_samples_without_weight_are_not_learnt_from():
    """Half of the samples say the opposite; without weight they do not matter, bit by bit."""
    m = material()
    weight = (m.groups < 2).float()
    nonsense = m.y.clone()
    nonsense[: m.mixed] = torch.where(weight > 0, m.given, (m.given + 1) % 3)
    lessons = Lessons([0], torch.tensor([[0]]), [m.trusted], torch.ones(1, m.mixed, dtype=torch.bool), weight[None])
    (one,) = train(m, lessons)
    (other,) = train(replace(m, y=nonsense), lessons)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_networks_trained_at_once_learn_what_each_would_alone():
    """Side by side, each network sees its own samples, trusted samples and labels, and nothing of the others'."""
    m = material(make=maker("dense", (6,), 3), steps=30)
    torch.manual_seed(0)
    seen = torch.rand(3, m.mixed) < 0.5
    weight = torch.rand(3, m.mixed)
    labels = torch.rand(2, m.mixed, 3).softmax(-1)
    shown = [m.trusted[:20], m.trusted[20:], m.trusted[:20]]
    lessons = Lessons(range(3), torch.tensor([[0], [1], [0]]), shown, seen, weight)
    together = train(m, lessons, soft(labels))
    changed = replace(lessons, weight=torch.cat([weight[:2], 1 - weight[2:]]))
    other = train(m, changed, soft(labels))
    for number, same in enumerate([True, True, False]):
        for a, b in zip(together[number].parameters(), other[number].parameters(), strict=True):
            assert torch.equal(a, b) == same
    relabelled = train(m, lessons, soft(torch.stack([labels[0], labels[1].flip(-1)])))
    for number, same in enumerate([True, False, True]):
        assert torch.equal(together[number].learnt[0].weight, relabelled[number].learnt[0].weight) == same


@pytest.mark.parametrize(
    ("kind", "shape"), [("linear", (6,)), ("dense", (2, 3)), ("cnn", (1, 28, 28)), ("cnn", (3, 9, 12))]
)
def test_networks_side_by_side_answer_as_they_do_apart(kind, shape):
    networks = [maker(kind, shape, 4)() for _ in range(3)]
    stack = Stack(networks)
    x = torch.randn(3, 5, *shape)

    def apart():
        return torch.stack([network(own) for network, own in zip(networks, x, strict=True)])

    torch.testing.assert_close(stack(x), apart())
    with torch.no_grad():
        for p in stack.parameters():
            p.mul_(2.0)
    stack.unstack()
    torch.testing.assert_close(stack(x), apart())
    assert (stacked(networks) is None) == (kind == "cnn")
    assert stacked([*networks, nn.Linear(6, 4)]) is None


def test_networks_that_cannot_be_stacked_are_trained_one_by_one():
    m = material(make=lambda: nn.Sequential(nn.Linear(6, 3)), steps=5)
    fit = cross_fit(m, [m.trusted[:30], m.trusted[30:]])
    assert [len(own) for own in fit.networks] == [2, 2]
    assert fit.unseen.shape == (2, 400, 3)


def test_no_network_speaks_of_a_sample_that_it_saw():
    """A network that remembers a sample by its number knows nothing of those that were left out."""
    n = 60
    x = torch.eye(n)
    y = torch.arange(n) % 2
    both = (torch.cat([x, torch.zeros(4, n)]), torch.cat([y, torch.tensor([0, 1, 0, 1])]))
    m = Material(*both, n, 2, maker("linear", (n,), 2), steps=400)
    fit = cross_fit(m, [m.trusted], repeats=2)
    assert len(fit.networks[0]) == 4
    unseen = fit.unseen[0, torch.arange(n), y]
    assert unseen.max() < 0.6  # a remembered label would have a probability near 1
    torch.testing.assert_close(fit.unseen.sum(2), torch.ones(1, n))


def test_each_class_is_spread_over_the_folds():
    m = material()
    parts = split(m, 3)
    assert sorted(torch.cat(parts).tolist()) == list(range(400, 460))
    counts = torch.stack([torch.bincount(m.y[part], minlength=3) for part in parts])
    assert (counts.max(0).values - counts.min(0).values).max() <= 1


def test_which_ways_apply():
    assert list(ways(material()))[5:] == ["group weights", "groups and labels", "sample weights"]
    assert "group weights" not in ways(material(groups=None))
    assert list(usual(material()))[-1] == "groups and labels"
    assert list(usual(material(groups=None)))[-1] == "mended labels"
    regression = material(classes=0, y=torch.randn(460), make=maker("linear", (6,), 1))
    assert list(usual(replace(regression, groups=None)))[-1] == "sample weights"
    assert list(ways(regression)) == [
        "trusted samples alone", "everything", "group weights", "sample weights",
    ]  # fmt: skip


def test_ways_share_what_they_have_in_common():
    trainings = []
    bench = Bench(material(progress=lambda: trainings.append(1), pace=Pace(bilevel_steps=5)))
    bench.go("group weights")
    first = len(trainings)
    assert first == 1 + 2  # FSLA, and a network a fold
    bench.go("groups and labels")
    bench.go("groups and labels")
    assert len(trainings) == first + 3 + 2 * 4  # the trusted ones alone, three rounds and the last


def test_the_best_on_held_out_trusted_samples_is_chosen_and_time_may_end():
    choice = choose(material(), names=["everything", "mended labels"], enough=lambda: True)
    assert [c.name for c in choice.candidates] == ["everything"]
    seen = []
    choice = choose(material(), names=["everything", "mended labels"], report=lambda *what: seen.append(what))
    assert seen == [("everything", 0, 3), ("mended labels", 1, 3), ("the model", 2, 3), ("done", 3, 3)]
    assert [len(c.held) for c in choice.candidates] == [3, 3]
    assert sum(c.share for c in choice.candidates) == pytest.approx(1.0)
    assert choice.together.score >= max(c.score for c in choice.candidates) - 1e-3
    assert choice.labels.belief.shape == (400, 3)


def test_being_right_counts_more_than_being_modest():
    """Of two candidates the one that errs less is taken, however sure it is of itself."""
    torch.manual_seed(0)
    truths = torch.randint(3, (300,))
    modest = Candidate("modest", [(torch.full((300, 3), 1 / 3), truths)])
    seen = torch.where(torch.rand(300) < 0.9, truths, (truths + 1) % 3)
    sure = Candidate("sure", [(nn.functional.one_hot(seen, 3).float().clamp(min=1e-9), truths)])
    assert sure.score > modest.score
    assert sure.temperature > 4
    certain = (0.9 * nn.functional.one_hot(seen, 3).float() + 0.1 / 3, truths)
    assert 0.8 < Candidate("calibrated", [certain]).temperature < 1.6


def test_shares_go_to_those_who_know_what_others_do_not():
    """Two candidates, each right on its half of the samples, share; a third one that guesses has nothing."""
    torch.manual_seed(0)
    truths = torch.randint(3, (300,))
    sure = 0.9 * nn.functional.one_hot(truths, 3).double() + 0.1 / 3
    guess = torch.full((300, 3), 1 / 3, dtype=torch.float64)
    first = torch.arange(300)[:, None] < 150
    held = [torch.where(first, sure, guess), torch.where(first, guess, sure), torch.rand(300, 3).softmax(1).double()]
    candidates = [Candidate(str(number), [(answers, truths)]) for number, answers in enumerate(held)]
    found = shares(candidates)
    assert found[0] == pytest.approx(0.5, abs=0.05)
    assert found[2] == 0.0
    assert sum(found) == pytest.approx(1.0)
    assert shares(candidates[:1]) == [1.0]


def test_shares_do_not_depend_on_the_number_of_threads():
    draw = torch.Generator().manual_seed(0)
    truths = torch.randint(10, (100,), generator=draw)
    candidates = []
    for sure in (1.0, 1.5, 2.0, 1.8, 2.2):
        scores = torch.randn(100, 10, generator=draw)
        scores[torch.arange(100), truths] += sure
        candidates.append(Candidate(str(sure), [(scores.softmax(1), truths)]))
    found = []
    for threads in (1, 2, 4):
        with threadpool_limits(threads):
            found.append(shares(candidates))
    assert found[0] == found[1] == found[2]


def test_shares_of_numbers_lower_the_squared_error():
    torch.manual_seed(0)
    truths = torch.randn(200).double()
    noise = torch.randn(2, 200).double()
    candidates = [Candidate("a", [(truths + noise[0], truths)]), Candidate("b", [(truths + 0.5 * noise[1], truths)])]
    found = shares(candidates)
    assert found[0] == pytest.approx(0.2, abs=0.06)  # in proportion to 1 / variance


# ------------------------------------------------------------------------------------------------------- estimators


@pytest.fixture(scope="module")
def cleaner():
    x, y, group, _, _ = mixed()
    names = np.array(["ant", "bee", "cow"])
    clean_x, clean_y = blobs(60, 9)
    options = QUICK | {"bilevel_steps": 300, "steps": 150, "folds": 3}
    return fsla.HyperCleaner(**options).fit(x, names[y], clean_x, names[clean_y], groups=group)


def test_the_cleaner_finds_wrong_labels_and_what_they_should_be(cleaner):
    _, y, _, wrong, true = mixed()
    names = np.array(["ant", "bee", "cow"])
    assert roc_auc_score(wrong, 1 - cleaner.label_quality_) > 0.97
    issues = cleaner.find_label_issues()
    assert list(issues.columns) == [
        "index", "given_label", "suggested_label", "suggested_probability", "is_label_issue", "label_quality", "weight",
    ]  # fmt: skip
    assert issues["label_quality"].is_monotonic_increasing
    flagged = issues[issues["is_label_issue"]]["index"]
    assert wrong[flagged].mean() > 0.9
    assert len(flagged) > 0.9 * wrong.sum()
    by_row = issues.sort_values("index")
    assert (by_row["given_label"].to_numpy() == names[y]).all()
    assert (by_row["suggested_label"].to_numpy() == names[true]).mean() > 0.93
    assert cleaner.noise_rate_interval_[0] <= wrong.mean() <= cleaner.noise_rate_interval_[1]
    np.testing.assert_allclose(cleaner.transition_.sum(1), 1.0, atol=1e-6)
    test_x, test_y = blobs(500, 20)
    assert cleaner.score(test_x, names[test_y]) > 0.95
    np.testing.assert_allclose(cleaner.predict_proba(test_x).sum(1), 1.0, atol=1e-5)


def test_the_cleaner_weighs_groups_too(cleaner):
    table = cleaner.weights_.set_index("group")
    assert table.loc["a", "decision"] == table.loc["b", "decision"] == "keep"
    assert table.loc["liar", "decision"] == "review"  # all 60 are right with it, too
    assert table.loc["liar", "high"] < 0.3
    assert table.loc["liar", "wrong_labels"] > 0.9
    assert table["samples"].sum() == 400
    assert (table["low"] <= table["weight"]).all()
    assert (table["weight"] <= table["high"]).all()
    assert cleaner.candidates_.iloc[0]["way"] == "together"
    assert cleaner.candidates_.iloc[1:]["share"].sum() == pytest.approx(1.0)
    assert cleaner.candidates_.iloc[1:]["log_likelihood"].is_monotonic_decreasing


def test_weights_serve_another_estimator(cleaner):
    x, y, _, _, _ = mixed()
    test_x, test_y = blobs(500, 20)
    weighted = LogisticRegression().fit(x, y, sample_weight=cleaner.sample_weight_)
    assert weighted.score(test_x, test_y) >= LogisticRegression().fit(x, y).score(test_x, test_y)


def test_the_weigher_does_regressions():
    random = np.random.default_rng(0)
    x = random.standard_normal((300, 4))
    group = np.arange(300) % 3
    y = x @ [1.0, -2.0, 0.5, 0.0] + 5
    y[group == 2] = random.standard_normal(100) * 3
    clean = random.standard_normal((60, 4))
    found = fsla.DataWeigher(model="linear", steps=300, bilevel_steps=300, random_state=0, device="cpu").fit(
        x, y, group, clean, clean @ [1.0, -2.0, 0.5, 0.0] + 5
    )
    assert found.task_ == "regression"
    table = found.weights_.set_index("group")
    assert table.loc[2, "weight"] < 0.2 < 0.8 < table.loc[[0, 1], "weight"].min()
    test = random.standard_normal((100, 4))
    assert found.score(test, test @ [1.0, -2.0, 0.5, 0.0] + 5) > 0.98
    with pytest.raises(AttributeError, match="no probabilities"):
        found.predict_proba(test)


def test_what_was_learnt_is_saved_without_pickle(cleaner, tmp_path):
    path = tmp_path / "cleaner.safetensors"
    cleaner.save(path)
    loaded = fsla.HyperCleaner.load(path)
    test_x, _ = blobs(50, 20)
    np.testing.assert_array_equal(loaded.predict_proba(test_x), cleaner.predict_proba(test_x))
    assert loaded.find_label_issues().equals(cleaner.find_label_issues())
    assert loaded.weights_["group"].tolist() == cleaner.weights_["group"].tolist()
    assert loaded.noise_rate_interval_ == cleaner.noise_rate_interval_
    with pytest.raises(ValueError, match=r"it holds HyperCleaner, not DataWeigher"):
        fsla.DataWeigher.load(path)
    with pytest.raises(ValueError, match="must be the one whose weights"):
        fsla.HyperCleaner.load(path, model="linear")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="Cannot read"):
        fsla.HyperCleaner.load(path)


def test_the_same_seed_gives_the_same_numbers():
    x, y, group, _, _ = mixed(120)
    clean = blobs(30, 9)
    one, other = (fsla.HyperCleaner(**QUICK).fit(x, y, *clean, groups=group) for _ in range(2))
    np.testing.assert_array_equal(one.label_quality_, other.label_quality_)
    np.testing.assert_array_equal(one.weights_["weight"], other.weights_["weight"])


def without_class_2(rate=0.3):
    """Of three classes, two have trusted samples; the share of labels that were made wrong is that of each class."""
    x, true = blobs(600, 1)
    random = np.random.default_rng(2)
    wrong = random.random(600) < rate
    y = np.where(wrong, (true + random.integers(1, 3, size=600)) % 3, true)
    clean_x, clean_y = blobs(90, 9)
    few = clean_y < 2
    with pytest.warns(UserWarning, match="No trusted sample has the label 2"):
        found = fsla.HyperCleaner(**QUICK).fit(x, y, clean_x[few], clean_y[few])
    return found, x, y, wrong, true


def test_a_class_without_a_trusted_sample_is_checked_by_those_that_stand_in():
    found, x, y, wrong, true = without_class_2()
    assert roc_auc_score(wrong[y == 2], 1 - found.label_quality_[y == 2]) > 0.95  # all of them alike before: 0.5
    assert roc_auc_score(wrong[y != 2], 1 - found.label_quality_[y != 2]) > 0.95
    flagged = found.suggested_ != y
    assert (flagged == wrong).mean() > 0.95
    assert (found.suggested_[wrong & (true == 2)] == 2).mean() > 0.9
    assert found.score(x, true) > 0.95


def test_networks_that_never_saw_a_class_have_no_share():
    """What they say of samples that stand in keeps them out."""
    found, *_ = without_class_2(rate=0.6)
    table = found.candidates_.set_index("way")
    assert table.loc["trusted samples alone", "share"] == 0
    assert table.loc["trusted samples alone", "log_likelihood"] < table.loc["everything", "log_likelihood"]


def test_right_labels_of_a_class_without_a_trusted_sample_stay():
    found, _, y, _, _ = without_class_2(rate=0.0)
    assert (found.suggested_ == y).mean() > 0.98
    assert found.noise_rate_ < 0.05


def test_samples_stand_in_for_what_a_view_lacks():
    m = material()
    lacking = m.trusted[m.y[m.trusted] != 2]
    bench = Bench(m, [m.trusted, lacking])
    assert bench.known.tolist() == [[True] * 3, [True, True, False]]
    assert not bench.stand_ins[0].any()
    said = bench.go(EVERYTHING).fit.unseen[1].argmax(1)
    assert torch.equal(bench.stand_ins[1], (m.given == 2) & (said == 2))
    assert bench.checked.all()
    assert [len(part) for part in stand_ins_by_fold(bench, 3)] == [0, 0, 0]  # some trusted sample is of every class
    few = Bench(m, [lacking[:9], lacking[9:]])
    parts = stand_ins_by_fold(few, 3)
    rows = torch.cat(parts)
    wanted = round(60 * float((m.given == 2).float().mean()))
    assert len(rows) == min(wanted, int(few.stand_ins.all(0).sum())) > 3
    assert few.stand_ins[:, rows].all()
    assert (m.given[rows] == 2).all()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_images_and_a_module_of_the_user_s(tmp_path):
    random = np.random.default_rng(0)
    y = random.integers(2, size=80)
    images = random.random((80, 1, 8, 8)) + y[:, None, None, None]
    options = QUICK | {"steps": 10, "bilevel_steps": 3, "ways": ["everything", "mended labels"]}
    found = fsla.HyperCleaner(**options).fit(images, y, images[:20], y[:20])
    assert found.predict(images).shape == (80,)
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = [p.clone() for p in own.parameters()]
    found = fsla.HyperCleaner(model=own, **options).fit(images[:, 0], y, images[:20, 0], y[:20])
    assert found.predict_proba(images[:, 0]).shape == (80, 2)
    found.save(tmp_path / "own")
    with pytest.raises(ValueError, match=r"the user's own. Give it again: HyperCleaner.load\(path, model=...\)"):
        fsla.HyperCleaner.load(tmp_path / "own")
    again = fsla.HyperCleaner.load(tmp_path / "own", model=own)
    np.testing.assert_array_equal(again.predict_proba(images[:, 0]), found.predict_proba(images[:, 0]))
    assert all(torch.equal(p, q) for p, q in zip(own.parameters(), before, strict=True))


def test_whole_numbers_of_many_values_are_a_regression():
    random = np.random.default_rng(0)
    x = random.standard_normal((200, 3))
    y = np.round(100 * x[:, 0])
    weigher = fsla.DataWeigher(ways=["everything"], steps=20, folds=2, device="cpu")
    assert weigher.fit(x, y, None, x[:60], y[:60]).task_ == "regression"
    sign = (y > 0).astype(int)
    assert weigher.fit(x, sign, None, x[:60], sign[:60]).task_ == "classification"
    assert not hasattr(weigher, "weights_")


def test_columns_in_another_order_are_refused():
    pd = pytest.importorskip("pandas")
    x, y, _, _, _ = mixed(120)
    clean_x, clean_y = blobs(30, 9)
    names = list("abcdef")
    table, clean = pd.DataFrame(x, columns=names), pd.DataFrame(clean_x, columns=names)
    cleaner = fsla.HyperCleaner(**QUICK | {"ways": ["everything"]})
    with pytest.raises(ValueError, match=r"in the same order\. X_clean has f, e, d, c, b, a; it should have a, b, c"):
        cleaner.fit(table, y, clean[names[::-1]], clean_y)
    cleaner.fit(table, y, clean, clean_y)
    assert list(cleaner.feature_names_in_) == names
    with pytest.raises(ValueError, match=r"in the same order\. X has f, e"):
        cleaner.predict(clean[names[::-1]])


def test_group_table_has_the_choice_s_decisions_and_counts_of_flags():
    """What the table says of labels must be countable in issues.csv."""
    m = material(pace=Pace(bilevel_steps=5))
    choice = choose(m, names=["everything", "group weights"])
    names = np.array(["a", "b", "careless", "liar"])
    table = tables.weights(names, m.groups, choice).set_index("group")
    assert table.loc[names, "decision"].tolist() == choice.decisions
    flags = torch.bincount(m.groups, weights=choice.labels.flagged.double())
    np.testing.assert_allclose(table.loc[names, "wrong_labels"] * table.loc[names, "samples"], flags)
    assert table.loc["liar", "wrong_labels"] > 0.5 > table.loc["a", "wrong_labels"]


def test_choice_measures_groups_left_out_only_while_there_is_time():
    """Without time a group in question is for review, never dropped on its weight alone."""
    m = material(pace=Pace(bilevel_steps=5))
    late = []
    choice = choose(m, names=["everything", "group weights"], enough=lambda: len(late.append(1) or late) > 2)
    assert "review" in choice.decisions
    assert "drop" not in choice.decisions
    assert {(removal.change, removal.reason) for removal in choice.removals} == {(None, "time was up")}


BAD = np.array([[0.0, np.nan], [1.0, 2.0], [0.0, 1.0]])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"X_clean": None}, "learns what to trust from trusted samples: give X_clean and y_clean"),
        ({"X_clean": np.zeros((0, 6)), "y_clean": np.zeros(0)}, "0 sample"),
        ({"X_clean": np.zeros((3, 6)), "y_clean": np.zeros(3)}, "at least 4 trusted samples"),
        ({"X_clean": np.zeros((20, 5)), "y_clean": np.zeros(20)}, "has 5 features, but the data .* has 6"),
        ({"y": np.zeros(7)}, "y must have one value for each of the 120 samples. Got 7"),
        ({"groups": "supplier"}, "groups must have one value for each of the 120 samples. Got 'supplier'"),
        ({"groups": ["a"]}, "groups must have one value for each of the 120 samples. Got 1"),
        ({"X": np.full((120, 6), np.inf)}, "infinity"),
        ({"y": np.zeros(120), "y_clean": np.zeros(30)}, "at least two classes"),
        ({"y": np.linspace(0, 1, 120)}, "Unknown label type"),
    ],
)
def test_bad_input_gets_one_message(change, text):
    x, y, _, _, _ = mixed(120)
    clean_x, clean_y = blobs(30, 9)
    given = {"X": x, "y": y, "X_clean": clean_x, "y_clean": clean_y} | change
    with pytest.raises(ValueError, match=text):
        fsla.HyperCleaner(**QUICK).fit(**given)


def test_one_group_a_group_of_one_and_labels_all_wrong_end_well():
    x, y, _, _, true = mixed(120)
    clean = blobs(30, 9)
    few = QUICK | {"ways": ["everything", "mended labels"]}
    one = fsla.HyperCleaner(**few).fit(x, y, *clean, groups=["all"] * 120)
    assert one.weights_["decision"].tolist() == ["keep"]
    alone = fsla.HyperCleaner(**QUICK).fit(x, y, *clean, groups=["all"] * 119 + ["single"])
    assert len(alone.weights_) == 2
    wrong = fsla.HyperCleaner(**few | {"steps": 150}).fit(x, (true + 1) % 3, *clean)
    assert wrong.noise_rate_ > 0.8
    right = fsla.HyperCleaner(**few | {"steps": 150}).fit(x, true, *clean)
    assert right.noise_rate_ < 0.15


class Checked(fsla.HyperCleaner):
    """Takes the first samples for trusted ones, as scikit-learn's checks know of none."""

    def fit(self, X, y):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "No trusted sample", UserWarning)
            if y is None or issparse(X):
                return super().fit(X, y, X, y)
            rows = X if hasattr(X, "shape") else np.asarray(X)
            labels = np.asarray(y)
            count = max(6, rows.shape[0] // 2)
            return super().fit(X, y, rows[:count], labels[:count])


@parametrize_with_checks([Checked(steps=20, ways=["mended labels"], folds=2, random_state=0, device="cpu")])
def test_scikit_learn_s_checks(estimator, check):
    check(estimator)


def test_nothing_can_be_asked_before_the_fit():
    with pytest.raises(NotFittedError):
        fsla.HyperCleaner().predict(np.zeros((1, 2)))


@pytest.mark.parametrize(("trusted", "given"), [("Apple", "apple"), (" apple", "apple"), ("1", "1.0")])
def test_labels_that_differ_in_their_spelling_alone_are_refused(trusted, given):
    """One class of several would be taken for another one, with no trusted sample."""
    x, y, _, _, _ = mixed(60)
    clean_x, clean_y = blobs(30, 9)
    names = np.array([given, "pear", "plum"], dtype=object)
    others = np.array([trusted, "pear", "plum"], dtype=object)
    with pytest.raises(ValueError, match=f"labels must be written alike in both.*{trusted!r}, the others {given!r}"):
        fsla.HyperCleaner(**QUICK).fit(x, names[y], clean_x, others[clean_y])


def test_the_spelling_of_what_both_have_is_theirs():
    check_spelling(["Apple", "new"], ["Apple", "apple"], "labels")
    check_spelling([], ["a"], "labels")


def test_the_weight_of_a_sample_is_that_of_its_given_label():
    """Also where labels are mended: a wrong one must not count for another estimator."""
    x, y, _, wrong, _ = mixed(400, rate=0.4)
    options = QUICK | {"ways": ["mended labels"]}
    cleaner = fsla.HyperCleaner(**options).fit(x, y, *blobs(90, 9))
    assert cleaner.sample_weight_[wrong].mean() < 0.2
    assert cleaner.sample_weight_[~wrong].mean() > 0.8


def test_a_saved_model_knows_its_columns(tmp_path):
    x, y, _, _, _ = mixed(60)
    frame = pd.DataFrame(x, columns=list("abcdef"))
    clean_x, clean_y = blobs(30, 9)
    clean = pd.DataFrame(clean_x, columns=list("abcdef"))
    options = QUICK | {"ways": ["everything"]}
    fsla.HyperCleaner(**options).fit(frame, y, clean, clean_y).save(tmp_path / "model")
    loaded = fsla.HyperCleaner.load(tmp_path / "model")
    assert len(loaded.predict(frame)) == 60
    with pytest.raises(ValueError, match="in the same order"):
        loaded.predict(frame[list("fedcba")])
