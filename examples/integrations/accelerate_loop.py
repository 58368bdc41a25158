"""Weights of sources, learnt in a plain loop with Accelerate.

python examples/integrations/accelerate_loop.py --output_dir out/accelerate --max_steps 400
torchrun --nproc-per-node 2 examples/integrations/accelerate_loop.py
"""

import argparse
import shutil
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from accelerate import Accelerator
from text import SOURCES, make_model, make_rows, make_sources, row_losses
from torch.utils.data import DataLoader

import fsla


def main(output_dir, max_steps):
    accelerator = Accelerator()
    model = make_model()
    weights = fsla.GroupWeights(SOURCES).to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    samples, generator = list(zip(*make_sources(), strict=True)), torch.Generator()
    loader = DataLoader(samples, batch_size=16, generator=generator)  # draws nothing from the stream of dropout
    trusted_loader = DataLoader(make_rows("manual", 64, 100), batch_size=16)
    model, optimizer, loader, trusted_loader = accelerator.prepare(model, optimizer, loader, trusted_loader)
    outer_optimizer = partial(torch.optim.Adam, lr=0.15)
    bilevel = fsla.SOBA(model, weights, inner_optimizer=optimizer, outer_optimizer=outer_optimizer, outer_every=8)
    accelerator.register_for_checkpointing(bilevel, weights)
    state, trusted = Path(output_dir) / "state", list(trusted_loader)
    if state.exists():
        accelerator.load_state(str(state))
    batches = islice(chain.from_iterable(repeat(loader)), bilevel.step_count, max_steps)
    for ids, source in batches:

        def inner(ids=ids, source=source):
            loss = (weights(source) * row_losses(model, ids)).mean()
            accelerator.backward(loss)
            return loss.detach()

        def outer():
            loss = row_losses(model, trusted[bilevel.step_count // 8 % len(trusted)]).mean()
            accelerator.backward(loss)
            return loss.detach()

        bilevel.backward(inner, outer)  # in the place of accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if bilevel.step_count % 20 == 0:
            accelerator.save_state(f"{state}.part")
            if accelerator.is_main_process:  # a kill leaves the last state that is whole
                shutil.rmtree(state, ignore_errors=True)
                Path(f"{state}.part").rename(state)
            accelerator.wait_for_everyone()
    accelerator.print("weights:", weights.as_dict())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", default="out/accelerate")
    parser.add_argument("--max_steps", type=int, default=400)
    main(**vars(parser.parse_args()))
