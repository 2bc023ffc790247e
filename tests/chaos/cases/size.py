"""Cases of work that grows faster than its input, and of requests just below the limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from chaos.acts import floods, leaves
from chaos.case import ALL, FAKE_SERVER, INSIDE, REAL, REFUSED, RIGHT, Case

SIZE = "5 size"
ANY = REFUSED | RIGHT | {429}
MANY = {"prompt": ["a"] * 1000, "n": 20, "max_tokens": 1}


def _doubled(depth: int, way: str) -> dict[str, Any]:
    """Return a schema whose expansion doubles with each definition."""
    defs: dict[str, Any] = {f"a{depth}": {"type": "string"}}
    for level in range(depth):
        ref = {"$ref": f"#/$defs/a{level + 1}"}
        if way == "properties":
            defs[f"a{level}"] = {
                "type": "object",
                "properties": {"x": ref, "y": ref},
                "required": ["x", "y"],
            }
        else:
            defs[f"a{level}"] = {way: [ref, ref]}
    return {"$defs": defs, "$ref": "#/$defs/a0"}


def _properties(count: int, length: int = 1, **more: Any) -> dict[str, Any]:
    names = [f"{'p' * length}{index}" for index in range(count)]
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, **more}


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def _required(count: int) -> dict[str, Any]:
    names = [f"p{index}" for index in range(count)]
    return {"type": "object", "required": names}


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
    "nested oneOf": {
        "oneOf": [
            {
                "oneOf": [
                    {"oneOf": [{"const": k + j * 9 + i * 81} for k in range(9)]} for j in range(9)
                ]
            }
            for i in range(9)
        ]
    },
    "15,000 properties": _properties(15_000),
    "15,000 required names": _required(15_000),
    "15,000 properties, required": {
        **_properties(15_000),
        "required": [f"p{i}" for i in range(15_000)],
    },
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
GRAMMARS = {
    "chain of 5,000 rules": "root ::= r0\n"
    + "".join(f"r{i} ::= r{i + 1}\n" for i in range(5000))
    + 'r5000 ::= "a"',
    "chain of 50,000 rules": "root ::= r0\n"
    + "".join(f"r{i} ::= r{i + 1}\n" for i in range(50_000))
    + 'r50000 ::= "a"',
    "doubling rules": "root ::= r0\n"
    + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(60))
    + 'r60 ::= "a"',
    "doubling choices": "root ::= r0\n"
    + "".join(f"r{i} ::= r{i + 1} | r{i + 1}\n" for i in range(60))
    + 'r60 ::= "a"',
    "doubling empty rules": "root ::= r0\n"
    + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(60))
    + 'r60 ::= ""',
    "negated class of 10,000": "root ::= [^"
    + "".join(chr(0x4E00 + i) for i in range(10_000))
    + "]",
    "class of 100,000": "root ::= [" + "ab" * 50_000 + "]",
    "optional 50": "root ::= " + '"a"? ' * 50 + '"a" ' * 50,
    "optional 400": "root ::= " + '"a"? ' * 400 + '"a" ' * 400,
    "stars 200": "root ::= " + '"a"* ' * 200,
    "ambiguous": 'root ::= b b\nb ::= "a" | "a" b | c\nc ::= "a" b "a"?',
    "text of 1 MB": 'root ::= "' + "a" * 2**20 + '"',
    "comments of 4 MB": 'root ::= "a"\n' + "# comment\n" * 400_000,
}


CHAT = "/v1/chat/completions"
MESSAGE = {"role": "user", "content": "MARKED"}


def _requests() -> Iterator[Case]:
    yield from _prompts()
    yield from _messages()
    yield from _bodies()
    yield from _fields()


def _prompts() -> Iterator[Case]:
    yield _case("1,000 prompts × n 20", body=MANY, seconds=60, act=leaves(1.0), short=True)
    yield _case("2,048 prompts × n 128", body={**MANY, "prompt": ["a"] * 2048, "n": 128})
    yield _case("2,049 prompts", body={**MANY, "prompt": ["a"] * 2049})
    yield _case("best_of 20 × 1,000 prompts", body={**MANY, "n": 1, "best_of": 20}, act=leaves(1.0))
    stops = {"stop": ["s" * 300_000 + str(index) for index in range(4)], "n": 32, "max_tokens": 4}
    yield _case("four stops of 300 KB for 32 choices", body={"prompt": "a", **stops}, short=True)
    own = {"stop": ["ab" * 2000 + str(index) for index in range(4)], "n": 8, "max_tokens": 4}
    yield _case("four stops of 4 KB for 8 choices", body={"prompt": "a", **own})
    for count in (100_000, 8_000_000):
        yield _case(
            f"a prompt of {count:,} ids",
            body=lambda count=count: {"prompt": [5] * count},
            memory=1500,
            short=count == 100_000,
        )
    yield _case("a prompt of 30 MB", body=lambda: {"prompt": "word " * 6_000_000}, memory=600)
    yield _case("prompts of ids", body=lambda: {"prompt": [[5] * 4000] * 500}, memory=600)


def _messages() -> Iterator[Case]:
    yield _case(
        "a message of 30 MB",
        path=CHAT,
        memory=600,
        body=lambda: {"messages": [{"role": "user", "content": "word " * 6_000_000}]},
    )
    yield _case(
        "100,000 messages",
        path=CHAT,
        memory=600,
        body=lambda: {"messages": [{"role": "user", "content": "a"}] * 100_000},
    )
    yield _case(
        "300,000 parts",
        path=CHAT,
        memory=900,
        body=lambda: {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 300_000}]
        },
    )
    for size in (100_000, 5_000_000):
        url = "data:image/png" + ";" * size + ",AAAA"
        part = {"type": "image_url", "image_url": {"url": url}}
        yield _case(
            f"a data: URL of {size:,} semicolons",
            path=CHAT,
            short=size == 100_000,
            memory=200,
            body=lambda part=part: {"messages": [{"role": "user", "content": [part]}]},
        )


def _bodies() -> Iterator[Case]:
    nest = "[" * 100 + "]" * 100
    yield _case(
        "arrays 100 deep, 30,000 times",
        memory=900,
        short=True,
        body=lambda: (
            '{"model":"m","prompt":"a","x":[' + ",".join([nest] * 30_000) + "]}"
        ).encode(),
    )
    yield _case(
        "objects 100 deep, 10,000 times",
        memory=900,
        body=lambda: (
            '{"model":"m","prompt":"a","x":['
            + ",".join(['{"a":' * 100 + "1" + "}" * 100] * 10_000)
            + "]}"
        ).encode(),
    )
    deep = b'{"type":"array","items":' * 1000 + b"{}" + b"}" * 1000
    yield _case("schema 1,000 deep", body=b'{"model":"m","prompt":"a","json_schema":' + deep + b"}")
    yield _case("arrays 100,000 deep", body=b'{"model":"m","x":' + b"[" * 100_000)
    yield _case(
        "200,000 unknown fields",
        memory=600,
        body=lambda: {"prompt": "a", "max_tokens": 1, **{f"x{i}": i for i in range(200_000)}},
    )
    for count in (100_000, 5_000_000):
        yield _case(
            f"detokenise {count:,} ids",
            path="/v1/detokenize",
            memory=1500,
            body=lambda count=count: {"tokens": [97] * count},
            short=count == 100_000,
        )
    yield _case(
        "tokenise 20 MB",
        path="/v1/tokenize",
        memory=2000,
        body=lambda: {"prompt": "word " * 4_000_000},
    )


def _fields() -> Iterator[Case]:
    for name in ("repeat_last_n", "dry_penalty_last_n"):
        more = {"repeat_penalty": 1.1, "dry_multiplier": 1.0, "n": 4, "max_tokens": 4}
        yield _case(
            f"{name} 2,147,483,647",
            body={"prompt": "a", name: 2**31 - 1, **more},
            short=name == "repeat_last_n",
        )
    yield _case(
        "dry_sequence_breakers",
        body={
            "prompt": "a",
            "max_tokens": 4,
            "dry_multiplier": 1.0,
            "dry_sequence_breakers": ["b" * 2000 + str(i) for i in range(2000)],
        },
        memory=128,
    )
    bias = {str(token): 1 for token in range(100_000)}
    yield _case("logit_bias of 100,000", body={"prompt": "a", "max_tokens": 4, "logit_bias": bias})
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": _properties(20)}}
        for i in range(2000)
    ]
    yield _case("2,000 tools", path=CHAT, body={"messages": [MESSAGE], "tools": tools}, memory=300)
    yield _case(
        "a body of 33 MB",
        body=lambda: {"prompt": "a", "x": "y" * (33 * 2**20)},
        memory=200,
        says="33554432",
    )
    yield _case("a template's name of 1 MB", path=CHAT, body={"messages": [MESSAGE], "adapter": {
        "assistant": {"start": "a" * 2**20}}})  # fmt: skip


def _case(name: str, **fields: Any) -> Case:
    # Large requests take seconds, mostly before an engine gets them.
    engines = (FAKE_SERVER, INSIDE) if fields.get("memory", 0) >= 500 else ALL
    return Case(
        name=name, kind=SIZE, **{"expect": ANY, "engines": engines, "seconds": 15.0, **fields}
    )


def _structures() -> Iterator[Case]:
    for name, schema in SCHEMAS.items():
        body = {"prompt": "a", "json_schema": schema, "max_tokens": 4}
        yield _case(
            f"schema: {name}",
            body=body,
            memory=128,
            short=name in ("doubling by properties", "oneOf of hundreds"),
        )
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        function = {"name": "f", "parameters": schema, "strict": True}
        yield _case(
            f"tool: {name}",
            path="/v1/chat/completions",
            memory=128,
            engines=(FAKE_SERVER, INSIDE),
            expect=ANY | {502},
            body={
                **chat,
                "tools": [{"type": "function", "function": function}],
                "tool_choice": "required",
            },
        )
    for name, text in GRAMMARS.items():
        yield _case(
            f"grammar: {name}",
            memory=256,
            body={"prompt": "a", "grammar": text, "max_tokens": 4},
            short=name in ("chain of 5,000 rules", "negated class of 10,000", "optional 50"),
        )
    # A cache limited by count would keep forty of them.
    for index in range(20):
        schema = {"type": "object", "description": str(index) + "d" * 6 * 10**6}
        yield _case(
            f"6 MB of descriptions, the {index + 1}th time",
            memory=160,
            engines=(FAKE_SERVER, INSIDE),
            body=lambda schema=schema: {"prompt": "a", "json_schema": schema, "max_tokens": 1},
        )


# Maximum values that OpenAI documents.
PUBLISHED: dict[str, dict[str, Any]] = {
    "n 128": {"prompt": "echo:a", "n": 128, "max_tokens": 1},
    "four stops": {"prompt": "echo:a", "stop": ["q1", "q2", "q3", "q4"], "max_tokens": 2},
    "2,048 prompts": {"prompt": ["echo:a"] * 2048, "max_tokens": 1},
    # The fake llama-server has 259 tokens; OpenAI's limit is 300 of them.
    "logit_bias of 240": {
        "prompt": "echo:a",
        "logit_bias": {str(i): 1 for i in range(10, 250)},
        "max_tokens": 2,
    },
    "a user of 512": {"prompt": "echo:a", "user": "u" * 512, "max_tokens": 2},
    "1,000 enum values": {
        "prompt": "echo:a",
        "json_schema": {"enum": [f"v{i}" for i in range(1000)]},
        "max_tokens": 2,
    },
    "5,000 properties": {
        "prompt": "echo:a",
        "max_tokens": 2,
        "json_schema": {
            **_properties(5000),
            "required": [f"p{i}" for i in range(5000)],
            "additionalProperties": False,
        },
    },
    "10 levels": {"prompt": "echo:a", "max_tokens": 2, "json_schema": _deep(10)},
    "120,000 characters of names": {
        "prompt": "echo:a",
        "max_tokens": 2,
        "json_schema": _properties(1200, 96),
    },
}


def _published() -> Iterator[Case]:
    for name, body in PUBLISHED.items():
        slow = name == "2,048 prompts"
        yield Case(
            name=f"OpenAI's limit: {name}",
            kind=SIZE,
            body=body,
            expect=RIGHT,
            engines=(FAKE_SERVER, INSIDE) if slow else (FAKE_SERVER, REAL, INSIDE),
            seconds=90 if slow else 30,
            memory=300,
        )
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": _properties(3)}}
             for i in range(128)]  # fmt: skip
    yield Case(
        name="OpenAI's limit: 128 tools",
        kind=SIZE,
        path="/v1/chat/completions",
        engines=(INSIDE,),
        body={
            "messages": [{"role": "user", "content": "Hello!"}],
            "tools": tools,
            "max_tokens": 4,
            "tool_choice": "none",
        },
        expect=RIGHT | {400},
    )


def _together() -> Iterator[Case]:
    large = {"prompt": "a", "max_tokens": 4, "json_schema": SCHEMAS["oneOf of hundreds"]}
    assert json.dumps(large)
    yield _case("fifty large schemas at once", body=large, act=floods(50), seconds=30, memory=256)
    yield _case(
        "twenty bodies of 8 MB at once",
        act=floods(20),
        seconds=30,
        memory=1200,
        body=lambda: {"prompt": "a", "max_tokens": 1, "x": ["y" * 100] * 80_000},
    )


CASES = [*_requests(), *_structures(), *_published(), *_together()]
