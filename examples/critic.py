"""Actor and critic as leader and follower on a frozen lake.

The critic (inner variable) has a value for each state and action; its loss is the squared Bellman residual under the
policy. The policy (outer variable) wants the value of the start to be large. Then the hypergradient is the true policy
gradient, and the adjoint holds how often each state is visited. The lake's transitions are known.

python examples/critic.py
"""

import sys

import torch
from torch import nn

import fsla

DISCOUNT, SIDE = 0.9, 4
MOVES = [(0, -1), (1, 0), (0, 1), (-1, 0)]


def lake(seed):
    """Return P[s, a, s'] and r[s, a]: a step slips to either side in two of three cases; holes and the goal end it."""
    random = torch.Generator().manual_seed(seed)
    while True:
        ice = torch.rand(SIDE, SIDE, generator=random) < 0.8
        ice[0, 0] = ice[-1, -1] = True
        if goal_in_reach(ice):
            break
    P = torch.zeros(SIDE**2, 4, SIDE**2, dtype=torch.float64)
    r = torch.zeros(SIDE**2, 4, dtype=torch.float64)
    for s in range(SIDE**2 - 1):
        for action in range(4):
            for slip in (-1, 0, 1) if ice[divmod(s, SIDE)] else ():
                i, j = ((k + d) for k, d in zip(divmod(s, SIDE), MOVES[(action + slip) % 4], strict=True))
                i, j = min(max(i, 0), SIDE - 1), min(max(j, 0), SIDE - 1)
                if (i, j) == (SIDE - 1, SIDE - 1):
                    r[s, action] += 1 / 3
                elif ice[i, j]:
                    P[s, action, i * SIDE + j] += 1 / 3
    return P, r


def goal_in_reach(ice):
    seen = {(0, 0)}
    for _ in range(SIDE**2):
        seen |= {(i + a, j + b) for i, j in seen for a, b in MOVES if 0 <= i + a < SIDE and 0 <= j + b < SIDE}
        seen = {cell for cell in seen if ice[cell]}
    return (SIDE - 1, SIDE - 1) in seen


# --8<-- [start:core]
def inner_loss(critic, logits, world):
    P, r = world
    value = (logits.softmax(1) * critic["q"]).sum(1)
    return (r + DISCOUNT * P @ value - critic["q"]).square().sum() / 2


def outer_loss(critic, logits, world):
    return -(logits[0].softmax(0) * critic["q"][0]).sum()


def learn_policy(world, steps=3000, algorithm="soba"):
    """Return the logits of a policy."""
    critic, logits = nn.ParameterDict({"q": torch.zeros_like(world[1])}), nn.Parameter(torch.zeros_like(world[1]))
    bilevel = fsla.BilevelOptimizer(
        critic,
        logits,
        inner_loss=inner_loss,
        outer_loss=outer_loss,
        algorithm=algorithm,
    )
    for _ in range(steps):
        bilevel.step(world, world)
    return logits.detach()


# --8<-- [end:core]
def value(logits, world):
    """Return the exact value of the start."""
    P, r = world
    policy = logits.softmax(1)
    moves = torch.einsum("sa,sat->st", policy, P)
    return torch.linalg.solve(torch.eye(len(P), dtype=torch.float64) - DISCOUNT * moves, (policy * r).sum(1))[0]


if __name__ == "__main__":
    world = lake(seed=0)
    for steps in (0, 600 if "--small" in sys.argv else 3000):
        print(f"value of the start after {steps} steps: {value(learn_policy(world, steps), world):.4f}")
