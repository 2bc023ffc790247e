"""Cases of work that grows faster than its input, and of requests just below the limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from chaos.acts import floods, leaves
from chaos.case import ALL, ANSWERED, CHAT, COMPLETIONS, FAKE_SERVER, INSIDE, REAL, RIGHT, Case

SIZE = "5 size"
ANY = ANSWERED | {429}


def _case(name: str, body: Any = None, **fields: Any) -> Case:
    # Large requests take seconds, mostly before an engine gets them.
    engines = (FAKE_SERVER, INSIDE) if fields.get("memory", 0) >= 500 else ALL
    common = {"expect": ANY, "engines": engines, "seconds": 15.0}
    return Case(name=name, kind=SIZE, body=body or {}, **{**common, **fields})


def _doubled(depth: int, way: str) -> dict[str, Any]:
    """Return a schema whose expansion doubles with each definition."""
    defs: dict[str, Any] = {f"a{depth}": {"type": "string"}}
    for level in range(depth):
        ref = {"$ref": f"#/$defs/a{level + 1}"}
        both = {"type": "object", "properties": {"x": ref, "y": ref}, "required": ["x", "y"]}
        defs[f"a{level}"] = both if way == "properties" else {way: [ref, ref]}
    return {"$defs": defs, "$ref": "#/$defs/a0"}


def _properties(count: int, length: int = 1, **more: Any) -> dict[str, Any]:
    names = [f"{'p' * length}{index}" for index in range(count)]
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, **more}


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def _one_of(schemas: Iterable[Any]) -> dict[str, Any]:
    return {"oneOf": list(schemas)}


def _names(count: int) -> list[str]:
    return [f"p{index}" for index in range(count)]


SCHEMAS: dict[str, Any] = {
    **{
        f"doubling by {way}": _doubled(60, way) for way in ("properties", "allOf", "anyOf", "oneOf")
    },
    "doubling, shallow": _doubled(14, "properties"),
    "oneOf of hundreds": {
        "oneOf": [{"type": "object", "properties": {f"a{i}": {"const": i}}} for i in range(600)]
    },
    "anyOf of thousands": {"anyOf": [{"const": index} for index in range(5000)]},
    "allOf of hundreds": {"allOf": [{"properties": {f"a{i}": {}}} for i in range(600)]},
    "nested oneOf": _one_of(
        _one_of(_one_of({"const": k + j * 9 + i * 81} for k in range(9)) for j in range(9))
        for i in range(9)
    ),
    "15,000 properties": _properties(15_000),
    "15,000 required names": {"type": "object", "required": _names(15_000)},
    "15,000 properties, required": _properties(15_000, required=_names(15_000)),
    "500 optional properties": _properties(500),
    "long names": _properties(20, 1500),
    "enum of 100,000": {"enum": list(range(100_000))},
    "enum of long texts": {"enum": ["a" * 100_000 + str(index) for index in range(20)]},
    "arrays 100 deep": _deep(100),
    "maxLength": {"type": "string", "maxLength": 2**31},
    "minLength": {"type": "string", "minLength": 10**9},
    "minItems": {"type": "array", "items": {"type": "integer"}, "minItems": 10**7},
    "items range": {"type": "array", "items": _deep(3), "minItems": 500, "maxItems": 1000},
    "pattern repeat": {"type": "string", "pattern": "^([a-z]{1,1000}){1,1000}$"},
    "minimum": {"type": "integer", "minimum": 10**400, "maximum": 10**401},
    "multipleOf": {"type": "integer", "multipleOf": 10**15 + 37},
    "number range": {"type": "number", "minimum": 1e-300, "maximum": 1e300},
    "own reference": {"$ref": "#"},
    "own reference in a loop": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {f"^a{i}": {} for i in range(2000)},
    },
    "dependent": {"type": "object", "dependentRequired": {f"a{i}": ["b"] for i in range(3000)}},
}


def _chain(count: int, rule: str, last: str) -> str:
    """Return a grammar of a chain of rules, each made of the next one."""
    rules = "".join(f"r{i} ::= {rule.format(n=i + 1)}\n" for i in range(count))
    return f"root ::= r0\n{rules}r{count} ::= {last}"


GRAMMARS = {
    "chain of 5,000 rules": _chain(5000, "r{n}", '"a"'),
    "chain of 50,000 rules": _chain(50_000, "r{n}", '"a"'),
    "doubling rules": _chain(60, "r{n} r{n}", '"a"'),
    "doubling choices": _chain(60, "r{n} | r{n}", '"a"'),
    "doubling empty rules": _chain(60, "r{n} r{n}", '""'),
    "negated class of 10,000": f"root ::= [^{''.join(chr(0x4E00 + i) for i in range(10_000))}]",
    "class of 100,000": "root ::= [" + "ab" * 50_000 + "]",
    "optional 50": "root ::= " + '"a"? ' * 50 + '"a" ' * 50,
    "optional 400": "root ::= " + '"a"? ' * 400 + '"a" ' * 400,
    "stars 200": "root ::= " + '"a"* ' * 200,
    "ambiguous": 'root ::= b b\nb ::= "a" | "a" b | c\nc ::= "a" b "a"?',
    "text of 1 MB": 'root ::= "' + "a" * 2**20 + '"',
    "comments of 4 MB": 'root ::= "a"\n' + "# comment\n" * 400_000,
}


def _message(content: Any, count: int = 1) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}] * count}


def _image(size: int) -> dict[str, Any]:
    url = "data:image/png" + ";" * size + ",AAAA"
    return _message([{"type": "image_url", "image_url": {"url": url}}])


def _nested(start: str, end: str, times: int) -> bytes:
    """Return a body with an array of values that are nested 100 deep."""
    value = start * 100 + ("1" if ":" in start else "") + end * 100
    return ('{"model":"m","prompt":"a","x":[' + ",".join([value] * times) + "]}").encode()


# Large requests, made when they are sent: the path, the MiB that they can take, and the body.
Large = tuple[str, int, Callable[[], Any]]
LARGE: dict[str, Large] = {
    "a prompt of 100,000 ids": (COMPLETIONS, 1500, lambda: {"prompt": [5] * 100_000}),
    "a prompt of 8,000,000 ids": (COMPLETIONS, 1500, lambda: {"prompt": [5] * 8_000_000}),
    "a prompt of 30 MB": (COMPLETIONS, 600, lambda: {"prompt": "word " * 6_000_000}),
    "prompts of ids": (COMPLETIONS, 600, lambda: {"prompt": [[5] * 4000] * 500}),
    "a message of 30 MB": (CHAT, 600, lambda: _message("word " * 6_000_000)),
    "100,000 messages": (CHAT, 600, lambda: _message("a", 100_000)),
    "300,000 parts": (CHAT, 900, lambda: _message([{"type": "text", "text": "a"}] * 300_000)),
    "a data: URL of 100,000 semicolons": (CHAT, 200, lambda: _image(100_000)),
    "a data: URL of 5,000,000 semicolons": (CHAT, 200, lambda: _image(5_000_000)),
    "arrays 100 deep, 30,000 times": (COMPLETIONS, 900, lambda: _nested("[", "]", 30_000)),
    "objects 100 deep, 10,000 times": (COMPLETIONS, 900, lambda: _nested('{"a":', "}", 10_000)),
    "200,000 unknown fields": (
        COMPLETIONS, 600,
        lambda: {"prompt": "a", "max_tokens": 1, **{f"x{i}": i for i in range(200_000)}},
    ),
    "detokenise 100,000 ids": ("/v1/detokenize", 1500, lambda: {"tokens": [97] * 100_000}),
    "detokenise 5,000,000 ids": ("/v1/detokenize", 1500, lambda: {"tokens": [97] * 5_000_000}),
    "tokenise 20 MB": ("/v1/tokenize", 2000, lambda: {"prompt": "word " * 4_000_000}),
}  # fmt: skip
_DEEP = b'{"type":"array","items":' * 1000 + b"{}" + b"}" * 1000
_OWN = {"repeat_penalty": 1.1, "dry_multiplier": 1.0, "n": 4, "max_tokens": 4}
SHORT = {
    "a prompt of 100,000 ids", "a data: URL of 100,000 semicolons",
    "arrays 100 deep, 30,000 times", "detokenise 100,000 ids",
    "schema: doubling by properties", "schema: oneOf of hundreds", "grammar: chain of 5,000 rules",
    "grammar: negated class of 10,000", "grammar: optional 50",
}  # fmt: skip


def _requests() -> Iterator[Case]:
    several = {"prompt": ["a"] * 1000, "n": 20, "max_tokens": 1}
    yield _case("1,000 prompts × n 20", several, seconds=60, act=leaves(1.0), short=True)
    yield _case("2,048 prompts × n 128", {**several, "prompt": ["a"] * 2048, "n": 128})
    yield _case("2,049 prompts", {**several, "prompt": ["a"] * 2049})
    yield _case("best_of 20 × 1,000 prompts", {**several, "n": 1, "best_of": 20}, act=leaves(1.0))
    stops = {"stop": ["s" * 300_000 + str(index) for index in range(4)], "n": 32, "max_tokens": 4}
    yield _case("four stops of 300 KB for 32 choices", {"prompt": "a", **stops}, short=True)
    stops = {"stop": ["ab" * 2000 + str(index) for index in range(4)], "n": 8, "max_tokens": 4}
    yield _case("four stops of 4 KB for 8 choices", {"prompt": "a", **stops})
    for name, (path, memory, body) in LARGE.items():
        yield _case(name, body, path=path, memory=memory, short=name in SHORT)
    yield _case("schema 1,000 deep", b'{"model":"m","prompt":"a","json_schema":' + _DEEP + b"}")
    yield _case("arrays 100,000 deep", b'{"model":"m","x":' + b"[" * 100_000)
    for name in ("repeat_last_n", "dry_penalty_last_n"):
        fields = {"prompt": "a", name: 2**31 - 1, **_OWN}
        yield _case(f"{name} 2,147,483,647", fields, short=name == "repeat_last_n")
    breakers = ["b" * 2000 + str(i) for i in range(2000)]
    dry = {"dry_multiplier": 1.0, "dry_sequence_breakers": breakers}
    yield _case("dry_sequence_breakers", {"prompt": "a", "max_tokens": 4, **dry}, memory=128)
    bias = {str(token): 1 for token in range(100_000)}
    yield _case("logit_bias of 100,000", {"prompt": "a", "max_tokens": 4, "logit_bias": bias})
    yield _case(
        "2,000 tools",
        lambda: {
            **_message("MARKED"), "tools": [_tool(f"f{i}", _properties(20)) for i in range(2000)],
        },
        path=CHAT, memory=300,
    )  # fmt: skip
    yield _case(
        "a body of 33 MB", lambda: {"prompt": "a", "x": "y" * (33 * 2**20)}, memory=200,
        says="33554432",
    )  # fmt: skip
    template = {"adapter": {"assistant": {"start": "a" * 2**20}}}
    yield _case("a template's name of 1 MB", {**_message("MARKED"), **template}, path=CHAT)


def _tool(name: str, schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def _described(index: int) -> dict[str, Any]:
    return {"type": "object", "description": str(index) + "d" * 6 * 10**6}


def _structures() -> Iterator[Case]:
    def case(kind: str, name: str, memory: int, **body: Any) -> Case:
        title = f"{kind}: {name}"
        body = {"prompt": "a", **body, "max_tokens": 4}
        return _case(title, body, memory=memory, short=title in SHORT)

    for name, schema in SCHEMAS.items():
        yield case("schema", name, 128, json_schema=schema)
        tools = {"tools": [_tool("f", schema, strict=True)], "tool_choice": "required"}
        yield _case(
            f"tool: {name}", {**_message("a"), "max_tokens": 4, **tools}, path=CHAT, memory=128,
            engines=(FAKE_SERVER, INSIDE), expect=ANY | {502},
        )  # fmt: skip
    for name, text in GRAMMARS.items():
        yield case("grammar", name, 256, grammar=text)
    # A cache limited by count would keep forty of them.
    for index in range(20):
        yield _case(
            f"6 MB of descriptions, the {index + 1}th time",
            lambda index=index: {"prompt": "a", "json_schema": _described(index), "max_tokens": 1},
            memory=160, engines=(FAKE_SERVER, INSIDE),
        )  # fmt: skip


_REQUIRED = _properties(5000, required=_names(5000), additionalProperties=False)
# Maximum values that OpenAI documents.
PUBLISHED: dict[str, dict[str, Any]] = {
    "n 128": {"n": 128, "max_tokens": 1},
    "four stops": {"stop": ["q1", "q2", "q3", "q4"]},
    "2,048 prompts": {"prompt": ["echo:a"] * 2048, "max_tokens": 1},
    # The fake llama-server has 259 tokens; OpenAI's limit is 300 of them.
    "logit_bias of 240": {"logit_bias": {str(i): 1 for i in range(10, 250)}},
    "a user of 512": {"user": "u" * 512},
    "1,000 enum values": {"json_schema": {"enum": [f"v{i}" for i in range(1000)]}},
    "5,000 properties": {"json_schema": _REQUIRED},
    "10 levels": {"json_schema": _deep(10)},
    "120,000 characters of names": {"json_schema": _properties(1200, 96)},
}


def _published() -> Iterator[Case]:
    for name, fields in PUBLISHED.items():
        slow = name == "2,048 prompts"
        yield _case(
            f"OpenAI's limit: {name}", {"prompt": "echo:a", "max_tokens": 2, **fields},
            expect=RIGHT, seconds=90 if slow else 30, memory=300,
            engines=(FAKE_SERVER, INSIDE) if slow else (FAKE_SERVER, REAL, INSIDE),
        )  # fmt: skip
    tools = [_tool(f"f{i}", _properties(3)) for i in range(128)]
    yield _case(
        "OpenAI's limit: 128 tools",
        {**_message("Hello!"), "tools": tools, "max_tokens": 4, "tool_choice": "none"},
        path=CHAT, engines=(INSIDE,), expect=RIGHT | {400}, seconds=10.0,
    )  # fmt: skip


def _together() -> Iterator[Case]:
    large = {"prompt": "a", "max_tokens": 4, "json_schema": SCHEMAS["oneOf of hundreds"]}
    yield _case("fifty large schemas at once", large, act=floods(50), seconds=30, memory=256)
    yield _case(
        "twenty bodies of 8 MB at once",
        lambda: {"prompt": "a", "max_tokens": 1, "x": ["y" * 100] * 80_000},
        act=floods(20), seconds=30, memory=1200,
    )  # fmt: skip


CASES = [*_requests(), *_structures(), *_published(), *_together()]
