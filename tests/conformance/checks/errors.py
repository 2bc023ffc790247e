"""Error objects: the status and fields of each rejection (contract 1.2 to 1.4)."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from ..check import Body, Diverges, Fail, Skip, Unsupported, check, expect
from ..target import ERROR_KEYS, Api, Reply, expect_too_long

C, H = "/completions", "/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
WRITE: dict[str, Any] = {"prompt": "Hello", "max_tokens": 1}

# The words by which clients recognise the error of a prompt that is too long.
WORDS = "maximum context length is"

# Each row: the id, the endpoint, the invalid fields, the field that the error must name, source.
INVALID: tuple[tuple[str, str, dict[str, Any], str, str], ...] = (
    ("temperature-below", H, {"temperature": -0.5}, "temperature", "3.1"),
    ("top-p-above", C, {"top_p": 2}, "top_p", "2.1"),
    ("n-zero", C, {"n": 0}, "n", "2.1"),
    ("n-above", H, {"n": 129}, "n", "3.1"),
    ("chat-max-tokens-zero", H, {"max_tokens": 0}, "max_tokens", "3.1"),
    ("logprobs-boolean", C, {"logprobs": True}, "logprobs", "2.1"),
    ("chat-logprobs-integer", H, {"logprobs": 1}, "logprobs", "3.1"),
    ("top-logprobs-above", H, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "3.1"),
    ("best-of-below-n", C, {"n": 3, "best_of": 2}, "best_of", "2.1"),
    ("stop-number", H, {"stop": 5}, "stop", "2.5"),
    ("temperature-string", C, {"temperature": "1"}, "temperature", "1.2"),
    ("stream-string", H, {"stream": "yes"}, "stream", "1.2"),
    ("max-tokens-string", C, {"max_tokens": "5"}, "max_tokens", "1.2 [code-gpt#273]"),
    ("logit-bias-above", C, {"logit_bias": {"5": 101}}, "logit_bias", "2.1"),
    ("seed-fraction", H, {"seed": 1.5}, "seed", "3.1"),
    ("messages-empty", H, {"messages": []}, "messages", "1.2 [CopilotKit#529]"),
    ("messages-string", H, {"messages": "Hello"}, "messages", "3.2"),
    ("role-unknown", H, {"messages": [{"role": "x", "content": "a"}]}, "messages", "3.2"),
    ("content-number", H, {"messages": [{"role": "user", "content": 5}]}, "messages", "3.2"),
    ("content-missing", H, {"messages": [{"role": "user"}]}, "messages", "3.2"),
    (
        "part-unknown",
        H,
        {"messages": [{"role": "user", "content": [{"type": "no_type"}]}]},
        "messages",
        "3.2",
    ),
    ("service-tier", H, {"service_tier": "no_tier"}, "service_tier", "3.1 [DOC]"),
    ("prompt-number", C, {"prompt": 5}, "prompt", "2.2"),
    ("prompt-mixed", C, {"prompt": ["a", 1]}, "prompt", "2.2"),
    ("prompt-id-negative", C, {"prompt": [-1]}, "prompt", "2.2"),
)


def _invalid(path: str, changes: dict[str, Any], param: str) -> Body:
    async def run(api: Api) -> None:
        full = {"model": api.model, **(WRITE if path == C else ASK), **changes}
        error = (await api.post(path, full)).error(400)
        named = str(error["param"] or error["message"])
        expect(
            param in named,
            f"expected an error that names {param!r} in param or message, but got {error}",
        )

    return run


for name, path, changes, param, source in INVALID:
    request = "completion" if path == C else "chat completion"
    shown = json.dumps(changes)
    promise = f"A {request} request with {shown} is rejected with a 400 error that names {param!r}."
    check(f"errors.{name}", promise, "must", source)(_invalid(path, changes, param))


@check("errors.missing-messages",
       "A chat completion request without messages is rejected with a 400 error that names "
       "messages.",
       "must", "1.2")  # fmt: skip
async def missing_messages(api: Api) -> None:
    error = (await api.post(H, {"model": api.model})).error(400)
    expect(
        "messages" in str(error["param"] or error["message"]),
        f"expected an error that names 'messages' in param or message, but got {error}",
    )


@check("errors.unknown-model",
       "A completion request with an unknown model gets 404 with the code model_not_found.",
       "should", "1.4")  # fmt: skip
async def unknown_model(api: Api) -> None:
    reply = await api.post(C, {**WRITE, "model": "no-such-model-anywhere"})
    if reply.status == 200:
        raise Diverges("the server accepts every model name")
    error = reply.error(404)
    expect(error["code"] == "model_not_found", f"expected code model_not_found, but got {error}")


# Requests that any server has a reason to reject. A lenient server may accept some of them.
REJECTED = (
    (H, {"messages": None}), (C, {**WRITE, "temperature": 3}), (H, {"messages": "Hello"}),
    (C, {"prompt": 5}), (H, {**ASK, "n": "many"}), (C, {**WRITE, "top_p": 2}),
)  # fmt: skip


async def _rejection(api: Api, **more: Any) -> Reply:
    """Return the reply to the first of these requests that the server rejects."""
    for path, body in REJECTED:
        full = {name: value for name, value in body.items() if value is not None}
        with suppress(Unsupported):
            reply = await api.post(path, {"model": api.model, **full, **more})
            if reply.status >= 400:
                return reply
    raise Fail("expected an error for an invalid request, but got a success for each")


@check("errors.keys", "Every error object has the keys message, type, param and code.",
       "must", "1.3 [SPEC]")  # fmt: skip
async def keys(api: Api) -> None:
    for reply in (await api.get("/no-such-endpoint"), await _rejection(api)):
        error = reply.json().get("error")
        expect(isinstance(error, dict), f"expected an 'error' object, but got {reply.text[:200]}")
        missing = ERROR_KEYS - error.keys()
        expect(not missing, f"expected {sorted(missing)} in the error, but got {reply.text[:200]}")


@check("errors.type",
       "An invalid request is rejected with 400 and the error type invalid_request_error.",
       "must", "1.4")  # fmt: skip
async def kind(api: Api) -> None:
    error = (await _rejection(api)).error(400)
    expected = "invalid_request_error"
    expect(error["type"] == expected, f"expected {expected}, but got {error['type']!r}")


@check("errors.code-type",
       "In an error object, param and code are each a string or null, never a number.",
       "must", "1.3")  # fmt: skip
async def code_type(api: Api) -> None:
    # Some errors have a code, and others have none.
    replies = [await _rejection(api), await api.send("POST", "/chat/completions", b"{")]
    for error in (reply.error(400, 422, 500) for reply in replies):
        for key in ("param", "code"):
            expect(
                error[key] is None or isinstance(error[key], str),
                f"expected a string or null in {key!r}, but got {error}",
            )


@check("errors.stream",
       "An invalid request with stream true is rejected with JSON, not with an event stream.",
       "must", "1.7")  # fmt: skip
async def stream(api: Api) -> None:
    reply = await _rejection(api, stream=True)
    kind = reply.kind
    expect(kind == "application/json", f"expected JSON, but got {kind!r}")


@check("errors.context",
       "A prompt that exceeds the context length is rejected with 400, code "
       "context_length_exceeded, and a message that contains 'maximum context length is'.",
       "must", "1.4")  # fmt: skip
async def context(api: Api) -> None:
    # Two million words: more than any context length, less than any limit on bodies.
    reply = await api.post(C, {**WRITE, "model": api.model, "prompt": "a b " * 1_000_000})
    expect_too_long(reply, WORDS)


@check("errors.chat-context",
       "Messages that exceed the context length are rejected with 400, code "
       "context_length_exceeded, and a message that contains 'maximum context length is'.",
       "must", "1.4")  # fmt: skip
async def chat_context(api: Api) -> None:
    messages = [{"role": "user", "content": "a b " * 1_000_000}]
    reply = await api.post(H, {"model": api.model, "messages": messages, "max_tokens": 1})
    expect_too_long(reply, WORDS)


@check("errors.wrong-key",
       "A wrong API key gets 401 with the type invalid_request_error and the code "
       "invalid_api_key or null.",
       "must", "1.2 [DD]")  # fmt: skip
async def wrong_key(api: Api) -> None:
    if "authorization" not in api.client.headers:
        raise Skip("this check needs an API key: --api-key")
    body = json.dumps({**ASK, "model": api.model, "stream": True}).encode()
    reply = await api.send("POST", H, body, {"authorization": "Bearer sk-wrong"})
    if reply.status == 200:
        raise Diverges("the server accepts any API key")
    error = reply.error(401)
    known = error["code"] in ("invalid_api_key", None)
    valid = known and error["type"] == "invalid_request_error"
    expect(valid, f"expected invalid_request_error and invalid_api_key, but got {error}")


@check("errors.context-sum",
       "A prompt and max_tokens that together exceed the context length are rejected with 400 "
       "and the code context_length_exceeded.",
       "should", "1.4")  # fmt: skip
async def context_sum(api: Api) -> None:
    reply = await api.post(C, {**WRITE, "model": api.model, "max_tokens": 100_000_000})
    error = reply.error(400)
    code = error["code"]
    expect(code == "context_length_exceeded", f"expected context_length_exceeded, but got {error}")


@check("errors.stream-options",
       "stream_options without stream is rejected with a 400 error whose param is stream_options.",
       "should", "2.1")  # fmt: skip
async def stream_options(api: Api) -> None:
    body = {**ASK, "model": api.model, "stream_options": {"include_usage": True}}
    error = (await api.post(H, body)).error(400)
    expect(error["param"] == "stream_options", f"expected param stream_options, but got {error}")


@check("errors.top-logprobs-alone",
       "top_logprobs without logprobs is rejected with a 400 error whose param is top_logprobs.",
       "should", "3.1")  # fmt: skip
async def top_logprobs_alone(api: Api) -> None:
    error = (await api.post(H, {**ASK, "model": api.model, "top_logprobs": 3})).error(400)
    expect(error["param"] == "top_logprobs", f"expected param top_logprobs, but got {error}")


@check("errors.unknown-field", "A completion request with an unknown field is rejected with 400.",
       "may", "1.2")  # fmt: skip
async def unknown_field(api: Api) -> None:
    reply = await api.post(C, {**WRITE, "model": api.model, "no_such_field": 1})
    if reply.status == 200:
        raise Diverges("the server ignores unknown fields")
    reply.error(400)
