"""Limits in the memory of one process."""

from __future__ import annotations

import time

from .leases import Account, Grant, Lease, Refusal


class MemoryLimits:
    """A store of limits for one process; see `LeaseStore`."""

    def __init__(self) -> None:
        # The account of each key.
        self._accounts: dict[str, Account] = {}
        self._count = 0

    async def reserve(self, grant: Grant, tokens: int) -> Lease | Refusal:
        """See `LeaseStore.reserve`."""
        account = self._accounts.get(grant.name)
        if account is None or account.rates is not grant.rates:
            account = self._account(grant)
        self._count += 1
        name, now = str(self._count), time.monotonic()
        refusal = account.reserve(now, tokens, name)
        if refusal is not None:
            return refusal
        requests, spent = account.requests, account.tokens
        left = requests.limit - requests.used, spent.limit - spent.used
        return Lease(self, grant, name, spent.buckets[-1][0], tokens, left)

    def settle(self, lease: Lease, used: int) -> None:
        """See `LeaseStore.settle`."""
        account = self._accounts[lease.grant.name]
        account.settle(time.monotonic(), lease.id, lease.at, lease.tokens, used)

    def _account(self, grant: Grant) -> Account:
        """Return the account of a key that is new, or whose limits have changed."""
        account = self._accounts.setdefault(grant.name, Account(grant.rates))
        account.limit(grant.rates)
        return account

    async def open(self) -> None:
        """Do nothing: memory always answers."""

    async def aclose(self) -> None:
        """Do nothing: there is no connection."""
