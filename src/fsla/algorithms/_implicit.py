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

from fsla._checks import positive, whole_number
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
    """Return BSA: ⌈T (k+1)^growth⌉ moves of ω and a random Neumann series.

    The seed of a step's batches draws which of the first `num_terms` terms is taken.

    Args:
        step_sizes: step sizes of λ and ω: a schedule such as `fsla.steps.constant`; its adjoint_lr is not read.
        inner_steps: T, moves of ω in a step.
        growth: power of k + 1 by which `inner_steps` grows.
        num_terms: K, terms of the Neumann series.
        adjoint_lr: step size of the series, near 1/L, where L is the largest eigenvalue of H.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> minimize(fsla.algorithms.bsa(constant(0.2, 0.5, 0.0), num_terms=2, adjoint_lr=0.5))
        1.0
    """
    if growth:
        positive(growth, "growth", "bsa")
    solve = RandomNeumann(num_terms, adjoint_lr)
    return replace(after_inner(Solved(solve), step_sizes, inner_steps, projection), growth=growth)


@register("ttsa")
def ttsa(
    step_sizes: Sizes, *, num_terms: int = 10, adjoint_lr: float = 0.1, projection: Projection | None = None
) -> Alternating:
    """Return TTSA: one move of ω, a random Neumann series, two time scales.

    Its step sizes fall by two powers, such as ``Schedule(..., power=(3/5, 2/5, 0, 0))``.

    Args:
        step_sizes: step sizes of λ and ω: a schedule such as `fsla.steps.constant`; its adjoint_lr is not read.
        num_terms: K, terms of the Neumann series.
        adjoint_lr: step size of the series, near 1/L, where L is the largest eigenvalue of H.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> minimize(fsla.algorithms.ttsa(constant(0.1, 0.5, 0.0), num_terms=2, adjoint_lr=0.5))
        1.0
    """
    return after_inner(Solved(RandomNeumann(num_terms, adjoint_lr)), step_sizes, 1, projection)


@register("aid_bio")
def aid_bio(
    step_sizes: Sizes = AUTOMATIC, *, inner_steps: int = 10, hvp_steps: int = 10, projection: Projection | None = None
) -> Alternating:
    """Return AID-BiO: T moves of ω, then v by conjugate gradients from the last v.

    One of the Q products is for the residual of the last v.

    Args:
        step_sizes: step sizes of λ, ω and v: automatic by default, or a schedule.
        inner_steps: T, moves of ω in a step.
        hvp_steps: Q, products of H in a step.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> minimize(fsla.algorithms.aid_bio(constant(0.2, 0.5, 0.0), inner_steps=2, hvp_steps=2))
        1.0
    """
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
    """Return stocBiO: T moves of ω, then v by Q products of a Neumann series.

    Each product reads its own batch where a step has several.

    Args:
        step_sizes: step sizes of λ and ω: a schedule such as `fsla.steps.constant`; its adjoint_lr is not read.
        inner_steps: T, moves of ω in a step.
        hvp_steps: Q, products of H in a step.
        adjoint_lr: step size of the series, near 1/L, where L is the largest eigenvalue of H.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> minimize(fsla.algorithms.stocbio(constant(0.2, 0.5, 0.0), inner_steps=2, hvp_steps=5, adjoint_lr=0.5))
        1.0
    """
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
    """Return SBiO-BreD: stocBiO whose λ moves by a Bregman step.

    Args:
        step_sizes: step sizes of λ and ω: a schedule such as `fsla.steps.constant`; its adjoint_lr is not read.
        inner_steps: T, moves of ω in a step.
        hvp_steps: Q, products of H in a step.
        adjoint_lr: step size of the series, near 1/L, where L is the largest eigenvalue of H.
        outer_update: how λ moves; by default `fsla.steps.ExponentiatedGradient`, for which λ must be positive.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> minimize(fsla.algorithms.sbio_bred(constant(0.2, 0.5, 0.0), adjoint_lr=0.5))
        1.0
    """
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
    """Return implicit differentiation with Q products of a Neumann series.

    Args:
        step_sizes: step sizes of λ and ω: a schedule such as `fsla.steps.constant`; its adjoint_lr is not read.
        inner_steps: T, moves of ω in a step.
        hvp_steps: Q, products of H in a step.
        adjoint_lr: step size of the series, near 1/L, where L is the largest eigenvalue of H.
        outer_update: how λ moves, such as `fsla.steps.Adam()`; plain steps by default.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> outer_update = fsla.steps.Momentum(0.5)
        >>> minimize(fsla.algorithms.implicit_neumann(constant(0.2, 0.5, 0.0), outer_update=outer_update))
        1.0
    """
    whole_number(hvp_steps, "hvp_steps", "the algorithm")
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
    """Return T1-T2: v is a multiple of ∂_ω F, without a product of H.

    It is cheap, and biased unless H is near a multiple of the identity.

    Args:
        step_sizes: step sizes of λ and ω: a schedule such as `fsla.steps.constant`; its adjoint_lr is not read.
        inner_steps: T, moves of ω in a step.
        adjoint_lr: the multiple.
        outer_update: how λ moves; plain steps by default.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> minimize(fsla.algorithms.t1_t2(constant(0.2, 0.5, 0.0), adjoint_lr=1.0))
        1.0
    """
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
    """Return AID-FP: v by K fixed-point iterations from zero.

    The iteration is v ← v + adjoint_lr (∂_ω F - H v). On a `fsla.FixedPointProblem` take adjoint_lr = 1.

    Args:
        step_sizes: step sizes of λ and ω: a schedule such as `fsla.steps.constant`; its adjoint_lr is not read.
        inner_steps: T, moves of ω in a step.
        num_terms: K, iterations of v.
        adjoint_lr: step size of the iteration, near 1/L, where L is the largest eigenvalue of H.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> minimize(fsla.algorithms.aid_fp(constant(0.2, 0.5, 0.0), inner_steps=2, adjoint_lr=0.5))
        1.0
    """
    return after_inner(Solved(Neumann(num_terms, adjoint_lr)), step_sizes, inner_steps, projection)


@register("aid_cg")
def aid_cg(
    step_sizes: Sizes = AUTOMATIC, *, inner_steps: int = 10, hvp_steps: int = 10, projection: Projection | None = None
) -> Alternating:
    """Return AID-CG: v by conjugate gradients from zero.

    Args:
        step_sizes: step sizes of λ, ω and v: automatic by default, or a schedule.
        inner_steps: T, moves of ω in a step.
        hvp_steps: Q, products of H in a step.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> minimize(fsla.algorithms.aid_cg(constant(0.2, 0.5, 0.0), inner_steps=2, hvp_steps=1))
        1.0
    """
    return after_inner(Solved(ConjugateGradient(hvp_steps)), step_sizes, inner_steps, projection)
