"""How models write calls: a table, chosen by what a template spells."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...generation.parts import Reader
from ..calls import Calls, OneReader
from ..json_call import ARGUMENTS, NAME, CallReader
from .harmony import MARKERS, Harmony
from .mistral import ARGS, MistralReader
from .mistral import MARKER as TOOL_CALLS
from .python_tag import MARKER as PYTHON_TAG
from .python_tag import PythonTagReader
from .xml_call import FUNCTION, PARAMETER, XmlReader

Check = Callable[[str], bool]


class Format(NamedTuple):
    """A way to write calls.

    Args:
        markers: what of it may be tokens of the model's.
        begin, end: what stands around calls; none where a call is all that an answer is.
        name, arguments: the keys of a call's object.
        listed: whether a list of objects stands between the markers, or one object.
        bare: whether JSON at the beginning of an answer is a call.
        id_size: how long the ids of calls must be that the template is given, None for any.
    """

    title: str
    markers: tuple[str, ...] = ()
    begin: str = ""
    end: str = ""
    name: str = NAME
    arguments: str = ARGUMENTS[0]
    listed: bool = False
    bare: bool = False
    id_size: int | None = None

    def reader(
        self, functions: Mapping[str, Any], marks: frozenset[str], sure: bool, forced: bool
    ) -> Reader:
        """What takes calls out of an answer.

        Args:
            functions: the schemas of the arguments of those that are offered, by their names.
            marks: markers that are tokens of the model's.
            sure: whether a grammar makes calls that cannot be broken.
            forced: whether there is nothing but calls, so that the spelling of a marker is one.
        """
        marks = frozenset() if forced else marks
        check = functions.__contains__
        if self.title == "harmony":
            return Harmony(marks, check, sure)

        def make(checked: bool) -> OneReader:
            return self._one(check, checked) if self.title != "xml" else XmlReader(functions)

        begin = (PYTHON_TAG,) if self.title == "llama3" else (self.begin,) if self.begin else ()
        return Calls(make, begin, self.end, self.bare, marks, sure)

    def spelled(self, name: str) -> tuple[str, ...]:
        """How a function's name stands in a call."""
        if self.title == "xml":
            return (f"{FUNCTION}{name}>",)
        if self.title == "harmony":
            return (f"functions.{name}",)
        if self.title == "mistral-args":
            return (f"{name}{ARGS}", f"{name}[CALL_ID]")
        key = json.dumps(self.name)
        return (f'{key}: "{name}"', f'{key}:"{name}"')

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls as the model writes them; each: name and arguments."""
        objects = [
            json.dumps({self.name: name, self.arguments: arguments}, ensure_ascii=False)
            for name, arguments in calls
        ]
        if self.listed:
            return f"{self.begin}[{', '.join(objects)}]{self.end}"
        return "".join(f"{self.begin}{one}{self.end}" for one in objects)

    def _one(self, offered: Check, checked: bool) -> OneReader:
        check = offered if checked else None
        if self.title.startswith("mistral"):
            return MistralReader(check=check)

        def make() -> CallReader:
            keys = (self.arguments, *ARGUMENTS)
            return CallReader(self.name, keys, check)

        return PythonTagReader(make, offered) if self.title == "llama3" else make()


HERMES = Format("hermes", ("<tool_call>", "</tool_call>"), "<tool_call>", "</tool_call>")
FORMATS = (
    HERMES,
    Format("harmony", MARKERS),
    Format("xml", ("<tool_call>", "</tool_call>"), "<tool_call>", "</tool_call>"),
    Format("mistral", (TOOL_CALLS,), TOOL_CALLS, listed=True, id_size=9),
    Format("mistral-args", (TOOL_CALLS, ARGS), TOOL_CALLS, id_size=9),
    Format("llama3", (PYTHON_TAG,), arguments="parameters", bare=True),
    Format("tool-call-list", ("<|tool_call|>",), "<|tool_call|>", "<|/tool_call|>", listed=True),
    Format(
        "command-r7b", ("<|START_ACTION|>", "<|END_ACTION|>"), "<|START_ACTION|>",
        "<|END_ACTION|>", "tool_name", "parameters", listed=True,
    ),
    Format("bare", bare=True),
)  # fmt: skip

_BY_TITLE = {one.title: one for one in FORMATS}


def format_of(template: str) -> Format | None:
    """The way in which a template writes calls; None where it knows no tools, or another way."""

    def has(*spellings: str) -> bool:
        return all(spelling in template for spelling in spellings)

    if has("<|channel|>", "commentary", "functions."):
        return _BY_TITLE["harmony"]
    if has(TOOL_CALLS):
        return _BY_TITLE["mistral-args" if has(ARGS) else "mistral"]
    if has("<tool_call>", FUNCTION, PARAMETER):
        return _BY_TITLE["xml"]
    if has("<tool_call>") and not has("<function=") and not has("<arg_key>"):
        return HERMES if has('"name"') or has('\\"name\\"') else None
    for title in ("tool-call-list", "command-r7b"):
        if has(_BY_TITLE[title].begin, "tools"):
            return _BY_TITLE[title]
    if not has("tools", '"name"') or has("<function="):
        return None
    if has('"parameters"') and (has(PYTHON_TAG) or has("<|start_header_id|>")):
        return _BY_TITLE["llama3"]
    return _BY_TITLE["bare"] if has('"arguments"') or has('"parameters"') else None
