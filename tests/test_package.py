"""What is installed: three hard dependencies, and one line for whoever lacks an extra."""

import ast
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import fsla
from fsla._extras import EXTRAS
from launch import finish

ROOT = Path(__file__).parent.parent
BLOCK = """
import sys
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec

def find_others(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in {modules} else find_spec(name, path, target)

PathFinder.find_spec = classmethod(find_others)
"""
HARD = {"fsla", "torch", "torchgen", "functorch", "numpy", "safetensors"}
OF_TORCH = {"typing_extensions", "sympy", "mpmath", "networkx", "fsspec", "filelock", "setuptools", "packaging"}
STEP = """
import torch, fsla
model, weights = torch.nn.Linear(3, 2), fsla.GroupWeights(2)
x, y = torch.randn(8, 3), torch.arange(8) % 2
losses = lambda model: torch.nn.functional.cross_entropy(model(x), y, reduction="none")
inner = lambda model, weights, batch: (weights(y) * losses(model)).mean() + model.weight.square().sum()
bilevel = fsla.SOBA(model, weights, inner_loss=inner, outer_loss=lambda model, weights, batch: losses(model).mean())
fsla.fit(bilevel, [None], [None], max_steps=3, output_dir=sys.argv[1])
print("stepped", bilevel.step_count)
"""


def blocked(code, *arguments, modules):
    """Run code in a process that cannot import some modules."""
    program = BLOCK.format(modules=set(modules)) + code
    return subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True)


def test_package_requires_torch_numpy_and_safetensors():
    """Whoever trains a network pays for nothing that the data commands need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sorted(name.partition(">")[0] for name in project["dependencies"]) == ["numpy", "safetensors", "torch"]


def test_fit_runs_with_hard_dependencies_alone(tmp_path):
    """A stray import of an optional package would break users who lack it."""
    done = blocked(STEP, tmp_path, modules=packages_distributions().keys() - HARD - OF_TORCH)
    assert (done.stdout, done.returncode) == ("stepped 3\n", 0), done.stderr


@pytest.mark.parametrize("module", ["typer", "jinja2"])
def test_command_without_extra_says_how_to_install(module, tmp_path):
    """A traceback does not name the missing extra; the report's template engine would be missed after training."""
    code = "from fsla.__main__ import main; main()"
    done = blocked(code, "clean", "--demo", "--out", tmp_path / "x", modules=[module])
    assert done.returncode == 2
    assert done.stderr == f"fsla: The module {module} is not installed. Install it with: pip install 'fsla[data]'\n"
    assert not list(tmp_path.iterdir())


def test_extra_data_lists_every_imported_module():
    """A module that is not in the list would end a command halfway with a traceback."""
    names = set()
    for path in [*(ROOT / "src/fsla/data").glob("*.py"), *(ROOT / "src/fsla/cli").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            names |= {module.partition(".")[0] for module in modules}
    others = {module for extra, modules in EXTRAS.items() if extra != "data" for module in modules}
    assert names - sys.stdlib_module_names - {"fsla", "torch", "numpy", "safetensors"} - others == set(EXTRAS["data"])


def test_import_loads_few_modules():
    """A program waits for the import at each start; what `fit` does not need loads when its name is first used."""
    code = "import torch, sys; before = set(sys.modules); import fsla; print(*set(sys.modules) - before)"
    loaded = finish(sys.executable, "-c", code).stdout.split()
    assert "fsla.train._fit" in loaded
    assert {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names == {"fsla", "safetensors"}
    assert not {"fsla.data", "fsla.cli", "fsla.train._engine", "fsla.train._checkpoint_folder"} & set(loaded)


def test_package_has_every_public_name():
    """A name that is not loaded yet is listed, and is loaded when it is used."""
    assert set(fsla.__all__) <= set(dir(fsla))
    assert all(hasattr(fsla, name) for name in fsla.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fsla.nothing


def test_estimator_without_extra_says_how_to_install():
    """`fsla.LabelCleaner` is loaded when it is first used, so the error comes then."""
    done = blocked("import fsla; fsla.LabelCleaner", modules=["sklearn"])
    message = "Cannot load fsla.LabelCleaner. The module sklearn is not installed. Install it with: pip install"
    assert f"ImportError: {message} 'fsla[data]'" in done.stderr


@pytest.mark.parametrize("name", ["transformers", "lightning"])
def test_integration_without_extra_says_how_to_install(name):
    """Each is an extra: the base install has none of them."""
    done = blocked(f"import fsla.integrations; import fsla.integrations.{name}", modules=[name])
    message = f"Cannot load fsla.integrations.{name}. The module {name} is not installed. Install it with: pip install"
    assert f"ImportError: {message} 'fsla[{name}]'" in done.stderr


def test_command_of_repository_not_installed_is_explained(tmp_path):
    """A user of the wheel who read of `fsla compare` learns where it is, not that it is misspelt."""
    code = "import fsla.cli; fsla.cli.entry_points = lambda group: (); fsla.cli.main()"
    for name in ("reproduce", "compare", "bench", "data"):
        done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True)
        assert done.returncode == 2
        assert "It comes with the repository" in " ".join(done.stderr.split())
