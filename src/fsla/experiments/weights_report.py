"""What the measurements of data weights say: the table, the claims and the picture."""

from __future__ import annotations

from statistics import fmean, stdev

from fsla.experiments.folder import Record
from fsla.experiments.report import Claim, table
from fsla.experiments.weights_tasks import RIGHT

CHOSEN = "fsla"
CLEANLAB = "cleanlab"
ORACLE = "right sources alone (known)"


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
    for cell in dict.fromkeys(r["cell"] for r in rows):
        own = {r["method"]: r for r in rows if r["cell"] == cell}
        chosen = own[CHOSEN]
        others = [r for name, r in own.items() if name not in (CHOSEN, ORACLE)]
        if "error" in chosen:
            bound = 1.1 * own[ORACLE]["error"]
            text = f"{cell}: within 10 % of training on the right sources alone"
            found.append(Claim(text, chosen["error"] <= bound, f"{chosen['error']:.3f}, at most {bound:.3f}"))
            continue
        best = max(others, key=lambda r: r["accuracy"])
        spread = max(best["accuracy_spread"], chosen["accuracy_spread"], 0.005)
        figures = f"{chosen['accuracy']:.3f}; {best['method']} {best['accuracy']:.3f} ± {best['accuracy_spread']:.3f}"
        held = chosen["accuracy"] >= best["accuracy"] - spread
        found.append(Claim(f"{cell}: as accurate as the best way", held, figures))
        if chosen.get("weights") and chosen["kind"] == "sources":
            right = min(chosen["weights"][g] for g in RIGHT)
            wrong = max(w for g, w in enumerate(chosen["weights"]) if g not in RIGHT)
            text = f"{cell}: right sources weigh more than .8, wrong ones less than .2"
            found.append(Claim(text, right > 0.8 and wrong < 0.2, f"at least {right:.2f}, at most {wrong:.2f}"))
    return tuple(found)


def markdown(head: str, rows: list[Record]) -> str:
    """summary.md: a table for each cell, the best in bold."""
    parts = ["# Which data to trust, measured\n", head]
    for cell in dict.fromkeys(r["cell"] for r in rows):
        own = [r for r in rows if r["cell"] == cell]
        key = "error" if "error" in own[0] else "accuracy"
        ranked = [r[key] for r in own if r["method"] != ORACLE]
        best = min(ranked) if key == "error" else max(ranked)
        lines = [
            (
                f"**{r['method']}**" if r[key] == best else r["method"],
                f"{r[key]:.3f} ± {r[f'{key}_spread']:.3f}",
                f"{r['auroc']:.3f} ± {r['auroc_spread']:.3f}" if "auroc" in r else "",
                f"{r['s_taken']:.0f}",
                ", ".join(f"{name} {share:.2f}" for name, share in r.get("shares", {}).items()),
            )
            for r in own
        ]
        parts += [f"## {cell}\n", table(["method", key, "AUROC", "seconds", "shares"], lines)]
    parts += [f"- {c.text}: {'yes' if c.held else '**no**'} ({c.figures})" for c in claims(rows)]
    return "\n".join([*parts, ""])
