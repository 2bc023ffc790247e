"""Tests of the limits of OpenAI's service, which apply with `limits="openai"` only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.hosted import CHAT_LIMITS, COMPLETION_LIMITS, table
from latimer.adapter.model_entry import ModelEntry
from latimer.adapter.service import Service
from latimer.adapter.settings import Settings
from latimer.backends.base import Backend
from latimer.backends.errors import RequestError
from latimer.backends.llama_cpp import LlamaCpp
from support.clients import adapting
from support.recordings import DEMO_CHATML

C, H = "/v1/completions", "/v1/chat/completions"
COUNT = "Count to 12."
COUNTED = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12."
ASKED = {"role": "user", "content": COUNT}
BASE: dict[str, dict[str, Any]] = {
    C: {"model": "demo", "prompt": DEMO_CHATML.format(COUNT), "temperature": 0, "max_tokens": 64},
    H: {"model": "demo", "messages": [ASKED], "temperature": 0},
}
DROP = object()
OTHERS = [f"none {number}" for number in range(127)]
UNNAMED = "you must provide a model parameter"

# Path, changes, the text by default, and OpenAI's error.
BEYOND: list[tuple[str, dict[str, Any], str, str]] = [
    (C, {"model": DROP}, COUNTED, UNNAMED),
    (H, {"model": DROP}, COUNTED, UNNAMED),
    (H, {"model": ""}, COUNTED, UNNAMED),
    (C, {"model": None}, COUNTED, UNNAMED),
    (C, {"stop": [*"abcd", "10"]}, "1, 2, 3, 4, 5, 6, 7, 8, 9, ",
     "Invalid 'stop': array too long. Expected an array with maximum length 4, but got an array "
     "with length 5 instead."),
    (H, {"stop": [*OTHERS, "4"]}, "1, 2, 3, ", "Invalid 'stop': array too long. Expected an array"),
    (H, {"stop": ["4", *OTHERS]}, "1, 2, 3, ", "Invalid 'stop': array too long. Expected an array"),
    (C, {"temperature": 3, "top_k": 1}, COUNTED,
     "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 3 inste"),
    (H, {"temperature": 2.1, "top_k": 1}, COUNTED,
     "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 2.1 inst"),
    *((path, {field: bound, "stop": "2"}, "1, ", f"Invalid '{field}': decimal {words} value. Exp")
      for path in (C, H) for field in ("presence_penalty", "frequency_penalty")
      for bound, words in ((2.5, "above maximum"), (-3, "below minimum"))),
    (C, {"max_tokens": -1}, COUNTED,
     "Invalid 'max_tokens': integer below minimum value. Expected a value >= 0, but got -1 inste"),
    (C, {"max_tokens": -2}, COUNTED, "Invalid 'max_tokens': integer below minimum value."),
    (H, {"max_tokens": -1}, COUNTED,
     "Invalid 'max_tokens': integer below minimum value. Expected a value >= 1, but got -1 inste"),
    (H, {"max_tokens": -2}, COUNTED, "Invalid 'max_tokens': integer below minimum value."),
    (H, {"max_completion_tokens": -1}, COUNTED, "Invalid 'max_completion_tokens': integer below"),
    (H, {"max_tokens": -1, "max_completion_tokens": 5}, "1, 2, 3", "Invalid 'max_tokens': integer"),
    (H, {"messages": [{"role": "assistant", "content": "Hi", "tool_calls": []}, ASKED]}, COUNTED,
     "Invalid 'messages[0].tool_calls': empty array. Expected an array with minimum length 1, but"),
    (C, {"logprobs": 6}, COUNTED,
     "Invalid 'logprobs': integer above maximum value. Expected a value <= 5, but got 6 instead."),
    (C, {"logit_bias": ""}, COUNTED, "Invalid type for 'logit_bias': expected an object, but got"),
    (H, {"logit_bias": ""}, COUNTED, "Invalid type for 'logit_bias': expected an object, but got"),
    (H, {"tool_choice": "none"}, COUNTED,
     "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are specified."),
    (H, {"tool_choice": "auto", "tools": []}, COUNTED, "Invalid value for 'tool_choice': 'tool_ch"),
    (H, {"parallel_tool_calls": False}, COUNTED, "Invalid value for 'parallel_tool_calls': 'para"),
    (H, {"function_call": "none"}, COUNTED, "Invalid value for 'function_call': 'function_call'"),
    (H, {"top_logprobs": 0, "logprobs": False}, COUNTED, "The 'top_logprobs' parameter is only al"),
    (H, {"metadata": {}}, COUNTED, "The 'metadata' parameter is only allowed when 'store' is en"),
]  # fmt: skip
# Requests beyond every engine, with the bound that each mode names.
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (C, {"stop": ["a"] * 129}, "length 128,", "length 4,"),
    (C, {"logprobs": 21}, "<= 20,", "<= 5,"),
    (C, {"max_tokens": -3}, ">= 0,", ">= 0,"),
    (C, {"temperature": 101}, "<= 100,", "<= 2,"),
    (H, {"temperature": -1}, ">= 0,", ">= 0,"),
    (H, {"presence_penalty": -101}, ">= -100,", ">= -2,"),
    (H, {"max_tokens": 0}, ">= 1,", ">= 1,"),
    (H, {"max_tokens": "a", "model": DROP}, "expected an integer", UNNAMED),
    (H, {"tool_choice": "required"}, "only allowed when 'tools'", "only allowed when 'tools'"),
    (C, {"model": []}, "expected a string, but got an array", "expected a string, but got an arr"),
    (H, {"tool_choice": "some"}, "Supported values", "Supported values"),
    (H, {"function_call": {"name": "f"}}, "when 'functions'", "when 'functions'"),
]


def body_of(path: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return a request with some fields changed or omitted."""
    merged = {**BASE[path], **changes}
    return {name: value for name, value in merged.items() if value is not DROP}


def text_of(reply: httpx2.Response) -> str:
    """Return the text of the only choice."""
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.fixture(scope="module", params=["limits", "strict"])
async def hosted(
    request: pytest.FixtureRequest, make_backend: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of an adapter with OpenAI's limits, set by either option."""
    options: Any = {"limits": "openai"} if request.param == "limits" else {"strict": True}
    async with adapting(make_backend("llama_cpp"), **options) as client:
        yield client


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
@pytest.mark.parametrize(("path", "changes", "text", "_said"), BEYOND)
async def test_an_engine_serves_what_openai_refuses(
    engine: str, path: str, changes: dict[str, Any], text: str, _said: str, apps: Any,
    client_of: Any,
) -> None:  # fmt: skip
    """A request beyond OpenAI's limits gets the complete answer by default."""
    async with client_of(apps(engine)) as client:
        reply = await client.post(path, json=body_of(path, changes))
    assert text_of(reply) == text


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_strong_values_are_not_clipped(engine: str, apps: Any, client_of: Any) -> None:
    """A penalty and a temperature beyond OpenAI's limits have effects that OpenAI's have not."""
    async with client_of(apps(engine)) as client:
        for field, bound in (("presence_penalty", 2), ("frequency_penalty", 0.1)):
            weak, strong = [
                text_of(await client.post(C, json=body_of(C, {field: value})))
                for value in (bound, 100)
            ]
            assert weak.count(",") > 1 >= strong.count(",")
        warm, hot = [
            await client.post(C, json=body_of(C, {
                "temperature": value, "seed": 1, "n": 16, "max_tokens": 1}))
            for value in (2, 100)
        ]  # fmt: skip
    likely = [
        sum(choice["text"] == "1" for choice in reply.json()["choices"]) for reply in (warm, hot)
    ]
    assert likely[0] > 4 > 2 > likely[1]


@pytest.mark.parametrize(("path", "changes", "_text", "said"), BEYOND)
async def test_openais_limits_are_refused_in_its_words(
    hosted: httpx2.AsyncClient, path: str, changes: dict[str, Any], _text: str, said: str
) -> None:
    """With OpenAI's limits, or `strict`, the same request is a 400 in OpenAI's words."""
    reply = await hosted.post(path, json=body_of(path, changes))
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(said)


@pytest.mark.parametrize(("path", "changes", "engine", "openai"), WRONG)
async def test_what_no_engine_can_do_is_always_refused(
    echo: httpx2.AsyncClient, hosted: httpx2.AsyncClient, path: str, changes: dict[str, Any],
    engine: str, openai: str,
) -> None:  # fmt: skip
    """A request beyond the engine's limits is a 400 that names the limits in force."""
    for client, said in ((echo, engine), (hosted, openai)):
        reply = await client.post(path, json=body_of(path, changes))
        assert reply.status_code == 400
        assert said in reply.json()["error"]["message"]


@pytest.mark.parametrize("field", ["tools", "functions"])
async def test_many_tools(
    demo: httpx2.AsyncClient, hosted: httpx2.AsyncClient, field: str
) -> None:  # fmt: skip
    """By default 512 tools are only limited by the context length; OpenAI allows 128."""
    functions = [{"name": f"f{number}"} for number in range(513)]
    tools = [{"type": "function", "function": one} for one in functions]
    sent = tools if field == "tools" else functions
    said = []
    for client, count in ((demo, 512), (demo, 513), (hosted, 129), (hosted, 513)):
        reply = await client.post(H, json=body_of(H, {field: sent[:count]}))
        assert reply.status_code == 400
        said.append(reply.json()["error"]["message"])
    assert said[0].startswith("This model's maximum context length is 2048 tokens.")
    assert (
        f"Invalid '{field}': array too long. Expected an array with maximum length 512" in said[1]
    )
    assert all("maximum length 128, but got" in one for one in said[2:])


async def test_engine_fields_are_outside_openais_limits(hosted: httpx2.AsyncClient) -> None:
    """OpenAI's limits do not concern the fields of engines."""
    own = {"top_k": -1, "repeat_last_n": -1, "repeat_penalty": 0, "grammar": ""}
    assert text_of(await hosted.post(C, json=body_of(C, own))) == COUNTED
    others: list[dict[str, Any]] = [
        {"n_predict": -1},
        {"options": {"num_predict": -2}},
        {"max_length": 64, "n_probs": 6},
        {"max_length": 64, "stop_sequence": list("abcde")},
    ]
    for fields in others:
        body = body_of(C, {"max_tokens": DROP, **fields})
        assert text_of(await hosted.post(C, json=body)) == COUNTED


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("top", [10, 20])
async def test_twenty_alternatives(
    engine: str, top: int, echo: bool, apps: Any, client_of: Any
) -> None:
    """Completions have up to 20 alternatives for each token, also for a prompt's."""
    body = {"prompt": "The sky is", "max_tokens": 2, "logprobs": top, "echo": echo}
    async with client_of(apps(engine)) as client:
        reply = await client.post(C, json=body_of(C, body))
    found = reply.json()["choices"][0]["logprobs"]["top_logprobs"]
    assert len(found) > 2 or not echo
    # Two tokens of the same text are one key.
    assert max(len(one) for one in found if one is not None) in (top, top + 1)


async def test_koboldcpp_names_the_field_of_completions(apps: Any, client_of: Any) -> None:
    """More alternatives than koboldcpp reports are a 400 that names `logprobs`."""
    async with client_of(apps("koboldcpp")) as client:
        body = {"model": "demo", "prompt": "a", "logprobs": 11}
        error = (await client.post(C, json=body)).json()["error"]
    assert (error["param"], error["code"]) == ("logprobs", "unsupported_parameter")


async def test_a_response_names_the_model_that_the_request_omits(
    make_backend: Any, client_of: Any
) -> None:
    """A response to a request without a model has the served name, the first of several."""
    app = OpenAIAdapter(make_backend("echo"), model_names=["gpt-4o", "other"])
    async with client_of(app) as client:
        for path in (C, H):
            reply = await client.post(path, json=body_of(path, {"model": DROP, "max_tokens": 1}))
            assert reply.json()["model"] == "gpt-4o"
    await app.aclose()


async def test_of_several_models_one_must_be_named(make_backend: Any) -> None:
    """With several models, the error for a missing or unknown name lists their names."""
    inside: Backend = LlamaCpp(gpu_layers=0)
    service = Service(
        [ModelEntry(inside, ["one"]), ModelEntry(make_backend("llama_server"), ["two"])]
    )
    for name in (None, ""):
        with pytest.raises(RequestError, match=r"^you must .* Expected one of: one, two\.$"):
            await service.resolve(name)
    with pytest.raises(RequestError, match=r"`gpt-4o` does not exist .*one, two.*--any-model\."):
        await service.resolve("gpt-4o")
    await service.aclose()


async def test_an_unknown_model_is_refused_in_openais_words(
    make_backend: Any, client_of: Any
) -> None:
    """With OpenAI's limits, the error for an unknown model is OpenAI's own."""
    app = OpenAIAdapter(make_backend("echo"), limits="openai")
    async with client_of(app) as client:
        error = (await client.post(H, json=body_of(H, {"model": "gpt-5"}))).json()["error"]
    await app.aclose()
    assert error["message"] == ("The model `gpt-5` does not exist or you do not have access to it.")


def test_the_setting_comes_from_flag_variable_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`limits` is a flag, a variable and a key, and other words are an error that lists these."""
    file = tmp_path / "latimer.toml"
    file.write_text('limits = "openai"\n')
    assert Settings.load(file).limits == "openai"
    assert Settings.load(file, limits="engine").limits == "engine"
    monkeypatch.setenv("LATIMER_LIMITS", "openai")
    assert Settings.load(None).limits == "openai"
    monkeypatch.setenv("LATIMER_LIMITS", "none")
    with pytest.raises(
        ValueError, match="LATIMER_LIMITS must be one of engine, openai, not 'none'"
    ):
        Settings.load(None)
    with pytest.raises(ValueError, match="limits must be one of engine, openai, not 'none'"):
        OpenAIAdapter(LlamaCpp(), limits="none")  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
@pytest.mark.parametrize(("most", "text"), [(1, "1"), (6, "1, 2, 3,"), (-1, COUNTED)])
async def test_a_response_may_be_shorter_than_openais(
    engine: str, most: int, text: str, apps: Any, client_of: Any
) -> None:
    """By default `max_output_tokens` may be any limit of the engine, and -1 means no limit."""
    body = {"model": "demo", "input": COUNT, "temperature": 0, "max_output_tokens": most}
    async with client_of(apps(engine)) as client:
        made = (await client.post("/v1/responses", json=body)).json()
    assert made["output"][0]["content"][0]["text"] == text
    assert made["max_output_tokens"] == (most if most > 0 else None)
    assert made["status"] == ("incomplete" if most > 0 else "completed")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
async def test_openais_limit_of_a_response(hosted: httpx2.AsyncClient, path: str) -> None:
    """With OpenAI's limits, a response has at least 16 tokens."""
    for most, status in ((15, 400), (-1, 400), (16, 200)):
        body = {"model": "demo", "input": COUNT, "max_output_tokens": most}
        reply = await hosted.post(path, json=body)
        assert reply.status_code == status, reply.text
        if status == 400:
            error = reply.json()["error"]
            assert f"Expected a value >= 16, but got {most} instead." in error["message"]
            assert error["param"] == "max_output_tokens"


def test_the_documentation_has_the_table_of_the_code() -> None:
    """The documentation has the table of OpenAI's limits, and a test exceeds each of them."""
    docs = Path(__file__).parent.parent.parent / "docs" / "fidelity.md"
    assert table() in docs.read_text()
    tested = {(path, field) for path, changes, *_ in BEYOND for field in changes}
    tested |= {(H, "tools"), (H, "functions")}
    for path, hosted in ((C, COMPLETION_LIMITS), (H, CHAT_LIMITS)):
        assert {(path, limit.field) for limit in hosted} <= tested
