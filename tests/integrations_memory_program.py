"""Print what closures keep in bytes: between steps, at most after a pass, and what is trained; plain and learning.

It is a program of its own because it counts every tensor of its process.
"""

import gc
import json
import sys
from functools import partial

import torch

import fsla
from tiny_text import lora_gpt2, make_ids, make_trusted, row_losses, tiny_gpt2


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


if __name__ == "__main__":
    lora = sys.argv[1] == "lora"
    build = partial(lora_gpt2, 0.0, rank=64, width=64) if lora else partial(tiny_gpt2, 0.0, width=64)
    print(json.dumps([peaks(build, learns=False), peaks(build, learns=True)]))
