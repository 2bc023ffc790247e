"""Make the small models that the fidelity tests use in addition to the demo model.

`make_embeddings.py` makes those of the tests of embeddings.

    pip install gguf sentencepiece tokenizers numpy
    python tests/models/make.py

Weights are random, vocabularies are trained here on words made here: nothing is downloaded.
Each model has features that the demo model lacks:

* `spm.gguf`: SentencePiece with BOS, a space in front of the first piece, byte fallback
* `bpe.gguf`: byte-level BPE with the llama-3 pre-tokenizer, BOS, and user-defined tokens
* `recurrent.gguf`: Mamba's recurrent state, from which no part can be removed
"""

from __future__ import annotations

import io
import random
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
CONTEXT = 512
LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def corpus() -> list[str]:
    """Return sentences of made-up and real words, with accents, digits and emoji."""
    rng = random.Random(1)
    syllables = [
        "ka",
        "to",
        "mi",
        "ra",
        "ne",
        "so",
        "lu",
        "vi",
        "pa",
        "de",
        "stra",
        "blo",
        "chi",
        "qué",
        "né",
        "über",
        "ço",
    ]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(400)]
    words += [
        "the",
        "a",
        "of",
        "and",
        "to",
        "in",
        "is",
        "was",
        "he",
        "she",
        "it",
        "with",
        "for",
        "on",
        "that",
        "Hello",
        "world",
        "été",
        "12",
        "345",
    ]
    return [
        " ".join(rng.choices(words, k=rng.randint(3, 12)))
        + rng.choice([".", "!", "?", "\n", " 🐱"])
        for _ in range(4000)
    ]


def spm_vocabulary(writer: gguf.GGUFWriter) -> int:
    """Write a SentencePiece BPE vocabulary with byte fallback, like Llama 2's; return its size."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=model,
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=True,
        split_digits=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokens, scores, kinds = [], [], []
    for token in range(pieces.vocab_size()):
        kind = gguf.TokenType.NORMAL
        if pieces.is_unknown(token):
            kind = gguf.TokenType.UNKNOWN
        elif pieces.is_control(token):
            kind = gguf.TokenType.CONTROL
        elif pieces.is_byte(token):
            kind = gguf.TokenType.BYTE
        tokens.append(pieces.id_to_piece(token).encode())
        scores.append(pieces.get_score(token))
        kinds.append(kind)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(pieces.bos_id())
    writer.add_eos_token_id(pieces.eos_id())
    writer.add_unk_token_id(pieces.unk_id())
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(True)
    return len(tokens)


def bpe_vocabulary(writer: gguf.GGUFWriter, add_bos: bool) -> int:
    """Write a byte-level BPE vocabulary with the llama-3 pre-tokenizer; return its size.

    Two tokens are user-defined.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    for text, kind in (
        ("<|begin_of_text|>", gguf.TokenType.CONTROL),
        ("<|end_of_text|>", gguf.TokenType.CONTROL),
        ("<|im_start|>", gguf.TokenType.CONTROL),
        ("<|im_end|>", gguf.TokenType.CONTROL),
        ("<think>", gguf.TokenType.USER_DEFINED),
        ("</think>", gguf.TokenType.USER_DEFINED),
    ):
        tokens.append(text)
        kinds.append(kind)
    merges = tokenizer.to_str()
    import json

    listed = json.loads(merges)["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in listed])
    writer.add_bos_token_id(tokens.index("<|begin_of_text|>"))
    writer.add_eos_token_id(tokens.index("<|end_of_text|>"))
    writer.add_eot_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(CHATML)
    return len(tokens)


class Weights:
    """A writer of random tensors from one seed."""

    def __init__(self, writer: gguf.GGUFWriter, seed: int) -> None:
        self._writer = writer
        self._rng = np.random.default_rng(seed)

    def matrix(self, name: str, *shape: int, scale: float = 1.0) -> None:
        values = self._rng.standard_normal(shape, np.float32) * scale / np.sqrt(shape[-1])
        self._writer.add_tensor(name, values.astype(np.float32))

    def ones(self, name: str, size: int) -> None:
        self._writer.add_tensor(name, np.ones(size, np.float32))

    def around(self, name: str, size: int, *, centre: float = 0.0) -> None:
        values = centre + 0.1 * self._rng.standard_normal(size, np.float32)
        self._writer.add_tensor(name, values.astype(np.float32))

    def values(self, name: str, values: np.ndarray) -> None:
        self._writer.add_tensor(name, values.astype(np.float32))


def transformer(path: Path, kind: str, seed: int) -> None:
    """Write a two-layer Llama of width 64."""
    width, layers, heads, inner = 64, 2, 4, 128
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    size = spm_vocabulary(writer) if kind == "spm" else bpe_vocabulary(writer, add_bos=True)
    writer.add_vocab_size(size)
    weights = Weights(writer, seed)
    # Large scales keep the two best tokens apart, so greedy answers are the same on every engine.
    weights.matrix("token_embd.weight", size, width, scale=8.0)
    weights.matrix("output.weight", size, width, scale=6.0)
    weights.ones("output_norm.weight", width)
    for layer in range(layers):
        block = f"blk.{layer}."
        weights.ones(block + "attn_norm.weight", width)
        weights.ones(block + "ffn_norm.weight", width)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            weights.matrix(f"{block}{name}.weight", width, width)
        weights.matrix(block + "ffn_gate.weight", inner, width)
        weights.matrix(block + "ffn_up.weight", inner, width)
        weights.matrix(block + "ffn_down.weight", width, inner)
    write(writer)


def mamba(path: Path, seed: int) -> None:
    """Write a two-layer Mamba of width 64."""
    width, layers, inner, state, conv, rank = 64, 2, 128, 16, 4, 4
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_name(path.stem)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(conv)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(1e-5)
    size = bpe_vocabulary(writer, add_bos=False)
    writer.add_vocab_size(size)
    weights = Weights(writer, seed)
    weights.matrix("token_embd.weight", size, width, scale=8.0)
    weights.matrix("output.weight", size, width, scale=6.0)
    weights.ones("output_norm.weight", width)
    for layer in range(layers):
        block = f"blk.{layer}."
        weights.ones(block + "attn_norm.weight", width)
        weights.matrix(block + "ssm_in.weight", 2 * inner, width)
        weights.matrix(block + "ssm_conv1d.weight", inner, conv)
        weights.values(block + "ssm_conv1d.bias", np.zeros(inner))
        weights.matrix(block + "ssm_x.weight", rank + 2 * state, inner)
        weights.matrix(block + "ssm_dt.weight", inner, rank)
        weights.values(block + "ssm_dt.bias", np.zeros(inner))
        decay = -np.tile(np.arange(1, state + 1, dtype=np.float32), (inner, 1))
        weights.values(block + "ssm_a", decay)
        weights.ones(block + "ssm_d", inner)
        weights.matrix(block + "ssm_out.weight", width, inner)
    write(writer)


def write(writer: gguf.GGUFWriter) -> None:
    """Write the file of F32 tensors that has been described."""
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    transformer(HERE / "spm.gguf", "spm", 11)
    transformer(HERE / "bpe.gguf", "bpe", 12)
    mamba(HERE / "recurrent.gguf", 13)
