"""What each column is taken for, and the features that are made of it."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsla.data._columns import describe_column, parse_number
from fsla.data._features import CONSTANT, FeatureBuilder
from fsla.data._text import TextVectors

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "while",
    "dogs",
    "bark",
    "at",
    "night",
    "and",
    "birds",
    "sing",
    "in",
    "green",
    "trees",
    "near",
    "old",
    "blue",
    "houses",
]


def sentences(rows, seed=0, words=8):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, words)) for _ in range(rows)]


@pytest.mark.parametrize(
    ("text", "decimal", "value"),
    [
        ("1,234.5", ".", 1234.5),
        ("1.234,5", ",", 1234.5),
        ("1 234", ".", 1234),
        ("1\u202f234,5", ",", 1234.5),
        ("1'234.50", ".", 1234.5),
        ("$1,000", ".", 1000),
        ("-€5", ".", -5),
        ("€ -5", ".", -5),
        ("12 EUR", ".", 12),
        ("12.5%", ".", 12.5),
        ("(3.5)", ".", -3.5),
        ("\u22123", ".", -3),
        ("1e-3", ".", 0.001),
        (".5", ".", 0.5),
    ],
)
def test_parse_number_reads_separators_currency_and_percent(text, decimal, value):
    """People write numbers for people."""
    assert parse_number(text, decimal) == value


@pytest.mark.parametrize("text", ["", "abc", "1,23", "1.2.3", "0x10", "--5", "$", "5 apples", "1,2345", "1_000", "e5"])
def test_parse_number_refuses_what_is_none(text):
    """A wrong number is worse than a missing one."""
    assert math.isnan(parse_number(text))


@settings(max_examples=200, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False, width=64))
def test_parse_number_reads_what_python_writes(value):
    """The rules for separators must not touch plain numbers."""
    assert parse_number(repr(value)) == value


OOPS = "1 cells are no numbers, such as 'oops': taken as missing"


@pytest.mark.parametrize(
    ("name", "cells", "kind", "note"),
    [
        ("price", ["$1,200.50", "$3.10", ""] * 9, "number", "'$1,200.50' is 1200.5; 9 missing"),
        ("price", ["1.200,50", "3,10"] * 9, "number", "decimal comma"),
        ("share", ["10%", "12.5%", "3%"] * 9, "number", "percent"),
        ("n", [str(i * 7 % 31) for i in range(30)] + ["oops"], "number", OOPS),
        ("n", ["1", "2", "oops"] * 9, "category", "3 levels"),
        ("grade", ["1", "2", "3", "4"] * 9, "number", "4 values, also as a category"),
        ("zip", ["01000", "20000"] * 9, "category", "2 levels"),
        ("ok", ["yes", "No", "YES", ""] * 9, "boolean", "9 missing"),
        ("day", ["2024-01-31", "2023-12-01"] * 9, "date", "written as year-month-day"),
        ("day", ["31.01.2024", "1.2.2024"] * 9, "date", "written as day.month.year"),
        ("day", ["01/02/2024", "3/4/2024"] * 9, "date", "written as month/day/year; day/month/year would fit too"),
        ("day", ["13/02/2024", "03/04/2024"] * 9, "date", "written as day/month/year"),
        ("day", ["31 Jan 2024", "1 Feb 2024"] * 9, "date", "written as day month year"),
        ("at", ["2024-01-31T10:00:00Z", "2023-12-01T11:30:00Z"] * 9, "date", "written as year-month-day"),
        ("review", sentences(30), "text", "8 words on average"),
        ("city", ["Rome", "Oslo", "Paris"] * 9, "category", "3 levels"),
        ("id", [str(i) for i in range(30)], "id", "every row has its own number"),
        ("row", [str(i + 5) for i in range(30)], "id", "every row has its own number"),
        ("code", [f"A{i}" for i in range(30)], "id", "nearly every row has its own value"),
        ("user_id", [str(i % 15) for i in range(30)], "category", "a code, by its name; 15 levels"),
        ("age", [str(20 + 3 * i) for i in range(30)], "number", ""),
        ("same", ["x"] * 30, "constant", "every cell is 'x'"),
        ("same", ["1.0"] * 30, "constant", "every cell is '1.0'"),
        ("none", ["NA", "", "?", "null"] * 9, "empty", "every cell is missing"),
        ("题目", ["这部电影非常好看我很喜欢", "今天天气不错", "他昨天买了一本新的书"] * 2, "text", ""),
    ],
)  # fmt: skip
def test_describe_column_recognises_kind_and_says_why(name, cells, kind, note):
    """The note is what a person checks before anything is trained."""
    column = describe_column(name, cells)
    assert (column.kind, column.note) == (kind, note)


def test_describe_column_with_hundred_thousand_levels_is_an_id_or_category():
    """Levels must not become a hundred thousand features."""
    assert describe_column("c", [f"v{i}" for i in range(100_000)]).kind == "id"
    column = describe_column("c", [f"v{i // 2}" for i in range(200_000)])
    assert (column.kind, column.note) == ("category", "100000 levels, the 50 most frequent as such")
    builder = FeatureBuilder([column]).fit(pd.DataFrame({"c": [f"v{i // 2}" for i in range(2000)]}))
    assert builder.transform(pd.DataFrame({"c": ["v0", "never seen", ""]})).dense.shape == (3, 53)


def mixed_frame(rows=60, seed=0):
    random = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "amount": [f"${v:,.2f}" for v in random.lognormal(5, 2, rows)],
            "grade": random.choice(["1", "2", "3", ""], rows),
            "flag": random.choice(["yes", "no", "NA"], rows),
            "day": [f"2024-{m:02d}-{d:02d}" for m, d in random.integers(1, 13, (rows, 2))],
            "city": random.choice(["Rome", "Oslo", "Paris", ""], rows),
            "code": [f"c{i}" for i in random.integers(0, 40, rows)],
            "review": sentences(rows, seed),
        }
    )
    return frame.astype(object)


def test_builder_restored_from_json_and_arrays_is_the_same():
    """A saved model must say of new rows what it said before, bit for bit."""
    frame = mixed_frame()
    builder = FeatureBuilder()
    fitted = builder.fit_transform(frame)
    arrays, values = builder.to_state()
    restored = FeatureBuilder.from_state(arrays, json.loads(json.dumps(values)))
    for rows in (frame, mixed_frame(20, seed=1), frame.iloc[:1]):
        a, b = builder.transform(rows), restored.transform(rows)
        assert np.array_equal(a.dense, b.dense)
        assert np.array_equal(a.numeric, b.numeric, equal_nan=True)
    assert np.array_equal(builder.transform(frame).dense, fitted.dense)
    assert fitted.numeric.shape[1] == 1 + 1 + 1 + 5 + 1 + 1 + min(len(fitted.dense), 32)


RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize(
    "rows",
    [
        RANDOM.standard_normal((30, 3)),
        RANDOM.integers(0, 256, (30, 1, 6, 5)).astype(np.uint8),
        sentences(30),
    ],
    ids=["array", "images", "texts"],
)
def test_builder_of_arrays_and_texts_restores(rows):
    """Estimators hand over arrays as they are."""
    builder = FeatureBuilder()
    fitted = builder.fit_transform(rows)
    arrays, values = builder.to_state()
    restored = FeatureBuilder.from_state(arrays, json.loads(json.dumps(values)))
    again = restored.transform(rows[:7])
    assert np.array_equal(again.dense, builder.transform(rows[:7]).dense)
    assert len(fitted) == 30
    assert (fitted.images is None) == (np.ndim(rows) != 4)


def test_dense_features_have_unit_mean_square_norm_and_constant():
    """Penalties of linear learners mean the same for every data set."""
    for rows in (mixed_frame(), np.random.default_rng(0).normal(5, 100, (40, 6)), sentences(40)):
        dense = FeatureBuilder().fit_transform(rows).dense
        assert np.square(dense[:, :-1]).sum(axis=1).mean() == pytest.approx(1, abs=1e-9)
        assert (dense[:, -1] == CONSTANT).all()


def test_typed_frame_gives_the_features_of_its_text():
    """A user predicts on what pandas.read_csv returns, which has numbers where training saw text."""
    frame = pd.DataFrame({"n": ["1.5", "", "3.0", "4"], "k": ["1", "2", "3", "3"], "c": ["a", "b", "", "a"]})
    builder = FeatureBuilder().fit(frame)
    typed = pd.DataFrame({"n": [1.5, None, 3.0, 4.0], "k": [1, 2, 3, 3], "c": ["a", "b", None, "a"]})
    assert np.array_equal(builder.transform(typed).dense, builder.transform(frame).dense)
    numbers = typed[["n", "k"]]
    as_frame, as_array = (FeatureBuilder().fit_transform(rows).dense for rows in (numbers, numbers.to_numpy()))
    assert np.array_equal(as_frame, as_array)


def test_column_missing_in_all_new_rows_is_imputed():
    """A fold, or one row to predict, may have a column without any value."""
    frame = mixed_frame()
    builder = FeatureBuilder().fit(frame)
    rows = frame.iloc[:5].copy()
    rows[["amount", "grade", "flag", "day", "city"]] = ""
    features = builder.transform(rows)
    assert np.isfinite(features.dense).all()
    assert np.isnan(features.numeric[:, :9]).all()


def test_missing_cells_get_an_indicator():
    """That a doctor ordered no test says something about the patient."""
    frame = pd.DataFrame({"n": ["1", "2", "3.5", ""] * 5})
    dense = FeatureBuilder().fit_transform(frame).dense
    assert dense.shape[1] == 3
    assert len(np.unique(dense[:, 1])) == 2


def test_builder_without_columns_or_with_lacking_ones_raises():
    """New rows without a column would otherwise be imputed without a word."""
    builder = FeatureBuilder().fit(mixed_frame())
    with pytest.raises(ValueError, match="lack the columns city"):
        builder.transform(mixed_frame().drop(columns="city"))
    with pytest.raises(ValueError, match="expected 3 columns"):
        FeatureBuilder().fit(np.ones((4, 3)) * np.arange(4)[:, None]).transform(np.ones((2, 2)))
    with pytest.raises(ValueError, match="No column is left"):
        FeatureBuilder().fit(pd.DataFrame({"a": ["x", "x"]}))


@pytest.mark.parametrize("value", [1e308, -1e308, np.inf, np.nan])
def test_extreme_numbers_do_not_overflow(value):
    """One broken cell must not turn all features into NaN."""
    x = np.arange(20.0).reshape(10, 2)
    x[3, 1] = value
    features = FeatureBuilder().fit_transform(x)
    assert np.isfinite(features.dense).all()
    assert np.isnan(features.numeric[3, 1])


def test_wide_tables_are_reduced():
    """The cost of closed forms grows with the cube of the columns."""
    x = np.random.default_rng(0).standard_normal((50, 2000))
    builder = FeatureBuilder()
    features = builder.fit_transform(x)
    assert features.dense.shape == (50, 51)
    assert features.numeric.shape == (50, 2000)
    restored = FeatureBuilder.from_state(*builder.to_state())
    assert np.array_equal(restored.transform(x).dense, features.dense)


def test_text_without_spaces_uses_characters():
    """Word terms would take a whole Chinese sentence for one word."""
    texts = ["这部电影非常好看我很喜欢", "今天天气不错我们去公园", "他昨天买了一本新的书", "这本书非常好看我很喜欢"]
    vectors = TextVectors().fit(texts)
    assert vectors.analyzer == "char"
    similar = vectors.transform(texts)
    assert similar[0] @ similar[3] > similar[0] @ similar[1]


def test_text_of_no_terms_is_zero():
    """A new text may share no word with the training texts."""
    vectors = TextVectors().fit(sentences(20))
    assert not vectors.transform(["zzz qqq", ""]).any()
    assert TextVectors().fit(["", "", "!"]).transform(["a word"]).shape == (1, 0)


@pytest.mark.parametrize("part", ["form", "columns", "levels", "texts"])
def test_state_outside_its_schema_is_refused(part):
    """A file may come from another version, or be damaged."""
    arrays, values = FeatureBuilder().fit(mixed_frame()).to_state()
    with pytest.raises(ValueError, match="schema"):
        FeatureBuilder.from_state(arrays, {**values, part: 3})


@pytest.mark.parametrize("name", ["numbers.mean", "categories.rate", "text0.idf", "scales"])
def test_state_with_lacking_or_wrong_arrays_is_refused(name):
    """Arrays and JSON are checked against each other before they are used."""
    arrays, values = FeatureBuilder().fit(mixed_frame()).to_state()
    with pytest.raises(ValueError, match=r"do not fit|lack"):
        FeatureBuilder.from_state({**arrays, name: arrays[name][:-1]}, values)
    with pytest.raises(ValueError, match=r"do not fit|lack"):
        FeatureBuilder.from_state({k: v for k, v in arrays.items() if k != name}, values)
