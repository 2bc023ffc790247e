"""Messages to a prompt in which their content is text, whatever it spells.

Who writes `<|im_end|>` into a message must not end it. Where no content spells a control token the
rendered prompt stays one string. Where one does, its spelling is rendered as a private-use
character, so that a template that trims or compares still behaves; the prompt is then cut at the
template's own control tokens, and what stands between two of them is tokenised by itself, as text,
if it holds such a character.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ...backends import offload
from ...backends.base import MEDIA, MEDIA_ID, Backend, Content, Model, Special, Text, TokenIds
from ...backends.errors import EngineUnavailable
from ...schemas import limits
from ..errors import InvalidRequest
from .templates import Conversation

# Breaks a spelling where an engine cannot be given plain text.
BREAK = "\u200b"
_PRIVATE = range(0xE000, 0xF8FF)
# What control tokens are spelled with: without it no vocabulary needs to be read.
LIKELY = re.compile(r"[<\[｜]")
# Control tokens that are looked at in one turn of the event loop.
MARKS_AT_ONCE = 500
# Words of OpenAI's rather than of somebody's: templates compare them, so they stay as they are.
_OWN_WORDS = frozenset(
    {
        "assistant", "content", "custom", "developer", "function", "id", "name", "object", "role",
        "system", "tool", "tool_call_id", "tool_calls", "type", "user",
    }
)  # fmt: skip


class Rendered(NamedTuple):
    """A prompt of a conversation.

    Args:
        text: what it says; a private-use character stands for each control token that a message
            spells, where the prompt is ids.
        bos_count: how many of its ids are a BOS.
        changed: whether content had to be changed for it.
    """

    prompt: Content
    text: str
    bos_count: int = 0
    changed: bool = False

    @classmethod
    def of(cls, text: str, changed: bool = False) -> Rendered:
        """A prompt that is one text."""
        return cls(Text(text), text, 0, changed)


async def prompt_of(
    model: Model,
    conversation: Conversation,
    backend: Backend,
    render: Callable[[Conversation], str],
    has_media: bool = False,
    size: int = 0,
) -> Rendered:
    """The prompt of a chat, in which nothing but the template's own control tokens is one.

    Args:
        render: makes the prompt of a conversation.
        has_media: whether `MEDIA` in the prompt stands for pictures or sounds.
        size: bytes of the request's body.
    """
    plain = (
        _rendered_if_plain(conversation, render)
        if size <= offload.SMALL
        else await offload.run(size, _rendered_if_plain, conversation, render)
    )
    if plain is not None:
        return Rendered.of(plain)
    specials = await _special_tokens_of(backend, model)
    spelled = await offload.run(size, _spelled, conversation, specials.pattern)
    if not spelled:
        return Rendered.of(await offload.run(size, render, conversation))
    capabilities = backend.capabilities
    as_text = has_media and not capabilities.media_among_ids
    if as_text or not capabilities.plain_text:
        broken = {spelling: spelling[0] + BREAK + spelling[1:] for spelling in spelled}
        conversation = await offload.run(size, _replaced, conversation, specials.pattern, broken)
        return Rendered.of(await offload.run(size, render, conversation), True)
    spelled_as = await offload.run(size, _hidden, conversation, spelled)
    conversation = await offload.run(size, _replaced, conversation, specials.pattern, spelled_as)
    text = await offload.run(size, render, conversation)
    spellings = {character: spelling for spelling, character in spelled_as.items()}
    bos = await backend.tokenize("", add_special=True, parse_special=True)
    ids = await _Cutter(backend, specials, spellings, has_media).ids(text)
    return Rendered(bos + ids, text, len(bos))


def _rendered_if_plain(
    conversation: Conversation, render: Callable[[Conversation], str]
) -> str | None:
    """The prompt of a conversation, None where it holds what control tokens are spelled with."""
    return None if _may_spell(conversation) else render(conversation)


def _may_spell(conversation: Conversation) -> bool:
    return LIKELY.search("\n".join(_texts(conversation))) is not None


def _spelled(conversation: Conversation, pattern: re.Pattern[str]) -> set[str]:
    """The control tokens that somebody's words spell."""
    return {found for text in _texts(conversation) for found in pattern.findall(text)}


def _hidden(conversation: Conversation, spelled: Iterable[str]) -> dict[str, str]:
    """A private-use character for each spelling, which nothing in the conversation has."""
    used = set().union(*(set(text) for text in _texts(conversation)))
    free = (chr(code) for code in _PRIVATE if chr(code) not in used)
    return dict(zip(sorted(spelled), free, strict=False))


def _texts(conversation: Conversation) -> list[str]:
    """Every string that somebody may have written, in no order."""
    found: list[str] = []
    todo: list[Any] = [part for part in conversation.values() if part]
    while todo:
        one = todo.pop()
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, dict):
            for key, inner in one.items():
                found.append(key)
                # Most values are words: they need no turn of their own.
                if isinstance(inner, str):
                    found.append(inner)
                elif inner:
                    todo.append(inner)
        elif isinstance(one, list | tuple):
            todo += one
    return found


def _replaced(value: Any, pattern: re.Pattern[str], by: Mapping[str, str]) -> Any:
    """The same with other spellings in every string."""
    if isinstance(value, str):
        return value if value in _OWN_WORDS else pattern.sub(lambda match: by[match[0]], value)
    if isinstance(value, Mapping):
        return {
            _replaced(key, pattern, by): _replaced(inner, pattern, by)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replaced(inner, pattern, by) for inner in value]
    return value


async def spellings_of(backend: Backend, model: Model) -> frozenset[str]:
    """What the model's tokeniser takes for one token, wherever it stands."""
    return (await _special_tokens_of(backend, model)).spellings


class _SpecialTokens:
    """What a model's tokeniser takes for one token, and what that does to the blanks beside it."""

    def __init__(self, specials: Sequence[Special], model: Model) -> None:
        self.fingerprint = model.fingerprint
        self.added = frozenset(one.spelling for one in specials if not one.control)
        self.spellings = frozenset(one.spelling for one in specials)
        # The longest first, as the tokeniser looks for them.
        longest = sorted(self.spellings, key=lambda text: (-len(text), text))
        self.pattern = re.compile("|".join(map(re.escape, longest)) or r"(?!)")
        self._strips: dict[str, tuple[bool, bool]] = {}

    async def strips(self, mark: str, backend: Backend) -> tuple[bool, bool]:
        """Whether a control token takes away the blanks before it, and those behind it."""
        found = self._strips.get(mark)
        if found is None:

            async def ids(text: str) -> TokenIds:
                return await backend.tokenize(text, add_special=False, parse_special=True)

            alone = await ids(f"x{mark}x")
            found = (await ids(f"x\n \n{mark}x") == alone, await ids(f"x{mark}\n \nx") == alone)
            self._strips[mark] = found
        return found


_known: WeakKeyDictionary[Any, _SpecialTokens] = WeakKeyDictionary()


async def _special_tokens_of(backend: Backend, model: Model) -> _SpecialTokens:
    found = _known.get(backend)
    if found is None or found.fingerprint != model.fingerprint:
        specials = await backend.specials()
        if (await backend.model()).fingerprint != model.fingerprint:
            raise EngineUnavailable("The engine serves another model now; ask again.")
        # Some vocabularies have a thousand; their expression takes its time to compile.
        found = await offload.run(64 * len(specials), _SpecialTokens, specials, model)
        _known[backend] = found
    return found


class _Cutter:
    """Cuts a rendered prompt at its control tokens, and tokenises it piece by piece.

    Args:
        spellings: what the private-use characters stand for.
        has_media: whether `MEDIA` stands for pictures or sounds.
    """

    def __init__(
        self,
        backend: Backend,
        specials: _SpecialTokens,
        spellings: Mapping[str, str],
        has_media: bool = False,
    ) -> None:
        self._has_media = has_media
        self._backend = backend
        self._specials = specials
        self._spellings = spellings
        self._private = re.compile("|".join(spellings))
        self._pieces = 0

    async def ids(self, text: str) -> TokenIds:
        """The ids of a prompt; the template's control tokens and nothing else are some."""
        specials = await offload.run(len(text), self._found, text)
        found: list[TokenIds] = []
        clean, start, before = "", 0, ""
        for index, mark in enumerate(specials):
            if index % MARKS_AT_ONCE == MARKS_AT_ONCE - 1:
                await asyncio.sleep(0)
            run = text[start : mark.start() if mark is not None else len(text)]
            after = mark[0] if mark is not None else ""
            if self._private.search(run):
                found.append(await self._tokenized(clean, True))
                found += await self._plain(run, before, after)
                clean = after
            else:
                clean += run + after
            start, before = mark.end() if mark is not None else len(text), after
        found.append(await self._tokenized(clean, True))
        return await offload.run(sum(map(len, found)), _joined, found)

    def _found(self, text: str) -> list[re.Match[str] | None]:
        """The template's control tokens, and the end."""
        return [*self._specials.pattern.finditer(text), None]

    async def _plain(self, run: str, before: str, after: str) -> list[TokenIds]:
        """The ids of a run of text with its spellings back, between two control tokens."""
        if before and (await self._specials.strips(before, self._backend))[1]:
            run = run.lstrip()
        if after and (await self._specials.strips(after, self._backend))[0]:
            run = run.rstrip()
        first, *others = await offload.run(len(run), self._spelled, run)
        self._count(1 + len(others))
        return [
            await self._tokenized(first, False),
            *[await self._continued(part) for part in others],
        ]

    def _count(self, pieces: int) -> None:
        """Refuse what would come to more questions than a request may ask."""
        self._pieces += pieces
        if self._pieces > limits.SPELLED.most:
            raise InvalidRequest(
                "Invalid 'messages': they spell the model's control tokens too often: their text "
                f"comes to more than {limits.SPELLED.most} pieces. Spell them less often, or in "
                "fewer messages.",
                "messages",
                "string_above_max_length",
            )

    def _spelled(self, run: str) -> list[str]:
        """A run of text with its spellings back, in pieces that are tokenised by themselves."""
        parts: list[list[str]] = [[]]
        position = 0
        for match in self._private.finditer(run):
            spelling = self._spellings[match[0]]
            parts[-1].append(run[position : match.start()])
            if spelling in self._specials.added:
                # Such a token is found even in plain text: it must not be whole in any piece.
                parts[-1].append(spelling[0])
                parts.append([spelling[1:]])
            else:
                parts[-1].append(spelling)
            position = match.end()
        parts[-1].append(run[position:])
        return ["".join(part) for part in parts]

    async def _continued(self, text: str) -> TokenIds:
        """Text that goes on from other text: without the space that is put before a beginning."""
        line = await self._tokenized("\n", False)
        both = await self._tokenized(f"\n{text}", False)
        if both[: len(line)] == line:
            return both[len(line) :]
        return await self._tokenized(text, False)

    async def _tokenized(self, text: str, parse_special: bool) -> TokenIds:
        if not self._has_media:
            return await self._ids(text, parse_special)
        ids: list[int] = []
        parts = text.split(MEDIA)
        for index, part in enumerate(parts):
            ids += (MEDIA_ID,) if index else ()
            ids += await self._ids(part, parse_special)
        return tuple(ids)

    async def _ids(self, text: str, parse_special: bool) -> TokenIds:
        if not text:
            return ()
        # In process nothing else here would let others have their turn.
        await asyncio.sleep(0)
        return await self._backend.tokenize(text, add_special=False, parse_special=parse_special)


def _joined(runs: Sequence[TokenIds]) -> TokenIds:
    return tuple(chain.from_iterable(runs))
