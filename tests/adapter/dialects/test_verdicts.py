"""Tests of the response of each engine to each field of another server, streamed or not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx2
import pytest
from adapter.dialects.outcomes import BASES, PATHS, body_of, equal, rows, sent
from conftest import ENGINES, Client
from latimer.adapter import OpenAIAdapter
from latimer.adapter.dialects import TABLES, Field, Where
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.koboldcpp.translate import NEUTRAL
from support.engines.replay import GENERATE, Replay, replaying
from support.replies import chunks_in

IDS: Callable[[Any], str] = lambda one: one if isinstance(one, str) else one.name  # noqa: E731
# Parts of a payload that decide which recording answers.
_PLAIN = {"temperature": 0.0, "top_p": 1.0, "presence_penalty": 0.0, "stop_sequence": []}


class AnySampling(Replay):
    """A fake koboldcpp that answers any sampling as greedy, and keeps its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []

    def _find(self, method: str, path: str, body: Any) -> dict[str, Any] | None:
        if path in GENERATE and "12" in body["prompt"]:
            shown = {n: v for n, v in body.items() if n not in ("genkey", "sampler_seed")}
            self.asked.append(shown)
            known = _PLAIN.keys() | NEUTRAL.keys() | {
                "prompt", "max_length", "max_context_length", "genkey", "render_special",
            }  # fmt: skip
            body = {n: v for n, v in body.items() if n in known} | NEUTRAL | _PLAIN
        return super()._find(method, path, body)


@pytest.fixture(scope="module")
def koboldcpp() -> Iterator[tuple[str, AnySampling]]:
    """Run a koboldcpp that accepts any sampling."""
    replay = AnySampling()
    with replaying(replay) as (address, _):
        yield address, replay


Ask = Callable[[str, Where, dict[str, Any]], Any]


@pytest.fixture(scope="module")
async def clients(
    koboldcpp: tuple[str, AnySampling], apps: Callable[[str], Any], client_of: Client
) -> AsyncIterator[dict[str, httpx2.AsyncClient]]:
    """Return a client of each engine's adapter."""
    own = OpenAIAdapter(KoboldCpp(koboldcpp[0]), any_model=True)
    async with (
        client_of(apps("llama_cpp")) as first,
        client_of(apps("llama_server")) as second,
        client_of(own) as third,
    ):
        yield dict(zip(ENGINES, (first, second, third), strict=True))
    await own.aclose()


def texts_of(reply: httpx2.Response) -> list[str]:
    """Return the text of each choice, streamed or not."""
    if "event-stream" not in reply.headers["content-type"]:
        return [
            choice["text"] if "text" in choice else choice["message"]["content"]
            for choice in reply.json()["choices"]
        ]
    found: dict[int, str] = {}
    for chunk in chunks_in(reply):
        for choice in chunk["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + text
    return [found[index] for index in sorted(found)]


WAYS = [("llama_cpp", False), ("llama_server", True), ("koboldcpp", False)]


def named(where: Where, *names: str) -> list[tuple[Where, Field]]:
    """Return some fields of an endpoint."""
    return [(where, TABLES[where][name]) for name in names]


# The rows that engines answer; `test_table.py` has all others, without an engine.
REFUSED = [*named("chat", "stop_token_ids"), *named("completions", "options.penalize_newline")]
MAPPED = [
    *named("chat", "structured_outputs", "rep_pen", "min_new_tokens", "thinking", "reasoning"),
    *named("completions", "tfs_z", "guided_choice", "sampler_seed", "n_probs", "n_cmpl", "options"),
]


@pytest.mark.parametrize(("where", "field"), REFUSED, ids=IDS)
async def test_a_refused_field(
    clients: dict[str, httpx2.AsyncClient], where: Where, field: Field
) -> None:
    """A refused field is a 400 with its name and a hint."""
    for engine, stream in WAYS:
        body = body_of(where, field, {**sent(field.name, field.example), "stream": stream})
        reply = await clients[engine].post(PATHS[where], json=body)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert (error["param"], error["code"]) == (field.name, "unsupported_parameter")
        assert error["message"].endswith(f"'{field.name}' is not supported. {field.note}")


@pytest.mark.parametrize("where", PATHS)
async def test_ignored_fields(clients: dict[str, httpx2.AsyncClient], where: Where) -> None:
    """Ignored fields are listed, and the answer is the same."""
    # A header lists no more.
    fields = [field for place, field in rows("ignored") if place == where][-15:]
    extra: dict[str, Any] = {}
    for field in fields:
        for name, value in sent(field.name, field.example).items():
            extra[name] = {**extra.get(name, {}), **value} if "." in field.name else value
    for engine, stream in WAYS:
        plain = body_of(where, fields[0], {"stream": stream})
        wanted = await clients[engine].post(PATHS[where], json=plain)
        reply = await clients[engine].post(PATHS[where], json={**plain, **extra})
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-latimer-ignored"] == ", ".join(sorted(f.name for f in fields))
        assert texts_of(reply) == texts_of(wanted)


@pytest.mark.parametrize(("where", "field"), MAPPED, ids=IDS)
async def test_a_mapped_field(
    clients: dict[str, httpx2.AsyncClient],
    koboldcpp: tuple[str, AnySampling],
    where: Where,
    field: Field,
) -> None:
    """A mapped field gets the answer of the field that it is mapped to, or the same error under
    its own name."""
    replay = koboldcpp[1]
    theirs, ours = sent(field.name, field.example), equal(where, field)
    for engine, stream in WAYS:
        replies = []
        payloads = []
        for fields in (theirs, ours):
            del replay.asked[:]
            body = body_of(where, field, {**fields, "stream": stream})
            replies.append(await clients[engine].post(PATHS[where], json=body))
            payloads.append(list(replay.asked))
        got, wanted = replies
        assert got.status_code == wanted.status_code
        if got.status_code == 400:
            param = got.json()["error"]["param"]
            assert param.startswith(field.name)
            assert f"'{param}'" in got.json()["error"]["message"]
            continue
        assert got.status_code == 200, got.text
        assert got.headers.get("x-latimer-ignored") == IGNORED.get(field.name)
        assert payloads[0] == payloads[1]
        assert texts_of(got) == texts_of(wanted)


# The fields that an example's field contains, and that have no effect.
IGNORED = {"options": "options.num_ctx", "reasoning": "reasoning.effort"}


@pytest.mark.parametrize("where", PATHS)
async def test_unknown_fields_inside_known_objects(demo: httpx2.AsyncClient, where: Where) -> None:
    """An unknown field of a known object is listed with its path."""
    body = {"model": "demo", "max_tokens": 2, **BASES[where], "options": {"foo": 1}, "bar": 2}
    reply = await demo.post(PATHS[where], json=body)
    assert reply.status_code == 200
    assert reply.headers["x-latimer-ignored"] == "bar, options.foo"


async def test_strict_refuses_only_what_is_unknown(apps: Any, client_of: Client) -> None:
    """Under `strict`, known fields that cannot change the answer are listed; others are refused."""
    from latimer.backends.llama_cpp import LlamaCpp

    backend = LlamaCpp()
    body = {"model": "demo", "max_tokens": 2, **BASES["chat"]}
    async with client_of(OpenAIAdapter(backend, any_model=True, strict=True)) as client:
        reply = await client.post(PATHS["chat"], json={**body, "keep_alive": "5m"})
        assert reply.status_code == 200
        assert reply.headers["x-latimer-ignored"] == "keep_alive"
        for fields, param in (
            ({"options": {"foo": 1}}, "options.foo"),
            ({"reasoning_effort": "low"}, "reasoning_effort"),
            ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ):
            reply = await client.post(PATHS["chat"], json={**body, **fields})
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == param
    await backend.aclose()
