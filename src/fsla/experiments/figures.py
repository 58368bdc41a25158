"""Which runs make which figure of section 6.2 and Appendix E, at two scales.

    smoke   scikit-learn's digits, 600 + 500 images, softmax regression with a ridge, 300 steps: minutes, offline
    paper   5000 + 5000 images, the four-layer network, 2000 steps, Appendix E's constants

The smoke setting was picked by a look at a few: on the digits a small network hardly learns in 300 steps, and cleaning
then changes nothing. δ shrinks there with the number of samples, since λ_j's gradient grows with 1/N; the rates of ω, v
and d stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fsla.checks import pick, positive, whole
from fsla.data import TaskSpec
from fsla.experiments.cleaning import RunSpec


@dataclass(frozen=True)
class CleaningSpec:
    """What was asked for, and so what an output folder holds. Figures and seeds may be added to a folder later."""

    scale: str = "smoke"
    model: str | None = None
    budget_s: float | None = None

    def __post_init__(self) -> None:
        pick(self.scale, SCALES, "scale")
        positive(self.budget_s, "budget", "reproduce")


@dataclass(frozen=True)
class Panel:
    """Runs that are drawn together: a title, and a spec for each label."""

    title: str
    runs: dict[str, RunSpec]


@dataclass(frozen=True)
class Scale:
    base: RunSpec
    bp: tuple[int, ...]
    warm: tuple[int, ...]
    """K of the warm-started NS and CG (T = 1)."""
    cold: tuple[int, ...]
    """T of the restarted ones (K = 10)."""
    others: dict[str, TaskSpec]
    """The tasks of Figure 4."""
    batches: tuple[int, ...]


_DIGITS = TaskSpec("digits", n_train=600, n_valid=500)
SCALES = {
    "smoke": Scale(
        RunSpec(
            _DIGITS, model="softmax", steps=300, every=20, batch=64,
            delta=120.0, c_tau=1 / 120, c_beta=0.1 / 120, c_eta=0.9 / 120, budget_s=30.0,
        ),
        bp=(1, 5, 20),
        warm=(1, 5, 10, 20),
        cold=(5, 20),
        others={
            "digits, wrong classes": replace(_DIGITS, noise="wrong", rate=0.7),
            "digits, pair flips": replace(_DIGITS, noise="pair", rate=0.4),
        },
        batches=(8, 32, 64, 128),
    ),
    "paper": Scale(
        RunSpec(TaskSpec("mnist"), budget_s=900.0),
        bp=(1, 11, 51, 101, 201),
        warm=(1, 5, 10, 20),
        cold=(5, 20, 50),
        others={"Fashion-MNIST": TaskSpec("fashion-mnist"), "QMNIST": TaskSpec("qmnist")},
        batches=(32, 64, 128, 256, 512),
    ),
}  # fmt: skip


def panels(figure: str, asked: CleaningSpec) -> list[Panel]:
    """The panels of a figure."""
    scale = SCALES[asked.scale]
    changes: dict[str, object] = {}
    if asked.model is not None:
        changes["model"] = asked.model
    if asked.budget_s is not None:
        changes["budget_s"] = asked.budget_s
    return pick(figure, FIGURES, "figure")(replace(scale, base=replace(scale.base, **changes)))  # type: ignore[arg-type]


def _methods(base: RunSpec, *names: str) -> dict[str, RunSpec]:
    return {name.upper(): replace(base, method=name) for name in names}


def _overview(s: Scale) -> list[Panel]:
    return [Panel("Data hyper-cleaning", _methods(s.base, "fsla", "cg_1_1", "cg_1_10", "ns_1_10", "none"))]


def _fig2(s: Scale) -> list[Panel]:
    return [Panel("FSLA and BP", _methods(s.base, "fsla", *(f"bp_{T}" for T in s.bp), "none", "oracle"))]


def _fig3(s: Scale) -> list[Panel]:
    warm, cold = [f"1_{K}" for K in s.warm], [f"{T}_10" for T in s.cold]
    return [
        Panel("NS, warm start", _methods(s.base, "fsla", *(f"ns_{x}" for x in warm))),
        Panel("NS, restarted", _methods(s.base, "fsla", "ns_1_10", *(f"ns_{x}" for x in cold))),
        Panel("CG, warm start", _methods(s.base, "fsla", *(f"cg_{x}" for x in warm))),
        Panel("CG, restarted", _methods(s.base, "fsla", "cg_1_10", *(f"cg_{x}" for x in cold))),
    ]


def _fig4(s: Scale) -> list[Panel]:
    return [
        Panel(title, _methods(replace(s.base, task=task), "fsla", "cg_1_10", "none"))
        for title, task in s.others.items()
    ]


def _fig5(s: Scale) -> list[Panel]:
    return [
        Panel("batch size", {f"{b}": replace(s.base, batch=b) for b in s.batches}),
        _factor("δ", s.base, "delta", (0.25, 0.5, 1.0, 2.0)),
    ]


def _fig6(s: Scale) -> list[Panel]:
    return [
        _factor("c_τ", s.base, "c_tau", (0.25, 0.5, 1.0, 2.0)),
        _factor("c_η", s.base, "c_eta", (1 / 9, 1 / 3, 1.0)),
        _factor("c_β", s.base, "c_beta", (0.2, 0.5, 1.0, 2.0, 5.0)),
    ]


def _momentum(s: Scale) -> list[Panel]:
    """Not in the paper: what STORM gains, what sharing one batch costs it, and Gauss-Newton for the Hessian."""
    runs = {name: replace(s.base, momentum=name) for name in ("storm", "average", "none")}
    newton = {f"{name}, Gauss-Newton": replace(run, curvature="gauss-newton") for name, run in runs.items()}
    return [
        Panel("momentum", runs | {"storm, shared batches": replace(s.base, samples="shared")}),
        Panel(
            "curvature", {name: runs[name] for name in ("storm", "none")} | {k: newton[k] for k in list(newton)[::2]}
        ),
    ]


def _factor(title: str, base: RunSpec, name: str, factors: tuple[float, ...]) -> Panel:
    """One constant times each factor; a factor of 1 is the base run itself."""
    value = getattr(base, name)
    return Panel(
        title,
        {f"{float(f'{value * f:.3g}'):g}": replace(base, **{name: value * f}) if f != 1 else base for f in factors},
    )


FIGURES: dict[str, Callable[[Scale], list[Panel]]] = {
    "overview": _overview,
    "fig2": _fig2,
    "fig3": _fig3,
    "fig4": _fig4,
    "fig5": _fig5,
    "fig6": _fig6,
    "momentum": _momentum,
}
GROUPS = {
    "overview": ("overview",),
    "fig2": ("fig2",),
    "fig3": ("fig3",),
    "fig4": ("fig4",),
    "ablations": ("fig5", "fig6", "momentum"),
    "momentum": ("momentum",),
    "all": tuple(FIGURES),
}


def runs(figures: tuple[str, ...], asked: CleaningSpec, seeds: int) -> list[RunSpec]:
    """Every run that the figures need, once, the first seed of all before the second of any."""
    whole(seeds, "seeds", "reproduce")
    base = [spec for f in figures for panel in panels(f, asked) for spec in panel.runs.values()]
    return list(dict.fromkeys(spec.seeded(seed) for seed in range(seeds) for spec in base))
