"""Actions of clients and engines beyond one request: disconnect, read nothing, pipeline, flood."""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter

from support.engines.koboldcpp import FakeKoboldcpp
from support.engines.llama_server import FakeLlamaServer
from support.engines.model import TEMPLATE, Model

from chaos.case import CHAT, COMPLETIONS, Act, Case, asks, judged
from chaos.client import Client, Reply, ask, get, post
from chaos.stage import Stage


def leaves(
    after: float = 0.0, *, share: float = 1.0, begun: bool = False, twice: bool = False
) -> Act:
    """Return an act that disconnects and checks that all work ends.

    Args:
        after: seconds after the request was sent.
        share: the part of the request's bytes that is sent.
        begun: wait for the first bytes of the reply's body.
        twice: send a second request on the connection, before the first is answered.
    """

    async def act(stage: Stage, case: Case) -> list[str]:
        request = stage.request(case, stage.marker())
        data = request.data
        client = await Client.to(stage.latimer.port, request)
        client.send(data[: int(len(data) * share)] + data * twice)
        if begun:
            async with asyncio.timeout(case.seconds):
                await client.reader.readuntil(b"\r\n\r\n")
                await client.reader.read(1)
        await asyncio.sleep(after)
        if stage.fake is not None and case.says == "works" and not stage.fake.working:
            return ["the engine was not at work when the client left"]
        client.leave()
        return await stage.calm()

    return act


async def stays_silent(stage: Stage, case: Case) -> list[str]:
    """Send half a request, wait, and disconnect."""
    request = stage.request(case, stage.marker())
    client = await Client.to(stage.latimer.port, request)
    client.send(request.data[: len(request.data) // 2])
    await asyncio.sleep(0.5)
    client.leave()
    return []


def reads_nothing(seconds: float = 2.0, most: float = 32.0) -> Act:
    """Return an act that requests a stream, reads none of it, and measures the sent bytes.

    Args:
        seconds: how long to wait before measuring.
        most: limit of MiB that the engine sends.
    """

    async def act(stage: Stage, case: Case) -> list[str]:
        assert stage.fake is not None
        before = stage.fake.sent
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, ("127.0.0.1", stage.latimer.port))
            await loop.sock_sendall(connection, stage.request(case, stage.marker()).data)
            await asyncio.sleep(seconds)
            taken = (stage.fake.sent - before) / 2**20
        found = await stage.calm()
        if taken > most:
            found.append(f"{taken:.0f} MiB were taken from the engine, and nothing was read")
        return found

    return act


async def pipelines(stage: Stage, case: Case) -> list[str]:
    """Send two requests together on one connection, and check that each gets its own reply in
    order."""
    markers = [stage.marker(), stage.marker()]
    requests = [stage.request(case, marker) for marker in markers]
    client = await Client.to(stage.latimer.port, requests[0])
    found = []
    try:
        data = b"".join(request.data for request in requests)
        client.send(data.replace(b"Connection: close\r\n", b""))
        for request, marker in zip(requests, markers, strict=True):
            async with asyncio.timeout(case.seconds):
                reply = await client.reply()
            reply.wanted = stage.wanted(request, marker)
            found += judged(reply, case)
    except TimeoutError:
        found.append("a second request in the pipeline is not answered")
    finally:
        client.leave()
    return found


async def asks_again(stage: Stage, case: Case) -> list[str]:
    """Send the request three times in sequence, each time with its own marker."""
    found: list[str] = []
    for _ in range(3):
        found += await asks(stage, case)
    # Late bytes arrive on a connection that is idle.
    await asyncio.sleep(0.1 if "late" in case.fault else 0)
    return found


def floods(count: int, ends: bool = True) -> Act:
    """Return an act that sends many concurrent requests, each of which gets its own reply or a 429.

    Args:
        count: the number of requests.
        ends: True if every request waits for its reply; else the clients disconnect after a second.
    """

    async def act(stage: Stage, case: Case) -> list[str]:
        async def send(index: int) -> Reply:
            # A full backlog of connections is the system's limit, not Latimer's.
            await asyncio.sleep(index / 4000)
            return await stage.ask(case)

        tasks = [asyncio.create_task(send(index)) for index in range(count)]
        if not ends:
            await asyncio.sleep(1.0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return await stage.calm()
        found: Counter[str] = Counter()
        for reply in await asyncio.gather(*tasks):
            for problem in judged(reply, case):
                found[re.sub(r"m\d{5}-\d{5}|[\d.]+ s", "…", problem)[:300]] += 1
        return [f"{number} of {count}: {problem}" for problem, number in found.most_common(3)]

    return act


async def after_restart(stage: Stage, case: Case) -> list[str]:
    """Restart the fake engine, and send the request."""
    assert stage.fake is not None
    await stage.fake.restart()
    # Wait until the end of the old connections has arrived.
    await asyncio.sleep(0.05)
    return await asks(stage, case)


async def unreachable(stage: Stage, case: Case) -> list[str]:
    """Send the request while nothing listens at the engine's address, then start the engine."""
    assert stage.fake is not None
    await stage.fake.stop()
    try:
        return await asks(stage, case)
    finally:
        await stage.fake.start()


async def raw(stage: Stage, case: Case) -> list[str]:
    """Send the case's bytes unchanged."""
    assert isinstance(case.made, bytes)
    return judged(await ask(stage.latimer.port, case.made, case.seconds), case)


OTHER = "[OTHER]" + TEMPLATE


def another_model(what: str, closes: bool) -> Act:
    """Return an act that changes the fake engine's model, sends requests, and changes it back.

    Args:
        what: the part that changes: `name`, `template`, `vocabulary`, `context`, or `all`.
        closes: True to close connections in between, as a restart does. Otherwise only the
            engine's responses show the change, so the second reply must reflect it.
    """

    async def act(stage: Stage, case: Case) -> list[str]:
        fake = stage.fake
        assert isinstance(fake, FakeLlamaServer | FakeKoboldcpp)
        old = fake.model
        every = what == "all"
        # Every change of an engine also changes its name or path.
        fake.model = Model(
            name=f"another-{what}.gguf",
            template=OTHER if every or what == "template" else old.template,
            shift=7 if every or what == "vocabulary" else 0,
            context=64 if every or what == "context" else old.context,
        )
        try:
            if closes:
                await fake.restart()
                await asyncio.sleep(0.25)
            else:
                # The first response reveals the other model.
                await stage.small()
            return await _reflects(stage, fake)
        finally:
            # Real engines take longer to restart, and their start time identifies them.
            await asyncio.sleep(0.25)
            fake.model = old
            await fake.restart()
            await asyncio.sleep(0.25)
            await stage.small()

    return act


async def _reflects(stage: Stage, fake: FakeLlamaServer | FakeKoboldcpp) -> list[str]:
    """Check that every reply reflects the new model."""
    found, text, model = [], stage.marker(), fake.model

    async def send(path: str, **body: object) -> Reply:
        return await ask(stage.latimer.port, post(path, {"model": "m", **body}))

    messages = [{"role": "user", "content": f"echo:{text}"}]
    reply = await send(CHAT, messages=messages, logprobs=True, max_tokens=16)
    if reply.status != 200:
        found.append(f"a chat fails: {reply}")
    else:
        choice = reply.json()["choices"][0]
        tokens = "".join(one["token"] for one in choice["logprobs"]["content"])
        if (choice["message"]["content"], tokens) != (text, text):
            answer = choice["message"]["content"]
            found.append(f"the answer is {answer!r}, its tokens are {tokens!r}")
        if model.template == OTHER and "[OTHER]" not in fake.seen[-1]:
            found.append(f"the prompt was made with the old template: {fake.seen[-1]!r}")
    known = (await send("/v1/tokenize", prompt="ab")).json()
    if not known or known.get("tokens", [])[-2:] != model.ids("ab"):
        found.append(f"the tokens of a text are {known}, not {model.ids('ab')}")
    elif known["max_model_len"] != model.context:
        found.append(f"the context is {known['max_model_len']}, not {model.context}")
    back = await send("/v1/detokenize", tokens=model.ids("ab"))
    if (back.json() or {}).get("prompt") != "ab":
        found.append(f"the text of tokens is {back}")
    reply = await send(COMPLETIONS, prompt="a" * 100 + f" echo:{text}", max_tokens=16)
    if model.context < 100 and "context_length_exceeded" not in str(reply):
        found.append(f"a prompt longer than the new context: {reply}")
    names = (await ask(stage.latimer.port, get("/v1/models"))).json()
    if names["data"][0]["id"] != model.name:
        found.append(f"the model is called {names['data'][0]['id']}, not {model.name}")
    return found
