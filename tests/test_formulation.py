"""Lemma 2: the sums, the recursions, the order of the products, and BP as their case."""

import pytest
import torch

from fsla import Batch, Point, StepBatches
from fsla import _tree as tree
from fsla._tree import basis, zeros_like
from fsla.hypergradients import ReverseUnroll
from fsla.hypergradients._recursions import adjoint_recursion, apply_matrix, matrix_recursion
from fsla.steps import GradientDescent, Position, StepContext, constant
from fsla.steps._updates import Updates
from lemma2 import Term, backward_sum, forward_sum, vector_recursion
from support import normal, ridge_logistic


@pytest.fixture
def lemma():
    """K = 5 states of a problem whose Hessians do not commute, with β_k and p_k of their own."""
    problem, at, train, valid = ridge_logistic()
    terms = []
    for k in range(5):
        omega = {name: t + 2 * normal(*t.shape, seed=10 + k) for name, t in at.omega.items()}
        p = tree.unflatten(normal(7, seed=20 + k), at.omega)
        terms.append(Term(problem.inner_at(Point(at.lam, omega), Batch(train)), 0.3 + 0.1 * k, p))
    return problem, at, train, valid, terms


def close(x, y, tol=1e-13):
    return float(tree.norm(tree.sub(x, y)) / tree.norm(y)) < tol


def test_formulation_hessians_do_not_commute(lemma):
    *_, terms = lemma
    v = terms[0].p
    one = terms[0].at.hvp(terms[1].at.hvp(v))
    other = terms[1].at.hvp(terms[0].at.hvp(v))
    assert not close(one, other, 1e-3)


def test_backward_sum_equals_recursions(lemma):
    problem, at, _, valid, terms = lemma
    p, d_lam = terms[-1].p, problem.outer_at(at, Batch(valid)).grad_lam
    by_sum = backward_sum(terms, p, d_lam)
    assert close(adjoint_recursion(reversed(terms), p, d_lam), by_sum)
    rows = matrix_recursion(terms, at.lam, [zeros_like(at.omega) for _ in basis(at.lam)])
    assert close(tree.sub(d_lam, apply_matrix(rows, p, at.lam)), by_sum)


def test_forward_sum_equals_vector_recursion(lemma):
    problem, at, train, valid, terms = lemma
    last, d_lam = problem.inner_at(at, Batch(train)), problem.outer_at(at, Batch(valid)).grad_lam
    v = vector_recursion(terms, tree.zeros_like(at.omega))
    assert close(tree.sub(d_lam, last.mixed_hvp(v)), forward_sum(terms, last, d_lam))


def product(terms, order, p):
    for term in order(terms):
        p = tree.axpy(-term.beta, term.at.hvp(p), p)
    return p


def test_product_in_other_order_is_wrong(lemma):
    """The paper's increasing product fits the backward mode only; each mode fails with the other's order."""
    problem, at, train, valid, terms = lemma
    last, d_lam, p = problem.inner_at(at, Batch(train)), problem.outer_at(at, Batch(valid)).grad_lam, terms[-1].p
    # applied to p, the rightmost factor of the product comes first
    increasing, decreasing = reversed, list  # P_{k+1} … P_{K-1} p and P_{K-1} … P_{k+1} p

    def sums(order):
        backward, forward = d_lam, d_lam
        for k, term in enumerate(terms):
            later = terms[k + 1 :]
            backward = tree.axpy(-term.beta, term.at.mixed_hvp(product(later, order, p)), backward)
            forward = tree.axpy(-term.beta, last.mixed_hvp(product(later, order, term.p)), forward)
        return backward, forward

    right = backward_sum(terms, p, d_lam), forward_sum(terms, last, d_lam)
    assert close(sums(increasing)[0], right[0])
    assert close(sums(decreasing)[1], right[1])
    assert not close(sums(decreasing)[0], right[0], 1e-6)
    assert not close(sums(increasing)[1], right[1], 1e-6)


@pytest.mark.parametrize("unroll_length", [None, 1, 3])
def test_bp_equals_backward_mode_with_shifted_steps(unroll_length):
    """Automatic differentiation through the inner steps, with steps of different sizes (β_k = η_{k+1})."""
    problem, at, train, valid = ridge_logistic()
    etas = [0.5, 0.2, 0.9, 0.4, 0.7]
    lam = {name: t.clone().requires_grad_() for name, t in at.lam.items()}
    omega, trajectory = dict(at.omega), []
    for k, eta in enumerate(etas):
        trajectory.append(({name: t.detach() for name, t in omega.items()}, eta))
        leaves = {name: t if t.requires_grad else t.clone().requires_grad_() for name, t in omega.items()}
        if unroll_length is not None and k < len(etas) - unroll_length:  # before the cut, nothing depends on λ
            leaves = {name: t.detach().requires_grad_() for name, t in omega.items()}
        loss = problem.inner_loss(lam, leaves, train)
        grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        omega = {name: t - eta * g for (name, t), g in zip(leaves.items(), grads, strict=True)}
        if unroll_length is not None and k < len(etas) - unroll_length:
            omega = {name: t.detach() for name, t in omega.items()}
    value = problem.outer_loss(lam, omega, valid)
    expected = dict(zip(lam, torch.autograd.grad(value, list(lam.values())), strict=True))

    there = Point(at.lam, {name: t.detach() for name, t in omega.items()}, tuple(trajectory))
    sizes, plain = constant(0.0, 0.0, 0.0), GradientDescent()
    step = StepContext(problem, StepBatches.shared(train, valid), sizes.rates(0), Updates(plain, plain, plain), sizes)
    actual = ReverseUnroll(unroll_length).gradient(step, Position(there, {}))
    assert close(actual, expected)


def test_forward_mode_without_p_is_wrong(lemma):
    _, at, _, _, terms = lemma
    with pytest.raises(ValueError, match="must have its p"):
        vector_recursion([terms[0]._replace(p=None)], tree.zeros_like(at.omega))
