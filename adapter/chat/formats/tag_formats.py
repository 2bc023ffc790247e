"""Tool calls as tags: one for the function, and one or two for each argument."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import orjson
from typing_extensions import override

from ....backends.grammar.dialects import modern
from ....backends.grammar.regex import literal
from ..parsers import LONGEST_NAME, NAME_BYTES, Bytes, CallParser, ParseFailed, Steps
from .base import Check, FunctionSchema, TemplatePattern, ToolCallFormat, as_json, named_arguments
from .tag_schemas import LINES, Arguments, Tags, Values, end_of, rules_of

# The longest name of an argument that no schema lists, in bytes.
_LONGEST = 256
_QUOTE, _BACKSLASH = b'"\\'

Text: TypeAlias = Generator[None, int, bytes]


class _Marks(NamedTuple):
    """The texts of `Tags` in bytes."""

    function: bytes
    named: bytes
    key: bytes
    text: bytes
    json: bytes
    value: bytes
    value_end: bytes
    end: bytes


class TagParser(CallParser):
    """A parser of functions with their arguments; an argument is returned when it is complete.

    Args:
        functions: the schemas of the offered functions' arguments, by function name.
        last: the marker after several calls; empty if one call follows a marker.
        enforced: True if a grammar guarantees valid calls.
    """

    def __init__(self, tags: Tags, functions: Mapping[str, Any], last: str, enforced: bool) -> None:
        self._tags = _Marks(*(getattr(tags, name).encode() for name in _Marks._fields))
        self._lines = tags.lines
        self._functions = functions
        self._read: dict[str, Arguments] = {}
        self._last = last.encode()
        self._enforced = enforced
        super().__init__(functions.__contains__)

    def _run(self) -> Steps:
        yield from self._marker(self._tags.function)
        while True:
            yield from self._function()
            if not self._last:
                return
            # The marker after the last call may be missing.
            self._may_end = True
            if (yield from self._marker(self._tags.function, self._last)) == self._last:
                return

    def _function(self) -> Steps:
        tags = self._tags
        name = (yield from self._word()).decode()
        yield from self._exactly(tags.named)
        self._begin(name)
        if name not in self._read:
            self._read[name] = Arguments(modern(self._functions[name]))
        arguments = self._read[name]
        keys: set[str] = set()
        while (yield from self._marker(tags.key, tags.end)) == tags.key:
            key, is_text = yield from self._key([one.encode() for one in arguments.names])
            yield from self._marker(tags.value)
            value = yield from self._value_of(arguments.values(key), is_text)
            if key in keys:
                # Where the schema names no properties, the grammar allows one twice.
                if not self._enforced:
                    raise ParseFailed
                continue
            before = b"," if keys else b"{"
            self._put("arguments", before + orjson.dumps(key) + b":" + value)
            keys.add(key)
        self._put("arguments", b"}" if keys else b"{}")
        self._settle()

    def _word(self) -> Text:
        """Parse the name of a function, which ends at the first byte that no name has."""
        name = bytearray()
        byte = yield from self._next()
        while byte in NAME_BYTES and len(name) < LONGEST_NAME:
            name.append(byte)
            byte = yield
        self._peeked = byte
        return bytes(name)

    def _key(self, known: Sequence[bytes]) -> Generator[None, int, tuple[str, bool | None]]:
        """Parse the name of an argument and the tag after it.

        Return the name, and True if the value is text, False if it is JSON, and None if only the
        schema says it.
        """
        tags = self._tags
        # A line break after the tag is a part of it, where names can contain the tag.
        line = b"\n" if self._lines and self._enforced else b""
        ends = [tags.text + line, tags.json + line]
        most = max(_LONGEST, *(len(one) for one in known)) if known else _LONGEST
        text = bytearray()
        end = None
        while end is None:
            text.append((yield))
            end = end_of(bytes(text), ends, known)
            if len(text) > most + len(ends[0]) + len(ends[1]):
                raise ParseFailed
        if line:
            self._peeked = line[0]
        key = bytes(text[: -len(end)])
        if key not in known:
            key = key.strip()
            if not key:
                raise ParseFailed
        is_text = None if tags.text == tags.json else end == ends[0]
        return key.decode(errors="replace"), is_text

    def _exactly(self, text: bytes) -> Steps:
        """Parse a text without whitespace before it."""
        for one in text:
            if (yield from self._byte()) != one:
                raise ParseFailed

    def _value_of(self, values: Values, is_text: bool | None) -> Text:
        """Parse a value and the tag after it, and return the value as JSON.

        Args:
            is_text: True for text and False for JSON; None if only the schema says it.
        """
        end = self._tags.value_end
        if not self._enforced:
            raw = yield from self._text(end, ())
            if self._lines:
                raw = raw.removeprefix(b"\n").removesuffix(b"\n")
        else:
            if self._lines:
                # A text can contain the tag after it, unless it is at the beginning of a line.
                yield from self._exactly(b"\n")
                end = b"\n" + end
            raw = yield from self._enforced_value(end, values, is_text)
        text = raw.decode(errors="replace")
        if is_text or (is_text is None and values.is_text):
            return orjson.dumps(text)
        return self._as_json(text, values, is_text is None)

    def _enforced_value(self, end: bytes, values: Values, is_text: bool | None) -> Text:
        """Parse a value that a grammar guarantees."""
        if is_text is None and not values.may_be_text:
            is_text = False
        if is_text is None:
            first = self._peeked = yield
            if chr(first) in values.opens:
                is_text = False
        if is_text is False:
            return (yield from self._json(end))
        texts = values.apart(end.decode()) if is_text is None else values.texts or ()
        return (yield from self._text(end, [one.encode() for one in texts]))

    def _text(self, end: bytes, known: Sequence[bytes]) -> Text:
        """Parse up to a mark, which only known texts can contain."""
        text = bytearray()
        while not text.endswith(end) or end_of(bytes(text), [end], known) is None:
            text.append((yield from self._byte()))
        return bytes(text.removesuffix(end))

    def _json(self, end: bytes) -> Text:
        """Parse JSON up to a mark, which strings in it can contain."""
        text = bytearray()
        quoted = escaped = False
        while quoted or not text.endswith(end):
            byte = yield from self._byte()
            text.append(byte)
            if byte == _QUOTE and not escaped:
                quoted = not quoted
            escaped = quoted and byte == _BACKSLASH and not escaped
        return bytes(text.removesuffix(end))

    def _byte(self) -> Bytes:
        byte, self._peeked = self._peeked, None
        return byte if byte is not None else (yield)

    def _as_json(self, text: str, values: Values, is_either: bool) -> bytes:
        """Return a value as JSON.

        Args:
            is_either: True if a text is not marked as one.
        """
        try:
            orjson.loads(text)
        except orjson.JSONDecodeError:
            # A model without a grammar writes JSON with small mistakes, which its reader may know.
            if self._enforced or values.may_be_text or values.ruled or values.listed:
                return orjson.dumps(text)
            raise ParseFailed from None
        if is_either and values.may_be_text and not values.has(text):
            return orjson.dumps(text)
        return text.strip().encode()


@dataclass(frozen=True, eq=False)
class Tagged(ToolCallFormat):
    """A format with tags. A value is text as it is, or JSON: the schema says which, or the tag.

    Args:
        tags: the texts of a call.
    """

    tags: Tags = field(kw_only=True)
    gap = LINES

    @property
    @override
    def usual_patterns(self) -> tuple[TemplatePattern, ...]:
        tags = self.tags
        return self.begin, tags.function, tags.key, tags.value

    @override
    def make_parser(self, functions: Mapping[str, Any], check: Check | None) -> CallParser:
        return TagParser(self.tags, functions, self.end if self.block else "", check is None)

    @override
    def name_spellings(self, name: str) -> tuple[str, ...]:
        return (f"{self.tags.function or self.begin}{name}{self.tags.named}",)

    @override
    def render(self, calls: Sequence[tuple[str, Any]]) -> str:
        each = [self.write(name, given, index) for index, (name, given) in enumerate(calls)]
        if self.block:
            return "\n".join([self.begin, *each, self.end])
        if self.is_tight:
            return "\n".join(f"{self.begin}{one}" for one in each)
        return "\n".join(f"{self.begin}\n{one}\n{self.end}" for one in each)

    @override
    def write(self, name: str, arguments: Any, index: int) -> str:
        tags = self.tags
        line = "\n" if tags.lines else ""
        lines = [f"{tags.function}{name}{tags.named}"]
        for key, value in named_arguments(arguments).items():
            is_text = isinstance(value, str)
            text = value if is_text else as_json(value)
            if tags.value:
                lines.append(f"{tags.key}{key}{tags.text}")
                lines.append(f"{tags.value}{text}{tags.value_end}")
            else:
                after = tags.text if is_text else tags.json
                lines.append(f"{tags.key}{key}{after}{line}{text}{line}{tags.value_end}")
        return "\n".join([*lines, tags.end])

    @override
    def rules(
        self, function: FunctionSchema, name: str, prefix: str, index: int
    ) -> Mapping[str, str]:
        return rules_of(self.tags, function, name, prefix, index)

    @override
    def call(self, name: str, arguments: str, special: frozenset[str]) -> str:
        tags = self.tags
        begin = literal(f"{tags.function}{name}{tags.named}")
        return f"{begin} {tags.gap} {arguments} {literal(tags.end)}"
