"""Stop sequences (contract 2.5)."""

from __future__ import annotations

from typing import Any

from ..check import Skip, check, expect
from ..target import Api

PROMPT = "1, 2, 3, 4, 5,"


async def _text(api: Api, prompt: str | None = None, **body: Any) -> str:
    """Return the completion of the prompt without a stop sequence."""
    full = {"temperature": 0, "max_tokens": 24, **body}
    reply = await api.complete(prompt or api.stable(PROMPT), **full)
    text: str = reply["choices"][0]["text"]
    if len(text) < 4:
        raise Skip("the model generates too little text to stop it anywhere")
    return text


async def _stopped(api: Api, stop: Any, prompt: str | None = None, **body: Any) -> Any:
    full = {"temperature": 0, "max_tokens": 24, "stop": stop, **body}
    return (await api.complete(prompt or api.stable(PROMPT), **full))["choices"][0]


@check("stops.excluded", "A completion ends before its stop sequence, with the finish_reason stop.",
       "must", "2.5")  # fmt: skip
async def excluded(api: Api) -> None:
    text = await _text(api)
    stop = text[2:4]
    choice = await _stopped(api, stop)
    expected = text[: text.index(stop)]
    expect(choice["text"] == expected, f"expected {expected!r}, but got {choice['text']!r}")
    expect(choice["finish_reason"] == "stop", f"expected stop, but got {choice['finish_reason']}")


@check("stops.one-character",
       "A stop sequence of one character ends the completion there, even inside a token.",
       "must", "2.5 10.33")  # fmt: skip
async def one_character(api: Api) -> None:
    text = await _text(api)
    for stop in sorted(set(text[:8])):
        choice = await _stopped(api, stop)
        expected = text[: text.index(stop)]
        expect(
            choice["text"] == expected,
            f"{stop!r}: expected {expected!r}, but got {choice['text']!r}",
        )


@check("stops.at-once",
       "A stop sequence that matches at the start of a completion leaves an empty text.",
       "must", "2.5 10.34")  # fmt: skip
async def at_once(api: Api) -> None:
    text = await _text(api)
    choice = await _stopped(api, text[:2])
    expect(choice["text"] == "", f"expected an empty text, but got {choice['text']!r}")


@check("stops.earliest",
       "Of several stop sequences, the one that occurs first in the text ends the completion.",
       "must", "2.5")  # fmt: skip
async def earliest(api: Api) -> None:
    text = await _text(api)
    late, early = text[-4:], text[2:5]
    choice = await _stopped(api, [late, early, "no such text"])
    expected = text[: min(text.index(late), text.index(early))]
    expect(choice["text"] == expected, f"expected {expected!r}, but got {choice['text']!r}")


@check("stops.string", "A stop sequence in a string has the same effect as in a list.",
       "must", "2.5 10.35")  # fmt: skip
async def string(api: Api) -> None:
    text = await _text(api)
    both = [(await _stopped(api, stop))["text"] for stop in (text[2:4], [text[2:4]])]
    expect(both[0] == both[1], f"expected the same text, but got {both}")


@check("stops.four", "A completion request may have four stop sequences.", "must", "2.5 10.35")
async def four(api: Api) -> None:
    await _stopped(api, ["no", "such", "text", "here!"])


@check("stops.not-prompt", "A stop sequence that occurs in the prompt does not end the completion.",
       "must", "2.5 10.36")  # fmt: skip
async def not_prompt(api: Api) -> None:
    # A few tokens: the longer the completion, the likelier a near tie changes it.
    text = await _text(api, PROMPT, max_tokens=8)
    choice = await _stopped(api, "1, 2, 3", PROMPT, max_tokens=8)
    if "1, 2, 3" in text:
        raise Skip("the model repeats the prompt")
    expect(choice["text"] == text, f"expected {text!r}, but got {choice['text']!r}")


@check("stops.stream",
       "A streamed completion ends before its stop sequence and contains no part of it.",
       "must", "2.5 10.31")  # fmt: skip
async def stream(api: Api) -> None:
    text = await _text(api)
    stop = text[2:5]
    chunks = await api.complete_stream(api.stable(PROMPT), temperature=0, max_tokens=24, stop=stop)
    streamed = "".join(c["choices"][0]["text"] for c in chunks if c["choices"])
    expected = text[: text.index(stop)]
    expect(streamed == expected, f"expected {expected!r}, but got {streamed!r}")


@check("stops.held-back",
       "A streamed completion includes text that matches only the beginning of a stop sequence.",
       "must", "2.5")  # fmt: skip
async def held_back(api: Api) -> None:
    text = await _text(api)
    body = {"temperature": 0, "max_tokens": 24, "stop": [text[-1] + "no such text"]}
    chunks = await api.complete_stream(api.stable(PROMPT), **body)
    streamed = "".join(c["choices"][0]["text"] for c in chunks if c["choices"])
    expect(streamed == text, f"expected {text!r}, but got {streamed!r}")


@check("stops.usage",
       "A completion that a stop sequence ends has fewer completion tokens than the same one "
       "without it.",
       "should", "2.3 10.61")  # fmt: skip
async def usage(api: Api) -> None:
    text = await _text(api)
    full = {"temperature": 0, "max_tokens": 24}
    whole = (await api.complete(api.stable(PROMPT), **full))["usage"]["completion_tokens"]
    cut = (await api.complete(api.stable(PROMPT), stop=text[2:4], **full))["usage"][
        "completion_tokens"
    ]
    expect(cut < whole, f"expected fewer than {whole} tokens, but got {cut}")


@check("stops.logprobs",
       "If a stop sequence ends a completion, the tokens in logprobs begin with its text.",
       "should", "10.37")  # fmt: skip
async def logprobs(api: Api) -> None:
    text = await _text(api)
    choice = await _stopped(api, text[2:4], logprobs=0)
    arrays = choice["logprobs"]
    joined = "".join(arrays["tokens"])
    expect(
        joined.startswith(choice["text"]),
        f"expected tokens of {choice['text']!r}, but got {joined!r}",
    )
    lengths = [len(arrays[name]) for name in ("tokens", "token_logprobs")]
    expect(lengths[0] == lengths[1], f"expected arrays of one length, but got lengths {lengths}")


@check("stops.chat",
       "A chat completion ends before its stop sequence, with the finish_reason stop.",
       "must", "3.1")  # fmt: skip
async def chat(api: Api) -> None:
    full = {"temperature": 0, "max_tokens": 24}
    text = (await api.chat("Count to 12.", **full))["choices"][0]["message"]["content"]
    if len(text) < 4:
        raise Skip("the model generates too little text to stop it anywhere")
    choice = (await api.chat("Count to 12.", stop=text[2:4], **full))["choices"][0]
    expected = text[: text.index(text[2:4])]
    got = choice["message"]["content"]
    expect(got == expected, f"expected {expected!r}, but got {got!r}")
    expect(choice["finish_reason"] == "stop", f"expected stop, but got {choice['finish_reason']}")
