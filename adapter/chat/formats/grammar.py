"""GBNF for calls, so that they come as a format writes them and with arguments by their schemas."""

from __future__ import annotations

from collections.abc import Sequence
from sys import getsizeof
from typing import NamedTuple

from ....backends.base import Grammar
from ....backends.grammar import WS, as_gbnf, renamed, until
from ....backends.offload import Memo
from ....schemas import limits
from .base import ToolCallFormat
from .rules import FunctionSchema

_ANY = b'{"type":"object"}'
# Room is left for what may come before: a thought.
MAX_SIZE = limits.SCHEMA.most - 2_000
# What is not strict is left out of a grammar beyond this: each token would take longer.
WELL_FOLLOWED = 63_536


class TooLarge(Exception):
    """There are so many functions that no grammar for all of them can be followed."""


class GrammarRequest(NamedTuple):
    """What a grammar for calls is made of.

    Args:
        functions: those that may be called.
        parallel: whether there may be several calls.
        forced: whether there is nothing but calls; else the first marker begins them.
        special: markers that are tokens of the model's.
        answer: what there may be instead of calls.
    """

    form: ToolCallFormat
    functions: tuple[FunctionSchema, ...]
    parallel: bool
    forced: bool
    special: frozenset[str]
    answer: Grammar | None = None

    @property
    def size(self) -> int:
        """Characters of names and schemas."""
        own = sum(len(name) + len(schema or b"") for name, schema, _ in self.functions)
        return own + (len(self.answer.text) if self.answer is not None else 0)


_known: Memo[GrammarRequest, str] = Memo(
    16 << 20, lambda request, text: 1_024 + 4 * request.size + getsizeof(text)
)


async def prepared(request: GrammarRequest) -> str:
    """The grammar of a request, made in a thread and kept; see `grammar`."""
    return await _known.get(request, lambda: grammar(request))


def grammar(request: GrammarRequest) -> str:
    """A grammar for an answer with calls.

    Raises:
        Unenforced: a schema that is to be made sure of; the path begins with the function's place.
        InvalidGrammar: what there may be instead of calls is wrong.
        TooLarge: see there.
    """
    form, functions, parallel, forced, special, answer = request
    text = _grammar(form, functions, parallel, forced, special)
    if len(text) > WELL_FOLLOWED:
        loose = [one if one.strict else one._replace(schema=_ANY) for one in functions]
        text = _grammar(form, loose, parallel, forced, special)
    if len(text) > MAX_SIZE:
        raise TooLarge
    return text if answer is None else beside(text, as_gbnf(answer))


def _grammar(
    form: ToolCallFormat,
    functions: Sequence[FunctionSchema],
    parallel: bool,
    forced: bool,
    special: frozenset[str],
) -> str:
    rules = {"ws": WS}
    names = []
    for index, function in enumerate(functions):
        own = f"arguments-{index}"
        rules |= form.rules(function, own, f"f{index}-", index)
        rules[f"call-{index}"] = form.call(function.name, own, special)
        names.append(f"call-{index}")
    rules["call"] = " | ".join(names)
    begin, rest = form.around(parallel, special)
    if forced:
        rules["root"] = f"{begin} {rest}"
    elif begin.startswith("<"):
        rules["root"] = f"!{begin}* ({begin} {rest})?"
    else:
        rules |= until(form.begin, "free", rest, may_end=True)
        rules["root"] = "free"
    return "".join(f"{name} ::= {rule}\n" for name, rule in rules.items())


def beside(calls: str, answer: str) -> str:
    """A grammar for what is either calls or another answer; both are GBNF."""
    own = renamed(calls, "root", "calls")
    other = renamed(answer, "root", "answer")
    rules = dict.fromkeys([*own.splitlines(), *other.splitlines()])
    return "root ::= calls | answer\n" + "".join(f"{rule}\n" for rule in rules)
