"""What closures keep: the adjoint and its copy between steps, and never a copy of a frozen base."""

import gc
from functools import partial

import pytest
import torch

import fsla
from tiny_text import lora_gpt2, make_ids, make_trusted, row_losses, tiny_gpt2

pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[dev]' installs it")


def live_bytes():
    """The bytes of all tensors that the garbage collector sees, each storage once."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def peaks(build, *, learns):
    """Bytes between steps, most bytes after a backward pass, and bytes of what is trained."""
    model, weights = build(), fsla.GroupWeights(5)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    ids, source = make_ids()
    trusted, seen, watched, before = make_trusted(), [], False, 0
    bilevel = None
    if learns:
        optimizers = {"adjoint_optimizer": partial(torch.optim.SGD, lr=0.05)}
        optimizers["outer_optimizer"] = partial(torch.optim.Adam, lr=0.1)
        bilevel = fsla.SOBA(model, weights, inner_optimizer=optimizer, **optimizers)

    def inner():
        loss = (weights(source[:8]) * row_losses(model, ids[:8])).mean()
        loss.backward()
        if watched:
            seen.append(live_bytes())
        return loss.detach()

    def outer():
        loss = row_losses(model, trusted[:8]).mean()
        loss.backward()
        if watched:
            seen.append(live_bytes())
        return loss.detach()

    for k in range(12):  # The guard makes its copy at the tenth step.
        watched = k == 11
        before = live_bytes() if watched else 0
        if bilevel is None:
            inner()
        else:
            bilevel.backward(inner, outer)
        optimizer.step()
        optimizer.zero_grad()
    return before, max(seen), sum(p.numel() * p.element_size() for p in trained)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("adapters", [False, True], ids=["all", "lora"])
def test_due_step_keeps_few_copies_of_what_is_trained(adapters):
    """Between steps v and the guard's copy of it; in a step two more. With LoRA that is of the adapters alone."""
    if adapters:
        pytest.importorskip("peft", reason="peft is not installed; pip install peft installs it")
    build = partial(lora_gpt2, 0.0, rank=64, width=64) if adapters else partial(tiny_gpt2, 0.0, width=64)
    plain, learns = peaks(build, learns=False), peaks(build, learns=True)
    size = plain[2]
    assert learns[2] == size
    assert (learns[0] - plain[0]) / size < 2.5
    assert (learns[1] - plain[1]) / size < 4.5
