"""PyTorch may drop its private names: fsla uses them in one module, and is imported without any of them."""

import ast
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fsla
from fsla import _torch
from launch import finish

SOURCE = Path(__file__).parent.parent / "src" / "fsla"
ROOTS = ("torch", "nn", "dist", "checkpoint", "checkpointing", "F")
OF_OBJECTS = (
    "_version", "_parameters", "_modules", "_buffers", "_base", "_warned_capturable_if_run_uncaptured",
)  # fmt: skip
REMOVE = """
import json, os, sys, torch, numpy, safetensors.torch
import torch.distributed, torch.distributed.tensor, torch.utils.checkpoint, torch.utils.data, torch.nn.parallel

def remove(name):
    owner, _, last = name.rpartition(".")
    if name == "torch._decomp.decompositions_for_jvp":
        sys.modules[name] = None  # Then an import fails.
    elif name == "torch.ops._c10d_functional":
        torch._ops._OpNamespace.__getattr__ = lambda self, name: (_ for _ in ()).throw(AttributeError(name))
        torch.ops.__dict__.pop(last, None)
    else:
        delattr(torch.utils.checkpoint if "checkpoint" in owner else torch, last)

STEP = '''
import torch, fsla
torch.manual_seed(0)
model, x, y = torch.nn.Linear(3, 2), torch.randn(8, 3), torch.arange(8) % 2
weights = fsla.GroupWeights(2)
each = lambda model: torch.nn.functional.cross_entropy(model(x), y, reduction="none")
inner = lambda model, weights, batch: (weights(y) * each(model)).mean() + model.weight.square().sum()
bilevel = fsla.FSLA(model, weights, inner_loss=inner, outer_loss=lambda model, weights, batch: each(model).mean())
for k in range(3):
    bilevel.step(None, None, seed=k)
numbers = [p.double().sum().item() for p in model.parameters()]
'''
results = {}
for name in [None, *sys.argv[1:]]:
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            if name is not None:
                remove(name)
            names = {}
            exec(STEP, names)
            text = json.dumps(names["numbers"])
        except BaseException as error:
            text = json.dumps(f"{type(error).__name__}: {error}")
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        results[str(name)] = json.loads(pipe.read())
    os.wait()
print(json.dumps(results))
"""
REMOVABLE = [
    *(f"torch._foreach_{name}" for name in ("add", "add_", "mul", "div_", "norm", "copy_")),
    "torch._decomp.decompositions_for_jvp",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
    "torch.ops._c10d_functional",
]


@pytest.fixture(scope="module")
def steps_without():
    """The parameters after three steps without each private name; each import is in a new process."""
    done = finish(sys.executable, "-W", "ignore", "-c", REMOVE, *REMOVABLE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", REMOVABLE)
def test_import_and_step_without_private_name_agree(name, steps_without):
    """One missing name must not break `import fsla`; where it has a public form, the numbers stay."""
    assert steps_without[name] == pytest.approx(steps_without["None"], rel=1e-5)


def private_names(tree):
    """Yield line and text of every private name of torch that a module uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            text = ast.unparse(node)
            of_tensor = node.attr in OF_OBJECTS and not text.startswith(("self.", "cls."))
            if of_tensor or text.partition(".")[0] in ROOTS:
                yield node.lineno, text
        elif isinstance(node, ast.ImportFrom | ast.Import):
            module = node.module if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                path = f"{module}.{alias.name}" if module else alias.name
                if path.startswith("torch") and "._" in path:
                    yield node.lineno, path
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)*\._\w[\w.]*", str(node.value)):
            yield node.lineno, node.value


def test_private_names_of_torch_are_in_one_module():
    """A private name elsewhere would have no fallback."""
    hits = {}
    for path in sorted(SOURCE.rglob("*.py")):
        hits[path.relative_to(SOURCE).as_posix()] = list(private_names(ast.parse(path.read_text(encoding="utf-8"))))
    assert hits.pop("_torch.py")
    assert not {name: lines for name, lines in hits.items() if lines}


@pytest.mark.parametrize(
    "source",
    [
        "torch._C",
        "torch.ops._x.y()",
        "t._version",
        "import torch._dynamo",
        "from torch import _C",
        "f('torch._decomp')",
    ],
)
def test_private_names_sees_every_form(source):
    assert list(private_names(ast.parse(source)))


def test_fallbacks_equal_fused_operations():
    x, y = [torch.randn(3), torch.randn(2, 2)], [torch.randn(3), torch.randn(2, 2)]

    def results(add, add_, mul, div_, norm, copy_):
        a, b, c = ([t.clone() for t in x] for _ in range(3))
        add_(a, y)
        div_(b, 3.0)
        copy_(c, y)
        return [*add(x, y, alpha=0.5), *a, *mul(x, 2.0), *mul(x, y), *mul(x, torch.tensor(2.0)), *b, *norm(x), *c]

    fused = results(*(getattr(torch, name.removeprefix("torch.")) for name in REMOVABLE[:6]))
    plain = results(_torch._add, _torch._add_, _torch._mul, _torch._div_, _torch._norm, _torch._copy_)
    for a, b in zip(fused, plain, strict=True):
        torch.testing.assert_close(a, b)
    assert _torch._norm(x, float("inf"), torch.float64)[0].dtype == torch.float64


def test_versions_without_counter_are_zero():
    assert _torch.versions([SimpleNamespace(), SimpleNamespace()]) == [0, 0]
    t = torch.zeros(2)
    t.add_(1)
    assert _torch.versions([t]) == [1]


def test_make_functional_without_checkpoint_hook_raises(monkeypatch):
    """Without the hook a checkpointed network would have gradients at another point, and nothing would say so."""
    monkeypatch.delattr(_torch.checkpoint, _torch._GENERATOR)
    with pytest.raises(RuntimeError, match=r"make_functional needs torch\.utils\.checkpoint\._checkpoint_without"):
        fsla.make_functional(nn.Linear(2, 2))


def test_module_parameters_without_private_dictionary_raises():
    with pytest.raises(RuntimeError, match=r"make_functional needs SimpleNamespace\._parameters, which torch"):
        _torch.module_parameters(SimpleNamespace())


def test_all_reduce_without_functional_collectives_raises(monkeypatch):
    monkeypatch.setattr(torch, "ops", SimpleNamespace())
    with pytest.raises(RuntimeError, match=r"Averaging over ranks needs SimpleNamespace\._c10d_functional"):
        _torch.all_reduce_sum(torch.zeros(1), None)
