"""Started by torchrun or accelerate launch: an integration on several ranks. Rank 0 saves the numbers of the run.

integrations_program.py KIND FOLDER STEPS [CHECKPOINT]
"""

import sys
import warnings
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import fsla
from tiny_text import NAMES, make_ids, make_trainer, make_trusted, numbers, row_losses, tiny_gpt2

BATCH = 8
PARTS = 2


def train_trainer(folder, steps, resumes, *, weighting="auto"):
    """Trainer under DDP, with two micro-batches a step."""
    trainer = make_trainer(
        folder,
        model=tiny_gpt2(0.0).double(),
        max_steps=steps,
        save_steps=4,
        per_device_train_batch_size=BATCH // world_size(),
        gradient_accumulation_steps=PARTS,
        config={
            "weights": fsla.GroupWeights(NAMES).double(),
            "weighting": weighting,
            "adjoint_optimizer": partial(torch.optim.SGD, lr=0.05),
        },
    )
    trainer.train(resume_from_checkpoint=resumes or None)
    return trainer.model, trainer.bilevel_config.weights


def world_size():
    import os

    return int(os.environ.get("WORLD_SIZE", "1"))


def train_accelerate(folder, steps, resumes):
    """A loop of the user's with Accelerate, as docs/how-to/trainer.md shows it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    size = BATCH // accelerator.num_processes
    ids, source = make_ids(64)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    rows = torch.utils.data.TensorDataset(ids[order], source[order])
    model, weights = tiny_gpt2(0.0).double(), fsla.GroupWeights(5).double().to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    loader, trusted_loader = DataLoader(rows, size), DataLoader(make_trusted(), size)
    model, optimizer, loader, trusted_loader = accelerator.prepare(model, optimizer, loader, trusted_loader)
    bilevel = fsla.SOBA(
        model,
        weights,
        inner_optimizer=optimizer,
        outer_every=3,
        adjoint_optimizer=partial(torch.optim.SGD, lr=0.05),
    )
    accelerator.register_for_checkpointing(bilevel, weights)
    if resumes:
        accelerator.load_state(str(folder / "state"))
    batches, trusted = iter(loader), list(trusted_loader)
    for k in range(steps):
        micro = [next(batches) for _ in range(PARTS)]
        if k < bilevel.step_count:
            continue

        def inner(micro=micro):
            total = 0.0
            for i, (rows, groups) in enumerate(micro):
                with accelerator.no_sync(model) if i < PARTS - 1 else torch.enable_grad():
                    loss = (weights(groups) * row_losses(model, rows)).mean() / PARTS
                    accelerator.backward(loss)
                total = total + loss.detach()
            return total

        def outer():
            loss = row_losses(model, trusted[bilevel.step_count % len(trusted)]).mean()
            accelerator.backward(loss)
            return loss

        bilevel.backward(inner, outer)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if k == 3 and not resumes:
            accelerator.save_state(str(folder / "state"))
    return model, weights


def train_sharded(folder, steps, resumes, *, model=None):
    """`fully_shard` in a loop of the user's: accelerate makes no shards on CPUs."""
    from torch.distributed.fsdp import fully_shard

    group = fsla.distributed.get_group()
    model = (tiny_gpt2(0.0) if model is None else model).double()
    if group.world_size > 1:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        for block in base.transformer.h:
            fully_shard(block)
        fully_shard(model)
    weights = fsla.GroupWeights(5).double()
    ids, source = make_ids(64)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    trusted, size = make_trusted(), BATCH // group.world_size
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3, weight_decay=0.0)
    bilevel = fsla.SOBA(
        model,
        weights,
        inner_optimizer=optimizer,
        outer_every=3,
        adjoint_optimizer=partial(torch.optim.SGD, lr=0.05),
    )
    for k in range(steps):
        start = k * PARTS * BATCH + group.rank * size
        micro = [order[start + i * BATCH :][:size] for i in range(PARTS)]

        def inner(micro=micro):
            total = 0.0
            for i, rows in enumerate(micro):
                if group.world_size > 1:
                    model.set_requires_gradient_sync(i == PARTS - 1)
                loss = (weights(source[rows]) * row_losses(model, ids[rows])).mean() / PARTS
                loss.backward()
                total = total + loss.detach()
            return total

        def outer(k=k):
            rows = slice(k * BATCH % 64 + group.rank * size, k * BATCH % 64 + (group.rank + 1) * size)
            loss = row_losses(model, trusted[rows]).mean()
            loss.backward()
            return loss

        bilevel.backward(inner, outer)
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, weights


def train_lightning(folder, steps, resumes, *, parts=1):
    """Lightning under DDP. The trusted pass does not go through DDP's forward."""
    import lightning

    from lightning_module import TextModule, make_loader

    lightning.seed_everything(3, verbose=False)
    module = TextModule(batch_size=BATCH // world_size(), dropout=0.0).double()
    module.bilevel_config.weights.double()
    count = world_size()
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=count,
        strategy="ddp" if count > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        precision="64-true",
        accumulate_grad_batches=parts,
        gradient_clip_val=1.0,
    )
    loader = make_loader(BATCH // count, rank=trainer.global_rank, world_size=count)
    trainer.fit(module, loader, ckpt_path=str(folder / "last.ckpt") if resumes else None)
    if not resumes:
        trainer.save_checkpoint(folder / "last.ckpt")
    return module.net, module.bilevel_config.weights


def lora(folder, steps, resumes):
    from tiny_text import lora_gpt2

    return train_sharded(folder, steps, resumes, model=lora_gpt2(0.0))


KINDS = {
    "trainer": train_trainer,
    "groups": partial(train_trainer, weighting="groups"),
    "accelerate": train_accelerate,
    "fully_shard": train_sharded,
    "fully_shard_lora": lora,
    "lightning": train_lightning,
}


def main(kind, folder, steps, resumes=""):
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    folder = Path(folder)
    model, weights = KINDS[kind](folder, int(steps), bool(resumes))
    group = fsla.distributed.get_group()
    lam = weights.logit.detach().double().tolist()
    run = numbers(model, weights)
    assert group.gather(lam) == [lam] * group.world_size, "the ranks have different weights"
    if group.is_first:
        torch.save(run, folder / f"{kind}-{group.world_size}{'-resumed' if resumes else ''}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
