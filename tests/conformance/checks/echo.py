"""`echo`, with and without log-probabilities (contract 2.4), as evaluation harnesses need it."""

from __future__ import annotations

from typing import Any

from ..check import Skip, check, expect
from ..target import Api

PROMPT = "The capital of France is"


async def _scored(api: Api, prompt: Any = PROMPT, **body: Any) -> tuple[Any, Any]:
    full = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, **body}
    reply = await api.complete(prompt, **full)
    choice = reply["choices"][0]
    expect(isinstance(choice["logprobs"], dict), f"expected arrays, got {choice['logprobs']!r}")
    return choice, reply["usage"]


def _bytes(tokens: list[str]) -> bytes:
    data = b""
    for token in tokens:
        if token.startswith("bytes:\\x"):
            data += bytes(int(part, 16) for part in token.removeprefix("bytes:\\x").split("\\x"))
        else:
            data += token.encode()
    return data


@check("echo.text", "The prompt stands in front of the text.", "must", "2.4")
async def text(api: Api) -> None:
    plain = (await api.complete(PROMPT, max_tokens=3, temperature=0))["choices"][0]["text"]
    body = await api.complete(PROMPT, max_tokens=3, temperature=0, echo=True)
    got = body["choices"][0]["text"]
    expect(got == PROMPT + plain, f"expected {PROMPT + plain!r}, but got {got!r}")


@check(
    "echo.alone", "echo with max_tokens 0 is the prompt, and counts nothing.", "must", "2.4 10.7"
)
async def alone(api: Api) -> None:
    body = await api.complete(PROMPT, max_tokens=0, echo=True)
    expect(body["choices"][0]["text"] == PROMPT, f"expected the prompt, got {body['choices'][0]}")
    expect(body["usage"]["completion_tokens"] == 0, f"expected no tokens: {body['usage']}")


@check(
    "echo.length", "One entry for each prompt token, and one generated.", "must", "10.2 [LMEVAL]"
)
async def length(api: Api) -> None:
    choice, usage = await _scored(api)
    lengths = {name: len(values) for name, values in choice["logprobs"].items() if values}
    expected = usage["prompt_tokens"] + 1
    expect(set(lengths.values()) == {expected}, f"expected {expected} entries, but got {lengths}")


@check("echo.first-null", "The first entry is null, and no other.", "must", "10.3 [LIT]")
async def first_null(api: Api) -> None:
    choice, _usage = await _scored(api)
    for name in ("token_logprobs", "top_logprobs"):
        values = choice["logprobs"][name]
        nulls = [index for index, value in enumerate(values) if value is None]
        expect(nulls == [0], f"{name}: expected null at 0 only, but got it at {nulls}")


@check("echo.offsets", "Offsets begin at zero and find each token.", "must", "10.4")
async def offsets(api: Api) -> None:
    choice, _usage = await _scored(api)
    found = choice["logprobs"]["text_offset"]
    expect(found[0] == 0 and found == sorted(found), f"expected 0 and upwards, but got {found}")
    for token, offset in zip(choice["logprobs"]["tokens"], found, strict=True):
        there = choice["text"][offset : offset + len(token)]
        expect(there == token or offset == len(choice["text"]), f"{token!r} is not at {offset}")


@check("echo.tokens", "The tokens, put together, are the prompt.", "must", "2.2 [HELM]")
async def tokens(api: Api) -> None:
    choice, _usage = await _scored(api, max_tokens=0)
    joined = _bytes(choice["logprobs"]["tokens"]).decode(errors="replace")
    expect(joined == PROMPT, f"expected {PROMPT!r}, nothing in front, but got {joined!r}")


@check("echo.zero", "max_tokens 0 scores the prompt alone.", "must", "10.7 [HELM]")
async def zero(api: Api) -> None:
    choice, usage = await _scored(api, max_tokens=0)
    count = len(choice["logprobs"]["tokens"])
    expect(count == usage["prompt_tokens"], f"expected {usage['prompt_tokens']}, but got {count}")
    expect(choice["text"] == PROMPT, f"expected the prompt, but got {choice['text']!r}")


@check("echo.ids-verbatim", "Token ids are scored as they are.", "must", "10.5 [LMEVAL]")
async def ids_verbatim(api: Api) -> None:
    ids = [70, 71, 70, 72]
    choice, usage = await _scored(api, [ids])
    count = len(choice["logprobs"]["tokens"])
    expect(count == len(ids) + 1, f"expected {len(ids) + 1} entries, but got {count}")
    expect(usage["prompt_tokens"] == len(ids), f"expected {len(ids)} prompt tokens: {usage}")


@check("echo.id-lists", "Prompts of different lengths have their own arrays.", "must", "10.48")
async def id_lists(api: Api) -> None:
    body = await api.complete([[70, 71, 72], [73]], echo=True, logprobs=1, max_tokens=0)
    lengths = [len(choice["logprobs"]["tokens"]) for choice in body["choices"]]
    expect(lengths == [3, 1], f"expected 3 and 1 entries, but got {lengths}")


@check("echo.chain", "A longer prompt scores its beginning alike.", "must", "10.8")
async def chain(api: Api) -> None:
    short, _usage = await _scored(api, "A B", max_tokens=0)
    long, _usage = await _scored(api, "A B C D", max_tokens=0)
    # Later offsets belong to generated tokens. The last prompt token may differ in the longer one.
    size = sum(offset < len("A B") for offset in short["logprobs"]["text_offset"]) - 1
    pairs = [one["logprobs"]["token_logprobs"][1:size] for one in (short, long)]
    far = [abs(a - b) for a, b in zip(*pairs, strict=True)]
    expect(max(far, default=0) < 0.3, f"expected the same numbers, but got {pairs}")


@check("echo.context-counts", "What stands before a token changes its number.", "must", "2.6.2")
async def context_counts(api: Api) -> None:
    values = []
    for word in ("1, 2, 3, 4", "The cat sat"):
        choice, _usage = await _scored(api, f"{word}, 5", max_tokens=0)
        values.append(choice["logprobs"]["token_logprobs"][-1])
    expect(abs(values[0] - values[1]) > 1e-3, f"expected different numbers, but got {values}")


@check("echo.greedy", "Where a token is the likeliest, its number is the largest.", "must", "10.9")
async def greedy(api: Api) -> None:
    choice, _usage = await _scored(api)
    arrays = choice["logprobs"]
    for value, top in zip(arrays["token_logprobs"][1:], arrays["top_logprobs"][1:], strict=True):
        expect(top and value <= max(top.values()), f"{value} is above the likeliest of {top}")


@check("echo.end-entry", "An end token keeps its entry under echo.", "must", "10.6 [LMEVAL]")
async def end_entry(api: Api) -> None:
    api.demo()
    prompt = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    answer = (await api.complete(prompt, max_tokens=40, temperature=0))["choices"][0]["text"]
    choice, usage = await _scored(api, prompt + answer)
    if choice["finish_reason"] != "stop":
        raise Skip("the model does not end its answer there")
    count = len(choice["logprobs"]["tokens"])
    expected = usage["prompt_tokens"] + 1
    expect(count == expected, f"expected {expected} entries, but got {count}")
    expect(choice["text"] == prompt + answer, f"the end token is in the text: {choice['text']!r}")


@check("echo.utf8", "Characters of several tokens are whole when put together.", "must", "10.38")
async def utf8(api: Api) -> None:
    prompt = "😀 é 漢"
    choice, _usage = await _scored(api, prompt, max_tokens=0)
    joined = _bytes(choice["logprobs"]["tokens"])
    expect(joined == prompt.encode(), f"expected {prompt!r}, but got {joined!r}")


@check("echo.utf8-offsets", "Offsets of such tokens stay inside the text.", "must", "10.39")
async def utf8_offsets(api: Api) -> None:
    prompt = "😀 é 漢"
    choice, _usage = await _scored(api, prompt, max_tokens=0)
    found = choice["logprobs"]["text_offset"]
    good = found == sorted(found) and found[-1] <= len(prompt)
    expect(good, f"expected code points up to {len(prompt)}, but got {found}")


@check("echo.floor", "What is impossible is -9999, never infinity.", "must", "10.46")
async def floor(api: Api) -> None:
    choice, _usage = await _scored(api, "zxqj 漢漢", max_tokens=0)
    values = [v for v in choice["logprobs"]["token_logprobs"] if v is not None]
    expect(all(-10000 < v <= 1e-6 for v in values), f"expected finite numbers, but got {values}")


@check("echo.stream", "A stream echoes the prompt with its numbers.", "must", "10.91 [vLLM#47815]")
async def stream(api: Api) -> None:
    choice, _usage = await _scored(api, max_tokens=3)
    body = {"echo": True, "logprobs": 1, "max_tokens": 3, "temperature": 0}
    chunks = await api.complete_stream(PROMPT, **body)
    parts = [c["choices"][0] for c in chunks if c["choices"]]
    joined = "".join(part["text"] for part in parts)
    expect(joined == choice["text"], f"expected {choice['text']!r}, but got {joined!r}")
    for name in ("tokens", "text_offset"):
        found = [item for p in parts if p.get("logprobs") for item in p["logprobs"][name]]
        expected = choice["logprobs"][name]
        expect(found == expected, f"{name}: expected {expected}, but got {found}")
