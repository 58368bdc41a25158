"""`fsla bench data`: its sets, its alternatives, and tables from rows of results."""

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from fsla.data._dataset import Features, TrainingData, Votes
from fsla.data._learners import FineTunedLinearLearner, LinearLearner
from fsla_benchmarks.cli import bench
from fsla_benchmarks.data import alternatives, experiment, measures, report
from fsla_benchmarks.data.experiment import BY_CV, BY_CV_SCORE, PRODUCT, DataSpec, run_alternatives
from fsla_benchmarks.data.mixed import bundled
from fsla_benchmarks.data.plot import draw
from fsla_benchmarks.data.sets import SETS, available_sets, draw_problem, parse_numbers
from fsla_reproduction.folder import RunError

FROM_MEMORY = [name for name, line in SETS.items() if line.origin != "file"]
LEARNER = LinearLearner()


# --- Sets ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FROM_MEMORY)
def test_set_same_seed_is_the_same_and_hides_truth(name):
    """Methods see checked labels only; test rows and checked rows are drawn anew by each seed."""
    size = SETS[name].sizes[0]
    one, again, other = (draw_problem(name, size, seed) for seed in (3, 3, 4))
    data = one.data
    np.testing.assert_array_equal(one.data.features.dense, again.data.features.dense)
    np.testing.assert_array_equal(one.data.votes.label, again.data.votes.label)
    assert not np.array_equal(one.data.features.dense, other.data.features.dense)
    assert len(data.checked_rows) == size
    np.testing.assert_array_equal(data.checked_labels, one.gold[data.checked_rows])
    assert len(one.test) == len(one.test_labels)
    assert one.test.dense.shape[1] == data.features.dense.shape[1]
    assert (np.bincount(data.votes.group, minlength=data.num_groups) > 0).all()
    assert float((data.features.dense**2).sum(1).mean()) == pytest.approx(1.25, abs=0.1)
    known = {row.tobytes() for row in data.features.dense[data.checked_rows]}
    assert not any(row.tobytes() in known for row in one.test.dense)


def test_digit_sources_quality_orders_share_of_right_labels():
    """The rank correlation of the tables needs a quality that the labels bear out."""
    problem = draw_problem("digsrc", 100, 3)
    right = ~problem.wrong_votes
    group = problem.data.votes.group
    share_right = np.bincount(group, right) / np.bincount(group)
    same_pixels = np.array([0, 1, 2, 3, 4, 5, 6, 9])
    assert measures.rank_correlation(share_right[same_pixels], problem.group_quality[same_pixels]) > 0.9


def write_sets(folder):
    """Write small files in the forms of the real ones."""
    rng = np.random.default_rng(0)
    words = [f"word{number}" for number in range(40)]

    def text(label):
        return " ".join(rng.choice(words[label * 20 : label * 20 + 20], 6))

    weak, noisy, scores = ["split,text,label,rule_00,rule_01"], ["split,text,given,label"], []
    for number in range(260):
        label = number % 2
        split = "test" if number >= 200 else "train"
        names = ["HAM", "SPAM"]
        wrong = rng.random() < 0.3
        line = f"{text(label)} {number}"
        weak.append(f"{split},{line},{names[label]},{names[label]},{'' if number % 3 else names[label ^ wrong]}")
        noisy.append(f"{split},{line},{names[label ^ wrong]},{names[label]}")
    for request in range(60):
        line = text(request % 2)
        for annotator in range(3):
            score = 13 + 5 * (request % 2) + annotator
            scores.append(f"{request},{line},A{annotator},{score},{request % 2 - 0.5}")
    (folder / "real").mkdir()
    (folder / "real" / "hausa-news.csv").write_text("\n".join(noisy), encoding="utf-8")
    import gzip

    for name, lines in (("wrench-youtube.csv.gz", weak), ("politeness-wikipedia.csv.gz", scores)):
        head = ["request,text,annotator,score,consensus"] if lines is scores else []
        (folder / name).write_bytes(gzip.compress("\n".join([*head, *lines]).encode()))


def test_sets_from_files_are_read_from_folder_and_subfolder(tmp_path, monkeypatch):
    """Votes are cells of rules, empty where a rule abstains; a text of the test set never trains."""
    from fsla_benchmarks.data import real

    write_sets(tmp_path)
    monkeypatch.setattr(real, "POLITE_TEST_ROWS", 10)
    assert set(available_sets(tmp_path)) == {*FROM_MEMORY, "youtube", "hausa", "polite"}
    weak = draw_problem("youtube", 50, 0, tmp_path)
    assert len(weak.data.features) == 200
    assert len(weak.test) == 60
    assert list(np.bincount(weak.data.votes.group)) == [200, 67]
    assert weak.group_quality[0] == 1
    assert 0.5 < weak.group_quality[1] < 0.9
    assert draw_problem("hausa", 50, 0, tmp_path).data.num_groups == 1
    scores = draw_problem("polite", 30, 0, tmp_path)
    assert scores.data.task == "regression"
    assert scores.data.num_groups == 3
    assert np.bincount(scores.data.votes.row).max() == 2
    with pytest.raises(RunError, match=r"noisy-ag-news\.csv\.gz is neither in"):
        draw_problem("agnews", 50, 0, tmp_path)
    with pytest.raises(RunError, match="Name the folder with --data-dir"):
        draw_problem("agnews", 50, 0, None)


def test_heart_keeps_missing_cells_for_trees(tmp_path):
    """Cells that a hospital did not measure are NaN for trees, and an indicator for linear models."""
    rng = np.random.default_rng(0)
    names = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal"
    lines = [f"hospital,{names},disease"]
    for number in range(240):
        hospital = ("va", "cleveland", "hungarian")[number % 3]
        cells = [f"{value:.1f}" for value in rng.integers(1, 4, 13)]
        cells[11] = "" if hospital == "hungarian" else cells[11]
        lines.append(",".join([hospital, *cells, ("yes", "no")[number % 2]]))
    (tmp_path / "heart-hospitals.csv").write_text("\n".join(lines), encoding="utf-8")
    problem = draw_problem("heart", 50, 0, tmp_path)
    assert problem.data.num_groups == 2
    assert len(problem.test) == 30
    assert np.isnan(problem.data.features.numeric).sum() == 80
    assert np.isfinite(problem.data.features.dense).all()


# --- Alternatives ----------------------------------------------------------------------------------------------------


def make_votes(accuracies, rows=400, seed=0, num_classes=3):
    """Return data in which each group votes on each row, right as often as its accuracy says."""
    rng = np.random.default_rng(seed)
    gold = rng.integers(0, num_classes, rows)
    labels = [
        np.where(rng.random(rows) < accuracy, gold, (gold + rng.integers(1, num_classes, rows)) % num_classes)
        for accuracy in accuracies
    ]
    dense = np.eye(num_classes)[gold] + 0.5 * rng.normal(size=(rows, num_classes))
    data = TrainingData(
        "classification",
        Features(np.column_stack([dense, np.full(rows, 0.5)])),
        Votes(np.tile(np.arange(rows), len(labels)), np.repeat(np.arange(len(labels)), rows), np.concatenate(labels)),
        np.arange(len(labels)),
        np.arange(40),
        gold[:40],
        np.arange(num_classes),
    )
    return data, gold


@pytest.mark.parametrize("one_coin", [False, True])
def test_dawid_skene_beats_majority_and_ranks_groups(one_coin):
    """Two good annotators among five bad ones: their votes decide, and checked rows stay out of the mass."""
    accuracies = [0.95, 0.9, 0.4, 0.4, 0.4, 0.35, 0.35]
    data, gold = make_votes(accuracies)
    mass, score = alternatives.dawid_skene(data, np.arange(40), LEARNER, one_coin=one_coin)
    by_votes = alternatives.majority(data, np.arange(40), LEARNER).mass
    assert not mass[:40].any()
    rows = slice(40, None)
    right = (mass[rows].argmax(1) == gold[rows]).mean()
    assert right > (by_votes[rows].argmax(1) == gold[rows]).mean() + 0.05
    assert measures.rank_correlation(score, np.array(accuracies)) > 0.8


def test_good_sources_by_checked_votes_and_by_model_leave_bad_source_out():
    """Both rules see a source of random labels, whether checked rows carry its votes or not."""
    data, _ = make_votes([0.9, 0.9, 0.33])
    chosen = alternatives.good_sources(data, np.arange(40), LEARNER)
    assert chosen.group_score[:2].min() > chosen.group_score[2] + 0.2
    assert chosen.mass[40:].sum() == 2 * 360
    score = alternatives.score_by_model(data, np.arange(40))
    assert score[:2].min() > 2 * score[2]


def test_confident_issues_equal_those_of_cleanlab():
    """The rule is the published one: checked against the package where it is installed."""
    filters = pytest.importorskip("cleanlab.filter")
    labels, probability = noisy_labels()
    expected = filters.find_label_issues(labels, probability, n_jobs=1)
    np.testing.assert_array_equal(alternatives.confident_issues(labels, probability), expected)


def noisy_labels():
    """Return labels of which a fifth is wrong, and probabilities that mostly know it."""
    rng = np.random.default_rng(0)
    gold = rng.integers(0, 4, 500)
    labels = np.where(rng.random(500) < 0.2, rng.integers(0, 4, 500), gold)
    scores = 2 * np.eye(4)[gold] + rng.normal(size=(500, 4))
    return labels, np.exp(scores) / np.exp(scores).sum(1, keepdims=True)


def test_confident_issues_flag_labels_that_a_model_contradicts():
    """Without the package: most flagged labels are wrong, and none is the model's own choice."""
    labels, probability = noisy_labels()
    issue = alternatives.confident_issues(labels, probability)
    assert not (issue & (probability.argmax(1) == labels)).any()
    assert 40 < issue.sum() < 140


def test_checked_weight_grows_where_votes_are_wrong():
    """Cross-validation must trust checked rows more, the worse the votes are."""
    weights = []
    for accuracy in (0.95, 0.2):
        data, _ = make_votes([accuracy], rows=150)
        mass = alternatives.vote_mass(data)
        weights.append(alternatives.choose_checked_weight(data, mass, np.arange(40)))
    assert weights[0] < weights[1]


def test_agreeing_rows_drop_wrong_votes():
    """Rows that a model of the checked rows contradicts are left out: most of them are wrong."""
    data, gold = make_votes([0.6])
    mass = alternatives.agreeing_rows(data, np.arange(40), LEARNER).mass
    used = mass.any(1)
    assert (mass.argmax(1) == gold)[used].mean() > 0.8


def test_run_alternatives_own_cv_is_the_lowest_held_out_loss():
    """The careful user picks by checked rows alone, and pays for trying everything."""
    problem = draw_problem("wine", 50, 0)
    records = run_alternatives(problem, 0, lambda fraction: None)
    *singles, chosen, by_score = records
    best = min(singles, key=lambda record: record["held_out_loss"])
    assert chosen["method"] == BY_CV
    assert chosen["picked"] == report.label(best)
    assert chosen["score"] == best["score"]
    assert by_score["method"] == BY_CV_SCORE
    assert by_score["held_out_score"] == max(record["held_out_score"] for record in singles)
    assert chosen["seconds"] == pytest.approx(sum(record["seconds"] for record in singles))
    names = {record["method"] for record in singles}
    assert names == {a.name for a in alternatives.ALTERNATIVES if a.suits(problem.data)}
    assert {"source as feature", "confident learning", "good sources"} < names
    assert all(0 <= record["score"] <= 1 and math.isfinite(record["log_likelihood"]) for record in records)
    weighted = [r for r in singles if r["method"] == "nothing"]
    assert FineTunedLinearLearner.name not in {r["learner"] for r in weighted}


# --- Measures and tables ---------------------------------------------------------------------------------------------


def test_measures_equal_those_of_scikit_learn():
    """With ties, and with a group that nobody can judge."""
    from sklearn.metrics import r2_score, roc_auc_score

    rng = np.random.default_rng(0)
    suspicion, wrong = rng.integers(0, 20, 300) / 20, rng.random(300) < 0.3
    assert measures.auroc(suspicion, wrong) == pytest.approx(roc_auc_score(wrong, suspicion))
    assert measures.auroc(suspicion, np.zeros(300, dtype=bool)) is None
    truth = rng.normal(size=300)
    scores = measures.score_predictions("regression", truth + 0.5, truth, 0.25)
    assert scores["score"] == pytest.approx(r2_score(truth, truth + 0.5))
    assert scores["log_likelihood"] == pytest.approx(-0.5 * np.log(2 * np.pi * 0.25) - 0.5)
    assert measures.rank_correlation(np.array([1.0, 2, 3, 9]), np.array([3.0, 2, 1, np.nan])) == pytest.approx(-1)
    assert measures.rank_correlation(np.ones(4), np.arange(4)) is None


def make_record(method, seed, score, **more):
    """Return a row of results."""
    learner = "" if method in (PRODUCT, BY_CV) else LEARNER.name
    head = {"set": "toy", "task": "classification", "checked": 100, "seed": seed}
    return head | {"method": method, "learner": learner, "score": score, "seconds": 1.0} | more


def make_records():
    """Return three tuning seeds and two reported ones, on which another alternative is best."""
    records = []
    for seed in range(5):
        tuning = seed < 3
        records += [
            make_record("nothing", seed, 0.90 if tuning else 0.70),
            make_record("good sources", seed, 0.80 if tuning else 0.85),
            make_record(BY_CV, seed, 0.75),
        ]
    return [*records, make_record(PRODUCT, 3, 0.80), make_record(PRODUCT, 4, 0.82)]


def test_compare_takes_tuned_alternative_from_other_seeds():
    """The tuned bar must not see reported seeds; the one in hindsight does nothing else."""
    (line,) = report.compare(make_records())
    assert line.seeds == (3, 4)
    assert line.labels == {"tuned": f"nothing / {LEARNER.name}", "hindsight": f"good sources / {LEARNER.name}"}
    assert line.product == pytest.approx(0.81)
    assert line.gains["own CV"] == pytest.approx((0.06, 0.01))
    assert line.gains["tuned"].mean == pytest.approx(0.11)
    assert line.gains["hindsight"].mean == pytest.approx(-0.04)
    assert line.fixed == {"nothing": pytest.approx(0.70)}


def test_summary_counts_losses_beyond_their_error():
    """A loss of .04 with an error of .01 is one; the summary names the line."""
    rows = {row["bar"]: row for row in report.summarise(report.compare(make_records()))}
    assert rows["hindsight"]["behind"] == rows["hindsight"]["behind_surely"] == 1
    assert rows["own CV"]["ahead"] == 1
    assert rows["hindsight"]["worst_line"] == "toy 100"
    noisy = [r | {"score": 0.99} if r["method"] == PRODUCT and r["seed"] == 4 else r for r in make_records()]
    noisy = [r | {"score": 0.60} if r["method"] == PRODUCT and r["seed"] == 3 else r for r in noisy]
    rows = {row["bar"]: row for row in report.summarise(report.compare(noisy))}
    assert (rows["hindsight"]["behind"], rows["hindsight"]["behind_surely"]) == (1, 0)


def test_write_report_puts_losses_first():
    """A reader meets what the library is worse at before anything else."""
    other = [record | {"set": "good", "score": record["score"] - 0.2} for record in make_records()]
    other = [r | {"score": 0.95} if r["method"] == PRODUCT else r for r in other]
    text = report.write_report([*other, *make_records()])
    assert text.index("| toy |") < text.index("| good |")
    assert "-0.040 (0.010)" in text
    assert "No line has both" in report.write_report([])


def test_draw_shows_a_row_for_each_line(tmp_path):
    """Nothing to draw is no picture."""
    (path,) = draw(tmp_path / "data", report.compare(make_records()))
    assert path.stat().st_size > 5_000
    assert draw(tmp_path / "none", []) == []


@pytest.mark.parametrize(
    ("text", "numbers"), [("3", (3,)), ("3,5", (3, 5)), ("3-6", (3, 4, 5, 6)), ("0, 2-3", (0, 2, 3))]
)
def test_parse_numbers_reads_lists_and_ranges(text, numbers):
    """As people write seeds."""
    assert parse_numbers(text) == numbers


def test_spec_unknown_names_raise():
    """Before anything is measured."""
    with pytest.raises(ValueError, match="set"):
        DataSpec(("wines",))
    with pytest.raises(ValueError, match="part"):
        DataSpec(parts=("product",))
    with pytest.raises(RunError, match="'x' is no list of whole numbers"):
        parse_numbers("x")
    assert DataSpec(("wine",), (50, 300), (1,)).cells() == [("wine", 50, 1)]


# --- The command -----------------------------------------------------------------------------------------------------


def test_bench_data_runs_resumes_and_fills_a_page(tmp_path, monkeypatch):
    """From the command to the tables of a page; the second call does only what is missing."""
    monkeypatch.delenv("FSLA_DATA", raising=False)
    monkeypatch.setattr(experiment, "default_learners", lambda data: [LEARNER, FineTunedLinearLearner()])
    out, rows = tmp_path / "out", tmp_path / "rows.json"
    arguments = ["data", "--out", str(out), "--sets", "wine", "--checked", "50", "--json", str(rows), "--commit", "abc"]
    runner = CliRunner()
    first = runner.invoke(bench, [*arguments, "--seeds", "3"], catch_exceptions=False)
    assert first.exit_code == 0, first.output
    runs = {path.name: path.stat().st_mtime_ns for path in (out / "runs").iterdir()}
    assert set(runs) == {"wine-50-3-alternatives.jsonl", "wine-50-3-fsla.jsonl"}
    second = runner.invoke(bench, [*arguments, "--seeds", "3-4"], catch_exceptions=False)
    assert second.exit_code == 0, second.output
    for name, time in runs.items():
        assert (out / "runs" / name).stat().st_mtime_ns == time
    result = json.loads(rows.read_text(encoding="utf-8"))
    assert result["commit"] == "abc"
    records = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    assert {record["seed"] for record in records} == {3, 4}
    assert {"machine", "date", "python"} <= result.keys()
    assert {"commit", "date", "score", "seconds"} <= set(result["columns"])
    assert (out / "data.png").is_file()
    summary = (out / "summary.md").read_text(encoding="utf-8")
    assert "| wine | 50 | 2 |" in summary

    from fsla_benchmarks.steps import results

    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- table rows.json -->\nold\n<!-- end -->\n", encoding="utf-8")
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    text = results.fill_tables(page.read_text(encoding="utf-8"), report.write_result, tmp_path)
    assert "| wine | 50 | 0." in text
    assert "old" not in text
    assert "commit abc" in text


def test_bundled_sets_are_read_once():
    """Seeds share what does not depend on them."""
    assert bundled("wine")[0] is bundled("wine")[0]
