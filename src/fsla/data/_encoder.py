"""Sentence embeddings by a local sentence-transformers model of the BERT family: tokenizers, safetensors and torch."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fsla._extras import require
from fsla._storage._files import open_regular
from fsla.data._dataset import Array

MAX_TOKENS = 256
BATCH = 64
_NEEDED = ("config.json", "tokenizer.json", "model.safetensors")


class SentenceEncoder:
    """Mean-pooled, normalised embeddings of texts.

    Args:
        folder: a local folder with config.json, tokenizer.json and model.safetensors. Nothing is downloaded.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            require("encoder")
        except ModuleNotFoundError as error:
            raise ValueError(
                f"Cannot use the encoder without {error.name}. Install it: pip install 'fsla[encoder]'"
            ) from error
        from safetensors.torch import load
        from tokenizers import Tokenizer

        lacking = [name for name in _NEEDED if not (self.folder / name).is_file()]
        if lacking:
            what = "is no folder" if not self.folder.is_dir() else f"lacks {', '.join(lacking)}"
            raise ValueError(
                f"Cannot use the encoder {self.folder}: it {what}. Name the folder of a sentence-transformers model "
                "that is on this machine, such as all-MiniLM-L6-v2."
            )
        try:
            config, tokenizer, weights = (self._bytes(name) for name in _NEEDED)
            self.config: dict[str, Any] = json.loads(config)
            if self.config.get("model_type") != "bert":
                raise ValueError(f"its model type is {self.config.get('model_type')!r}, and only 'bert' is supported")
            self.tokenizer = Tokenizer.from_str(tokenizer.decode())
            self.tokenizer.enable_truncation(min(MAX_TOKENS, int(self.config["max_position_embeddings"])))
            self.tokenizer.no_padding()
            self.weights = {name.removeprefix("bert."): w.float() for name, w in load(weights).items()}
            self.digest = hashlib.blake2b(tokenizer + weights, digest_size=16).hexdigest()
            self.embed(["one", "another text"])
        except Exception as error:  # tokenizers raises bare Exceptions
            raise ValueError(f"Cannot use the encoder {self.folder}: {error}.") from error

    def _bytes(self, name: str) -> bytes:
        with open(open_regular(self.folder / name, os.O_RDONLY), "rb") as file:
            return file.read()

    @torch.no_grad()
    def embed(self, texts: Any) -> Array:
        """Return one row a text, of length 1."""
        tokens = [e.ids for e in self.tokenizer.encode_batch(list(map(str, texts)))]
        order = np.argsort([len(ids) for ids in tokens], kind="stable")  # rows of one batch are about as long
        order = order[sum(not ids for ids in tokens) :]  # a text without tokens is 0
        vectors = np.zeros((len(tokens), int(self.config["hidden_size"])))
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(tokens[i]) for i in rows], batch_first=True)
            lengths = torch.tensor([len(tokens[i]) for i in rows])
            mask = torch.arange(padded.shape[1]) < lengths[:, None]
            hidden = self._hidden(padded, mask) * mask[:, :, None]
            vectors[rows] = F.normalize(hidden.sum(1) / lengths[:, None], dim=1).double().numpy()
        return vectors

    def _hidden(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the last layer's states: batch x tokens x width."""
        heads, length = int(self.config["num_attention_heads"]), tokens.shape[1]
        table = {
            name: self.weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
        }
        x = self._norm(table["word"][tokens] + table["position"][:length] + table["token_type"][0], "embeddings.")
        for layer in range(int(self.config["num_hidden_layers"])):
            name = f"encoder.layer.{layer}."
            q, k, v = (
                self._linear(x, f"{name}attention.self.{part}").reshape(*tokens.shape, heads, -1).transpose(1, 2)
                for part in ("query", "key", "value")
            )
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :]).transpose(1, 2).flatten(2)
            x = self._norm(self._linear(mixed, f"{name}attention.output.dense") + x, f"{name}attention.output.")
            wide = F.gelu(self._linear(x, f"{name}intermediate.dense"))
            x = self._norm(self._linear(wide, f"{name}output.dense") + x, f"{name}output.")
        return x

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.weights[f"{name}LayerNorm.weight"], self.weights[f"{name}LayerNorm.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, float(self.config.get("layer_norm_eps", 1e-12)))
