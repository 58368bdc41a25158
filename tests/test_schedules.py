"""Schedules refuse what has no rates, and have rates for every step otherwise."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsla.steps import Schedule

HUGE = [pytest.param(10**400, id="10**400"), pytest.param(10**5000, id="10**5000")]


@pytest.mark.parametrize("power", [10**30, *HUGE, 101, 100.5, True, "1", math.nan, -1])
def test_schedule_falling_too_fast_raises(power):
    with pytest.raises(ValueError, match="The 'power' of Schedule must be"):
        Schedule(1.0, 1.0, 1.0, power=power)


@pytest.mark.parametrize("name", ["outer_lr", "inner_lr", "adjoint_lr", "new_grad_weight"])
@pytest.mark.parametrize("value", [*HUGE, True, "1", None, math.inf])
def test_schedule_with_unrepresentable_rate_raises(name, value):
    with pytest.raises(ValueError, match=f"The '{name}' of Schedule must be a finite number"):
        Schedule(**{"outer_lr": 1.0, "inner_lr": 1.0, "adjoint_lr": 1.0, name: value})


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    power=st.floats(0, 100) | st.integers(0, 100),
    first=st.floats(0, 1e308) | st.integers(0, 10**308),
    k=st.integers(0, 10**9),
    clip=st.booleans(),
)
def test_schedule_accepted_has_rates_for_every_step(power, first, k, clip):
    rates = Schedule(first, first, first, first, power, clip).rates(k)
    assert all(isinstance(rate, float) and 0 <= rate < math.inf for rate in rates)
    assert rates.outer_lr <= float(first)
