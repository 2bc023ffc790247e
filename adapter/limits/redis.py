"""Limits in Redis: one script for each step, which counts as `leases.Account` does."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    NoScriptError,
    RedisError,
    ResponseError,
)
from typing_extensions import override

from ..errors import LimitsUnavailable
from .leases import KINDS, Grant, LimitsError, Refusal
from .shared import (
    ANSWER_SECONDS,
    LEASE_SECONDS,
    Refused,
    Reserve,
    Settle,
    SharedLease,
    SharedLimits,
    Step,
)

# Redis' own clock counts, so that those of the processes may differ.
_CLOCK = """
local clock = redis.call('TIME')
local time = clock[1] + clock[2] / 1000000
local now = math.floor(time * 2)
"""

# KEYS: the windows of requests and of tokens, the leases. ARGV: the lease, the limits of requests,
# tokens and leases (-1 for none), the tokens, the seconds of a lease, and 1 request. Returns 1, the
# bucket, and the requests and tokens that are left; or 0, the kind of the limit, what is used of
# it, the milliseconds to wait, and the requests and tokens that are left.
_RESERVE = (
    _CLOCK
    + """
local limits = {tonumber(ARGV[2]), tonumber(ARGV[3])}
local wanted = {1, tonumber(ARGV[5])}
local used, kind, seen, wait = {}, nil, 0, -1
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', time)
local running, most = redis.call('ZCARD', KEYS[3]), tonumber(ARGV[4])
if most >= 0 and running >= most then kind, seen, wait = 2, running, 1 end
for i = 1, 2 do
  local sum, old, numbers, amounts = 0, {}, {}, {}
  local all = redis.call('HGETALL', KEYS[i])
  for j = 1, #all, 2 do
    local number, amount = tonumber(all[j]), tonumber(all[j + 1])
    if number <= now - 121 then
      old[#old + 1] = all[j]
    else
      numbers[#numbers + 1] = number
      amounts[number] = amount
      sum = sum + amount
    end
  end
  if #old > 0 then redis.call('HDEL', KEYS[i], unpack(old)) end
  used[i] = sum
  local excess = sum + wanted[i] - limits[i]
  if limits[i] >= 0 and excess > 0 then
    local seconds = 60
    table.sort(numbers)
    for _, number in ipairs(numbers) do
      excess = excess - amounts[number]
      if excess <= 0 then
        seconds = (number + 1) / 2 + 60 - time
        break
      end
    end
    if seconds > wait then kind, seen, wait = i - 1, sum, seconds end
  end
end
if kind then
  return {0, kind, seen, math.ceil(wait * 1000), limits[1] - used[1], limits[2] - used[2]}
end
for i = 1, 2 do
  redis.call('HINCRBY', KEYS[i], string.format('%.0f', now), ARGV[i == 1 and 7 or 5])
  redis.call('EXPIRE', KEYS[i], 62)
end
redis.call('ZADD', KEYS[3], time + ARGV[6], ARGV[1])
redis.call('EXPIRE', KEYS[3], ARGV[6] + 1)
return {1, now, limits[1] - used[1] - 1, limits[2] - used[2] - wanted[2]}
"""
)

# KEYS: the window of tokens, the leases. ARGV: the lease, its bucket, and the tokens that it used
# beyond the reserved ones.
_SETTLE = (
    _CLOCK
    + """
redis.call('ZREM', KEYS[2], ARGV[1])
local at, more = tonumber(ARGV[2]), tonumber(ARGV[3])
if more > 0 then
  redis.call('HINCRBY', KEYS[1], string.format('%.0f', now), ARGV[3])
  redis.call('EXPIRE', KEYS[1], 62)
elseif more < 0 and redis.call('HEXISTS', KEYS[1], ARGV[2]) == 1 then
  redis.call('HINCRBY', KEYS[1], ARGV[2], ARGV[3])
end
"""
)

# KEYS: the leases. ARGV: the seconds of a lease, and the leases.
_RENEW = (
    _CLOCK
    + """
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], 'XX', time + ARGV[1], ARGV[i]) end
redis.call('EXPIRE', KEYS[1], ARGV[1] + 1)
"""
)

# The texts of the scripts by their digests, by which Redis runs them.
_SCRIPTS = {hashlib.sha1(one.encode()).hexdigest(): one for one in (_RESERVE, _SETTLE, _RENEW)}  # noqa: S324
_DIGESTS = {text: digest for digest, text in _SCRIPTS.items()}

# A script, its keys and its values.
_Command: TypeAlias = tuple[str, list[str], list[Any]]


class RedisLimits(SharedLimits):
    """A store of limits in Redis; see `SharedLimits`.

    Args:
        url: the address of the server, such as `redis://:PASSWORD@HOST:6379/0`.
    """

    def __init__(self, url: str, admits: bool = True) -> None:
        super().__init__(admits)
        self._url = url
        self._made: Redis | None = None
        # The event loop of its connections, and what closes them at its end.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: AsyncGenerator[None, None] | None = None

    @override
    async def _connect(self) -> None:
        await self._ping()

    @override
    async def _ping(self) -> None:
        client = await self._client()
        try:
            with _errors():
                await client.ping()
        except TypeError:
            raise LimitsError("the URL has an unknown option") from None

    @override
    async def _run(self, steps: Sequence[Step]) -> Sequence[Any]:
        commands = [_command(step) for step in steps]
        with _errors():
            replies = await self._sent(commands)
            # A server that was started again does not know the scripts.
            lost = [index for index, one in enumerate(replies) if isinstance(one, NoScriptError)]
            if lost:
                pipeline = (await self._client()).pipeline(transaction=False)
                for script in _SCRIPTS.values():
                    pipeline.script_load(script)
                await pipeline.execute()
                again = await self._sent([commands[index] for index in lost])
                for index, reply in zip(lost, again, strict=True):
                    replies[index] = reply
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
        return [self._result(step, reply) for step, reply in zip(steps, replies, strict=True)]

    @override
    async def _close(self) -> None:
        end, self._made, self._end = self._end, None, None
        if end is not None and self._loop is asyncio.get_running_loop():
            with suppress(LimitsUnavailable), _errors():
                await end.aclose()

    async def _sent(self, commands: Sequence[_Command]) -> list[Any]:
        pipeline = (await self._client()).pipeline(transaction=False)
        for script, keys, values in commands:
            pipeline.evalsha(_DIGESTS[script], len(keys), *keys, *values)
        found: list[Any] = await pipeline.execute(raise_on_error=False)
        return found

    def _result(self, step: Step, reply: Any) -> SharedLease | Refusal | None:
        if not isinstance(step, Reserve):
            return None
        grant, limits = step.grant, _limits(step.grant)
        requests, spent = reply[-2:]
        left = (requests if limits[0] >= 0 else math.inf, spent if limits[1] >= 0 else math.inf)
        if not reply[0]:
            _, number, used, wait = reply[:4]
            kind = KINDS[number]
            requested = step.tokens if kind == "tokens" else 1
            return Refusal(kind, limits[number], used, requested, wait / 1000, left)
        at = reply[1]
        return SharedLease(self, grant, step.lease, at, step.tokens, left)

    async def _client(self) -> Redis:
        """Return the client of the running event loop, which connects when it is used.

        Raises:
            LimitsError: the URL is wrong.
        """
        loop = asyncio.get_running_loop()
        if self._made is None or self._loop is not loop:
            try:
                self._made = Redis.from_url(
                    self._url,
                    socket_timeout=ANSWER_SECONDS,
                    socket_connect_timeout=ANSWER_SECONDS,
                    # A step that was sent may have been done: nothing is sent twice.
                    retry=Retry(NoBackoff(), 0),
                    client_name="latimer",
                )
            except ValueError:
                # Its message can have the password.
                raise LimitsError("the URL is wrong") from None
            self._loop, self._end = loop, _closing(self._made)
            await anext(self._end)
        return self._made


async def _closing(client: Redis) -> AsyncGenerator[None, None]:
    """Close a client when the event loop ends its generators, which is before its own end."""
    try:
        yield
    finally:
        await client.aclose()


def _limits(grant: Grant) -> tuple[int, int, int]:
    """Return the limits of a key as the scripts take them, in the order of `KINDS`."""
    rates = grant.rates
    requests, tokens, concurrent = [
        -1 if limit is None else limit for limit in (rates.requests, rates.tokens, rates.concurrent)
    ]
    return requests, tokens, concurrent


def _command(step: Step) -> _Command:
    # The braces keep the keys of one account on one node of a cluster.
    requests, tokens, leases = [f"latimer:limits:{{{step.grant.name}}}:{kind}" for kind in KINDS]
    if isinstance(step, Reserve):
        values = [step.lease, *_limits(step.grant), step.tokens, LEASE_SECONDS, 1]
        return _RESERVE, [requests, tokens, leases], values
    if isinstance(step, Settle):
        lease = step.lease
        return _SETTLE, [tokens, leases], [lease.id, lease.at, step.used - lease.tokens]
    return _RENEW, [leases], [LEASE_SECONDS, *step.leases]


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (AuthenticationError, NoPermissionError) as error:
        raise Refused(f"the database refused the user ({error})") from None
    except ResponseError as error:
        if "DB index" not in str(error):
            raise LimitsUnavailable(f"{type(error).__name__}: {error}") from None
        raise Refused(f"the database does not exist ({error})") from None
    except (RedisError, OSError) as error:
        raise LimitsUnavailable(f"{type(error).__name__}: {error}") from None
