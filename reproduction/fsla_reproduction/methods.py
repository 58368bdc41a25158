"""What a run of section 6.2 may do: one frozen specification for each kind of method.

Each has the name of the paper's legends ("CG_1_10": T = 1 inner step, K = 10 hypergradient steps; warm for T = 1 and
restarted for T > 1), the price of a step in oracle calls, and builds its algorithm from the step sizes. `kind` names
the specifications apart once they are JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from fsla import algorithms
from fsla._checks import pick, positive, whole_number
from fsla.algorithms import Algorithm
from fsla.steps import Schedule
from fsla.steps._momentum import MOMENTA

Momentum = Literal["storm", "average", "none"]
CURVATURES = {"hessian": "the Hessian", "gauss-newton": "the Gauss-Newton matrix"}
V_AT = {"old": "v moves at ω_k", "new": "v moves at ω_{k+1}"}
_SUFFIX = {"storm": "", "average": ", moving average", "none": ", no momentum"}


@dataclass(frozen=True)
class Fsla:
    """Algorithm 1."""

    v_at: Literal["old", "new"] = "old"
    momentum: Momentum = "storm"
    curvature: str = "hessian"
    kind: Literal["fsla"] = field(default="fsla", init=False)

    def __post_init__(self) -> None:
        pick(self.v_at, V_AT, "place where v moves (v_at)")
        pick(self.momentum, MOMENTA, "momentum")
        pick(self.curvature, CURVATURES, "curvature")

    @property
    def legend(self) -> str:
        place = ", v at new ω" if self.v_at == "new" else ""
        curvature = ", Gauss-Newton" if self.curvature == "gauss-newton" else ""
        return f"FSLA{_SUFFIX[self.momentum]}{place}{curvature}"

    @property
    def calls(self) -> int:
        return 3 + _gradients(self.momentum)

    def algorithm(self, step_sizes: Schedule) -> Algorithm[Any]:
        place: Literal["old_params", "new_params"] = "old_params" if self.v_at == "old" else "new_params"
        return algorithms.fsla(step_sizes, adjoint_at=place, momentum=self.momentum)

    def __str__(self) -> str:
        return "-".join(
            ["fsla", *_tail(self.momentum), *_unless(self.v_at, "old"), *_unless(self.curvature, "hessian")]
        )


@dataclass(frozen=True)
class Bp:
    """Backpropagation through T inner steps."""

    T: int
    momentum: Momentum = "storm"
    kind: Literal["bp"] = field(default="bp", init=False)

    def __post_init__(self) -> None:
        whole_number(self.T, "T", "Bp")
        pick(self.momentum, MOMENTA, "momentum")

    @property
    def legend(self) -> str:
        return f"BP_{self.T}{_SUFFIX[self.momentum]}"

    @property
    def calls(self) -> int:
        return self.T + _gradients(self.momentum) * (1 + self.T)

    def algorithm(self, step_sizes: Schedule) -> Algorithm[Any]:
        return algorithms.bp(step_sizes, inner_steps=self.T, momentum=self.momentum)

    def __str__(self) -> str:
        return "-".join([f"bp_{self.T}", *_tail(self.momentum)])


@dataclass(frozen=True)
class Ns:
    """T inner steps, then K terms of the Neumann series with step `beta`."""

    T: int
    K: int
    beta: float = 0.1
    momentum: Momentum = "storm"
    kind: Literal["ns"] = field(default="ns", init=False)

    def __post_init__(self) -> None:
        whole_number(self.T, "T", "Ns")
        whole_number(self.K, "K", "Ns")
        positive(self.beta, "beta", "Ns")
        pick(self.momentum, MOMENTA, "momentum")

    @property
    def legend(self) -> str:
        return f"NS_{self.T}_{self.K}{_SUFFIX[self.momentum]}"

    @property
    def calls(self) -> int:
        return self.T + _gradients(self.momentum) * (self.K + 1)

    def algorithm(self, step_sizes: Schedule) -> Algorithm[Any]:
        return algorithms.ns(
            step_sizes, inner_steps=self.T, num_terms=self.K, adjoint_lr=self.beta, momentum=self.momentum
        )

    def __str__(self) -> str:
        return "-".join([f"ns_{self.T}_{self.K}", *_tail(self.momentum)])


@dataclass(frozen=True)
class Cg:
    """T inner steps, then K steps of conjugate gradients."""

    T: int
    K: int
    momentum: Momentum = "storm"
    kind: Literal["cg"] = field(default="cg", init=False)

    def __post_init__(self) -> None:
        whole_number(self.T, "T", "Cg")
        whole_number(self.K, "K", "Cg")
        pick(self.momentum, MOMENTA, "momentum")

    @property
    def legend(self) -> str:
        return f"CG_{self.T}_{self.K}{_SUFFIX[self.momentum]}"

    @property
    def calls(self) -> int:
        return self.T + _gradients(self.momentum) * (self.K + 2)

    def algorithm(self, step_sizes: Schedule) -> Algorithm[Any]:
        return algorithms.cg(step_sizes, inner_steps=self.T, hvp_steps=self.K, momentum=self.momentum)

    def __str__(self) -> str:
        return "-".join([f"cg_{self.T}_{self.K}", *_tail(self.momentum)])


@dataclass(frozen=True)
class NoCleaning:
    """Training with every weight fixed at ½."""

    kind: Literal["none"] = field(default="none", init=False)

    @property
    def legend(self) -> str:
        return "no cleaning"

    @property
    def calls(self) -> int:
        return 1

    def algorithm(self, step_sizes: Schedule) -> Algorithm[Any]:
        return algorithms.fixed(step_sizes)

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True)
class Oracle:
    """Training with weight 1 for the labels that are right and 0 for the others, which no method may know."""

    kind: Literal["oracle"] = field(default="oracle", init=False)

    @property
    def legend(self) -> str:
        return "oracle"

    @property
    def calls(self) -> int:
        return 1

    def algorithm(self, step_sizes: Schedule) -> Algorithm[Any]:
        return algorithms.fixed(step_sizes)

    def __str__(self) -> str:
        return "oracle"


Method = Fsla | Bp | Ns | Cg | NoCleaning | Oracle


def _gradients(momentum: str) -> int:
    """Hypergradients of a step: STORM asks for one at the new point and one at the old."""
    return 2 if momentum == "storm" else 1


def _tail(momentum: str) -> list[str]:
    return _unless(momentum, "storm", "no-momentum" if momentum == "none" else momentum)


def _unless(value: str, default: str, word: str | None = None) -> list[str]:
    """The part of a file name for a value that is not the usual one."""
    return [] if value == default else [word or value]
