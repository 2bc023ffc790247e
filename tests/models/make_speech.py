"""Make a model for koboldcpp that speaks: noise of the same length for every text.

    PYTHONPATH=tests python -m models.make_speech FOLDER
    koboldcpp --model backends/llama_cpp/demo.gguf --port 5001 \\
        --ttsmodel FOLDER/outetts.gguf --ttswavtokenizer FOLDER/wavtokenizer.gguf

`outetts.gguf` answers every prompt with sixty audio tokens, and `wavtokenizer.gguf`, which has
random weights, makes the sound.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
from support.scripted import scripted

TOKENS = [f"<|{number}|>" for number in range(60)]
# Widths: of a token, inside, of the feed-forward layers, and of a spectrum.
FEATURES, WIDTH, FORWARD, SPECTRUM = 16, 32, 64, 1_282
VOCABULARY, RESNETS, ATTENTION, LAYERS = 4_096, (0, 1, 3, 4), 2, 2


class Vocoder:
    """The writer of a WavTokenizer with random weights."""

    def __init__(self, path: Path) -> None:
        self._writer = gguf.GGUFWriter(path, "wavtokenizer-dec")
        self._random = np.random.default_rng(1)

    def write(self) -> None:
        """Write the file."""
        self._settings()
        self._weights("token_embd", FEATURES, VOCABULARY, scale=1.0, bias=False)
        self._convolution("conv1d", 7, FEATURES)
        for index in RESNETS:
            for name in ("1", "2"):
                self._norm(f"posnet.{index}.norm{name}", 1, WIDTH)
                self._convolution(f"posnet.{index}.conv{name}", 3, WIDTH)
        for index in (ATTENTION, 5):
            self._norm(f"posnet.{index}.attn_norm", 1, WIDTH)
        for name in ("q", "k", "v", "output"):
            self._convolution(f"posnet.{ATTENTION}.attn_{name}", 1, WIDTH)
        self._norm("token_embd_norm", WIDTH)
        for index in range(LAYERS):
            self._convolution(f"convnext.{index}.dw", 7, 1)
            self._norm(f"convnext.{index}.norm", WIDTH)
            self._weights(f"convnext.{index}.pw1", WIDTH, FORWARD)
            self._weights(f"convnext.{index}.pw2", FORWARD, WIDTH)
            self._weights(f"convnext.{index}.gamma", WIDTH, bias=False)
        self._norm("output_norm", WIDTH)
        self._weights("output", WIDTH, SPECTRUM, scale=0.3)
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()

    def _settings(self) -> None:
        writer = self._writer
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(VOCABULARY)
        writer.add_features_length(FEATURES)
        writer.add_embedding_length(SPECTRUM)
        writer.add_feed_forward_length(FORWARD)
        writer.add_context_length(8_192)
        writer.add_block_count(6)
        writer.add_head_count(1)
        writer.add_layer_norm_eps(1e-6)
        writer.add_group_norm_eps(1e-6)
        writer.add_group_norm_groups(4)
        writer.add_posnet_embedding_length(WIDTH)
        writer.add_posnet_block_count(6)
        writer.add_convnext_embedding_length(WIDTH)
        writer.add_convnext_block_count(LAYERS)
        writer.add_causal_attention(False)

    def _tensor(self, name: str, values: np.ndarray) -> None:
        self._writer.add_tensor(name, values)

    def _drawn(self, *shape: int, scale: float = 0.1) -> np.ndarray:
        drawn = self._random.standard_normal(shape[::-1]) * scale
        return drawn.astype(np.float32)

    def _weights(self, name: str, *shape: int, scale: float = 0.1, bias: bool = True) -> None:
        self._tensor(f"{name}.weight", self._drawn(*shape, scale=scale))
        if bias:
            self._tensor(f"{name}.bias", self._drawn(shape[-1], scale=scale))

    def _convolution(self, name: str, size: int, width: int) -> None:
        self._tensor(f"{name}.weight", self._drawn(size, width, WIDTH).astype(np.float16))
        self._tensor(f"{name}.bias", self._drawn(1, WIDTH))

    def _norm(self, name: str, *shape: int) -> None:
        self._tensor(f"{name}.weight", np.ones(shape[::-1], np.float32))
        self._tensor(f"{name}.bias", self._drawn(*shape))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    scripted(folder / "outetts.gguf", TOKENS[::-1], marks=TOKENS, context=8_192)
    Vocoder(folder / "wavtokenizer.gguf").write()
