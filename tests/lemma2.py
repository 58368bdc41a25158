"""Lemma 2 as the paper states it, term by term: what the library's recursions are compared with."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fsla._tree import Leaves, Tree, axpy, scale, sub
from fsla.problems import View


class Term(NamedTuple):
    """State k of the formula: ω_k, seen through the linearised ∂_ω G there; β_k; and p_k (forward mode only)."""

    at: View
    beta: float
    p: Tree | None = None
    last: bool = False


def vector_recursion(terms: Iterable[Term], v: Tree) -> Tree:
    """Return v_K from v_0: v + β (p - H v), once for each term."""
    for term in terms:
        v = axpy(term.beta, sub(_p(term), term.at.hvp(v)), v)
    return v


def backward_sum(terms: Sequence[Term], p: Tree, d_lam: Leaves) -> Leaves:
    """Return ∇f_K in the backward mode, term by term as Lemma 2 states it: K²/2 products, for reference."""
    for k, term in enumerate(terms):
        s = p
        for later in reversed(terms[k + 1 :]):
            s = axpy(-later.beta, later.at.hvp(s), s)
        d_lam = axpy(-term.beta, term.at.mixed_hvp(s), d_lam)
    return d_lam


def forward_sum(terms: Sequence[Term], last: View, d_lam: Leaves) -> Leaves:
    """Return ∇f_K in the forward mode, term by term as Lemma 2 states it; `last` is G seen at ω_K."""
    for k, term in enumerate(terms):
        s = _p(term)
        for later in terms[k + 1 :]:
            s = axpy(-later.beta, later.at.hvp(s), s)
        d_lam = sub(d_lam, last.mixed_hvp(scale(term.beta, s)))
    return d_lam


def _p(term: Term) -> Tree:
    if term.p is None:
        raise ValueError("In the forward mode every Term must have its p. Got None.")
    return term.p
