"""Grammars over a model's vocabulary: the tokens that may come next.

llama.cpp matches GBNF (src/llama-grammar.cpp), and schemas and regular expressions that come after
a preamble. llguidance matches all other schemas and regular expressions, and Lark.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import re
from collections.abc import Mapping
from decimal import Decimal
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import llama_cpp
import llguidance
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from ...schemas.limits import COPIES, ITEMS, MULTIPLE, PROPERTIES, TRIAL, TRIAL_MEMORY
from .. import offload, sandbox
from ..base import Grammar
from ..errors import EngineError, shortened
from ..grammar import check_length, gbnf, gbnf_of, in_request
from ..grammar.dialects import NAMED, VALUES
from ..grammar.gbnf import UnsupportedSchema
from ..grammar.regex import repetitions
from ..grammar.schema import path_to, target_of
from ..offload import DeepThreads, FairThreads, Memo
from .grammar_trial import STACK
from .options import SHUT_DOWN
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# The size of the cache of compiled grammars in bytes. A rule takes some dozens of bytes for each of
# its characters, and a matcher over a vocabulary some hundred thousand bytes.
_CACHED = 64 << 20
_LIMITS: Mapping[str, Any] = {
    # OpenAI allows 5,000 properties, and each optional one takes four items.
    "max_items_in_row": 20_000,
    # A step blocks all other choices. Over a vocabulary of bytes it takes one or two milliseconds
    # with this fuel, and 17 with llguidance's default, which is ten times as much.
    "step_lexer_fuel": 20_000,
}
LIMITS = llguidance.LLParserLimits(**_LIMITS)
# Keywords that have taken llguidance minutes: intersections, multiples, regular expressions.
_HARD = re.compile(r'"(?:pattern|patternProperties|multipleOf|allOf)"')
# llama.cpp's rule for JSON (common/json-schema-to-grammar.cpp), because a model that may write
# unlimited whitespace sometimes does.
_JSON: JsonCompileOptions = {"whitespace_pattern": r" |\n[ \t]{0,20}"}
_TOO_MANY_PARTS = f"its repetitions expand to more than {ITEMS.maximum} items"
# Keywords that llguidance ignores next to a reference; next to any other it merges copies.
_ANNOTATIONS = frozenset(
    {
        "$anchor", "$defs", "definitions", "$schema", "$id", "id", "$comment", "title",
        "description", "default", "readOnly", "writeOnly", "examples", "contentMediaType",
        "contentEncoding",
    }
)  # fmt: skip
# A regular expression in Lark; without a closing slash it extends to the end of the line.
_EXPRESSION = re.compile(r"/((?:[^/\\\n]|\\.)*+)")
# A number with as many digits as those that a double rounds, and the last integer of those that
# it keeps.
_LONG, _EXACT = re.compile("[0-9]{16}"), 2**53
_KEYS = re.compile(r'Unimplemented keys: \["([^"]+)"')
# The position of an error in llguidance's own format, in which most grammars are a single line.
_PLACE = re.compile(r"^at 1\(\d+\): ")


_SCRIPT = Path(__file__).with_name("grammar_trial.py")
# The number of trials that run in parallel: a slow one must not block the others.
AT_ONCE = 4
# The real time that a trial may take as a multiple of its CPU time, because other processes use the
# CPU as well.
PATIENCE = 4
# The size of the cache of results in bytes.
_KEPT = 1 << 20


class Constraint(Protocol):
    """The position of a choice in a grammar."""

    def allows(self, token: int) -> bool:
        """Return True if a token may come next; an end token may if the grammar is complete."""
        ...

    def allowed(self) -> NDArray[np.bool_]:
        """Return `allows` for every token, shape (vocabulary,); much slower than for one."""
        ...

    def accept(self, token: int) -> None:
        """Advance past a token, which must be allowed."""
        ...

    def copy(self) -> Constraint:
        """Return an independent constraint at the same position."""
        ...


class LimitExceeded(Exception):
    """A grammar that exceeded llguidance's limits during generation."""


class Gbnf(Constraint):
    """llama.cpp's grammar sampler; freed with its last reference."""

    def __init__(self, pointer: object, candidates: Candidates) -> None:
        self._pointer = pointer
        self._candidates = candidates

    def __del__(self) -> None:
        llama_cpp.llama_sampler_free(self._pointer)

    @override
    def allows(self, token: int) -> bool:
        # The grammar sets the logits of tokens that are not allowed to minus infinity.
        data = llama_cpp.llama_token_data(token, 0.0, 0.0)
        array = llama_cpp.llama_token_data_array(ctypes.pointer(data), 1, -1, False)
        llama_cpp.llama_sampler_apply(self._pointer, ctypes.byref(array))
        return bool(data.logit == 0.0)

    @override
    def allowed(self) -> NDArray[np.bool_]:
        self._candidates.fill(0.0)
        self._candidates.apply(self._pointer)
        possible: NDArray[np.bool_] = self._candidates.entries["logit"] == 0.0
        return possible

    @override
    def accept(self, token: int) -> None:
        """llama.cpp aborts at a token that is not allowed."""
        llama_cpp.llama_sampler_accept(self._pointer, token)

    @override
    def copy(self) -> Gbnf:
        return Gbnf(llama_cpp.llama_sampler_clone(self._pointer), self._candidates)


class Guidance(Constraint):
    """llguidance's matcher."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    @override
    def allows(self, token: int) -> bool:
        if self._matcher.is_stopped():
            return not self._matcher.is_error() and token in self._vocabulary.ends
        return self._matcher.validate_tokens([token]) == 1

    @override
    def allowed(self) -> NDArray[np.bool_]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little")[: self._vocabulary.size].astype(np.bool_)

    @override
    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    @override
    def copy(self) -> Guidance:
        return Guidance(self._matcher.deep_copy(), self._vocabulary)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise LimitExceeded(_reason(self._matcher.get_error()))


class Candidates:
    """A token array for llama.cpp's samplers; threads must not share one."""

    def __init__(self, size: int) -> None:
        self.entries = np.zeros(size, [("id", np.int32), ("logit", np.float32), ("p", np.float32)])
        self._ids = np.arange(size, dtype=np.int32)
        self._data = ctypes.cast(
            self.entries.ctypes.data, ctypes.POINTER(llama_cpp.llama_token_data)
        )
        self._array: Any = llama_cpp.llama_token_data_array(self._data)
        self._reference = ctypes.byref(self._array)

    def fill(
        self, logits: NDArray[np.float32] | float, allowed: NDArray[np.bool_] | None = None
    ) -> int:
        """Fill the array with every token, or the allowed ones, and return their number."""
        ids = self._ids if allowed is None else np.flatnonzero(allowed)
        entries = self.entries[: len(ids)]
        entries["id"] = ids
        entries["logit"] = logits if allowed is None else np.asarray(logits)[ids]
        entries["p"] = 0.0
        # A sampler may have moved the pointer: XTC moves it past the most likely tokens.
        self._array.data = self._data
        self._array.size = len(ids)
        self._array.selected = -1
        self._array.sorted = False
        return len(ids)

    def apply(self, sampler: object) -> None:
        """Run a sampler, or a chain of them, over the tokens."""
        llama_cpp.llama_sampler_apply(sampler, self._reference)

    @property
    def selected(self) -> int | None:
        """The token that the sampler selected; None without one, or if its logit is -inf."""
        index = self._array.selected
        if not 0 <= index < self._array.size:
            return None
        entry = self._array.data[index]
        return int(entry.id) if entry.logit > -np.inf else None


class GrammarTrials:
    """Trial compilations in processes with limits (`grammar_trial`), cached by the grammar's text.

    Args:
        limits: the arguments of `llguidance.LLParserLimits`.
        seconds: the CPU time that a trial may take.
    """

    def __init__(self, limits: Mapping[str, int], seconds: int = TRIAL.maximum) -> None:
        self._limits = json.dumps(limits)
        self._seconds = seconds
        # These threads only wait for processes.
        self._threads = FairThreads(AT_ONCE, "latimer-grammar-trials")
        self._tried: Memo[str, bool] = Memo(_KEPT, lambda text, _: 64 + len(text), self._threads)

    async def check(self, text: str) -> None:
        """Check that a grammar in llguidance's own format compiles within the limits.

        Raises:
            WrongGrammar: the grammar takes too much time or memory.
        """
        if not await self._tried.get(text, lambda: self._can_compile(text)):
            raise gbnf.WrongGrammar(
                f"it takes more than {self._seconds} s or {TRIAL_MEMORY.maximum} MiB to compile; "
                "use fewer or smaller intersections, repetitions and multiples"
            )

    def close(self) -> None:
        """Cancel trials that have not started, and forget all results."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._tried.clear()

    def _can_compile(self, text: str) -> bool:
        memory = (TRIAL_MEMORY.maximum << 20) + STACK
        wait = PATIENCE * self._seconds
        try:
            ended = sandbox.run(
                _SCRIPT, text.encode(), self._limits, cpu=self._seconds, memory=memory, wait=wait
            )
        except OSError:
            # No process can be started, so the grammar is accepted without a trial.
            return True
        return ended.status == 0


class Grammars:
    """A compiler of grammars with a thread of its own, and a cache of the most recent ones."""

    def __init__(self, vocabulary: Vocabulary, candidates: Candidates) -> None:
        self._vocabulary = vocabulary
        self._candidates = candidates
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._executor = DeepThreads(1, "latimer-grammars")
        self._compiled: Memo[Grammar, Constraint] = Memo(_CACHED, _size, self._executor)
        self._trials = GrammarTrials(_LIMITS)
        self._is_closed = False

    async def compile(self, grammar: Grammar) -> Constraint:
        """Return a constraint at the start of a grammar; copy it before advancing.

        Raises:
            InvalidGrammar: the grammar is wrong, or too large; the message says where.
            EngineError: the engine was shut down before the compilation.
        """
        key = grammar._replace(param="")
        known = self._compiled.known(key)
        if known is not None:
            return known
        try:
            if key.kind == "gbnf" or key.after is not None:
                return await self._compiled.get(key, lambda: self._gbnf(key))
            text, is_hard = await offload.run(len(key.text), _checked, key)
            if text is None:
                return await self._compiled.get(key, lambda: self._gbnf(key))
            if is_hard:
                await self._trials.check(text)
            return await self._compiled.get(key, lambda: self._guidance(key, text))
        except (UnsupportedSchema, gbnf.WrongGrammar) as error:
            raise in_request(error, grammar) from None
        except (asyncio.CancelledError, RuntimeError):
            task = asyncio.current_task()
            if not self._is_closed or (task is not None and task.cancelling()):
                raise
            # The compilation was cancelled, and not the request; or no other one can begin.
            raise EngineError(SHUT_DOWN) from None

    def close(self) -> None:
        """Stop the thread, after the compilation that it is running."""
        self._is_closed = True
        self._trials.close()
        self._executor.shutdown(cancel_futures=True)
        self._compiled.clear()

    def _guidance(self, grammar: Grammar, text: str) -> Guidance:
        """Return llguidance's matcher for a grammar; `text` is in llguidance's own format."""
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self._vocabulary)
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        if matcher.is_error():
            reason = _reason(matcher.get_error())
            found = _KEYS.search(reason) if grammar.kind == "json_schema" else None
            path = None if found is None else path_to(json.loads(grammar.text), found[1])
            if found is not None and path is not None:
                raise UnsupportedSchema(f"'{shortened(found[1])}' cannot be enforced", path)
            raise gbnf.WrongGrammar(reason)
        return Guidance(matcher, self._vocabulary)

    def _gbnf(self, grammar: Grammar) -> Gbnf:
        if grammar.kind == "lark":
            raise gbnf.WrongGrammar("Lark is not supported after reasoning; send GBNF")
        text = gbnf_of(grammar, self._piece)
        for spelling in gbnf.tokens(text):
            if not self._is_token(spelling):
                raise gbnf.WrongGrammar(f"'{shortened(spelling)}' is not one token of this model")
        # Nobody would free a pointer that work had when it was abandoned.
        with offload.shielded():
            pointer = llama_cpp.llama_sampler_init_grammar(
                self._vocabulary.pointer, text.encode(), b"root"
            )
            if pointer:
                return Gbnf(pointer, self._candidates)
        raise gbnf.WrongGrammar("llama.cpp cannot read it")

    def _piece(self, spelling: str) -> str:
        if not spelling.startswith("<["):
            return spelling
        number = int(spelling[2:-2])
        known = number < self._vocabulary.size
        return self._vocabulary.token(number)[0].decode(errors="replace") if known else ""

    def _is_token(self, spelling: str) -> bool:
        if spelling.startswith("<["):
            return int(spelling[2:-2]) < self._vocabulary.size
        ids = self._vocabulary.tokenize(spelling, add_special=False, parse_special=True)
        return len(ids) == 1


def _is_hard(grammar: Grammar) -> bool:
    """Return True if llguidance may take long to compile a grammar."""
    return grammar.kind != "json_schema" or _HARD.search(grammar.text) is not None


def _checked(grammar: Grammar) -> tuple[str | None, bool]:
    """Return a grammar in llguidance's own format, and True if it has to be tried first.

    Its size is checked; most errors are found only on compilation. There is no text if llguidance
    would change the values of a schema, which GBNF does not.

    Raises:
        UnsupportedSchema: a schema exceeds a limit.
        WrongGrammar: the grammar is malformed, or too large.
    """
    check_length(grammar)
    expressions = [grammar.text] if grammar.kind == "regex" else []
    if grammar.kind == "lark":
        expressions = _EXPRESSION.findall(grammar.text)
    if sum(map(repetitions, expressions)) > ITEMS.maximum:
        raise gbnf.WrongGrammar(_TOO_MANY_PARTS)
    is_hard = _is_hard(grammar)
    if grammar.kind == "json_schema":
        schema = json.loads(grammar.text)
        _check_schema(schema)
        if _LONG.search(grammar.text) and _has_inexact(schema):
            return None, False
        is_hard = _check_copies(schema) or is_hard
    try:
        if grammar.kind == "json_schema":
            text = llguidance.LLMatcher.grammar_from_json_schema(grammar.text, defaults=_JSON)
        elif grammar.kind == "regex":
            text = llguidance.LLMatcher.grammar_from_regex(grammar.text)
        else:
            text = llguidance.LLMatcher.grammar_from_lark(grammar.text)
    except ValueError as error:
        raise gbnf.WrongGrammar(_reason(str(error))) from None
    return text, is_hard


def _check_schema(schema: Any) -> None:
    """Reject a schema with more properties, parts or multiples than llguidance handles quickly.

    llguidance keeps a state for each remainder of a multiple. It combines several `multipleOf` into
    their least common multiple.
    """
    common, properties, parts = 1, 0, 0
    todo: list[tuple[Any, tuple[str | int, ...]]] = [(schema, ())]
    while todo:
        value, path = todo.pop()
        if isinstance(value, list):
            todo += [(inner, (*path, place)) for place, inner in enumerate(value)]
        elif isinstance(value, dict):
            own, others = value.get("properties"), _unlisted(value)
            properties += (len(own) if isinstance(own, dict) else 0) + others
            if properties > PROPERTIES.maximum:
                reason = f"the schema has more than {PROPERTIES.maximum} properties"
                if others:
                    reason += ", with the names that only 'required' has; use fewer"
                raise UnsupportedSchema(reason, (*path, "required" if others else "properties"))
            expression = value.get("pattern")
            if isinstance(expression, str):
                parts += repetitions(expression)
                if parts > ITEMS.maximum:
                    raise UnsupportedSchema(_TOO_MANY_PARTS, (*path, "pattern"))
            step = value.get("multipleOf")
            if isinstance(step, int | float) and step > 0:
                digits = int("".join(map(str, Decimal(repr(step)).normalize().as_tuple().digits)))
                common = lcm(common, digits)
                if common > MULTIPLE.maximum:
                    reason = f"'multipleOf' is enforced up to {MULTIPLE.maximum}"
                    raise UnsupportedSchema(reason, (*path, "multipleOf"))
            todo += [(inner, (*path, key)) for key, inner in value.items()]


def _has_inexact(schema: Any) -> bool:
    """Return True if a listed value has an integer that llguidance may round to a double."""
    # True for what is a part of listed values.
    todo: list[tuple[Any, bool]] = [(schema, False)]
    while todo:
        value, is_listed = todo.pop()
        if isinstance(value, list):
            todo += [(inner, is_listed) for inner in value]
        elif isinstance(value, dict):
            todo += [(one, is_listed or key in ("const", "enum")) for key, one in value.items()]
        elif is_listed and isinstance(value, int) and abs(value) > _EXACT:
            return True
    return False


def _unlisted(schema: dict[str, Any]) -> int:
    """Return the number of required names without a property, which llguidance compiles as one."""
    names, own = schema.get("required"), schema.get("properties")
    if not isinstance(names, list):
        return 0
    listed = own if isinstance(own, dict) else {}
    return sum(isinstance(name, str) and name not in listed for name in names)


def _check_copies(schema: Any) -> bool:
    """Reject a schema of which llguidance would make too many copies.

    It compiles a reference once, except next to other keywords: there it merges a copy of the
    target, and 26 definitions with two such references each become 67 million schemas.

    Returns:
        True if copies that merge with each other could be too many.
    """
    if "$ref" not in json.dumps(schema):
        return False
    _check_circles(schema)
    if _copies(schema, all_in_copies=False) > COPIES.maximum:
        reason = f"its references next to other keywords need more than {COPIES.maximum} copies"
        raise UnsupportedSchema(f"{reason}; use fewer of them, or references alone")
    return _copies(schema, all_in_copies=True) > COPIES.maximum


def _check_circles(schema: Any) -> None:
    """Reject references that only follow each other, for which llguidance finds no token."""
    ending: set[str] = set()
    todo: list[tuple[Any, tuple[str | int, ...]]] = [(schema, ())]
    while todo:
        value, path = todo.pop()
        if isinstance(value, list):
            todo += [(inner, (*path, place)) for place, inner in enumerate(value)]
        elif isinstance(value, dict):
            followed: set[str] = set()
            at: Any = value
            while isinstance(at, dict) and isinstance(target := at.get("$ref"), str):
                if target in followed:
                    raise UnsupportedSchema("'$ref' is circular", (*path, "$ref"))
                if target in ending:
                    break
                followed.add(target)
                at = _target(schema, target)
            ending |= followed
            # Nothing may need a definition.
            others = value.keys() - VALUES - {"$defs", "definitions"}
            todo += [(value[key], (*path, key)) for key in others]


def _copies(schema: Any, all_in_copies: bool) -> int:
    """Return the number of schemas in copies; beyond the limit, any larger number.

    Args:
        all_in_copies: True to copy the targets of all references in copies, as if each merged with
            another.
    """
    count = 0
    targets: dict[str, Any] = {}
    compiled: set[str] = set()
    # Schemas, or lists of them; True in a copy; True where they merge; and the open references.
    todo: list[tuple[Any, bool, bool, frozenset[str]]] = [(schema, False, False, frozenset())]
    while todo and count <= COPIES.maximum:
        value, is_copy, merges, around = todo.pop()
        if isinstance(value, list):
            todo += [(one, is_copy, merges, around) for one in value]
        if not isinstance(value, dict):
            continue
        count += 1 + _unlisted(value) if is_copy else 0
        merges = merges or len(value.keys() - _ANNOTATIONS) > 1
        target = value.get("$ref")
        if isinstance(target, str):
            copies = merges or (is_copy and all_in_copies)
            if target not in targets:
                targets[target] = _target(schema, target)
            if copies and target in around and all_in_copies:
                return COPIES.maximum + 1
            if target not in (around if copies else compiled):
                compiled |= set() if copies else {target}
                inside = around | {target} if copies else frozenset()
                todo.append((targets[target], copies, copies, inside))
        for key, inner in value.items():
            if key in NAMED and isinstance(inner, dict):
                todo += [(one, is_copy, False, around) for one in inner.values()]
            elif key in ("allOf", "anyOf", "oneOf"):
                todo.append((inner, is_copy, merges, around))
            elif key not in VALUES and key not in ("$defs", "definitions"):
                todo.append((inner, is_copy, False, around))
    return count


def _target(schema: Any, reference: str) -> Any:
    """Return the target of a reference; True if llguidance has to report that there is none."""
    try:
        return target_of(schema, reference, ())
    except UnsupportedSchema:
        return True


def _size(grammar: Grammar, _compiled: Constraint) -> int:
    return (2 << 20 if _is_hard(grammar) else 256 << 10) + 64 * len(grammar.text)


def _tokenizer(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """Return llguidance's tokenizer for a vocabulary, from the spellings that are known already.

    Tokens that are not text are prefixed with 0xFF: control tokens, and added tokens that look
    like them (llguidance/llamacpp.py).
    """
    tokens = []
    for token in range(vocabulary.size):
        spelling, control = vocabulary.token(token)
        added = spelling[:1] == b"<" and spelling[-1:] == b">" and vocabulary.is_added(token)
        tokens.append(b"\xff" + spelling if control or added else spelling)
    function = llama_cpp.llama_cpp._lib.llama_tokenize
    return llguidance.LLTokenizer.from_llamacpp(  # type: ignore[attr-defined, no-any-return]
        tokens=tokens,
        vocab_ptr=vocabulary.pointer,
        tokenize_fptr=ctypes.cast(function, ctypes.c_void_p).value,
        eos_token=sorted(vocabulary.ends),
        slices=None,
    )


def _reason(message: str) -> str:
    """Return llguidance's reason in one line, without its state and the surrounding text."""
    first, *others = message.split("<state>")[0].strip().splitlines() or [""]
    errors = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    return " ".join([_PLACE.sub("", first), *errors]).rstrip(".")
