"""Limits in Redis: one script for each step, which counts as `leases.Account` does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ..errors import LimitsUnavailable
from .leases import KINDS, Grant, Lease, LimitsError, Refusal
from .shared import ANSWER_SECONDS, LEASE_SECONDS, SharedLimits

if TYPE_CHECKING:
    from redis.asyncio import Redis

# Redis' own clock counts, so that those of the processes may differ.
_CLOCK = """
local clock = redis.call('TIME')
local time = clock[1] + clock[2] / 1000000
local now = math.floor(time * 2)
"""

# KEYS: the windows of requests and of tokens, the leases. ARGV: the lease, the limits of requests,
# tokens and leases (-1 for none), the tokens, the seconds of a lease, and 1 request. Returns 1, the
# bucket, and the requests and tokens that are left; or 0, the kind of the limit, what is used of
# it, and the milliseconds to wait.
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
if kind then return {0, kind, seen, math.ceil(wait * 1000)} end
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

_MISSING = (
    "Limits in Redis require the extra 'redis': run pip install '.[redis]' in a clone of Latimer."
)


class RedisLimits(SharedLimits):
    """A store of limits in Redis; see `SharedLimits`.

    Args:
        url: the address of the server, such as `redis://:PASSWORD@HOST:6379/0`.
    """

    def __init__(self, url: str, admits: bool = True) -> None:
        super().__init__(admits)
        self._url = url
        self._made: Redis | None = None
        self._scripts: dict[str, Any] = {}

    @override
    async def open(self) -> None:
        client = self._client()
        with _errors():
            await client.ping()

    @override
    async def _reserve(self, grant: Grant, tokens: int, name: str) -> Lease | Refusal:
        rates = grant.rates
        limits = (rates.requests, rates.tokens, rates.concurrent)
        given = [-1 if limit is None else limit for limit in limits]
        keys = [_key(grant.name, kind) for kind in KINDS]
        found = await self._run(_RESERVE, keys, [name, *given, tokens, LEASE_SECONDS, 1])
        if not found[0]:
            _, kind, used, wait = found
            requested = tokens if KINDS[kind] == "tokens" else 1
            return Refusal(KINDS[kind], limits[kind] or 0, used, requested, wait / 1000)
        _, at, requests, spent = found
        left = (
            math.inf if rates.requests is None else requests,
            math.inf if rates.tokens is None else spent,
        )
        return Lease(self, grant, name, at, tokens, left)

    @override
    async def _settle(self, lease: Lease, used: int) -> None:
        keys = [_key(lease.grant.name, kind) for kind in KINDS[1:]]
        await self._run(_SETTLE, keys, [lease.id, lease.at, used - lease.tokens])

    @override
    async def _renew(self, leases: Mapping[str, Sequence[str]]) -> None:
        for name, ids in leases.items():
            await self._run(_RENEW, [_key(name, "concurrent")], [LEASE_SECONDS, *ids])

    @override
    async def _close(self) -> None:
        client, self._made = self._made, None
        self._scripts.clear()
        if client is not None:
            with _errors():
                await client.aclose()

    async def _run(self, script: str, keys: list[str], values: list[Any]) -> Any:
        client = self._client()
        prepared = self._scripts.get(script)
        if prepared is None:
            prepared = self._scripts[script] = client.register_script(script)
        with _errors():
            return await prepared(keys, values)

    def _client(self) -> Redis:
        """Return the client, which connects when it is used.

        Raises:
            LimitsError: the package is missing, or the URL is wrong.
        """
        if self._made is None:
            try:
                from redis.asyncio import Redis
                from redis.asyncio.retry import Retry
                from redis.backoff import NoBackoff
            except ModuleNotFoundError:
                raise LimitsError(_MISSING) from None
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
                raise LimitsError("The URL of the store of the limits is wrong.") from None
        return self._made


def _key(name: str, kind: str) -> str:
    # The braces keep the keys of one account on one node of a cluster.
    return f"latimer:limits:{{{name}}}:{kind}"


@contextmanager
def _errors() -> Iterator[None]:
    from redis.exceptions import RedisError

    try:
        yield
    except (RedisError, OSError) as error:
        raise LimitsUnavailable(f"{type(error).__name__}: {error}") from None
