"""One look for every figure: legible fonts, a colour for each family of methods, PNG and SVG.

FSLA is blue everywhere, NS orange, BP purple, CG green; within a family more steps are darker. Restarted methods are
dashed, those without momentum dash-dotted. Colour-blind readers can distinguish hues and shades (after Okabe and
Ito).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, assert_never

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from fsla._storage._files import write_bytes
from fsla_reproduction.methods import Bp, Cg, Fsla, Method, NoCleaning, Ns, Oracle

FSLA = "#0072B2"
NS = "#D55E00"
BP = "#A3327B"
CG = "#009E73"
GREY = "#777777"
_SHADES = {
    "NS": LinearSegmentedColormap.from_list("NS", ["#F2BE22", NS, "#571C00"]),
    "BP": LinearSegmentedColormap.from_list("BP", ["#E9A3D8", BP, "#3A0A2B"]),
    "CG": LinearSegmentedColormap.from_list("CG", ["#8CDB9A", CG, "#00332B"]),
}
_DARKEST_K = 20
_DARKEST_T = 80
_DARKEST_BP = 201
"""As many steps have the darkest shade of their family."""
_SETTINGS = LinearSegmentedColormap.from_list("settings", ["#F0A8A0", "#C0392B", "#4A0000"])

_STYLE: Any = {
    "font.size": 12,
    "axes.grid": True,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "legend.fontsize": 11,
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "lines.linewidth": 2.0,
    "savefig.dpi": 160,
    "svg.hashsalt": "fsla",
}


@dataclass(frozen=True)
class CurveStyle:
    """How a curve is drawn."""

    colour: str
    dash: str | tuple[float, tuple[float, float]] = "-"
    width: float = 2.0


def curve_style(method: Method) -> CurveStyle:
    """The look of a method, the same in every figure."""
    match method:
        case Fsla(curvature="gauss-newton"):
            storm = (
                method.momentum == "storm"
            )  # dots in turn: where the Hessian is its own Gauss-Newton matrix, both show
            return CurveStyle("#E69F00" if storm else "#000000", (0 if storm else 3, (1, 5)), 2.8)
        case Fsla(momentum="storm"):
            return CurveStyle(FSLA, width=2.8)
        case Fsla(momentum="none"):
            return CurveStyle("#4FA8DC", "-.")
        case Fsla():
            return CurveStyle("#00304F", "--")
        case Bp():
            return CurveStyle(_shade("BP", method.T, _DARKEST_BP), _dash(method.momentum))
        case Ns(T=1):
            return CurveStyle(_shade("NS", method.K, _DARKEST_K), _dash(method.momentum))
        case Cg(T=1):
            return CurveStyle(_shade("CG", method.K, _DARKEST_K), _dash(method.momentum))
        case Ns():
            return CurveStyle(_shade("NS", method.T, _DARKEST_T), "--")
        case Cg():
            return CurveStyle(_shade("CG", method.T, _DARKEST_T), "--")
        case NoCleaning():
            return CurveStyle(GREY, ":")
        case Oracle():
            return CurveStyle(GREY, "--")
        case _:
            assert_never(method)


def setting(place: int, number: int) -> CurveStyle:
    """The look of FSLA with one setting other than usual: the place-th of so many, from light to dark."""
    return CurveStyle(to_hex(_SETTINGS(place / max(1, number - 1))))


def _shade(family: str, steps: int, darkest: int) -> str:
    return to_hex(_SHADES[family](min(1.0, math.log(steps) / math.log(darkest)) ** 1.5))


def _dash(momentum: str) -> str:
    return "-." if momentum == "none" else "-"


def log_axis(ax: Axes) -> None:
    """A logarithmic x axis with plain numbers: 0.5, 1, 2 … rather than powers of ten."""
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    decades = math.log10(high / low)
    subs = (1.0, 2.0, 5.0) if decades < 1.5 else (1.0, 3.0) if decades < 3.2 else (1.0,)
    ax.xaxis.set_major_locator(LogLocator(base=10, subs=subs))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: plain_number(x)))
    ax.xaxis.set_minor_formatter(NullFormatter())


def plain_number(x: float) -> str:
    """A number without a power of ten; thousands are set apart."""
    return f"{x:,.0f}".replace(",", " ") if x >= 10 else f"{x:g}"


@contextmanager
def figure(
    path: Path, columns: float = 1, rows: int = 1, *, size: tuple[float, float] = (5.6, 4.2)
) -> Iterator[Figure]:
    """Yield an empty figure, and save it as path.png and path.svg, each whole or not at all."""
    with plt.rc_context(_STYLE):
        fig = plt.figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        try:
            yield fig
            for suffix, metadata in ((".png", None), (".svg", {"Date": None})):
                picture = BytesIO()
                fig.savefig(picture, format=suffix[1:], metadata=metadata, bbox_inches="tight")
                write_bytes(path.with_name(f"{path.name}{suffix}"), picture.getvalue())
        finally:
            plt.close(fig)
