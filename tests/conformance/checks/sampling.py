"""Temperature, biases, penalties (contract 2.1)."""

from __future__ import annotations

from ..check import Diverges, Skip, check, expect
from ..target import Api


@check(
    "sampling.greedy", "Temperature 0 gives the same answer each time.", "must", "10.55", alone=True
)
async def greedy(api: Api) -> None:
    texts = {
        (await api.complete("1, 2, 3,", temperature=0, max_tokens=8))["choices"][0]["text"]
        for _ in range(3)
    }
    expect(len(texts) == 1, f"expected one answer, but got {texts}")


@check("sampling.default", "Without a temperature answers vary.", "may", "2.1 10.56")
async def default(api: Api) -> None:
    texts = {
        (await api.complete("Once upon a", max_tokens=8))["choices"][0]["text"] for _ in range(8)
    }
    if len(texts) == 1:
        raise Diverges("eight answers were equal: the default temperature is not 1")


@check("sampling.top-p", "top_p near zero leaves the likeliest token.", "should", "2.1")
async def top_p(api: Api) -> None:
    best = await api.complete("1, 2, 3,", temperature=0, max_tokens=4)
    body = await api.complete("1, 2, 3,", temperature=1, top_p=0.0001, max_tokens=4)
    texts = [one["choices"][0]["text"] for one in (best, body)]
    expect(texts[0] == texts[1], f"expected the greedy answer, but got {texts}")


@check("sampling.bias-forces", "A bias of 100 makes a token come.", "must", "2.1 10.57")
async def bias_forces(api: Api) -> None:
    texts = set()
    for prompt in ("Hello", "1, 2, 3,"):
        body = await api.complete(prompt, logit_bias={"70": 100}, temperature=0, max_tokens=2)
        texts.add(body["choices"][0]["text"])
    expect(len(texts) == 1, f"expected the same token whatever the prompt, but got {texts}")


@check("sampling.bias-bans", "A bias of -100 keeps a token away.", "must", "2.1 10.57")
async def bias_bans(api: Api) -> None:
    forced = {"70": 100, "71": 99}
    first = await api.complete("Hello", logit_bias=forced, temperature=0, max_tokens=1)
    banned = {**forced, "70": -100}
    second = await api.complete("Hello", logit_bias=banned, temperature=0, max_tokens=1)
    texts = [body["choices"][0]["text"] for body in (first, second)]
    expect(texts[0] != texts[1], f"expected another token than the banned one, but got {texts}")


@check("sampling.bias-chat", "Chat takes biases too.", "must", "3.1")
async def bias_chat(api: Api) -> None:
    texts = set()
    for prompt in ("Hello", "Count to 7."):
        body = await api.chat(prompt, logit_bias={"70": 100}, temperature=0, max_tokens=2)
        texts.add(body["choices"][0]["message"]["content"])
    expect(len(texts) == 1, f"expected the same token whatever was said, but got {texts}")


@check("sampling.bias-fraction", "A bias may be a fraction.", "should", "2.1 [VLLM]")
async def bias_fraction(api: Api) -> None:
    await api.complete(logit_bias={"70": 0.5}, max_tokens=1)


@check("sampling.frequency-penalty", "A frequency penalty ends repetition.", "should", "2.1")
async def frequency_penalty(api: Api) -> None:
    forced = {"logit_bias": {"70": 21, "71": 20}, "temperature": 0, "max_tokens": 8}
    plain = (await api.complete("Hello", **forced))["choices"][0]["text"]
    if len(set(plain)) > 1 and plain[: len(plain) // 2] != plain[len(plain) // 2 :]:
        raise Skip("the biased token does not repeat")
    body = await api.complete("Hello", frequency_penalty=2, **forced)
    text = body["choices"][0]["text"]
    expect(text != plain, f"expected another token after a while, but got {text!r} both times")


@check("sampling.presence-penalty", "A presence penalty disfavours what was said.", "should", "2.1")
async def presence_penalty(api: Api) -> None:
    forced = {"logit_bias": {"70": 21, "71": 20}, "temperature": 0, "max_tokens": 4}
    plain = (await api.complete("Hello", **forced))["choices"][0]["text"]
    body = await api.complete("Hello", presence_penalty=2, **forced)
    text = body["choices"][0]["text"]
    if text == plain:
        raise Skip("the two biased tokens lie further apart than the penalty")
