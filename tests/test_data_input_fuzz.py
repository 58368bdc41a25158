"""Whatever bytes or cells come in, the answer is a table or one message, never another exception."""

import io
import random

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsla.data._features import FeatureBuilder
from fsla.data._loading import load_data
from fsla.data._readers import read_table

NAMES = ("x.csv", "x.tsv", "x.csv.gz", "x.jsonl", "x.jsonl.gz", "x.xlsx", "x.parquet", "x.npz", "x.npy")
FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
CELL = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12),
    st.sampled_from(
        ["", "NA", "nan", "1", "2", "007", "1,5", "1.234,5", "$3", "50%", "yes", "no", "1e400", "-0", "inf"]
    ),
    st.sampled_from(["2024-01-31", "31/12/2024", "99/99/9999", "a b c d", "好看的电影", "true", "0x1", "(5)", "١٢"]),
    st.integers().map(str),
    st.floats().map(repr),
)


def valid_file(path):
    """Write a small table in the format of the name."""
    frame = pd.DataFrame({"a": [1.5, 2.5, 3.5], "b": ["x", "y", "z"], "label": [0, 1, 1]})
    suffix = path.name.partition(".")[2].removesuffix(".gz")
    if suffix == "parquet":
        frame.to_parquet(path)
    elif suffix == "xlsx":
        frame.to_excel(path)
    elif suffix == "npz":
        np.savez(path, X=np.ones((3, 2)), y=np.arange(3))
    elif suffix == "npy":
        np.save(path, np.ones((3, 3)))
    elif suffix == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, index=False)
    return path.read_bytes()


def check_read(path):
    message = ""
    try:
        table = read_table(path)
    except ValueError as error:
        message = str(error)
    assert "\n" not in message
    if message:
        return
    assert all(isinstance(cell, str) for cell in table.frame.to_numpy().ravel())


@pytest.mark.parametrize("name", NAMES)
def test_read_table_of_damaged_files_gives_cells_or_one_message(tmp_path, name):
    """Downloads end early and disks flip bits."""
    path = tmp_path / name
    content = valid_file(path)
    generator = random.Random(0)
    for _ in range(40):
        damaged = bytearray(content)
        for _ in range(generator.randint(1, 5)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        if generator.random() < 0.3:
            del damaged[generator.randrange(len(damaged)) :]
        path.write_bytes(damaged)
        check_read(path)


@FUZZ
@given(name=st.sampled_from(NAMES), content=st.binary(max_size=200))
def test_read_table_of_any_bytes_gives_cells_or_one_message(tmp_path, name, content):
    """A file may be anything, whatever its name says."""
    path = tmp_path / name
    path.write_bytes(content)
    check_read(path)


@FUZZ
@given(
    columns=st.lists(st.lists(CELL, min_size=12, max_size=12), min_size=1, max_size=4),
    labels=st.lists(st.one_of(st.sampled_from(["a", "b", " A", ""]), CELL), min_size=12, max_size=12),
    more=st.sampled_from(["", "group", "checked", "trusted_column", "label_columns"]),
)
def test_load_data_of_any_cells_gives_finite_features_or_one_message(columns, labels, more):
    """Types of columns are guessed from cells that nobody foresaw."""
    names = [f"c{i}" for i in range(len(columns))]
    frame = pd.DataFrame({**dict(zip(names, columns, strict=True)), "label": labels}, dtype=object)
    arguments = {} if not more else {more: ["label", "c0"] if more == "label_columns" else "c0"}
    message = ""
    try:
        loaded = load_data(frame, **arguments)
    except ValueError as error:
        message = str(error)
    assert "\n" not in message
    if message:
        return
    features = loaded.data.features
    assert np.isfinite(features.dense).all()
    assert len(features) == 12
    assert loaded.table.equals(frame)
    assert sorted(loaded.columns["column"]) == sorted(frame.columns)
    restored = FeatureBuilder.from_state(*loaded.builder.to_state())
    assert np.array_equal(restored.transform(frame).dense, features.dense)
    assert all(isinstance(loaded.display(i)["cells"], dict) for i in range(12))
    buffer = io.StringIO()
    loaded.columns.to_csv(buffer)
