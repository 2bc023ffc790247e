"""Vocabularies of small models with the control tokens of published templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from . import gguf_files

MODELS = Path(__file__).parent.parent / "models"
# The control tokens in the tests' templates; the first one ends a turn.
MARKS = (
    "<|im_end|>", "<|im_start|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|eom_id|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>",
    "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>", "<BOS_TOKEN>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>", "<|start|>", "<|message|>", "<|channel|>", "<|return|>",
    "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>",
    "<|endoftext|>", "<|turn>", "<turn|>", "<|im_middle|>", "]~b]", "[e~[",
)  # fmt: skip
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
CONTROL, USER_DEFINED = 3, 4
# The base model and changed metadata of each vocabulary, whose markers replace words.
VOCABULARIES: dict[str, tuple[str, dict[str, Any]]] = {
    "spm": ("spm", {}),
    "gpt-2": ("bpe", {"tokenizer.ggml.pre": "gpt-2"}),
    "llama-3": ("bpe", {}),
    "qwen2": ("bpe", {"tokenizer.ggml.pre": "qwen2"}),
    # llama.cpp lets control tokens of this model family strip the whitespace after them.
    "stripping": ("spm", {"general.name": "phi-3"}),
}


def with_marks(source: Path, target: Path, changes: dict[str, Any]) -> Path:
    """Copy a model with the templates' markers as tokens in place of some words."""
    fields = gguf.GGUFReader(source).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    wanted = [*((mark, CONTROL) for mark in MARKS), *((mark, USER_DEFINED) for mark in ADDED)]
    specials = [(mark, kind) for mark, kind in wanted if mark not in tokens]
    long = [place for place, text in enumerate(tokens) if kinds[place] == 1 and len(text) > 3]
    for place, (spelling, kind) in zip(long[-len(specials) :], specials, strict=True):
        tokens[place], kinds[place] = spelling, kind
    own = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    return gguf_files.copy(source, target, changes={**changes, **own})
