"""Tests of GBNF, JSON schemas, regular expressions and Lark grammars in process."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from latimer.adapter.errors import render
from latimer.backends.base import (
    Event,
    Generation,
    Grammar,
    GrammarKind,
    Piece,
    Prompt,
    Sampling,
    Text,
)
from latimer.backends.errors import InvalidGrammar
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_cpp.grammars import Guidance
from support.jobs import run
from support.recordings import DEMO_CHATML

ASK = Text(DEMO_CHATML.format("Tell me about a person."))
FRANCE = Text(DEMO_CHATML.format("What is the capital of France?"))
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON_SCHEMA = Grammar("json_schema", json.dumps(PERSON), "json_schema")
DIGITS = Grammar("regex", "[0-9]{3}", "regex")


@pytest.fixture(scope="module")
async def backend() -> AsyncIterator[LlamaCpp]:
    """A backend with the demo model."""
    made = LlamaCpp(context=2048, parallel=8)
    yield made
    await made.aclose()


async def events_of(backend: LlamaCpp, job: Generation) -> list[Event]:
    """Return every event of a job."""
    async with backend.open(job) as batches:
        return [event async for batch in batches for event in batch]


def job_of(
    grammar: Grammar, tokens: int = 200, seed: int | None = 1, **sampling: Any
) -> Generation:
    """Return a job with one choice."""
    return Generation(Prompt(ASK), tokens, (seed,), sampling=Sampling(**sampling), grammar=grammar)


async def text_of(backend: LlamaCpp, job: Generation) -> tuple[str, str]:
    """Return the text of one choice and its finish reason."""
    (text,), (finish,) = await run(backend, job)
    return text.decode(errors="replace"), finish.reason


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("regex", r"[A-Z][a-z]{2,8}( [0-9]{2})?", r"[A-Z][a-z]{2,8}( [0-9]{2})?"),
        ("lark", 'start: "x" INT "y"\nINT: /[0-9]{1,4}/', r"x[0-9]{1,4}y"),
        ("gbnf", 'root ::= ("yes" | "no") " " [A-Z!]{3}', r"(yes|no) [A-Z!]{3}"),
        ("gbnf", 'root ::= item+ "."\nitem ::= "- " [a-z]{1,5} "\\n"', r"(- [a-z]{1,5}\n)+\."),
        ("gbnf", 'root ::= "é" "ß"{2} "😀"', "éßß😀"),
        ("regex", "é{2}😀|ß{3}😀", "é{2}😀|ß{3}😀"),
    ],
)
async def test_an_answer_follows_its_grammar(
    backend: LlamaCpp, kind: GrammarKind, text: str, pattern: str, temperature: float
) -> None:
    """A completion that ends by itself matches its grammar at any temperature."""
    grammar = Grammar(kind, text, "grammar")
    jobs = [job_of(grammar, seed=seed, temperature=temperature) for seed in range(12)]
    for answer, reason in await asyncio.gather(*(text_of(backend, job) for job in jobs)):
        if reason == "end":
            assert re.fullmatch(pattern, answer), answer
        else:
            assert kind == "gbnf"
            assert "+" in text


async def test_objects_follow_their_schema(backend: LlamaCpp) -> None:
    """Forty objects that are sampled at a high temperature satisfy the schema."""
    jobs = [job_of(PERSON_SCHEMA, 400, seed, temperature=1.3) for seed in range(40)]
    answers = await asyncio.gather(*(text_of(backend, job) for job in jobs))
    whole = [json.loads(text) for text, reason in answers if reason == "end"]
    assert len(whole) == 40
    for person in whole:
        jsonschema.validate(person, PERSON)


async def test_every_choice_follows_it(backend: LlamaCpp) -> None:
    """Each choice of a request follows the grammar with a state of its own."""
    job = replace(job_of(DIGITS), seeds=tuple(range(6)))
    texts, _ = await run(backend, job)
    assert all(re.fullmatch(b"[0-9]{3}", text) for text in texts)
    assert len(set(texts)) > 1


@pytest.mark.slow
async def test_probabilities_are_those_of_masking(backend: LlamaCpp) -> None:
    """Sampling before asking the grammar gives each token the probability of masking first."""
    alone = Generation(Prompt(ASK), 1, (1,), sampling=Sampling(temperature=0.0), logprobs=1024)
    first = next(e for e in await events_of(backend, alone) if isinstance(e, Piece)).tokens[0]
    weights = {a.spelling.decode(): math.exp(a.logprob) for a in first.top if a.spelling.isdigit()}
    total = sum(weight for digit, weight in weights.items() if len(digit) == 1)
    grammar = Grammar("regex", "[0-9]", "regex")
    sampled = Generation(Prompt(ASK), 1, tuple(range(1200)), grammar=grammar)
    events = await events_of(backend, sampled)
    counts = Counter(e.data.decode() for e in events if isinstance(e, Piece))
    assert sum(counts.values()) == 1200
    for digit, weight in weights.items():
        expected = 1200 * weight / total if len(digit) == 1 else 0
        assert abs(counts[digit] - expected) <= 5 * math.sqrt(expected + 1), digit


@pytest.mark.parametrize(
    "extras",
    [
        {"xtc_probability": 1.0, "xtc_threshold": 0.0},
        {"xtc_probability": 0.5, "xtc_threshold": 0.1},
        {"top_k": 3}, {"typical_p": 0.2}, {"min_p": 0.5}, {"top_n_sigma": 1.0},
        {"mirostat": 1}, {"mirostat": 2}, {"dynatemp_range": 0.5},
    ],
    ids=str,
)  # fmt: skip
async def test_truncation_changes_no_other_answer(
    backend: LlamaCpp, extras: dict[str, Any]
) -> None:
    """A truncating sampler with a grammar leaves other completions unchanged."""
    reference = job_of(Grammar("regex", "[a-z ]*", "regex"), 12, 5, temperature=1.5)
    before = await text_of(backend, reference)
    truncated = job_of(Grammar("regex", "[a-z ]*", "regex"), 16, 1, extras=extras)
    jobs = [replace(truncated, seeds=(seed,)) for seed in range(8)]
    answers = await asyncio.gather(*(text_of(backend, job) for job in jobs))
    assert all(re.fullmatch("[a-z ]*", text) for text, _ in answers)
    assert await text_of(backend, reference) == before


async def test_told_probabilities_are_the_models_own(backend: LlamaCpp) -> None:
    """Returned log-probabilities are the model's own, without the grammar."""
    free = Generation(Prompt(FRANCE), 1, (1,), sampling=Sampling(temperature=0.0), logprobs=5)
    bound = replace(free, grammar=DIGITS)
    first, second = [
        next(e for e in await events_of(backend, job) if isinstance(e, Piece)).tokens[0]
        for job in (free, bound)
    ]
    assert second.spelling.isdigit()
    assert [a.id for a in second.top] == [a.id for a in first.top]
    assert all(abs(a.logprob - b.logprob) < 0.2 for a, b in zip(first.top, second.top, strict=True))


async def test_masks_are_seldom_wanted(backend: LlamaCpp, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampled token that the grammar allows costs no mask of the whole vocabulary."""
    masks = 0
    allowed = Guidance.allowed

    def counted(self: Guidance) -> Any:
        nonlocal masks
        masks += 1
        return allowed(self)

    monkeypatch.setattr(Guidance, "allowed", counted)
    grammar = Grammar("regex", r"The capital of [A-Z][a-z]+ is [A-Z][a-z]+\.", "regex")
    job = Generation(Prompt(FRANCE), 40, (1,), sampling=Sampling(temperature=0.0), grammar=grammar)
    assert await text_of(backend, job) == ("The capital of France is Paris.", "end")
    assert masks == 0


async def test_named_tokens_can_be_forced(backend: LlamaCpp) -> None:
    """GBNF's token terminals force tokens by id."""
    ids = await backend.tokenize(" Paris is", add_special=False, parse_special=False)
    text = "root ::= " + " ".join(f"<[{token}]>" for token in ids)
    assert await text_of(backend, job_of(Grammar("gbnf", text, "grammar"))) == (" Paris is", "end")


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("gbnf", "root ::= x", "there is no rule 'x'"),
        ("gbnf", "root ::= <[99999]>", "'<[99999]>' is not one token of this model"),
        # llama.cpp takes a part of `app` and `apple` for the "a", and ends with an exception.
        ("gbnf", 'root ::= "a" !<|im_end|>*', "'!<|im_end|>' can come after characters"),
        ("gbnf", 'root ::= "a" <[1003]>', "'<[1003]>' can come after characters"),
        ("gbnf", "root ::= <two words>", "'<two words>' is not one token of this model"),
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("lark", "start: foo", 'unknown name: "foo"'),
        ("lark", "start: " + "x" * 70_000, "it is 70007 characters long"),
        ("json_schema", '{"type": "strange"}', "Invalid type: strange"),
        ("json_schema", '{"$ref": "#"}', "'$ref' is circular"),
        (
            "json_schema",
            '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/items"}}, "items": {"$ref": "#"}}',
            "'$ref' is circular",
        ),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    ],
)
async def test_a_wrong_grammar_is_the_clients_mistake(
    backend: LlamaCpp, kind: GrammarKind, text: str, reason: str
) -> None:
    """An invalid grammar is a 400 that names the request's field and the reason."""
    with pytest.raises(InvalidGrammar) as caught:
        await events_of(backend, job_of(Grammar(kind, text, "the_field")))
    # The error names a keyword with its place in the schema.
    place = f".{keyword[0]}" if (keyword := re.search(r"uniqueItems|\$ref", reason)) else ""
    assert caught.value.param == "the_field" + place
    assert render(caught.value)[0] == 400
    assert reason in caught.value.message
    assert "<state>" not in caught.value.message
    assert len(caught.value.message) < 1000


async def test_a_dead_end_is_told_and_nobody_else_hears_of_it(backend: LlamaCpp) -> None:
    """A grammar that no token can continue ends only its own request, with an error."""
    dead = Grammar("gbnf", 'root ::= "ab" "\\x00"', "grammar")
    results = await asyncio.gather(
        events_of(backend, job_of(dead)),
        text_of(backend, job_of(DIGITS)),
        return_exceptions=True,
    )
    assert isinstance(results[0], InvalidGrammar)
    assert "allows no further token" in results[0].message
    assert isinstance(results[1], tuple)


async def test_a_complete_grammar_ends_even_where_ends_are_banned(backend: LlamaCpp) -> None:
    """A completed grammar ends the completion even with `ignore_eos`."""
    job = job_of(DIGITS, extras={"ignore_eos": True})
    text, reason = await text_of(backend, job)
    assert re.fullmatch("[0-9]{3}", text)
    assert reason == "end"


@pytest.mark.parametrize("kind", ["lark", "gbnf", "json_schema"])
async def test_a_long_chain_of_rules_is_survived(backend: LlamaCpp, kind: GrammarKind) -> None:
    """A grammar with the longest possible chain of rules is followed and does not crash the
    engine."""
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1500)}
    text = {
        "lark": "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(4000)) + 'a4000: "x"',
        "gbnf": "root ::= a0\n"
        + "".join(f"a{i} ::= a{i + 1}\n" for i in range(3000))
        + 'a3000 ::= "x"',
        "json_schema": json.dumps(
            {"$defs": {**definitions, "d1500": {"const": "x"}}, "$ref": "#/$defs/d0"}
        ),
    }[kind]
    answer, reason = await text_of(backend, job_of(Grammar(kind, text, "grammar")))
    assert (answer.strip('"'), reason) == ("x", "end")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "string", "pattern": "^(a{1000}){1000}$"}'),
        ("regex", "(?x)((a{1000 }){1000 }){1000 }"),
        ("regex", "((a{100}){100}){50}"),
        ("lark", "start: A | B\nA: /((a{100}){100}){9}/\nB: /x{20000}/"),
        ("json_schema", '{"properties": {"a": {"pattern": "^b((a{9}){999}){99}$"}}}'),
    ],
)
async def test_repetitions_of_repetitions_hold_nobody(
    backend: LlamaCpp, kind: GrammarKind, text: str
) -> None:
    """Nested repetitions are rejected within three seconds, because one thread serves all
    requests."""
    start = time.monotonic()
    with pytest.raises(InvalidGrammar):
        await events_of(backend, job_of(Grammar(kind, text, kind)))
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    "beside",
    [
        {"type": "object"},
        {"required": ["a"]},
        {"nullable": True},
        {"anyOf": [{"minProperties": 0}]},
    ],
    ids=lambda one: next(iter(one)),
)
async def test_copies_of_definitions_are_counted_before(
    backend: LlamaCpp, beside: dict[str, Any]
) -> None:
    """References next to other keywords, doubled at each level, are rejected at once."""

    def doubled(most: int) -> Grammar:
        definitions: dict[str, Any] = {f"d{most}": {"type": "object"}}
        for level in range(most):
            part = {"$ref": f"#/$defs/d{level + 1}", **beside}
            definitions[f"d{level}"] = {"type": "object", "properties": {"a": part, "b": part}}
        schema = {"$ref": "#/$defs/d0", "$defs": definitions}
        return Grammar("json_schema", json.dumps(schema), "json_schema")

    start = time.monotonic()
    with pytest.raises(InvalidGrammar, match="next to other keywords need more than 10000 copies"):
        async with backend.open(job_of(doubled(26))):
            pass
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("copies", [0, 3])
async def test_required_names_count_as_properties(backend: LlamaCpp, copies: int) -> None:
    """Names that only `required` has count as properties, also in the copies of a definition."""
    names = [f"a{number}" for number in range(5_001)]

    async def opened(count: int, copies: int) -> None:
        schema: dict[str, Any] = {"required": names[:count]}
        schema["properties"] = {name: {"type": "null"} for name in names[:count:2]}
        if copies:
            part = {"$ref": "#/$defs/d", "minProperties": 0}
            definition = {"type": "object", "required": names[:count]}
            parts = {f"b{number}": part for number in range(copies)}
            schema = {"properties": parts, "$defs": {"d": definition}}
        text = json.dumps({"type": "object", **schema})
        async with backend.open(job_of(Grammar("json_schema", text, "schema"))):
            pass

    await opened(4_990, min(copies, 1))
    start = time.monotonic()
    with pytest.raises(InvalidGrammar, match=r"'required' has|10000 copies") as error:
        await opened(4_990 if copies else 5_001, copies)
    assert error.value.param == ("schema" if copies else "schema.required")
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("number", [2**53 + 1, 123456789012345678, -(2**63) - 1, 10**100])
async def test_long_integers_are_not_rounded(backend: LlamaCpp, number: int) -> None:
    """An integer that a double would round is written as the schema lists it."""
    schema = {
        "type": "object",
        "properties": {"id": {"enum": [number]}, "const": {"const": [{"a": number}]}},
        "required": ["id", "const"],
        "additionalProperties": False,
    }
    job = job_of(Grammar("json_schema", json.dumps(schema), ""), 1000)
    text, _ = await text_of(backend, job)
    assert json.loads(text) == {"id": number, "const": [{"a": number}]}


async def test_references_alone_are_not_copied(backend: LlamaCpp) -> None:
    """Definitions that refer to the next twice are cheap."""
    definitions: dict[str, Any] = {"d26": {"type": "string", "maxLength": 1}}
    for level in range(26):
        part = {"$ref": f"#/$defs/d{level + 1}", "description": "The next."}
        definitions[f"d{level}"] = {"anyOf": [part, part, {"type": "null"}]}
    schema = {"$ref": "#/$defs/d0", "$defs": definitions}
    text, _ = await text_of(backend, job_of(Grammar("json_schema", json.dumps(schema), "")))
    assert text == "null" or len(json.loads(text)) <= 1
