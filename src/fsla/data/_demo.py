"""scikit-learn's digits as data of mixed quality: six sources, three of them bad, and a few wrong labels in all."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fsla.data._dataset import Array
from fsla.data._result import CleaningResult

if TYPE_CHECKING:
    import pandas as pd

CHECKED = 100
TEST = 400
SOURCES = ("north office", "south office", "west office", "careless typist", "shifted column", "guessing trainee")
COLUMNS = {"label": "digit", "group": "source", "id": "name", "checked": "checked"}
"""What the columns of the table are."""
LEARNERS = ("linear", "linear_fine_tuned", "forest")
"""A network takes as long as all of these, and counts nothing on this table."""


class Demo(NamedTuple):
    """A table with wrong labels, and what a result is judged by."""

    table: pd.DataFrame
    wrong: Array
    """Which labels are wrong."""
    test: pd.DataFrame
    test_labels: Array


def make_demo(seed: int = 0) -> Demo:
    """Return 1397 digits of six sources, 100 of them checked at random, and 400 digits to test on."""
    import pandas as pd
    from sklearn.datasets import load_digits

    digits = load_digits()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(digits.target))
    pixels = pd.DataFrame(digits.data[order].astype(int), columns=list(digits.feature_names))
    true = digits.target[order]
    count = len(true) - TEST
    source = np.arange(count) % len(SOURCES)
    given_label = true[:count].copy()
    rate = np.array([0.03, 0.03, 0.03, 0.5, 0.0, 0.9])[source]
    typo = rng.random(count) < rate
    given_label[typo] = (given_label[typo] + rng.integers(1, 10, size=int(typo.sum()))) % 10
    given_label[source == 4] = (given_label[source == 4] + 1) % 10
    checked = np.full(count, "", dtype=object)
    rows = rng.permutation(count)[:CHECKED]
    checked[rows] = true[rows].astype(str)
    table = pixels.iloc[:count].assign(
        name=[f"digit-{i:04d}" for i in range(count)],
        source=np.array(SOURCES)[source],
        digit=given_label,
        checked=checked,
    )
    return Demo(
        table, given_label != true[:count], pixels.iloc[count:].reset_index(drop=True), true[count:].astype(str)
    )


def show_pictures(demo: Demo, result: CleaningResult) -> None:
    """Let the rows to review show each digit as a picture in the place of its 64 pixels."""
    from fsla.data._images import thumbnail

    pixels = demo.table.filter(like="pixel_").to_numpy().reshape(-1, 8, 8)
    result.review["image"] = [thumbnail((255 - 15 * pixels[row]).astype(np.uint8)) for row in result.review["row"]]
    result.review["cells"] = [{} for _ in result.review["row"]]


class DemoScore(NamedTuple):
    """How well a result does, which only a demonstration can tell."""

    precision: float
    """Share of flagged labels that are wrong."""
    recall: float
    """Share of wrong labels that are flagged."""
    accuracy: float
    """Of the model on test digits."""
    accuracy_as_it_is: float
    """Of a model trained on everything as it is."""

    def sentence(self) -> str:
        """Return the score as one line."""
        return (
            f"Demo: {100 * self.precision:.0f} % of the flagged labels are wrong, and {100 * self.recall:.0f} % of the "
            f"wrong ones are flagged. Accuracy on {TEST} test digits: {100 * self.accuracy:.1f} % with cleaning, "
            f"{100 * self.accuracy_as_it_is:.1f} % without."
        )


def score_demo(demo: Demo, result: CleaningResult, as_it_is: CleaningResult) -> DemoScore:
    """Return how well a result does, beside one of the same table without checked rows."""
    issues = result.label_issues
    flagged = np.zeros(len(demo.wrong), dtype=bool)
    flagged[issues.loc[issues["is_label_issue"], "row"]] = True
    judged = np.zeros(len(demo.wrong), dtype=bool)
    judged[issues["row"]] = True  # rows that nobody checked
    wrong = demo.wrong & judged
    after, before = (np.mean(r.model.predict(demo.test).astype(str) == demo.test_labels) for r in (result, as_it_is))
    precision = float(demo.wrong[flagged].mean()) if flagged.any() else 0.0
    return DemoScore(precision, float(flagged[wrong].mean()), float(after), float(before))
