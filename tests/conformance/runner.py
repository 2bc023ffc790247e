"""Running of checks against a server: concurrently where possible, repeatedly on failure."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import httpx2

from .check import Check, Diverges, Fail, Outcome, Skip, Unsupported, Verdict
from .target import SILENCE, Api

# The number of times that a check runs before it counts as failed.
TRIES = 3
# After so many checks without a response, one more is not repeated: three tries of each check of a
# server that hangs would take an hour.
LATE = 5
# The seconds for which a client waits for a response, or for the next part of it.
WAIT = 60.0
# The seconds of the request that measures the server's speed, and the largest factor by which time
# limits are extended because of it.
FIRST, PATIENCE = 60.0, 10.0
# The seconds for which a server that refuses connections may be restarting.
RESTART = 20.0
# The seconds for which a server may answer nothing at all.
STUCK = 120.0


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
        most: the seconds that the whole run may take; None for any.
        restart: the seconds after which a server that refuses connections has ended.
        stuck: the seconds after which a server that answers nothing is given up.
    """

    url: str
    model: str | None = None
    key: str | None = None
    hint: str | None = None
    at_once: int = 8
    breaks: str | None = None
    silence: float = SILENCE
    hosted: bool = False
    most: float | None = None
    restart: float = RESTART
    stuck: float = STUCK


class Unreachable(Exception):
    """A server that cannot be judged: it does not respond, or lists no model."""


class _Gone(Exception):
    """A server that has ended during the run, or answers nothing."""


def _client(settings: Settings) -> httpx2.AsyncClient:
    headers = {"authorization": f"Bearer {settings.key}"} if settings.key else {}
    limits = httpx2.Limits(max_connections=None)
    return httpx2.AsyncClient(
        base_url=settings.url.rstrip("/") + "/", headers=headers, timeout=WAIT, limits=limits
    )


async def resolved(settings: Settings) -> Settings:
    """Return settings with the model that requests name, and with the `/v1` of the base URL.

    A base URL without `/v1` gets one if the server has its models there only.

    Raises:
        Unreachable: the server does not respond, or lists no model.
    """
    longer = replace(settings, url=settings.url.rstrip("/") + "/v1")
    for one in (settings, longer):
        async with _client(one) as client:
            try:
                reply = await client.get("models")
            except httpx2.HTTPError as error:
                reason = str(error).rstrip(".") or type(error).__name__
                raise Unreachable(f"{settings.url} does not respond: {reason}.") from error
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
            first = str(reply.json()["data"][0]["id"])
            return replace(one, model=settings.model or first)
    if settings.model is None:
        if reply.status_code in (401, 403):
            raise Unreachable(f"{settings.url}/models needs a key. Send one with --api-key.")
        raise Unreachable(f"{settings.url}/models lists no model. Name one with --model.")
    return settings


@asynccontextmanager
async def connected(settings: Settings) -> AsyncIterator[tuple[httpx2.AsyncClient, str]]:
    """Yield a client of the server, and the model that requests name.

    Raises:
        Unreachable: the server does not respond, or lists no model.
    """
    if settings.model is None:
        settings = await resolved(settings)
    async with _client(settings) as client:
        yield client, settings.model or ""


async def judge(
    settings: Settings,
    checks: Sequence[Check],
    report: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Run checks and return their verdicts in the same order.

    The run ends early after its time limit, or if the server ends. The checks that have not ended
    by then are skipped, with the reason; their number of runs is 0.

    Args:
        report: receives each verdict as soon as its check ends.
    """
    async with connected(settings) as (client, model):
        turn = _Turn(settings, client, model, report)
        reason = ""
        try:
            async with asyncio.timeout(settings.most):
                await turn.take(checks)
        except TimeoutError:
            reason = f"the run ended after {settings.most:g} s"
        except _Gone as gone:
            reason = str(gone)
        return [
            turn.verdicts.get(check.id) or Verdict(check, "skip", f"not run: {reason}", runs=0)
            for check in checks
        ]


class _Turn:
    """A run of checks, and the verdicts so far, by the id of their check."""

    def __init__(
        self,
        settings: Settings,
        client: httpx2.AsyncClient,
        model: str,
        report: Callable[[Verdict], None],
    ) -> None:
        self.verdicts: dict[str, Verdict] = {}
        self._settings, self._client, self._model = settings, client, model
        self._report = report
        self._wrong: dict[str, str] = {}
        self._patience = 1.0
        self._late = 0

    async def take(self, checks: Sequence[Check]) -> None:
        """Run checks: many at a time, then one by one those that must run alone."""
        self._patience = await _patience(self._client, self._model, self._settings.at_once)
        turns = asyncio.Semaphore(self._settings.at_once)

        async def one(check: Check) -> None:
            async with turns:
                await self._run(check)

        gone = ""
        try:
            async with asyncio.TaskGroup() as group:
                for check in checks:
                    if not check.alone:
                        group.create_task(one(check))
        except* _Gone as ends:
            gone = str(ends.exceptions[0])
        if gone:
            raise _Gone(gone)
        for check in checks:
            if check.alone:
                await self._run(check)

    def _api(self) -> Api:
        settings = self._settings
        return Api(
            self._client, self._model, settings.hint, self._wrong, settings.breaks,
            settings.silence, settings.hosted,
        )  # fmt: skip

    async def _run(self, check: Check) -> None:
        late = TRIES if self._late < LATE else 1
        verdict = await run(check, self._api, self._patience, late=late)
        self._late += verdict.outcome == "timeout"
        if verdict.broken:
            await self._ask(check)
        self.verdicts[check.id] = verdict
        self._report(verdict)

    async def _ask(self, check: Check) -> None:
        """Raise `_Gone` if the server has refused connections, or answers nothing, for too long."""
        stuck = self._settings.stuck
        end = time.monotonic() + self._settings.restart
        while True:
            try:
                await self._client.get("models", timeout=stuck)
            except httpx2.TimeoutException:
                words = f"the server answered nothing for {stuck:g} s (seen in {check.id})"
                raise _Gone(words) from None
            except httpx2.ConnectError as error:
                if time.monotonic() > end:
                    words = f"the server has ended: {error} (seen in {check.id})"
                    raise _Gone(words) from None
                await asyncio.sleep(0.2)
            except httpx2.HTTPError:
                return
            else:
                return


async def _patience(client: httpx2.AsyncClient, model: str, at_once: int) -> float:
    """Return the factor by which time limits are extended: a slow engine's queue is not a fault.

    The second of two requests counts, since the first one may load the model.
    """
    body = {"model": model, "prompt": "Hello", "max_tokens": 4}
    for _ in range(2):
        start = time.monotonic()
        with contextlib.suppress(httpx2.NetworkError, httpx2.ProtocolError):
            try:
                await client.post("completions", json=body, timeout=FIRST)
            except httpx2.TimeoutException:
                return PATIENCE
    return min(max(1.0, 5.0 * at_once * (time.monotonic() - start)), PATIENCE)


async def run(
    check: Check,
    make: Callable[[], Api],
    patience: float = 1.0,
    tries: int = TRIES,
    late: int = TRIES,
) -> Verdict:
    """Judge one check. A check that fails and then passes is flaky.

    Args:
        tries: how often it runs before it counts as failed.
        late: how often it runs without a response.
    """
    passes = 0
    for runs in range(1, tries + 1):
        verdict = await _once(check, make(), patience)
        passes += verdict.outcome == "pass"
        if verdict.outcome not in ("fail", "timeout", "pass") or (runs == 1 and passes):
            return verdict
        if verdict.broken:
            broken = verdict
        late -= verdict.outcome == "timeout"
        if not late:
            break
    if passes:
        return Verdict(
            check, "flaky", broken.detail, runs, passes, broken.seconds, broken.exchanges
        )
    return Verdict(check, broken.outcome, broken.detail, runs, 0, broken.seconds, broken.exchanges)


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
    except httpx2.TimeoutException:
        outcome, detail = "timeout", f"expected a response within {WAIT:.0f} s, but got none"
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
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        outcome, detail = "fail", f"expected the documented format, but got {error!r}"
    passes = int(outcome == "pass")
    seconds = time.monotonic() - start
    return Verdict(check, outcome, detail, 1, passes, seconds, tuple(api.exchanges))
