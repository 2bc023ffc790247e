"""Prompts for llama-server, checked against the context length."""

from __future__ import annotations

import orjson

from .. import offload
from ..base import MEDIA, Generation, Model, Text, TokenIds
from ..errors import (
    ContextExceeded,
    EmptyPrompt,
    Unsupported,
    check_ids,
    ends_with_media,
    read_from,
    text_of,
)
from .server import INFILL_PROBE, INFILL_TEXTS, InfillTokens, Server, infill_tokens
from .translate import ENGINE, NativePrompt, to_error, with_media


def text_prompt(job: Generation, model: Model) -> str | None:
    """Return the prompt of a job as text, if its length shows that it fits; else None.

    A token has at least one byte, so the length of the text usually shows that all fits.

    Raises:
        EmptyPrompt: the prompt has no tokens.
    """
    prompt, content = job.prompt, job.prompt.content
    if (
        not isinstance(content, Text)
        or not content.parse_special
        or prompt.media
        or prompt.suffix is not None
        or len(content.text.encode()) + 2
        > model.context - (0 if job.clips else job.max_tokens or 0)
    ):
        return None
    if not content.text and not model.adds_bos:
        raise EmptyPrompt
    return content.text


async def native_prompt(server: Server, job: Generation, model: Model) -> NativePrompt:
    """Return the prompt to send, after checking that prompt and completion fit.

    The server rejects a prompt that is too long, but silently shortens a completion.
    """
    prompt = job.prompt.content
    if job.prompt.media:
        assert isinstance(prompt, Text)
        if prompt.text.endswith(MEDIA):
            # The server would abort.
            raise ends_with_media(ENGINE)
        size = sum(len(one.data) for one in job.prompt.media)
        return await offload.run(size, with_media, job, _marker(server))
    text = text_prompt(job, model)
    if text is not None:
        return text
    ids, _ = await prompt_ids(server, job, model)
    if len(ids) >= model.context:
        raise ContextExceeded(model.context, len(ids), job.max_tokens or 0)
    return ids


async def check_biases(server: Server, job: Generation) -> None:
    """Reject a `logit_bias` of an id that the vocabulary lacks, which the server would ignore.

    Raises:
        UnknownToken: an id is not in the vocabulary.
    """
    ids = [token for token, _ in job.sampling.logit_bias]
    check_ids("logit_bias", ids, await server.vocabulary_size())


async def check_prompt(server: Server, job: Generation) -> None:
    """Name the id of a prompt that the server has rejected, which its own error does not.

    Raises:
        UnknownToken: an id is not in the vocabulary.
    """
    content = job.prompt.content
    if not isinstance(content, Text):
        check_ids("prompt", content, await server.vocabulary_size())


async def prompt_ids(server: Server, job: Generation, model: Model) -> tuple[TokenIds, int]:
    """Return the ids of a prompt that fits, and how many of them are the client's own."""
    prompt = job.prompt.content
    if job.prompt.suffix is not None:
        ids, count = await _filling(server, job, model)
    elif isinstance(prompt, Text):
        ids = await server.tokenize(
            prompt.text, add_special=True, parse_special=prompt.parse_special
        )
        count = len(ids) - (model.adds_bos and not prompt.bos)
    else:
        ids, count = prompt, len(prompt) - job.prompt.bos_count
    if not ids:
        raise EmptyPrompt
    if len(ids) + (0 if job.clips else job.max_tokens or 0) > model.context:
        raise ContextExceeded(model.context, len(ids), job.max_tokens or 0)
    if job.prompt.logprobs is not None:
        check_ids("prompt", ids, len((await server.facts()).vocabulary))
    return ids, count


async def _filling(server: Server, job: Generation, model: Model) -> tuple[TokenIds, int]:
    """Return the ids of an infill prompt, and how many of them are the client's own."""
    markers = await _markers(server, model)
    prefix, is_own = job.prompt.content, False
    if isinstance(prefix, Text):
        is_own = bool(prefix.bos)
        prefix = await server.plain(prefix.text)
    ids = markers.around(prefix, await server.plain(job.prompt.suffix or ""))
    return ((await server.ids("")) + ids if model.adds_bos else ids), len(ids) + is_own


async def _markers(server: Server, model: Model) -> InfillTokens:
    found = server.infill
    if found is None:
        status, body = await server.reply("POST", "/infill", orjson.dumps(INFILL_PROBE))
        if status == 501:
            raise Unsupported("suffix", ENGINE, "This model has no fill-in-the-middle tokens.")
        if status != 200:
            raise to_error(status, body)
        with read_from(ENGINE, "/infill"):
            spelled = text_of(orjson.loads(body)["prompt"])
        ids = await server.tokenize(spelled, add_special=False, parse_special=True)
        before, after = [await server.plain(text) for text in INFILL_TEXTS]
        found = infill_tokens(ids, before, after)
        server.monitor.check_is(model)
        server.infill = found
    return found


def _marker(server: Server) -> str:
    """Return the media placeholder of the server's prompts."""
    return server.monitor.identity.marker if server.monitor.identity is not None else ""
