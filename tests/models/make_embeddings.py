"""Make the small models that the tests of embeddings and rankings use.

    pip install gguf sentencepiece tokenizers numpy
    PYTHONPATH=tests python -m models.make_embeddings

Like the models of `make.py` they have random weights and vocabularies of words made there. All
are F32. Attention prefers a few tokens, so that texts of any length and order differ clearly.

* `bert-mean.gguf`: BERT with a WordPiece vocabulary, no cache, mean pooling, no EOS token
* `bert-cls.gguf`: BERT with CLS pooling, whose [SEP] is also the EOS token
* `last.gguf`: a causal Qwen3 with byte-level BPE and an EOS token at the end, last-token pooling
* `rank.gguf`: BERT with a classifier of one label, which scores a query and a document
"""

from __future__ import annotations

import string
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import gguf
from models.make import Weights, bpe_vocabulary, corpus, write
from tokenizers import normalizers, pre_tokenizers

HERE = Path(__file__).parent
WIDTH, LAYERS, HEADS, INNER = 64, 2, 4, 128
CONTEXT, LONG_CONTEXT = 512, 2048
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = string.ascii_lowercase + string.digits


def wordpiece() -> list[str]:
    """Return WordPiece's pieces: every character in every place of a word, and frequent ones.

    They are counted here, because the trainer of `tokenizers` makes another vocabulary each time.
    """
    normalizer = normalizers.BertNormalizer(lowercase=True)
    splitter = pre_tokenizers.BertPreTokenizer()
    counts: Counter[str] = Counter()
    for line in corpus():
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(line)):
            for start, end in combinations(range(len(word) + 1), 2):
                if end - start <= 8:
                    counts[("##" if start else "") + word[start:end]] += end - start
    letters = {piece for piece in counts if len(piece.removeprefix("##")) == 1}
    letters |= {form + letter for form in ("", "##") for letter in LETTERS}
    frequent = sorted(counts, key=lambda piece: (-counts[piece], piece))
    return sorted({*letters, *string.punctuation, *frequent[:800]})


def wordpiece_vocabulary(writer: gguf.GGUFWriter, eos: bool) -> int:
    """Write a WordPiece vocabulary in GGUF's form, and return its size.

    In that form `▁` marks the first piece of a word, and the others lose their `##`.

    Args:
        eos: whether [SEP] is the EOS token too, as newer conversions of BERT say.
    """
    pieces = [
        piece.removeprefix("##") if piece.startswith("##") else "▁" + piece for piece in wordpiece()
    ]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*SPECIAL, *pieces])
    writer.add_token_types([control] * len(SPECIAL) + [normal] * len(pieces))
    writer.add_token_type_count(2)
    writer.add_bos_token_id(SPECIAL.index("[CLS]"))
    writer.add_unk_token_id(SPECIAL.index("[UNK]"))
    writer.add_sep_token_id(SPECIAL.index("[SEP]"))
    writer.add_pad_token_id(SPECIAL.index("[PAD]"))
    writer.add_mask_token_id(SPECIAL.index("[MASK]"))
    if eos:
        writer.add_eos_token_id(SPECIAL.index("[SEP]"))
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)
        writer.add_add_sep_token(False)
    return len(SPECIAL) + len(pieces)


class Shape(NamedTuple):
    """The sizes of a transformer."""

    width: int = WIDTH
    layers: int = LAYERS
    heads: int = HEADS
    inner: int = INNER


SMALL = Shape()


def _header(
    writer: gguf.GGUFWriter, name: str, context: int, pooling: gguf.PoolingType, shape: Shape
) -> None:
    writer.add_name(name)
    writer.add_context_length(context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_pooling_type(pooling)


def bert(
    path: Path, pooling: gguf.PoolingType, seed: int, *, eos: bool, shape: Shape = SMALL
) -> None:
    """Write a BERT, with a classifier of one label if its pooling is rank."""
    writer = gguf.GGUFWriter(path, "bert")
    width, inner = shape.width, shape.inner
    _header(writer, path.stem, CONTEXT, pooling, shape)
    writer.add_causal_attention(False)
    writer.add_layer_norm_eps(1e-12)
    size = wordpiece_vocabulary(writer, eos)
    writer.add_vocab_size(size)
    weights = Weights(writer, seed)

    def norm(name: str) -> None:
        weights.around(name + ".weight", width, centre=1.0)
        weights.around(name + ".bias", width)

    def linear(name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        weights.matrix(name + ".weight", rows, columns, scale=scale)
        weights.around(name + ".bias", rows)

    weights.matrix("token_embd.weight", size, width, scale=8.0)
    weights.matrix("token_types.weight", 2, width, scale=2.0)
    weights.matrix("position_embd.weight", CONTEXT, width, scale=3.0)
    norm("token_embd_norm")
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        for name, scale in (("q", 1.5), ("k", 1.5), ("v", 1.0), ("output", 4.0)):
            linear(f"{block}attn_{name}", width, width, scale)
        norm(block + "attn_output_norm")
        linear(block + "ffn_up", inner, width)
        linear(block + "ffn_down", width, inner, 2.0)
        norm(block + "layer_output_norm")
    if pooling == gguf.PoolingType.RANK:
        linear("cls", width, width)
        linear("cls.output", 1, width, 4.0)
    write(writer)


def decoder(path: Path, seed: int) -> None:
    """Write a Qwen3 with grouped heads and the output matrix of its input embeddings."""
    key_heads, head = 2, WIDTH // HEADS
    writer = gguf.GGUFWriter(path, "qwen3")
    _header(writer, path.stem, LONG_CONTEXT, gguf.PoolingType.LAST, SMALL)
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    size = bpe_vocabulary(writer, add_bos=False)
    writer.add_add_eos_token(True)
    writer.add_vocab_size(size)
    weights = Weights(writer, seed)
    weights.matrix("token_embd.weight", size, WIDTH, scale=8.0)
    weights.around("output_norm.weight", WIDTH, centre=1.0)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        weights.around(block + "attn_norm.weight", WIDTH, centre=1.0)
        weights.around(block + "ffn_norm.weight", WIDTH, centre=1.0)
        for name, rows in (("q", WIDTH), ("k", key_heads * head), ("v", key_heads * head)):
            weights.matrix(f"{block}attn_{name}.weight", rows, WIDTH)
        weights.matrix(block + "attn_output.weight", WIDTH, WIDTH, scale=2.0)
        weights.around(block + "attn_q_norm.weight", head, centre=1.5)
        weights.around(block + "attn_k_norm.weight", head, centre=1.5)
        weights.matrix(block + "ffn_gate.weight", INNER, WIDTH)
        weights.matrix(block + "ffn_up.weight", INNER, WIDTH)
        weights.matrix(block + "ffn_down.weight", WIDTH, INNER)
    write(writer)


if __name__ == "__main__":
    bert(HERE / "bert-mean.gguf", gguf.PoolingType.MEAN, 21, eos=False)
    bert(HERE / "bert-cls.gguf", gguf.PoolingType.CLS, 22, eos=True)
    decoder(HERE / "last.gguf", 23)
    bert(HERE / "rank.gguf", gguf.PoolingType.RANK, 33, eos=True)
