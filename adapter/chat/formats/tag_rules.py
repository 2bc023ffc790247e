"""GBNF for arguments in tags: the properties of a function's schema, in its order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import orjson

from ....backends.grammar import JSON, PLAIN, Unenforced, embedded, literal, modern, unmarked, until
from ..json_call import INPUT
from . import tag_json
from .rules import FunctionSchema, Path
from .tag_arguments import Argument, Arguments, Option
from .tag_ends import is_readable
from .tag_values import OTHERS, Json, Values

# The whitespace that a model may write between two tags.
LINES = "[\\n]{0,2}"
# The rule for a text and the tag after it.
_TEXT = "tag-text"
_NAME = "[a-zA-Z0-9_-]{1,64}"


class Tags(NamedTuple):
    """The texts of a format.

    Args:
        function, named: before and after the name of a function.
        key: before the name of an argument.
        text, json: after the name, for a value that is text and for JSON. They are equal if only
            the schema says how a value is written.
        value: a further tag before the value, or empty.
        value_end: after a value.
        end: after the last argument.
        lines: True if a value has lines of its own, and every tag ends its line.
    """

    function: str
    named: str
    key: str
    text: str
    json: str
    value: str
    value_end: str
    end: str
    lines: bool = False

    @property
    def gap(self) -> str:
        """The GBNF of the whitespace between tags."""
        return '"\\n"' if self.lines else LINES

    def opening(self, key: str, is_text: bool) -> str:
        """Return the GBNF of everything before a value; the key is GBNF, too."""
        value = f" {self.gap} {literal(self.value)}" if self.value else ""
        line = ' "\\n"' if self.lines else ""
        after = literal(self.text if is_text else self.json)
        return f"{literal(self.key)} {key} {after}{value}{line}"

    @property
    def after_key(self) -> tuple[str, ...]:
        """The texts that can follow a name in a call that a grammar guarantees."""
        line = "\n" if self.lines else ""
        return tuple(dict.fromkeys((self.text + line, self.json + line)))

    @property
    def is_marked(self) -> bool:
        """True if a tag says whether a value is text."""
        return self.text != self.json

    @property
    def closing(self) -> str:
        """The text after a value."""
        return f"\n{self.value_end}" if self.lines else self.value_end


NO_TAGS = Tags("", "", "", "", "", "", "", "")


def rules_of(
    tags: Tags, function: FunctionSchema, name: str, prefix: str, index: int
) -> Mapping[str, str]:
    """Return the rules for arguments in tags (`rules.arguments`)."""
    if function.input is not None:
        text = f"{prefix}text"
        opening = tags.opening(literal(INPUT), True)
        rule = f"{opening} {text} {literal(tags.closing)} {tags.gap}"
        rules = embedded(function.input, text, f"{prefix}i", PLAIN)
        return {**unmarked(rules, text, tags.closing), name: rule}
    if function.schema is None:
        return {name: '""'}
    schema = orjson.loads(function.schema)
    try:
        arguments = Arguments(modern(schema), function.strict)
        values = _Values(tags, arguments, prefix)
        options = [values.option(one) for one in arguments.options]
    except Unenforced as error:
        raise Unenforced(error.reason, (index, *error.path)) from None
    return {**values.rules, name: " | ".join(dict.fromkeys(options))}


class _Values:
    """The rules for the values of one function."""

    def __init__(self, tags: Tags, arguments: Arguments, prefix: str) -> None:
        self._tags = tags
        self._arguments = arguments
        self._prefix = prefix
        self._strict = arguments.strict
        # The names of rules for JSON: the same schema needs one rule.
        self._shared: dict[bytes, str] = {}
        self.rules: dict[str, str] = {}

    def option(self, option: Option) -> str:
        """Return GBNF for a list of arguments."""
        gap = self._tags.gap
        parts = []
        for name, argument in option.named.items():
            found = self._argument(name, argument)
            if found:
                parts.append(f"({found} {gap})" if argument.is_required else f"({found} {gap})?")
        if option.other is not False:
            other = Argument(option.other, ("additionalProperties",), False)
            values = self._arguments.values(None)
            found = self._tagged(_NAME, values, values, other)
            parts += [f"({found} {gap})*"] if found else []
        return " ".join(parts) or '""'

    def _argument(self, name: str, argument: Argument) -> str:
        """Return GBNF for an argument; empty if it cannot be written."""
        if not is_readable(name, self._tags.after_key, self._arguments.names):
            if self._strict:
                raise self._unwritable("name", name, argument.path)
            return ""
        values, argument = self._arguments.own(name, argument)
        return self._tagged(literal(name), values, self._arguments.values(name), argument)

    def _tagged(self, key: str, values: Values, read: Values, argument: Argument) -> str:
        """Return GBNF for an argument, or nothing if no value can be written.

        Args:
            key: GBNF for its name.
            values: its values.
            read: the values as which a parser reads them.
        """
        tags = self._tags
        texts = self._text(values, read)
        parts = self._json(values, argument)
        if not texts and not parts:
            if self._strict and argument.is_required:
                raise Unenforced("no value satisfies it", argument.path)
            return ""
        if tags.is_marked and texts and parts:
            return f"({tags.opening(key, True)} {texts} | {tags.opening(key, False)} {parts})"
        found = f"({texts} | {parts})" if texts and parts else texts or parts
        return f"{tags.opening(key, bool(texts))} {found}"

    def _text(self, values: Values, read: Values) -> str:
        """Return GBNF for the texts and the tag after them, or nothing."""
        closing = self._tags.closing
        if not values.may_be_text:
            return ""
        if values.texts is None:
            if values.limits and self._strict:
                path = values.limits[0]
                reason = f"'{path[-1]}' is not enforced in this model's tool-call format"
                raise Unenforced(reason, path)
            begins = "" if self._tags.is_marked else values.begins
            self.rules |= until(closing, _TEXT, "")
            return self._not_begun(begins) if begins else _TEXT
        known = list(read.texts or ()) if self._tags.is_marked else read.apart(closing)
        found = []
        for text, path in values.texts.items():
            if text in known and is_readable(text, (closing,), known):
                found.append(literal(text))
            elif self._strict:
                raise self._unwritable("value", text, path)
        return f"({' | '.join(found)}) {literal(closing)}" if found else ""

    def _not_begun(self, begins: str) -> str:
        """Return the name of a rule for text that does not begin with one of some characters.

        It does not begin with a blank either.
        """
        closing = self._tags.closing
        first = closing[0]
        name = f"{_TEXT}-no-{begins.encode().hex()}"
        outside = "".join(f"\\x{ord(one):02x}" for one in dict.fromkeys(f" \t\r\n{begins}{first}"))
        options = [f"[^{outside}] {_TEXT}"]
        options.append(literal(closing) if first.isspace() else f"{literal(first)} {_TEXT}-1")
        self.rules[name] = " | ".join(options)
        return name

    def _json(self, values: Values, argument: Argument) -> str:
        """Return GBNF for the values that are JSON and the tag after them, or nothing."""
        parts = []
        if not values.may_be_text:
            if values.is_none:
                return ""
            parts.append(self._rule(Json(argument.schema, argument.path, OTHERS)))
        else:
            # Any text is also all JSON without limits, where no tag says what is text.
            is_apart = self._tags.is_marked or values.texts is not None
            if is_apart and values.plain:
                plain = {"type": sorted(values.plain)}
                parts.append(self._rule(Json(plain, argument.path, values.plain)))
            parts += [self._rule(one) for one in values.ruled]
            if is_apart:
                parts += [literal(JSON.written(one)) for one in values.listed]
        closing = literal(self._tags.closing)
        return f"({' | '.join(dict.fromkeys(parts))}) {closing}" if parts else ""

    def _rule(self, part: Json) -> str:
        """Return the name of a rule for JSON."""
        key = orjson.dumps(part.schema, option=orjson.OPT_SORT_KEYS)
        if key not in self._shared:
            own = self._shared[key] = f"{self._prefix}value-{len(self._shared)}"
            self.rules |= tag_json.rules_of(
                part, own, f"{own}-", self._arguments.root, self._strict
            )
        return self._shared[key]

    def _unwritable(self, what: str, text: str, path: Path) -> Unenforced:
        reason = f"this model's tool-call format cannot express the {what} '{text:.100}'"
        return Unenforced(reason, path)
