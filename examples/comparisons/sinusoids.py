"""Learnt features beside one network for all tasks, MAML, and heads in closed form."""

from functools import partial

import torch
from sinusoids import RIDGE, Features, learn_features, make_tasks, new_task_error
from torch import nn
from torch.func import functional_call, vmap

METRIC, BETTER, DIGITS = "squared error on 100 new tasks, ten points each", "lower", 3
STEPS, SMALL, SIZE = 1000, 60, (7, 3.4)
SUMMARY = [
    (
        "Features for many tasks",
        "squared error on new tasks; lower is better",
        "heads in closed form, differentiated",
        "without an adjoint (one_step)",
        "fsla (SOBA), 100 of 200 tasks a step",
    ),
]
"""Lines of the gallery's table: title, score, and the methods that it shows."""


def tasks_of(seed):
    return make_tasks(200, seed), make_tasks(100, 10_000 + seed)


def draw_tasks(tasks, count=25):
    chosen = torch.randperm(len(tasks[0]))[:count]
    return [t[chosen] for t in tasks]


def closed_form(steps, seed):
    """Solve the heads of the drawn tasks and differentiate the solution, which a linear head allows."""
    tasks, new = tasks_of(seed)
    features = Features()
    optimizer = torch.optim.Adam(features.parameters(), lr=0.003)
    for _ in range(steps):
        x, y = draw_tasks(tasks)
        h = features(x[:, :10])
        w = torch.linalg.solve(h.mT @ h / 10 + RIDGE * torch.eye(features.size), h.mT @ y[:, :10] / 10)
        optimizer.zero_grad()
        (features(x[:, 10:]) @ w - y[:, 10:]).square().mean().backward()
        optimizer.step()
    return new_task_error(features, new)


def whole_network(kind, steps, seed):
    """Adapt all weights of a network: MAML, or training on all tasks as if they were one."""
    tasks, (new_x, new_y) = tasks_of(seed)
    network = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))

    def loss(weights, x, y):
        return vmap(lambda w, x, y: (functional_call(network, w, (x,)) - y).square().mean())(weights, x, y)

    def adapt(x, y, steps, rate, graph):
        w = {name: p.expand(len(x), *p.shape) for name, p in network.named_parameters()}
        for _ in range(steps):
            w = w if graph else {name: t.detach().requires_grad_() for name, t in w.items()}
            gradients = torch.autograd.grad(loss(w, x, y).sum(), list(w.values()), create_graph=graph)
            w = {name: t - rate * g for (name, t), g in zip(w.items(), gradients, strict=True)}
        return w

    optimizer = torch.optim.Adam(network.parameters(), lr=0.003)
    for _ in range(steps):
        x, y = draw_tasks(tasks)
        optimizer.zero_grad()
        if kind == "maml":
            loss(adapt(x[:, :10], y[:, :10], 5, 0.01, True), x[:, 10:], y[:, 10:]).mean().backward()
        else:
            (network(x) - y).square().mean().backward()
        optimizer.step()
    few = new_x[:, :10], new_y[:, :10]
    ends = [adapt(*few, 10, rate, False) for rate in (0.003, 0.01, 0.03)]
    return min(loss(w, new_x[:, 10:], new_y[:, 10:]).mean().item() for w in ends)


def learned(algorithm, drawn, steps, seed):
    tasks, new = tasks_of(seed)
    return new_task_error(learn_features(tasks, steps, algorithm, drawn), new)


def methods(steps):
    return {
        "one network for all tasks": partial(whole_network, "joint", steps),
        "MAML, 5 steps": partial(whole_network, "maml", steps),
        "heads in closed form, differentiated": partial(closed_form, steps),
        "without an adjoint (one_step)": partial(learned, "one_step", 100, steps),
        "fsla (SOBA), 25 of 200 tasks a step": partial(learned, "soba", 25, steps),
        "fsla (SOBA), 100 of 200 tasks a step": partial(learned, "soba", 100, steps),
        "fsla (SOBA), all tasks at every step": partial(learned, "soba", 200, steps),
    }


def draw(figure, steps):
    tasks, (x, y) = tasks_of(0)
    start, end = learn_features(tasks, 0), learn_features(tasks, steps)
    line = torch.linspace(-5, 5, 200)[:, None]
    high = y.abs().amax((1, 2)).argsort(descending=True)[:2]
    for ax, i in zip(figure.subplots(1, 2, sharey=True), high, strict=True):
        for label, features, style in (("random features", start, ":"), ("learnt features", end, "-")):
            h = features(x[i, :10]).detach()
            w = torch.linalg.solve(h.mT @ h / 10 + RIDGE * torch.eye(features.size), h.mT @ y[i, :10] / 10)
            ax.plot(line, (features(line) @ w).detach(), style, label=label)
        ax.plot(x[i, :10], y[i, :10], "ko", label="ten points of a new task")
        ax.plot(x[i, 10:], y[i, 10:], "kx", label="what is to be predicted")
        ax.set(xlabel="x", ylim=(-6, 10))
    figure.axes[1].legend(fontsize=7)
