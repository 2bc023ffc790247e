"""Batches that have either a few generated tokens or prompts, where larger ones are slower.

With flash attention on a processor, llama.cpp computes a batch of at least 64 tokens in tiles of 64
(`GGML_FA_TILE_Q` in ggml-cpu). A tile evaluates each cell that any of its tokens sees, for all of
them. Tokens of one prompt see the same cells, but for the last ones. The next tokens of several
sequences do not: in a batch with a prompt, or with 64 of them, each costs the cells of all. In a
smaller batch of their own each costs only its own cells, and the weights are read once more.
"""

from __future__ import annotations

import math

from .library import LoadedModel, has_gpu
from .options import Options

# The tokens of a tile, and the fewest of a batch that has tiles.
TILE = 64
# The largest batch of generated tokens without tiles, which may get one more (`padding.py`).
MOST_APART = TILE - 2
# The tokens of a prompt that take as long as to read the weights once more.
_READ = 8
# The cache types of which llama.cpp makes tiles.
_TYPES = (None, "f16", "f32")


def least_cells(model: LoadedModel, options: Options) -> float:
    """Return the cells of generated tokens from which a batch with a prompt as well is slower.

    It is infinity where llama.cpp makes no tiles: on a GPU, without flash attention, and with a
    quantized KV cache. It is infinity for models with recurrent layers, too, which have little
    attention or none.
    """
    on_gpu = has_gpu() and options.gpu_layers != 0
    if on_gpu or options.exact or options.flash_attention is False:
        return math.inf
    if options.cache_type not in _TYPES or not model.rolls_back or not model.attention:
        return math.inf
    # A cell and a token of a tile take two products of the width of a layer's heads. A token of a
    # prompt takes a product with each weight, but for those of the vocabulary.
    sizes = model.sizes()
    weights = sizes["n_params"] - sizes["n_vocab"] * sizes["n_embd"]
    return _READ * weights / (TILE * 2 * model.attention)
