"""The small problem of the outside checks, from closed forms: no random generator of any library matters.

    G(λ, ω) = mean_i sigmoid(z_i·λ) (log(1 + exp(x_i·ω)) - t_i x_i·ω) + 0.15 exp(λ_0) ‖ω‖²      8 rows, in 4 batches
    F(λ, ω) = mean_i (log(1 + exp(c_i·ω)) - s_i c_i·ω) + 0.05 ‖λ - (1, -1)‖²                    6 rows, in 3 batches

Neither loss is quadratic, so that the point at which a derivative is taken shows in every number; F reads λ itself;
G is strongly convex in ω, with a largest curvature under 1.
"""

from __future__ import annotations

import numpy as np

INNER_ROWS = 8
OUTER_ROWS = 6
BATCH = 2
LAM = (0.4, -0.3)
OMEGA = (0.5, -0.2, 0.3)
TARGET = (1.0, -1.0)


def wave(rows: int, columns: int, shift: float) -> np.ndarray:
    """sin(shift + 3 i + 5 j + i j): of full rank."""
    i, j = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    return np.sin(shift + 3.0 * i + 5.0 * j + i * j)


def inner_data() -> dict[str, np.ndarray]:
    return {"x": wave(INNER_ROWS, 3, 1.0), "z": wave(INNER_ROWS, 2, 2.0), "t": np.arange(INNER_ROWS) % 2.0}


def outer_data() -> dict[str, np.ndarray]:
    return {"c": wave(OUTER_ROWS, 3, 4.0), "s": (np.arange(OUTER_ROWS) % 3 == 0) * 1.0}


def batch_of_draw(draw: int, batches: int) -> int:
    """Which batch the draw number 0, 1, … of a level takes: each once in a round, in an order that shifts."""
    return (draw + draw // batches) % batches
