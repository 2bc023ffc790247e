"""Actions of clients beyond one request: disconnect, read nothing, pipeline, flood."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections import Counter

from faults.case import Act, Case
from faults.client import Client, Reply, ask
from faults.judge import judged
from faults.stage import Stage


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
        data = stage.request(case, stage.marker())
        client = await Client.to(stage.latimer.port)
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


def reads_nothing(seconds: float = 2.0, most: float = 24.0) -> Act:
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
            await loop.sock_sendall(connection, stage.request(case, stage.marker()))
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
    data = [
        stage.request(case, marker).replace(b"Connection: close\r\n", b"") for marker in markers
    ]
    client = await Client.to(stage.latimer.port)
    found = []
    try:
        client.send(b"".join(data))
        for marker in markers:
            async with asyncio.timeout(case.seconds):
                reply = await client.reply()
            reply.wanted = stage.wanted(data[0], markers[0]) and marker
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
        found += judged(await stage.ask(case, stage.marker()), case)
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
        async def one(index: int) -> Reply:
            # A full backlog of connections is the system's limit, not Latimer's.
            await asyncio.sleep(index / 4000)
            return await stage.ask(case, stage.marker())

        tasks = [asyncio.create_task(one(index)) for index in range(count)]
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


def restarts(change: Act | None = None) -> Act:
    """Return an act that restarts the fake engine before it sends the request."""

    async def act(stage: Stage, case: Case) -> list[str]:
        assert stage.fake is not None
        await stage.fake.restart()
        # Wait until the end of the old connections has arrived.
        await asyncio.sleep(0.05)
        return judged(await stage.ask(case, stage.marker()), case)

    return change or act


async def unreachable(stage: Stage, case: Case) -> list[str]:
    """Send the request while nothing listens at the engine's address, then start the engine."""
    assert stage.fake is not None
    await stage.fake.stop()
    try:
        found = judged(await stage.ask(case, stage.marker()), case)
    finally:
        await stage.fake.start()
    return found


async def raw(stage: Stage, case: Case) -> list[str]:
    """Send the case's bytes unchanged."""
    assert isinstance(case.made, bytes)
    return judged(await ask(stage.latimer.port, case.made, case.seconds), case)


async def stays_silent(stage: Stage, case: Case) -> list[str]:
    """Send half a request, wait, and disconnect."""
    data = stage.request(case, stage.marker())
    client = await Client.to(stage.latimer.port)
    client.send(data[: len(data) // 2])
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        await asyncio.sleep(0.05)
    client.leave()
    return []
