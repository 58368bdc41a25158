"""Lemma 2: one formula for every approximate hypergradient.

Given states ω_0 … ω_{K-1}, coefficients β_k and vectors p_k, with H_k, J_k at ω_k and P_k = I - β_k H_k,

    ∇f_K = ∂_λ F(λ, ω_K) - Σ_{k<K} β_k s_k,

    backward mode   s_k = J_k P_{k+1} P_{k+2} … P_{K-1} p_K       (BP, NS)
    forward mode    s_k = J_K P_{K-1} P_{K-2} … P_{k+1} p_k       (CG, FSLA)

The two modes need opposite orders of the product; the paper prints the increasing one for both, which is wrong in the
forward mode unless the Hessians commute. The sums obey recursions, which is what an algorithm runs:

    matrix_recursion   A_{k+1} = A_k P_k + β_k J_k      Σ β_k s_k = A_K p_K    p products a step, any p_K afterwards
    v (`Tracked`)      v_{k+1} = P_k v_k + β_k p_k      Σ β_k s_k = J_K v_K    one product a step: FSLA's memory
    adjoint_recursion  the backward sum from the right, from p_K: one joint product a step, K states in memory

"Backward" and "forward" name the place of p, not a mode of automatic differentiation: the matrix recursion is
forward-mode differentiation of the inner steps (A = -dω/dλ), the adjoint recursion reverse-mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from fsla._tree import Leaves, Scalar, Tree, axpy, basis, dot, sub, unflatten
from fsla.problems._views import View


class Term(NamedTuple):
    """State k of the formula: ω_k, seen through the linearised ∂_ω G there, and β_k."""

    at: View
    beta: Scalar
    last: bool = False
    """Whether no term follows (for the adjoint recursion)."""


def adjoint_recursion(backwards: Iterable[Term], p: Tree, d_lam: Leaves) -> Leaves:
    """Return d_lam - Σ β_k s_k in the backward mode, from the terms in the order K-1 … 0; the last has `last` set.

    A generator of terms is consumed one by one, so that one graph at a time is held. The product H_0 p, which nothing
    reads, is not computed.
    """
    for term in backwards:
        if term.last:
            return axpy(-term.beta, term.at.mixed_hvp(p), d_lam)
        h, j = term.at.products(p)
        d_lam = axpy(-term.beta, j, d_lam)
        p = axpy(-term.beta, h, p)
    return d_lam


def matrix_recursion(terms: Iterable[Term], lam: Tree, matrix: Sequence[Tree]) -> Sequence[Tree]:
    """Return A_K from A_0, each as p trees, one for each coordinate of λ."""
    for term in terms:
        view = term.at.linearized()
        pairs = zip(matrix, basis(lam), strict=True)
        matrix = [axpy(term.beta, sub(view.mixed_hvp_transpose(e), view.hvp(a)), a) for a, e in pairs]
    return matrix


def apply_matrix(matrix: Sequence[Tree], p: Tree, lam: Tree) -> Tree:
    """Return A p as a tree of the form of λ."""
    return unflatten(torch.stack([dot(a, p) for a in matrix]), lam)
