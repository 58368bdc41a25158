"""Algorithms by their literature names: functions that return an `Algorithm` with `init` and `step`.

The examples of this room go on from this problem, whose solution is λ = 1:

    >>> import torch
    >>> import fsla
    >>> from fsla.steps import constant
    >>> problem = fsla.Problem(
    ...     inner_loss=lambda lam, omega, batch: ((omega["w"] - lam["x"]) ** 2).sum() / 2,
    ...     outer_loss=lambda lam, omega, batch: ((omega["w"] - 1) ** 2).sum() / 2,
    ... )
    >>> at = fsla.Point({"x": torch.full((1,), 0.5)}, {"w": torch.zeros(1)})
    >>> batches = fsla.StepBatches.shared(None, None, seed=0)
    >>> def minimize(algorithm, steps=60):
    ...     state = algorithm.init(problem, at, batches)
    ...     for _ in range(steps):
    ...         state = algorithm.step(problem, state, batches)
    ...     return round(state.lam.value["x"].item(), 2)
    >>> minimize(fsla.algorithms.soba(constant(0.2, 0.5, 0.5)))
    1.0
"""

from fsla._state_tree import saved
from fsla.algorithms._base import Algorithm, State
from fsla.algorithms._baselines import bp, cg, ns
from fsla.algorithms._bda import bda
from fsla.algorithms._dense import stable, svrb
from fsla.algorithms._first_order import bome, f2sa, sama
from fsla.algorithms._fixed import fixed
from fsla.algorithms._hoag import hoag
from fsla.algorithms._implicit import aid_bio, aid_cg, aid_fp, bsa, implicit_neumann, sbio_bred, stocbio, t1_t2, ttsa
from fsla.algorithms._orders import Alternating, AlternatingState, SharedBatchWarning, Simultaneous, SimultaneousState
from fsla.algorithms._penalty import penalty
from fsla.algorithms._registry import get_algorithm, list_algorithms, register
from fsla.algorithms._reversible import reversible
from fsla.algorithms._saba import saba
from fsla.algorithms._single_loop import amigo, fsla, single_loop, slip
from fsla.algorithms._soba import fdehbo, hjfbio, ma_soba, one_step, soba, srba
from fsla.algorithms._tuning_free import s_tfbo
from fsla.algorithms._unrolled import bio_bred, forward, itd_bio, rtho, truncated_bp
from fsla.algorithms._variance_reduced import accbo, biadam, mrbo, sustain, vr_biadam
from fsla.algorithms._vrbo import vrbo

__all__ = [
    "Algorithm",
    "Alternating",
    "AlternatingState",
    "SharedBatchWarning",
    "Simultaneous",
    "SimultaneousState",
    "State",
    "accbo",
    "aid_bio",
    "aid_cg",
    "aid_fp",
    "amigo",
    "bda",
    "biadam",
    "bio_bred",
    "bome",
    "bp",
    "bsa",
    "cg",
    "f2sa",
    "fdehbo",
    "fixed",
    "forward",
    "fsla",
    "get_algorithm",
    "hjfbio",
    "hoag",
    "implicit_neumann",
    "itd_bio",
    "list_algorithms",
    "ma_soba",
    "mrbo",
    "ns",
    "one_step",
    "penalty",
    "register",
    "reversible",
    "rtho",
    "s_tfbo",
    "saba",
    "sama",
    "saved",
    "sbio_bred",
    "single_loop",
    "slip",
    "soba",
    "srba",
    "stable",
    "stocbio",
    "sustain",
    "svrb",
    "t1_t2",
    "truncated_bp",
    "ttsa",
    "vr_biadam",
    "vrbo",
]
