"""Files are opened and written in one way, which no link, pipe or half-written file gets past."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "fsla"
STORAGE = ROOT / "_storage"
METHODS = {
    "read_text", "read_bytes", "write_text", "write_bytes", "safe_open", "load_file", "save_file", "fromfile", "tofile",
    "memmap", "savez", "savetxt", "loadtxt", "genfromtxt", "to_pickle", "read_pickle", "read_excel",
}  # fmt: skip
"""Calls that open a path themselves."""
READERS = {"read_csv", "read_table", "read_parquet", "load_workbook", "load"}
"""Calls that take an open file as well: the first argument must be one, under one of these names."""
FILES = {"file", "stream", "data", "text"}
FORBIDDEN = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
ALLOWED = {
    ("data/_report.py", "read_text"): "the template, which is a part of the package",
    ("distributed/_join.py", "read_bytes"): "source code of the program that runs, for a fingerprint",
    ("distributed/_gloo_shutdown.py", "read_text"): "/proc",
}


def paths():
    return [path for path in sorted(ROOT.rglob("*.py")) if STORAGE not in path.parents]


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def second_ways(source):
    """Return line and name of each call that opens a path without `open_regular`."""
    hits = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        first = node.args[0] if node.args else None
        if name == "open":
            opened = isinstance(first, ast.Call) and getattr(first.func, "id", "") == "open_regular"
            known = isinstance(first, ast.Name) and first.id in {"descriptor", *FILES}
            member = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") in ("archive", "Image")
            null = isinstance(first, ast.Attribute) and first.attr == "devnull"
            if not (opened or known or member or null):
                hits.append((node.lineno, name))
        elif name in METHODS and isinstance(node.func, ast.Attribute):
            hits.append((node.lineno, name))
        elif name in READERS and isinstance(node.func, ast.Attribute):
            module = getattr(node.func.value, "id", "")
            if module in ("pd", "np", "numpy", "pandas", "parquet", "openpyxl", "torch", "json") and not (
                isinstance(first, ast.Name) and first.id in FILES
            ):
                hits.append((node.lineno, f"{module}.{name}"))
    return hits


@pytest.mark.parametrize("path", paths(), ids=name_of)
def test_files_are_opened_in_one_way(path):
    """A path that is opened elsewhere may be a link of somebody else's, a pipe without an end, or half a file."""
    hits = second_ways(path.read_text(encoding="utf-8"))
    allowed = {name for place, name in ALLOWED if place == name_of(path)}
    assert not [hit for hit in hits if hit[1] not in allowed]


@pytest.mark.parametrize("path", [*paths(), *sorted(STORAGE.glob("*.py"))], ids=name_of)
def test_nothing_is_pickled_or_evaluated(path):
    """A file must not be able to run code."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not {alias.name.partition(".")[0] for alias in node.names} & FORBIDDEN
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in FORBIDDEN
        elif isinstance(node, ast.Call):
            assert getattr(node.func, "id", "") not in ("eval", "exec")
            if getattr(node.func, "attr", "") == "load" and getattr(node.func.value, "id", "") == "torch":
                (safe,) = (k.value.value for k in node.keywords if k.arg == "weights_only")
                assert safe is True
            if getattr(node.func, "attr", "") == "load" and getattr(node.func.value, "id", "") in ("np", "numpy"):
                assert not [k for k in node.keywords if k.arg == "allow_pickle" and k.value.value]


@pytest.mark.parametrize(
    "source",
    [
        "open(path)",
        "open(path, 'rb')",
        "path.open()",
        "Path(x).read_text()",
        "path.write_bytes(b'')",
        "pd.read_csv(path)",
        "np.load(path)",
        "parquet.read_table(path)",
        "safetensors.safe_open(path, 'pt')",
        "os.open(path, flags)",
    ],
)
def test_second_ways_finds_each_kind_of_call(source):
    assert second_ways(source)


@pytest.mark.parametrize(
    "source", ["open(open_regular(path, flags), 'rb')", "pd.read_csv(file)", "with open(descriptor, 'wb') as f: pass"]
)
def test_second_ways_accepts_what_is_open_already(source):
    assert not second_ways(source)
