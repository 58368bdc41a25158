"""The figure of the sources experiment, from its records alone."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes

from fsla_reproduction.folder import Record
from fsla_reproduction.plots.style import BP, CG, FSLA, GREY, NS, figure
from fsla_reproduction.problems.sources import GRAMMARS

_GRAMMAR = {"A": FSLA, "B": NS, "C": CG, "noise": GREY}
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)))
_LOSS = {"learnt": ("learnt weights", BP), "equal": ("equal weights", "#E69F00")}


def draw(folder: Path, records: list[Record]) -> list[Path]:
    """Draw the weights of the first seed over steps, and the loss on fresh text; return the PNG file."""
    path = folder / "sources"
    first = [r for r in records if r["seed"] == 0]
    with figure(path, columns=2, size=(6.4, 4.0)) as fig:
        weights_ax, loss_ax = fig.subplots(1, 2)
        _weights(weights_ax, [r for r in first if r["run"] == "learnt"])
        _losses(loss_ax, first)
        handles, labels = weights_ax.get_legend_handles_labels()
        more_handles, more_labels = loss_ax.get_legend_handles_labels()
        fig.legend(handles + more_handles, labels + more_labels, loc="outside right upper", fontsize=10)
    return [path.with_suffix(".png")]


def _weights(ax: Axes, records: list[Record]) -> None:
    steps = [r["step"] for r in records]
    for source, grammar in enumerate(GRAMMARS):
        dash = _DASHES[GRAMMARS[:source].count(grammar)]
        label = f"source {source}: {'grammar ' if grammar != 'noise' else ''}{grammar}"
        values = [r["weights"][source] for r in records]
        ax.plot(steps, values, color=_GRAMMAR[grammar], linestyle=dash, label=label)
    ax.set_ylim(-0.03, 1.03)
    ax.set_xlabel("step")
    ax.set_ylabel("weight of the source")
    ax.set_title("Weights, learnt on text of grammar A", fontsize=11)


def _losses(ax: Axes, records: list[Record]) -> None:
    for run, (label, colour) in _LOSS.items():
        run_records = [r for r in records if r["run"] == run]
        ax.plot([r["step"] for r in run_records], [r["held_out_loss"] for r in run_records], color=colour, label=label)
    ax.set_xlabel("step")
    ax.set_ylabel("cross entropy of a token")
    ax.set_title("Loss on fresh text of grammar A", fontsize=11)
