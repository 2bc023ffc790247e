"""A job's prompt as koboldcpp gets it, after making sure that all of it fits."""

from __future__ import annotations

from .. import offload
from ..base import Generation, Model, Text, TokenIds
from ..errors import ContextExceeded, EmptyPrompt, Unsupported
from .server import Server
from .translate import CAPABILITIES, ENGINE, with_media


async def counted(server: Server, job: Generation, model: Model) -> tuple[str, int, int]:
    """The prompt as text, and how many tokens it has with a BOS and without.

    koboldcpp cuts what does not fit from the prompt's front, silently: so it is counted first.
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
    """The text of token ids, if koboldcpp reads the same ids out of it again."""
    text = (await server.detokenize(ids)).decode()
    if tuple((await server.token_count(text, False))["ids"]) != ids:
        raise Unsupported(
            "prompt", ENGINE, "These token ids do not survive its tokeniser; send text instead."
        )
    return text
