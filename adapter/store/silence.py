"""Connections to PostgreSQL that end when the server is silent.

A server that is paused, or behind a network that drops packets, keeps its connections open. The
driver would wait for ever.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen

T = TypeVar("T")
# The base of the driver's errors.
DriverError = psycopg.Error

# Seconds without any data from the server after which a connection is closed.
SILENCE = 10.0


class Connection(psycopg.Connection[Any]):
    """A connection that is closed after a silence.

    Attributes:
        silence: seconds without data; None for a statement that may take any time.
    """

    silence: float | None = SILENCE

    def wait(self, gen: PQGen[T], *arguments: Any, **options: Any) -> T:
        """See psycopg; the generator is resumed about ten times a second without data."""
        if self.silence is None:
            return super().wait(gen, *arguments, **options)
        return super().wait(self._until_silence(gen, self.silence), *arguments, **options)

    def _until_silence(self, gen: PQGen[T], seconds: float) -> Generator[Any, Any, T]:
        try:
            wanted = next(gen)
            end = time.monotonic() + seconds
            while True:
                ready = yield wanted
                if ready:
                    end = time.monotonic() + seconds
                elif time.monotonic() > end:
                    # What was sent may arrive later, so nothing more can be sent here.
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"the server sent nothing for {seconds:g} s")
                wanted = gen.send(ready)
        except StopIteration as finished:
            result: T = finished.value
            return result
