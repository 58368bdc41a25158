"""Plain training of ω, with λ left where it is: what every bilevel method is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from fsla._checks import whole_number
from fsla._state_tree import evolve
from fsla.algorithms._base import Algorithm, State
from fsla.algorithms._single_loop import AUTOMATIC, Sizes
from fsla.problems._batches import BatchSpec
from fsla.steps._context import StepContext, descend


@dataclass(frozen=True, kw_only=True)
class Fixed(Algorithm[State]):
    """ω ← ω - τ ∂_ω G(λ, ω), `inner_steps` times a step, and nothing else. It reads `inner_grad` alone."""

    inner_steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.inner_steps, "inner_steps", "Fixed")

    @property
    def batches(self) -> BatchSpec:
        return BatchSpec(self.inner_steps, 0, 0, 0, 0)

    def start(self, state: State, step: StepContext) -> State:
        return state

    def move(self, state: State, step: StepContext) -> State:
        return self.train(state, step)

    def train(self, state: State, step: StepContext) -> State:
        return evolve(state, omega=descend(step, state.point, state.omega, self.inner_steps)[1])


def fixed(step_sizes: Sizes = AUTOMATIC, *, inner_steps: int = 1) -> Fixed:
    """Return plain training: ω moves by its own gradient, and λ stays.

    Args:
        step_sizes: step size of ω: automatic by default, or a schedule.
        inner_steps: T, moves of ω in a step.

    Returns:
        The algorithm, a `Fixed`.

    Examples:
        >>> minimize(fsla.algorithms.fixed(constant(0.0, 0.5, 0.0)))
        0.5
    """
    return Fixed(step_sizes=step_sizes, inner_steps=inner_steps)
