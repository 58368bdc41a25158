"""Compare every example with what one would do instead; write figures, pictures and the tables of the pages.

python examples/gallery.py                  # all examples, three seeds
python examples/gallery.py poison tolls     # these alone; the figures of the others stay
python examples/gallery.py --small --json out/gallery.json --pictures out   # seconds for each, one seed
"""

import argparse
import importlib
import json
import platform
import re
import subprocess
import sys
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

import fsla

ROOT = Path(__file__).resolve().parents[1]
NAMES = [
    "poison", "tolls", "distill", "penalties", "denoise", "critic", "sinusoids", "architecture", "equilibrium",
    "source_weights", "text_mixture", "hyper_cleaning", "class_weights",
]  # fmt: skip


def measure(name, method, seeds):
    """Run a method for each seed; return its values, their mean and sd, and CPU seconds for each seed."""
    values, notes, begin = [], [], time.process_time()
    for seed in range(seeds):
        torch.manual_seed(seed)
        np.random.seed(seed)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                values.append(float(method(seed)))
            notes += sorted({f"seed {seed}: {w.category.__name__}" for w in caught if "fsla" in str(w.category)})
        except fsla.DivergenceError as error:  # a run that diverges is a result, too
            values.append(float("nan"))
            notes.append(f"seed {seed}: {type(error).__name__}")
    seconds = (time.process_time() - begin) / seeds
    ends = [v for v in values if np.isfinite(v)]
    row = {"method": name, "values": [v if np.isfinite(v) else None for v in values], "seconds": round(seconds, 2)}
    row["mean"] = float(np.mean(ends)) if ends else None
    row["sd"] = float(np.std(ends, ddof=1)) if len(ends) > 1 else None
    return row | ({"notes": notes} if notes else {})


def show(row, digits):
    """Return a mean and its spread as text."""
    if row["mean"] is None:
        return "diverged"
    failures = sum(v is None for v in row["values"])
    spread = "" if row["sd"] is None else f" ± {row['sd']:.{digits}f}"
    return f"{row['mean']:.{digits}f}{spread}" + (f" ({failures} of {len(row['values'])} diverged)" if failures else "")


def compare(name, small):
    """Run all methods of an example; print and return its table."""
    module = importlib.import_module(f"comparisons.{name}")
    print(f"{name}: {module.METRIC}", flush=True)
    rows = []
    for method, run in module.methods(module.SMALL if small else module.STEPS).items():
        row = measure(method, run, 1 if small else 3)
        rows.append(row)
        line = f"  {method:<60}{show(row, module.DIGITS):>20}{row['seconds']:>9.1f} s"
        print(line, *row.get("notes", []), flush=True)
    return {"metric": module.METRIC, "better": module.BETTER, "digits": module.DIGITS, "rows": rows}


def describe():
    """Return what the figures depend on beside the code."""
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
        text = commit.stdout.strip() + (" with changes" if changes.stdout else "")
    except (OSError, subprocess.SubprocessError):
        text = "unknown"
    command = " ".join(["python", "examples/gallery.py", *sys.argv[1:]])
    machine = f"{platform.machine()} CPU, {torch.get_num_threads()} thread"
    date = datetime.now(UTC).date().isoformat()
    return {"commit": text, "date": date, "command": command, "machine": machine, "torch": torch.__version__}


def draw(name, folder, small):
    """Write the picture of an example, from a run with seed 0."""
    module = importlib.import_module(f"comparisons.{name}")
    figure = Figure(module.SIZE, layout="constrained", dpi=110)
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        module.draw(figure, module.SMALL if small else module.STEPS)
    figure.savefig(folder / f"{name}.png")


def table_of(result):
    """Return the table of an example as lines of Markdown."""
    yield f"| method | {result['metric']} | CPU seconds |"
    yield "| --- | --- | --- |"
    for row in result["rows"]:
        yield f"| {row['method']} | {show(row, result['digits'])} | {row['seconds']:.1f} |"
    yield ""
    yield "Mean and standard deviation over 3 seeds; CPU seconds of one seed, on one thread."
    yield f"`{result['command']}`, commit {result['commit']}, {result['date']}, torch {result['torch']}."


def cell(row, winner, digits):
    """Return a score as text: empty where there is none, bold where it equals the best of its line."""
    if row is None:
        return ""
    wins = row["mean"] is not None and round(row["mean"], digits) == round(winner, digits)
    return f"**{show(row, digits)}**" if wins else show(row, digits)


def table_of_all(results):
    """Return a table with a line for each score of each example, as lines of Markdown."""
    yield "| example | score | instead | without an adjoint (`one_step`) | fsla |"
    yield "| --- | --- | --- | --- | --- |"
    for name, result in results.items():
        module = importlib.import_module(f"comparisons.{name}")
        rows = {row["method"]: row for row in result["rows"]}
        for title, metric, instead, one_step, learned in module.SUMMARY:
            best = {"higher": max, "lower": min}[metric.split("; ")[1].split()[0]]
            chosen = [rows.get(method) for method in (instead, one_step, learned)]
            winner = best(row["mean"] for row in chosen if row and row["mean"] is not None)
            cells = [cell(row, winner, result["digits"]) for row in chosen]
            cells[0] += f"<br>{instead}"
            yield f"| [{title}]({name}.md) | {metric} | {' | '.join(cells)} |"


def fill(page, results):
    """Return the text of a page with its tables made anew: all examples, or the one that a comment names."""

    def table(match):
        if match[2] and match[2] not in results:
            return match[0]
        lines = table_of(results[match[2]]) if match[2] else table_of_all(results)
        return "\n".join([match[1], *lines, match[3]])

    return re.sub(r"(<!-- gallery(?: (\w+))? -->).*?(<!-- end -->)", table, page, flags=re.DOTALL)


def write_pages(results, check):
    """Fill the tables of the pages; if `check`, exit if that changes one."""
    for path in sorted((ROOT / "docs" / "gallery").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        new_text = fill(text, results)
        if check and new_text != text:
            raise SystemExit(f"{path} is out of date. Run python examples/gallery.py --only pages.")
        path.write_text(new_text, encoding="utf-8")


def load_results(path):
    return json.loads(path.read_text(encoding="utf-8"))["examples"] if path.exists() else {}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--small", action="store_true", help="one seed and few steps: shows that everything runs")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "gallery.json")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs" / "assets" / "gallery", help="folder")
    parser.add_argument("--only", choices=["figures", "pictures", "pages"], help="leave the others out")
    parser.add_argument("--check", action="store_true", help="write no page; fail if one is out of date")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.names or NAMES:
        if args.only in (None, "figures"):
            result = describe() | compare(name, args.small)
            results = load_results(args.json) | {name: result}
            ordered = {key: results[key] for key in NAMES if key in results}
            text = json.dumps({"benchmark": "gallery", "examples": ordered}, indent=1)
            args.json.write_text(text + "\n", encoding="utf-8")
        if args.only in (None, "pictures"):
            args.pictures.mkdir(parents=True, exist_ok=True)
            draw(name, args.pictures, args.small)
    if args.only == "pages" or not (args.only or args.small):
        write_pages(load_results(args.json), args.check)


if __name__ == "__main__":
    main()
