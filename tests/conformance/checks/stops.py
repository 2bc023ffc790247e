"""Stop sequences (contract 2.5)."""

from __future__ import annotations

from typing import Any

from ..check import Skip, check, expect
from ..target import Api

PROMPT = "1, 2, 3, 4, 5,"


async def _text(api: Api, prompt: str | None = None, **body: Any) -> str:
    """Return the completion of the prompt without a stop sequence."""
    full = {"temperature": 0, "max_tokens": 24, **body}
    reply = await api.complete(prompt or api.sure(PROMPT), **full)
    text: str = reply["choices"][0]["text"]
    if len(text) < 4:
        raise Skip("the model writes too little to stop it anywhere")
    return text


async def _stopped(api: Api, stop: Any, prompt: str | None = None, **body: Any) -> Any:
    full = {"temperature": 0, "max_tokens": 24, "stop": stop, **body}
    return (await api.complete(prompt or api.sure(PROMPT), **full))["choices"][0]


@check("stops.excluded", "The text ends before the stop, with finish_reason stop.", "must", "2.5")
async def excluded(api: Api) -> None:
    text = await _text(api)
    stop = text[2:4]
    choice = await _stopped(api, stop)
    expected = text[: text.index(stop)]
    expect(choice["text"] == expected, f"expected {expected!r}, but got {choice['text']!r}")
    expect(choice["finish_reason"] == "stop", f"expected stop, but got {choice['finish_reason']}")


@check("stops.one-character", "A stop may begin inside a token.", "must", "2.5 10.33")
async def one_character(api: Api) -> None:
    text = await _text(api)
    for stop in sorted(set(text[:8])):
        choice = await _stopped(api, stop)
        expected = text[: text.index(stop)]
        expect(
            choice["text"] == expected, f"{stop!r}: expected {expected!r}, got {choice['text']!r}"
        )


@check("stops.at-once", "A stop at the very beginning leaves no text.", "must", "2.5 10.34")
async def at_once(api: Api) -> None:
    text = await _text(api)
    choice = await _stopped(api, text[:2])
    expect(choice["text"] == "", f"expected no text, but got {choice['text']!r}")


@check("stops.earliest", "Of several stops the earliest counts.", "must", "2.5")
async def earliest(api: Api) -> None:
    text = await _text(api)
    late, early = text[-4:], text[2:5]
    choice = await _stopped(api, [late, early, "no such text"])
    expected = text[: min(text.index(late), text.index(early))]
    expect(choice["text"] == expected, f"expected {expected!r}, but got {choice['text']!r}")


@check("stops.string", "A string is a list of one.", "must", "2.5 10.35")
async def string(api: Api) -> None:
    text = await _text(api)
    both = [(await _stopped(api, stop))["text"] for stop in (text[2:4], [text[2:4]])]
    expect(both[0] == both[1], f"expected the same text, but got {both}")


@check("stops.four", "Four stops are allowed.", "must", "2.5 10.35")
async def four(api: Api) -> None:
    await _stopped(api, ["no", "such", "text", "here!"])


@check("stops.not-prompt", "A stop in the prompt stops nothing.", "must", "2.5 10.36")
async def not_prompt(api: Api) -> None:
    # A few tokens: the longer the completion, the likelier a near tie changes it.
    text = await _text(api, PROMPT, max_tokens=8)
    choice = await _stopped(api, "1, 2, 3", PROMPT, max_tokens=8)
    if "1, 2, 3" in text:
        raise Skip("the model repeats the prompt")
    expect(choice["text"] == text, f"expected {text!r}, but got {choice['text']!r}")


@check("stops.stream", "A stream shows no part of a stop.", "must", "2.5 10.31")
async def stream(api: Api) -> None:
    text = await _text(api)
    stop = text[2:5]
    chunks = await api.complete_stream(api.sure(PROMPT), temperature=0, max_tokens=24, stop=stop)
    streamed = "".join(c["choices"][0]["text"] for c in chunks if c["choices"])
    expected = text[: text.index(stop)]
    expect(streamed == expected, f"expected {expected!r}, but got {streamed!r}")


@check("stops.held-back", "What only might have become a stop is shown after all.", "must", "2.5")
async def held_back(api: Api) -> None:
    text = await _text(api)
    body = {"temperature": 0, "max_tokens": 24, "stop": [text[-1] + "no such text"]}
    chunks = await api.complete_stream(api.sure(PROMPT), **body)
    streamed = "".join(c["choices"][0]["text"] for c in chunks if c["choices"])
    expect(streamed == text, f"expected {text!r}, but got {streamed!r}")


@check("stops.usage", "Tokens after the stop are not counted.", "should", "2.3 10.61")
async def usage(api: Api) -> None:
    text = await _text(api)
    full = {"temperature": 0, "max_tokens": 24}
    whole = (await api.complete(api.sure(PROMPT), **full))["usage"]["completion_tokens"]
    cut = (await api.complete(api.sure(PROMPT), stop=text[2:4], **full))["usage"][
        "completion_tokens"
    ]
    expect(cut < whole, f"expected fewer than {whole} tokens, but got {cut}")


@check("stops.logprobs", "With a stop the arrays begin with the text's tokens.", "should", "10.37")
async def logprobs(api: Api) -> None:
    text = await _text(api)
    choice = await _stopped(api, text[2:4], logprobs=0)
    arrays = choice["logprobs"]
    joined = "".join(arrays["tokens"])
    expect(joined.startswith(choice["text"]), f"{joined!r} does not begin like {choice['text']!r}")
    expect(len(arrays["tokens"]) == len(arrays["token_logprobs"]), "arrays of different lengths")


@check("stops.chat", "Chat stops as completions do.", "must", "3.1")
async def chat(api: Api) -> None:
    full = {"temperature": 0, "max_tokens": 24}
    text = (await api.chat("Count to 12.", **full))["choices"][0]["message"]["content"]
    if len(text) < 4:
        raise Skip("the model writes too little to stop it anywhere")
    choice = (await api.chat("Count to 12.", stop=text[2:4], **full))["choices"][0]
    expected = text[: text.index(text[2:4])]
    got = choice["message"]["content"]
    expect(got == expected, f"expected {expected!r}, but got {got!r}")
    expect(choice["finish_reason"] == "stop", f"expected stop, but got {choice['finish_reason']}")
