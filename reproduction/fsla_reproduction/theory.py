"""Section 5 and Appendix D as programs: certificates for small problems, not step sizes for practice.

The constants of Theorem 5 are computed in exact rational arithmetic, since its inequalities cancel to many digits.
They are tiny (with every assumption constant 1, δ is 1.1e-7): they document the theorem, and no run should use them.
Where the paper's statement fails, the corrected one is used, and the docstring names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

Number = int | float | Fraction


@dataclass(frozen=True)
class Constants:
    """The assumptions' constants, for every sample: any upper bound (for mu, lower bound) will do.

    mu: strong convexity of G in ω. L: Lipschitz constant of ∂_ω G. C_J: bound of ‖J‖. L_J, L_H: Lipschitz constants
    of J and H. L_F_lam, L_F_omega: Lipschitz constants of ∂_λ F and ∂_ω F in (λ, ω). C_F_omega: bound of ‖∂_ω F‖ on
    the region of interest.
    """

    mu: Number
    L: Number
    C_J: Number
    L_J: Number
    L_H: Number
    L_F_lam: Number
    L_F_omega: Number
    C_F_omega: Number

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            least = "positive" if f.name in ("mu", "L", "C_J", "L_F_omega", "C_F_omega") else "at least 0"
            if not (math.isfinite(value) and (value > 0 if least == "positive" else value >= 0)):
                raise ValueError(f"The constant {f.name!r} must be finite and {least}. Got {value} instead.")
            object.__setattr__(self, f.name, Fraction(value))
        if self.mu > self.L:
            raise ValueError(f"mu must not exceed L. Got mu={float(self.mu)}, L={float(self.L)} instead.")


class LemmaConstants(NamedTuple):
    """C_{x,y}: how the error of y, or ‖d‖², enters the next error of x."""

    d_d: Fraction
    d_omega: Fraction
    d_v: Fraction
    v_d: Fraction
    v_omega: Fraction
    omega_d: Fraction


@dataclass(frozen=True)
class Theorem5:
    """Every constant of Theorem 5, as a Fraction, and what follows from them."""

    constants: Constants
    M: Fraction
    """Bound of ‖v_λ‖ and of ‖v_k‖."""
    C_omega: Fraction
    """Lipschitz constant of ω_λ."""
    C_v: Fraction
    """Lipschitz constant of v_λ."""
    gamma1_sq: Fraction
    gamma2_sq: Fraction
    gamma3_sq: Fraction
    gamma4_sq: Fraction
    L_f: Fraction
    """Smoothness of f, which the paper leaves out."""
    gamma_v: Fraction
    gamma_omega: Fraction
    c_eta: Fraction
    c_beta: Fraction
    c_tau: Fraction
    C_bar: Fraction
    delta_bound: Fraction
    """δ must be smaller than this; includes δ ≤ 2/(c_β (L+μ)), which the paper leaves out and its proof needs."""

    def lemma_constants(self, alpha: Number | None = None) -> LemmaConstants:
        """Return the constants of the error lemmas; at a step α, the strict ones, with the terms the paper drops."""
        c = self.constants
        g1 = self.gamma1_sq
        gv = self.gamma_v
        gw = self.gamma_omega
        L_F = Fraction(c.L_F_omega) ** 2
        ML_H = self.M**2 * Fraction(c.L_H) ** 2
        omega = 2 * (self.c_tau**2 * self.gamma2_sq * self.gamma3_sq + 4 * self.c_beta**2 * g1 * self.gamma4_sq)
        v = 32 * self.c_beta**2 * g1 * self.gamma3_sq
        a = Fraction(0 if alpha is None else alpha)
        up_v = 1 + gv * a
        up_w = 1 + gw * a
        vw = self.c_beta**2 * up_v * up_w * (L_F + up_v * ML_H) / gv
        return LemmaConstants(
            d_d=2 * self.gamma2_sq + a * (up_w * omega * self.C_omega**2 / gw + up_v * v * self.C_v**2 / gv),
            d_omega=up_w * omega,
            d_v=up_v * v,
            v_d=self.C_v**2 * up_v**3 / gv + a * vw * self.C_omega**2 / gw,
            v_omega=vw,
            omega_d=self.C_omega**2 * up_w / gw,
        )

    def margins(self, alpha: Number, *, strict: bool = False) -> tuple[Fraction, Fraction, Fraction]:
        """Return left minus right sides of inequalities (40), (41), (42) at step α: all must be negative."""
        a = Fraction(alpha)
        mu = Fraction(self.constants.mu)
        g1 = self.gamma1_sq
        g2 = self.gamma2_sq
        C = self.lemma_constants(alpha if strict else None)
        shrink_v = (1 + self.gamma_v * a) ** 3 * (1 - self.c_beta * mu * a) - 1
        shrink_omega = (1 + self.gamma_omega * a) * (1 - self.c_tau * mu * a) - 1
        return (
            C.d_d / self.c_eta * a**2 + 4 * g1 * C.v_d * a + g2 * C.omega_d * a - a / 2 * (1 - a * self.L_f),
            4 * g1 * shrink_v + C.d_v * a**2 / self.c_eta + 4 * g1 * a,
            g2 * shrink_omega + C.d_omega * a**2 / self.c_eta + 4 * g1 * C.v_omega * a + g2 * a,
        )

    def bound(self, K: int, *, potential: float, sigma_sq: float, delta: float, horizon: bool = False) -> float:
        """Return the bound of the average of E‖∇f(λ_k)‖² over K steps.

        `potential` is Φ_0 - inf f. With α_k = δ/√(k+1) the noise term carries 1 + ln K (the paper's ln(K+1) is
        smaller than the harmonic sum that it bounds); with the constant α = δ/√K (`horizon`) it carries 1.
        """
        if K < 1 or not 0 < delta < self.delta_bound:
            raise ValueError(
                f"The bound needs K ≥ 1 and 0 < delta < {float(self.delta_bound):.4g}. Got K={K}, delta={delta}."
            )
        log = 1.0 if horizon else 1.0 + math.log(K)
        return (2 * potential / delta + 2 * delta * float(self.C_bar) * sigma_sq * log) / math.sqrt(K)


def theorem5(constants: Constants) -> Theorem5:
    """Return the constants of Theorem 5 with its gaps filled.

    Where F does not depend on λ and J is constant (the paper's own synthetic problem), Γ_2 = 0 leaves c_τ undefined;
    L_F_lam is then replaced by a positive upper bound, 0.1 L_f / (1 + C_ω).
    """
    c = {f.name: Fraction(getattr(constants, f.name)) for f in fields(constants)}
    mu, L, C_J, L_J, L_H, L_F_lam, L_F_omega, C_F_omega = c.values()
    M = C_F_omega / mu
    C_omega = C_J / mu
    C_v = (C_F_omega * L_H / mu**2 + L_F_omega / mu) * (1 + C_omega)
    g1 = C_J**2
    g2 = 2 * L_F_lam**2 + 4 * M**2 * L_J**2
    g3 = L**2
    g4 = 2 * (L_F_omega**2 + 2 * M**2 * L_H**2)
    L_f = (1 + C_omega) * (L_F_lam + M * L_J) + C_J * C_v
    if g2 == 0:
        return theorem5(replace(constants, L_F_lam=L_f / 10 / (1 + C_omega)))
    gv = 32 * g1 * C_v**2
    gw = 8 * g2 * C_omega**2
    c_eta = 4 * g2 / L_f
    c_beta = 2 * (3 * gv + 1) / mu
    c_tau = (2 * gv * g2 * gw + 2 * gv * g2 + 4 * g1 * c_beta**2 * (L_F_omega**2 + M**2 * L_H**2)) / (gv * g2 * mu)
    noise_d = 2 * (c_tau**2 * g2 + 4 * c_beta**2 * (1 + M**2) * g1 + c_eta**2 * (1 + M**2))
    C_bar = noise_d / c_eta + 4 * g1 * c_beta**2 * (1 + M**2) + g2 * c_tau**2
    delta = min(
        1 / (4 * L_f),
        2 * g2 * mu * c_beta / (12 * g2 * gv**2 + 8 * g3 * L_f * c_beta**2),
        c_eta * g2 * (1 + gw) / (2 * (c_tau**2 * g2 * g3 + 4 * c_beta**2 * g1 * g4) + g2 * c_eta),
        1 / c_eta,
        1 / (2 * (3 * gv + 1)),
        1 / (c_tau * mu),
        mu / (c_tau * L**2),
        2 / (c_beta * (L + mu)),
    )
    return Theorem5(constants, M, C_omega, C_v, g1, g2, g3, g4, L_f, gv, gw, c_eta, c_beta, c_tau, C_bar, delta)


@dataclass(frozen=True)
class Lemma3:
    """Lemma 3's quantities along sequences, and the bounds that follow from them.

    m[k] = Π_{s≤k} (1 - μβ_s); omega[k] and p[k] are m_k Σ_{s≤k} β_s e_s / m_s for e = e_ω and e_p, by their
    recursions. For convergence m, e_ω and e_p must tend to 0; that the sums be finite, as the paper asks, is neither
    needed nor enough.
    """

    m: list[float]
    omega: list[float]
    p: list[float]

    def matrix_bound(self, start: float, C_1: float) -> float:
        """Bound of ‖A_K - A*‖ from ‖A_0 - A*‖, with C_1 = L_J + C_J L_H / μ."""
        return self.m[-1] * start + C_1 * self.omega[-1]

    def vector_bound(self, start: float, C_2: float) -> float:
        """Bound of ‖v_K - v*‖ from ‖v_0 - v*‖, with C_2 = C_{F,ω} L_H / μ."""
        return self.m[-1] * start + C_2 * self.omega[-1] + self.p[-1]


def lemma3(mu: float, L: float, betas: Sequence[float], e_omega: Sequence[float], e_p: Sequence[float]) -> Lemma3:
    """Return Lemma 3's quantities for coefficients β_k in (0, 2/(L+μ)] and errors e_ω,k and e_p,k."""
    if not len(betas) == len(e_omega) == len(e_p) > 0:
        raise ValueError(
            f"The sequences must be of one length, at least 1. Got {len(betas)}, {len(e_omega)}, {len(e_p)} instead."
        )
    limit = neumann_step(mu, L)
    for k, beta in enumerate(betas):
        if not 0 < beta <= limit * (1 + 1e-12):
            raise ValueError(f"Every beta must lie in (0, 2/(L+mu)] = (0, {limit:.4g}]. Got beta_{k} = {beta} instead.")
    m = []
    omega = []
    p = []
    product = 1.0
    sum_omega = 0.0
    sum_p = 0.0
    for beta, e, f in zip(betas, e_omega, e_p, strict=True):
        shrink = 1 - mu * beta
        product = product * shrink
        sum_omega = shrink * sum_omega + beta * e
        sum_p = shrink * sum_p + beta * f
        m.append(product)
        omega.append(sum_omega)
        p.append(sum_p)
    return Lemma3(m, omega, p)


def neumann_step(mu: float, L: float) -> float:
    """The largest step of Corollary 1, 2/(L+μ). (The paper's interval up to 1/μ contains steps that diverge.)"""
    return 2 / (L + mu)


def decreasing_step(mu: float, L: float, theta: float) -> Callable[[int], float]:
    """The steps of Corollaries 2 and 3, θ/(k+k_0), with the offset k_0 that keeps the first ones stable."""
    if not theta > 1 / (2 * mu):
        raise ValueError(
            f"theta must exceed 1/(2 mu) = {1 / (2 * mu):.4g}, or the rate is slower than 1/√K. Got {theta} instead."
        )
    offset = max(1, math.ceil(theta * (L + mu) / 2))
    return lambda k: theta / (k + offset)


def spectral_abscissa(H: Tensor, J: Tensor, Q: Tensor, R: Tensor, S: Tensor, *, c_tau: float, c_beta: float) -> float:
    """Return the largest real part of FSLA's linearised flow on the reference quadratic; negative means stable.

    For small steps FSLA follows λ' = -(∂_λ F - J v), ω' = -c_τ ∂_ω G, v' = c_β (∂_ω F - H v). The ratios c_τ and c_β
    stay fixed as the steps fall, so a positive value is not cured by smaller or falling steps, only by larger ratios.
    """
    n = H.shape[0]
    flow = torch.cat(
        [
            torch.cat([-S, -R, J], dim=1),
            torch.cat([-c_tau * J.T, -c_tau * H, H.new_zeros(n, n)], dim=1),
            torch.cat([c_beta * R.T, c_beta * Q, -c_beta * H], dim=1),
        ]
    )
    return float(torch.linalg.eigvals(flow).real.max())
