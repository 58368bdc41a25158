"""Which runs make which figure of section 6.2 and Appendix E, at two scales.

    smoke   scikit-learn's digits, 600 + 500 images, softmax regression with a ridge, 300 steps: minutes, offline
    paper   5000 + 5000 images, the four-layer network, 2000 steps, Appendix E's constants

The smoke setting was picked among a few: on the digits a small network hardly learns in 300 steps, and cleaning
then changes nothing. δ shrinks there with the number of samples, since λ_j's gradient grows with 1/N; the rates of ω, v
and d stay.

No run has a wall-clock budget unless one is asked for: what a figure shows does not depend on the machine, times aside.
The figures of the paper compare at equal steps; the overview gives every method the same number of oracle calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fsla._checks import pick, positive, whole_number
from fsla_reproduction.cleaning import RunSpec
from fsla_reproduction.datasets import TaskSpec
from fsla_reproduction.methods import Bp, Cg, Fsla, Method, NoCleaning, Ns, Oracle


@dataclass(frozen=True)
class CleaningSpec:
    """What was asked for, and so what an output folder holds. Figures and seeds may be added to a folder later."""

    preset: str = "smoke"
    model: str | None = None
    time_limit: float | None = None
    """Minutes of a run."""

    def __post_init__(self) -> None:
        pick(self.preset, PRESETS, "preset")
        positive(self.time_limit, "time_limit", "reproduce", optional=True)


@dataclass(frozen=True)
class Panel:
    """Runs that are drawn together: a title, and a spec for each label."""

    title: str
    runs: Mapping[str, RunSpec]


@dataclass(frozen=True)
class Panels:
    """The panels of every figure, built once for what was asked."""

    cleaning_spec: CleaningSpec
    base: RunSpec
    """FSLA with the usual settings."""
    figures: Mapping[str, tuple[Panel, ...]]

    def panel(self, figure: str, title: str) -> Panel:
        """The panel of a figure that has this title."""
        by_title = {panel.title: panel for panel in pick(figure, self.figures, "figure")}
        return pick(title, by_title, f"panel of {figure}")

    def runs(self, figures: tuple[str, ...], seeds: int) -> list[RunSpec]:
        """Every run that the figures need, once, the first seed of all before the second of any."""
        whole_number(seeds, "seeds", "reproduce")
        selected = [panel for name in figures for panel in pick(name, self.figures, "figure")]
        specs = [spec for panel in selected for spec in panel.runs.values()]
        return list(dict.fromkeys(spec.with_seed(seed) for seed in range(seeds) for spec in specs))


@dataclass(frozen=True)
class Preset:
    base: RunSpec
    calls: int
    """Oracle calls of each run of the overview."""
    bp: tuple[int, ...]
    warm: tuple[int, ...]
    """K of the warm-started NS and CG (T = 1)."""
    cold: tuple[int, ...]
    """T of the restarted ones (K = 10)."""
    others: Mapping[str, TaskSpec]
    """The tasks of Figure 4."""
    batches: tuple[int, ...]


_DIGITS = TaskSpec("digits", n_train=600, n_valid=500)
PRESETS = {
    "smoke": Preset(
        RunSpec(
            _DIGITS, model="softmax", steps=300, every=20, batch=64,
            delta=120.0, c_tau=1 / 120, c_beta=0.1 / 120, c_eta=0.9 / 120,
        ),
        calls=4000,
        bp=(1, 5, 20),
        warm=(1, 5, 10, 20),
        cold=(5, 20),
        others={
            "digits, wrong classes": replace(_DIGITS, noise="wrong", rate=0.7),
            "digits, pair flips": replace(_DIGITS, noise="pair", rate=0.4),
        },
        batches=(8, 32, 64, 128),
    ),
    "paper": Preset(
        RunSpec(TaskSpec("mnist")),
        calls=10_000,
        bp=(1, 11, 51, 101, 201),
        warm=(1, 5, 10, 20),
        cold=(5, 20, 50),
        others={"Fashion-MNIST": TaskSpec("fashion-mnist"), "QMNIST": TaskSpec("qmnist")},
        batches=(32, 64, 128, 256, 512),
    ),
}  # fmt: skip


def panels(cleaning_spec: CleaningSpec) -> Panels:
    """Build the panels of every figure."""
    preset = PRESETS[cleaning_spec.preset]
    limit = cleaning_spec.time_limit
    base = replace(preset.base, budget_s=None if limit is None else 60 * limit)
    if cleaning_spec.model is not None:
        base = replace(base, model=cleaning_spec.model)
    preset = replace(preset, base=base)
    return Panels(cleaning_spec, base, {name: tuple(build(preset)) for name, build in FIGURES.items()})


def _methods(base: RunSpec, *methods: Method) -> dict[str, RunSpec]:
    return {method.legend: replace(base, method=method) for method in methods}


def _overview(s: Preset) -> list[Panel]:
    """Every method with the same number of oracle calls, and some sixty records."""
    methods = (
        Fsla(),
        Fsla(momentum="none"),
        Cg(1, 1),
        Cg(1, 10),
        Cg(1, 10, momentum="none"),
        NoCleaning(),
    )
    runs = {}
    for method in methods:
        steps = s.calls // method.calls
        runs[method.legend] = replace(s.base, method=method, steps=steps, every=max(1, steps // 60))
    return [Panel("equal oracle calls", runs)]


def _fig2(s: Preset) -> list[Panel]:
    return [Panel("FSLA and BP", _methods(s.base, Fsla(), *(Bp(T) for T in s.bp), NoCleaning(), Oracle()))]


def _fig3(s: Preset) -> list[Panel]:
    return [
        Panel("NS, warm start", _methods(s.base, Fsla(), *(Ns(1, K) for K in s.warm))),
        Panel("NS, restarted", _methods(s.base, Fsla(), Ns(1, 10), *(Ns(T, 10) for T in s.cold))),
        Panel("CG, warm start", _methods(s.base, Fsla(), *(Cg(1, K) for K in s.warm))),
        Panel("CG, restarted", _methods(s.base, Fsla(), Cg(1, 10), *(Cg(T, 10) for T in s.cold))),
    ]


def _fig4(s: Preset) -> list[Panel]:
    return [
        Panel(title, _methods(replace(s.base, task=task), Fsla(), Cg(1, 10), NoCleaning()))
        for title, task in s.others.items()
    ]


def _fig5(s: Preset) -> list[Panel]:
    base = s.base
    return [
        Panel("batch size", {f"{size}": replace(base, batch=size) for size in s.batches}),
        _factor("δ", base, base.delta, lambda x: replace(base, delta=x), (0.25, 0.5, 1.0, 2.0)),
    ]


def _fig6(s: Preset) -> list[Panel]:
    base = s.base
    return [
        _factor("c_τ", base, base.c_tau, lambda x: replace(base, c_tau=x), (0.25, 0.5, 1.0, 2.0)),
        _factor("c_η", base, base.c_eta, lambda x: replace(base, c_eta=x), (1 / 9, 1 / 3, 1.0)),
        _factor("c_β", base, base.c_beta, lambda x: replace(base, c_beta=x), (0.2, 0.5, 1.0, 2.0, 5.0)),
    ]


def _momentum(s: Preset) -> list[Panel]:
    """Not in the paper: what STORM gains, what sharing one batch costs it, and Gauss-Newton for the Hessian."""
    storm = s.base
    average = replace(s.base, method=Fsla(momentum="average"))
    none = replace(s.base, method=Fsla(momentum="none"))
    storm_newton = replace(s.base, method=Fsla(curvature="gauss-newton"))
    none_newton = replace(s.base, method=Fsla(momentum="none", curvature="gauss-newton"))
    return [
        Panel(
            "momentum",
            {
                "storm": storm,
                "average": average,
                "none": none,
                "storm, shared batches": replace(storm, samples="shared"),
            },
        ),
        Panel(
            "curvature",
            {
                "storm": storm,
                "none": none,
                "storm, Gauss-Newton": storm_newton,
                "none, Gauss-Newton": none_newton,
            },
        ),
    ]


def _factor(
    title: str, base: RunSpec, value: float, changed: Callable[[float], RunSpec], factors: tuple[float, ...]
) -> Panel:
    """One constant times each factor; a factor of 1 is the base run itself."""
    runs = {}
    for factor in factors:
        label = f"{float(f'{value * factor:.3g}'):g}"
        runs[label] = base if factor == 1 else changed(value * factor)
    return Panel(title, runs)


FIGURES: dict[str, Callable[[Preset], list[Panel]]] = {
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
