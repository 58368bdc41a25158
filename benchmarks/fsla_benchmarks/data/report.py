"""Tables of `fsla bench data`, made from rows of results alone."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fsla.data._learners import FineTunedLinearLearner, LinearLearner
from fsla_benchmarks.data.experiment import BY_CV, BY_CV_SCORE, PRODUCT, REPORTED_SEEDS, TUNING_SEEDS
from fsla_reproduction.folder import Record
from fsla_reproduction.report import table

BARS = ("own CV", "own CV, accuracy", "tuned", "hindsight")
"""Alternatives picked by held-out loss, by held-out accuracy, by other seeds, by their test score."""
FIXED = (
    ("nothing", "nothing", LinearLearner.name),
    ("trusted alone", "trusted alone", LinearLearner.name),
    ("fine-tuned", "all + trusted", FineTunedLinearLearner.name),
)
"""Column, method and learner of alternatives that are shown on each line."""
MARGIN = 0.01 + 1e-9
"""Differences up to it mean nothing; rounding does not push .01 beyond it."""

Key = tuple[str, int]


class Gain(NamedTuple):
    """Mean paired difference over seeds, and its standard error (None with one seed)."""

    mean: float
    error: float | None


class Line(NamedTuple):
    """One set and number of checked rows: means over the seeds that both sides have."""

    name: str
    checked: int
    task: str
    seeds: tuple[int, ...]
    product: float
    bars: dict[str, float]
    labels: dict[str, str]
    """Names of the tuned and of the hindsight alternative."""
    fixed: dict[str, float]
    gains: dict[str, Gain]


def label(record: Mapping[str, Any]) -> str:
    """Return method and learner as one name."""
    return f"{record['method']} / {record['learner']}" if record["learner"] else str(record["method"])


def gain(product: Mapping[int, float], other: Mapping[int, float]) -> Gain:
    """Return the paired difference over the seeds that both have."""
    differences = np.array([product[seed] - other[seed] for seed in sorted(product.keys() & other.keys())])
    error = float(differences.std(ddof=1) / np.sqrt(len(differences))) if len(differences) > 1 else None
    return Gain(float(differences.mean()), error)


def by_method(records: Iterable[Record], seeds: Sequence[int], measure: str) -> dict[Key, dict[str, dict[int, float]]]:
    """Return set and number of checked rows -> method and learner -> seed -> value."""
    values: dict[Key, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        if record["seed"] in seeds and record.get(measure) is not None:
            values[record["set"], record["checked"]][label(record)][record["seed"]] = record[measure]
    return values


def compare(
    records: Sequence[Record],
    measure: str = "score",
    seeds: Sequence[int] = REPORTED_SEEDS,
    tuning_seeds: Sequence[int] = TUNING_SEEDS,
) -> list[Line]:
    """Return a line for each set and number of checked rows, largest loss against the hindsight alternative first.

    Args:
        records: Rows of results.
        measure: "score", "log_likelihood", "auroc" or "group_correlation"; larger is better.
        seeds: Seeds to report.
        tuning_seeds: Seeds that say which alternative is best.
    """
    reported, tuning = by_method(records, seeds, measure), by_method(records, tuning_seeds, measure)
    tasks = {(record["set"], record["checked"]): record["task"] for record in records}
    lines = []
    for key, methods in reported.items():
        product = methods.get(PRODUCT)
        if product is None or BY_CV not in methods:
            continue
        common = product.keys() & methods[BY_CV].keys()
        alternatives = {
            name: values
            for name, values in methods.items()
            if name not in (PRODUCT, BY_CV, BY_CV_SCORE) and common <= values.keys()
        }
        if not common or not alternatives:
            continue
        product = {seed: product[seed] for seed in common}
        mean = {name: float(np.mean([values[seed] for seed in common])) for name, values in alternatives.items()}
        best = {"hindsight": max(mean, key=lambda name: mean[name])}
        before = {name: np.mean(list(values.values())) for name, values in tuning[key].items() if name in mean}
        if before:
            best["tuned"] = max(before, key=lambda name: float(before[name]))
        against = {"own CV": methods[BY_CV]}
        if common <= methods.get(BY_CV_SCORE, {}).keys():
            against["own CV, accuracy"] = methods[BY_CV_SCORE]
        against |= {bar: alternatives[name] for bar, name in best.items()}
        fixed = {
            column: mean[f"{method} / {learner}"]
            for column, method, learner in FIXED
            if f"{method} / {learner}" in mean
        }
        lines.append(
            Line(
                *key,
                tasks[key],
                tuple(sorted(common)),
                float(np.mean(list(product.values()))),
                {bar: float(np.mean([values[seed] for seed in common])) for bar, values in against.items()},
                best,
                fixed,
                {bar: gain(product, values) for bar, values in against.items()},
            )
        )
    return sorted(lines, key=lambda line: line.gains["hindsight"].mean)


def summarise(lines: Sequence[Line]) -> list[Record]:
    """Return how the library compares with each bar over all lines."""
    rows = []
    for bar in BARS:
        gains = [(line.gains[bar], line) for line in lines if bar in line.gains]
        if not gains:
            continue
        worst, line = min(gains, key=lambda pair: pair[0].mean)
        sure = [each.mean < -MARGIN and each.error is not None and each.mean + 2 * each.error < 0 for each, _ in gains]
        rows.append(
            {
                "bar": bar,
                "lines": len(gains),
                "mean_gain": float(np.mean([each.mean for each, _ in gains])),
                "behind": sum(each.mean < -MARGIN for each, _ in gains),
                "behind_surely": sum(sure),
                "ahead": sum(each.mean > MARGIN for each, _ in gains),
                "worst": worst.mean,
                "worst_line": f"{line.name} {line.checked}",
            }
        )
    return rows


def number(value: float | None) -> str | None:
    """Return a value with three digits after the point."""
    return None if value is None else f"{value:.3f}"


def signed(value: Gain | None) -> str | None:
    """Return a difference with its standard error."""
    if value is None:
        return None
    return f"{value.mean:+.3f}" if value.error is None else f"{value.mean:+.3f} ({value.error:.3f})"


def write_comparison(lines: Sequence[Line]) -> str:
    """Return the main table as Markdown."""
    head = ["set", "checked", "seeds", "fsla", "own CV", "own CV, accuracy", "tuned alternative", "best in hindsight"]
    head += [column for column, _, _ in FIXED] + [f"fsla - {bar}" for bar in BARS]
    rows = [
        [
            line.name,
            line.checked,
            len(line.seeds),
            number(line.product),
            number(line.bars["own CV"]),
            number(line.bars.get("own CV, accuracy")),
            f"{number(line.bars['tuned'])} {line.labels['tuned']}" if "tuned" in line.bars else None,
            f"{number(line.bars['hindsight'])} {line.labels['hindsight']}",
            *(number(line.fixed.get(column)) for column, _, _ in FIXED),
            *(signed(line.gains.get(bar)) for bar in BARS),
        ]
        for line in lines
    ]
    return table(head, rows)


def write_summary(lines: Sequence[Line]) -> str:
    """Return how the library compares with each bar, as Markdown."""
    head = [
        "fsla against",
        "lines",
        "mean gain",
        "behind by > .01",
        "beyond 2 s.e.",
        "ahead by > .01",
        "worst",
    ]
    return table(
        head,
        [
            [
                row["bar"],
                row["lines"],
                f"{row['mean_gain']:+.4f}",
                row["behind"],
                row["behind_surely"],
                row["ahead"],
                f"{row['worst']:+.3f} ({row['worst_line']})",
            ]
            for row in summarise(lines)
        ],
    )


def write_short(lines: Sequence[Line]) -> str:
    """Return a narrow table of a further measure, as Markdown."""
    head = ["set", "checked", "fsla", "own CV", "best in hindsight", "fsla - own CV", "fsla - hindsight"]
    rows = [
        [
            line.name,
            line.checked,
            number(line.product),
            number(line.bars["own CV"]),
            f"{number(line.bars['hindsight'])} {line.labels['hindsight']}",
            signed(line.gains["own CV"]),
            signed(line.gains["hindsight"]),
        ]
        for line in lines
    ]
    return table(head, rows)


def write_seconds(records: Sequence[Record], seeds: Sequence[int] = REPORTED_SEEDS) -> str:
    """Return the seconds of the library and of the careful user's cross-validation, as Markdown."""
    seconds = by_method(records, seeds, "seconds")
    rows = [
        [name, checked, number(_mean(methods.get(PRODUCT))), number(_mean(methods.get(BY_CV)))]
        for (name, checked), methods in seconds.items()
    ]
    return table(["set", "checked", "fsla", "own CV over all alternatives"], rows)


def _mean(values: Mapping[int, float] | None) -> float | None:
    return float(np.mean(list(values.values()))) if values else None


MEASURES = {
    "log_likelihood": "Log-likelihood of test rows",
    "auroc": "AUROC of wrong labels",
    "group_correlation": "Rank correlation with the quality of groups",
}


def write_report(
    records: Sequence[Record],
    seeds: Sequence[int] = REPORTED_SEEDS,
    tuning_seeds: Sequence[int] = TUNING_SEEDS,
    *,
    level: int = 2,
) -> str:
    """Return all tables as Markdown."""
    lines = compare(records, "score", seeds, tuning_seeds)
    if not lines:
        return "No line has both fsla and the alternatives.\n"
    heading = "#" * level
    text = [f"{heading} Summary\n", write_summary(lines), f"{heading} Accuracy, R2 in regression\n"]
    text.append(write_comparison(lines))
    for measure, title in MEASURES.items():
        further = compare(records, measure, seeds, tuning_seeds)
        if further:
            text += [f"{heading} {title}\n", write_short(further)]
    text += [f"{heading} Seconds\n", write_seconds(records, seeds)]
    return "\n".join(text)


def to_json(records: Sequence[Record], run: Mapping[str, object]) -> str:
    """Return results as JSON, a row in each line, with five digits: a page's tables are made of it.

    Args:
        records: Rows of results.
        run: What they depend on: commit, machine, date and versions.
    """
    columns = list(dict.fromkeys(key for record in records for key in record))
    values = [[record.get(key) for key in columns] for record in records]
    rows = [
        json.dumps([round(value, 5) if isinstance(value, float) else value for value in row], separators=(",", ":"))
        for row in values
    ]
    head = json.dumps({"benchmark": "data", **run, "notes": [], "columns": columns}, indent=1)
    return head.removesuffix("\n}") + ',\n "rows": [\n' + ",\n".join(rows) + "\n ]\n}\n"


def write_result(result: Mapping[str, Any]) -> list[str]:
    """Return the tables of a page as lines of Markdown: a summary of each measure, and the scores line by line.

    `fsla bench data` writes all tables beside its records.
    """
    records = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    lines = compare(records, "score", REPORTED_SEEDS, TUNING_SEEDS)
    text = ["### Accuracy, R2 in regression\n", write_summary(lines), write_short(lines)]
    for measure, title in MEASURES.items():
        further = compare(records, measure, REPORTED_SEEDS, TUNING_SEEDS)
        if further:
            text += [f"### {title}\n", write_summary(further)]
    return "\n".join(text).splitlines()
