"""Algorithms by their literature names. Each is a function that returns a solver with `init` and `step`."""

from collections.abc import Callable

from fsla.algorithms.baselines import bp, cg, ns
from fsla.algorithms.fixed import fixed
from fsla.algorithms.single_loop import amigo, fsla, single_loop
from fsla.algorithms.soba import ma_soba, soba
from fsla.solver import Algorithm

ALL: dict[str, Callable[..., Algorithm]] = {
    "fsla": fsla,
    "single_loop": single_loop,
    "bp": bp,
    "ns": ns,
    "cg": cg,
    "soba": soba,
    "ma_soba": ma_soba,
    "amigo": amigo,
}

"""The bilevel algorithms. (`fixed` is plain training, to compare with.)"""

__all__ = ["ALL", "amigo", "bp", "cg", "fixed", "fsla", "ma_soba", "ns", "single_loop", "soba"]
