"""`echo`, with and without log-probabilities (contract 2.4), as evaluation harnesses need it."""

from __future__ import annotations

from typing import Any

from ..check import Skip, check, expect
from ..target import Api, expect_finite

PROMPT = "The capital of France is"


async def _scored(api: Api, prompt: Any = PROMPT, **body: Any) -> tuple[Any, Any]:
    full = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, **body}
    reply = await api.complete(prompt, **full)
    choice = reply["choices"][0]
    expect(
        isinstance(choice["logprobs"], dict), f"expected logprobs, but got {choice['logprobs']!r}"
    )
    return choice, reply["usage"]


def _bytes(tokens: list[str]) -> bytes:
    data = b""
    for token in tokens:
        if token.startswith("bytes:\\x"):
            data += bytes(int(part, 16) for part in token.removeprefix("bytes:\\x").split("\\x"))
        else:
            data += token.encode()
    return data


@check("echo.text",
       "With echo, the text of a completion is the prompt followed by the generated text.",
       "must", "2.4")  # fmt: skip
async def text(api: Api) -> None:
    plain = (await api.complete(PROMPT, max_tokens=3, temperature=0))["choices"][0]["text"]
    body = await api.complete(PROMPT, max_tokens=3, temperature=0, echo=True)
    got = body["choices"][0]["text"]
    expect(got == PROMPT + plain, f"expected {PROMPT + plain!r}, but got {got!r}")


@check("echo.alone",
       "With echo and max_tokens 0, the text is the prompt, and usage counts no completion tokens.",
       "must", "2.4 10.7")  # fmt: skip
async def alone(api: Api) -> None:
    body = await api.complete(PROMPT, max_tokens=0, echo=True)
    expect(
        body["choices"][0]["text"] == PROMPT, f"expected the prompt, but got {body['choices'][0]}"
    )
    expect(body["usage"]["completion_tokens"] == 0, f"expected 0 tokens, but got {body['usage']}")


@check("echo.length",
       "With echo and max_tokens 1, logprobs have an entry for each prompt token and one "
       "generated token.",
       "must", "10.2 [LMEVAL]")  # fmt: skip
async def length(api: Api) -> None:
    choice, usage = await _scored(api)
    lengths = {name: len(values) for name, values in choice["logprobs"].items() if values}
    expected = usage["prompt_tokens"] + 1
    expect(set(lengths.values()) == {expected}, f"expected {expected} entries, but got {lengths}")


@check("echo.first-null",
       "With echo, the first entry of token_logprobs and top_logprobs is null, and no other.",
       "must", "10.3 [LIT]")  # fmt: skip
async def first_null(api: Api) -> None:
    choice, _usage = await _scored(api)
    for name in ("token_logprobs", "top_logprobs"):
        values = choice["logprobs"][name]
        nulls = [index for index, value in enumerate(values) if value is None]
        expect(nulls == [0], f"{name}: expected null at index 0 only, but got it at {nulls}")


@check("echo.offsets",
       "With echo, text_offset begins at 0 and is the position of each token in the text.",
       "must", "10.4")  # fmt: skip
async def offsets(api: Api) -> None:
    choice, _usage = await _scored(api)
    found = choice["logprobs"]["text_offset"]
    expect(
        found[0] == 0 and found == sorted(found),
        f"expected offsets that increase from 0, but got {found}",
    )
    for token, offset in zip(choice["logprobs"]["tokens"], found, strict=True):
        part = choice["text"][offset : offset + len(token)]
        valid = part == token or offset == len(choice["text"])
        expect(valid, f"expected {token!r} at offset {offset}, but got {part!r}")


@check("echo.tokens", "With echo and max_tokens 0, the tokens in logprobs join to the prompt.",
       "must", "2.2 [HELM]")  # fmt: skip
async def tokens(api: Api) -> None:
    choice, _usage = await _scored(api, max_tokens=0)
    joined = _bytes(choice["logprobs"]["tokens"]).decode(errors="replace")
    expect(joined == PROMPT, f"expected exactly {PROMPT!r}, but got {joined!r}")


@check("echo.zero",
       "With echo and max_tokens 0, logprobs have one entry for each prompt token and no other.",
       "must", "10.7 [HELM]")  # fmt: skip
async def zero(api: Api) -> None:
    choice, usage = await _scored(api, max_tokens=0)
    count = len(choice["logprobs"]["tokens"])
    expect(
        count == usage["prompt_tokens"],
        f"expected {usage['prompt_tokens']} entries, but got {count}",
    )
    expect(choice["text"] == PROMPT, f"expected the prompt, but got {choice['text']!r}")


@check("echo.ids-verbatim",
       "With echo, a prompt of token ids has logprobs for exactly these tokens.",
       "must", "10.5 [LMEVAL]")  # fmt: skip
async def ids_verbatim(api: Api) -> None:
    ids = [70, 71, 70, 72]
    choice, usage = await _scored(api, [ids])
    count = len(choice["logprobs"]["tokens"])
    expect(count == len(ids) + 1, f"expected {len(ids) + 1} entries, but got {count}")
    expect(
        usage["prompt_tokens"] == len(ids), f"expected {len(ids)} prompt tokens, but got {usage}"
    )


@check("echo.id-lists", "With echo, each of several prompts has logprobs of its own length.",
       "must", "10.48")  # fmt: skip
async def id_lists(api: Api) -> None:
    body = await api.complete([[70, 71, 72], [73]], echo=True, logprobs=1, max_tokens=0)
    lengths = [len(choice["logprobs"]["tokens"]) for choice in body["choices"]]
    expect(lengths == [3, 1], f"expected 3 and 1 entries, but got {lengths}")


@check("echo.chain",
       "With echo, a prompt has the same log-probabilities as the beginning of a longer prompt.",
       "must", "10.8")  # fmt: skip
async def chain(api: Api) -> None:
    short, _usage = await _scored(api, max_tokens=0)
    long, _usage = await _scored(api, f"{PROMPT} Paris, and that of Italy is", max_tokens=0)
    # Later offsets belong to generated tokens. The last prompt token may differ in the longer one.
    size = sum(offset < len(PROMPT) for offset in short["logprobs"]["text_offset"]) - 1
    if size < 2:
        raise Skip(f"the prompt has {size + 1} tokens, of which the second one may differ")
    pairs = [one["logprobs"]["token_logprobs"][1:size] for one in (short, long)]
    differences = [abs(a - b) for a, b in zip(*pairs, strict=True)]
    expect(
        max(differences, default=0) < 0.3, f"expected the same log-probabilities, but got {pairs}"
    )


@check("echo.context-counts",
       "With echo, the log-probability of a token depends on the tokens before it.",
       "must", "2.6.2")  # fmt: skip
async def context_counts(api: Api) -> None:
    values = []
    for word in ("1, 2, 3, 4", "The cat sat"):
        choice, _usage = await _scored(api, f"{word}, 5", max_tokens=0)
        values.append(choice["logprobs"]["token_logprobs"][-1])
    expect(
        abs(values[0] - values[1]) > 1e-3, f"expected different log-probabilities, but got {values}"
    )


@check("echo.greedy",
       "With echo, no token has a greater log-probability than the most likely alternative.",
       "must", "10.9")  # fmt: skip
async def greedy(api: Api) -> None:
    choice, _usage = await _scored(api)
    arrays = choice["logprobs"]
    for value, top in zip(arrays["token_logprobs"][1:], arrays["top_logprobs"][1:], strict=True):
        valid = top and value <= max(top.values())
        expect(valid, f"expected at most the greatest value of {top}, but got {value}")


@check("echo.end-entry",
       "With echo, a generated end-of-sequence token has an entry in logprobs, but no text.",
       "must", "10.6 [LMEVAL]")  # fmt: skip
async def end_entry(api: Api) -> None:
    api.demo()
    prompt = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    answer = (await api.complete(prompt, max_tokens=40, temperature=0))["choices"][0]["text"]
    choice, usage = await _scored(api, prompt + answer)
    if choice["finish_reason"] != "stop":
        raise Skip("the model does not end its answer at that point")
    count = len(choice["logprobs"]["tokens"])
    expected = usage["prompt_tokens"] + 1
    expect(count == expected, f"expected {expected} entries, but got {count}")
    expect(
        choice["text"] == prompt + answer,
        f"expected {prompt + answer!r}, but got {choice['text']!r}",
    )


@check("echo.utf8",
       "With echo, the tokens in logprobs join to the prompt even if a character spans several "
       "tokens.",
       "must", "10.38")  # fmt: skip
async def utf8(api: Api) -> None:
    prompt = "😀 é 漢"
    choice, _usage = await _scored(api, prompt, max_tokens=0)
    joined = _bytes(choice["logprobs"]["tokens"])
    expect(joined == prompt.encode(), f"expected {prompt!r}, but got {joined!r}")


@check("echo.utf8-offsets",
       "With echo, text_offset never decreases and stays within the prompt, even if a character "
       "spans several tokens.",
       "must", "10.39")  # fmt: skip
async def utf8_offsets(api: Api) -> None:
    prompt = "😀 é 漢"
    choice, _usage = await _scored(api, prompt, max_tokens=0)
    found = choice["logprobs"]["text_offset"]
    valid = found == sorted(found) and found[-1] <= len(prompt)
    expect(valid, f"expected offsets up to {len(prompt)}, but got {found}")


@check("echo.floor",
       "With echo, the log-probability of an unlikely token is a finite number above -10000.",
       "must", "10.46")  # fmt: skip
async def floor(api: Api) -> None:
    choice, _usage = await _scored(api, "zxqj 漢漢", max_tokens=0)
    expect_finite([v for v in choice["logprobs"]["token_logprobs"] if v is not None])


@check("echo.stream",
       "With echo, a streamed completion has the same text, tokens and text_offset as one that "
       "is not streamed.",
       "must", "10.91 [vLLM#47815]")  # fmt: skip
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
