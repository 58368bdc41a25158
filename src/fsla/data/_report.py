"""The report: one page of HTML that loads nothing, with every string from the data escaped."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from fsla.data._inputs import Array
from fsla.data._reading import Given
from fsla.data._tables import dropped

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 60
FLIPS = 5
FREQUENT = 0.05
"""The share of a class from which a mix-up is told."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#A3327B", "#8A6100", "#56B4E9", "#777777", "#571C00", "#3A0A2B", "#00332B")
WIDTH = 760
HEIGHT = 300
MARGIN = 46


def render(found: Any, given: Given, trusted: int, title: str, origin: str, finding: Sequence[str]) -> str:
    """The page for what an estimator found in samples."""
    from jinja2 import Environment

    template = (files("fsla.data") / "report.html").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True).from_string(template)
    classifies = hasattr(found, "classes_")
    runs = int(found.candidates_["folds"].max())
    best = found.candidates_.iloc[0]
    issues = found.find_label_issues() if hasattr(found, "find_label_issues") else None
    wrong = None if issues is None else _kept_first(issues[issues["is_label_issue"]], found, given)
    return page.render(
        title=title,
        origin=origin,
        finding=[line.replace(" %", "\u00a0%") for line in finding],
        groups=found.weights_.to_dict("records") if hasattr(found, "weights_") else [],
        runs=runs,
        noise=None
        if issues is None
        else {"rate": found.noise_rate_, "low": found.noise_rate_interval_[0], "high": found.noise_rate_interval_[1]},
        flips=[] if issues is None else _flips(found),
        samples=[] if wrong is None else [_sample(row, given) for row in wrong.head(SHOWN).to_dict("records")],
        issue_count=0 if wrong is None else len(wrong),
        labels=[] if wrong is None else sorted({str(name) for name in wrong.head(SHOWN)["given_label"]}),
        candidates=found.candidates_.to_dict("records"),
        error_name="wrong answers" if classifies else "root mean squared error",
        error_form="%.1f %%" if classifies else "%.3g",
        error_unit=100.0 if classifies else 1.0,
        classifies=classifies,
        trusted=trusted,
        untrusted=[str(name) for name in found._untrusted] if classifies else [],
        margin=100 * (max(float(best["error"]), 0.01) / trusted) ** 0.5,
        curve=_curve(found) if hasattr(found, "weights_") else "",
    )


def _kept_first(issues: pd.DataFrame, found: Any, given: Given) -> pd.DataFrame:
    """Those of groups that are dropped last: nobody needs to look at them."""
    if given.groups is None:
        return issues
    last = dropped(found.weights_, given.groups[issues["index"].to_numpy()])
    return issues.iloc[np.argsort(last, kind="stable")]


def _flips(found: Any) -> list[dict[str, Any]]:
    transition = found.transition_.copy()
    np.fill_diagonal(transition, 0)
    order = np.argsort(-transition, axis=None)[:FLIPS]
    pairs = [np.unravel_index(number, transition.shape) for number in order]
    return [
        {"true": str(found.classes_[c]), "given": str(found.classes_[y]), "share": float(transition[c, y])}
        for c, y in pairs
        if transition[c, y] >= FREQUENT
    ]


def _sample(row: dict[str, Any], given: Given) -> dict[str, Any]:
    x = given.x[row["index"]]
    return {
        "id": str(given.ids[row["index"]]),
        "given": str(row["given_label"]),
        "suggested": str(row["suggested_label"]),
        "group": "" if given.groups is None else str(given.groups[row["index"]]),
        "probability": row["suggested_probability"],
        "quality": row["label_quality"],
        "picture": _picture(x) if x.ndim == 3 else None,
        "row": None if x.ndim == 3 else _row(x, given.names),
    }


def _picture(x: Array) -> str:
    from PIL import Image

    low, high = float(x.min()), float(x.max())
    scaled = ((x - low) / (high - low if high > low else 1.0) * 255).astype(np.uint8)
    image = Image.fromarray(scaled[0]) if len(scaled) == 1 else Image.fromarray(scaled[:3].transpose(1, 2, 0))
    image.thumbnail((96, 96))
    image.save(held := io.BytesIO(), "PNG")
    return base64.b64encode(held.getvalue()).decode("ascii")


def _row(x: Array, names: list[str]) -> str:
    shown = names[:8] or [f"x{i}" for i in range(min(8, len(x)))]
    text = ", ".join(f"{name} {value:.3g}" for name, value in zip(shown, x, strict=False))
    return text + (", …" if len(x) > len(shown) else "")


def _curve(found: Any) -> Markup | str:
    """Lines of the groups' weights by step, as SVG."""
    points = [(step, weights) for step, _, weights in found._curve if weights] if hasattr(found, "_curve") else []
    if len(points) < 2:
        return ""
    names = [str(name) for name in found._groups.names]
    last = points[-1][0]
    order = sorted(range(len(names)), key=lambda g: -points[-1][1][g])[: len(COLOURS)]

    def place(step: int, weight: float) -> str:
        return f"{MARGIN + step / last * (WIDTH - 200 - MARGIN):.1f},{10 + (1 - weight) * (HEIGHT - MARGIN - 10):.1f}"

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="weights of the groups by step">']
    for tick in (0.0, 0.5, 1.0):
        _, y = place(0, tick).split(",")
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - 200}" y1="{y}" y2="{y}" stroke="currentColor" opacity=".2"/>')
        parts.append(f'<text x="{MARGIN - 8}" y="{y}" text-anchor="end" dominant-baseline="middle">{tick:g}</text>')
    for tick in (0, last // 2, last):
        x, _ = place(tick, 0).split(",")
        parts.append(f'<text x="{x}" y="{HEIGHT - 24}" text-anchor="middle">{tick}</text>')
    parts.append(f'<text x="{(MARGIN + WIDTH - 200) / 2}" y="{HEIGHT - 4}" text-anchor="middle">step</text>')
    parts.append(
        f'<text x="12" y="{HEIGHT / 2}" transform="rotate(-90 12 {HEIGHT / 2})" text-anchor="middle">weight</text>'
    )
    for rank, group in enumerate(order):
        line = " ".join(place(step, weights[group]) for step, weights in points)
        dash = ' stroke-dasharray="6 3"' if rank % 2 else ""
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[rank]}" stroke-width="2"{dash}/>')
        level = 20 + 22 * rank
        stroke = f'stroke="{COLOURS[rank]}" stroke-width="2"{dash}'
        parts.append(f'<line x1="{WIDTH - 188}" x2="{WIDTH - 164}" y1="{level}" y2="{level}" {stroke}/>')
        parts.append(
            f'<text x="{WIDTH - 158}" y="{level}" dominant-baseline="middle">{html.escape(names[group][:22])}</text>'
        )
    return Markup("".join([*parts, "</svg>"]))
