"""Weight modules: called by names or indices, with mean 1 over groups, and factors of products."""

import numpy as np
import pytest
import torch
from torch import nn

import fsla


def test_group_weights_by_name_equal_by_index():
    """A batch holds names as its loader collates them: a list of strings; a tensor holds indices."""
    weights = fsla.GroupWeights(["web", "forum", "vendor"], init={"web": 3.0, "forum": 1.0, "vendor": 2.0})
    by_name = weights(["vendor", "web", "web"])
    assert torch.equal(by_name, weights(torch.tensor([2, 0, 0])))
    assert torch.equal(by_name, weights(("vendor", "web", "web")))
    assert torch.equal(by_name, weights(np.array(["vendor", "web", "web"])))
    torch.testing.assert_close(by_name, torch.tensor([1.0, 1.5, 1.5]))
    assert by_name.requires_grad


def test_group_weights_probabilities_count_weights_and_entries():
    """A mixture that draws so needs no weight in its loss."""
    weights = fsla.GroupWeights(["web", "forum", "web", "web"], init={"web": 1.0, "forum": 2.0})
    assert weights.probabilities() == pytest.approx([3 / 5, 2 / 5])
    assert fsla.GroupWeights(["a", "b"]).probabilities() == [0.5, 0.5]


def test_group_weights_have_mean_one():
    """The learning rate of the model must not depend on the weights' common size."""
    weights = fsla.GroupWeights(5)
    assert weights.as_dict() == dict.fromkeys(range(5), 1.0)
    nn.init.normal_(weights.logit, std=3.0, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(weights.weights.mean(), torch.tensor(1.0))
    assert not weights.weights.requires_grad


def test_group_weights_of_samples_keep_group_index():
    """A column of a data set serves as it is; the index is no part of the state, which then loads on other data."""
    weights = fsla.GroupWeights(np.array(["b", "a", "b", "c"]))
    assert weights.names == ["b", "a", "c"]
    assert weights.group_index.tolist() == [0, 1, 0, 2]
    assert list(weights.state_dict()) == ["logit"]
    fsla.GroupWeights(["b", "a", "c"]).load_state_dict(weights.state_dict())


def test_group_weights_unknown_name_lists_groups():
    """A typo in a source's name must not be taken for another source."""
    weights = fsla.GroupWeights(["web", "forum"])
    with pytest.raises(ValueError, match=r"Unknown group 'wbe'.*'web', 'forum'"):
        weights(["web", "wbe"])
    with pytest.raises(TypeError, match=r"Got the string 'web'; use \['web'\]"):
        weights("web")


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: fsla.GroupWeights(["web", "web"]), "at least two groups.*Got 1"),
        (lambda: fsla.GroupWeights(0), "'groups' of GroupWeights must be at least 1"),
        (lambda: fsla.GroupWeights(["a", "b"], init={"a": 1.0}), "a weight for each group: 'a', 'b'. Got 'a'"),
        (lambda: fsla.GroupWeights(["a", "b"], init={"a": 1.0, "b": 0.0}), "must be positive"),
        (lambda: fsla.SampleWeights(3, init=0.0), r"'init' of SampleWeights must lie in \(0, 1\)"),
    ],
)
def test_weights_invalid_argument_raises(build, text):
    """The message names what is wrong with which argument."""
    with pytest.raises(ValueError, match=text):
        build()


def test_product_weights_accept_names_and_indices():
    """The weight of a sample may be that of its source times that of its annotator."""
    sources = fsla.GroupWeights(["web", "forum"], init={"web": 3.0, "forum": 1.0})
    product = fsla.ProductWeights(sources, fsla.SampleWeights(4, init=0.25))
    torch.testing.assert_close(product(["web", "forum"], torch.tensor([0, 3])), torch.tensor([0.375, 0.125]))
    product(["web"], torch.tensor([1])).sum().backward()
    assert all(p.grad is not None for p in product.parameters())
