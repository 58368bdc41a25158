"""Differentiation of the inner steps themselves, and then λ.

ITD-BiO          Ji, Yang & Liang 2021     backwards through T warm steps
truncated BP     Shaban et al. 2018        backwards through the last R of them
forward          Franceschi et al. 2017    forwards, with p products a step: for few coordinates of λ
RTHO             Franceschi et al. 2017    the same in real time: λ moves after every inner step
BiO-BreD         Huang et al. 2021         ITD-BiO with a Bregman or proximal step of λ
"""

from __future__ import annotations

from dataclasses import replace

from fsla.algorithms._orders import Alternating
from fsla.algorithms._registry import register
from fsla.algorithms._single_loop import Sizes, after_inner
from fsla.hypergradients._estimators import ForwardSensitivity, ForwardUnroll, ReverseUnroll
from fsla.steps._schedules import InnerStep, Scheduled
from fsla.steps._updates import Projection, Update


@register("itd_bio")
def itd_bio(step_sizes: Sizes, *, inner_steps: int = 10, projection: Projection | None = None) -> Alternating:
    """Return ITD-BiO: T warm steps of ω, differentiated in reverse.

    Args:
        step_sizes: step sizes of λ, ω and v: a schedule such as `fsla.steps.constant`.
        inner_steps: T, moves of ω in a step.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> minimize(fsla.algorithms.itd_bio(constant(0.2, 0.5, 0.0), inner_steps=5))
        1.0
    """
    return after_inner(ReverseUnroll(), step_sizes, inner_steps, projection)


@register("truncated_bp")
def truncated_bp(
    step_sizes: Sizes, *, inner_steps: int = 10, unroll_length: int = 5, projection: Projection | None = None
) -> Alternating:
    """Return truncated back-propagation through the last of T warm steps.

    Args:
        step_sizes: step sizes of λ, ω and v: a schedule such as `fsla.steps.constant`.
        inner_steps: T, moves of ω in a step.
        unroll_length: R, how many of the last inner steps are differentiated.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> minimize(fsla.algorithms.truncated_bp(constant(0.2, 0.5, 0.0), unroll_length=3))
        1.0
    """
    return after_inner(ReverseUnroll(unroll_length), step_sizes, inner_steps, projection)


@register("forward")
def forward(step_sizes: Sizes, *, inner_steps: int = 10, projection: Projection | None = None) -> Alternating:
    """Return the direction of ITD-BiO, computed from the first step to the last.

    Cost of a step: p HVPs and p transposed mixed products for each inner step.

    Args:
        step_sizes: step sizes of λ, ω and v: a schedule such as `fsla.steps.constant`.
        inner_steps: T, moves of ω in a step.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> minimize(fsla.algorithms.forward(constant(0.2, 0.5, 0.0), inner_steps=5))
        1.0
    """
    return after_inner(ForwardUnroll(), step_sizes, inner_steps, projection)


@register("bio_bred")
def bio_bred(
    step_sizes: Sizes,
    *,
    inner_steps: int = 10,
    outer_update: Update | None = None,
    projection: Projection | None = None,
) -> Alternating:
    """Return BiO-BreD: ITD-BiO whose λ moves by a Bregman or proximal step.

    Args:
        step_sizes: step sizes of λ, ω and v: a schedule such as `fsla.steps.constant`.
        inner_steps: T, moves of ω in a step.
        outer_update: how λ moves, such as ``Proximal(SoftThreshold(weight))``; plain steps by default.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> outer_update = fsla.steps.Proximal(fsla.steps.SoftThreshold(0.01))
        >>> minimize(fsla.algorithms.bio_bred(constant(0.2, 0.5, 0.0), outer_update=outer_update))
        0.99
    """
    return after_inner(ReverseUnroll(), step_sizes, inner_steps, projection, outer_update)


@register("rtho")
def rtho(step_sizes: Scheduled, *, projection: Projection | None = None) -> Alternating:
    """Return RTHO: dω/dλ is carried along, and λ moves after every step of ω.

    The memory is p trees of the form of ω.

    Args:
        step_sizes: step sizes of λ, ω and v: a schedule such as `fsla.steps.constant`.
        projection: set that λ stays in, such as `fsla.steps.Box(0, 1)`.

    Returns:
        The algorithm, an `Alternating`.

    Examples:
        >>> minimize(fsla.algorithms.rtho(constant(0.2, 0.5, 0.0)))
        1.0
    """
    algorithm = after_inner(ForwardSensitivity(), InnerStep(step_sizes), 1, projection)
    return replace(algorithm, adjoint_at="old_params")
