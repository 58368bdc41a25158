"""Algorithms by their literature names. Each is a function that returns a solver with `init` and `step`."""

from collections.abc import Callable

from fsla.algorithms._alternating import Algorithm, SharedBatchWarning, Solver, State
from fsla.algorithms._around import ByDifferences, Growing, WarmedUp
from fsla.algorithms._baselines import bp, cg, ns
from fsla.algorithms._bda import bda
from fsla.algorithms._dense import stable, svrb
from fsla.algorithms._fixed import fixed
from fsla.algorithms._hoag import hoag
from fsla.algorithms._implicit import aid_bio, aid_cg, aid_fp, bsa, implicit_neumann, sbio_bred, stocbio, t1_t2, ttsa
from fsla.algorithms._penalty import penalty
from fsla.algorithms._reversible import reversible
from fsla.algorithms._saba import saba
from fsla.algorithms._sama import sama
from fsla.algorithms._simultaneous import Jacobi
from fsla.algorithms._single_loop import amigo, fsla, single_loop, slip
from fsla.algorithms._soba import fdehbo, hjfbio, ma_soba, soba, srba
from fsla.algorithms._tuning_free import s_tfbo
from fsla.algorithms._unrolled import bio_bred, forward, itd_bio, rtho, truncated_bp
from fsla.algorithms._value_function import bome, f2sa
from fsla.algorithms._variance_reduced import accbo, biadam, mrbo, sustain, vr_biadam
from fsla.algorithms._vrbo import vrbo

_FUNCTIONS: tuple[Callable[..., Algorithm], ...] = (
    fsla, single_loop, amigo, slip,
    soba, ma_soba, saba, srba, fdehbo, hjfbio, s_tfbo,
    bp, ns, cg,
    itd_bio, truncated_bp, forward, rtho, reversible, bio_bred, bda,
    bsa, ttsa, aid_bio, stocbio, sbio_bred, implicit_neumann, t1_t2, aid_fp, aid_cg, hoag,
    sustain, mrbo, vrbo, biadam, vr_biadam, accbo,
    stable, svrb,
    penalty, f2sa, bome, sama,
)  # fmt: skip
ALL: dict[str, Callable[..., Algorithm]] = {function.__name__: function for function in _FUNCTIONS}
"""The bilevel algorithms. (`fixed` is plain training, to compare with.)"""

__all__ = [
    "ALL",
    "Algorithm",
    "ByDifferences",
    "Growing",
    "Jacobi",
    "SharedBatchWarning",
    "Solver",
    "State",
    "WarmedUp",
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
    "hjfbio",
    "hoag",
    "implicit_neumann",
    "itd_bio",
    "ma_soba",
    "mrbo",
    "ns",
    "penalty",
    "reversible",
    "rtho",
    "s_tfbo",
    "saba",
    "sama",
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
