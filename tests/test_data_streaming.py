"""Group weights of data larger than memory: one pass gives what all rows in memory give."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from fsla import _extras
from fsla.data import _streaming as streaming
from fsla.data import weigh_groups
from fsla.data._group_weights import GroupStatistics, encode_targets, fit_group_weights

NUM_FEATURES = 5
NAMES = [f"x{number}" for number in range(NUM_FEATURES)]
BAD = ("s1", "s4")


def make_rows(task, rows=1500, trusted=120, seed=0):
    """Return rows of six sources, of which two are random, and trusted rows. Features have large means."""
    rng = np.random.default_rng(seed)
    total = rows + trusted
    values = rng.normal(size=(total, NUM_FEATURES))
    score = values @ rng.normal(size=NUM_FEATURES) + 0.3 * rng.normal(size=total)
    source = np.array([f"s{number}" for number in range(6)])[rng.integers(0, 6, total)]
    source[:trusted] = "trusted"
    score = np.where(np.isin(source, BAD), rng.normal(size=total), score)
    frame = pd.DataFrame(values * [1, 2, 30, 0.1, 5] + [0, 1e3, -50, 4, 1e4], columns=NAMES)
    frame["y"] = (
        40 + 7 * score if task == "regression" else np.array(["no", "so-so", "yes"])[np.digitize(score, [-1, 1])]
    )
    frame["source"] = source
    return frame[trusted:].reset_index(drop=True), frame[:trusted].drop(columns="source").reset_index(drop=True)


def weigh_in_memory(rows, trusted, task):
    """Return the closed form on features that are standardised over all rows at once."""
    mean, spread = rows[NAMES].mean().to_numpy(), rows[NAMES].std(ddof=0).to_numpy()

    def standardise(frame):
        values = (frame[NAMES].to_numpy() - mean) / spread / np.sqrt(NUM_FEATURES)
        return np.column_stack([values, np.full(len(frame), 0.5)])

    if task == "classification":
        classes = sorted(set(rows.y))
        target = [
            encode_targets(np.array([classes.index(y) for y in part.y]), len(classes)) for part in (rows, trusted)
        ]
    else:
        centre, scale = trusted.y.mean(), trusted.y.std(ddof=0)
        target = [encode_targets((part.y.to_numpy() - centre) / scale, 0) for part in (rows, trusted)]
    group = np.searchsorted(np.unique(rows.source), rows.source)
    statistics = GroupStatistics.from_rows(standardise(rows), target[0], group, group.max() + 1)
    return fit_group_weights(statistics, standardise(trusted), target[1]).weight


def write_parquet(rows, folder):
    """Write two files a source, as a partitioned folder."""
    half = len(rows) // 2
    for number, part in enumerate((rows[:half], rows[half:])):
        table = pa.Table.from_pandas(part, preserve_index=False)
        parquet.write_to_dataset(table, folder, partition_cols=["source"], basename_template=f"{number}-{{i}}.parquet")


@pytest.fixture(params=["classification", "regression"])
def problem(request):
    """Return rows, trusted rows and what the closed form gives in memory."""
    rows, trusted = make_rows(request.param)
    return rows, trusted, weigh_in_memory(rows, trusted, request.param)


def weigh(source, trusted, **options):
    return weigh_groups(source, label="y", group="source", trusted=trusted, draws=4, **options)


def test_weigh_groups_parquet_folder_equals_closed_form_in_memory(problem, tmp_path, monkeypatch):
    """The pass standardises afterwards, from sums: nothing may be lost by it, even where means are large."""
    monkeypatch.setattr(streaming, "BLOCK_ROWS", 200)
    rows, trusted, expected = problem
    write_parquet(rows, tmp_path / "rows")
    result = weigh(tmp_path / "rows", trusted)
    np.testing.assert_allclose(result.weight, expected, rtol=0, atol=1e-10)
    assert list(result.group) == sorted(set(rows.source))
    assert list(result.n_samples) == list(rows.groupby("source").size())


def test_weigh_groups_one_parquet_file_equals_frame(problem, tmp_path):
    """A dictionary-encoded column and a plain one are the same column."""
    rows, trusted, expected = problem
    path = tmp_path / "rows.parquet"
    rows.astype({"source": "category"}).to_parquet(path)
    trusted.to_parquet(tmp_path / "trusted.parquet")
    result = weigh(str(path), tmp_path / "trusted.parquet")
    np.testing.assert_allclose(result.weight, expected, rtol=0, atol=1e-10)
    pd.testing.assert_frame_equal(result, weigh(rows, trusted), atol=1e-9)


def test_weigh_groups_dask_frame_equals_closed_form_in_memory(problem, monkeypatch):
    """Partitions see other groups and labels in another order: sums must meet by name."""
    dask = pytest.importorskip("dask")
    frames = pytest.importorskip("dask.dataframe")
    monkeypatch.setattr(streaming, "SPLIT_EVERY", 3)
    rows, trusted, expected = problem
    frame = frames.from_pandas(rows.sort_values("source", kind="stable").reset_index(drop=True), npartitions=11)
    with dask.config.set(scheduler="synchronous"):
        result = weigh(frame, trusted)
    np.testing.assert_allclose(result.weight, expected, rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("default")  # What a cluster warns of on its way up and down is its own business.
def test_weigh_groups_dask_cluster_equals_closed_form_in_memory():
    """A cluster serialises the sums on their way up the tree."""
    frames = pytest.importorskip("dask.dataframe")
    distributed = pytest.importorskip("distributed")
    rows, trusted = make_rows("classification")
    expected = weigh_in_memory(rows, trusted, "classification")
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None, protocol="tcp"
        ) as cluster,
        distributed.Client(cluster),
    ):
        result = weigh(frames.from_pandas(rows, npartitions=5), trusted)
    np.testing.assert_allclose(result.weight, expected, rtol=0, atol=1e-10)


def test_weigh_groups_random_sources_weigh_less(problem):
    """The point of it: labels that trusted rows contradict count less, with intervals that say so."""
    rows, trusted, _ = problem
    result = weigh_groups(rows, label="y", group="source", trusted=trusted).set_index("group")
    good = [name for name in result.index if name not in BAD]
    assert result.loc[[*BAD], "weight"].max() < result.loc[good, "weight"].min()
    assert result.loc[[*BAD], "weight_high"].max() < result.loc[good, "weight"].max()
    assert (result.weight_low <= result.weight).all()
    assert (result.weight <= result.weight_high).all()


def test_weigh_groups_incomplete_rows_are_counted(tmp_path):
    """Nothing is dropped silently: rows without label or group, and empty cells, are in `attrs`."""
    rows, trusted = make_rows("classification")
    rows.loc[[3, 4], "y"] = None
    rows.loc[[4, 5], "source"] = None
    rows.loc[:9, "x2"] = np.nan
    rows.to_parquet(tmp_path / "rows.parquet")
    for source in (rows, tmp_path / "rows.parquet"):
        result = weigh(source, trusted)
        assert result.attrs == {"skipped_rows": 3, "missing_cells": {"x2": 7}}
        assert result.n_samples.sum() == len(rows) - 3
        assert np.isfinite(result.weight).all()


def test_weigh_groups_constant_feature_changes_nothing():
    """A column that is the same everywhere has no spread to divide by."""
    rows, trusted = make_rows("regression")
    expected = weigh(rows, trusted)
    with_constant = weigh(rows.assign(same=3.0), trusted.assign(same=3.0))
    np.testing.assert_allclose(with_constant.weight, expected.weight, atol=1e-10)


def test_weigh_groups_classes_of_either_side_count():
    """A class that trusted rows lack is a class, and so is one that the data lacks."""
    rows, trusted = make_rows("classification")
    rows = rows[rows.y != "no"]
    trusted = trusted[trusted.y != "yes"]
    assert len(weigh(rows, trusted)) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "z"}, "trusted= has no column 'z'"),
        ({"group": "z"}, "The data has no column 'z'. It has x0, x1"),
        ({"group": "y"}, "label= and group= are both 'y'"),
        ({"features": ["x0", "words"]}, "'words' of trusted= is not numeric"),
        ({"features": ["x0", "y"]}, "features= contains the label or group column 'y'"),
        ({"task": "ranking"}, "task must be 'auto', 'classification' or 'regression'. Got 'ranking'"),
        ({"task": "regression"}, "The label 'y' of trusted= is not numeric"),
    ],
)
def test_weigh_groups_wrong_column_raises(options, message):
    """The message names the argument and the column."""
    rows, trusted = make_rows("classification")
    rows, trusted = rows.assign(words="a"), trusted.assign(words="a")
    with pytest.raises(ValueError, match=message):
        weigh_groups(rows, **{"label": "y", "group": "source", "trusted": trusted, **options})


def test_weigh_groups_unusable_data_raises(tmp_path, monkeypatch):
    """Too few trusted rows, no common label, no file, too many groups: each has its own sentence."""
    rows, trusted = make_rows("classification")
    with pytest.raises(ValueError, match="Only 9 trusted rows have a label"):
        weigh(rows, trusted[:9])
    with pytest.raises(ValueError, match="No label of the data is among the trusted ones"):
        weigh(rows, trusted.assign(y=trusted.y.str.upper()))
    with pytest.raises(ValueError, match="No row of the data has both"):
        weigh(rows.assign(y=None), trusted)
    with pytest.raises(ValueError, match="No numeric column is in both"):
        weigh(rows, trusted[["y"]])
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        weigh(tmp_path / "missing", trusted)
    monkeypatch.setattr(streaming, "MAX_ENTRIES", 100)
    with pytest.raises(ValueError, match="6 groups with 6 columns need"):
        weigh(rows, trusted)


def test_weigh_groups_whole_numbers_few_values_are_classes():
    """Codes 0, 1, 2 are classes; prices are not."""
    rows, trusted = make_rows("classification")
    codes = {"no": 0, "so-so": 1, "yes": 2}
    as_numbers = weigh(rows.assign(y=rows.y.map(codes)), trusted.assign(y=trusted.y.map(codes)))
    np.testing.assert_allclose(as_numbers.weight, weigh(rows, trusted).weight, atol=1e-12)


@pytest.mark.parametrize("extra", ["parquet", "dask"])
def test_weigh_groups_without_extra_says_how_to_install(extra, tmp_path, monkeypatch):
    """Both modules are extras: who lacks one must read what to type, not a traceback of an import deep inside."""
    rows, trusted = make_rows("classification")
    path = tmp_path / "rows.parquet"
    rows.to_parquet(path)
    source = path if extra == "parquet" else pytest.importorskip("dask.dataframe").from_pandas(rows, npartitions=2)
    monkeypatch.setitem(_extras.EXTRAS, extra, ("missing_module",))
    with pytest.raises(ImportError, match=rf"missing_module is not installed.*pip install 'fsla\[{extra}\]'"):
        weigh(source, trusted)
