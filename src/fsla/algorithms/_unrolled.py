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
    """ITD-BiO: T warm steps, differentiated in reverse."""
    return after_inner(ReverseUnroll(), step_sizes, inner_steps, projection)


@register("truncated_bp")
def truncated_bp(
    step_sizes: Sizes, *, inner_steps: int = 10, unroll_length: int = 5, projection: Projection | None = None
) -> Alternating:
    """Truncated back-propagation: T warm steps, of which the last `unroll_length` are differentiated."""
    return after_inner(ReverseUnroll(unroll_length), step_sizes, inner_steps, projection)


@register("forward")
def forward(step_sizes: Sizes, *, inner_steps: int = 10, projection: Projection | None = None) -> Alternating:
    """The direction of ITD-BiO from the first step to the last: p HVPs and p transposed mixed products a step."""
    return after_inner(ForwardUnroll(), step_sizes, inner_steps, projection)


@register("bio_bred")
def bio_bred(
    step_sizes: Sizes,
    *,
    inner_steps: int = 10,
    outer_update: Update | None = None,
    projection: Projection | None = None,
) -> Alternating:
    """BiO-BreD: ITD-BiO with a step such as `steps.Proximal(steps.SoftThreshold(weight))`."""
    return after_inner(ReverseUnroll(), step_sizes, inner_steps, projection, outer_update)


@register("rtho")
def rtho(step_sizes: Scheduled, *, projection: Projection | None = None) -> Alternating:
    """Real-time hyperparameter optimisation: dω/dλ is carried along, p trees of the form of ω."""
    algorithm = after_inner(ForwardSensitivity(), InnerStep(step_sizes), 1, projection)
    return replace(algorithm, adjoint_at="old_params")
