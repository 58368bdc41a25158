"""Weights of sources for LoRA: the adapters are trained, and the base model is copied nowhere.

python examples/integrations/lora.py --output_dir out/lora --max_steps 400 --learning_rate 1e-2
"""

from functools import partial

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from text import make_model, make_rows, make_sources
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed

import fsla
from fsla.integrations.transformers import BilevelConfig, bilevel


def as_dataset(ids, **columns):
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist(), **columns})


def main():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    ids, source = make_sources()
    targets = ["c_attn", "c_proj", "c_fc"]
    adapters = LoraConfig(r=8, target_modules=targets, fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = get_peft_model(make_model(), adapters)
    set_seed(args.seed)
    weights = fsla.GroupWeights(source)
    config = BilevelConfig(
        weights=weights,
        trusted_dataset=as_dataset(make_rows("manual", 64, 100)),
        group_column="source",
        outer_every=8,
        outer_optimizer=partial(torch.optim.Adam, lr=0.15),
    )
    trainer = bilevel(Trainer)(model=model, args=args, train_dataset=as_dataset(ids, source=source), bilevel=config)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    print("parameters of the inner variable:", sum(t.numel() for t in trainer.bilevel.adjoint.values()))
    print("weights:", weights.as_dict())


if __name__ == "__main__":
    main()
