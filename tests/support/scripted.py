"""Models that generate a script: each token is followed by one fixed token.

The layers add nothing, so the logits depend on the last token alone. The embeddings are one-hot,
and the output matrix maps each token of a script to the next.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
from latimer.backends.base import Backend
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer

from support.engines.koboldcpp import koboldcpp
from support.servers import llama_server

WIDTH = 512
_NO_OTHERS: Mapping[str, Sequence[str]] = MappingProxyType({})
CONTROLS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# HERMES renders tools, THINKING opens the reasoning, MAY_THINK only mentions its tags.
HERMES = (
    "{% if tools %}<|im_start|>system\n<tools>{{ tools | tojson }}</tools><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for c in m.tool_calls %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
MAY_THINK = CHATML + "{# <think> </think> #}"


def scripted(
    path: Path,
    script: Sequence[str],
    template: str = CHATML,
    marks: Sequence[str] = (),
    after: str = "\n",
    context: int = 512,
    others: Mapping[str, Sequence[str]] = _NO_OTHERS,
    reads: bool = False,
) -> Path:
    """Write a model that answers every prompt with a script, then an end token.

    Args:
        script: its tokens, all different; those among `marks` are control tokens.
        after: the characters that end a prompt; the script follows each of them.
        context: the context length.
        others: further scripts, by the character at the end of the prompts that they follow; no two
            scripts have a token in common.
        reads: True if the scripts' tokens are also those of the same text in a prompt; otherwise
            every byte there is a token.
    """
    alphabet = _byte_alphabet()
    controls = (*CONTROLS, *marks)
    pieces = chain(script, *others.values())
    texts = [piece for piece in pieces if piece not in controls]
    spelled = {
        text if reads else "".join(alphabet[byte] for byte in text.encode()): text for text in texts
    }
    letters = list(alphabet.values())
    tokens = [*letters, *controls, *(one for one in spelled if one not in letters)]
    ids = {spelled.get(token, token): index for index, token in enumerate(tokens)}
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    if reads:
        kinds[len(letters) + len(controls) :] = [gguf.TokenType.USER_DEFINED] * len(spelled)
    for control in controls:
        kinds[ids[control]] = gguf.TokenType.CONTROL
    writer = _begun(path, context)
    writer.add_vocab_size(len(tokens))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    # The file must have a merge; this one, of two zero bytes, never applies.
    writer.add_token_merges([f"{alphabet[0]} {alphabet[0]}"])
    writer.add_eos_token_id(ids["<|im_end|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)
    follows = dict.fromkeys(range(len(tokens)), ids["<|im_end|>"])
    for text, before in ((script, after), *((text, one) for one, text in others.items())):
        own = [ids[piece] for piece in text]
        follows |= {tokens.index(alphabet[ord(one)]): own[0] for one in before}
        follows |= dict(zip(own, [*own[1:], ids["<|im_end|>"]], strict=True))
    _write(writer, len(tokens), follows)
    return path


@asynccontextmanager
async def scripted_engine(
    engine: str,
    folder: Path,
    script: Sequence[str],
    template: str = CHATML,
    marks: Sequence[str] = (),
    *,
    after: str = "\n",
    slots: int = 4,
    context: int = 512,
) -> AsyncIterator[Backend]:
    """Yield a backend of an engine that answers every prompt with a script; see `scripted`."""
    async with AsyncExitStack() as stack:
        if engine == "koboldcpp":
            yield (await stack.enter_async_context(koboldcpp(template, "".join(script))))[1]
            return
        path = scripted(folder / "model.gguf", script, template, marks, after, context)
        if engine == "llama_cpp":
            yield LlamaCpp(path, context=context)
        else:
            address = stack.enter_context(llama_server(path, slots=slots, context=context))
            yield LlamaServer(address)


def _begun(path: Path, context: int) -> gguf.GGUFWriter:
    """Return the writer of a file, after the shape of the model."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_context_length(context)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(8)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // 8)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    return writer


def _write(writer: gguf.GGUFWriter, size: int, follows: dict[int, int]) -> None:
    def zeros(name: str, *shape: int) -> None:
        writer.add_tensor(name, np.zeros(shape, np.float32))

    output = np.zeros((size, WIDTH), np.float32)
    for token, after in follows.items():
        output[after, token] = 1.0
    writer.add_tensor("token_embd.weight", np.eye(size, WIDTH, dtype=np.float32))
    writer.add_tensor("output.weight", output)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        zeros(f"blk.0.{name}.weight", WIDTH, WIDTH)
    zeros("blk.0.ffn_gate.weight", 64, WIDTH)
    zeros("blk.0.ffn_up.weight", 64, WIDTH)
    zeros("blk.0.ffn_down.weight", WIDTH, 64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _byte_alphabet() -> dict[int, str]:
    """Return the character that GPT-2's vocabularies use for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }
