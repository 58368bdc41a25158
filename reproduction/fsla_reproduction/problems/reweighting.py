"""Section 6.2: a weight for each training sample, learnt on a clean validation set.

    G(λ, ω) = mean_j sigmoid(λ_j) l(ω; x_j, y_j) + ½ ρ ‖ω‖²        F(ω) = mean l(ω; validation)

λ starts at 0, weights at ½. Batches are indices into the training or the validation set. F does not read λ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fsla._tree import Tree
from fsla.problems import Point, WeightedLossProblem, make_functional
from fsla.problems._functional import Network


@dataclass(frozen=True, eq=False)
class Reweighting:
    """The two losses over tensors, and a start."""

    model: nn.Module
    train_x: Tensor
    train_y: Tensor
    valid_x: Tensor
    valid_y: Tensor
    ridge: float = 0.0

    @cached_property
    def network(self) -> tuple[Tree, Network]:
        """ω_0 and the model as a function of ω."""
        return make_functional(self.model)

    def start(self) -> Point:
        omega, _ = self.network
        return Point({"weight_logits": torch.zeros(len(self.train_y), device=self.train_x.device)}, omega)

    def losses(self) -> WeightedLossProblem:
        _, net = self.network

        def scores(omega: Tree, index: Tensor) -> Tensor:
            return net(omega, self.train_x[index])  # type: ignore[no-any-return]

        def each(scores: Tensor, index: Tensor) -> Tensor:
            return nn.functional.cross_entropy(scores, self.train_y[index], reduction="none")

        def weight(rows: Tree, index: Tensor) -> Tensor:
            return weights(rows)

        def ridge(omega: Tree) -> Tensor:
            return self.ridge / 2 * _square(omega)

        def outer(lam: Tree, omega: Tree, index: Tensor) -> Tensor:
            return nn.functional.cross_entropy(net(omega, self.valid_x[index]), self.valid_y[index])

        return WeightedLossProblem(
            each,
            weight,
            outer,
            regularizer=ridge if self.ridge else None,
            row_index=lambda index: index,
            model_outputs=scores,
            outer_uses_lam=False,
        )

    @torch.no_grad()
    def scores(self, omega: Tree, x: Tensor, chunk: int = 5000) -> Tensor:
        """The model's class scores, in chunks."""
        _, net = self.network
        return torch.cat([net(omega, part) for part in x.split(chunk)])  # type: ignore[no-untyped-call]


def weights(lam: Tree) -> Tensor:
    """The weights of the samples."""
    return lam["weight_logits"].sigmoid()


def _square(omega: Tree) -> Tensor:
    return torch.stack([t.square().sum() for t in omega.values()]).sum()
