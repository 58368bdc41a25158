"""Sentence embeddings by a local model: the same numbers as torch's own layers give."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fsla.data._encoder import SentenceEncoder
from fsla.data._features import FeatureBuilder
from fsla.data._loading import load_data
from test_data_input_columns import WORDS, sentences

WIDTH, HEADS, LAYERS, POSITIONS = 16, 4, 2, 12
PARTS = ("self.query", "self.key", "self.value", "output.dense")


@pytest.fixture
def tiny(tmp_path):
    """Write a BERT of two layers with random weights; return its folder, its layers and its tables."""
    tokenizers = pytest.importorskip("tokenizers")
    names = ["[PAD]", "[UNK]", *dict.fromkeys(WORDS)]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    config = {
        "model_type": "bert", "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
        "max_position_embeddings": POSITIONS, "layer_norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    layers = [
        nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, activation="gelu", batch_first=True).eval()
        for _ in range(LAYERS)
    ]
    tables = {"word": torch.randn(len(names), WIDTH), "position": torch.randn(POSITIONS, WIDTH)}
    tables["token_type"] = torch.randn(2, WIDTH)
    weights = {f"bert.embeddings.{name}_embeddings.weight": table for name, table in tables.items()}
    weights |= {"embeddings.LayerNorm.weight": torch.ones(WIDTH), "embeddings.LayerNorm.bias": torch.zeros(WIDTH)}
    for i, layer in enumerate(layers):
        name = f"encoder.layer.{i}."
        attention = layer.self_attn
        for j, part in enumerate(PARTS[:3]):
            weights[f"{name}attention.{part}.weight"] = attention.in_proj_weight[j * WIDTH : (j + 1) * WIDTH]
            weights[f"{name}attention.{part}.bias"] = attention.in_proj_bias[j * WIDTH : (j + 1) * WIDTH]
        modules = {
            "attention.output.dense": attention.out_proj, "attention.output.LayerNorm": layer.norm1,
            "intermediate.dense": layer.linear1, "output.dense": layer.linear2, "output.LayerNorm": layer.norm2,
        }  # fmt: skip
        weights |= {f"{name}{n}.{w}": getattr(m, w) for n, m in modules.items() for w in ("weight", "bias")}
    save_file({name: w.detach().contiguous() for name, w in weights.items()}, folder / "model.safetensors")
    return folder, layers, tables, {n: i for i, n in enumerate(names)}


def expected_vector(text, layers, tables, number):
    tokens = [number.get(word, 1) for word in text.split()][:POSITIONS]
    x = tables["word"][tokens] + tables["position"][: len(tokens)] + tables["token_type"][0]
    x = nn.functional.layer_norm(x, (WIDTH,))[None]
    for layer in layers:
        x = layer(x)
    return nn.functional.normalize(x[0].mean(0), dim=0).detach().numpy()


def test_embed_equals_torch_layers_whatever_the_batch(tiny):
    """Padding and sorting by length must not change a vector."""
    folder, layers, tables, number = tiny
    texts = [*sentences(5), "cat", "unknown words only", " ".join(WORDS)]
    expected = np.stack([expected_vector(text, layers, tables, number) for text in texts])
    vectors = SentenceEncoder(folder).embed([*texts, ""])
    assert np.allclose(vectors[:-1], expected, atol=1e-5)
    assert not vectors[-1].any()


def test_encoder_makes_the_features_of_a_table_and_restores(tiny, tmp_path):
    """A model that moved is named anew; another model is refused."""
    folder = tiny[0]
    frame = pd.DataFrame({"review": sentences(40), "label": ["a", "b"] * 20})
    loaded = load_data(frame, encoder=folder)
    assert loaded.data.features.dense.shape == (40, WIDTH + 1)
    arrays, values = loaded.builder.to_state()
    restored = FeatureBuilder.from_state(arrays, json.loads(json.dumps(values)))
    assert np.array_equal(restored.transform(frame).dense, loaded.builder.transform(frame).dense)
    moved = folder.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="is no folder"):
        FeatureBuilder.from_state(arrays, values)
    FeatureBuilder.from_state(arrays, values, encoder=str(moved))
    (moved / "tokenizer.json").write_text((moved / "tokenizer.json").read_text() + " ")
    with pytest.raises(ValueError, match="is not the one"):
        FeatureBuilder.from_state(arrays, values, encoder=str(moved))


def test_encoder_that_is_not_there_or_broken_is_refused(tiny, tmp_path, monkeypatch):
    """Nothing is downloaded, so the message names what to put where."""
    folder = tiny[0]
    frame = pd.DataFrame({"review": sentences(40), "label": ["a", "b"] * 20})
    with pytest.raises(ValueError, match=r"is no folder\. Name the folder of a sentence-transformers model"):
        load_data(frame, encoder="all-MiniLM-L6-v2")
    config = (folder / "config.json").read_text()
    for name, content, match in (
        ("config.json", config.replace('"bert"', '"mpnet"'), "model type is 'mpnet'"),
        ("config.json", "{", "Cannot use the encoder"),
        ("tokenizer.json", "{}", "Cannot use the encoder"),
        ("model.safetensors", "x", "Cannot use the encoder"),
    ):
        before = (folder / name).read_bytes()
        (folder / name).write_text(content)
        with pytest.raises(ValueError, match=match) as error:
            SentenceEncoder(folder)
        assert "\n" not in str(error.value)
        (folder / name).write_bytes(before)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"lacks config\.json"):
        SentenceEncoder(folder)
    numbers = pd.DataFrame({"x": np.arange(40) ** 2, "label": ["a", "b"] * 20})
    assert "The encoder is not used: no column is free text." in load_data(numbers, encoder=folder).notes
    monkeypatch.setattr("fsla._extras.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'fsla\[encoder\]'"):
        SentenceEncoder(folder)
