"""Running of checks against a server: concurrently where possible, repeatedly on failure."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx2

from .check import Check, Diverges, Fail, Outcome, Skip, Unsupported, Verdict
from .target import SILENCE, Api

# The number of times that a check runs before it counts as failed.
TRIES = 3


@dataclass(frozen=True, slots=True)
class Settings:
    """The server to judge, and the settings of the run.

    Args:
        url: the base URL, with its `/v1`.
        model: the model that requests name; None for the first that `/models` lists.
        key: sent as a bearer token, if given.
        hint: `demo` if the demo model answers.
        at_once: the number of checks that run concurrently.
        breaks: a command that stops and restarts the engine behind the server.
        silence: the seconds for which a stream may send nothing.
        hosted: True if the server must have the limits of OpenAI's service.
    """

    url: str
    model: str | None = None
    key: str | None = None
    hint: str | None = None
    at_once: int = 8
    breaks: str | None = None
    silence: float = SILENCE
    hosted: bool = False


class Unreachable(Exception):
    """A server that cannot be judged: it does not respond, or lists no model."""


@asynccontextmanager
async def connected(settings: Settings) -> AsyncIterator[tuple[httpx2.AsyncClient, str]]:
    """Yield a client of the server, and the model that requests name.

    Raises:
        Unreachable: the server does not respond, or lists no model.
    """
    headers = {"authorization": f"Bearer {settings.key}"} if settings.key else {}
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(
        base_url=settings.url.rstrip("/") + "/", headers=headers, timeout=60, limits=limits
    ) as client:
        if settings.model is not None:
            yield client, settings.model
            return
        try:
            models = (await client.get("models")).json()["data"]
            model = str(models[0]["id"])
        except httpx2.HTTPError as error:
            reason = str(error).rstrip(".") or type(error).__name__
            raise Unreachable(f"{settings.url} does not respond: {reason}.") from error
        except (ValueError, KeyError, IndexError, TypeError):
            raise Unreachable(f"{settings.url}/models lists no model. Name one.") from None
        yield client, model


async def judge(
    settings: Settings,
    checks: Sequence[Check],
    report: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Run checks and return their verdicts in the same order.

    `report` receives each verdict as soon as its check ends.
    """
    async with connected(settings) as (client, model):
        verdicts: dict[str, Verdict] = {}
        wrong: dict[str, str] = {}
        patience = await _patience(client, model, settings.at_once)
        turns = asyncio.Semaphore(settings.at_once)

        async def one(check: Check) -> None:
            async with turns:
                verdict = await run(
                    check,
                    lambda: Api(
                        client,
                        model,
                        settings.hint,
                        wrong,
                        settings.breaks,
                        settings.silence,
                        settings.hosted,
                    ),
                    patience,
                )
            verdicts[check.id] = verdict
            report(verdict)

        await asyncio.gather(*(one(check) for check in checks if not check.alone))
        for check in checks:
            if check.alone:
                await one(check)
        return [verdicts[check.id] for check in checks]


async def _patience(client: httpx2.AsyncClient, model: str, at_once: int) -> float:
    """Return the factor by which time limits are extended: a slow engine's queue is not a fault."""
    start = time.monotonic()
    body = {"model": model, "prompt": "Hello", "max_tokens": 4}
    with contextlib.suppress(httpx2.HTTPError):
        await client.post("completions", json=body)
    return max(1.0, 5.0 * at_once * (time.monotonic() - start))


async def run(
    check: Check, make: Callable[[], Api], patience: float = 1.0, tries: int = TRIES
) -> Verdict:
    """Judge one check. A check that fails and then passes is flaky."""
    passes = 0
    for runs in range(1, tries + 1):
        verdict = await _once(check, make(), patience)
        passes += verdict.outcome == "pass"
        if verdict.outcome not in ("fail", "timeout", "pass") or (runs == 1 and passes):
            return verdict
        if verdict.broken:
            broken = verdict
    if passes:
        return Verdict(
            check, "flaky", broken.detail, tries, passes, broken.seconds, broken.exchanges
        )
    return Verdict(check, broken.outcome, broken.detail, tries, 0, broken.seconds, broken.exchanges)


async def _once(check: Check, api: Api, patience: float) -> Verdict:
    start = time.monotonic()
    outcome: Outcome = "pass"
    detail = ""
    limit = check.seconds * patience
    try:
        async with asyncio.timeout(limit):
            await check.run(api)
    except TimeoutError:
        outcome, detail = "timeout", f"expected a response within {limit:.0f} s, but got none"
    except Unsupported as error:
        outcome, detail = "unsupported", str(error)
    except Diverges as error:
        outcome, detail = "diverges", str(error)
    except Skip as error:
        outcome, detail = "skip", str(error)
    except Fail as error:
        outcome, detail = "fail", str(error)
    except (httpx2.HTTPError, OSError, asyncio.IncompleteReadError) as error:
        outcome, detail = "fail", f"expected a complete response, but got {error!r}"
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        outcome, detail = "fail", f"expected the documented format, but got {error!r}"
    passes = int(outcome == "pass")
    seconds = time.monotonic() - start
    return Verdict(check, outcome, detail, 1, passes, seconds, tuple(api.exchanges))
