"""Sets from files: real weak labels, real annotators, real hospitals."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fsla.data._dataset import Features, Votes
from fsla_benchmarks.data.problem import Array, Problem, add_constant, make_problem, standardise
from fsla_reproduction.folder import RunError

TEXT_COLUMNS = 128
FILES = {
    "youtube": "wrench-youtube.csv.gz",
    "trec": "wrench-trec.csv.gz",
    "agnews": "noisy-ag-news.csv.gz",
    "hausa": "hausa-news.csv",
    "heart": "heart-hospitals.csv",
    "polite": "politeness-wikipedia.csv.gz",
}
TARGET_HOSPITAL = "va"
POLITE_TEST_ROWS = 1000
POLITE_POOL_ROWS = 1800
POLITE_SCORES = 2
"""Scores of a request that enter, of the five there are: with all five the mean needs no cleaning."""


def find_file(name: str, folder: Path | None) -> Path:
    """Return the file of a set, in the folder or its subfolder `real`.

    Raises:
        RunError: No folder was named, or the file is not there.
    """
    if folder is None:
        raise RunError(f"The set {name} is read from a file. Name the folder with --data-dir or FSLA_DATA.")
    for path in _places(name, folder):
        if path.is_file():
            return path
    raise RunError(f"The file {FILES[name]} is neither in {folder} nor in {folder / 'real'}. Put it there.")


def has_file(name: str, folder: Path | None) -> bool:
    """Return whether the file of a set is there."""
    return folder is not None and any(path.is_file() for path in _places(name, folder))


def _places(name: str, folder: Path) -> tuple[Path, Path]:
    return folder / "real" / FILES[name], folder / FILES[name]


def read_table(path: Path) -> Any:
    """Return a file as a table of text."""
    import pandas as pd

    return pd.read_csv(path, dtype=str, keep_default_na=False)


def text_features(pool: list[str], test: list[str]) -> tuple[Features, Features]:
    """Return TF-IDF of words and pairs of words, reduced by SVD; fitted on the pool."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import normalize

    words = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True, strip_accents="unicode")
    counts = words.fit_transform(pool)
    reduce = TruncatedSVD(min(TEXT_COLUMNS, counts.shape[1] - 1), random_state=0, n_iter=4)
    dense = normalize(reduce.fit_transform(counts))
    return Features(add_constant(dense)), Features(add_constant(normalize(reduce.transform(words.transform(test)))))


class LabelledText(NamedTuple):
    """A set of texts with everything that does not depend on the seed."""

    features: Features
    test: Features
    votes: Votes
    gold: Array
    test_labels: Array
    num_groups: int
    num_classes: int


@cache
def read_text(name: str, folder: Path | None) -> LabelledText:
    """Return a set of texts. Rows whose text is in the test set or occurs twice are left out."""
    table = read_table(find_file(name, folder))
    test = table[table.split == "test"]
    pool = table[table.split != "test"].drop_duplicates("text")
    pool = pool[~pool.text.isin(set(test.text))]
    classes = np.unique(table.label.to_numpy(dtype=str))
    if name == "agnews":
        pool, test = pool.sample(4000, random_state=0), test.sample(2500, random_state=0)
    if "given" in table:
        pool = pool[pool.given.isin(classes)]
        row, group = np.arange(len(pool)), np.zeros(len(pool), dtype=np.int64)
        label = pool.given.to_numpy(dtype=str)
        num_groups = 1
    else:
        rules = [column for column in table if column.startswith("rule_")]
        cells = pool[rules].to_numpy(dtype=str)
        row, group = np.nonzero(cells != "")
        label = cells[row, group]
        num_groups = len(rules)
    features, test_features = text_features(list(pool.text), list(test.text))
    return LabelledText(
        features,
        test_features,
        Votes(row, group, np.searchsorted(classes, label)),
        np.searchsorted(classes, pool.label.to_numpy(dtype=str)),
        np.searchsorted(classes, test.label.to_numpy(dtype=str)),
        num_groups,
        len(classes),
    )


def draw_text(name: str, folder: Path | None, checked: int, seed: int) -> Problem:
    """Return a set of texts with checked rows drawn at random from the pool; they keep their votes."""
    text = read_text(name, folder)
    rows = np.random.default_rng(1000 + seed).permutation(len(text.gold))[:checked]
    right = text.votes.label == text.gold[text.votes.row]
    counts = np.bincount(text.votes.group, minlength=text.num_groups)
    hits = np.bincount(text.votes.group, right, minlength=text.num_groups)
    quality = np.where(counts > 0, hits / np.maximum(counts, 1), np.nan)
    return make_problem(
        name,
        "classification",
        text.features,
        text.test,
        text.votes,
        text.gold,
        rows,
        text.test_labels,
        text.num_groups,
        num_classes=text.num_classes,
        group_quality=quality if text.num_groups > 1 else None,
    )


@cache
def polite_features(folder: Path | None, seed: int) -> tuple[Any, Any, Features, Features]:
    """Return scores, requests of the pool and of the test set as one, and both their features."""
    table = read_table(find_file("polite", folder))
    requests = table.drop_duplicates("request").reset_index(drop=True)
    order = np.random.default_rng(1000 + seed).permutation(len(requests))
    test, pool = order[:POLITE_TEST_ROWS], order[POLITE_TEST_ROWS : POLITE_TEST_ROWS + POLITE_POOL_ROWS]
    texts = requests.text.to_numpy()
    features, test_features = text_features(list(texts[pool]), list(texts[test]))
    return table, requests.iloc[np.concatenate([pool, test])], features, test_features


def draw_polite(name: str, folder: Path | None, checked: int, seed: int) -> Problem:
    """Return requests with two annotators' scores each; the target is the published consensus."""
    table, requests, features, test = polite_features(folder, seed)
    pool = len(features)
    consensus = requests.consensus.to_numpy(dtype=np.float64)
    consensus = consensus / consensus[:pool].std()
    position = {request: number for number, request in enumerate(requests.request[:pool])}
    scores = table[table.request.isin(position)].sample(frac=1, random_state=seed)
    scores = scores.groupby("request").head(POLITE_SCORES)
    annotators, group = np.unique(scores.annotator.to_numpy(dtype=str), return_inverse=True)
    value = scores.score.to_numpy(dtype=np.float64)
    row = np.array([position[request] for request in scores.request])
    label = (value - 13) / 5
    error = np.bincount(group, (label - consensus[row]) ** 2) / np.bincount(group)
    return make_problem(
        name,
        "regression",
        features,
        test,
        Votes(row, group, label),
        consensus[:pool],
        np.arange(checked),
        consensus[pool:],
        len(annotators),
        group_quality=-np.sqrt(error),
    )


def draw_heart(name: str, folder: Path | None, checked: int, seed: int) -> Problem:
    """Return patients of three hospitals, with checked and test patients of a fourth."""
    import pandas as pd

    table = pd.read_csv(find_file("heart", folder))
    hospital = table.hospital.str.lower().to_numpy(dtype=str)
    target = np.char.startswith(hospital, TARGET_HOSPITAL)
    columns = table.drop(columns=["hospital", "disease"])
    gold = (table.disease == "yes").to_numpy(dtype=np.int64)
    order = np.random.default_rng(1000 + seed).permutation(np.flatnonzero(target))
    test, rows = order[checked:], np.concatenate([order[:checked], np.flatnonzero(~target)])
    categories = ["cp", "restecg", "slope", "thal"]
    numbers = columns.drop(columns=categories)
    dense = np.column_stack(
        [
            numbers.fillna(numbers.iloc[rows].median()),
            columns.isna(),
            pd.get_dummies(columns[categories].astype("category"), dtype=float),
        ]
    ).astype(np.float64)
    pool, test_dense = standardise(dense[rows], dense[test])
    cells = columns.to_numpy(dtype=np.float64)
    names, source = np.unique(hospital[rows[checked:]], return_inverse=True)
    return make_problem(
        name,
        "classification",
        Features(pool, numeric=cells[rows]),
        Features(test_dense, numeric=cells[test]),
        Votes(np.arange(checked, len(rows)), source, gold[rows[checked:]]),
        gold[rows],
        np.arange(checked),
        gold[test],
        len(names),
        num_classes=2,
    )
