"""Imports only go down the layers; the core needs torch alone."""

import ast
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

LAYERS = [
    ["_extras", "checks", "files"],
    ["locks"],
    ["ranks"],
    ["tree"],
    ["sample"],
    ["problem", "passes", "nest"],
    ["differences", "formulation", "linsolve", "module", "reduced", "samplers", "shards", "views", "wrap"],
    ["autodiff", "counted"],
    ["weighted", "exact", "fixed_point"],
    ["update", "direction", "rates", "projection", "adjoints", "saga"],
    ["estimators", "inner", "decay"],
    ["solver", "evaluate"],
    ["jacobi"],
    ["algorithms"],
    ["plain", "lazy"],
    ["checkpoint", "weights"],
    ["checkpoint_folder", "shard_files"],
    ["front"],
    ["cleaning"],
    ["fsla"],  # __init__: the public names of the core
    ["training"],
    ["cli"],
    ["__main__"],
    ["fsla_reproduction"],  # packages of the repository, which the wheel does not hold
    ["fsla_benchmarks"],
]
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}
CORE = RANK["algorithms"]


def part(path: Path) -> str:
    if not path.is_relative_to(ROOT):
        return path.relative_to(REPOSITORY).parts[1]
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


FILES = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]


def name_of(path):
    return str(path.relative_to(REPOSITORY))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_down(path):
    own = part(path)
    assert own in RANK, f"{own} has no layer: add it to LAYERS"
    for name in imports(path):
        package = name.split(".")[0]
        if package not in ("fsla", *LAYERS[-2], *LAYERS[-1]):
            continue
        target = name.split(".")[1] if name.startswith("fsla.") else package
        same = target == own and path.name != f"{own}.py"
        assert same or RANK[target] < RANK[own], f"{own} imports {target}, which is not below it"


@pytest.mark.parametrize("path", [f for f in FILES if RANK[part(f)] <= CORE], ids=name_of)
def test_the_core_needs_torch_alone(path):
    foreign = {n.split(".")[0] for n in imports(path)} - set(sys.stdlib_module_names) - {"fsla", "torch"}
    assert not foreign


def test_importing_the_package_loads_no_plotting_or_command_line():
    import subprocess

    code = "import sys, fsla; print([m for m in ('matplotlib', 'typer', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= 320
