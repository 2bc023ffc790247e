"""The request bodies that arrive in parts, which are in memory before anything else is known."""

from __future__ import annotations

from ..schemas import limits
from .errors import Overloaded, RateLimited
from .limits.leases import BUSY_SECONDS, Grant

# The bytes of all of them, as a multiple of the largest body; one key may have half of them.
TOGETHER = 16
# The bytes of a body that may arrive at once: asyncio reads as many.
AT_ONCE = 262_144


class Arrivals:
    """The bodies of an app that are incomplete. Most arrive at once, and are not counted.

    Args:
        most: the bytes of the largest body.
    """

    def __init__(self, most: int = limits.BODY.maximum) -> None:
        self.most = most
        self._size = 0
        # The bodies of each key, and their bytes.
        self._of: dict[str, tuple[int, int]] = {}

    def check(self, key: str, size: int) -> None:
        """Refuse bytes for which there is no room now; others may take the room meanwhile.

        Raises:
            Overloaded: the bodies would have too many bytes.
        """
        together = TOGETHER * self.most
        of_key = self._of.get(key, (0, 0))[1] + size if key else 0
        if self._size + size > together or of_key > together // 2:
            raise Overloaded

    def add(self, key: str, grant: Grant | None, size: int, is_first: bool) -> None:
        """Count a part of a body.

        Args:
            key: the digest of the API key; empty without one.
            is_first: True if no part of the body is counted yet; False for a WebSocket's message,
                which takes no place from bodies.

        Raises:
            RateLimited: the key may not have so many requests at the same time.
            Overloaded: the bodies have too many bytes.
        """
        bodies, size_of_key = self._of.get(key, (0, 0))
        if is_first and grant is not None:
            most = grant.rates.concurrent
            if most is not None and bodies >= most:
                raise RateLimited(
                    "request bodies", grant.name, "concurrent requests", most, bodies, 1,
                    BUSY_SECONDS,
                )  # fmt: skip
        self.check(key, size)
        self._size += size
        self._of[key] = bodies + is_first, size_of_key + size

    def remove(self, key: str, size: int, bodies: int = 1) -> None:
        """Forget a body that is complete or has ended, of which some bytes are counted.

        Args:
            bodies: 0 for a WebSocket's message.
        """
        self._size -= size
        before, size_of_key = self._of.pop(key)
        if before > bodies or size_of_key > size:
            self._of[key] = before - bodies, size_of_key - size


# Those of requests that no app has received.
OTHERS = Arrivals()
