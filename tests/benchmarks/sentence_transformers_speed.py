"""Measure sentence-transformers with the weights of a GGUF file; `embeddings.py` runs this.

It reads a JSON object of lists of texts from standard input, and writes texts per second. Its
packages are in the dependency group `sentence-transformers`.
"""

# It runs in an environment of its own, whose packages the type checker does not see.
# mypy: disable-error-code="import-not-found,attr-defined"

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import gguf
import torch
from sentence_transformers import SentenceTransformer, models
from transformers import BertConfig, BertModel, BertTokenizerFast

NAMES = {
    "token_embd": "embeddings.word_embeddings", "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings", "token_embd_norm": "embeddings.LayerNorm",
    "attn_q": "attention.self.query", "attn_k": "attention.self.key",
    "attn_v": "attention.self.value", "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm", "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm",
}  # fmt: skip


def name_of(tensor: str) -> str:
    """Return the name of a tensor in transformers."""
    base, _, kind = tensor.rpartition(".")
    if base.startswith("blk."):
        _, layer, part = base.split(".")
        return f"encoder.layer.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[base]}.{kind}"


def load(path: Path, folder: Path) -> SentenceTransformer:
    """Return the model of a GGUF file, with mean pooling."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tokens = fields["tokenizer.ggml.tokens"]
    pieces = [
        token if number < 5 else token[1:] if token[0] == "▁" else f"##{token}"
        for number, token in enumerate(tokens)
    ]
    (folder / "vocab.txt").write_text("\n".join(pieces))
    config = BertConfig(
        vocab_size=len(pieces),
        hidden_size=fields["bert.embedding_length"],
        num_hidden_layers=fields["bert.block_count"],
        num_attention_heads=fields["bert.attention.head_count"],
        intermediate_size=fields["bert.feed_forward_length"],
    )
    model = BertModel(config, add_pooling_layer=False)
    weights = {name_of(one.name): torch.from_numpy(one.data.copy()) for one in reader.tensors}
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    bert = models.Transformer(str(folder))
    pooling = models.Pooling(config.hidden_size, "mean")
    return SentenceTransformer(modules=[bert, pooling, models.Normalize()], device="cpu")


if __name__ == "__main__":
    torch.set_num_threads(2)
    work = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as name:
        model = load(Path(sys.argv[1]), Path(name))
        found = {}
        for load_name, lists in work.items():
            model.encode(lists[0][:4])
            begun = time.perf_counter()
            for texts in lists:
                model.encode(texts, batch_size=32)
            found[load_name] = sum(map(len, lists)) / (time.perf_counter() - begun)
    sys.stdout.write(json.dumps(found) + "\n")
