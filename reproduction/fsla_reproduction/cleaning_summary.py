"""summary.md of the cleaning runs: the claims, and a table of every run."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fsla_reproduction.cleaning_claims import all_claims
from fsla_reproduction.figures import Panel
from fsla_reproduction.report import claims, table
from fsla_reproduction.results import Results, Runs, number_of_seeds


def markdown(figures: Iterable[str], results: Results) -> str:
    """summary.md: the claims, then every run."""
    figures = tuple(figures)
    lines = [
        f"# Data hyper-cleaning, scale {results.panels.cleaning_spec.scale}, {number_of_seeds(results.seeds)}\n",
        "Losses and accuracies are means over seeds at the end of each run (± standard deviation). AUROC: how well a "
        "score ranks the wrong labels, of the learnt weights and of the model's confidence in the given label.\n",
        "## Claims\n",
        claims(all_claims(figures, results)),
    ]
    for figure in figures:
        for panel in results.panels.figures[figure]:
            lines += [f"## {figure}: {panel.title}\n", _runs_table(panel, results)]
    return "\n".join(lines)


_COLUMNS = {
    "valid_loss": "validation loss",
    "valid_accuracy": "accuracy",
    "test_accuracy": "test accuracy",
    "weight_auroc": "AUROC weights",
    "confidence_auroc": "AUROC confidence",
}


def _runs_table(panel: Panel, results: Results) -> str:
    rows = []
    for label, runs in results.by_label(panel).items():
        cells = [_mean_and_spread(runs, key) for key in _COLUMNS]
        rows.append((label, *cells, f"{runs.calls:.0f}", f"{runs.step_seconds * 1e3:.1f}", runs.status))
    return table(["run", *_COLUMNS.values(), "oracle calls", "ms a step", "status"], rows)


def _mean_and_spread(runs: Runs, key: str) -> str:
    mean = runs.final(key)
    if not math.isfinite(mean):  # a seed diverged
        return "-"
    return f"{mean:.3f}" + (f" ± {runs.spread(key):.3f}" if len(runs.seeds) > 1 else "")
