"""`LabelCleaner` and `GroupWeigher` as scikit-learn's users meet them."""

import pickle
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import fsla
from fsla.data import GroupWeigher, LabelCleaner
from fsla.data._learners import LinearLearner
from trusted_data import annotators, blobs, scores, sources

QUICK = {"learners": ["linear"], "cv": 2, "random_state": 0}
NAMES = np.array(["ant", "bee", "cat"])


def mixed(n=500, checked=80, seed=0, rates=(0.0, 0.0, 0.4, 1.0)):
    """Return rows, given labels, checked labels, groups and true labels, as a user has them."""
    data, y = sources(n, checked, seed=seed, rates=rates)
    truth = NAMES[y]
    y_checked = np.where(np.arange(n) < checked, truth.astype(object), None)
    return data.features.raw, NAMES[data.votes.label], y_checked, data.group_names[data.votes.group], truth


@pytest.fixture(scope="module")
def cleaner():
    x, y_given, y_checked, group, _ = mixed()
    return LabelCleaner(learners=["linear", "linear_fine_tuned"], random_state=0).fit(
        x, y_given, y_checked=y_checked, groups=group
    )


@parametrize_with_checks([LabelCleaner(**QUICK), GroupWeigher(**QUICK), GroupWeigher(task="regression", **QUICK)])
@pytest.mark.filterwarnings("ignore:y_checked has no checked label")
def test_estimators_pass_the_checks_of_scikit_learn(estimator, check):
    """The classes that users import, without checked labels: then the given labels are learned as they are."""
    check(estimator)


def test_cleaner_finds_wrong_labels(cleaner):
    _, y_given, y_checked, _, truth = mixed()
    wrong, free = y_given != truth, pd.isna(y_checked)
    assert roc_auc_score(wrong[free], 1 - cleaner.label_quality_[free]) > 0.95
    assert (cleaner.suggested_labels_ == truth).mean() > 0.9
    np.testing.assert_array_equal(cleaner.suggested_labels_[~free], truth[~free])
    np.testing.assert_array_equal(cleaner.label_quality_[~free], (~wrong)[~free])
    np.testing.assert_array_equal(cleaner.suggested_proba_[~free], 1)
    low, high = cleaner.noise_rate_interval_
    assert low <= cleaner.noise_rate_ <= high
    assert low <= wrong.mean() <= high
    assert cleaner.noise_matrix_.shape == (3, 3)


def test_cleaner_predicts_new_rows(cleaner):
    x, y = blobs(500, seed=5)
    assert cleaner.score(x, NAMES[y]) > 0.85
    np.testing.assert_array_equal(cleaner.classes_, NAMES)
    np.testing.assert_allclose(cleaner.predict_proba(x).sum(1), 1)
    nothing = LogisticRegression().fit(*mixed()[:2]).score(x, NAMES[y])
    assert cleaner.score(x, NAMES[y]) > nothing + 0.03
    assert cleaner.comparison_.recommended.value > cleaner.comparison_.nothing.value


def test_sample_weight_helps_another_estimator(cleaner):
    x, y_given, *_ = mixed()
    new, y = blobs(500, seed=5)
    plain = LogisticRegression().fit(x, y_given).score(new, NAMES[y])
    assert (
        LogisticRegression().fit(x, y_given, sample_weight=cleaner.sample_weight_).score(new, NAMES[y]) > plain + 0.03
    )
    assert (cleaner.sample_weight_ >= 0).all()


def test_label_issues_are_a_table_worst_first(cleaner):
    _, y_given, *_ = mixed()
    issues = cleaner.find_label_issues()
    assert list(issues) == [
        "index", "given_label", "suggested_label", "suggested_probability", "is_label_issue", "label_quality",
        "sample_weight",
    ]  # fmt: skip
    assert issues["label_quality"].is_monotonic_increasing
    assert (issues["given_label"] == y_given[issues["index"]]).all()
    assert (issues["is_label_issue"] == (issues["given_label"] != issues["suggested_label"])).all()


def test_group_weights_are_a_table_of_groups(cleaner):
    table = cleaner.group_weights_.set_index("group")
    assert table["weight"].idxmin() == "source3"
    assert table["n_samples"].sum() == 500
    assert set(table["decision"]) <= {"keep", "drop", "review", "not_evaluated"}
    assert (table["weight_low"] <= table["weight"]).all()
    assert table.loc["source3", "noise_rate"] > 0.8
    assert table.loc["source0", "noise_rate_low"] < 0.05


def test_strategy_results_sum_to_one(cleaner):
    table = cleaner.strategy_results_
    assert table["share"].sum() == pytest.approx(1)
    assert table["share"].is_monotonic_decreasing
    assert list(table) == ["strategy", "learner", "share", "log_likelihood", "accuracy", "seconds"]


@pytest.mark.parametrize("missing", [None, np.nan, pd.NA], ids=["None", "NaN", "NA"])
def test_y_checked_takes_every_mark_of_missing(missing):
    x, y_given, y_checked, *_ = mixed(n=200)
    column = [missing if v is None else v for v in y_checked]
    fits = [LabelCleaner(**QUICK).fit(x, y_given, y_checked=c) for c in (column, pd.Series(column), list(y_checked))]
    assert all(f.comparison_.rows == 80 for f in fits)
    np.testing.assert_array_equal(fits[0].label_quality_, fits[2].label_quality_)


@pytest.mark.parametrize("kind", ["float", "Int64", "object"])
def test_numbers_as_classes_stay_whole(kind):
    """A column of integers with gaps is of floats in pandas; classes must not become 0.0, 1.0 and 2.0."""
    data, y = sources(n=200)
    checked = pd.Series([int(v) if i < 60 else None for i, v in enumerate(y)])
    checked = checked.astype({"float": "float64", "Int64": "Int64", "object": object}[kind])
    fit = LabelCleaner(**QUICK).fit(data.features.raw, data.votes.label, y_checked=checked)
    assert fit.classes_.dtype.kind == "i"
    assert fit.predict(data.features.raw).dtype.kind == "i"


def test_several_labels_a_row_weigh_annotators():
    """One column for each annotator, missing where there is none; a data frame names them."""
    data, y = annotators(n=400, checked=80)
    table = np.full((400, 5), None, dtype=object)
    table[data.votes.row, data.votes.group] = NAMES[data.votes.label]
    y_checked = np.where(np.arange(400) < 80, NAMES[y].astype(object), None)
    frame = pd.DataFrame(table, columns=["eve", "bob", "cid", "dan", "ada"])
    fit = LabelCleaner(**QUICK).fit(data.features.raw, frame, y_checked=y_checked)
    groups = fit.group_weights_.set_index("group")
    assert groups["label_quality"].idxmax() == "eve"
    assert groups["label_quality"].idxmin() == "ada"
    assert (fit.suggested_labels_ == NAMES[y]).mean() > 0.85
    plain = LabelCleaner(**QUICK).fit(data.features.raw, table, y_checked=y_checked)
    assert sorted(plain.group_weights_["group"]) == ["0", "1", "2", "3", "4"]


def test_weigher_of_numbers_is_in_their_units():
    data, y = scores(n=400, votes_a_row=1, biases=(0.0, 0.0, 3.0))
    y_given = 100 * data.votes.label + 1000
    y_checked = np.where(np.arange(400) < 60, 100 * y + 1000, np.nan)
    weigher = GroupWeigher(random_state=0).fit(data.features.raw, y_given, y_checked=y_checked, groups=data.votes.group)
    assert weigher.task_ == "regression"
    assert weigher.score(data.features.raw, 100 * y + 1000) > 0.85
    assert weigher.group_weights_.set_index("group")["label_quality"].idxmin() == "2"
    assert not hasattr(weigher, "predict_proba")
    assert not hasattr(weigher, "classes_")


def test_weigher_of_classes_has_probabilities():
    x, y_given, y_checked, group, truth = mixed()
    weigher = GroupWeigher(**QUICK).fit(x, y_given, y_checked=y_checked, groups=group)
    assert weigher.task_ == "classification"
    assert weigher.score(x, truth) > 0.85
    assert weigher.predict_proba(x).shape == (500, 3)


def test_rows_may_lack_a_given_label():
    """Rows from outside enter with their checked label alone."""
    x, y_given, y_checked, group, truth = mixed()
    y_given = y_given.astype(object)
    y_given[:80] = None
    fit = LabelCleaner(**QUICK).fit(x, y_given, y_checked=y_checked, groups=group)
    assert np.isnan(fit.label_quality_[:80]).all()
    assert fit.noise_rate_ is None
    assert len(fit.find_label_issues()) == 420
    assert fit.score(x, truth) > 0.8


def test_cleaner_works_in_a_pipeline_and_in_cross_validation():
    """y_checked and groups are cut like y."""
    x, y_given, y_checked, group, _ = mixed()
    pipe = make_pipeline(StandardScaler(), LabelCleaner(**QUICK))
    pipe.fit(x, y_given, labelcleaner__y_checked=y_checked, labelcleaner__groups=group)
    assert pipe.predict(x).shape == (500,)
    params = {"y_checked": y_checked, "groups": group}
    folds = KFold(3, shuffle=True, random_state=0)
    values = cross_val_score(LabelCleaner(**QUICK), x, y_given, cv=folds, params=params)
    assert values.shape == (3,)
    assert np.isfinite(values).all()
    assert clone(pipe[-1]).get_params()["cv"] == 2


def test_metadata_routing_asks_for_checked_labels():
    with config_context(enable_metadata_routing=True):
        request = LabelCleaner().set_fit_request(y_checked=True, groups=True).get_metadata_routing()
    assert request.fit.requests["y_checked"] is True


def test_estimators_of_the_user_learn():
    x, y_given, y_checked, group, truth = mixed()
    options = {"learners": [LogisticRegression(), LinearLearner()], "cv": 2, "random_state": 0}
    fit = LabelCleaner(**options).fit(x, y_given, y_checked=y_checked, groups=group)
    assert "LogisticRegression" in set(fit.strategy_results_["learner"])
    assert fit.score(x, truth) > 0.85


def test_pred_probs_take_part_and_predict_no_new_rows():
    """Out-of-fold predictions of a strong model elsewhere say which labels are wrong."""
    x, y_given, y_checked, _, truth = mixed()
    oracle = np.full((500, 3), 0.02) + 0.94 * (truth[:, None] == NAMES)
    fit = LabelCleaner(**QUICK).fit(x, y_given, y_checked=y_checked, pred_probs=oracle)
    assert fit.strategy_results_["learner"][0] == "pred_probs"
    assert (fit.suggested_labels_ == truth).mean() > 0.99
    assert np.isfinite(fit.predict_proba(x)).all()


def test_strategies_by_name():
    x, y_given, y_checked, group, _ = mixed(n=200)
    fit = LabelCleaner(strategies=["all_data"], **QUICK).fit(x, y_given, y_checked=y_checked, groups=group)
    assert set(fit.strategy_results_["strategy"]) == {"all_data"}
    with pytest.raises(ValueError, match=r"Got 'al_data' instead. Did you mean 'all_data'\?"):
        LabelCleaner(strategies=["al_data"], **QUICK).fit(x, y_given, y_checked=y_checked, groups=group)
    with pytest.raises(ValueError, match="The learner must be one of"):
        LabelCleaner(learners=["cnn3"]).fit(x, y_given, y_checked=y_checked)


def test_fit_sees_progress_and_stops():
    x, y_given, y_checked, group, _ = mixed(n=200)
    names = []
    options = QUICK | {"progress_callback": lambda name, done, total: names.append(name), "should_stop": lambda: True}
    LabelCleaner(**options).fit(x, y_given, y_checked=y_checked, groups=group)
    assert names == ["nothing", "trusted_only", "all_data"]


def test_fitted_estimator_pickles_without_the_training_data():
    x, y_given, y_checked, group, _ = mixed(n=2000)
    fit = LabelCleaner(**QUICK).fit(x, y_given, y_checked=y_checked, groups=group)
    blob = pickle.dumps(fit)
    assert len(blob) < 4 * x.nbytes
    np.testing.assert_array_equal(pickle.loads(blob).predict(x), fit.predict(x))


def test_saved_model_predicts_the_same(tmp_path, cleaner):
    """The file holds features and learners: no row of the training data, and no pickle."""
    x, _ = blobs(50, seed=5)
    cleaner.save(tmp_path / "model")
    np.testing.assert_array_equal(fsla.data.load_model(tmp_path / "model").predict(x), cleaner.predict(x))


def test_saved_model_with_constant_column_loads(tmp_path):
    """A constant column has an infinite scale, which is no damage: dates of one year have such a column."""
    x, y_given, y_checked, group, _ = mixed()
    frame = pd.DataFrame(x, columns=list("abcdef")).assign(year=2026.0)
    fit = LabelCleaner(**QUICK).fit(frame, y_given, y_checked=y_checked, groups=group)
    fit.save(tmp_path / "model")
    np.testing.assert_array_equal(fsla.data.load_model(tmp_path / "model").predict(frame), fit.predict(frame))


def test_missing_cells_and_frames_are_taken():
    x, y_given, y_checked, group, truth = mixed()
    frame = pd.DataFrame(x, columns=list("abcdef"))
    frame.iloc[::9, 2] = np.nan
    fit = LabelCleaner(**QUICK).fit(frame, y_given, y_checked=y_checked, groups=group)
    assert fit.score(frame, truth) > 0.85
    assert fit.feature_names_in_.tolist() == list("abcdef")
    with pytest.raises(ValueError, match="feature names should match"):
        fit.predict(frame[list("fedcba")])


def test_texts_are_taken():
    """A list of texts is enough; the model takes new texts."""
    rng = np.random.default_rng(0)
    words = np.array([["apple", "pear", "plum", "fruit"], ["bolt", "nut", "screw", "tool"]])
    y = rng.integers(2, size=200)
    texts = [" ".join(rng.choice(words[c], 6)) + f" number {i % 7}" for i, c in enumerate(y)]
    wrong = rng.random(200) < 0.3
    checked = np.where(np.arange(200) < 40, y, np.nan)
    fit = LabelCleaner(**QUICK).fit(texts, np.where(wrong, 1 - y, y), y_checked=checked)
    assert fit.predict(["a plum and an apple, fruit", "a screw, a bolt, a tool"]).tolist() == [0, 1]


CASES = {
    "length": ({"y_checked": [None, "ant"]}, "y_checked has 2 values, but X has 200 rows"),
    "groups": ({"groups": ["a"] * 3}, "groups has 3 values, but X has 200 rows"),
    "few": ({"y_checked": ["ant"] * 5 + [None] * 195}, "Only 5 rows have a checked label. Check at least 10 rows"),
    "empty text": ({"y_checked": ["ant"] * 20 + [""] * 180}, "y_checked has the label '', which y never has"),
    "text and numbers": ({"y_checked": [1] * 20 + [None] * 180}, "Labels are text and numbers at once"),
    "one value": ({"y_checked": "ant"}, "y_checked must have one value for each of the 200 rows. Got 'ant'"),
    "pred_probs": ({"pred_probs": np.ones((200, 2))}, r"pred_probs has the shape \(200, 2\), expected \(200, 3\)"),
    "one class": ({"y": ["ant"] * 200, "y_checked": ["ant"] * 200}, "at least two classes. Got 1 class: 'ant'"),
    "no label": ({"y": [None] * 200, "y_checked": [None] * 200}, "No row has a label"),
    "no y": ({"y": None}, "requires y to be passed, but the target y is None"),
    "fractions": ({"y": np.linspace(0, 1, 200), "y_checked": None}, "Unknown label type: continuous"),
    "infinite": ({"y": np.full(200, np.inf), "y_checked": None}, "Input y contains infinity"),
    "complex": ({"y": np.full(200, 1j), "y_checked": None}, "Complex data not supported"),
    "groups of annotators": ({"y": np.full((200, 2), "ant")}, "Pass groups of the shape of y"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_gets_one_clear_message(case):
    """What failed, with the value, then how to mend it."""
    changes, message = CASES[case]
    x, y_given, y_checked, group, _ = mixed(n=200)
    arguments = {"y": y_given, "y_checked": y_checked, "groups": group} | changes
    with pytest.raises(ValueError, match=message):
        LabelCleaner(**QUICK).fit(x, **arguments)


def test_minus_one_is_a_label_and_no_mark_of_missing():
    """In scikit-learn -1 marks unlabelled rows, but y_checked says so by NaN: a silent guess could be wrong."""
    data, y = sources(n=200)
    with pytest.raises(ValueError, match="y_checked has the label -1, which y never has"):
        LabelCleaner(**QUICK).fit(data.features.raw, data.votes.label, y_checked=np.where(np.arange(200) < 60, y, -1))
    shifted = data.votes.label - 1  # -1 is a class
    fit = LabelCleaner(**QUICK).fit(
        data.features.raw, shifted, y_checked=np.where(np.arange(200) < 60, y - 1.0, np.nan)
    )
    assert fit.classes_.tolist() == [-1, 0, 1]


def test_without_checked_labels_the_cleaner_warns_and_trains():
    x, y_given, *_, truth = mixed(rates=(0.0, 0.2))
    with pytest.warns(UserWarning, match="y_checked has no checked label"):
        fit = LabelCleaner(**QUICK).fit(x, y_given)
    assert fit.score(x, truth) > 0.85
    assert fit.noise_rate_ is None
    assert fit.comparison_ is None
    wrong = y_given != truth
    assert roc_auc_score(wrong, 1 - fit.label_quality_) > 0.9


@pytest.mark.parametrize("n", [40, 200])
def test_hard_cases_fit(n):
    """A class without checked rows; a class that a fold lacks; a group with every row checked; one group."""
    data, y = sources(n=n, checked=20)
    x, y_given = data.features.raw, data.votes.label
    no_class = np.where((np.arange(n) < 20) & (y != 2), y, np.nan)
    assert LabelCleaner(**QUICK).fit(x, y_given, y_checked=no_class).classes_.tolist() == [0, 1, 2]
    rare = (np.arange(n) == 3).astype(int)
    checked = np.where(np.arange(n) < 20, rare, np.nan)
    assert LabelCleaner(learners=["linear"], random_state=0).fit(x, rare, y_checked=checked).predict(x).shape == (n,)
    group = np.where(np.arange(n) < 20, "checked", "other")
    fit = LabelCleaner(**QUICK).fit(x, y_given, y_checked=np.where(np.arange(n) < 20, y, np.nan), groups=group)
    assert np.isfinite(fit.group_weights_["weight"]).all()
    one = LabelCleaner(**QUICK).fit(x, y_given, y_checked=np.where(np.arange(n) < 20, y, np.nan), groups=["all"] * n)
    assert len(one.group_weights_) == 0


def test_missing_groups_are_a_group():
    """Nothing is dropped silently."""
    x, y_given, y_checked, group, _ = mixed(n=200)
    group = group.astype(object)
    group[::10] = None
    fit = LabelCleaner(**QUICK).fit(x, y_given, y_checked=y_checked, groups=group)
    assert "missing" in set(fit.group_weights_["group"])


def test_import_of_the_package_leaves_scikit_learn_out():
    code = "import sys, fsla; assert 'sklearn' not in sys.modules; fsla.LabelCleaner; assert 'sklearn' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert fsla.LabelCleaner is LabelCleaner
    assert fsla.GroupWeigher is GroupWeigher
