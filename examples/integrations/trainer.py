"""Weights of sources, learnt inside transformers' Trainer. The lines marked +n are new or changed.

python examples/integrations/trainer.py --output_dir out/trainer --max_steps 400 --learning_rate 3e-3
"""

import torch
from datasets import Dataset
from text import make_model, make_rows, make_sources
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed

import fsla  # +1
from fsla.integrations.transformers import BilevelConfig, bilevel  # +2


def as_dataset(ids, **columns):
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist(), **columns})


def main():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    ids, source = make_sources()
    train, trusted = as_dataset(ids, source=source), as_dataset(make_rows("manual", 64, 100))
    test = as_dataset(make_rows("manual", 64, 200))
    model = make_model()
    set_seed(args.seed)
    weights = fsla.GroupWeights(train["source"])  # +3
    config = BilevelConfig(weights=weights, trusted_dataset=trusted, group_column="source", outer_every=8)  # +4
    config.outer_optimizer = torch.optim.Adam(weights.parameters(), lr=0.15)  # +5
    trainer = bilevel(Trainer)(model, args, train_dataset=train, eval_dataset=test, bilevel=config)  # +6
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    print("evaluation loss:", trainer.evaluate()["eval_loss"])
    print("weights:", weights.as_dict())
    print("probabilities for datasets.interleave_datasets:", weights.probabilities())


if __name__ == "__main__":
    main()
