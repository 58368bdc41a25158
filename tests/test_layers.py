"""Imports only go down the layers; the core needs torch alone."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "fsla"

LAYERS = [
    ["checks", "files"],
    ["ranks"],
    ["tree"],
    ["sample"],
    ["problem", "passes", "nest"],
    ["differences", "formulation", "linsolve", "module", "reduced", "shards", "views", "wrap"],
    ["autodiff", "counted"],
    ["weighted", "exact", "fixed_point"],
    ["update", "direction", "rates", "projection", "adjoints", "saga"],
    ["estimators", "inner", "decay"],
    ["solver", "evaluate"],
    ["jacobi"],
    ["algorithms"],
    ["theory", "plain", "lazy"],
    ["checkpoint", "weights"],
    ["checkpoint_folder", "shard_files"],
    ["front"],
    ["cleaning"],
    ["fsla"],  # __init__: the public names of the core
    ["problems", "data", "training"],
    ["experiments"],
    ["plots", "screen"],
    ["cli"],
    ["__main__"],
]
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}
CORE = RANK["algorithms"]


def part(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return "fsla" if first == "__init__.py" else first.removesuffix(".py")


def imports(path: Path) -> list[str]:
    """Every module that the file imports, at any depth."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "fsla":
                found += [f"fsla.{a.name}" if a.name in RANK else "fsla" for a in node.names]
            else:
                found.append(node.module)
    return found


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    own = part(path)
    assert own in RANK, f"{own} has no layer: add it to LAYERS"
    for name in imports(path):
        if name.split(".")[0] != "fsla":
            continue
        target = name.split(".")[1] if "." in name else "fsla"
        same = target == own and path.name != f"{own}.py"
        assert same or RANK[target] < RANK[own], f"{own} imports {target}, which is not below it"


@pytest.mark.parametrize("path", [f for f in FILES if RANK[part(f)] <= CORE], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_core_needs_torch_alone(path):
    foreign = {n.split(".")[0] for n in imports(path)} - set(sys.stdlib_module_names) - {"fsla", "torch"}
    assert not foreign


def test_importing_the_package_loads_no_plotting_or_command_line():
    import subprocess

    code = "import sys, fsla; print([m for m in ('matplotlib', 'typer', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= 320
