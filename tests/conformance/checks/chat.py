"""`POST /chat/completions` (contract 3.1 to 3.3)."""

from __future__ import annotations

from typing import Any

from ..check import Skip, check, expect
from ..target import Api, expect_seconds, expect_usage, only


async def _message(api: Api, messages: Any = "Hello", **body: Any) -> Any:
    full = {"max_tokens": 8, **body}
    return only((await api.chat(messages, **full))["choices"], "choice")["message"]


@check("chat.object",
       "A chat completion has the object chat.completion and an id that begins with chatcmpl-.",
       "must", "3.3 10.63")  # fmt: skip
async def object_and_id(api: Api) -> None:
    body = await api.chat(max_tokens=1)
    expect(
        body["object"] == "chat.completion", f"expected chat.completion, but got {body['object']!r}"
    )
    expect(body["id"].startswith("chatcmpl-"), f"expected chatcmpl-…, but got {body['id']!r}")


@check("chat.created", "The created field of a chat completion is a Unix time in whole seconds.",
       "must", "3.3 [EXP]")  # fmt: skip
async def created(api: Api) -> None:
    expect_seconds((await api.chat(max_tokens=1))["created"])


@check("chat.message",
       "The message of a chat completion has the role assistant and a string as content.",
       "must", "3.3")  # fmt: skip
async def message(api: Api) -> None:
    found = await _message(api)
    expect(found.get("role") == "assistant", f"expected the role assistant, but got {found}")
    expect(isinstance(found.get("content"), str), f"expected a string as content, but got {found}")


@check("chat.refusal-null",
       "The message of a chat completion has the key refusal, with the value null.",
       "must", "3.3 10.62 [INSTR]")  # fmt: skip
async def refusal_null(api: Api) -> None:
    found = (await _message(api)).get("refusal", "no key")
    expect(found is None, f"expected null for refusal, but got {found!r}")


@check("chat.no-tool-calls",
       "The message of a chat completion without tools has no list of tool_calls.",
       "must", "3.3 10.62")  # fmt: skip
async def no_tool_calls(api: Api) -> None:
    found = await _message(api)
    expect(
        not isinstance(found.get("tool_calls"), list), f"expected no tool_calls, but got {found}"
    )


@check("chat.logprobs-null",
       "Unless the request asks for logprobs, a choice of a chat completion has logprobs null.",
       "must", "3.3 10.62 [SPEC]")  # fmt: skip
async def logprobs_null(api: Api) -> None:
    choice = only((await api.chat(max_tokens=1))["choices"], "choice")
    found = choice.get("logprobs", "no key")
    expect(found is None, f"expected null for logprobs, but got {found!r}")


@check("chat.usage",
       "The usage of a chat completion has integer prompt_tokens and completion_tokens that add "
       "up to total_tokens.",
       "must", "3.3 10.60")  # fmt: skip
async def usage(api: Api) -> None:
    expect_usage((await api.chat(max_tokens=3)).get("usage"))


@check("chat.usage-details",
       "In usage, prompt_tokens_details and completion_tokens_details are objects of integers, "
       "or absent.",
       "must", "3.3")  # fmt: skip
async def usage_details(api: Api) -> None:
    counts = (await api.chat(max_tokens=3))["usage"]
    for name in ("prompt_tokens_details", "completion_tokens_details"):
        details = counts.get(name, {})
        valid = isinstance(details, dict) and all(type(v) is int for v in details.values())
        expect(valid, f"expected integers in {name}, but got {details!r}")


@check("chat.max-tokens",
       "max_tokens and max_completion_tokens each limit a chat completion, with the "
       "finish_reason length.",
       "must", "10.90")  # fmt: skip
async def max_tokens(api: Api) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        body = await api.chat("Count to 12.", temperature=0, **{name: 3})
        count = body["usage"]["completion_tokens"]
        expect(count <= 3, f"{name}: expected at most 3 tokens, but got {count}")
        reason = body["choices"][0]["finish_reason"]
        expect(reason == "length" or count < 3, f"{name}: expected length, but got {reason!r}")


@check("chat.unlimited",
       "Without max_tokens, a chat completion ends by itself or has more than 128 tokens.",
       "must", "3.1 10.15")  # fmt: skip
async def unlimited(api: Api) -> None:
    question = "Count to 12." if api.hint == "demo" else "Count from 1 to 60, with commas."
    body = await api.chat(question, temperature=0)
    count, reason = body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]
    if reason == "stop":
        expect(count > 16 or api.hint != "demo", f"expected more than 16 tokens, but got {count}")
        return
    expect(count > 128, f"expected more than 128 tokens, but got {count}")


@check("chat.nulls", "A chat completion request with null in its optional fields is accepted.",
       "must", "3.1 10.58 [LC]")  # fmt: skip
async def nulls(api: Api) -> None:
    names = (
        "frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "top_logprobs",
        "max_completion_tokens", "n", "temperature", "top_p", "seed", "stop", "stream",
        "stream_options", "store", "metadata", "service_tier", "reasoning_effort",
    )  # fmt: skip
    await api.chat(max_tokens=1, **dict.fromkeys(names))


@check("chat.text-parts",
       "The content of a message may be a list of text parts, which have the effect of one text.",
       "must", "10.75")  # fmt: skip
async def text_parts(api: Api) -> None:
    one = await api.chat("Count to 7.", temperature=0, max_tokens=8)
    parts = [{"type": "text", "text": "Count "}, {"type": "text", "text": "to 7."}]
    two = await api.chat([{"role": "user", "content": parts}], temperature=0, max_tokens=8)
    texts = [body["choices"][0]["message"]["content"] for body in (one, two)]
    expect(texts[0] == texts[1], f"expected the same answer, but got {texts}")


@check("chat.system", "A system message is accepted, with a string or with text parts as content.",
       "must", "10.75")  # fmt: skip
async def system(api: Api) -> None:
    for content in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        await api.chat(
            [{"role": "system", "content": content}, {"role": "user", "content": "Hello"}],
            max_tokens=1,
        )


@check("chat.developer", "A developer message is accepted.", "must", "3.2 10.75")
async def developer(api: Api) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    await api.chat(messages, max_tokens=1)


@check("chat.history", "Earlier messages of a conversation are part of the prompt.", "must", "3.2")
async def history(api: Api) -> None:
    short = await api.chat("Hello", max_tokens=1)
    turns = [
        {"role": "user", "content": "Count to 7."},
        {"role": "assistant", "content": "1, 2, 3, 4, 5, 6, 7."},
        {"role": "user", "content": "Hello"},
    ]
    long = await api.chat(turns, max_tokens=1)
    counts = [body["usage"]["prompt_tokens"] for body in (short, long)]
    expect(counts[1] > counts[0], f"expected more prompt tokens with a history, but got {counts}")


@check("chat.same-role", "Two consecutive messages of the same role are accepted.", "should", "3.2")
async def same_role(api: Api) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "user", "content": "Count to 3."}]
    reply = await api.post(
        "/chat/completions", {"model": api.model, "messages": messages, "max_tokens": 1}
    )
    if reply.status == 400:
        reply.error(400)
        raise Skip("the model's chat template rejects consecutive messages of one role")
    reply.ok()


@check("chat.name", "A message with a name is accepted.", "should", "3.2")
async def name(api: Api) -> None:
    await api.chat([{"role": "user", "content": "Hello", "name": "ada"}], max_tokens=1)


@check("chat.user", "A chat completion request with a user is accepted.", "must", "3.1 3.9")
async def user(api: Api) -> None:
    await api.chat(max_tokens=1, user="someone")


@check("chat.without-effect",
       "A request with safety_identifier, prompt_cache_key, verbosity, modalities and prediction "
       "is accepted.",
       "should", "3.1 3.9")  # fmt: skip
async def without_effect(api: Api) -> None:
    await api.chat(
        max_tokens=1, safety_identifier="someone", prompt_cache_key="a", verbosity="low",
        modalities=["text"], prediction={"type": "content", "content": "Hello"},
    )  # fmt: skip


@check("chat.no-prediction",
       "Without prediction, no tokens of one are counted as accepted or rejected.",
       "should", "3.3")  # fmt: skip
async def no_prediction(api: Api) -> None:
    # An engine that drafts tokens by itself finds some here.
    asked = {"role": "user", "content": "Count to 12."}
    said = {"role": "assistant", "content": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12."}
    body = await api.chat([asked, said, asked], temperature=0, max_tokens=48)
    details = body["usage"].get("completion_tokens_details") or {}
    for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
        expect(not details.get(name), f"expected {name} 0, but got {details}")


@check("chat.service-tier",
       "If a request has service_tier auto, the response has the tier that was used, not auto.",
       "should", "3.3 3.9 [DOC]")  # fmt: skip
async def service_tier(api: Api) -> None:
    body = await api.chat(max_tokens=1, service_tier="auto")
    tier = body.get("service_tier")
    expect(
        isinstance(tier, str) and tier != "auto",
        f"expected a tier such as 'default', but got {tier!r}",
    )


@check("chat.audio",
       "A request for audio is served, or rejected with a 400 error that names audio or "
       "modalities.",
       "should", "3.1 3.9")  # fmt: skip
async def audio(api: Api) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    wanted = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}
    body = {"model": api.model, "messages": messages, "max_tokens": 1, **wanted}
    reply = await api.post("/chat/completions", body)
    if reply.status == 200:
        found = reply.json()["choices"][0]["message"].get("audio")
        expect(isinstance(found, dict), f"expected an audio object, but got {found!r}")
        return
    error = str(reply.error(400))
    named = "audio" in error or "modalities" in error
    expect(named, f"expected an error that names audio or modalities, but got {error}")


@check("chat.last-assistant", "A conversation that ends with an assistant message is accepted.",
       "should", "3.2")  # fmt: skip
async def last_assistant(api: Api) -> None:
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi, I"}]
    await api.chat(turns, max_tokens=1)


@check("chat.empty-parts", "The content of a message may be an empty list.",
       "may", "3.2 [openai-python#1812]")  # fmt: skip
async def empty_parts(api: Api) -> None:
    turns = [{"role": "system", "content": []}, {"role": "user", "content": "Hello"}]
    await api.chat(turns, max_tokens=1)


@check("chat.finish-words",
       "The finish_reason of a chat completion without tools is stop or length.",
       "must", "10.59")  # fmt: skip
async def finish_words(api: Api) -> None:
    for body in ({"max_tokens": 1}, {"max_tokens": 60}):
        reason = (await api.chat("Hello", **body))["choices"][0]["finish_reason"]
        expect(reason in ("stop", "length"), f"expected stop or length, but got {reason!r}")


@check("chat.fingerprint", "Two consecutive chat completions have the same system_fingerprint.",
       "should", "3.9")  # fmt: skip
async def fingerprint(api: Api) -> None:
    found = [(await api.chat(max_tokens=1)).get("system_fingerprint") for _ in range(2)]
    expect(found[0] == found[1], f"expected the same system_fingerprint, but got {found}")


@check("chat.both-limits",
       "max_tokens and max_completion_tokens are accepted together if they are equal.",
       "should", "3.1 10.90")  # fmt: skip
async def both_limits(api: Api) -> None:
    await api.chat(max_tokens=2, max_completion_tokens=2)


@check("chat.answer", "The demo model's answer about the capital of France is returned exactly.",
       "must", "3.3")  # fmt: skip
async def answer(api: Api) -> None:
    api.demo()
    found = await _message(api, "What is the capital of France?", temperature=0, max_tokens=60)
    expected = "The capital of France is Paris."
    expect(found["content"] == expected, f"expected {expected!r}, but got {found['content']!r}")


# A PNG image of 64 by 64 pixels, half black and half white.
IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQAAAACCEkxzAAAAFElEQVR42mP4DwQMIDDKGG"
    "WQzgAA8SD/AcSiPtIAAAAASUVORK5CYII="
)


@check("chat.detail-original",
       "An image with detail original is accepted, and has as many tokens as with high.",
       "should", "3.2 [SDK]")  # fmt: skip
async def detail_original(api: Api) -> None:
    counts = []
    for detail in ("high", "original"):
        image = {"type": "image_url", "image_url": {"url": IMAGE, "detail": detail}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "Describe it."}, image]}]
        body = {"model": api.model, "messages": messages, "max_tokens": 1}
        reply = await api.post("/chat/completions", body)
        if detail == "high" and reply.status != 200:
            raise Skip(f"the model takes no images: {reply.text[:200]}")
        counts.append(reply.ok()["usage"]["prompt_tokens"])
    expect(counts[0] == counts[1], f"expected equal numbers of prompt tokens, but got {counts}")
