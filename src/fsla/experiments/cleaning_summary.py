"""What the records of the cleaning runs say: a table of every run, and each claim of section 6.2 held or not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from fsla.experiments.cleaning import RunSpec
from fsla.experiments.figures import CleaningSpec, panels
from fsla.experiments.report import claims, table
from fsla.training import Status

Record = dict[str, Any]
Claim = tuple[str, bool | None, str]
"""What is said, whether it held (None: the runs do not decide it), and the figures."""


class Results:
    """The records of finished runs, by spec and seed."""

    def __init__(self, records: dict[str, list[Record]], seeds: int) -> None:
        self._records, self.seeds = records, seeds

    def runs(self, spec: RunSpec) -> list[list[Record]]:
        """The records of a spec, one list for each seed."""
        return [self._records[spec.seeded(s).name] for s in range(self.seeds)]

    def final(self, spec: RunSpec, key: str = "valid_loss") -> float:
        """The mean over seeds of the last value; a diverged run has an infinite loss, and nothing else."""
        if any(run[-1]["status"] == Status.DIVERGED or run[-1][key] is None for run in self.runs(spec)):
            return float("inf") if key == "valid_loss" else float("nan")
        return statistics.fmean(run[-1][key] for run in self.runs(spec))

    def spread(self, spec: RunSpec, key: str = "valid_loss") -> float:
        values = [run[-1][key] for run in self.runs(spec)]
        return 0.0 if len(values) < 2 or any(v is None for v in values) else statistics.stdev(values)

    def step_seconds(self, spec: RunSpec) -> float:
        return statistics.fmean(run[-1]["seconds"] / max(1, run[-1]["step"]) for run in self.runs(spec))

    def status(self, spec: RunSpec) -> str:
        kinds = sorted({run[-1]["status"] for run in self.runs(spec)})
        step = min(run[-1]["step"] for run in self.runs(spec))
        return ", ".join(kinds) + ("" if kinds == ["finished"] else f" at step {step}")

    def curve(self, spec: RunSpec, key: str = "valid_loss") -> dict[int, float]:
        """The mean over seeds at each step that every seed has."""
        runs = [{r["step"]: r[key] for r in run if r[key] is not None} for run in self.runs(spec)]
        steps = sorted(set.intersection(*(set(r) for r in runs)))
        return {s: statistics.fmean(r[s] for r in runs) for s in steps}

    def together(self, *specs: RunSpec) -> tuple[int, list[float]]:
        """The last step that all of these were measured at, and their losses there: a budget may have cut some."""
        curves = [self.curve(spec) for spec in specs]
        step = max(set.intersection(*(set(c) for c in curves)))
        return step, [c[step] for c in curves]

    def in_time(self, spec: RunSpec, other: RunSpec) -> float:
        """The mean over seeds of a run's loss when another one ended, or its last before."""
        ends = [run[-1]["seconds"] for run in self.runs(other)]
        losses = []
        for run, end in zip(self.runs(spec), ends, strict=True):
            seen = [r["valid_loss"] for r in run if r["seconds"] <= end]
            losses.append(float("inf") if seen[-1] is None else seen[-1])
        return statistics.fmean(losses)

    def time_to(self, spec: RunSpec, level: float) -> float | None:
        """The mean over seeds of the seconds until the validation loss is first at or under a level."""
        times = []
        for run in self.runs(spec):
            hit = next((r["seconds"] for r in run if r["valid_loss"] is not None and r["valid_loss"] <= level), None)
            if hit is None:
                return None
            times.append(hit)
        return statistics.fmean(times)


def all_claims(asked: CleaningSpec, figures: tuple[str, ...], results: Results) -> list[Claim]:
    """Each claim that the figures bear on: what is said, whether it held, the figures."""
    return [claim for f in figures for claim in _CLAIMS[f](asked, results)]


def markdown(asked: CleaningSpec, figures: tuple[str, ...], results: Results) -> str:
    """summary.md: the claims, then every run."""
    lines = [
        f"# Data hyper-cleaning, scale {asked.scale}, {results.seeds} seed{'s' if results.seeds > 1 else ''}\n",
        "Losses and accuracies are means over seeds at the end of each run (± standard deviation). AUROC: how well a "
        "score ranks the wrong labels, of the learnt weights and of the model's confidence in the given label.\n",
        "## Claims\n",
        claims(all_claims(asked, figures, results)),
    ]
    for figure in figures:
        for panel in panels(figure, asked):
            lines += [f"## {figure}: {panel.title}\n", _runs_table(panel.runs, results)]
    return "\n".join(lines)


def _runs_table(runs: dict[str, RunSpec], results: Results) -> str:
    def cell(spec: RunSpec, key: str) -> str:
        value, spread = results.final(spec, key), results.spread(spec, key)
        if not math.isfinite(value):  # a seed diverged
            return "-"
        return f"{value:.3f}" + (f" ± {spread:.3f}" if results.seeds > 1 else "")

    keys = ("valid_loss", "valid_accuracy", "test_accuracy", "weight_auroc", "confidence_auroc")
    head = ["run", "validation loss", "accuracy", "test accuracy", "AUROC weights", "AUROC confidence"]
    rows = [
        (name, *(cell(s, k) for k in keys), f"{results.step_seconds(s) * 1e3:.1f}", results.status(s))
        for name, s in runs.items()
    ]
    return table([*head, "ms a step", "status"], rows)


def _two(a: str, x: float, b: str, y: float) -> str:
    return f"{a} {x:.3f}, {b} {y:.3f}"


def _claims2(asked: CleaningSpec, results: Results) -> list[Claim]:
    runs = panels("fig2", asked)[0].runs
    bps = {name: spec for name, spec in runs.items() if name.startswith("BP")}
    own = results.curve(runs["FSLA"])
    best = {s: min(results.curve(b).get(s, float("inf")) for b in bps.values()) for s in own}
    behind = [s for s in own if own[s] > best[s]]
    last = max(own)
    crossed = 0 if not behind else next((s for s in sorted(own) if s > max(behind)), None)
    quarter = last / 4
    finals = ", ".join(f"{n} {results.final(s):.3f} ({results.status(s)})" for n, s in bps.items())
    slowest = list(bps)[-1]
    ratio = results.step_seconds(bps[slowest]) / results.step_seconds(runs["FSLA"])
    reached = all(max(results.curve(b)) >= 1.5 * quarter for b in bps.values())
    timed = {n: results.in_time(s, runs["FSLA"]) for n, s in bps.items()}
    fastest = min(timed, key=timed.__getitem__)
    return [
        (
            f"FSLA passes the best BP variant around hyper-iteration 500 of 2000 (here: {quarter:.0f} of {last})",
            crossed is not None and crossed <= 1.5 * quarter if reached else None,
            f"ahead of every BP, as far as each got, from step {'none' if crossed is None else crossed}; at the end "
            f"FSLA {results.final(runs['FSLA']):.3f}, {finals}",
        ),
        (
            "FSLA is much faster than BP in time",
            ratio > 2 and results.final(runs["FSLA"]) < timed[fastest],
            f"a step of {slowest} takes {ratio:.1f} steps of FSLA; when FSLA has ended, at "
            f"{results.final(runs['FSLA']):.3f}, the best BP is {fastest} at {timed[fastest]:.3f}",
        ),
        (
            "Cleaning helps (not a claim of the paper's)",
            results.final(runs["FSLA"]) < results.final(runs["NONE"]),
            _two("FSLA", results.final(runs["FSLA"]), "no cleaning", results.final(runs["NONE"]))
            + f", oracle {results.final(runs['ORACLE']):.3f}",
        ),
    ]


def _claims3(asked: CleaningSpec, results: Results) -> list[Claim]:
    ns_warm, ns_cold, cg_warm, cg_cold = (p.runs for p in panels("fig3", asked))
    fsla, out = ns_warm["FSLA"], list[Claim]()
    for name, warm, cold in (("NS", ns_warm, ns_cold), ("CG", cg_warm, cg_cold)):
        own = results.final(warm[f"{name}_1_10"])
        best = min((results.final(s), n) for n, s in cold.items() if n not in ("FSLA", f"{name}_1_10"))
        text = f"at the end of each run {name}_1_10 {own:.3f}, best restarted {best[1]} {best[0]:.3f}"
        out.append((f"Warm start speeds up {name}", own < best[0], text))
    ratio = results.step_seconds(ns_warm["NS_1_10"]) / results.step_seconds(ns_warm["NS_1_1"])
    out.append(("NS: the time is dominated by the series", ratio > 2, f"a step of NS_1_10 takes {ratio:.1f} of NS_1_1"))
    step, (one, ten, twenty) = results.together(*(cg_warm[f"CG_1_{K}"] for K in (1, 10, 20)))
    out.append(
        (
            "CG saturates at about K = 10",
            abs(twenty - ten) < 0.25 * abs(one - ten) if _far(step, fsla) else None,
            f"at step {step}, the last that all have: CG_1_1 {one:.3f}, CG_1_10 {ten:.3f}, CG_1_20 {twenty:.3f}",
        )
    )
    ratio = results.step_seconds(cg_warm["CG_1_10"]) / results.step_seconds(fsla)
    out.append(("CG costs visibly more time than FSLA", ratio > 1.5, f"a step of CG_1_10 takes {ratio:.1f} of FSLA"))
    step, (own, one) = results.together(fsla, cg_warm["CG_1_1"])
    text = f"at step {step}: {_two('FSLA', own, 'CG_1_1', one)}"
    out.append(("CG_1_1 is much slower than FSLA", one > 1.5 * own, text))
    rivals = {n: s for p in (ns_warm, ns_cold, cg_warm, cg_cold) for n, s in p.items() if n != "FSLA"}
    seen = {n: results.together(fsla, s) for n, s in rivals.items()}
    ahead = [n for n, (_, (own, other)) in seen.items() if own < other]
    behind = [
        f"{n} ({own:.3f} against {other:.3f} at step {k})" for n, (k, (own, other)) in seen.items() if own >= other
    ]
    short = [n for n, (k, _) in seen.items() if not _far(k, fsla)]
    out.append(
        (
            "FSLA converges faster than every NS and CG, by iterations",
            False if any(n not in ahead and n not in short for n in seen) else None if short else True,
            f"ahead of {len(ahead)} of {len(seen)} at the last step that both have; "
            f"behind {', '.join(behind) or 'none'}; cut before half of the steps: {', '.join(short) or 'none'}",
        )
    )
    timed = {n: results.in_time(s, fsla) for n, s in rivals.items()}
    best_name = min(timed, key=timed.__getitem__)
    out.append(
        (
            "FSLA converges faster than every NS and CG, in time",
            results.final(fsla) < timed[best_name],
            f"when FSLA has ended, at {results.final(fsla):.3f}, the best is {best_name} at {timed[best_name]:.3f}",
        )
    )
    return out


def _far(step: int, spec: RunSpec) -> bool:
    """Whether a step is far enough into a run to judge it by iterations."""
    return 2 * step >= spec.steps


def _claims4(asked: CleaningSpec, results: Results) -> list[Claim]:
    out = list[Claim]()
    for panel in panels("fig4", asked):
        fsla, cg = panel.runs["FSLA"], panel.runs["CG_1_10"]
        level = max(results.final(fsla), results.final(cg))
        own, other = results.time_to(fsla, level), results.time_to(cg, level)
        held = own is not None and (other is None or own < 0.9 * other)  # less than a tenth is a tie
        text = f"seconds to a loss of {level:.3f}: FSLA {_seconds(own)}, CG_1_10 {_seconds(other)}; at the end "
        text += _two("FSLA", results.final(fsla), "CG_1_10", results.final(cg))
        out.append((f"FSLA beats the best CG in time on {panel.title}", held, text))
    return out


def _seconds(x: float | None) -> str:
    return "never" if x is None else f"{x:.2f}"


def _fails(results: Results, spec: RunSpec) -> bool:
    """Whether a run diverged, or ended a quarter above the lowest loss it had. Where to cut is a matter of taste: look
    at the figures beside the verdict."""
    return not results.final(spec) <= 1.25 * min(results.curve(spec).values())


def _ends(results: Results, runs: dict[str, RunSpec]) -> str:
    ends = (f"{n}: {results.final(s):.3f} (lowest {min(results.curve(s).values()):.3f})" for n, s in runs.items())
    return "loss at the end: " + ", ".join(ends)


def _claims5(asked: CleaningSpec, results: Results) -> list[Claim]:
    runs = panels("fig5", asked)[0].runs
    least = next(iter(runs))
    return [(f"The smallest batch, {least}, does not converge", _fails(results, runs[least]), _ends(results, runs))]


def _claims6(asked: CleaningSpec, results: Results) -> list[Claim]:
    runs = panels("fig6", asked)[2].runs
    most = list(runs)[-1]
    return [(f"c_β five times larger, {most}, does not converge", _fails(results, runs[most]), _ends(results, runs))]


def _claims_momentum(asked: CleaningSpec, results: Results) -> list[Claim]:
    runs = panels("momentum", asked)[0].runs
    values = {n: results.final(s) for n, s in runs.items()}
    text = ", ".join(f"{n} {x:.3f}" for n, x in values.items())
    held = values["storm"] < min(values["none"], values["average"])
    return [("STORM gains over no momentum and over a moving average", held, text)]


def _claims_overview(asked: CleaningSpec, results: Results) -> list[Claim]:
    runs = panels("overview", asked)[0].runs
    own, none = results.final(runs["FSLA"]), results.final(runs["NONE"])
    step, (then, one) = results.together(runs["FSLA"], runs["CG_1_1"])
    ten = results.in_time(runs["CG_1_10"], runs["FSLA"])
    ratio = results.step_seconds(runs["CG_1_10"]) / results.step_seconds(runs["FSLA"])
    auroc = results.final(runs["FSLA"], "weight_auroc")
    return [
        (
            "CG_1_1, which costs about as much as FSLA, ends with at least twice its loss",
            one >= 2 * then if _far(step, runs["FSLA"]) else None,
            f"at step {step}: " + _two("FSLA", then, "CG_1_1", one),
        ),
        (
            "When FSLA ends, CG_1_10 is not as far, since its steps take more time",
            own < ten and ratio > 1,
            _two("FSLA", own, "CG_1_10", ten) + f"; a step of CG_1_10 takes {ratio:.1f} of FSLA",
        ),
        ("Cleaning helps (not a claim of the paper's)", own < none, _two("FSLA", own, "no cleaning", none)),
        (
            "The weights rank the wrong labels (not a claim of the paper's): AUROC at least 0.95",
            auroc >= 0.95,
            f"{auroc:.3f}",
        ),
    ]


_CLAIMS: dict[str, Callable[[CleaningSpec, Results], list[Claim]]] = {
    "overview": _claims_overview,
    "fig2": _claims2,
    "fig3": _claims3,
    "fig4": _claims4,
    "fig5": _claims5,
    "fig6": _claims6,
    "momentum": _claims_momentum,
}
