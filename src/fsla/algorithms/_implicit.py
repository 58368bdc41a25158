"""Implicit differentiation: T steps on ω, then v afresh (or improved) at the new ω, then λ.

    BSA                Ghadimi & Wang 2018           a growing number of steps, a random Neumann series
    TTSA               Hong et al. 2020              one step, a random Neumann series, two time scales
    AID-BiO            Ji, Yang & Liang 2021         conjugate gradients from the last v
    stocBiO            Ji, Yang & Liang 2021         a Neumann series, with a batch for each factor
    SBiO-BreD          Huang et al. 2021             the same, with a Bregman step of λ
    implicit Neumann   Lorraine et al. 2020          a Neumann series on one batch, any optimiser for λ
    T1-T2              Luketina et al. 2016          the identity in the place of the inverse
    AID-FP, AID-CG     Grazzi et al. 2020            a fixed-point iteration or conjugate gradients, from zero

`adjoint_lr` is the step of the series, in units of 1/L; that of the step sizes is not read.
"""

from __future__ import annotations

from dataclasses import replace

from fsla._checks import positive
from fsla.algorithms._orders import Alternating
from fsla.algorithms._registry import register
from fsla.algorithms._single_loop import AUTOMATIC, Sizes, after_inner
from fsla.hypergradients._estimators import Solved, WarmStartCG
from fsla.hypergradients._linear_solvers import ConjugateGradient, Identity, Neumann, RandomNeumann
from fsla.steps._updates import ExponentiatedGradient, Projection, Update


@register("bsa")
def bsa(
    step_sizes: Sizes,
    *,
    inner_steps: int = 1,
    growth: float = 0.5,
    num_terms: int = 10,
    adjoint_lr: float = 0.1,
    projection: Projection | None = None,
) -> Alternating:
    """BSA: ⌈T (k+1)^growth⌉ steps on ω; one of the first `num_terms` terms of the series, drawn by the step's seed."""
    if growth:
        positive(growth, "growth", "bsa")
    solve = RandomNeumann(num_terms, adjoint_lr)
    return replace(after_inner(Solved(solve), step_sizes, inner_steps, projection), growth=growth)


@register("ttsa")
def ttsa(
    step_sizes: Sizes, *, num_terms: int = 10, adjoint_lr: float = 0.1, projection: Projection | None = None
) -> Alternating:
    """TTSA: one step on ω. Its step sizes have two powers, such as Schedule(..., power=(3/5, 2/5, 0, 0))."""
    return after_inner(Solved(RandomNeumann(num_terms, adjoint_lr)), step_sizes, 1, projection)


@register("aid_bio")
def aid_bio(
    step_sizes: Sizes = AUTOMATIC, *, inner_steps: int = 10, hvp_steps: int = 10, projection: Projection | None = None
) -> Alternating:
    """AID-BiO: T steps on ω; v by Q products of conjugate gradients from the last v, one of them for the residual."""
    return after_inner(WarmStartCG(hvp_steps), step_sizes, inner_steps, projection)


@register("stocbio")
def stocbio(
    step_sizes: Sizes,
    *,
    inner_steps: int = 10,
    hvp_steps: int = 10,
    adjoint_lr: float = 0.1,
    projection: Projection | None = None,
) -> Alternating:
    """stocBiO: T steps on ω; Q products of a Neumann series, each of its own batch where there are several."""
    return implicit_neumann(
        step_sizes, inner_steps=inner_steps, hvp_steps=hvp_steps, adjoint_lr=adjoint_lr, projection=projection
    )


@register("sbio_bred")
def sbio_bred(
    step_sizes: Sizes,
    *,
    inner_steps: int = 10,
    hvp_steps: int = 10,
    adjoint_lr: float = 0.1,
    outer_update: Update | None = None,
    projection: Projection | None = None,
) -> Alternating:
    """SBiO-BreD: stocBiO with a Bregman step of λ, by default an exponentiated one, for which λ must be positive."""
    return implicit_neumann(
        step_sizes,
        inner_steps=inner_steps,
        hvp_steps=hvp_steps,
        adjoint_lr=adjoint_lr,
        outer_update=ExponentiatedGradient() if outer_update is None else outer_update,
        projection=projection,
    )


@register("implicit_neumann")
def implicit_neumann(
    step_sizes: Sizes,
    *,
    inner_steps: int = 1,
    hvp_steps: int = 10,
    adjoint_lr: float = 0.1,
    outer_update: Update | None = None,
    projection: Projection | None = None,
) -> Alternating:
    """Implicit differentiation with Q products of a Neumann series, and any update of λ, such as `steps.Adam()`."""
    solve = Neumann(hvp_steps + 1, adjoint_lr)
    return after_inner(Solved(solve), step_sizes, inner_steps, projection, outer_update)


@register("t1_t2")
def t1_t2(
    step_sizes: Sizes,
    *,
    inner_steps: int = 1,
    adjoint_lr: float = 0.1,
    outer_update: Update | None = None,
    projection: Projection | None = None,
) -> Alternating:
    """T1-T2: v = adjoint_lr · ∂_ω F. Cheap, and biased unless H is near a multiple of the identity."""
    return after_inner(Solved(Identity(adjoint_lr)), step_sizes, inner_steps, projection, outer_update)


@register("aid_fp")
def aid_fp(
    step_sizes: Sizes,
    *,
    inner_steps: int = 10,
    num_terms: int = 10,
    adjoint_lr: float = 0.1,
    projection: Projection | None = None,
) -> Alternating:
    """AID-FP: v ← v + adjoint_lr (∂_ω F - H v), K times from zero. On a fixed-point problem with adjoint_lr = 1."""
    return after_inner(Solved(Neumann(num_terms, adjoint_lr)), step_sizes, inner_steps, projection)


@register("aid_cg")
def aid_cg(
    step_sizes: Sizes = AUTOMATIC, *, inner_steps: int = 10, hvp_steps: int = 10, projection: Projection | None = None
) -> Alternating:
    """AID-CG: K conjugate-gradient steps from zero."""
    return after_inner(Solved(ConjugateGradient(hvp_steps)), step_sizes, inner_steps, projection)
