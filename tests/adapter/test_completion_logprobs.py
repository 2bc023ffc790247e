"""Tests of `logprobs`, `echo` and `best_of` on every engine, as OpenAI's clients see them."""

from __future__ import annotations

import math
import re
from typing import Any

import httpx2
import pytest
from support.recordings import DEMO_CHATML
from support.replies import chunks_in

SCORING = ("llama_cpp", "llama_server")
CAPITAL = DEMO_CHATML.format("What is the capital of France?")
FIRE = DEMO_CHATML.format("Show me an emoji of fire.")


async def complete(client: httpx2.AsyncClient, **body: Any) -> Any:
    """Return a completion, with a seed because OpenAI's defaults sample."""
    reply = await client.post("/v1/completions", json={"model": "m", "seed": 3, **body})
    assert reply.status_code == 200, reply.text
    assert not re.search(r"NaN|Infinity", reply.text)
    return reply.json()


async def streamed(client: httpx2.AsyncClient, **body: Any) -> tuple[str, Any]:
    """Return the joined text and arrays of a streamed completion of one choice."""
    body = {"model": "m", "seed": 3, "stream": True, **body}
    choices = [c["choices"][0] for c in chunks_in(await client.post("/v1/completions", json=body))]
    arrays: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    arrays["top_logprobs"] = []
    for choice in choices:
        for name in arrays:
            arrays[name] += choice["logprobs"][name] or []
    assert choices[-1]["logprobs"]["tokens"] == []
    return "".join(choice["text"] for choice in choices), arrays


async def test_engines_agree(client: httpx2.AsyncClient, demo: httpx2.AsyncClient) -> None:
    """All engines return the same tokens and offsets, and logprobs within a small tolerance."""
    for body in (
        {"prompt": CAPITAL, "logprobs": 2},
        {"prompt": FIRE, "logprobs": 1},
        {"prompt": CAPITAL, "logprobs": 0, "stop": " of"},
        {"prompt": DEMO_CHATML.format("Translate to French: summer"), "logprobs": 1, "n": 2},
    ):
        ours = (await complete(client, **body))["choices"]
        reference = (await complete(demo, **body))["choices"]
        for choice, other in zip(ours, reference, strict=True):
            assert choice["text"] == other["text"]
            assert choice["logprobs"]["tokens"] == other["logprobs"]["tokens"]
            assert choice["logprobs"]["text_offset"] == other["logprobs"]["text_offset"]
            for a, b in zip(
                choice["logprobs"]["token_logprobs"],
                other["logprobs"]["token_logprobs"],
                strict=True,
            ):
                assert math.isclose(a, b, abs_tol=0.05)


async def test_zero_log_probabilities_are_not_none(client: httpx2.AsyncClient) -> None:
    """`logprobs: 0` returns the tokens without alternatives, and null returns none."""
    choice = (await complete(client, prompt=CAPITAL, logprobs=0))["choices"][0]
    assert choice["logprobs"]["top_logprobs"] is None
    assert len(choice["logprobs"]["token_logprobs"]) == 7
    choice = (await complete(client, prompt=CAPITAL, logprobs=None))["choices"][0]
    assert choice["logprobs"] is None


@pytest.mark.parametrize("stop", [None, " France", "itals", ["o", "xyz"], "The", "tal of"])
async def test_streams_tell_the_same(client: httpx2.AsyncClient, stop: Any) -> None:
    """The chunks' entries add up to the unstreamed arrays, also if a stop sequence delays text."""
    body = {"prompt": CAPITAL, "logprobs": 2, "stop": stop}
    choice = (await complete(client, **body))["choices"][0]
    text, arrays = await streamed(client, **body)
    assert text == choice["text"]
    assert arrays["tokens"] == choice["logprobs"]["tokens"]
    assert arrays["text_offset"] == choice["logprobs"]["text_offset"]
    for a, b in zip(arrays["token_logprobs"], choice["logprobs"]["token_logprobs"], strict=True):
        assert math.isclose(a, b, abs_tol=0.05)
    assert "".join(arrays["tokens"]).startswith(text)


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("logprobs", [None, 0, 1])
async def test_what_echo_shows(
    scorer: httpx2.AsyncClient, echo: bool, max_tokens: int, logprobs: int | None
) -> None:
    """Each mix of `echo`, `max_tokens` and `logprobs` has the right text, arrays and usage."""
    reply = await complete(
        scorer, prompt=CAPITAL, echo=echo, max_tokens=max_tokens, logprobs=logprobs
    )
    choice, usage = reply["choices"][0], reply["usage"]
    generated = "The capital" if max_tokens else ""
    assert choice["text"] == (CAPITAL if echo else "") + generated
    assert choice["finish_reason"] == "length"
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (15, max_tokens)
    if logprobs is None:
        assert choice["logprobs"] is None
        return
    count = (15 if echo else 0) + max_tokens
    arrays = choice["logprobs"]
    assert len(arrays["tokens"]) == len(arrays["text_offset"]) == count
    assert [value is None for value in arrays["token_logprobs"]] == [
        echo and index == 0 for index in range(count)
    ]
    if logprobs == 0:
        assert arrays["top_logprobs"] is None
    elif echo:
        assert arrays["top_logprobs"][0] is None
    assert "".join(arrays["tokens"]) == choice["text"]
    assert arrays["text_offset"][:1] == ([0] if echo else [len(CAPITAL)] if count else [])


# The ids of "Hi", and of the three bytes of a character.
HI, BYTE, SECOND, THIRD = 769, 165, 248, 101


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize(
    ("prompt", "bias", "offsets"),
    [
        ([HI, BYTE], 313, [0, 2, 3, 6]),
        ([HI], BYTE, [0, 2, 3, 4]),
        ([HI, BYTE], SECOND, [0, 2, 2, 2]),
    ],
)
async def test_offsets_after_an_incomplete_character(
    scorer: httpx2.AsyncClient, echo: bool, prompt: list[int], bias: int, offsets: list[int]
) -> None:
    """A token after an abandoned character begins after it: with and without echo, and streamed."""
    body: dict[str, Any] = {"prompt": prompt, "echo": echo, "logprobs": 0, "temperature": 0}
    body |= {"logit_bias": {bias: 100}, "max_tokens": 4 - len(prompt)}
    expected = offsets if echo else offsets[len(prompt) :]
    choice = (await complete(scorer, **body))["choices"][0]
    text, arrays = await streamed(scorer, **body)
    assert choice["logprobs"]["text_offset"] == arrays["text_offset"] == expected
    assert text == choice["text"]


@pytest.mark.parametrize("stop", [None, ["xyz", "日本"]])
@pytest.mark.parametrize("logprobs", [None, 0])
async def test_a_character_begins_in_the_prompt(
    scorer: httpx2.AsyncClient, logprobs: int | None, stop: Any
) -> None:
    """A character of the echoed prompt is completed by the reply, with and without `logprobs`."""
    body: dict[str, Any] = {"prompt": [HI, BYTE, SECOND], "echo": True, "logprobs": logprobs}
    body |= {"logit_bias": {THIRD: 100}, "temperature": 0, "max_tokens": 2, "n": 2, "stop": stop}
    reply = await complete(scorer, **body)
    assert [choice["text"] for choice in reply["choices"]] == ["Hi日\ufffd"] * 2
    assert reply["usage"]["completion_tokens"] == 4
    body |= {"stream": True, "model": "m", "n": 1}
    chunks = chunks_in(await scorer.post("/v1/completions", json=body))
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == "Hi日\ufffd"
    # The last chunk has the finish reason.
    assert all(texts[:-1])


async def test_a_reply_ends_inside_a_character(scorer: httpx2.AsyncClient) -> None:
    """After a prompt that ends inside a character, broken characters of a reply are its text."""
    body = {"prompt": [HI, BYTE], "echo": True, "logit_bias": {BYTE: 100}, "max_tokens": 3}
    reply = await complete(scorer, **body, temperature=0)
    assert reply["choices"][0]["text"] == "Hi\ufffd\ufffd\ufffd"
    assert reply["usage"]["completion_tokens"] == 3


async def test_ids_are_echoed_verbatim(scorer: httpx2.AsyncClient) -> None:
    """Prompts of token ids are each scored unchanged and returned in order."""
    prompts = [[70, 71, 72], [418, 130, 107], [2, 1, 84]]
    reply = await complete(scorer, prompt=prompts, echo=True, logprobs=1, max_tokens=1, n=2)
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    assert reply["usage"]["prompt_tokens"] == 9
    for index, choice in enumerate(reply["choices"]):
        alone = await complete(
            scorer, prompt=[prompts[index // 2]], echo=True, logprobs=1, max_tokens=0
        )
        arrays = choice["logprobs"]
        assert len(arrays["tokens"]) == 4
        assert arrays["tokens"][:3] == alone["choices"][0]["logprobs"]["tokens"]
    assert reply["choices"][4]["text"].startswith("<|im_end|><|im_start|>")


async def test_stops_are_not_looked_for_in_an_echoed_prompt(scorer: httpx2.AsyncClient) -> None:
    """A stop sequence in the echoed prompt does not end the completion."""
    reply = await complete(
        scorer, prompt=CAPITAL, echo=True, logprobs=1, stop=" capital", temperature=0
    )
    choice = reply["choices"][0]
    assert choice["text"] == CAPITAL + "The"
    assert len(choice["logprobs"]["tokens"]) == 16


async def test_the_best_of_several(client: httpx2.AsyncClient) -> None:
    """`best_of` returns the candidates with the highest mean log-probability, best first."""
    body = {"prompt": "Say:", "max_tokens": 1, "logprobs": 0}
    candidates = (await complete(client, n=5, **body))["choices"]
    reply = await complete(client, n=2, best_of=5, **body)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]

    def score(choice: Any) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values) if values else -math.inf

    limited = [choice for choice in candidates if choice["finish_reason"] == "length"]
    assert len(limited) == 5, "none of these candidates ends by itself"
    ranked = sorted(candidates, key=score, reverse=True)
    assert [c["text"] for c in reply["choices"]] == [c["text"] for c in ranked[:2]]
    assert reply["usage"]["completion_tokens"] == 5


async def test_as_many_as_the_best_are_not_ranked(scorer: httpx2.AsyncClient) -> None:
    """With `best_of` equal to `n`, all candidates are returned in their order, as in a stream."""
    body = {"prompt": "Say:", "max_tokens": 1, "n": 5, "seed": 3}
    plain = (await complete(scorer, logprobs=0, **body))["choices"]
    reply = await complete(scorer, best_of=5, **body)
    texts = [choice["text"] for choice in plain]
    ranked = sorted(plain, key=lambda one: one["logprobs"]["token_logprobs"], reverse=True)
    assert [one["text"] for one in ranked] != texts, "these candidates are in order by chance"
    assert [choice["text"] for choice in reply["choices"]] == texts


async def test_the_whole_prompt_may_be_scored(scorer: httpx2.AsyncClient) -> None:
    """A prompt of one token has one entry, with a null logprob."""
    reply = await complete(scorer, prompt=[70], echo=True, logprobs=1, max_tokens=0)
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == [None]
    assert reply["choices"][0]["finish_reason"] == "length"


async def test_ids_of_tokens_and_alternatives(
    client: httpx2.AsyncClient, demo: httpx2.AsyncClient
) -> None:
    """`logprobs_token_ids` adds the ids of tokens and alternatives, which spell the same texts."""
    body = {"prompt": CAPITAL, "logprobs": 3, "logprobs_token_ids": True}
    own = (await complete(client, **body))["choices"][0]["logprobs"]
    assert len(own["token_ids"]) == len(own["tokens"])
    for token, spelling in zip(own["token_ids"], own["tokens"], strict=True):
        reply = await demo.post("/detokenize", json={"tokens": [token]})
        assert reply.json() == {"prompt": spelling}
    for top, ids in zip(own["top_logprobs"], own["top_token_ids"], strict=True):
        assert top.keys() == ids.keys()
    first = own["tokens"][0]
    assert own["top_token_ids"][0][first] == own["token_ids"][0]


async def test_ids_continue_exactly(scorer: httpx2.AsyncClient) -> None:
    """A prompt of the ids of a text and of its reply scores as they did."""
    ids = (await scorer.post("/tokenize", json={"prompt": CAPITAL})).json()["tokens"]
    body = {"logprobs": 1, "logprobs_token_ids": True, "temperature": 0}
    own = (await complete(scorer, prompt=CAPITAL, **body))["choices"][0]["logprobs"]
    begun = [*ids, *own["token_ids"][:3]]
    rest = (await complete(scorer, prompt=begun, **body))["choices"][0]["logprobs"]
    count = len(own["token_ids"]) - 3
    assert rest["token_ids"][:count] == own["token_ids"][3:]


async def test_ids_need_log_probabilities(echo: httpx2.AsyncClient) -> None:
    """`logprobs_token_ids` without `logprobs` is a 400 that names it; with 0 it has no lists."""
    body: dict[str, Any] = {"model": "m", "prompt": "a", "logprobs_token_ids": True}
    reply = await echo.post("/v1/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "logprobs_token_ids"
    reply = await echo.post("/v1/completions", json={**body, "logprobs": 0})
    own = reply.json()["choices"][0]["logprobs"]
    assert (own["token_ids"], own["top_token_ids"]) == ([97], None)
