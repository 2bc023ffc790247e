"""Tests of `/v1/completions` on every engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from conftest import Client
from latimer.schemas.openai.completions import Completion, CompletionChunk
from pydantic import TypeAdapter
from support.recordings import DEMO_CHATML
from support.replies import chunks_in

COUNT = DEMO_CHATML.format("Count to 12.")
FRANCE = DEMO_CHATML.format("What is the capital of France?")
REPLY = TypeAdapter(Completion)
CHUNK = TypeAdapter(CompletionChunk)


async def complete(client: httpx2.AsyncClient, **body: Any) -> Any:
    """Return a greedy completion."""
    reply = await client.post(
        "/v1/completions", json={"model": "demo", "temperature": 0, "prompt": COUNT, **body}
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


async def chunks_of(client: httpx2.AsyncClient, **body: Any) -> list[Any]:
    """Return the chunks of a greedy completion."""
    reply = await client.post(
        "/v1/completions",
        json={"model": "demo", "temperature": 0, "prompt": COUNT, "stream": True, **body},
    )
    return chunks_in(reply)


async def test_a_reply_is_openais_to_the_last_key(client: httpx2.AsyncClient) -> None:
    """A plain response has exactly OpenAI's keys, types, ids and headers."""
    response = await client.post(
        "/v1/completions", json={"model": "x", "prompt": COUNT, "temperature": 0}
    )
    reply = response.json()
    REPLY.validate_python(reply, strict=True)
    assert list(reply) == [
        "id", "object", "created", "model", "system_fingerprint", "choices", "usage",
    ]  # fmt: skip
    assert reply["id"].startswith("cmpl-")
    assert reply["model"] == "x"
    assert set(reply["choices"][0]) == {"text", "index", "logprobs", "finish_reason"}
    assert set(reply["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert response.headers["x-request-id"].startswith("req_")
    assert len(response.headers["x-request-id"]) == 36
    assert response.headers["openai-processing-ms"].isdigit()
    assert response.headers["openai-version"] == "2020-10-01"


async def test_ids_cannot_be_computed(client: httpx2.AsyncClient) -> None:
    """The ids of a request and of its reply do not follow from those that a client has seen."""
    found = set[str]()
    for _ in range(2):
        random.seed(0)
        reply = await client.post("/v1/completions", json={"prompt": COUNT, "temperature": 0})
        found |= {reply.headers["x-request-id"], reply.json()["id"]}
    assert len(found) == 4


async def test_a_stream_has_openais_order(client: httpx2.AsyncClient) -> None:
    """A stream sends text, one finish reason, and usage last, null before (contract 2.7)."""
    plain = await complete(client, max_tokens=64)
    chunks = await chunks_of(client, max_tokens=64, stream_options={"include_usage": True})
    for chunk in chunks:
        CHUNK.validate_python(chunk, strict=True)
    for key in ("id", "created", "model", "system_fingerprint", "object"):
        assert len({chunk[key] for chunk in chunks}) == 1
    *texts, last = chunks
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in texts)
    assert last["choices"] == []
    assert last["usage"] == plain["usage"]
    choices = [chunk["choices"][0] for chunk in texts]
    assert [choice["finish_reason"] for choice in choices].count(None) == len(choices) - 1
    assert choices[-1] == {"text": "", "index": 0, "logprobs": None, "finish_reason": "stop"}
    assert "".join(choice["text"] for choice in choices) == plain["choices"][0]["text"]


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        (",", "1", 1),
        ([","], "1", 1),
        (["nothing", " 4"], "1, 2, 3,", 6),
        ("5, 6", "1, 2, 3, 4, ", 9),
        ("1", "", 0),
        (None, "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12.", 24),
        ([], "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12.", 24),
        ("", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12.", 24),
        (["12", "1, 2, 3, 4, 5, 6, 7, 8"], "", 0),
    ],
)
async def test_stops(client: httpx2.AsyncClient, stop: Any, text: str, tokens: int) -> None:
    """Text and counted tokens end before the stop sequence, streamed or not."""
    reply = await complete(client, max_tokens=64, stop=stop)
    assert reply["choices"][0]["text"] == text
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == tokens
    chunks = await chunks_of(client, max_tokens=64, stop=stop)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


async def test_a_stop_inside_a_token(client: httpx2.AsyncClient) -> None:
    """A stop sequence can cut a token, and the token is counted."""
    reply = await complete(client, prompt=FRANCE, max_tokens=64, stop="pit")
    assert reply["choices"][0]["text"] == "The ca"
    assert reply["usage"]["completion_tokens"] == 2


async def test_echo(client: httpx2.AsyncClient) -> None:
    """An echoed prompt comes first, streamed or not, and is not counted as completion."""
    reply = await complete(client, max_tokens=3, echo=True)
    assert reply["choices"][0]["text"] == COUNT + "1, 2"
    assert reply["usage"]["completion_tokens"] == 3
    chunks = await chunks_of(client, max_tokens=3, echo=True)
    assert chunks[0]["choices"][0]["text"] == COUNT
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == COUNT + "1, 2"


@pytest.mark.parametrize("echo", [False, True])
async def test_no_tokens(client: httpx2.AsyncClient, echo: bool) -> None:
    """`max_tokens: 0` counts the prompt and echoes it on request (contract 2.4)."""
    reply = await complete(client, max_tokens=0, echo=echo)
    assert reply["choices"][0]["text"] == (COUNT if echo else "")
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"] == {"prompt_tokens": 12, "completion_tokens": 0, "total_tokens": 12}


async def test_prompts_times_choices(client: httpx2.AsyncClient) -> None:
    """Choices are ordered by prompt, then by choice, and each prompt counts once (contract 2.2)."""
    prompts = ["One day,", COUNT]
    body = {"prompt": prompts, "n": 2, "max_tokens": 4, "seed": 7, "temperature": 1}
    reply = await complete(client, **body)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert reply["choices"][2]["text"] == reply["choices"][3]["text"] == "1, 2,"
    single = [await complete(client, **{**body, "prompt": p, "n": 1}) for p in prompts]
    assert reply["choices"][0]["text"] == single[0]["choices"][0]["text"]
    assert reply["usage"] == {
        "prompt_tokens": 15, "completion_tokens": 16, "total_tokens": 31,
    }  # fmt: skip


async def test_streams_of_several_choices(client: httpx2.AsyncClient) -> None:
    """Streamed choices may interleave, but begin in ascending order, and each ends once."""
    body = {"prompt": ["One day,", COUNT], "n": 2, "max_tokens": 4, "seed": 7, "temperature": 1}
    chunks = [chunk["choices"][0] for chunk in await chunks_of(client, **body)]
    first = list(dict.fromkeys(chunk["index"] for chunk in chunks))
    assert first == [0, 1, 2, 3]
    reply = await complete(client, **body)
    for index in range(4):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert "".join(chunk["text"] for chunk in mine) == reply["choices"][index]["text"]
        assert [chunk["finish_reason"] for chunk in mine][:-1] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == "length"


async def test_a_list_of_one(client: httpx2.AsyncClient) -> None:
    """A list of one prompt is the same as that prompt."""
    one = await complete(client, prompt=[COUNT], max_tokens=4)
    assert [choice["text"] for choice in one["choices"]] == ["1, 2,"]


async def test_an_unknown_id_is_named_with_its_prompt(scorer: httpx2.AsyncClient) -> None:
    """An id that the vocabulary lacks is named, with the index of its prompt if there are
    several."""
    cases = (([5, 99999], "prompt"), ([[5, 99999]], "prompt"), ([[5], [5, 99999]], "prompt[1]"))
    for prompt, param in cases:
        body = {"model": "m", "prompt": prompt, "max_tokens": 1}
        reply = await scorer.post("/v1/completions", json=body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (400, param, "invalid_value")
        assert error["message"].startswith(
            f"Invalid '{param}': 99999 is not a token id of this model. "
            "Expected an id from 0 to 1023."
        )


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("word " * 3000, "context_length_exceeded"),
        ("x" * 4_000_000, "context_length_exceeded"),
        ("", "empty_string"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"echo": True}, {"logprobs": 0, "n": 2}])
async def test_a_wrong_text_is_named(
    scorer: httpx2.AsyncClient, prompt: str, code: str, more: Any
) -> None:
    """A text that is too long or empty is named by its index, if there are several prompts."""
    for prompts, param in (["a", "b", prompt, "c"], "prompt[2]"), ([prompt], "prompt"):
        body = {"model": "m", "prompt": prompts, "max_tokens": 1, **more}
        reply = await scorer.post("/v1/completions", json=body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (400, param, code)
        assert ("prompt[2]" in error["message"]) == (param == "prompt[2]")


async def _refuse_last(client: httpx2.AsyncClient, before: int, n: int) -> None:
    prompts = [*["a"] * before, "word " * 3000]
    body = {"model": "m", "prompt": prompts, "max_tokens": 300, "stream": True, "n": n}
    reply = await client.post("/v1/completions", json=body)
    error = reply.json()["error"]
    found = reply.status_code, error["param"], error["code"]
    assert found == (400, f"prompt[{before}]", "context_length_exceeded")


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_with_a_wrong_prompt_does_not_begin(
    scorer: httpx2.AsyncClient, n: int
) -> None:
    """A prompt that is too long is a 400 that names it, also behind another one in a stream."""
    await _refuse_last(scorer, 1, n)


async def test_in_process_all_prompts_are_checked_first(demo: httpx2.AsyncClient) -> None:
    """In process, a prompt that is too long is a 400, also behind a hundred others in a stream."""
    await _refuse_last(demo, 100, 2)


async def test_the_first_wrong_prompt_is_named(demo: httpx2.AsyncClient) -> None:
    """Of several wrong prompts in a stream, the error is about the first, as without a stream."""
    for stream in (False, True):
        body = {"model": "m", "prompt": ["", "word " * 3000], "stream": stream}
        error = (await demo.post("/v1/completions", json=body)).json()["error"]
        assert (error["param"], error["code"]) == ("prompt[0]", "empty_string")


async def test_a_huge_id_is_an_integer(echo: httpx2.AsyncClient) -> None:
    """A token id of more than 64 bits is an integer out of range, and no decimal number."""
    reply = await echo.post("/v1/completions", json={"model": "m", "prompt": [2**70]})
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("prompt[0]", "integer_above_max_value")
    assert "Expected a value <= 2147483647" in error["message"]


@pytest.mark.parametrize(
    "prompt", [[{"role": "user", "content": "Hi"}], {"role": "user"}, [[{"role": "user"}]]]
)
async def test_a_chat_as_a_prompt(echo: httpx2.AsyncClient, prompt: Any) -> None:
    """The error for messages in `prompt`, or for several chats, names the endpoint for them."""
    reply = await echo.post("/v1/completions", json={"model": "m", "prompt": prompt})
    assert reply.json()["error"]["message"].endswith(
        "but got an object instead. For a chat, send 'messages' to v1/chat/completions."
    )


async def test_token_ids(client: httpx2.AsyncClient) -> None:
    """A list of ids is one prompt, lists of ids are several, and all are used unchanged."""
    ids = [1, 288, 201, 37, 505, 298, 223, 515, 16, 2, 201, 1, 285, 201]
    # The first three ids are "Hi" in the demo model's vocabulary.
    plain = await complete(client, prompt=ids[:3], max_tokens=1)
    assert plain["usage"]["prompt_tokens"] == 3
    several = await complete(client, prompt=[ids[:3], [360, 323, 14]], max_tokens=1)
    assert several["usage"]["prompt_tokens"] == 6
    assert several["choices"][0] == plain["choices"][0]
    assert (await complete(client, prompt=[[360, 323, 14]], max_tokens=4))["choices"][0][
        "text"
    ] == (await complete(client, prompt="One day,", max_tokens=4))["choices"][0]["text"]


@pytest.mark.parametrize(
    ("engine", "inexact"),
    [("llama_cpp", None), ("llama_server", None), ("koboldcpp", "logit_bias")],
)
async def test_a_bias_that_cannot_be_checked_is_inexact(
    apps: Callable[[str], Any], client_of: Client, engine: str, inexact: str | None
) -> None:
    """A bias bans its token; koboldcpp, which reports no vocabulary size, cannot check its id."""
    body = {"model": "demo", "prompt": FRANCE, "temperature": 0, "max_tokens": 20}
    async with client_of(apps(engine)) as client:
        bias = {str(PARIS): -100}
        reply = await client.post("/v1/completions", json={**body, "logit_bias": bias})
        assert "Paris" not in reply.json()["choices"][0]["text"]
        assert reply.headers.get("x-latimer-inexact") == inexact
        if inexact is None:
            bias = {"99999": 1}
            reply = await client.post("/v1/completions", json={**body, "logit_bias": bias})
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == "logit_bias"


# The id of " Paris" in the demo model's vocabulary.
PARIS = 876
