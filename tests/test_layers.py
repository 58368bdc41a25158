"""The layers of the library are its rooms: imports only go up the list, and users meet the rooms' public faces."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
ROOT = REPOSITORY / "src" / "fsla"
PACKAGES = [
    ROOT,
    REPOSITORY / "reproduction" / "fsla_reproduction",
    REPOSITORY / "benchmarks" / "fsla_benchmarks",
]
ROOMS = [
    "distributed", "problems", "steps", "hypergradients", "algorithms", "train", "contrib", "data", "integrations",
    "cli",
]  # fmt: skip
LAYERS = [
    "_version", "_extras", "_torch", "_checks", "_tree", "_state_tree", *ROOMS[:5],
    "_storage", *ROOMS[5:8],
    "fsla",  # the package's own __init__
    "integrations", "cli", "__main__", "fsla_reproduction", "fsla_benchmarks",
]  # fmt: skip
RANK = {name: i for i, name in enumerate(LAYERS)}
CORE = RANK["algorithms"]
"""Up to here torch and numpy alone are needed."""
FILES = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]


def layer_of(path: Path) -> str:
    if not path.is_relative_to(ROOT):
        return path.relative_to(REPOSITORY).parts[1]
    first = path.relative_to(ROOT).parts[0]
    return "fsla" if first == "__init__.py" else first.removesuffix(".py")


def imports(source: str) -> list[str]:
    """Return every module that a text imports, at any depth."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            if node.module == "fsla":
                names += [f"fsla.{a.name}" if a.name in RANK else "fsla" for a in node.names]
            else:
                names.append(node.module)
    return names


def name_of(path):
    return str(path.relative_to(REPOSITORY))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_follow_layer_order(path):
    """An import in the other direction would tie two rooms together."""
    layer = layer_of(path)
    assert layer in RANK, f"{layer} has no layer: add it to LAYERS"
    for name in imports(path.read_text(encoding="utf-8")):
        package = name.split(".")[0]
        if package not in ("fsla", "fsla_reproduction", "fsla_benchmarks"):
            continue
        target = name.split(".")[1] if name.startswith("fsla.") else package
        same = target == layer and path.name != f"{layer}.py"
        assert same or RANK[target] < RANK[layer], f"{layer} imports {target}, which does not stand above it"


@pytest.mark.parametrize("path", [f for f in FILES if RANK[layer_of(f)] <= CORE], ids=name_of)
def test_core_imports_torch_and_numpy_only(path):
    """Whoever steps an algorithm pays for nothing else."""
    names = {n.split(".")[0] for n in imports(path.read_text(encoding="utf-8"))}
    assert not names - set(sys.stdlib_module_names) - {"fsla", "torch", "numpy"}


def test_import_loads_no_plotting_or_cli():
    """A library that is imported in training must not load what draws or parses."""
    code = "import sys, fsla; print([m for m in ('matplotlib', 'typer', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("room", ROOMS)
def test_room_exports_all_and_hides_modules(room):
    """A module without an underscore would be a second entrance."""
    modules = {path.stem for path in (ROOT / room).glob("*.py")} - {"__init__"}
    if room != "cli":  # Commands are no library.
        assert not [name for name in modules if not name.startswith("_")]
        face = importlib.import_module(f"fsla.{room}")
        assert len(set(face.__all__)) == len(face.__all__)
        assert all(hasattr(face, name) for name in face.__all__)


def examples():
    """Yield what readers copy from."""
    yield from sorted((REPOSITORY / "examples").rglob("*.py"))
    for page in sorted([*(REPOSITORY / "docs").rglob("*.md"), REPOSITORY / "README.md"]):
        if "```python" in page.read_text(encoding="utf-8"):
            yield page


@pytest.mark.parametrize("path", list(examples()), ids=name_of)
def test_examples_use_public_names_only(path):
    """A reader who copies an example must not depend on what may change."""
    text = path.read_text(encoding="utf-8")
    code = text if path.suffix == ".py" else "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert not re.findall(r"\bfsla(?:\.\w+)*\._(?!_)\w+", code)
