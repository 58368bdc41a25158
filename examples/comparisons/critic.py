"""The learnt policy beside the exact policy gradient, actor-critic without an adjoint and REINFORCE."""

from functools import partial

import torch
from critic import DISCOUNT, MOVES, SIDE, lake, learn_policy, value
from matplotlib.patches import Rectangle

METRIC, BETTER, DIGITS = "value of the start, % of the optimum (value iteration: 100, in milliseconds)", "higher", 1
STEPS, SMALL, SIZE = 3000, 100, (8.5, 3.6)
SUMMARY = [
    (
        "Actor and critic",
        "value, % of the optimum; higher is better",
        "actor-critic, no adjoint",
        "without an adjoint (one_step)",
        "fsla (SOBA)",
    ),
]
"""Lines of the gallery's table: title, score, and the methods that it shows."""


def optimum(world):
    P, r = world
    best = torch.zeros(len(P), dtype=torch.float64)
    for _ in range(2000):
        best = (r + DISCOUNT * P @ best).max(1).values
    return best[0]


def percent(logits, world):
    return 100 * (value(logits, world) / optimum(world)).item()


def uniform(seed):
    world = lake(seed)
    return percent(torch.zeros_like(world[1]), world)


def exact(steps, seed):
    """Ascend the exact policy gradient, which takes a linear system a step."""
    world = lake(seed)
    logits = torch.nn.Parameter(torch.zeros_like(world[1]))
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        (-value(logits, world)).backward()
        optimizer.step()
    return percent(logits.detach(), world)


def actor_critic(steps, seed):
    """Each state's policy climbs the critic, all states alike; the critic takes a step of temporal differences."""
    world = P, r = lake(seed)
    logits, q = torch.nn.Parameter(torch.zeros_like(r)), torch.zeros_like(r)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        (-(logits.softmax(1) * q).sum()).backward()
        optimizer.step()
        q = q + 0.5 * (r + DISCOUNT * P @ (logits.detach().softmax(1) * q).sum(1) - q)
    return percent(logits.detach(), world)


def reinforce(episodes, seed):
    """Learn from episodes alone; the transitions are unknown."""
    world = P, r = lake(seed)
    logits, baseline = torch.nn.Parameter(torch.zeros_like(r)), 0.0
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(episodes):
        state, gain, path = 0, 0.0, []
        for time in range(100):
            action = torch.multinomial(logits.detach()[state].softmax(0), 1).item()
            path.append((state, action))
            probabilities = torch.cat([P[state, action], r[state, action].view(1)])  # the last: the goal
            probabilities = torch.cat([probabilities, (1 - probabilities.sum()).clamp(min=0).view(1)])  # and a hole
            after = torch.multinomial(probabilities, 1).item()
            if after >= SIDE**2:
                gain = DISCOUNT**time * (after == SIDE**2)
                break
            state = after
        states, actions = torch.tensor(path).T
        optimizer.zero_grad()
        (-(gain - baseline) * logits.log_softmax(1)[states, actions].sum()).backward()
        optimizer.step()
        baseline += 0.05 * (gain - baseline)
    return percent(logits.detach(), world)


def learned(algorithm, steps, seed):
    world = lake(seed)
    return percent(learn_policy(world, steps, algorithm), world)


def methods(steps):
    return {
        "uniform policy": uniform,
        "exact policy gradient": partial(exact, steps),
        "actor-critic, no adjoint": partial(actor_critic, steps),
        "REINFORCE, transitions unknown": partial(reinforce, steps),
        "without an adjoint (one_step)": partial(learned, "one_step", steps),
        "fsla (SOBA)": partial(learned, "soba", steps),
    }


def draw(figure, steps):
    world = P, r = lake(0)
    policy = learn_policy(world, steps).softmax(1)
    left, right = figure.subplots(1, 2)
    for s in range(SIDE**2):
        i, j = divmod(s, SIDE)
        hole = P[s].sum() + r[s].sum() == 0 and s < SIDE**2 - 1
        left.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor="0.3" if hole else "0.92", edgecolor="white"))
        if s == SIDE**2 - 1:
            left.text(j, i, "goal", ha="center", va="center")
        elif not hole:
            for (di, dj), p in zip(MOVES, policy[s].tolist(), strict=True):
                if p > 0.05:
                    left.arrow(j, i, 0.35 * p * dj, 0.35 * p * di, head_width=0.12 * p, color="C3")
    edge = SIDE - 0.5
    left.set(
        xlim=(-0.5, edge), ylim=(edge, -0.5), xticks=[], yticks=[], aspect="equal", title="Learnt policy; dark: holes"
    )
    counts = [0, *(int(steps * share) for share in (0.05, 0.1, 0.2, 0.4, 0.7, 1))]
    for label, algorithm in (("fsla (SOBA)", "soba"), ("one_step", "one_step")):
        right.plot(counts, [percent(learn_policy(world, n, algorithm), world) for n in counts], "o-", label=label)
    right.set(xlabel="steps", ylabel="value of the start, % of the optimum", ylim=(0, 105))
    right.legend()
