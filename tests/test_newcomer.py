"""What people try first, with the defaults and nothing else: it must neither diverge nor go in the wrong direction."""

import warnings

import pytest
import torch
from torch import nn

from fsla import FSLA

F64 = torch.float64


@pytest.fixture(autouse=True)
def _quiet_runs():
    """No run may need to be rescued: warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def ridge(features=12, rows=40, *, stretch=1.0, shift=0.0, target=1.0, total=False):
    g = torch.Generator().manual_seed(5)
    x = torch.randn(2 * rows, features, generator=g, dtype=F64)
    truth = torch.randn(features, generator=g, dtype=F64) * (torch.arange(features) < 4)
    y = target * (x @ truth + torch.randn(2 * rows, generator=g, dtype=F64))
    x = stretch * x + shift
    reduce = torch.sum if total else torch.mean
    train, valid = (x[:rows], y[:rows]), (x[rows:], y[rows:])

    def inner(model, penalty, batch):
        error = (model(batch[0])[:, 0] - batch[1]).square()
        return reduce(error) + (penalty.exp() * model.weight.square()).sum()

    def outer(model, penalty, batch):
        return reduce((model(batch[0])[:, 0] - batch[1]).square())

    def f(penalty):
        """F at the exact inner minimum, relative to the mean square of the targets."""
        scale = 1.0 if total else 1.0 / rows
        H = scale * train[0].T @ train[0] + penalty.exp().diag()
        w = torch.linalg.solve(H, scale * train[0].T @ train[1])
        return float((valid[0] @ w - valid[1]).square().mean() / valid[1].square().mean())

    return features, inner, outer, f, train, valid


RIDGE = {
    "plain": {},
    "features x 10": {"stretch": 10.0},
    "features x 0.1": {"stretch": 0.1},
    "features + 5": {"shift": 5.0},
    "targets x 10": {"target": 10.0},
    "targets x 0.1": {"target": 0.1},
    "200 features": {"features": 200},
    "10 rows": {"rows": 10},
    "a sum for a mean": {"total": True},
    "features x 10, a sum": {"stretch": 10.0, "total": True},
}


@pytest.mark.parametrize("kind", RIDGE)
def test_quick_program_learns_feature_penalties(kind):
    features, inner, outer, f, train, valid = ridge(**RIDGE[kind])
    model = nn.Linear(features, 1, bias=False, dtype=F64)
    nn.init.zeros_(model.weight)
    penalty = nn.Parameter(torch.zeros(features, dtype=F64))
    start = f(penalty.detach())
    opt = FSLA(model, penalty, inner_loss=inner, outer_loss=outer)
    for _ in range(400):
        info = opt.step(train, valid)
    assert info.outer_loss.isfinite()
    assert f(penalty.detach()) < start


def digits(n=600):
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order[:n]], y[order[:n]], x[order[n : n + 200]], y[order[n : n + 200]]


def test_quick_program_learns_class_weights_with_batch_norm():
    x, y, x_trusted, y_trusted = digits()
    rare = (y > 0) | (torch.arange(len(y)) % 10 == 0)
    x, y = x[rare], y[rare]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
    weights = nn.Parameter(torch.zeros(10))

    def inner(model, weights, batch):
        each = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (weights.exp()[batch["y"]] * each).mean()

    def outer(model, weights, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    opt = FSLA(
        model,
        weights,
        inner_loss=inner,
        outer_loss=outer,
        inner_optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
    )
    g = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(300):
        i = torch.randint(len(x), (64,), generator=g)
        j = torch.randint(len(x_trusted), (64,), generator=g)
        info = opt.step({"x": x[i], "y": y[i]}, {"x": x_trusted[j], "y": y_trusted[j]})
        losses.append(float(info.outer_loss))
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
    assert all(bool(t.isfinite().all()) for t in (*model.state_dict().values(), weights))
    model.eval()
    assert float((model(x_trusted).argmax(1) == y_trusted).float().mean()) > 0.85


def test_quick_program_layer_penalties_move_down_hypergradient():
    """Retrained from the start at the learned penalties, the network does better on trusted data."""
    x, y, x_trusted, y_trusted = digits(100)

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))

    def inner(model, penalties, batch):
        layers = [m for m in model if isinstance(m, nn.Linear)]
        ridge = sum(p.exp() * layer.weight.square().sum() for p, layer in zip(penalties, layers, strict=True))
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) + ridge

    def outer(model, penalties, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    penalties = nn.Parameter(torch.tensor([-9.0, -9.0]))  # far too small: the network has 100 samples
    model = build()
    opt = FSLA(model, penalties, inner_loss=inner, outer_loss=outer)
    for _ in range(600):
        opt.step((x, y), (x_trusted, y_trusted))

    def retrained(values):
        model = build()
        search = torch.optim.LBFGS(model.parameters(), max_iter=300, line_search_fn="strong_wolfe")

        def closure():
            search.zero_grad()
            value = inner(model, values, (x, y))
            value.backward()
            return value

        search.step(closure)
        with torch.no_grad():
            return float(outer(model, values, (x_trusted, y_trusted)))

    assert penalties.detach().min() > -9.0
    assert retrained(penalties.detach()) < retrained(torch.tensor([-9.0, -9.0]))


def test_quick_program_weights_of_rare_classes_move():
    """A batch with a rare sample bends far more than the ones before it: v must not run away on it."""
    torch.manual_seed(0)
    centres = 1.5 * torch.randn(3, 5)

    def draw(counts):
        y = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
        return centres[y] + torch.randn(len(y), 5), y

    x, y = draw([900, 80, 20])
    x_trusted, y_trusted = draw([100, 100, 100])
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    weights = nn.Parameter(torch.zeros(3))

    def inner(model, weights, batch):
        each = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (weights.exp()[batch[1]] * each).mean() + 1e-3 * sum(p.square().sum() for p in model.parameters())

    def outer(model, weights, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    opt = FSLA(model, weights, inner_loss=inner, outer_loss=outer)
    largest = 0.0
    for _ in range(600):
        i = torch.randint(1000, (64,))
        j = torch.randint(300, (64,))
        info = opt.step((x[i], y[i]), (x_trusted[j], y_trusted[j]))
        largest = max(largest, float(info.adjoint_norm))
    assert largest < 1e3
    assert weights[2] > weights[1] > weights[0]


def test_quick_program_integer_weight_is_explained():
    weights = nn.Parameter(torch.ones(3))
    batch = torch.randn(8, 4), torch.arange(8) % 3
    opt = FSLA(
        nn.Linear(4, 3),
        weights,
        inner_loss=lambda m, w, b: nn.functional.cross_entropy(m(b[0]), b[1], weight=w),
        outer_loss=lambda m, w, b: nn.functional.cross_entropy(m(b[0]), b[1]),
    )
    with pytest.raises(RuntimeError) as caught:
        opt.step(batch, batch)
    assert any("reduction='none' and multiply" in note for note in caught.value.__notes__)


def test_quick_program_missing_outer_loader_is_named():
    features, inner, outer, _, train, _ = ridge()
    penalty = nn.Parameter(torch.zeros(features, dtype=F64))
    opt = FSLA(nn.Linear(features, 1).to(F64), penalty, inner_loss=inner, outer_loss=outer)
    with pytest.raises(TypeError) as caught:
        opt.step(train)
    assert "The batch is None: give step an outer_batch, or fit an outer_loader." in caught.value.__notes__


def test_quick_program_lr_for_optimizer_is_explained():
    with pytest.raises(TypeError, match=r"outer_optimizer must be a torch.optim.Optimizer or a function .* Got float"):
        FSLA(
            nn.Linear(2, 1),
            nn.Parameter(torch.zeros(2)),
            inner_loss=lambda m, o, b: m(b).sum(),
            outer_loss=lambda m, o, b: m(b).sum(),
            outer_optimizer=0.1,
        )
