"""What the figures show: one colour for FSLA, distinct curves, axes with units, the data and the seeds."""

from contextlib import contextmanager

import pytest
from matplotlib.figure import Figure

from fsla_reproduction.figures import FIGURES, GROUPS, PRESETS, CleaningSpec, panels
from fsla_reproduction.methods import Cg, Fsla
from fsla_reproduction.plots import cleaning, style, synthetic
from fsla_reproduction.results import Results

ORACLES = ("grad", "hvp", "mixed_hvp", "outer_grad_omega")


def record(step, loss):
    histogram = [1] + [0] * 19
    return {
        "step": step,
        "seconds": step * 0.02,
        "oracles": dict.fromkeys(ORACLES, step) | {"joint": 0},
        "status": "finished" if step == 40 else "running",
        "valid_loss": loss,
        "weight_auroc": 1 - loss / 4,
        "histogram_clean": histogram,
        "histogram_corrupted": histogram,
        "weight_clean": 0.6,
        "weight_corrupted": 0.4,
    }


def results(seeds=1, preset="smoke"):
    """Every run of every figure; FSLA is the best."""
    every = panels(CleaningSpec(preset))
    runs = {}
    for spec in every.runs(GROUPS["all"], seeds):
        end = (0.5 if isinstance(spec.method, Fsla) else 1.0) - 0.4 * (spec.task.noise == "pair")
        runs[spec.name] = [record(0, 2.0), record(20, 1.5), record(40, end + spec.task.seed / 10)]
    return Results(every, runs, seeds)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn, by name. They are not saved, which would take most of the time."""
    figures = {}

    @contextmanager
    def recording(path, *args, **kwargs):
        figures[path.name] = Figure()
        yield figures[path.name]

    monkeypatch.setattr(cleaning, "figure", recording)
    monkeypatch.setattr(synthetic, "figure", recording)
    return figures


def lines(fig):
    return [line for ax in fig.axes for line in ax.get_lines() if not line.get_label().startswith("_")]


def titles(fig):
    return [ax.get_title() for ax in fig.axes if ax.get_lines()]


def test_figures_have_title_and_labels(tmp_path, drawn):
    paths = cleaning.draw(tmp_path, tuple(FIGURES), results(seeds=2))
    assert {path.stem for path in paths} == {*FIGURES, "oracle-calls", "weights"} == set(drawn)
    for name, fig in drawn.items():
        titles = fig.get_suptitle() + "".join(ax.get_title() for ax in fig.axes)
        assert "digits" in titles
        assert "600 + 500 images, " in titles
        assert ("seed 0" if name == "weights" else "seeds 0 to 1") in titles
        assert all(ax.get_xlabel() for ax in fig.axes if ax.get_lines())
        assert fig.axes[0].get_ylabel()
        for ax in fig.axes:
            low, high = ax.get_ylim()
            assert all(low <= y <= high for line in ax.get_lines() for y in line.get_ydata())  # nothing is cut off


def test_figures_save_png_and_svg(tmp_path):
    (path,) = cleaning.draw(tmp_path, ("fig4",), results())
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in path.with_suffix(".svg").read_text()
    assert {file.name for file in tmp_path.iterdir()} == {"fig4.png", "fig4.svg"}  # no temporary file is left


@pytest.mark.parametrize("preset", PRESETS)
def test_figures_style_curves_uniquely(tmp_path, drawn, preset):
    by_figure = results(preset=preset)
    cleaning.draw(tmp_path, tuple(FIGURES), by_figure)
    for name, fig in drawn.items():
        if name in ("fig5", "fig6", "weights"):
            continue
        default = {line.get_color() for line in lines(fig) if line.get_label() in ("FSLA", "storm")}
        assert default == {style.FSLA}, name
    for name in ("fig5", "fig6"):
        for ax in (ax for ax in drawn[name].axes if ax.get_lines()):
            assert sum(line.get_color() == style.FSLA for line in ax.get_lines()) == 1  # the usual setting
    for fig in drawn.values():
        for ax in fig.axes:
            styles = [(line.get_color(), line.get_linestyle()) for line in ax.get_lines()]
            assert len(set(styles)) == len(styles)


def test_figures_style_method_consistently(tmp_path, drawn):
    cleaning.draw(tmp_path, tuple(FIGURES), results())
    styles = {}
    for name in ("overview", "fig2", "fig3", "fig4", "oracle-calls"):
        for line in lines(drawn[name]):
            styles.setdefault(line.get_label(), set()).add((line.get_color(), line.get_linestyle()))
    assert {label: len(variants) for label, variants in styles.items()} == dict.fromkeys(styles, 1)
    assert {"FSLA", "CG_1_10", "NS_1_10", "BP_20", "no cleaning", "oracle"} <= set(styles)


def test_figures_time_axis_is_logarithmic_seconds(tmp_path, drawn):
    cleaning.draw(tmp_path, ("fig2",), results())
    by_steps, by_time = (ax for ax in drawn["fig2"].axes if ax.get_lines())
    assert (by_steps.get_xscale(), by_time.get_xscale()) == ("linear", "log")
    assert "seconds" in by_time.get_xlabel()
    fsla = next(line for line in by_time.get_lines() if line.get_label() == "FSLA")
    assert list(fsla.get_xdata()) == [0.4, 0.8]


def test_figures_overview_names_leader(tmp_path, drawn):
    cleaning.draw(tmp_path, ("overview",), results())
    ranking, loss, _ = titles(drawn["overview"])
    assert "best: FSLA" in ranking
    assert "lowest: FSLA with STORM, FSLA without momentum" in loss
    by_figure = results()
    runs = by_figure.panels.panel("overview", "equal oracle calls").runs
    records = {spec.name: by_figure.of(spec).seeds[0] for spec in runs.values()}
    records[runs[Cg(1, 10).legend].name] = [record(0, 2.0), record(20, 1.0), record(40, 0.1)]
    cleaning.draw(tmp_path, ("overview",), Results(by_figure.panels, records, 1))
    ranking, loss, _ = titles(drawn["overview"])
    assert "best: CG_1_10 (0.975)" in ranking
    assert "lowest: CG_1_10 with STORM, FSLA without momentum" in loss


def test_figures_mark_stopped_run(tmp_path, drawn):
    by_figure = results()
    spec = by_figure.panels.panel("fig4", "digits, pair flips").runs["CG_1_10"]
    records = {
        s.name: by_figure.of(s).seeds[0] for panel in by_figure.panels.figures["fig4"] for s in panel.runs.values()
    }
    records[spec.name] = [record(0, 2.0), record(20, 1.5) | {"status": "budget"}]
    cleaning.draw(tmp_path, ("fig4",), Results(by_figure.panels, records, 1))
    labels = [line.get_label() for line in lines(drawn["fig4"])]
    assert "CG_1_10 (to step 20)" in labels
    assert sum(line.get_marker() == "x" for ax in drawn["fig4"].axes for line in ax.get_lines()) == 1


def estimate(run, method, K, s_one):
    prices = {"hvp_one": K, "hvp_every": K * K, "s_one": s_one, "s_every": K * 0.1}
    return {"run": run, "seed": 0, "method": method, "K": K, "relative_error": 0.5**K, **prices}


def test_figures_synthetic_are_drawn(tmp_path, drawn):
    noisy = [0.1, 0.3, 0.2, 0.5, 0.4]
    methods = ("NS", "BP", "CG", "FSLA")
    rows = [
        estimate(run, method, K, seconds)
        for run in ("estimators", "timing")
        for method in methods
        for K, seconds in enumerate(noisy, 1)
    ]
    rows += [{"run": "sequences", "seed": 0, "exponent": 1.0, "K": K, "relative_error": K**-2.0} for K in (1, 10, 100)]
    paths = synthetic.draw(tmp_path, rows)
    assert {path.stem for path in paths} == set(drawn)
    for name in ("fig1-estimators", "fig1-products", "fig1-time"):
        colours = {line.get_label(): line.get_color() for line in lines(drawn[name])}
        assert colours == {"NS": style.NS, "BP": style.BP, "CG": style.CG, "FSLA": style.FSLA}
    for ax in drawn["fig1-time"].axes:
        assert ax.get_xlabel() == "seconds"
        for line in ax.get_lines():
            assert list(line.get_xdata()) == sorted(line.get_xdata())  # no curve runs backwards in time
    assert all("10 000 rows" in fig.get_suptitle() and "seed 0" in fig.get_suptitle() for fig in drawn.values())


def test_figures_failure_keeps_old_file(tmp_path):
    (tmp_path / "x.png").write_bytes(b"old")

    def draw(title):
        with style.figure(tmp_path / "x") as fig:
            fig.suptitle(title)

    with pytest.raises(ValueError, match="nonsense"):
        draw("$\\nonsense$")
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]
    assert (tmp_path / "x.png").read_bytes() == b"old"


@pytest.mark.parametrize(("x", "text"), [(0.02, "0.02"), (3.0, "3"), (4000.0, "4 000"), (1e6, "1 000 000")])
def test_figures_axis_numbers_are_plain(x, text):
    assert style.plain_number(x) == text
