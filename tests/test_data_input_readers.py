"""Files of every format become the same table of text, cell by cell as written."""

import csv
import datetime
import gzip
import io
import json
import os
import re
import zipfile

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsla.data import _readers
from fsla.data._readers import read_table

CELLS = [["id", "zip", "note"], ["007", "01000", "1.50"], ["8", "", 'say "hi", Zoë\nnew line'], ["9", " x ", "ü€"]]
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


def csv_text(rows, delimiter=",", end="\n"):
    buffer = io.StringIO()
    csv.writer(buffer, delimiter=delimiter, lineterminator=end).writerows(rows)
    return buffer.getvalue()


def cells(table):
    return [list(table.frame.columns), *table.frame.to_numpy().tolist()]


def check_message(path, content, *parts):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=re.escape(parts[-1])) as error:
        read_table(path)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "cp1252"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv_of_any_delimiter_and_encoding_gives_same_cells(tmp_path, delimiter, encoding, end):
    """Spreadsheet programs of different countries write the same table differently."""
    path = tmp_path / "data.csv"
    path.write_bytes(csv_text(CELLS, delimiter, end).encode(encoding))
    table = read_table(path)
    assert cells(table) == CELLS
    assert any("separated by" in note for note in table.notes) == (delimiter != ",")
    assert any(word in " ".join(table.notes) for word in ("UTF-16", "Windows-1252")) == (
        not encoding.startswith("utf-8")
    )


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=5), gz=st.booleans())
def test_csv_cells_survive_byte_by_byte(tmp_path_factory, rows, gz):
    """cleaned.csv must hold what the user's file holds, whatever that is."""
    written = [["a", "b", "c"], *map(list, rows)]
    path = tmp_path_factory.mktemp("csv") / ("x.csv.gz" if gz else "x.csv")
    content = csv_text(written, end="\r\n").encode()
    path.write_bytes(gzip.compress(content) if gz else content)
    table = read_table(path)
    assert cells(table) == written
    assert csv_text(cells(table), end="\r\n").encode() == content


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5))
def test_jsonl_and_dataframe_cells_survive(tmp_path_factory, rows):
    """JSON escapes and pandas' string types must not change a cell either."""
    path = tmp_path_factory.mktemp("jsonl") / "x.jsonl"
    path.write_text("".join(json.dumps({"a": a, "b": b}) + "\n" for a, b in rows), encoding="utf-8")
    written = [["a", "b"], *map(list, rows)]
    assert cells(read_table(path)) == written
    assert cells(read_table(pd.DataFrame(rows, columns=["a", "b"]))) == written


def test_jsonl_numbers_stay_as_written_and_nested_values_are_json(tmp_path):
    """1.50 is a text that json.loads would shorten; a missing key is a missing cell."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1.50, "b": [1, 2], "c": true}\n\n{"a": 7, "c": null}\n')
    table = read_table(path)
    assert cells(table) == [["a", "b", "c"], ["1.50", '["1", "2"]', "true"], ["7", "", ""]]
    assert "1 blank line in x.jsonl is skipped." in table.notes
    assert "Some rows of x.jsonl lack b; these cells are missing." in table.notes


def test_excel_cells_read_as_shown(tmp_path):
    """Spreadsheets store whole numbers, dates and padded codes as floats."""
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.append(["id", "n", "day", "flag", "text"])
    sheet.append([7, 1.5, datetime.datetime(2024, 3, 1), True, "007"])
    sheet.append([8, None, None, False, "x"])
    sheet["A2"].number_format = "000"
    book.create_sheet("other")
    book.save(tmp_path / "x.xlsx")
    table = read_table(tmp_path / "x.xlsx")
    assert cells(table) == [
        ["id", "n", "day", "flag", "text"],
        ["007", "1.5", "2024-03-01", "True", "007"],
        ["8", "", "", "False", "x"],
    ]
    assert table.notes == ("The first sheet of x.xlsx is read; other are not.",)


def test_parquet_reads_as_csv_does(tmp_path):
    """A missing cell turns whole numbers into floats in pandas, but 1.0 was never written."""
    frame = pd.DataFrame({"n": [1.0, None, 3.0], "f": [0.1, 2.5, 1e-7], "s": ["a", None, "007"], "i": [1, 2, 3]})
    frame.to_parquet(tmp_path / "x.parquet")
    expected = [["n", "f", "s", "i"], ["1", "0.1", "a", "1"], ["", "2.5", "", "2"], ["3", "1e-07", "007", "3"]]
    assert cells(read_table(tmp_path / "x.parquet")) == expected
    assert cells(read_table(frame)) == expected


class ClassLabel:
    names = ("ham", "spam")


class Dataset:
    """Behaves as a datasets.Dataset as far as it is read."""

    column_names = ("text", "label")

    @property
    def features(self):
        return {"text": object(), "label": ClassLabel()}

    def __getitem__(self, name):
        return {"text": ["a", "b", "c"], "label": [1, 0, -1]}[name]


def test_hugging_face_dataset_gives_class_names():
    """Class numbers mean nothing to a person; -1 is how a ClassLabel says "no label"."""
    assert cells(read_table(Dataset())) == [["text", "label"], ["a", "spam"], ["b", "ham"], ["c", ""]]


def test_dict_of_splits_asks_for_one():
    """load_dataset without split= returns a mapping."""
    with pytest.raises(ValueError, match="Choose one part"):
        read_table({"train": Dataset()})


def test_npz_and_npy_keep_features_as_numbers(tmp_path):
    """A million pixels need no detour through text."""
    x = np.arange(6.0).reshape(3, 2)
    np.savez(tmp_path / "x.npz", X=x, y=np.array([0, 1, 1]), groups=np.array(["a", "b", "a"]))
    table = read_table(tmp_path / "x.npz", "label")
    assert np.array_equal(table.x, x)
    assert cells(table) == [["label", "groups"], ["0", "a"], ["1", "b"], ["1", "a"]]
    np.save(tmp_path / "x.npy", np.c_[x, [1, 0, 1]])
    table = read_table(tmp_path / "x.npy", "y")
    assert np.array_equal(table.x, x)
    assert cells(table) == [["y"], ["1"], ["0"], ["1"]]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["is empty"]),
        ("\n\n", ["is empty"]),
        ("a,b\n", ["no rows below its header"]),
        ("a,b,a\n1,2,3\n", ["the header has a more than once"]),
        ("a,,c\n1,2,3\n", ["column 2 of the header has no name"]),
        ("a,b\n1,2\n3\n", ["Line 3 has 1 cells, but the header has 2"]),
        ('a,b\n"x\ny",2\n3,4,5\n6\n', ["Line 4 has 3 cells", "(2 such rows)"]),
        ('a,b\n"x"y,2\n"z,3,4\n', ["a quote in line 2 is not closed or not doubled"]),
        ('a,b\n"x,2\n3,"4,5\n', ["a quote in line"]),
        ("a,b\n1,\0\n", ["line 2 holds a NUL byte"]),
        (f"a,b\n1,{'x' * 140_000}\n", ["more than 131072 characters"]),
    ],
)
def test_broken_csv_gets_one_message(tmp_path, content, parts):
    """A person must learn which line to mend, not which function of a parser failed."""
    check_message(tmp_path / "x.csv", content, "x.csv", *parts)


def test_csv_with_stray_quotes_and_even_rows_reads_them_as_text(tmp_path):
    """Tab-separated files are often written without any quoting."""
    (tmp_path / "x.tsv").write_text('a\tb\n5" pipe\t1\n"odd\t2\n')
    table = read_table(tmp_path / "x.tsv")
    assert cells(table) == [["a", "b"], ['5" pipe', "1"], ['"odd', "2"]]
    assert "Quotes in x.tsv do not enclose cells" in table.notes[0]


def test_csv_with_backslashed_quotes_is_read(tmp_path):
    """MySQL and others escape a quote instead of doubling it."""
    (tmp_path / "x.csv").write_text('a,b\n"say \\"hi\\", you",1\nplain,2\n')
    table = read_table(tmp_path / "x.csv")
    assert cells(table) == [["a", "b"], ['say "hi", you', "1"], ["plain", "2"]]
    assert table.notes == ("Quotes in x.csv are escaped by backslashes.",)


def test_csv_blank_lines_index_column_and_sep_line_are_said(tmp_path):
    """Nothing is skipped or renamed without a note."""
    (tmp_path / "x.csv").write_text("sep=;\n;a\n\n0;1\n1;2\n\n")
    table = read_table(tmp_path / "x.csv")
    assert cells(table) == [["Unnamed: 0", "a"], ["0", "1"], ["1", "2"]]
    assert len(table.notes) == 3
    assert "2 blank lines in x.csv are skipped." in table.notes


def test_csv_of_too_many_columns_is_refused_at_once(tmp_path):
    """10^5 columns are a transposed table more often than data."""
    path = tmp_path / "x.csv"
    row = ",".join(f"c{i}" for i in range(100_000))
    check_message(path, f"{row}\n{row}\n", "has 100000 columns, more than 10000")


def test_semicolons_with_decimal_commas_are_detected(tmp_path):
    """Commas inside the cells must not win over the header."""
    (tmp_path / "x.csv").write_text("a;b\n1,5;2,5\n3,5;4,5\n")
    assert cells(read_table(tmp_path / "x.csv")) == [["a", "b"], ["1,5", "2,5"], ["3,5", "4,5"]]


def test_latin1_bytes_that_cp1252_lacks_are_read(tmp_path):
    """Some byte values have no letter in Windows-1252."""
    (tmp_path / "x.csv").write_bytes(b"a,b\n\x81\xe9,1\n")
    table = read_table(tmp_path / "x.csv")
    assert table.frame["a"][0] == "\x81é"
    assert "Latin-1" in table.notes[0]


@pytest.mark.parametrize("suffix", [".csv.gz", ".jsonl.gz"])
def test_gzip_bomb_and_damage_are_refused(tmp_path, monkeypatch, suffix):
    """A small file can decompress to more than the machine holds."""
    monkeypatch.setattr(_readers, "MAX_BYTES", 10_000)
    path = tmp_path / f"x{suffix}"
    check_message(path, gzip.compress(b"a" * 100_000), "decompresses to more than 9.77 KiB")
    check_message(path, gzip.compress(b"a" * 100)[:-9], "compression is damaged")
    check_message(path, b"a,b\n1,2\n", "compression is damaged")


def test_unpacked_archives_are_bounded(tmp_path, monkeypatch):
    """An .npz and a workbook are zip archives, which say how large they unpack."""
    monkeypatch.setattr(_readers, "MAX_BYTES", 10_000)
    for name in ("x.npz", "x.xlsx"):
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("X.npy", b"\0" * 100_000)
        with pytest.raises(ValueError, match=r"decompresses to 97\.7 KiB, more than 9\.77 KiB"):
            read_table(tmp_path / name)


def test_array_header_cannot_make_it_allocate(tmp_path):
    """A header of 128 bytes may promise 71 PiB."""
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "<f8", "fortran_order": False, "shape": (10**8, 10**8)})
    check_message(tmp_path / "x.npy", content.getvalue(), "its header promises")


def test_pickled_array_is_refused(tmp_path):
    """Loading objects would run code of the file."""
    np.save(tmp_path / "x.npy", np.array([{}, 1], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects"):
        read_table(tmp_path / "x.npy")


@pytest.mark.parametrize("name", ["x.csv", "x.parquet", "x.npz", "x.jsonl", "x.xlsx"])
def test_links_pipes_and_other_content_are_refused(tmp_path, name):
    """A pipe would wait for ever, and a link may lead anywhere."""
    (tmp_path / "real.csv").write_text("a,b\n1,2\n")
    link, pipe = tmp_path / name, tmp_path / f"p{name}"
    link.symlink_to(tmp_path / "real.csv")
    os.mkfifo(pipe)
    for path, word in ((link, "symbolic link"), (pipe, "pipe")):
        with pytest.raises(ValueError, match=word):
            read_table(path)
    link.unlink()
    if name != "x.csv":
        check_message(link, b"\x93not what the name says\n" * 9, "Cannot read")


def test_missing_and_unknown_files_are_named(tmp_path):
    """The first thing that goes wrong is the name of the file."""
    with pytest.raises(ValueError, match=r"Cannot read .*no\.csv: no such file or folder"):
        read_table(tmp_path / "no.csv")
    check_message(tmp_path / "x.xls", "", "the format .xls is unknown", "Save it as .xlsx")
    check_message(tmp_path / "x", "", "without a suffix")
    with pytest.raises(ValueError, match="data of type int"):
        read_table(3)


@pytest.mark.parametrize("module", ["openpyxl", "pyarrow"])
def test_format_without_its_extra_says_how_to_install(tmp_path, monkeypatch, module):
    """Excel and Parquet need packages that not everybody has."""
    monkeypatch.setattr("fsla._extras.find_spec", lambda name: None if name == module else True)
    path, extra = {"openpyxl": ("x.xlsx", "excel"), "pyarrow": ("x.parquet", "parquet")}[module]
    check_message(tmp_path / path, "", f"pip install 'fsla[{extra}]'")


@pytest.mark.parametrize(
    ("line", "part"),
    [("[1]", "no JSON object"), ('{"a": 1, "a": 2}', "a twice"), ("{", "no JSON object"), ("[" * 10**5, "no JSON")],
)
def test_broken_json_line_is_named(tmp_path, line, part):
    """A file of ten thousand objects has one that is broken."""
    check_message(tmp_path / "x.jsonl", f'{{"a": 1}}\n{line}\n', "line 2", part)


def test_half_a_surrogate_pair_is_refused(tmp_path):
    """It could be read, but not be written to cleaned.csv."""
    check_message(tmp_path / "x.jsonl", '{"a": "\\ud800"}\n', "half a character")
