"""Running of checks against a server: concurrently where possible, repeatedly on failure."""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2

from .check import Check, Diverges, Fail, Outcome, Skip, Unsupported, Verdict
from .discovery import Unreachable, connect, find, seconds_for_tokens
from .target import SILENCE, Api

# The number of times that a check runs before it counts as failed.
TRIES = 3
# After so many checks without a response, one more is not repeated: three tries of each check of an
# endpoint that hangs would take an hour.
LATE = 5
# The largest factor by which the time limits of checks are extended for a slow server.
PATIENCE = 10.0
# The seconds for which a server that refuses connections may be restarting.
RESTART = 20.0
# The seconds in which an idle server lists its models, or generates four tokens: else it hangs.
HANGS = 20.0
# What the run had not begun, or not finished, when it ended.
NOT_RUN, NOT_ENDED = "not run: ", "not ended: "
CHECKS = Path(__file__).parent / "checks"


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
        wait: the seconds for which the server may still be starting.
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
    wait: float = 0.0


class _Gone(Exception):
    """A server that has ended during the run, or hangs."""


async def resolved(settings: Settings) -> Settings:
    """Return settings with the model that requests name, and with the `/v1` of the base URL.

    Raises:
        Unreachable: the server does not respond, lists no model, or has another purpose.
    """
    url, model = await find(settings.url, settings.model, settings.key, settings.wait)
    return replace(settings, url=url, model=model)


@asynccontextmanager
async def connected(settings: Settings) -> AsyncIterator[tuple[httpx2.AsyncClient, str]]:
    """Yield a client of the server, and the model that requests name.

    Raises:
        Unreachable: the server does not respond, or lists no model.
    """
    if settings.model is None:
        settings = await resolved(settings)
    async with connect(settings.url, settings.key) as client:
        yield client, settings.model or ""


async def judge(
    settings: Settings,
    checks: Sequence[Check],
    report: Callable[[Verdict], None] = lambda verdict: None,
    may_be_cancelled: bool = False,
) -> list[Verdict]:
    """Run checks and return their verdicts in the same order.

    The run ends early after its time limit, or if the server ends. The checks that have not ended
    by then are skipped, with the reason: `NOT_RUN` or `NOT_ENDED`. Their number of runs is 0.

    Args:
        report: receives each verdict as soon as its check ends.
        may_be_cancelled: True if the cancellation of the task, as by Ctrl-C, ends the run early,
            too.
    """
    async with connected(settings) as (client, model):
        turn = _Turn(settings, client, model, report)
        reason = ""
        try:
            async with asyncio.timeout(settings.most):
                await turn.take(checks)
        except TimeoutError:
            reason = turn.reason(f"the run ended after {settings.most:g} s")
        except _Gone as gone:
            reason = str(gone)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not may_be_cancelled:
                raise
            task.uncancel()
            reason = turn.reason("the run was interrupted")
        return [
            turn.verdicts.get(check.id)
            or Verdict(check, "skip", turn.state_of(check) + reason, runs=0)
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
        # The factor by which time limits are extended.
        self._patience = 1.0
        self._late = 0
        self._started = False
        self._running: set[str] = set()
        self._one_at_a_time = asyncio.Semaphore()

    async def take(self, checks: Sequence[Check]) -> None:
        """Run checks: many at a time, then one by one those that must run alone."""
        spent = await seconds_for_tokens(self._client, self._model)
        self._started = True
        # The queue of a slow engine is not a fault.
        self._patience = min(max(1.0, 5.0 * self._settings.at_once * spent), PATIENCE)
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
            settings.silence, settings.hosted, self._one_at_a_time,
        )  # fmt: skip

    async def _run(self, check: Check) -> None:
        self._running.add(check.id)
        late = TRIES if self._late < LATE else 1
        verdict = await run(check, self._api, self._patience, late=late)
        self._late += verdict.outcome == "timeout"
        if verdict.broken:
            await self._ask(verdict.outcome == "timeout")
        self._running.discard(check.id)
        self.verdicts[check.id] = verdict
        self._report(verdict)

    async def _ask(self, hung: bool) -> None:
        """Raise `_Gone` if the server has refused connections for too long, or answers nothing.

        Args:
            hung: ask for tokens, too.
        """
        end = time.monotonic() + self._settings.restart
        limit = HANGS * self._patience
        while True:
            try:
                await self._client.get("models", timeout=limit)
                if hung:
                    await seconds_for_tokens(self._client, self._model, limit)
            except httpx2.ConnectError as error:
                if time.monotonic() > end:
                    raise self._gone(f"the server has ended: {error}") from None
                await asyncio.sleep(0.2)
            except httpx2.ReadTimeout:
                words = f"the server does not answer GET /models within {limit:.0f} s"
                raise self._gone(words) from None
            except Unreachable as error:
                raise self._gone(str(error)) from None
            except httpx2.HTTPError:
                return
            else:
                return

    def _gone(self, words: str) -> _Gone:
        return _Gone(self.reason(words))

    def reason(self, words: str) -> str:
        """Return why the run ends, with the checks that run: one of them may have caused it."""
        if not self._started:
            return f"{words}, before the server answered a first request for four tokens"
        if not self._running:
            return words
        return f"{words} (while these ran: {', '.join(sorted(self._running))})"

    def state_of(self, check: Check) -> str:
        """Return how far a check without a verdict is."""
        return NOT_ENDED if check.id in self._running else NOT_RUN


async def run(
    check: Check,
    make: Callable[[], Api],
    patience: float = 1.0,
    tries: int = TRIES,
    late: int = TRIES,
) -> Verdict:
    """Judge one check. A check that fails and then passes is flaky.

    A run that is inconclusive after a failure counts as one that did not pass.

    Args:
        tries: how often it runs before it counts as failed.
        late: how often it runs without a response.
    """
    passes = 0
    for runs in range(1, tries + 1):
        verdict = await _once(check, make(), patience)
        passes += verdict.outcome == "pass"
        if verdict.outcome in ("unsupported", "diverges") or (runs == 1 and not verdict.broken):
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


def _misfit(error: Exception) -> str:
    """Return what is wrong with a response, by the error that a check met when it read it."""
    words = " ".join(str(error).split())[:200]
    if isinstance(error, KeyError):
        what = f"the key {words} is missing"
    elif isinstance(error, IndexError):
        what = "a list has too few elements"
    elif isinstance(error, TypeError | AttributeError):
        what = f"a value is null or has another type ({words})"
    elif isinstance(error, json.JSONDecodeError):
        what = f"a text that must be JSON is {error.doc[:200]!r}"
    else:
        what = f"got {type(error).__name__}: {words}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.line for frame in frames if CHECKS in Path(frame.filename).parents and frame.line]
    return f"{what}, where the check reads `{own[-1].strip()}`" if own else what


async def _once(check: Check, api: Api, patience: float) -> Verdict:
    start = time.monotonic()
    outcome: Outcome = "pass"
    detail = ""
    limit = check.seconds * patience
    try:
        async with asyncio.timeout(limit) as api.clock:
            await check.run(api)
    except (TimeoutError, httpx2.TimeoutException):
        spent = time.monotonic() - start
        outcome, detail = "timeout", f"expected a response within {spent:.0f} s, but got none"
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
    except Exception as error:
        # What a server sends may cause any error, which must not end the run.
        outcome, detail = "fail", f"expected the documented format, but {_misfit(error)}"
    passes = int(outcome == "pass")
    seconds = time.monotonic() - start
    return Verdict(check, outcome, detail, 1, passes, seconds, tuple(api.exchanges))
