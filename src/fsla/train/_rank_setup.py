"""How the ranks of a run begin: one GPU each, the same settings, and the parameters of rank 0."""

from __future__ import annotations

import platform
from collections.abc import Mapping

from fsla._tree import is_sharded
from fsla.distributed._reducer import DataParallelReducer
from fsla.problems import _passes as passes
from fsla.problems._module import ModuleProblem, named_tensors


def join_ranks(problem: ModuleProblem, reducer: DataParallelReducer, settings: Mapping[str, object]) -> None:
    """Broadcast parameters and buffers from rank 0. Raise unless all ranks have the same form and settings."""
    group = reducer.process_group
    if group.world_size == 1:
        return
    device = passes.device_of(problem.omega)
    forms = {
        name: {key: f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for key, t in named_tensors(part)}
        for name, part in (("model", problem.model), ("outer", problem.outer))
    }
    group.check_equal({**settings, **forms, "device": device.type}, "model and settings")
    places = group.gather([platform.node(), str(device)])
    if device.type == "cuda" and len({tuple(place) for place in places}) < len(places):
        group.abort(
            f"Each rank must have a GPU of its own. Got {', '.join(place[1] for place in places)} by rank. Make the "
            "model on the device that fsla.distributed.get_device() returns."
        )
    group.copy_from(0, [t for t in problem.tensors() if not is_sharded(t)])
