"""Fits that nobody computed: what a result says of them is known beforehand."""

from types import SimpleNamespace

import numpy as np
import pandas as pd

from fsla.data._clean import build_result
from fsla.data._data_fit import CandidateScore, DataFit, GroupFit
from fsla.data._dataset import Features, TrainingData, Votes
from fsla.data._result import Comparison, Estimate

CLASSES = np.array(["ant", "bee", "cow"], dtype=object)
GROUPS = np.array(["web", "book", "forum"], dtype=object)
GAINS = {"better": (0.13, 0.06, 0.20), "same": (0.0, -0.02, 0.02), "worse": (-0.09, -0.15, -0.03)}


class Builder:
    """Takes columns a and b."""

    def transform(self, rows):
        x = rows[["a", "b"]].to_numpy(dtype=float)
        return Features(np.c_[x, np.ones(len(x))])

    def to_state(self):
        return {}, {"columns": ["a", "b"]}


class Predictor:
    """A linear score a class."""

    def __init__(self, table):
        self.table = np.asarray(table, dtype=float)

    def predict(self, features):
        scores = np.exp(features.dense @ self.table)
        return scores / scores.sum(1, keepdims=True)

    def to_state(self):
        return {"table": self.table}, {"kind": "linear"}


def fabricate(
    effect="better",
    *,
    n=120,
    checked=40,
    noise=0.5,
    probability=0.97,
    forum_gain=(0.08, 0.02, 0.14),
    forum_weight=(0.05, 0.0, 0.15),
    ids=None,
    label="label",
    texts=None,
):
    """Return data of three groups, of which the forum has wrong labels, and a fit that knows all true labels.

    Of the `n` rows of the table the first `checked` are checked and keep their given label.
    """
    rng = np.random.default_rng(0)
    true = rng.integers(3, size=n)
    group = np.arange(n) % 3
    wrong = (group == 2) & (rng.random(n) < noise)
    given_code = np.where(wrong, (true + 1) % 3, true)
    x = rng.standard_normal((n, 2))
    table = pd.DataFrame(
        {
            "a": [f"{v:.3f}" for v in x[:, 0]],
            "b": [f"{v:.3f}" for v in x[:, 1]],
            "note": texts if texts is not None else [f"text {i}" for i in range(n)],
            "source": GROUPS[group],
            label: CLASSES[given_code],
        }
    )
    checked_rows = np.arange(checked)
    data = TrainingData(
        task="classification",
        features=Features(np.c_[x, np.ones(n)]),
        votes=Votes(np.arange(n), group, given_code),
        group_names=GROUPS,
        checked_rows=checked_rows,
        checked_labels=true[:checked],
        classes=CLASSES,
    )
    posterior = np.full((n, 3), (1 - probability) / 2)
    posterior[np.arange(n), true] = probability
    rate = wrong[group == 2].mean()
    groups = GroupFit(
        weight=np.array([1.0, 0.9, forum_weight[0]]),
        weight_low=np.array([0.9, 0.8, forum_weight[1]]),
        weight_high=np.array([1.0, 1.0, forum_weight[2]]),
        quality=np.array([0.95, 0.94, 0.4]),
        noise_rate=(Estimate(0.0, 0.0, 0.05), Estimate(0.01, 0.0, 0.06), Estimate(rate, rate - 0.1, rate + 0.1))
        if checked
        else (None, None, None),
        gain_without=(None, None, Estimate(*forum_gain)),
        num_checked_votes=np.bincount(group[:checked], minlength=3),
    )
    comparison = None
    if effect != "unknown":
        gain = Estimate(*GAINS[effect])
        after = 0.8 + gain.value
        comparison = Comparison(
            "accuracy",
            max(checked, 1),
            Estimate(0.8, 0.7, 0.88),
            Estimate(after, after - 0.08, after + 0.06),
            gain,
            "closed_form",
            Estimate(0.7, 0.6, 0.8),
        )
    wrong_share = float(wrong.mean())
    fit = DataFit(
        data=data,
        predictor=Predictor(rng.standard_normal((3, 3))),
        candidates=(
            CandidateScore("closed_form", "linear", 0.7, 0.3, 0.9, 1.2),
            CandidateScore("trusted_only", "forest", 0.3, 0.4, 0.85, 0.4),
        ),
        out_of_fold=posterior,
        posterior=posterior,
        vote_weight=np.where(group == 2, forum_weight[0], 1.0),
        groups=groups,
        confusion=np.array([[0.8, 0.2, 0.0], [0.0, 0.8, 0.2], [0.2, 0.0, 0.8]]),
        group_confusion=None,
        noise_rate=Estimate(wrong_share, max(0.0, wrong_share - 0.06), wrong_share + 0.06) if checked else None,
        comparison=comparison,
    )
    loaded = SimpleNamespace(
        data=data,
        builder=Builder(),
        table=table,
        num_rows=n,
        row_of=np.arange(n),
        label=label,
        ids=np.array(ids if ids is not None else [f"s{i}" for i in range(n)], dtype=object),
        columns=pd.DataFrame(
            {
                "column": list(table.columns),
                "role": ["feature", "feature", "text", "group", "label"],
                "kind": "",
                "note": "",
            }
        ),
        notes=("1 blank line of data.csv is skipped.",),
        duplicates=pd.DataFrame({"row": [7], "same_as": [3], "why": ["same features"]}),
        display=lambda row: {"text": table["note"][row], "cells": {"a": table["a"][row], "b": table["b"][row]}},
        given_labels=table[label].to_numpy(dtype=object),
        label_names=CLASSES,
    )
    return loaded, fit


def fabricated_result(effect="better", *, relabel="sure", review=20, label="label", **options):
    """Return the result of a fabricated fit."""
    loaded, fit = fabricate(effect, label=label, **options)
    inputs = {"data": "data.csv", "trusted": None, "label": label, "group": "source"}
    return build_result(loaded, fit, relabel=relabel, review=review, seed=0, inputs=inputs)
