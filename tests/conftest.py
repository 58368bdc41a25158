import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser):
    parser.addoption("--order", type=int, metavar="SEED", help="run modules, and the tests of each, in random order")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    seed = config.getoption("--order")
    if seed is None:
        return
    modules = {}
    for item in items:
        modules.setdefault(item.module, []).append(item)
    order = random.Random(seed)
    groups = order.sample(list(modules.values()), len(modules))
    items[:] = [item for group in groups for item in order.sample(group, len(group))]


@pytest.fixture(autouse=True)
def _one_thread():
    """Two workers on two cores: one thread each."""
    torch.set_num_threads(1)
