"""GBNF for tool calls: the syntax of a format, and arguments that match their schemas."""

from __future__ import annotations

from sys import getsizeof
from typing import NamedTuple

from ....backends.base import Grammar
from ....backends.grammar import WS, as_gbnf, literal, renamed, until
from ....backends.offload import Memo
from ....schemas import limits
from .base import FunctionSchema, ToolCallFormat

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


async def prepared(request: GrammarRequest) -> str:
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
