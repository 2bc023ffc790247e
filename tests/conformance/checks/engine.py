"""Behaviour towards clients when the engine dies during a response (contract 1.7).

These checks need `--break COMMAND`: the suite cannot make a server fail at the right moment.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

from ..check import Fail, Skip, check, expect
from ..raw import connected
from ..target import Api, Reply

H = "/chat/completions"
# The seconds that an engine may take to end, and to come back.
ENDS, BACK = 30.0, 60.0
# The seconds between requests to a server whose engine may not be back.
PAUSE = 0.1


def _long(api: Api, **more: Any) -> dict[str, Any]:
    """Return a long request: the demo model's answers are short, so it asks for many choices."""
    messages = [{"role": "user", "content": "Count to 1000."}]
    size = {"n": 64, "max_tokens": 60} if api.hint == "demo" else {"max_tokens": 1500}
    return {"model": api.model, "messages": messages, "temperature": 0, **size, **more}


async def end_engine(api: Api) -> None:
    """Run the command that stops the engine."""
    assert api.breaks is not None
    process = await asyncio.create_subprocess_shell(
        api.breaks, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
    )
    await process.wait()


async def answers(api: Api) -> list[Reply]:
    """Repeat a request until it succeeds, and return all replies; the last is the answer."""
    end = time.monotonic() + BACK
    body = _long(api, n=1, max_tokens=1)
    replies = []
    while time.monotonic() < end:
        replies.append(await api.post(H, body))
        if replies[-1].status == 200:
            return replies
        await asyncio.sleep(PAUSE)
    raise Fail(
        f"expected success within {BACK:.0f} s of the failure, but got {replies[-1].text[:200]}"
    )


async def _broken(api: Api) -> tuple[list[str], str]:
    """Return the data of the events of a stream whose engine died after the first event.

    Returns:
        The events, and the complete text of each choice.
    """
    api.needs_break()
    choices = (await api.post(H, _long(api))).ok()["choices"]
    async with connected(api, "POST", H, _long(api, stream=True)) as (reader, _writer):
        data = await reader.readuntil(b"data:")
        await end_engine(api)
        try:
            data += await asyncio.wait_for(reader.read(-1), ENDS)
        except TimeoutError:
            raise Fail(
                f"expected the stream to end within {ENDS:.0f} s, but it is still open"
            ) from None
    await answers(api)
    lines = data.decode(errors="replace").replace("\r\n", "\n").split("\n")
    found = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    whole = choices[0]["message"]["content"]
    texts = [(_choice(one).get("delta") or {}).get("content") or "" for one in found]
    if len("".join(texts)) >= len(whole) * len(choices):
        raise Skip("the answer was complete before the engine stopped")
    return found, whole


def _parsed(data: str) -> Mapping[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _choice(data: str) -> Mapping[str, Any]:
    choices = _parsed(data).get("choices")
    return choices[0] if choices else {}


@check("engine.error-event",
       "A stream whose engine dies has exactly one event with an error object, and no chunk "
       "after it.",
       "must", "1.7 10.84 [EXP]", alone=True, seconds=120)  # fmt: skip
async def error_event(api: Api) -> None:
    found, _whole = await _broken(api)
    places = [at for at, data in enumerate(found) if "error" in _parsed(data)]
    expect(len(places) == 1, f"expected one error event, but the last events are {found[-2:]}")
    error = _parsed(found[places[0]])["error"]
    valid = isinstance(error, dict) and isinstance(error.get("message"), str)
    expect(valid, f"expected an error object, but got {error!r}")
    after = [data for data in found[places[0] + 1 :] if data != "[DONE]"]
    expect(not after, f"expected no event after the error, but got {after[:1]}")


@check("engine.no-false-end",
       "A stream whose engine dies has no usage, and no finish_reason for an incomplete choice.",
       "must", "1.7 10.84", alone=True, seconds=120)  # fmt: skip
async def no_false_end(api: Api) -> None:
    found, whole = await _broken(api)
    texts: dict[int, str] = {}
    for data in found:
        expect(not _parsed(data).get("usage"), f"expected no usage, but got {data[:200]}")
        choice = _choice(data)
        index = choice.get("index", 0)
        texts[index] = texts.get(index, "") + ((choice.get("delta") or {}).get("content") or "")
        cut = choice.get("finish_reason") and len(texts[index]) < len(whole)
        expect(not cut, f"expected no finish_reason, but got {data[:200]}")


@check("engine.plain",
       "A request without stream whose engine dies gets 500, 502 or 503 with an error object.",
       "must", "1.3 1.4", alone=True, seconds=120)  # fmt: skip
async def plain(api: Api) -> None:
    api.needs_break()
    start = time.monotonic()
    (await api.post(H, _long(api))).ok()
    took = time.monotonic() - start
    pending = asyncio.ensure_future(api.post(H, _long(api)))
    await asyncio.sleep(min(took / 3, 1.0))
    await end_engine(api)
    reply = await pending
    await answers(api)
    if reply.status == 200:
        raise Skip("the answer was complete before the engine stopped")
    reply.error(500, 502, 503)


@check("engine.back",
       "While the engine is down, requests get 500, 502 or 503 with an error object; later they "
       "succeed again.",
       "must", "1.3 10.84", alone=True, seconds=120)  # fmt: skip
async def back(api: Api) -> None:
    api.needs_break()
    await end_engine(api)
    for reply in (await answers(api))[:-1]:
        reply.error(500, 502, 503)
