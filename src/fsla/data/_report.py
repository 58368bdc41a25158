"""The report: one page that loads nothing, with every string of the data escaped and its one script under a hash."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fsla.data._decisions import sign_of
from fsla.data._intervals import wilson
from fsla.data._result import CleaningResult, Effect, Estimate
from fsla.data._sentences import join_names

if TYPE_CHECKING:
    import pandas as pd

GROUPS = 40
"""Groups and annotators that are open at first."""
COLUMNS = 60
DUPLICATES = 20
HEAT_CLASSES = 14
"""More classes make a heat map that nobody reads."""
GROUP_HEAT_CLASSES = 8
GROUP_HEATS = 24
"""Groups whose confusions the page shows."""
MIXUPS = 6
FREQUENT = 0.03
"""Share of a class from which a mix-up is listed."""
BUTTON_CLASSES = 12
"""Up to so many classes, each has a button, the first nine of them a key."""
TEXT = 4000
"""Characters of a text that a card shows."""
CELL = 200
CELLS = 24
_JOINERS = "\u200c\u200d"
"""Invisible characters that scripts and emoji need."""


def render(result: CleaningResult) -> str:
    """Return the page of a result."""
    from jinja2 import Environment

    source = (files("fsla.data") / "report.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, finalize=_finalize)
    numbers = result.task == "regression"
    groups = [_group(row) for row in result.groups.to_dict("records")] if len(result.groups) > 1 else []
    annotators = _annotators(result.annotators, numbers)
    heat, mixups = _confusions(result.confusion)
    cards = [_card(row, number, result) for number, row in enumerate(result.review.to_dict("records"), 1)]
    many = len(result.classes) > BUTTON_CLASSES
    return environment.from_string(source).render(
        style_hash=_hash(source, "style"),
        script_hash=_hash(source, "script"),
        title=f"Which data to trust: {_origin_name(result)}",
        origin=_origin(result),
        decision=_space(result.decision),
        facts=[_space(line) for line in result.facts],
        pictures=_pictures(result),
        groups=groups[:GROUPS],
        more_groups=groups[GROUPS:],
        has_rates=bool(result.groups["noise_rate"].notna().any()) if len(result.groups) else False,
        cards=cards,
        review_data=_review_data(result),
        other_labels=[{"value": _attribute(name), "name": name} for name in result.classes] if many else [],
        numbers=numbers,
        heat=heat,
        group_heats=_group_heats(result),
        mixups=mixups,
        classes=result.classes,
        annotators=annotators[:GROUPS],
        more_annotators=annotators[GROUPS:],
        snippet=_snippet(result),
        notes=[_space(note) for note in result.notes],
        columns=result.columns.head(COLUMNS).to_dict("records"),
        more_columns=max(0, len(result.columns) - COLUMNS),
        candidates=_candidates(result),
        candidate_note=_candidate_note(result),
        loss_name="squared error" if numbers else "log-likelihood",
        duplicates=result.duplicates.head(DUPLICATES).to_dict("records"),
        more_duplicates=max(0, len(result.duplicates) - DUPLICATES),
    )


def visible(text: str) -> str:
    """Return text with characters that a page hides or obeys, such as a change of direction, as escapes."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" or c in _JOINERS or c == "\u00a0" or (c.isspace() and c > "\x7f")
        else c.encode("unicode_escape").decode("ascii")
        for c in text
    )  # fmt: skip


def _finalize(value: Any) -> Any:
    if isinstance(value, Markup):
        return value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return visible(value) if isinstance(value, str) else value


def _attribute(text: str) -> Markup:
    """Return text for an attribute that a script reads back: nothing is replaced but what HTML needs."""
    return Markup("".join(c if c.isprintable() else f"&#{ord(c)};" for c in str(Markup.escape(text))))


def _hash(source: str, tag: str) -> str:
    """Return the hash by which the page's policy allows its own style or script."""
    match = re.search(rf"<{tag}>(.*?)</{tag}>", source, re.DOTALL)
    assert match is not None
    return "sha256-" + base64.b64encode(hashlib.sha256(match[1].encode()).digest()).decode()


def _space(line: str) -> str:
    return line.replace(" %", "\u00a0%")


def _percent(fraction: float, digits: int = 0) -> str:
    return f"{100 * fraction:.{digits}f}\u00a0%"


def _origin_name(result: CleaningResult) -> str:
    return re.split(r"[/\\]", str(result.inputs.get("data", "")))[-1]


def _origin(result: CleaningResult) -> str:
    rows = f"{len(result.table)} rows, {result.num_checked} checked"
    what = f"labels in {result.inputs.get('label')}"
    group = result.inputs.get("group") or result.inputs.get("annotator")
    return " · ".join([_origin_name(result), rows, what, *([f"groups in {group}"] if group else [])])


def _pictures(result: CleaningResult) -> list[dict[str, Any]]:
    """Return what is drawn: accuracies of models, and right labels before and after correction."""
    pictures = []
    comparison, correction = result.comparison, result.correction
    if comparison is not None:
        entries = [("Everything as it is", comparison.nothing), ("This model", comparison.recommended)]
        if comparison.trusted_only is not None:
            entries.append(("Checked rows alone", comparison.trusted_only))
        title = f"{comparison.metric} on {comparison.rows} checked rows"
        pictures.append(_picture(title, entries, sign_of(comparison.gain), comparison.metric == "accuracy"))
    if correction is not None and correction.fixed + correction.broken:
        rows = correction.rows
        entries = [
            ("Labels as they are", wilson(correction.right_before / rows, rows)),
            ("Corrected labels", wilson(correction.right_after / rows, rows)),
        ]
        pictures.append(_picture(f"right labels of {rows} checked rows", entries, correction.effect, True))
    return pictures


def _picture(title: str, entries: list[tuple[str, Estimate]], effect: Effect, is_share: bool) -> dict[str, Any]:
    """Return intervals on one axis; the first is doing nothing, the second what is judged."""
    low = min(value.low for _, value in entries)
    high = max(value.high for _, value in entries)
    pad = 0.05 * (high - low) or 0.05
    low, high = max(0.0, low - pad), high + pad
    if is_share:
        low, high = math.floor(20 * low) / 20, min(1.0, math.ceil(20 * high) / 20)
    best = {"better": 1, "worse": 0}.get(effect)
    return {
        "title": title,
        "low": _percent(low) if is_share else f"{low:.3g}",
        "high": _percent(high) if is_share else f"{high:.3g}",
        "bars": [
            {
                "name": name,
                "kind": "judged" if i == 1 else "plain",
                "best": i == best,
                "svg": _interval(value, low, high),
                "text": _percent(value.value, 1) if is_share else f"{value.value:.3g}",
            }
            for i, (name, value) in enumerate(entries)
        ],
    }


def _interval(value: Estimate, low: float = 0.0, high: float = 1.0) -> Markup:
    """Return a dot with its interval on a line. Strokes keep their width when the picture is stretched."""

    def place(x: float) -> str:
        return f"{100 * min(max((x - low) / (high - low), 0.0), 1.0):.2f}"

    a, b, dot = place(value.low), place(value.high), place(value.value)
    return Markup(
        '<svg class="interval" viewBox="-2 0 104 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="base" d="M0 5H100"/><path class="range" d="M{a} 5H{b}"/><path class="dot" d="M{dot} 5h0"/></svg>'
    )


def _group(row: dict[str, Any]) -> dict[str, Any]:
    rate = Estimate(row["noise_rate"], row["noise_rate_low"], row["noise_rate_high"])
    weight = Estimate(row["weight"], row["weight_low"], row["weight_high"])
    known = not math.isnan(rate.value)
    return row | {
        "reason": "" if row["decision"] == "keep" else _space(str(row["reason"])),
        "rate": f"{100 * rate.value:.0f}\u00a0% ({100 * rate.low:.0f} to {100 * rate.high:.0f})"
        if known
        else "unknown",
        "rate_svg": _interval(rate) if known else "",
        "weight_text": f"{weight.value:.2f} ({weight.low:.2f} to {weight.high:.2f})",
        "weight_svg": _interval(weight),
        "quality": f"{row['label_quality']:.2f}",
    }


def _annotators(table: pd.DataFrame, numbers: bool) -> list[dict[str, Any]]:
    worst = table.sort_values("rmse" if numbers else "accuracy", ascending=not numbers) if len(table) else table
    rows = []
    for row in worst.to_dict("records"):
        if numbers:
            known = not math.isnan(row["bias"])
            row |= {name: f"{row[name]:+.3g}" if known else "no checked row" for name in ("bias",)}
            row["rmse"] = f"{row['rmse']:.3g}" if known else ""
        else:
            value = Estimate(row["accuracy"], row["accuracy_low"], row["accuracy_high"])
            known = not math.isnan(value.value)
            row["svg"] = _interval(value) if known else ""
            low, high = 100 * value.low, 100 * value.high
            row["accuracy"] = f"{_percent(value.value)} ({low:.0f} to {high:.0f})" if known else "no checked row"
        rows.append(row)
    return rows


def _confusions(confusion: pd.DataFrame) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the heat map (none for many classes) and the most frequent mix-ups."""
    names = list(confusion.columns)
    values = confusion.to_numpy()
    pairs = [(values[i, j], i, j) for i in range(len(names)) for j in range(len(names)) if i != j]
    mixups = [
        {"share": _percent(rate), "true": names[i], "given": names[j]}
        for rate, i, j in sorted(pairs, key=lambda pair: -pair[0])[:MIXUPS]
        if rate >= FREQUENT
    ]
    return [] if len(names) > HEAT_CLASSES else _heat(confusion), mixups


def _heat(confusion: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {"name": name, "cells": [{"level": min(9, int(10 * value)), "text": f"{100 * value:.0f}"} for value in line]}
        for name, line in zip(confusion.columns, confusion.to_numpy(), strict=True)
    ]


def _group_heats(result: CleaningResult) -> list[dict[str, Any]]:
    """Return heat maps of groups: those of the groups with most labels, if they are small enough to read."""
    if len(result.classes) > GROUP_HEAT_CLASSES:
        return []
    sizes = dict(zip(result.groups["group"], result.groups["n_samples"], strict=True))
    names = sorted(result.group_confusions, key=lambda name: -sizes.get(name, 0))[:GROUP_HEATS]
    return [{"name": name, "heat": _heat(result.group_confusions[name])} for name in names]


def _card(row: dict[str, Any], number: int, result: CleaningResult) -> dict[str, Any]:
    given_text, suggested = row["given_label"], row["suggested_label"]
    cells = row.get("cells") or {}
    picture = row.get("image")
    text = row.get("text")
    return {
        "number": number,
        "row": row["row"],
        "name": f"row {row['row']}" if str(row["id"]) == str(row["row"]) else f"id {_cut(str(row['id']), 60)}",
        "group": row.get("group", ""),
        "given": _label_text(given_text),
        "reason": _space(str(row["reason"])),
        "picture": Markup(base64.b64encode(picture).decode("ascii")) if isinstance(picture, bytes) else "",
        "text": _cut(text, TEXT) if isinstance(text, str) else "",
        "cells": [(_cut(str(name), CELL), _cut(str(cell), CELL)) for name, cell in cells.items() if cell][:CELLS],
        "choices": _choices(given_text, suggested, result),
    }


def _choices(given_text: Any, suggested: Any, result: CleaningResult) -> list[dict[str, Any]]:
    """Return a button a class; with many classes (or numbers) one for the given and one for the suggested one."""
    given_text, suggested = _label_text(given_text), _label_text(suggested)
    if result.task == "classification" and len(result.classes) <= BUTTON_CLASSES:
        labels = list(result.classes)
    else:
        labels = list(dict.fromkeys(label for label in (given_text, suggested) if label))
    notes = {given_text: "given", suggested: "suggested"} | (
        {given_text: "given, suggested"} if given_text == suggested else {}
    )
    return [
        {
            "value": _attribute(label),
            "name": _cut(label, 60),
            "note": notes.get(label, ""),
            "suggested": label == suggested,
        }
        for label in labels
    ]


def _label_text(label: Any) -> str:
    return "" if label is None else f"{label:.4g}" if isinstance(label, float) else str(label)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]} … ({len(text)} characters)"


def _review_data(result: CleaningResult) -> Markup:
    """Return what the script needs to write reviewed.csv."""
    names = ("row", "id", "given_label", "is_random")
    rows = [
        {"row": row, "id": str(name), "given": _label_text(given_text), "random": random}
        for row, name, given_text, random in zip(*(result.review[name].tolist() for name in names), strict=True)
    ]
    header = ["row", "id", "given_label", "checked_label", "is_random"]
    content = json.dumps({"header": header, "rows": rows})
    digest = hashlib.blake2b(f"{_origin(result)} {content}".encode(), digest_size=12).hexdigest()
    return _attribute(json.dumps({"key": f"fsla-review-{digest}", "header": header, "rows": rows}))


def _snippet(result: CleaningResult) -> str:
    roles = result.columns
    names = [str(name) for name in roles.loc[roles["role"].isin(["feature", "text", "image"]), "column"]]
    features = repr(names[0]) if len(names) == 1 else str(names) if len(names) <= 12 else "features"
    label = repr(str(result.inputs["label"]))
    training = (
        "# Train a model of your own on the cleaned rows, with a weight each:\n"
        'rows = pd.read_csv("cleaned.csv")\n'
        f'your_model.fit(rows[{features}], rows[{label}], sample_weight=rows["sample_weight"])'
    )
    if result.model.unsaved_part() is not None:
        return f"import pandas as pd\n{training}"
    return (
        "import pandas as pd, fsla\n"
        'model = fsla.data.load_model("model.safetensors")\n'
        'print(model.predict(pd.read_csv("new.csv")))  # takes the columns of the table\n\n' + training
    )


def _candidates(result: CleaningResult) -> list[dict[str, Any]]:
    loss = "squared_error" if result.task == "regression" else "log_likelihood"
    return [
        {
            "name": f"{row['strategy']}, {row['learner']}",
            "share": _percent(row["share"]),
            "loss": f"{row[loss]:.3g}",
            "accuracy": _percent(row["accuracy"], 1) if isinstance(row.get("accuracy"), float) else "",
            "seconds": f"{row['seconds']:.1f}",
        }
        for row in result.candidates.to_dict("records")
    ]


def _candidate_note(result: CleaningResult) -> str:
    if result.comparison is None:
        return "Figures are measured on given labels, because no row is checked."
    shares_of_candidates = result.candidates["share"]
    sure = f"The largest share is {_percent(float(shares_of_candidates.max()))}" if len(shares_of_candidates) else ""
    names = result.candidates.loc[shares_of_candidates >= 0.05, "strategy"].drop_duplicates().tolist()
    return f"Figures are measured on held-out checked rows. {sure}; strategies that count: {join_names(names)}."
