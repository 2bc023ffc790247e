"""Limits in the memory of one process."""

from __future__ import annotations

from typing_extensions import override

from .leases import Account, Grant, Lease, LeaseStore, Refusal


class MemoryLimits(LeaseStore):
    """A store of limits for one process, which nobody has to wait for."""

    def __init__(self) -> None:
        # The account of each key.
        self._accounts: dict[str, Account] = {}

    @override
    async def reserve(self, grant: Grant, tokens: int) -> Lease | Refusal:
        return self.try_reserve(grant, tokens)

    @override
    def try_reserve(self, grant: Grant, tokens: int) -> Lease | Refusal:
        account = self._accounts.get(grant.name)
        if account is None or account.rates is not grant.rates:
            account = self._account(grant)
        return account.reserve(tokens)

    def _account(self, grant: Grant) -> Account:
        """Return the account of a key that is new, or whose limits have changed."""
        account = self._accounts.setdefault(grant.name, Account(grant.rates))
        account.limit(grant.rates)
        return account

    @override
    async def open(self) -> None:
        """Do nothing: memory always answers."""

    @override
    async def aclose(self) -> None:
        """Do nothing: there is no connection."""
