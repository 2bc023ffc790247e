"""The search for a server's API: its base URL, a model, and whether it answers at all."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2

# The seconds in which the list of models must arrive.
LISTED = 30.0
# The seconds in which four tokens must arrive. The first request may load the model.
GENERATED = 180.0
# The seconds between two attempts to reach a server that starts.
PAUSE = 0.5
# What a request for a few tokens adds to the model, by endpoint.
SHORT: Mapping[str, Mapping[str, Any]] = {
    "completions": {"prompt": "Hello", "max_tokens": 4},
    "chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
}
# What an error of TLS means, by a word in its text.
TLS: Mapping[str, str] = {
    "CERTIFICATE_VERIFY_FAILED": (
        "has a certificate that is not trusted here. SSL_CERT_FILE=FILE names the certificate of "
        "its authority"
    ),
    "WRONG_VERSION_NUMBER": "does not speak TLS. Use http://",
    "RECORD_LAYER_FAILURE": "does not speak TLS. Use http://",
}


class Unreachable(Exception):
    """A server that cannot be judged: it does not respond, or lists no model."""


class _Starting(Unreachable):
    """A server that may only need more time."""


def connect(url: str, key: str | None) -> httpx2.AsyncClient:
    """Return a client of a server, whose paths are relative to the base URL.

    Raises:
        Unreachable: the address, or a proxy or certificates of the environment, cannot be used.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx2.Limits(max_connections=None)
    # What reads a reply has a time limit of its own, which is longer for a slow server.
    timeout = httpx2.Timeout(60, read=None)
    try:
        base = httpx2.URL(url.rstrip("/") + "/")
        # A proxy of the environment reaches no server of this machine. https may need certificates.
        is_here = base.scheme == "http" and (
            base.host in ("localhost", "::1") or base.host.startswith("127.")
        )
        return httpx2.AsyncClient(
            base_url=base,
            headers=headers,
            timeout=timeout,
            limits=limits,
            trust_env=not is_here,
        )
    except (ImportError, OSError, ValueError, httpx2.InvalidURL) as error:
        raise Unreachable(
            f"{url} cannot be asked, because of the address, or of a proxy or certificates in the "
            f"environment: {_words(error)}."
        ) from error


async def find(url: str, model: str | None, key: str | None, wait: float) -> tuple[str, str]:
    """Return the base URL with its `/v1`, and the model that requests name.

    A base URL without `/v1` gets one if the server has its models there: some have paths of their
    own at the other place.

    Args:
        model: the model's name; None for the first that `/models` lists.
        wait: the seconds for which the server may still be starting.

    Raises:
        Unreachable: the server does not respond, lists no model, or has another purpose.
    """
    end = time.monotonic() + wait
    while True:
        try:
            return await _find(url, model, key)
        except _Starting:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(PAUSE)


async def _find(url: str, model: str | None, key: str | None) -> tuple[str, str]:
    short = url.rstrip("/")
    replies = []
    for one in (short,) if short.endswith("/v1") else (f"{short}/v1", short):
        async with connect(one, key) as client:
            reply = await _asked(url, client.get("models", timeout=LISTED))
            with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
                first = str(reply.json()["data"][0]["id"])
                return one, model or first
            replies.append(reply)
            if model is not None:
                body = {"model": model, **SHORT["chat/completions"]}
                post = client.post("chat/completions", json=body, timeout=GENERATED)
                if _is_api(await _asked(url, post)):
                    return one, model
    raise _problem(short, replies, key)


async def _asked(url: str, request: Any) -> httpx2.Response:
    """Return the reply to a request; raise `Unreachable` if there is none."""
    try:
        reply: httpx2.Response = await request
    except httpx2.ReadTimeout as error:
        words = f"{url} accepts connections, but does not answer within {LISTED:g} s."
        raise Unreachable(words) from error
    except (httpx2.RemoteProtocolError, httpx2.ReadError) as error:
        hint = ". Does it need https://?" if url.startswith("http:") else "."
        raise _Starting(f"{url} sends no HTTP response: {_words(error)}{hint}") from error
    except httpx2.HTTPError as error:
        for word, meaning in TLS.items():
            if word in str(error):
                raise Unreachable(f"{url} {meaning}. ({_words(error)})") from error
        raise _Starting(f"{url} does not respond: {_words(error)}.") from error
    return reply


def _words(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__


def _is_api(reply: httpx2.Response) -> bool:
    """Return True if a reply to a chat request is one of an API: a result, or an error object.

    An unknown path may have an error object as well, but then the other place is asked, too.
    """
    with contextlib.suppress(ValueError):
        body = reply.json()
        known = {"choices"} if reply.status_code == 404 else {"choices", "error"}
        return isinstance(body, dict) and not known.isdisjoint(body)
    return False


def _problem(url: str, replies: Sequence[httpx2.Response], key: str | None) -> Unreachable:
    """Return what is wrong with a server without a list of models, by what it has answered."""
    reply = next((one for one in replies if one.status_code not in (200, 404)), replies[0])
    where, status = str(reply.url), reply.status_code
    kind = reply.headers.get("content-type", "").partition(";")[0]
    text = " ".join(reply.text[:100].split())
    if status in (401, 403) and key:
        return Unreachable(f"{where} rejects the key: status {status}, {text!r}.")
    if status in (401, 403):
        return Unreachable(f"{where} needs a key. Send one with --api-key, or in OPENAI_API_KEY.")
    if status == 429:
        after = reply.headers.get("retry-after")
        when = f"after {after} s" if after else "later"
        return _Starting(f"{where} limits the rate of requests: status 429. Try again {when}.")
    if status >= 500:
        return _Starting(f"{where} is not ready: status {status}, {text!r}.")
    if kind == "text/html":
        return Unreachable(
            f"{where} is a web page (status {status}, text/html), and not an API. Check the port "
            "and the path of the base URL."
        )
    if status == 404:
        return Unreachable(
            f"{url} has neither /models nor /v1/models: status 404, {text!r}. Check the base URL, "
            "or name a model with --model."
        )
    return Unreachable(f"{where} lists no model: status {status}, {text!r}. Name one with --model.")


async def seconds_for_tokens(
    client: httpx2.AsyncClient, model: str, limit: float = GENERATED
) -> float:
    """Return the seconds that a request for four tokens takes, once the model is loaded.

    Raises:
        Unreachable: the tokens do not come within the limit.
    """
    spent = 0.0
    for path, body in SHORT.items():
        for _ in range(2):
            start = time.monotonic()
            try:
                reply = await client.post(path, json={"model": model, **body}, timeout=limit)
            except httpx2.ReadTimeout as error:
                words = f"the server does not answer POST /{path} within {limit:.0f} s"
                raise Unreachable(words) from error
            except httpx2.HTTPError:
                return spent
            spent = time.monotonic() - start
            if reply.status_code != 200:
                break
        else:
            break
    return spent
