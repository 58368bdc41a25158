import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsla import _tree as tree

shapes = st.lists(st.integers(0, 3), max_size=3)
trees = st.dictionaries(st.text("abc.", min_size=1, max_size=4), shapes, min_size=1, max_size=4)


def fill(form, seed):
    g = torch.Generator().manual_seed(seed)
    return {k: torch.randn(s, generator=g, dtype=torch.float64) for k, s in form.items()}


@given(trees, st.floats(-5, 5))
@settings(max_examples=60, deadline=None)
def test_tree_arithmetic_equals_flat_vectors(form, a):
    x, y = fill(form, 0), fill(form, 1)
    backwards = dict(reversed(list(y.items())))  # pairing is by name, not by position
    flat_x, flat_y = tree.flatten(x), tree.flatten(y)
    for scalar in (a, torch.tensor(a, dtype=torch.float64)):
        assert torch.allclose(tree.flatten({k: tree.axpy(scalar, x, backwards)[k] for k in x}), flat_y + a * flat_x)
        assert torch.allclose(tree.flatten(tree.scale(scalar, x)), a * flat_x)
    assert torch.allclose(tree.flatten(tree.sub(x, backwards)), flat_x - flat_y)
    assert torch.allclose(tree.dot(x, backwards), flat_x @ flat_y)
    assert torch.allclose(tree.norm(x), flat_x.norm())
    assert tree.size(x) == flat_x.numel()


@given(trees)
@settings(max_examples=40, deadline=None)
def test_unflatten_inverts_flatten(form):
    x = fill(form, 0)
    back = tree.unflatten(tree.flatten(x), x)
    assert back.keys() == x.keys()
    assert all(torch.equal(back[k], x[k]) and back[k].shape == x[k].shape for k in x)


def test_tree_basis_is_identity():
    like = {"a": torch.zeros(2, 2), "b": torch.zeros(3)}
    assert torch.equal(torch.stack([tree.flatten(e) for e in tree.basis(like)]), torch.eye(7))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"b": torch.zeros(2)}, "same keys.*'a', 'b'"),
        ({"a": torch.zeros(1)}, r"shape, dtype and device.*\(1,\).*\(2,\)"),  # would broadcast
        ({"a": torch.zeros(2, dtype=torch.float64)}, "float64"),  # would promote
        ({"a": torch.zeros(2, device="meta")}, "meta"),
    ],
)
@pytest.mark.parametrize("operation", ["axpy", "sub", "dot"])
def test_trees_of_different_structure_raise(other, text, operation):
    x = {"a": torch.zeros(2)}
    with pytest.raises(ValueError, match=text):
        tree.axpy(1.0, other, x) if operation == "axpy" else getattr(tree, operation)(x, other)


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (torch.zeros(2), TypeError, r'mapping.*Write \{"name": tensor\}'),
        ([1], TypeError, "mapping.*list"),
        ({}, ValueError, "at least one tensor"),
        ({"a": 1.0}, TypeError, "float at 'a'"),
        ({1: torch.zeros(1)}, TypeError, "names to tensors"),
        ({"a": torch.zeros(1, dtype=torch.int64)}, TypeError, "floating-point.*int64"),
        ({"a": torch.zeros(1, dtype=torch.complex64)}, TypeError, "real floating-point"),
    ],
)
def test_tree_check_states_requirement(x, error, text):
    with pytest.raises(error, match=text):
        tree.check(x, "lam")


def test_tree_operations_are_pure():
    x, y = {"a": torch.ones(2)}, {"a": torch.ones(2)}
    tree.axpy(2.0, x, y)
    assert torch.equal(y["a"], torch.ones(2))


@given(
    st.lists(st.integers(0, 4), max_size=6),
    st.lists(st.integers(0, 4), max_size=6),
    st.integers(0, 2),
    st.floats(-3, 3),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_rows_equal_dense_tensors(first, second, width, a, same):
    shape = (5, *([width] if width else []))
    second = first if same else second
    index = torch.tensor(first, dtype=torch.long)
    other = index if same else torch.tensor(second, dtype=torch.long)
    g = torch.Generator().manual_seed(1)
    make = lambda i: torch.randn((len(i), *shape[1:]), generator=g, dtype=torch.float64)  # noqa: E731
    x, y = {"r": tree.RowSparse(index, make(first), 5)}, {"r": tree.RowSparse(other, make(second), 5)}
    z = {"r": torch.randn(shape, generator=g, dtype=torch.float64)}
    for scalar in (a, torch.tensor(a, dtype=torch.float64)):
        for p, q in ((x, y), (x, z), (z, x), (z, z)):
            plain_p, plain_q = tree.dense(p), tree.dense(q)
            for actual, expected in (
                (tree.axpy(scalar, p, q), tree.axpy(scalar, plain_p, plain_q)),
                (tree.sub(p, q), tree.sub(plain_p, plain_q)),
                (tree.scale(scalar, p), tree.scale(scalar, plain_p)),
            ):
                assert torch.allclose(tree.dense(actual)["r"], expected["r"], atol=1e-12)
            assert torch.allclose(tree.dot(p, q), tree.dot(plain_p, plain_q))
            assert torch.allclose(tree.norm(p), tree.norm(plain_p))
    assert isinstance(tree.sub(x, y)["r"], tree.RowSparse)  # nothing is written out before it must be
    assert torch.equal(z["r"], tree.axpy(0.0, x, z)["r"])


def test_rows_of_wrong_length_raise():
    rows = {"r": tree.RowSparse(torch.tensor([0]), torch.ones(1), 4)}
    with pytest.raises(ValueError, match=r"at 'r' one holds \(4,\)"):
        tree.axpy(1.0, rows, {"r": torch.ones(5)})
