"""Engines give the same numbers; what cannot be had is said."""

import pytest
import torch

import fsla
from fsla.data import TaskSpec
from fsla.experiments.cleaning import RunSpec, execute
from fsla.training.engine import _copy, _map, _tensors, make_engine
from support import F64

TINY = RunSpec(
    TaskSpec("digits", n_train=60, n_valid=40), model="cnn-small", steps=24, every=12, batch=16,
    delta=10.0, c_tau=0.1, c_beta=0.01, c_eta=0.09,
)  # fmt: skip


def test_rates_of_a_tensor_are_those_of_the_number():
    for schedule in (fsla.rates.paper(), fsla.rates.constant(0.1, 0.2, 0.3), fsla.rates.Schedule(1, 1, 1, 9.0, 0.4)):
        for k in (0, 1, 7, 1999):
            for number, tensor in zip(schedule(k), schedule(torch.tensor(float(k), dtype=F64)), strict=True):
                assert float(tensor) == pytest.approx(number, rel=1e-14)


def test_a_state_is_copied_tensor_by_tensor():
    at = fsla.Point({"a": torch.ones(2)}, {"w": torch.ones(3)}, (({"w": torch.ones(3)}, 0.1),))
    state = fsla.State(3, at, None, None, {"a": torch.zeros(2)})
    twin = _map(lambda t: torch.full_like(t, 7.0), state)
    assert type(twin) is fsla.State
    assert type(twin.at) is fsla.Point
    assert twin.at.trail[0][1] == 0.1
    _copy(twin, state)
    assert all(torch.equal(a, b) for a, b in zip(_tensors(twin), _tensors(state), strict=True))
    assert len(_tensors(state)) == 4


def test_the_graph_engine_needs_a_gpu_and_says_so():
    with pytest.raises(ValueError, match=r"'graph' needs a CUDA device. Got cpu"):
        execute(TINY, engine="graph")
    with pytest.raises(ValueError, match=r"engine must be one of.*Got 'grph'.*Did you mean 'graph'"):
        make_engine("grph", None, None, None, torch.Generator(), None)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fsla", "bp_3", "ns_1_3", "cg_1_3", "cg_2_3", "none"])
def test_a_captured_run_is_the_eager_run(method):
    spec = RunSpec(**{**TINY.__dict__, "method": method})
    eager, graph = (execute(spec, device="cuda", engine=e) for e in ("eager", "graph"))
    for a, b in zip(eager, graph, strict=True):
        assert a["step"] == b["step"]
        assert a["oracles"] == b["oracles"]
        for key in ("valid_loss", "omega_norm", "weight_clean", "d_norm"):
            assert b[key] == pytest.approx(a[key], rel=2e-3, abs=1e-6)


def test_counts_of_replays_are_added_up():
    total = fsla.Counts(grad=3, hvp=1).plus(10, fsla.Counts(grad=1, hvp=2, cross=2))
    assert total == fsla.Counts(grad=13, hvp=21, cross=20)
