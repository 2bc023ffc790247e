"""Cases of memory, freezes by grammars, retrieval of named resources, and crossed replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from chaos.acts import asks_again
from chaos.case import (
    ALL,
    ANSWERED,
    BROKEN,
    CHAT,
    COMPLETIONS,
    FAKE_SERVER,
    FAKES,
    INSIDE,
    MAYBE,
    PLAIN_AND_STREAMED,
    RIGHT,
    Case,
    judged,
)  # fmt: skip
from chaos.client import Reply, ask, post
from chaos.stage import PROMPTS, Stage

MEMORY, FREEZE, SPY, CROSSED = "1 memory", "2 freeze", "3 retrieval", "4 crossed"

# Samplers that cut or move the candidates.
SAMPLERS: dict[str, dict[str, Any]] = {
    "xtc": {"xtc_probability": 1, "xtc_threshold": 0},
    "xtc-half": {"xtc_probability": 0.5, "xtc_threshold": 0.1},
    "top_k": {"top_k": 1},
    "top_k-2": {"top_k": 2},
    "top_p": {"top_p": 0.001},
    "min_p": {"min_p": 1.0},
    "typical": {"typical_p": 0.01},
    "top_n_sigma": {"top_n_sigma": 0.01},
    "mirostat-1": {"mirostat": 1, "mirostat_tau": 0.1},
    "mirostat-2": {"mirostat": 2, "mirostat_tau": 0.1},
    "dry": {"dry_multiplier": 5.0, "dry_allowed_length": 0},
    "dynatemp": {"dynatemp_range": 5.0, "temperature": 2.0},
    "all": {
        "xtc_probability": 1, "xtc_threshold": 0, "top_k": 3, "top_p": 0.01, "min_p": 0.5,
        "typical_p": 0.1, "top_n_sigma": 0.1, "dry_multiplier": 1.0,
    },
    "bias": {"logit_bias": {str(token): -100 for token in range(300)}},
    "nothing-left": {"xtc_probability": 1, "xtc_threshold": 0, "top_k": 1, "top_p": 0.0},
}  # fmt: skip
GRAMMARS: dict[str, dict[str, Any]] = {
    "regex": {"regex": "[a-z ]*"},
    "gbnf": {"grammar": "root ::= [a-z ]*"},
    "schema": {"json_schema": {"type": "object", "properties": {"a": {"type": "string"}}}},
    "none": {},
}
SHORT_MEMORY = ("xtc with regex", "xtc-half with regex")


async def _constrained(stage: Stage, case: Case) -> list[str]:
    """Send the request while other clients' constrained completions must stay unchanged."""
    # Greedy sampling, because the shape of a batch changes the last digits of logits.
    common = {"model": "m", "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0}
    body = {**common, "regex": "[a-zA-Z .]*"}

    async def other() -> Reply:
        return await ask(stage.latimer.port, post(COMPLETIONS, body), 20)

    alone = (await other()).json()["choices"][0]["text"]
    replies = asyncio.gather(*(other() for _ in range(3)))
    found = judged(await stage.ask(case), case)
    for reply in await replies:
        if reply.problem or reply.status != 200:
            found.append(f"another client's request fails: {reply}")
        elif (text := reply.json()["choices"][0]["text"]) != alone:
            found.append(f"another client's answer is {text!r}, alone {alone!r}")
    return found


def _memory() -> Iterator[Case]:
    for name, fields in SAMPLERS.items():
        bodies = {
            f"{name} with {kind}": {"max_tokens": 16, **fields, **grammar}
            for kind, grammar in GRAMMARS.items()
        }
        several = {"max_tokens": 8, "n": 8, "logprobs": 5, **fields, "regex": "[a-z]*"}
        for title, body in {**bodies, f"{name} with n and logprobs": several}.items():
            yield Case(
                name=title, kind=MEMORY, engines=(INSIDE,), body={"prompt": "a", **body},
                act=_constrained, expect=RIGHT | {400}, short=title in SHORT_MEMORY,
            )  # fmt: skip


# Texts on which a regular expression with nested or overlapping repetitions would hang.
GBNF = {
    "hashes": "root " + "#" * 40,
    "hashes-long": "root " + "#" * 4000,
    "hashes-end": "root ::= " + "#" * 4000,
    "hashes-lines": "root ::= " + "#\n" * 4000,
    "spaces": "root " + " " * 4000,
    "spaces-lines": "root" + " \n" * 4000 + "!",
    "line-ends": "root ::=" + "\n" * 4000,
    "comments": "#" + " #" * 4000 + "\nroot",
    "quotes": 'root ::= "' + '\\"' * 4000,
    "backslashes": 'root ::= "' + "\\" * 4001,
    "open-string": 'root ::= "' + "a" * 4000,
    "open-class": "root ::= [" + "a" * 4000,
    "class-escapes": "root ::= [" + "\\]" * 4000,
    "class-ranges": "root ::= [" + "a-" * 4000 + "]",
    "brackets": "root ::= " + "[" * 4000,
    "parentheses": "root ::= " + "(" * 4000,
    "parentheses-closed": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000,
    "stars": 'root ::= "a"' + "*" * 4000,
    "nested-stars": "root ::= " + "(" * 40 + '"a"' + ")*" * 40,
    "bars": "root ::= " + "| " * 4000,
    "braces": 'root ::= "a"' + "{1," * 2000,
    "repeat": 'root ::= "a"{1000000000}',
    "repeat-nested": 'root ::= ((("a"{1000}){1000}){1000}){1000}',
    "definitions": "root " + "::= " * 4000,
    "names": "root ::= " + "a-" * 4000,
    "dashes": "-" * 4000 + " ::= root",
    "no-root": 'a ::= "b"\n' * 2000,
    "left": 'root ::= root "a" | "b"',
    "left-mutual": 'root ::= a\na ::= b\nb ::= root "x" | "y"',
    "left-empty": 'root ::= e root\ne ::= ""',
    "empty-star": 'root ::= (""*)*',
    "tokens": "root ::= " + "<[1]> " * 4000,
    "token-open": "root ::= " + "<[" * 4000,
    "unicode": "root ::= [\\U" + "F" * 4000 + "]",
    "escape-open": 'root ::= "\\x',
    "nul": 'root ::= "a\x00b"',
    "surrogate": 'root ::= "\\uD800"',
}
REGEXES = {
    "nested": "(a+)+$",
    "nested-deep": "(" * 60 + "a" + "+)" * 60,
    "alternatives": "(a|a)*b",
    "alternatives-many": "(" + "a|" * 4000 + "a)*",
    "open": "(" * 4000,
    "classes": "[a-z]{1000}" * 4,
    "repeat": "(((a{1000}){1000}){1000}){1000}",
    "repeat-huge": "a{1000000000}",
    "optional": "a?" * 2000 + "a" * 2000,
    "optional-100": "a?" * 100 + "a" * 100,
    "lookahead": "(?=a)b",
    "back": r"(a)\1",
    "unicode": r"\p{L}{500}",
    "deep": "(" * 1200 + "a" + ")" * 1200,
    "negated": "[^" + "a" * 10_000 + "]",
}
# Short grammars that would take an automaton minutes and gigabytes.
_ROWS = " & ".join(f"/([a-z]{{{prime}}})*/" for prime in (2, 3, 5, 7, 11, 13, 17, 19))
_BOTH = [{"type": "string", "pattern": f"a.{{{count}}}b"} for count in range(40)]
AUTOMATA: dict[str, dict[str, Any]] = {
    "40 patterns at once": {"json_schema": {"allOf": _BOTH}},
    "a large multiple in Lark": {"lark": 'start: %json {"type": "integer", "multipleOf": 9999991}'},
    "rows in Lark": {"lark": f"start: A\nA: {_ROWS}"},
    "repetitions in a pattern": {"json_schema": {"type": "string", "pattern": "^(a{1000}){1000}$"}},
    "repetitions with blanks": {"regex": "(?x)((a{1000 }){1000 }){1000 }"},
    "long looks back": {"lark": "start: A*\nA: /[^b]*a.{100}/ & /.*b.{100}/", "n": 16},
    "all but": {"lark": "start: A\nA: /(.*a.{20})/ & ~/(.*b.{20})/ & /(.*c.{15}.*)/"},
}
SHORT_FREEZE = {f"grammar {name}" for name in ("hashes", "quotes", "parentheses", "braces")} | {
    "regex nested"
}


def _freeze() -> Iterator[Case]:
    for field, texts in (("grammar", GBNF), ("regex", REGEXES)):
        for name, text in texts.items():
            title = f"{field} {name}"
            body = {"prompt": "a", field: text, "max_tokens": 8}
            short = title in SHORT_FREEZE
            yield Case(name=title, kind=FREEZE, body=body, expect=ANSWERED, short=short)
    for name, fields in AUTOMATA.items():
        yield Case(
            name=f"automaton {name}", kind=FREEZE, body={"prompt": "a", "max_tokens": 8, **fields},
            expect=ANSWERED, memory=300, seconds=20,
        )  # fmt: skip


SCHEMAS: dict[str, str] = {
    "literal": '{"enum":[["x"]],"items":{"$ref":"http://CANARY/x"}}',
    "file": '{"enum":[["x"]],"items":{"$ref":"file://FIFO"}}',
    "https": '{"enum":[["x"]],"items":{"$ref":"https://CANARY/x"}}',
    "ref": '{"$ref":"http://CANARY/x"}',
    "fragment": '{"$ref":"http://CANARY/x#/a"}',
    "id": '{"$id":"http://CANARY/base","$ref":"other"}',
    "id-items": '{"$id":"http://CANARY/base","enum":[["x"]],"items":{"$ref":"other"}}',
    "schema": '{"$schema":"http://CANARY/meta","type":"object"}',
    "schema-enum": '{"$schema":"http://CANARY/meta","enum":["a"],"minLength":1}',
    "schema-inner": '{"enum":[{"a":1}],"properties":{"a":{"$schema":"http://CANARY/meta"}}}',
    "dynamic": '{"enum":["x"],"$dynamicRef":"http://CANARY/x"}',
    "recursive": '{"enum":["x"],"$recursiveRef":"http://CANARY/x"}',
    "const": '{"const":["x"],"items":{"$ref":"http://CANARY/x"}}',
    "not": '{"enum":["x"],"not":{"$ref":"http://CANARY/x"}}',
    "if": '{"enum":["x"],"if":{"$ref":"http://CANARY/x"},"then":{}}',
    "allOf": '{"enum":["x"],"allOf":[{"$ref":"http://CANARY/x"}]}',
    "oneOf": '{"type":"object","oneOf":[{"$ref":"http://CANARY/x"},{"type":"string"}]}',
    "defs": '{"enum":["x"],"$defs":{"a":{"$ref":"http://CANARY/x"}},"allOf":[{"$ref":"#/$defs/a"}]}',
    "properties": '{"enum":[{"a":1}],"properties":{"a":{"$ref":"http://CANARY/x"}}}',
    "names": '{"enum":[{"a":1}],"propertyNames":{"$ref":"file://FIFO"}}',
    "contains": '{"enum":[["x"]],"contains":{"$ref":"file://FIFO"}}',
    "prefix": '{"enum":[["x"]],"prefixItems":[{"$ref":"file://FIFO"}]}',
    "dependent": '{"enum":[{"a":1}],"dependentSchemas":{"a":{"$ref":"file://FIFO"}}}',
    "unevaluated": '{"enum":[{"a":1}],"unevaluatedProperties":{"$ref":"file://FIFO"}}',
    "content": '{"enum":["x"],"contentSchema":{"$ref":"http://CANARY/x"}}',
    "default": '{"type":"object","default":{"a":1},"properties":{"a":{"$ref":"http://CANARY/x"}}}',
    "draft-4": '{"$schema":"http://json-schema.org/draft-04/schema#","id":"http://CANARY/b","enum":'
    '[["x"]],"items":{"$ref":"c"}}',
    "relative": '{"enum":[["x"]],"items":{"$ref":"FIFO"}}',
    "data": '{"enum":[["x"]],"items":{"$ref":"data:application/json,{}"}}',
    "urn": '{"enum":[["x"]],"items":{"$ref":"urn:uuid:5"}}',
}
_A = "a" * 32 + "!"
PATTERNS: dict[str, dict[str, Any]] = {
    "literal": {"type": "string", "enum": [_A], "pattern": "^(a+)+$"},
    "const": {"const": _A, "pattern": "^(a|aa)+$"},
    "names": {"enum": [{_A: 1}], "patternProperties": {"^(a+)+$": {}}},
    "property-names": {"enum": [{_A: 1}], "propertyNames": {"pattern": "^(a+)+$"}},
    "back": {"enum": [_A], "pattern": r"^(a+)+\1$"},
    "lookahead": {"enum": [_A], "pattern": r"^(?=(a+)+$)a*"},
    "lookbehind": {"enum": [_A], "pattern": r"^(a+)+(?<=b)$"},
    "large": {"enum": ["a"], "pattern": "(a{1000}){1000}"},
    "unanchored": {"enum": [_A * 100], "pattern": "(.*a){20}b"},
    "format": {"enum": ["a@" * 20_000], "format": "email"},
    "format-regex": {"enum": ["(" * 5000], "format": "regex"},
    "uri": {"enum": ["http://" + "a:" * 20_000], "format": "uri"},
    "deep": {"type": "string", "pattern": "(" * 1000 + "a" + ")" * 1000},
    "many": {"anyOf": [{"enum": [_A], "pattern": "^(a+)+$"}] * 200},
}


def _ways(schema: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the fields that take a schema, each as a path and a body."""
    chat = {"messages": [{"role": "user", "content": "MARKED"}], "max_tokens": 64}
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    function = {"name": "f", "parameters": schema}
    tool = {"type": "function", "function": function}
    strict = {"type": "function", "function": {**function, "strict": True}}
    return {
        "field": (COMPLETIONS, {"prompt": "a", "json_schema": schema, "max_tokens": 8}),
        "format": (CHAT, {**chat, "response_format": named}),
        "tool": (CHAT, {**chat, "tools": [tool]}),
        "strict-tool": (CHAT, {**chat, "tools": [strict], "tool_choice": "required"}),
    }


SHORT_SPY = (
    "reference literal in a field", "reference file in a field", "pattern literal in a field",
)  # fmt: skip


def _retrieval() -> Iterator[Case]:
    def cases(name: str, schema: Any, ways: set[str], engines: tuple[str, ...]) -> Iterator[Case]:
        for way, (path, body) in _ways(schema).items():
            if way in ways:
                title = f"{name} in a {way}"
                yield Case(
                    name=title, kind=SPY, path=path, body=body, engines=engines, expect=ANSWERED,
                    act=_any_answer, short=title in SHORT_SPY,
                )  # fmt: skip

    most = {"field", "strict-tool"}
    for name, text in SCHEMAS.items():
        every = {"format", "tool"} if name in ("literal", "file", "ref") else set()
        engines = (*FAKES, INSIDE) if name in ("literal", "file") else (FAKE_SERVER, INSIDE)
        yield from cases(f"reference {name}", json.loads(text), most | every, engines)
    for name, schema in PATTERNS.items():
        yield from cases(f"pattern {name}", schema, most, ALL)


async def _any_answer(stage: Stage, case: Case) -> list[str]:
    """Send the request, and accept a completion that does not follow the grammar."""
    found = judged(await stage.ask(case), case)
    # A fake engine's completion is not a tool call.
    return [one for one in found if stage.fake is None or "502" not in one or "500" in one]


def _crossed_case(name: str, **fields: Any) -> Case:
    return Case(name=name, kind=CROSSED, **{"engines": FAKES, "expect": MAYBE, **fields})


def _crossed() -> Iterator[Case]:
    for what in ("100", "102", "103", "199", "many", "apart"):
        for way, body in PLAIN_AND_STREAMED.items():
            yield _crossed_case(
                f"informational {what}{way}", body=body, fault=f"informational/{what}",
                act=asks_again, expect=RIGHT, short=what == "103",
            )  # fmt: skip
    yield _crossed_case("informational with a length", fault="informational/length")
    yield _crossed_case("switching protocols", fault="switching", expect=BROKEN)
    for what in ("bytes", "reply", "event", "late", "long", "half", "line", "endless"):
        for way, body in PLAIN_AND_STREAMED.items():
            yield _crossed_case(
                f"behind {what}{way}", body=body, fault=f"behind/{what}", act=asks_again,
                short=what in ("reply", "bytes"),
            )  # fmt: skip
        yield _crossed_case(
            f"behind {what} of a tokenised prompt", engines=(FAKE_SERVER,), path="/v1/tokenize",
            body={"prompt": "hello"}, calls={"/tokenize": f"behind/{what}"}, act=_tokenised,
            expect=RIGHT,
        )  # fmt: skip
    for what in ("short", "zero", "twice", "both", "negative", "text"):
        yield _crossed_case(f"length {what}", fault=f"length/{what}", act=asks_again)
    for what in ("no-content", "not-modified", "empty"):
        yield _crossed_case(f"reply {what}", fault=what, expect=BROKEN, act=asks_again)
    yield _crossed_case("an answer that nobody asked for", act=_pushed, expect=RIGHT, short=True)


async def _tokenised(stage: Stage, case: Case) -> list[str]:
    """Tokenize three texts, and check that each reply has the tokens of its own text."""
    found = []
    for text in ("hello", "abc", "xyz-123"):
        # Late bytes arrive on a connection that is idle.
        await asyncio.sleep(0.1)
        body = {"model": "m", "prompt": text}
        reply = await ask(stage.latimer.port, post(case.path, body), 10)
        ids = (reply.json() or {}).get("tokens")
        if reply.status != 502 and ids != list(text.encode()):
            found.append(f"the tokens of {text!r} are {ids}: {reply}")
    await asyncio.sleep(0.1)
    return found


async def _pushed(stage: Stage, case: Case) -> list[str]:
    """Send a response on idle connections."""
    assert stage.fake is not None
    found = []
    data = b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n" + b'{"content":1}'
    for wait in (0.0, 0.1):
        for _ in range(2):
            await stage.small()
        await stage.fake.push(data)
        await asyncio.sleep(wait)
        found += judged(await stage.ask(case), case)
    return found


CASES = [*_memory(), *_freeze(), *_retrieval(), *_crossed()]
