"""A real Redis for tests, from Debian's package; its own service is not used.

The quick tests load this module, so it imports the client of Redis only where it is used.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from support.servers import free_port

PROGRAM = "redis-server"
# Ports that are tried: another process can take a free one first.
_TRIES = 5
_SECONDS = 30.0


def missing() -> str | None:
    """Return the reason why tests cannot start a Redis, or None."""
    if shutil.which(PROGRAM) is None:
        return "needs Redis: apt-get install redis-server"
    return None


class RedisServer:
    """A Redis on 127.0.0.1 that keeps nothing on disk.

    Args:
        folder: an empty folder for its log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """The URL of its first database."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server, after a stop at the same port."""
        ports = [self.port] if self.port else [free_port() for _ in range(_TRIES)]
        for port in ports:
            if self._answers(port):
                return
        raise AssertionError((self._folder / "log").read_text(errors="replace")[-5000:])

    def stop(self) -> None:
        """End the server at once, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_SECONDS)
            self._process = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the process: it keeps its connections, and is silent."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def clear(self) -> str:
        """Delete everything, and return the URL."""
        from redis import Redis

        with Redis.from_url(self.url) as client:
            client.flushall()
        return self.url

    def _answers(self, port: int) -> bool:
        """Start the server at a port; False if it ends, as if the port is in use."""
        from redis import Redis
        from redis.exceptions import RedisError

        with (self._folder / "log").open("ab") as log:
            self._process = process = subprocess.Popen(
                [PROGRAM, "--port", str(port), "--bind", "127.0.0.1", "--save", "",
                 "--appendonly", "no", "--dir", str(self._folder)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.port = port
        deadline = time.monotonic() + _SECONDS
        while process.poll() is None:
            try:
                with Redis.from_url(self.url) as client:
                    client.ping()
            except RedisError:
                if time.monotonic() > deadline:
                    self.stop()
                    raise
                time.sleep(0.02)
            else:
                return True
        self.port, self._process = 0, None
        return False


@contextlib.contextmanager
def running() -> Iterator[RedisServer]:
    """Run a Redis until the block ends; a test that stops its server needs one of its own."""
    with tempfile.TemporaryDirectory(prefix="latimer-redis-") as folder:
        server = RedisServer(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.stop()
