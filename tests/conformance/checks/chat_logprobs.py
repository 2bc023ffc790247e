"""`logprobs` and `top_logprobs` of chat (contract 3.4)."""

from __future__ import annotations

from typing import Any

from ..check import Skip, check, expect
from ..target import Api, expect_finite

ENTRY = {"token", "logprob", "bytes", "top_logprobs"}


async def _entries(api: Api, question: str = "Count to 7.", **body: Any) -> tuple[str, list[Any]]:
    full = {"logprobs": True, "temperature": 0, "max_tokens": 8, **body}
    choice = (await api.chat(question, **full))["choices"][0]
    found = choice["logprobs"]
    expect(isinstance(found, dict), f"expected an object in logprobs, but got {found!r}")
    expect("content" in found, f"expected content in logprobs, but got {list(found)}")
    text = choice["message"]["content"]
    if not text:
        raise Skip("the model ended its answer with its first token")
    return text, found["content"]


@check("chat_logprobs.shape",
       "The logprobs of a chat completion have the keys content and refusal, and refusal is null.",
       "must", "10.43 [lcp#1787]")  # fmt: skip
async def shape(api: Api) -> None:
    choice = (await api.chat(logprobs=True, max_tokens=2))["choices"][0]
    found = choice["logprobs"]
    expect(
        isinstance(found, dict) and found.keys() >= {"content", "refusal"},
        f"expected content and refusal, but got {found!r}",
    )
    expect(found["refusal"] is None, f"expected null for refusal, but got {found['refusal']!r}")


@check("chat_logprobs.entries",
       "Each entry of a chat completion's logprobs has token, logprob, bytes and top_logprobs.",
       "must", "3.4")  # fmt: skip
async def entries(api: Api) -> None:
    _text, found = await _entries(api)
    for entry in found:
        expect(entry.keys() >= ENTRY, f"expected {sorted(ENTRY)} in each entry, but got {entry}")


@check("chat_logprobs.bytes",
       "The bytes in a chat completion's logprobs join to the content of the message.",
       "must", "10.40")  # fmt: skip
async def exact_bytes(api: Api) -> None:
    text, found = await _entries(api)
    data = bytes(byte for entry in found for byte in entry["bytes"] or ())
    expect(data == text.encode(), f"expected {text!r}, but got {data!r}")


@check("chat_logprobs.emoji",
       "The bytes in logprobs join to the content even if a character spans several tokens.",
       "must", "10.40")  # fmt: skip
async def emoji(api: Api) -> None:
    api.demo()
    text, found = await _entries(api, "Translate to French: summer", max_tokens=16)
    data = bytes(byte for entry in found for byte in entry["bytes"] or ())
    expect(data == text.encode(), f"expected {text!r}, but got {data!r}")


@check("chat_logprobs.top-empty",
       "If a request has top_logprobs null or 0, each entry of logprobs has an empty list of them.",
       "must", "10.41 [SNAP]")  # fmt: skip
async def top_empty(api: Api) -> None:
    for top in (None, 0):
        _text, found = await _entries(api, top_logprobs=top)
        lists = [entry["top_logprobs"] for entry in found]
        expect(all(one == [] for one in lists), f"expected empty lists, but got {lists}")


@check("chat_logprobs.top",
       "Each entry of logprobs has at most top_logprobs alternatives, the most likely first.",
       "must", "10.42")  # fmt: skip
async def top(api: Api) -> None:
    for count in (1, 5):
        _text, found = await _entries(api, top_logprobs=count)
        for entry in found:
            values = [other["logprob"] for other in entry["top_logprobs"]]
            expect(
                0 < len(values) <= count,
                f"expected 1 to {count} alternatives, but got {len(values)}",
            )
            expect(
                values == sorted(values, reverse=True),
                f"expected the most likely first, but got {values}",
            )


@check("chat_logprobs.twenty",
       "With top_logprobs 20, a chat completion returns up to 20 alternatives, and more than 5, "
       "each with token, logprob and bytes.",
       "must", "10.42 [GUID]")  # fmt: skip
async def twenty(api: Api) -> None:
    _text, found = await _entries(api, top_logprobs=20)
    counts = {len(entry["top_logprobs"]) for entry in found}
    expect(max(counts) <= 20, f"expected at most 20 alternatives, but got {counts}")
    expect(max(counts) > 5, f"expected 20 alternatives, but got {counts}")
    for one in (one for entry in found for one in entry["top_logprobs"]):
        missing = ENTRY - {"top_logprobs"} - one.keys()
        expect(not missing, f"expected {sorted(missing)} in an alternative, but got {one}")


@check("chat_logprobs.finite",
       "The log-probabilities of a chat completion are finite and not greater than 0.",
       "must", "10.46")  # fmt: skip
async def finite(api: Api) -> None:
    _text, found = await _entries(api, top_logprobs=5)
    values = [entry["logprob"] for entry in found]
    values += [other["logprob"] for entry in found for other in entry["top_logprobs"]]
    expect_finite(values)


@check("chat_logprobs.likeliest",
       "At temperature 0, the first of the top_logprobs is the generated token itself.",
       "must", "3.4")  # fmt: skip
async def likeliest(api: Api) -> None:
    _text, found = await _entries(api, top_logprobs=1)
    for entry in found:
        first = entry["top_logprobs"][0]
        same = (first["token"], first["logprob"]) == (entry["token"], entry["logprob"])
        expect(same, f"expected the generated token first, but got {entry}")


@check("chat_logprobs.one-per-token",
       "The number of entries in a chat completion's logprobs is within one of its "
       "completion_tokens.",
       "must", "3.4")  # fmt: skip
async def one_per_token(api: Api) -> None:
    body = await api.chat("Count to 7.", logprobs=True, temperature=0, max_tokens=4)
    found = body["choices"][0]["logprobs"]["content"]
    count = body["usage"]["completion_tokens"]
    expect(abs(len(found) - count) <= 1, f"expected {count} entries, but got {len(found)}")


@check("chat_logprobs.stream",
       "A streamed chat completion has the same tokens in logprobs as one that is not streamed.",
       "must", "10.44")  # fmt: skip
async def stream(api: Api) -> None:
    _text, found = await _entries(api)
    chunks = await api.chat_stream("Count to 7.", logprobs=True, temperature=0, max_tokens=8)
    parts = [c["choices"][0].get("logprobs") for c in chunks if c["choices"]]
    tokens = [entry["token"] for part in parts if part for entry in part["content"] or ()]
    expected = [entry["token"] for entry in found]
    expect(tokens == expected, f"expected {expected}, but got {tokens}")


@check("chat_logprobs.aligned",
       "A chat completion stream sends the logprobs of a text with that text or before it.",
       "must", "10.44 [GUID]")  # fmt: skip
async def aligned(api: Api) -> None:
    chunks = await api.chat_stream("Count to 7.", logprobs=True, temperature=0, max_tokens=8)
    text = data = b""
    for chunk in chunks:
        for choice in chunk["choices"]:
            text += (choice["delta"].get("content") or "").encode()
            for entry in (choice.get("logprobs") or {}).get("content") or ():
                data += bytes(entry["bytes"] or ())
            expect(data.startswith(text), f"expected logprobs of {text!r}, but got {data!r}")
