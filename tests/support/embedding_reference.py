"""The vectors and scores that a GGUF model should give, computed in float64 with numpy.

It reads the file with gguf's reader and evaluates BERT, Llama, and Qwen3. It shares no code with
llama.cpp or Latimer, and takes token ids. Tests may take the ids from llama.cpp's vocabulary, which
they compare with HuggingFace's `tokenizers` for WordPiece.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
MEAN, CLS, LAST, RANK = 1, 2, 3, 4


def _layer_norm(x: Array, weight: Array, bias: Array, epsilon: float) -> Array:
    x = x - x.mean(-1, keepdims=True)
    x /= np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)
    return x * weight + bias


def _rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    result: Array = x * weight / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)
    return result


def _gelu(x: Array) -> Array:
    result: Array = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * x * (1 + 0.044715 * x * x)))
    return result


def _silu(x: Array) -> Array:
    result: Array = x / (1 + np.exp(-x))
    return result


def _attention(query: Array, key: Array, value: Array, causal: bool) -> Array:
    """Attend in every head; arrays have the shape (heads, tokens, head)."""
    count, shared = query.shape[1], query.shape[0] // key.shape[0]
    key, value = key.repeat(shared, axis=0), value.repeat(shared, axis=0)
    weights: Array = query @ key.swapaxes(1, 2) / np.sqrt(query.shape[2])
    if causal:
        weights[:, ~np.tri(count, dtype=bool)] = -np.inf
    weights -= weights.max(-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(-1, keepdims=True)
    attended: Array = weights @ value
    return attended.swapaxes(0, 1).reshape(count, -1)


def _rotate(x: Array, base: float, halves: bool) -> Array:
    """Apply rotary positions to halves (NeoX), or to neighbouring pairs."""
    size = x.shape[-1]
    angles = np.outer(np.arange(x.shape[1]), base ** (-np.arange(0, size, 2) / size))
    cos, sin = np.cos(angles), np.sin(angles)
    one, other = (
        (np.s_[..., : size // 2], np.s_[..., size // 2 :])
        if halves
        else (np.s_[..., 0::2], np.s_[..., 1::2])
    )
    turned = np.empty_like(x)
    turned[one] = x[one] * cos - x[other] * sin
    turned[other] = x[one] * sin + x[other] * cos
    return turned


class EmbeddingReference:
    """A model's weights and metadata, and its forward pass.

    Attributes:
        pooling: the model's own pooling, as GGUF numbers it; that of the last token by default.
        size: the number of dimensions.
        context: the largest number of tokens.
    """

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._fields = {
            name: field.contents()
            for name, field in reader.fields.items()
            if field.types[0] != gguf.GGUFValueType.ARRAY
        }
        self._weights: dict[str, Array] = {
            tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            for tensor in reader.tensors
        }
        self._architecture = str(self._fields["general.architecture"])
        assert self._architecture in ("bert", "llama", "qwen3"), self._architecture
        self.pooling = int(self._hyper("pooling_type", LAST))
        self.size = int(self._hyper("embedding_length"))
        self.context = int(self._hyper("context_length"))
        self._layers = int(self._hyper("block_count"))

    def _hyper(self, name: str, default: Any = None) -> Any:
        value = self._fields.get(f"{self._architecture}.{name}", default)
        assert value is not None, name
        return value

    def vector(self, ids: Sequence[int], pooling: int | None = None) -> Array:
        """Return the unit vector of an input, whose ids include its special tokens."""
        states = self._states(ids)
        pooled = {MEAN: states.mean(0), CLS: states[0], LAST: states[-1]}[pooling or self.pooling]
        unit: Array = pooled / np.linalg.norm(pooled)
        return unit

    def scores(self, ids: Sequence[int]) -> Array:
        """Return the classifier's raw scores of a pair, one per label."""
        first = self._states(ids)[0]
        return self._linear("cls.output", np.tanh(self._linear("cls", first)))

    def pair(self, query: Sequence[int], document: Sequence[int]) -> list[int]:
        """Lay out a pair of ids without special tokens as llama.cpp's server does."""
        assert "tokenizer.chat_template.rerank" not in self._fields
        wordpiece = self._fields["tokenizer.ggml.model"] == "bert"
        bos, eos, separator = (
            [self._fields[f"tokenizer.ggml.{key}_token_id"]]
            if self._fields.get(f"tokenizer.ggml.add_{added}_token", default)
            else []
            for key, added, default in (
                ("bos", "bos", wordpiece),
                ("eos", "eos", False),
                ("seperator", "sep", wordpiece),
            )
        )
        return [*bos, *query, *eos, *separator, *document, *eos]

    def _linear(self, name: str, x: Array) -> Array:
        return x @ self._weights[name + ".weight"].T + self._weights.get(name + ".bias", 0.0)

    def _heads(self, name: str, x: Array, key: bool) -> Array:
        """Project to heads, of the shape (heads, tokens, head)."""
        heads = self._hyper("attention.head_count")
        count = self._hyper("attention.head_count_kv", heads) if key else heads
        return self._linear(name, x).reshape(len(x), count, -1).swapaxes(0, 1)

    def _states(self, ids: Sequence[int]) -> Array:
        """Return the last layer's output for every token."""
        states = self._weights["token_embd.weight"][list(ids)]
        return self._encoder(states) if self._architecture == "bert" else self._decoder(states)

    def _encoder(self, x: Array) -> Array:
        weights, epsilon = self._weights, self._hyper("attention.layer_norm_epsilon")

        def norm(name: str, x: Array) -> Array:
            return _layer_norm(x, weights[name + ".weight"], weights[name + ".bias"], epsilon)

        x = x + weights["token_types.weight"][0] + weights["position_embd.weight"][: len(x)]
        x = norm("token_embd_norm", x)
        for layer in range(self._layers):
            block = f"blk.{layer}."
            query, key, value = (
                self._heads(f"{block}attn_{name}", x, key=name != "q") for name in "qkv"
            )
            attended = self._linear(block + "attn_output", _attention(query, key, value, False))
            x = norm(block + "attn_output_norm", x + attended)
            inner = _gelu(self._linear(block + "ffn_up", x))
            x = norm(block + "layer_output_norm", x + self._linear(block + "ffn_down", inner))
        return x

    def _decoder(self, x: Array) -> Array:
        weights, epsilon = self._weights, self._hyper("attention.layer_norm_rms_epsilon")
        base, qwen = self._hyper("rope.freq_base", 10000.0), self._architecture == "qwen3"

        def norm(name: str, x: Array) -> Array:
            return _rms_norm(x, weights[name + ".weight"], epsilon)

        for layer in range(self._layers):
            block = f"blk.{layer}."
            given = norm(block + "attn_norm", x)
            query, key, value = (
                self._heads(f"{block}attn_{name}", given, key=name != "q") for name in "qkv"
            )
            if qwen:
                query, key = norm(block + "attn_q_norm", query), norm(block + "attn_k_norm", key)
            query, key = (_rotate(one, base, halves=qwen) for one in (query, key))
            x = x + self._linear(block + "attn_output", _attention(query, key, value, True))
            given = norm(block + "ffn_norm", x)
            gate = _silu(self._linear(block + "ffn_gate", given))
            x = x + self._linear(block + "ffn_down", gate * self._linear(block + "ffn_up", given))
        return norm("output_norm", x)


@cache
def embedding_reference(path: Path) -> EmbeddingReference:
    """Return a model's reference, read once."""
    return EmbeddingReference(path)


def cosine(one: Sequence[float] | Array, other: Sequence[float] | Array) -> float:
    """Return the cosine of two vectors of any length."""
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
