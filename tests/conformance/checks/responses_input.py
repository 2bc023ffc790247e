"""The input of `/responses`: instructions, items, images and options (contract of responses 2)."""

from __future__ import annotations

import json
from typing import Any

from ..check import Skip, check, expect
from ..target import Api
from .chat import IMAGE
from .responses import ASK, WEATHER, R, message_of, of_type, respond, size, stream, text_of
from .tools import one_of

# Every field that may be null, with the same effect as no field.
NULLABLE = (
    "instructions", "max_output_tokens", "metadata", "previous_response_id", "reasoning",
    "temperature", "top_p", "stream", "parallel_tool_calls", "background", "conversation",
    "include", "max_tool_calls", "moderation", "prompt", "prompt_cache_key",
    "safety_identifier", "service_tier", "stream_options", "text", "tool_choice", "tools",
    "top_logprobs", "truncation", "user",
)  # fmt: skip


@check("responses.instructions",
       "instructions are part of the prompt, and the Response repeats them.",
       "must", "7")  # fmt: skip
async def instructions(api: Api) -> None:
    plain = await respond(api, max_output_tokens=16)
    instructed = await respond(api, max_output_tokens=16, instructions="Answer in one word.")
    counts = [body["usage"]["input_tokens"] for body in (plain, instructed)]
    expect(counts[1] > counts[0], f"expected more input tokens with instructions, but got {counts}")
    found = instructed["instructions"]
    expect(found == "Answer in one word.", f"expected the instructions, but got {found!r}")


@check("responses.items",
       "The input may be a list of messages, with a string or with input_text parts as content.",
       "must", "7")  # fmt: skip
async def items(api: Api) -> None:
    whole = text_of(await respond(api, max_output_tokens=16))
    parts = [{"type": "input_text", "text": "Count "}, {"type": "input_text", "text": "to 12."}]
    for given in (
        [{"role": "user", "content": ASK}],
        [{"type": "message", "role": "user", "content": parts}],
    ):
        found = text_of(await respond(api, given, max_output_tokens=16))
        expect(found == whole, f"expected {whole!r}, but got {found!r}")


@check("responses.nulls",
       "A request to /responses with null in all optional fields is the same as one without them.",
       "must", "7 R2 R10.22")  # fmt: skip
async def nulls(api: Api) -> None:
    plain = await respond(api, max_output_tokens=16)
    found = await respond(api, **{**dict.fromkeys(NULLABLE), "temperature": 0,
                                  "max_output_tokens": 16})  # fmt: skip
    counts = [body["usage"]["input_tokens"] for body in (plain, found)]
    expect(counts[0] == counts[1], f"expected equal numbers of input tokens, but got {counts}")
    # The format keeps an answer without a limit short.
    form = {"type": "json_schema", "name": "answer", "schema": one_of(colour=("red", "blue"))}
    names = ("max_output_tokens", "temperature", "store")
    found = await respond(api, "Which colour?", text={"format": form}, **dict.fromkeys(names))
    limit = found.get("max_output_tokens", "nothing")
    expect(limit is None, f"expected null for max_output_tokens, but got {limit!r}")


@check("responses.format", "With a JSON schema in text.format, the answer matches the schema.",
       "should", "7")  # fmt: skip
async def text_format(api: Api) -> None:
    schema = one_of(colour=("red", "blue"))
    form = {"type": "json_schema", "name": "answer", "strict": True, "schema": schema}
    body = await respond(api, "Which colour?", text={"format": form}, max_output_tokens=256)
    if body["status"] == "incomplete":
        raise Skip("the model needs more than 256 tokens for the answer")
    found = json.loads(text_of(body))
    expect(found in ({"colour": "red"}, {"colour": "blue"}), f"expected a colour, but got {found}")


@check("responses.input-tokens-all",
       "The number of input tokens counts instructions, tools and replayed items.",
       "must", "R1 R10.37")  # fmt: skip
async def input_tokens_all(api: Api) -> None:
    given = [{"role": "user", "content": ASK}, {"role": "assistant", "content": "1, 2, 3"},
             {"role": "user", "content": "Go on."}]  # fmt: skip
    full = {"instructions": "Be brief.", "tools": [WEATHER]}
    body = {"model": api.model, "input": given, **full}
    counted = (await api.post(f"{R}/input_tokens", body)).ok()
    used = await size(api, given, **full)
    kind = counted.get("object")
    expect(kind == "response.input_tokens", f"expected response.input_tokens, but got {kind!r}")
    expect(counted["input_tokens"] == used, f"expected {used}, but got {counted}")


@check("responses.input-tokens",
       "POST /responses/input_tokens returns the number of input tokens that a Response would use.",
       "should", "7 1.1")  # fmt: skip
async def input_tokens(api: Api) -> None:
    counted = (await api.post(f"{R}/input_tokens", {"model": api.model, "input": ASK})).ok()
    used = (await respond(api, max_output_tokens=16))["usage"]["input_tokens"]
    expect(counted["input_tokens"] == used, f"expected {used}, but got {counted}")


def _seen(detail: str | None = None, image: bool = True) -> Any:
    part = {"type": "input_image", "image_url": IMAGE, **({"detail": detail} if detail else {})}
    text = {"type": "input_text", "text": "Describe it."}
    return [{"role": "user", "content": [text, part] if image else [text]}]


@check("responses.image",
       "An image in a data URL is part of the prompt, and may have the detail original.",
       "must", "R2.4 R10.48 [SDK]")  # fmt: skip
async def image(api: Api) -> None:
    plain = await size(api, _seen(image=False))
    body = {"model": api.model, "input": _seen(), "store": False, "max_output_tokens": 16}
    reply = await api.post(R, body)
    if reply.status != 200:
        raise Skip(f"the model takes no images: {reply.text[:200]}")
    count = reply.json()["usage"]["input_tokens"]
    expect(count > plain, f"expected more than {plain} input tokens, but got {count}")
    counts = [await size(api, _seen(detail)) for detail in ("high", "original")]
    expect(counts[0] == counts[1], f"expected equal numbers of input tokens, but got {counts}")


LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@check("responses.logprobs",
       "With include, each token of a text has its log-probability, bytes and alternatives.",
       "must", "R9.1 R10.43")  # fmt: skip
async def logprobs(api: Api) -> None:
    body = await respond(api, max_output_tokens=16, **LOGPROBS)
    text, entries = text_of(body), message_of(body)["content"][0]["logprobs"]
    expect(entries, f"expected log-probabilities, but got {entries!r}")
    for entry in entries:
        for one in (entry, *entry["top_logprobs"]):
            valid = isinstance(one["bytes"], list) and one["logprob"] <= 0
            expect(valid, f"expected a list of bytes and a logprob of at most 0, but got {one}")
        tops = len(entry["top_logprobs"])
        expect(tops == 2, f"expected two alternatives, but got {entry}")
    joined = bytes(byte for entry in entries for byte in entry["bytes"]).decode(errors="replace")
    # A character that the limit has cut is not in the text.
    same = joined.rstrip("\ufffd") == text.rstrip("\ufffd")
    expect(same, f"expected the tokens of {text!r}, but got {joined!r}")


@check("responses.logprobs-stream",
       "With include, the deltas of a stream have the log-probabilities of its end and its part.",
       "must", "R5.3 R9.1 R10.43")  # fmt: skip
async def logprobs_stream(api: Api) -> None:
    events = await stream(api, max_output_tokens=16, **LOGPROBS)
    deltas = [one for event in of_type(events, "output_text.delta") for one in event["logprobs"]]
    done = of_type(events, "output_text.done")[0]["logprobs"]
    part = of_type(events, "content_part.done")[0]["part"]["logprobs"]
    expect(part, f"expected log-probabilities, but got {part!r}")
    found = [[one["token"] for one in listed] for listed in (deltas, done, part)]
    expect(found[0] == found[1] == found[2], f"expected the same tokens, but got {found}")


@check("responses.logprobs-none", "Without include, a text has an empty list of logprobs.",
       "must", "R9.1 R10.43")  # fmt: skip
async def logprobs_none(api: Api) -> None:
    body = await respond(api, max_output_tokens=16)
    found = message_of(body)["content"][0].get("logprobs")
    expect(found == [], f"expected an empty list, but got {found!r}")


@check("responses.stop",
       "A stop sequence in a request to /responses ends the text, or is rejected by name.",
       "should", "R2.1 R10.53")  # fmt: skip
async def stop(api: Api) -> None:
    text = text_of(await respond(api, max_output_tokens=16))
    if len(text) < 8:
        raise Skip("the model generates too little text to stop it anywhere")
    end = text[4:7]
    found = text_of(await respond(api, max_output_tokens=16, stop=[end]))
    expected = text[: text.index(end)]
    expect(found == expected, f"expected {expected!r}, but got {found!r}")


@check("responses.seed", "A seed in a request to /responses is served, or rejected by name.",
       "should", "R2.1 R10.53",
       chance="A server that ignores the seed passes with p, the probability of the likeliest "
              "text.")  # fmt: skip
async def seed(api: Api) -> None:
    made = [
        text_of(await respond(api, max_output_tokens=16, seed=7, temperature=1.5)) for _ in range(2)
    ]
    expect(made[0] == made[1], f"expected the same text twice, but got {made}")
