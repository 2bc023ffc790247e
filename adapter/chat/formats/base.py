"""A tool call format: an object that detects it, and parses, constrains and writes its calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from sys import getsizeof
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import orjson
from typing_extensions import override

from ....backends.base import Grammar, Preamble
from ....backends.grammar import as_gbnf
from ....backends.grammar.dialects import modern
from ....backends.grammar.gbnf import UnsupportedSchema
from ....backends.grammar.lark import embedded
from ....backends.grammar.notation import JSON, WS, Notation
from ....backends.grammar.preamble import renamed, token_or_text, until
from ....backends.grammar.regex import PLAIN, literal
from ....backends.grammar.schema import rules_of
from ....backends.grammar.unmarked import unmarked
from ....backends.offload import Memo
from ....schemas import limits
from ...generation.choice import Parser
from ..parsers import ARGUMENTS, INPUT, NAME, CallParser, ToolCallParser

Path: TypeAlias = tuple[str | int, ...]

GAP = "[ \\n]{0,2}"
# Keywords of schemas that allow no arguments if `properties` and `required` are empty.
_OF_NONE = {
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "description", "examples",
    "properties", "required", "strict", "title", "type",
}  # fmt: skip
# Keywords to remove from a schema one by one; each removal reads the whole schema again.
MOST_TAKEN_AWAY = 32
# The characters of an input's grammar, up to which it is repeated for another kind of quotes.
_MOST_TWICE = 16_000
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionSchema(NamedTuple):
    """A function, and the schema of its arguments.

    Args:
        schema: the JSON schema of the arguments; None if the function has no arguments.
        strict: True if the whole schema must be enforced. Otherwise keywords that a grammar cannot
            enforce are dropped, or the whole schema if the grammar would be too large.
        input: the grammar of the text that a custom tool takes; its schema has one argument.
    """

    name: str
    schema: bytes | None
    strict: bool
    input: Grammar | None = None


def marker(text: str, special: frozenset[str]) -> str:
    """Return the GBNF of a marker: one token of the model, or its spelling."""
    return token_or_text(text, Preamble("", "", False, special))


def argument_rules(
    function: FunctionSchema, name: str, prefix: str, index: int, notation: Notation = JSON
) -> Mapping[str, str]:
    """Return the rules for arguments as an object.

    Args:
        name: the name of the main rule; names of the others begin with the prefix.
        index: the index of the function, for errors.
        notation: the way to write the object.

    Raises:
        UnsupportedSchema: a strict schema cannot be enforced.
    """
    if function.input is not None:
        return _input(function.input, name, prefix, notation)
    schema = _NO_ARGUMENTS if function.schema is None else orjson.loads(function.schema)
    # Keywords that cannot be enforced may still allow arguments.
    may_be_none = isinstance(schema, dict) and schema.keys() <= _OF_NONE
    if function.strict:
        try:
            return rules_of(_as_object(schema, may_be_none), name, prefix, notation)
        except UnsupportedSchema as error:
            raise UnsupportedSchema(error.reason, (index, *error.path)) from None
    # Remove what cannot be enforced, until the rest can be. The paths are those of a modern schema.
    schema = modern(schema)
    for _ in range(MOST_TAKEN_AWAY):
        try:
            return rules_of(_as_object(schema, may_be_none), name, prefix, notation)
        except UnsupportedSchema as error:
            if not without(schema, error.path):
                break
    return rules_of({"type": "object"}, name, prefix, notation)


def _input(grammar: Grammar, name: str, prefix: str, notation: Notation) -> Mapping[str, str]:
    """Return the rules for the arguments of a custom tool, whose text follows a grammar."""
    quote, text = notation.quote, f"{prefix}text"
    encoding = PLAIN if notation.end else notation.encoding
    rules = embedded(grammar, text, f"{prefix}i", encoding)
    if notation.end:
        rules = unmarked(rules, text, notation.end)
    given = f"{quote} {text} {quote}"
    if notation.other is not None and sum(map(len, rules.values())) <= _MOST_TWICE:
        quote, encoding = notation.other
        rules |= embedded(grammar, f"{text}-other", f"{prefix}o", encoding)
        given = f"({given} | {quote} {text}-other {quote})"
    key, ws = notation.named(INPUT), notation.ws
    first, last = notation.brackets
    rules[name] = f'{first} {ws} {key} {ws} "{notation.colon}" {ws} {given} {ws} {last}'
    return rules


def _as_object(schema: Any, may_be_none: bool) -> Any:
    """Require an object in a schema, and an empty one if it may be and names no properties."""
    if not isinstance(schema, dict):
        return schema
    if may_be_none and schema.get("properties") == {} and not schema.get("required"):
        schema = {**schema, "additionalProperties": False}
    return {"type": "object", **schema}


def without(schema: Any, path: Sequence[str | int], exactly: bool = False) -> bool:
    """Remove the keyword at a path, or the nearest before it; return True if one was removed.

    Of the required names, only the one at the path is removed. A path may continue through the
    target of a reference, which is elsewhere in the schema.

    Args:
        exactly: True if only the keyword at the path itself may be removed.
    """
    nearest: tuple[Any, str | int] | None = None
    before: str | int = ""
    for key in path:
        if isinstance(schema, dict) and isinstance(key, str) and key in schema:
            nearest = schema, key
        elif not isinstance(schema, list) or not isinstance(key, int) or key >= len(schema):
            nearest = None if exactly else nearest
            break
        elif before == "required":
            nearest = schema, key
        schema, before = schema[key], key
    if nearest is None:
        return False
    del nearest[0][nearest[1]]
    return True


Check: TypeAlias = Callable[[str], bool]
# A text of a template, a pattern, or several texts of which one is enough.
TemplatePattern: TypeAlias = str | re.Pattern[str] | tuple[str, ...]


class CallPosition(NamedTuple):
    """An earlier call of a conversation.

    Args:
        name: the name of its function.
        in_conversation: the number of calls before it.
        in_message: the same, counted in its own message.
    """

    name: str
    in_conversation: int
    in_message: int


def as_json(value: Any) -> str:
    """Write a value as JSON, with characters of every script."""
    return json.dumps(value, ensure_ascii=False)


def named_arguments(arguments: Any) -> Mapping[str, Any]:
    """Return arguments as an object; those of an earlier call may be another value."""
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}


def _has(template: str, pattern: TemplatePattern) -> bool:
    if isinstance(pattern, str):
        return pattern in template
    if isinstance(pattern, re.Pattern):
        return pattern.search(template) is not None
    return any(one in template for one in pattern)


@dataclass(frozen=True, eq=False)
class ToolCallFormat:
    """Tool calls as JSON objects, between markers or alone; subclasses implement other formats.

    Args:
        begin, end: the markers around calls; empty if the whole answer is a call.
        name, arguments: the keys of a call's object.
        tokens: the strings of the format that can be tokens of the model, if not `begin` and `end`.
        patterns: what chat templates with such calls contain, if not `usual_patterns`.
        absent: what they do not contain.
        block: `list` if a list of calls in brackets is between the markers, `section` if several
            calls are, one after another; empty if only one is.
        is_tight: True if calls follow the first marker directly, and end with the last one.
        bare: True if JSON at the beginning of an answer is a call.
        optional_begin: the marker that a call may follow, if `begin` is empty.
        call_parser: makes a parser of the text after a marker, for other calls than objects.
        notation: the notation of the arguments.
        id_size: the length of call ids that the template requires; None for any.
        answer: the text before the answer, if a turn of the model has several messages.
        recipient: the same text, if an answer always begins with it.
        reasons: True if such a message can be reasoning.
        in_order: True if the template takes the results of calls in the order of the calls.
        preface: Jinja to put before a template that shows calls, but no tools.
        again: see `ToolCallParser`.
        interrupts: True if the token that begins calls also ends reasoning that has no end tag.
    """

    title: str
    begin: str = ""
    end: str = ""
    name: str = NAME
    arguments: str = ARGUMENTS[0]
    _: KW_ONLY
    tokens: tuple[str, ...] = ()
    patterns: tuple[TemplatePattern, ...] = ()
    absent: tuple[TemplatePattern, ...] = ()
    block: Literal["", "list", "section"] = ""
    is_tight: bool = False
    bare: bool = False
    optional_begin: str = ""
    call_parser: Callable[[Check | None], CallParser] | None = None
    notation: Notation = JSON
    id_size: int | None = None
    answer: str = ""
    recipient: str = ""
    reasons: bool = False
    in_order: bool = False
    preface: str = ""
    again: str = ""
    interrupts: bool = False
    # The class of the parser that separates calls from content.
    calls: ClassVar[type[ToolCallParser]] = ToolCallParser
    # GBNF for what may be between the calls of a section.
    gap: ClassVar[str] = GAP

    def matches(self, template: str) -> bool:
        """Return True if a chat template has calls in this format."""
        patterns = self.patterns or self.usual_patterns
        return all(_has(template, one) for one in patterns) and not any(
            _has(template, one) for one in self.absent
        )

    @property
    def usual_patterns(self) -> tuple[TemplatePattern, ...]:
        """The patterns of a format that names none."""
        return self.begin, "tools"

    def parser(
        self, functions: Mapping[str, Any], special: frozenset[str], enforced: bool, forced: bool
    ) -> Parser:
        """Return a parser that separates the calls in an answer from its content.

        Args:
            functions: the schemas of the offered functions' arguments, by function name.
            special: the markers that are tokens of the model.
            enforced: True if a grammar guarantees valid calls.
            forced: True if the answer has only calls, so that text with the spelling of a marker
                is the marker.
        """
        check = functions.__contains__

        def make(checked: bool) -> CallParser:
            return self.make_parser(functions, check if checked else None)

        own = frozenset() if forced else special
        return self.calls(
            make, self.openers, self.end, self.bare, own, enforced, self.markers, self.again, forced
        )

    @property
    def markers(self) -> tuple[str, ...]:
        """The strings of the format that can be tokens of the model."""
        return self.tokens or tuple(one for one in (self.begin, self.end) if one)

    @property
    def openers(self) -> tuple[str, ...]:
        """The markers that can begin a call."""
        begin = self.begin or self.optional_begin
        return (begin,) if begin else ()

    def make_parser(self, functions: Mapping[str, Any], check: Check | None) -> CallParser:
        """Return a parser of the text after a marker.

        Args:
            check: returns True if a function is offered; None if a grammar guarantees it.
        """
        if self.call_parser is not None:
            return self.call_parser(check)
        return CallParser(check, self.name, (self.arguments, *ARGUMENTS))

    def call_id(self, call_id: str, place: CallPosition) -> str:
        """Return the id that the template gets for an earlier call and its result."""
        if self.id_size is None:
            return call_id
        letters = "".join(one for one in call_id if one.isascii() and one.isalnum())
        return letters[-self.id_size :].rjust(self.id_size, "0")

    def name_spellings(self, name: str) -> tuple[str, ...]:
        """Return the forms in which a function's name can appear in a call."""
        key = json.dumps(self.name)
        return (f'{key}: "{name}"', f'{key}:"{name}"')

    def render(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Write calls, each a name and arguments, as the model does."""
        each = [self.write(name, given, index) for index, (name, given) in enumerate(calls)]
        if self.block == "list":
            return f"{self.begin}[{', '.join(each)}]{self.end}"
        if self.block == "section":
            return f"{self.begin}{''.join(each)}{self.end}"
        return "".join(f"{self.begin}{one}{self.end}" for one in each)

    def write(self, name: str, arguments: Any, index: int) -> str:
        """Write the call with an index, without the markers around it."""
        return as_json({self.name: name, self.arguments: arguments})

    def rules(
        self, function: FunctionSchema, name: str, prefix: str, index: int
    ) -> Mapping[str, str]:
        """Return GBNF rules for a function's arguments (`argument_rules`)."""
        return argument_rules(function, name, prefix, index, self.notation)

    def call(self, name: str, arguments: str, special: frozenset[str]) -> str:
        """Return the GBNF of one call, without the markers around it.

        Args:
            arguments: the name of the rule for its arguments.
        """
        keys = [f'{literal(json.dumps(key))} ws ":" ws' for key in (self.name, self.arguments)]
        own = literal(json.dumps(name))
        return f'"{{" ws {keys[0]} {own} ws "," ws {keys[1]} {arguments} ws "}}"'

    def envelope(self, parallel: bool, special: frozenset[str]) -> tuple[str, str]:
        """Return the GBNF of the marker that begins calls, and of everything after it."""
        if not self.begin:
            return "".join(f"{marker(one, special)}?" for one in self.openers), "call"
        begin = marker(self.begin, special)
        gap = self.gap if self.block == "section" else GAP
        end = f" {gap} {marker(self.end, special)}" if self.end else ""
        if self.block == "list":
            more = f' ({GAP} "," {GAP} call)*' if parallel else ""
            return begin, f'{GAP} "[" {GAP} call{more} {GAP} "]"{end}'
        if self.block == "section":
            more = f" ({gap} call)*" if parallel else ""
            return begin, f"{gap} call{more}{end}"
        call = "call" if self.is_tight else f"{GAP} call{end}"
        more = f" ({GAP} {begin} {call})*" if parallel else ""
        return begin, f"{call}{more}"


@dataclass(frozen=True, eq=False)
class NamedFormat(ToolCallFormat):
    """Calls as a name and arguments.

    Args:
        head: the text before the arguments, with `{}` for the name.
        spellings: forms of the name and of text next to it; by default the head.
        write_arguments: writes arguments in the notation.
    """

    head: str = "{}"
    spellings: tuple[str, ...] = ()
    write_arguments: Callable[[Any], str] = as_json

    @override
    def name_spellings(self, name: str) -> tuple[str, ...]:
        return tuple(one.replace("{}", name) for one in self.spellings or (self.head,))

    @override
    def write(self, name: str, arguments: Any, index: int) -> str:
        return f"{self.head.replace('{}', name)}{self.write_arguments(arguments)}"

    @override
    def call(self, name: str, arguments: str, special: frozenset[str]) -> str:
        before, _, after = self.head.partition("{}")
        parts = [literal(before + name), marker(after, special) if after else "", arguments]
        if self.is_tight and self.end:
            parts.append(marker(self.end, special))
        return " ".join(one for one in parts if one)


_ANY = b'{"type":"object"}'
# Leaves room for a preamble: the reasoning before the calls.
MAX_SIZE = limits.SCHEMA.maximum - 2_000
# Beyond this size, the largest schemas that are not strict are dropped: each token would take
# longer.
WELL_FOLLOWED = 63_536


class TooLarge(Exception):
    """An error for functions whose grammar is larger than `MAX_SIZE`."""


class GrammarRequest(NamedTuple):
    """The input of a grammar for tool calls.

    Args:
        functions: the functions that may be called.
        parallel: True if several calls are allowed.
        forced: True if only calls are allowed; otherwise they begin with the first marker.
        special: the markers that are tokens of the model.
        answer: the grammar of an answer that is allowed instead of calls, or None.
    """

    form: ToolCallFormat
    functions: tuple[FunctionSchema, ...]
    parallel: bool
    forced: bool
    special: frozenset[str]
    answer: Grammar | None = None

    @property
    def size(self) -> int:
        """The total length of the names, the schemas and the answer's grammar."""
        own = sum(
            len(name) + len(schema or b"") + len(text.text if text is not None else "")
            for name, schema, _, text in self.functions
        )
        return own + (len(self.answer.text) if self.answer is not None else 0)


_known: Memo[GrammarRequest, str] = Memo(
    16 << 20, lambda request, text: 1_024 + 4 * request.size + getsizeof(text)
)


async def prepared_grammar(request: GrammarRequest) -> str:
    """Return the grammar of a request from a cache, or make it in a thread; see `grammar`."""
    return await _known.get(request, lambda: grammar(request))


def grammar(request: GrammarRequest) -> str:
    """Return a grammar for an answer with calls.

    Raises:
        UnsupportedSchema: a strict schema cannot be enforced; the path begins with the function's
            index.
        InvalidGrammar: the grammar of the answer is invalid.
        TooLarge: the grammar is larger than `MAX_SIZE`.
    """
    text = _grammar(request)
    if len(text) > WELL_FOLLOWED:
        text = _grammar(_loosened(request, len(text) - WELL_FOLLOWED))
    if len(text) > MAX_SIZE:
        raise TooLarge
    if request.answer is None:
        return text
    return beside(text, as_gbnf(request.answer), request.form.recipient)


def _loosened(request: GrammarRequest, excess: int) -> GrammarRequest:
    """Return the request without the largest schemas, as far as they are not strict.

    Args:
        excess: the number of characters by which their grammar is too long.
    """

    def size(function: FunctionSchema) -> int:
        rules = request.form.rules(function, "arguments-0", "f0-", 0)
        return sum(len(name) + len(rule) + len(" ::= \n") for name, rule in rules.items())

    any_size = size(FunctionSchema("", _ANY, False))
    loose = list(request.functions)
    sizes = {index: size(one) for index, one in enumerate(loose) if not one.strict}
    for index in sorted(sizes, key=lambda index: -sizes[index]):
        if excess <= 0:
            break
        excess -= sizes[index] - any_size
        loose[index] = loose[index]._replace(schema=_ANY)
    return request._replace(functions=tuple(loose))


def _grammar(request: GrammarRequest) -> str:
    form, special = request.form, request.special
    rules = {"ws": WS}
    names = []
    for index, function in enumerate(request.functions):
        own = f"arguments-{index}"
        rules |= form.rules(function, own, f"f{index}-", index)
        rules[f"call-{index}"] = form.call(function.name, own, special)
        names.append(f"call-{index}")
    rules["call"] = " | ".join(names)
    begin, rest = form.envelope(request.parallel, special)
    if request.forced:
        rules["root"] = f"{begin} {rest}"
    elif begin.startswith("<"):
        rules["root"] = f"!{begin}* ({begin} {rest})?"
    else:
        rules |= until(form.begin, "free", rest, may_end=True)
        rules["root"] = "free"
    return "".join(f"{name} ::= {rule}\n" for name, rule in rules.items())


def beside(calls: str, answer: str, recipient: str = "") -> str:
    """Return a grammar that allows either calls or another answer; both are GBNF.

    Args:
        recipient: see `ToolCallFormat`.
    """
    own = renamed(calls, "root", "calls")
    other = renamed(answer, "root", "answer")
    rules = dict.fromkeys([*own.splitlines(), *other.splitlines()])
    before = f"{literal(recipient)} " if recipient else ""
    return f"root ::= calls | {before}answer\n" + "".join(f"{rule}\n" for rule in rules)
