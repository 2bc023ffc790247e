"""Several choices, several prompts, seeds (contract 2.2, 2.8, 3.1)."""

from __future__ import annotations

from ..check import Fail, check, expect
from ..target import Api

RANDOM = {"temperature": 1.5, "max_tokens": 12}


@check("choices.order",
       "A completion request with three prompts and n 2 returns six choices, in order of index.",
       "must", "2.2 [VLLM] [LC]")  # fmt: skip
async def order(api: Api) -> None:
    body = await api.complete(["a", "b", "c"], n=2, max_tokens=1)
    indices = [choice["index"] for choice in body["choices"]]
    expect(indices == list(range(6)), f"expected 0 to 5, but got {indices}")


@check("choices.own-prompt",
       "With two prompts and n 2, choices 0 and 1 continue the first prompt, and 2 and 3 the "
       "second.",
       "must", "2.2")  # fmt: skip
async def own_prompt(api: Api) -> None:
    france = "What is the capital of France?"
    prompts = [api.stable("1, 2, 3,"), api.stable("The capital of France is", france)]
    body = await api.complete(prompts, n=2, max_tokens=6, temperature=0)
    texts = [choice["text"] for choice in body["choices"]]
    alone = [
        (await api.complete(prompt, max_tokens=6, temperature=0))["choices"][0]["text"]
        for prompt in prompts
    ]
    expected = [alone[0], alone[0], alone[1], alone[1]]
    expect(texts == expected, f"expected {expected}, but got {texts}")


@check("choices.usage", "The usage of a completion counts each prompt once, for every value of n.",
       "must", "2.2")  # fmt: skip
async def usage(api: Api) -> None:
    one = (await api.complete("Hello there", max_tokens=2))["usage"]["prompt_tokens"]
    three = (await api.complete("Hello there", max_tokens=2, n=3))["usage"]["prompt_tokens"]
    expect(one == three, f"expected {one} prompt tokens, but got {three}")


@check("choices.distinct",
       "Without a seed, the choices of a completion at high temperature are not all equal.",
       "must", "3.1 [lcp#1906]",
       chance="A right server fails with p⁹, where p is the probability of the likeliest text; a "
              "server that returns equal choices always fails.")  # fmt: skip
async def distinct(api: Api) -> None:
    for _ in range(3):
        body = await api.complete("Once upon a", n=4, **RANDOM)
        expect(len(body["choices"]) == 4, f"expected 4 choices, but got {len(body['choices'])}")
        if len({choice["text"] for choice in body["choices"]}) > 1:
            return
    raise Fail("expected choices that differ, but got equal ones in three of three requests")


@check("choices.chat", "A chat completion with n 2 returns choices 0 and 1, in order.",
       "must", "3.1")  # fmt: skip
async def chat(api: Api) -> None:
    body = await api.chat("Hello", n=2, max_tokens=2)
    indices = [choice["index"] for choice in body["choices"]]
    expect(indices == [0, 1], f"expected choices 0 and 1, but got {indices}")


@check("choices.seed", "The same completion request with the same seed returns the same text.",
       "must", "2.1 3.1", alone=True,
       chance="A server that ignores the seed passes with about 2p, where p is the probability "
              "of the likeliest text; a right one fails if batching changes two of "
              "three.")  # fmt: skip
async def seed(api: Api) -> None:
    # Requests before the first one can change the last digits of its logits.
    texts = [
        (await api.complete("Once upon a", seed=11, **RANDOM))["choices"][0]["text"]
        for _ in range(3)
    ]
    same = texts[1] in (texts[0], texts[2])
    expect(same, f"expected the same text in succession, but got {texts}")


@check("choices.seeds",
       "Completion requests that differ only in seed do not all return the same text.",
       "must", "2.1 3.1",
       chance="A right server fails with p³, where p is the probability of the likeliest text; a "
              "server with a fixed seed always fails.")  # fmt: skip
async def seeds(api: Api) -> None:
    texts = {
        (await api.complete("Once upon a", seed=number, **RANDOM))["choices"][0]["text"]
        for number in range(4)
    }
    expect(len(texts) > 1, f"expected different texts, but got {texts} each time")


@check("choices.best-of",
       "With best_of 3 and n 1, a completion has one choice, and usage counts all candidates.",
       "should", "2.8")  # fmt: skip
async def best_of(api: Api) -> None:
    one = await api.complete("1, 2, 3, 4,", max_tokens=2, best_of=1, seed=1)
    three = await api.complete("1, 2, 3, 4,", max_tokens=2, best_of=3, n=1, seed=1)
    expect(len(three["choices"]) == 1, f"expected one choice, but got {len(three['choices'])}")
    counts = [body["usage"]["completion_tokens"] for body in (one, three)]
    expect(counts[1] > counts[0], f"expected usage to count all candidates, but got {counts}")


@check("choices.best-of-one", "A completion request with best_of 1 and logprobs is accepted.",
       "must", "2.8 [HELM]")  # fmt: skip
async def best_of_one(api: Api) -> None:
    await api.complete(max_tokens=1, best_of=1, logprobs=1)


@check("choices.best-of-stream",
       "A completion request with stream true and best_of above n is rejected with 400.",
       "should", "2.1 10.53")  # fmt: skip
async def best_of_stream(api: Api) -> None:
    body = {"model": api.model, "prompt": "a", "best_of": 3, "n": 1, "stream": True}
    (await api.post("/completions", body)).error(400)
