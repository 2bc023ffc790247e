"""Tests of engine extras in the spellings of llama.cpp's clients."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from latimer.schemas.openai.completions import CompletionRequest

C = "/v1/completions"
# The field, a spelling, and the value that it means.
SPELLINGS: list[tuple[str, Any, Any]] = [
    ("top_k", -1, 0),
    ("top_k", -5, 0),
    ("top_k", 20.0, 20),
    ("mirostat", 2.0, 2),
    ("dry_allowed_length", 2.0, 2),
    ("dry_penalty_last_n", -1.0, -1),
    ("repeat_last_n", -1, -1),
    ("repeat_last_n", 64.0, 64),
    ("repeat_penalty", 0, 1.0),
    ("repeat_penalty", 1.1, 1.1),
    ("grammar", "", None),
    ("dry_sequence_breakers", '["\\n", ":"]', ["\n", ":"]),
    ("dry_sequence_breakers", ' [ "a" ]', ["a"]),
    ("dry_sequence_breakers", "[]", []),
    ("dry_sequence_breakers", "\n", ["\n"]),
    ("dry_sequence_breakers", "[/INST]", ["[/INST]"]),
    ("dry_sequence_breakers", "", None),
]
WRONG: list[tuple[str, Any, str]] = [
    ("top_k", 20.5, "invalid_type"),
    ("top_k", True, "invalid_type"),
    ("top_k", 2**31, "integer_above_max_value"),
    ("repeat_last_n", -2, "integer_below_min_value"),
    ("repeat_penalty", -1, "decimal_below_min_value"),
    ("dry_sequence_breakers", '["a"', "invalid_type"),
    ("dry_sequence_breakers", "[" + '"' * 100_000, "invalid_type"),
    ("dry_sequence_breakers", '["a", 5]', "invalid_type"),
    ("dry_sequence_breakers", ["a", 5], "invalid_type"),
]


@pytest.mark.parametrize(("field", "spelling", "value"), SPELLINGS)
def test_a_spelling_has_llama_cpps_meaning(field: str, spelling: Any, value: Any) -> None:
    """A spelling of llama.cpp's clients becomes the one value that every engine gets."""
    request = CompletionRequest.model_validate({"model": "demo", field: spelling})
    found = getattr(request, field)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(("field", "value", "code"), WRONG)
async def test_a_value_without_a_meaning_is_refused(
    echo: httpx2.AsyncClient, field: str, value: Any, code: str
) -> None:
    """An unknown spelling is a 400 that names the field."""
    reply = await echo.post(C, json={"model": "demo", "prompt": "a", field: value})
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["param"].startswith(field)
    assert error["code"] == code


async def test_an_error_in_a_string_names_the_element(echo: httpx2.AsyncClient) -> None:
    """The error for an element of an array as a JSON string has its index."""
    for text, code in (('["a", 5]', "invalid_type"), (f'["a", "{"b" * 41}"]', "string_above_max")):
        body = {"model": "demo", "prompt": "a", "dry_sequence_breakers": text}
        error = (await echo.post(C, json=body)).json()["error"]
        assert error["param"] == "dry_sequence_breakers[1]"
        assert error["code"].startswith(code)


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_engines_get_the_meaning(engine: str, apps: Any, client_of: Any) -> None:
    """A request in these spellings is served, with the text of one in the engine's own values."""
    body = {"model": "demo", "prompt": " Lisbon" * 9, "max_tokens": 12, "seed": 3}
    odd = {
        "top_k": -1, "repeat_last_n": -1, "repeat_penalty": 0, "grammar": "",
        "dry_sequence_breakers": '["\\n"]', "dry_allowed_length": 2.0, "dry_penalty_last_n": -1,
        "dry_multiplier": 0.8,
    }  # fmt: skip
    plain = {
        "top_k": 0, "repeat_last_n": 2048, "repeat_penalty": 1.0, "dry_allowed_length": 2,
        "dry_sequence_breakers": ["\n"], "dry_penalty_last_n": 2048, "dry_multiplier": 0.8,
    }  # fmt: skip
    async with client_of(apps(engine)) as client:
        replies = [await client.post(C, json={**body, **extras}) for extras in (odd, plain)]
    assert [reply.status_code for reply in replies] == [200, 200], replies[0].text
    assert replies[0].json()["choices"] == replies[1].json()["choices"]


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_the_whole_context_counts(engine: str, apps: Any, client_of: Any) -> None:
    """`repeat_last_n: -1` penalises a token of the prompt that a short window does not reach."""
    text = "<|im_start|>user\nSay: apple<|im_end|>\n<|im_start|>assistant\n"
    body = {"model": "demo", "prompt": text, "max_tokens": 5, "temperature": 0}
    async with client_of(apps(engine)) as client:
        texts = [
            (await client.post(C, json={**body, "repeat_penalty": 10.0, "repeat_last_n": last}))
            .json()["choices"][0]["text"]
            for last in (0, -1)
        ]  # fmt: skip
    assert texts[0] == "apple"
    assert texts[1] != "apple"


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_no_sequence_breakers(engine: str, apps: Any, client_of: Any) -> None:
    """Without sequence breakers DRY ends a repetition of lines, which the default ones keep."""
    dry = {"dry_multiplier": 20.0}
    wanted: list[dict[str, Any]] = [
        {}, dry, {**dry, "dry_sequence_breakers": []}, {**dry, "dry_sequence_breakers": "[]"},
        {"dry_sequence_breakers": []},
    ]  # fmt: skip
    async with client_of(apps(engine)) as client:
        found = await client.post("/tokenize", json={"prompt": " Lisbon"})
        token = found.json()["tokens"][0]
        body = {"model": "demo", "prompt": " Lisbon\n" * 12, "max_tokens": 1, "temperature": 0,
                "logit_bias": {token: 20}}  # fmt: skip
        replies = [await client.post(C, json={**body, **extras}) for extras in wanted]
    kept = [reply.json()["choices"][0]["text"] == " Lisbon" for reply in replies]
    assert kept == [True, True, False, False, True]
