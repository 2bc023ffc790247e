"""Temperature, biases, penalties (contract 2.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..check import Diverges, check, expect
from ..target import Api


@check("sampling.greedy",
       "At temperature 0, the same completion request returns the same text every time.",
       "must", "10.55", alone=True)  # fmt: skip
async def greedy(api: Api) -> None:
    texts = {
        (await api.complete("1, 2, 3,", temperature=0, max_tokens=8))["choices"][0]["text"]
        for _ in range(3)
    }
    expect(len(texts) == 1, f"expected the same text each time, but got {texts}")


@check("sampling.default",
       "Without a temperature, repeated completions of one prompt are not all equal.",
       "may", "2.1 10.56",
       chance="A right server diverges with p⁷, where p is the probability of the likeliest text; "
              "a server that is greedy by default always does.")  # fmt: skip
async def default(api: Api) -> None:
    texts = {
        (await api.complete("Once upon a", max_tokens=24))["choices"][0]["text"] for _ in range(8)
    }
    if len(texts) == 1:
        raise Diverges("eight completions were equal, so the default temperature is not 1")


@check("sampling.top-p", "A top_p close to 0 returns the greedy completion, even at temperature 2.",
       "should", "2.1")  # fmt: skip
async def top_p(api: Api) -> None:
    prompt = api.stable("1, 2, 3,")
    best = await api.complete(prompt, temperature=0, max_tokens=12)
    body = await api.complete(prompt, temperature=2, top_p=0.0001, max_tokens=12)
    texts = [one["choices"][0]["text"] for one in (best, body)]
    expect(texts[0] == texts[1], f"expected the greedy text, but got {texts}")


@check("sampling.bias-forces",
       "In a completion, a logit_bias of 100 forces its token after any prompt.",
       "must", "2.1 10.57")  # fmt: skip
async def bias_forces(api: Api) -> None:
    texts = set()
    for prompt in ("Hello", "1, 2, 3,"):
        body = await api.complete(prompt, logit_bias={"70": 100}, temperature=0, max_tokens=2)
        texts.add(body["choices"][0]["text"])
    expect(len(texts) == 1, f"expected the same token for each prompt, but got {texts}")


@check("sampling.bias-bans", "In a completion, a logit_bias of -100 bans its token.",
       "must", "2.1 10.57")  # fmt: skip
async def bias_bans(api: Api) -> None:
    # The second one is far below the first, and far above all others.
    forced = {"70": 100, "71": 50}
    first = await api.complete("Hello", logit_bias=forced, temperature=0, max_tokens=1)
    banned = {**forced, "70": -100}
    second = await api.complete("Hello", logit_bias=banned, temperature=0, max_tokens=1)
    texts = [body["choices"][0]["text"] for body in (first, second)]
    expect(texts[0] != texts[1], f"expected another token than the banned one, but got {texts}")


@check("sampling.bias-chat", "In a chat completion, a logit_bias of 100 forces its token.",
       "must", "3.1")  # fmt: skip
async def bias_chat(api: Api) -> None:
    texts = set()
    for prompt in ("Hello", "Count to 7."):
        body = await api.chat(prompt, logit_bias={"70": 100}, temperature=0, max_tokens=2)
        texts.add(body["choices"][0]["message"]["content"])
    expect(len(texts) == 1, f"expected the same token for each message, but got {texts}")


@check("sampling.bias-fraction", "A logit_bias value may be a fraction.", "should", "2.1 [VLLM]")
async def bias_fraction(api: Api) -> None:
    await api.complete(logit_bias={"70": 0.5}, max_tokens=1)


# Prompts whose completions repeat tokens. These run without a bias.
REPEATING = ("1, 2, 3,", "la la la la", "a, a, a, a,", "the cat and the dog and the")
# The bias leaves two tokens. The likelier one varies with the position, by a small margin.
TWO: Mapping[str, Any] = {"logit_bias": {"70": 100, "71": 100}, "temperature": 0, "max_tokens": 6}
PROMPTS = (
    "Hello",
    "1, 2, 3,",
    "Once upon a time",
    "The capital of",
    "x = [",
    "I am",
    "Q:",
    "a b c",
)


async def _changes(api: Api, **penalty: float) -> bool:
    """Return True if a penalty changes any completion."""
    free: Mapping[str, Any] = {"temperature": 0, "max_tokens": 24}
    for prompt, full in (*((p, TWO) for p in PROMPTS), *((p, free) for p in REPEATING)):
        texts = [
            (await api.complete(prompt, **full, **more))["choices"][0]["text"]
            for more in ({}, penalty)
        ]
        if texts[0] != texts[1]:
            return True
    return False


@check("sampling.frequency-penalty", "A frequency_penalty of 2 changes some greedy completions.",
       "should", "2.1")  # fmt: skip
async def frequency_penalty(api: Api) -> None:
    found = await _changes(api, frequency_penalty=2.0)
    expect(
        found, f"expected a change in any of {len(PROMPTS + REPEATING)} completions, but got none"
    )


@check("sampling.presence-penalty", "A presence_penalty of 2 changes some greedy completions.",
       "should", "2.1")  # fmt: skip
async def presence_penalty(api: Api) -> None:
    found = await _changes(api, presence_penalty=2.0)
    expect(
        found, f"expected a change in any of {len(PROMPTS + REPEATING)} completions, but got none"
    )
