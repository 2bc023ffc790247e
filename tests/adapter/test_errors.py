"""Every malformed request gets the documented error (contract, sections 1 to 3)."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

C = "/v1/completions"
H = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
ASKED = USER[0]
TOOL = {"type": "function", "function": {"name": "f"}}
RICH = {"properties": {f"p{i}": {"enum": [f"{i}" * 20, "b"]} for i in range(160)}}
MANY = [
    {"type": "function", "function": {"name": f"g{i}", "parameters": RICH, "strict": True}}
    for i in range(127)
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
BASE: dict[str, dict[str, Any]] = {
    C: {"model": "demo", "prompt": "Hi"},
    H: {"model": "demo", "messages": USER},
}
DROP = object()


def body_of(path: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A right body with some fields changed or left out."""
    merged = {**BASE[path], **changes}
    return {name: value for name, value in merged.items() if value is not DROP}


# path, changes, param, code, the message's exact words (or their beginning, with …)
CASES: list[tuple[str, dict[str, Any], str | None, str | None, str]] = [
    (C, {"model": DROP}, None, None, "you must provide a model parameter"),
    (H, {"model": DROP}, None, None, "you must provide a model parameter"),
    (C, {"model": 5}, "model", "invalid_type",
     "Invalid type for 'model': expected a string, but got an integer instead."),
    (H, {"messages": DROP}, "messages", "missing_required_parameter",
     "Missing required parameter: 'messages'."),
    (H, {"messages": []}, "messages", "empty_array",
     "Invalid 'messages': empty array. Expected an array with minimum length 1, but got an empty "
     "array instead."),
    (H, {"messages": "Hi"}, "messages", "invalid_type",
     "Invalid type for 'messages': expected an array, but got a string instead."),
    (H, {"messages": ["Hi"]}, "messages[0]", "invalid_type",
     "Invalid type for 'messages[0]': expected an object, but got a string instead."),
    (H, {"messages": [{"content": "Hi"}]}, "messages[0].role", "missing_required_parameter",
     "Missing required parameter: 'messages[0].role'."),
    (H, {"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter",
     "Missing required parameter: 'messages[0].content'."),
    (H, {"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role", "invalid_value",
     "Invalid value: 'robot'. Supported values are: 'system', 'developer', 'user', 'assistant', "
     "'tool', and 'function'."),
    (H, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type",
     "Invalid type for 'messages[0].content': expected one of a string or array of objects, but "
     "got an integer instead."),
    (H, {"messages": [*USER, {"role": "user", "content": [{"type": "video"}]}]},
     "messages[1].content[0].type", "invalid_value", "Invalid value: 'video'. Supported values…"),
    (H, {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "messages[0].content[0].text", "missing_required_parameter", "Missing required parameter…"),
    (H, {"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].tool_calls",
     "empty_array", "Invalid 'messages[0].tool_calls': empty array…"),
    (H, {"messages": [{"role": "assistant"}]}, "messages[0].content",
     "missing_required_parameter", "Missing required parameter: 'messages[0].content'."),
    (C, {"prompt": 5}, "prompt", "invalid_type", "Invalid type for 'prompt'…"),
    (C, {"prompt": []}, "prompt", "empty_array", "Invalid 'prompt': empty array…"),
    (C, {"prompt": ["a", 1]}, "prompt[1]", "invalid_type", "Invalid type for 'prompt[1]'…"),
    (C, {"prompt": ["a", [1]]}, "prompt[1]", "invalid_type", "Invalid type for 'prompt[1]'…"),
    (C, {"prompt": [[1], []]}, "prompt[1]", "empty_array", "Invalid 'prompt[1]': empty array…"),
    (C, {"prompt": [1, 1.5]}, "prompt[1]", "invalid_type", "Invalid type for 'prompt[1]'…"),
    (C, {"prompt": [True]}, "prompt[0]", "invalid_type", "Invalid type for 'prompt[0]'…"),
    (C, {"prompt": [1, -1]}, "prompt[1]", "integer_below_min_value",
     "Invalid 'prompt[1]': integer below minimum value. Expected a value >= 0, but got -1 "
     "instead."),
    (C, {"prompt": [99999]}, "prompt", "invalid_value", "Invalid 'prompt': 99999 is not a token…"),
    (C, {"max_tokens": "five"}, "max_tokens", "invalid_type",
     "Invalid type for 'max_tokens': expected an integer, but got a string instead."),
    (C, {"max_tokens": "5"}, "max_tokens", "invalid_type", "Invalid type for 'max_tokens'…"),
    (C, {"max_tokens": 5.5}, "max_tokens", "invalid_type",
     "Invalid type for 'max_tokens': expected an integer, but got a decimal number instead."),
    (C, {"max_tokens": True}, "max_tokens", "invalid_type",
     "Invalid type for 'max_tokens': expected an integer, but got a boolean instead."),
    (C, {"max_tokens": -15335}, "max_tokens", "integer_below_min_value",
     "Invalid 'max_tokens': integer below minimum value. Expected a value >= 0, but got -15335 "
     "instead."),
    (H, {"max_tokens": 0}, "max_tokens", "integer_below_min_value",
     "Invalid 'max_tokens': integer below minimum value. Expected a value >= 1, but got 0 "
     "instead."),
    (H, {"max_completion_tokens": 0}, "max_completion_tokens", "integer_below_min_value",
     "Invalid 'max_completion_tokens': integer below minimum value…"),
    (H, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "invalid_value",
     "Invalid 'max_tokens': 5 differs from 'max_completion_tokens', 6…"),
    (C, {"temperature": 3}, "temperature", "integer_above_max_value",
     "Invalid 'temperature': integer above maximum value. Expected a value <= 2, but got 3 "
     "instead."),
    (C, {"temperature": 2.5}, "temperature", "decimal_above_max_value",
     "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 2.5 "
     "instead."),
    (C, {"temperature": -0.5}, "temperature", "decimal_below_min_value",
     "Invalid 'temperature': decimal below minimum value. Expected a value >= 0, but got -0.5 "
     "instead."),
    (C, {"temperature": "hot"}, "temperature", "invalid_type",
     "Invalid type for 'temperature': expected a decimal number, but got a string instead."),
    (C, {"top_p": 1.5}, "top_p", "decimal_above_max_value", "Invalid 'top_p': decimal above…"),
    (C, {"presence_penalty": 2.5}, "presence_penalty", "decimal_above_max_value", "Invalid…"),
    (C, {"frequency_penalty": -2.5}, "frequency_penalty", "decimal_below_min_value", "Invalid…"),
    (C, {"n": 0}, "n", "integer_below_min_value", "Invalid 'n': integer below minimum value…"),
    (C, {"n": 129}, "n", "integer_above_max_value", "Invalid 'n': integer above maximum value…"),
    (C, {"logprobs": 6}, "logprobs", "integer_above_max_value", "Invalid 'logprobs'…"),
    (C, {"logprobs": True}, "logprobs", "invalid_type",
     "Invalid type for 'logprobs': expected an integer, but got a boolean instead."),
    (H, {"logprobs": 1}, "logprobs", "invalid_type",
     "Invalid type for 'logprobs': expected a boolean, but got an integer instead."),
    (H, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value",
     "Invalid 'top_logprobs'…"),
    (H, {"top_logprobs": 3}, "top_logprobs", None,
     "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled."),
    (C, {"best_of": 21}, "best_of", "integer_above_max_value", "Invalid 'best_of'…"),
    (C, {"n": 5, "best_of": 4}, "best_of", None,
     "You requested that the server return more choices than it will generate (HINT: you must set "
     "'n' (currently 5) to be at most 'best_of' (currently 4), or omit either parameter if you "
     "don't specifically want to use them.)"),
    (C, {"best_of": 3, "stream": True}, "best_of", None, "Results cannot be streamed…"),
    (C, {"suffix": "x", "echo": True, "logprobs": 1}, "suffix", "invalid_value",
     "Invalid 'suffix': 'echo' with 'logprobs'…"),
    (C, {"logit_bias_vocabulary": "latin", "logit_bias": {"1": 1}}, "logit_bias_vocabulary",
     "invalid_value", "Invalid value: 'latin'. Supported values are: …"),
    (C, {"stop": list("abcde")}, "stop", "array_above_max_length",
     "Invalid 'stop': array too long. Expected an array with maximum length 4, but got an array "
     "with length 5 instead."),
    (C, {"stop": 5}, "stop", "invalid_type",
     "Invalid type for 'stop': expected one of a string or array of strings, but got an integer "
     "instead."),
    (C, {"stop": ["a", 5]}, "stop[1]", "invalid_type",
     "Invalid type for 'stop[1]': expected a string, but got an integer instead."),
    (C, {"seed": 2**63}, "seed", "integer_above_max_value", "Invalid 'seed'…"),
    (C, {"seed": 1.5}, "seed", "invalid_type", "Invalid type for 'seed'…"),
    (C, {"stream": "yes"}, "stream", "invalid_type",
     "Invalid type for 'stream': expected a boolean, but got a string instead."),
    (C, {"stream_options": {"include_usage": True}}, "stream_options", None,
     "The 'stream_options' parameter is only allowed when 'stream' is enabled."),
    (H, {"stream_options": {}}, "stream_options", None,
     "The 'stream_options' parameter is only allowed when 'stream' is enabled."),
    (H, {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage",
     "invalid_type", "Invalid type for 'stream_options.include_usage': expected a boolean…"),
    (C, {"logit_bias": {"x": 1}}, "logit_bias", "invalid_value", "Invalid key in 'logit_bias': x…"),
    (C, {"logit_bias": {"5": 101}}, "logit_bias.5", "decimal_above_max_value",
     "Invalid 'logit_bias.5': decimal above maximum value. Expected a value <= 100, but got 101 "
     "instead."),
    (C, {"logit_bias": {"5": "a"}}, "logit_bias.5", "invalid_type", "Invalid type for 'logit_b…"),
    (C, {"logit_bias": [5]}, "logit_bias", "invalid_type",
     "Invalid type for 'logit_bias': expected an object, but got an array instead."),
    (C, {"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value", "Invalid 'logit_bias': 999…"),
    (C, {"suffix": "x"}, "suffix", "unsupported_parameter", "Unsupported parameter: 'suffix'…"),
    (C, {"grammar": "root ::= ["}, "grammar", "invalid_value", "Invalid 'grammar'…"),
    (C, {"grammar": 'root ::= "a"', "lark": "x"}, "lark", "invalid_value", "Invalid 'lark'…"),
    (C, {"regex": "("}, "regex", "invalid_value", "Invalid 'regex'…"),
    (C, {"regex": 5}, "regex", "invalid_type", "Invalid type for 'regex'…"),
    (C, {"lark": "start: a"}, "lark", "invalid_value", "Invalid 'lark'…"),
    (C, {"json_schema": {"type": 5}}, "json_schema", None, "Invalid schema: In context=('type',…"),
    (C, {"json_schema": "{}"}, "json_schema", "invalid_type", "Invalid type for 'json_schema'…"),
    (C, {"oai_compat": False}, "oai_compat", "unsupported_parameter", "Unsupported parameter…"),
    (H, {"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}]},
     "tools[0].custom.format", "unsupported_parameter",
     "Unsupported parameter: 'tools[0].custom.format'…"),
    (H, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "tool_choice", None, "Invalid value for 'tool_choice': 'g' is not among the tools of the…"),
    (H, {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice",
     "invalid_value", "Invalid value for 'tool_choice': {\"type\":\"function\",…"),
    (H, {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools":
                                          {"mode": "none", "tools": [TOOL]}}}, "tool_choice",
     "invalid_value", "Invalid value for 'tool_choice': {…"),
    (H, {"tools": [TOOL, {"type": "function", "function": {"name": "g", "parameters":
                                                           {"type": "thing"}}}]},
     "tools[1].function.parameters", None,
     "Invalid schema for function 'g': In context=('type',), 'thing' is not valid under any…"),
    (H, {"tools": [{"type": "function", "function": {
        "name": "f", "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "not": {}}}}}}]},
     "tools[0].function.parameters.properties.a.not", None,
     "Invalid schema for function 'f': In context=('properties', 'a', 'not'), 'not' is not…"),
    (H, {"tools": MANY, "tool_choice": "required"}, "tools", "array_above_max_length",
     "Invalid 'tools': no grammar can be made for so many functions at once…"),
    (H, {"tools": [TOOL], "regex": "a"}, "regex", "invalid_value",
     "Invalid 'regex': with tools an answer may be a call…"),
    (H, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name",
     "invalid_value", "Invalid 'tools[0].function.name': string does not match pattern…"),
    (H, {"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools",
     "array_above_max_length", "Invalid 'tools': array too long. Expected an array with maximum…"),
    (H, {"tool_choice": "auto"}, "tool_choice", None,
     "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are specified."),
    (H, {"tool_choice": "some"}, "tool_choice", "invalid_value", "Invalid value: 'some'…"),
    (H, {"parallel_tool_calls": False}, "parallel_tool_calls", None, "Invalid value for 'parall…"),
    (H, {"function_call": "auto"}, "function_call", None, "Invalid value for 'function_call'…"),
    (H, {"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call", None,
     "Invalid value for 'function_call': 'g' is not among the functions of the request; there…"),
    (H, {"functions": [{"name": "f", "parameters": {"type": 5}}]}, "functions[0].parameters", None,
     "Invalid schema for function 'f'…"),
    (H, {"response_format": {"type": "json_object"}, "regex": "a"}, "response_format",
     "invalid_value", "Invalid 'response_format': a completion follows one grammar, and 'regex'…"),
    (H, {"response_format": {"type": "json_schema", "json_schema":
                             {"name": "n", "schema": {"type": "x"}}}}, "response_format", None,
     "Invalid schema for response_format 'n': In context=('type',), 'x' is not valid under any…"),
    (H, {"response_format": "json_object"}, "response_format", "invalid_type",
     "Invalid type for 'response_format': expected an object, but got a string instead."),
    (H, {"response_format": {"type": "xml"}}, "response_format.type", "invalid_value",
     "Invalid value: 'xml'. Supported values are: 'text', 'json_object', and 'json_schema'."),
    (H, {"response_format": {"type": "json_schema"}}, "response_format.json_schema",
     "missing_required_parameter", "Missing required parameter: 'response_format.json_schema'."),
    (H, {"store": True}, "store", "unsupported_parameter", "Unsupported parameter: 'store'…"),
    (H, {"metadata": {"a": "b"}}, "metadata", None,
     "The 'metadata' parameter is only allowed when 'store' is enabled."),
    (H, {"metadata": {"k": "v" * 513}}, "metadata.k", "string_above_max_length",
     "Invalid 'metadata.k': string too long. Expected a string with maximum length 512, but got a "
     "string with length 513 instead."),
    (H, {"modalities": ["text", "audio"], "audio": {"voice": "a", "format": "wav"}}, None,
     "unsupported_parameter", "Unsupported parameter…"),
    (H, {"modalities": ["text", "audio"]}, "audio", "missing_required_parameter", "Missing…"),
    (H, {"modalities": ["smell"]}, "modalities[0]", "invalid_value",
     "Invalid value: 'smell'. Supported values are: 'text' and 'audio'."),
    (H, {"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter", "Unsupported…"),
    (H, {"reasoning_effort": "huge"}, "reasoning_effort", "invalid_value", "Invalid value: 'hug…"),
    (H, {"web_search_options": {}}, "web_search_options", "unsupported_parameter", "Unsupport…"),
    (H, {"service_tier": "gold"}, "service_tier", "invalid_value", "Invalid value: 'gold'…"),
    (H, {"verbosity": "loud"}, "verbosity", "invalid_value", "Invalid value: 'loud'…"),
    (H, {"prediction": {"type": "content"}}, "prediction.content", "missing_required_parameter",
     "Missing required parameter: 'prediction.content'."),
    (H, {"safety_identifier": "x" * 129}, "safety_identifier", "string_above_max_length", "Inva…"),
    (H, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]},
     "messages.[0].role", None, "Invalid parameter: messages with role 'tool' must be a response…"),
    (H, {"messages": [ASKED, CALLED]}, "messages.[2].role", None,
     "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
     "'tool_call_id'. The following tool_call_ids did not have response messages: call_1"),
    (H, {"messages": [ASKED, CALLED, ASKED]}, "messages.[2].role", None,
     "An assistant message with 'tool_calls' must be followed by tool messages responding to…"),
    (H, {"messages": [ASKED, CALLED, {"role": "tool", "content": "x", "tool_call_id": "c"}]},
     "messages.[2].role", None, "Invalid parameter: messages with role 'tool' must be a…"),
    (H, {"messages": [ASKED, {**CALLED, "tool_calls": []}]}, "messages[1].tool_calls",
     "empty_array", "Invalid 'messages[1].tool_calls': empty array…"),
    (H, {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:,"}}]}]}, "messages[0].content[0].type",
     "unsupported_parameter", "Unsupported parameter: 'messages[0].content[0].type'…"),
    (C, {"top_k": -1}, "top_k", "integer_below_min_value", "Invalid 'top_k'…"),
    (C, {"prompt": "word " * 5000}, "prompt", "context_length_exceeded",
     "This model's maximum context length is 2048 tokens, however you requested…"),
    (C, {"max_tokens": 5000}, "prompt", "context_length_exceeded",
     "This model's maximum context length is 2048 tokens, however you requested 5001 tokens (1 in "
     "your prompt; 5000 for the completion). Please reduce your prompt; or completion length."),
    (H, {"messages": [{"role": "user", "content": "word " * 5000}]}, "messages",
     "context_length_exceeded", "This model's maximum context length is 2048 tokens. However…"),
    (H, {"max_tokens": 5000}, "messages", "context_length_exceeded",
     "This model's maximum context length is 2048 tokens. However, you requested 50…"),
]  # fmt: skip


def assert_error(reply: httpx2.Response, status: int, code: str | None) -> dict[str, Any]:
    """The exact error object, the headers of every reply; returns the error."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"].startswith("req_")
    value = reply.json()
    assert set(value) == {"error"}
    assert set(value["error"]) == {"message", "type", "param", "code"}
    assert value["error"]["code"] == code
    error: dict[str, Any] = value["error"]
    return error


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(
    ("path", "changes", "param", "code", "message"),
    CASES,
    ids=[f"{case[0][4:8]}-{number}-{next(iter(case[1]))}" for number, case in enumerate(CASES)],
)
async def test_malformed_requests(
    demo: httpx2.AsyncClient,
    path: str,
    changes: dict[str, Any],
    param: str | None,
    code: str | None,
    message: str,
    stream: bool,
) -> None:
    """Status 400, all four keys, the contract's words, the field; as JSON for streams too."""
    body = body_of(path, changes)
    if stream:
        if "stream" in changes or "stream_options" in changes or "best_of" in changes:
            pytest.skip("the field itself is about streams")
        body["stream"] = True
    error = assert_error(await demo.post(path, json=body), 400, code)
    assert error["type"] == "invalid_request_error"
    if "audio" not in changes:
        assert error["param"] == param
    start = message.removesuffix("…")
    assert error["message"].startswith(start) if start != message else error["message"] == message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{nope",
        b"[1, 2]",
        b'"text"',
        b'{"model": "demo", "prompt": "x", "temperature": NaN}',
        b'{"model": "demo", "prompt": "x", "unknown": Infinity}',
        b'{"model": "demo", "prompt": "x", "unknown": 1e999}',
        b'{"model": "demo", "prompt": "\xff\xfe"}',
        b'{"model": "demo", "prompt": "\\ud800"}',
        b'{"model": "demo", "prompt": "x", "unknown": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model": "demo", "prompt": "x", "unknown": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"model": "demo", "prompt": "x", "u": ' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}",
    ],
    ids=["empty", "broken", "array", "string", "nan", "infinity", "huge", "bytes", "surrogate",
         "deep", "nested", "objects"],
)  # fmt: skip
async def test_bodies_that_are_no_json(demo: httpx2.AsyncClient, body: bytes) -> None:
    """What is not JSON, or not finite, or too deep, is a 400 in the contract's words."""
    headers = {"content-type": "application/json"}
    error = assert_error(await demo.post(C, content=body, headers=headers), 400, None)
    assert error["message"].startswith("We could not parse the JSON body of your request.")
    assert error["param"] is None


async def test_the_last_of_duplicate_keys_wins(demo: httpx2.AsyncClient) -> None:
    """As in most JSON parsers, and so in most clients' tests."""
    body = b'{"model": "demo", "prompt": "Hi", "max_tokens": "x", "max_tokens": 1}'
    headers = {"content-type": "application/json"}
    reply = await demo.post(C, content=body, headers=headers)
    assert reply.json()["usage"]["completion_tokens"] <= 1


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/json; charset=utf-8", "Application/JSON", ""]
)
async def test_json_content_types(demo: httpx2.AsyncClient, content_type: str) -> None:
    """JSON with or without a charset, and no type at all, are taken."""
    body = json.dumps({**BASE[C], "max_tokens": 1}).encode()
    reply = await demo.post(C, content=body, headers={"content-type": content_type})
    assert reply.status_code == 200, reply.text


async def test_other_content_types(demo: httpx2.AsyncClient) -> None:
    """A form is refused by name, not taken for JSON."""
    reply = await demo.post(C, data={"model": "demo"})
    error = assert_error(reply, 400, "unsupported_content_type")
    assert error["message"].startswith(
        "Unsupported content type: 'application/x-www-form-urlencoded'. This API method only "
        "accepts 'application/json' requests"
    )


async def test_an_unknown_path(demo: httpx2.AsyncClient) -> None:
    """404 in the contract's words."""
    error = assert_error(await demo.post("/v1/foo", json={}), 404, None)
    assert error["message"] == "Invalid URL (POST /v1/foo)"


async def test_a_wrong_method(demo: httpx2.AsyncClient) -> None:
    """405 in the contract's words, with the methods that are allowed."""
    reply = await demo.get(C)
    error = assert_error(reply, 405, None)
    assert error["message"].startswith("Not allowed to GET on /v1/completions. (HINT:")
    assert reply.headers["allow"] == "POST"


async def test_every_nullable_field_may_be_null(demo: httpx2.AsyncClient) -> None:
    """An explicit null is the field's default."""
    from latimer.schemas.openai.chat import ChatRequest
    from latimer.schemas.openai.completions import CompletionRequest

    for path, schema in ((C, CompletionRequest), (H, ChatRequest)):
        required = BASE[path].keys()
        nulls = {name: None for name in schema.model_fields if name not in required}
        plain = await demo.post(path, json={**BASE[path], "seed": 1})
        nulled = await demo.post(path, json={**nulls, **BASE[path], "seed": 1})
        assert nulled.status_code == 200, nulled.text
        assert "x-latimer-ignored" not in nulled.headers
        assert nulled.json()["choices"] == plain.json()["choices"]


async def test_fields_without_effect_are_accepted(demo: httpx2.AsyncClient) -> None:
    """What legally changes nothing is taken; the tier is echoed as it was served."""
    fields = {
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prediction": {"type": "content", "content": "x"},
        "verbosity": "low",
        "service_tier": "auto",
        "store": False,
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "tools": [],
        "max_tokens": 2,
    }
    reply = await demo.post(H, json={**BASE[H], **fields})
    assert reply.status_code == 200, reply.text
    assert reply.json()["service_tier"] == "default"
    assert "x-latimer-ignored" not in reply.headers


async def test_unknown_fields_are_listed(demo: httpx2.AsyncClient) -> None:
    """They are ignored, and said to be, encoded so that nothing can break out of the header."""
    unknown = {"foo": 1, "é\r\nx-evil: 1": 2, "max_tokens": 1}
    messages = [{"role": "user", "content": "Hi", "mood": "good"}]
    reply = await demo.post(H, json={"model": "demo", "messages": messages, **unknown})
    assert reply.status_code == 200
    names = reply.headers["x-latimer-ignored"]
    assert names == "foo, messages[0].mood, %C3%A9%0D%0Ax-evil%3A%201"
    many = {f"field-{number}": 1 for number in range(100)}
    reply = await demo.post(C, json={**BASE[C], **many, "max_tokens": 1})
    assert reply.headers["x-latimer-ignored"].count(",") == 19
    long = {"x" * 3000: 1}
    reply = await demo.post(C, json={**BASE[C], **long, "max_tokens": 1})
    assert len(reply.headers["x-latimer-ignored"]) <= 1024
