"""What the measurements of data weights say: the table, the claims and the picture."""

from __future__ import annotations

from statistics import fmean, stdev

from fsla.data._ways import AGREEMENT, ALONE, EVERYTHING, MENDED, SAMPLES, SELF, WITH_GROUPS
from fsla_benchmarks.data_quality.tasks import RIGHT
from fsla_reproduction.folder import Record
from fsla_reproduction.report import Claim, table

CHOSEN = "fsla"
CLEANLAB = "cleanlab"
ORACLE = "right sources alone (known)"
ALTERNATIVES = (ALONE, EVERYTHING, AGREEMENT, SELF, MENDED, SAMPLES, CLEANLAB)
"""What one could do instead."""
METHODS = (*ALTERNATIVES, *WITH_GROUPS)


def summarise(records: list[Record]) -> list[Record]:
    """For each cell and method the mean and the spread over the seeds."""
    rows: list[Record] = []
    for cell, method in dict.fromkeys((r["cell"], r["method"]) for r in records):
        own = [r for r in records if r["cell"] == cell and r["method"] == method]
        row: Record = {"cell": cell, "kind": own[0]["kind"], "method": method, "seeds": len(own)}
        for name in ("accuracy", "error", "auroc", "s_taken"):
            values = [r[name] for r in own if r.get(name) is not None]
            if values:
                row[name] = fmean(values)
                row[f"{name}_spread"] = stdev(values) if len(values) > 1 else 0.0
        weights = [r["weights"] for r in own if r.get("weights")]
        if weights:
            row["weights"] = [fmean(column) for column in zip(*weights, strict=True)]
        if method == CHOSEN:
            row["shares"] = _mean_shares(own)
        rows.append(row)
    return rows


def _mean_shares(records: list[Record]) -> dict[str, float]:
    names = dict.fromkeys(name for record in records for name in record["shares"])
    return {name: fmean(record["shares"].get(name, 0.0) for record in records) for name in names}


def claims(rows: list[Record]) -> tuple[Claim, ...]:
    """The targets, held or not."""
    found = []
    for own in _by_cell(rows):
        cell = own[CHOSEN]["cell"]
        weights = own[CHOSEN].get("weights")
        if "error" in own[CHOSEN]:
            bound = 1.1 * own[ORACLE]["error"]
            reached = own[CHOSEN]["error"]
            text = f"{cell}: within 10 % of training on the right sources alone"
            found.append(Claim(text, reached <= bound, f"{reached:.3f}, at most {bound:.3f}"))
            continue
        for key, what in (("accuracy", "as accurate as the best other"), ("auroc", "ranks wrong labels as well")):
            if key in own[CHOSEN]:
                held, figures = _compared(own, key)
                found.append(Claim(f"{cell}: {what}", held, figures))
        if weights and own[CHOSEN]["kind"] == "sources":
            right = min(weights[g] for g in RIGHT)
            wrong = max(weight for g, weight in enumerate(weights) if g not in RIGHT)
            text = f"{cell}: right sources weigh more than .8, wrong ones less than .2"
            found.append(Claim(text, right > 0.8 and wrong < 0.2, f"at least {right:.2f}, at most {wrong:.2f}"))
    return tuple(found)


def _compared(own: dict[str, Record], key: str) -> tuple[bool, str]:
    """Whether the product reaches the best alternative, within the larger spread of the two, or half a hundredth."""
    others = [row for name, row in own.items() if name in ALTERNATIVES and key in row]
    best = max(others, key=lambda row: row[key])
    spread = max(best[f"{key}_spread"], own[CHOSEN][f"{key}_spread"], 0.005)
    figures = f"{_shown(own[CHOSEN], key)}; {best['method']} {_shown(best, key)}"
    return own[CHOSEN][key] >= best[key] - spread, figures


def _by_cell(rows: list[Record]) -> list[dict[str, Record]]:
    cells = dict.fromkeys(row["cell"] for row in rows)
    return [{row["method"]: row for row in rows if row["cell"] == cell} for cell in cells]


def _shown(row: Record, key: str) -> str:
    spread = f" ± {row[f'{key}_spread']:.3f}" if row["seeds"] > 1 else ""
    return (f"{row[key]:.3f}" + spread).replace("0.", ".")


def markdown(head: str, rows: list[Record]) -> str:
    """summary.md: a table for each measure, a line for each cell, the best in bold."""
    cells = _by_cell(rows)
    shares = [
        (own[CHOSEN]["cell"], ", ".join(f"{name} {share:.2f}" for name, share in own[CHOSEN]["shares"].items()))
        for own in cells
    ]
    parts = [
        "# Which data to trust, measured\n",
        head,
        "## Test accuracy\n",
        _table(cells, "accuracy"),
        "## AUROC of ranking the wrong labels\n",
        _table(cells, "auroc"),
        "## Root mean squared error of regressions\n",
        _table(cells, "error"),
        "## Seconds\n",
        _table(cells, "s_taken"),
        "## Shares of the ways in the model\n",
        table(["cell", "shares"], shares),
        "## Targets\n",
        table(
            ["target", "held", "figures"], [(c.text, "yes" if c.holds else "**no**", c.figures) for c in claims(rows)]
        ),
    ]
    return "\n".join(parts)


def _table(cells: list[dict[str, Record]], key: str) -> str:
    measured = [own for own in cells if key in own[CHOSEN]]
    names = [name for name in (CHOSEN, *METHODS, ORACLE) if any(key in own.get(name, {}) for own in measured)]
    return table(["cell", "seeds", *names], [_line(own, names, key) for own in measured])


def _line(own: dict[str, Record], names: list[str], key: str) -> list[object]:
    best = (min if key == "error" else max)(row[key] for name, row in own.items() if name != ORACLE and key in row)
    line: list[object] = [own[CHOSEN]["cell"], own[CHOSEN]["seeds"]]
    for name in names:
        row = own.get(name, {})
        if key not in row:
            line.append(None)
        elif key == "s_taken":
            line.append(f"{row[key]:.0f}")
        else:
            line.append(f"**{_shown(row, key)}**" if row[key] == best and name != ORACLE else _shown(row, key))
    return line
