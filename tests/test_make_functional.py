import pytest
import torch
from torch import nn

import fsla


def test_make_functional_equals_module():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    omega, net = fsla.make_functional(model)
    x = torch.randn(5, 3)
    assert torch.equal(net(omega, x), model(x))
    other = {name: t + 1 for name, t in omega.items()}
    assert not torch.equal(net(other, x), model(x))
    assert all(not t.requires_grad for t in omega.values())


def test_make_functional_wrong_parameter_name_raises():
    omega, net = fsla.make_functional(nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"lacks \['bias'\]"):
        net({"weight": omega["weight"]}, torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"\['biass'\] are unknown"):
        net({**omega, "biass": omega["bias"]}, torch.ones(1, 3))


def test_make_functional_later_parameter_raises():
    model = nn.Sequential(nn.Linear(3, 2))
    omega, net = fsla.make_functional(model)
    model.append(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="must not be given new parameters or parts"):
        net(omega, torch.ones(1, 3))


def test_make_functional_restores_parameters_after_error():
    model = nn.Linear(3, 2)
    parameters = list(model.parameters())
    omega, net = fsla.make_functional(model)
    with pytest.raises(RuntimeError):
        net(omega, torch.ones(1, 4))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_make_functional_handles_frozen_buffers_and_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight
            self.b.bias.requires_grad_(False)
            self.register_buffer("shift", torch.ones(3))

        def forward(self, x):
            return self.b(self.a(x)) + self.shift

    model = Tied()
    omega, net = fsla.make_functional(model)
    assert set(omega) == {"a.weight", "a.bias"}
    x = torch.randn(2, 3)
    assert torch.allclose(net(omega, x), model(x))
    doubled = {name: 2 * t for name, t in omega.items()}
    with torch.no_grad():
        model.a.weight.mul_(2)
        model.a.bias.mul_(2)
    assert torch.allclose(net(doubled, x), model(x))


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)], ids=lambda m: type(m).__name__
)
def test_make_functional_running_statistics_need_policy(layer):
    model = nn.Sequential(nn.Linear(3, 3), layer)
    text = rf"'1' \({type(layer).__name__}.*running statistics.*batch_norm=\"batch\".*track_running_stats=False"
    with pytest.raises(ValueError, match=text):
        fsla.make_functional(model)
    model.eval()
    omega, net = fsla.make_functional(model)
    net(omega, torch.ones(3, 3))
    model.train()  # switched later
    with pytest.raises(ValueError, match="running statistics"):
        net(omega, torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"batch_norm policy must be.*Got 'freeze'"):
        fsla.make_functional(model, batch_norm="freeze")


def test_make_functional_dropout_without_seed_raises():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    omega, net = fsla.make_functional(model)
    with pytest.raises(ValueError, match=r"Dropout.*new mask.*Give the step.s batches a seed"):
        net(omega, torch.ones(3, 3))
    model.eval()
    net(omega, torch.ones(3, 3))


def test_make_functional_accepts_stateless_layers():
    for layer in (nn.BatchNorm1d(3, track_running_stats=False), nn.Dropout(0.0), nn.LayerNorm(3)):
        fsla.make_functional(nn.Sequential(nn.Linear(3, 3), layer))


def test_make_functional_of_non_module_raises():
    with pytest.raises(TypeError, match=r"torch.nn.Module.*dict"):
        fsla.make_functional({})
    with pytest.raises(ValueError, match="at least one parameter"):
        fsla.make_functional(nn.ReLU())


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return nn.functional.dropout(self.layer(x), 0.5, training=self.training)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Functional(), "draws random numbers"),
        (nn.Sequential(nn.Linear(3, 3), nn.RReLU()), "draws random numbers"),
        (Counting(), r"writes its buffers \['calls'\]"),
    ],
)
def test_make_functional_first_call_detects_state(model, text):
    omega, net = fsla.make_functional(model)
    below_zero = {name: -t.abs() for name, t in omega.items()}  # RReLU draws for negative inputs alone
    with pytest.raises(ValueError, match=text):
        net(below_zero, torch.ones(2, 3))


def test_make_functional_broadcastable_parameter_raises():
    omega, net = fsla.make_functional(nn.Linear(3, 4))
    with pytest.raises(ValueError, match=r"omega\['bias'\] must have shape \(4,\). Got \(1,\)"):
        net({**omega, "bias": torch.zeros(1)}, torch.ones(2, 3))


def test_make_functional_passes_named_arguments():
    class Scaled(nn.Linear):
        def forward(self, x, *, scale=1.0):
            return scale * super().forward(x)

    omega, net = fsla.make_functional(Scaled(3, 2))
    x = torch.ones(1, 3)
    assert torch.allclose(net(omega, x, scale=2.0), 2 * net(omega, x))
