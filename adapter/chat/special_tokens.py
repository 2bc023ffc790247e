"""Render prompts in which message content is text, even if it spells control tokens.

A client that writes `<|im_end|>` into a message must not end the message. If no content spells a
control token, the rendered prompt stays one string. Otherwise each such spelling is rendered as a
private-use character, so that a template that trims or compares content still works. The prompt is
then split at the template's own control tokens. A piece between two of them that contains such a
character is tokenized separately, as plain text.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ...backends import offload
from ...backends.base import MEDIA, MEDIA_ID, Backend, Content, Model, Special, Text, TokenIds
from ...backends.errors import COUNTED, EngineUnavailable
from ...backends.spellings import Spellings
from ...schemas import limits
from ..errors import wrong_value
from .instruct import InstructFormat
from .reasoning import Framed
from .templates import Conversation, render

# Breaks a spelling if the engine cannot tokenize plain text.
BREAK = "\u200b"
_PRIVATE = range(0xE000, 0xF8FF)
# Characters of control tokens: text without them needs no check against the vocabulary.
LIKELY = re.compile(r"[<\[｜]")
# Characters that are looked at in one step, because a step holds the interpreter lock.
_PIECE = 65_536
# Words of OpenAI's API. Templates compare them, so they are never replaced.
_OWN_WORDS = frozenset(
    {
        "assistant", "content", "custom", "developer", "function", "id", "name", "object", "role",
        "system", "tool", "tool_call_id", "tool_calls", "type", "user",
    }
)  # fmt: skip


class Rendered(NamedTuple):
    """The prompt of a conversation.

    Args:
        text: the prompt as text; if the prompt is ids, a private-use character replaces each
            control token that a message spells.
        bos_count: the number of BOS ids at the start of the prompt.
        changed: True if content had to be changed.
    """

    prompt: Content
    text: str
    bos_count: int = 0
    changed: bool = False

    @classmethod
    def of(cls, text: str, changed: bool = False) -> Rendered:
        """Make a prompt of one text."""
        return cls(Text(text), text, 0, changed)


async def prompt_of(
    model: Model,
    conversation: Conversation,
    backend: Backend,
    form: InstructFormat | None = None,
    has_media: bool = False,
    size: int = 0,
    check: Callable[[int, int], None] | None = None,
) -> Rendered:
    """Return the prompt of a chat, in which only the template's control tokens count as such.

    Args:
        form: the instruct format to use instead of the model's template, or None.
        has_media: True if `MEDIA` in the prompt is the placeholder of an image or audio.
        size: size of the request body in bytes.
        check: a function to reject a text that cannot fit, before it is tokenized; its arguments
            are the text's number of characters and the length of the longest token in bytes.
    """
    if size <= offload.SMALL:
        plain = _rendered_if_plain(model, conversation, form)
    else:
        plain = await offload.run(size, _rendered_if_plain, model, conversation, form)
    if plain is not None:
        return Rendered(Text(plain), plain)
    shown = partial(render, model, form=form)
    specials = await _special_tokens_of(backend, model)
    spelled = await offload.run(size, _spelled, conversation, specials.known)
    if not spelled:
        return Rendered.of(await offload.run(size, shown, conversation))
    capabilities = backend.capabilities
    spelled_as: dict[str, str] = {}
    if capabilities.plain_text and (capabilities.media_among_ids or not has_media):
        spelled_as = await offload.run(size, _hidden, conversation, spelled)
    if len(spelled_as) < len(spelled):
        # The engine takes text only, or the conversation has too many private-use characters.
        broken = {spelling: spelling[0] + BREAK + spelling[1:] for spelling in spelled}
        conversation = await offload.run(size, _replaced, conversation, specials.known, broken)
        return Rendered.of(await offload.run(size, shown, conversation), True)
    conversation = await offload.run(size, _replaced, conversation, specials.known, spelled_as)
    text = await offload.run(size, shown, conversation)
    if check is not None:
        check(len(text), limits.TOKEN_SIZE.maximum)
        if len(text) > COUNTED:
            check(len(text), specials.longest)
    spellings = {character: spelling for spelling, character in spelled_as.items()}
    bos = await backend.tokenize("", add_special=True, parse_special=True)
    ids = await _Cutter(backend, specials, spellings, has_media).ids(text, bos)
    return Rendered(ids, text, len(bos))


async def as_ids(prompt: Rendered, backend: Backend, has_media: bool) -> Rendered:
    """Return a prompt as token ids, those which the engine makes of its text."""
    if not isinstance(prompt.prompt, Text):
        return prompt
    bos = await backend.tokenize("", add_special=True, parse_special=True)
    ids = await tokenized(prompt.text, backend, True, has_media)
    return prompt._replace(prompt=bos + ids, bos_count=len(bos))


async def tokenized(
    text: str, backend: Backend, parse_special: bool, has_media: bool = False
) -> TokenIds:
    """Return the ids of a part of a prompt, with `MEDIA_ID` for each `MEDIA`."""
    parts = text.split(MEDIA) if has_media else [text]
    found: list[TokenIds] = []
    for index, part in enumerate(parts):
        if index:
            found.append((MEDIA_ID,))
        if part:
            # With an engine in process, nothing else here yields to the event loop.
            await asyncio.sleep(0)
            ids = await backend.tokenize(part, add_special=False, parse_special=parse_special)
            found.append(ids)
    if len(found) == 1:
        return found[0]
    return await offload.run(len(text), lambda: tuple(chain.from_iterable(found)))


def _rendered_if_plain(
    model: Model, conversation: Conversation, form: InstructFormat | None
) -> str | None:
    """Render a conversation; return None if it contains characters of control tokens."""
    text = "\n".join(_texts(conversation))
    steps = range(0, len(text), _PIECE)
    is_plain = not any(LIKELY.search(text, start, start + _PIECE) for start in steps)
    return render(model, conversation, form) if is_plain else None


def _spelled(conversation: Conversation, known: Spellings[str]) -> set[str]:
    return {match[0] for text in _texts(conversation) for match in known.matches(text)}


def _hidden(conversation: Conversation, spelled: Iterable[str]) -> dict[str, str]:
    """Map each spelling to a private-use character that the conversation does not contain.

    Spellings for which no such character is left are missing.
    """
    used: set[str] = set()
    for text in _texts(conversation):
        for start in range(0, len(text), _PIECE):
            used.update(text[start : start + _PIECE])
    free = (chr(code) for code in _PRIVATE if chr(code) not in used)
    return dict(zip(sorted(spelled), free, strict=False))


def _texts(conversation: Conversation) -> list[str]:
    """Return every string that a client may have written, in no particular order."""
    found: list[str] = []
    todo: list[Any] = [*filter(None, conversation.values())]
    while todo:
        one = todo.pop()
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, dict):
            for key, inner in one.items():
                found.append(key)
                # Most values are strings, which need no iteration of their own.
                if isinstance(inner, Framed):
                    found += inner.parts
                elif isinstance(inner, str):
                    found.append(inner)
                elif inner:
                    todo.append(inner)
        elif isinstance(one, list | tuple):
            todo += one
    return found


def _replaced(value: Any, known: Spellings[str], by: Mapping[str, str]) -> Any:
    """Return a value with the spellings in all of its strings replaced."""
    if isinstance(value, Framed):
        reasoning, answer = (_replaced(part, known, by) for part in value.parts)
        return f"{value.tags.begin}{reasoning}{value.tags.end}{answer}"
    if isinstance(value, str):
        return value if value in _OWN_WORDS else _text_replaced(value, known, by)
    if isinstance(value, Mapping):
        return {
            _replaced(key, known, by): _replaced(inner, known, by) for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replaced(inner, known, by) for inner in value]
    return value


def _text_replaced(text: str, known: Spellings[str], by: Mapping[str, str]) -> str:
    parts: list[str] = []
    end = 0
    for match in known.matches(text):
        parts += (text[end : match.start()], by[match[0]])
        end = match.end()
    return "".join([*parts, text[end:]]) if parts else text


async def spellings_of(backend: Backend, model: Model) -> frozenset[str]:
    """Return the spellings that the model's tokenizer reads as one token in any text."""
    return (await _special_tokens_of(backend, model)).spellings


class _SpecialTokens:
    """The special tokens of a model, and their effect on adjacent whitespace."""

    def __init__(
        self, specials: Sequence[Special], model: Model, pieces: Sequence[bytes] | None
    ) -> None:
        self.fingerprint = model.fingerprint
        self.added = frozenset(one.spelling for one in specials if not one.control)
        self.spellings = frozenset(one.spelling for one in specials)
        self.known = Spellings(self.spellings)
        # The length of the longest token at most, in bytes.
        self.longest = limits.TOKEN_SIZE.maximum
        if pieces is not None:
            own = (len(spelling.encode()) for spelling in self.spellings)
            self.longest = max(chain(map(len, pieces), own))
        self._strips: dict[str, tuple[bool, bool]] = {}

    async def strips(self, mark: str, backend: Backend) -> tuple[bool, bool]:
        """Return two flags: a control token strips whitespace before it, and after it."""
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
        specials, pieces = await backend.special_tokens(), await backend.token_bytes()
        if (await backend.model()).fingerprint != model.fingerprint:
            raise EngineUnavailable("The engine has loaded another model. Send the request again.")
        # Some vocabularies have hundreds of special tokens, which are slow to compile.
        found = await offload.run(offload.UNKNOWN, _SpecialTokens, specials, model, pieces)
        _known[backend] = found
    return found


class _Run(NamedTuple):
    """A part of a prompt.

    Args:
        clean: text without private-use characters.
        text: the text after it, up to the next control token, with such characters.
        before, after: the control tokens around `text`, or empty.
    """

    clean: str
    text: str = ""
    before: str = ""
    after: str = ""


class _Cutter:
    """A tokenizer of rendered prompts that splits them at their control tokens.

    Args:
        spellings: the control token for each private-use character.
        has_media: True if `MEDIA` is the placeholder of an image or audio.
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
        self._pieces = 0

    async def ids(self, text: str, bos: TokenIds = ()) -> TokenIds:
        """Return the ids of a prompt; only the template's control tokens are parsed as such.

        Args:
            bos: the ids to put in front.
        """
        found: list[Iterable[int]] = [bos]
        for run in await offload.run(len(text), self._runs, text):
            found.append(await self._tokenized(run.clean, True))
            found += await self._plain(run)
        return await offload.run(len(text), lambda: tuple(chain.from_iterable(found)))

    @cached_property
    def _private(self) -> Spellings[str]:
        return Spellings(self._spellings)

    def _runs(self, text: str) -> list[_Run]:
        """Divide a prompt; the text of the last run is empty."""
        found: list[_Run] = []
        clean, start, before = 0, 0, ""
        for mark in chain(self._specials.known.matches(text), [None]):
            end, after = (len(text), "") if mark is None else (mark.start(), mark[0])
            if next(self._private.matches(text, start, end), None) is not None:
                found.append(_Run(text[clean:start], text[start:end], before, after))
                clean = end
            if mark is not None:
                start, before = mark.end(), after
        return [*found, _Run(text[clean:])]

    async def _plain(self, run: _Run) -> list[Iterable[int]]:
        """Return the ids of text between two control tokens, with its spellings restored."""
        if not run.text:
            return []
        before, after = run.before, run.after
        strips_start = bool(before) and (await self._specials.strips(before, self._backend))[1]
        strips_end = bool(after) and (await self._specials.strips(after, self._backend))[0]

        def pieces() -> list[str]:
            text = run.text.lstrip() if strips_start else run.text
            first, *others = self._spelled(text.rstrip() if strips_end else text)
            return [first, *(f"\n{part}" for part in others)]

        first, *others = await offload.run(len(run.text), pieces)
        self._count(1 + len(others))
        return [
            await self._tokenized(first, False),
            *[await self._continued(part) for part in others],
        ]

    def _count(self, pieces: int) -> None:
        """Count pieces of text; reject a request that has too many of them."""
        self._pieces += pieces
        if self._pieces > limits.SPELLED.maximum:
            raise wrong_value(
                "messages",
                f"they contain too many control tokens as text; at most {limits.SPELLED.maximum} "
                "pieces are allowed. Remove some of them, or send fewer messages.",
                "string_above_max_length",
            )

    def _spelled(self, run: str) -> list[str]:
        """Restore the spellings in a text; return the pieces to tokenize separately."""
        parts: list[list[str]] = [[]]
        position = 0
        for match in self._private.matches(run):
            spelling = self._spellings[match[0]]
            parts[-1].append(run[position : match.start()])
            if spelling in self._specials.added:
                # The tokenizer finds an added token even in plain text, so divide its spelling.
                parts[-1].append(spelling[0])
                parts.append([spelling[1:]])
            else:
                parts[-1].append(spelling)
            position = match.end()
        parts[-1].append(run[position:])
        return ["".join(part) for part in parts]

    async def _continued(self, text: str) -> Iterable[int]:
        """Return the ids of text that continues other text, without a space from the tokenizer.

        Args:
            text: a line break, which has no ids in the result, and the text.
        """
        line = await self._tokenized("\n", False)
        both = await self._tokenized(text, False)
        if both[: len(line)] == line:
            return islice(both, len(line), None)
        return await self._tokenized(text[1:], False)

    async def _tokenized(self, text: str, parse_special: bool) -> TokenIds:
        return await tokenized(text, self._backend, parse_special, self._has_media)
