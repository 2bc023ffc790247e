"""Prompts for koboldcpp, checked against the context length."""

from __future__ import annotations

from .. import offload
from ..base import Generation, Model, Text, TokenIds
from ..errors import ContextExceeded, EmptyPrompt, Unsupported
from .server import Server
from .translate import CAPABILITIES, ENGINE, with_media


async def counted(server: Server, job: Generation, model: Model) -> tuple[str, int, int]:
    """Return the prompt as text, and its number of tokens with a BOS and without.

    koboldcpp silently cuts the beginning of a prompt that does not fit, so its tokens are counted
    first.
    """
    content = job.prompt.content
    if isinstance(content, Text):
        if not content.parse_special:
            raise Unsupported("parse_special", ENGINE, CAPABILITIES.refused["parse_special"])
        text = await offload.run(len(content.text), with_media, job, content.text)
    else:
        text = await _text_of(server, content)
    tokens = len((await server.token_count(text, False))["ids"])
    count = tokens + model.adds_bos
    if not count:
        raise EmptyPrompt
    if count + (job.max_tokens or 0) > model.context or count >= model.context:
        raise ContextExceeded(model.context, tokens, job.max_tokens or 0)
    return text, count, tokens


async def _text_of(server: Server, ids: TokenIds) -> str:
    """Return the text of token ids, if koboldcpp tokenizes it to the same ids."""
    text = (await server.detokenize(ids)).decode()
    if tuple((await server.token_count(text, False))["ids"]) != ids:
        raise Unsupported(
            "prompt", ENGINE, "Its tokenizer does not preserve these token ids. Send text instead."
        )
    return text
