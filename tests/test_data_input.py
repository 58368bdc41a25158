"""From a file to training data: roles, labels, votes, checked labels, and what is said of all of it."""

import io
import struct
import zlib

import numpy as np
import pandas as pd
import pytest

from fsla.data._loading import load_data
from test_data_input_columns import sentences


def make_frame(rows=60, seed=0):
    """Return a small table of text cells: x and y decide the label."""
    random = np.random.default_rng(seed)
    x, y = random.normal(size=(2, rows)).round(3)
    label = np.where(x + y > 0, "ham", "spam")
    source = random.choice(["web", "forum", "vendor"], rows)
    frame = pd.DataFrame({"x": x, "y": y, "source": source, "label": label})
    return frame.astype(str).astype(object)


def note_of(loaded, column):
    row = loaded.columns.set_index("column").loc[column]
    return row["role"], row["kind"], row["note"]


def refused(match, source, **arguments):
    with pytest.raises(ValueError, match=match) as error:
        load_data(source, **arguments)
    assert "\n" not in str(error.value)


def test_load_data_gives_votes_groups_and_classes():
    """One label a row is one vote of its group."""
    frame = make_frame()
    loaded = load_data(frame, group="source")
    data = loaded.data
    assert data.task == "classification"
    assert data.classes.tolist() == ["ham", "spam"]
    assert data.group_names.tolist() == ["forum", "vendor", "web"]
    assert (data.group_names[data.votes.group] == frame["source"]).all()
    assert (data.classes[data.votes.label] == frame["label"]).all()
    assert loaded.given_labels.tolist() == frame["label"].tolist()
    assert (loaded.num_rows, len(data.checked_rows)) == (60, 0)
    assert "No row has a checked label." in loaded.notes
    assert loaded.table.equals(frame)
    assert loaded.columns.columns.tolist() == ["column", "role", "kind", "note"]
    assert loaded.display(3) == {"cells": {"x": frame["x"][3], "y": frame["y"][3]}}


# Checked labels


def test_checked_column_keeps_given_label_and_adds_the_checked_one():
    """Rows with both labels are what judges groups."""
    frame = make_frame()
    frame["gold"] = ""
    frame.loc[[4, 7], "gold"] = ["spam", "ham"]
    data = load_data(frame, checked="gold").data
    assert data.checked_rows.tolist() == [4, 7]
    assert data.classes[data.checked_labels].tolist() == ["spam", "ham"]
    assert len(data.votes) == 60
    assert data.has_checked_votes


def test_trusted_column_makes_the_label_itself_checked():
    """Such a row has no label that somebody else gave, so it casts no vote."""
    frame = make_frame()
    frame["ok"] = ["true" if i % 10 == 0 else "" for i in range(60)]
    data = load_data(frame, trusted_column="ok").data
    assert data.checked_rows.tolist() == list(range(0, 60, 10))
    assert (data.classes[data.checked_labels] == frame["label"][::10]).all()
    assert not data.has_checked_votes


def test_all_rows_of_a_group_trusted_leaves_it_out_of_the_groups():
    """Its labels are all checked: there is nothing to weigh."""
    frame = make_frame()
    frame["ok"] = np.where(frame["source"] == "web", "yes", "no")
    loaded = load_data(frame, trusted_column="ok", group="source")
    assert loaded.data.group_names.tolist() == ["forum", "vendor"]
    assert "No labels that are not checked from web: left out of the groups." in loaded.notes


def test_trusted_file_is_matched_by_id_and_the_rest_added(tmp_path):
    """A matched row keeps its vote; a new one is checked and casts none."""
    frame = make_frame()
    frame.insert(0, "key", [f"r{i}" for i in range(60)])
    frame.to_csv(tmp_path / "data.csv", index=False)
    new = make_frame(3, seed=1).assign(key=["n0", "n1", "n2"])
    trusted = pd.concat([frame.iloc[[5, 2]], new], ignore_index=True)
    trusted["label"] = ["ham", "spam", "spam", "ham", "spam"]
    trusted.to_csv(tmp_path / "trusted.csv", index=False)
    loaded = load_data(tmp_path / "data.csv", id="key", trusted=tmp_path / "trusted.csv")
    data = loaded.data
    assert data.checked_rows.tolist() == [2, 5, 60, 61, 62]
    assert data.classes[data.checked_labels].tolist() == ["spam", "ham", "spam", "ham", "spam"]
    assert len(data.features) == 63
    assert len(data.votes) == 60
    assert loaded.ids[[0, 60]].tolist() == ["r0", "n0"]
    assert "Of 5 checked labels in trusted.csv, 2 are rows of the table, 3 are added to it." in loaded.notes
    assert loaded.given_labels[60] is None
    assert loaded.display(61)["cells"] == dict(new[["x", "y", "source"]].iloc[1])


def test_trusted_rows_without_id_are_matched_by_identical_features():
    """A row that is trusted and training at once would judge itself."""
    frame = make_frame()
    trusted = frame.iloc[[8, 3]].copy()
    trusted["x"] = trusted["x"].astype(float)  # as pandas writes it
    loaded = load_data(frame, trusted=trusted)
    assert loaded.data.checked_rows.tolist() == [3, 8]
    assert len(loaded.data.features) == 60


def test_ids_that_name_other_rows_are_not_trusted():
    """Two files may both count from 1."""
    frame = make_frame()
    frame["id"] = [str(i) for i in range(60)]
    trusted = make_frame(20, seed=1)
    trusted["id"] = [str(i) for i in range(20)]
    loaded = load_data(frame, trusted=trusted)
    assert loaded.data.checked_rows.tolist() == list(range(60, 80))
    assert any("belong to rows with other features" in note for note in loaded.notes)


def test_reviewed_file_is_matched_by_row_and_says_what_was_random(tmp_path):
    """A person improves the data in rounds: the downloaded file is the next trusted file."""
    frame = make_frame()
    reviewed = pd.DataFrame(
        {
            "row": ["3", "9", "11"],
            "id": ["3", "9", "11"],
            "given_label": frame["label"][[3, 9, 11]],
            "checked_label": ["spam", "ham", ""],
            "is_random": ["true", "false", "true"],
        }
    )
    first = frame.iloc[:2].copy()
    loaded = load_data(frame, trusted=[first, reviewed])
    assert loaded.data.checked_rows.tolist() == [0, 1, 3, 9]
    assert loaded.data.random_rows.tolist() == [True, True, True, False]
    assert any("1 rows of the table have no checked label and are skipped." in note for note in loaded.notes)
    reviewed["given_label"] = ["other", "other", "other"]
    refused("review of other data", frame, trusted=reviewed)


def test_reviewed_file_is_matched_by_id_where_there_is_one():
    """The table may have been sorted since."""
    frame = make_frame()
    frame["key"] = [f"r{i}" for i in range(60)]
    reviewed = pd.DataFrame({"row": ["3"], "id": ["r3"], "checked_label": ["ham"]})
    loaded = load_data(frame.iloc[::-1].reset_index(drop=True), id="key", trusted=reviewed)
    assert loaded.data.checked_rows.tolist() == [56]


def test_column_checked_label_in_the_table_is_used():
    """Somebody may have joined the review to the table."""
    frame = make_frame()
    frame["checked_label"] = ["ham", "spam", *[""] * 58]
    assert load_data(frame).data.checked_rows.tolist() == [0, 1]


def test_trusted_file_without_label_or_features_is_refused():
    """What is missing must be named."""
    frame = make_frame()
    renamed = frame.rename(columns={"label": "Label"})
    refused("no column 'label' with the checked labels.*Did you mean 'Label'", frame, trusted=renamed)
    refused("lacks the columns y, and 5 of its rows are not in", frame, trusted=make_frame(5, seed=1).drop(columns="y"))
    refused("has no label in the column 'label'", frame, trusted=frame.assign(label="").iloc[:3])


def test_later_check_of_the_same_row_counts():
    """Two people may disagree; nothing is overwritten without a note."""
    frame = make_frame()
    loaded = load_data(frame, trusted=[frame.iloc[:1].assign(label="ham"), frame.iloc[:1].assign(label="spam")])
    assert loaded.data.classes[loaded.data.checked_labels].tolist() == ["spam"]
    assert "1 rows have several checked labels that differ; the last one counts." in loaded.notes


# Labels


def test_labels_stay_as_written_and_spellings_are_joined():
    """007 is not 7, but " Spam" and "spam" are one class, which is said."""
    frame = make_frame()
    frame.loc[0, "label"] = " HAM "
    loaded = load_data(frame)
    assert loaded.data.classes.tolist() == ["ham", "spam"]
    assert any("are joined as 'ham'" in note for note in loaded.notes)
    assert loaded.table["label"][0] == loaded.given_labels[0] == " HAM "
    codes = load_data(make_frame().assign(label=lambda f: f["label"].map({"ham": "1", "spam": "01"})))
    assert codes.data.classes.tolist() == ["01", "1"]
    mixed = load_data(
        make_frame().assign(label=lambda f: ["1.0" if i % 3 else "1" if i % 2 else "2" for i in range(60)])
    )
    assert mixed.data.classes.tolist() == ["1.0", "2"]


def test_class_names_that_are_numbers_are_sorted_as_numbers():
    """A confusion matrix with 10 between 1 and 2 is hard to read."""
    frame = make_frame().assign(label=[str(i % 12) for i in range(60)])
    assert load_data(frame).data.classes.tolist() == [str(i) for i in range(12)]


def test_missing_labels_cast_no_vote_and_are_said():
    """Unlabelled rows get predictions; "NA" may have been a class."""
    frame = make_frame()
    frame.loc[[0, 1, 2], "label"] = ["", "NA", " "]
    loaded = load_data(frame)
    assert len(loaded.data.votes) == 57
    assert loaded.given_labels[:3].tolist() == [None, None, None]
    assert "3 of 60 rows have no given label: they train no model, and get predictions." in loaded.notes
    assert any("1 labels are written NA, which is taken as missing" in note for note in loaded.notes)


def test_class_without_checked_row_and_typo_are_said():
    """Models of such a class rest on given labels; a class of one row is a typo more often."""
    frame = make_frame()
    frame.loc[0, "label"] = "sapm"
    frame["gold"] = ["ham"] * 3 + [""] * 57
    notes = load_data(frame, checked="gold").notes
    assert any("No checked row has the label sapm, spam" in note for note in notes)
    assert "The label 'sapm' occurs once and counts as a class. Correct it if it is 'spam'." in notes


def test_labels_that_cannot_be_used_are_refused():
    """Each case gets one message that says what to change."""
    frame = make_frame()
    refused("one class only: 'ham'", frame.assign(label="ham"))
    refused("No row of the table has a label in label", frame.assign(label=""))
    refused("No checked label is among the given ones", frame.assign(gold=["0", "1"] * 30), checked="gold")
    refused("60 different values in 60 labels", frame.assign(label=[f"a{i}" for i in range(60)]))
    refused("no column 'lable'.*Did you mean 'label'", frame, label="lable")
    refused("label column.*seems to be a row", pd.DataFrame([["1", "2"]], columns=["5.1", "3.5"]))
    large = pd.DataFrame(
        {"x": np.random.default_rng(0).normal(size=10**5), "label": [f"v{i // 2}" for i in range(10**5)]}
    ).astype(str)
    refused("50000 different values in 100000 labels", large)


def test_task_is_decided_by_the_labels_and_said():
    """Prices are no classes."""
    frame = make_frame()
    prices = [f"{i * 1.5:,.2f}" for i in range(800, 860)]
    loaded = load_data(frame.assign(label=prices))
    assert loaded.data.task == "regression"
    assert loaded.data.classes is None
    assert np.allclose(loaded.data.votes.label, np.arange(800, 860) * 1.5)
    assert any("regression. Set task='classification'" in note for note in loaded.notes)
    assert load_data(frame.assign(label=[str(i % 5) for i in range(60)])).data.task == "classification"
    assert load_data(frame.assign(label=[str(i % 5) for i in range(60)]), task="regression").data.task == "regression"
    refused("holds numbers, but 1 are none, such as 'abc'", frame.assign(label=[*prices[:59], "abc"]))
    refused("holds numbers, but 60 are none", frame, task="regression")
    refused("task is 'rank'", frame, task="rank")


def test_regression_brings_given_numbers_to_the_scale_of_checked_ones():
    """Annotators use 1 to 25, the consensus is standardised: they measure the same thing."""
    random = np.random.default_rng(0)
    truth = random.normal(size=200)
    frame = pd.DataFrame({"x": truth.round(4), "label": (13 + 5 * truth).round(), "gold": truth.round(3)}).astype(str)
    loaded = load_data(frame, checked="gold")
    assert any("have different scales" in note for note in loaded.notes)
    assert np.abs(loaded.data.votes.label - truth[loaded.data.votes.row]).mean() < 0.2
    assert np.abs(loaded.given_labels.astype(float) - truth).mean() < 0.2
    same = load_data(frame.assign(label=(truth + 0.2).round(3).astype(str)), checked="gold")
    assert not any("scales" in note for note in same.notes)


# Several labels a row


def votes_frame():
    frame = make_frame().drop(columns="source")
    truth = frame.pop("label")
    for i, accuracy in enumerate((0.9, 0.7, 0.5)):
        random = np.random.default_rng(i)
        votes = np.where(random.random(60) < accuracy, truth, "ham").astype(object)
        votes[random.random(60) < 0.4] = ""
        frame[f"rule_{i}"] = votes
    return frame, truth


def test_label_columns_become_groups_of_votes():
    """Each labelling function is an annotator; an empty cell is no vote."""
    frame, truth = votes_frame()
    loaded = load_data(frame.assign(gold=truth), label_columns=["rule_*"], checked="gold")
    data = loaded.data
    assert data.group_names.tolist() == ["rule_0", "rule_1", "rule_2"]
    assert len(data.votes) == (frame[["rule_0", "rule_1", "rule_2"]] != "").to_numpy().sum()
    for row, group, label in list(zip(data.votes.row, data.votes.group, data.votes.label, strict=True))[:20]:
        assert frame[data.group_names[group]][row] == data.classes[label]
    assert note_of(loaded, "rule_1")[0] == "label"
    assert note_of(loaded, "gold")[0] == "checked label"


def test_label_columns_minus_one_and_abstain_are_no_votes():
    """Snorkel and WRENCH write -1 where a rule has no label."""
    frame, _ = votes_frame()
    columns = [c for c in frame if c.startswith("rule_")]
    numbers = frame.replace({c: {"ham": "0", "spam": "1", "": "-1"} for c in columns})
    a, b = (load_data(f, label_columns=columns) for f in (frame, numbers))
    assert np.array_equal(a.data.votes.row, b.data.votes.row)
    assert any("-1, which means no label" in note for note in b.notes)
    words = frame.replace({c: {"": "ABSTAIN"} for c in columns})
    assert len(load_data(words, label_columns=columns).data.votes) == len(a.data.votes)


def test_long_format_joins_the_rows_of_an_id():
    """One row a label is how crowdsourcing platforms export."""
    frame, _ = votes_frame()
    frame["key"] = [f"k{i}" for i in range(60)]
    wide = load_data(frame, label_columns=["rule_*"], id="key")
    long = frame.melt(["key", "x", "y"], var_name="who", value_name="label")
    long = long[long["label"] != ""].reset_index(drop=True).astype(object)
    loaded = load_data(long, id="key", annotator="who")
    assert loaded.num_rows == long["key"].nunique()
    assert loaded.table.equals(long)
    assert (loaded.ids[loaded.row_of] == long["key"]).all()
    assert loaded.data.has_several_votes

    def named_votes(loaded):
        votes = loaded.data.votes
        return {
            (loaded.ids[r], loaded.data.group_names[g], loaded.data.classes[y])
            for r, g, y in zip(votes.row, votes.group, votes.label, strict=True)
        }

    assert named_votes(loaded) == named_votes(wide)


def test_one_annotator_and_forms_that_clash_are_said():
    """There is nobody to compare one annotator with."""
    frame, _ = votes_frame()
    notes = load_data(frame, label_columns=["rule_0"]).notes
    assert "All labels are from one annotator, 'rule_0': there is nobody to compare it with." in notes
    refused("label_columns= and annotator= are both", frame, label_columns=["rule_0"], annotator="x", id="y")
    refused("annotator= needs id=", frame, annotator="rule_0")
    refused("no column 'rulé'", frame, label_columns=["rulé"])
    refused("label_columns= names no column", frame, label_columns=[])
    refused("trusted_column= and label_columns= are both", frame, label_columns=["rule_0"], trusted_column="x")
    with_group = load_data(frame.assign(g=["a", "b"] * 30), label_columns=["rule_*"], group="g")
    assert "Each annotator is a group of its own; the column 'g' is not used." in with_group.notes


# Columns


def test_roles_must_be_different_columns():
    """The label as a group, or as a feature, is perfect and useless."""
    frame = make_frame()
    refused("'label' is both the label column and the group column", frame, group="label")
    refused("'label' is both a feature and the label column", frame, features=["x", "label"])
    refused("'source' is both the group column and an id column", frame, group="source", id="source")
    refused("'x' is both the text column and an ignored column", frame, text="x", ignore=["x"])


def test_copies_of_the_label_are_left_out_or_refused():
    """A feature that gives the answer away makes every model perfect and useless."""
    frame = make_frame()
    frame["copy"] = frame["label"].str.upper()
    frame["code"] = frame["label"].map({"ham": "0", "spam": "1"})
    loaded = load_data(frame)
    assert note_of(loaded, "copy") == ("ignored", "category", "a copy of the label")
    assert note_of(loaded, "code") == ("ignored", "number", "each value belongs to one label")
    refused("The feature 'code' gives the answer away", frame, features=["x", "code"])
    prices = make_frame().assign(label=[str(i * 1.5) for i in range(60)], cents=[str(i * 150) for i in range(60)])
    assert note_of(load_data(prices), "cents")[2] == "the label in other units"


def test_other_labels_and_splits_are_left_out():
    """A benchmark's gold label beside the given one is no feature."""
    frame = make_frame()
    frame["gold"] = np.roll(frame["label"], 1)
    frame["split"] = ["train", "test"] * 30
    loaded = load_data(frame)
    assert note_of(loaded, "gold")[0] == note_of(loaded, "split")[0] == "ignored"
    assert "name it with checked=" in note_of(loaded, "gold")[2]
    assert note_of(load_data(frame, features=["x", "gold"]), "gold")[0] == "feature"
    smoker = make_frame().assign(
        label=lambda f: f["label"].map({"ham": "yes", "spam": "no"}), smoker=["yes", "no"] * 30
    )
    assert note_of(load_data(smoker), "smoker") == ("feature", "boolean", "")


def test_ids_and_constants_are_left_out_and_said():
    """An id that is a feature makes trees learn the order of the file."""
    frame = make_frame()
    frame["id"] = [f"{i:03d}" for i in range(60)]
    frame["serial"] = [str(i + 7) for i in range(60)]
    frame["same"] = "x"
    frame["empty"] = "NA"
    loaded = load_data(frame)
    assert note_of(loaded, "id") == ("id", "", "recognised: every row has its own")
    assert loaded.ids[7] == "007"
    assert note_of(loaded, "serial") == ("ignored", "id", "an id: every row has its own number")
    assert note_of(loaded, "same")[2] == "every cell is 'x'"
    assert note_of(loaded, "empty")[2] == "every cell is missing"
    chosen = load_data(frame, features=["x", "serial", "same"])
    assert note_of(chosen, "serial") == ("feature", "number", "")
    assert chosen.data.features.numeric[:, 1].tolist() == list(range(7, 67))


def test_features_ignore_and_text_override_what_is_recognised():
    """The table of columns is a proposal."""
    frame = make_frame().assign(city=["Rome", "Oslo"] * 30)
    loaded = load_data(frame, ignore=["y"], text="city")
    assert note_of(loaded, "y")[0] == "ignored"
    assert note_of(loaded, "city")[0] == "text"
    loaded = load_data(frame, features=["x"])
    assert [c.name for c in loaded.builder.columns] == ["x"]
    assert note_of(loaded, "y") == ("ignored", "number", "not among features=")
    refused("no column 'z'", frame, features=["z"])
    refused("No column of the table is left as a feature", frame[["label", "source"]].assign(source="x"))


def test_repeated_texts_hint_at_several_labels():
    """Whoever forgets to name the annotators would train on copies of every text."""
    frame = pd.DataFrame({"review": sentences(30) * 4, "label": ["a", "b"] * 60})
    assert any("30 different texts in 120 rows" in note for note in load_data(frame).notes)
    assert not any("different texts" in note for note in load_data(frame[:30]).notes)


def test_words_of_their_own_become_text_where_nothing_else_is():
    """Names are ids beside other columns, and all there is without them."""
    random = np.random.default_rng(0)
    names = ["".join(random.choice(list("abcdefgh"), 8)) for _ in range(60)]
    loaded = load_data(make_frame()[["label"]].assign(name=names))
    assert note_of(loaded, "name")[:2] == ("text", "text")


def test_duplicate_and_missing_ids_are_named():
    """An id must name one row."""
    frame = make_frame().assign(key=["a", "a", *map(str, range(58))])
    refused(r"Duplicate id 'a' in the table \(2 rows\)", frame, id="key")
    refused(
        "1 rows of the table have no id in 'key', row 1 the first",
        frame.assign(key=["", *map(str, range(59))]),
        id="key",
    )


def test_group_of_many_values_and_missing_groups():
    """A group needs several rows; rows without a group are one of their own."""
    frame = make_frame()
    refused("group column 'key'.*60 different values", frame.assign(key=[f"a{i}" for i in range(60)]), group="key")
    frame.loc[:4, "source"] = ""
    loaded = load_data(frame, group="source")
    assert "(none)" in loaded.data.group_names
    assert "5 rows have no source: they form the group '(none)'." in loaded.notes


def test_text_where_a_number_was_is_missing_and_said():
    """One broken cell must not turn a number into a category of a thousand levels."""
    frame = make_frame()
    frame.loc[3, "x"] = "broken"
    loaded = load_data(frame)
    assert note_of(loaded, "x") == ("feature", "number", "1 cells are no numbers, such as 'broken': taken as missing")
    assert np.isnan(loaded.data.features.numeric[3, 0])


def test_missing_cells_can_be_refused():
    """Some want to impute themselves, or use complete rows alone."""
    frame = make_frame()
    frame.loc[3, "x"] = ""
    assert np.isfinite(load_data(frame).data.features.dense).all()
    refused(r"Cells are missing in x \(1\)", frame, missing="error")
    dropped = load_data(frame, missing="drop")
    assert 3 not in dropped.data.votes.row
    assert len(dropped.data.votes) == 59
    assert "1 rows have missing cells: their labels are not used." in dropped.notes


def test_duplicates_are_listed_with_reason():
    """Copies with different labels are errors for certain; copies of checked rows leak."""
    frame = pd.concat([make_frame(), make_frame().iloc[:3]], ignore_index=True)
    frame.loc[60, "label"] = "spam" if frame["label"][0] == "ham" else "ham"
    new = make_frame(1, seed=5)
    loaded = load_data(frame, trusted=pd.concat([new, new]))
    expected = [
        (60, 0, "identical features, different labels"),
        (61, 1, "identical features"),
        (62, 2, "identical features"),
    ]
    assert [tuple(row) for row in loaded.duplicates.to_numpy()[:3]] == expected
    assert loaded.duplicates.to_numpy()[3].tolist() == [64, 63, "row 2 of the table has identical features"]
    assert "3 rows repeat the features of an earlier row, 1 of them with different labels." in loaded.notes


def test_text_is_recognised_and_shown():
    """Free text needs no flag."""
    frame = make_frame().drop(columns=["x", "y", "source"]).assign(review=sentences(60))
    loaded = load_data(frame)
    assert note_of(loaded, "review") == ("text", "text", "8 words on average")
    assert loaded.data.features.numeric is None
    assert loaded.display(2) == {"cells": {}, "text": frame["review"][2]}


def test_saved_builder_takes_raw_columns_again(tmp_path):
    """The model is used on files like the one that it was trained on."""
    frame = make_frame()
    frame.to_csv(tmp_path / "x.csv", index=False)
    loaded = load_data(tmp_path / "x.csv")
    again = loaded.builder.transform(pd.read_csv(tmp_path / "x.csv"))
    assert np.array_equal(again.dense, loaded.data.features.dense)


# Images


def write_image(path, size=(8, 8), color=(250, 0, 0), mode="RGB", **options):
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new(mode, size, color).save(path, **options)


def test_folder_of_class_folders_loads_images_of_any_size(tmp_path):
    """Photographs come in all sizes and colours."""
    for i in range(4):
        write_image(tmp_path / "red" / f"{i}.png", (8 + i, 9), (200 + i, 0, 0))
        write_image(tmp_path / "grey" / f"{i}.jpg", (20, 12 + i), 60 + i, "L")
    (tmp_path / "red" / "notes.txt").write_text("x")
    loaded = load_data(tmp_path)
    images = loaded.data.features.images
    assert images.shape == (8, 32, 32, 3)
    assert images.dtype == np.uint8
    assert loaded.data.classes.tolist() == ["grey", "red"]
    assert (images[4:, :, :, 0] >= 195).all()
    assert loaded.ids[0] == "grey/0.jpg"
    assert any("1 entries" in note and "red/notes.txt" in note for note in loaded.notes)
    assert loaded.display(0)["image"].startswith(b"\x89PNG")
    assert load_data(tmp_path, image_size=16).data.features.images.shape == (8, 16, 16, 3)


def test_trusted_folder_is_matched_by_the_images_themselves(tmp_path):
    """Two folders may both have cat/0.png, of different cats; one picture may lie in both under two names."""
    for i in range(3):
        write_image(tmp_path / "data" / "cat" / f"{i}.png", color=(40 * i, 0, 0))
        write_image(tmp_path / "data" / "dog" / f"{i}.png", color=(0, 40 * i + 9, 0))
    write_image(tmp_path / "trusted" / "dog" / "0.png", color=(80, 0, 0))
    write_image(tmp_path / "trusted" / "cat" / "0.png", color=(0, 0, 200))
    loaded = load_data(tmp_path / "data", trusted=tmp_path / "trusted")
    data = loaded.data
    assert dict(zip(loaded.ids[data.checked_rows], data.classes[data.checked_labels], strict=True)) == {
        "cat/2.png": "dog",
        "trusted 1": "cat",
    }
    assert data.features.images[6, 0, 0].tolist() == [0, 0, 200]
    assert loaded.display(6)["image"].startswith(b"\x89PNG")


def image_table(folder, names):
    frame = pd.DataFrame({"picture": names, "label": ["a", "b"] * (len(names) // 2)})
    frame.to_csv(folder / "x.csv", index=False)
    return folder / "x.csv"


def test_table_of_image_paths_stays_inside_its_folder(tmp_path):
    """A table from elsewhere must not show what else is on the disk."""
    folder = tmp_path / "data"
    for i in range(4):
        write_image(folder / "img" / f"{i}.png", color=(60 * i, 0, 0))
    write_image(tmp_path / "secret.png")
    names = [f"img/{i}.png" for i in range(4)]
    loaded = load_data(image_table(folder, names), image="picture")
    assert loaded.data.features.images.shape == (4, 8, 8, 3)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "out").symlink_to(tmp_path)
    for bad in ("../secret.png", str(tmp_path / "secret.png"), "out/secret.png", "link.png", ""):
        path = image_table(folder, [*names[:3], bad or " "])
        refused("outside|names no image|symbolic link", path, image="picture")
    refused("no such file", image_table(folder, [*names[:3], "img/9.png"]), image="picture")


def png_header(width, height):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_broken_images_and_bombs_are_refused(tmp_path):
    """A small file can decode to more pixels than the machine holds."""
    for i in range(2):
        write_image(tmp_path / "a" / f"{i}.png")
    bad = tmp_path / "b" / "bad.png"
    bad.parent.mkdir()
    bad.write_bytes(png_header(60_000, 60_000))
    refused("bad.png", tmp_path)
    bad.write_bytes(png_header(8192, 8193))
    refused("8192 x 8193 pixels are more than", tmp_path)
    bad.write_bytes(b"no image")
    refused("Cannot read the image .*bad.png", tmp_path)
    bad.write_bytes(png_header(8, 8))
    refused("Cannot read the image .*bad.png", tmp_path)
    bad.unlink()
    refused("holds no images in 0 folders", tmp_path / "b")


def test_images_of_other_modes_become_plain(tmp_path):
    """Sixteen bits, transparency and rotation by a flag must show as a viewer shows them."""
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.full((8, 8), 65535, dtype=np.uint16)).save(tmp_path / "deep.png")
    write_image(tmp_path / "clear.png", color=(0, 0, 0, 0), mode="RGBA")
    write_image(tmp_path / "palette.gif", color=3, mode="P")
    turned = image.new("L", (8, 4), 0)
    turned.paste(255, (0, 0, 4, 4))
    exif = image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif)
    names = ["deep.png", "clear.png", "palette.gif", "turned.jpg"]
    images = load_data(image_table(tmp_path, names), image="picture", image_size=8).data.features.images
    assert (images[:2] == 255).all()
    assert images[3, 0].mean() > 200 > 50 > images[3, -1].mean()


def test_images_in_a_dataset_column_are_used():
    """Hugging Face datasets hold images, not paths."""
    image = pytest.importorskip("PIL.Image")
    pictures = [image.new("RGB", (8, 8), (i * 30, 0, 0)) for i in range(4)]
    buffer = io.BytesIO()
    pictures[3].save(buffer, format="PNG")
    frame = pd.DataFrame(
        {"image": [*pictures[:3], {"bytes": buffer.getvalue(), "path": None}], "label": ["a", "b"] * 2}
    )
    loaded = load_data(frame)
    assert loaded.data.features.images[:, 0, 0, 0].tolist() == [0, 30, 60, 90]
    assert loaded.table["image"][1] == "image 1"


def test_arrays_of_images_are_bytes_whatever_their_scale(tmp_path):
    """scikit-learn's digits have values to 16, torchvision's tensors to 1."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 17, (20, 1, 8, 8))
    pixels[0, 0, 0, :2] = 0, 16
    y = np.arange(20) % 2
    for x in (pixels, pixels / 16):
        np.savez(tmp_path / "x.npz", X=x, y=y, trusted=np.arange(20) < 5, groups=np.array(["a", "b"] * 10))
        loaded = load_data(tmp_path / "x.npz")
        images = loaded.data.features.images
        assert images.shape == (20, 8, 8, 1)
        assert np.array_equal(images[:, :, :, 0], np.rint(pixels[:, 0] * 255 / 16))
        assert loaded.data.checked_rows.tolist() == [0, 1, 2, 3, 4]
        assert loaded.data.group_names.tolist() == ["a", "b"]
        assert loaded.display(0)["image"].startswith(b"\x89PNG")


def test_arrays_of_numbers_match_trusted_arrays(tmp_path):
    """Arrays have no ids: equal rows are the same row."""
    x = np.random.default_rng(0).normal(size=(30, 3))
    np.savez(tmp_path / "x.npz", X=x, y=np.arange(30) % 3)
    np.savez(tmp_path / "t.npz", X=np.r_[x[[4]], [[1.0, 2.0, 3.0]]], y=[0, 2])
    loaded = load_data(tmp_path / "x.npz", trusted=tmp_path / "t.npz")
    assert loaded.data.checked_rows.tolist() == [4, 30]
    assert loaded.display(30)["cells"] == {"x0": "1.0", "x1": "2.0", "x2": "3.0"}
    np.savez(tmp_path / "t.npz", X=np.ones((1, 2)), y=[0])
    refused(r"has shape \(1, 2\)", tmp_path / "x.npz", trusted=tmp_path / "t.npz")
