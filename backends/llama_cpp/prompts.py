"""The token ids of a job's prompt, which may be text, ids, infill, or text or ids with media."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ..base import MEDIA, MEDIA_ID, Generation, Text, TokenIds
from ..errors import (
    COUNTED,
    ContextExceeded,
    Unsupported,
    WordTooLong,
    check_ids,
    check_length,
)
from .options import ENGINE

if TYPE_CHECKING:
    from .projector import Chunk
    from .vocabulary import Vocabulary


class TokenizedPrompt(NamedTuple):
    """The tokens to evaluate for a job.

    Args:
        ids: the token ids; those of media are negative.
        own_count: the number of ids that are the client's own.
        chunks: the chunks of media, by position in `ids`.
        shown: the bytes of each of the client's own tokens, if the job asks for them.
        prediction: the tokens that the answer is expected to repeat.
    """

    ids: TokenIds
    own_count: int
    chunks: dict[int, Chunk]
    shown: Sequence[bytes] = ()
    prediction: TokenIds = ()


def size_of(job: Generation, vocabulary: Vocabulary) -> int:
    """Return the number of characters or ids in a prompt; see `Vocabulary.weight`."""
    content = job.prompt.content
    own = vocabulary.weight(content.text) if isinstance(content, Text) else len(content)
    return own + len(job.prompt.suffix or "") + len(job.prediction)


def prompt_of(
    job: Generation,
    vocabulary: Vocabulary,
    media: Sequence[Sequence[int | Chunk]],
    context: int,
) -> TokenizedPrompt:
    """Return a job's prompt as ids.

    Args:
        media: the tokens and chunks of each media file.
        context: the model's context length in tokens.

    Raises:
        ContextExceeded: the prompt is too long for the context with any tokenization.
        UnknownToken: an id is not in the vocabulary.
        Unsupported: the prompt has a suffix, and the model has no infill tokens.
    """
    check_length(len(job.prompt.suffix or ""), vocabulary.longest, context, job.max_tokens)
    if isinstance(job.prompt.content, Text):
        if not media and job.prompt.suffix is None:
            _check_count(job.prompt.content, vocabulary, context, job.max_tokens or 0)
        check_length(len(job.prompt.content.text), vocabulary.longest, context, job.max_tokens)
    elif len(job.prompt.content) > context:
        raise ContextExceeded(context, len(job.prompt.content), job.max_tokens or 0)
    text, found = job.prompt.content, TokenizedPrompt((), 0, {})
    if media:
        found = _with_media(job, vocabulary, media)
    elif job.prompt.suffix is not None:
        found = _infill(job, vocabulary)
    elif isinstance(text, Text):
        ids = vocabulary.tokenize(text.text, add_special=True, parse_special=text.parse_special)
        found = TokenizedPrompt(ids, len(ids) - (vocabulary.adds_bos and not text.bos), {})
    else:
        check_ids("prompt", text, vocabulary.size)
        found = TokenizedPrompt(text, len(text) - job.prompt.bos_count, {})
    if job.prediction:
        # No more of it can be repeated.
        text_ahead = job.prediction[: context * vocabulary.longest]
        ahead = vocabulary.tokenize(text_ahead, add_special=False, parse_special=False)
        found = found._replace(prediction=ahead[:context])
    if job.prompt.logprobs is None:
        return found
    data = text.spelled.encode() if isinstance(text, Text) else None
    shown = vocabulary.shown(found.ids[len(found.ids) - found.own_count :], data)
    return found._replace(shown=shown)


def _check_count(content: Text, vocabulary: Vocabulary, context: int, max_tokens: int) -> None:
    """Reject a text that cannot fit, with its number of tokens: clients compact by it.

    Texts that would take long to count are left to `check_length`.

    Raises:
        ContextExceeded: the text is too long for the context with any tokenization.
    """
    text = content.text
    if context * vocabulary.longest < len(text) <= COUNTED:
        with suppress(WordTooLong):
            ids = vocabulary.tokenize(text, add_special=False, parse_special=content.parse_special)
            # A tokenizer that drops spaces can make fewer.
            if len(ids) > context:
                raise ContextExceeded(context, len(ids), max_tokens)


def _with_media(
    job: Generation, vocabulary: Vocabulary, media: Sequence[Sequence[int | Chunk]]
) -> TokenizedPrompt:
    """Return a prompt with the tokens and chunks of its media."""
    prompt = job.prompt.content
    if isinstance(prompt, Text):
        first, *others = prompt.text.split(MEDIA)
        special = prompt.parse_special
        runs = [vocabulary.tokenize(first, add_special=True, parse_special=special)]
        runs += [
            vocabulary.tokenize(text, add_special=False, parse_special=special) for text in others
        ]
        bos_count = int(vocabulary.adds_bos and not prompt.bos)
    else:
        runs = [tuple(run) for run in _split(prompt, MEDIA_ID)]
        bos_count = job.prompt.bos_count
    ids: list[int] = []
    chunks: dict[int, Chunk] = {}
    for run, parts in zip(runs, [*media, ()], strict=True):
        ids += run
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                chunks[len(ids)] = part
                ids += part.ids
    return TokenizedPrompt(tuple(ids), len(ids) - bos_count, chunks)


def _split(ids: TokenIds, at: int) -> list[list[int]]:
    runs: list[list[int]] = [[]]
    for token in ids:
        if token == at:
            runs.append([])
        else:
            runs[-1].append(token)
    return runs


def _infill(job: Generation, vocabulary: Vocabulary) -> TokenizedPrompt:
    """Return a prefix and a suffix, joined by the vocabulary's infill tokens."""
    if vocabulary.fim is None:
        raise Unsupported("suffix", ENGINE, "This model has no fill-in-the-middle tokens.")
    before, after, gap = vocabulary.fim
    prompt = job.prompt.content

    def tokenize(text: str) -> TokenIds:
        return vocabulary.tokenize(text, add_special=False, parse_special=False)

    if isinstance(prompt, Text):
        prefix = tokenize(prompt.text)
    else:
        check_ids("prompt", prompt, vocabulary.size)
        prefix = prompt
    ids = (before, *prefix, after, *tokenize(job.prompt.suffix or ""), gap)
    if not vocabulary.adds_bos:
        return TokenizedPrompt(ids, len(ids), {})
    is_own = isinstance(prompt, Text) and bool(prompt.bos)
    return TokenizedPrompt((vocabulary.bos_id, *ids), len(ids) + is_own, {})
