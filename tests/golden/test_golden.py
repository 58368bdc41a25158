"""Every algorithm retraces its recorded run, as a function and on a module."""

import pytest
import torch
import trajectories
from rows import row_of
from safetensors.torch import load_file

from fsla.algorithms import list_algorithms

GOLDEN = load_file(trajectories.FILE)
TOLERANCE = {"exact": 1e-11, "difference": 1e-6}
"""Relative. A difference divides the rounding of two gradients by its step."""
OWN_DIFFERENCES = 1e-9
"""Of algorithms that take differences whatever products they are given."""


def compare(prefix, run, tolerance):
    expected = {key.removeprefix(prefix): rows for key, rows in GOLDEN.items() if key.startswith(prefix)}
    assert expected, f"{prefix} has no recorded run. Record it with python tests/golden/trajectories.py NAME."
    assert run.keys() == expected.keys()
    for variable, rows in run.items():
        assert torch.isfinite(rows).all()
        scale = expected[variable].abs().max().clamp(min=1e-3)
        assert (rows - expected[variable]).abs().max() / scale < tolerance, variable


def test_golden_file_covers_every_algorithm():
    """A new algorithm without a recorded run would escape the comparison."""
    assert {key.split("/")[1] for key in GOLDEN if key.startswith("function/")} == set(list_algorithms())
    assert {key.split("/")[1] for key in GOLDEN if key.startswith("module/")} == set(trajectories.MODULE_RUNS)


@pytest.mark.parametrize("products", trajectories.PRODUCTS)
@pytest.mark.parametrize("name", list_algorithms())
def test_functional_run_matches_recorded_trajectory(name, products):
    """Eight steps on changing batches pin the order of a step, its products and its memories."""
    run = trajectories.run_functional(name, products)
    tolerance = TOLERANCE[products] if row_of(name).exact else max(TOLERANCE[products], OWN_DIFFERENCES)
    compare(f"function/{name}/{products}/", run, tolerance)


@pytest.mark.parametrize("products", trajectories.PRODUCTS)
@pytest.mark.parametrize("optimizers", trajectories.OPTIMIZERS)
@pytest.mark.parametrize("name", trajectories.MODULE_RUNS)
def test_module_run_matches_recorded_trajectory(name, optimizers, products):
    """Sixty steps pin torch optimisers and automatic steps: curvature, damping, gate and λ's scale-free step."""
    run = trajectories.run_module(name, optimizers, products)
    compare(f"module/{name}/{optimizers}/{products}/", run, TOLERANCE[products])
